"""Deploys functions to AWS Lambda: `Deployer` over boto3.

A function is `<prefix><name>`. Each package is a published version whose description holds the package's digest, and
the alias `live` names the current one. Versions are immutable, so a rollback only moves the alias.

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
import random
import re
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

from serverless.deploy.aws_control import DeploymentOvertaken, LambdaControl, LambdaVersion, SmokeFailed
from serverless.deploy.aws_function import ALIAS, AwsFunction, AwsSettings, aws_function
from serverless.deploy.aws_session import library
from serverless.deploy.package import Package
from serverless.errors import BackendFailed, ServerlessError, SpecInvalid, UnknownFunction
from serverless.meter import MeterSink, NullMeter, billed_seconds
from serverless.providers.base import DeployedFunction, DeploymentChange, LogLine, rollback_number
from serverless.providers.faults import LambdaReport
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

_ATTEMPTS = 10
"""Attempts of a deployment that conflicts with others."""

_BACKOFF_S, _MAX_BACKOFF_S = 0.25, 8.0
"""Upper bounds of the random pause before the second attempt, which doubles with each, and before any. Without pauses,
conflicting deployments go on in step, each uploading its code between the upload and the publish of another."""

_SHOWN = {"Runtime": "runtime", "Handler": "handler", "MemorySize": "memory (MB)", "Timeout": "time limit (s)"}


@dataclass(frozen=True, slots=True)
class PinnedVersion:
    """A pinned version. `alias` names it. Calls go to `qualifier`: that alias, or another alias of the same version if
    that one has the provisioned environments, which Lambda grants to one alias per version. Only version `number` may
    answer."""

    function: str
    alias: str
    qualifier: str
    number: str
    timeout_s: float
    memory_mb: int


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

    def __init__(self, settings: AwsSettings | None = None, *, meter: MeterSink | None = None) -> None:
        self.settings = settings or AwsSettings()
        self._meter = meter or NullMeter()
        self._control = LambdaControl(self.settings)
        self._open = False
        self._turn = asyncio.Lock()
        self._trials: list[tuple[str, LambdaReport]] = []
        """The function and the bill of each trial of the current step."""

    @_step
    def plan(self, package: Package) -> DeploymentChange:
        """The changes that a deployment would make, without building the archive."""
        wanted, settings = aws_function(package, self.settings), self.settings
        name, spec, configuration = wanted.name, wanted.package.spec, wanted.configuration
        lines: list[str] = []
        exists, live = self._control.ours(name), self._control.live(name)
        if live is None:
            made = "publish the first version of" if exists else "create"
            lines.append(
                f"{made} the Lambda function {name}: {settings.runtime} on {settings.architecture}, "
                f"{configuration['MemorySize']} MB, {configuration['Timeout']} s, digest {wanted.package.version[:12]}"
            )
            if spec.requirements:
                lines.append(f"install {', '.join(spec.requirements)} into its archive")
            lines.append(f"keep its logs for {settings.log_retention_days} days")
        elif not live.runs(wanted):
            if live.digest != wanted.package.version:
                lines.append(f"digest: {live.digest[:12]} -> {wanted.package.version[:12]}")
            changed = (key for key in _SHOWN if live.settings[key] != configuration[key])
            lines += [f"{_SHOWN[key]}: {live.settings[key]} -> {configuration[key]}" for key in changed]
            if live.architecture != settings.architecture:
                lines.append(f"architecture: {live.architecture} -> {settings.architecture}")
            if settings.role_arn not in ("", live.role):
                lines.append(f"role: {live.role} -> {settings.role_arn}")
        warm = self._control.warm(name) if exists and spec.warm else 0
        if spec.warm != warm and spec.warm:
            lines.append(f"warm environments (provisioned concurrency, billed while idle): {warm} -> {spec.warm}")
        reserved = self._control.reserved(name) if exists and settings.reserve_concurrency else 0
        if reserved != wanted.reserved:
            lines.append(f"reserved concurrency: {reserved or 'none'} -> {wanted.reserved}")
        return DeploymentChange(spec.name, self.provider, tuple(lines))

    @_step
    def deploy(self, package: Package) -> DeployedFunction:
        """See `Deployer`. The trial of a new version is billed to the meter as a SMOKE call."""
        wanted = aws_function(package, self.settings)
        name, spec = wanted.name, wanted.package.spec
        exists, live = self._control.ours(name), self._control.live(name)
        if exists:
            self._remove_expired(name)
        unchanged = live is not None and live.runs(wanted)
        if live is None or not unchanged:
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
        return replace(self._deployed(name, live, live), unchanged=unchanged)

    @_step
    def pin(self, package: Package, run: str, *, existing: bool = False) -> PinnedVersion:
        """Set the alias of a run to the package's version, with a lease of `LEASE_S`. The version is published and
        tried if it is missing; it becomes current only if no version is. The alias holds the package's `warm`
        environments. With `existing`, raises `UnknownFunction` if the function does not exist."""
        wanted, alias = aws_function(package, self.settings), _run_alias(run)
        name = wanted.name
        exists = self._control.ours(name)
        if existing and not exists:
            raise UnknownFunction(f"{wanted.package.spec.name} is gone from AWS", remedy="deploy it again")
        if exists:
            self._remove_expired(name)
        named = {one.number for one in self._control.aliases(name)}
        version = self._published(wanted, exists=exists, tried=named)
        until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=LEASE_S)
        self._control.name(name, alias, version.number, f"rollart: lease until {until.isoformat(timespec='seconds')}")
        if self._control.live(name) is None:
            self._control.point(name, version)
        if version.number not in named:
            self._prune(name)
        qualifier, warm = alias, wanted.package.spec.warm
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
        return _pinned(wanted.package.spec.name, alias, qualifier, version)

    @_step
    def current(self, function: str) -> PinnedVersion:
        """The current version."""
        return _pinned(function, ALIAS, ALIAS, self._live(function))

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
        found = [(name, self._control.live(name)) for name in self._control.names()]
        return [self._deployed(name, v, v) for name, v in found if v is not None and v.digest]

    @_step
    def versions(self, function: str) -> Sequence[DeployedFunction]:
        name = self.settings.function_name(function)
        live = self._control.live(name)
        return [self._deployed(name, version, live) for version in self._versions(function)]

    @_step
    def rollback(self, function: str, version: str = "") -> DeployedFunction:
        """See `Deployer`. The previous version is the newest former current one that is older than the current one."""
        name = self.settings.function_name(function)
        kept, live, deployed = self._versions(function), self._control.live(name), self._control.deployed(name)
        newest = int(live.number) if live is not None else math.inf
        former = [int(v.number) for v in kept if v.number in deployed and int(v.number) < newest]
        digests = {int(v.number): v.digest for v in kept}
        number = rollback_number(function, digests, former, version, noun="version")
        chosen = next(v for v in kept if int(v.number) == number)
        self._control.point(name, chosen)
        return self._deployed(name, chosen, chosen)

    @_step
    def scale(self, function: str, *, warm: int | None = None, concurrency: int | None = None) -> DeployedFunction:
        """`warm` sets the provisioned concurrency, `concurrency` the reserved one; 0 removes either."""
        for value in (warm, concurrency):
            if value is not None and value < 0:
                raise SpecInvalid(f"{function}: {value} environments: not less than 0")
        name, live = self.settings.function_name(function), self._live(function)
        if concurrency is not None:
            self._control.reserve(name, concurrency)
        if warm is not None:
            self._control.set_warm(name, warm)
        return self._deployed(name, live, live)

    @_step
    def logs(self, function: str, *, since_s: float = 3600.0, limit: int = 1000) -> Sequence[LogLine]:
        since_ms = (datetime.datetime.now(datetime.UTC).timestamp() - since_s) * 1000.0
        self._live(function)
        events = self._control.log_events(self.settings.function_name(function), max(0, round(since_ms)))
        events.sort(key=lambda event: int(event["timestamp"]))
        return [_line(event) for event in events[-limit:]] if limit > 0 else []

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

    def _published(self, wanted: AwsFunction, *, exists: bool, tried: Collection[str] = ()) -> LambdaVersion:
        """The package's version, kept or newly published. It is tried unless its number is in `tried`."""
        name = wanted.name
        for attempt in range(_ATTEMPTS):
            try:
                version, new = self._uploaded(wanted, exists=exists)
                break
            except DeploymentOvertaken:
                if attempt == _ATTEMPTS - 1:
                    raise
                exists = True
                self._control.pause(random.uniform(0.0, min(_BACKOFF_S * 2**attempt, _MAX_BACKOFF_S)))
        if not new and version.number in tried:
            return version
        try:
            trial = self._control.smoke(name, version.number, float(wanted.configuration["Timeout"]))
        except BackendFailed as error:
            alone = not exists and len(self._control.versions(name)) <= 1
            self._control.remove(name, "" if alone else version.number)
            if not isinstance(error, SmokeFailed):
                raise
            if error.report is not None:
                self._trials.append((wanted.package.spec.name, error.report))
            raise BackendFailed(
                f"function {wanted.package.spec.name}: the new version does not work: {error.message}",
                remedy="`rollart rewards test` runs it here; what was current before stays current",
            ) from None
        if trial is not None:
            self._trials.append((wanted.package.spec.name, trial))
        return version

    def _uploaded(self, wanted: AwsFunction, *, exists: bool) -> tuple[LambdaVersion, bool]:
        """The package's version, and True if it was published now. Raises `DeploymentOvertaken` if another deployment
        interfered, also one with the same code under other settings."""
        kept = self._control.versions(wanted.name) if exists else []
        known = next((v for v in kept if v.runs(wanted)), None)
        if known is not None:
            return known, False
        self._control.upload(wanted, create=not exists)
        self._control.retain_logs(wanted.name)
        number = self._control.publish(wanted)
        made = next((v for v in self._control.versions(wanted.name) if v.number == number), None)
        if made is None or not made.runs(wanted):
            raise DeploymentOvertaken(wanted.name)
        return made, True

    def _prune(self, name: str) -> None:
        """Prune versions. Keeps the newest `keep_versions` former current versions, the same number of versions that
        only runs called, and each version named by an alias. A version that cannot be removed (a run's role may lack
        the permission) is left to the next deployment."""
        with contextlib.suppress(ServerlessError):
            named = {alias.number for alias in self._control.aliases(name)}
            deployed = set(self._control.deployed(name))
            versions = self._control.versions(name)
            called = [v for v in versions if v.number not in deployed]
            for group in ([v for v in versions if v.number in deployed], called):
                for old in group[self.settings.keep_versions :]:
                    if old.number not in named:
                        self._control.remove(name, old.number)

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

    def _deployed(self, name: str, version: LambdaVersion, live: LambdaVersion | None) -> DeployedFunction:
        current = live is not None and version.number == live.number
        warm: int | None = 0
        reserved: int | None = 0
        problem = ""
        if current:
            try:
                warm, reserved = None, None
                warm, reserved = self._control.warm(name), self._control.reserved(name)
            except ServerlessError as error:  # only the displayed details are missing
                problem = error.message
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
            problem=problem,
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


def _line(event: dict[str, Any]) -> LogLine:
    t = datetime.datetime.fromtimestamp(event["timestamp"] / 1000.0, datetime.UTC)
    return LogLine(t.isoformat(timespec="milliseconds"), str(event.get("logStreamName", "")), event["message"].rstrip())


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
