"""The decoder network: fused weights, and one forward pass over a packed batch.

Query, key and value projections are one matrix, and so are gate and up: at the sizes that run on a CPU, a step is
dominated by operator overhead. The last layer computes queries, attention and MLP only for the tokens whose logits are
needed; for a model of few layers that halves a prefill.

Tokens of all rows are packed without padding, so that the linear layers, which are most of the work, compute no
padding. Attention needs rectangles: rows are grouped by similar length (at most a factor of two apart), and only the
queries are padded. A decoding row is simply a row with one new token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from rollart.architecture import Architecture
from rollart.engine.cache import KvCache
from rollart.engine.operations import TorchOperations
from rollart.engine.sampling import to_device
from rollart.errors import UsageError

BLOCKED_MIN_ELEMENTS = 65_536
"""Elements from which the blocked layout wins at any number of rows above one."""

BLOCKED_MIN_MULTIPLY_ADDS = 4_000_000
"""Multiply-adds from which the blocked layout wins for a small matrix as well."""

HINT_ROWS = 64
"""Number of rows that oneDNN optimizes the blocking for; measured to make no difference."""

Ints = npt.NDArray[np.int64]


class Network:
    """Holds the weights on the device. `load` replaces them in place; `forward` reads them. One thread."""

    def __init__(self, architecture: Architecture, *, context: int, device: torch.device, dtype: torch.dtype) -> None:
        self.architecture, self.device, self.dtype = architecture, device, dtype
        a = architecture

        def empty(*shape: int) -> Tensor:
            return torch.zeros(shape, device=device, dtype=dtype)

        def layer() -> _Layer:
            queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
            bias = a.attention_bias
            qkv = BlockedLinear(empty(queries + 2 * keys, a.hidden), empty(queries + 2 * keys) if bias else None)
            return _Layer(
                norm_in=empty(a.hidden),
                qkv=qkv,
                q=qkv.rows(0, queries),
                kv=qkv.rows(queries, queries + 2 * keys),
                qk_scale=empty(a.heads + a.kv_heads, a.head_dim) if a.qk_norm else None,
                out=BlockedLinear(empty(a.hidden, queries), empty(a.hidden) if bias else None),
                norm_mid=empty(a.hidden),
                gate_up=BlockedLinear(empty(2 * a.intermediate, a.hidden)),
                down=BlockedLinear(empty(a.hidden, a.intermediate)),
            )

        self._embed = empty(a.vocab, a.hidden)
        self._head = BlockedLinear(self._embed if a.tied else empty(a.vocab, a.hidden))
        self._norm = empty(a.hidden)
        self._layers = [layer() for _ in range(a.layers)]
        self.rope = _rope_tables(a, context, device, dtype)
        """The rotary tables, cosine and signed sine `[context, 1, head_dim]`."""

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the tensors that a checkpoint of this architecture holds."""
        for name, target in self.weight_targets():
            per_head = name.endswith(("q_norm.weight", "k_norm.weight"))  # one vector for all heads
            yield name, tuple(target.shape[-1:] if per_head else target.shape)

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse tensors that are not this architecture's, before anything is overwritten."""
        for name, expected in self.shapes():
            if name not in tensors:
                raise UsageError(f"the checkpoint has no tensor {name}")
            if tuple(tensors[name].shape) != expected:
                raise UsageError(f"tensor {name} has shape {tuple(tensors[name].shape)}, the model needs {expected}")

    def staged(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A checkpoint's tensors in the form that `load` copies fastest. For a GPU they are converted here, on the
        host while steps continue; otherwise `load` would convert them while steps are stopped."""
        if self.device.type == "cpu":
            return dict(tensors)
        return {name: tensor.to("cpu", self.dtype) for name, tensor in tensors.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a checkpoint's tensors (Hugging Face names) into the fused weights, in place."""
        self.check(tensors)
        for name, target in self.weight_targets():
            target.copy_(tensors[name])
        self._head.pack()
        for layer in self._layers:
            for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down):
                matrix.pack()
        for matrix in (self._layers[-1].q, self._layers[-1].kv):
            matrix.pack()

    def forward(self, batch: PackedBatch, cache: KvCache) -> Tensor:
        """Write the batch's keys and values into the cache; return fp32 logits `[rows, vocab]` of the last tokens."""
        a, x = self.architecture, F.embedding(batch.tokens, self._embed)
        cos, sin = (table.index_select(0, batch.positions) for table in self.rope)
        final = len(self._layers) - 1
        for i, layer in enumerate(self._layers):
            h = self._rms(x, layer.norm_in)
            if i == final and (last := batch.last) is not None:  # keys and values of all, queries of each row's last
                scale_q = scale_k = None
                if layer.qk_scale is not None:
                    scale_q, scale_k = layer.qk_scale[: a.heads], layer.qk_scale[a.heads :]
                kv = layer.kv(h).view(x.shape[0], 2 * a.kv_heads, a.head_dim)
                cache.write(i, batch.write, self._rotate(kv[:, : a.kv_heads], scale_k, cos, sin), kv[:, a.kv_heads :])
                q = layer.q(h.index_select(0, last)).view(-1, a.heads, a.head_dim)
                q = self._rotate(q, scale_q, cos.index_select(0, last), sin.index_select(0, last))
                x, attended = x.index_select(0, last), self._attention(i, q, batch, cache, tail=True)
            else:
                qkv = layer.qkv(h).view(x.shape[0], a.heads + 2 * a.kv_heads, a.head_dim)
                qk = self._rotate(qkv[:, : a.heads + a.kv_heads], layer.qk_scale, cos, sin)
                cache.write(i, batch.write, qk[:, a.heads :], qkv[:, a.heads + a.kv_heads :])
                attended = self._attention(i, qk[:, : a.heads], batch, cache, tail=False)
            x = x + layer.out(attended)
            gate, up = layer.gate_up(self._rms(x, layer.norm_mid)).chunk(2, -1)
            x = x + layer.down(F.silu(gate).mul_(up))
        return self._head(self._rms(x, self._norm)).float()

    def decode(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        cache: KvCache,
        operations: TorchOperations,
        length: int,
    ) -> Tensor:
        """`forward` of rows with one new token each `[R]`, in shapes that depend on `R` and `length` alone, where
        positions are below `length`: fp32 logits `[R, vocab]`."""
        x, delta = F.embedding(tokens, self._embed), None
        for layer, keys, values in zip(self._layers, cache.keys, cache.values, strict=True):
            x, h = operations.add_norm(x, delta, layer.norm_in)
            queries = operations.place(layer.qkv(h), layer.qk_scale, slots, positions, keys, values)
            attended = operations.attend(queries, keys, values, slots, positions, length)
            x, h = operations.add_norm(x, layer.out(attended), layer.norm_mid)
            delta = layer.down(operations.gate(layer.gate_up(h)))
        _, h = operations.add_norm(x, delta, self._norm)
        return self._head(h).float()

    def _attention(self, i: int, q: Tensor, batch: PackedBatch, cache: KvCache, *, tail: bool) -> Tensor:
        """Attend group by group. `q`: `[T, heads, head_dim]`, or `[R, ...]` for the rows' last tokens (`tail`)."""
        a = self.architecture
        outputs = []
        for g in batch.groups:
            rows = g.r1 - g.r0
            keys, values = cache.read(i, g.slots, g.length)
            if tail or g.width == 1:
                part = q[g.r0 : g.r1] if tail else q[g.t0 : g.t1]
                folded = part.view(rows, a.kv_heads, a.group, a.head_dim)
                out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=g.tail_mask)
                outputs.append(out.reshape(rows, -1))
                continue
            part = q[g.t0 : g.t1] if g.pad is None else q[g.t0 : g.t1].index_select(0, g.pad)
            # Query heads of one kv head are folded into the query axis: keys and values are never repeated.
            folded = part.view(rows, g.width, a.kv_heads, a.group, a.head_dim).transpose(1, 2)
            folded = folded.reshape(rows, a.kv_heads, g.width * a.group, a.head_dim)
            out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=g.mask)
            out = out.view(rows, a.kv_heads, g.width, a.group, a.head_dim).transpose(1, 2)
            out = out.reshape(rows * g.width, -1)
            outputs.append(out if g.keep is None else out.index_select(0, g.keep))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.architecture.norm_eps)

    def _rotate(self, x: Tensor, scale: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
        """Per-head norm (if any) and rotary embedding of `[n, heads, head_dim]`; rotate_half's sign is in `sin`."""
        if scale is not None:
            x = F.rms_norm(x, (x.shape[-1],), None, self.architecture.norm_eps) * scale
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)

    def weight_targets(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face tensor names with the views of the fused weights that they fill."""
        a = self.architecture
        queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
        yield "model.embed_tokens.weight", self._embed
        yield "model.norm.weight", self._norm
        if not a.tied:
            yield "lm_head.weight", self._head.weight
        for i, layer in enumerate(self._layers):
            at = f"model.layers.{i}."
            yield at + "input_layernorm.weight", layer.norm_in
            yield at + "post_attention_layernorm.weight", layer.norm_mid
            for kind, fused in (("weight", layer.qkv.weight), ("bias", layer.qkv.bias)):
                if fused is not None:
                    yield f"{at}self_attn.q_proj.{kind}", fused[:queries]
                    yield f"{at}self_attn.k_proj.{kind}", fused[queries : queries + keys]
                    yield f"{at}self_attn.v_proj.{kind}", fused[queries + keys :]
            if layer.qk_scale is not None:
                yield at + "self_attn.q_norm.weight", layer.qk_scale[: a.heads]
                yield at + "self_attn.k_norm.weight", layer.qk_scale[a.heads :]
            yield at + "self_attn.o_proj.weight", layer.out.weight
            if layer.out.bias is not None:
                yield at + "self_attn.o_proj.bias", layer.out.bias
            yield at + "mlp.gate_proj.weight", layer.gate_up.weight[: a.intermediate]
            yield at + "mlp.up_proj.weight", layer.gate_up.weight[a.intermediate :]
            yield at + "mlp.down_proj.weight", layer.down.weight


class BlockedLinear:
    """A linear layer with a second copy of its matrix in oneDNN's blocked layout, used where that multiplies faster.

    Measured on Zen 4 with one thread: at 2 to 64 rows the blocked layout takes 0.6 to 0.75 of MKL's time for matrices
    of at least 256 × 512, but each call costs 10 µs more, which is a loss for small products. `weight` `[out, in]` and
    an optional `bias` `[out]` are filled by the owner; call `pack` after each change.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self._packed: Tensor | None = None
        self._large = weight.numel() >= BLOCKED_MIN_ELEMENTS

    def pack(self) -> None:
        """Copy the weight into the blocked layout (only for fp32 on a CPU with oneDNN; otherwise does nothing)."""
        w = self.weight
        # Inductor's operators are not public API: a torch without them uses the plain layout.
        known = hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        if known and w.device.type == "cpu" and w.dtype == torch.float32:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(w.contiguous(), HINT_ROWS)

    def rows(self, start: int, stop: int) -> BlockedLinear:
        """The outputs [start, stop) as a matrix that shares this one's storage."""
        return BlockedLinear(self.weight[start:stop], None if self.bias is None else self.bias[start:stop])

    def __call__(self, x: Tensor) -> Tensor:
        """`x` `[n, in]` to `[n, out]`."""
        n = x.shape[0]
        if self._packed is None or n == 1 or not (self._large or n * self.weight.numel() >= BLOCKED_MIN_MULTIPLY_ADDS):
            return F.linear(x, self.weight, self.bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return product


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Tokens `[T]`, their positions `[T]`, the flat cache rows of their keys `[T * kv_heads]`, and the groups.

    `order` `[R]` gives, for each row of the result, the row of the caller. `last` `[R]` is the packed index of each
    row's last token, or None when every token is one (pure decoding).
    """

    tokens: Tensor
    positions: Tensor
    write: Tensor
    last: Tensor | None
    groups: tuple[AttentionGroup, ...]
    order: Ints


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Rows that attend together: packed tokens [t0, t1), rows [r0, r1) of the batch.

    `pad` `[rows * width]` picks each padded query from the group's tokens and `keep` `[t1 - t0]` picks the real
    ones back (None where no row is shorter than `width`). `mask` is additive, `[rows, 1, width * heads per
    kv head or 1, length]`; `tail_mask` `[rows, 1, 1, length]` is that of each row's last token alone.
    """

    r0: int
    r1: int
    t0: int
    t1: int
    width: int
    length: int
    slots: slice | Tensor
    pad: Tensor | None
    keep: Tensor | None
    mask: Tensor
    tail_mask: Tensor


def pack_batch(network: Network, table: Ints, slots: Ints, start: Ints, end: Ints, *, context: int) -> PackedBatch:
    """Pack rows: row i computes tokens `table[slots[i], start[i]:end[i]]` (at least one each). `context` is the cache's
    number of positions per slot."""
    kv_heads, device = network.architecture.kv_heads, network.device
    lengths = end - start
    bucket = np.ceil(np.log2(lengths)).astype(np.int64)
    order = np.lexsort((slots, bucket))
    slots, start, lengths, bucket = slots[order], start[order], lengths[order], bucket[order]
    rows, total = len(slots), int(lengths.sum())
    offsets = np.zeros(rows + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    slot_of = np.repeat(slots, lengths)
    position = np.arange(total) + np.repeat(start - offsets[:-1], lengths)
    heads = np.arange(kv_heads)
    write = ((slot_of[:, None] * kv_heads + heads) * context + position[:, None]).reshape(-1)
    edges = np.flatnonzero(np.diff(bucket)) + 1
    groups = tuple(
        _group(network, int(a), int(b), slots, start, lengths, offsets)
        for a, b in zip([0, *edges], [*edges, rows], strict=True)
    )
    return PackedBatch(
        tokens=to_device(table[slot_of, position], device),
        positions=to_device(position, device),
        write=to_device(write, device),
        last=None if total == rows else to_device(offsets[1:] - 1, device),
        groups=groups,
        order=order,
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer. `q` and `kv` are parts of `qkv`; `qk_scale` `[heads + kv_heads, head_dim]` is the q/k norm."""

    norm_in: Tensor
    qkv: BlockedLinear
    q: BlockedLinear
    kv: BlockedLinear
    qk_scale: Tensor | None
    out: BlockedLinear
    norm_mid: Tensor
    gate_up: BlockedLinear
    down: BlockedLinear


def _rope_tables(a: Architecture, context: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine `[context, 1, head_dim]`: rotating is x * cos + roll(x, head_dim / 2) * sin."""
    half = a.head_dim // 2
    frequency = 1.0 / a.rope_theta ** (torch.arange(half, dtype=torch.float32) * 2 / a.head_dim)
    if a.rope_scaling is not None:
        # Llama 3.1's rope scaling: long wavelengths are stretched by `factor`, short ones kept, the middle blended.
        factor, original = a.rope_scaling["factor"], a.rope_scaling["original_max_position_embeddings"]
        low, high = a.rope_scaling["low_freq_factor"], a.rope_scaling["high_freq_factor"]
        wavelength = 2 * math.pi / frequency
        smooth = (original / wavelength - low) / (high - low)
        blended = (1 - smooth) / factor * frequency + smooth * frequency
        scaled = torch.where(wavelength > original / low, frequency / factor, frequency)
        frequency = torch.where((wavelength <= original / low) & (wavelength >= original / high), blended, scaled)
    angle = torch.arange(context, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    return (
        torch.cat((cos, cos), -1)[:, None].to(device, dtype),
        torch.cat((-sin, sin), -1)[:, None].to(device, dtype),
    )


def _group(network: Network, a: int, b: int, slots: Ints, start: Ints, lengths: Ints, offsets: Ints) -> AttentionGroup:
    """The rows [a, b). With one layer only, just each row's last query is ever computed, so `mask` is `tail_mask`."""
    device, dtype, per_kv_head = network.device, network.dtype, network.architecture.group
    slots, start, lengths = slots[a:b], start[a:b], lengths[a:b]
    rows, width = b - a, int(lengths.max())
    final = start + lengths - 1
    length = int(final.max()) + 1
    tail_mask = _causal(final[:, None], length, device, dtype).view(rows, 1, 1, length)
    pad = keep = None
    mask = tail_mask
    if width > 1 and network.architecture.layers > 1:
        step = np.minimum(np.arange(width), lengths[:, None] - 1)
        if int(lengths.min()) < width:
            local = offsets[a:b] - offsets[a]
            pad = to_device((local[:, None] + step).reshape(-1), device)
            real = np.arange(width) < lengths[:, None]
            keep = to_device(np.flatnonzero(real), device)
        mask = _causal(start[:, None] + step, length, device, dtype)
        mask = mask.view(rows, 1, width, 1, length).expand(-1, -1, -1, per_kv_head, -1)
        mask = mask.reshape(rows, 1, width * per_kv_head, length)
    run = int(slots[-1]) - int(slots[0]) + 1 == rows
    where = slice(int(slots[0]), int(slots[-1]) + 1) if run else to_device(slots, device)
    return AttentionGroup(a, b, int(offsets[a]), int(offsets[b]), width, length, where, pad, keep, mask, tail_mask)


def _causal(positions: Ints, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Additive mask `[rows, width, length]`: key j is hidden from a query at a position below j."""
    query = to_device(positions, device)
    hidden = torch.arange(length, device=device) > query[:, :, None]
    return torch.zeros(hidden.shape, device=device, dtype=dtype).masked_fill_(hidden, float("-inf"))
