"""The operations of a decode step between its matrix products, fused into four Triton kernels, for NVIDIA GPUs.

A step of few rows moves little more than the weights and the KV, so launching a single PyTorch operator costs about as
much as its computation. Here a layer has nine launches instead of about twenty, and attention reads each row's KV in
place, up to its own length: nothing is gathered, padded or masked. The formulas are those of `operations.py`, in fp32
inside. Triton, which PyTorch's CUDA wheels include, compiles the kernels at first use; only `decoding` imports this.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor, empty, empty_like, float32

from rollart.architecture import Architecture
from rollart.engine.operations import TorchOperations
from rollart.engine.rotary import Tables

KEYS = 64
"""Keys per block: 16 KB of keys and 16 KB of values at a head dimension of 128 in bf16; three blocks in flight."""

IN_FLIGHT = 64 << 10
"""Bytes of blocks that are prefetched while another is computed. With it a program fits the 99 KB of shared memory of
the smallest of these GPUs (at most 86 KB, as Triton 3.9 compiles it for sm_80 to sm_90)."""

ROWS = 16
"""Minimum rows of a tensor-core product: the query heads of one kv head are padded to this."""

WAVE = 264
"""Programs that fill a GPU of 132 multiprocessors twice; with fewer, the keys of a row are split among programs."""

SPLITS = 32
"""Maximum programs that share the keys of one row and kv head."""


@triton.jit
def _add_norm(x, delta, weight, total, normed, hidden, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    real = at < hidden
    v = tl.load(x + row * hidden + at, real, 0.0)
    if ADD:
        other = tl.load(delta + row * hidden + at, real, 0.0)
        v = (v.to(tl.float32) + other.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row * hidden + at, v, real)
    v = v.to(tl.float32)
    v = v * tl.rsqrt(tl.sum(v * v, 0) / hidden + eps)
    w = tl.load(weight + at, real, 0.0).to(tl.float32)
    tl.store(normed + row * hidden + at, (v * w).to(normed.dtype.element_ty), real)


@triton.jit
def _gate(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < width
    g = tl.load(gate_up + row * 2 * width + at, real, 0.0).to(tl.float32)
    u = tl.load(gate_up + row * 2 * width + width + at, real, 0.0).to(tl.float32)
    tl.store(out + row * width + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), real)


@triton.jit
def _place(
    qkv,
    cos,
    sin,
    scale,
    slots,
    positions,
    queries,
    keys,
    values,
    context,
    eps,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, DIM)
    turned = (at + DIM // 2) % DIM
    source = qkv + (row * (HEADS + 2 * KV) + head) * DIM
    slot = tl.load(slots + row)
    position = tl.load(positions + row)
    if head < HEADS + KV:
        v = tl.load(source + at).to(tl.float32)
        w = tl.load(source + turned).to(tl.float32)
        if NORM:
            root = tl.rsqrt(tl.sum(v * v, 0) / DIM + eps)
            v = v * root * tl.load(scale + head * DIM + at).to(tl.float32)
            w = w * root * tl.load(scale + head * DIM + turned).to(tl.float32)
        c = tl.load(cos + position * DIM + at).to(tl.float32)
        s = tl.load(sin + position * DIM + at).to(tl.float32)
        v = v * c + w * s
        if head < HEADS:
            tl.store(queries + (row * HEADS + head) * DIM + at, v.to(queries.dtype.element_ty))
        else:
            there = ((slot * KV + head - HEADS) * context + position) * DIM
            tl.store(keys + there + at, v.to(keys.dtype.element_ty))
    else:
        there = ((slot * KV + head - HEADS - KV) * context + position) * DIM
        tl.store(values + there + at, tl.load(source + at))


@triton.jit
def _attend(
    queries,
    keys,
    values,
    slots,
    positions,
    out,
    parts,
    peaks,
    context,
    factor,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    part = tl.program_id(2)
    length = tl.load(positions + row) + 1
    blocks = tl.cdiv(tl.cdiv(length, KEYS), SPLIT)
    first = part * blocks * KEYS
    last = tl.minimum(first + blocks * KEYS, length)
    head = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    key = tl.arange(0, KEYS)
    mine = (row * KV + kv) * GROUP + head
    q = tl.load(queries + mine[:, None] * DIM + dim[None, :], (head < GROUP)[:, None], 0.0)
    base = (tl.load(slots + row) * KV + kv) * context
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIM], tl.float32)
    for start in range(first, last, KEYS):
        at = start + key
        real = at < last
        rows = (base + at)[:, None] * DIM + dim[None, :]
        k = tl.load(keys + rows, real[:, None], 0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * factor
        score = tl.where(real[None, :], score, float("-inf"))
        now = tl.maximum(peak, tl.max(score, 1))
        p = tl.exp(score - now[:, None])
        old = tl.exp(peak - now)
        v = tl.load(values + rows, real[:, None], 0.0)
        sums = sums * old[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        weight = weight * old + tl.sum(p, 1)
        peak = now
    if SPLIT == 1:
        done = sums / weight[:, None]
        tl.store(out + mine[:, None] * DIM + dim[None, :], done.to(out.dtype.element_ty), (head < GROUP)[:, None])
    else:
        place = mine * SPLIT + part
        tl.store(parts + place[:, None] * DIM + dim[None, :], sums, (head < GROUP)[:, None])
        tl.store(peaks + place * 2, peak, head < GROUP)
        tl.store(peaks + place * 2 + 1, weight, head < GROUP)


@triton.jit
def _join(parts, peaks, out, DIM: tl.constexpr, SPLIT: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SPLIT)
    dim = tl.arange(0, DIM)
    peak = tl.load(peaks + (head * SPLIT + part) * 2)
    weight = tl.load(peaks + (head * SPLIT + part) * 2 + 1)
    share = tl.exp(peak - tl.max(peak, 0))  # a part without keys has a peak of minus infinity, and share 0
    sums = tl.load(parts + (head * SPLIT + part)[:, None] * DIM + dim[None, :])
    done = tl.sum(sums * share[:, None], 0) / tl.sum(weight * share, 0)
    tl.store(out + head * DIM + dim, done.to(out.dtype.element_ty))


class TritonOperations(TorchOperations):
    """Implementation in fused Triton kernels."""

    ragged = True

    def __init__(self, architecture: Architecture, tables: Sequence[Tables]) -> None:
        """`ValueError` for an architecture that is not `uniform`."""
        if not architecture.uniform:
            raise ValueError(f"{architecture.family} is not uniform")
        super().__init__(architecture, [(cos.contiguous(), sin.contiguous()) for cos, sin in tables])

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        assert weight is not None
        rows, hidden = x.shape
        total, normed = x if delta is None else empty_like(x), empty_like(x)
        block = triton.next_power_of_2(hidden)
        _add_norm[(rows,)](
            x,
            x if delta is None else delta,
            weight,
            total,
            normed,
            hidden,
            self.architecture.norm_eps,
            ADD=delta is not None,
            BLOCK=block,
            num_warps=min(8, max(1, block // 256)),
        )
        return total, normed

    def gate(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
        _gate[(rows, triton.cdiv(width, 1024))](gate_up, out, width, BLOCK=1024, num_warps=4)
        return out

    def place(
        self,
        qkv: Tensor,
        scale: Tensor | None,
        slots: Tensor,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        table: int | None = 0,
    ) -> Tensor:
        assert table is not None
        cos, sin = self.tables[table]
        rows, heads = qkv.shape[0], self.architecture.heads
        _, kv, context, dim = keys.shape
        queries = empty((rows, heads, dim), dtype=qkv.dtype, device=qkv.device)
        _place[(rows, heads + 2 * kv)](
            qkv,
            cos,
            sin,
            cos if scale is None else scale,
            slots,
            positions,
            queries,
            keys,
            values,
            context,
            self.architecture.norm_eps,
            HEADS=heads,
            KV=kv,
            DIM=dim,
            NORM=scale is not None,
            num_warps=1,
        )
        return queries

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        positions: Tensor,
        length: int,
        window: int | None = None,
    ) -> Tensor:
        rows, heads, dim = queries.shape
        _, kv, context, _ = keys.shape
        splits = 1
        while splits < SPLITS and rows * kv * splits < WAVE and splits * KEYS < context:
            splits *= 2
        stages = 1 + max(0, min(2, IN_FLIGHT // (2 * KEYS * dim * keys.element_size())))
        out = empty((rows, heads * dim), dtype=queries.dtype, device=queries.device)
        parts = peaks = out
        if splits > 1:
            parts = empty((rows * heads, splits, dim), dtype=float32, device=queries.device)
            peaks = empty((rows * heads, splits, 2), dtype=float32, device=queries.device)
        _attend[(rows, kv, splits)](
            queries,
            keys,
            values,
            slots,
            positions,
            out,
            parts,
            peaks,
            context,
            dim**-0.5,
            KV=kv,
            GROUP=heads // kv,
            DIM=dim,
            SPLIT=splits,
            KEYS=KEYS,
            ROWS=max(ROWS, triton.next_power_of_2(heads // kv)),
            num_warps=4,
            num_stages=stages,
        )
        if splits > 1:
            _join[(rows * heads,)](parts, peaks, out, DIM=dim, SPLIT=splits, num_warps=2)
        return out
