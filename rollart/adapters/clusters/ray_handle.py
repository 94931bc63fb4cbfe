"""One actor on Ray across its incarnations."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollart import __version__
from rollart.adapters.clusters.ray_host import RayActorHost, pack, unpack
from rollart.errors import NoPlace, PartDied, ProviderError, UsageError
from rollart.ports import ActorSpec, RuntimeEvent

if TYPE_CHECKING:
    from rollart.adapters.clusters.ray import RayRuntime

STOP_S = 8.0
"""Seconds that an actor may take to stop its object: a program gets 5 between SIGTERM and SIGKILL."""

RECHECK_S = 1.0
"""Seconds between two checks, while Ray looks for room, that a node that could hold the actor still exists."""

MAX_START_ATTEMPTS = 6
"""Starts of one incarnation, over about six seconds: longer than Ray takes to notice the death of a node."""

NODE_ID = "ray.io/node-id"
"""The label that Ray gives each node."""

RESERVED_CALLS = 3
"""Concurrent calls beside those of the caller: `live`, which never returns, the start and the stop."""


@dataclass(slots=True)
class _Incarnation:
    """One incarnation: its Ray actor and its node."""

    host: Any
    node: str
    ray_id: str
    """Ray's id of the node."""
    watch: asyncio.Task[None] | None = field(default=None)


class RayHandle:
    """A running actor. Calls wait for one of `max_concurrency` slots; a call in flight when the actor dies is retried
    up to `max_task_retries` on the next incarnation, then fails with `PartDied`. If a restart finds no node that could
    hold the actor, calls fail with `PartDied`, and each of them tries the restart again."""

    def __init__(self, runtime: RayRuntime, spec: ActorSpec) -> None:
        self._runtime = runtime
        self.spec = spec
        self._slots = asyncio.Semaphore(spec.max_concurrency)
        self._incarnation: _Incarnation | None = None
        self._node = ""
        self.resourceless = not spec.bundle and not any(spec.resources.values())
        self.target_node = ""
        """The node chosen here for an actor that takes no resources."""
        self._restarts = 0
        self._revival: asyncio.Task[None] | None = None
        self._gone = False

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def node(self) -> str:
        return self._node

    async def boot(self) -> None:
        """Start the next incarnation. `UsageError` if no node could hold it; exceptions of its constructor."""
        await self._runtime.feasible(self.spec)
        resources = dict(self.spec.resources)
        scheduling: dict[str, Any] = {"label_selector": dict(self.spec.labels) or None}
        if self.spec.bundle:
            scheduling = {"scheduling_strategy": self._runtime.groups.strategy(self.spec.bundle)}
        elif self.resourceless:
            self.target_node, ray_id = self._runtime.least_loaded_node(self)
            scheduling["fallback_strategy"] = [dict(scheduling)] if self.spec.labels else None
            scheduling["label_selector"] = {**self.spec.labels, NODE_ID: ray_id}
        options = {
            "num_cpus": resources.pop("CPU", 0.0),
            "num_gpus": resources.pop("GPU", 0.0),
            "resources": resources,
            **scheduling,
            "max_concurrency": self.spec.max_concurrency + RESERVED_CALLS,
            "max_restarts": 0,
        }
        host = await self._runtime.link.actor(RayActorHost, options)
        try:
            ok, error, ray_id = await self._boot_response(host)
            if not ok:
                raise unpack(error)
        except BaseException:
            self._runtime.link.kill(host)
            raise
        self._node = self._runtime.acquire_resources(ray_id, self.spec)
        incarnation = _Incarnation(host, self._node, ray_id)
        # The actor outlives the call that started it; it ends by `kill` or by its death, which this task waits for.
        incarnation.watch = asyncio.get_running_loop().create_task(self._watch(incarnation), name=f"end of {self.name}")
        self._incarnation = incarnation

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        payload = pack((args, kwargs))
        async with self._slots:
            for _ in range(self.spec.max_task_retries + 1):
                incarnation = await self._alive()
                try:
                    ok, result = await self._ask(incarnation, "call", method, payload)
                except PartDied as error:
                    last = error
                    self._on_death(incarnation)
                    continue
                if not ok:
                    raise unpack(result)
                return unpack(result)
            raise last

    async def stream(self, method: str, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """The items of an async generator method, one by one. Not retried: the caller may have seen items."""
        payload = pack((args, kwargs))
        async with self._slots:
            incarnation = await self._alive()
            with self._translate_deaths(incarnation):
                async with contextlib.aclosing(self._runtime.link.stream(incarnation.host, method, payload)) as items:
                    async for ok, item in items:
                        if not ok:
                            raise unpack(item)
                        yield unpack(item)

    async def kill(self, *, restart: bool = False) -> None:
        incarnation, self._incarnation = self._incarnation, None
        if self._gone:
            return
        self._gone = not restart  # first, so that a call during the stop does not restart the actor
        if incarnation is None:  # dead, or restarting
            await self._end_revival()
            incarnation, self._incarnation = self._incarnation, None
        if incarnation is not None:
            try:
                await self._stop(incarnation)
            finally:
                self._record_death(incarnation, restart)
        elif self._gone:
            self._runtime.forget(self)
        if restart and not self._gone:
            await self._alive()

    async def _boot_response(self, host: Any) -> tuple[bool, bytes, str]:
        """The response of the new actor's `boot`, once Ray has placed it."""
        init = pack((self.spec.args, dict(self.spec.kwargs)))
        boot_call = self._runtime.link.call_method(host, "boot", self.spec.factory, init, __version__)
        booting = asyncio.get_running_loop().create_task(boot_call, name=f"start of {self.name}")
        try:
            while True:
                try:
                    async with asyncio.timeout(RECHECK_S):
                        answer: tuple[bool, bytes, str] = await asyncio.shield(booting)
                        return answer
                except TimeoutError:
                    await self._runtime.feasible(self.spec)
        except _death_errors() as error:
            raise PartDied(self.name, f"it did not start: {_first_line(error)}") from None
        finally:
            booting.cancel()

    async def _ask(self, incarnation: _Incarnation, method: str, *args: object) -> Any:
        with self._translate_deaths(incarnation):
            return await self._runtime.link.call_method(incarnation.host, method, *args)

    @contextlib.contextmanager
    def _translate_deaths(self, incarnation: _Incarnation) -> Iterator[None]:
        """Converts Ray's errors of a dead actor into `PartDied`."""
        try:
            yield
        except _death_errors() as error:
            raise PartDied(self.name, f"its actor on {incarnation.node} died: {_first_line(error)}") from None

    async def _alive(self) -> _Incarnation:
        while True:
            if self._gone:
                raise PartDied(self.name, "the actor is dead and has no restarts left")
            if self._incarnation is not None:
                return self._incarnation
            if self._revival is None or self._revival.done():
                self._revival = asyncio.get_running_loop().create_task(self._revive(), name=f"restart {self.name}")
            revival = self._revival
            await asyncio.shield(revival)

    async def _revive(self) -> None:
        """Retried, since Ray may place the next incarnation on a dead node until it notices the death."""
        for attempt in range(MAX_START_ATTEMPTS):
            try:
                await self.boot()
                break
            except UsageError as error:
                raise NoPlace(self.name, error.message, remedy=error.remedy) from None
            except PartDied:
                if attempt == MAX_START_ATTEMPTS - 1:
                    raise
                await asyncio.sleep(min(0.25 * 2**attempt, 2.0))
        self._runtime.emit(RuntimeEvent("actor_restarted", self.name, self._node))

    async def _watch(self, incarnation: _Incarnation) -> None:
        """Wait for the death of an incarnation, then restart the actor."""
        try:
            await self._ask(incarnation, "live")
        except PartDied:
            self._on_death(incarnation)
        except ProviderError:  # the connection is lost: every call fails by itself
            return

    def _on_death(self, incarnation: _Incarnation) -> None:
        """The incarnation died, or is unreachable. It is killed, so that it never runs beside its successor."""
        if self._incarnation is not incarnation:
            return
        self._incarnation = None
        self._runtime.link.kill(incarnation.host)
        self._record_death(incarnation, True)
        if not self._gone:
            self._revival = asyncio.get_running_loop().create_task(self._revive(), name=f"restart {self.name}")
            self._revival.add_done_callback(_mark_retrieved)

    def _record_death(self, incarnation: _Incarnation, restart: bool) -> None:
        self._runtime.return_resources(incarnation.ray_id, self.spec)
        self._runtime.emit(RuntimeEvent("actor_died", self.name, incarnation.node))
        if restart and (self.spec.max_restarts < 0 or self._restarts < self.spec.max_restarts):
            self._restarts += 1
        else:
            self._gone = True
            self._runtime.forget(self)

    async def _stop(self, incarnation: _Incarnation) -> None:
        if incarnation.watch is not None:
            incarnation.watch.cancel()
            await asyncio.gather(incarnation.watch, return_exceptions=True)
        try:
            with contextlib.suppress(Exception):  # killed below, whether the stop succeeds or not
                async with asyncio.timeout(STOP_S):
                    await self._ask(incarnation, "stop")
        finally:
            self._runtime.link.kill(incarnation.host)

    async def _end_revival(self) -> None:
        if self._revival is not None:
            self._revival.cancel()
            await asyncio.gather(self._revival, return_exceptions=True)


def _death_errors() -> tuple[type[Exception], ...]:
    from ray import exceptions as ray

    return (
        ray.RayActorError,
        ray.NodeDiedError,
        ray.ObjectLostError,
        ray.RaySystemError,
        ray.TaskCancelledError,
        ray.WorkerCrashedError,
    )


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]


def _mark_retrieved(task: asyncio.Task[None]) -> None:
    """The next caller gets the error again; it is not an unhandled one if no caller was waiting."""
    if not task.cancelled():
        task.exception()
