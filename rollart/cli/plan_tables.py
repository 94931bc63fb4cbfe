"""A plan as tables: its rate and cost, parts and flows, bottlenecks, and alternatives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from placement.diff import MoveCosts, diff
from placement.explain import NEGLIGIBLE_GAIN, Baseline, Explanation, Marginal, baselines, explain, gain
from placement.problem import Problem
from placement.solve import solve
from placement.training import mfu, training_layout
from placement.types import Infeasible, Objective, Placement, Pool, Role
from placement.window import DomainWindow
from rollart.report.tables import Cell, Report, Table, TableColumn
from rollart.settings.planning import pools_of
from rollart.settings.resolve import Resolved
from rollart.tools.window import fresh_group_shares, publish_paths, recommended_staleness, sustained_slots

Row = tuple[Cell, ...]

KEPT = 0.99
"""Share of a domain's groups that should meet the staleness bound; the rest is about one group in a batch."""

REACHED = 0.01
"""Relative tolerance of the check that the window sustains the plan's rate: the plan takes slopes of the window near
its solution."""


def plan_report(resolved: Resolved, *, fast: bool = False, extra: Sequence[Table] = ()) -> Report:
    """One plan. `fast` leaves out parts that need further solutions; `extra` tables come before the last one."""
    found, problem = resolved.plan.placement, resolved.problem
    tables = [_pools(resolved)]
    notes, away = [f"total: ${resolved.plan.usd_per_hour:.4f} per hour"], list[str]()
    if found is None:
        tables.insert(0, _parts(resolved))
        notes.append(f"binds: {resolved.plan.binds}")
    else:
        held, binds = sustained_slots(resolved), found.binds
        tables = [
            _totals(found),
            *_stages(found),
            *tables,
            _deployments(found),
            _flows(found),
            *_window(held),
            *_publishing(resolved),
        ]
        if problem is not None:
            tables += _training(problem, found)
            notes += _trainer_options(resolved, problem, found)
        notes += _out_of_reach(held, found) + _guessed(resolved) + _tail(resolved, fast=fast)
        if problem is not None:
            others = () if fast else _others(problem)
            tables += [_baselines(others, found)] if others else []
            why = explain(problem, found, resolve=not fast and problem.fixed is None)
            binds = why.binds
            tables += _reasons(why, problem, found)
            notes += _cost_of_publishing(why, found)
            away += [f"{o.name}: {o.answer.message}" for o in others if isinstance(o.answer, Infeasible)]
        tables += _rewards(found)
        tables.append(_parts(resolved))
        notes += [f"binds: {'; '.join(binds)}"] if binds else []
        notes += [*found.notes, *away]
    tables += extra
    tables.append(_batch(resolved))
    return Report("plan", resolved.run.name, tuple(tables), (*notes, *resolved.notes))


def comparison_report(old: Resolved, new: Resolved, changes: Sequence[str]) -> Report:
    """Two plans side by side, and the moves from one to the other."""
    columns = (
        TableColumn("figure"),
        TableColumn("now", "number"),
        TableColumn("what_if", "number"),
        TableColumn("change"),
    )
    tables = [
        Table("totals", f"What if {' '.join(changes)}", columns, tuple(_both(old, new))),
        Table("instances", "Instances", _SIDE, tuple(_instances(old, new))),
        Table("pools", "Devices in use", _SIDE, tuple(_devices(old, new))),
    ]
    moves = _moves(old, new)
    if moves is not None:
        tables.append(moves)
    notes = []
    for label, resolved in (("now", old), ("what if", new)):
        notes.append(f"binds {label}: {_binds(resolved)}")
    notes += dict.fromkeys((*old.notes, *new.notes))
    return Report("plan", new.run.name, tuple(tables), tuple(notes))


def _window(held: Sequence[DomainWindow]) -> Iterator[Table]:
    """Seconds that slots are held, and the rate that this allows."""
    if held:
        columns = (
            TableColumn("domain"),
            TableColumn("seconds", "number"),
            TableColumn("longest_of_group_s", "number"),
            TableColumn("training_s", "number"),
            TableColumn("publish_s", "number"),
            TableColumn("slots", "count"),
            TableColumn("held_s", "number"),
            TableColumn("trajectories_per_s", "number"),
        )
        rows = tuple(
            (h.domain, h.seconds, h.longest_s, h.train_s, h.publish_s, round(h.slots), h.held_s, h.rate) for h in held
        )
        yield Table("window", "What the window sustains (a slot is held until its group is published)", columns, rows)


def _publishing(resolved: Resolved) -> Iterator[Table]:
    """The path of a version from the trainer to the engines of each pool."""
    paths = publish_paths(resolved)
    if paths:
        columns = (
            TableColumn("engines_on"),
            TableColumn("transport"),
            TableColumn("gb", "number"),
            TableColumn("push_gb_per_s", "number"),
            TableColumn("pull_gb_per_s", "number"),
            TableColumn("load_gb_per_s", "number"),
            TableColumn("seconds", "number"),
            TableColumn("limited_by"),
        )
        rows = tuple(
            (
                pool,
                str(path.transport),
                path.gb,
                path.push.gb_per_s,
                _finite(path.pull.gb_per_s),
                _finite(path.load_gb_per_s),
                path.seconds,
                path.limit,
            )
            for pool, path in paths.items()
        )
        yield Table("publishing", "Publishing a version (pull: of one host, while all pull)", columns, rows)


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


def _tail(resolved: Resolved, *, fast: bool) -> list[str]:
    """The share of each domain's groups within the staleness bound, and the bound that their lengths recommend."""
    bound = resolved.run.staleness
    notes = [
        f"staleness: at this rate {bound} keeps {one.share:.0%} of {one.domain}'s groups "
        "(paced waits for the others, rollart drops them)"
        for one in fresh_group_shares(resolved)
        if one.share < KEPT
    ]
    if not fast and (asked := recommended_staleness(resolved)) is not None:
        notes.append(
            f"staleness: {asked.staleness} is recommended: the least at which a plan for `paced` keeps 99 % of every "
            f"domain's groups at 90 % of the best rate, {asked.rate:.3g} of {asked.best:.3g} trajectories/s"
        )
    return notes


def _guessed(resolved: Resolved) -> list[str]:
    paths = publish_paths(resolved).values()
    legs = [(leg.limit, leg.gb_per_s) for path in paths for leg in (path.push, path.pull) if leg.assumed]
    notes = [
        f"assumed: {limit} carries {gb_per_s:.3g} GB/s of weights; declare it in the cluster's `links`, or a measured "
        "speed in `publish`"
        for limit, gb_per_s in dict.fromkeys(legs)
    ]
    loads = {path.load_gb_per_s for path in paths if path.load_assumed}
    return notes + [
        f"assumed: an engine loads a version at {load:.3g} GB/s, as published of RollArt; measure it (`rollart "
        "calibrate --from RUN`), or state `publish.load_gb_per_s`"
        for load in loads
    ]


def _out_of_reach(held: Sequence[DomainWindow], found: Placement) -> list[str]:
    least = min(held, key=lambda h: h.rate, default=None)
    if least is None or least.rate >= found.rate * (1 - REACHED):
        return []
    return [
        f"the window sustains {least.rate:.3g} of the {found.rate:.3g} trajectories/s: a slot of {least.domain} is "
        f"held {least.held_s:.0f} s, so that more needs a higher `staleness`, a larger batch or a faster publish"
    ]


def _training(problem: Problem, found: Placement) -> Iterator[Table]:
    """Memory use of one device of the trainer, and its MFU."""
    train, pools = problem.train, {p.name: p for p in problem.pools}
    for d in found.of(Role.TRAINER):
        how = "given" if train is None else training_layout(problem, pools[d.pool], train)
        if train is None or isinstance(how, str) or pools[d.pool].device.is_cpu:
            continue
        held = how.memory(d.devices)
        columns = (
            TableColumn("pool"),
            TableColumn("devices", "count"),
            TableColumn("least", "count"),
            TableColumn("most_useful", "count"),
            TableColumn("sequence_split", "count"),
            TableColumn("recompute"),
            TableColumn("state_gb", "number"),
            TableColumn("activations_gb", "number"),
            TableColumn("logits_gb", "number"),
            TableColumn("reserve_gb", "number"),
            TableColumn("device_gb", "number"),
            TableColumn("mfu", "share"),
        )
        row = (
            d.pool,
            d.devices,
            how.least,
            how.most,
            how.split,
            "yes" if how.recompute else "no",
            held.state,
            held.activations,
            held.logits,
            held.reserve,
            pools[d.pool].device.memory_gb,
            mfu(problem, pools[d.pool], train) if train.seconds_per_token is None else None,
        )
        title = f"Training: memory of one device, with sequences of {train.sequence:,} tokens"
        yield Table("training", title, columns, (row,))


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


_SIDE = (TableColumn("what"), TableColumn("now", "count"), TableColumn("what_if", "count"), TableColumn("change"))


def _totals(found: Placement) -> Table:
    bound, limit = _bound(found)
    columns = (
        TableColumn("trajectories_per_s", "number"),
        TableColumn("from", "number"),
        TableColumn("to", "number"),
        bound,
        TableColumn("gap", "share"),
        TableColumn("usd_per_hour_used", "usd"),
        TableColumn("usd_per_hour_all", "usd"),
        TableColumn("usd_per_1k", "usd"),
        TableColumn("usd_per_1k_all", "usd"),
    )
    rate, band = found.rate, found.band
    per_thousand = (found.usd_per_thousand, found.usd_per_thousand_all) if rate > 0 else (None, None)
    row = (
        rate,
        rate * (1 - band),
        rate * (1 + band),
        limit,
        found.gap,
        found.usd_per_hour,
        found.usd_per_hour_all,
        *per_thousand,
    )
    return Table("totals", f"Plan ({str(found.objective).replace('_', ' ')})", columns, (row,))


def _stages(found: Placement) -> Iterator[Table]:
    """The plan with the best rate, beside the chosen plan, which gave up some rate for lower cost."""
    first = found.first
    if first is not None and first.rate > found.rate * (1 + 1e-6):
        columns = (
            TableColumn("plan"),
            TableColumn("trajectories_per_s", "number"),
            TableColumn("usd_per_hour_used", "usd"),
        )
        rows = (("best rate", first.rate, first.usd_per_hour), ("this plan", found.rate, found.usd_per_hour))
        yield Table("stages", "Given up for dollars (placement.rate_tolerance)", columns, rows)


def _bound(found: Placement) -> tuple[TableColumn, float]:
    """The upper bound over all plans, in the unit of the objective; the column's name has the unit unless it is the
    rate."""
    match found.objective:
        case Objective.MIN_COST:
            return TableColumn("bound_usd_per_hour", "usd"), found.bound
        case Objective.MAX_THROUGHPUT_PER_DOLLAR:
            return TableColumn("bound_trajectories_per_usd", "number"), found.bound * 3600.0
        case _:
            return TableColumn("bound", "number"), found.bound


def _pools(resolved: Resolved) -> Table:
    columns = (
        TableColumn("pool"),
        TableColumn("device"),
        TableColumn("devices", "count"),
        TableColumn("used", "count"),
        TableColumn("idle", "count"),
        TableColumn("by_role"),
        TableColumn("usd_per_hour", "usd"),
    )
    rows = []
    for pool in _fleet(resolved):
        idle = resolved.plan.idle[pool.name]
        paid = pool.count - idle if pool.rented else pool.count
        rows.append(
            (
                pool.name,
                pool.device.name,
                pool.count,
                pool.count - idle,
                idle,
                _by_role(resolved, pool.name),
                paid * pool.usd_per_device_hour,
            )
        )
    return Table("pools", "Pools", columns, tuple(rows))


def _by_role(resolved: Resolved, pool: str) -> str:
    used: dict[Role, int] = {}
    for a in resolved.plan.assignments:
        if a.pool == pool:
            used[a.role] = used.get(a.role, 0) + len(a.devices)
    return ", ".join(f"{role} {devices:,}" for role, devices in sorted(used.items(), key=lambda item: -item[1]))


def _deployments(found: Placement) -> Table:
    columns = (
        TableColumn("role"),
        TableColumn("pool"),
        TableColumn("tp", "count"),
        TableColumn("replicas", "count"),
        TableColumn("devices", "count"),
        TableColumn("batch", "number"),
        TableColumn("utilisation", "share"),
        TableColumn("kv", "share"),
    )
    rows = []
    for d in sorted(found.deployments, key=lambda d: (_ORDER[d.role], d.pool, d.tp)):
        serving = d.role in _SERVING
        rows.append(
            (
                str(d.role),
                d.pool,
                d.tp if serving else None,
                d.replicas,
                d.devices,
                round(d.batch, 1),
                d.utilisation,
                d.kv_utilisation if serving else None,
            )
        )
    return Table("deployments", "What runs where", columns, tuple(rows))


_ORDER = {role: n for n, role in enumerate(Role)}
_SERVING = (Role.ENGINE, Role.PREFILL, Role.DECODE)


def _flows(found: Placement) -> Table:
    """Flows of a domain on the same pools and with the same handling of the KV are one row, whatever the tp."""
    columns = (
        TableColumn("domain"),
        TableColumn("prefill"),
        TableColumn("decode"),
        TableColumn("kv"),
        TableColumn("share", "share"),
        TableColumn("trajectories_per_s", "number"),
        TableColumn("seconds", "seconds"),
    )
    rate: dict[tuple[str, str, str, str], float] = {}
    time: dict[tuple[str, str, str, str], float] = {}
    whole: dict[str, float] = {}
    for f in found.flows:
        key = (f.domain, f.prefill_pool or "same", f.pool, str(f.kv))
        rate[key] = rate.get(key, 0.0) + f.rate
        time[key] = time.get(key, 0.0) + f.rate * f.seconds
        whole[f.domain] = whole.get(f.domain, 0.0) + f.rate
    rows = tuple(
        (*key, r / whole[key[0]] if whole[key[0]] else None, r, time[key] / r if r else None)
        for key, r in sorted(rate.items(), key=lambda item: (item[0][0], -item[1]))
    )
    return Table("flows", "Where trajectories go", columns, rows)


def _others(problem: Problem) -> Sequence[Baseline]:
    """Simpler plans on the same model. Where the engines are given, the placer's computed plan."""
    if problem.fixed is None:
        return baselines(problem)
    return [Baseline("computed", solve(replace(problem, fixed=None)))]


def _baselines(others: Sequence[Baseline], found: Placement) -> Table:
    """This plan beside simpler ones. `ratio`: the gain of this plan by its objective."""
    columns = (
        TableColumn("plan"),
        TableColumn("trajectories_per_s", "number"),
        TableColumn("usd_per_hour_used", "usd"),
        TableColumn("usd_per_1k", "usd"),
        TableColumn("ratio", "number"),
    )
    rows: list[Row] = [("this plan", found.rate, found.usd_per_hour, _per_thousand(found), None)]
    for other in others:
        plan = other.placement
        if plan is None:
            rows.append((other.name, None, None, None, None))
        else:
            ratio = gain(found, plan)
            finite = round(ratio, 4) if math.isfinite(ratio) else None  # infinite against a plan of value 0
            rows.append((other.name, plan.rate, plan.usd_per_hour, _per_thousand(plan), finite))
    return Table("baselines", "Beside simpler plans", columns, tuple(rows))


def _per_thousand(found: Placement) -> float | None:
    return found.usd_per_thousand if found.rate > 0 else None


def _marginals(why: Explanation, found: Placement) -> Iterator[Row]:
    """The gain of more resources, by dual prices and then by solving again. In pools with engines devices come by the
    instance, since fewer devices gain nothing but rounding."""
    rows: list[tuple[Marginal, float, float, str]] = []
    for m in why.marginals:
        words = m.words.removesuffix(" (solved again)").removesuffix(" (at the margin)")
        size = max((d.tp for d in found.deployments if d.pool == m.pool and d.role in _SERVING), default=1)
        amount, gain = m.amount, m.gain
        if not m.solved and m.devices == 1 and size > 1:
            amount, gain = size, m.gain * size
            resource = words.removeprefix("one").rpartition(":")[0]
            gained = "nothing" if gain < NEGLIGIBLE_GAIN else f"{_percent(gain)} trajectories/s"
            words = f"{size}{resource}: {gained}"
        rows.append((m, amount, gain, words))
    rows.sort(key=lambda row: (row[0].solved, -row[2], row[0].what))
    for m, amount, gain, words in rows:
        yield (m.what, amount, gain, "solved again" if m.solved else "dual price", words)


def _reasons(why: Explanation, problem: Problem, found: Placement) -> Iterator[Table]:
    if why.marginals and problem.fixed is None:
        columns = (
            TableColumn("what"),
            TableColumn("amount", "number"),
            TableColumn("gain", "share"),
            TableColumn("how"),
            TableColumn("in_words"),
        )
        yield Table("marginals", "What more would buy", columns, tuple(_marginals(why, found)))
    if why.affinities:
        columns = (
            TableColumn("domain"),
            TableColumn("phase"),
            TableColumn("best"),
            TableColumn("factor", "number"),
            TableColumn("in_words"),
        )
        yield Table(
            "affinities",
            "Which device suits what (this model, these prices)",
            columns,
            tuple((a.domain, a.phase, a.best, a.factor, a.words) for a in why.affinities),
        )


def _rewards(found: Placement) -> Iterator[Table]:
    if not found.rewards:
        return
    columns = (
        TableColumn("domain"),
        TableColumn("where"),
        TableColumn("trajectories_per_s", "number"),
        TableColumn("usd_per_1k", "usd"),
        TableColumn("dedicated_wins_above", "share"),
        TableColumn("dedicated_devices_busy", "number"),
        TableColumn("note"),
    )
    rows = tuple(
        (r.domain, r.where, r.rate, r.usd_per_thousand, r.break_even_utilisation, r.dedicated_utilisation, r.note)
        for r in found.rewards
    )
    yield Table("rewards", "Rewards", columns, rows)


def _parts(resolved: Resolved) -> Table:
    columns = (
        TableColumn("part"),
        TableColumn("pool"),
        TableColumn("devices", "count"),
        TableColumn("which"),
        TableColumn("usd_per_hour", "usd"),
    )
    rows = tuple(
        (a.name, a.pool, len(a.devices), _indices(a.devices), len(a.devices) * resolved.usd_per_device_hour[a.pool])
        for a in resolved.plan.assignments
    )
    return Table("parts", "Parts", columns, rows)


def _indices(devices: Sequence[int]) -> str:
    """`0-7`, or a list if the indices are not contiguous."""
    if len(devices) > 2 and list(devices) == list(range(devices[0], devices[-1] + 1)):
        return f"{devices[0]}-{devices[-1]}"
    return ",".join(map(str, devices))


def _batch(resolved: Resolved) -> Table:
    columns = (TableColumn("domain"), TableColumn("trajectories", "count"))
    return Table("batch", "Trajectories per step", columns, tuple(resolved.quotas.items()))


def _both(old: Resolved, new: Resolved) -> Iterator[Row]:
    a, b = old.plan.placement, new.plan.placement
    if a is not None and b is not None:
        yield _figure("trajectories/s", a.best_rate, b.best_rate)
        yield _figure("$/h of what is used", a.usd_per_hour, b.usd_per_hour)
        if a.rate > 0 and b.rate > 0:
            yield _figure("$/1k trajectories", a.usd_per_thousand, b.usd_per_thousand)
    yield _figure("$/h of all pools", old.plan.usd_per_hour, new.plan.usd_per_hour)


def _figure(name: str, a: float, b: float) -> Row:
    return (name, a, b, _percent(b / a - 1) if a else None)


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"


def _instances(old: Resolved, new: Resolved) -> Iterator[Row]:
    counts: list[dict[str, int]] = []
    for resolved in (old, new):
        found: dict[str, int] = {}
        for a in resolved.plan.assignments:
            key = f"{a.role} on {a.pool}, {len(a.devices)} device{'s' if len(a.devices) > 1 else ''} each"
            found[key] = found.get(key, 0) + 1
        counts.append(found)
    yield from _side_by_side(*counts)


def _devices(old: Resolved, new: Resolved) -> Iterator[Row]:
    used = [{p.name: p.count - r.plan.idle[p.name] for p in _fleet(r)} for r in (old, new)]
    yield from _side_by_side(*used)


def _side_by_side(a: dict[str, int], b: dict[str, int]) -> Iterator[Row]:
    for key in sorted({*a, *b}):
        difference = b.get(key, 0) - a.get(key, 0)
        yield (key, a.get(key, 0), b.get(key, 0), f"{difference:+,d}" if difference else None)


def _moves(old: Resolved, new: Resolved) -> Table | None:
    """The moves from the old plan to the new. None if a plan was not computed, or if nothing has to move."""
    a, b = old.plan.placement, new.plan.placement
    if a is None or b is None:
        return None
    rebalance = new.run.placement.rebalance
    costs = MoveCosts(restart_s=rebalance.restart_s, usd_per_device_hour=dict(new.usd_per_device_hour))
    moves = diff(a.deployments, b.deployments, costs=costs)
    if not moves:
        return None
    columns = (
        TableColumn("move"),
        TableColumn("what"),
        TableColumn("device_seconds", "count"),
        TableColumn("usd", "usd"),
    )
    rows = tuple((str(m.kind), m.words, m.device_seconds, m.usd) for m in moves)
    return Table("moves", "Moves, in order", columns, rows)


def _binds(resolved: Resolved) -> str:
    found = resolved.plan.placement
    return "; ".join(found.binds) if found is not None and found.binds else resolved.plan.binds


def _fleet(resolved: Resolved) -> tuple[Pool, ...]:
    return pools_of(resolved.cluster, resolved.prices)
