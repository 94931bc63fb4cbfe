"""A host that violates the protocol is disconnected; the client keeps its own promises.

Idle environments of a host: bounds, and that no environment plays again after a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.adapters.env_hosts.client import HostConnection
from rollart.adapters.env_hosts.host import (
    DomainFactory,
    EnvironmentHostServer,
    PooledEnvironment,
    WarmPool,
)
from rollart.adapters.env_hosts.wire import (
    CallStatus,
    HostOperation,
    HostRequest,
    HostResponse,
    encode_frame,
    pack,
    read_frame,
    unpack,
)
from rollart.errors import EnvironmentFault
from rollart.model import Observation, Step
from tests.contracts.warm_worlds import Again, Once

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.just("$"), inner, max_size=3)
        | st.sets(st.integers(), max_size=3)
    ),
    max_leaves=12,
)


@pytest.mark.slow
@given(plain)
def test_plain_values_arrive_as_they_were(value: Any) -> None:
    """Through JSON, types included."""
    arrived = unpack(json.loads(json.dumps(pack(value))))
    assert arrived == value
    assert repr(arrived) == repr(value) or isinstance(value, set | dict | list | tuple)


@given(st.recursive(plain, lambda inner: st.dictionaries(st.sampled_from(["$", "of", "a"]), inner, max_size=3)))
def test_any_frame_is_a_value_or_a_value_error(frame: Any) -> None:
    for read in (unpack, HostResponse.from_json, HostRequest.from_json):
        try:
            read(frame)
        except ValueError:
            pass


class Liar:
    """A host that answers each request but the greeting as the test asks."""

    def __init__(self, lie: Callable[[HostRequest], Any]) -> None:
        self._lie = lie

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                ask = HostRequest.from_json(await read_frame(reader))
                if ask.op is HostOperation.HELLO:
                    writer.write(encode_frame(HostResponse(ask.id, "", CallStatus.OK, [7, {}, []]).to_json()))
                    continue
                response = self._lie(ask)
                if isinstance(response, bytes):
                    writer.write(response)
                elif response is not None:
                    writer.write(encode_frame(response))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def lied(lie: Callable[[HostRequest], Any], scenario: Callable[[HostConnection], Awaitable[None]]) -> None:
    async def main() -> None:
        server = await asyncio.start_server(Liar(lie).serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connection = await HostConnection.open("environment-0", f"tcp://127.0.0.1:{port}")
        try:
            async with asyncio.timeout(60):
                await scenario(connection)
        finally:
            await connection.aclose()
            server.close()

    asyncio.run(main())


STEP = [["text", None, None], 1.0, False, None, {}]


@pytest.mark.slow  # sockets
@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (
            lambda ask: HostResponse(99, ask.episode, CallStatus.OK, STEP).to_json(),
            "an answer to a request that was never made",
        ),
        (lambda ask: HostResponse(ask.id, "another", CallStatus.OK, STEP).to_json(), "an answer of episode 'another'"),
        (lambda ask: [1, 2], "a frame that is no answer"),
        (lambda ask: b"\xff\xff\xff\xff", "a frame of 4294967295 bytes"),
        (lambda ask: b"\x00\x00\x00\x02{]", "it sent"),
    ],
)
def test_a_host_that_violates_the_protocol_is_disconnected(lie: Callable[[HostRequest], Any], words: str) -> None:
    """Its other calls and all later ones fail with the same cause."""

    async def scenario(connection: HostConnection) -> None:
        one, two = await asyncio.gather(
            connection.step("e", "left"), connection.step("f", "left"), return_exceptions=True
        )
        assert isinstance(one, EnvironmentFault)
        assert isinstance(two, EnvironmentFault)
        assert words in str(one)
        assert one.incident == two.incident != ""
        assert words in await connection.lost()
        assert not connection.alive
        with pytest.raises(EnvironmentFault, match="on environment-0"):
            await connection.health()

    lied(lie, scenario)


@pytest.mark.slow  # sockets
def test_lives_of_a_host_that_have_the_same_process_id_end_apart() -> None:
    """As those of a container do."""
    ends = []

    async def scenario(connection: HostConnection) -> None:
        assert connection.pid == 7
        with pytest.raises(EnvironmentFault) as fault:
            await connection.step("e", "left")
        ends.append(fault.value.incident)

    for _ in range(2):
        lied(lambda ask: [1, 2], scenario)
    assert len(set(ends)) == 2


@pytest.mark.slow  # sockets
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([["text", None, None], float("nan"), False, None, {}], "reward is nan"),
        ([["text", [], None], 1.0, False, None, {}], "no legal action"),
        ([["text", None, 0], 1.0, False, None, {}], "max_tokens is 0"),
        ("nothing", "an answer that is no step"),
        ([["text", None, None], "1", False, None, {}], "an answer that is no step"),
    ],
)
def test_an_answer_that_is_no_step_is_its_episodes_fault_alone(value: Any, words: str) -> None:
    async def scenario(connection: HostConnection) -> None:
        with pytest.raises(EnvironmentFault, match=words) as fault:
            await connection.step("e", "left")
        assert (fault.value.host, fault.value.incident) == ("environment-0", "")
        assert connection.alive

    lied(lambda ask: HostResponse(ask.id, ask.episode, CallStatus.OK, value).to_json(), scenario)


@pytest.mark.slow  # sockets
def test_a_late_response_is_dropped() -> None:
    """A call that was cancelled may still be answered: that is no lie, and reaches no other call."""
    late: list[HostRequest] = []

    def lie(ask: HostRequest) -> Any:
        if ask.op is HostOperation.STEP and ask.value == "hang":
            late.append(ask)
            return None
        if ask.op is HostOperation.CANCEL:
            return HostResponse(late[0].id, late[0].episode, CallStatus.OK, STEP).to_json()
        return HostResponse(ask.id, ask.episode, CallStatus.OK, STEP).to_json()

    async def scenario(connection: HostConnection) -> None:
        hanging = asyncio.get_running_loop().create_task(connection.step("e", "hang"))
        await connection.step("f", "left")  # the other is on its way
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
        for _ in range(3):
            assert (await connection.step("f", "left"))[0].reward == 1.0
        assert connection.alive

    lied(lie, scenario)


class Slow:
    """Steps never end; resets do."""

    async def reset(self, seed: int) -> Observation:
        return Observation("begun")

    async def step(self, action: str) -> Step:
        if action == "hang":
            await asyncio.Event().wait()
        return Step(Observation("done"), 1.0, True)

    async def close(self) -> None:
        return None


def fronted(scenario: Callable[[EnvironmentHostServer, str], Awaitable[None]]) -> None:
    """A host's own front, on this loop."""

    async def main() -> None:
        front = EnvironmentHostServer({"slow": DomainFactory(Slow)}, asyncio.get_running_loop(), "word")
        server = await asyncio.start_server(front.serve, "127.0.0.1", 0)
        try:
            async with asyncio.timeout(60):
                await scenario(front, f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        finally:
            server.close()

    asyncio.run(main())


@pytest.mark.slow  # sockets
def test_cancelled_calls_get_a_response_and_are_forgotten() -> None:
    async def scenario(front: EnvironmentHostServer, address: str) -> None:
        connection = await HostConnection.open("environment-0", address, "word")
        try:
            for number in range(50):
                episode = f"slow-{number}"
                await connection.reset(episode, "slow", number)
                hanging = asyncio.get_running_loop().create_task(connection.step(episode, "hang"))
                while front.episodes[episode].running is None:
                    await asyncio.sleep(0)
                if number % 2:
                    hanging.cancel()
                else:  # closed during the call: it gets an error
                    await connection.close(episode)
                (ended,) = await asyncio.gather(hanging, return_exceptions=True)
                assert isinstance(ended, asyncio.CancelledError if number % 2 else EnvironmentFault)
                await connection.close(episode)
            assert (await connection.health()).live == 0
            assert connection.outstanding == 0
            assert front.cancelled == set()
            assert front.calls == {}
            # One that is over on the host when its caller gives it up.
            await connection.reset("last", "slow", 0)
            done = asyncio.get_running_loop().create_task(connection.step("last", "go"))
            await asyncio.sleep(0)
            done.cancel()
            await asyncio.gather(done, return_exceptions=True)
            await connection.close("last")
            assert (await connection.health()).live == 0
            assert connection.outstanding == 0
        finally:
            await connection.aclose()

    fronted(scenario)


@pytest.mark.slow  # sockets
def test_who_does_not_greet_is_not_listened_to_for_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("serverless.hosts.GREETING_S", 0.05)

    async def scenario(front: EnvironmentHostServer, address: str) -> None:
        port = int(address.rpartition(":")[2])
        for data in (b"", b"\x00\x00", b"\x00\x10\x00\x00" + b"x" * 64):  # nothing, half a length, a megabyte
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            with contextlib.suppress(ConnectionError):  # it may have left some of that unread
                assert await reader.read() == b""
            writer.close()
        monkeypatch.setattr("serverless.hosts.GREETING_S", 60.0)
        for word in ("another", "\u00e9"):
            with pytest.raises(EnvironmentFault, match="broke"):
                await HostConnection.open("environment-0", address, word)
        connection = await HostConnection.open("environment-0", address, "word")
        assert (await connection.health()).live == 0
        await connection.aclose()
        assert not caplog.records

    fronted(scenario)


class Forks:
    """An environment whose forked child returns from the same call."""

    async def reset(self, seed: int) -> Observation:
        return Observation("begin")

    async def step(self, action: str) -> Step:
        child = os.fork()
        if child == 0:
            return Step(Observation("the child's"), -1.0, True)
        os.waitpid(child, 0)
        return Step(Observation(action), 1.0, False)

    async def close(self) -> None:
        pass


@pytest.mark.slow  # a process
def test_a_child_that_an_environment_forked_does_not_serve_its_host(tmp_path: pathlib.Path) -> None:
    """It would answer in its parent's place, and take bytes of the host's loop."""
    domains = {"forks": {"environment": f"{__name__}:Forks", "arguments": {}}}
    (tmp_path / "domains.json").write_text(json.dumps(domains))

    async def main() -> list[Any]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rollart.adapters.env_hosts.host",
            "--domains",
            str(tmp_path / "domains.json"),
            "--path",
            str(pathlib.Path(__file__).parents[2]),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "ROLLART_HOST_TOKEN": "t"},
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(60):
                ready = (await process.stdout.readline()).decode().split()
                connection = await HostConnection.open("environment-0", ready[1], "t")
                await connection.reset("e", "forks", 1)
                steps = [(await connection.step("e", str(n)))[0] for n in range(5)]
                await connection.aclose()
        finally:
            process.kill()
            await process.wait()
        return [(step.observation.text, step.reward) for step in steps if step.observation is not None]

    assert asyncio.run(main()) == [(str(n), 1.0) for n in range(5)]


async def settled(pool: WarmPool) -> None:
    """Everything that is being made is made. No clock: each making takes a few turns of the loop."""
    while pool.making:
        await asyncio.sleep(0)


def pool_of(
    make: Callable[[], Once], tasks: asyncio.TaskGroup | None = None, *, size: int = 0, reuse: int = 1
) -> WarmPool:
    pool = WarmPool("lake", DomainFactory(make), asyncio.get_running_loop(), size, reuse, tasks)
    pool.fill()
    return pool


@given(
    st.integers(0, 4),
    st.integers(1, 4),
    st.booleans(),
    st.lists(st.tuples(st.sampled_from(["begin", "end", "fail", "settle"]), st.integers(0, 5)), max_size=30),
)
def test_bounds_hold_after_any_moves(size: int, reuse: int, again: bool, moves: list[tuple[str, int]]) -> None:
    async def play() -> None:
        kind = Again if again else Once
        playing: list[PooledEnvironment] = []
        failed: list[object] = []
        async with asyncio.TaskGroup() as tasks:
            pool = pool_of(kind, tasks, size=size, reuse=reuse)
            for move, which in moves:
                if move == "begin":
                    idle = pool.take()
                    if idle is None:  # as a host does: the episode makes its own
                        made = await pool.make()
                        idle = PooledEnvironment(asyncio.get_running_loop(), environment=made)
                        pool.mark_in_use(idle)
                    assert idle.environment not in [other.environment for other in playing]
                    assert all(idle.environment is not one for one in failed)
                    assert idle.played < reuse
                    playing.append(idle)
                elif move == "settle":
                    await settled(pool)
                elif playing:
                    idle = playing.pop(which % len(playing))
                    if move == "fail":
                        failed.append(idle.environment)
                    idle = dataclasses.replace(idle, played=idle.played + 1)
                    if pool.give_back(idle, healthy=move == "end"):
                        assert again
                        assert move == "end"
                        assert idle.played < reuse
                assert len(pool.idle) + pool.making <= size
                assert pool.in_use == (len(playing) if again and reuse > 1 and size else 0)
            await settled(pool)
            waiting = [idle.environment for idle in pool.idle]
            await pool.close()
            assert all(isinstance(one, Once) and one.closed for one in waiting)
            assert not pool.idle

    asyncio.run(play())


def test_as_many_as_wanted_are_made_ahead_and_made_again() -> None:
    async def play() -> None:
        async with asyncio.TaskGroup() as tasks:
            pool = pool_of(Once, tasks, size=3)
            await settled(pool)
            assert len(pool.idle) == 3
            idle = pool.take()
            assert idle is not None
            assert isinstance(idle.environment, Once)
            assert idle.environment.began
            assert pool.making == 1
            assert not pool.give_back(idle, healthy=True)  # it does not say that it may be used again
            await settled(pool)
            assert len(pool.idle) == 3
            await pool.close()

    asyncio.run(play())


def test_an_environment_that_cannot_be_made_is_not_retried_for_ever() -> None:
    tries: list[int] = []

    def broken() -> Once:
        tries.append(1)
        if len(tries) < 4:
            raise OSError("no room")
        return Once()

    async def play() -> None:
        async with asyncio.TaskGroup() as tasks:
            pool = pool_of(broken, tasks, size=3)
            await settled(pool)
            assert (len(tries), len(pool.idle), pool.failing) == (3, 0, True)
            assert pool.take() is None
            made = await pool.make()  # an episode's own try, which goes well
            pool.mark_in_use(PooledEnvironment(asyncio.get_running_loop(), environment=made))
            await settled(pool)
            assert (len(tries), len(pool.idle)) == (7, 3)
            await pool.close()

    asyncio.run(play())


def test_an_environment_whose_start_fails_is_closed() -> None:
    class Half(Once):
        made: list[Half] = []  # noqa: RUF012

        async def start(self) -> None:
            self.made.append(self)
            raise OSError("no container")

    async def play() -> None:
        with pytest.raises(OSError, match="no container"):
            await pool_of(Half).make()

    asyncio.run(play())
    assert [one.closed for one in Half.made] == [True]
