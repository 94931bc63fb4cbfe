"""A backend under the conformance suite (`rollart.testing.backend_suite`), for authors of backends.

A test module of one's package:

    import pytest
    from rollart.testing.backends import Provider
    from rollart.testing.backend_suite import *

    class Nebula(Provider):
        name = "nebula"

        @contextlib.asynccontextmanager
        async def open(self, packages, meter=None):
            async with NebulaBackend(meter=meter) as backend:
                for package in packages:
                    await backend.deploy(package)
                yield backend

    @pytest.fixture
    def provider() -> Provider:
        return Nebula()

A test that a provider cannot pass is left out by deleting its name after the import, with the reason beside it.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import pathlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from rollart.testing.functions import Meter
from serverless.deploy.package import Package, build
from serverless.meter import MeterSink, WorkerSpan
from serverless.providers.base import Backend
from serverless.spec import FunctionSpec
from serverless.types import Invocation, Item

T = TypeVar("T")

REWARDS = pathlib.Path(__file__).parent / "rewards"
"""The functions of the suite. They are packed, and run by the backend alone."""


def package(source: str = "behave", *, base: pathlib.Path = REWARDS, **settings: Any) -> Package:
    """A function of the suite, `file` or `file:attribute`; its name is the attribute's unless given."""
    file, _, attribute = source.partition(":")
    settings.setdefault("name", attribute or file)
    return build(FunctionSpec(source=f"{file}.py", handler=attribute, **settings), base=base)


def item(key: str = "a", **metadata: Any) -> Item:
    messages = ({"role": "user", "content": "in"}, {"role": "assistant", "content": "out"})
    return Item(key, messages, "out", metadata)


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for a fact about real processes, which nothing signals to us."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


class Books(Meter):
    """A meter that keeps every record."""

    def __init__(self) -> None:
        super().__init__()
        self.invocations: list[Invocation] = []
        self.spans: list[WorkerSpan] = []

    def invocation(self, invocation: Invocation) -> None:
        super().invocation(invocation)
        self.invocations.append(invocation)

    def worker(self, span: WorkerSpan) -> None:
        super().worker(span)
        self.spans.append(span)


class Provider(abc.ABC):
    """A backend under the conformance suite.

    `missing` is why it cannot run here ('' if it can): the suite then skips with that. `real` providers wait on the
    clock and start processes, so their tests are slow ones. `workers` is None where a caller cannot count them, and
    `spans` False where the provider does not report its workers' time: the tests about these are then skipped.
    """

    name: str
    real = True
    spans = True
    missing = ""

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(main)

    @abc.abstractmethod
    def open(
        self, packages: Sequence[Package], meter: MeterSink | None = None
    ) -> contextlib.AbstractAsyncContextManager[Backend]:
        """The backend with these deployed."""

    def workers(self, backend: Backend, function: str) -> int | None:
        count: int = backend.load(function).workers  # type: ignore[attr-defined]
        return count
