"""`ModelledEngine` keeps the engines' contract, seen through real tokens: one id for each.

Left out: the choice of tokens (legal tokens, seeds), which simulated engines do not draw.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from rollart.model import Completion, EngineId, EngineStats, GenerateRequest, PauseMode, VersionSpan, WeightsRef
from rollart.sim.engine import ModelledEngine
from rollart.sim.loop import run
from tests.contracts.engine_contract import EngineContract, Scenario, Subject
from tests.sim.models import engine


class Unfolded:
    """Takes ids of one token each, answers with as many ids as tokens. A look at the counters takes a millisecond, as
    over HTTP: time passes while a scenario polls."""

    def __init__(self, inner: ModelledEngine) -> None:
        self.inner = inner

    @property
    def id(self) -> EngineId:
        return self.inner.id

    async def generate(self, request: GenerateRequest) -> Completion:
        c = await self.inner.generate(dataclasses.replace(request, token_ids=(1,) * len(request.token_ids)))
        edges = [sum(c.token_ids[:i]) for i in range(len(c.token_ids) + 1)]
        return dataclasses.replace(
            c,
            token_ids=(97,) * edges[-1],
            logprobs=(-1.0,) * edges[-1],
            spans=tuple(VersionSpan(s.version, edges[s.start], edges[s.end]) for s in c.spans),
        )

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self.inner.abort(request_ids)

    async def release(self, session: str) -> None:
        await self.inner.release(session)

    async def pause(self, mode: PauseMode) -> None:
        await self.inner.pause(mode)

    async def resume(self) -> None:
        await self.inner.resume()

    async def update_weights(self, weights: WeightsRef) -> None:
        await self.inner.update_weights(weights)

    async def stats(self) -> EngineStats:
        await asyncio.sleep(0.001)
        return await self.inner.stats()

    async def healthy(self) -> bool:
        return await self.inner.healthy()


class TestModelledEngine(EngineContract):
    TELLS = False
    test_only_legal_tokens = None  # type: ignore[assignment]
    test_a_seed_repeats_itself_in_company = None  # type: ignore[assignment]

    def run(self, scenario: Scenario) -> None:
        async def body() -> None:
            async with asyncio.timeout(60):
                await scenario(Subject(Unfolded(engine()), lambda version: WeightsRef(version, f"v{version}")))

        run(body())


class TestBusyEngine(TestModelledEngine):
    """The same with hardly any memory and few tokens a step: nothing of the contract depends on plenty."""

    def run(self, scenario: Scenario) -> None:
        async def body() -> None:
            async with asyncio.timeout(60):
                small = engine(kind="H20", slots=8, step_tokens=8, kv_tokens=100)
                await scenario(Subject(Unfolded(small), lambda version: WeightsRef(version, f"v{version}")))

        run(body())
