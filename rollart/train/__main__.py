"""`python -m rollart.train --config trainer.json`: prints `ready http://host:port` on stdout once it serves.

Ends with its parent and on SIGTERM, at once: a publish is atomic, so nothing is lost that was promised.
Exit codes: 0 told to stop, 2 the config, the model or the port is wrong (one line on stderr).
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEEP_BYTES = 1 << 30
"""glibc gives large blocks back to the kernel at once and faults them in again at the next micro-batch: 8,000 to 20,000
page faults and 4–7 % of a step's CPU time at 120 tokens a sample. Below this size memory is kept instead."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rollart.train", description="The embedded trainer.")
    parser.add_argument("--config", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    _die_with_parent()
    _keep_memory()
    listener = _listen(arguments.host, arguments.port)
    if listener is None:
        return 2

    from rollart.errors import UsageError
    from rollart.train.config import load_config
    from rollart.train.server import make_app

    try:
        app = make_app(load_config(arguments.config))
    except UsageError as error:
        print(f"rollart.train: {error}", file=sys.stderr)
        return 2
    asyncio.run(_serve(app, listener))
    # A step may still be running in the worker thread; nobody waits for its answer any more.
    sys.stdout.flush()
    os._exit(0)


def _die_with_parent() -> None:
    """SIGKILL when the parent dies (Linux; elsewhere the caller's own supervision has to do)."""
    parent = os.getppid()
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:
        sys.exit(0)


def _keep_memory() -> None:
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, KEEP_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, KEEP_BYTES)
    except (OSError, AttributeError):
        return


def _listen(host: str, port: int) -> socket.socket | None:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        print(f"rollart.train: cannot listen on {host}:{port}: {error.strerror}", file=sys.stderr)
        return None
    return listener


async def _serve(app: object, listener: socket.socket) -> None:
    from aiohttp import web

    assert isinstance(app, web.Application)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    host, port = listener.getsockname()[:2]
    print(f"ready http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    await stop.wait()
    await runner.cleanup()


if __name__ == "__main__":
    sys.exit(main())
