"""The processes of one trainer: how they start, which GPU each has, how they meet, and their communication.

Rank 0 serves; the others repeat each of its commands at the same time. Every rank receives every command with all
samples (29 bytes per token), so that all ranks refuse the same input, advantages are computed over the whole batch, and
only the forward and backward passes are split. A process has three *channels*, one per worker thread: for torch, the
disk, and broadcasts to engines. They are gloo groups on the CPU, never NCCL: an idle rank may wait in them for hours.

The first rank of a host starts the others as child processes, unless a launcher (a job queue, with `--rank` and
`--meet`) starts every rank itself. Each rank has its own GPU, out of those visible to its process
(`CUDA_VISIBLE_DEVICES`).
"""

from __future__ import annotations

import contextlib
import datetime
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from rollart.errors import TrainerError, UsageError, first_line

IDLE_TIMEOUT = datetime.timedelta(days=365)
"""Ranks wait for the next command as long as the run lasts; the connection closes when the leader is lost."""

START_TIMEOUT = datetime.timedelta(minutes=10)
"""Longest wait of ranks for each other at the start: imports from a cold disk take a minute."""


class Ranks:
    """This process among the ranks of its trainer, made by `join_ranks`. `Ranks()` is a trainer of one process, which
    never loads a communication library, and whose methods do nothing."""

    def __init__(self, *, rank: int = 0, size: int = 1, device: torch.device | None = None) -> None:
        self.rank, self.size = rank, size
        self.torch = self.disk = self.wire = SINGLE_RANK
        self.mesh: Any = None
        self.device = device
        if device is not None:
            from torch.distributed.device_mesh import DeviceMesh

            world = dist.group.WORLD
            assert world is not None, "the ranks have met"
            self.mesh = DeviceMesh.from_group(world, device.type)
            self.torch, self.disk, self.wire = (
                RankChannel(dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT), rank=rank, size=size)
                for _ in range(3)
            )

    def enter(self, threads: int) -> None:
        """Call first in every thread that computes: sets its number of cores, and this rank's GPU. Each thread has its
        own current device, initially device 0, on which FSDP2 creates its streams."""
        torch.set_num_threads(threads)
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def totals(self, values: Sequence[float], device: torch.device) -> list[float]:
        """The sum of each value over the ranks."""
        if self.size == 1:
            return list(values)
        out: list[float] = self.total(torch.tensor(list(values), dtype=torch.float64, device=device)).tolist()
        return out

    def assemble(self, rows: Tensor, *, of: int, owner: int) -> Tensor | None:
        """Gather a parameter on one rank from the rows of all ranks (`row_range`): [of, …] in host memory there,
        None on the others."""
        if self.size == 1:
            return rows.detach().to("cpu", copy=True)
        chunk = -(-of // self.size)
        padded = torch.zeros((chunk, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
        padded[: len(rows)] = rows.detach()
        parts = [torch.empty_like(padded) for _ in range(self.size)] if owner == self.rank else None
        dist.gather(padded, parts, dst=owner)
        return None if parts is None else torch.cat(parts)[:of].cpu()


class RankChannel:
    """Connects one thread of each rank: rank 0 announces a command, all ranks execute it, and all learn every
    outcome."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, rank: int = 0, size: int = 1) -> None:
        self._group, self._rank, self._size = group, rank, size

    @property
    def leads(self) -> bool:
        return self._rank == 0

    def send_command(self, command: str, body: bytes) -> None:
        """On rank 0: send a command, which `receive_command` returns on the others. `TrainerError` if that fails."""
        if self._size > 1:
            with _lost_ranks_refused():
                dist.broadcast_object_list([command, body], 0, self._group)

    def receive_command(self) -> tuple[str, bytes]:
        """On other ranks: the next command. `TrainerError` after rank 0 is gone."""
        message: list[Any] = [None, None]
        with _lost_ranks_refused():
            dist.broadcast_object_list(message, 0, self._group)
        return message[0], message[1]

    def exchange(self, mine: Any) -> list[Any]:
        """The value of each rank, by rank. Waits for all."""
        if self._size == 1:
            return [mine]
        out: list[Any] = [None] * self._size
        with _lost_ranks_refused():
            dist.all_gather_object(out, mine, self._group)
        return out

    def agree(self, problem: TrainerError | None) -> None:
        """Raise on every rank if any rank has a problem: its own, else the first one, prefixed with its rank."""
        problems = self.exchange(None if problem is None else (type(problem), problem.message, problem.remedy))
        if problem is not None:
            raise problem
        for rank, other in enumerate(problems):
            if other is not None:
                kind, line, remedy = other
                raise kind(f"rank {rank}: {line}", remedy=remedy)


SINGLE_RANK = RankChannel()


def rendezvous(host: str, port: int, *, rank: int, size: int) -> TCPStore:
    """The rendezvous store; rank 0 opens it (port 0: any). `UsageError` if it cannot be opened or reached."""
    try:
        return TCPStore(host, port, size, is_master=rank == 0, timeout=START_TIMEOUT, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        verb = "open" if rank == 0 else "reach"
        raise UsageError(
            f"rank {rank} cannot {verb} the ranks' meeting point {host}:{port}: {first_line(error, 200)}"
        ) from error


def join_ranks(store: TCPStore, device: torch.device, *, rank: int, size: int) -> Ranks:
    """Connect to the other ranks, once per process: NCCL between GPUs, gloo between CPUs. Blocks until all are present.
    `UsageError` if they do not come, or if NCCL cannot connect them, which would otherwise show at the first step."""
    gpu = device if device.type == "cuda" else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    try:
        dist.init_process_group(
            "gloo" if gpu is None else "nccl",
            store=store,
            rank=rank,
            world_size=size,
            timeout=START_TIMEOUT,
            device_id=gpu,
        )
        return Ranks(rank=rank, size=size, device=device)
    except RuntimeError as error:
        raise UsageError(f"rank {rank} of {size} did not meet the others: {first_line(error, 200)}") from error


class LocalRankProcesses:
    """Owns the processes, each with a thread that waits for its exit. `lost` may be replaced at any time; it is called
    once, from that thread, for the first exit before `stop`, with a text that names the rank and the cause."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self.lost: Callable[[str], object] | None = None
        self._stopping = False

    def start(self, arguments: Sequence[str], *, first: int, here: int, ranks: int) -> None:
        """Start the `here` − 1 ranks after `first`, each with `arguments` and its numbers. Call it from the main
        thread: the processes die with the thread that started them."""
        for local in range(1, here):
            rank = first + local
            numbers = ["--rank", str(rank), "--local", str(local)]
            command = [sys.executable, "-m", "rollart.train", *arguments, *numbers]
            # stdout is reserved for this process's "ready" line; output of followers goes to the log.
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno())
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(rank, ranks, process), daemon=True).start()

    def stop(self) -> None:
        """Kill and reap all processes: a follower holds no state that must survive."""
        with self._lock:
            self._stopping = True
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()

    def _watch(self, rank: int, ranks: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        with self._lock:
            lost, self.lost = self.lost, None
            if lost is not None and not self._stopping:
                lost(f"rank {rank} of {ranks} (process {process.pid}) {how}")


def select_gpu(local: int, here: int) -> int:
    """The number of the GPU of rank `local` out of `here` ranks on this host. `UsageError` if there are too few GPUs:
    two ranks on one would each take its memory, and NCCL refuses them only after minutes."""
    if not torch.cuda.is_available():
        raise UsageError("device 'cuda': torch sees no CUDA device")
    visible, variable = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
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
    first: dict[str, int] = {}
    for other in range(size):
        shared = store.get(f"gpu/{other}").decode()
        if first.setdefault(shared, other) != other:
            raise UsageError(
                f"ranks {first[shared]} and {other} share the GPU {shared} (rule: one each)",
                remedy="start each with its own --local, or with a CUDA_VISIBLE_DEVICES of its own",
            )


@contextlib.contextmanager
def _lost_ranks_refused() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise TrainerError(
            f"the trainer's ranks lost each other: {first_line(error, 200)}", remedy="it is restarted and restored"
        ) from error
