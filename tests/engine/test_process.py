"""The engine as a process: its start, its refusals, its end. Slow: each test starts at least one (1 to 2 s)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollart.adapters.engines.http import HttpEngine
from rollart.errors import EngineError
from rollart.model import EngineId, GenerateRequest, Sampling
from tests.engine.hosting import command, process
from tests.engine.models import QWEN, greedy

pytestmark = pytest.mark.slow


def test_it_starts_in_seconds_serves_and_ends_cleanly_on_sigterm(qwen: Path) -> None:
    with process(qwen, "--weight-version", "4") as (url, started):
        stat = Path(f"/proc/{started.pid}/stat").read_text().rpartition(")")[2].split()
        used_s = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
        assert used_s < 15.0, "about 2 s of CPU, however long a busy host takes over them"

        async def body() -> None:
            e = HttpEngine(EngineId("e"), url)
            c = await e.generate(GenerateRequest("a", "s", (1, 2, 3), Sampling(6, temperature=0.0)))
            assert c.token_ids == greedy(qwen, [1, 2, 3], 6)
            assert c.spans[0].version == 4
            await e.close()

        asyncio.run(body())
        started.send_signal(signal.SIGTERM)
        assert started.wait(60) == 0


def test_sigterm_ends_it_with_a_request_in_flight(qwen: Path) -> None:
    with process(qwen) as (url, started):

        async def body() -> None:
            e = HttpEngine(EngineId("e"), url)
            await e.control("/pause?mode=keep", {})
            task = asyncio.create_task(e.generate(GenerateRequest("a", "", (1,), Sampling(6))))
            while (await e.stats()).waiting == 0:
                await asyncio.sleep(0.01)
            started.send_signal(signal.SIGTERM)
            with pytest.raises(EngineError, match=r"shutting down|connection lost") as ended:
                await task
            assert ended.value.retryable
            await e.close()

        asyncio.run(body())
        assert started.wait(60) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "/nowhere"], "model directory /nowhere does not exist"),
        (["--model", "MAMBA"], "architecture MambaForCausalLM is not supported"),
        (["--model", "QWEN", "--device", "cuda:9"], "device cuda:9 is not the first"),
        (["--model", "QWEN", "--port", "TAKEN"], "cannot listen on 127.0.0.1:"),
        (["--model", "QWEN", "--max-slots", "0"], "--max-slots must be at least 1"),
    ],
)
def test_a_bad_start_is_one_line_and_code_2(qwen: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN, "architectures": ["MambaForCausalLM"]}))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        places = {"QWEN": str(qwen), "MAMBA": str(tmp_path), "TAKEN": str(taken.getsockname()[1])}
        ended = subprocess.run(
            command(*(places.get(a, a) for a in arguments)), capture_output=True, text=True, timeout=300, check=False
        )
    assert ended.returncode == 2
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""


def test_it_does_not_outlive_its_parent(qwen: Path) -> None:
    script = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen({command('--model', str(qwen), '--port', '0')!r}, stdout=subprocess.PIPE, text=True)\n"
        "print(p.pid, p.stdout.readline().strip(), flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, word, _ = parent.stdout.readline().split()
        assert word == "ready"
        parent.kill()
    for _ in range(6000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.01)
    os.kill(int(pid), signal.SIGKILL)
    pytest.fail("the engine outlived its parent")
