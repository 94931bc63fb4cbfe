"""The port of a function provider: deploy a package, invoke it with a list of items, return its answer and the bill."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from serverless.deploy.package import Package
from serverless.errors import SpecInvalid, UnknownFunction
from serverless.output import LineReader
from serverless.types import Cause, FaultKind, InfraFault, Invocation


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

    async def attach(self, function: str, version: str = "") -> None:
        """Direct calls of a function to a version, by the provider's number of it, or to its current one. Raises
        `UnknownFunction` if there is none."""


@runtime_checkable
class SecretsBackend(Protocol):
    """A backend that accepts secrets from callers."""

    def given(self, function: str, secrets: Mapping[str, str]) -> str:
        """The name for calls of a function in workers with these values of its secrets. Raises `UnknownFunction`."""


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


LIVE = "live"
"""The alias that deployments, promotions and rollbacks move. It has one version, or two with weights."""

CANARY = "canary"
"""The alias of the version beside the current one that gets a share of the calls."""


@dataclass(frozen=True, slots=True)
class DeployedFunction:
    """A deployed function. `version` is the package's content digest, `provider_version` the provider's own name of it;
    `current` is True for the main version of the alias `live`."""

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
    weight: float = 0.0
    """Share of the calls of `live` that this version gets; those of all versions add up to 1."""
    aliases: tuple[str, ...] = ()
    """Names of this version besides its digest and its number."""
    unchanged: bool = field(default=False, compare=False)
    """Of a deployment: this version already was current, or already had this weight."""
    problem: str = field(default="", compare=False)
    """An error that occurred after the version had become current."""


@dataclass(frozen=True, slots=True)
class LiveVersions:
    """The versions that the alias `live` names, by the provider's numbers: the current one, and a canary with its
    weight, the share of calls that it gets ('' and 0 without one)."""

    current: str
    canary: str = ""
    weight: float = 0.0

    def of(self, number: str) -> float:
        """The share of calls of a version."""
        if self.canary and number == self.canary:
            return self.weight
        return 1.0 - self.weight if number == self.current else 0.0

    def aliases(self, number: str) -> tuple[str, ...]:
        return (LIVE,) * (number == self.current) + (CANARY,) * bool(self.canary and number == self.canary)


@dataclass(frozen=True, slots=True)
class DeploymentChange:
    """The planned changes of a deployment, as `lines` of text for the user; no line means no change."""

    function: str
    provider: str
    lines: tuple[str, ...]
    before: Package | None = field(default=None, compare=False)
    """The package of the current version, where that is another version and the provider can give it back."""
    problem: str = field(default="", compare=False)
    """The reason why the current version cannot be read back."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a function's log. `t` is ISO 8601, UTC, or '' if the provider does not report it.

    `run` and `items` (the ids of a run's items are those of its trajectories) are the call's, empty if unknown: see
    `serverless.output`.
    """

    t: str
    source: str
    text: str
    run: str = ""
    items: tuple[str, ...] = ()


def log_line(reader: LineReader, t: str, source: str, text: str) -> LogLine | None:
    """A line as printed, without its prefix; None for a line that only names the items of a call."""
    found = reader.read(text)
    if found is None:
        return None
    run, items, text = found
    return LogLine(t, source, text, run, items)


class Deployer(Protocol):
    """The control plane of a provider, used by `rollart rewards`. Use `async with`.

    Raises `CredentialsMissing`, `ExtraMissing`, `UnknownFunction`, `PackageError` and `BackendFailed`, each with one
    line of cause and one of remedy. After a failed deployment the previous version stays current, and a canary keeps
    its weight. A version with a weight is never pruned.
    """

    @property
    def provider(self) -> str: ...

    async def plan(self, package: Package, *, canary: float = 0.0) -> DeploymentChange:
        """The changes that a deployment would make. Has no side effects."""

    async def deploy(self, package: Package, *, canary: float = 0.0) -> DeployedFunction:
        """Upload the package, wait, try the new version with an empty list (its answer must be a list), make it the
        only current one and prune old versions. Does nothing if it already is that.

        With `canary`, a share between 0 and 1, the current version stays current with the rest of the calls. A function
        without a current version gets this one, whatever the share.
        """

    async def promote(self, function: str) -> DeployedFunction:
        """Make the canary the only current version. Raises `UnknownFunction` if there is none."""

    async def functions(self) -> Sequence[DeployedFunction]:
        """The versions with a weight of each function that rollart deployed, by name, the current one first."""

    async def versions(self, function: str) -> Sequence[DeployedFunction]:
        """Newest first."""

    async def package(self, function: str, version: str = "") -> Package:
        """A version (the current one, or the one with a number of the provider) as it was packed. Raises `PackageError`
        if the provider cannot give it back, or if it differs from the version's digest."""

    async def rollback(self, function: str, version: str = "") -> DeployedFunction:
        """End a canary; without one, make the previous version current. With `version`, a number or the start of a
        digest, make that one the only current version."""

    async def scale(
        self, function: str, *, warm: int | None = None, concurrency: int | None = None
    ) -> DeployedFunction: ...

    async def logs(self, function: str, *, since_s: float = 3600.0, limit: int = 1000) -> Sequence[LogLine]:
        """Oldest first."""

    def follow(self, function: str, *, since_s: float = 0.0) -> AsyncIterator[LogLine]:
        """The lines of the last `since_s` seconds, then new ones as they appear, until closed or cancelled."""

    async def delete(self, function: str) -> None:
        """Delete a function with all its versions."""

    async def __aenter__(self) -> Deployer: ...

    async def __aexit__(self, *exc: object) -> None: ...


def split_reference(reference: str) -> tuple[str, str]:
    """The function and the version of NAME, NAME@VERSION or NAME@ALIAS; without a version the alias `live`."""
    function, _, version = reference.partition("@")
    return function, version or LIVE


def find_version(function: str, versions: Sequence[DeployedFunction], wanted: str, *, draw: float) -> DeployedFunction:
    """The version that `wanted` names: the alias `live` by the weights, an alias, a number, or the start of a digest.

    `draw` in [0, 1) chooses the current version below its weight, and the canary from there on. Raises
    `UnknownFunction` unless exactly one version fits.
    """
    if wanted == LIVE:
        weighted = sorted((v for v in versions if v.weight > 0.0), key=lambda v: not v.current)
        for one in weighted[:-1]:
            if draw < one.weight:
                return one
            draw -= one.weight
        found = weighted[-1:]
    else:
        found = [v for v in versions if wanted in v.aliases or wanted == v.provider_version]
        found = found or [v for v in versions if len(wanted) >= _DIGEST_START and v.version.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    problem = "more than one version" if found else "no version"
    known = ", ".join(f"{v.version[:12]} ({', '.join((v.provider_version, *v.aliases))})" for v in versions)
    raise UnknownFunction(f"function {function} has {problem} {wanted!r}", remedy=f"it has {known or 'none'}")


_DIGEST_START = 4
"""Characters of a digest that can name a version: fewer would be a mistyped number."""


def previous_version(function: str, versions: Sequence[DeployedFunction], former: Collection[str]) -> DeployedFunction:
    """The version of a rollback without a name: the newest of the numbers `former`. `versions` are newest first."""
    for one in versions:
        if one.provider_version in former:
            return one
    raise UnknownFunction(f"function {function} has no version before the current one", remedy="deploy another one")


def check_canary(function: str, share: float) -> None:
    """Raise `SpecInvalid` unless a canary's share of calls leaves some to the current version."""
    if not 0.0 <= share < 1.0:
        raise SpecInvalid(
            f"a canary of {function} with {share:g} of its calls (rule: above 0 and below 1)",
            remedy="give a share such as 0.1, or none to make the version current",
        )


FUNCTION_FAULTS = (FaultKind.CRASH, FaultKind.TIMEOUT, FaultKind.OUT_OF_MEMORY, FaultKind.BAD_ANSWER)
"""Faults of a trial that the function itself has, not its provider."""


def no_canary(function: str) -> UnknownFunction:
    """The error of a promotion without a canary."""
    return UnknownFunction(f"{function} has no canary", remedy="deploy one: rollart rewards deploy FILE --canary 0.1")
