"""Modal as this package uses it: its client, the deployments of a function, and one call.

The client is opened with credentials, with unpickling disabled and errors translated.

Modal's client loads an answer in whatever format the container names, so a container that runs a policy's code could
execute code in this process. `deserialize` of `modal._serialization` would unpickle such an answer, and also the
exception of a container that failed to start. While a client of this package is open, that module's unpickler is
replaced by a refusing one (process-wide: no data from a container may be unpickled), and answers are requested as
CBOR. This is the only module that touches Modal's private interface. The replacement is checked at every opening, and a
client that would load a pickle is not opened.

A function has one app, whose tags map its deployments to package versions:

    rollart-live   3              the deployment that calls go to (Modal counts an app's deployments from 1)
    rollart-canary 4              the deployment beside it that gets a share of the calls, if there is one
    rollart-weight 0.1            that share
    rollart-v3     <digest>       the package version of deployment 3, base64url (a tag holds 63 characters)
    rollart-t3     1767225600     when it was made, Unix seconds
    rollart-s3     <digest>       the sources of its secrets, if it has any: which `modal.Secret` has which variable

Modal keeps deployments and looks any of them up by number (`Function.from_name(version=)`), so a rollback is one
`App.set_tags`, which is atomic, and a deployment that fails is never live.

A call goes to a pinned deployment, and the container's answer is validated. Payloads and answers are JSON as bytes in
CBOR, see `serverless.deploy.modal_entry`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import datetime
import importlib
import json
import os
import pickle
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from serverless.errors import BackendFailed, CredentialsMissing, ExtraMissing, SpecInvalid, UnknownFunction
from serverless.meter import billed_seconds
from serverless.providers.jobs import HELD_S, poll_job
from serverless.spec import Settings
from serverless.types import Cause, FaultKind, InfraFault, Invocation, Throttle

if TYPE_CHECKING:
    import modal

CONNECT_S = 20.0
"""Seconds to connect. Modal's client tries for a minute; a command that cannot connect must report it sooner."""

_CLOSE_S = 5.0

_SETTINGS = {"MODAL_PAYLOAD_FORMAT": "cbor", "MODAL_MAX_THROTTLE_WAIT": "0"}
"""The second setting leaves throttled requests to this package's retries instead of a wait inside the client."""

_REMEDY = "set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET, or run `modal token new`"

_BILLING = re.compile(r"billing|budget|spend|payment|credit", re.IGNORECASE)
"""A workspace without credit also answers RESOURCE_EXHAUSTED, but retries do not help."""

_MEMORY = re.compile(r"out of memory|\boom\b|memory limit|exit(?:ed with)? code:? 137", re.IGNORECASE)

_STOPPED = re.compile(r"stopped|terminated|preempt", re.IGNORECASE)


_POLL_S, _POLL_PAUSE_S = 30.0, 1.0
"""Seconds of one request for the answer of a submitted call, and between requests after a failed one."""


class PickleRefused(Exception):
    """A container answered with a pickle, which was not loaded."""


def modal_library() -> Any:
    """The modal package."""
    try:
        import modal
    except ImportError:
        raise ExtraMissing("modal", "modal") from None
    return modal


@contextlib.asynccontextmanager
async def open_client() -> AsyncIterator[modal.Client]:
    """A client with the user's credentials, checked with the server.

    Raises `CredentialsMissing` if there are none or the server rejects them, `BackendFailed` if it does not answer.
    """
    modal, client = modal_library(), None
    with _no_pickles():
        try:
            with translate_errors():
                async with asyncio.timeout(CONNECT_S) as limit:
                    client = await _connect(modal)
                    await client.hello.aio()
            yield client
        except TimeoutError:
            if not limit.expired():
                raise
            raise BackendFailed(
                f"Modal does not answer within {CONNECT_S:g} s", remedy="check the network and MODAL_SERVER_URL"
            ) from None
        finally:
            if client is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_CLOSE_S):
                        await client.close.aio()


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Translate Modal's errors into this package's errors, for the control plane."""
    modal = modal_library()
    try:
        yield
    except (modal.exception.AuthError, modal.exception.PermissionDeniedError) as error:
        raise CredentialsMissing(f"Modal refuses: {_text(error)}", remedy=_REMEDY) from None
    except modal.exception.Error as error:
        raise BackendFailed(f"Modal: {type(error).__name__}: {_text(error)}") from error
    except TimeoutError:  # an OSError, but a time limit of this package
        raise
    except OSError as error:
        raise BackendFailed(f"Modal: {error}", remedy="check the network and MODAL_SERVER_URL") from error


def fault_of(error: Exception) -> InfraFault:
    """The fault of a failed call. Errors that the next call would meet again are raised as errors of this package.

    Modal reports the reason of a container's end only as text, which its documentation does not guarantee.
    """
    kinds = modal_library().exception
    text = _text(error)
    detail = f"{type(error).__name__}: {text}"[:500]
    if isinstance(error, kinds.AuthError | kinds.PermissionDeniedError):
        raise CredentialsMissing(f"Modal refuses: {text}", remedy=_REMEDY) from None
    if isinstance(error, kinds.ClientClosed):
        raise BackendFailed("the modal backend is closed") from None
    if isinstance(error, kinds.ResourceExhaustedError):
        unpaid = _BILLING.search(text) is not None
        throttle = Throttle.RESERVED if unpaid else Throttle.RATE
        return InfraFault(FaultKind.THROTTLED, retryable=not unpaid, detail=detail, throttle=throttle)
    if _find_pickle_refusal(error) or isinstance(error, kinds.ExecutionError | kinds.DeserializationError):
        return _unreadable(error, text)
    if isinstance(error, kinds.InternalFailure | kinds.RemoteError):
        return _ended(text, detail, lost=isinstance(error, kinds.InternalFailure))
    for found, kind, retryable in (
        (kinds.FunctionTimeoutError, FaultKind.TIMEOUT, True),
        (kinds.ConflictError, FaultKind.UNAVAILABLE, True),
        (kinds.InvalidError | kinds.RequestSizeError | kinds.SerializationError, FaultKind.ENVIRONMENT, False),
        (kinds.ConnectionError | kinds.ServiceError | kinds.InternalError | OSError, FaultKind.UNAVAILABLE, True),
        (kinds.Error, FaultKind.UNAVAILABLE, False),
    ):
        if isinstance(error, found):
            return InfraFault(kind, retryable=retryable, detail=detail)
    raise error


def _ended(text: str, detail: str, *, lost: bool) -> InfraFault:
    """The fault of a container that ended during a call (`lost`: Modal's own term) or that never started."""
    if _MEMORY.search(text):
        return InfraFault(FaultKind.OUT_OF_MEMORY, retryable=True, detail=detail)
    if _STOPPED.search(text) or not text:
        return InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail=detail)
    return InfraFault(FaultKind.CRASH, retryable=lost, detail=detail)


def _unreadable(error: Exception, text: str) -> InfraFault:
    """The fault of a pickled answer; or, with a remote traceback, of a container that could not start and pickled its
    exception."""
    if "remote exception" in text:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return InfraFault(FaultKind.CRASH, retryable=False, detail=f"the function did not load: {lines[-1]}"[:500])
    if _find_pickle_refusal(error):
        detail = "the container answered with a pickle, which is never loaded"
        return InfraFault(FaultKind.BAD_ANSWER, retryable=False, detail=detail)
    return InfraFault(FaultKind.BAD_ANSWER, retryable=False, detail=text[:500])


def _find_pickle_refusal(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, PickleRefused):
            return True
        error = error.__cause__
    return False


def _text(error: BaseException) -> str:
    return str(error.args[0] if error.args else getattr(error, "_message", "") or error)


async def _connect(modal: Any) -> Any:
    config = modal.config.config
    token, secret = config.get("token_id"), config.get("token_secret")
    if token and secret:
        return await modal.Client.from_credentials.aio(token, secret)
    if refresh := config.get("oauth_refresh_token"):
        return await modal.Client.from_oauth_credentials.aio(
            refresh,
            oauth_client_id=config.get("oauth_client_id"),
            oauth_client_secret=config.get("oauth_client_secret"),
            oauth_jwt_key=config.get("oauth_jwt_key"),
        )
    raise CredentialsMissing("Modal knows no token", remedy=_REMEDY)


class _OpenClients:
    """The number of open clients, and the guard that is closed after the last."""

    depth = 0
    guard = contextlib.ExitStack()


class _RefusingUnpickler:
    """Replaces `modal._serialization.Unpickler`."""

    def __init__(self, client: object, buffer: object) -> None: ...

    def load(self) -> Any:
        raise PickleRefused("pickles are not loaded")


@contextlib.contextmanager
def _no_pickles() -> Iterator[None]:
    if _OpenClients.depth == 0:
        _OpenClients.guard.enter_context(_refused_pickles())
    _OpenClients.depth += 1
    try:
        yield
    finally:
        _OpenClients.depth -= 1
        if _OpenClients.depth == 0:
            _OpenClients.guard.close()


@contextlib.contextmanager
def _refused_pickles() -> Iterator[None]:
    version = getattr(modal_library(), "__version__", "?")
    failed = BackendFailed(
        f"modal {version} cannot be kept from loading pickles of containers", remedy="pip install 'modal~=1.6.4'"
    )
    before = {name: os.environ.get(name) for name in _SETTINGS}
    try:
        inside: Any = importlib.import_module("modal._serialization")
        unpickler, inside.Unpickler = inside.Unpickler, _RefusingUnpickler
    except (ImportError, AttributeError):
        raise failed from None
    os.environ.update(_SETTINGS)
    try:
        try:
            inside.deserialize(pickle.dumps("a harmless one"), None)
        except Exception as error:
            if not _find_pickle_refusal(error):
                raise failed from None
        else:
            raise failed
        yield
    finally:
        inside.Unpickler = unpickler
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


PROVIDER = "modal"

FUNCTION = "call"
"""The name of the one Modal function of an app: that of `serverless.deploy.modal_entry`."""

PACKAGE = "package"
"""The name of the function of an app that gives its package back: that of `serverless.deploy.modal_files`."""

_NUMBERED = ("rollart-v", "rollart-t", "rollart-s")
"""Tags that end with the number of a deployment."""

_WEIGHT = re.compile(r"0?\.\d+")

_NAME = 63
"""Maximum characters of an app's name."""


class ModalSettings(Settings):
    """Settings of functions on Modal. `python` is the minor version of the interpreter in the container ('' for this
    one's); `keep` is the number of versions before the live one that are kept for a rollback."""

    prefix: str = "rollart-"
    environment: str = ""
    python: str = ""
    keep: int = 5


@dataclass(frozen=True, slots=True)
class DeploymentTags:
    """The parsed tags of an app. `versions` are digests by deployment number, `times` Unix seconds likewise."""

    live: int = 0
    versions: Mapping[int, str] = field(default_factory=dict)
    times: Mapping[int, int] = field(default_factory=dict)
    other: Mapping[str, str] = field(default_factory=dict)
    """Foreign tags, which are preserved."""
    canary: int = 0
    """The deployment that gets the share `weight` of the calls; 0 for none."""
    weight: float = 0.0
    secrets: Mapping[int, str] = field(default_factory=dict)
    """Digests of the sources of secrets, by deployment number."""

    @classmethod
    def read(cls, tags: Mapping[str, str]) -> DeploymentTags:
        live, canary, weight, versions, times, secrets, other = 0, 0, 0.0, {}, {}, {}, {}
        for key, value in tags.items():
            number = int(key[9:]) if key[:9] in _NUMBERED and key[9:].isdigit() else 0
            if key == "rollart-live":
                live = int(value) if value.isdigit() else 0
            elif key == "rollart-canary":
                canary = int(value) if value.isdigit() else 0
            elif key == "rollart-weight":
                weight = float(value) if _WEIGHT.fullmatch(value) else 0.0
            elif number and key[8] == "v":
                versions[number] = _hex(value)
            elif number and key[8] == "s":
                secrets[number] = value
            elif number:
                times[number] = int(value) if value.isdigit() else 0
            else:
                other[key] = value
        live = live if live in versions else 0
        split = live and canary in versions and canary != live and 0.0 < weight < 1.0
        return cls(live, versions, times, other, *((canary, weight) if split else (0, 0.0)), secrets)

    def tags(self) -> dict[str, str]:
        tags = dict(self.other)
        for number, digest in self.versions.items():
            tags[f"rollart-v{number}"] = base64.urlsafe_b64encode(bytes.fromhex(digest)).decode().rstrip("=")
        tags |= {f"rollart-t{n}": str(t) for n, t in self.times.items() if n in self.versions}
        tags |= {f"rollart-s{n}": sources for n, sources in self.secrets.items() if n in self.versions}
        if self.canary:
            tags |= {"rollart-canary": str(self.canary), "rollart-weight": f"{self.weight:.6f}"}
        return tags | ({"rollart-live": str(self.live)} if self.live else {})

    @property
    def weighted(self) -> tuple[int, ...]:
        """The deployments that get calls, the live one first."""
        return tuple(filter(None, (self.live, self.canary)))

    def matching(self, digest: str, secrets: str) -> list[int]:
        """The deployments of a package version with these sources of secrets."""
        return [n for n, found in self.versions.items() if found == digest and self.secrets.get(n, "") == secrets]

    def pointed(self, number: int, canary: float = 0.0) -> DeploymentTags:
        """The tags with another live deployment; with `canary`, it gets this share of the calls beside the live one."""
        if canary:
            return replace(self, canary=number, weight=canary)
        return replace(self, live=number, canary=0, weight=0.0)

    def added(
        self, number: int, digest: str, t: float, *, keep: int, canary: float = 0.0, secrets: str = ""
    ) -> DeploymentTags:
        """The tags with a new deployment, live or as a canary, the newest `keep` of the older ones, and those with a
        weight."""
        tags = replace(
            self,
            versions={**self.versions, number: digest},
            times={**self.times, number: int(t)},
            secrets={**self.secrets, **({number: secrets} if secrets else {})},
        ).pointed(number, canary if self.live else 0.0)
        kept = {*sorted(tags.versions, reverse=True)[: keep + 1], *tags.weighted}
        return replace(tags, versions={n: digest for n, digest in tags.versions.items() if n in kept})

    def created(self, number: int) -> str:
        if number not in self.times:
            return ""
        return datetime.datetime.fromtimestamp(self.times[number], datetime.UTC).isoformat()


@dataclass(frozen=True, slots=True)
class ModalNamespace:
    """Names and look-ups in a Modal environment. `environment` '' is the configured one."""

    client: modal.Client
    prefix: str
    environment: str = ""

    def app(self, function: str) -> str:
        name = self.prefix + function
        if len(name) > _NAME:
            raise SpecInvalid(f"{name!r} is {len(name)} characters long, an app's name on Modal at most {_NAME}")
        return name

    async def find(self, function: str) -> tuple[modal.App | None, DeploymentTags]:
        """The function's app and its tags; None and no tags if there is no such app."""
        modal = modal_library()
        try:
            app = await modal.App.lookup.aio(
                self.app(function), client=self.client, environment_name=self.environment or None
            )
        except modal.exception.NotFoundError:
            return None, DeploymentTags()
        return app, DeploymentTags.read(await app.get_tags.aio(client=self.client))

    async def get(self, function: str) -> tuple[modal.App, DeploymentTags]:
        """The app and tags of a deployed function. Raises `UnknownFunction` otherwise."""
        app, tags = await self.find(function)
        if app is None or not tags.live:
            known = ", ".join(await self.functions()) or "none"
            raise UnknownFunction(f"no function {function!r} is deployed on Modal", remedy=f"deployed: {known}")
        return app, tags

    def function(self, function: str, number: int, name: str = FUNCTION) -> Any:
        """A `modal.Function` of one deployment, without a request to Modal."""
        return modal_library().Function.from_name(
            self.app(function), name, version=number, client=self.client, environment_name=self.environment or None
        )

    async def functions(self) -> list[str]:
        """The names of the functions that rollart deployed here, sorted."""
        modal = modal_library()
        with translate_errors():
            kind, client = modal.Environment, self.client
            found = (
                kind.from_name(self.environment, client=client)
                if self.environment
                else kind.from_context(client=client)
            )
            ours = [app for app in await found.apps.list.aio() if (app.name or "").startswith(self.prefix)]
            live = [a for a in ours if DeploymentTags.read(await a.get_tags.aio(client=self.client)).live]
        return sorted(str(app.name).removeprefix(self.prefix) for app in live)


def _hex(tag: str) -> str:
    try:
        return base64.urlsafe_b64decode(tag + "=" * (-len(tag) % 4)).hex()
    except (binascii.Error, ValueError):
        return ""


@dataclass(frozen=True, slots=True)
class PinnedFunction:
    """One pinned deployment of a function. `version` is the package's digest."""

    name: str
    number: int
    version: str
    handle: Any
    memory_mb: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class ModalReply:
    """The result of a call: a body or a fault, and the container's own measurements (`worker` '' if there are none)."""

    body: object = None
    fault: InfraFault | None = None
    worker: str = ""
    call: str = ""
    run_s: float = 0.0
    init_s: float = 0.0


async def pin(namespace: ModalNamespace, function: str, number: int, version: str) -> PinnedFunction:
    """Look up one deployment: its handle, memory and time limit."""
    handle = namespace.function(function, number)
    info = await handle.info.aio()
    memory = info.memory_mib
    size = memory[-1] if isinstance(memory, tuple) else memory or 0
    return PinnedFunction(function, number, version, handle, size, float(info.timeout))


def bill(
    target: PinnedFunction, answer: ModalReply | None, t0: float, t1: float, *, limit_s: float, items: int, cause: Cause
) -> Invocation:
    """The bill of a call, of a cancelled one without an answer. `limit_s`: the longest run if no container measured
    it."""
    status = "cancelled" if answer is None else str(answer.fault.kind) if answer.fault else "ok"
    answer = answer or ModalReply()
    run_s = answer.run_s if answer.worker else min(t1 - t0, limit_s)
    return Invocation(
        function=target.name,
        provider=PROVIDER,
        worker=answer.worker,
        t0=t0,
        t1=t1,
        cold_start_s=answer.init_s,
        billed_s=billed_seconds(run_s + answer.init_s),
        memory_mb=target.memory_mb,
        items=items,
        status=status,
        cause=cause,
        provider_id=answer.call,
    )


async def call_pinned(
    target: PinnedFunction, event: Sequence[dict[str, Any]], request: str, *, run: str = ""
) -> ModalReply:
    """One call, limited by its caller's wait. `run`: the id of the run that makes it, if one does.

    Faults are values. Raises `UnknownFunction`, `CredentialsMissing` and `BackendFailed`.
    """
    asked = {
        "id": f"{target.version[:8]}-{request}",
        "name": target.name,
        "version": target.version,
        "memory_mb": target.memory_mb,
        "timeout_s": target.timeout_s,
        "event": list(event),
        **({"run": run} if run else {}),
    }
    try:
        payload = json.dumps(asked).encode()
    except (TypeError, ValueError, RecursionError) as error:
        detail = f"the event has no wire form: {error}"[:500]
        return ModalReply(fault=InfraFault(FaultKind.ENVIRONMENT, retryable=False, detail=detail))
    try:
        given = await (target.handle.remote.aio(payload) if target.timeout_s <= HELD_S else _job(target, payload))
    except modal_library().exception.NotFoundError as error:
        raise UnknownFunction(f"{target.name!r} is gone from Modal: {error}", remedy="deploy it again") from None
    except TimeoutError:
        raise
    except Exception as error:
        return ModalReply(fault=fault_of(error))
    return _read(given, target)


async def _job(target: PinnedFunction, payload: bytes) -> object:
    """The answer of a submitted call. At the deadline and at a cancellation the call is cancelled, while a call under
    `remote` runs to its end or its time limit. Modal ends a call whose caller died at its time limit."""
    job = await target.handle.spawn.aio(payload)

    async def ask() -> tuple[object] | None:
        try:
            return (await job.get.aio(timeout=_POLL_S),)
        except TimeoutError:
            return None

    lost = (modal_library().exception.ConnectionError,)
    (answer,) = await poll_job(ask, job.cancel.aio, lost=lost, pause_s=_POLL_PAUSE_S)
    return answer


def _read(given: object, target: PinnedFunction) -> ModalReply:
    """Validate the container's envelope. Its code may be a policy's, so every part is checked. An envelope of an older
    version of this package does not name its version."""
    try:
        answer = json.loads(given) if isinstance(given, bytes) else None
    except (ValueError, RecursionError):
        answer = None
    envelope = answer if isinstance(answer, dict) else {}
    if not (isinstance(envelope["fault"], dict) if "fault" in envelope else "body" in envelope):
        detail = f"the container's answer is not the handler's: {given!r:.80}"
        return ModalReply(fault=InfraFault(FaultKind.BAD_ANSWER, retryable=False, detail=detail))
    measured = ModalReply(
        worker=str(envelope.get("worker"))[:100],
        call=str(envelope.get("call") or "")[:100],
        run_s=_seconds(envelope.get("run_s")),
        init_s=_seconds(envelope.get("init_s")),
    )
    version = str(envelope.get("version", target.version))
    if version != target.version:
        detail = f"{target.name}: version {target.version[:12]} was called, but {version[:12]} answered"
        return replace(measured, fault=InfraFault(FaultKind.BAD_ANSWER, retryable=True, detail=detail))
    if "fault" not in envelope:
        return replace(measured, body=envelope["body"])
    fault = envelope["fault"]
    kind = str(fault.get("kind"))
    known = FaultKind(kind) if kind in set(FaultKind) else FaultKind.CRASH
    retryable = fault.get("retryable") is True
    return replace(measured, fault=InfraFault(known, retryable=retryable, detail=str(fault.get("detail"))[:500]))


def _seconds(value: object) -> float:
    """A duration claimed by a container: finite and not negative, else 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 1e6:
        return 0.0
    return float(value)
