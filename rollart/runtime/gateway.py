"""The gateway: one turn's tokens to the right engine, and one weight update to all of them.

Token in, token out; session-sticky; fenced by version. It owns what is known of every engine (health, version, load,
sessions) and the gate that holds new turns while weights change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from rollart.errors import EngineError, LeaseExpired
from rollart.ledger.clock import EngineShares
from rollart.ledger.intervals import State
from rollart.model import Completion, EngineId, GenerateRequest, PauseMode, Sampling, WeightsRef
from rollart.policy.lease import Expiry
from rollart.policy.routing import EngineView, choose_engine
from rollart.policy.syncing import engines_to_update
from rollart.ports import Engine
from rollart.runtime.leases import Leases

__all__ = ["Gateway", "GatewayLimits"]


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Seconds that the gateway waits, and how often a turn is tried on another engine. `engine_s` is for an engine
    that may serve: as long as a restart and a weight update may take, however short a generation is."""

    generate_s: float = 120.0
    engine_s: float = 240.0
    sync_s: float = 60.0
    attempts: int = 4
    slots: int = 1_000_000
    """Requests that one engine generates at a time; more wait inside it."""


@dataclass(slots=True)
class _Member:
    """What the gateway knows of one engine."""

    engine: Engine
    version: int
    shares: EngineShares
    healthy: bool = True
    doubted: bool = False
    running: int = 0
    sessions: set[str] = field(default_factory=set)


class Gateway:
    """Called by trajectories (`generate`, `forget`), by publish (`update`) and by supervise (`join`, `lose`).

    `generate` waits for the gate (unblocked by the end of an update), then for an eligible engine (unblocked by
    `join`), then for the engine's answer. Invariant: no request is sent to an engine whose version is not current.
    """

    def __init__(
        self, leases: Leases, *, limits: GatewayLimits, version: int, on_suspect: Callable[[EngineId], None]
    ) -> None:
        self._leases = leases
        self._limits = limits
        self._on_suspect = on_suspect
        self._members: dict[str, _Member] = {}
        self._sticky: dict[str, str] = {}
        self._gate = asyncio.Event()
        self._gate.set()
        self._changed = asyncio.Event()
        # Weights move on one engine in one way at a time: an update of all, or the catching up of one that came back.
        self._moving = asyncio.Lock()
        self._requests = 0
        self.served = 0
        """Turns generated so far."""
        self.version = version

    def join(self, engine: Engine, *, version: int, shares: EngineShares) -> None:
        """An engine is up with `version` loaded. The same id may join again after it was lost."""
        self._members[engine.id] = _Member(engine, version, shares)
        shares.release()
        self._notify()

    async def bring_in(
        self, engine: Engine, *, loaded: int | None, weights: Callable[[], WeightsRef], shares: EngineShares
    ) -> int:
        """An engine that started with version `loaded`, or is in doubt (None), joins with the current version, which is
        returned. It waits for an update under way, and an update waits for it, so the version cannot move meanwhile.

        Raises `EngineError` or `LeaseExpired` when it does not load.
        """
        async with self._moving:
            current = weights()
            if loaded != current.version:
                waiting_for = f"weights v{current.version} on {engine.id}"
                async with self._leases.hold("supervise", waiting_for, self._limits.sync_s, Expiry.RESTART_PART):
                    await engine.pause(PauseMode.KEEP)
                    await engine.update_weights(current)
                    await engine.resume()
            self.join(engine, version=current.version, shares=shares)
            return current.version

    def trust(self, engine_id: EngineId) -> bool:
        """An engine in doubt was looked at and answers: it takes turns again. False if it was lost meanwhile."""
        member = self._members.get(engine_id)
        if member is None or not member.healthy:
            return False
        member.doubted = False
        self._notify()
        return True

    def lose(self, engine_id: EngineId) -> None:
        """The engine is gone: its sessions start over elsewhere with a full prefill."""
        member = self._members.get(engine_id)
        if member is None or not member.healthy:
            return
        member.healthy = False
        member.shares.hold(State.DOWN, "engine_down")
        for session in member.sessions:
            self._sticky.pop(session, None)
        member.sessions.clear()

    async def generate(
        self,
        session: str,
        token_ids: tuple[int, ...],
        sampling: Sampling,
        *,
        spend: Callable[[float], None],
        sent: Callable[[int], None] = lambda _: None,
    ) -> Completion:
        """One turn's completion. `spend` is told of the engine seconds of every attempt, also of one that is cancelled;
        `sent` of the version, when the engine has a slot free and so begins at once.

        Raises `EngineError` when no attempt succeeded, at most `limits.attempts` of them. A retried turn is
        generated anew: no token of a failed attempt is kept.
        """
        self._requests += 1
        number, last = self._requests, ""
        for attempt in range(1, self._limits.attempts + 1):
            member = await self._eligible(session)
            request = GenerateRequest(
                f"{session}-{number}-{attempt}", session, token_ids, sampling, cache_salt=f"v{self.version}"
            )
            member.running += 1
            if member.running <= self._limits.slots:
                sent(self.version)
            member.shares.begin(request.request_id)
            try:
                async with self._leases.hold(
                    session, f"generation on {member.engine.id}", self._limits.generate_s, Expiry.RETRY
                ):
                    completion = await member.engine.generate(request)
                self.served += 1
                return completion
            except (EngineError, LeaseExpired) as error:
                if isinstance(error, EngineError) and not error.retryable:
                    raise
                self._doubt(member, session, error)
                last = error.cause if isinstance(error, LeaseExpired) else str(error)
            finally:
                member.running -= 1
                spend(member.shares.end(request.request_id))
        raise EngineError(f"no engine answered in {self._limits.attempts} attempts: {last}", retryable=True)

    async def forget(self, session: str) -> None:
        """The trajectory is over: its engine may drop the prefix KV."""
        engine_id = self._sticky.pop(session, None)
        member = self._members.get(engine_id) if engine_id is not None else None
        if member is not None and member.healthy:
            member.sessions.discard(session)
            await member.engine.release(session)

    async def update(self, weights: WeightsRef, on_version: Callable[[int], None]) -> None:
        """suspend -> update -> resume on every healthy engine; `on_version` runs once, while all stand still.

        An engine that fails is lost, and loads the version when it comes back. New turns wait at the gate.
        """
        async with self._moving:
            await self._update(weights, on_version)

    async def _update(self, weights: WeightsRef, on_version: Callable[[int], None]) -> None:
        self._gate.clear()
        try:
            targets = [
                self._members[e]
                for e in engines_to_update(
                    {e: m.version for e, m in self._members.items()},
                    {e: m.healthy for e, m in self._members.items()},
                    weights.version,
                )
            ]
            async with asyncio.TaskGroup() as group:
                for member in targets:
                    group.create_task(self._load(member, weights), name=f"sync {member.engine.id}")
            self.version = weights.version
            on_version(weights.version)
            async with asyncio.TaskGroup() as group:
                for member in targets:
                    if member.healthy:
                        group.create_task(self._resume(member), name=f"resume {member.engine.id}")
        finally:
            self._gate.set()
            self._notify()

    async def _load(self, member: _Member, weights: WeightsRef) -> None:
        member.shares.hold(State.SYNC)
        try:
            async with self._leases.hold(
                "publish", f"weights v{weights.version} on {member.engine.id}", self._limits.sync_s, Expiry.RESTART_PART
            ):
                await member.engine.pause(PauseMode.KEEP)
                await member.engine.update_weights(weights)
            member.version = weights.version
        except (EngineError, LeaseExpired):
            self._suspect(member)

    async def _resume(self, member: _Member) -> None:
        try:
            async with self._leases.hold(
                "publish", f"resume of {member.engine.id}", self._limits.sync_s, Expiry.RESTART_PART
            ):
                await member.engine.resume()
            member.shares.release()
        except (EngineError, LeaseExpired):
            self._suspect(member)

    async def _eligible(self, session: str) -> _Member:
        while True:
            if self._gate.is_set():
                views = [
                    EngineView(e, m.running, len(m.sessions), m.healthy and not m.doubted, m.version)
                    for e, m in self._members.items()
                ]
                chosen = choose_engine(views, sticky=self._sticky.get(session), version=self.version)
                if chosen is not None:
                    member = self._members[chosen]
                    self._sticky[session] = chosen
                    member.sessions.add(session)
                    return member
            changed = self._changed
            async with self._leases.hold(session, "an engine", self._limits.engine_s, Expiry.GAP_FILL):
                await changed.wait()

    def _doubt(self, member: _Member, session: str, error: EngineError | LeaseExpired) -> None:
        """A turn failed. A broken connection takes the engine out at once; a turn that was only slow has the engine
        looked at first: it may be healthy and hold the KV of everybody else. While weights load, slow is normal."""
        self._sticky.pop(session, None)
        member.sessions.discard(session)
        if isinstance(error, EngineError):
            self._suspect(member)
        elif member.healthy and not self._moving.locked():
            member.doubted = True
            self._on_suspect(member.engine.id)

    def _suspect(self, member: _Member) -> None:
        if member.healthy:
            self.lose(member.engine.id)
            self._on_suspect(member.engine.id)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
