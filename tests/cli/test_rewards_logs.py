"""`rollart rewards logs -f`, as a process that follows calls made meanwhile."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollart.launch.functions import packages_in
from serverless.types import Item
from serverless.wire import encode
from serverless.workers.local import LocalBackend

pytestmark = pytest.mark.slow  # a process of its own, with function workers

SOURCE = """from rollart import reward

@reward(memory_mb=128)
def f(sample):
    print("scored", sample.id)
    return 1.0
"""


def test_new_lines_are_shown_with_their_run_and_trajectory(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(SOURCE)
    (package,) = packages_in("f.py", base=tmp_path)
    arguments = ["rewards", "logs", "f", "--root", "root", "-f", "-o", "json", "--trajectory", "t/2"]
    event = [encode(Item(key, ({"role": "assistant", "content": ""},))) for key in ("t/1", "t/2", "t/3")]

    async def main() -> None:
        async with LocalBackend(root=tmp_path / "root", run="lake-1") as backend:
            await backend.deploy(package)
            await backend.invoke("f", event[:2], deadline_s=60.0)
            process = subprocess.Popen(
                [sys.executable, "-m", "rollart.cli.main", *arguments],
                cwd=tmp_path,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            try:
                assert process.stdout is not None

                async def line() -> dict[str, Any]:
                    found: dict[str, Any] = json.loads(await asyncio.to_thread(process.stdout.readline))
                    return found

                first = await line()
                assert first.pop("t")
                expected = {"source": "0", "run": "lake-1", "trajectory": "t/2", "text": "scored t/2"}
                assert first == {"schema_version": 1, **expected}
                await backend.invoke("f", event, deadline_s=60.0)
                assert (await line())["text"] == "scored t/2"
                process.send_signal(signal.SIGINT)
                assert await asyncio.to_thread(process.wait, 60) == 130
                assert process.stderr is not None
                assert process.stderr.read() == "rollart: interrupted\n"
            finally:
                process.kill()
                process.communicate()

    asyncio.run(main())
