"""Decode steps on GPUs: one launch of a captured CUDA graph per step.

A decode step reads the weights and the KV once and hardly computes, so launching its operators one by one takes longer
than running them. Here all shapes are fixed. Rows are padded to the next of a few sizes; padding rows write into a slot
of the cache that no sequence uses. The inputs of a step (tokens, positions, slots) are copied to a fixed device buffer
before the graph runs. The step waits for the device only once, for the sampled tokens.

Weights are loaded in place (`Network.load`) and the cache never moves, so graphs stay valid for an engine's life.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollart.engine.cache import KvCache
from rollart.engine.network import Network
from rollart.engine.operations import TorchOperations, select_operations

Ints = npt.NDArray[np.int64]

MIN_CAPTURED_LENGTH = 64
"""Minimum length for which attention over rows of equal length is captured; masks are aligned to 16 bytes."""

WARM_UPS = 2
"""Runs before a capture, in which libraries allocate and select algorithms, and kernels are compiled."""


class GraphDecoder:
    """Owns the graphs and their input buffers. Only the runner's thread uses it, one call at a time; each call
    overwrites the logits that the previous one returned. The last slot of `cache` is for padding rows: the runner does
    not use it."""

    def __init__(
        self, network: Network, cache: KvCache, *, operations: TorchOperations | None = None, capture: bool = True
    ) -> None:
        """`capture` False runs the same step operator by operator, for devices other than GPUs."""
        self._network, self._cache, self._capture = network, cache, capture
        self.why = ""
        """Reason for using PyTorch's operators instead of the fused ones, or for using no graph; '' otherwise."""
        if operations is None:
            operations, self.why = select_operations(network.architecture, *network.rope)
        self.operations = operations
        self._sizes = captured_sizes(cache.slots - 1)
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None
        most = 3 * _stride(self._sizes[-1])
        self._device = torch.zeros(most, dtype=torch.int64, device=network.device)
        self._host = torch.zeros(most, dtype=torch.int64, pin_memory=network.device.type == "cuda")
        self._copied = torch.cuda.Event() if network.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def graphs(self) -> int:
        """Number of captured graphs."""
        return len(self._graphs)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture a graph for every number of rows now, while no request waits: compiling the kernels takes seconds,
        once. The largest comes first, so that the others share its memory. Does nothing if graphs also depend on the
        length, which has too many values."""
        if not self.operations.ragged:
            return
        self._device.fill_(0)
        for rows in reversed(self._sizes):
            step_inputs(self._device, rows)[2] = self._cache.slots - 1
            if not self._capture or self._captured(rows, self._cache.context) is None:
                return

    def step(self, tokens: Ints, positions: Ints, slots: Ints) -> Tensor:
        """Logits `[R, vocab]` fp32 after the tokens `[R]`, each at its position in its slot. Writes the tokens' KV into
        the cache."""
        n, context = len(tokens), self._cache.context
        rows = next(size for size in self._sizes if size >= n)
        length = context if self.operations.ragged else _padded_length(int(positions.max()) + 1, context)
        if self._copied is not None:
            self._copied.synchronize()  # the last step's copy ended long ago: its tokens were waited for
        staged = step_inputs(self._host, rows).numpy()
        staged[:, :n] = tokens, positions, slots
        staged[:, n:] = [[0], [0], [self._cache.slots - 1]]
        used = 3 * _stride(rows)  # contiguous, so that one copy from pinned memory suffices
        self._device[:used].copy_(self._host[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        if not self._capture:
            return self._run(rows, length)[:n]
        found = self._graphs.get((rows, length)) or self._captured(rows, length)
        if found is None:
            return self._run(rows, length)[:n]
        graph, logits = found
        graph.replay()
        return logits[:n]

    def _run(self, rows: int, length: int) -> Tensor:
        tokens, positions, slots = step_inputs(self._device, rows)[:, :rows]
        return self._network.decode(tokens, positions, slots, self._cache, self.operations, length)

    def _captured(self, rows: int, length: int) -> tuple[torch.cuda.CUDAGraph, Tensor] | None:
        """Capture the step as a graph. None, now and in future, if this device or driver cannot."""
        current_stream = torch.cuda.current_stream()
        try:
            capture_stream = torch.cuda.Stream(self._network.device)  # type: ignore[no-untyped-call]
            capture_stream.wait_stream(current_stream)
            with torch.cuda.stream(capture_stream):
                for _ in range(WARM_UPS):  # harmless: they write the same values as the step
                    self._run(rows, length)
            current_stream.wait_stream(capture_stream)
            graph = torch.cuda.CUDAGraph()
            # Checks only this thread: the server's other threads may copy KV during the capture.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                logits = self._run(rows, length)
        except RuntimeError as error:
            torch.cuda.set_stream(
                current_stream
            )  # a capture that fails at its end leaves the thread on the capture's stream
            self._capture = False
            self.why = f"no CUDA graph: {str(error).splitlines()[0][:200]}"
            return None
        self._pool = self._pool or graph.pool()
        self._graphs[rows, length] = graph, logits
        return graph, logits


def _stride(rows: int) -> int:
    """Elements between the starts of the three inputs: kernels are compiled for addresses aligned to 16 bytes."""
    return rows + rows % 2


def step_inputs(buffer: Tensor, rows: int) -> Tensor:
    """Tokens, positions and slots `[3, rows (rounded up to even)]` at the start of the buffer."""
    return buffer[: 3 * _stride(rows)].view(3, _stride(rows))


def captured_sizes(most: int) -> Sequence[int]:
    """Row counts to capture, ascending, up to `most`: powers of two and the midpoints between them, so that at most a
    third of the rows is padding."""
    steps = {1, 2, 3, most}
    size = 4
    while size < most:
        steps |= {size, size * 3 // 2}
        size *= 2
    return tuple(sorted(s for s in steps if s <= most))


def _padded_length(length: int, context: int) -> int:
    """The length rounded up to a power of two, within [`MIN_CAPTURED_LENGTH`, `context`]."""
    size = MIN_CAPTURED_LENGTH
    while size < length:
        size *= 2
    return min(size, context)
