"""The rollout side of a problem as plain numbers: instance kinds (pool × role × TP), and every path that a trajectory
may take through them. The coefficients of the solver; nothing is solved here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.architecture import DecoderShape
from placement.milp import Floats, Ints
from placement.problem import DomainProfile, Problem, Restriction
from placement.roofline import Roofline
from placement.types import ROLLOUT_ROLES, Device, KvMode, Link, Role

AGGREGATED_ONLY = (Restriction.AGGREGATED, Restriction.STRICT, Restriction.NO_AFFINITY)
MODES = (KvMode.KEEP, KvMode.RECOMPUTE, KvMode.PULL)
MANY = 60
"""Above this many units, sizes that serve a pool's mix badly are left out: fewer whole numbers to search."""
SIZES = 2
EXACT_TURNS = 8
"""Sums of up to this many turns are taken term by term."""
QUADRATURE_NODES = 6
"""Quadrature points for the turns of a long trajectory after its second."""

RefusalReason = tuple[str, str, str]
"""The reason that something cannot run: pool, domain ("" for all domains) and text."""


@dataclass(frozen=True, slots=True)
class InstanceKind:
    """Instances of one role on `tp` devices of one pool: at most `most` of them, each as fast as `model`."""

    pool: int
    role: Role
    tp: int
    most: int
    model: Roofline

    @property
    def kv_gb(self) -> float:
        """KV memory of one instance."""
        return self.model.kv_capacity_bytes / 1e9


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

    @staticmethod
    def of(count: int, **columns: Ints | Floats | float) -> Paths:
        """`count` paths. A single value counts for all of them, and a column that is not given does not apply."""
        whole = ("domain", "unit", "first", "mode", "link")
        values: dict[str, Any] = {}
        for name in Paths.__slots__:
            kind, absent = (np.int64, -1) if name in whole else (np.float64, 0.0)
            values[name] = np.full(count, columns.get(name, absent), dtype=kind)
        return Paths(**values)

    def __len__(self) -> int:
        return len(self.domain)

    def take(self, keep: Ints | NDArray[np.bool_]) -> Paths:
        return Paths(*(getattr(self, name)[keep] for name in Paths.__slots__))


@dataclass(frozen=True, slots=True)
class Tableau:
    """`weights` are the domains' shares of the rate, 1 in sum. `reasons` explain why a pool, or a domain on a pool, has
    no path. `notes` are the assumptions behind `units`."""

    units: tuple[InstanceKind, ...]
    channels: tuple[Link, ...]
    paths: Paths
    weights: Floats
    reasons: tuple[RefusalReason, ...]
    notes: tuple[str, ...]

    @property
    def pool_of(self) -> Ints:
        """By unit."""
        return np.array([unit.pool for unit in self.units])

    @property
    def tp_of(self) -> Floats:
        """By unit."""
        return np.array([float(unit.tp) for unit in self.units])

    def device_seconds(self, paths: Paths) -> Floats:
        """Device-seconds per trajectory, by path."""
        tp = self.tp_of
        return paths.load * tp[paths.unit] + np.where(paths.first >= 0, paths.first_load * tp[paths.first], 0.0)


def tableau(problem: Problem) -> Tableau:
    """Every unit, channel and path that the problem and its restriction allow."""
    reasons: list[RefusalReason] = []
    notes: list[str] = []
    weights = np.array([d.weight for d in problem.domains])
    builder = _Builder(problem, list(_instance_kinds(problem, reasons)), reasons)
    if problem.fixed is None and len(builder.units) > MANY:
        builder.keep_worthwhile()
        notes.append(f"many pools: at most {SIZES} sizes of instance per pool and role are considered")
    blocks = [Paths.of(0), *builder.aggregated(), *builder.divided()]
    return Tableau(
        units=tuple(builder.units),
        channels=tuple(problem.kv_channels().values()),
        paths=Paths(*(np.concatenate([getattr(block, name) for block in blocks]) for name in Paths.__slots__)),
        weights=weights / weights.sum(),
        reasons=tuple(dict.fromkeys(reasons)),
        notes=tuple(dict.fromkeys(notes)),
    )


def _instance_kinds(problem: Problem, reasons: list[RefusalReason]) -> Iterator[InstanceKind]:
    roles = {Role.ENGINE} if problem.restriction in AGGREGATED_ONLY else set(ROLLOUT_ROLES)
    if problem.restriction is Restriction.PD_ONLY:
        roles -= {Role.ENGINE}
    offered = [r for r in ROLLOUT_ROLES if r in roles & problem.roles]
    shape = problem.performance.shape

    @functools.cache
    def instance(device: Device, tp: int) -> Roofline | str:
        found = shape.allows_tp(tp) or problem.performance.instance(device, tp)
        if isinstance(found, str) or found.kv_capacity_bytes > 0:
            return found
        gb, verb = device.memory_gb, "has" if tp == 1 else "have"
        have = "" if gb is None else f", {tp} {device.name} {verb} {gb * tp:g} GB"
        return f"the model needs {shape.weight_bytes / 1e9:.4g} GB for its weights{have}"

    # Sizes of running or given instances were offered before.
    given = (*(problem.fixed or ()), *(problem.running.deployments if problem.running else ()))
    for index, pool in enumerate(problem.pools):
        if problem.device_types is not None and pool.device.name not in problem.device_types:
            continue
        there = {d.tp for d in given if d.role in ROLLOUT_ROLES and d.pool == pool.name}
        host = pool.device.devices_per_host or pool.count
        for tp in sorted({*problem.tensor_parallel, *there}):
            model: Roofline | str = f"the pool has {pool.count}"
            if host < tp <= pool.count:
                model = f"a host has {host}, and an instance does not span hosts"
            elif tp <= pool.count:
                model = instance(pool.device, tp)
            if isinstance(model, str):
                reasons.append((pool.name, "", f"{pool.name}, {tp} per instance: {model}"))
                continue
            most = pool.count // host * (host // tp) + pool.count % host // tp
            for role in offered:
                yield InstanceKind(index, role, tp, most, model)


class _Builder:
    """Builds blocks of paths. Caches the cost of an instance type for a domain, since pools share device types."""

    def __init__(self, problem: Problem, units: list[InstanceKind], reasons: list[RefusalReason]) -> None:
        self.units, self._problem, self._reasons = units, problem, reasons
        self._links = problem.kv_channels()
        self._order = {key: i for i, key in enumerate(self._links)}
        self._turns = [representative_turns(d, problem.performance.shape) for d in problem.domains]
        self._costs: dict[tuple[int, Role, bool, int], PhaseCost] = {}
        self._moved = {mode: self._moved_gb(mode) for mode in (KvMode.KEEP, KvMode.PULL)}
        turns, domains = self._turns, problem.domains
        self._count = np.array([t.count for t in turns])
        self._hops_prompt = np.array([float((t.weight + t.later) @ t.kv_prompt) for t in turns])
        """By domain, GB of the prompt's KV at each transfer, in sum."""
        self._lent = np.array([t.kv_lent / t.count for t in turns])
        """Mean GB of KV that prefill holds during a decode."""
        self._wait = np.array([d.environment.wait_s * t.kv_wait for d, t in zip(domains, turns, strict=True)])
        """GB·s of KV during the waits between turns."""
        self._away = np.array([_away(d) for d in domains])

    def keep_worthwhile(self) -> None:
        """Keep the useful units of many: by pool and role, the size that serves the mix best per device and the
        next best by that rate over the root of the seconds; also the units that run already."""
        groups: dict[tuple[int, Role], list[int]] = {}
        for u, unit in enumerate(self.units):
            groups.setdefault((unit.pool, unit.role), []).append(u)
        pools = self._problem.pools
        now = {(d.pool, d.role, d.tp) for d in (self._problem.running.deployments if self._problem.running else ())}
        kept = {u for u, unit in enumerate(self.units) if (pools[unit.pool].name, unit.role, unit.tp) in now}
        for group in groups.values():
            merit = {u: self._merit(u) for u in group}
            best = max(group, key=lambda u: merit[u][0])
            kept |= {best, *sorted(set(group) - {best}, key=lambda u: (-merit[u][1], u))[: SIZES - 1]}
        self.units = [self.units[u] for u in sorted(kept)]

    def aggregated(self) -> Iterator[Paths]:
        """Paths that prefill and decode on one unit."""
        for u, unit in enumerate(self.units):
            if unit.role is not Role.ENGINE:
                continue
            for j, domain in enumerate(self._problem.domains):
                if not self._may(j, u):
                    continue
                waits = domain.environment.wait_s * self._turns[j].kv_wait
                again = domain.environment.wait_s > 0 and domain.turns.mean > 1
                for mode in (KvMode.KEEP, KvMode.RECOMPUTE) if again else (KvMode.KEEP,):
                    cost = self._cost(j, u, drop=mode is KvMode.RECOMPUTE)
                    yield Paths.of(
                        len(cost.batch),
                        domain=j,
                        unit=u,
                        mode=MODES.index(mode),
                        batch=cost.batch,
                        load=cost.load,
                        kv=cost.kv_seconds + (waits if mode is KvMode.KEEP else 0.0),
                        seconds=cost.seconds + _away(domain),
                    )

    def divided(self) -> Iterator[Paths]:
        """Paths that prefill on one unit and decode on another, for all domains of a pair of units at a time."""
        pools = self._problem.pools
        decoding = {u: self._decoding(u) for u, unit in enumerate(self.units) if unit.role is Role.DECODE}
        for p, first in enumerate(self.units):
            if first.role is not Role.PREFILL:
                continue
            prefilling = self._prefilling(p)
            for d, work in decoding.items():
                last = self.units[d]
                a, b = pools[first.pool], pools[last.pool]
                key = (min(a.name, b.name), max(a.name, b.name))
                whole = first.tp % last.tp == 0 or last.tp % first.tp == 0
                if key not in self._links or not whole or a.device.is_cpu != b.device.is_cpu:
                    continue
                for mode in (KvMode.KEEP, KvMode.PULL):
                    yield self._hand_over(p, d, key, mode, prefilling, work)

    def _merit(self, u: int) -> tuple[float, float]:
        """Trajectories/s per device over the mix, bound by time and by KV; and that rate divided by the square root of
        the seconds."""
        unit, rates, quick = self.units[u], [], []
        for j, domain in enumerate(self._problem.domains):
            if not self._fits(j, u):
                continue
            cost, turns = self._cost(j, u), self._turns[j]
            if unit.role is Role.PREFILL:
                held = cost.seconds * turns.kv_longest
            else:
                held = cost.kv_seconds + domain.environment.wait_s * turns.kv_wait
            able = np.minimum(1.0 / cost.load, unit.kv_gb / held) / unit.tp
            rates.append(domain.weight / float(able.max()))
            quick.append(domain.weight / float((able / np.sqrt(cost.seconds)).max()))
        return (1 / sum(rates), 1 / sum(quick)) if rates else (0.0, 0.0)

    def _prefilling(self, u: int) -> tuple[Floats, Floats]:
        """By domain: seconds and GB·s of prefill; NaN where its KV does not fit."""
        load, kv_seconds = np.full((2, len(self._turns)), math.nan)
        for j in range(len(self._turns)):
            if self._fits(j, u):
                cost = self._cost(j, u)
                load[j], kv_seconds[j] = cost.load[0], cost.kv_seconds[0]
        return load, kv_seconds

    def _decoding(self, u: int) -> tuple[Ints, PhaseCost]:
        """All domains' batch sizes one after the other: the domain of each, and the costs."""
        blocks = [(j, self._cost(j, u)) for j in range(len(self._turns)) if self._may(j, u)]
        domain = np.concatenate([np.zeros(0, dtype=np.int64), *(np.full(len(c.batch), j) for j, c in blocks)])
        columns = (np.concatenate([np.zeros(0), *(getattr(c, f) for _, c in blocks)]) for f in PhaseCost.__slots__)
        return domain, PhaseCost(*columns)

    def _hand_over(
        self,
        p: int,
        d: int,
        key: tuple[str, str],
        mode: KvMode,
        prefilling: tuple[Floats, Floats],
        decoding: tuple[Ints, PhaseCost],
    ) -> Paths:
        channel, (domain, decode) = self._links[key], decoding
        load, prefill_kv = (values[domain] for values in prefilling)
        turns, (gb, gb_prompt) = self._count[domain], (moved[domain] for moved in self._moved[mode])
        moving = gb / channel.gb_per_s + (2 * turns - 1) * channel.latency_s
        # The prompt's KV is there, on both sides, while it is computed and moves.
        handing = prefill_kv + gb_prompt / channel.gb_per_s + self._hops_prompt[domain] * channel.latency_s
        first_kv = handing
        if mode is KvMode.KEEP:
            first_kv = handing + decode.seconds * self._lent[domain] + self._wait[domain]
        paths = Paths.of(
            len(domain),
            domain=domain,
            unit=d,
            mode=MODES.index(mode),
            batch=decode.batch,
            load=decode.load,
            kv=handing + decode.kv_seconds + self._wait[domain],
            seconds=load + moving + decode.seconds + self._away[domain],
            first=p,
            first_load=load,
            first_kv=first_kv,
            link=self._order[key],
            link_gb=gb,
        )
        # A single turn has nothing to pull back, and nothing to keep where it is known to be the last.
        single = np.array([d.turns.mean == 1 and d.last_turn_known for d in self._problem.domains])[domain]
        return paths.take(np.isfinite(load) & (~single | (mode is KvMode.KEEP)))

    def _moved_gb(self, mode: KvMode) -> tuple[Floats, Floats]:
        """By domain, GB over the link, and the sum by turn of these GB × GB of the prompt's KV: later turns move more,
        and hold more meanwhile."""
        gb, shape = np.empty((2, len(self._turns))), self._problem.performance.shape
        for j, t in enumerate(self._turns):
            # Decode hands back to prefill before a turn: the outputs since, or the whole context.
            known: Floats | float = t.kv_prefix
            if mode is KvMode.KEEP:
                known = np.array([shape.kv_bytes(max(c - t.output, 0.0)) / 1e9 for c in t.cached])
            moved = t.kv_prompt - t.kv_cached + np.where(t.later > 0, t.kv_cached - known, 0.0)
            gb[:, j] = t.weight @ moved, t.weight @ (moved * t.kv_prompt)
        return gb[0], gb[1]

    def _may(self, j: int, u: int) -> bool:
        """True if a domain may decode on a unit, by affinity and by the memory of its longest turn."""
        allowed = self._problem.affinity.get(self._problem.domains[j].name)
        return (allowed is None or self._problem.pools[self.units[u].pool].name in allowed) and self._fits(j, u)

    def _fits(self, j: int, u: int) -> bool:
        """True if a domain's longest turn fits an instance's KV memory."""
        need, have = self._turns[j].kv_longest, self.units[u].kv_gb
        if need > have:
            pool = self._problem.pools[self.units[u].pool].name
            tp, domain = self.units[u].tp, self._problem.domains[j].name
            text = f"a trajectory of {domain} needs {need:.3g} GB of KV, {have:.3g} GB are left after the weights"
            self._reasons.append((pool, domain, f"{pool}, {tp} per instance: {text}"))
        return need <= have

    def _cost(self, j: int, u: int, *, drop: bool = False) -> PhaseCost:
        """The cost of a domain on a unit. Pools of one device type share their models."""
        unit, turns = self.units[u], self._turns[j]
        key = (j, unit.role, drop, id(unit.model))
        if key not in self._costs:
            batch = _batch_sizes(min(unit.kv_gb / turns.kv_running, float(self._problem.max_batch)))
            if unit.role is Role.PREFILL:
                self._costs[key] = prefill_cost(unit.model, turns)
            elif unit.role is Role.ENGINE:
                self._costs[key] = aggregated_cost(unit.model, turns, batch, recompute=drop)
            else:
                self._costs[key] = decode_cost(unit.model, turns, batch)
        return self._costs[key]


def _away(domain: DomainProfile) -> float:
    """Seconds in flight outside of any engine: the environment, and the reward."""
    spent = domain.turns.mean * domain.environment.wait_s + domain.environment.reset_s
    return spent + (0.0 if domain.reward is None else domain.reward.seconds)


@dataclass(frozen=True, slots=True)
class RepresentativeTurns:
    """Representative turns of a domain's mean trajectory: arrays over them; the sum of `weight` is the mean turns.

    A trajectory's context grows turn by turn, so its work is a sum over turns. Short sums are taken term by term; long
    ones by Gauss–Legendre quadrature over the turn number, which is exact for polynomials in the context and within 1 %
    where a phase changes from memory-bound to compute-bound between turns.

    `cached` tokens are in the KV cache before the turn, `new` are prefilled, `output` generated. KV in GB: `kv_cached`
    before the turn, `kv_prompt` with its prompt, `kv_middle` halfway through its output. `kv_wait` is the sum over the
    turns that another one follows of the KV held in between; `kv_prefix` that of the shared prefix. `kv_lent` is the
    sum over the turns of the prompt's KV that a prefill engine still holds while another engine decodes.
    """

    weight: Floats
    cached: Floats
    new: Floats
    output: float
    kv_cached: Floats
    kv_prompt: Floats
    kv_middle: Floats
    kv_wait: float
    kv_lent: float
    kv_prefix: float
    kv_longest: float
    prefix: float

    @property
    def count(self) -> float:
        return float(self.weight.sum())

    @property
    def kv_running(self) -> float:
        """Mean KV of a trajectory that is generating, GB."""
        return float(self.weight @ self.kv_middle) / self.count

    @property
    def context(self) -> float:
        """Mean context over all decode steps, tokens."""
        return float(self.weight @ (self.cached + self.new)) / self.count + self.output / 2

    @property
    def later(self) -> Floats:
        """`weight` without the first turn, which nothing precedes."""
        return np.concatenate([[0.0], self.weight[1:]])


def representative_turns(domain: DomainProfile, shape: DecoderShape) -> RepresentativeTurns:
    """The turns of the domain's mean trajectory. A fractional mean counts the last turn in part."""
    first, new, output = domain.prompt.mean, domain.new_tokens.mean, domain.output_tokens.mean
    prefix = first * domain.shared_prefix
    number, weight = _nodes(domain.turns.mean)

    def prompt(number: Floats) -> tuple[Floats, Floats]:
        """Tokens of these turns that are cached, and that are computed."""
        later = number > 1
        cached = np.where(later, first + output + (number - 2) * (new + output), prefix)
        # A turn without an observation still computes its last sampled token.
        return cached, np.where(later, max(new, 1.0), max(first - prefix, 1.0))

    cached, fresh = prompt(number)

    def kv(tokens: Floats) -> Floats:
        return np.array([shape.kv_bytes(float(t)) / 1e9 for t in tokens])

    after = kv(cached + fresh + output)
    followed = _nodes(domain.turns.mean - 1) if domain.turns.mean > 1 else (np.zeros(0), np.zeros(0))
    waiting = kv(first + output + (followed[0] - 1) * (new + output))
    prompts = kv(cached + fresh)
    lent = weight @ prompts
    if domain.last_turn_known:
        lent = followed[1] @ kv(sum(prompt(followed[0]), np.zeros(len(followed[0]))))
    return RepresentativeTurns(
        weight=weight,
        cached=cached,
        new=fresh,
        output=output,
        kv_cached=kv(cached),
        kv_prompt=prompts,
        kv_middle=kv(cached + fresh + output / 2),
        kv_wait=float(followed[1] @ waiting),
        kv_lent=float(lent),
        kv_prefix=shape.kv_bytes(prefix) / 1e9,
        kv_longest=float(after.max()),
        prefix=prefix,
    )


def _nodes(turns: float) -> tuple[Floats, Floats]:
    """Turn numbers and weights whose weighted sum stands for the sum over `turns` turns."""
    if turns <= EXACT_TURNS:
        number = np.arange(1.0, np.ceil(turns) + 1)
        weight = np.ones_like(number)
        weight[-1] = turns - (len(number) - 1)
        return number, weight
    # The second turn is taken as it is: half a turn before it, a context would be extrapolated below nothing.
    x, w = np.polynomial.legendre.leggauss(QUADRATURE_NODES)
    half = (turns - 2) / 2
    number = np.concatenate([[1.0, 2.0], 2.5 + half * (1 + x)])
    return number, np.concatenate([[1.0, 1.0], w * half])


@dataclass(frozen=True, slots=True)
class PhaseCost:
    """The use of an instance by one trajectory, at each batch size: instance-seconds, seconds in the phase (aggregated:
    in generation), and GB·s of KV meanwhile. A prefill has one size."""

    batch: Floats
    load: Floats
    seconds: Floats
    kv_seconds: Floats


def aggregated_cost(instance: Roofline, turns: RepresentativeTurns, batch: Floats, *, recompute: bool) -> PhaseCost:
    """Every turn prefilled and decoded on one instance. `recompute`: the KV is dropped between turns."""
    cached = np.full_like(turns.cached, turns.prefix) if recompute else turns.cached
    new = turns.cached + turns.new - cached
    rows = list(zip(new.tolist(), cached.tolist(), strict=True))
    turn = np.array([[instance.turn_s(b, n, c, turns.output) for n, c in rows] for b in batch.tolist()])
    load = turn @ turns.weight
    return PhaseCost(batch, load, batch * load, batch * (turn @ (turns.weight * turns.kv_middle)))


def prefill_cost(instance: Roofline, turns: RepresentativeTurns) -> PhaseCost:
    """Every turn's new tokens prefilled, the context before them cached. The KV is that of the prompts."""
    rows = zip(turns.new.tolist(), turns.cached.tolist(), strict=True)
    seconds = np.array([instance.prefill_s(n, c) for n, c in rows])
    load = np.array([seconds @ turns.weight])
    return PhaseCost(np.ones(1), load, load, np.array([seconds @ (turns.weight * turns.kv_prompt)]))


def decode_cost(instance: Roofline, turns: RepresentativeTurns, batch: Floats) -> PhaseCost:
    """Every output token decoded: the decode engine generates the first one again, as vLLM's does. A batch mixes
    trajectories at all turns, so its step is that of the mean context."""
    step = np.array([instance.decode_step_s(b, turns.context) for b in batch.tolist()])
    seconds = turns.count * turns.output * step
    return PhaseCost(batch, seconds / batch, seconds, seconds * turns.kv_running)


def _batch_sizes(top: float) -> Floats:
    """Operating points 1, 2, 4 … up to `top`, which is one itself."""
    grid = [1.0]
    while grid[-1] * 2 < top:
        grid.append(grid[-1] * 2)
    if top > grid[-1]:
        grid.append(top)
    return np.array(grid)
