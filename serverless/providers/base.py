"""The port of a function provider: deploy a package, invoke it with a list of items, return its answer and the bill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from serverless.deploy.package import Package
from serverless.errors import BackendFailed
from serverless.types import Cause, InfraFault, Invocation


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of one call: an unchecked body, or the fault of the whole call.

    `invocation` is the bill, None for a call that never reached a worker.
    """

    body: object = None
    fault: InfraFault | None = None
    invocation: Invocation | None = None


class Backend(Protocol):
    """Runs functions. Use `async with`; leaving it stops everything that it started, in bounded time.

    A failed call is a value (`Reply.fault`). Raises `UnknownFunction` and `BackendFailed`. A cancellation ends the call
    on the provider where the provider supports it.
    """

    @property
    def provider(self) -> str: ...

    async def deploy(self, package: Package) -> None:
        """Make a version current. A repeated deployment of the same version has no effect; calls in flight end on the
        old one."""

    async def invoke(
        self, function: str, event: Sequence[dict[str, Any]], *, deadline_s: float, cause: Cause = Cause.CALL
    ) -> Reply:
        """One call, limited to `deadline_s` seconds from now including its time in the queue. It is executed at most
        once: retries are the caller's. `cause` is for the bill."""

    async def __aenter__(self) -> Backend: ...

    async def __aexit__(self, *exc: object) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The workers of a function at a moment: `ready` are up (`busy` of these serve a call), `starting` are starting,
    and `waiting` calls have no worker."""

    ready: int = 0
    starting: int = 0
    busy: int = 0
    waiting: int = 0

    @property
    def workers(self) -> int:
        """Ready and starting workers."""
        return self.ready + self.starting

    @property
    def under_way(self) -> int:
        """Calls that run or wait."""
        return self.busy + self.waiting


@runtime_checkable
class AttachableBackend(Protocol):
    """A backend whose provider keeps deployed functions."""

    async def attach(self, function: str) -> None:
        """Direct calls of a function to its current version. Raises `UnknownFunction` if there is none."""


@runtime_checkable
class ScalableBackend(Protocol):
    """A backend that can start and stop workers at any moment without delay for the caller.

    Both methods are synchronous and cheap, and raise `UnknownFunction` for a function that is not deployed.
    """

    @property
    def provider(self) -> str: ...

    def load(self, function: str) -> WorkerLoad: ...

    def keep(self, function: str, workers: int, *, keep_alive_s: float | None = None) -> int:
        """Set the number of workers, idle or not, that should exist; it is clamped to the function's
        `warm`..`concurrency` and returned. Missing workers are started; idle ones above it end after `keep_alive_s` of
        idle time (None: unchanged). Calls still start workers on demand."""


@runtime_checkable
class ProvisionedBackend(Protocol):
    """A backend with paid provisioned environments, whose number is changed by a request that may take minutes."""

    @property
    def provider(self) -> str: ...

    @property
    def calls_included(self) -> bool:
        """True if the seconds of a call on a provisioned environment are billed once, and not again with the call."""

    def load(self, function: str) -> WorkerLoad:
        """Calls in flight from this process; `ready` is unknown and 0."""

    async def provisioned(self, function: str) -> int:
        """The number of environments that the provider currently keeps ready."""

    async def provision(self, function: str, workers: int) -> None:
        """Request a number of provisioned environments, 0 for none. Calls continue meanwhile. Raises as a `Deployer`
        does."""


@dataclass(frozen=True, slots=True)
class DeployedFunction:
    """A deployed function. `version` is the package's content digest, `provider_version` the provider's own name of it;
    `current` is True if calls go to it."""

    function: str
    provider: str
    version: str
    provider_version: str
    current: bool
    created: str = ""
    """ISO 8601, UTC."""
    memory_mb: int = 0
    endpoint: str = ""
    """The callable address: an ARN, a URL, or an app and a function."""
    warm: int | None = 0
    """None: not reported by the provider."""
    concurrency: int | None = 0
    unchanged: bool = field(default=False, compare=False)
    """Of a deployment: this version already was current."""
    problem: str = field(default="", compare=False)
    """An error that occurred after the version had become current."""


@dataclass(frozen=True, slots=True)
class DeploymentChange:
    """The planned changes of a deployment, as `lines` of text for the user; no line means no change."""

    function: str
    provider: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a function's log. `t` is ISO 8601, UTC, or '' if the provider does not report it."""

    t: str
    source: str
    text: str


class Deployer(Protocol):
    """The control plane of a provider, used by `rollart rewards`. Use `async with`.

    Raises `CredentialsMissing`, `ExtraMissing`, `UnknownFunction`, `PackageError` and `BackendFailed`, each with one
    line of cause and one of remedy. After a failed deployment the previous version stays current.
    """

    @property
    def provider(self) -> str: ...

    async def plan(self, package: Package) -> DeploymentChange:
        """The changes that a deployment would make. Has no side effects."""

    async def deploy(self, package: Package) -> DeployedFunction:
        """Upload the package, wait, try the new version with an empty list (its answer must be a list), make it current
        and prune old versions. Does nothing if this version already is current."""

    async def functions(self) -> Sequence[DeployedFunction]:
        """The current version of each function that rollart deployed, by name."""

    async def versions(self, function: str) -> Sequence[DeployedFunction]:
        """Newest first."""

    async def rollback(self, function: str, version: str = "") -> DeployedFunction:
        """Make an earlier version current: the previous one, or the one with the given digest prefix."""

    async def scale(
        self, function: str, *, warm: int | None = None, concurrency: int | None = None
    ) -> DeployedFunction: ...

    async def logs(self, function: str, *, since_s: float = 3600.0, limit: int = 1000) -> Sequence[LogLine]:
        """Oldest first."""

    async def delete(self, function: str) -> None:
        """Delete a function with all its versions."""

    async def __aenter__(self) -> Deployer: ...

    async def __aexit__(self, *exc: object) -> None: ...


def rollback_number(function: str, digests: Mapping[int, str], former: Sequence[int], wanted: str, *, noun: str) -> int:
    """The number of the version for a rollback: the newest with the digest prefix `wanted`, else the newest of
    `former`."""
    known = ", ".join(f"{digests[n][:12]} ({noun} {n})" for n in sorted(digests, reverse=True))
    if wanted:
        found = {digest: n for n, digest in sorted(digests.items()) if digest.startswith(wanted)}
        if len(found) != 1:
            what = "no" if not found else "more than one"
            raise BackendFailed(f"{function} has {what} version {wanted!r}", remedy=f"it has {known}")
        return next(iter(found.values()))
    if not former:
        raise BackendFailed(f"{function} has no version before the current one", remedy=f"it has {known}")
    return max(former)
