"""The seam of a function provider: deploy a package, call it with a list, get its answer and the bill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from serverless.deploy.package import Package
from serverless.types import Cause, InfraFault, Invocation

__all__ = [
    "AttachableBackend",
    "Backend",
    "DeploymentChange",
    "DeployedFunction",
    "Deployer",
    "WorkerLoad",
    "LogLine",
    "ProvisionedBackend",
    "Reply",
    "ScalableBackend",
]


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

    async def invoke(
        self, function: str, event: Sequence[dict[str, Any]], *, deadline_s: float, cause: Cause = Cause.CALL
    ) -> Reply:
        """One call with at most `deadline_s` seconds from now, time in the queue included. It is executed at most
        once: retries are the caller's. `cause` is for the bill."""

    async def __aenter__(self) -> Backend: ...

    async def __aexit__(self, *exc: object) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a function's workers do at a moment: `ready` of them are up (`busy` of these serve a call), `starting` will
    be, and `waiting` calls have none."""

    ready: int = 0
    starting: int = 0
    busy: int = 0
    waiting: int = 0

    @property
    def workers(self) -> int:
        """Those that exist."""
        return self.ready + self.starting

    @property
    def under_way(self) -> int:
        """Calls that run or wait."""
        return self.busy + self.waiting


@runtime_checkable
class AttachableBackend(Protocol):
    """A backend whose provider keeps what was deployed there."""

    async def attach(self, function: str) -> None:
        """Calls of a function go to the version that is current now. `UnknownFunction` if there is none."""


@runtime_checkable
class ScalableBackend(Protocol):
    """A backend whose workers start in no time of the caller's: how many there should be may change at any moment.

    Both are synchronous and cheap; `UnknownFunction` for one that is not deployed.
    """

    @property
    def provider(self) -> str: ...

    def load(self, function: str) -> WorkerLoad: ...

    def keep(self, function: str, workers: int, *, keep_alive_s: float | None = None) -> int:
        """From now on so many workers should exist, idle or not, within the function's `warm` and `concurrency`: what
        that makes is returned. Missing ones are started; idle ones above it end when they have been idle for
        `keep_alive_s` (None: as it is). Calls start workers as before."""


@runtime_checkable
class ProvisionedBackend(Protocol):
    """A backend that keeps environments ready for money, changed by a request that may take minutes."""

    @property
    def provider(self) -> str: ...

    @property
    def calls_included(self) -> bool:
        """Whether the seconds that a call runs on such an environment are billed once, and not again as a call's."""

    def load(self, function: str) -> WorkerLoad:
        """Calls under way from here; `ready` is not known and 0."""

    async def provisioned(self, function: str) -> int:
        """Environments that the provider now keeps ready."""

    async def provision(self, function: str, workers: int) -> None:
        """Ask for so many, 0 for none. Calls go on meanwhile. Raises what a `Deployer` does."""


@dataclass(frozen=True, slots=True)
class DeployedFunction:
    """A function as a provider has it. `version` is the package's content digest, `provider_version` the provider's
    own name of it; `current` whether calls go there."""

    function: str
    provider: str
    version: str
    provider_version: str
    current: bool
    created: str = ""
    """ISO 8601, UTC."""
    memory_mb: int = 0
    endpoint: str = ""
    """What a caller addresses: an ARN, a URL, an app and a function."""
    warm: int | None = 0
    """None: the provider did not say."""
    concurrency: int | None = 0
    unchanged: bool = field(default=False, compare=False)
    """Of a deployment: this version was current, as it is to be."""
    problem: str = field(default="", compare=False)
    """What failed after the version had become current."""


@dataclass(frozen=True, slots=True)
class DeploymentChange:
    """What a deployment would do. `lines` say it to a person; no line: nothing."""

    function: str
    provider: str
    lines: tuple[str, ...]

    @property
    def nothing(self) -> bool:
        return not self.lines


@dataclass(frozen=True, slots=True)
class LogLine:
    """`t` is ISO 8601, UTC, or '' where the provider does not tell."""

    t: str
    source: str
    text: str


class Deployer(Protocol):
    """The control plane of a provider: what `rollart rewards` does. Open it with `async with`.

    Errors are `CredentialsMissing`, `ExtraMissing`, `UnknownFunction`, `PackageError` and `BackendFailed`, each one
    line of cause and one of remedy. A deployment that fails leaves the version before it current.
    """

    @property
    def provider(self) -> str: ...

    async def plan(self, package: Package) -> DeploymentChange:
        """Changes nothing."""

    async def deploy(self, package: Package) -> DeployedFunction:
        """Upload, wait, try the new version with an empty list (its answer must be one), make it current, prune old
        versions. Does nothing where the current version already is this one."""

    async def functions(self) -> Sequence[DeployedFunction]:
        """The current version of each function that rollart deployed, by name."""

    async def versions(self, function: str) -> Sequence[DeployedFunction]:
        """Newest first."""

    async def rollback(self, function: str, version: str = "") -> DeployedFunction:
        """Make an earlier version current: the one before, or that whose digest starts so."""

    async def scale(
        self, function: str, *, warm: int | None = None, concurrency: int | None = None
    ) -> DeployedFunction: ...

    async def logs(self, function: str, *, since_s: float = 3600.0, limit: int = 1000) -> Sequence[LogLine]:
        """Oldest first."""

    async def delete(self, function: str) -> None:
        """With all its versions."""

    async def __aenter__(self) -> Deployer: ...

    async def __aexit__(self, *exc: object) -> None: ...
