"""The embedded trainer with ranks on several hosts: one program per host, with the rendezvous at the first one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollart.adapters.trainers.http import HttpTrainer
from rollart.errors import RollartError
from rollart.launch.clusters import exit_cause, place_actor
from rollart.launch.layout import trainer_actors
from rollart.ports import Handle, Runtime
from rollart.settings.resolve import Resolved

STOP_S = 15.0
"""Seconds for a host to stop its program, which is killed after 5. The actor of a lost host may wait for resources
indefinitely; its next start ends leftover processes."""


async def place_trainer(
    stack: contextlib.AsyncExitStack, resolved: Resolved, runtime: Runtime, directory: Path, config: Path
) -> Handle | MultiHostTrainer:
    """Place the trainer's actors as planned; no program is started yet."""
    handles = [await place_actor(resolved, runtime, actor) for actor in trainer_actors(resolved, directory, config)]
    if len(handles) == 1:
        return handles[0]
    hosts = MultiHostTrainer(handles)
    stack.push_async_callback(hosts.aclose)
    return hosts


class MultiHostTrainer:
    """Programs of one trainer, started together and lost together. Provides the one `Handle` call that `TrainerProgram`
    makes.

    Owns a task that waits for the exit of every host except the first, whose exit callers notice themselves. It reports
    the cause to the first host, which fails all pending requests with it at once.
    """

    def __init__(self, hosts: Sequence[Handle]) -> None:
        """`hosts`: actors of `Program`, rank 0's first."""
        self._leader, *self._others = hosts
        self._watching: asyncio.Task[None] | None = None

    async def call(self, method: str, extra: list[str]) -> Any:
        """`start`: the trainer's address. `PartDied` of the first host that ends before all are ready; no host is left
        running then."""
        assert method == "start"
        await self.aclose()
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
        # The task outlives this call; the next start or `aclose` ends it.
        self._watching = asyncio.get_running_loop().create_task(self._watch(address), name="hosts of the trainer")
        return address

    async def _watch(self, address: str) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number, other in enumerate(self._others, 1):
                tasks.create_task(self._report_exit(number, other, address))

    async def _report_exit(self, number: int, other: Handle, address: str) -> None:
        cause, trainer = await exit_cause(other), HttpTrainer(address)
        try:
            await trainer.lost(f"the trainer's host {number}: {cause}")
        except RollartError:  # the first host has ended as well
            pass
        finally:
            await trainer.aclose()

    async def _stop(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for host in (self._leader, *self._others):
                tasks.create_task(_stop_host(host))

    async def aclose(self) -> None:
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def _stop_host(host: Handle) -> None:
    with contextlib.suppress(RollartError, TimeoutError):
        async with asyncio.timeout(STOP_S):
            await host.call("stop")
