"""Events of a runtime, when more happened than is kept. On the virtual loop."""

from __future__ import annotations

import asyncio

from rollart.adapters.clusters.runtime import EventLog
from rollart.fleet import RuntimeEvent
from rollart.sim import loop


def test_readers_continue_after_events_were_dropped() -> None:
    async def main() -> None:
        log, early, late = EventLog(max_events=3), list[str](), list[str]()

        async def read(into: list[str]) -> None:
            async for event in log.read():
                into.append(event.subject)

        async with asyncio.TaskGroup() as readers:
            readers.create_task(read(early))
            for n in range(7):
                log.emit(RuntimeEvent("node_up", f"n{n}"))
                await asyncio.sleep(0)
            readers.create_task(read(late))
            await asyncio.sleep(1)
            log.close()
        assert early == [f"n{n}" for n in range(7)]
        assert late == ["n4", "n5", "n6"], "the oldest are gone"

    loop.run(main())
