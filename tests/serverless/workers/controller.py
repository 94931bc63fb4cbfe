"""A controller with a local backend that is killed: what it started must go with it."""

from __future__ import annotations

import asyncio
import pathlib
import subprocess
import sys
import textwrap

from tests.serverless.support import alive, until

SCRIPT = """
import asyncio
from serverless.workers.local import LocalBackend
from serverless.wire import encode
from tests.serverless.support import item, package, until, descendants
async def main():
    one = package({settings})
    async with LocalBackend({backend}) as backend, asyncio.TaskGroup() as group:
        await backend.deploy(one)
{body}
        print(backend.root, *descendants(), flush=True)
        await asyncio.sleep(60.0)
asyncio.run(main())
"""


def kill_controller(body: str, *, processes: int, settings: str, backend: str = "") -> None:
    """Kill a controller that has run `body` and has this many processes: they and its files disappear."""
    indented = textwrap.indent(textwrap.dedent(body).strip(), " " * 8)
    script = SCRIPT.format(body=indented, settings=settings, backend=backend)
    controller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert controller.stdout is not None
        root, *pids = controller.stdout.readline().split()
        assert len(pids) == processes
        assert all(alive(int(pid)) for pid in pids)
    finally:
        controller.kill()
        controller.wait()
        controller.stdout.close()
    asyncio.run(until(lambda: not any(alive(int(p)) for p in pids) and not pathlib.Path(root).exists()))
