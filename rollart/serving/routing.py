"""Routing of turns: session state, and the choice of engines for each turn. Synchronous."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

from rollart.fleet import EngineRole, Routes
from rollart.policy.routing import EngineView, RoutingPolicy, TurnPath, TurnView, choose_engine, route
from rollart.serving.engine_registry import (
    DomainRoutingStats,
    EmitEvent,
    EngineRegistry,
    GatewayLimits,
    RegisteredEngine,
    SessionKv,
    TurnRequest,
)
from rollart.serving.group_colocation import GroupColocation
from rollart.serving.kv_admission import KvAdmission

LEAST_LOADED, STICKY, WITH_GROUP = "least loaded", "its KV is there", "its group is there"
"""Reasons for routes where prices and affinities decide nothing."""

TurnRoute = tuple[SessionKv, RegisteredEngine, RegisteredEngine | None]
"""The session's KV state, the decode engine, and the prefill engine if it is a different one."""


class TurnRouter:
    """Owns the sessions and the router. Every change takes effect between two awaits."""

    def __init__(
        self,
        limits: GatewayLimits,
        registry: EngineRegistry,
        router: RoutingPolicy,
        version: int,
        emit: EmitEvent,
        colocation: GroupColocation | None = None,
    ) -> None:
        self._limits = limits
        self.registry = registry
        self.router = router
        self._special = False
        """True if routing needs more than load and version."""
        self.version = version
        self.lag = 0
        """The number of versions that a serving engine may lag; 0 while no engine lags."""
        self._emit = emit
        self.sessions: dict[str, SessionKv] = {}
        self._domain_stats = DomainRoutingStats(emit)
        self.gate = asyncio.Event()
        self.gate.set()
        self.admission: KvAdmission | None = None
        self.colocation = colocation
        self.paths: dict[str, int] = {}
        """Turns by routing reason; empty while load alone decides."""

    def follow(self, routes: Routes) -> None:
        """Apply routes from the next turn on. Trajectories keep their sticky engines. If the shares change, earlier
        assignments no longer count."""
        before = self.router.routes
        self.router = dataclasses.replace(self.router, routes=routes)
        self._update_mode()
        if routes.shares != before.shares:
            self._domain_stats.pool_counts.clear()

    def evict_sessions(self, member: RegisteredEngine) -> None:
        """Evict the engine's sessions: they lose their sticky engine and its KV."""
        for session in member.sessions:
            kv = self.sessions[session]
            kv.sticky = kv.returned = None
        member.sessions.clear()
        member.prefill_sessions.clear()
        member.kv.clear()
        if self.colocation is not None:
            self.colocation.lost(member)
        if self._special:
            for kv in self.sessions.values():
                kv.cached.pop(member.engine.id, None)

    def forget(self, session: str) -> list[RegisteredEngine]:
        """End the session; returns the healthy engines that may hold its KV."""
        kv = self.sessions.pop(session, None)
        if kv is None:
            if self.admission is not None:  # it has no state, because it waited for a weight update
                self.admission.arrival_order.pop(session, None)
            return []
        if kv.sticky is not None:
            sticky = self.registry.members.get(kv.sticky)
            if sticky is not None:
                sticky.sessions.discard(session)
        self._leave_prefill(session, kv)
        members = [m for m in map(self.registry.members.get, kv.held) if m is not None]
        if self.colocation is not None:
            self.colocation.ended(session)
        if self.admission is not None:
            self.admission.forget(session, kv, held=members)
        return [m for m in members if m.healthy]

    def finished(self, session: str) -> None:
        """Record the length of a trajectory that ended by itself: only such lengths are representative."""
        kv = self.sessions.get(session)
        if kv is not None:
            kv.whole = True

    def _update_mode(self) -> None:
        plain = self.router.plain(self.registry.kinds) and self.admission is None
        self._special = self.registry.roles or not plain

    def _route_now(self, turn: TurnRequest) -> TurnRoute | None:
        """The turn's route; None while the gate is closed or no engine is eligible."""
        if not self.gate.is_set():
            return None
        kv, registry = self._known(turn.session), self.registry
        if kv is None:
            return None
        version = kv.version
        sticky = registry.sticky(kv.sticky, version)
        if self.colocation is not None and sticky is None:
            sticky = self._seated(turn, kv)
        if self.admission is not None and (sticky is None or turn.session not in sticky.kv) and registry.serve(version):
            return None  # the trajectory must be admitted first
        if sticky is not None and not registry.roles:
            turn.why = turn.why or STICKY
            return kv, sticky, None
        path = self._choose(turn, kv, sticky)
        if path is None:
            return None
        decode = registry.members[path.decode]
        if sticky is not decode:
            self._assign(turn, kv, decode, path.preferred)
        return kv, decode, None if path.prefill is None else registry.members[path.prefill]

    def _report_route(self, turn: TurnRequest, sticky: RegisteredEngine, source: RegisteredEngine | None) -> None:
        turn.routed(turn.why, sticky.engine.id, None if source is None else source.engine.id, sticky.running)
        turn.why = ""

    def _known(self, session: str) -> SessionKv | None:
        """The session's KV state at the version of its next turn; None while no engine may serve it."""
        kv, version = self.sessions.get(session), self.version
        if self.lag:
            serving = self.registry.serving(kv, version, self.lag, self._limits.slots)
            if serving is None:
                return None
            version = serving
        if kv is None:
            kv = self.sessions[session] = SessionKv(version)
        elif kv.version != version:
            kv.expire(version)
        return kv

    def _assign_waiting(self, turn: TurnRequest) -> bool | None:
        """Assign the turn's trajectory to an engine with free KV memory. True: assigned; None: no eligible engine."""
        if self._is_admitted(turn):
            return True
        if not self.gate.is_set():
            return False
        registry, kv = self.registry, self._known(turn.session)
        if kv is None or not registry.serve(kv.version):
            return None
        assert self.admission is not None
        admission, seats = self.admission, 1
        if self.colocation is not None:
            if self._seated(turn, kv) is not None:
                return True
            seats = self.colocation.needed(turn.session)
        path = self._choose(turn, kv, None, lambda member: admission.takes(member, turn, seats))
        if path is None:
            return False
        self._assign(turn, kv, registry.members[path.decode], path.preferred)
        return True

    def _is_admitted(self, turn: TurnRequest) -> bool:
        """True if the sticky engine of the trajectory holds KV memory for it; a weight update changes nothing of it."""
        if self.gate.is_set():
            kv = self._known(turn.session)
            sticky = None if kv is None else self.registry.sticky(kv.sticky, kv.version)
        else:
            kv = self.sessions.get(turn.session)
            sticky = None if kv is None or kv.sticky is None else self.registry.members.get(kv.sticky)
        return sticky is not None and turn.session in sticky.kv

    def _seated(self, turn: TurnRequest, kv: SessionKv) -> RegisteredEngine | None:
        """The engine of the turn's group, if it has a slot for the trajectory, which is then assigned to it."""
        assert self.colocation is not None
        unit = self.colocation.seat(
            turn.session, lambda sticky: self.registry.sticky(sticky.engine.id, kv.version) is sticky and sticky.serves
        )
        if unit is None or unit.sticky is None:
            return None
        turn.why = WITH_GROUP
        self._assign(turn, kv, unit.sticky, unit.preferred)
        return unit.sticky

    def _follow_group(self, turn: TurnRequest) -> bool:
        """True if the turn's trajectory was assigned to a slot that its group reserved."""
        if self.colocation is None or not self.gate.is_set():
            return False
        kv = self._known(turn.session)
        return kv is not None and self._seated(turn, kv) is not None

    def _holds(self, member: RegisteredEngine, session: str, tokens: int) -> bool:
        """True if the engine is expected to hold at least `tokens` of the session's KV."""
        return self.admission is None or member.kv.held(session) >= tokens

    def _choose(
        self,
        turn: TurnRequest,
        kv: SessionKv,
        sticky: RegisteredEngine | None,
        takes: Callable[[RegisteredEngine], bool] | None = None,
    ) -> TurnPath | None:
        """`takes`: the filter for decode engines."""
        registry = self.registry
        if not self._special:
            loads = _without_avoided(turn, kv, registry.loads(turn.session, kv.version))
            chosen = choose_engine(loads, version=kv.version)
            turn.why = LEAST_LOADED
            return None if chosen is None else TurnPath(chosen, None, LEAST_LOADED)
        view = TurnView(
            tokens=turn.length,
            output=self._domain_stats.output(turn.domain, turn.sampling.max_tokens),
            domain=turn.domain,
            was_remote=kv.was_remote,
            returns=kv.returned is not None
            and (sticky is None or self._holds(sticky, turn.session, kv.cached.get(sticky.engine.id, 0))),
            no_handoff=turn.no_handoff,
        )
        now = asyncio.get_running_loop().time()
        views = registry.views(
            turn.session, kv.version, sticky, kv.cached, now, self._limits.slots, takes, self.admission is not None
        )
        path = route(
            _without_avoided(turn, kv, views),
            view,
            self.router,
            sticky=None if sticky is None else kv.sticky,
            version=kv.version,
            assignments=self._domain_stats.pool_counts.get(turn.domain, {}),
        )
        if path is not None:
            turn.why = path.why
        if path is not None and takes is None:
            self.paths[path.why] = self.paths.get(path.why, 0) + 1
        return path

    def _assign(self, turn: TurnRequest, kv: SessionKv, member: RegisteredEngine, preferred: bool) -> None:
        """Make this engine the trajectory's sticky engine."""
        old = None if kv.sticky is None else self.registry.members.get(kv.sticky)
        if old is not None:
            old.sessions.discard(turn.session)
            old.kv.drop(turn.session)
        member.sessions.add(turn.session)
        kv.sticky = member.engine.id
        kv.lies_at(member.engine.id)
        if self.admission is not None:
            kv.returned = None
            self.admission.assigned(turn, member)
        if self.colocation is not None:
            wanted = 0 if self.admission is None else self.admission.wanted(turn.domain, turn.length)
            self.colocation.assigned(turn.session, member, preferred=preferred, wanted=wanted)
        if self._special:
            doubts = () if preferred else self.registry.doubts(asyncio.get_running_loop().time())
            self._domain_stats.assigned(turn.domain, member, self.router.affinity, preferred=preferred, doubts=doubts)

    def _assign_prefill(self, session: str, kv: SessionKv, source: RegisteredEngine) -> None:
        """Make this engine the trajectory's remote prefill engine."""
        if kv.prefill_engine != source.engine.id:
            self._leave_prefill(session, kv)
            kv.prefill_engine = source.engine.id
        source.prefill_sessions.add(session)
        kv.lies_at(source.engine.id)

    def _leave_prefill(self, session: str, kv: SessionKv) -> None:
        host = None if kv.prefill_engine is None else self.registry.members.get(kv.prefill_engine)
        if host is not None:
            host.prefill_sessions.discard(session)

    def _leave_sticky(self, turn: TurnRequest, kv: SessionKv, sticky: RegisteredEngine) -> None:
        sticky.sessions.discard(turn.session)
        sticky.kv.drop(turn.session)
        kv.sticky = kv.returned = None
        kv.cached.pop(sticky.engine.id, None)

    def _work(
        self, turn: TurnRequest, kv: SessionKv, member: RegisteredEngine, *, prefill: bool, decode: bool
    ) -> float:
        """Predicted engine seconds of the request there; 0 without a model, when load is measured by counts alone."""
        model = self.router.routes.model
        if model is None:
            return 0.0
        kind, tokens = member.seat.kind, turn.length
        seconds = 0.0
        if prefill:
            cached = min(kv.cached.get(member.engine.id, 0), tokens)
            if not decode and kv.sticky is not None:
                cached = max(cached, min(kv.cached.get(kv.sticky, 0), tokens) if kv.returned is not None else 0)
            seconds += model.prefill_s(kind, max(tokens - cached, 1), cached)
        if decode:
            seconds += model.decode_s(kind, tokens, self._domain_stats.output(turn.domain, turn.sampling.max_tokens))
        return seconds


def _without_avoided(turn: TurnRequest, kv: SessionKv, views: list[EngineView]) -> list[EngineView]:
    """The candidates without engines that answered the turn wrongly, while other engines can generate it."""
    others = [v for v in views if v.id not in turn.avoided] if turn.avoided else views
    able = (v for v in others if v.healthy and v.version == kv.version and v.seat.role is not EngineRole.PREFILL)
    return others if any(able) else views
