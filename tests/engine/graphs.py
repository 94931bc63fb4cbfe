"""CUDA graphs on a CPU: operators between a graph's begin and end are recorded with their tensors, and a replay runs
exactly those again. So a value that a graph wrongly treats as constant (a number read on the host, a tensor that has
moved since) gives wrong results here as on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["play"]


class _Graph(TorchDispatchMode):
    """Stands for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[tuple[Callable[..., Any], Any, Any, Any, list[int]]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.written.append((func, args, kwargs or {}, out, _places((args, kwargs))))
        return out

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out, places in self.written:
            assert _places((args, kwargs)) == places, f"what {func} reads has moved since"
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():  # a graph's results keep their address
                    old.copy_(new)


def _places(values: Any) -> list[int]:
    return [value.data_ptr() for value in tree_leaves(values) if isinstance(value, Tensor)]


class _Stream:
    def wait_stream(self, other: object) -> None:
        pass


def play(monkeypatch: pytest.MonkeyPatch, *, fails: str = "") -> list[_Graph]:
    """Emulate CUDA graphs from now on; returns the captured graphs. `fails`: every capture ends with this error."""
    made: list[_Graph] = []
    current: list[_Stream] = [_Stream()]

    def new() -> _Graph:
        made.append(_Graph())
        return made[-1]

    @contextlib.contextmanager
    def graph(one: _Graph, *, pool: object, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        assert (pool is None) == (len(made) == 1), "all share the first one's memory"
        before, current[0] = current[0], _Stream()
        with one:
            yield
        if fails:  # as in PyTorch, the end raises before the stream is restored
            raise RuntimeError(fails)
        current[0] = before

    @contextlib.contextmanager
    def stream(one: _Stream) -> Iterator[None]:
        before, current[0] = current[0], one
        yield
        current[0] = before

    monkeypatch.setattr("torch.cuda.CUDAGraph", new)
    monkeypatch.setattr("torch.cuda.graph", graph)
    monkeypatch.setattr("torch.cuda.stream", stream)
    monkeypatch.setattr("torch.cuda.Stream", lambda device: _Stream())
    monkeypatch.setattr("torch.cuda.current_stream", lambda: current[0])
    monkeypatch.setattr("torch.cuda.set_stream", lambda one: current.__setitem__(0, one))
    return made
