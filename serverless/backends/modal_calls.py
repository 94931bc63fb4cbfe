"""One call on Modal: a pinned deployment, the payload, and the validated answer of the container.

Payloads and answers are JSON as bytes in CBOR, see `serverless.deploy.modal_entry`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from serverless.backends import modal_client
from serverless.backends.modal_versions import ModalNamespace
from serverless.errors import UnknownFunction
from serverless.types import FaultKind, InfraFault

__all__ = ["ModalReply", "PinnedFunction", "call_pinned", "pin"]

_CANCEL_S = 5.0
"""Maximum seconds that a cancelled call waits for its cancellation to be acknowledged."""


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


async def call_pinned(
    target: PinnedFunction, event: Sequence[dict[str, Any]], request: str, *, cancellable: bool = False
) -> ModalReply:
    """One call, limited by its caller's wait. Faults are values. Raises `UnknownFunction`, `CredentialsMissing` and
    `BackendFailed`."""
    asked = {
        "id": f"{target.version[:8]}-{request}",
        "name": target.name,
        "version": target.version,
        "memory_mb": target.memory_mb,
        "timeout_s": target.timeout_s,
        "event": list(event),
    }
    try:
        payload = json.dumps(asked).encode()
    except (TypeError, ValueError, RecursionError) as error:
        detail = f"the event has no wire form: {error}"[:500]
        return ModalReply(fault=InfraFault(FaultKind.ENVIRONMENT, retryable=False, detail=detail))
    try:
        given = await (_cancellable(target.handle, payload) if cancellable else target.handle.remote.aio(payload))
    except modal_client.modal_library().exception.NotFoundError as error:
        raise UnknownFunction(f"{target.name!r} is gone from Modal: {error}", remedy="deploy it again") from None
    except TimeoutError:
        raise
    except Exception as error:
        return ModalReply(fault=modal_client.fault_of(error))
    return _read(given, target)


async def _cancellable(handle: Any, payload: bytes) -> object:
    """A call that is cancelled on Modal together with its caller, even while it is being submitted."""
    async with asyncio.TaskGroup() as group:
        spawning = group.create_task(_settled(handle.spawn.aio(payload)))
        try:
            call = await asyncio.shield(spawning)
            given = call if isinstance(call, Exception) else await _settled(call.get.aio())
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_CANCEL_S):
                    await (await spawning).cancel.aio()
            raise
    if isinstance(given, Exception):
        raise given
    return given


async def _settled(work: Awaitable[Any]) -> Any:
    """The result or exception as a value: a task group would wrap the exception."""
    try:
        return await work
    except Exception as error:
        return error


def _read(given: object, target: PinnedFunction) -> ModalReply:
    """Validate the container's envelope. Its code may be a policy's, so every part is checked. An envelope of an older
    version of this package does not name its version."""
    answer = _envelope(given)
    if answer is None:
        detail = f"the container's answer is not the handler's: {given!r:.80}"
        return ModalReply(fault=InfraFault(FaultKind.BAD_ANSWER, retryable=False, detail=detail))
    measured = ModalReply(
        worker=str(answer.get("worker"))[:100],
        call=str(answer.get("call") or "")[:100],
        run_s=_seconds(answer.get("run_s")),
        init_s=_seconds(answer.get("init_s")),
    )
    version = str(answer.get("version", target.version))
    if version != target.version:
        detail = f"{target.name}: version {target.version[:12]} was called, but {version[:12]} answered"
        return replace(measured, fault=InfraFault(FaultKind.BAD_ANSWER, retryable=True, detail=detail))
    if "fault" not in answer:
        return replace(measured, body=answer["body"])
    fault = answer["fault"]
    kind = str(fault.get("kind"))
    known = FaultKind(kind) if kind in set(FaultKind) else FaultKind.CRASH
    retryable = fault.get("retryable") is True
    return replace(measured, fault=InfraFault(known, retryable=retryable, detail=str(fault.get("detail"))[:500]))


def _envelope(given: object) -> dict[str, Any] | None:
    try:
        answer = json.loads(given) if isinstance(given, bytes) else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(answer, dict):
        return None
    sound = isinstance(answer["fault"], dict) if "fault" in answer else "body" in answer
    return answer if sound else None


def _seconds(value: object) -> float:
    """A duration claimed by a container: finite and not negative, else 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 1e6:
        return 0.0
    return float(value)
