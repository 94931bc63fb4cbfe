"""What a pool needs of its workers: one execution environment, who starts it, and how long to leave failing starts be.

Knows nothing of processes: the local and the simulated backend start theirs in their own way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from serverless.deploy.package import Package
from serverless.types import InfraFault

__all__ = ["WorkerReply", "StartFailures", "Launcher", "WorkerRequest", "Worker", "WorkerFault", "WorkerLost"]

_FIRST_S, _LONGEST_S = 1.0, 60.0
"""Of the pauses between starts that nobody waits for: a function that crashes as it loads costs at most a start a
minute and worker."""


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """One call as a worker sees it. `remaining_s` is the time limit, counted from receipt."""

    id: str
    event: Sequence[dict[str, Any]]
    remaining_s: float


@dataclass(frozen=True, slots=True)
class WorkerReply:
    """`run_s` is the handler's time as the worker measured it; `keep` False if the worker ends after it."""

    body: object
    run_s: float
    fault: InfraFault | None = None
    keep: bool = True


class WorkerFault(Exception):
    """A worker died under its call, or did not start."""

    def __init__(self, fault: InfraFault) -> None:
        super().__init__(fault.detail)
        self.fault = fault


class WorkerLost(WorkerFault):
    """A worker's machine is gone, or cannot be reached: what it was called with need have no part in that, and no
    answer of it will be heard. The call is made again elsewhere."""


class Worker(Protocol):
    """One execution environment. `call` is never entered twice at once."""

    @property
    def init_s(self) -> float:
        """Time of the function's own start-up, which is billed with the first call."""

    @property
    def alive(self) -> bool: ...

    async def call(self, request: WorkerRequest) -> WorkerReply: ...

    def kill(self) -> None:
        """End it now, whatever it does. Idempotent."""


class Launcher(Protocol):
    async def start(self, package: Package, worker: str, slot: int, gone: Callable[[], None]) -> Worker:
        """A ready worker, or `WorkerFault`. `gone` is called once if it ends by itself. Cleans up if cancelled."""


@dataclass(slots=True)
class StartFailures:
    """Starts that failed, or workers that ended while nothing called them, since a call was last answered. Those within
    one pause are one round. Loop seconds."""

    rounds: int = 0
    until: float = 0.0

    def another(self, now: float) -> None:
        if now >= self.until:
            self.until = now + min(_LONGEST_S, _FIRST_S * 2.0 ** min(self.rounds, 16))
            self.rounds += 1

    def pause_s(self, now: float) -> float:
        """Seconds until another start is worth a try, 0 for now."""
        return max(0.0, self.until - now)
