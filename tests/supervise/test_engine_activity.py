"""Engines' counters as rows of the ledger: growth by interval, whatever is started anew."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rollart.ledger.events import ENGINE_DID
from rollart.model import EngineId, EngineStats
from rollart.ports import Interval, RunEvent
from rollart.sim.loop import run
from rollart.supervise.engines import EVERY_S, EngineMeter

NONE = EngineStats(0, 0, 0, 0, 0, 0.0, 0.0)


class Events:
    def __init__(self) -> None:
        self.seen: list[RunEvent] = []

    def event(self, event: RunEvent) -> None:
        self.seen.append(event)

    def interval(self, interval: Interval) -> None:
        raise AssertionError("no interval is due here")

    def charge(self, charge: object) -> None:
        raise AssertionError("nothing is charged here")


def test_each_interval_has_what_grew_in_it() -> None:
    """Counters before the run do not count; an engine that begins anew counts from zero; one that rests has no row."""
    now = {EngineId("a"): replace(NONE, prompt_tokens=100, generated_tokens=5), EngineId("b"): NONE}
    events = Events()

    async def stats() -> dict[EngineId, EngineStats]:
        return dict(now)

    async def body() -> None:
        meter = EngineMeter(stats, events)
        task = asyncio.create_task(meter.run())
        await asyncio.sleep(EVERY_S / 2)
        now[EngineId("a")] = replace(NONE, prompt_tokens=140, generated_tokens=9, cached_tokens=30, steps=4)
        await asyncio.sleep(EVERY_S)
        now[EngineId("a")] = replace(NONE, prompt_tokens=7, generated_tokens=1)
        now[EngineId("late")] = replace(NONE, prompt_tokens=3)
        await meter.look()
        task.cancel()

    run(body())
    assert {e.kind for e in events.seen} == {ENGINE_DID}
    did = [(e.subject, e.fields["seconds"], e.fields["prompt_tokens"], e.fields["steps"]) for e in events.seen]
    assert did == [("a", EVERY_S, 40.0, 4.0), ("a", EVERY_S / 2, 7.0, 0.0), ("late", EVERY_S / 2, 3.0, 0.0)]
