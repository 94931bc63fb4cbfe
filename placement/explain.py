"""Explanation of a plan, in short lines for a reader, and its comparison with simpler plans.

The lines give the gain of one more device, the binding constraints, and the device preference of each domain's phases.
Preferences are computed for this model, workload and prices; the name of a device decides nothing.

Baselines show the value of a plan: simple mappings, solved on the same model with the same hardware. Each is a
restriction of the problem: one device type, the same mix everywhere, a pool per domain, no prefill/decode split, or
nothing but the split. No baseline can therefore beat the full plan by more than the solver's gap. The user's
constraints (affinity, budget, a running plan) hold for baselines too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from placement import paths, result
from placement.problem import Problem, Restriction
from placement.publish import DEVICES_PER_HOST, LOADING, Publishing, Transport
from placement.solve import best_objective_value, solve
from placement.types import ROLLOUT_ROLES, Device, Infeasible, Link, Objective, Placement, Pool, Role

DEVICES = "devices"

NO_PREFERENCE = 1.05
"""Device types whose costs of a phase differ by less than this factor are reported as equal."""

NEGLIGIBLE_GAIN = 5e-4
"""Relative gains below this are reported as nothing: the solver's gap leaves as much open."""

MIN_RESOLVED_GAIN = 2e-3
"""The same threshold for plans that are solved again: searches for the trainer's size end within 0.15 % of each
other."""


@dataclass(frozen=True, slots=True)
class Marginal:
    """The value of more of a resource: `gain` relative to the plan's objective (0.02: two per cent better).

    `what` is a pool, "in flight", a link ("a–b"), "publish", "broadcast" or "affinity"; `amount` is in `unit`: devices,
    trajectories, GB/s or seconds. `solved`: the problem was solved again with the increment. Otherwise the gain is a
    dual price times the amount, valid for a small step. The dual prices of devices come from the relaxed problem, with
    fractional instances: whole instances gain more or less.
    """

    what: str
    amount: float
    unit: str
    gain: float
    solved: bool
    words: str

    @property
    def pool(self) -> str | None:
        """The pool of the devices; None for other resources."""
        return self.what if self.unit == DEVICES else None


@dataclass(frozen=True, slots=True)
class Affinity:
    """The device type on which a domain's phase costs least: dollars per trajectory where every type has a price,
    device-seconds otherwise. `factor` is its advantage over the next; None and 1 if they are within 5 %. Types that
    cannot hold the model or a trajectory are left out."""

    domain: str
    phase: str
    best: str | None
    factor: float
    words: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The value of more resources, the constraints that bind, and the devices that domains prefer."""

    marginals: tuple[Marginal, ...]
    binds: tuple[str, ...]
    affinities: tuple[Affinity, ...]


def explain(problem: Problem, placement: Placement, *, resolve: bool = True) -> Explanation:
    """Explain a plan. `resolve`: solve again with more devices of each serving pool, and confirm the binding
    constraints by the result; up to three first-stage solutions per pool."""
    found = marginals(problem, placement, resolve=resolve)
    return Explanation(found, _confirmed_constraints(problem, placement, found), affinities(problem, placement))


def marginals(problem: Problem, placement: Placement, *, resolve: bool = True) -> tuple[Marginal, ...]:
    """The marginals of a plan, most valuable first (ties: by name). At the margin: one device of each pool, a tenth
    more trajectories in flight, and a tenth more of each binding link. These exist only for MAX_THROUGHPUT, since dual
    prices are prices of the rate; a price of 0 is left out for serving devices, since it means nothing for whole
    instances. With `resolve`, the problem is solved again for serving devices instead, and without affinities where
    some were given."""
    again = resolve and problem.fixed is None
    serving = _gpus_first(problem.pools)
    found: list[Marginal] = []
    if placement.objective is Objective.MAX_THROUGHPUT and placement.rate > 0:
        for pool in problem.pools:
            one = _device_marginal(placement, pool)
            if pool not in serving or (one.gain >= NEGLIGIBLE_GAIN and not again):
                found.append(one)
        found += _capacity_marginals(problem, placement)
        found.sort(key=lambda m: (-m.gain, m.what))
    if not again:
        return tuple(found)
    solved = [_pool_marginal(problem, placement, pool) for pool in serving]
    if problem.affinity:
        worth = _resolved_gain(replace(problem, affinity={}), placement)
        solved.append(_marginal(placement, "affinity", 0, "", "without the affinities given", worth, solved=True))
    solved += _publish_marginals(problem, placement)
    return (*found, *sorted(solved, key=lambda m: (-m.gain, m.what)))


def _pool_marginal(problem: Problem, placement: Placement, pool: Pool) -> Marginal:
    """The marginal of the smallest useful increment among the devices of one instance, one host and two hosts; the
    largest increment if none gains anything.

    A dual price of 0 means little for whole instances: the trainer's size is fixed when prices are taken, and one more
    device may be too few for one more instance. In that case the largest increment is tried first, since it mostly
    gains nothing."""
    used = (d.tp for d in placement.deployments if d.pool == pool.name and d.role in ROLLOUT_ROLES)
    widest, host = max(used, default=1), pool.device.devices_per_host or DEVICES_PER_HOST
    *fewer, most = sorted({widest, max(widest, host), 2 * max(widest, host)})

    def bought(devices: int) -> Marginal:
        pools = tuple(replace(p, count=p.count + devices) if p is pool else p for p in problem.pools)
        return _more_devices(placement, pool, devices, _resolved_gain(replace(problem, pools=pools), placement))

    last = bought(most) if _device_marginal(placement, pool).gain < NEGLIGIBLE_GAIN else None
    if last is None or last.gain > 0:
        for devices in fewer:
            found = bought(devices)
            if found.gain > 0:
                return found
    return last or bought(most)


def _confirmed_constraints(problem: Problem, placement: Placement, found: tuple[Marginal, ...]) -> tuple[str, ...]:
    """The plan's binding constraints. Of the devices that were solved again, only those with a gain are listed."""
    gains = {m.pool: m.gain for m in found if m.solved and m.pool is not None}
    used = {g: sum(d.devices for d in placement.deployments if d.pool == g) for g in gains}
    words = {p.name: result.devices_text(p, used[p.name]) for p in problem.pools if p.name in gains}
    kept = tuple(text for text in placement.binds if all(text != words[g] or gains[g] > 0 for g in words))
    more = sorted((g for g in words if gains[g] > 0 and words[g] not in kept), key=lambda g: (-gains[g], g))
    return (*kept, *(words[g] for g in more))


def affinities(problem: Problem, placement: Placement | None = None) -> tuple[Affinity, ...]:
    """The cost of each domain's phase (prefill, decode) on each device type, at the TP sizes that the plan uses, if
    any. Decode is costed at the batch that the memory and the trajectories in flight allow, the latter divided over as
    many instances as the problem's GPUs hold."""
    types: dict[str, Device] = {}
    usd: dict[str, float] = {}
    for pool in _gpus_first(problem.pools):
        types.setdefault(pool.device.name, pool.device)
        usd[pool.device.name] = min(usd.get(pool.device.name, math.inf), pool.usd_per_device_hour)
    prices = usd if all(price > 0 for price in usd.values()) else None
    there = () if placement is None else placement.deployments
    found = []
    for domain in problem.domains:
        turns = paths.representative_turns(domain, problem.performance.shape)
        prefill: dict[str, float] = {}
        decode: dict[str, float] = {}
        for name, device in types.items():
            pools = {p.name for p in problem.pools if p.device.name == name}
            used = {d.tp for d in there if d.pool in pools and d.role in ROLLOUT_ROLES}
            for tp in sorted(used or set(problem.tensor_parallel)):
                model = problem.performance.instance(device, tp)
                if isinstance(model, str) or model.kv_capacity_bytes / 1e9 < turns.kv_longest:
                    continue
                instances = sum(pool.count // tp for pool in _gpus_first(problem.pools)) or 1
                in_memory = model.kv_capacity_bytes / 1e9 / turns.kv_running
                batch = min(float(problem.max_batch), in_memory, problem.trajectories_in_flight / instances)
                cost = paths.decode_cost(model, turns, np.array([max(batch, 1.0)]))
                decode[name] = min(decode.get(name, math.inf), tp * float(cost.load[0]))
                alone = paths.prefill_cost(model, turns)
                prefill[name] = min(prefill.get(name, math.inf), tp * float(alone.load[0]))
        for phase, seconds in (("prefill", prefill), ("decode", decode)):
            if seconds:
                found.append(_affinity(domain.name, phase, seconds, prices))
    return tuple(found)


def baselines(problem: Problem) -> dict[str, Placement | Infeasible]:
    """The best plan of every baseline of the problem, or the reason that it has none: single types by name (if there
    are several), then the restrictions in order."""
    allowed = [p for p in problem.pools if problem.device_types is None or p.device.name in problem.device_types]
    types = sorted({p.device.name for p in _gpus_first(allowed)})
    asked = {f"only {t}": replace(problem, device_types=frozenset({t})) for t in types if len(types) > 1}
    asked |= {str(r): replace(problem, restriction=r) for r in Restriction if r is not Restriction.FULL}
    return {name: solve(restricted) for name, restricted in asked.items()}


def gain(placement: Placement, baseline: Placement) -> float:
    """How much better a plan is than another by its own objective: 1.1 is ten per cent more rate (before
    some of it was given up for dollars) or rate per dollar, or as much for a cost that is lower by a factor of 1.1."""
    ours, theirs = placement.worth, baseline.worth
    if theirs <= 0:
        return 1.0 if ours <= 0 else math.inf
    return ours / theirs


def _gpus_first(pools: Sequence[Pool]) -> Sequence[Pool]:
    """The pools that can serve: GPU pools if any exist."""
    return [pool for pool in pools if not pool.device.is_cpu] or pools


def _device_marginal(placement: Placement, pool: Pool) -> Marginal:
    worth = placement.prices.pools.get(pool.name, 0.0) / placement.best_rate
    return _more_devices(placement, pool, 1, worth, solved=False)


def _more_devices(placement: Placement, pool: Pool, number: int, worth: float, *, solved: bool = True) -> Marginal:
    where = "" if pool.name.lower() == pool.device.name.lower() else f" in '{pool.name}'"
    words = f"{'one' if number == 1 else number} more {pool.device.name}{where}"
    return _marginal(placement, pool.name, number, DEVICES, words, worth, solved=solved)


def _capacity_marginals(problem: Problem, placement: Placement) -> Iterator[Marginal]:
    """A tenth more of the resources without a natural unit: trajectories in flight and links, where they bind."""
    prices, bound = placement.prices, problem.trajectories_in_flight
    if prices.places > 0 and math.isfinite(bound):
        tenth = float(max(1, round(0.1 * bound)))
        words, worth = f"{tenth:.0f} more trajectories in flight", prices.places * tenth / placement.best_rate
        yield _marginal(placement, "in flight", tenth, "trajectories", words, worth, solved=False)
    for channel in problem.kv_channels().values():
        price = prices.links.get(channel.pools, 0.0)
        if price > 0:
            name, speed = "–".join(channel.pools), 0.1 * channel.gb_per_s
            words, worth = f"{speed:.3g} GB/s more on {name}", price * speed / placement.best_rate
            yield _marginal(placement, name, speed, "GB/s", words, worth, solved=False)


def _publish_marginals(problem: Problem, placement: Placement) -> Iterator[Marginal]:
    """The gains of no publish at all, of twice the bandwidth at the publish's bottleneck (networks come in steps of
    two), and of a broadcast."""
    window, trainer = problem.window, next(iter(placement.of(Role.TRAINER)), None)
    if window is None or window.publish is None or trainer is None:
        return
    serving = {d.pool for d in placement.deployments if d.role in ROLLOUT_ROLES}
    path = window.publish.slowest(problem.pools, problem.links, trainer.pool, serving)

    def gain_of(publish: Publishing | None, links: tuple[Link, ...] = problem.links) -> float:
        return _resolved_gain(replace(problem, links=links, window=replace(window, publish=publish)), placement)

    words = f"no publish ({path.seconds:.3g} s)"
    none = _marginal(placement, "publish", path.seconds, "s", words, gain_of(None), solved=True)
    yield none
    if not none.gain:
        return  # nor does a shorter one buy anything
    faster = window.publish.faster(path, problem.links, 2.0)
    if faster is not None:
        leg = path.slower
        name = path.limit if path.limit == LOADING or leg.link is None else "–".join(leg.link)
        gb_per_s = path.load_gb_per_s if path.limit == LOADING else leg.gb_per_s
        words = f"{path.limit} twice as fast"
        yield _marginal(placement, name, gb_per_s, "GB/s", words, gain_of(*faster), solved=True)
    if path.transport is not Transport.COLLECTIVE:
        broadcast = replace(window.publish, transport=Transport.COLLECTIVE)
        yield _marginal(placement, "broadcast", 0, "", "with weights.collective", gain_of(broadcast), solved=True)


def _marginal(
    placement: Placement, what: str, amount: float, unit: str, words: str, worth: float, *, solved: bool
) -> Marginal:
    share, figure = {
        Objective.MAX_THROUGHPUT: (worth, "trajectories/s"),
        Objective.MIN_COST: (1 / (1 + worth) - 1, "cost"),
        Objective.MAX_THROUGHPUT_PER_DOLLAR: (worth, "trajectories per dollar"),
    }[placement.objective]
    digits = 0 if abs(share) >= 0.0995 else 1  # one decimal below ten per cent
    buys = "nothing" if abs(worth) < NEGLIGIBLE_GAIN else f"{100 * share:+.{digits}f} % {figure}"
    how = "solved again" if solved else "at the margin"
    return Marginal(what, amount, unit, worth, solved, f"{words}: {buys} ({how})")


def _resolved_gain(asked: Problem, placement: Placement) -> float:
    """Gain of the plan for a problem that allows more; 0 if it is within the tolerance of the search. More cannot hurt:
    a worse answer would only be the gap."""
    more = best_objective_value(asked) / placement.worth - 1.0 if 0 < placement.worth < math.inf else 0.0
    return more if MIN_RESOLVED_GAIN <= more < math.inf else 0.0


def _affinity(domain: str, phase: str, seconds: dict[str, float], prices: Mapping[str, float] | None) -> Affinity:
    cost = seconds if prices is None else {name: s / 3600.0 * prices[name] for name, s in seconds.items()}
    ranked = sorted(cost, key=lambda name: (cost[name], name))
    factor = cost[ranked[1]] / cost[ranked[0]] if len(ranked) > 1 else 1.0
    per, verb = "per device" if prices is None else "per dollar", f"{domain} {phase}s"
    if len(ranked) == 1:
        return Affinity(domain, phase, ranked[0], 1.0, f"{verb} on {ranked[0]} only")
    if factor < NO_PREFERENCE:
        return Affinity(domain, phase, None, 1.0, f"{verb} as cheaply on {ranked[0]} as on {ranked[1]} {per}")
    words = f"{verb} {factor:.1f}x cheaper on {ranked[0]} than on {ranked[1]} {per}"
    return Affinity(domain, phase, ranked[0], factor, words)
