"""A headless Chromium over the DevTools protocol: for the tests of the dashboard, its measurements and its pictures."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LIMIT_S = 60.0

READY = """new Promise(done => { const look = () => document.body && document.body.dataset.ready === 'yes'
  ? done(performance.now()) : setTimeout(look, 5); look(); })"""
"""Milliseconds since the begin of the navigation at which the page's script has drawn it and answers."""


def executable() -> str | None:
    """The browser, None if there is none: `ROLLART_CHROMIUM`, or a name on the path."""
    return os.environ.get("ROLLART_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """A page. `errors`: what it logged as an error, violations of its content security policy included."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.errors: list[str] = []

    async def listen(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                future = self._waiting.pop(event["id"])
                if not future.done():
                    future.set_result(event)
            elif event["method"] == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(event["params"]["exceptionDetails"])[:500])
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                self.errors.append(event["params"]["entry"]["text"])

    async def call(self, method: str, **parameters: Any) -> Any:
        number = next(self._ids)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(LIMIT_S):
            answer = await future
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    async def run(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        found = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"])[:500])
        return found["result"].get("value")

    async def open(self, url: str) -> float:
        """Open a page and wait until it is interactive; after how many seconds that is."""
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(LIMIT_S):
            while True:
                with contextlib.suppress(RuntimeError):  # the old page went away under the script
                    if await self.run("location.href") != "about:blank":
                        return float(await self.run(READY)) / 1000.0
                await asyncio.sleep(0.01)

    async def until(self, script: str) -> None:
        """Wait until an expression is true; it may fail until then, as while another page opens."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                with contextlib.suppress(RuntimeError):
                    if await self.run(f"Boolean({script})"):
                        return
                await asyncio.sleep(0.05)

    async def resize(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def drag(self, x0: float, x1: float, y: float) -> None:
        for kind, x in (("mousePressed", x0), ("mouseMoved", (x0 + x1) / 2), ("mouseMoved", x1), ("mouseReleased", x1)):
            button = "none" if kind == "mouseMoved" else "left"
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=1, clickCount=1)

    async def picture(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of what is in view, or of the whole page."""
        found = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))


@contextlib.asynccontextmanager
async def open_tab(width: int = 1280, height: int = 900, *, dark: bool = False) -> AsyncIterator[Tab]:
    """A tab of a browser of its own, which ends with the body."""
    program = executable()
    assert program is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        process = await asyncio.create_subprocess_exec(
            *(program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--hide-scrollbars", "--remote-debugging-port=0", f"--user-data-dir={home}", "about:blank"),
            stderr=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stdin=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(LIMIT_S):
                port = await _port(process)
            async with aiohttp.ClientSession() as session:
                async with session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer:
                    address = (await answer.json(content_type=None))["webSocketDebuggerUrl"]
                async with session.ws_connect(address, max_msg_size=0) as socket, asyncio.TaskGroup() as group:
                    tab = Tab(socket)
                    listening = group.create_task(tab.listen())
                    for domain in ("Page", "Runtime", "Log"):
                        await tab.call(f"{domain}.enable")
                    scheme = "dark" if dark else "light"
                    await tab.call(
                        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
                    )
                    await tab.resize(width, height)
                    yield tab
                    await tab.call("Browser.close")
                    await process.wait()
                    listening.cancel()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _port(process: asyncio.subprocess.Process) -> int:
    """The port that the browser prints."""
    assert process.stderr is not None
    lines: list[bytes] = []
    while line := await process.stderr.readline():
        lines.append(line)
        if b"DevTools listening on" in line:
            return int(line.split(b"://")[1].split(b"/")[0].rpartition(b":")[2])
    raise RuntimeError(f"the browser did not start: {b''.join(lines).decode(errors='replace')[-1000:]}")
