"""A provider on virtual time with limits and failures set by a test: a function determines the result of each call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from serverless.deploy.package import Package
from serverless.providers.base import Reply
from serverless.types import Cause, FaultKind, InfraFault, Invocation, Throttle

Body = Callable[["Modelled", list[dict[str, Any]], Cause], Awaitable[InfraFault | None]]


class Modelled:
    """Runs `body` per call: it sleeps, and returns the call's fault or None. Every item scores its metadata's `value`.

    `capacity` calls run at once; one more is refused after 5 ms with `reason` and `retry_after_s`. A fault of one
    that never `answers` is a connection lost after the call was sent: its bill has no name.
    """

    def __init__(
        self,
        body: Body,
        *,
        provider: str = "modelled",
        capacity: int = 10_000,
        reason: Throttle | None = Throttle.CONCURRENCY,
        retry_after_s: float | None = None,
        answers: bool = True,
    ) -> None:
        self.body = body
        self.provider = provider
        self.capacity = capacity
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.answers = answers
        self.running = 0
        self.peak = 0
        self.calls: list[Invocation] = []
        self.events: list[list[dict[str, Any]]] = []
        self.refused = 0
        self.cancelled = 0
        self.deployed: list[str] = []

    async def deploy(self, package: Package) -> None:
        self.deployed.append(package.spec.name)

    async def invoke(
        self, function: str, event: Sequence[dict[str, Any]], *, deadline_s: float, cause: Cause = Cause.CALL
    ) -> Reply:
        loop = asyncio.get_running_loop()
        began = loop.time()
        if self.running >= self.capacity:
            self.refused += 1
            await asyncio.sleep(0.005)
            return Reply(fault=InfraFault(FaultKind.THROTTLED, True, "refused", self.reason, self.retry_after_s))
        self.events.append(list(event))
        self.running += 1
        self.peak = max(self.peak, self.running)
        status = "cancelled"
        try:
            async with asyncio.timeout(deadline_s):
                fault = await self.body(self, list(event), cause)
            status = "ok" if fault is None else str(fault.kind)
        except TimeoutError:
            fault = InfraFault(FaultKind.DEADLINE, retryable=False, detail="too late")
            status = "deadline"
        finally:
            self.running -= 1
            self.cancelled += status == "cancelled"
            took = loop.time() - began
            ended, name = began + took, f"m-{len(self.calls)}" if self.answers else ""
            bill = Invocation(
                function, self.provider, "w", began, ended, 0.0, took, 512, len(event), status, cause, name
            )
            self.calls.append(bill)
        answers = [
            {"id": e["id"], "aggregate_reward_score": float(e["metadata"].get("value", 1.0)), "metrics_list": []}
            for e in event
        ]
        return Reply(answers, None, bill) if fault is None else Reply(fault=fault, invocation=bill)

    def caused(self, cause: Cause) -> int:
        return sum(call.cause is cause for call in self.calls)

    async def __aenter__(self) -> Modelled:
        return self

    async def __aexit__(self, *exc: object) -> None: ...


def takes(seconds: float) -> Body:
    async def body(provider: Modelled, event: list[dict[str, Any]], cause: Cause) -> None:
        await asyncio.sleep(seconds)

    return body


def fails(kind: FaultKind, *, retryable: bool = True) -> Body:
    async def body(provider: Modelled, event: list[dict[str, Any]], cause: Cause) -> InfraFault:
        await asyncio.sleep(0.01)
        return InfraFault(kind, retryable=retryable, detail=f"{provider.provider} is broken")

    return body
