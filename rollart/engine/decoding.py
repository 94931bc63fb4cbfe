"""Decode steps on GPUs: one launch of a captured CUDA graph per step.

A decode step reads the weights and the KV once and hardly computes, so launching its operators one by one takes longer
than running them. Here all shapes are fixed. Rows are padded to the next of a few sizes; padding rows write into a slot
of the cache that no sequence uses. The inputs of a step (tokens, positions, slots, and adapters if there are some) are
copied to a fixed device buffer before the graph runs. The step waits for the device only once, for the sampled tokens.

Weights are loaded in place (`Network.load`) and the cache never moves, so graphs stay valid for an engine's life.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollart.architecture import Architecture
from rollart.engine.cache import KvCache
from rollart.engine.network import Network
from rollart.engine.operations import TorchOperations
from rollart.engine.rotary import Tables

Ints = npt.NDArray[np.int64]

MIN_CAPTURED_LENGTH = 64
"""Minimum length for which attention over rows of equal length is captured; masks are aligned to 16 bytes."""

WARM_UPS = 2
"""Runs before a capture, in which libraries allocate and select algorithms, and kernels are compiled."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest ‖theirs − ours‖ / ‖ours‖ that counts as rounding."""

COMPARED_POSITIONS = 512
"""Number of positions on which the kernels are compared."""


class GraphDecoder:
    """Owns the graphs and their input buffers. Only the runner's thread uses it, one call at a time; each call
    overwrites the logits that the previous one returned. The last slot of `cache` is for padding rows: the runner does
    not use it."""

    def __init__(
        self, network: Network, cache: KvCache, *, operations: TorchOperations | None = None, capture: bool = True
    ) -> None:
        """`capture` False runs the same step operator by operator, for devices other than GPUs. So does a network with
        experts: the numbers of their rows are no fixed shapes."""
        experts = network.architecture.experts is not None
        self._network, self._cache, self._capture = network, cache, capture and not experts
        self.why = ""
        """Reason for using PyTorch's operators instead of the fused ones, or for using no graph; '' otherwise."""
        if operations is None:
            operations, self.why = select_operations(network.architecture, network.tables, network.dtype)
        if experts and not self.why:
            self.why = "no CUDA graph: the rows of an expert are no fixed shape"
        self.operations = operations
        self._sizes = captured_sizes(cache.slots - 1)
        self.graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None
        self._inputs = 3 if network.adapters is None else 4
        most = self._inputs * _stride(self._sizes[-1])
        self._device = torch.zeros(most, dtype=torch.int64, device=network.device)
        self._host = torch.zeros(most, dtype=torch.int64, pin_memory=network.device.type == "cuda")
        self._copied = torch.cuda.Event() if network.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture a graph for every number of rows now, while no request waits: compiling the kernels takes seconds,
        once. The largest comes first, so that the others share its memory. Does nothing if graphs also depend on the
        length, which has too many values."""
        if not self.operations.ragged:
            return
        for rows in reversed(self._sizes):
            if not self._capture or self._captured(rows, self._cache.context) is None:
                return

    def step(
        self,
        tokens: Ints,
        positions: Ints,
        slots: Ints,
        chosen: list[Tensor] | None = None,
        adapters: Ints | None = None,
    ) -> Tensor:
        """Logits `[R, vocab]` fp32 after the tokens `[R]`, each at its position in its slot. Writes the tokens' KV into
        the cache. `chosen` receives the experts of each layer that has some `[R, active]`. `adapters` `[R]`: the
        numbers of the rows', in a network with some."""
        n, context = len(tokens), self._cache.context
        rows = next(size for size in self._sizes if size >= n)
        # The longest row's length, rounded up to a power of two within [`MIN_CAPTURED_LENGTH`, `context`].
        padded = min(context, max(MIN_CAPTURED_LENGTH, 1 << int(positions.max()).bit_length()))
        length = context if self.operations.ragged else padded
        found = (self.graphs.get((rows, length)) or self._captured(rows, length)) if self._capture else None
        if self._copied is not None:
            self._copied.synchronize()  # the last step's copy ended long ago: its tokens were waited for
        staged = step_inputs(self._host, rows, self._inputs).numpy()
        staged[:3, :n] = tokens, positions, slots
        staged[:3, n:] = [[0], [0], [self._cache.slots - 1]]
        if self._inputs > 3:
            staged[3] = 0
            staged[3, :n] = adapters
        used = self._inputs * _stride(rows)  # contiguous, so that one copy from pinned memory suffices
        self._device[:used].copy_(self._host[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        if found is None:
            logits = self._run(rows, length, chosen)[:n]
            if chosen is not None:
                chosen[:] = [numbers[:n] for numbers in chosen]
            return logits
        graph, logits = found
        graph.replay()
        return logits[:n]

    def _run(self, rows: int, length: int, chosen: list[Tensor] | None = None) -> Tensor:
        tokens, positions, slots, *others = step_inputs(self._device, rows, self._inputs)[:, :rows]
        adapters = others[0] if others else None
        return self._network.decode(tokens, positions, slots, self._cache, self.operations, length, chosen, adapters)

    def _captured(self, rows: int, length: int) -> tuple[torch.cuda.CUDAGraph, Tensor] | None:
        """Capture the step as a graph. None, now and in future, if this device or driver cannot. All rows are padding:
        what a capture runs before the step would move the states of linear attention on."""
        self._device.fill_(0)
        step_inputs(self._device, rows, self._inputs)[2] = self._cache.slots - 1
        current_stream = torch.cuda.current_stream()
        try:
            capture_stream = torch.cuda.Stream(self._network.device)  # type: ignore[no-untyped-call]
            capture_stream.wait_stream(current_stream)
            with torch.cuda.stream(capture_stream):
                for _ in range(WARM_UPS):
                    self._run(rows, length)
            current_stream.wait_stream(capture_stream)
            graph = torch.cuda.CUDAGraph()
            # Checks only this thread: the server's other threads may copy KV during the capture.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                logits = self._run(rows, length)
        except RuntimeError as error:
            # A capture that fails at its end leaves the thread on the capture's stream.
            torch.cuda.set_stream(current_stream)
            self._capture = False
            self.why = f"no CUDA graph: {str(error).splitlines()[0][:200]}"
            return None
        self._pool = self._pool or graph.pool()
        self.graphs[rows, length] = graph, logits
        return graph, logits


def _stride(rows: int) -> int:
    """Elements between the starts of the inputs: kernels are compiled for addresses aligned to 16 bytes."""
    return rows + rows % 2


def step_inputs(buffer: Tensor, rows: int, inputs: int = 3) -> Tensor:
    """Tokens, positions, slots and possibly adapters `[inputs, rows (rounded up to even)]` at the start of the
    buffer."""
    return buffer[: inputs * _stride(rows)].view(inputs, _stride(rows))


def captured_sizes(most: int) -> Sequence[int]:
    """Row counts to capture, ascending, up to `most`: powers of two and the midpoints between them, so that at most a
    third of the rows is padding."""
    steps = {1, 2, 3, most}
    size = 4
    while size < most:
        steps |= {size, size * 3 // 2}
        size *= 2
    return tuple(sorted(s for s in steps if s <= most))


def select_operations(
    architecture: Architecture, tables: Sequence[Tables], dtype: torch.dtype
) -> tuple[TorchOperations, str]:
    """The operations for this device, and the reason for not using the fused ones ('' if they are used): their results
    on this device must match those of PyTorch."""
    plain = TorchOperations(architecture, tables)
    if not architecture.uniform:
        return plain, f"fused kernels are for decoders like Llama's, not {architecture.family}"
    (cos, _), *_ = tables
    if cos.device.type != "cuda":
        return plain, f"fused kernels are for CUDA devices, this is {cos.device.type}"
    try:
        from rollart.engine.kernels import TritonOperations

        fused = TritonOperations(architecture, tables)
        found = operation_differences(plain, fused, context=min(cos.shape[0], COMPARED_POSITIONS))
    except Exception as error:  # e.g. no Triton, an unsupported head dimension, no compiler
        return plain, f"fused kernels do not run here: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
    bad = {name: value for name, value in found.items() if not value <= TOLERANCE[dtype]}
    if bad:
        return plain, "fused kernels differ from PyTorch: " + ", ".join(f"{n} by {v:.1e}" for n, v in bad.items())
    return fused, ""


def operation_differences(
    ours: TorchOperations, theirs: TorchOperations, *, context: int, rows: Sequence[int] = (1, 3, 48)
) -> dict[str, float]:
    """‖theirs − ours‖ / ‖ours‖ of each operation on random values, the maximum over `rows`. Destinations of writes are
    filled with NaN first, so that missing writes are detected."""
    a, (cos, _) = ours.architecture, ours.tables[0]
    device = cos.device
    g = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=device).to(cos.dtype)

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
        scale = random(a.heads + a.kv_heads, a.head_dim) if a.qk_norm != "none" else None
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
