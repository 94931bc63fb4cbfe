"""Selection of the decode engine and the prefill engine of a turn.

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
rule (`pricing.PREFILL_RULES`) decides between remote prefill and prefill on the sticky engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rollart.fleet import EnginePlacement, EngineRole, Routes
from rollart.policy.affinity import HardwareAffinity
from rollart.policy.pricing import MARGIN, PREFILL_RULES, EngineLoad, PathPricing, PrefillChoice, PrefillRule

__all__ = ["EngineView", "TurnPath", "RoutingPolicy", "TurnView", "choose_engine", "route"]

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
    prefilled remotely. `returns`: its sticky engine can return its KV to a prefill engine. `at_home`: it must be
    prefilled on the sticky engine."""

    tokens: int
    output: float = 1.0
    domain: str = ""
    was_remote: bool | None = None
    returns: bool = False
    at_home: bool = False


class TurnPath(NamedTuple):
    """The engines of a turn. `prefill` None: the whole turn runs on `decode`. `preferred` is False where affinity had
    to fall back; `predicted_s` is the duration that the pricing model predicts."""

    decode: str
    prefill: str | None
    why: str
    preferred: bool = True
    predicted_s: float | None = None


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


def choose_engine(engines: Sequence[EngineView], *, sticky: str | None, version: int) -> str | None:
    """The id of the engine to use, or None if none is eligible (the caller waits for one)."""
    eligible = [e for e in engines if e.healthy and e.version == version]
    if sticky is not None and any(e.id == sticky for e in eligible):
        return sticky
    if not eligible:
        return None
    return min(eligible, key=_least_loaded).id


def route(
    engines: Sequence[EngineView],
    turn: TurnView,
    router: RoutingPolicy,
    *,
    sticky: str | None,
    version: int,
    homes: Mapping[str, float] = _NOWHERE,
) -> TurnPath | None:
    """The turn's path; None if no engine is eligible. `homes` counts the domain's sticky-engine assignments so far, by
    pool.

    A prefill engine serves whole turns only while there is no other engine at all.
    """
    eligible = [e for e in engines if e.healthy and e.version == version]
    serving = [e for e in eligible if e.seat.role is not EngineRole.PREFILL]
    remote = bool(serving) and not turn.at_home
    prefills = [e for e in eligible if remote and not e.barred and e.seat.role is EngineRole.PREFILL]
    serving = serving or eligible
    if not serving:
        return None
    tariff = router.tariff
    decode, preferred = next((e for e in serving if e.id == sticky), None), True
    if decode is None:
        decode, preferred = _sticky_engine(serving, prefills, turn, router, tariff, homes)
    local = None if tariff is None else tariff.local(decode.load, turn.tokens, turn.output)
    if not prefills:
        return TurnPath(decode.id, None, "no prefill engine", preferred, None if local is None else local.seconds)
    prefill, price, seconds = _prefill(prefills, decode, turn, tariff)
    offer = PrefillChoice(
        tokens=turn.tokens,
        uncached=max(turn.tokens - decode.cached, 0),
        local=None if local is None else local.price,
        remote=price,
        was_remote=turn.was_remote,
    )
    if router.rule(offer) and offer.remote != math.inf:
        return TurnPath(decode.id, prefill.id, "remote", preferred, seconds)
    return TurnPath(decode.id, None, "local", preferred, None if local is None else local.seconds)


def _sticky_engine(
    serving: Sequence[EngineView],
    prefills: Sequence[EngineView],
    turn: TurnView,
    router: RoutingPolicy,
    tariff: PathPricing | None,
    homes: Mapping[str, float],
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
    priced = [(_cheapest(engine, prefills, turn, router.rule, tariff), engine) for engine in best.values()]
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
    given = sum(homes.get(pool, 0) for pool in pools) + 1

    def behind(engine: EngineView) -> float:
        share = shares.get(engine.seat.pool, 0.0) / part if part else 1 / len(pools)
        return share * given - homes.get(engine.seat.pool, 0)

    return min(tied, key=lambda x: (-behind(x[1]), x[1].fill, x[0], _least_behind(x[1])))[1], rank == 0


def _cheapest(
    decode: EngineView, prefills: Sequence[EngineView], turn: TurnView, rule: PrefillRule, tariff: PathPricing | None
) -> float:
    """The price of the turn by way of `decode`; 0 without prices: all engines tie."""
    if tariff is None:
        return 0.0
    local = tariff.local(decode.load, turn.tokens, turn.output).price
    if not prefills:
        return local
    _, remote, _ = _prefill(prefills, decode, turn, tariff)
    uncached = max(turn.tokens - decode.cached, 0)
    assert remote is not None, "a tariff prices every path"
    goes = rule(PrefillChoice(turn.tokens, uncached, local, remote, turn.was_remote)) and remote != math.inf
    return remote if goes else local


def _prefill(
    prefills: Sequence[EngineView], decode: EngineView, turn: TurnView, tariff: PathPricing | None
) -> tuple[EngineView, float | None, float | None]:
    """The prefill engine, and the price and predicted seconds of the path. By prefix, then load, then id; with prices
    the cheapest among, for every kind, the engine with the longest prefix and the one with the least backlog."""
    if tariff is None:
        return min(prefills, key=_prefix_first), None, None
    costs = []
    for engine in _candidates(prefills):
        cost = tariff.remote(engine.load, decode.load, turn.tokens, turn.output, returns=turn.returns)
        costs.append((cost.price, _prefix_first(engine), cost.seconds, engine))
    price, _, seconds, engine = min(costs, key=lambda x: x[:2])
    return engine, price, seconds


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
