"""`python -m rollart.train --config trainer.json`: prints `ready http://host:port` on stdout once it serves.

With `parallel.ranks` above 1 in the config, this process is rank 0 and starts the others beside it. With `--meet` the
ranks are on several hosts, or started by an external launcher: one process per host, with its first rank (`--rank`)
and the number of ranks on its host (`--here`). Rank 0 opens the rendezvous, at any port with `--meet :0`, and prints
`meet HOST:PORT` before it waits there. The ranks of a host have one GPU each, in the order of the visible ones.

Ends at once with its parent and on SIGTERM: a publish is atomic, so no confirmed version is lost.
Exit codes: 0 stopped, 1 a rank ended before all were ready, 2 the config, the model or the port is wrong (one line on
stderr).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import os
import socket
import sys
from typing import TYPE_CHECKING

from rollart.lifeline import die_with_parent, stop_event

if TYPE_CHECKING:  # torch takes seconds to load: a port in use and a wrong config are reported first
    from rollart.errors import UsageError
    from rollart.settings.training import TrainerConfig
    from rollart.train.ranks import LocalRankProcesses
    from rollart.train.server import TrainerService

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
TRIM_THRESHOLD_BYTES = 1 << 30
"""glibc returns large blocks to the kernel at once and faults them in again at the next micro-batch: 8,000 to 20,000
page faults and 4–7 % of a step's CPU time at 120 tokens per sample. Blocks below this size are kept instead."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rollart.train", description="The embedded trainer.")
    parser.add_argument("--config", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument(
        "--rank", type=int, default=0, help="number of this rank, if an external launcher starts the ranks"
    )
    parser.add_argument("--meet", metavar="[HOST]:PORT", help="where the ranks meet; rank 0 opens it (host: --host)")
    parser.add_argument("--here", type=int, help="ranks on this host, this one first (default: all; with --meet 1)")
    parser.add_argument("--local", type=int, default=0, help="number of this rank on its host, and of its GPU")
    parser.add_argument("--leader", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    die_with_parent(arguments.leader or os.getppid(), code=0)
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, TRIM_THRESHOLD_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
    listener = None
    if arguments.rank == 0:
        host, port = arguments.host, arguments.port
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(128)
        except OSError as error:
            print(f"rollart.train: cannot listen on {host}:{port}: {error.strerror}", file=sys.stderr)
            return 2

    from rollart.errors import UsageError
    from rollart.train.config import load_config

    try:
        config = load_config(arguments.config)
    except UsageError as error:
        return _refused(arguments.rank, error)

    from rollart.train.ranks import LocalRankProcesses

    followers = LocalRankProcesses()
    try:
        service = join_service(arguments, config, followers)
    except UsageError as error:
        followers.stop()
        return _refused(arguments.rank, error)
    if listener is None:
        print(f"ready rank-{arguments.rank}", flush=True)
        service.follow()
        return 0
    asyncio.run(_serve(service, listener, followers))
    followers.stop()
    # A step may still be running in the worker thread, without a client that waits for it.
    sys.stdout.flush()
    os._exit(0)


def _refused(rank: int, error: UsageError) -> int:
    which = f"rank {rank}: " if rank else ""
    print(f"rollart.train: {which}{error}", file=sys.stderr)
    return 2


def join_service(arguments: argparse.Namespace, config: TrainerConfig, followers: LocalRankProcesses) -> TrainerService:
    """The trainer service, after all ranks have met. `UsageError` from its parts."""
    import torch

    from rollart.errors import UsageError
    from rollart.train.ranks import join_ranks, refuse_shared, rendezvous, select_gpu
    from rollart.train.server import TrainerService

    rank, size = arguments.rank, config.parallel.ranks
    here = arguments.here or (size if arguments.meet is None else 1)
    if not 0 <= rank < size:
        raise UsageError(f"--rank {rank}: the config has parallel.ranks {size}")
    if rank + here > size:
        raise UsageError(f"--rank {rank} --here {here}: the config has parallel.ranks {size}")
    if not config.parallel.sharded:
        return TrainerService(config, host=arguments.host)
    gpu = ""
    if config.device == "cuda":
        number = select_gpu(arguments.local, here)
        config = config.model_copy(update={"device": f"cuda:{number}"})
        gpu = str(torch.cuda.get_device_properties(number).uuid)
    host, colon, port = (arguments.meet or "127.0.0.1:0").rpartition(":")
    if not colon or not port.isdecimal():
        raise UsageError(f"--meet {arguments.meet} is not HOST:PORT")
    host = host.strip("[]") or arguments.host
    store = rendezvous(host, int(port), rank=rank, size=size)
    meet = f"{f'[{host}]' if ':' in host else host}:{store.port}"
    if arguments.meet is not None and rank == 0:
        print(f"meet {meet}", flush=True)
    if arguments.leader is None and here > 1:
        shared = ["--config", arguments.config, "--meet", meet, "--leader", str(os.getpid())]
        when = "" if rank else " before the trainer was ready"

        def lost(reason: str) -> None:
            """Before the trainer serves. On a host without rank 0, the launcher of this process sees its exit."""
            print(f"rollart.train: {reason}{when}", file=sys.stderr, flush=True)
            os._exit(1)

        followers.lost = lost
        followers.start(shared, first=rank, here=here, ranks=size)
    if gpu:
        refuse_shared(store, gpu, rank=rank, size=size)
    ranks = join_ranks(store, torch.device(config.device), rank=rank, size=size)
    service = TrainerService(config, ranks, host=arguments.host)
    ranks.torch.exchange("ready")
    return service


async def _serve(service: TrainerService, listener: socket.socket, followers: LocalRankProcesses) -> None:
    from aiohttp import web

    stop, loop = stop_event(), asyncio.get_running_loop()
    followers.lost = lambda reason: loop.call_soon_threadsafe(service.lost, reason)
    runner = web.AppRunner(service.app(), access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    host, port = listener.getsockname()[:2]
    print(f"ready http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    await stop.wait()
    await runner.cleanup()


if __name__ == "__main__":
    sys.exit(main())
