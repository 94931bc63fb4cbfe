"""Prefill on one engine and decode on another: the two legs of a hand-off, and the guard of their common version.

vLLM's protocol (NIXL pull, `kv_transfer_params`): the prefill engine generates one token and returns an opaque value.
The value is sent verbatim to the decode engine with the original request. The decode engine pulls the KV, generates the
first token anew and may return such a value itself, for the prefill engine of the next turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping

from rollart.errors import EngineError, HandoffFailed, LeaseExpired
from rollart.model import Completion, GenerateRequest
from rollart.policy.lease import Expiry
from rollart.runtime.leases import Leases
from rollart.runtime.members import RegisteredEngine

__all__ = [
    "SESSION_ENDS_KEY",
    "WEIGHT_VERSION_KEY",
    "MissingHandoffValue",
    "HandoffTracker",
    "HandoffRevoked",
    "decode_params",
    "discard_prefill_kv",
    "prefill_params",
    "prefill_request",
    "handoff_obstacle",
]

WEIGHT_VERSION_KEY = "weight_version"
"""A hand-off value with this key names the weight version of its KV, which the decode engine checks itself. Values of
vLLM lack it."""


SESSION_ENDS_KEY = "session_ends"
"""Parameter of a prefill leg that no turn follows: its engine keeps only the KV that is handed over."""


class HandoffRevoked(HandoffFailed):
    """The hand-off did not fail, but the weights change or an engine drains: the turn is routed again."""


class MissingHandoffValue(HandoffFailed):
    """The prefill engine answered without a hand-off value."""


def prefill_params(returned: Mapping[str, object] | None, *, last: bool = False) -> dict[str, object]:
    """Parameters of a prefill leg: keep the KV for a decode engine, and fetch the KV that this engine returned. After
    the hand-over of the `last` turn the prefill engine may free it (vLLM's blocks are free then in any case)."""
    params = {"do_remote_prefill": False, **(returned or {}), "do_remote_decode": True}
    return {**params, SESSION_ENDS_KEY: True} if last else params


def prefill_id(request_id: str) -> str:
    """The id of a request's prefill leg, under which the KV is kept."""
    return f"{request_id}-p"


def prefill_request(
    request: GenerateRequest, returned: Mapping[str, object] | None, *, last: bool = False
) -> GenerateRequest:
    """The prefill leg of a request: one unused token. It has its own id, because both legs may appear in one log."""
    return dataclasses.replace(
        request,
        request_id=prefill_id(request.request_id),
        sampling=dataclasses.replace(request.sampling, max_tokens=1),
        kv_transfer=prefill_params(returned, last=last),
        on_chunk=None,
    )


def decode_params(answer: Completion, engine: str, *, last: bool = False) -> Mapping[str, object]:
    """Parameters of the decode engine's pull; after the `last` turn it returns no KV. `HandoffFailed` if the prefill
    engine kept no KV."""
    if not answer.kv_transfer:
        raise MissingHandoffValue(
            f"{engine} prefilled but handed no KV over", remedy="does it run with a KV connector?"
        )
    return {**answer.kv_transfer, "return_kv": False} if last else answer.kv_transfer


class HandoffTracker:
    """The legs of hand-offs that a weight update would invalidate. The update revokes them before it begins.

    A decode leg may still be pulling: an engine that loads new weights in the middle of a pull would decode on KV of
    the old ones, without an error (measured on vLLM 0.32). The end of a pull is not reported: the request may wait in
    the engine for any time before it begins. So every unanswered decode leg is revoked, except legs whose hand-off
    value names its version, which their engines compare. The KV of a running prefill leg would be of the old weights in
    any case. The turns are routed and generated again on the new weights.
    """

    def __init__(self, leases: Leases, returned: Callable[[], None]) -> None:
        self._leases = leases
        self._returned = returned
        """Called when the last KV fetch from a draining engine has ended."""
        self._open: dict[str, tuple[asyncio.Timeout, frozenset[str]]] = {}
        """Open legs, and the engines involved in each."""
        self._taken: set[str] = set()
        self._settled = asyncio.Event()

    @contextlib.asynccontextmanager
    async def pull(
        self, request: GenerateRequest, source: RegisteredEngine, home: RegisteredEngine
    ) -> AsyncIterator[None]:
        """The body is the decode leg. Until it ends, the decode engine may fetch the KV from `source`, which must not
        leave."""
        source.lent += 1
        try:
            async with self.leg(request, source, home, prefills=False):
                yield
        finally:
            source.lent -= 1
            if source.draining and not source.lent:
                self._returned()

    @contextlib.asynccontextmanager
    async def leg(self, request: GenerateRequest, *members: RegisteredEngine, prefills: bool) -> AsyncIterator[None]:
        """The body is a leg of a hand-off. An update that revokes the leg raises `HandoffRevoked` in it."""
        if not prefills and WEIGHT_VERSION_KEY in (request.kv_transfer or {}):
            yield
            return
        scope = asyncio.timeout(None)
        self._open[request.request_id] = scope, frozenset(m.engine.id for m in members)
        try:
            async with scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise HandoffRevoked("the weights change") from None
        finally:
            del self._open[request.request_id]
            self._taken.discard(request.request_id)
            if not self._taken:
                self._settled.set()

    async def take_back(self, seconds: float, engine: str | None = None) -> int:
        """Before a weight update of one engine or of all: revoke their legs and wait for the engines to release them,
        at most `seconds`. Returns the number of legs."""
        now = asyncio.get_running_loop().time()
        mine = [r for r, (_, engines) in self._open.items() if engine is None or engine in engines]
        for request_id in mine:
            if request_id not in self._taken:  # by the update of the leg's other engine
                self._taken.add(request_id)
                self._open[request_id][0].reschedule(now)
        count = len(self._taken) if engine is None else len(mine)
        if not count:
            return 0
        self._settled.clear()
        # An engine that does not release a leg hangs: the update itself detects that.
        with contextlib.suppress(LeaseExpired):
            async with self._leases.hold("publish", "hand-offs to end", seconds, Expiry.RESTART_PART):
                await self._settled.wait()
        return count


def handoff_obstacle(
    version: int, source: RegisteredEngine, home: RegisteredEngine, known: Mapping[str, RegisteredEngine]
) -> HandoffFailed | None:
    """The reason why KV that `source` computed under `version` may not go to `home` now; None if it may."""
    for member in (source, home):
        name = member.engine.id
        if known.get(name) is not member or not member.healthy:
            return HandoffFailed(f"{name} is gone")
        if member.updating:
            return HandoffRevoked("the weights change")
        if member.version != version:
            return HandoffFailed(f"{name} has v{member.version}")
        if member.draining:
            return HandoffRevoked(f"{name} drains")
    return None


async def discard_prefill_kv(member: RegisteredEngine, request_id: str, leases: Leases, seconds: float) -> None:
    """Let the engine drop the unused KV of this request's prefill leg. If this fails, the engine's own lease drops
    it."""
    request_id = prefill_id(request_id)
    with contextlib.suppress(EngineError, LeaseExpired):
        async with leases.hold(request_id, f"its KV to be dropped by {member.engine.id}", seconds, Expiry.RETRY):
            await member.engine.abort([request_id])
