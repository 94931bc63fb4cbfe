"""An engine's server in this process (real sockets, no start-up), and as a separate process, as in production."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from aiohttp import web

from rollart.engine.driver import Driver
from rollart.engine.handoff import HandoffSettings
from rollart.engine.server import EngineServer
from tests.engine.models import runner


@contextlib.asynccontextmanager
async def hosted(
    directory: Path,
    *,
    slots: int = 8,
    context: int = 64,
    version: int = 0,
    step_tokens: int = 2048,
    deterministic: bool = False,
    handoff: HandoffSettings | None = None,
) -> AsyncIterator[tuple[str, EngineServer]]:
    """A server on this loop, and its URL."""
    own = runner(
        directory, slots=slots, context=context, version=version, step_tokens=step_tokens, deterministic=deterministic
    )
    driver = Driver(own)
    server = EngineServer(driver, model=str(directory), handoff=handoff)
    web_runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await web_runner.setup()
    await web.TCPSite(web_runner, "127.0.0.1", 0).start()
    port = web_runner.addresses[0][1]
    server.handoffs.advertise = ("127.0.0.1", port)
    listener = await server.listen("127.0.0.1")
    tasks = asyncio.create_task(driver.run()), asyncio.create_task(server.handoffs.run())
    try:
        yield f"http://127.0.0.1:{port}", server
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await web_runner.cleanup()


@contextlib.asynccontextmanager
async def served(directory: Path, **options: Any) -> AsyncIterator[str]:
    """The URL of a server on this loop."""
    async with hosted(directory, **options) as (url, _):
        yield url


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
            raise AssertionError(started.communicate(timeout=60))
        yield url, started
    finally:
        started.terminate()
        started.communicate(timeout=60)
