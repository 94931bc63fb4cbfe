"""A turn model whose numbers can be checked in the head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from rollart.fleet import EngineKind

__all__ = ["LinearModel"]


@dataclass(frozen=True, slots=True)
class LinearModel:
    """Seconds per token, by pool where it is named: prefill of new tokens, an engine's share of a generated one, and a
    token's KV on the way. A gigabyte is a million tokens."""

    prefill: float = 0.001
    decode: float = 0.01
    link: float = 0.0001
    width: float = 4.0
    prefill_of: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    decode_of: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def prefill_s(self, kind: EngineKind, new: float, cached: float) -> float:
        return new * self.prefill_of.get(kind.pool, self.prefill)

    def decode_s(self, kind: EngineKind, context: float, output: float) -> float:
        return output * self.decode_of.get(kind.pool, self.decode)

    def batch(self, kind: EngineKind) -> float:
        return self.width

    def handoff_s(self, source: EngineKind, target: EngineKind, tokens: float) -> float:
        return tokens * self.link

    def kv_gb(self, tokens: float) -> float:
        return tokens * 1e-6
