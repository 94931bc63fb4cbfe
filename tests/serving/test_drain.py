"""KV on an engine that goes: who still fetches it is waited for, and nobody counts on it later."""

from __future__ import annotations

import asyncio

import pytest

from rollart.errors import LeaseExpired
from rollart.fleet import EnginePlacement, EngineRole
from rollart.model import EngineId
from rollart.testing.handoff import HandoffTimings
from tests.serving.test_handoff import PROMPT, Bench, virtual

SPLIT = {
    "p": EnginePlacement("fast", role=EngineRole.PREFILL),
    "d": EnginePlacement("wide", role=EngineRole.DECODE),
    "e": EnginePlacement("wide", role=EngineRole.DECODE),
}


@pytest.mark.parametrize("versioned", [True, False])
def test_a_drain_waits_for_kv_that_is_being_fetched(versioned: bool) -> None:
    async def main() -> None:
        bench = Bench(SPLIT, pace=HandoffTimings(pull_s=0.01), versioned=versioned)
        async with asyncio.TaskGroup() as tasks:
            turn = tasks.create_task(bench.ask())
            await asyncio.sleep(0.5)  # prefilled at 0.1, pulled at 1.1
            assert bench.shares["p"].requests == []
            await bench.gateway.drain(EngineId("p"), seconds=5.0)
            assert asyncio.get_running_loop().time() >= 1.1
        assert turn.result().token_ids
        assert bench.fabric.remote == 1
        assert bench.events("handoff_failed") == []

    virtual(main)


def test_kv_of_an_engine_that_went_is_not_fetched() -> None:
    """Its last answers come with an offer of KV, after it began to drain."""

    async def main() -> None:
        bench = Bench(SPLIT)
        async with asyncio.TaskGroup() as tasks:
            turn = tasks.create_task(bench.ask())
            await asyncio.sleep(0.12)
            sticky = next(e for e in ("d", "e") if bench.requests(e))
            await bench.gateway.drain(EngineId(sticky), seconds=5.0)
        assert turn.result().kv_transfer is not None
        bench.gateway.leave(EngineId(sticky), cause="drained")
        bench.engines[sticky].fail = True
        await bench.ask((*PROMPT, 1))
        assert bench.requests("p")[1].kv_transfer == {"do_remote_decode": True, "do_remote_prefill": False}
        assert bench.events("handoff_failed") == []
        assert bench.suspected == []

    virtual(main)


def test_a_turn_that_is_cut_short_is_no_failed_attempt() -> None:
    async def main() -> None:
        bench = Bench({name: EnginePlacement("x") for name in "abc"}, rule_name="local", attempts=1)
        for engine in bench.engines.values():
            engine.slow = 10.0
        async with asyncio.TaskGroup() as tasks:
            turn = tasks.create_task(bench.ask())
            for _ in range(2):
                await asyncio.sleep(1.0)
                (sticky,) = [n for n, shares in bench.shares.items() if shares.requests]
                with pytest.raises(LeaseExpired):
                    await bench.gateway.drain(EngineId(sticky), seconds=1.0)
                bench.gateway.leave(EngineId(sticky), cause="drained")
                bench.engines[sticky].fail = True
                while bench.shares[sticky].requests:
                    await asyncio.sleep(1.0)
        assert turn.result().token_ids
        assert bench.gateway.turns.served == 1
        assert bench.suspected == [], "its end was wanted"

    virtual(main)
