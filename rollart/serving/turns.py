"""Execution of turns: routing, local or remote prefill, generation, and retries."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping

from rollart.errors import EngineError, ForeignWeights, HandoffFailed, LeaseExpired, WrongAnswer
from rollart.leases import Expiry, Leases
from rollart.model import Completion, FinishReason, GenerateRequest
from rollart.policy.engine_health import wrong_answer
from rollart.policy.routing import RoutingPolicy
from rollart.serving.engine_registry import (
    AttemptFailed,
    EmitEvent,
    EngineRegistry,
    GatewayLimits,
    RegisteredEngine,
    RerouteTurn,
    SessionKv,
    TurnRequest,
)
from rollart.serving.group_colocation import GroupColocation
from rollart.serving.handoff import (
    HandoffCounts,
    HandoffQueue,
    HandoffRevoked,
    HandoffTracker,
    MissingHandoffValue,
    decode_params,
    discard_prefill_kv,
    handoff_obstacle,
    prefill_request,
)
from rollart.serving.kv_admission import ConcurrencySettings, KvAdmission
from rollart.serving.routing import TurnRoute, TurnRouter

MAX_LEASE_RENEWAL = 2.0
"""Longest wait of a prefill in a moving queue, as a multiple of its lease. Measured on the 32B example: at 1 (never
renewed) 3.5 % of the hand-offs fail, at 2 0.4 %, at 3 0.1 %. Without a bound, turns wait for a prefill engine whose
memory is full although their decode engine could prefill them: one such split of a 32B model ran at 0.27 of the
throughput of combined engines (0.90 at 1, 0.89 at 2, 0.83 at 4)."""


class TurnExecutor(TurnRouter):
    """Owns the sessions, the gate and the running turns; `Gateway` reports engine changes to it.

    Any number of trajectories call `generate`; each waits for the gate, an eligible engine and the answers of one or
    two engines, all under leases. Invariant: both legs of a hand-off are sent while the same version is current on both
    engines, and the second only if no update began since the first.
    """

    def __init__(
        self,
        leases: Leases,
        limits: GatewayLimits,
        registry: EngineRegistry,
        router: RoutingPolicy,
        version: int,
        doubt: Callable[[RegisteredEngine, EngineError | LeaseExpired], None],
        emit: EmitEvent,
        concurrency: ConcurrencySettings | None = None,
        colocation: GroupColocation | None = None,
    ) -> None:
        super().__init__(limits, registry, router, version, emit, colocation)
        self._leases = leases
        self.doubt = doubt
        self.changed = asyncio.Event()
        """Set at the next `notify`, which replaces it."""
        self.pulls = HandoffTracker(leases, self.notify)
        self.served = 0
        """Turns generated so far."""
        self.handed = HandoffCounts()
        self.handoffs = None if limits.handoffs == 0 else HandoffQueue(limits.handoffs, limits.slots)
        if concurrency is not None:
            self.admission = KvAdmission(
                concurrency,
                registry,
                leases,
                emit,
                self._assign_waiting,
                self._is_admitted,
                colocation,
                self._follow_group,
            )

    def notify(self) -> None:
        """Wake waiting turns and refresh the routing mode after a change of engines, weights or routes."""
        self._update_mode()
        self.changed.set()
        self.changed = asyncio.Event()
        if self.admission is not None:
            self.admission.pump()

    async def quiet(self, member: RegisteredEngine) -> None:
        """Returns when the draining engine has no running turn and no pending KV fetch, or no longer drains."""
        while member.draining and (member.running or member.lent):
            await self.changed.wait()

    async def generate(self, turn: TurnRequest) -> Completion:
        """See `Gateway.generate`."""
        failures, last = 0, ""
        while failures < self._limits.attempts:
            no_handoff = turn.no_handoff
            try:
                completion = await self._attempt(turn)
                self.served += 1
                return completion
            except AttemptFailed as failed:
                last = str(failed)
                # A failed hand-off is followed by a local prefill, which counts as the first attempt.
                failures += no_handoff == turn.no_handoff
            except RerouteTurn:
                continue
        raise EngineError(f"no engine answered in {self._limits.attempts} attempts: {last}", retryable=True)

    async def _attempt(self, turn: TurnRequest) -> Completion:
        kv, sticky, source = self._route_now(turn) or await self._route(turn)
        self._report_route(turn, sticky, source)
        request = self._request(turn, kv.version)
        before, version, current = turn.spent, kv.version, self.version
        if source is not None:
            params = await self._hand_off(turn, kv, request, source, sticky)
            if params is None:
                turn.no_handoff = True
                kv, sticky, source = await self._route(turn)
                self._report_route(turn, sticky, source)
                version = kv.version
                request = self._request(turn, version)
            else:
                request = dataclasses.replace(request, kv_transfer=params)
        work = 0.0 if not self._special else self._work(turn, kv, sticky, prefill=source is None, decode=True)
        limit = self._limits.generate_s
        completion = None
        if self.admission is not None:
            self.admission.begins(turn, sticky, self._domain_stats.output(turn.domain, turn.sampling.max_tokens))
        try:
            if source is None:
                completion = await self._leg(turn, sticky, request, limit, work, generates=True)
            else:
                async with self.pulls.pull(request, source, sticky):
                    completion = await self._leg(turn, sticky, request, limit, work, generates=True)
        except (EngineError, LeaseExpired) as error:
            wasted, way = turn.spent - before, (kv, sticky, source)
            turn.go_on()
            moved = self.version != current or sticky.version != version or sticky.updating
            raise await self._unanswered(turn, way, request, error, wasted, moved=moved) from None
        finally:
            self._leave_handoff_queue(turn, sticky)
            if self.admission is not None:
                self.admission.ends(kv, turn, sticky, 0 if completion is None else completion.sampled)
        if completion.finish is FinishReason.ABORT and request.request_id in sticky.asked:
            turn.go_on(completion, lent=True)
            raise RerouteTurn
        moved = self.version != current or sticky.version != version or sticky.updating or not self.gate.is_set()
        if completion.finish is FinishReason.ABORT and moved:
            turn.go_on(completion)
            raise RerouteTurn  # a weight update ended it: generate it again from its history
        if self.lag and kv.begun is None and completion.spans:
            kv.begun = completion.spans[0].version
        if source is not None:
            source.breaker.succeeded()
            self.handed.ended(pulled=completion.cached_tokens - kv.cached.get(sticky.engine.id, 0))
        if self._special:
            self._generated(turn, kv, sticky, completion, source is not None)
        return completion if turn.kept is None else turn.whole(completion)

    async def _unanswered(
        self,
        turn: TurnRequest,
        way: TurnRoute,
        request: GenerateRequest,
        error: EngineError | LeaseExpired,
        wasted: float,
        *,
        moved: bool,
    ) -> Exception:
        """The error to raise for a failed decode leg. `moved`: the weights changed since the turn was routed."""
        kv, sticky, source = way
        if isinstance(error, HandoffFailed):
            if source is None:
                return EngineError(f"{sticky.engine.id} was sent no KV: {error}", retryable=False)
            again = moved or isinstance(error, HandoffRevoked)
            if not again:
                self._handoff_failed(turn, source, sticky, error, wasted)
                turn.no_handoff = True
            await self._drop(source, request)
            return RerouteTurn() if again else AttemptFailed(str(error))
        retryable = not isinstance(error, EngineError) or error.retryable
        if retryable:
            self._leave_sticky(turn, kv, sticky)
            if isinstance(error, WrongAnswer):
                self._answered_wrongly(turn, sticky, error)
            else:
                self.doubt(sticky, error)
            turn.no_handoff = turn.no_handoff or source is not None
        if source is not None:
            await self._drop(source, request)
        if not retryable:
            return error
        if sticky.draining:  # the engine was drained during a long turn
            return RerouteTurn()
        return AttemptFailed(error.cause if isinstance(error, LeaseExpired) else str(error))

    def _answered_wrongly(self, turn: TurnRequest, sticky: RegisteredEngine, error: WrongAnswer) -> None:
        """Send the turn to another engine. This engine continues, or is restarted: after several wrong answers, or at
        once if its weights are not the published weights."""
        turn.avoided.add(sticky.engine.id)
        self._emit("wrong_answer", sticky.engine.id, request=turn.id, what=error.message)
        if (sticky.trust.failed() or isinstance(error, ForeignWeights)) and sticky.healthy:
            sticky.condemned = f"its answers cannot be used: {error.message}"
            self.doubt(sticky, error)

    async def _hand_off(
        self,
        turn: TurnRequest,
        kv: SessionKv,
        request: GenerateRequest,
        source: RegisteredEngine,
        sticky: RegisteredEngine,
    ) -> Mapping[str, object] | None:
        """Run the prefill leg once the decode engine's hand-off queue has a slot, which is held until the decode leg
        begins."""
        queue = self.handoffs
        if queue is None:
            return await self._prefill(turn, kv, request, source, sticky)
        if queue.full(sticky):
            version = kv.version
            try:
                waiting_for = f"its hand-off to {sticky.engine.id}"
                async with self._leases.hold(turn.session, waiting_for, self._limits.generate_s, Expiry.RETRY):
                    await queue.enter(sticky)
            except LeaseExpired:
                return None
            if (
                kv.version != version
                or kv.sticky != sticky.engine.id
                or self.fenced(version, source, sticky) is not None
            ):
                queue.leave(sticky)
                raise RerouteTurn
        else:
            await queue.enter(sticky)
        turn.holds_handoff_slot = True
        began, params = asyncio.get_running_loop().time(), None
        try:
            params = await self._prefill(turn, kv, request, source, sticky)
        finally:
            if params is None:
                self._leave_handoff_queue(turn, sticky)
            else:
                queue.prefilled(sticky, asyncio.get_running_loop().time() - began)
        return params

    def _leave_handoff_queue(self, turn: TurnRequest, sticky: RegisteredEngine) -> None:
        """Free the turn's slot in the hand-off queue: the decode engine has the turn, or the turn was given up."""
        if turn.holds_handoff_slot and self.handoffs is not None:
            turn.holds_handoff_slot = False
            self.handoffs.leave(sticky)

    async def _prefill(
        self,
        turn: TurnRequest,
        kv: SessionKv,
        request: GenerateRequest,
        source: RegisteredEngine,
        sticky: RegisteredEngine,
    ) -> Mapping[str, object] | None:
        """The prefill leg: the transfer parameters for the decode engine; None if that engine must prefill itself.
        `RerouteTurn` if the turn is to be routed again."""
        version, before = kv.version, turn.spent
        work = self._work(turn, kv, source, prefill=True, decode=False)
        # A queue that the router accepted is no failure, nor is work as long as predicted. If the queue moves more
        # slowly than predicted, each answer renews the leases of the waiting prefills.
        waiting = source.backlog_s(asyncio.get_running_loop().time(), self._limits.slots)
        limit = self._limits.handoff_s + waiting + work
        if kv.sticky is not None and not self._holds(sticky, turn.session, kv.cached.get(kv.sticky, 0)):
            kv.returned = None  # the sticky engine had to evict it
        ask = prefill_request(request, kv.returned, last=turn.last)
        kv.returned = None  # the value can be used once
        self._assign_prefill(turn.session, kv, source)
        if self.admission is not None:
            source.kv.begin(turn.session, turn.length)
        try:
            async with self.pulls.leg(ask, source, prefills=True):
                answer = await self._leg(turn, source, ask, limit, work, generates=False)
            params = decode_params(answer, source.engine.id, last=turn.last)
        except HandoffRevoked:
            await self._drop(source, request)
            raise RerouteTurn from None
        except (EngineError, LeaseExpired) as error:
            self._handoff_failed(turn, source, sticky, error, turn.spent - before)
            if isinstance(error, ForeignWeights):
                self._answered_wrongly(turn, source, error)
            elif isinstance(error, LeaseExpired) or (error.retryable and not isinstance(error, HandoffFailed)):
                self.doubt(source, error)
            return None
        finally:
            source.kv.end(turn.session, turn.length)
        why = self.fenced(version, source, sticky)
        if why is None or (isinstance(why, HandoffRevoked) and source.version == version):
            kv.cached[source.engine.id] = 0 if turn.last else turn.length
        if why is None:
            return params
        if not isinstance(why, HandoffRevoked):
            self._handoff_failed(turn, source, sticky, why, turn.spent - before)
        await self._drop(source, request)
        if isinstance(why, HandoffRevoked):
            raise RerouteTurn
        return None

    def fenced(self, version: int, source: RegisteredEngine, sticky: RegisteredEngine) -> HandoffFailed | None:
        """The reason why KV that `source` computed under `version` may not go to `sticky` now; None if it may."""
        if (not self.lag and self.version != version) or not self.gate.is_set():
            return HandoffRevoked("the weights change")
        return handoff_obstacle(version, source, sticky, self.registry.members)

    async def _drop(self, source: RegisteredEngine, request: GenerateRequest) -> None:
        """Discard the KV that `source` keeps for this request."""
        if source.healthy:
            await discard_prefill_kv(source, request.request_id, self._leases, self._limits.handoff_s)

    async def _leg(
        self,
        turn: TurnRequest,
        member: RegisteredEngine,
        request: GenerateRequest,
        seconds: float,
        work: float,
        *,
        generates: bool,
    ) -> Completion:
        """Send one request to one engine. Its engine time is charged whether it succeeds or fails."""
        member.running += 1
        if generates:
            self._leave_handoff_queue(turn, member)
        if work:
            member.expect(work, asyncio.get_running_loop().time())
        if generates and member.running <= self._limits.slots:
            turn.begins(member.version)
        member.shares.begin(request.request_id)
        what, oldest = "generation" if generates else "prefill", member.version
        try:
            with self._leases.hold(turn.session, f"{what} on {member.engine.id}", seconds, Expiry.RETRY) as lease:
                if not generates:
                    member.prefilling[request.request_id] = lease
                answer = await member.engine.generate(request)
            if not generates:  # the queue moves: leases are for an engine that makes no progress
                for other in member.prefilling.values():
                    other.renew(MAX_LEASE_RENEWAL * other.seconds)
            else:
                versions = oldest, max(self.version, member.version)
                wrong = wrong_answer(answer, request.sampling, vocab=self._limits.vocab, versions=versions)
                if wrong:
                    raise WrongAnswer(f"{member.engine.id}: {wrong}")
                member.trust.right()
            return answer
        finally:
            member.prefilling.pop(request.request_id, None)
            member.running -= 1
            if work or member.work_s:  # also if 0: the last request removes the remaining rounding error
                member.done(work, asyncio.get_running_loop().time())
            spent = member.shares.end(request.request_id)
            turn.spent += spent
            turn.spend(spent)
            if generates and self.handoffs is not None:
                self.handoffs.ended(member)
            if member.draining and not member.running:
                self.notify()

    async def _route(self, turn: TurnRequest) -> TurnRoute:
        """The route of the turn; waits for the gate and for an eligible engine."""
        while True:
            if self.admission is not None:
                known = self.sessions.get(turn.session)
                turn.begun = known is not None and known.tokens > 0
                await self.admission.enter(turn)
            found = self._route_now(turn)
            if found is not None:
                return found
            changed = self.changed
            async with self._leases.hold(turn.session, "an engine", self._limits.engine_s, Expiry.GAP_FILL):
                await changed.wait()

    def _generated(
        self, turn: TurnRequest, kv: SessionKv, sticky: RegisteredEngine, completion: Completion, remote: bool
    ) -> None:
        """Record the KV that the engines hold. KV computed before a later update is useless."""
        version = sticky.version if self.lag else self.version
        if kv.version != version:
            kv.expire(version)
        kv.was_remote = remote
        if sticky.keeps and completion.spans and completion.spans[-1].version == version:
            kv.cached[sticky.engine.id] = turn.length + max(completion.sampled - 1, 0)
            kv.returned = completion.kv_transfer
        self._domain_stats.answered(turn.domain, completion.sampled)

    def _request(self, turn: TurnRequest, version: int) -> GenerateRequest:
        turn.sends += 1
        on_chunk = None if turn.listener is None else turn.receive
        return GenerateRequest(
            f"{turn.id}-{turn.sends}",
            turn.session,
            turn.token_ids,
            turn.sampling,
            cache_salt=f"v{version}",
            on_chunk=on_chunk,
            experts_from=turn.experts_from,
            adapter=turn.adapter,
        )

    def _handoff_failed(
        self,
        turn: TurnRequest,
        source: RegisteredEngine,
        sticky: RegisteredEngine,
        error: EngineError | LeaseExpired,
        wasted: float,
    ) -> None:
        cause = error.cause if isinstance(error, LeaseExpired) else str(error)
        self._emit(
            "handoff_failed",
            turn.session,
            prefill=source.engine.id,
            decode=sticky.engine.id,
            cause=cause,
            wasted_s=round(wasted, 6),
        )
        self.handed.failed += 1
        now = asyncio.get_running_loop().time()
        seconds = source.breaker.failed(now, hopeless=isinstance(error, MissingHandoffValue))
        if seconds is not None:
            failures = source.breaker.failures
            self._emit("prefill_barred", source.engine.id, cause=cause, in_a_row=failures, seconds=seconds)
