"""An engine's server in this process (real sockets, no start-up), and as the process that it is in production."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from aiohttp import web

from rollart.engine.driver import Driver
from rollart.engine.server import Server
from tests.engine.models import runner


@contextlib.asynccontextmanager
async def served(directory: Path, *, slots: int = 8, context: int = 64, version: int = 0) -> AsyncIterator[str]:
    """The URL of a server on this loop."""
    driver = Driver(runner(directory, slots=slots, context=context, version=version))
    server = Server(driver, model=str(directory), advertise=("127.0.0.1", 0))
    web_runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await web_runner.setup()
    await web.TCPSite(web_runner, "127.0.0.1", 0).start()
    port = web_runner.addresses[0][1]
    server.advertise = ("127.0.0.1", port)
    listener = await server.listen("127.0.0.1")
    stepping = asyncio.create_task(driver.run())
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        listener.close()
        stepping.cancel()
        await asyncio.gather(stepping, return_exceptions=True)
        await web_runner.cleanup()


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rollart.engine", *arguments]


@contextlib.contextmanager
def process(directory: Path, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """URL and process of `python -m rollart.engine` on a free port."""
    started = subprocess.Popen(
        command("--model", str(directory), "--port", "0", "--max-slots", "8", "--max-context", "64", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert started.stdout is not None
        word, _, url = started.stdout.readline().strip().partition(" ")
        if word != "ready":
            raise AssertionError(started.communicate(timeout=10))
        yield url, started
    finally:
        started.terminate()
        started.communicate(timeout=10)
