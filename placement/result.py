"""Conversion of a solution to a `Placement`: flows at its instances, dual prices, and the binding constraints as
text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from placement.milp import Floats, MilpSolution
from placement.paths import MODES
from placement.problem import DomainProfile, FunctionPrice, RewardCost
from placement.program import PlacementProgram, RewardOption, solve_relaxation
from placement.search import plan_value
from placement.types import Deployment, DualPrices, FirstStage, Flow, Objective, Placement, Pool, RewardChoice, Role

NEGLIGIBLE_FLOW = 1e-9
"""Shares of the rate below this are the solver's tolerance, not flows."""
WIDE_GAP = 0.1
"""Distance of a plan to its bound from which a reader is warned. A guess: a tenth, less than the band of any model."""
MIN_BINDING_SHARE = 5e-4
"""Constraints that hold back less than this share of the rate are not listed."""


def build_placement(p: PlacementProgram, x: Floats, bound: float, first: FirstStage | None = None) -> Placement:
    """The plan at the integer instances of `x`, with the flows that keep the devices least busy."""
    fix = {j: float(round(x[j])) for j in p.integers()}
    for key in (("cost",), ("reached",)):
        if p.matrix.has(key):
            p.matrix.limit(key)  # prices are of the problem, not of the search for one of its best plans
    relaxed = p.relaxed
    if relaxed is None:
        with p.matrix.bounded({p.rate: (0.0, math.inf)}):
            relaxed = solve_relaxation(p, {p.rate: 1.0})
    best, x = _final_flows(p, x, fix)
    rate, cost = p.rate_of(x), p.usd_per_hour(x)
    if p.problem.objective is Objective.MIN_COST and p.problem.rate is not None:
        rate = p.problem.rate  # reached, but for the solver's tolerance
    if first is not None and (first.rate <= rate or math.isclose(first.usd_per_hour, cost, rel_tol=1e-3)):
        # A window is held at the plan's own seconds by now: a first stage of the same cost was worth no more.
        first = FirstStage(rate, cost)
    value = abs(plan_value(p, x)) if first is None else first.rate
    gap = abs(bound - value) / max(abs(bound), 1e-300)
    models = [unit.model for unit, column in zip(p.tableau.units, p.units, strict=True) if x[column] > 0.5]
    notes = [*p.tableau.notes, *(n for m in models for n in m.notes), *p.notes]
    if gap > WIDE_GAP:
        notes.insert(
            0,
            f"warning: the search ended {gap:.0%} short of the bound: a much better plan may exist; solve a smaller "
            "problem (placement.tensor_parallel, fewer pools) or give placement.train.devices",
        )
    unused = ((q, q.count - n) for q, n in zip(p.problem.pools, p.devices_used(x), strict=True))
    idle_usd = sum(n * q.usd_per_device_hour for q, n in unused if not q.rented)
    assumed = [d.name for d in p.problem.domains if d.source == "assumed"]
    notes += [f"the profile of {name} is assumed, not measured" for name in assumed]
    return Placement(
        objective=p.problem.objective,
        rate=rate,
        bound=bound if gap > 1e-9 else value,
        gap=gap if gap > 1e-9 else 0.0,
        usd_per_hour=cost,
        usd_per_hour_all=cost + idle_usd,
        deployments=tuple(_deployments(p, x)),
        flows=tuple(_flows(p, x)),
        rewards=tuple(_rewards(p, x)),
        prices=_prices(p, best, relaxed),
        binds=_binding_constraints(p, best, x),
        notes=tuple(dict.fromkeys(notes)),
        band=max((m.band for m in models), default=0.0),
        first=first,
    )


def devices_text(pool: Pool, used: int) -> str:
    """The text for a pool whose devices bind, of which a plan uses `used`."""
    where = "" if pool.device.name == pool.name else f" of {pool.name}"
    return f"{pool.device.name} devices{where}: {used} of {pool.count}"


def _final_flows(p: PlacementProgram, x: Floats, fix: dict[int, float]) -> tuple[MilpSolution, Floats]:
    """The solutions with fixed instances: the maximum flow (for dual prices), and the reported flows, which are the
    cheapest at the plan's rate and then take the fewest device-seconds."""
    with p.matrix.bounded({p.rate: (0.0, math.inf)}):
        best = solve_relaxation(p, {p.rate: 1.0}, fix=fix)
    if best is None:
        raise RuntimeError("HiGHS: the solution found does not hold with its instances fixed")
    rate = float(best.x[p.rate])
    if p.problem.objective is not Objective.MAX_THROUGHPUT:
        rate = min(rate, float(x[p.rate]))
    dollars = max((q.usd_per_device_hour for q in p.problem.pools), default=0.0) or 1.0
    least = p.vector({j: -v for j, v in p.cost().items()})
    least[p.first_path :] -= 1e-3 * dollars * p.scale * p.tableau.device_seconds(p.active)
    reported = rate * (1 - 1e-9)
    with p.matrix.bounded({p.rate: (reported, reported)}):
        flows = p.matrix.relaxed(least, fix=fix)
    return best, best.x if flows is None else flows.x


def _prices(p: PlacementProgram, best: MilpSolution, relaxed: MilpSolution | None) -> DualPrices:
    names = [q.name for q in p.problem.pools]
    per_token = p.problem.performance.shape.kv_bytes(1.0) / 1e9
    deployments, kv = {}, {}
    for u, unit in enumerate(p.tableau.units):
        if best.x[p.units[u]] > 0.5:
            key = (names[unit.pool], unit.role, unit.tp)
            deployments[key] = _clean_price(best.duals["load", u] * p.scale)
            kv[key] = _clean_price(best.duals["kv", u] * p.scale / unit.kv_gb * per_token)
    # Of trajectories in flight: the gain per additional one, and the cost per second; with a window, over all domains.
    each = p.scale / p.problem.trajectories_in_flight
    places = seconds = best.duals.get(("in flight",), 0.0) * each
    for j, own in enumerate(p.slopes):
        price = best.duals["window", j] * each
        places, seconds = places + price / own, seconds + price
    pools = {} if relaxed is None else {name: relaxed.duals["pool", g] * p.scale for g, name in enumerate(names)}
    return DualPrices(
        deployments=deployments,
        kv=kv,
        links={c.pools: _clean_price(best.duals["link", c.pools] * p.scale / c.gb_per_s) for c in p.tableau.channels},
        in_flight=_clean_price(seconds),
        places=_clean_price(places),
        pools={name: _clean_price(price) for name, price in pools.items()},
    )


def _clean_price(value: float) -> float:
    """The price without the solver's noise: no negative price, no -0.0."""
    return float(value) if value > 1e-12 else 0.0


def _deployments(p: PlacementProgram, x: Floats) -> Iterable[Deployment]:
    paths, names = p.active, [q.name for q in p.problem.pools]
    flow, rate = np.maximum(x[p.first_path :], 0.0) * p.scale, p.rate_of(x)
    for u, unit in enumerate(p.tableau.units):
        n = round(x[p.units[u]])
        if n < 1:
            continue
        last, first = paths.unit == u, paths.first == u
        busy = float(flow[last] @ paths.load[last]) + float(flow[first] @ paths.first_load[first])
        held = float(flow[last] @ paths.kv[last]) + float(flow[first] @ paths.first_kv[first])
        at_once = float(flow[last] @ (paths.load[last] * paths.batch[last]))
        batch = at_once / busy if unit.role is not Role.PREFILL and busy > 0 else 1.0
        yield Deployment(
            names[unit.pool], unit.role, unit.tp, n, batch, min(1.0, busy / n), min(1.0, held / (n * unit.kv_gb))
        )
    for option in p.trainers:
        m = round(x[option.devices])
        if m >= 1:
            yield Deployment(names[option.pool], Role.TRAINER, m, 1, 1.0, min(1.0, rate * option.seconds(m)))
    counts: dict[tuple[int, int], tuple[int, float]] = {}
    for key, column in p.reward_units.items():
        scored = ((x[q.column] * p.scale, p.problem.domains[q.domain].reward) for q in p.rewards if q.unit == key)
        busy = sum(each * reward.seconds for each, reward in scored if reward is not None)
        n, before = counts.get(key[:2], (0, 0.0))
        counts[key[:2]] = (n + round(x[column]), before + float(busy))
    for (g, devices), (n, busy) in sorted(counts.items()):
        if n >= 1:
            yield Deployment(names[g], Role.REWARD, devices, n, 1.0, min(1.0, busy / n))
    cores = sum(round(x[c]) for c in p.environments.values())
    for g, column in p.environments.items():
        if round(x[column]) >= 1:
            share = min(1.0, p.environment_cores * float(x[p.rate]) * p.scale / cores)
            yield Deployment(names[g], Role.ENVIRONMENT, 1, round(x[column]), 1.0, share)


def _flows(p: PlacementProgram, x: Floats) -> Iterable[Flow]:
    paths, units, names = p.active, p.tableau.units, [q.name for q in p.problem.pools]
    sums: dict[tuple[int, int, int, int], tuple[float, float]] = {}
    """Rate, and trajectories in flight."""
    values = x[p.first_path :]
    for k in np.nonzero(values > NEGLIGIBLE_FLOW * max(float(x[p.rate]), 1e-300))[0].tolist():
        key = (int(paths.domain[k]), int(paths.unit[k]), int(paths.first[k]), int(paths.mode[k]))
        rate, in_flight = sums.get(key, (0.0, 0.0))
        more = float(values[k]) * p.scale
        sums[key] = rate + more, in_flight + more * float(paths.seconds[k])
    for (j, u, f, mode), (rate, in_flight) in sorted(sums.items()):
        yield Flow(
            domain=p.problem.domains[j].name,
            pool=names[units[u].pool],
            tp=units[u].tp,
            rate=rate,
            seconds=in_flight / rate,
            kv=MODES[mode],
            prefill_pool=names[units[f].pool] if f >= 0 else None,
            prefill_tp=units[f].tp if f >= 0 else None,
        )


def _rewards(p: PlacementProgram, x: Floats) -> Iterable[RewardChoice]:
    pools = p.problem.pools
    chosen: list[tuple[RewardOption, float, DomainProfile, RewardCost]] = []
    for q in p.rewards:
        rate, domain = float(x[q.column]) * p.scale, p.problem.domains[q.domain]
        if rate > NEGLIGIBLE_FLOW * p.rate_of(x) and domain.reward is not None:
            chosen.append((q, rate, domain, domain.reward))
    notes = _idle_notes(p.problem.functions, {d.name: (reward, rate) for q, rate, d, reward in chosen if q.pool < 0})
    for q, rate, domain, reward in chosen:
        mine = [r for r in p.rewards if r.domain == q.domain]
        usd = next((r.usd for r in mine if r.pool < 0), None)
        hourly = {r.pool: pools[r.pool].usd_per_device_hour * r.unit[1] for r in mine if r.unit is not None}
        dedicated = hourly.get(q.pool, min(hourly.values(), default=None))
        even = None
        if usd is not None and usd > 0 and dedicated is not None and reward.seconds > 0:
            even = dedicated / (3600.0 * usd / reward.seconds)
        per = usd if q.pool < 0 else (dedicated or 0.0) / 3600.0 * reward.seconds
        yield RewardChoice(
            domain=domain.name,
            where="functions" if q.pool < 0 else pools[q.pool].name,
            rate=rate,
            usd_per_thousand=1000.0 * (per or 0.0),
            break_even_utilisation=even,
            dedicated_utilisation=rate * reward.seconds if dedicated is not None else None,
            note=notes.get(domain.name, "") if q.pool < 0 else "",
        )


def idle_containers(scored: Sequence[tuple[RewardCost, float]]) -> float:
    """An estimate of the mean number of waiting containers of one function, from the rewards of its domains and their
    trajectories/s.

    Calls arrive at random: a mean load of a containers needs a + √a of them. Containers above the load wait all the
    time if they are `warm`, and otherwise no longer than `keep_alive_s` for their next call.
    """
    load = sum(rate * reward.seconds for reward, rate in scored)
    calls_per_s = sum(rate / reward.batch for reward, rate in scored)
    warm = max((reward.warm for reward, _ in scored), default=0)
    keep_alive_s = max((reward.keep_alive_s for reward, _ in scored), default=0.0)
    spare = max(0.0, math.ceil(load + math.sqrt(load)) - max(load, warm))
    return max(0.0, warm - load) + spare * -math.expm1(-calls_per_s * keep_alive_s)


def _idle_notes(price: FunctionPrice | None, scored: Mapping[str, tuple[RewardCost, float]]) -> dict[str, str]:
    """By domain the bill of waiting containers and their start, where the provider charges them. It is in no dollars of
    a plan. `scored`: reward and trajectories/s by domain. Domains that share a function have one note, at the first of
    them."""
    if price is None or not price.charges_idle:
        return {}
    shared: dict[tuple[str, ...], list[tuple[str, RewardCost, float]]] = {}
    for domain, (reward, rate) in scored.items():
        for i, part in enumerate(reward.parts):
            shared.setdefault(part.functions or ("", domain, str(i)), []).append((domain, part, rate))
    notes: dict[str, list[str]] = {}
    for found in shared.values():
        domain, others = found[0][0], [name for name, _, _ in found[1:]]
        usd_per_s = price.usd_per_s(found[0][1])
        if usd_per_s is None:
            continue
        waiting = idle_containers([(part, rate) for _, part, rate in found])
        note = f"and about ${3600.0 * waiting * usd_per_s:.2f}/h for {waiting:.1f} containers that wait"
        note += f", shared with {', '.join(others)}" if others else ""
        starts = [part.cold_start_s for _, part, _ in found if part.cold_start_s is not None]
        notes.setdefault(domain, []).append(f"{note}; a start takes {max(starts):g} s" if starts else note)
    return {domain: "; ".join(parts) for domain, parts in notes.items()}


def _binding_constraints(p: PlacementProgram, best: MilpSolution, x: Floats) -> tuple[str, ...]:
    """The constraints, most important first, by the share of the rate that they hold back: the price of a row × its
    resources. Training and publishing count with their share of the holding time of a window's slots."""
    pools, t, used = p.problem.pools, p.tableau, p.devices_used(x)
    weight: dict[str, float] = {}

    def count(what: str, value: float) -> None:
        if value > MIN_BINDING_SHARE * float(x[p.rate]):
            weight[what] = weight.get(what, 0.0) + value

    for u, unit in enumerate(t.units):
        n = float(x[p.units[u]])
        pool = pools[unit.pool]
        count(devices_text(pool, used[unit.pool]), best.duals["load", u] * n * p.problem.utilisation)
        count(f"KV memory of {unit.role} on {pool.name}", best.duals["kv", u] * n)
    for channel in t.channels:
        a, b = channel.pools
        name = f"link {a}–{b}" if a != b else f"the network inside {a}"
        count(f"{name}: {channel.gb_per_s:g} GB/s", best.duals["link", channel.pools])
    limit = p.problem.trajectories_in_flight
    if p.matrix.has(("in flight",)):
        count(f"trajectories in flight: {limit:,.0f} of {limit:,.0f}", best.duals["in flight",])
    for j, own in enumerate(p.slopes):
        name, price = p.problem.domains[j].name, best.duals["window", j] / own
        count(f"the window: {limit * t.weights[j]:,.0f} places for {name}", price)
        for what, share in _holding_shares(p, x, j, own):
            count(what, price * share)
    trained = sum(v for key, v in best.duals.items() if key[0] == "train")
    count("the trainer", trained / p.scale)
    for key, column in p.reward_units.items():
        count(f"rewards on {pools[key[0]].name}", best.duals["scoring", *key] * float(x[column]))
    if p.environments:
        cores = sum(float(x[c]) for c in p.environments.values())
        count("cores for environments", best.duals["environments",] * cores * p.problem.utilisation)
    if p.matrix.has(("budget",)):
        count(f"the budget of ${p.problem.budget_usd_per_hour:g}/h", best.duals["budget",])
    return tuple(sorted(weight, key=lambda w: (-weight[w], w)))


def _holding_shares(p: PlacementProgram, x: Floats, j: int, own: float) -> Iterator[tuple[str, float]]:
    """The shares of a slot's holding time that are training, if more devices would shorten it, and publishing."""
    option = p.trainer(x)
    assert option is not None, "a window's slots are held until training"
    size = round(float(x[option.devices]))
    train_s, publish_s = p.step_s(option, size), p.publish_s(option, p.serving(x))
    rest = p.held[option.pool][0][j] * own * float(x[option.rate]) / (train_s + publish_s)
    if size < option.most and p.trainer_size(option) is None:
        yield "the trainer", rest * train_s
    yield f"publishing: {publish_s:.3g} s", rest * publish_s
