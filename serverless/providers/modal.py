"""Calls functions on Modal: `Backend` over the public Modal client.

A function's version is pinned when it is deployed, or looked up once if it was not deployed from here: later
deployments by others change nothing in a run. An answer of another version is a fault. See `modal_client` for the
protection against pickles.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from serverless.deploy.modal_app import ModalDeployer
from serverless.deploy.package import Package
from serverless.errors import UnknownFunction
from serverless.meter import MeterSink, NullMeter
from serverless.providers import modal_client
from serverless.providers.base import Reply, WorkerLoad
from serverless.providers.modal_client import (
    PROVIDER,
    ModalReply,
    ModalSettings,
    PinnedFunction,
    call_pinned,
    pin,
)
from serverless.secrets import Secrets
from serverless.types import Cause, FaultKind, InfraFault

_UNREACHED = frozenset({FaultKind.THROTTLED, FaultKind.ENVIRONMENT, FaultKind.UNAVAILABLE})
"""Faults after which no container is known to have run the call."""


class ModalBackend:
    """Implements `Backend` and `ProvisionedBackend` for functions that it or a `ModalDeployer` deployed.

    Owns a client connection. `invoke` may be called by any number of tasks; each waits for its own call, and the first
    call of a function also for its look-up. Modal bounds the containers (`concurrency`) and the calls that wait for
    them.

    A call is executed at most once as far as a caller can know: no retry is requested from Modal, but Modal itself may
    rerun an input that it lost with a preempted container. A call that is cancelled or past its deadline runs to its
    end or its time limit, ignored and billed; a call of a function with a time limit above 60 s is cancelled.

    `Invocation.billed_s` is the container's own measurement of the run, plus its start if the call caused one; for a
    call that no container answered, the elapsed time. Idle time of containers is billed by Modal and not visible here.
    """

    provider = PROVIDER
    calls_included = True
    """A container is billed by its seconds, busy or idle."""

    def __init__(
        self,
        settings: ModalSettings | None = None,
        *,
        meter: MeterSink | None = None,
        current: bool = True,
        run: str = "",
        secrets: Secrets | None = None,
    ) -> None:
        """`current`: a deployment from here becomes current, unless there is a canary. `run`: the id of the run that
        calls, for the logs."""
        self._run = run
        self._current = None if current else False
        self._meter = meter or NullMeter()
        self._deployer = ModalDeployer(settings, meter=meter, secrets=secrets)
        self._pinned: dict[str, PinnedFunction] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._ids = itertools.count(1)
        self._running: dict[str, int] = {}

    async def deploy(self, package: Package) -> None:
        """Deploy the package; only a look-up if the live version already is this one. Raises as a `Deployer` does."""
        name = package.spec.name
        if package.deployment[0] == PROVIDER:
            await self._pin(name, int(package.deployment[1]), package.version)  # Modal keeps it, the tags may not
            return
        deployed = await self._deployer.deploy(package, current=self._current)
        number, known = int(deployed.provider_version), self._pinned.get(name)
        if known is None or known.number != number:
            await self._pin(name, number, package.version)

    async def attach(self, function: str, version: str = "") -> None:
        """See `AttachableBackend`."""
        if not version:
            await self._target(function)
            return
        namespace = self._deployer.namespace
        with modal_client.translate_errors():
            _, tags = await namespace.get(function)
            number = int(version) if version.isdigit() else 0
            if number not in tags.versions:
                known = ", ".join(map(str, tags.versions))
                raise UnknownFunction(f"{function} has no deployment {version} on Modal", remedy=f"it has {known}")
        await self._pin(function, number, tags.versions[number])

    async def invoke(
        self, function: str, event: Sequence[dict[str, Any]], *, deadline_s: float, cause: Cause = Cause.CALL
    ) -> Reply:
        """See `Backend`. Also raises `CredentialsMissing` if Modal revokes a token."""
        now = asyncio.get_running_loop().time
        t0 = now()
        number = next(self._ids)
        target: PinnedFunction | None = None
        answer: ModalReply | None = None
        self._running[function] = self._running.get(function, 0) + 1
        try:
            try:
                async with asyncio.timeout(deadline_s):
                    target = await self._target(function)
                    answer = await call_pinned(target, event, f"{number:012d}", run=self._run)
            except TimeoutError:
                detail = f"no answer of {function} in {deadline_s:.3f} s"
                answer = ModalReply(fault=InfraFault(FaultKind.DEADLINE, retryable=False, detail=detail))
        finally:
            self._running[function] -= 1
            reached = answer is None or answer.fault is None or answer.fault.kind not in _UNREACHED
            bill = None
            if target is not None and reached:
                limit_s = target.timeout_s
                bill = modal_client.bill(target, answer, t0, now(), limit_s=limit_s, items=len(event), cause=cause)
                self._meter.invocation(bill)
        assert answer is not None
        return Reply(answer.body, answer.fault, bill)

    def load(self, function: str) -> WorkerLoad:
        return WorkerLoad(busy=self._running.get(function, 0))

    async def provisioned(self, function: str) -> int:
        """The `min_containers` of the pinned version."""
        target = await self._target(function)
        with modal_client.translate_errors():
            return int((await target.handle.autoscaler.settings.aio()).min_containers or 0)

    async def provision(self, function: str, workers: int) -> None:
        """Set `min_containers`. Any later deployment resets it."""
        target = await self._target(function)
        with modal_client.translate_errors():
            await target.handle.autoscaler.update.aio(min_containers=workers)

    async def __aenter__(self) -> ModalBackend:
        await self._deployer.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._pinned.clear()
        await self._deployer.__aexit__()

    async def _pin(self, function: str, number: int, version: str) -> None:
        with modal_client.translate_errors():
            self._pinned[function] = await pin(self._deployer.namespace, function, number, version)

    async def _target(self, function: str) -> PinnedFunction:
        if (known := self._pinned.get(function)) is not None:
            return known
        async with self._locks.setdefault(function, asyncio.Lock()):
            if function not in self._pinned:
                namespace = self._deployer.namespace
                with modal_client.translate_errors():
                    _, tags = await namespace.get(function)
                    self._pinned[function] = await pin(namespace, function, tags.live, tags.versions[tags.live])
            return self._pinned[function]
