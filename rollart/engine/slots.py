"""The slot table: tokens, progress and limits of the sequence in each slot as arrays; sessions and their eviction.

A slot is free, idle (the prefix KV of a session between turns) or active (a request). A session keeps its slot until it
is released, the weights are replaced, or a request needs a slot: then the least recently used session is evicted.

The states of linear attention are those of all tokens of a slot, and of no shorter prefix (`whole_prefixes`).
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollart.architecture import ExpertLayers

STOPS = 8
"""Initial number of stop ids per slot; the array grows for a request with more."""


class SlotState(enum.IntEnum):
    FREE = 0
    IDLE = 1
    ACTIVE = 2


@dataclass(frozen=True, slots=True)
class _Prefix:
    slot: int
    salt: str | None


class SlotTable:
    """Arrays by slot. Invariant: KV of `tokens[s, :kv[s]]` is in the cache, `kv[s] < known[s]` while active.

    `known` counts all tokens (prompt and sampled), `prompt` the prompt's. `limit` is the value of `known` at which the
    request ends. `loads` is the runner's `loads` when the latest token was sampled (-1 before the first). `adapter` is
    the number of the sequence's adapter.
    Not thread safe: owned by the runner.
    """

    def __init__(
        self, slots: int, context: int, experts: ExpertLayers | None = None, *, whole_prefixes: bool = False
    ) -> None:
        """`whole_prefixes`: a session can be continued only after all of its tokens, since its state of linear
        attention cannot be cut as its KV can."""
        self.slots, self.context = slots, context
        self._whole_prefixes = whole_prefixes
        self.experts = None if experts is None else ExpertTable(slots, context, experts)
        """The experts of the tokens in the cache; None for a model without."""
        self.tokens = np.zeros((slots, context + 1), np.int64)
        self.logprobs = np.zeros((slots, context + 1), np.float32)
        self.state = np.zeros(slots, np.int8)
        self.kv = np.zeros(slots, np.int64)
        self.known = np.zeros(slots, np.int64)
        self.prompt = np.zeros(slots, np.int64)
        self.limit = np.zeros(slots, np.int64)
        self.arrival = np.zeros(slots, np.int64)
        self.adapter = np.zeros(slots, np.int64)
        self.loads = np.full(slots, -1, np.int64)
        self.temperature = np.zeros(slots, np.float32)
        self.top_p = np.ones(slots, np.float32)
        self.seed = np.zeros(slots, np.uint64)
        self.stops = np.full((slots, STOPS), -1, np.int64)
        self.free = list(range(slots - 1, -1, -1))
        """Slots without a request or a prefix."""
        self._idle: OrderedDict[str, _Prefix] = OrderedDict()

    def active(self) -> npt.NDArray[np.int64]:
        """Slots with a request, ascending."""
        return np.flatnonzero(self.state == SlotState.ACTIVE)

    def used_tokens(self) -> int:
        """Positions that hold valid KV, idle sessions included."""
        return int(self.kv.sum())

    def idle_sessions(self) -> int:
        return len(self._idle)

    def acquire(self, session: str, salt: str | None, prompt: npt.NDArray[np.int64]) -> tuple[int, int] | None:
        """A slot for a prompt and the number of its tokens cached there; None if every slot is active.

        The cached prefix is compared token by token, and its salt must be equal. At least one token is left to
        compute, since KV alone gives no logits.
        """
        held = self._idle.get(session)
        if held is not None:
            cached = self.cached(session, salt, prompt)
            del self._idle[session]
            return self._claim(held.slot, prompt, cached)
        if self.free:
            return self._claim(self.free.pop(), prompt, 0)
        if self._idle:
            _, evicted = self._idle.popitem(last=False)
            return self._claim(evicted.slot, prompt, 0)
        return None

    def cached(self, session: str, salt: str | None, prompt: npt.NDArray[np.int64]) -> int:
        """Number of prompt tokens that an idle session holds, never including the last. Counts as use: the session
        becomes the last to be evicted."""
        held = self._idle.get(session)
        if held is None or held.salt != salt:
            return 0
        self._idle.move_to_end(session)
        common = self._common(held.slot, prompt[: len(prompt) - 1])
        return 0 if self._whole_prefixes and common < self.kv[held.slot] else common

    def holder(self, session: str, tokens: npt.NDArray[np.int64]) -> int | None:
        """The slot of an idle session that holds the KV of all these tokens; None otherwise."""
        held = self._idle.get(session)
        return held.slot if held is not None and self.holds(held.slot, tokens) else None

    def holds(self, slot: int, tokens: npt.NDArray[np.int64]) -> bool:
        """True if a slot's valid KV starts with all these tokens."""
        return self._common(slot, tokens) == len(tokens)

    def retire(self, slot: int, session: str, salt: str | None) -> None:
        """End a request: its slot becomes the session's idle prefix, or free if there is no prefix to keep."""
        if not session or self.kv[slot] == 0 or session in self._idle:
            self.discard(slot)
            return
        self.state[slot] = SlotState.IDLE
        self._idle[session] = _Prefix(slot, salt)

    def discard(self, slot: int) -> None:
        self.state[slot] = SlotState.FREE
        self.kv[slot] = 0
        self.free.append(slot)

    def release(self, session: str) -> bool:
        """Free an idle session's slot. False if it holds none."""
        held = self._idle.pop(session, None)
        if held is not None:
            self.discard(held.slot)
        return held is not None

    def drop_idle(self) -> None:
        """Free the slots of all idle sessions."""
        for held in self._idle.values():
            self.discard(held.slot)
        self._idle.clear()

    def limits(
        self,
        slot: int,
        *,
        limit: int,
        temperature: float,
        top_p: float,
        seed: int,
        stops: tuple[int, ...],
        arrival: int,
    ) -> None:
        """Set the sampling parameters, the end conditions and the arrival number of the request in a slot."""
        self.limit[slot], self.temperature[slot], self.top_p[slot] = limit, temperature, top_p
        self.arrival[slot] = arrival
        self.seed[slot] = np.uint64(seed & 0xFFFFFFFFFFFFFFFF)
        if len(stops) > self.stops.shape[1]:
            grown = np.full((self.slots, 2 * len(stops)), -1, np.int64)
            grown[:, : self.stops.shape[1]] = self.stops
            self.stops = grown
        self.stops[slot] = -1
        self.stops[slot, : len(stops)] = stops

    def _common(self, slot: int, tokens: npt.NDArray[np.int64]) -> int:
        """Length of the common prefix of these tokens and a slot's valid KV."""
        upto = min(int(self.kv[slot]), len(tokens))
        differs = np.flatnonzero(self.tokens[slot, :upto] != tokens[:upto])
        return int(differs[0]) if len(differs) else upto

    def _claim(self, slot: int, prompt: npt.NDArray[np.int64], cached: int) -> tuple[int, int]:
        n = len(prompt)
        self.tokens[slot, :n] = prompt
        self.state[slot] = SlotState.ACTIVE
        self.kv[slot], self.known[slot], self.prompt[slot] = cached, n, n
        if self.experts is not None:
            self.experts.kept[slot] = cached
        self.loads[slot] = -1
        return slot, cached


class ExpertTable:
    """The experts that each token in the cache ran through, kept for the trainer, which replays them (Ma et al.,
    "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", arXiv:2510.11370).

    `ids` `[slots, context, token_bytes]`, uint8: little-endian numbers `[layers, active]` of a token. A request's token
    keeps the choice of its first computation: KV that is recomputed after a weight update leaves it as it was. `kept`
    `[slots]` is the number of leading tokens that keep theirs."""

    def __init__(self, slots: int, context: int, layers: ExpertLayers) -> None:
        self._shape = len(layers.layers), layers.active
        self._kind = np.dtype("u1" if layers.id_bytes == 1 else "<u2")
        self.ids = np.zeros((slots, context, layers.token_bytes), np.uint8)
        self.kept = np.zeros(slots, np.int64)

    def record(
        self,
        slots: npt.NDArray[np.int64],
        start: npt.NDArray[np.int64],
        end: npt.NDArray[np.int64],
        chosen: Sequence[npt.NDArray[np.int64]],
    ) -> None:
        """Record the choices of the tokens [start, end) of each slot, `[T, active]` by layer; `[R, active]` are those
        of the rows' last tokens, and leave the others' unknown."""
        lengths = end - start
        ends = np.cumsum(lengths)
        slot, total = np.repeat(slots, lengths), int(ends[-1])
        position = np.arange(total) + np.repeat(start - (ends - lengths), lengths)
        numbers = np.full((total, *self._shape), np.iinfo(self._kind).max, self._kind)
        for layer, found in enumerate(chosen):
            numbers[slice(None) if len(found) == total else ends - 1, layer] = found
        new = position >= self.kept[slot]
        self.ids[slot[new], position[new]] = numbers.reshape(total, -1).view(np.uint8)[new]
        self.kept[slots] = np.maximum(self.kept[slots], end)

    def put(self, slot: int, begin: int, end: int, ids: npt.NDArray[np.uint8] | None) -> None:
        """Set the choices of the tokens [begin, end), which came with their KV; None: they are unknown."""
        self.ids[slot, begin:end] = 255 if ids is None else ids
        self.kept[slot] = end

    def read(self, slot: int, begin: int, end: int) -> tuple[bytes, ...]:
        """The choices of each token of [begin, end)."""
        return tuple(row.tobytes() for row in self.ids[slot, begin : min(end, int(self.kept[slot]))])
