"""Broadcasts to a server of two tensor-parallel workers with a tied head: each keeps its shard."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rollart.adapters.engines.vllm import WORKER_METHOD, VllmEngine
from rollart.errors import EngineError
from rollart.model import EngineId, PauseMode, WeightsRef
from tests.contracts.broadcasting import BroadcastVllm
from tests.contracts.engine_contract import request
from tests.engine.models import reference
from tests.vllm.hosting import TIED, needs_vllm, publish, server

pytestmark = [pytest.mark.slow, needs_vllm, pytest.mark.timeout(900)]

PARALLEL = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")


def test_every_worker_takes_part_and_loads_its_own_part(tmp_path: Path) -> None:
    async def body(url: str) -> None:
        engine = BroadcastVllm(EngineId("e0"), url)
        try:
            assert await engine.members() == 2
            for version in (1, 2):
                if version == 2:
                    await refused(engine, tmp_path)
                path = publish(tmp_path / f"v{version}", version, TIED)
                await engine.pause(PauseMode.KEEP)
                await engine.update_weights(WeightsRef(version, str(path)))
                await engine.resume()
                answer = await engine.generate(request(f"v{version}", (5, 17, 2, 40), max_tokens=24, temperature=0.0))
                rows = reference(path, (5, 17, 2, 40, *answer.token_ids))[3:-1]
                assert [span.version for span in answer.spans] == [version]
                assert answer.token_ids == tuple(rows.argmax(-1).tolist())
                assert answer.logprobs == pytest.approx(rows.max(-1).values.tolist(), abs=1e-4)
        finally:
            await engine.close()

    async def refused(engine: VllmEngine, nothing: Path) -> None:
        """Refused by both workers, and the next call is answered correctly."""
        with pytest.raises(EngineError, match="is not a whole version"):
            await VllmEngine.update_weights(engine, WeightsRef(9, str(nothing)))
        told = json.dumps({"stamp": "none"})
        assert [one["unknown"] for one in await engine.workers(WORKER_METHOD, "look", told)] == [True, True]
        await engine.control("/start_weight_update", {})  # and never ended

    with server(publish(tmp_path / "v0", 0, TIED), tmp_path / "log", extra=PARALLEL) as url:
        asyncio.run(body(url))
