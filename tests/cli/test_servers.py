"""`rollart rewards serve`: a process that other runs call, and that ends when told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollart.cli.main import run
from rollart.launch.functions import backend, packages_in
from rollart.settings.cluster import ClusterFunctions, HttpFunction
from serverless.deploy import template
from serverless.deploy.local import LocalDeployer
from serverless.types import Item
from serverless.wire import encode
from tests.contracts.test_releases import constant

pytestmark = pytest.mark.slow  # servers and workers are processes

ITEM = Item("1", ({"role": "assistant", "content": "<answer>42</answer>"},), "42", {})


@contextmanager
def served(
    directory: Path, *arguments: str, source: str = "mine/mine.py"
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    template.write(directory / "mine", "mine")
    code = "import sys; from rollart.cli.main import main; main(['rewards', 'serve', *sys.argv[1:]])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, source, "--json", *arguments],
        cwd=directory,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TOKEN": "secret"},
    )
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def test_it_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    with served(tmp_path) as (process, told):
        (function,) = told["functions"]
        assert function["url"].startswith("http://127.0.0.1:")
        request = urllib.request.Request(function["url"], data=json.dumps([encode(ITEM)]).encode())
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert json.load(answer)[0]["aggregate_reward_score"] == 1.0
        process.send_signal(signal.SIGINT)  # SIGTERM: tests/dashboard/test_command.py
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out, err) == (130, "", "")


def test_another_run_calls_it_by_url_and_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tmp_path, "--token-env", "TOKEN") as (_, told):
        with urllib.request.urlopen(told["health"], timeout=120) as healthy:
            assert (healthy.status, healthy.read()) == (200, b"ok")
        (function,) = told["functions"]
        request = urllib.request.Request(function["url"], data=b"[]")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=120)
        refused.value.close()
        assert refused.value.code == 403
        monkeypatch.setenv("CALLERS_TOKEN", "secret")
        (package,) = packages_in("mine/mine.py", base=tmp_path)

        async def main() -> Any:
            http = {"mine": HttpFunction(url=function["url"], token_env="CALLERS_TOKEN")}
            async with backend("http", ClusterFunctions(http=http)) as place:
                await place.deploy(package)
                return await place.invoke("mine", [encode(ITEM)], deadline_s=60.0)

        reply = asyncio.run(main())
        assert reply.fault is None
        assert reply.body[0]["aggregate_reward_score"] == 1.0
        assert reply.invocation.memory_mb == 128


def test_an_address_in_use_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template.write(tmp_path / "mine", "mine")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert run(["rewards", "serve", str(tmp_path / "mine/mine.py"), "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_calls_of_a_deployed_function_follow_its_weights(tmp_path: Path) -> None:
    async def deploy() -> None:
        async with LocalDeployer(tmp_path / ".rollart/functions") as control:
            for value in (1.0, 2.0):
                await control.deploy(constant(tmp_path, value), canary=0.5)

    asyncio.run(deploy())
    with served(tmp_path, source="f") as (_, told):
        (function,) = told["functions"]
        request = urllib.request.Request(function["url"], data=json.dumps([encode(ITEM)]).encode())
        found = set()
        for _ in range(30):
            with urllib.request.urlopen(request, timeout=120) as answer:
                found.add(json.load(answer)[0]["aggregate_reward_score"])
        assert found == {1.0, 2.0}
