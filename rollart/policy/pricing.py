"""What a path costs, and the rules that decide between prefilling at home and on another engine.

The price of a path is Σ λ·(1 + backlog/target)·seconds over the engines it uses, plus what it holds (KV, a place in
flight) and sends (links): λ are the plan's dual prices, the backlog is what the gateway measures (drift plus penalty).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from rollart.fleet import EngineKind, RoutePrices, TurnModel

__all__ = [
    "DYNAMO_RATIO",
    "DYNAMO_TOKENS",
    "IDLE_SHARE",
    "MARGIN",
    "PREFILL_RULES",
    "UNCACHED_TOKENS",
    "PathCost",
    "EngineLoad",
    "PrefillChoice",
    "PrefillRule",
    "PathPricing",
    "prefill_rule",
]

MARGIN = 0.10
"""Gain at which a trajectory changes between local and remote prefill, and the difference up to which two homes cost
the same. Calibrated predictions of a turn are off by 5-15 %: less is noise, and a change leaves warm KV behind."""

IDLE_SHARE = 0.05
"""An engine that the plan leaves slack has λ = 0, and no backlog would ever make it dearer. Its backlog is priced as if
λ were this share of the highest one; without a backlog it stays free (as in `placement.price`)."""

DYNAMO_TOKENS, DYNAMO_RATIO = 2048, 0.7
"""NVIDIA Dynamo 1.x, `isl_bounding`: local while fewer tokens than this are uncached and they are less than this share
of the prompt."""

UNCACHED_TOKENS = 256
"""vllm-router 0.1.17: local up to this many uncached tokens."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine to price: its kind, seconds of work waiting there, tokens of this trajectory's KV that it holds."""

    kind: EngineKind
    backlog_s: float = 0.0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class PathCost:
    """`price` in the plan's money; `seconds` that the trajectory waits for its turn."""

    price: float
    seconds: float


@dataclass(frozen=True, slots=True)
class PathPricing:
    """Prices applied to turns. Where nothing is scarce (every price 0) a turn costs its seconds. A path with no end
    (KV that cannot get there) has no price that anybody pays: infinity."""

    prices: RoutePrices
    model: TurnModel
    scarce: bool = field(init=False)
    """Whether anything has a price at all."""
    floor: float = field(init=False)

    def __post_init__(self) -> None:
        prices = self.prices
        scarce = prices.in_flight or any(any(p.values()) for p in (prices.engines, prices.kv, prices.links))
        object.__setattr__(self, "scarce", bool(scarce))
        object.__setattr__(self, "floor", IDLE_SHARE * max(prices.engines.values(), default=0.0))

    def local(self, home: EngineLoad, tokens: int, output: float) -> PathCost:
        """All of the turn on `home`."""
        prefill = self.model.prefill_s(home.kind, max(tokens - home.cached, 0), min(home.cached, tokens))
        decode = self.model.decode_s(home.kind, tokens, output)
        seconds = home.backlog_s + prefill + decode * self.model.batch(home.kind)
        return self._cost(self.second(home) * (prefill + decode), 0.0, home, tokens, seconds)

    def remote(self, prefill: EngineLoad, home: EngineLoad, tokens: int, output: float, *, returns: bool) -> PathCost:
        """Prefill on `prefill`, decode on `home`. `returns`: `home` gives its KV back, so that only what neither holds
        is computed; only what the receiver lacks is sent, either way."""
        back = max(home.cached - prefill.cached, 0) if returns else 0
        known = min(prefill.cached + back, tokens)
        compute = self.model.prefill_s(prefill.kind, max(tokens - known, 1), known)
        there = max(tokens - home.cached, 0)
        decode = self.model.decode_s(home.kind, tokens, output)
        seconds = prefill.backlog_s + compute + self.model.handoff_s(prefill.kind, home.kind, there)
        if back:
            seconds += self.model.handoff_s(home.kind, prefill.kind, back)
        seconds += home.backlog_s + decode * self.model.batch(home.kind)
        a, b = sorted((prefill.kind.pool, home.kind.pool))
        sent = self.prices.links.get((a, b), 0.0) * self.model.kv_gb(there + back)
        return self._cost(self.second(prefill) * compute + self.second(home) * decode, sent, home, tokens, seconds)

    def second(self, load: EngineLoad) -> float:
        """Price of an engine-second there: λ ← λ·(1 + backlog/target), with the floor of `IDLE_SHARE` on the growth."""
        own = self.prices.engines.get(load.kind)
        if own is None:
            own = self._alike(load.kind)
        return own + max(own, self.floor) * load.backlog_s / self.prices.target_s

    def _alike(self, kind: EngineKind) -> float:
        """A role that the plan does not have (somebody flipped an engine) costs what those devices cost in another: the
        dearest, lest every turn go there. Devices that the plan does not use at all are free."""
        return max((p for k, p in self.prices.engines.items() if (k.pool, k.tp) == (kind.pool, kind.tp)), default=0.0)

    def _cost(self, work: float, sent: float, home: EngineLoad, tokens: int, seconds: float) -> PathCost:
        if not self.scarce or math.isinf(seconds):
            return PathCost(seconds, seconds)
        held = self.prices.kv.get(home.kind, 0.0) * tokens + self.prices.in_flight
        return PathCost(work + sent + held * seconds, seconds)


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """A turn at its decode engine, and the best prefill engine for it. `local` and `remote` are prices, None where
    nobody set any; `was_remote` is how its last turn went (None: there was none)."""

    tokens: int
    uncached: int
    local: float | None = None
    remote: float | None = None
    was_remote: bool | None = None


PrefillRule = Callable[[PrefillChoice], bool]
"""True: prefill on the other engine."""


def prefill_rule(name: str) -> PrefillRule:
    """The rule of that name. ValueError for a name that is none."""
    try:
        return PREFILL_RULES[name]
    except KeyError:
        raise ValueError(
            f"routing rule '{name}' is unknown (rule: one of {', '.join(sorted(PREFILL_RULES))})"
        ) from None


def _priced(offer: PrefillChoice) -> bool:
    """The cheaper one; a trajectory that had a turn changes sides only for a gain above `MARGIN`. Equal prices: local,
    which needs one engine less. Without prices: vllm-router's threshold."""
    if offer.local is None or offer.remote is None:
        return _vllm_router(offer)
    if offer.was_remote is None:
        return offer.remote < offer.local
    if offer.was_remote:
        return not offer.local < (1 - MARGIN) * offer.remote
    return offer.remote < (1 - MARGIN) * offer.local


def _dynamo(offer: PrefillChoice) -> bool:
    return not (offer.uncached < DYNAMO_TOKENS and offer.uncached < DYNAMO_RATIO * offer.tokens)


def _vllm_router(offer: PrefillChoice) -> bool:
    return offer.uncached > UNCACHED_TOKENS


def _local(_: PrefillChoice) -> bool:
    return False


def _remote(_: PrefillChoice) -> bool:
    return True


PREFILL_RULES: Mapping[str, PrefillRule] = MappingProxyType(
    {"priced": _priced, "dynamo": _dynamo, "vllm_router": _vllm_router, "local": _local, "remote": _remote}
)
