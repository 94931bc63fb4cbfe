"""Assigns each rank its own GPU, out of the GPUs visible to its process (`CUDA_VISIBLE_DEVICES`)."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import Store

from rollart.errors import UsageError


def select_gpu(local: int, here: int) -> int:
    """The number of the GPU of rank `local` out of `here` ranks on this host. `UsageError` if there are too few
    GPUs."""
    if not torch.cuda.is_available():
        raise UsageError("device 'cuda': torch sees no CUDA device")
    return gpu_index(local, here, torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def gpu_index(local: int, here: int, visible: int, variable: str | None) -> int:
    """Refuses two ranks on one GPU: each would take its memory, and NCCL refuses them only after minutes."""
    needed = max(here, local + 1)
    if needed > visible:
        why = "is not set" if variable is None else f"is {variable!r}"
        raise UsageError(
            f"{needed} ranks on this host need a GPU each, and torch sees {visible} (CUDA_VISIBLE_DEVICES {why})",
            remedy="lower parallel.ranks (trainer.ranks of the cluster), or make more GPUs visible",
        )
    return local


def refuse_shared(store: Store, gpu: str, *, rank: int, size: int) -> None:
    """Publish this rank's GPU (its UUID) to all ranks. `UsageError`, on every rank, if two ranks have the same GPU.
    Waits for all."""
    store.set(f"gpu/{rank}", gpu)
    gpus = [store.get(f"gpu/{other}").decode() for other in range(size)]
    pair = shared_gpu(gpus)
    if pair is not None:
        a, b = pair
        raise UsageError(
            f"ranks {a} and {b} share the GPU {gpus[a]} (rule: one each)",
            remedy="start each with its own --local, or with a CUDA_VISIBLE_DEVICES of its own",
        )


def shared_gpu(gpus: Sequence[str]) -> tuple[int, int] | None:
    """The first two ranks with the same GPU."""
    first: dict[str, int] = {}
    for rank, gpu in enumerate(gpus):
        if gpu in first:
            return first[gpu], rank
        first[gpu] = rank
    return None
