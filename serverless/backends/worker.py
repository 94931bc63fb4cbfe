"""The workers of a pool as ports: an execution environment, its launcher, and the back-off of failing starts.

Independent of processes: the local and the simulated backend start workers in their own way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from serverless.deploy.package import Package
from serverless.types import InfraFault

__all__ = ["WorkerReply", "StartFailures", "Launcher", "WorkerRequest", "Worker", "WorkerFault", "WorkerLost"]

_FIRST_S, _LONGEST_S = 1.0, 60.0
"""The first and the longest pause between starts without a waiting call: a function that crashes on loading costs at
most one start per minute and worker."""


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """One call to a worker. `remaining_s` is the time limit, counted from receipt."""

    id: str
    event: Sequence[dict[str, Any]]
    remaining_s: float


@dataclass(frozen=True, slots=True)
class WorkerReply:
    """A worker's answer. `run_s` is the handler's time as measured by the worker; `keep` is False if the worker ends
    after it."""

    body: object
    run_s: float
    fault: InfraFault | None = None
    keep: bool = True


class WorkerFault(Exception):
    """A worker died during its call, or did not start."""

    def __init__(self, fault: InfraFault) -> None:
        super().__init__(fault.detail)
        self.fault = fault


class WorkerLost(WorkerFault):
    """A worker's machine is lost or unreachable. The call need not have caused this, and any later answer is ignored.
    The call is repeated elsewhere."""


class Worker(Protocol):
    """One execution environment. Calls of `call` do not overlap."""

    @property
    def init_s(self) -> float:
        """Seconds of the function's own start-up, billed with the first call."""

    @property
    def alive(self) -> bool: ...

    async def call(self, request: WorkerRequest) -> WorkerReply: ...

    def kill(self) -> None:
        """End the worker at once, even during a call. Idempotent."""


class Launcher(Protocol):
    async def start(self, package: Package, worker: str, slot: int, gone: Callable[[], None]) -> Worker:
        """Start a worker and wait until it is ready. Raises `WorkerFault`. `gone` is called once if the worker ends by
        itself. Cleans up if cancelled."""


@dataclass(slots=True)
class StartFailures:
    """Failed starts, and ends of idle workers, since the last answered call. Failures within one pause count as one
    round. Loop seconds."""

    rounds: int = 0
    until: float = 0.0

    def another(self, now: float) -> None:
        if now >= self.until:
            self.until = now + min(_LONGEST_S, _FIRST_S * 2.0 ** min(self.rounds, 16))
            self.rounds += 1

    def pause_s(self, now: float) -> float:
        """Seconds until the next start should be tried, 0 for now."""
        return max(0.0, self.until - now)
