"""The seam of a function provider: deploy a package, call it with a list, get its answer and the bill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from serverless.deploy.package import Package
from serverless.types import InfraFault, Invocation

__all__ = ["Backend", "Reply"]


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of one call: a body (unchecked), or the fault of the call as a whole.

    `invocation` is the bill, None for a call that never reached a worker.
    """

    body: object = None
    fault: InfraFault | None = None
    invocation: Invocation | None = None


class Backend(Protocol):
    """Runs functions. Open it with `async with`; leaving stops everything that it started, in bounded time.

    A failed call is a value (`Reply.fault`); errors are `UnknownFunction`, `BackendFailed` and cancellation,
    which ends the call on the provider where the provider can.
    """

    @property
    def provider(self) -> str: ...

    async def deploy(self, package: Package) -> None:
        """Make a version current. The same version again changes nothing; calls in flight end on the old one."""

    async def invoke(self, function: str, event: Sequence[dict[str, Any]], *, deadline_s: float) -> Reply:
        """One call with at most `deadline_s` seconds from now, time in the queue included."""

    async def __aenter__(self) -> Backend: ...

    async def __aexit__(self, *exc: object) -> None: ...
