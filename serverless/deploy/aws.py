"""Deploys functions to AWS Lambda: `Deployer` over boto3.

A function is `<prefix><name>`. Each package is a published version whose description holds the package's digest, and
the alias `live` names the current one, and a canary with the share of calls that Lambda routes to it. Versions are
immutable, so a rollback or a promotion only moves the alias.

A run calls its own alias, `run-<id>`, which names the version of its package regardless of the current version. The
alias's description holds a lease that the run renews. An alias with an expired lease is removed by the next deployment
or run of the function. A version that an alias names is never pruned.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import hashlib
import math
import re
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

from serverless.deploy.aws_control import (
    DeploymentOvertaken,
    LambdaAlias,
    LambdaControl,
    LambdaVersion,
    SmokeFailed,
)
from serverless.deploy.aws_function import ALIAS, AwsFunction, AwsSettings, aws_function
from serverless.deploy.aws_session import library
from serverless.deploy.changes import spec_lines, weight_lines
from serverless.deploy.images import find_engine
from serverless.deploy.package import Package, restore_archive
from serverless.errors import (
    BackendFailed,
    CredentialsMissing,
    FunctionFailed,
    IndexUnreachable,
    PackageError,
    ServerlessError,
    SpecInvalid,
    UnknownFunction,
)
from serverless.meter import MeterSink, NullMeter, billed_seconds
from serverless.output import LineReader
from serverless.providers.base import (
    DeployedFunction,
    DeploymentChange,
    LiveVersions,
    LogLine,
    check_canary,
    find_version,
    log_line,
    no_canary,
    previous_version,
)
from serverless.providers.faults import LambdaReport
from serverless.retries import AWS_DEPLOYMENT, AWS_PERMISSION
from serverless.secrets import Secrets
from serverless.types import Cause, Invocation

P = ParamSpec("P")
T = TypeVar("T")

PROVIDER = "aws_lambda"

LEASE_S = 3600.0
"""Lifetime of a run's alias after its last renewal. The provisioned environments of a killed run cost money until then.
"""

_RUN = "run-"
_LEASE = re.compile(r"^rollart: lease until (\S+)$")
_ALIAS_NAME = 128

_FOLLOW_S, _LATE_S = 1.0, 30.0
"""Seconds between two requests for new log events (an account has 5 to 10 a second), and the longest delay of an event.
"""

_OF_SPEC = ("MemorySize", "Timeout")
"""Lambda's configuration that follows from the settings of a function."""

_SHOWN = {"Runtime": "runtime", "Handler": "handler", "MemorySize": "memory (MB)", "Timeout": "time limit (s)"}


@dataclass(frozen=True, slots=True)
class PinnedVersion:
    """A pinned version. `alias` names it. Calls go to `qualifier`: that alias, or another alias of the same version if
    that one has the provisioned environments, which Lambda grants to one alias per version. Only version `number` may
    answer, or `canary` where the alias has one."""

    function: str
    alias: str
    qualifier: str
    number: str
    timeout_s: float
    memory_mb: int
    canary: str = ""


def _step(
    step: Callable[Concatenate[AwsDeployer, P], T],
) -> Callable[Concatenate[AwsDeployer, P], Coroutine[Any, Any, T]]:
    """A method whose body runs in a thread, see `AwsDeployer.run_step`."""

    @functools.wraps(step)
    async def run(deployer: AwsDeployer, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await deployer.run_step(functools.partial(step, deployer, *args, **kwargs))

    return run


class AwsDeployer:
    """Implements `Deployer`. Owns the boto3 clients. Its methods may be called by any number of tasks and run one at a
    time, each in a thread. A cancelled call waits for its current step and ends.

    `warm` of a package becomes provisioned concurrency; `concurrency` is reserved only if the settings ask for it.
    Values set by `scale` persist across deployments of a package that does not set them.
    """

    provider = PROVIDER

    def __init__(
        self, settings: AwsSettings | None = None, *, meter: MeterSink | None = None, secrets: Secrets | None = None
    ) -> None:
        self.settings = settings or AwsSettings()
        self._secrets = secrets or Secrets()
        self._meter = meter or NullMeter()
        self._control = LambdaControl(self.settings)
        self._open = False
        self._turn = asyncio.Lock()
        self._trials: list[tuple[str, LambdaReport]] = []
        """The function and the bill of each trial of the current step."""

    @_step
    def plan(self, package: Package, *, canary: float = 0.0) -> DeploymentChange:
        """The changes that a deployment would make, without building the archive."""
        wanted, settings = self._wanted(package), self.settings
        name, spec, configuration = wanted.name, wanted.package.spec, wanted.configuration
        check_canary(spec.name, canary)
        lines: list[str] = []
        before, problem = None, ""
        exists, live = self._control.ours(name), self._control.live(name)
        if live is None:
            made = "publish the first version of" if exists else "create"
            lines.append(
                f"{made} the Lambda function {name}: {settings.runtime} on {settings.architecture}, "
                f"{configuration['MemorySize']} MB, {configuration['Timeout']} s, digest {wanted.package.version[:12]}"
            )
            lines += self._code_lines(wanted)
            lines.append(f"keep its logs for {settings.log_retention_days} days")
            lines += [f"variable {name}: none -> set" for name in _variables(configuration)]
        else:
            lines += weight_lines(self._weighted(name), wanted.package.version, canary)
            if live.digest != wanted.package.version:
                try:
                    before = self._package(spec.name, live)
                    lines += spec_lines(before.spec, spec)
                except PackageError as error:
                    problem = error.message
            if not live.runs(wanted):
                lines += self._code_lines(wanted)
            shown = (key for key in _SHOWN if key in configuration and (before is None or key not in _OF_SPEC))
            changed = (key for key in shown if live.settings[key] != configuration[key])
            lines += [f"{_SHOWN[key]}: {live.settings[key]} -> {configuration[key]}" for key in changed]
            lines += _changed_variables(live.settings, configuration)
            if live.architecture != settings.architecture:
                lines.append(f"architecture: {live.architecture} -> {settings.architecture}")
            if settings.role_arn not in ("", live.role):
                lines.append(f"role: {live.role} -> {settings.role_arn}")
        if lines:
            lines += [
                f"secret {one}: in Lambda's encrypted environment; a new value takes another deployment, and versions "
                "before it keep theirs"
                for one in wanted.stored
            ]
        warm = self._control.warm(name) if exists and spec.warm else 0
        if spec.warm != warm and spec.warm:
            lines.append(f"warm environments (provisioned concurrency, billed while idle): {warm} -> {spec.warm}")
        reserved = self._control.reserved(name) if exists and wanted.reserved else None
        if wanted.reserved and reserved != wanted.reserved:
            lines.append(f"reserved concurrency: {'none' if reserved is None else reserved} -> {wanted.reserved}")
        return DeploymentChange(spec.name, self.provider, tuple(lines), before, problem)

    @_step
    def deploy(self, package: Package, *, canary: float = 0.0) -> DeployedFunction:
        """See `Deployer`. The trial of a new version is billed to the meter as a SMOKE call."""
        wanted = self._wanted(package)
        name, spec = wanted.name, wanted.package.spec
        check_canary(spec.name, canary)
        exists, live = self._control.ours(name), self._control.live(name)
        if exists:
            self._remove_expired(name)
        if canary and live is not None:
            return self._deploy_canary(wanted, live, canary)
        released = self._control.released(name) if live is not None else None
        unchanged = live is not None and live.runs(wanted) and not (released and released.canary)
        if live is None or not unchanged:
            if live is None or not live.runs(wanted):
                live = self._published(wanted, exists=exists)
            self._control.point(name, live)
            self._prune(name)
        try:
            if wanted.reserved and self._control.reserved(name) != wanted.reserved:
                self._control.reserve(name, wanted.reserved)
                unchanged = False
            if spec.warm and self._control.warm(name) != spec.warm:
                self._control.set_warm(name, spec.warm)
                unchanged = False
        except ServerlessError as error:
            raise BackendFailed(
                f"{spec.name}: version {live.number} is current, but not scaled as it says: {error.message}",
                remedy=error.remedy or "deploy it again",
            ) from None
        return replace(self._deployed(name, live), unchanged=unchanged)

    def _deploy_canary(self, wanted: AwsFunction, live: LambdaVersion, weight: float) -> DeployedFunction:
        """Publish a version, and give it a share of the calls of `live`."""
        name, function = wanted.name, wanted.package.spec.name
        if live.runs(wanted):
            return replace(self._deployed(name, live), unchanged=True)
        if self._control.warm(name):
            raise SpecInvalid(
                f"{function}: Lambda has no canary on an alias with warm environments (provisioned concurrency)",
                remedy=f"release them: rollart rewards scale {function} --warm 0",
            )
        if not self._control.keeps_role(live, wanted):
            raise SpecInvalid(
                f"{function}: Lambda gives both versions one role, and the current one has {live.role}",
                remedy="deploy without --canary to change the role",
            )
        seen = self._control.released(name)
        if seen is None:
            raise DeploymentOvertaken(name)
        version = next((v for v in self._control.versions(name) if v.number == seen.canary and v.runs(wanted)), None)
        if version is not None and math.isclose(seen.weight, weight):
            return replace(self._deployed(name, version), unchanged=True)
        number = (version := version or self._published(wanted, exists=True)).number
        AWS_DEPLOYMENT.run_blocking(
            lambda: self._control.split(name, self._control.released(name) or seen, number, weight),
            DeploymentOvertaken,
            pause=self._control.pause,
        )
        self._prune(name)
        return self._deployed(name, version)

    @_step
    def pin(self, package: Package, run: str, *, existing: bool = False) -> PinnedVersion:
        """Set the alias of a run to the package's version, with a lease of `LEASE_S`. The version is published and
        tried if it is missing; it becomes current only if no version is. A version that was drawn from AWS is taken as
        it is, whatever the settings are now. The alias holds the package's `warm` environments. Raises
        `UnknownFunction` if a drawn version is gone and, with `existing`, if the function does not exist."""
        function, alias = package.spec.name, _run_alias(run)
        wanted = None if package.deployment[0] == PROVIDER else self._wanted(package)
        name = self.settings.function_name(function)
        exists = self._control.ours(name)
        if existing and not exists:
            raise UnknownFunction(f"{function} is gone from AWS", remedy="deploy it again")
        if exists:
            self._remove_expired(name)
        named = {number for one in self._control.aliases(name) for number in (one.number, one.canary)}
        version = self._published(wanted, exists=exists, tried=named) if wanted else self._drawn(package)
        until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=LEASE_S)
        lease = f"rollart: lease until {until.isoformat(timespec='seconds')}"
        self._control.point_alias(name, alias, version.number, lease)
        if self._control.live(name) is None:
            self._control.point(name, version)
        if version.number not in named:
            self._prune(name)
        qualifier, warm = alias, package.spec.warm
        if warm or not existing:
            same = [one.name for one in self._control.aliases(name) if one.number == version.number]
            holders = [one for one in same if self._control.warm(name, one)]
            if holders and alias not in holders:
                qualifier = holders[0] if warm else alias
            elif not existing:
                self._control.set_warm(name, warm, alias)
            elif not holders:  # calls wait for the alias, and work without provisioned environments
                with contextlib.suppress(ServerlessError):
                    self._control.set_warm(name, warm, alias, wait=False)
        return _pinned(function, alias, qualifier, version)

    @_step
    def current(self, function: str, version: str = "") -> PinnedVersion:
        """The version with this number, or the alias `live`, whose weights Lambda follows."""
        if version:
            return _pinned(function, version, version, self._numbered(function, version))
        released = self._control.released(self.settings.function_name(function))
        canary = released.canary if released is not None else ""
        return replace(_pinned(function, ALIAS, ALIAS, self._live(function)), canary=canary)

    @_step
    def unpin(self, pin: PinnedVersion) -> None:
        """Remove the alias of a run and its provisioned environments."""
        self._control.remove_alias(self.settings.function_name(pin.function), pin.alias)

    @_step
    def warm(self, pin: PinnedVersion) -> int:
        """Provisioned concurrency of the alias that calls go to."""
        return self._control.warm(self.settings.function_name(pin.function), pin.qualifier)

    @_step
    def set_warm(self, pin: PinnedVersion, count: int) -> None:
        self._control.set_warm(self.settings.function_name(pin.function), count, pin.qualifier)

    @_step
    def functions(self) -> Sequence[DeployedFunction]:
        return [one for name in self._control.names() for one in self._weighted(name) if one.version]

    @_step
    def versions(self, function: str) -> Sequence[DeployedFunction]:
        return self._all(function)

    @_step
    def package(self, function: str, version: str = "") -> Package:
        chosen = self._numbered(function, version) if version else self._live(function)
        return self._package(function, chosen)

    @_step
    def promote(self, function: str) -> DeployedFunction:
        name = self.settings.function_name(function)
        self._live(function)
        seen = self._control.released(name)
        if seen is None or not seen.canary:
            raise no_canary(function)
        return self._point(function, self._numbered(function, seen.canary), seen)

    @_step
    def rollback(self, function: str, version: str = "") -> DeployedFunction:
        """See `Deployer`. The previous version is the newest former current one that is older than the current one."""
        name = self.settings.function_name(function)
        kept, seen = self._all(function), self._control.released(name)
        if version:
            number = find_version(function, kept, version, draw=0.0).provider_version
        elif seen is not None and seen.canary:
            number = seen.number
        else:
            newest = int(seen.number) if seen is not None else math.inf
            former = {number for number in self._control.deployed(name) if int(number) < newest}
            number = previous_version(function, kept, former).provider_version
        return self._point(function, self._numbered(function, number), seen)

    @_step
    def scale(self, function: str, *, warm: int | None = None, concurrency: int | None = None) -> DeployedFunction:
        """`warm` sets the provisioned concurrency, `concurrency` the reserved one; 0 removes either."""
        for value in (warm, concurrency):
            if value is not None and value < 0:
                raise SpecInvalid(f"{function}: {value} environments: not less than 0")
        name, live = self.settings.function_name(function), self._live(function)
        released = self._control.released(name)
        if warm and released is not None and released.canary:
            raise SpecInvalid(
                f"{function}: Lambda has no warm environments (provisioned concurrency) on an alias with a canary",
                remedy=f"end it first: rollart rewards promote {function}, or rollback {function}",
            )
        if concurrency is not None:
            self._control.reserve(name, concurrency)
        if warm is not None:
            self._control.set_warm(name, warm)
        return self._deployed(name, live)

    @_step
    def logs(self, function: str, *, since_s: float = 3600.0, limit: int = 1000) -> Sequence[LogLine]:
        since_ms = (datetime.datetime.now(datetime.UTC).timestamp() - since_s) * 1000.0
        self._live(function)
        events = self._control.log_events(self.settings.function_name(function), max(0, round(since_ms)))
        return _lines(LineReader(), events)[-limit:] if limit > 0 else []

    async def follow(self, function: str, *, since_s: float = 0.0) -> AsyncIterator[LogLine]:
        """See `Deployer`. Asks once a second; events that CloudWatch ingests up to `_LATE_S` late are found, and each
        is returned once."""
        since_ms = round((datetime.datetime.now(datetime.UTC).timestamp() - since_s) * 1000.0)
        reader, seen, from_ms = LineReader(), dict[str, int](), max(0, since_ms)
        await self.run_step(lambda: self._live(function))
        name = self.settings.function_name(function)
        while True:
            events = await self.run_step(functools.partial(self._control.log_events, name, from_ms))
            fresh = [event for event in events if event["eventId"] not in seen]
            seen |= {event["eventId"]: int(event["timestamp"]) for event in fresh}
            for line in _lines(reader, fresh):
                yield line
            from_ms = max(from_ms, max(seen.values(), default=0) - round(_LATE_S * 1000.0))
            seen = {event: t for event, t in seen.items() if t >= from_ms}
            await asyncio.sleep(_FOLLOW_S)

    @_step
    def delete(self, function: str) -> None:
        """Delete the function with its versions. Its logs stay until their retention ends."""
        name = self.settings.function_name(function)
        if not self._control.ours(name):
            raise UnknownFunction(f"{function} is not deployed on AWS")
        self._control.remove(name)

    async def __aenter__(self) -> AwsDeployer:
        await asyncio.to_thread(library, "boto3")
        self._open = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._control.stopped.set()
        async with self._turn:
            self._open = False
            await asyncio.to_thread(self._control.close)
            self._control.stopped.clear()

    async def run_step(self, step: Callable[[], T]) -> T:
        """Run a step in a thread, and bill its trials."""
        if not self._open:
            raise BackendFailed("the AWS deployer is not open", remedy="use `async with`")
        loop = asyncio.get_running_loop()
        async with self._turn:
            t0 = loop.time()
            thread = loop.run_in_executor(None, step)
            try:
                return await asyncio.shield(thread)
            except asyncio.CancelledError:
                self._control.stopped.set()
                await asyncio.gather(thread, return_exceptions=True)
                self._control.stopped.clear()
                raise
            finally:
                for function, trial in self._trials:
                    memory_mb, cause = trial.memory_mb, Cause.SMOKE
                    bill = lambda_bill(
                        function, trial, t0, loop.time(), memory_mb=memory_mb, items=0, status="ok", cause=cause
                    )
                    self._meter.invocation(bill)
                self._trials.clear()

    def _code_lines(self, wanted: AwsFunction) -> list[str]:
        """The code that would be built, and its size. Raises the errors of a deployment that are known beforehand; the
        package index and a container engine are not asked for more than notes."""
        self._control.check_package_type(wanted)
        if wanted.image is None and not wanted.package.spec.requirements:
            return []
        if wanted.image is not None and self._control.image_digest(wanted):
            return [f"use the image {self.settings.repository}:{wanted.image.tag}, which is there"]
        try:
            first, *others = wanted.build_lines()
        except IndexUnreachable as error:
            first, others = ("build an image" if wanted.image else "build an archive"), [f"size not known: {error}"]
        if wanted.image is None:
            return [first, *others]
        engine, reason = find_engine()
        if engine is not None:
            return [f"{first} with {engine.name}, and push it", *others]
        written = "`rollart rewards deploy FILE --render DIR` writes its build context for another machine"
        return [f"{first} and push it: no container engine answers here ({reason}); {written}", *others]

    def _wanted(self, package: Package) -> AwsFunction:
        """The package as a Lambda function whose secrets exist. Raises `SecretMissing`."""
        wanted = aws_function(package, self.settings, self._secrets)
        self._control.require_secrets(wanted)
        return wanted

    def _published(self, wanted: AwsFunction, *, exists: bool, tried: Collection[str] = ()) -> LambdaVersion:
        """The package's version, kept or newly published. It is tried unless its number is in `tried`."""
        name, function = wanted.name, wanted.package.spec.name

        def upload() -> tuple[LambdaVersion, bool]:
            nonlocal exists
            try:
                return self._uploaded(wanted, exists=exists)
            except DeploymentOvertaken:
                exists = True
                raise

        version, new = AWS_DEPLOYMENT.run_blocking(upload, DeploymentOvertaken, pause=self._control.pause)
        if not new and version.number in tried:
            return version

        def smoke() -> None:
            report = None
            try:
                report = self._control.smoke(name, version.number, float(wanted.configuration["Timeout"]))
            except SmokeFailed as error:
                report = error.report
                raise
            finally:
                if report is not None:
                    self._trials.append((function, report))

        try:
            # A concurrent deployment that has published the version may have permitted it a moment ago.
            own_role = bool(wanted.references) and not self.settings.role_arn
            permitted = own_role and (not new or self._control.grant_secrets(name))
            AWS_PERMISSION.run_blocking(
                smoke, lambda error: permitted and _access_denied(error), pause=self._control.pause
            )
        except BackendFailed as error:
            alone = not exists and len(self._control.versions(name)) <= 1
            self._control.remove(name, "" if alone else version.number)
            if not isinstance(error, SmokeFailed):
                raise
            kept = "nothing is deployed" if alone else "what was current before stays current"
            raise FunctionFailed(
                f"function {function}: the new version does not work: {error.message}",
                remedy=f"{kept}; `rollart rewards test` runs it here",
            ) from None
        return version

    def _uploaded(self, wanted: AwsFunction, *, exists: bool) -> tuple[LambdaVersion, bool]:
        """The package's version, and True if it was published now. Raises `DeploymentOvertaken` if another deployment
        interfered, also one with the same code under other settings."""
        kept = self._control.versions(wanted.name) if exists else []
        known = next((v for v in kept if v.runs(wanted)), None)
        if known is not None:
            return known, False
        self._control.check_package_type(wanted)
        self._control.upload(wanted, create=not exists)
        self._control.retain_logs(wanted.name)
        number = self._control.publish(wanted)
        made = next((v for v in self._control.versions(wanted.name) if v.number == number), None)
        if made is None or not made.runs(wanted):
            raise DeploymentOvertaken(wanted.name)
        return made, True

    def _prune(self, name: str) -> None:
        """Prune versions. Keeps the newest `keep_versions` former current versions, the same number of versions that
        only runs called, and each version named by an alias. The function's role then reads the secrets of the kept
        versions alone. A version or permission that cannot be removed (a run's role may lack the permission) is left to
        the next deployment."""
        with contextlib.suppress(ServerlessError):
            named = {number for alias in self._control.aliases(name) for number in (alias.number, alias.canary)}
            deployed = set(self._control.deployed(name))
            versions = self._control.versions(name)
            called = [v for v in versions if v.number not in deployed]
            for group in ([v for v in versions if v.number in deployed], called):
                for old in group[self.settings.keep_versions :]:
                    if old.number not in named:
                        self._control.remove(name, old.number)
            self._control.grant_secrets(name)

    def _remove_expired(self, name: str) -> None:
        """Remove the aliases of runs whose leases have expired. A failed removal is left to the next call."""
        now = datetime.datetime.now(datetime.UTC)
        for alias in self._control.aliases(name):
            found = _LEASE.match(alias.description) if alias.name.startswith(_RUN) else None
            if found is None:
                continue
            with contextlib.suppress(ServerlessError, ValueError):
                if datetime.datetime.fromisoformat(found[1]) < now:
                    self._control.remove_alias(name, alias.name)

    def _versions(self, function: str) -> list[LambdaVersion]:
        """The published versions, newest first."""
        found = self._control.versions(self.settings.function_name(function))
        if not found:
            raise UnknownFunction(f"{function} is not deployed on AWS", remedy="deploy it first")
        return found

    def _live(self, function: str) -> LambdaVersion:
        live = self._control.live(self.settings.function_name(function))
        if live is None:
            raise UnknownFunction(f"{function} is not deployed on AWS", remedy="deploy it first")
        return live

    def _numbered(self, function: str, number: str) -> LambdaVersion:
        versions = self._versions(function)
        found = next((version for version in versions if version.number == number), None)
        if found is None:
            known = ", ".join(version.number for version in versions)
            raise UnknownFunction(f"{function} has no version {number} on AWS", remedy=f"it has {known}")
        return found

    def _drawn(self, package: Package) -> LambdaVersion:
        """The version from which a package was read back, unless it is gone."""
        function, number = package.spec.name, package.deployment[1]
        kept = self._control.versions(self.settings.function_name(function))
        found = next((v for v in kept if v.number == number and v.digest == package.version), None)
        if found is None:
            raise UnknownFunction(
                f"version {number} ({package.version[:12]}) of {function}, which the run has drawn, is gone from AWS",
                remedy="start another run, which draws one of the versions that are there",
            )
        return found

    def _point(self, function: str, version: LambdaVersion, seen: LambdaAlias | None) -> DeployedFunction:
        """Make a version the only current one, unless the alias was moved since it was `seen`."""
        name = self.settings.function_name(function)
        self._control.point(name, version, seen)
        return self._deployed(name, version)

    def _package(self, function: str, version: LambdaVersion) -> Package:
        """Raises `PackageError` if it cannot be read back."""
        archive = self._control.archive(self.settings.function_name(function), version.number)
        return restore_archive(function, version.digest, archive)

    def _all(self, function: str) -> list[DeployedFunction]:
        """The versions of a function, newest first."""
        versions, name = self._versions(function), self.settings.function_name(function)
        aliases = self._control.aliases(name)
        return [self._deployed(name, version, aliases) for version in versions]

    def _weighted(self, name: str) -> list[DeployedFunction]:
        """The current version and the canary; none if the function has no current version."""
        live = self._control.live(name)
        if live is None:
            return []
        aliases = self._control.aliases(name)
        canary = next((alias.canary for alias in aliases if alias.name == ALIAS), "")
        canaries = [v for v in self._control.versions(name) if v.number == canary] if canary else []
        return [self._deployed(name, version, aliases) for version in (live, *canaries)]

    def _deployed(
        self, name: str, version: LambdaVersion, aliases: Sequence[LambdaAlias] | None = None
    ) -> DeployedFunction:
        warm: int | None = 0
        reserved: int | None = 0
        problem = ""
        aliases = self._control.aliases(name) if aliases is None else aliases
        released = next((alias for alias in aliases if alias.name == ALIAS), None)
        live = LiveVersions(released.number, released.canary, released.weight) if released else LiveVersions("")
        current = version.number == live.current
        if current:
            try:
                warm, reserved = None, None
                warm, reserved = self._control.warm(name), self._control.reserved(name)
                if reserved == 0:
                    problem = "switched off by a reserved concurrency of 0; scale --concurrency 0 removes it"
                reserved = reserved or 0
            except ServerlessError as error:  # only the displayed details are missing
                problem = error.message
        runs = (alias.name for alias in aliases if alias.number == version.number and alias.name != ALIAS)
        return DeployedFunction(
            function=name.removeprefix(self.settings.prefix),
            provider=self.provider,
            version=version.digest,
            provider_version=version.number,
            current=current,
            created=version.created,
            memory_mb=int(version.settings["MemorySize"]),
            endpoint=f"{version.unqualified}:{ALIAS if current else version.number}",
            warm=warm,
            concurrency=reserved,
            weight=live.of(version.number),
            aliases=(*live.aliases(version.number), *runs),
            problem=problem,
        )


def _variables(settings: Mapping[str, Any]) -> Mapping[str, str]:
    found: Mapping[str, str] = settings.get("Environment", {}).get("Variables", {})
    return found


def _changed_variables(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The variables that differ, without their values, which may be secrets."""
    old, new = _variables(before), _variables(after)
    changed = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    words = {(True, False): "set -> none", (False, True): "none -> set", (True, True): "set -> another value"}
    lines = [f"variable {name}: {words[name in old, name in new]}" for name in changed]
    keys = before.get("KMSKeyArn"), after.get("KMSKeyArn")
    return lines if keys[0] == keys[1] else [*lines, f"key of the variables: {keys[0]} -> {keys[1]}"]


def _access_denied(error: BaseException) -> bool:
    """True if AWS denied access to a function during its trial, rather than to this user."""
    return (
        isinstance(error, BackendFailed) and not isinstance(error, CredentialsMissing) and "AccessDenied" in str(error)
    )


def _run_alias(run: str) -> str:
    """The alias of a run's id, with characters that Lambda does not accept replaced: it accepts letters, digits, `-`,
    `_`."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "-", run)
    if plain != run or len(_RUN + plain) > _ALIAS_NAME:
        plain = f"{plain[: _ALIAS_NAME - len(_RUN) - 9]}-{hashlib.sha256(run.encode()).hexdigest()[:8]}"
    return _RUN + plain


def _pinned(function: str, alias: str, qualifier: str, version: LambdaVersion) -> PinnedVersion:
    settings = version.settings
    return PinnedVersion(
        function, alias, qualifier, version.number, float(settings["Timeout"]), int(settings["MemorySize"])
    )


def _lines(reader: LineReader, events: list[dict[str, Any]]) -> list[LogLine]:
    """The lines of log events, oldest first."""
    found = []
    for event in sorted(events, key=lambda event: int(event["timestamp"])):
        t = datetime.datetime.fromtimestamp(event["timestamp"] / 1000.0, datetime.UTC).isoformat(
            timespec="milliseconds"
        )
        found.append(log_line(reader, t, str(event.get("logStreamName", "")), event["message"].rstrip()))
    return [line for line in found if line is not None]


def lambda_bill(
    function: str,
    report: LambdaReport | None,
    t0: float,
    t1: float,
    *,
    memory_mb: int,
    items: int,
    status: str,
    cause: Cause,
    version: str = "",
) -> Invocation:
    """The bill of a call. Without a report it holds the seconds until `t1` and the function's memory."""
    return Invocation(
        function=function,
        provider=PROVIDER,
        worker=f"{PROVIDER}/{function}" + (f"/{version}" if version else ""),
        t0=t0,
        t1=t1,
        cold_start_s=report.init_s if report else 0.0,
        billed_s=report.billed_s if report else billed_seconds(t1 - t0),
        memory_mb=report.memory_mb if report else memory_mb,
        items=items,
        status=status,
        cause=cause,
        provider_id=report.request_id if report else "",
    )
