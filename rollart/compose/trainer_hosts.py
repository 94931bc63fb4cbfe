"""The embedded trainer with ranks on several hosts: one program on each, which meet where the first one says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollart.adapters.trainers.http import HttpTrainer
from rollart.compose.actors import trainer_actors
from rollart.compose.clusters import place_actor
from rollart.errors import PartDied, RollartError
from rollart.ports import Handle, Runtime
from rollart.spec.resolve import Resolved

__all__ = ["MultiHostTrainer", "place_trainer"]

STOP_S = 15.0
"""Seconds that a host may take to stop its program, which gets 5 before it is killed. The actor of a host that is gone
may be on its way back for ever: with room again, its next start ends what is left."""


async def place_trainer(
    stack: contextlib.AsyncExitStack, resolved: Resolved, runtime: Runtime, directory: Path, config: Path
) -> Handle | MultiHostTrainer:
    """The trainer's program, where the plan puts it; nothing of it runs yet."""
    handles = [await place_actor(resolved, runtime, actor) for actor in trainer_actors(resolved, directory, config)]
    if len(handles) == 1:
        return handles[0]
    hosts = MultiHostTrainer(handles)
    stack.push_async_callback(hosts.aclose)
    return hosts


class MultiHostTrainer:
    """Programs that are one: started together, lost together. Has the one call of a `Handle` that `TrainerProgram`
    makes.

    Owns a task that waits for the end of every host but the first, whose end callers notice by themselves, and tells
    the first one why: it answers whoever waits with that, at once.
    """

    def __init__(self, hosts: Sequence[Handle]) -> None:
        """`hosts`: actors of `Program`, that of rank 0 first."""
        self._leader, *self._others = hosts
        self._watching: asyncio.Task[None] | None = None

    async def call(self, method: str, extra: list[str]) -> Any:
        """`start`: the address that the trainer serves at. `PartDied` as the first host that ends before all are ready;
        then none is left running."""
        assert method == "start"
        await self._forget()
        meet = str(await self._leader.call("begin", [*extra, "--meet", ":0"]))
        try:
            async with asyncio.TaskGroup() as tasks:
                ready = tasks.create_task(self._leader.call("ready"))
                for other in self._others:
                    tasks.create_task(other.call("start", [*extra, "--meet", meet]))
        except BaseException as error:
            await self._stop()
            if isinstance(error, ExceptionGroup):
                raise error.exceptions[0] from None
            raise
        address = str(ready.result())
        # It outlives this call; the next start ends it, or `aclose`.
        self._watching = asyncio.get_running_loop().create_task(self._watch(address), name="hosts of the trainer")
        return address

    async def aclose(self) -> None:
        await self._forget()

    async def _watch(self, address: str) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number, other in enumerate(self._others, 1):
                tasks.create_task(self._tell_the_end(number, other, address))

    async def _tell_the_end(self, number: int, other: Handle, address: str) -> None:
        try:
            cause = str(await other.call("wait"))
        except PartDied as error:  # the actor, or its node
            cause = error.message
        trainer = HttpTrainer(address)
        try:
            await trainer.lost(f"the trainer's host {number}: {cause}")
        except RollartError:  # the first host is gone as well
            pass
        finally:
            await trainer.aclose()

    async def _stop(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for host in (self._leader, *self._others):
                tasks.create_task(_stop_host(host))

    async def _forget(self) -> None:
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def _stop_host(host: Handle) -> None:
    with contextlib.suppress(RollartError, TimeoutError):
        async with asyncio.timeout(STOP_S):
            await host.call("stop")
