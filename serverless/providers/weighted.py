"""A backend for callers that name a deployed function: each call goes to a version drawn by the weights of `live`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from serverless.deploy.package import Package
from serverless.errors import BackendFailed, ServerlessError, UnknownFunction
from serverless.providers.base import Backend, DeployedFunction, Deployer, Reply, find_version
from serverless.types import Cause, FaultKind, InfraFault

VersionOpener = Callable[[DeployedFunction], AbstractAsyncContextManager[Backend]]
"""Opens a backend that calls one version of a function."""

REFRESH_S = 5.0
"""Seconds between two readings of the weights. A rollback reaches callers after this time at most."""


@dataclass(slots=True, eq=False)
class _VersionInUse:
    """The backend of one version, in a task of its own, with the number of calls that use it. `opened` is the fault of
    those calls if it cannot be opened."""

    opened: asyncio.Future[Backend | InfraFault]
    task: asyncio.Task[None] | None = None
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    calls: int = 0

    def close(self) -> None:
        """Close the backend, or stop opening it."""
        self.leave.set()
        if not self.opened.done():
            fault = InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail="closed before the version was open")
            self.opened.set_result(fault)
            if self.task is not None:
                self.task.cancel()


class WeightedBackend:
    """Implements `Backend` for one deployed function. Owns a task per version in use, which holds its backend, and one
    that reads the weights. `control` is open and stays the caller's.

    Any number of tasks may call `invoke`; the first calls of a version wait until its backend is open, until their
    deadline or until this backend is closed. Invariants: a call is made by exactly one version, which had a weight (or
    was the one `wanted`) at the last reading; a version that has lost its weight ends its calls, and its backend is
    closed then. While the weights cannot be read, the last ones hold.
    """

    def __init__(
        self,
        control: Deployer,
        function: str,
        open_version: VersionOpener,
        *,
        draw: Callable[[], float],
        wanted: str = "live",
        refresh_s: float = REFRESH_S,
    ) -> None:
        """`draw` gives a number in [0, 1) per call; `wanted` is as for `find_version`."""
        self._control = control
        self._function = function
        self._open_version = open_version
        self._draw = draw
        self._wanted = wanted
        self._refresh_s = refresh_s
        self._versions: Sequence[DeployedFunction] = ()
        self._used: dict[str, _VersionInUse] = {}
        self._stack = contextlib.AsyncExitStack()
        self._group: asyncio.TaskGroup | None = None

    @property
    def provider(self) -> str:
        return self._control.provider

    @property
    def versions(self) -> Sequence[DeployedFunction]:
        """The versions at the last reading."""
        return self._versions

    async def deploy(self, package: Package) -> None:
        raise BackendFailed(f"{self._function} is called as it is deployed", remedy="deploy with a `Deployer`")

    async def invoke(
        self, function: str, event: Sequence[dict[str, Any]], *, deadline_s: float, cause: Cause = Cause.CALL
    ) -> Reply:
        """See `Backend`. The time to open the version counts."""
        if function != self._function:
            raise UnknownFunction(f"no function {function!r} is served", remedy=f"served: {self._function}")
        if self._group is None:
            raise BackendFailed("the backend is not open", remedy="use `async with`")
        chosen = find_version(function, self._versions, self._wanted, draw=self._draw())
        used = self._used.get(chosen.provider_version) or self._use(self._group, chosen)
        used.calls += 1
        now = asyncio.get_running_loop().time
        expires = now() + deadline_s
        try:
            async with asyncio.timeout_at(expires) as limit:
                backend = await asyncio.shield(used.opened)
            if isinstance(backend, InfraFault):
                return Reply(fault=backend)
            return await backend.invoke(function, event, deadline_s=expires - now(), cause=cause)
        except TimeoutError:
            if not limit.expired():
                raise
            detail = f"version {chosen.provider_version} of {function} was not open in {deadline_s:.3f} s"
            return Reply(fault=InfraFault(FaultKind.DEADLINE, retryable=False, detail=detail))
        finally:
            used.calls -= 1

    async def __aenter__(self) -> WeightedBackend:
        await self._read()
        self._group = await self._stack.enter_async_context(asyncio.TaskGroup())
        refresh = self._group.create_task(self._refresh(), name="weights")
        self._stack.callback(refresh.cancel)
        self._stack.callback(self._leave_all)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._group = None
        await self._stack.aclose()

    async def _read(self) -> None:
        versions = await self._control.versions(self._function)
        find_version(self._function, versions, self._wanted, draw=0.0)
        self._versions = versions

    async def _refresh(self) -> None:
        """Read the weights until cancelled, and close the backends of versions that nothing calls any more."""
        while True:
            await asyncio.sleep(self._refresh_s)
            with contextlib.suppress(ServerlessError):
                await self._read()
            weighted = {one.provider_version for one in self._versions if one.weight > 0.0}
            for number, used in list(self._used.items()):
                if self._wanted == "live" and number not in weighted and not used.calls:
                    del self._used[number]
                    used.close()

    def _use(self, group: asyncio.TaskGroup, version: DeployedFunction) -> _VersionInUse:
        used = self._used[version.provider_version] = _VersionInUse(asyncio.get_running_loop().create_future())
        used.task = group.create_task(self._hold(version, used), name=f"version {version.provider_version}")
        return used

    async def _hold(self, version: DeployedFunction, used: _VersionInUse) -> None:
        """Keep the backend of a version open until it is left. A failure to open it is that of the calls which wait for
        it: an error of this package is raised there, any other is their fault. The next call tries again."""
        number = version.provider_version
        is_open = False
        try:
            async with self._open_version(version) as backend:
                is_open = True
                if not used.opened.done():
                    used.opened.set_result(backend)
                await used.leave.wait()
        except Exception as error:
            if is_open:
                raise
            if used.opened.done():
                return
            self._used.pop(number, None)
            if isinstance(error, ServerlessError):
                used.opened.set_exception(error)
                used.opened.exception()  # marks it as seen, if every caller has left
            else:
                detail = f"version {number} of {self._function} cannot be opened: {type(error).__name__}: {error}"
                used.opened.set_result(InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail=detail[:500]))

    def _leave_all(self) -> None:
        for used in self._used.values():
            used.close()
