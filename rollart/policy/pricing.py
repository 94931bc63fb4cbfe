"""Prices of turn paths, and the rules that choose between local and remote prefill.

The price of a path is Σ λ·(1 + backlog/target)·seconds over the engines it uses, plus the resources it holds (KV, a
slot in flight) and its link transfers: λ are the plan's dual prices; the backlog is measured by the gateway (drift plus
penalty).
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
class PathCost:
    """`price` in the plan's units; `seconds` is the trajectory's latency for the turn."""

    price: float
    seconds: float


@dataclass(frozen=True, slots=True)
class PathPricing:
    """Prices applied to turns. Where nothing is scarce (every price 0), the price of a turn is its duration. A path
    without a KV connection has an infinite price."""

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

    def local(self, target: EngineLoad, tokens: int, output: float) -> PathCost:
        """Cost of the whole turn on `target`."""
        prefill = self.model.prefill_s(target.kind, max(tokens - target.cached, 0), min(target.cached, tokens))
        decode = self.model.decode_s(target.kind, tokens, output)
        seconds = target.backlog_s + prefill + decode * self.model.batch(target.kind)
        return self._cost(self.second(target) * (prefill + decode), 0.0, target, tokens, seconds)

    def remote(self, prefill: EngineLoad, target: EngineLoad, tokens: int, output: float, *, returns: bool) -> PathCost:
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

    def _cost(self, work: float, sent: float, target: EngineLoad, tokens: int, seconds: float) -> PathCost:
        if not self.scarce or math.isinf(seconds):
            return PathCost(seconds, seconds)
        held = self.prices.kv.get(target.kind, 0.0) * tokens + self.prices.in_flight
        return PathCost(work + sent + held * seconds, seconds)


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


def prefill_rule(name: str) -> PrefillRule:
    """The rule of that name. ValueError for an unknown name."""
    try:
        return PREFILL_RULES[name]
    except KeyError:
        raise ValueError(
            f"routing rule '{name}' is unknown (rule: one of {', '.join(sorted(PREFILL_RULES))})"
        ) from None


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
