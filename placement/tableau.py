"""The rollout side of a problem as plain numbers: instance kinds, the links between pools, and every path that a
trajectory may take through them. The coefficients of the solver; nothing is solved here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from placement import phases
from placement.performance import InstanceModel
from placement.phases import AggregatedCost, DecodeCost, PrefillCost
from placement.problem import Problem
from placement.types import KvMode, Role
from placement.units import InstanceKind, KvChannel, RefusalReason, instance_kinds, kv_channels
from placement.workload import DomainProfile

__all__ = [
    "MODES",
    "KvChannel",
    "Floats",
    "Ints",
    "Paths",
    "Tableau",
    "InstanceKind",
    "kv_channels",
    "tableau",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
T = TypeVar("T")

MODES = (KvMode.KEEP, KvMode.RECOMPUTE, KvMode.PULL)
MANY = 60
"""Above this many units, sizes that serve a pool's mix badly are left out: fewer whole numbers to search."""
SIZES = 2


@dataclass(frozen=True, slots=True)
class Paths:
    """Arrays over the paths. A path is a domain, the unit that decodes (or does both phases), the unit that prefills
    (-1: the same), a batch size of the decoding unit and a KV mode; per trajectory: instance-seconds and GB·s of KV on
    either unit, GB over channel `link` (-1: none), and seconds in flight, environment included."""

    domain: Ints
    unit: Ints
    first: Ints
    mode: Ints
    link: Ints
    batch: Floats
    load: Floats
    kv: Floats
    first_load: Floats
    first_kv: Floats
    link_gb: Floats
    seconds: Floats

    def __len__(self) -> int:
        return len(self.domain)

    def take(self, keep: Ints | NDArray[np.bool_]) -> Paths:
        return Paths(*(getattr(self, name)[keep] for name in Paths.__slots__))


@dataclass(frozen=True, slots=True)
class Tableau:
    """`weights` are the domains' shares of the rate, 1 in sum. `reasons` explain why a pool, or a domain on a pool, has
    no path. `instances` are the models behind `units`, and `notes` their assumptions."""

    units: tuple[InstanceKind, ...]
    instances: tuple[InstanceModel, ...]
    channels: tuple[KvChannel, ...]
    paths: Paths
    weights: Floats
    reasons: tuple[RefusalReason, ...]
    notes: tuple[str, ...]


def tableau(problem: Problem) -> Tableau:
    """Every unit, channel and path that the problem and its restriction allow."""
    reasons: list[RefusalReason] = []
    notes: list[str] = []
    units, models = instance_kinds(problem, reasons)
    weights = np.array([d.weight for d in problem.domains])
    links = kv_channels(problem)
    builder = _Builder(problem, units, models, links, reasons)
    if problem.fixed is None and len(units) > MANY:
        kept = builder.worthwhile()
        units, models = [units[u] for u in kept], [models[u] for u in kept]
        builder = _Builder(problem, units, models, links, reasons, builder.costs)
        notes.append(f"many pools: at most {SIZES} sizes of instance per pool and role are considered")
    paths = _join([*builder.aggregated(), *builder.divided()])
    return Tableau(
        units=tuple(units),
        instances=tuple(models),
        channels=tuple(links.values()),
        paths=paths,
        weights=weights / weights.sum(),
        reasons=tuple(dict.fromkeys(reasons)),
        notes=tuple(dict.fromkeys(notes)),
    )


class _Builder:
    """Builds blocks of paths. Caches the cost of an instance type for a domain, since pools share device types."""

    def __init__(
        self,
        problem: Problem,
        units: list[InstanceKind],
        models: list[InstanceModel],
        links: dict[tuple[str, str], KvChannel],
        reasons: list[RefusalReason],
        costs: dict[tuple[object, ...], object] | None = None,
    ) -> None:
        self._problem, self._units, self._models = problem, units, models
        self._links, self._reasons = links, reasons
        self._order = {key: i for i, key in enumerate(links)}
        self._turns = [phases.representative_turns(d, problem.performance.shape) for d in problem.domains]
        self.costs: dict[tuple[object, ...], object] = {} if costs is None else costs
        self._domains = {mode: self._domains_of(mode) for mode in (KvMode.KEEP, KvMode.PULL)}

    def aggregated(self) -> Iterator[Paths]:
        for u, unit in enumerate(self._units):
            if unit.role is not Role.ENGINE:
                continue
            for j, domain in enumerate(self._problem.domains):
                if self._may(j, u):
                    yield self._block(j, u, KvMode.KEEP)
                    if domain.environment.wait_s > 0 and domain.turns.mean > 1:
                        yield self._block(j, u, KvMode.RECOMPUTE)

    def worthwhile(self) -> list[int]:
        """The units to keep if there are many: by pool and role, the size that serves the mix best per device and the
        next best by that rate over the root of the seconds; also the units that run already."""
        groups: dict[tuple[int, Role], list[int]] = {}
        for u, unit in enumerate(self._units):
            groups.setdefault((unit.pool, unit.role), []).append(u)
        running = self._problem.running.deployments if self._problem.running else ()
        pools = self._problem.pools
        now = {(d.pool, d.role, d.tp) for d in running}
        kept: set[int] = set()
        for group in groups.values():
            score = np.array([self._merit(u) for u in group])
            order = np.lexsort((np.arange(len(group)), -score[:, 0]))
            kept.add(group[int(order[0])])
            others = [i for i in np.lexsort((np.arange(len(group)), -score[:, 1])).tolist() if i != order[0]]
            kept |= {group[i] for i in others[: SIZES - 1]}
            kept |= {
                u for u in group if (pools[self._units[u].pool].name, self._units[u].role, self._units[u].tp) in now
            }
        return sorted(kept)

    def _merit(self, u: int) -> tuple[float, float]:
        """Trajectories/s per device over the mix, bound by time and by KV; and that rate divided by the square root of
        the seconds."""
        unit, rates, quick = self._units[u], [], []
        for j, domain in enumerate(self._problem.domains):
            if not self._fits(j, u):
                continue
            turns = self._turns[j]
            wait = domain.environment.wait_s * turns.kv_wait
            if unit.role is Role.PREFILL:
                cost = self._prefill(j, u)
                seconds = np.array([cost.load])
                rate, held = 1.0 / seconds, seconds * turns.kv_longest
            elif unit.role is Role.DECODE:
                work = self._decode(j, u)
                seconds, rate, held = work.seconds, 1.0 / work.load, work.seconds * turns.kv_running + wait
            else:
                whole = self._engine(j, u, drop=False)
                seconds, rate, held = whole.seconds, 1.0 / whole.load, whole.kv_seconds + wait
            able = np.minimum(rate, unit.kv_gb / held) / unit.tp
            rates.append(domain.weight / float(able.max()))
            quick.append(domain.weight / float((able / np.sqrt(seconds)).max()))
        return (1 / sum(rates), 1 / sum(quick)) if rates else (0.0, 0.0)

    def _block(self, j: int, u: int, mode: KvMode) -> Paths:
        turns, domain, drop = self._turns[j], self._problem.domains[j], mode is KvMode.RECOMPUTE
        cost = self._engine(j, u, drop=drop)
        waits = 0.0 if drop else domain.environment.wait_s * turns.kv_wait
        n = len(cost.batch)
        return _paths(
            _whole(n, j),
            u,
            mode,
            cost.batch,
            load=cost.load,
            kv=cost.kv_seconds + waits,
            seconds=cost.seconds + _away(domain),
        )

    def divided(self) -> Iterator[Paths]:
        """Paths that prefill on one unit and decode on another, for all domains of a pair of units at a time."""
        pools = self._problem.pools
        decoding = {u: self._decoding(u) for u, unit in enumerate(self._units) if unit.role is Role.DECODE}
        for p, first in enumerate(self._units):
            if first.role is not Role.PREFILL:
                continue
            prefilling = self._prefilling(p)
            for d, work in decoding.items():
                last = self._units[d]
                a, b = pools[first.pool], pools[last.pool]
                key = (min(a.name, b.name), max(a.name, b.name))
                whole = first.tp % last.tp == 0 or last.tp % first.tp == 0
                if key not in self._links or not whole or a.device.is_cpu != b.device.is_cpu:
                    continue
                yield self._hand_over(p, d, key, KvMode.KEEP, prefilling, work)
                yield self._hand_over(p, d, key, KvMode.PULL, prefilling, work)

    def _prefilling(self, u: int) -> tuple[Floats, Floats]:
        """By domain: seconds and GB·s of prefill; NaN where its KV does not fit."""
        cost = [self._prefill(j, u) if self._fits(j, u) else None for j in range(len(self._turns))]
        return (
            np.array([math.nan if c is None else c.load for c in cost]),
            np.array([math.nan if c is None else c.kv_seconds for c in cost]),
        )

    def _decoding(self, u: int) -> tuple[Ints, DecodeCost]:
        """All domains' batch sizes one after the other: the domain of each, and the costs."""
        blocks = [(j, self._decode(j, u)) for j in range(len(self._turns)) if self._may(j, u)]
        domain = np.concatenate([np.zeros(0, dtype=np.int64), *(_whole(len(c.batch), j) for j, c in blocks)])
        empty = np.zeros(0)
        return domain, DecodeCost(
            np.concatenate([empty, *(c.batch for _, c in blocks)]),
            np.concatenate([empty, *(c.load for _, c in blocks)]),
            np.concatenate([empty, *(c.seconds for _, c in blocks)]),
        )

    def _hand_over(
        self,
        p: int,
        d: int,
        key: tuple[str, str],
        mode: KvMode,
        prefilling: tuple[Floats, Floats],
        decoding: tuple[Ints, DecodeCost],
    ) -> Paths:
        channel, (domain, decode) = self._links[key], decoding
        load, prefill_kv = (values[domain] for values in prefilling)
        t = self._domains[mode]
        turns, gb, middle = t.turns[domain], t.gb[domain], t.middle[domain]
        moving = gb / channel.gb_per_s + (2 * turns - 1) * channel.latency_s
        # The prompt's KV is there, on both sides, while it is computed and moves.
        handing = prefill_kv + t.gb_prompt[domain] / channel.gb_per_s + t.hops_prompt[domain] * channel.latency_s
        first_kv = handing
        if mode is KvMode.KEEP:
            first_kv = handing + decode.seconds * t.lent[domain] + t.wait[domain]
        paths = _paths(
            domain,
            d,
            mode,
            decode.batch,
            load=decode.load,
            kv=handing + decode.seconds * middle + t.wait[domain],
            seconds=load + moving + decode.seconds + t.away[domain],
            first=p,
            first_load=load,
            first_kv=first_kv,
            link=self._order[key],
            link_gb=gb,
        )
        # A single turn has nothing to pull back, and nothing to keep where it is known to be the last.
        single = np.array([d.turns.mean == 1 and d.last_turn_known for d in self._problem.domains])[domain]
        return paths.take(np.isfinite(load) & (~single | (mode is KvMode.KEEP)))

    def _domains_of(self, mode: KvMode) -> _Domains:
        turns, domains = self._turns, self._problem.domains
        # Later turns move more, and hold more meanwhile: products are summed by turn.
        moved = [t.kv_prompt - t.kv_cached + self._returned(j, mode) for j, t in enumerate(turns)]
        return _Domains(
            turns=np.array([t.count for t in turns]),
            gb=np.array([float(t.weight @ gb) for t, gb in zip(turns, moved, strict=True)]),
            gb_prompt=np.array([float(t.weight @ (gb * t.kv_prompt)) for t, gb in zip(turns, moved, strict=True)]),
            hops_prompt=np.array([float((t.weight + t.later) @ t.kv_prompt) for t in turns]),
            lent=np.array([t.kv_lent / t.count for t in turns]),
            middle=np.array([t.kv_running for t in turns]),
            wait=np.array([d.environment.wait_s * t.kv_wait for d, t in zip(domains, turns, strict=True)]),
            away=np.array([_away(d) for d in domains]),
        )

    def _returned(self, j: int, mode: KvMode) -> Floats:
        """GB that decode hands back to prefill before a turn: the outputs since, or the whole context."""
        turns = self._turns[j]
        shape, follows = self._problem.performance.shape, turns.later > 0
        if mode is KvMode.PULL:
            return np.where(follows, turns.kv_cached - turns.kv_prefix, 0.0)
        known = np.array([shape.kv_bytes(max(c - turns.output, 0.0)) / 1e9 for c in turns.cached])
        return np.where(follows, turns.kv_cached - known, 0.0)

    def _may(self, j: int, u: int) -> bool:
        """Whether a domain may decode on a unit: by affinity, and by the memory of its longest turn."""
        allowed = self._problem.affinity.get(self._problem.domains[j].name)
        return (allowed is None or self._problem.pools[self._units[u].pool].name in allowed) and self._fits(j, u)

    def _fits(self, j: int, u: int) -> bool:
        """Whether a domain's longest turn fits an instance's KV memory."""
        need, have = self._turns[j].kv_longest, self._units[u].kv_gb
        if need > have:
            pool = self._problem.pools[self._units[u].pool].name
            tp, domain = self._units[u].tp, self._problem.domains[j].name
            text = f"a trajectory of {domain} needs {need:.3g} GB of KV, {have:.3g} GB are left after the weights"
            self._reasons.append((pool, domain, f"{pool}, {tp} per instance: {text}"))
        return need <= have

    def _batches(self, j: int, u: int) -> Floats:
        return phases.batch_sizes(self._units[u].kv_gb / self._turns[j].kv_running, self._problem.max_batch)

    def _engine(self, j: int, u: int, *, drop: bool) -> AggregatedCost:
        turns, batch = self._turns[j], self._batches(j, u)
        return self._once(("engine", j, drop), u, lambda m: phases.aggregated_cost(m, turns, batch, recompute=drop))

    def _prefill(self, j: int, u: int) -> PrefillCost:
        return self._once(("prefill", j), u, lambda m: phases.prefill_cost(m, self._turns[j]))

    def _decode(self, j: int, u: int) -> DecodeCost:
        return self._once(("decode", j), u, lambda m: phases.decode_cost(m, self._turns[j], self._batches(j, u)))

    def _once(self, what: tuple[object, ...], u: int, make: Callable[[InstanceModel], T]) -> T:
        """Pools of one device type share their models, which `_units` made once."""
        key = (*what, id(self._models[u]))
        if key not in self.costs:
            self.costs[key] = make(self._models[u])
        return self.costs[key]  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class _Domains:
    """Arrays over the domains: turns, GB over the link; by transfer GB × KV of the prompt, and that KV, in sum; mean KV
    that prefill holds during a decode, and at half the output, KV·s of the waits between turns, seconds outside of
    engines."""

    turns: Floats
    gb: Floats
    gb_prompt: Floats
    hops_prompt: Floats
    lent: Floats
    middle: Floats
    wait: Floats
    away: Floats


def _away(domain: DomainProfile) -> float:
    """Seconds in flight outside of any engine: the environment, and the reward."""
    spent = domain.turns.mean * domain.environment.wait_s + domain.environment.reset_s
    return spent + (0.0 if domain.reward is None else domain.reward.seconds)


def _whole(n: int, value: int) -> Ints:
    return np.full(n, value, dtype=np.int64)


def _paths(
    domain: Ints,
    u: int,
    mode: KvMode,
    batch: Floats,
    *,
    load: Floats,
    kv: Floats,
    seconds: Floats,
    first: int = -1,
    first_load: Floats | float = 0.0,
    first_kv: Floats | float = 0.0,
    link: int = -1,
    link_gb: Floats | float = 0.0,
) -> Paths:
    n = len(batch)
    zero = np.zeros(n)
    return Paths(
        domain=domain,
        unit=_whole(n, u),
        first=_whole(n, first),
        mode=_whole(n, MODES.index(mode)),
        link=_whole(n, link),
        batch=batch,
        load=load,
        kv=kv,
        first_load=zero + first_load,
        first_kv=zero + first_kv,
        link_gb=zero + link_gb,
        seconds=seconds,
    )


def _join(blocks: list[Paths]) -> Paths:
    whole = {"domain", "unit", "first", "mode", "link"}
    columns = []
    for name in Paths.__slots__:
        kind = np.int64 if name in whole else np.float64
        columns.append(np.concatenate([np.zeros(0, dtype=kind), *(getattr(b, name) for b in blocks)]))
    return Paths(*columns)
