"""A plan as tables: its rate and cost, parts and flows, bottlenecks, and alternatives."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from placement.diff import MoveCosts, diff
from placement.explain import NEGLIGIBLE_GAIN, Explanation, Marginal, baselines, explain, gain
from placement.problem import Problem
from placement.solve import solve
from placement.training import mfu, training_layout
from placement.types import ROLLOUT_ROLES, Infeasible, Objective, Placement, Role
from placement.window import DomainWindow
from rollart.money import dollars
from rollart.report.money.planned import SimulatedCost, forecast_table, planned_cost
from rollart.report.tables import Report, Row, Table, as_count, as_number, as_seconds, as_share, as_usd, ratio, table
from rollart.settings.planning import pools_of
from rollart.settings.resolve import Resolved
from rollart.tools.window import fresh_group_shares, publish_paths, recommended_staleness, sustained_slots

KEPT = 0.99
"""Share of a domain's groups that should meet the staleness bound; the rest is about one group in a batch."""

REACHED = 0.01
"""Relative tolerance of the check that the window sustains the plan's rate: the plan takes slopes of the window near
its solution."""


def plan_report(
    resolved: Resolved, *, fast: bool = False, extra: Sequence[Table] = (), simulated: SimulatedCost | None = None
) -> Report:
    """One plan. `fast` leaves out parts that need further solutions; `extra` tables come before the last one;
    `simulated`: the cost of the run by its simulation."""
    found, problem = resolved.plan.placement, resolved.problem
    tables = [_pools(resolved)]
    notes, away = [f"total: {dollars(resolved.plan.usd_per_hour)} per hour"], list[str]()
    if found is None:
        tables.insert(0, _parts(resolved))
        notes.append(f"binds: {resolved.plan.binds}")
    else:
        held, binds = sustained_slots(resolved), found.binds
        tables = [
            _totals(found),
            forecast_table(planned_cost(resolved.to_dict()), simulated),
            _stages(found),
            *tables,
            _deployments(found),
            _flows(found),
            _window(held),
            _publishing(resolved),
        ]
        if problem is not None:
            tables += _training(problem, found)
            notes += _trainer_options(resolved, problem, found)
        notes += _shortfalls(resolved, held, found, fast=fast)
        if problem is not None:
            others: Mapping[str, Placement | Infeasible] = {}
            if not fast and problem.fixed is None:
                others = baselines(problem)
            elif not fast:
                others = {"computed": solve(replace(problem, fixed=None))}
            tables += [_baselines(others, found)] if others else []
            why = explain(problem, found, resolve=not fast and problem.fixed is None)
            binds = why.binds
            tables += [_marginals(why.marginals, found)] if problem.fixed is None else []
            tables.append(_affinities(why))
            notes += _cost_of_publishing(why, found)
            away += [f"{name}: {other.message}" for name, other in others.items() if isinstance(other, Infeasible)]
        tables += [_rewards(found), _parts(resolved)]
        notes += [f"binds: {'; '.join(binds)}"] if binds else []
        notes += [*found.notes, *away]
    tables += extra
    tables.append(_batch(resolved))
    return Report("plan", resolved.run.name, tuple(t for t in tables if t.rows), (*notes, *resolved.notes))


def comparison_report(old: Resolved, new: Resolved, changes: Sequence[str]) -> Report:
    """Two plans side by side, and the moves from one to the other."""
    tables = [
        Table.of("totals", f"What if {' '.join(changes)}", _both(old, new)),
        Table.of("instances", "Instances", _side_by_side(*map(_instances, (old, new)))),
        Table.of("pools", "Devices in use", _side_by_side(*map(_devices_used, (old, new)))),
    ]
    moves = _moves(old, new)
    tables += [moves] if moves.rows else []
    notes = [f"binds now: {_binds(old)}", f"binds what if: {_binds(new)}", *dict.fromkeys((*old.notes, *new.notes))]
    return Report("plan", new.run.name, tuple(tables), tuple(notes))


@table("window", "What the window sustains (a slot is held until its group is published)")
def _window(held: Sequence[DomainWindow]) -> Iterator[Row]:
    """Seconds that slots are held, and the rate that this allows."""
    for h in held:
        yield {
            "domain": h.domain,
            "seconds": as_number(h.seconds),
            "longest_of_group_s": as_number(h.longest_s),
            "training_s": as_number(h.train_s),
            "publish_s": as_number(h.publish_s),
            "slots": as_count(round(h.slots)),
            "held_s": as_number(h.held_s),
            "trajectories_per_s": as_number(h.rate),
        }


@table("publishing", "Publishing a version (pull: of one host, while all pull)")
def _publishing(resolved: Resolved) -> Iterator[Row]:
    """The path of a version from the trainer to the engines of each pool."""
    for pool, path in publish_paths(resolved).items():
        yield {
            "engines_on": pool,
            "transport": str(path.transport),
            "gb": as_number(path.gb),
            "push_gb_per_s": as_number(path.push.gb_per_s),
            "pull_gb_per_s": as_number(_finite(path.pull.gb_per_s)),
            "load_gb_per_s": as_number(_finite(path.load_gb_per_s)),
            "seconds": as_number(path.seconds),
            "limited_by": path.limit,
        }


def _cost_of_publishing(why: Explanation, found: Placement) -> list[str]:
    """The cost of publishing in trajectories/s, if the objective is the rate."""
    if found.objective is not Objective.MAX_THROUGHPUT:
        return []
    return [
        f"publishing costs {m.gain * found.best_rate:.2g} trajectories/s: {m.amount:.3g} s a version"
        for m in why.marginals
        if m.what == "publish" and m.gain >= NEGLIGIBLE_GAIN
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _shortfalls(resolved: Resolved, held: Sequence[DomainWindow], found: Placement, *, fast: bool) -> Iterator[str]:
    """A window that does not sustain the plan's rate, speeds of a publish that are assumed, and the share of each
    domain's groups within the staleness bound, with the bound that their lengths recommend."""
    least = min(held, key=lambda h: h.rate, default=None)
    if least is not None and least.rate < found.rate * (1 - REACHED):
        yield (
            f"the window sustains {least.rate:.3g} of the {found.rate:.3g} trajectories/s: a slot of {least.domain} is "
            f"held {least.held_s:.0f} s, so that more needs a higher `staleness`, a larger batch or a faster publish"
        )
    paths = list(publish_paths(resolved).values())
    legs = [(leg.limit, leg.gb_per_s) for path in paths for leg in (path.push, path.pull) if leg.assumed]
    for limit, gb_per_s in dict.fromkeys(legs):
        yield (
            f"assumed: {limit} carries {gb_per_s:.3g} GB/s of weights; declare it in the cluster's `links`, or a "
            "measured speed in `publish`"
        )
    for load in {path.load_gb_per_s for path in paths if path.load_assumed}:
        yield (
            f"assumed: an engine loads a version at {load:.3g} GB/s, as published of RollArt; measure it (`rollart "
            "calibrate --from RUN`), or state `publish.load_gb_per_s`"
        )
    bound = resolved.run.staleness
    for domain, share in fresh_group_shares(resolved).items():
        if share < KEPT:
            yield (
                f"staleness: at this rate {bound} keeps {share:.0%} of {domain}'s groups "
                "(paced waits for the others, rollart drops them)"
            )
    if not fast and (asked := recommended_staleness(resolved)) is not None:
        yield (
            f"staleness: {asked.staleness} is recommended: the least at which a plan for `paced` keeps 99 % of every "
            f"domain's groups at 90 % of the best rate, {asked.rate:.3g} of {asked.best:.3g} trajectories/s"
        )


def _training(problem: Problem, found: Placement) -> Iterator[Table]:
    """Memory use of one device of the trainer, and its MFU."""
    train, pools = problem.train, {p.name: p for p in problem.pools}
    for d in found.of(Role.TRAINER):
        how = "given" if train is None else training_layout(problem, pools[d.pool], train)
        if train is None or isinstance(how, str) or pools[d.pool].device.is_cpu:
            continue
        row: Row = {
            "pool": d.pool,
            "devices": as_count(d.devices),
            "least": as_count(how.least),
            "most_useful": as_count(how.most),
            "sequence_split": as_count(how.split),
            "recompute": "yes" if how.recompute else "no",
            "state_gb": as_number(how.state_gb / d.devices),
            "activations_gb": as_number(how.activations_gb),
            "logits_gb": as_number(how.logits_gb),
            "reserve_gb": as_number(how.reserve_gb),
            "device_gb": as_number(pools[d.pool].device.memory_gb),
            "mfu": as_share(mfu(problem, pools[d.pool], train) if train.seconds_per_token is None else None),
        }
        title = f"Training: memory of one device, with sequences of {train.sequence:,} tokens"
        yield Table.of("training", title, (row,))


def _trainer_options(resolved: Resolved, problem: Problem, found: Placement) -> Iterator[str]:
    """Options that the plan assumes of the trainer and that the spec does not set, or the embedded one lacks."""
    train, pools = problem.train, {p.name: p for p in problem.pools}
    for d in found.of(Role.TRAINER):
        how = "" if train is None else training_layout(problem, pools[d.pool], train)
        if isinstance(how, str) or pools[d.pool].device.is_cpu:
            continue
        if how.recompute and not resolved.cluster.trainer.activation_checkpointing:
            yield "the trainer has to recompute activations: set trainer.activation_checkpointing in the cluster spec"
        if how.split > 1:
            yield (
                f"{how.split} devices of the trainer share each sequence, for its memory; the embedded trainer does "
                "not divide sequences: give placement.train.split=1 to plan for it"
            )
        if train is not None and (train.devices or 0) > how.most:
            yield f"placement.train.devices is {train.devices}: more than {how.most} shorten a step little"


def _totals(found: Placement) -> Table:
    """`bound`: the upper bound over all plans, in the unit of the objective, which its column's name has unless it is
    the rate."""
    match found.objective:
        case Objective.MIN_COST:
            bound = {"bound_usd_per_hour": as_usd(found.bound)}
        case Objective.MAX_THROUGHPUT_PER_DOLLAR:
            bound = {"bound_trajectories_per_usd": as_number(found.bound * 3600.0)}
        case _:
            bound = {"bound": as_number(found.bound)}
    row: Row = {
        "trajectories_per_s": as_number(found.rate),
        "from": as_number(found.rate * (1 - found.band)),
        "to": as_number(found.rate * (1 + found.band)),
        **bound,
        "gap": as_share(found.gap),
        "usd_per_hour_used": as_usd(found.usd_per_hour),
        "usd_per_hour_all": as_usd(found.usd_per_hour_all),
        "usd_per_1k": as_usd(found.usd_per_thousand if found.rate > 0 else None),
        "usd_per_1k_all": as_usd(found.usd_per_thousand_all if found.rate > 0 else None),
    }
    return Table.of("totals", f"Plan ({str(found.objective).replace('_', ' ')})", [row])


@table("stages", "Given up for dollars (placement.rate_tolerance)")
def _stages(found: Placement) -> Iterator[Row]:
    """The plan with the best rate, beside the chosen plan, which gave up some rate for lower cost."""
    first = found.first
    if first is not None and first.rate > found.rate * (1 + 1e-6):
        for name, plan in (("best rate", first), ("this plan", found)):
            usd = as_usd(plan.usd_per_hour)
            yield {"plan": name, "trajectories_per_s": as_number(plan.rate), "usd_per_hour_used": usd}


@table("pools", "Pools")
def _pools(resolved: Resolved) -> Iterator[Row]:
    for pool in pools_of(resolved.cluster, resolved.prices):
        idle = resolved.plan.idle[pool.name]
        paid = pool.count - idle if pool.rented else pool.count
        yield {
            "pool": pool.name,
            "device": pool.device.name,
            "devices": as_count(pool.count),
            "used": as_count(pool.count - idle),
            "idle": as_count(idle),
            "by_role": _by_role(resolved, pool.name),
            "usd_per_hour": as_usd(paid * pool.usd_per_device_hour),
        }


def _by_role(resolved: Resolved, pool: str) -> str:
    used: Counter[Role] = Counter()
    for a in resolved.plan.assignments:
        if a.pool == pool:
            used[a.role] += len(a.devices)
    return ", ".join(f"{role} {devices:,}" for role, devices in used.most_common())


@table("deployments", "What runs where")
def _deployments(found: Placement) -> Iterator[Row]:
    for d in sorted(found.deployments, key=lambda d: (_ORDER[d.role], d.pool, d.tp)):
        serving = d.role in ROLLOUT_ROLES
        yield {
            "role": str(d.role),
            "pool": d.pool,
            "tp": as_count(d.tp if serving else None),
            "replicas": as_count(d.replicas),
            "devices": as_count(d.devices),
            "batch": as_number(round(d.batch, 1)),
            "utilisation": as_share(d.utilisation),
            "kv": as_share(d.kv_utilisation if serving else None),
        }


_ORDER = {role: n for n, role in enumerate(Role)}


@table("flows", "Where trajectories go")
def _flows(found: Placement) -> Iterator[Row]:
    """Flows of a domain on the same pools and with the same handling of the KV are one row, whatever the tp."""
    rate: dict[tuple[str, str, str, str], float] = {}
    time: dict[tuple[str, str, str, str], float] = {}
    whole: dict[str, float] = {}
    for f in found.flows:
        key = (f.domain, f.prefill_pool or "same", f.pool, str(f.kv))
        rate[key] = rate.get(key, 0.0) + f.rate
        time[key] = time.get(key, 0.0) + f.rate * f.seconds
        whole[f.domain] = whole.get(f.domain, 0.0) + f.rate
    for (domain, prefill, decode, kv), r in sorted(rate.items(), key=lambda item: (item[0][0], -item[1])):
        yield {
            "domain": domain,
            "prefill": prefill,
            "decode": decode,
            "kv": kv,
            "share": as_share(ratio(r, whole[domain])),
            "trajectories_per_s": as_number(r),
            "seconds": as_seconds(ratio(time[domain, prefill, decode, kv], r)),
        }


@table("baselines", "Beside simpler plans")
def _baselines(others: Mapping[str, Placement | Infeasible], found: Placement) -> Iterator[Row]:
    """This plan beside simpler ones. `ratio`: the gain of this plan by its objective."""

    def row(name: str, other: Placement | Infeasible, ratio: float | None) -> Row:
        plan = other if isinstance(other, Placement) else None
        return {
            "plan": name,
            "trajectories_per_s": as_number(None if plan is None else plan.rate),
            "usd_per_hour_used": as_usd(None if plan is None else plan.usd_per_hour),
            "usd_per_1k": as_usd(plan.usd_per_thousand if plan is not None and plan.rate > 0 else None),
            "ratio": as_number(ratio),
        }

    yield row("this plan", found, None)
    for name, other in others.items():
        ratio = gain(found, other) if isinstance(other, Placement) else math.inf  # inf: against one of value 0
        yield row(name, other, round(ratio, 4) if math.isfinite(ratio) else None)


@table("marginals", "What more would buy")
def _marginals(marginals: Sequence[Marginal], found: Placement) -> Iterator[Row]:
    """The gain of more resources, by dual prices and then by solving again. In pools with engines devices come by the
    instance, since fewer devices gain nothing but rounding."""
    rows: list[tuple[Marginal, float, float, str]] = []
    for m in marginals:
        words = m.words.removesuffix(" (solved again)").removesuffix(" (at the margin)")
        size = max((d.tp for d in found.deployments if d.pool == m.pool and d.role in ROLLOUT_ROLES), default=1)
        amount, gain = m.amount, m.gain
        if not m.solved and m.pool is not None and m.amount == 1 and size > 1:
            amount, gain = size, m.gain * size
            resource = words.removeprefix("one").rpartition(":")[0]
            gained = "nothing" if gain < NEGLIGIBLE_GAIN else f"{_percent(gain)} trajectories/s"
            words = f"{size}{resource}: {gained}"
        rows.append((m, amount, gain, words))
    rows.sort(key=lambda row: (row[0].solved, -row[2], row[0].what))
    for m, amount, gain, words in rows:
        yield {
            "what": m.what,
            "amount": as_number(amount),
            "gain": as_share(gain),
            "how": "solved again" if m.solved else "dual price",
            "in_words": words,
        }


@table("affinities", "Which device suits what (this model, these prices)")
def _affinities(why: Explanation) -> Iterator[Row]:
    for a in why.affinities:
        yield {"domain": a.domain, "phase": a.phase, "best": a.best, "factor": as_number(a.factor), "in_words": a.words}


@table("rewards", "Rewards")
def _rewards(found: Placement) -> Iterator[Row]:
    for r in found.rewards:
        yield {
            "domain": r.domain,
            "where": r.where,
            "trajectories_per_s": as_number(r.rate),
            "usd_per_1k": as_usd(r.usd_per_thousand),
            "dedicated_wins_above": as_share(r.break_even_utilisation),
            "dedicated_devices_busy": as_number(r.dedicated_utilisation),
            "note": r.note,
        }


@table("parts", "Parts")
def _parts(resolved: Resolved) -> Iterator[Row]:
    for a in resolved.plan.assignments:
        yield {
            "part": a.name,
            "pool": a.pool,
            "devices": as_count(len(a.devices)),
            "which": _indices(a.devices),
            "usd_per_hour": as_usd(len(a.devices) * resolved.usd_per_device_hour[a.pool]),
        }


def _indices(devices: Sequence[int]) -> str:
    """`0-7`, or a list if the indices are not contiguous."""
    if len(devices) > 2 and list(devices) == list(range(devices[0], devices[-1] + 1)):
        return f"{devices[0]}-{devices[-1]}"
    return ",".join(map(str, devices))


@table("batch", "Trajectories per step")
def _batch(resolved: Resolved) -> Iterator[Row]:
    for domain, quota in resolved.quotas.items():
        yield {"domain": domain, "trajectories": as_count(quota)}


def _both(old: Resolved, new: Resolved) -> Iterator[Row]:
    a, b = old.plan.placement, new.plan.placement
    if a is not None and b is not None:
        yield _figure("trajectories/s", a.best_rate, b.best_rate)
        yield _figure("$/h of what is used", a.usd_per_hour, b.usd_per_hour)
        if a.rate > 0 and b.rate > 0:
            yield _figure("$/1k trajectories", a.usd_per_thousand, b.usd_per_thousand)
    yield _figure("$/h of all pools", old.plan.usd_per_hour, new.plan.usd_per_hour)
    costs = [planned_cost(resolved.to_dict()) for resolved in (old, new)]
    if costs[0] is not None and costs[1] is not None:
        yield _figure(f"$ to step {costs[0].steps:,}", costs[0].usd, costs[1].usd)


def _figure(name: str, a: float, b: float) -> Row:
    return {"figure": name, "now": as_number(a), "what_if": as_number(b), "change": _percent(b / a - 1) if a else None}


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"


def _instances(resolved: Resolved) -> dict[str, int]:
    return Counter(
        f"{a.role} on {a.pool}, {len(a.devices)} device{'s' if len(a.devices) > 1 else ''} each"
        for a in resolved.plan.assignments
    )


def _devices_used(resolved: Resolved) -> dict[str, int]:
    return {p.name: p.count - resolved.plan.idle[p.name] for p in pools_of(resolved.cluster, resolved.prices)}


def _side_by_side(a: dict[str, int], b: dict[str, int]) -> Iterator[Row]:
    for key in sorted({*a, *b}):
        now, then = a.get(key, 0), b.get(key, 0)
        change = f"{then - now:+,d}" if then != now else None
        yield {"what": key, "now": as_count(now), "what_if": as_count(then), "change": change}


@table("moves", "Moves, in order")
def _moves(old: Resolved, new: Resolved) -> Iterator[Row]:
    """The moves from the old plan to the new, if both were computed."""
    a, b = old.plan.placement, new.plan.placement
    if a is None or b is None:
        return
    restart_s = new.run.placement.rebalance.restart_s
    costs = MoveCosts(restart_s=restart_s, usd_per_device_hour=dict(new.usd_per_device_hour))
    for m in diff(a.deployments, b.deployments, costs=costs):
        yield {"move": str(m.kind), "what": m.words, "device_seconds": as_count(m.device_seconds), "usd": as_usd(m.usd)}


def _binds(resolved: Resolved) -> str:
    found = resolved.plan.placement
    return "; ".join(found.binds) if found is not None and found.binds else resolved.plan.binds
