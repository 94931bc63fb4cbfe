"""Engine activity from the counters of engines, for the ledger: one row per engine and interval."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from rollart.ledger.clock import ENGINE_DID
from rollart.model import EngineId, EngineStats
from rollart.ports import Recorder, RunEvent

__all__ = ["EngineMeter"]

EVERY_S = 10.0
"""Seconds between two readings. Each costs the controller as much time as a request, and a row per engine."""

COUNTERS = (
    "prompt_tokens",
    "generated_tokens",
    "cached_tokens",
    "external_tokens",
    "prefill_seconds",
    "decode_seconds",
    "preemptions",
    "ended",
    "steps",
    "latencies",
    "latency_seconds",
)
"""Counters of `EngineStats` that grow from the start of an engine."""


class EngineMeter:
    """`run` never returns; it waits for its timer and for the engines' counters. `look` is called once more at the end
    of the run. A restarted engine counts from zero. The activity of an engine between its last reading and its death
    is lost."""

    def __init__(self, stats: Callable[[], Awaitable[Mapping[EngineId, EngineStats]]], recorder: Recorder) -> None:
        self._stats = stats
        self._recorder = recorder
        self._seen: dict[EngineId, dict[str, float]] = {}
        self._at = 0.0

    async def run(self) -> None:
        self._at = asyncio.get_running_loop().time()
        self._seen = {engine: _counted(stats) for engine, stats in (await self._stats()).items()}
        while True:
            await asyncio.sleep(EVERY_S)
            await self.look()

    async def look(self) -> None:
        now = asyncio.get_running_loop().time()
        for engine, stats in (await self._stats()).items():
            before, counted = self._seen.get(engine, {}), _counted(stats)
            if any(counted[name] < value for name, value in before.items()):
                before = {}
            did = {name: value - before.get(name, 0.0) for name, value in counted.items()}
            self._seen[engine] = counted
            if did["prompt_tokens"] or did["generated_tokens"]:
                fields = {"seconds": now - self._at, "kv_used": stats.kv_used, "running": stats.running, **did}
                self._recorder.event(RunEvent(now, ENGINE_DID, engine, fields))
        self._at = now


def _counted(stats: EngineStats) -> dict[str, float]:
    return {name: float(getattr(stats, name)) for name in COUNTERS}
