"""`HttpEngine` keeps the contract: with the embedded engine's server on this loop, and as a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rollart.adapters.engines.http import HttpEngine
from rollart.model import EngineId, WeightsRef
from tests.contracts.engine_contract import EngineContract, Scenario, Subject
from tests.engine.hosting import process, served
from tests.engine.models import publish


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("weights") / "v0", 0)


def publisher(base: Path) -> Callable[[int], WeightsRef]:
    return lambda version: WeightsRef(version, str(publish(base.parent / f"v{version}", version)))


async def play(url: str, base: Path, scenario: Scenario, *, streaming: bool) -> None:
    engine = HttpEngine(EngineId("e0"), url, streaming=streaming)
    try:
        async with asyncio.timeout(20):
            await scenario(Subject(engine, publisher(base)))
    finally:
        await engine.close()


class TestStream(EngineContract):
    streaming = True

    @pytest.fixture(autouse=True)
    def _base(self, base: Path) -> None:
        self.base = base

    def run(self, scenario: Scenario) -> None:
        async def body() -> None:
            async with served(self.base) as url:
                await play(url, self.base, scenario, streaming=self.streaming)

        asyncio.run(body())


class TestHttp(TestStream):
    """As with vLLM: no stream."""

    streaming = False


@pytest.mark.slow
class TestServerProcess(EngineContract):
    """Slow: starts a process for each test."""

    @pytest.fixture(autouse=True)
    def _base(self, base: Path) -> None:
        self.base = base

    def run(self, scenario: Scenario) -> None:
        with process(self.base) as (url, _):
            asyncio.run(play(url, self.base, scenario, streaming=True))
