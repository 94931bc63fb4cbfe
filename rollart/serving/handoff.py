"""Prefill on one engine and decode on another: the two legs of a hand-off, and the guard of their common version.

vLLM's protocol (NIXL pull, `kv_transfer_params`): the prefill engine generates one token and returns an opaque value.
The value is sent verbatim to the decode engine with the original request. The decode engine pulls the KV, generates the
first token anew and may return such a value itself, for the prefill engine of the next turn.

Each decode engine has a hand-off queue that bounds the prefills ahead of its free slots; its depth follows the
look-ahead rule of `policy.pipeline`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from rollart.errors import EngineError, HandoffFailed, LeaseExpired
from rollart.leases import Expiry, Leases
from rollart.ledger.events import HANDOFFS
from rollart.model import Completion, EngineId, GenerateRequest
from rollart.policy.pipeline import in_flight, mean_and_jitter
from rollart.serving.engine_registry import RegisteredEngine

WEIGHT_VERSION_KEY = "weight_version"
"""A hand-off value with this key names the weight version of its KV, which the decode engine checks itself. Values of
vLLM lack it."""


SESSION_ENDS_KEY = "session_ends"
"""Parameter of a prefill leg that no turn follows: its engine keeps only the KV that is handed over."""


class HandoffRevoked(HandoffFailed):
    """The hand-off did not fail, but the weights change or an engine drains: the turn is routed again."""


class MissingHandoffValue(HandoffFailed):
    """The prefill engine answered without a hand-off value."""


def prefill_id(request_id: str) -> str:
    """The id of a request's prefill leg, under which the KV is kept."""
    return f"{request_id}-p"


def prefill_request(
    request: GenerateRequest, returned: Mapping[str, object] | None, *, last: bool = False
) -> GenerateRequest:
    """The prefill leg of a request: one unused token. It has its own id, because both legs may appear in one log.

    Its engine keeps the KV for a decode engine, and fetches the KV that it returned. After the hand-over of the `last`
    turn it may free it (vLLM's blocks are free then in any case)."""
    params = {"do_remote_prefill": False, **(returned or {}), "do_remote_decode": True}
    if last:
        params[SESSION_ENDS_KEY] = True
    return dataclasses.replace(
        request,
        request_id=prefill_id(request.request_id),
        sampling=dataclasses.replace(request.sampling, max_tokens=1),
        kv_transfer=params,
        on_chunk=None,
        experts_from=None,
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
        self.unfetched: dict[str, tuple[asyncio.Timeout, frozenset[str]]] = {}
        """Open legs, and the engines involved in each."""
        self._taken: set[str] = set()
        self._settled = asyncio.Event()

    @contextlib.asynccontextmanager
    async def pull(
        self, request: GenerateRequest, source: RegisteredEngine, sticky: RegisteredEngine
    ) -> AsyncIterator[None]:
        """The body is the decode leg. Until it ends, the decode engine may fetch the KV from `source`, which must not
        leave."""
        source.lent += 1
        try:
            async with self.leg(request, source, sticky, prefills=False):
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
        self.unfetched[request.request_id] = scope, frozenset(m.engine.id for m in members)
        try:
            async with scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise HandoffRevoked("the weights change") from None
        finally:
            del self.unfetched[request.request_id]
            self._taken.discard(request.request_id)
            if not self._taken:
                self._settled.set()

    async def take_back(self, seconds: float, engine: str | None = None) -> int:
        """Before a weight update of one engine or of all: revoke their legs and wait for the engines to release them,
        at most `seconds`. Returns the number of legs."""
        now = asyncio.get_running_loop().time()
        mine = [r for r, (_, engines) in self.unfetched.items() if engine is None or engine in engines]
        for request_id in mine:
            if request_id not in self._taken:  # by the update of the leg's other engine
                self._taken.add(request_id)
                self.unfetched[request_id][0].reschedule(now)
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
    version: int, source: RegisteredEngine, sticky: RegisteredEngine, known: Mapping[str, RegisteredEngine]
) -> HandoffFailed | None:
    """The reason why KV that `source` computed under `version` may not go to `sticky` now; None if it may."""
    for member in (source, sticky):
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


EMPTY_HANDOFFS = "handoffs_pull_nothing"
"""Event, once: prefill engines work, and no decode engine pulled a token of the KV that they computed."""

UNUSED_PREFILL = "prefill_unused"
"""Event, once: prefill engines serve, and the router gave them no turn."""

ENOUGH = 20
"""Hand-offs without any pulled KV before `EMPTY_HANDOFFS` is emitted."""

MANY = 200
"""Turns prefilled on their decode engine before `UNUSED_PREFILL` is emitted."""

MOST_HANDED = 64
"""Most hand-offs that the rule queues for one engine: each keeps the KV of its context on a prefill engine
meanwhile."""

FIRST = 2
"""Depth before the first measurement: one hand-off in transfer, one waiting."""

SEEN = 64
"""Window of the rule, in prefills and ends of turns: enough for a 90th percentile, few enough to follow a change."""


@dataclass(slots=True)
class HandoffDepth:
    """The hand-off depth of one decode engine: `fixed`, or computed from measurements (None).

    The engine admits a turn when another turn ends, so `admit_s` is the mean time between two ends. The round trip is
    the duration of a remote prefill, with its 90th percentile as jitter. A depth n that is too small corrects itself:
    the engine then ends n turns in the time of one prefill, and the rule yields n + 1.
    """

    fixed: int | None = None
    prefills_s: deque[float] = field(default_factory=lambda: deque(maxlen=SEEN))
    """Remote prefills: seconds from the request to its answer."""
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=SEEN))
    ended_at: float | None = None

    def ended(self, now: float, *, idle: bool) -> None:
        """A turn left the engine. `idle`: no turn runs there any more, and the time until the next start is not counted
        as a gap."""
        if self.ended_at is not None:
            self.gaps_s.append(now - self.ended_at)
        self.ended_at = None if idle else now

    def depth(self) -> int:
        """Hand-offs that may be queued or in transfer, between 1 and `MOST_HANDED`."""
        if self.fixed is not None:
            return self.fixed
        if not self.prefills_s or not self.gaps_s:
            return FIRST
        mean, jitter = mean_and_jitter(self.prefills_s)
        admit_s = math.fsum(self.gaps_s) / len(self.gaps_s)
        return in_flight(admit_s, mean / 2, jitter_s=jitter / 2, most=MOST_HANDED)


@dataclass(slots=True)
class HandoffCounts:
    """Outcomes of hand-offs since the last `report`, and in total."""

    decoded: int = 0
    failed: int = 0
    empty: int = 0
    decoded_ever: int = 0
    pulled: bool = False
    reported: bool = False

    def ended(self, *, pulled: int) -> None:
        """A turn was decoded with `pulled` tokens of KV from its prefill engine."""
        self.decoded += 1
        self.decoded_ever += 1
        self.empty += pulled <= 0
        self.pulled = self.pulled or pulled > 0

    def report(self, version: int, emit: Callable[..., None], routes: Mapping[str, int]) -> None:
        """Emit the events of a publish. `routes` counts routed turns by reason (`policy.routing.TurnPath.why`). Nothing
        is emitted where no KV was handed over and no prefill engine was idle."""
        if self.decoded or self.failed:
            emit(HANDOFFS, f"v{version}", decoded=self.decoded, failed=self.failed, empty=self.empty)
        if self.decoded_ever >= ENOUGH and not self.pulled and not self.reported:
            self.reported = True
            emit(
                EMPTY_HANDOFFS,
                f"v{version}",
                count=self.decoded_ever,
                remedy="see the KV connector in the engines' logs, or use engines.count in place of engines.prefill "
                "and engines.decode",
            )
        local = routes.get("local", 0)
        if local >= MANY and not routes.get("remote") and not self.reported:
            self.reported = True
            emit(
                UNUSED_PREFILL,
                f"v{version}",
                count=local,
                remedy="use engines.count in place of engines.prefill and engines.decode, or another placement.router",
            )
        self.decoded = self.failed = self.empty = 0


@dataclass(slots=True)
class _Queue:
    member: RegisteredEngine
    depth: HandoffDepth
    open: int = 0
    """Hand-offs whose KV is being computed, or waits for the decode leg."""
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class HandoffQueue:
    """Owns the slots of the queue. `enter` waits for a slot in the order of arrival, unblocked by hand-offs that end
    their prefill and by turns that leave the decode engine. Invariant: a hand-off is admitted while fewer than the
    depth are open beyond the engine's free slots, counting turns that wait there for a slot: the bound never idles the
    engine.

    Without the bound every turn routed to the engine is prefilled at once, and its KV occupies prefill engines for as
    long as the decode engine is busy.
    """

    def __init__(self, fixed: int | None, slots: int) -> None:
        """`fixed`: see `HandoffDepth`. `slots`: turns that an engine generates at a time."""
        self.fixed_depth = fixed
        self.slots = slots
        self.queues: dict[EngineId, _Queue] = {}

    def full(self, member: RegisteredEngine) -> bool:
        """True if the next hand-off must wait."""
        queue = self._queue(member)
        queue.member = member  # a returning engine is a new object
        return bool(queue.waiting) or not self.room(queue)

    async def enter(self, member: RegisteredEngine) -> None:
        """Take a slot; `leave` frees it."""
        queue = self._queue(member)
        if not self.full(member):
            queue.open += 1
            return
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.waiting.append(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled():
                queue.open -= 1
            else:
                with contextlib.suppress(ValueError):  # `_pump` removed it already, in this iteration of the loop
                    queue.waiting.remove(slot)
            self._pump(queue)
            raise

    def prefilled(self, member: RegisteredEngine, seconds: float) -> None:
        """Record the duration of a prefill for this engine."""
        self._queue(member).depth.prefills_s.append(seconds)

    def leave(self, member: RegisteredEngine) -> None:
        """Free the slot of a hand-off that reached the decode engine, or failed."""
        queue = self._queue(member)
        queue.open -= 1
        self._pump(queue)

    def ended(self, member: RegisteredEngine) -> None:
        """Record that a turn left the engine, and admit waiting hand-offs."""
        queue = self.queues.get(member.engine.id)
        if queue is not None:
            queue.depth.ended(asyncio.get_running_loop().time(), idle=not member.running)
            self._pump(queue)

    def room(self, queue: _Queue) -> bool:
        return queue.open + queue.member.running - self.slots < queue.depth.depth()

    def _pump(self, queue: _Queue) -> None:
        while queue.waiting and self.room(queue):
            slot = queue.waiting.popleft()
            if not slot.done():
                slot.set_result(None)
                queue.open += 1

    def _queue(self, member: RegisteredEngine) -> _Queue:
        queue = self.queues.get(member.engine.id)
        if queue is None:
            queue = self.queues[member.engine.id] = _Queue(member, HandoffDepth(self.fixed_depth))
        return queue
