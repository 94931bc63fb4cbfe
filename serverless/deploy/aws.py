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
import hashlib
import random
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from serverless.deploy.aws_control import DeploymentOvertaken, LambdaControl, LambdaVersion, SmokeFailed
from serverless.deploy.aws_function import ALIAS, AwsFunction, AwsSettings, aws_function
from serverless.deploy.aws_session import library
from serverless.deploy.package import Package
from serverless.errors import BackendFailed, ServerlessError, SpecInvalid, UnknownFunction
from serverless.meter import MeterSink, NullMeter
from serverless.providers.base import DeployedFunction, DeploymentChange, LogLine
from serverless.providers.faults import LambdaReport
from serverless.types import Cause, Invocation

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
        self._control: LambdaControl | None = None
        self._turn = asyncio.Lock()

    async def plan(self, package: Package) -> DeploymentChange:
        """The changes that a deployment would make, without building the archive."""
        wanted = aws_function(package, self.settings)
        lines = await self._run(lambda control: self._difference(control, wanted))
        return DeploymentChange(package.spec.name, self.provider, tuple(lines))

    async def deploy(self, package: Package) -> DeployedFunction:
        """See `Deployer`. The trial of a new version is billed to the meter as a SMOKE call."""
        wanted = aws_function(package, self.settings)
        with self._billed_trials(package) as trials:
            return await self._run(lambda control: self._deploy(control, wanted, trials))

    async def pin(self, package: Package, run: str, *, existing: bool = False) -> PinnedVersion:
        """Set the alias of a run to the package's version, with a lease of `LEASE_S`. The version is published and
        tried if it is missing; it becomes current only if no version is. The alias holds the package's `warm`
        environments. With `existing`, raises `UnknownFunction` if the function does not exist."""
        wanted = aws_function(package, self.settings)

        def step(control: LambdaControl) -> PinnedVersion:
            if existing and not control.ours(wanted.name):
                raise UnknownFunction(f"{package.spec.name} is gone from AWS", remedy="deploy it again")
            return self._pin(control, wanted, trials, _run_alias(run), existing=existing)

        with self._billed_trials(package) as trials:
            return await self._run(step)

    async def current(self, function: str) -> PinnedVersion:
        """The current version."""

        def read(control: LambdaControl) -> PinnedVersion:
            return _pinned(function, ALIAS, ALIAS, self._live(control, function))

        return await self._run(read)

    async def unpin(self, pin: PinnedVersion) -> None:
        """Remove the alias of a run and its provisioned environments."""
        await self._run(lambda control: control.remove_alias(self._named(pin.function), pin.alias))

    async def warm(self, pin: PinnedVersion) -> int:
        """Provisioned concurrency of the alias that calls go to."""
        return await self._run(lambda control: control.warm(self._named(pin.function), pin.qualifier))

    async def set_warm(self, pin: PinnedVersion, count: int) -> None:
        await self._run(lambda control: control.set_warm(self._named(pin.function), count, pin.qualifier))

    async def functions(self) -> Sequence[DeployedFunction]:
        def read(control: LambdaControl) -> list[DeployedFunction]:
            found = [(name, control.live(name)) for name in control.names()]
            return [self._deployed(control, name, v, v) for name, v in found if v is not None and v.digest]

        return await self._run(read)

    async def versions(self, function: str) -> Sequence[DeployedFunction]:
        name = self._named(function)

        def read(control: LambdaControl) -> list[DeployedFunction]:
            live = control.live(name)
            found = control.versions(name)
            if not found:
                raise UnknownFunction(f"{function} is not deployed on AWS", remedy="deploy it first")
            return [self._deployed(control, name, version, live) for version in found]

        return await self._run(read)

    async def rollback(self, function: str, version: str = "") -> DeployedFunction:
        name = self._named(function)

        def move(control: LambdaControl) -> DeployedFunction:
            chosen = _rollback_version(
                function, control.versions(name), control.live(name), version, control.deployed(name)
            )
            control.point(name, chosen)
            return self._deployed(control, name, chosen, chosen)

        return await self._run(move)

    async def scale(
        self, function: str, *, warm: int | None = None, concurrency: int | None = None
    ) -> DeployedFunction:
        """`warm` sets the provisioned concurrency, `concurrency` the reserved one; 0 removes either."""
        for value in (warm, concurrency):
            if value is not None and value < 0:
                raise SpecInvalid(f"{function}: {value} environments: not less than 0")
        name = self._named(function)

        def change(control: LambdaControl) -> DeployedFunction:
            live = self._live(control, function)
            if concurrency is not None:
                control.reserve(name, concurrency)
            if warm is not None:
                control.set_warm(name, warm)
            return self._deployed(control, name, live, live)

        return await self._run(change)

    async def logs(self, function: str, *, since_s: float = 3600.0, limit: int = 1000) -> Sequence[LogLine]:
        name = self._named(function)
        since = datetime.datetime.now(datetime.UTC).timestamp() - since_s

        def read(control: LambdaControl) -> list[dict[str, Any]]:
            self._live(control, function)
            return control.log_events(name, max(0, round(since * 1000.0)))

        events = sorted(await self._run(read), key=lambda event: int(event["timestamp"]))
        return [_line(event) for event in events[-limit:]] if limit > 0 else []

    async def delete(self, function: str) -> None:
        """Delete the function with its versions. Its logs stay until their retention ends."""
        name = self._named(function)

        def remove(control: LambdaControl) -> None:
            if not control.ours(name):
                raise UnknownFunction(f"{function} is not deployed on AWS")
            control.remove(name)

        await self._run(remove)

    async def __aenter__(self) -> AwsDeployer:
        await asyncio.to_thread(library, "boto3")
        self._control = LambdaControl(self.settings)
        return self

    async def __aexit__(self, *exc: object) -> None:
        control = self._control
        if control is None:
            return
        control.stop()
        async with self._turn:
            self._control = None
            await asyncio.to_thread(control.close)

    def _named(self, function: str) -> str:
        return self.settings.function_name(function)

    async def _run(self, step: Callable[[LambdaControl], T]) -> T:
        if self._control is None:
            raise BackendFailed("the AWS deployer is not open", remedy="use `async with`")
        async with self._turn:
            control = self._control
            thread = asyncio.get_running_loop().run_in_executor(None, step, control)
            try:
                return await asyncio.shield(thread)
            except asyncio.CancelledError:
                control.stop()
                await asyncio.gather(thread, return_exceptions=True)
                control.resume()
                raise

    def _difference(self, control: LambdaControl, wanted: AwsFunction) -> list[str]:
        name, spec, settings, configuration = wanted.name, wanted.spec, self.settings, wanted.configuration
        lines: list[str] = []
        exists, live = control.ours(name), control.live(name)
        if live is None:
            made = "publish the first version of" if exists else "create"
            lines.append(
                f"{made} the Lambda function {name}: {settings.runtime} on {settings.architecture}, "
                f"{configuration['MemorySize']} MB, {configuration['Timeout']} s, digest {wanted.digest[:12]}"
            )
            if spec.requirements:
                lines.append(f"install {', '.join(spec.requirements)} into its archive")
            lines.append(f"keep its logs for {settings.log_retention_days} days")
        elif not live.runs(wanted):
            if live.digest != wanted.digest:
                lines.append(f"digest: {live.digest[:12]} -> {wanted.digest[:12]}")
            changed = (key for key in _SHOWN if live.settings[key] != configuration[key])
            lines += [f"{_SHOWN[key]}: {live.settings[key]} -> {configuration[key]}" for key in changed]
            if live.architecture != settings.architecture:
                lines.append(f"architecture: {live.architecture} -> {settings.architecture}")
            if settings.role_arn not in ("", live.role):
                lines.append(f"role: {live.role} -> {settings.role_arn}")
        warm = control.warm(name) if exists and spec.warm else 0
        if spec.warm != warm and spec.warm:
            lines.append(f"warm environments (provisioned concurrency, billed while idle): {warm} -> {spec.warm}")
        reserved = control.reserved(name) if exists and settings.reserve_concurrency else 0
        if reserved != wanted.reserved:
            lines.append(f"reserved concurrency: {reserved or 'none'} -> {wanted.reserved}")
        return lines

    def _deploy(self, control: LambdaControl, wanted: AwsFunction, trials: list[LambdaReport]) -> DeployedFunction:
        name, spec = wanted.name, wanted.spec
        exists, live = control.ours(name), control.live(name)
        if exists:
            self._remove_expired(control, name)
        unchanged = live is not None and live.runs(wanted)
        if live is None or not unchanged:
            live = self._published(control, wanted, trials, exists=exists)
            control.point(name, live)
            self._prune(control, name)
        try:
            if wanted.reserved and control.reserved(name) != wanted.reserved:
                control.reserve(name, wanted.reserved)
                unchanged = False
            if spec.warm and control.warm(name) != spec.warm:
                control.set_warm(name, spec.warm)
                unchanged = False
        except ServerlessError as error:
            raise BackendFailed(
                f"{spec.name}: version {live.number} is current, but not scaled as it says: {error.message}",
                remedy=error.remedy or "deploy it again",
            ) from None
        return replace(self._deployed(control, name, live, live), unchanged=unchanged)

    def _pin(
        self, control: LambdaControl, wanted: AwsFunction, trials: list[LambdaReport], alias: str, *, existing: bool
    ) -> PinnedVersion:
        name = wanted.name
        exists = control.ours(name)
        if exists:
            self._remove_expired(control, name)
        named = {one.number for one in control.aliases(name)}
        version = self._published(control, wanted, trials, exists=exists, tried=named)
        until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=LEASE_S)
        control.name(name, alias, version.number, f"rollart: lease until {until.isoformat(timespec='seconds')}")
        if control.live(name) is None:
            control.point(name, version)
        if version.number not in named:
            self._prune(control, name)
        qualifier, warm = alias, wanted.spec.warm
        if warm or not existing:
            same = [one.name for one in control.aliases(name) if one.number == version.number]
            holders = [one for one in same if control.warm(name, one)]
            if holders and alias not in holders:
                qualifier = holders[0] if warm else alias
            elif not existing:
                control.set_warm(name, warm, alias)
            elif not holders:  # calls wait for the alias, and work without provisioned environments
                with contextlib.suppress(ServerlessError):
                    control.set_warm(name, warm, alias, wait=False)
        return _pinned(wanted.spec.name, alias, qualifier, version)

    def _published(
        self,
        control: LambdaControl,
        wanted: AwsFunction,
        trials: list[LambdaReport],
        *,
        exists: bool,
        tried: Collection[str] = (),
    ) -> LambdaVersion:
        """The package's version, kept or newly published. It is tried unless its number is in `tried`."""
        name = wanted.name
        for attempt in range(_ATTEMPTS):
            try:
                version, new = _uploaded(control, wanted, exists=exists)
                break
            except DeploymentOvertaken:
                if attempt == _ATTEMPTS - 1:
                    raise
                exists = True
                control.pause(random.uniform(0.0, min(_BACKOFF_S * 2**attempt, _MAX_BACKOFF_S)))
        if not new and version.number in tried:
            return version
        try:
            trial = control.smoke(name, version.number, float(wanted.configuration["Timeout"]))
        except BackendFailed as error:
            alone = not exists and len(control.versions(name)) <= 1
            control.remove(name, "" if alone else version.number)
            if not isinstance(error, SmokeFailed):
                raise
            if error.report is not None:
                trials.append(error.report)
            raise BackendFailed(
                f"function {wanted.spec.name}: the new version does not work: {error.message}",
                remedy="`rollart rewards test` runs it here; what was current before stays current",
            ) from None
        if trial is not None:
            trials.append(trial)
        return version

    def _prune(self, control: LambdaControl, name: str) -> None:
        """Prune versions. Keeps the newest `keep_versions` former current versions, the same number of versions that
        only runs called, and each version named by an alias. A version that cannot be removed (a run's role may lack
        the permission) is left to the next deployment."""
        with contextlib.suppress(ServerlessError):
            named = {alias.number for alias in control.aliases(name)}
            deployed = set(control.deployed(name))
            versions = control.versions(name)
            called = [v for v in versions if v.number not in deployed]
            for group in ([v for v in versions if v.number in deployed], called):
                for old in group[self.settings.keep_versions :]:
                    if old.number not in named:
                        control.remove(name, old.number)

    def _remove_expired(self, control: LambdaControl, name: str) -> None:
        """Remove the aliases of runs whose leases have expired. A failed removal is left to the next call."""
        now = datetime.datetime.now(datetime.UTC)
        for alias in control.aliases(name):
            found = _LEASE.match(alias.description) if alias.name.startswith(_RUN) else None
            if found is None:
                continue
            with contextlib.suppress(ServerlessError, ValueError):
                if datetime.datetime.fromisoformat(found[1]) < now:
                    control.remove_alias(name, alias.name)

    def _live(self, control: LambdaControl, function: str) -> LambdaVersion:
        live = control.live(self._named(function))
        if live is None:
            raise UnknownFunction(f"{function} is not deployed on AWS", remedy="deploy it first")
        return live

    def _deployed(
        self, control: LambdaControl, name: str, version: LambdaVersion, live: LambdaVersion | None
    ) -> DeployedFunction:
        current = live is not None and version.number == live.number
        warm: int | None = 0
        reserved: int | None = 0
        problem = ""
        if current:
            try:
                warm, reserved = None, None
                warm, reserved = control.warm(name), control.reserved(name)
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

    @contextlib.contextmanager
    def _billed_trials(self, package: Package) -> Iterator[list[LambdaReport]]:
        """A list for the trials of new versions, which are billed to the meter at the end."""
        trials: list[LambdaReport] = []
        loop = asyncio.get_running_loop()
        t0 = loop.time()
        try:
            yield trials
        finally:
            for trial in trials:
                self._meter.invocation(
                    Invocation(
                        function=package.spec.name,
                        provider=self.provider,
                        worker=f"{self.provider}/{package.spec.name}",
                        t0=t0,
                        t1=loop.time(),
                        cold_start_s=trial.init_s,
                        billed_s=trial.billed_s,
                        memory_mb=trial.memory_mb,
                        items=0,
                        status="ok",
                        cause=Cause.SMOKE,
                        provider_id=trial.request_id,
                    )
                )


def _uploaded(control: LambdaControl, wanted: AwsFunction, *, exists: bool) -> tuple[LambdaVersion, bool]:
    """The package's version, and True if it was published now. Raises `DeploymentOvertaken` if another deployment
    interfered, also one with the same code under other settings."""
    kept = control.versions(wanted.name) if exists else []
    known = next((v for v in kept if v.runs(wanted)), None)
    if known is not None:
        return known, False
    control.upload(wanted, create=not exists)
    control.retain_logs(wanted.name)
    number = control.publish(wanted)
    made = next((v for v in control.versions(wanted.name) if v.number == number), None)
    if made is None or not made.runs(wanted):
        raise DeploymentOvertaken(wanted.name)
    return made, True


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


def _rollback_version(
    function: str, kept: list[LambdaVersion], live: LambdaVersion | None, wanted: str, deployed: Sequence[str]
) -> LambdaVersion:
    """The version for a rollback: the one with the given digest prefix, else the newest former current version
    (`deployed`) older than the current one."""
    if not kept:
        raise UnknownFunction(f"{function} is not deployed on AWS", remedy="deploy it first")
    known = ", ".join(f"{v.digest[:12]} (version {v.number})" for v in kept)
    if wanted:
        found = {v.digest: v for v in reversed(kept) if v.digest.startswith(wanted)}
        if len(found) != 1:
            what = "no" if not found else "more than one"
            raise BackendFailed(f"{function} has {what} version {wanted!r}", remedy=f"it has {known}")
        return next(iter(found.values()))
    older = [v for v in kept if v.number in deployed and (live is None or int(v.number) < int(live.number))]
    if not older:
        raise BackendFailed(f"{function} has no version before the current one", remedy=f"it has {known}")
    return older[0]


def _line(event: dict[str, Any]) -> LogLine:
    t = datetime.datetime.fromtimestamp(event["timestamp"] / 1000.0, datetime.UTC)
    return LogLine(t.isoformat(timespec="milliseconds"), str(event.get("logStreamName", "")), event["message"].rstrip())
