"""The operations of a decode step between its matrix products: one row per sequence, all shapes fixed.

`TorchOperations` uses PyTorch, on any device. `TritonOperations` uses a few fused kernels (`kernels.py`) on GPUs with
Triton; `select_operations` takes it only if its results on this device match those of `TorchOperations`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rollart.architecture import Architecture

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest ‖theirs − ours‖ / ‖ours‖ that counts as rounding."""

COMPARED_POSITIONS = 512
"""Number of positions on which the kernels are compared."""


class TorchOperations:
    """Implementation in PyTorch. `cos` and `sin` `[context, 1, head_dim]` are the rotary tables; `sin` has the sign.

    `keys` and `values` are one layer's cache, `[slots, kv_heads, context, head_dim]`. `slots` and `positions` `[R]` are
    the location of each row's token, which attends up to its position. `length` bounds the positions."""

    ragged = False
    """True if `attend` reads each row up to its own position; otherwise it reads all rows up to `length`."""

    def __init__(self, architecture: Architecture, cos: Tensor, sin: Tensor) -> None:
        self._a, self._cos, self._sin = architecture, cos, sin

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        x = x if delta is None else x + delta
        return x, F.rms_norm(x, (x.shape[-1],), weight, self._a.norm_eps)

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def place(
        self, qkv: Tensor, scale: Tensor | None, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        a = self._a
        qkv = qkv.view(qkv.shape[0], a.heads + 2 * a.kv_heads, a.head_dim)
        qk = qkv[:, : a.heads + a.kv_heads]
        if scale is not None:
            qk = F.rms_norm(qk, (a.head_dim,), None, a.norm_eps) * scale
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        qk = torch.addcmul(qk * cos, qk.roll(a.head_dim // 2, -1), sin)
        context = keys.shape[2]
        heads = torch.arange(a.kv_heads, device=qkv.device)
        index = ((slots[:, None] * a.kv_heads + heads) * context + positions[:, None]).view(-1)
        for cache, new in ((keys, qk[:, a.heads :]), (values, qkv[:, a.heads + a.kv_heads :])):
            cache.view(-1, a.head_dim).index_copy_(0, index, new.reshape(-1, a.head_dim))
        return qk[:, : a.heads]

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor, length: int
    ) -> Tensor:
        a, rows = self._a, queries.shape[0]
        hidden = torch.arange(length, device=queries.device) > positions[:, None]
        mask = torch.zeros(hidden.shape, device=queries.device, dtype=queries.dtype)
        mask = mask.masked_fill_(hidden, float("-inf")).view(rows, 1, 1, length)
        k, v = (cache[:, :, :length].index_select(0, slots) for cache in (keys, values))
        folded = queries.reshape(rows, a.kv_heads, a.group, a.head_dim)
        return F.scaled_dot_product_attention(folded, k, v, attn_mask=mask).reshape(rows, -1)


class TritonOperations(TorchOperations):
    """Implementation in fused Triton kernels. Needs Triton."""

    ragged = True

    def __init__(self, architecture: Architecture, cos: Tensor, sin: Tensor) -> None:
        from rollart.engine import kernels

        super().__init__(architecture, cos.contiguous(), sin.contiguous())
        self._kernels = kernels

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self._kernels.add_norm(x, delta, weight, self._a.norm_eps)

    def gate(self, gate_up: Tensor) -> Tensor:
        return self._kernels.gate(gate_up)

    def place(
        self, qkv: Tensor, scale: Tensor | None, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        return self._kernels.place(
            qkv, self._cos, self._sin, scale, slots, positions, keys, values, heads=self._a.heads, eps=self._a.norm_eps
        )

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor, length: int
    ) -> Tensor:
        return self._kernels.attend(queries, keys, values, slots, positions)


def select_operations(architecture: Architecture, cos: Tensor, sin: Tensor) -> tuple[TorchOperations, str]:
    """The operations for this device, and the reason for not using the fused ones ('' if they are used)."""
    plain = TorchOperations(architecture, cos, sin)
    if cos.device.type != "cuda":
        return plain, f"fused kernels are for CUDA devices, this is {cos.device.type}"
    try:
        fused = TritonOperations(architecture, cos, sin)
        found = operation_differences(
            architecture,
            plain,
            fused,
            device=cos.device,
            dtype=cos.dtype,
            context=min(cos.shape[0], COMPARED_POSITIONS),
        )
    except Exception as error:  # e.g. no Triton, an unsupported head dimension, no compiler
        return plain, f"fused kernels do not run here: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
    bad = {name: value for name, value in found.items() if not value <= TOLERANCE[cos.dtype]}
    if bad:
        return plain, "fused kernels differ from PyTorch: " + ", ".join(f"{n} by {v:.1e}" for n, v in bad.items())
    return fused, ""


def operation_differences(
    a: Architecture,
    ours: TorchOperations,
    theirs: TorchOperations,
    *,
    device: torch.device,
    dtype: torch.dtype,
    context: int,
    rows: Sequence[int] = (1, 3, 48),
) -> dict[str, float]:
    """‖theirs − ours‖ / ‖ours‖ of each operation on random values, the maximum over `rows`. Destinations of writes are
    filled with NaN first, so that missing writes are detected."""
    g = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=device).to(dtype)

    found: dict[str, float] = {}

    def compare(name: str, one: Tensor, other: Tensor) -> None:
        one, other = one.double(), other.double()
        difference = float((one - other).norm() / one.norm())
        worst = max(found.get(name, 0.0), difference)
        found[name] = difference if difference != difference else worst  # NaN stays

    for n in rows:
        x, delta, weight = random(n, a.hidden), random(n, a.hidden), random(a.hidden)
        for before in (None, delta):
            for one, other in zip(ours.add_norm(x, before, weight), theirs.add_norm(x, before, weight), strict=True):
                compare("add_norm", one, other)
        wide = random(n, 2 * a.intermediate)
        compare("gate", ours.gate(wide), theirs.gate(wide))
        slots = torch.randperm(n + 2, generator=g, device=device)[:n]
        positions = torch.randint(0, context, (n,), generator=g, device=device)
        positions[0] = context - 1
        qkv = random(n, (a.heads + 2 * a.kv_heads) * a.head_dim)
        scale = random(a.heads + a.kv_heads, a.head_dim) if a.qk_norm else None
        caches = [random(2, n + 2, a.kv_heads, context, a.head_dim)]
        caches[0][:, slots, :, positions] = float("nan")
        caches.append(caches[0].clone())
        queries = [
            of.place(qkv, scale, slots, positions, cache[0], cache[1])
            for of, cache in zip((ours, theirs), caches, strict=True)
        ]
        compare("place", *(q.reshape(n, -1) for q in queries))
        compare("place", *caches)
        compare(
            "attend",
            *(
                of.attend(queries[0].contiguous(), caches[0][0], caches[0][1], slots, positions, context)
                for of in (ours, theirs)
            ),
        )
    return found
