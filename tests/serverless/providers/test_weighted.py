"""Calls of a deployed function follow the weights of `live`, on virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from rollart.sim import loop as virtual
from serverless.errors import BackendFailed, UnknownFunction
from serverless.providers.base import Backend, DeployedFunction, LiveVersions, Reply
from serverless.providers.weighted import REFRESH_S, WeightedBackend
from serverless.types import FaultKind


class Control:
    """The versions of a function, as a deployer lists them."""

    provider = "fake"

    def __init__(self, live: LiveVersions) -> None:
        self.live = live
        self.broken = False

    async def versions(self, function: str) -> Sequence[DeployedFunction]:
        if self.broken:
            raise BackendFailed("no answer")
        if function != "f":
            raise UnknownFunction(f"no function {function}")
        return [
            DeployedFunction(
                "f",
                "fake",
                n * 64,
                n,
                n == self.live.current,
                weight=self.live.of(n),
                aliases=self.live.aliases(n),
            )
            for n in ("3", "2", "1")
        ]


class Versions:
    """Backends of single versions, each of whose calls take a second."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.calls: Counter[str] = Counter()
        self.fails = 0
        self.error: Exception = BackendFailed("it does not start")
        self.opening_s = 0.0

    @contextlib.asynccontextmanager
    async def backend(self, version: DeployedFunction) -> AsyncIterator[Any]:
        if self.fails:
            self.fails -= 1
            raise self.error
        await asyncio.sleep(self.opening_s)
        self.open.append(version.provider_version)
        outer = self

        class One:
            async def invoke(self, function: str, event: object, **more: object) -> Reply:
                await asyncio.sleep(1.0)
                assert version.provider_version in outer.open, "its backend is open until the call has ended"
                outer.calls[version.provider_version] += 1
                return Reply(body=version.provider_version)

        try:
            yield One()
        finally:
            self.open.remove(version.provider_version)


def weighted(control: Control, versions: Versions, wanted: str = "live") -> WeightedBackend:
    draw = random.Random(3).random
    return WeightedBackend(control, "f", versions.backend, draw=draw, wanted=wanted)  # type: ignore[arg-type]


async def calls(backend: Backend, count: int) -> Counter[object]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(backend.invoke("f", [], deadline_s=9.0)) for _ in range(count)]
    return Counter(task.result().body for task in tasks)


def test_calls_follow_the_weights_a_promotion_and_a_rollback() -> None:
    control, versions = Control(LiveVersions("1", "2", 0.1)), Versions()

    async def main() -> None:
        async with weighted(control, versions) as backend:
            found = await calls(backend, 2000)
            assert found.total() == 2000
            assert abs(found["2"] - 200) < 4 * (2000 * 0.1 * 0.9) ** 0.5, "four standard deviations"
            control.live = LiveVersions("2")
            under_way = asyncio.gather(calls(backend, 50))
            await asyncio.sleep(2.0 * REFRESH_S)
            assert (await under_way)[0].total() == 50, "calls end on the version that they went to"
            assert await calls(backend, 50) == {"2": 50}
            await asyncio.sleep(2.0 * REFRESH_S)
            assert versions.open == ["2"], "a version without calls holds no workers"
            control.live = LiveVersions("2", "3", 0.5)
            await asyncio.sleep(2.0 * REFRESH_S)
            assert set(await calls(backend, 50)) == {"2", "3"}
            control.live, control.broken = LiveVersions("3"), True
            await asyncio.sleep(2.0 * REFRESH_S)
            assert set(await calls(backend, 50)) == {"2", "3"}, "unread weights stay as they were"
        assert versions.open == []

    virtual.run(main())


def test_a_named_version_gets_every_call() -> None:
    control, versions = Control(LiveVersions("1", "2", 0.1)), Versions()

    async def main() -> None:
        async with weighted(control, versions, wanted="3") as backend:
            await asyncio.sleep(2.0 * REFRESH_S)
            assert await calls(backend, 20) == {"3": 20}
            with pytest.raises(UnknownFunction, match="served: f"):
                await backend.invoke("g", [], deadline_s=1.0)
        with pytest.raises(UnknownFunction, match="has no version '7'"):
            async with weighted(control, versions, wanted="7"):
                pass

    virtual.run(main())


def test_a_version_that_does_not_start_fails_its_call_and_is_tried_again() -> None:
    control, versions = Control(LiveVersions("1")), Versions()
    versions.fails = 1

    async def main() -> None:
        async with weighted(control, versions) as backend:
            with pytest.raises(BackendFailed, match="it does not start"):
                await backend.invoke("f", [], deadline_s=9.0)
            assert await calls(backend, 3) == {"1": 3}

    virtual.run(main())


def test_an_error_of_opening_is_the_fault_of_its_calls_and_other_versions_go_on() -> None:
    control, versions = Control(LiveVersions("1", "2", 0.5)), Versions()

    async def main() -> None:
        async with weighted(control, versions) as backend:
            assert set(await calls(backend, 50)) == {"1", "2"}
            control.live = LiveVersions("3")
            versions.fails, versions.error = 1, OSError("no descriptors")
            await asyncio.sleep(2.0 * REFRESH_S)
            reply = await backend.invoke("f", [], deadline_s=9.0)
            assert reply.fault is not None
            assert (reply.fault.kind, reply.fault.retryable) == (FaultKind.UNAVAILABLE, True)
            assert reply.fault.detail == "version 3 of f cannot be opened: OSError: no descriptors"
            assert await calls(backend, 3) == {"3": 3}

    virtual.run(main())


def test_the_time_to_open_a_version_counts_against_the_deadline() -> None:
    control, versions = Control(LiveVersions("1")), Versions()
    versions.opening_s = 60.0

    async def main() -> None:
        now = asyncio.get_running_loop().time
        async with weighted(control, versions) as backend:
            reply = await backend.invoke("f", [], deadline_s=0.1)
            assert now() == pytest.approx(0.1)
            assert reply.fault is not None
            assert (reply.fault.kind, reply.fault.retryable) == (FaultKind.DEADLINE, False)
            assert (await backend.invoke("f", [], deadline_s=70.0)).body == "1", "the opening goes on"
            assert now() == pytest.approx(61.0)

    virtual.run(main())


def test_a_version_that_hangs_as_it_is_opened_does_not_hold_up_the_end() -> None:
    control, versions = Control(LiveVersions("1")), Versions()
    versions.opening_s = 1e6

    async def main() -> None:
        now = asyncio.get_running_loop().time
        async with asyncio.TaskGroup() as group:
            async with weighted(control, versions) as backend:
                call = group.create_task(backend.invoke("f", [], deadline_s=1e6))
                await asyncio.sleep(1.0)
            assert now() == pytest.approx(1.0)
        assert now() == pytest.approx(1.0)
        assert call.result().fault is not None
        assert versions.open == []

    virtual.run(main())
