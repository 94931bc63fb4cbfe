"""The Modal client of this package: opened with credentials, with unpickling disabled and errors translated.

Modal's client loads an answer in whatever format the container names, so a container that runs a policy's code could
execute code in this process. `deserialize` of `modal._serialization` would unpickle such an answer, and also the
exception of a container that failed to start. While a client of this package is open, that module's unpickler is
replaced by a refusing one (process-wide: no data from a container may be unpickled), and answers are requested as
CBOR. This is the only module that touches Modal's private interface. The replacement is checked at every opening, and a
client that would load a pickle is not opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import pickle
import re
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from serverless.errors import BackendFailed, CredentialsMissing, ExtraMissing
from serverless.types import FaultKind, InfraFault, Throttle

if TYPE_CHECKING:
    import modal

__all__ = ["PickleRefused", "fault_of", "modal_library", "open_client", "translate_errors"]

_CONNECT_S = 20.0
"""Seconds to connect. Modal's client tries for a minute; a command that cannot connect must report it sooner."""

_CLOSE_S = 5.0

_SETTINGS = {"MODAL_PAYLOAD_FORMAT": "cbor", "MODAL_MAX_THROTTLE_WAIT": "0"}
"""The second setting leaves throttled requests to this package's retries instead of a wait inside the client."""

_REMEDY = "set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET, or run `modal token new`"

_BILLING = re.compile(r"billing|budget|spend|payment|credit", re.IGNORECASE)
"""A workspace without credit also answers RESOURCE_EXHAUSTED, but retries do not help."""

_MEMORY = re.compile(r"out of memory|\boom\b|memory limit|exit(?:ed with)? code:? 137", re.IGNORECASE)

_STOPPED = re.compile(r"stopped|terminated|preempt", re.IGNORECASE)


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
    with _no_pickles():
        client = await _client()
        try:
            yield client
        finally:
            await _close(client)


async def _client() -> Any:
    modal = modal_library()
    client = None
    try:
        with translate_errors():
            async with asyncio.timeout(_CONNECT_S):
                client = await _connect(modal)
                await client.hello.aio()
        return client
    except TimeoutError:
        await _close(client)
        raise BackendFailed(
            f"Modal does not answer within {_CONNECT_S:g} s", remedy="check the network and MODAL_SERVER_URL"
        ) from None
    except BaseException:
        await _close(client)
        raise


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
    modal = modal_library()
    kinds = modal.exception
    text = _text(error)
    detail = f"{type(error).__name__}: {text}"[:500]
    if isinstance(error, kinds.AuthError | kinds.PermissionDeniedError):
        raise CredentialsMissing(f"Modal refuses: {text}", remedy=_REMEDY) from None
    if isinstance(error, kinds.ClientClosed):
        raise BackendFailed("the modal backend is closed") from None
    if isinstance(error, kinds.FunctionTimeoutError):
        return InfraFault(FaultKind.TIMEOUT, retryable=True, detail=detail)
    if isinstance(error, kinds.ResourceExhaustedError):
        return _throttled(text, detail)
    if _find_pickle_refusal(error) or isinstance(error, kinds.ExecutionError | kinds.DeserializationError):
        return _unreadable(error, text)
    if isinstance(error, kinds.InternalFailure | kinds.RemoteError):
        return _ended(text, detail, lost=isinstance(error, kinds.InternalFailure))
    if isinstance(error, kinds.ConflictError):
        return InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail=detail)
    if isinstance(error, kinds.InvalidError | kinds.RequestSizeError | kinds.SerializationError):
        return InfraFault(FaultKind.ENVIRONMENT, retryable=False, detail=detail)
    if isinstance(error, kinds.ConnectionError | kinds.ServiceError | kinds.InternalError | OSError):
        return InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail=detail)
    if isinstance(error, kinds.Error):
        return InfraFault(FaultKind.UNAVAILABLE, retryable=False, detail=detail)
    raise error


def _throttled(text: str, detail: str) -> InfraFault:
    if _BILLING.search(text):
        return InfraFault(FaultKind.THROTTLED, retryable=False, detail=detail, throttle=Throttle.RESERVED)
    return InfraFault(FaultKind.THROTTLED, retryable=True, detail=detail, throttle=Throttle.RATE)


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


async def _close(client: Any) -> None:
    if client is not None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await client.close.aio()


class _OpenClients:
    """The number of open clients, and the unpickler to restore after the last."""

    depth = 0
    before: tuple[Any, dict[str, str | None]] | None = None


class _RefusingUnpickler:
    """Replaces `modal._serialization.Unpickler`."""

    def __init__(self, client: object, buffer: object) -> None:
        pass

    def load(self) -> Any:
        raise PickleRefused("pickles are not loaded")


@contextlib.contextmanager
def _no_pickles() -> Iterator[None]:
    if _OpenClients.depth == 0:
        _install()
    _OpenClients.depth += 1
    try:
        yield
    finally:
        _OpenClients.depth -= 1
        if _OpenClients.depth == 0:
            _uninstall()


def _install() -> None:
    version = getattr(modal_library(), "__version__", "?")
    failed = BackendFailed(
        f"modal {version} cannot be kept from loading pickles of containers", remedy="pip install 'modal~=1.6.4'"
    )
    try:
        inside: Any = importlib.import_module("modal._serialization")
        _OpenClients.before = (inside.Unpickler, {name: os.environ.get(name) for name in _SETTINGS})
        inside.Unpickler = _RefusingUnpickler
    except (ImportError, AttributeError):
        raise failed from None
    os.environ.update(_SETTINGS)
    try:
        inside.deserialize(pickle.dumps("a harmless one"), None)
    except Exception as error:
        if _find_pickle_refusal(error):
            return
    _uninstall()
    raise failed


def _uninstall() -> None:
    inside: Any = importlib.import_module("modal._serialization")
    assert _OpenClients.before is not None
    inside.Unpickler, settings = _OpenClients.before
    for name, value in settings.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
