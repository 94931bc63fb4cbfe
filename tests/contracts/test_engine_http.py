"""`HttpEngine` keeps the contract: with the embedded engine's server on this loop, and as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rollart.adapters.engines.http import HttpEngine
from rollart.adapters.engines.vllm import VllmEngine
from rollart.collective import BroadcastOrder
from rollart.engine.handoff import HandoffSettings
from rollart.model import EngineId, PauseMode, WeightsRef
from rollart.train.sending import BroadcastSender
from tests.contracts.broadcasting import BroadcastEngine, give
from tests.contracts.engine_contract import (
    EngineContract,
    PdContract,
    PdScenario,
    PdSubject,
    Scenario,
    Subject,
    request,
)
from tests.engine.hosting import process, served
from tests.engine.models import LLAMA, publish


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("weights") / "v0", 0)


def publisher(base: Path) -> Callable[[int], WeightsRef]:
    return lambda version: WeightsRef(version, str(publish(base.parent / f"v{version}", version)))


async def to_version(engine: HttpEngine, weights: WeightsRef) -> None:
    await engine.pause(PauseMode.KEEP)
    await engine.update_weights(weights)
    await engine.resume()


async def play(url: str, base: Path, scenario: Scenario, *, streaming: bool, vllm: bool = False) -> None:
    engine = VllmEngine(EngineId("e0"), url) if vllm else HttpEngine(EngineId("e0"), url, streaming=streaming)
    await played(engine, base, scenario)


async def played(engine: HttpEngine, base: Path, scenario: Scenario) -> None:
    try:
        async with asyncio.timeout(120):
            await scenario(Subject(engine, publisher(base)))
    finally:
        await engine.close()


class TestStream(EngineContract):
    streaming = True
    vllm = False

    @pytest.fixture(autouse=True)
    def _base(self, base: Path) -> None:
        self.base = base

    def run(self, scenario: Scenario) -> None:
        async def body() -> None:
            async with served(self.base) as url:
                await play(url, self.base, scenario, streaming=self.streaming, vllm=self.vllm)

        asyncio.run(body())


class TestHttp(TestStream):
    """As with vLLM: no stream."""

    streaming = False


class TestVllmClient(TestStream):
    """vLLM's client at the embedded engine, which speaks its protocol; at vLLM itself it is tested in tests/vllm."""

    vllm = True
    RELEASES = False


class TestBroadcast(EngineContract):
    """Versions that come by broadcast over gloo."""

    @pytest.fixture(autouse=True)
    def _base(self, base: Path) -> None:
        self.base = base

    def run(self, scenario: Scenario) -> None:
        async def body() -> None:
            async with served(self.base) as url:
                await played(BroadcastEngine(EngineId("e0"), url), self.base, scenario)

        asyncio.run(body())

    def test_missing_weights_are_read_from_files_and_weights_of_another_model_are_dropped(self) -> None:
        async def body() -> None:
            async with served(self.base) as url:
                engine, sender = (
                    HttpEngine(EngineId("e0"), url),
                    BroadcastSender(torch.device("cpu"), rank=0, host="127.0.0.1"),
                )
                try:
                    one, other = publisher(self.base)(1), publish(self.base.parent / "llama", 2, LLAMA)
                    await to_version(engine, one)
                    before = await engine.generate(request("a", max_tokens=9, temperature=0.0))
                    order = BroadcastOrder(sender.address(), "g", "gloo", 2, 1, "s", 2, limit_s=60.0)
                    sent = await give(sender, order, other, engine)
                    assert sent.errors == {1: "it is another architecture than the engine's"}
                    engine.received(2, "s")  # as if it had it
                    two = publisher(self.base)(2)
                    await to_version(engine, two)
                    after = await engine.generate(request("b", max_tokens=9, temperature=0.0))
                    await to_version(engine, dataclasses.replace(one, version=3))
                    again = await engine.generate(request("c", max_tokens=9, temperature=0.0))
                    assert before.token_ids == again.token_ids != after.token_ids
                finally:
                    sender.leave(wait_s=60.0)
                    await engine.close()

        asyncio.run(body())


@pytest.mark.slow
class TestServerProcess(EngineContract):
    """Slow: starts a process for each test."""

    @pytest.fixture(autouse=True)
    def _base(self, base: Path) -> None:
        self.base = base

    def run(self, scenario: Scenario) -> None:
        with process(self.base) as (url, _):
            asyncio.run(play(url, self.base, scenario, streaming=True))


class TestPdBySocket(PdContract):
    """Prefill and decode on two servers of this loop."""

    streaming = True
    shared = False
    vllm = False

    @pytest.fixture(autouse=True)
    def _base(self, base: Path, tmp_path: Path) -> None:
        self.base = base
        self.shm = str(tmp_path) if self.shared else ""

    def run_pd(self, scenario: PdScenario) -> None:
        async def body() -> None:
            handoff = HandoffSettings(shm=self.shm)
            async with contextlib.AsyncExitStack() as stack, contextlib.AsyncExitStack() as mortal:
                urls = [await s.enter_async_context(served(self.base, handoff=handoff)) for s in (mortal, stack, stack)]
                await play_pd(urls, self.base, scenario, mortal, streaming=self.streaming, vllm=self.vllm)

        asyncio.run(body())


class TestPdBySharedMemory(TestPdBySocket):
    shared = True


class TestPdByHttp(TestPdBySocket):
    """Requests as to vLLM: no stream."""

    streaming = False


class TestPdByVllmClient(TestPdBySocket):
    vllm = True


@pytest.mark.slow
class TestPdProcesses(PdContract):
    """Slow: starts three processes for each test."""

    @pytest.fixture(autouse=True)
    def _base(self, base: Path, tmp_path: Path) -> None:
        self.base, self.shm = base, str(tmp_path)

    def run_pd(self, scenario: PdScenario) -> None:
        with contextlib.ExitStack() as stack:
            (url, started), *others = [
                stack.enter_context(process(self.base, "--kv-shm", self.shm)) for _ in ("prefill", "decode", "alone")
            ]
            ended = contextlib.AsyncExitStack()
            ended.callback(started.wait, 60)
            ended.callback(started.terminate)
            asyncio.run(play_pd([url, *(u for u, _ in others)], self.base, scenario, ended, streaming=True))


async def play_pd(
    urls: list[str],
    base: Path,
    scenario: PdScenario,
    ends: contextlib.AsyncExitStack,
    *,
    streaming: bool,
    vllm: bool = False,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        engines: list[HttpEngine] = [
            VllmEngine(EngineId(f"e{i}"), url) if vllm else HttpEngine(EngineId(f"e{i}"), url, streaming=streaming)
            for i, url in enumerate(urls)
        ]
        for engine in engines:
            stack.push_async_callback(engine.close)
        async with asyncio.timeout(120):
            await scenario(PdSubject(*engines, publisher(base), ends.aclose))
