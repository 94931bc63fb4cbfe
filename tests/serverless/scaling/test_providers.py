"""Levels that cost money, with the real clients of AWS and Modal against their planes: followed, and set back."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from serverless.meter import WorkerState
from serverless.providers.base import ProvisionedBackend, ScalableBackend
from serverless.scaling.decisions import Hysteresis, StatisticsMeter
from serverless.scaling.scaler import Scaler, ScalerContext, ScalingDecision
from serverless.scaling.settings import ScalingSpec
from serverless.wire import encode
from tests.serverless.aws import provider as aws
from tests.serverless.modal_plane import provider as modal
from tests.serverless.support import Books, item, package, until

if TYPE_CHECKING:
    from tests.serverless.aws.plane import Plane

pytestmark = pytest.mark.slow  # real clients, real processes

SLEEPS = [encode(item("s", do="sleep", seconds=0.5))]


class Run:
    """A backend with one function, and its scaler that changes levels within fractions of a second."""

    def __init__(self, backend: Any, seen: StatisticsMeter, books: Books, remember: pathlib.Path | None = None) -> None:
        self.backend, self.books, self.decisions = backend, books, list[ScalingDecision]()
        self.one = package(concurrency=4)
        settings = ScalingSpec.model_validate(
            {"tick_s": 0.1, "provisioned": True, "reactive": {"stable_s": 1.0, "panic_share": 0.5}}
        )
        self.scaler = Scaler(
            {"behave": self.one.spec},
            [backend],
            seen=seen,
            meter=seen,
            settings=settings,
            around=ScalerContext(tell=self.decisions.append, remember=remember),
            hysteresis=lambda: Hysteresis(up_s=0.2, down_s=0.5),
        )

    async def call(self) -> None:
        while True:
            reply = await self.backend.invoke("behave", SLEEPS, deadline_s=60.0)
            assert reply.fault is None, reply.fault

    async def busy_until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.TaskGroup() as group:
            callers = [group.create_task(self.call()) for _ in range(3)]
            await until(condition, 60.0)
            for caller in callers:
                caller.cancel()


Level = Callable[[], Awaitable[int]]


async def follows(run: Run, level: Level) -> None:
    """The level rises with calls, falls without, and is as before when the scaler has gone."""
    before = await level()
    assert isinstance(run.backend, ProvisionedBackend)
    assert not isinstance(run.backend, ScalableBackend)
    async with run.scaler:
        await run.busy_until(lambda: any(c.after >= 3 for c in run.decisions))
        assert await level() >= 3
        await until(lambda: run.decisions[-1].after <= 1, 60.0)
        assert await level() == max(before, run.decisions[-1].after)
        await run.busy_until(lambda: run.decisions[-1].after >= 3)
        assert await level() >= 3
    assert await level() == before
    assert [c.failed for c in run.decisions if c.failed] == []
    spans = [s for s in run.books.spans if s.worker == "provisioned"]
    assert {s.state for s in spans} == {WorkerState.IDLE}
    assert sum((s.t1 - s.t0) * s.memory_mb for s in spans) > 0.0
    assert max(s.memory_mb for s in spans) <= 4 * run.one.spec.memory_mb


async def cancelled(run: Run, level: Level) -> None:
    """The owner of the scaler is cancelled at its highest level."""
    before = await level()

    async def owner() -> None:
        async with run.scaler:
            await run.busy_until(lambda: False)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(owner())
        await until(lambda: any(c.after >= 3 for c in run.decisions), 60.0)
        task.cancel()
    assert task.cancelled()
    assert await level() == before


@pytest.fixture(scope="module")
def modal_plane() -> Iterator[modal.PlaneProcess]:
    if modal.MISSING:
        pytest.skip(modal.MISSING)
    with modal.running_plane() as plane:
        yield plane


@pytest.fixture
def aws_plane() -> Iterator[Plane]:
    if aws.MISSING:
        pytest.skip(f"not installed: {aws.MISSING}")
    with aws.plane() as plane:
        yield plane


@contextlib.asynccontextmanager
async def on_lambda(plane: Plane, warm: int) -> AsyncIterator[tuple[Run, Level]]:
    from serverless.providers.aws import AwsLambdaBackend

    books = Books()
    seen = StatisticsMeter(books)
    async with AwsLambdaBackend(aws.settings(plane), meter=seen, run="a") as backend:
        await backend.deploy(package(concurrency=4, warm=warm))
        client = aws.client(plane)

        def read() -> int:
            try:
                found = client.get_provisioned_concurrency_config(FunctionName="rollart-behave", Qualifier="run-a")
            except client.exceptions.ProvisionedConcurrencyConfigNotFoundException:
                return 0
            return int(found["RequestedProvisionedConcurrentExecutions"])

        yield Run(backend, seen, books), lambda: asyncio.to_thread(read)


@contextlib.asynccontextmanager
async def on_modal(plane: modal.PlaneProcess, warm: int) -> AsyncIterator[tuple[Run, Level]]:
    from serverless.deploy.modal_app import ModalDeployer
    from serverless.providers.modal import ModalBackend
    from serverless.providers.modal_client import ModalSettings

    books, settings = Books(), ModalSettings(prefix=plane.prefix())
    seen = StatisticsMeter(books)
    async with ModalDeployer(settings) as deployer, ModalBackend(settings, meter=seen) as backend:
        try:
            await backend.deploy(package(concurrency=4, warm=warm))

            async def read() -> int:
                return (await deployer.functions())[0].warm

            yield Run(backend, seen, books), read
        finally:
            await deployer.delete("behave")


@pytest.mark.parametrize("warm", [0, 1])
def test_provisioned_concurrency_follows_and_is_set_back(aws_plane: Plane, warm: int) -> None:
    async def main() -> None:
        async with on_lambda(aws_plane, warm) as (run, level):
            await follows(run, level)

    asyncio.run(main())


def test_provisioned_concurrency_is_set_back_after_a_cancellation(aws_plane: Plane) -> None:
    async def main() -> None:
        async with on_lambda(aws_plane, 0) as (run, level):
            await cancelled(run, level)

    asyncio.run(main())


def test_min_containers_follow_and_are_set_back(modal_plane: modal.PlaneProcess) -> None:
    async def main() -> None:
        async with on_modal(modal_plane, 1) as (run, level):
            await follows(run, level)

    asyncio.run(main())


def test_min_containers_are_set_back_after_a_cancellation(modal_plane: modal.PlaneProcess) -> None:
    async def main() -> None:
        async with on_modal(modal_plane, 0) as (run, level):
            await cancelled(run, level)

    asyncio.run(main())
