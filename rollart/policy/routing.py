"""Selection of the decode engine and the prefill engine of a turn, by affinity and price.

A trajectory stays on the engine that holds its prefix KV (its sticky engine) while that engine is healthy. Engines that
have not loaded the current version are not eligible, for decode nor for prefill (version fence).

A first turn chooses the sticky engine in these steps: the pools that the domain prefers; among their engine kinds, the
price of the turn; engines whose prices differ by no more than `MARGIN` tie. Of the tied pools, the one furthest below
its planned share of the domain wins, shares being relative to these pools (at a plan's dual prices every path that it
uses costs the same, so prices alone would not keep to the plan). Further ties are broken by the emptiest KV memory,
where it is tracked (this spreads trajectories over engines of all sizes by their KV), then the least backlog, the
fewest running turns, the fewest sessions, the lower id. Without prices: the fewest running turns, then the fewest
sessions, then the lower id.

The prefill engine is one that holds the trajectory's KV, or else the engine with the least backlog, then fewest turns,
then the fewest trajectories whose KV it keeps (a prefill takes almost no time: without the last criterion all
trajectories would gather on the first engine and exceed its memory); a priced router weighs the two by their price. A
rule (`PREFILL_RULES`) decides between remote prefill and prefill on the sticky engine.

Hardware affinity is the pool in which a domain's trajectories decode, with a fallback order when that pool is down.
RollArt's `hw_affinity={"FrozenLake": "H800", "default": "H20"}` (RollArt §1.3): a tag names a pool or a device type. A
domain without an entry follows `default`; without a default it may decode anywhere.

The price of a path is Σ λ·(1 + backlog/target)·seconds over the engines it uses, plus the resources it holds (KV, a
slot in flight) and its link transfers: λ are the plan's dual prices; the backlog is measured by the gateway (drift plus
penalty).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from rollart.fleet import EngineKind, EnginePlacement, EngineRole, RoutePrices, Routes, TurnModel


@dataclass(frozen=True, slots=True)
class HardwareAffinity:
    """`preferred` maps a domain to a pool or device type; `default` applies to the other domains. `order` lists
    compatible pools or device types to fall back to, best first. Pools that `order` does not name come last, in any
    order: a fallback is worse than the plan, and a stall is worst."""

    preferred: Mapping[str, str] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    default: str | None = None

    def __bool__(self) -> bool:
        return bool(self.preferred) or self.default is not None

    def wants(self, domain: str) -> str | None:
        """The pool or device type that the domain prefers; None if it has no preference."""
        return self.preferred.get(domain, self.default)

    def rank(self, domain: str, placement: EnginePlacement) -> int:
        """0 for the domain's preferred hardware, then 1, 2, … down the fallback order; always 0 without a
        preference."""
        wanted = self.wants(domain)
        if wanted is None or wanted in (placement.pool, placement.device):
            return 0
        for position, name in enumerate(self.order, start=1):
            if name in (placement.pool, placement.device):
                return position
        return len(self.order) + 1

    def best(self, domain: str, placements: Sequence[EnginePlacement]) -> int:
        """The lowest rank among the engines; the choice is made among engines of this rank."""
        return min((self.rank(domain, placement) for placement in placements), default=0)


MARGIN = 0.10
"""Relative gain above which a trajectory changes between local and remote prefill, and the price difference up to which
two engines tie. Calibrated predictions of a turn are off by 5-15 %: a smaller gain is noise, and a change leaves warm
KV behind."""

IDLE_SHARE = 0.05
"""An engine with slack in the plan has λ = 0, so no backlog would ever raise its price. Its backlog is priced as if λ
were this share of the highest λ; without a backlog the engine stays free."""

DYNAMO_TOKENS, DYNAMO_RATIO = 2048, 0.7
"""NVIDIA Dynamo 1.x, `isl_bounding`: local while fewer tokens than this are uncached and they are less than this share
of the prompt."""

UNCACHED_TOKENS = 256
"""vllm-router 0.1.17: local up to this many uncached tokens."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine to price: its kind, its backlog in seconds of work, and the tokens of this trajectory's KV that it
    holds."""

    kind: EngineKind
    backlog_s: float = 0.0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class PathPricing:
    """Prices applied to turns, in the plan's units. Where nothing is scarce (every price 0), the price of a turn is its
    duration. A path without a KV connection has an infinite price."""

    prices: RoutePrices
    model: TurnModel
    scarce: bool = field(init=False)
    """True if any price is positive."""
    floor: float = field(init=False)

    def __post_init__(self) -> None:
        prices = self.prices
        scarce = prices.in_flight or any(any(p.values()) for p in (prices.engines, prices.kv, prices.links))
        object.__setattr__(self, "scarce", bool(scarce))
        object.__setattr__(self, "floor", IDLE_SHARE * max(prices.engines.values(), default=0.0))

    def local(self, target: EngineLoad, tokens: int, output: float) -> float:
        """Cost of the whole turn on `target`."""
        prefill = self.model.prefill_s(target.kind, max(tokens - target.cached, 0), min(target.cached, tokens))
        decode = self.model.decode_s(target.kind, tokens, output)
        seconds = target.backlog_s + prefill + decode * self.model.batch(target.kind)
        return self._cost(self.second(target) * (prefill + decode), 0.0, target, tokens, seconds)

    def remote(self, prefill: EngineLoad, target: EngineLoad, tokens: int, output: float, *, returns: bool) -> float:
        """Cost of prefill on `prefill` and decode on `target`. `returns`: the decode engine returns its KV to the
        prefill engine, so only tokens that neither holds are computed. In both directions only missing KV is
        transferred."""
        back = max(target.cached - prefill.cached, 0) if returns else 0
        known = min(prefill.cached + back, tokens)
        compute = self.model.prefill_s(prefill.kind, max(tokens - known, 1), known)
        there = max(tokens - target.cached, 0)
        decode = self.model.decode_s(target.kind, tokens, output)
        seconds = prefill.backlog_s + compute + self.model.handoff_s(prefill.kind, target.kind, there)
        if back:
            seconds += self.model.handoff_s(target.kind, prefill.kind, back)
        seconds += target.backlog_s + decode * self.model.batch(target.kind)
        a, b = sorted((prefill.kind.pool, target.kind.pool))
        sent = self.prices.links.get((a, b), 0.0) * self.model.kv_gb(there + back)
        return self._cost(self.second(prefill) * compute + self.second(target) * decode, sent, target, tokens, seconds)

    def second(self, load: EngineLoad) -> float:
        """Price of an engine-second: λ ← λ·(1 + backlog/target), with the floor of `IDLE_SHARE` on the growth."""
        own = self.prices.engines.get(load.kind)
        if own is None:
            own = self._alike(load.kind)
        return own + max(own, self.floor) * load.backlog_s / self.prices.target_s

    def _alike(self, kind: EngineKind) -> float:
        """A role that the plan does not have (an engine was flipped) costs as much as the same devices in another role:
        the highest such price, lest every turn go there. Devices that the plan does not use at all are free."""
        return max((p for k, p in self.prices.engines.items() if (k.pool, k.tp) == (kind.pool, kind.tp)), default=0.0)

    def _cost(self, work: float, sent: float, target: EngineLoad, tokens: int, seconds: float) -> float:
        if not self.scarce or math.isinf(seconds):
            return seconds
        held = self.prices.kv.get(target.kind, 0.0) * tokens + self.prices.in_flight
        return work + sent + held * seconds


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """A turn at its decode engine, and the best prefill engine for it. `local` and `remote` are prices, None without
    prices; `was_remote` describes the trajectory's last turn (None: there was none)."""

    tokens: int
    uncached: int
    local: float | None = None
    remote: float | None = None
    was_remote: bool | None = None


PrefillRule = Callable[[PrefillChoice], bool]
"""True: prefill on the other engine."""


def _priced(offer: PrefillChoice) -> bool:
    """The cheaper side; a trajectory that had a turn changes sides only for a gain above `MARGIN`. Ties are local,
    which needs one engine less. Without prices: vllm-router's threshold."""
    if offer.local is None or offer.remote is None:
        return _vllm_router(offer)
    if offer.was_remote is None:
        return offer.remote < offer.local
    if offer.was_remote:
        return not offer.local < (1 - MARGIN) * offer.remote
    return offer.remote < (1 - MARGIN) * offer.local


def _vllm_router(offer: PrefillChoice) -> bool:
    return offer.uncached > UNCACHED_TOKENS


PREFILL_RULES: Mapping[str, PrefillRule] = MappingProxyType(
    {
        "priced": _priced,
        "dynamo": lambda offer: offer.uncached >= min(DYNAMO_TOKENS, DYNAMO_RATIO * offer.tokens),
        "vllm_router": _vllm_router,
        "local": lambda _: False,
        "remote": lambda _: True,
    }
)


_NOWHERE: Mapping[str, float] = {}
_NO_SEAT = EnginePlacement()


class EngineView(NamedTuple):
    """Routing's view of an engine: identity, placement, load, health, version. Independent of the request's content.

    `sessions`: trajectories assigned to the engine, or last prefilled there. `backlog_s`: seconds of queued work.
    `cached`: tokens of KV that it holds of the trajectory to route. `barred`: its hand-offs fail, so it prefills only
    for itself. `fill`: reserved share of its KV memory, 0 if unknown.
    """

    id: str
    running: int
    sessions: int
    healthy: bool
    version: int
    seat: EnginePlacement = _NO_SEAT
    backlog_s: float = 0.0
    cached: int = 0
    barred: bool = False
    fill: float = 0.0

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(self.seat.kind, self.backlog_s, self.cached)


@dataclass(frozen=True, slots=True)
class TurnView:
    """The turn to route: `tokens` of context in total, `output` expected. `was_remote`: the trajectory's last turn was
    prefilled remotely. `returns`: its sticky engine can return its KV to a prefill engine. `no_handoff`: it must
    be prefilled on the sticky engine."""

    tokens: int
    output: float = 1.0
    domain: str = ""
    was_remote: bool | None = None
    returns: bool = False
    no_handoff: bool = False


class TurnPath(NamedTuple):
    """The engines of a turn. `prefill` None: the whole turn runs on `decode`. `preferred` is False where affinity had
    to fall back."""

    decode: str
    prefill: str | None
    why: str
    preferred: bool = True


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """The routing policy; replaced as a whole when prices or flows change."""

    routes: Routes = field(default_factory=Routes)
    affinity: HardwareAffinity = field(default_factory=HardwareAffinity)
    rule: PrefillRule = PREFILL_RULES["priced"]
    tariff: PathPricing | None = field(init=False, compare=False)
    """None without prices."""

    def __post_init__(self) -> None:
        routes = self.routes
        priced = None if routes.prices is None or routes.model is None else PathPricing(routes.prices, routes.model)
        object.__setattr__(self, "tariff", priced)

    def plain(self, kinds: int) -> bool:
        """True if load and version alone decide among `kinds` kinds of engine that prefill and decode: engines of one
        kind have one price."""
        return not self.affinity and (kinds <= 1 or (self.routes.prices is None and not self.routes.shares))


def choose_engine(engines: Sequence[EngineView], *, version: int) -> str | None:
    """The id of the engine to use, or None if none is eligible (the caller waits for one)."""
    eligible = [e for e in engines if e.healthy and e.version == version]
    return min(eligible, key=_least_loaded).id if eligible else None


def route(
    engines: Sequence[EngineView],
    turn: TurnView,
    router: RoutingPolicy,
    *,
    sticky: str | None,
    version: int,
    assignments: Mapping[str, float] = _NOWHERE,
) -> TurnPath | None:
    """The turn's path; None if no engine is eligible. `assignments` counts the sticky engines assigned in the domain
    so far, by pool.

    A prefill engine serves whole turns only while there is no other engine at all.
    """
    eligible = [e for e in engines if e.healthy and e.version == version]
    serving = [e for e in eligible if e.seat.role is not EngineRole.PREFILL]
    remote = bool(serving) and not turn.no_handoff
    prefills = [e for e in eligible if remote and not e.barred and e.seat.role is EngineRole.PREFILL]
    serving = serving or eligible
    if not serving:
        return None
    tariff = router.tariff
    decode, preferred = next((e for e in serving if e.id == sticky), None), True
    if decode is None:
        decode, preferred = _sticky_engine(serving, prefills, turn, router, tariff, assignments)
    if not prefills:
        return TurnPath(decode.id, None, "no prefill engine", preferred)
    prefill, _ = _prefill_choice(prefills, decode, turn, router.rule, tariff)
    if prefill is None:
        return TurnPath(decode.id, None, "local", preferred)
    return TurnPath(decode.id, prefill.id, "remote", preferred)


def _sticky_engine(
    serving: Sequence[EngineView],
    prefills: Sequence[EngineView],
    turn: TurnView,
    router: RoutingPolicy,
    tariff: PathPricing | None,
    assignments: Mapping[str, float],
) -> tuple[EngineView, bool]:
    """The sticky engine for a trajectory that has none, and whether it has the domain's preferred hardware."""
    rank = 0
    if router.affinity:
        rank = router.affinity.best(turn.domain, [e.seat for e in serving])
        serving = [e for e in serving if router.affinity.rank(turn.domain, e.seat) == rank]
    # The best of each kind: other engines of the kind cost the same or more.
    best: dict[object, EngineView] = {}
    for engine in serving:
        kind = engine.seat.kind if tariff is not None else engine.seat.pool
        if kind not in best or _least_behind(engine) < _least_behind(best[kind]):
            best[kind] = engine
    if tariff is None:
        priced = [(0.0, engine) for engine in best.values()]  # all engines tie
    else:
        priced = [(_prefill_choice(prefills, e, turn, router.rule, tariff)[1], e) for e in best.values()]
    limit = min(price for price, _ in priced) * (1 + MARGIN)
    tied = [(price, engine) for price, engine in priced if price <= limit]
    shares = router.routes.shares.get(turn.domain)
    if not shares:
        if tariff is None:
            return min((e for _, e in tied), key=_least_loaded), rank == 0
        return min(tied, key=lambda x: (x[1].fill, x[0], _least_behind(x[1])))[1], rank == 0
    # Relative to these pools: the share of a pool that is down or expensive now goes to the others by their shares.
    pools = {engine.seat.pool for _, engine in tied}
    part = sum(shares.get(pool, 0.0) for pool in pools)
    given = sum(assignments.get(pool, 0) for pool in pools) + 1

    def behind(engine: EngineView) -> float:
        share = shares.get(engine.seat.pool, 0.0) / part if part else 1 / len(pools)
        return share * given - assignments.get(engine.seat.pool, 0)

    return min(tied, key=lambda x: (-behind(x[1]), x[1].fill, x[0], _least_behind(x[1])))[1], rank == 0


def _prefill_choice(
    prefills: Sequence[EngineView], decode: EngineView, turn: TurnView, rule: PrefillRule, tariff: PathPricing | None
) -> tuple[EngineView | None, float]:
    """The engine that prefills the turn for `decode`, None if `decode` does; and the price, 0 without prices."""
    local = None if tariff is None else tariff.local(decode.load, turn.tokens, turn.output)
    if prefills:
        prefill, remote = _prefill(prefills, decode, turn, tariff)
        uncached = max(turn.tokens - decode.cached, 0)
        if rule(PrefillChoice(turn.tokens, uncached, local, remote, turn.was_remote)) and remote != math.inf:
            return prefill, remote or 0.0
    return None, local or 0.0


def _prefill(
    prefills: Sequence[EngineView], decode: EngineView, turn: TurnView, tariff: PathPricing | None
) -> tuple[EngineView, float | None]:
    """The prefill engine, and the price of the path. By prefix, then load, then id; with prices
    the cheapest among, for every kind, the engine with the longest prefix and the one with the least backlog."""
    if tariff is None:
        return min(prefills, key=_prefix_first), None
    costs = []
    for engine in _candidates(prefills):
        price = tariff.remote(engine.load, decode.load, turn.tokens, turn.output, returns=turn.returns)
        costs.append((price, _prefix_first(engine), engine))
    price, _, engine = min(costs, key=lambda x: x[:2])
    return engine, price


def _candidates(prefills: Iterable[EngineView]) -> list[EngineView]:
    longest: dict[object, EngineView] = {}
    freest: dict[object, EngineView] = {}
    for engine in prefills:
        kind = engine.seat.kind
        if engine.cached and (kind not in longest or _prefix_first(engine) < _prefix_first(longest[kind])):
            longest[kind] = engine
        if kind not in freest or _least_behind(engine) < _least_behind(freest[kind]):
            freest[kind] = engine
    return [*longest.values(), *(e for e in freest.values() if longest.get(e.seat.kind) is not e)]


def _least_loaded(engine: EngineView) -> tuple[float, int, int, str]:
    return engine.fill, engine.running, engine.sessions, engine.id


def _least_behind(engine: EngineView) -> tuple[float, float, int, int, str]:
    return engine.backlog_s, engine.fill, engine.running, engine.sessions, engine.id


def _prefix_first(engine: EngineView) -> tuple[int, float, int, int, str]:
    return -engine.cached, engine.backlog_s, engine.running, engine.sessions, engine.id
