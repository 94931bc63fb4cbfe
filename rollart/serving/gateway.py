"""The gateway: routes each turn to one engine, or to a prefill and a decode engine, and each weight update to all.

Token in, token out; session-sticky; fenced by version. It owns the state of every engine (health, version, placement,
load, sessions) and the gate that holds new turns while weights change.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from rollart.errors import EngineError, LeaseExpired
from rollart.fleet import EngineKind, EnginePlacement, EngineRole, KindLoad
from rollart.leases import Expiry, Leases
from rollart.ledger.intervals import EngineShares, ResourceState
from rollart.model import Completion, CompletionChunk, EngineId, EngineStats, PauseMode, Sampling, WeightsRef
from rollart.policy.routing import RoutingPolicy
from rollart.ports import Engine, Recorder, RunEvent
from rollart.serving.engine_registry import (
    EngineRegistry,
    GatewayLimits,
    RegisteredEngine,
    RouteListener,
    TurnRequest,
    unheard_route,
)
from rollart.serving.group_colocation import GroupColocation
from rollart.serving.kv_admission import ConcurrencySettings, KvAdmission
from rollart.serving.turns import TurnExecutor
from rollart.serving.weight_updates import AllAtOnceUpdates, UpdateContext, WeightUpdates

STATS_S = 5.0
"""An engine answers `stats` from its event loop during any computation. Without an answer its step is not evaluated."""


class Gateway:
    """Called by trajectories (`generate`, `forget`), by the publisher (`update`), by the supervisor (`join`, `lose`)
    and by the rebalancer (`flip`, `drain`).

    `generate` waits for the gate (unblocked by the end of an update), then for an eligible engine (unblocked by
    `join`), then for the engine's answer. Invariant: no request is sent to an engine whose version is not current, nor
    KV from one engine to another across an update.
    """

    def __init__(
        self,
        leases: Leases,
        *,
        limits: GatewayLimits,
        version: int,
        on_suspect: Callable[[EngineId], None],
        recorder: Recorder | None = None,
        router: RoutingPolicy | None = None,
        seats: Mapping[str, EnginePlacement] | None = None,
        pause: PauseMode = PauseMode.KEEP,
        concurrency: ConcurrencySettings | None = None,
        updates: Callable[[UpdateContext], WeightUpdates] = AllAtOnceUpdates,
        colocation: GroupColocation | None = None,
    ) -> None:
        """`pause`: the effect of a weight update on running turns. KEEP resumes them under the new weights, ABORT
        generates them again from their history. `concurrency`: trajectories per engine; None: unbounded. `updates`
        makes the policy of weight updates. `colocation`: groups that stay on one engine."""
        self._leases = leases
        self._limits = limits
        self._on_suspect = on_suspect
        self._recorder = recorder
        self.registry = EngineRegistry(seats or {})
        self.moving = asyncio.Lock()
        """One weight transfer per engine at a time: an update of all, or the catch-up of a returning engine. Others
        hold it to exclude updates, and briefly, since an update waits for it."""
        self.turns = TurnExecutor(
            leases,
            limits,
            self.registry,
            router or RoutingPolicy(),
            version,
            self.doubt,
            self._event,
            concurrency,
            colocation,
        )
        self._requests = 0
        self.on_lost: Callable[[EngineId], None] = lambda _: None
        """Called with an engine that no longer serves."""
        self.updates = updates(
            UpdateContext(self.turns, self.registry, leases, limits, pause, self._suspect, self._event)
        )
        """Weight updates; their `run` belongs to the owner of the gateway."""

    @property
    def version(self) -> int:
        return self.turns.version

    @property
    def admission(self) -> KvAdmission | None:
        """The admission control of engines' KV memory; its `run` must run as long as the gateway is used."""
        return self.turns.admission

    def join(self, engine: Engine, *, version: int, shares: EngineShares, seat: EnginePlacement | None = None) -> None:
        """Add an engine with `version` loaded. A lost engine may join again under the same id and keeps its present
        placement, so `seat` is used only the first time."""
        member = self.registry.join(engine, version=version, shares=shares, seat=seat)
        shares.release()
        if self.admission is not None:
            self.admission.joined(member)
        self.turns.notify()

    async def bring_in(
        self,
        engine: Engine,
        *,
        loaded: int | None,
        weights: Callable[[], WeightsRef],
        shares: EngineShares,
        seat: EnginePlacement | None = None,
    ) -> int:
        """Join an engine that started with version `loaded`, or is suspected (None), at the current version, which is
        returned. Excludes weight updates, so the version cannot change meanwhile.

        Raises `EngineError` or `LeaseExpired` if the weights do not load.
        """
        async with self.moving, self.updates.alone(engine.id):
            current = weights()
            if loaded != current.version:
                waiting_for = f"weights v{current.version} on {engine.id}"
                async with self._leases.hold("supervise", waiting_for, self._limits.sync_s, Expiry.RESTART_PART):
                    await engine.pause(PauseMode.KEEP)
                    await engine.update_weights(current)
                    await engine.resume()
            self.join(engine, version=current.version, shares=shares, seat=seat)
            return current.version

    def trust(self, engine_id: EngineId) -> bool:
        """Mark a suspected engine healthy after a passing health check. False if it was lost meanwhile."""
        member = self.registry.members.get(engine_id)
        if member is None or not member.healthy:
            return False
        member.doubted = False
        self.turns.notify()
        return True

    def condemned(self, engine_id: EngineId) -> str:
        """The reason to restart the engine although its health check may pass; '' if there is none."""
        member = self.registry.members.get(engine_id)
        return "" if member is None else member.condemned

    def lose(self, engine_id: EngineId, *, cause: str = "engine_down") -> None:
        """Mark the engine lost: its sessions continue on other engines with a full prefill."""
        member = self.registry.members.get(engine_id)
        if member is None or not member.healthy:
            return
        member.healthy = False
        member.shares.hold(ResourceState.DOWN, cause)
        self.turns.evict_sessions(member)
        self.on_lost(engine_id)
        self.updates.lost()

    def spare(self, engine_id: EngineId) -> bool:
        """True if the run can continue without this engine: another one serves and does not drain."""
        return any(m.keeps for e, m in self.registry.members.items() if e != engine_id)

    def flip(self, engine_id: EngineId, role: EngineRole) -> None:
        """Set the engine's role from the next turn on. Only the router changes, not the engine: running turns end where
        they are, and a trajectory whose sticky engine becomes a prefill engine fetches its KV from there."""
        seat = self.registry.seat_of(engine_id)
        if seat is None:
            raise ValueError(f"engine {engine_id} has no seat (rule: an engine that joined, or was given one)")
        if seat.role is not role:
            self.registry.seat(engine_id, dataclasses.replace(seat, role=role))
            self._event("role_flipped", engine_id, before=str(seat.role), after=str(role))
            self.turns.notify()

    def seats(self) -> Mapping[EngineId, EnginePlacement]:
        """The placement of every engine that joined and has not left for good."""
        return {m.engine.id: m.seat for m in self.registry.members.values()}

    def stable(self) -> set[EngineId]:
        """Engines that serve or are only suspected, and do not drain."""
        return {m.engine.id for m in self.registry.members.values() if m.keeps}

    def engines_of(self, kind: EngineKind) -> list[EngineId]:
        """Engines of a kind in the order in which to flip them: fewest sessions first, then by id."""
        members = [m for m in self.registry.members.values() if m.seat.kind == kind]
        return [m.engine.id for m in sorted(members, key=lambda m: (not m.serves, len(m.sessions), m.engine.id))]

    def retire(self, engine_id: EngineId) -> None:
        """Send no turn to the engine until it joins again. Its trajectories continue on other engines from their next
        turn on, with a full prefill."""
        member = self.registry.members[engine_id]
        member.draining = True
        self.turns.evict_sessions(member)

    async def drain(self, engine_id: EngineId, *, seconds: float) -> None:
        """Retire the engine; returns when its running turns have ended. `LeaseExpired` after `seconds`."""
        self.retire(engine_id)
        member = self.registry.members[engine_id]
        async with self._leases.hold("rebalance", f"{engine_id} to drain", seconds, Expiry.RETRY):
            await self.turns.quiet(member)

    async def lend(self, engine_id: EngineId, *, seconds: float) -> None:
        """Stop serving on the engine until `take_back`: its running turns continue on other engines with the tokens
        they have. Returns when they left, or once it is taken back; `EngineError` or, after `seconds`,
        `LeaseExpired`."""
        member = self.registry.members[engine_id]
        member.away, member.asked = True, frozenset(member.shares.requests)
        self.retire(engine_id)
        async with self._leases.hold("lending", f"{engine_id} to be left", seconds, Expiry.RETRY):
            await member.engine.abort(sorted(member.asked))
            await self.turns.quiet(member)
        if member.away:
            member.shares.hold(ResourceState.IDLE, "lent")

    def take_back(self, engine_id: EngineId) -> None:
        """Let a lent engine serve again, if it has not left."""
        member = self.registry.members.get(engine_id)
        if member is not None and member.away:
            member.away = member.draining = False
            if member.healthy:
                member.shares.release()
            self.turns.notify()

    def assignments(self) -> Mapping[str, EngineId]:
        """The sticky engine of each session that has one."""
        return {session: m.engine.id for m in self.registry.members.values() for session in m.sessions}

    def engine_of(self, session: str) -> EngineId | None:
        """The sticky engine of a session, if it has one."""
        members = self.registry.members.values()
        return next((m.engine.id for m in members if session in m.sessions), None)

    def leave(self, engine_id: EngineId, *, cause: str = "engine_down") -> None:
        """Remove the engine from the registry for good. Its unanswered turns are routed again. `cause` is recorded for
        the time until the engine is closed."""
        self.lose(engine_id, cause=cause)
        self.registry.leave(engine_id)
        self.turns.notify()

    def load(self) -> Mapping[EngineKind, KindLoad]:
        """The load of all registered engines, by kind."""
        return self.registry.load(asyncio.get_running_loop().time(), self._limits.slots)

    async def stats(self) -> Mapping[EngineId, EngineStats]:
        """The counters of every engine that serves and answers."""
        found: dict[EngineId, EngineStats] = {}
        for member in [m for m in self.registry.members.values() if m.serves]:
            waiting_for = f"the counters of {member.engine.id}"
            with contextlib.suppress(EngineError, LeaseExpired):
                async with self._leases.hold("gateway", waiting_for, STATS_S, Expiry.RETRY):
                    found[member.engine.id] = await member.engine.stats()
        return found

    def generate(
        self,
        session: str,
        token_ids: tuple[int, ...],
        sampling: Sampling,
        *,
        spend: Callable[[float], None],
        sent: Callable[[int], None] = lambda _: None,
        routed: RouteListener = unheard_route,
        domain: str = "",
        length: int | None = None,
        prompt: str = "",
        last: bool = False,
        on_chunk: Callable[[CompletionChunk], None] | None = None,
        experts_from: int | None = None,
        adapter: str | None = None,
    ) -> Coroutine[Any, Any, Completion]:
        """One turn's completion. `length` is the prompt's length in tokens, if that is not the number of ids; `prompt`
        names the prompt of the trajectory. After the `last` turn of a trajectory, a prefill engine keeps no KV.
        `spend` is called with the engine seconds of every attempt and both legs, cancelled ones included. `sent` is
        called with the version if the decode engine has a free slot and so begins at once, `routed` with each route.
        `experts_from`, `adapter`: see `GenerateRequest`.

        Raises `EngineError` if no attempt succeeded, after at most `limits.attempts`. A retried turn is generated anew:
        of a failed attempt only the tokens passed to `on_chunk` are kept. A failed hand-off does not count as an
        attempt: the turn is prefilled on its decode engine.
        """
        self._requests += 1
        turn = TurnRequest(f"{session}-{self._requests}", session, token_ids, sampling, spend, sent, domain)
        turn.prompt, turn.last, turn.listener, turn.vocab = prompt, last, on_chunk, self._limits.vocab
        turn.length = len(token_ids) if length is None else length
        turn.experts_from, turn.adapter, turn.routed = experts_from, adapter, routed
        return self.turns.generate(turn)

    async def forget(self, session: str) -> None:
        """End the session: its engines may drop its KV."""
        self.updates.ended(session)
        for member in self.turns.forget(session):
            with contextlib.suppress(EngineError):
                await member.engine.release(session)

    async def update(self, weights: WeightsRef, on_version: Callable[[int], None]) -> None:
        """Returns when the version is current, and engines may serve under it; `on_version` runs once, when it becomes
        current. An engine that fails is lost, and loads the version when it returns."""

        def current(version: int) -> None:
            on_version(version)
            self.turns.handed.report(version, self._event, self.turns.paths)
            if self.admission is not None:
                self.admission.report(version)

        await self.updates.ready(weights.version)
        async with self.moving:
            await self.updates.publish(weights, current)

    async def settle(self) -> None:
        """Returns when every engine that serves has the current version."""
        await self.updates.settle()

    def doubt(self, member: RegisteredEngine, error: EngineError | LeaseExpired) -> None:
        """Suspect an engine after a failed turn. A broken connection removes the engine at once. After a slow turn the
        engine's health is checked first, since it may be healthy and hold the KV of other sessions. Slow turns are
        normal while weights load."""
        if isinstance(error, EngineError):
            self._suspect(member, error)
        elif member.healthy and not member.updating and not self.moving.locked():
            if not member.doubted:
                member.doubted, member.doubted_at = True, asyncio.get_running_loop().time()
            self._on_suspect(member.engine.id)

    def _suspect(self, member: RegisteredEngine, error: EngineError | LeaseExpired) -> None:
        if member.healthy:
            self._event("engine_down", member.engine.id, cause=str(error))
            self.lose(member.engine.id)
            self._on_suspect(member.engine.id)

    def _event(self, kind: str, subject: str, **fields: str | int | float | None) -> None:
        if self._recorder is not None:
            self._recorder.event(RunEvent(asyncio.get_running_loop().time(), kind, subject, fields))
