"""The static key-value cache: one row of `context` positions per slot, and copies of it that travel.

Keys and values are `[layers, slots, kv_heads, context, head_dim]`: a run of slots, cut at the longest context in
it, is a view that batched attention reads without a copy. Gathering scattered slots costs about a quarter of the
attention itself. Layers with linear attention have no keys and values, but one state per slot.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from rollart.architecture import Architecture


@dataclass(frozen=True, slots=True)
class KvBlock:
    """The KV of tokens [start, len(token_ids)) of one sequence, off the device.

    `keys` and `values`: `[layers, kv_heads, len(token_ids) - start, head_dim]`, CPU. `token_ids` holds the whole
    sequence from its first token, since KV depends on all of it. `logits`: `[vocab]` fp32 of the last token, if known;
    with them the next token can be sampled without a forward pass. `experts`: of each token whose KV is here, as
    `slots.ExpertTable` holds them, `[tokens, bytes]` uint8; None for a model without. `states`: those of linear
    attention after the last token, `[linear layers, state size]` fp32; None for a model without. Valid only under
    weight version `version` and for requests of the same `adapter`.
    """

    token_ids: tuple[int, ...]
    version: int
    keys: Tensor
    values: Tensor
    start: int = 0
    logits: Tensor | None = None
    experts: Tensor | None = None
    states: Tensor | None = None
    adapter: str | None = None

    @property
    def parts(self) -> list[Tensor]:
        """The tensors that the block has, in the order in which they travel."""
        return [t for t in (self.keys, self.values, self.logits, self.states, self.experts) if t is not None]

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.parts)

    def cut(self, start: int) -> KvBlock:
        """The block from token `start` on, which it holds."""
        skip = start - self.start
        keys, values = self.keys[:, :, skip:], self.values[:, :, skip:]
        experts = None if self.experts is None else self.experts[skip:]
        return dataclasses.replace(self, keys=keys, values=values, experts=experts, start=start)


@dataclass(frozen=True, slots=True)
class LinearStates:
    """The states of one layer with linear attention, fp32, by slot: the last inputs of its convolution
    `[slots, kernel - 1, channels]`, oldest first, and its memory `[slots, value_heads, key_dim, value_dim]`."""

    convolved: Tensor
    memory: Tensor

    def read(self, slots: slice | Tensor) -> tuple[Tensor, Tensor]:
        """The states of some slots: views for a run of slots, copies otherwise."""
        if isinstance(slots, slice):
            return self.convolved[slots], self.memory[slots]
        return self.convolved.index_select(0, slots), self.memory.index_select(0, slots)

    def write(self, slots: slice | Tensor, convolved: Tensor, memory: Tensor) -> None:
        for states, new in ((self.convolved, convolved), (self.memory, memory)):
            if isinstance(slots, slice):
                states[slots].copy_(new)
            else:
                states.index_copy_(0, slots, new.to(states.dtype))


class KvCache:
    """Owns the cache tensors. Not thread safe: only the runner's thread touches it."""

    def __init__(
        self, architecture: Architecture, *, slots: int, context: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """`slots` counts all slots, also a padding slot that never holds a sequence."""
        a = architecture
        attending = [layer for layer, one in enumerate(a.attention) if one is not None]
        shape = (len(attending), slots, a.kv_heads, context, a.head_dim)
        self.slots, self.context, self.kv_heads = slots, context, a.kv_heads
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.layers = dict(zip(attending, zip(self.keys, self.values, strict=True), strict=True))
        """Keys and values by layer of the model, `[slots, kv_heads, context, head_dim]` each."""
        self._flat = {
            layer: (keys.view(-1, a.head_dim), values.view(-1, a.head_dim))
            for layer, (keys, values) in self.layers.items()
        }
        self.states: Tensor | None = None
        """States of linear attention, `[linear layers, slots, state size]` fp32; None for a model without."""
        self.linear: dict[int, LinearStates] = {}
        """By layer of the model, the parts of `states`."""
        if (linear := a.linear) is not None:
            others = [layer for layer, one in enumerate(a.attention) if one is None]
            self.states = torch.zeros(len(others), slots, linear.state_size, device=device)
            matrix = linear.value_heads, linear.key_dim, linear.value_dim
            for layer, states in zip(others, self.states, strict=True):
                convolved, memory = states[:, : linear.convolved], states[:, linear.convolved :]
                self.linear[layer] = LinearStates(
                    convolved.view(slots, linear.kernel - 1, linear.channels), memory.view(slots, *matrix)
                )

    def write(self, layer: int, index: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store `[tokens, kv_heads, head_dim]` at flat rows `index` `[tokens * kv_heads]` (`PackedBatch.write`)."""
        flat_keys, flat_values = self._flat[layer]
        flat_keys.index_copy_(0, index, keys.reshape(index.shape[0], -1))
        flat_values.index_copy_(0, index, values.reshape(index.shape[0], -1))

    def read(self, layer: int, slots: slice | Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[rows, kv_heads, length, head_dim]`: views for a run of slots, copies otherwise."""
        keys, values = self.layers[layer]
        if isinstance(slots, slice):
            return keys[slots, :, :length], values[slots, :, :length]
        return keys[:, :, :length].index_select(0, slots), values[:, :, :length].index_select(0, slots)

    def export(self, slot: int, token_ids: tuple[int, ...], version: int, *, start: int = 0) -> KvBlock:
        """A copy of a slot's positions [start, len(token_ids)) on the CPU, without states."""
        n = len(token_ids)
        return KvBlock(
            token_ids=token_ids,
            version=version,
            keys=self.keys[:, slot, :, start:n].to("cpu", copy=True).contiguous(),
            values=self.values[:, slot, :, start:n].to("cpu", copy=True).contiguous(),
            start=start,
        )

    def export_states(self, slot: int) -> Tensor | None:
        """A copy of a slot's states on the CPU; None for a model without."""
        return None if self.states is None else self.states[:, slot].to("cpu", copy=True).contiguous()

    def load(self, slot: int, block: KvBlock, begin: int, end: int) -> None:
        """Put the positions [begin, end) of a block's sequence into a slot, and its states, if any."""
        part = slice(begin - block.start, end - block.start)
        self.keys[:, slot, :, begin:end].copy_(block.keys[:, :, part])
        self.values[:, slot, :, begin:end].copy_(block.values[:, :, part])
        if self.states is not None and block.states is not None:
            self.states[:, slot].copy_(block.states)

    def fits(self, block: KvBlock) -> bool:
        """True if a block came from a cache of the same shape and dtype."""
        layers, _, kv_heads, _, head_dim = self.keys.shape
        shape = (layers, kv_heads, len(block.token_ids) - block.start, head_dim)
        states = None if self.states is None else self.states[:, 0].shape
        return (
            block.keys.shape == shape
            and block.values.shape == shape
            and (None if block.states is None else block.states.shape) == states
            and block.keys.dtype == block.values.dtype == self.keys.dtype
        )
