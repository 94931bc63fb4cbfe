"""The decoder network: fused weights, and one forward pass over a packed batch.

Query, key and value projections are one matrix, and so are gate and up: at the sizes that run on a CPU, a step is
dominated by operator overhead. The last layer computes queries, attention and MLP only for the tokens whose logits are
needed; for a model of few layers that halves a prefill.

Tokens of all rows are packed without padding, so that the linear layers, which are most of the work, compute no
padding. Attention needs rectangles: rows are grouped by similar length (at most a factor of two apart), and only the
queries are padded. A decoding row is simply a row with one new token.

One decoder computes all families: `Architecture` says which norms, biases, positions, windows and soft caps it has,
and which layers have linear attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from rollart.architecture import Architecture, ExpertLayers, LinearAttention, expert_parts, refuse_longer_context
from rollart.engine.adapters import AdaptedPart, AdapterStack, RowScales, StackedFactors, select_scales
from rollart.engine.cache import KvCache, LinearStates
from rollart.engine.delta import convolve, delta_chunks, delta_step
from rollart.engine.operations import (
    TorchOperations,
    causal_mask,
    gate,
    norm_heads,
    rms_norm,
    scaled_attention,
    separate_gates,
)
from rollart.engine.rotary import Tables, rotary_tables, rotate
from rollart.engine.sampling import to_device
from rollart.errors import UsageError
from rollart.lora import Adapter

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

        def attention(i: int) -> SoftmaxAttention | DeltaAttention:
            if a.attention[i] is None:
                assert a.linear is not None
                return DeltaAttention(a, a.linear, empty)
            values, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
            queries = 2 * values if a.gated else values
            qkv = linear(queries + 2 * keys, a.hidden, bias=a.qkv_bias)
            return SoftmaxAttention(
                qkv=qkv,
                q=qkv.rows(0, queries),
                kv=qkv.rows(queries, queries + 2 * keys),
                qk_scale=norm(a.heads + a.kv_heads, a.head_dim) if a.qk_norm != "none" else None,
                out=linear(a.hidden, values, bias=a.out_bias),
            )

        def layer(i: int) -> _Layer:
            return _Layer(
                norm_in=norm(a.hidden) if a.norms != "after" else None,
                attention=attention(i),
                norm_out=norm(a.hidden) if a.norms != "before" else None,
                norm_mid=norm(a.hidden) if a.norms != "after" else None,
                mlp=SparseMlp(a, a.experts, empty)
                if a.experts is not None and i in a.experts.layers
                else DenseMlp(
                    gate_up=linear(2 * a.intermediate, a.hidden, bias=a.mlp_bias),
                    down=linear(a.hidden, a.intermediate, bias=a.mlp_bias),
                ),
                norm_down=norm(a.hidden) if a.norms != "before" else None,
            )

        def norm(*shape: int) -> Tensor:
            # 1 + w in half precision would round w to the precision of 1.
            return torch.zeros(shape, device=device, dtype=torch.float32 if a.norm_offset else dtype)

        def linear(rows: int, columns: int, *, bias: bool) -> BlockedLinear:
            return BlockedLinear(empty(rows, columns), empty(rows) if bias else None)

        self._embed = empty(a.vocab, a.hidden)
        self._head = BlockedLinear(self._embed if a.tied else empty(a.vocab, a.hidden))
        self._norm = norm(a.hidden)
        self._layers = [layer(i) for i in range(a.layers)]
        self._embedding_scale = torch.tensor(a.embedding_scale, device=device, dtype=dtype)
        refuse_longer_context(a, context)
        used = [None if one is None else one.rotary for one in a.attention]
        rotaries = list(dict.fromkeys(one for one in used if one is not None))
        self.tables = [rotary_tables(one, context, device, dtype) for one in rotaries]
        """The distinct rotary tables."""
        self._table_of = [None if one is None else rotaries.index(one) for one in used]
        self.windows = list(dict.fromkeys(one.window for one in a.attention if one is not None))
        """The distinct attention windows, in keys; None: all keys."""
        self._window_of = [0 if one is None else self.windows.index(one.window) for one in a.attention]
        self.adapters: AdapterStack | None = None
        """The adapters that requests name; None: all requests have the weights of `load`."""

    def stack_adapters(self, adapters: Mapping[str, Adapter]) -> None:
        """Make room for adapters like these, which `load` fills, before the first request. UsageError if they do not
        fit the model."""
        ranks = {a.shape[0] for adapter in adapters.values() for a, _ in adapter.factors.values()}
        if len(ranks) != 1:
            raise UsageError(f"adapters of ranks {', '.join(map(str, sorted(ranks)))} (rule: one rank)")
        names, rank, targets = next(iter(adapters.values())).factors.keys(), ranks.pop(), dict(self.weight_targets())
        parts: dict[str, AdaptedPart] = {}
        for layer in self._layers:
            for matrix in layer.matrices:
                storage = matrix.weight.untyped_storage().data_ptr()
                own = [
                    name
                    for name, view in targets.items()
                    if name in names and view.untyped_storage().data_ptr() == storage
                ]
                if own:
                    factors = matrix.stack(len(adapters) * len(own) * rank)
                    width = matrix.weight.shape[1]
                    for number, name in enumerate(own):
                        start = targets[name].storage_offset() // width
                        parts[name] = AdaptedPart(factors, start, targets[name].shape[0], number, len(own))
            if isinstance(attention := layer.attention, SoftmaxAttention) and attention.qkv.factors is not None:
                queries = attention.q.weight.shape[0]
                attention.q.factors = attention.qkv.factors.rows(0, queries)
                attention.kv.factors = attention.qkv.factors.rows(queries, attention.qkv.weight.shape[0])
        if missing := sorted(names - parts.keys()):
            raise UsageError(f"the adapters change {missing[0]}, which takes none here")
        self.adapters = AdapterStack(sorted(adapters), rank, parts, self.device, self.dtype)
        self.adapters.check(adapters)

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the tensors that a checkpoint of this architecture holds."""
        for name, target in self.weight_targets():
            shared = target.dim() == 2 and "_norm." in name  # one vector for all heads
            yield name, tuple(target.shape[-1:] if shared else target.shape)

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
        types = {name: target.dtype for name, target in self.weight_targets()}
        return {name: tensor.to("cpu", types.get(name, self.dtype)) for name, tensor in tensors.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], adapters: Mapping[str, Adapter] | None = None) -> None:
        """Copy a checkpoint's tensors (Hugging Face names) into the fused weights, in place, and the factors of stacked
        adapters. With them `tensors` may be empty: the weights below stay."""
        if self.adapters is not None:
            given = adapters or {}
            self.adapters.check(given)
            if tensors or not self.adapters.holds_base(given):
                self.check(tensors)
            self.adapters.load(given)
            if not tensors:
                return
        self.check(tensors)
        for name, target in self.weight_targets():
            target.copy_(tensors[name])
            if "norm" in name and "linear_attn" not in name and self.architecture.norm_offset:
                target.add_(self.architecture.norm_offset)
        self._head.pack()
        for layer in self._layers:
            for matrix in layer.matrices:
                matrix.pack()
        if isinstance(final := self._layers[-1].attention, SoftmaxAttention):
            final.q.pack()
            final.kv.pack()

    def forward(self, batch: PackedBatch, cache: KvCache, chosen: list[Tensor] | None = None) -> Tensor:
        """Write the batch's keys and values into the cache; return fp32 logits `[rows, vocab]` of the last tokens.
        `chosen` receives the numbers of the experts of each layer that has some: `[T, active]`, or `[R, active]` of the
        rows' last tokens from the last layer."""
        a, x = self.architecture, self._embedded(batch.tokens)
        tables = [_select(one, batch.positions) for one in self.tables]
        scales = self._scales(batch.adapters)
        final = len(self._layers) - 1
        for i, layer in enumerate(self._layers):
            last = batch.last if i == final else None
            h = x if layer.norm_in is None else self._rms(x, layer.norm_in)
            if isinstance(layer.attention, DeltaAttention):
                attended = layer.attention(h, batch.groups, cache.linear[i], scales)
                attended = attended if last is None else attended.index_select(0, last)
            else:
                table = None if (t := self._table_of[i]) is None else tables[t]
                attended = self._attended(i, layer.attention, h, table, batch, cache, last, scales)
            if last is not None:
                x, scales = x.index_select(0, last), select_scales(scales, last)
            x = x + self._out(layer.attention.out(attended, scales), layer.norm_out)
            h = x if layer.norm_mid is None else self._rms(x, layer.norm_mid)
            mlp = layer.mlp
            if isinstance(mlp, DenseMlp):
                h = mlp.down(gate(a, mlp.gate_up(h, scales)), scales)
            else:
                h = mlp(h, chosen)
            x = x + self._out(h, layer.norm_down)
        return self._logits(self._rms(x, self._norm))

    def decode(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        cache: KvCache,
        operations: TorchOperations,
        length: int,
        chosen: list[Tensor] | None = None,
        adapters: Tensor | None = None,
    ) -> Tensor:
        """`forward` of rows with one new token each `[R]`, in shapes that depend on `R` and `length` alone, where
        positions are below `length`: fp32 logits `[R, vocab]`."""
        a = self.architecture
        x, delta = self._embedded(tokens), None
        scales = self._scales(adapters)
        for i, layer in enumerate(self._layers):
            x, h = operations.add_norm(x, delta, layer.norm_in)
            attention = layer.attention
            if isinstance(attention, DeltaAttention):
                attended = attention.decode(h, slots, positions, cache.linear[i], scales)
            else:
                (keys, values), window = cache.layers[i], self.windows[self._window_of[i]]
                (qkv, gates), table = separate_gates(a, attention.qkv(h, scales)), self._table_of[i]
                queries = operations.place(qkv, attention.qk_scale, slots, positions, keys, values, table)
                attended = operations.attend(queries, keys, values, slots, positions, length, window)
                attended = attended if gates is None else attended * gates.sigmoid()
            x, h = operations.add_norm(x, self._out(attention.out(attended, scales), layer.norm_out), layer.norm_mid)
            mlp = layer.mlp
            if isinstance(mlp, DenseMlp):
                h = mlp.down(operations.gate(mlp.gate_up(h, scales)), scales)
            else:
                h = mlp(h, chosen)
            delta = self._out(h, layer.norm_down)
        _, h = operations.add_norm(x, delta, self._norm)
        return self._logits(h)

    def _attended(
        self,
        i: int,
        attention: SoftmaxAttention,
        h: Tensor,
        table: Tables | None,
        batch: PackedBatch,
        cache: KvCache,
        last: Tensor | None,
        scales: RowScales | None,
    ) -> Tensor:
        """The result of attention `[T, heads * head_dim]`, before the output projection. With `last` the keys and
        values of all tokens, but the queries of each row's last alone: `[R, ...]`."""
        a, scale = self.architecture, attention.qk_scale
        if last is not None:
            scale_q, scale_k = (None, None) if scale is None else (scale[: a.heads], scale[a.heads :])
            kv = attention.kv(h, scales).view(h.shape[0], 2 * a.kv_heads, a.head_dim)
            keys = self._positioned(norm_heads(a, kv[:, : a.kv_heads], scale_k, 0), table)
            cache.write(i, batch.write, keys, kv[:, a.kv_heads :])
            q, gates = separate_gates(a, attention.q(h.index_select(0, last), select_scales(scales, last)))
            q = norm_heads(a, q.view(-1, a.heads, a.head_dim), scale_q, a.heads)
            q = self._positioned(q, None if table is None else _select(table, last))
        else:
            qkv, gates = separate_gates(a, attention.qkv(h, scales))
            qkv = qkv.view(h.shape[0], a.heads + 2 * a.kv_heads, a.head_dim)
            qk = norm_heads(a, qkv[:, : a.heads + a.kv_heads], scale, a.heads)
            qk = self._positioned(qk, table)
            cache.write(i, batch.write, qk[:, a.heads :], qkv[:, a.heads + a.kv_heads :])
            q = qk[:, : a.heads]
        attended = self._attention(i, q, batch, cache, tail=last is not None)
        return attended if gates is None else attended * gates.sigmoid()

    def _attention(self, i: int, q: Tensor, batch: PackedBatch, cache: KvCache, *, tail: bool) -> Tensor:
        """Attend group by group. `q`: `[T, heads, head_dim]`, or `[R, ...]` for the rows' last tokens (`tail`)."""
        a = self.architecture
        outputs = []
        for g in batch.groups:
            rows, (mask, tail_mask) = g.r1 - g.r0, g.masks[self._window_of[i]]
            keys, values = cache.read(i, g.slots, g.length)
            if tail or g.width == 1:
                part = q[g.r0 : g.r1] if tail else q[g.t0 : g.t1]
                folded = part.view(rows, a.kv_heads, a.group, a.head_dim)
                out = scaled_attention(a, folded, keys, values, tail_mask)
                outputs.append(out.reshape(rows, -1))
                continue
            part = q[g.t0 : g.t1] if g.pad is None else q[g.t0 : g.t1].index_select(0, g.pad)
            # Query heads of one kv head are folded into the query axis: keys and values are never repeated.
            folded = part.view(rows, g.width, a.kv_heads, a.group, a.head_dim).transpose(1, 2)
            folded = folded.reshape(rows, a.kv_heads, g.width * a.group, a.head_dim)
            out = scaled_attention(a, folded, keys, values, mask)
            out = out.view(rows, a.kv_heads, g.width, a.group, a.head_dim).transpose(1, 2)
            out = out.reshape(rows * g.width, -1)
            outputs.append(out if g.keep is None else out.index_select(0, g.keep))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _scales(self, adapters: Tensor | None) -> RowScales | None:
        """The factors of rows with adapters of these numbers; None in a network without adapters."""
        return None if self.adapters is None or adapters is None else self.adapters.scales(adapters)

    def _embedded(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self._embed)
        return x if self.architecture.embedding_scale == 1.0 else x * self._embedding_scale

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(self.architecture, x, weight)

    def _out(self, x: Tensor, norm: Tensor | None) -> Tensor:
        return x if norm is None else self._rms(x, norm)

    def _positioned(self, x: Tensor, table: Tables | None) -> Tensor:
        return x if table is None else rotate(x, table)

    def _logits(self, x: Tensor) -> Tensor:
        logits, cap = self._head(x).float(), self.architecture.logit_cap
        return logits if cap is None else (logits / cap).tanh() * cap

    def weight_targets(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face tensor names with the views of the fused weights that they fill."""
        a = self.architecture
        yield "model.embed_tokens.weight", self._embed
        yield "model.norm.weight", self._norm
        if not a.tied:
            yield "lm_head.weight", self._head.weight
        for i, layer in enumerate(self._layers):
            for name, target in layer.weight_targets(a):
                yield f"model.layers.{i}.{name}", target


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
        self.factors: StackedFactors | None = None
        """Those of adapters, which are added unmerged."""

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

    def stack(self, columns: int) -> StackedFactors:
        """Room for the factors of adapters, all zero."""
        (out, width), w = self.weight.shape, self.weight
        self.factors = StackedFactors(w.new_zeros(columns, width), w.new_zeros(out, columns))
        return self.factors

    def __call__(self, x: Tensor, scales: RowScales | None = None) -> Tensor:
        """`x` `[n, in]` to `[n, out]`. `scales`: of the rows' adapters, in a network with some."""
        n = x.shape[0]
        product: Tensor
        if self._packed is None or n == 1 or not (self._large or n * self.weight.numel() >= BLOCKED_MIN_MULTIPLY_ADDS):
            product = F.linear(x, self.weight, self.bias)
        else:
            product = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return product if scales is None or self.factors is None else self.factors.add(product, x, scales)


@dataclass(frozen=True, slots=True)
class SoftmaxAttention:
    """The attention of one layer over keys and values. `q` and `kv` are parts of `qkv`; `qk_scale`
    `[heads + kv_heads, head_dim]` is the q/k norm. In a gated decoder a head has two rows of `q`: its query's and its
    gate's."""

    qkv: BlockedLinear
    q: BlockedLinear
    kv: BlockedLinear
    qk_scale: Tensor | None
    out: BlockedLinear

    @property
    def matrices(self) -> Sequence[BlockedLinear]:
        return self.qkv, self.out

    def weight_targets(self, a: Architecture) -> Iterator[tuple[str, Tensor]]:
        if self.qk_scale is not None:
            for name, scale in (("q", self.qk_scale[: a.heads]), ("k", self.qk_scale[a.heads :])):
                yield f"self_attn.{name}_norm.weight", scale.view(-1) if a.qk_norm == "projection" else scale
        q, kv = self.q.weight.shape[0], a.kv_heads * a.head_dim
        yield from _parts("self_attn", self.qkv, {"qkv": 0} if a.fused else {"q": q, "k": kv, "v": kv})
        yield from _parts("self_attn", self.out, {"o": 0})


class DeltaAttention:
    """The linear attention of one layer, by a gated delta network. `weight_targets` are filled by the owner.

    A row's states are read, and written after its tokens; a row that starts at position 0 starts with empty ones, so
    that nothing need clear a slot. Convolution in the type of the weights, memory in fp32."""

    def __init__(self, a: Architecture, linear: LinearAttention, empty: Callable[..., Tensor]) -> None:
        self._linear, self._eps = linear, a.norm_eps
        self._widths = [linear.channels, linear.value_width, linear.value_heads, linear.value_heads]
        self._inputs = BlockedLinear(empty(sum(self._widths), a.hidden))
        self._taps = empty(linear.channels, 1, linear.kernel)
        self._norm = empty(linear.value_dim)
        self._rates, self._offsets = (empty(linear.value_heads).float() for _ in range(2))
        self.out = BlockedLinear(empty(a.hidden, linear.value_width))

    @property
    def matrices(self) -> Sequence[BlockedLinear]:
        return self._inputs, self.out

    def __call__(
        self, x: Tensor, groups: Sequence[AttentionGroup], states: LinearStates, scales: RowScales | None
    ) -> Tensor:
        """`x` `[T, hidden]` to `[T, value_heads * value_dim]`, before the output projection."""
        projected, outputs = self._inputs(x, scales), []
        for g in groups:
            assert g.resumed is not None
            part, rows = projected[g.t0 : g.t1], g.r1 - g.r0
            part = part if g.pad is None else part.index_select(0, g.pad)
            lengths = None if g.pad is None else g.lengths
            out = self._attend(part.view(rows, g.width, -1), g.slots, g.resumed, lengths, states)
            out = out.view(rows * g.width, -1)
            outputs.append(out if g.keep is None else out.index_select(0, g.keep))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def decode(
        self, x: Tensor, slots: Tensor, positions: Tensor, states: LinearStates, scales: RowScales | None
    ) -> Tensor:
        """The same for one token per row, `x` `[R, hidden]`, in shapes that depend on `R` alone."""
        return self._attend(self._inputs(x, scales)[:, None], slots, positions > 0, None, states)[:, 0]

    def _attend(
        self, projected: Tensor, slots: slice | Tensor, resumed: Tensor, lengths: Tensor | None, states: LinearStates
    ) -> Tensor:
        """`projected` `[rows, width, ...]` to `[rows, width, value_heads * value_dim]`. `resumed` `[rows]`: rows that
        continue the states of their slots. `lengths` `[rows]`: tokens of each row, if some are padding."""
        n, (rows, width, _) = self._linear, projected.shape
        mixed, gates, strengths, decays = torch.split(projected, self._widths, -1)
        convolved, memory = states.read(slots)
        convolved = convolved.masked_fill(~resumed[:, None, None], 0.0)
        memory = memory.masked_fill(~resumed[:, None, None, None], 0.0)
        mixed, convolved = convolve(mixed, convolved, self._taps, lengths)
        keys = n.key_heads * n.key_dim
        q, k, v = torch.split(F.silu(mixed).float(), [keys, keys, n.value_width], -1)
        q, k = (part.view(rows, width, n.key_heads, n.key_dim) for part in (q, k))
        v = v.view(rows, width, n.value_heads, n.value_dim)
        strength = strengths.float().sigmoid()
        decay = -self._rates.exp() * F.softplus(decays.float() + self._offsets)
        if lengths is not None:  # padding leaves the memory as it is
            padding = torch.arange(width, device=lengths.device) >= lengths[:, None]
            strength, decay = (part.masked_fill(padding[:, :, None], 0.0) for part in (strength, decay))
        out, memory = (delta_step if width == 1 else delta_chunks)(q, k, v, decay, strength, memory)
        states.write(slots, convolved, memory)
        out = F.rms_norm(out, (n.value_dim,), self._norm.float(), self._eps).flatten(2)
        return (out * F.silu(gates.float())).to(projected.dtype)

    def weight_targets(self, a: Architecture) -> Iterator[tuple[str, Tensor]]:
        parts = torch.split(self._inputs.weight, self._widths)
        for name, part in zip(("qkv", "z", "b", "a"), parts, strict=True):
            yield f"linear_attn.in_proj_{name}.weight", part
        yield "linear_attn.conv1d.weight", self._taps
        yield "linear_attn.A_log", self._rates
        yield "linear_attn.dt_bias", self._offsets
        yield "linear_attn.norm.weight", self._norm
        yield from _parts("linear_attn", self.out, {"out": 0})


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """The MLP of a layer without experts."""

    gate_up: BlockedLinear
    down: BlockedLinear


class SparseMlp:
    """The experts of one layer and their router. `weight_targets` are filled by the owner.

    The rows of an expert are multiplied together, so that each expert that a batch needs is read once. Its numbers of
    rows are values of the device: a step with experts has no fixed shapes, and waits for the device in each layer."""

    def __init__(self, a: Architecture, layers: ExpertLayers, empty: Callable[..., Tensor]) -> None:
        self._architecture, self._layers = a, layers
        self._router = empty(layers.experts, a.hidden)
        self._gate_up = empty(layers.experts, 2 * layers.width, a.hidden)
        self._down = empty(layers.experts, a.hidden, layers.width)

    def __call__(self, x: Tensor, chosen: list[Tensor] | None) -> Tensor:
        """`x` `[n, hidden]` to the same. Appends the numbers of the rows' experts `[n, active]` to `chosen`."""
        (n, hidden), active = x.shape, self._layers.active
        probabilities = F.linear(x, self._router).softmax(-1, dtype=torch.float32)
        shares, numbers = probabilities.topk(active)
        if self._layers.normalized:
            shares = shares / shares.sum(-1, keepdim=True)
        if chosen is not None:
            chosen.append(numbers)
        by_expert = numbers.view(-1).argsort(stable=True)
        inputs = x.index_select(0, by_expert // active)
        counts = numbers.view(-1).bincount(minlength=self._layers.experts).tolist()
        outputs, first = inputs.new_empty(n * active, hidden), 0
        for expert, rows in enumerate(counts):
            if rows:
                part = slice(first, first := first + rows)
                inner = gate(self._architecture, F.linear(inputs[part], self._gate_up[expert]))
                outputs[part] = F.linear(inner, self._down[expert])
        outputs = torch.empty_like(outputs).index_copy_(0, by_expert, outputs).view(n, active, hidden)
        return (outputs * shares.to(x.dtype)[:, :, None]).sum(1)

    def weight_targets(self) -> Iterator[tuple[str, Tensor]]:
        yield "mlp.gate.weight", self._router
        yield from expert_parts("mlp.experts.gate_up_proj", self._gate_up)
        yield from expert_parts("mlp.experts.down_proj", self._down)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Tokens `[T]`, their positions `[T]`, the flat cache rows of their keys `[T * kv_heads]`, and the groups.

    `order` `[R]` gives, for each row of the result, the row of the caller. `last` `[R]` is the packed index of each
    row's last token, or None when every token is one (pure decoding). `adapters` `[T]` are the numbers of the tokens'
    adapters; None in a network without.
    """

    tokens: Tensor
    positions: Tensor
    write: Tensor
    last: Tensor | None
    groups: tuple[AttentionGroup, ...]
    order: Ints
    adapters: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Rows that attend together: packed tokens [t0, t1), rows [r0, r1) of the batch.

    `pad` `[rows * width]` picks each padded query from the group's tokens and `keep` `[t1 - t0]` picks the real
    ones back (None where no row is shorter than `width`). `masks` are additive, a pair for each window of the network:
    of all tokens, `[rows, 1, width * heads per kv head or 1, length]`, and of each row's last, `[rows, 1, 1, length]`.
    `lengths` `[rows]` counts each row's tokens, and `resumed` `[rows]` is true where they continue a slot's states
    (None in a network without linear attention).
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
    masks: tuple[tuple[Tensor, Tensor], ...]
    lengths: Tensor | None
    resumed: Tensor | None


def pack_batch(
    network: Network,
    table: Ints,
    slots: Ints,
    start: Ints,
    end: Ints,
    *,
    context: int,
    adapters: Ints | None = None,
) -> PackedBatch:
    """Pack rows: row i computes tokens `table[slots[i], start[i]:end[i]]` (at least one each). `context` is the cache's
    number of positions per slot, `adapters` the number of each slot's adapter."""
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
        adapters=None if adapters is None else to_device(adapters[slot_of], device),
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer."""

    norm_in: Tensor | None
    attention: SoftmaxAttention | DeltaAttention
    norm_out: Tensor | None
    norm_mid: Tensor | None
    mlp: DenseMlp | SparseMlp
    norm_down: Tensor | None

    @property
    def matrices(self) -> Sequence[BlockedLinear]:
        """Its linear layers, but for experts and router."""
        dense = (self.mlp.gate_up, self.mlp.down) if isinstance(self.mlp, DenseMlp) else ()
        return *self.attention.matrices, *dense

    def weight_targets(self, a: Architecture) -> Iterator[tuple[str, Tensor]]:
        """Names of the layer's tensors, with the views that they fill."""
        norms = (self.norm_in, self.norm_out, self.norm_mid, self.norm_down)
        for name, norm in zip(NORM_NAMES[a.norms], norms, strict=True):
            if norm is not None:
                yield f"{name}_layernorm.weight", norm
        yield from self.attention.weight_targets(a)
        if isinstance(self.mlp, SparseMlp):
            yield from self.mlp.weight_targets()
            return
        w = a.intermediate
        yield from _parts("mlp", self.mlp.gate_up, {"gate_up": 0} if a.fused else {"gate": w, "up": w})
        yield from _parts("mlp", self.mlp.down, {"down": 0})


NORM_NAMES: Mapping[str, Sequence[str]] = {
    "before": ("input", "", "post_attention", ""),
    "after": ("", "post_attention", "", "post_feedforward"),
    "around": ("input", "post_attention", "pre_feedforward", "post_feedforward"),
}
"""Names of a layer's norms: before attention, after it, before the MLP, after it."""


def _parts(module: str, matrix: BlockedLinear, rows: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
    """The projections that `matrix` holds one below the other, by name with their rows (0: all)."""
    for kind, fused in (("weight", matrix.weight), ("bias", matrix.bias)):
        if fused is not None:
            parts = torch.split(fused, [n or fused.shape[0] for n in rows.values()])
            yield from ((f"{module}.{name}_proj.{kind}", part) for name, part in zip(rows, parts, strict=True))


def _select(tables: Tables, at: Tensor) -> Tables:
    return tables[0].index_select(0, at), tables[1].index_select(0, at)


def _group(network: Network, a: int, b: int, slots: Ints, start: Ints, lengths: Ints, offsets: Ints) -> AttentionGroup:
    """The rows [a, b). With one layer of attention only, just each row's last query is ever computed: both masks are
    its."""
    device, per_kv_head, linear = network.device, network.architecture.group, network.architecture.linear
    slots, start, lengths = slots[a:b], start[a:b], lengths[a:b]
    rows, width = b - a, int(lengths.max())
    final = start + lengths - 1
    length = int(final.max()) + 1
    keys = torch.arange(length, device=device)
    pad = keep = queries = None
    if width > 1 and (network.architecture.layers > 1 or linear is not None):
        step = np.minimum(np.arange(width), lengths[:, None] - 1)
        if int(lengths.min()) < width:
            local = offsets[a:b] - offsets[a]
            pad = to_device((local[:, None] + step).reshape(-1), device)
            real = np.arange(width) < lengths[:, None]
            keep = to_device(np.flatnonzero(real), device)
        queries = to_device(start[:, None] + step, device)[:, :, None]
    ends = to_device(final, device)[:, None, None]
    masks = []
    for window in network.windows:
        tail_mask = mask = causal_mask(keys, ends, window, network.dtype).view(rows, 1, 1, length)
        if queries is not None:
            mask = causal_mask(keys, queries, window, network.dtype).view(rows, 1, width, 1, length)
            mask = mask.expand(-1, -1, -1, per_kv_head, -1).reshape(rows, 1, width * per_kv_head, length)
        masks.append((mask, tail_mask))
    run = int(slots[-1]) - int(slots[0]) + 1 == rows
    where = slice(int(slots[0]), int(slots[-1]) + 1) if run else to_device(slots, device)
    return AttentionGroup(
        r0=a,
        r1=b,
        t0=int(offsets[a]),
        t1=int(offsets[b]),
        width=width,
        length=length,
        slots=where,
        pad=pad,
        keep=keep,
        masks=tuple(masks),
        lengths=None if linear is None else to_device(lengths, device),
        resumed=None if linear is None else to_device(start, device) > 0,
    )
