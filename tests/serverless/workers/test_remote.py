"""Function workers on remote machines: authentication, and the end of either side."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
import sys
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest

from serverless.errors import BackendFailed
from serverless.output import RUN
from serverless.pipeline.offload import Offload
from serverless.types import Cause, FaultKind, Outcome, Scored
from serverless.wire import encode
from serverless.workers.channel import encode_message, read_message
from serverless.workers.host import FUNCTION_HOST_TOKEN, WorkerHost
from serverless.workers.local import LocalBackend
from serverless.workers.logs import read as read_logs
from serverless.workers.remote import HostedBackend, HostLink, HostLost, WorkerHosts
from tests.serverless.support import Books, alive, children, item, package, until

LIMIT_S = 120.0
"""That only a failure meets."""


def test_frames_arrive_whole_however_they_are_cut() -> None:
    sent = [["a", 1.5, None], {"b": [b"\0" * 300]}, []]
    data = b"".join(encode_message(one) for one in sent)

    async def read() -> list[Any]:
        reader = asyncio.StreamReader()
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(read_message(reader))
            for n in range(0, len(data), 7):
                reader.feed_data(data[n : n + 7])
                await asyncio.sleep(0)
        return [first.result(), await read_message(reader), await read_message(reader)]

    assert asyncio.run(read()) == sent


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", encode_message(1)[:4] + b"\xc1"])
def test_what_is_no_frame_is_an_error(data: bytes) -> None:
    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        await read_message(reader)

    with pytest.raises(ValueError, match="frame"):
        asyncio.run(read())


class Machines:
    """Programs of worker hosts, real ones."""

    def __init__(self, stack: contextlib.AsyncExitStack, logs: pathlib.Path) -> None:
        self._stack, self._logs = stack, logs
        self.hosts = WorkerHosts()
        self.links: dict[str, HostLink] = {}
        self.processes: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, name: str) -> HostLink:
        address = await self.program(name)
        link = self.links[name] = await self.hosts.join(name, address, "the token")
        self._stack.push_async_callback(link.aclose)
        return link

    async def program(self, name: str) -> str:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "serverless.workers.host",
            "--logs",
            str(self._logs),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, FUNCTION_HOST_TOKEN: "the token", RUN: "lake-1"},
        )
        self.processes[name] = process
        self._stack.push_async_callback(self._end, process)
        assert process.stdout is not None
        greeting = (await process.stdout.readline()).decode().split()
        assert greeting[0] == "ready"
        return greeting[1]

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def machines(directory: pathlib.Path) -> AsyncIterator[Machines]:
    async with asyncio.timeout(LIMIT_S), contextlib.AsyncExitStack() as stack:
        yield Machines(stack, directory)


def run(work: Awaitable[None]) -> None:
    async def main() -> None:
        await work

    asyncio.run(main())


@pytest.mark.slow  # real programs, a second each
def test_a_machine_is_killed_under_calls_and_every_item_is_scored_once(tmp_path: pathlib.Path) -> None:
    run(_killed(tmp_path))


async def _killed(directory: pathlib.Path) -> None:
    books = Books()
    one = package(
        memory_mb=128,
        timeout_s=LIMIT_S,
        init_timeout_s=LIMIT_S,
        concurrency=4,
        batch={"max_items": 1},
        deterministic=False,
    )
    async with machines(directory) as fleet:
        for name in ("one", "two"):
            await fleet.start(name)
        async with HostedBackend(fleet.hosts, meter=books) as backend:
            await backend.deploy(one)
            async with Offload([one], backend, meter=books) as offload:
                gate, outcomes = directory / "gate", []

                async def score(n: int) -> None:
                    metadata = {"do": "gate", "file": str(gate), "value": float(n)}
                    outcomes.append(await offload.submit("behave", item(str(n), **metadata), LIMIT_S))

                async with asyncio.TaskGroup() as tasks:
                    for n in range(12):
                        tasks.create_task(score(n))
                    await until(lambda: len(list(directory.glob("gate.*"))) == 4, LIMIT_S)
                    assert [link.calls for link in fleet.links.values()] == [2, 2]
                    pids = [int(path.suffix[1:]) for path in directory.glob("gate.*")]
                    fleet.processes["one"].kill()
                    await until(lambda: fleet.links["two"].calls == 4, LIMIT_S)
                    gate.touch()
        assert sorted(value_of(one) for one in outcomes) == [float(n) for n in range(12)]
        await until(lambda: sum(alive(pid) for pid in pids) <= 2, LIMIT_S)
    lost = [i for i in books.invocations if i.status != "ok"]
    assert [(i.status, i.cause, i.items) for i in lost] == [("crash", Cause.CALL, 1)] * 2
    assert [i.cause for i in books.invocations if i.status == "ok" and i.items].count(Cause.RETRY) == 2
    assert sum(i.items for i in books.invocations if i.status == "ok") == 12


def value_of(outcome: Outcome) -> float:
    assert isinstance(outcome, Scored)
    return outcome.value


@pytest.mark.slow  # real programs, a second each
def test_who_does_not_greet_is_not_listened_to_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        host = WorkerHost(LocalBackend(), "the token")
        async with await asyncio.start_server(host.serve, "127.0.0.1", 0) as server, asyncio.timeout(LIMIT_S):
            port = server.sockets[0].getsockname()[1]
            monkeypatch.setattr("serverless.hosts.GREETING_S", LIMIT_S)
            await _knock(port, b"\x00\x10\x00\x00" + b"x" * 64)  # a megabyte
            await _knock(port, encode_message(["hello", "\u00e9"]))
            monkeypatch.setattr("serverless.hosts.GREETING_S", 0.05)
            await _knock(port, b"")
            await _knock(port, b"\x00\x00")  # half a length
            monkeypatch.setattr("serverless.hosts.GREETING_S", LIMIT_S)
            link = HostLink("one", f"tcp://127.0.0.1:{port}", "the token")
            await link.open()
            await link.ping()
            await link.aclose()
            await host.close()

    run(scenario())


async def _knock(port: int, greeting: bytes) -> None:
    """The connection ends for any greeting."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(greeting)
    with contextlib.suppress(ConnectionError):  # it may have left some of that unread
        assert await reader.read() == b""
    writer.close()


@pytest.mark.slow
def test_the_life_of_a_machine(tmp_path: pathlib.Path) -> None:
    run(_life(tmp_path))


async def _life(directory: pathlib.Path) -> None:
    """One program after the other, with all that may happen to it."""
    one = package(
        memory_mb=128,
        timeout_s=LIMIT_S,
        init_timeout_s=LIMIT_S,
        concurrency=2,
        keep_alive_s=LIMIT_S,
        deterministic=False,
    )
    event: list[dict[str, Any]] = [encode(item("a", do="pid"))]
    async with machines(directory) as fleet, HostedBackend(fleet.hosts) as backend:
        deploying = asyncio.create_task(backend.deploy(one))
        address = await fleet.program("one")
        with pytest.raises(HostLost, match="nothing that knows us"):
            await fleet.hosts.join("stranger", address, "another token")
        with pytest.raises(HostLost, match="nothing that knows us"):
            await fleet.hosts.join("none", "tcp://127.0.0.1:1", "the token")
        assert not fleet.hosts.links
        assert not deploying.done(), "it waits for a machine"
        link = await fleet.hosts.join("one", address, "the token")
        await deploying
        first = await backend.invoke("behave", event, deadline_s=LIMIT_S)
        assert first.fault is None
        (worker,) = [pid for zygote in children(link.pid) for pid in children(zygote)]
        await link.ping()

        os.kill(worker, signal.SIGKILL)
        await until(lambda: backend.load("behave").workers == 0, LIMIT_S)
        assert link.alive, "a worker's end is not its machine's"
        assert (await backend.invoke("behave", event, deadline_s=LIMIT_S)).fault is None

        strange = package("nosy", name="behave", memory_mb=128, requirements=("no-such-thing-is-installed",))
        with pytest.raises(BackendFailed, match=r"not installed here.* \(on one\)"):
            await link.deploy(strange)

        link.leave()
        await until(lambda: not link.workers, LIMIT_S)
        waits = asyncio.create_task(backend.invoke("behave", event, deadline_s=LIMIT_S))
        late = await backend.invoke("behave", event, deadline_s=0.2)
        assert late.fault is not None
        assert late.fault.kind is FaultKind.DEADLINE
        two = await fleet.start("two")
        assert (await waits).fault is None, "what came meanwhile is deployed there"
        assert two.answered == 1
        await backend.invoke("behave", [encode(item("t/9", do="raise"))], deadline_s=LIMIT_S)

        workers = [pid for zygote in children(two.pid) for pid in children(zygote)]
        assert workers
        await two.aclose()
        await until(lambda: not any(map(alive, workers)), LIMIT_S)
        assert fleet.processes["two"].returncode is None, "a client that is gone leaves no worker behind"
        await link.aclose()
        assert not fleet.hosts.machines, "nothing is kept of a machine that is gone"
    logs = sorted(path.name for path in (directory / "behave").iterdir())
    assert set(logs) <= {"0.log", "1.log"}
    printed = read_logs(directory, "behave", since_s=3600.0, limit=100)
    assert {(line.run, line.items) for line in printed} == {("lake-1", ("t/9",))}
