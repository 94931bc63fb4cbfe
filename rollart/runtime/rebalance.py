"""Keeping the plan right while the run goes on: prices, flows, and now and then other instances.

Three tempos (facts of queueing and of solvers set them): prices every few seconds, flows at fixed instances about every
half minute, instances when the work has drifted, an engine is gone for good, a pool is down, or on request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Awaitable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TypeVar

from rollart.errors import RollartError
from rollart.fleet import DomainWork, EngineKind, FleetMove, FleetMoveKind, FleetObservation, Proposal, Routes
from rollart.policy.lease import Expiry
from rollart.policy.rebalancing import notable_change, order_moves, reverse_drain, transition_routes, worth_moving
from rollart.policy.workload import WorkloadMeter, drift
from rollart.ports import Fleet, Planner, Recorder, RunEvent
from rollart.runtime.gateway import Gateway
from rollart.runtime.leases import Leases
from rollart.runtime.nodes import NodeTracker

__all__ = ["ADOPTED", "RebalanceSettings", "Rebalancer"]

ADOPTED = "plan_adopted"
"""Event of a plan that runs from now on; a resume starts it. In JSON: `engines`, a list of [id, pool, role, tp], and
`work`, the measured `DomainWork` that it is for, by domain."""

UNDO_ATTEMPTS = 5
"""As often as supervision restarts an engine before it gives it up."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RebalanceSettings:
    """Seconds between looks at prices and flows (0: never), the drift of the work that asks for a new plan, and the
    time over which moving must pay. The planner may take `planner_s` to answer, one drain or start `move_s`.

    `measure_s` is the window before and after a change over which its effect is measured, from `settle_s` after it on;
    until then drift alone starts no other change. `gone_s`: a pool without a serving engine for so long is down.
    `baseline` is the work that the running plan assumed; if it is empty, the first that is measured.
    """

    reprice_s: float = 5.0
    flows_s: float = 30.0
    drift: float = 0.15
    horizon_s: float = 3600.0
    measure_s: float = 300.0
    settle_s: float = 60.0
    gone_s: float = 60.0
    planner_s: float = 60.0
    move_s: float = 600.0
    baseline: Mapping[str, DomainWork] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Change:
    """An applied change whose effect is still to be measured."""

    at: float
    trigger: str
    predicted: float | None
    before: float | None


class _PlannerFailed(Exception):
    """The planner failed, which differs from finding no better plan."""


class Rebalancer:
    """A task of the run: `run` never returns. Anybody may call `notify`.

    It waits for its timer or a notification, for the planner (which computes elsewhere), and for a weight update to end
    before it touches anything; an update waits for it only while routes and roles are replaced, which takes no time. A
    planner or a fleet that fails changes nothing but the record: the run goes on with the routes it has.
    """

    def __init__(
        self,
        gateway: Gateway,
        planner: Planner,
        leases: Leases,
        recorder: Recorder,
        meter: WorkloadMeter,
        *,
        settings: RebalanceSettings,
        fleet: Fleet | None = None,
    ) -> None:
        self._gateway = gateway
        self._planner = planner
        self._leases = leases
        self._recorder = recorder
        self._meter = meter
        self._settings = settings
        self._fleet = fleet
        self._nodes: NodeTracker | None = None
        self._baseline = dict(settings.baseline)
        self._reasons: list[str] = []
        self._woken = asyncio.Event()
        self._samples: deque[tuple[float, int]] = deque()
        self._change: _Change | None = None
        self._down_since: dict[str, float] = {}
        self._down: set[str] = set()
        self._flowed: frozenset[EngineKind] | None = None
        """Kinds of engine that served when flows were computed last."""
        self._failing: dict[str, str] = {}
        """Requests that the planner failed last time, with the cause."""

    def move_by(self, fleet: Fleet) -> None:
        """From now on drains and starts are made, by this fleet."""
        self._fleet = fleet

    def follow(self, nodes: NodeTracker) -> None:
        """Where nodes come and go the plan is one for those that are there."""
        self._nodes = nodes
        nodes.follow(self._woken.set)

    def notify(self, reason: str) -> None:
        """Something happened that the plan did not count on: an engine gone for good, another price. In words."""
        self._reasons.append(reason)
        self._woken.set()

    async def run(self) -> None:
        settings, loop = self._settings, asyncio.get_running_loop()
        period = min((s for s in (settings.reprice_s, settings.flows_s) if s > 0), default=settings.measure_s)
        flows_due = loop.time() + settings.flows_s
        self._samples.append((loop.time(), self._meter.finished))
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(period if self._nodes is None else min(period, self._nodes.wait())):
                    await self._woken.wait()
            now = loop.time()
            self._sample(now)
            self._measure(now)
            reason = self._reason(now)
            await self._vacate()
            if reason:
                await self._replan(reason)
                await self._vacate()
            elif settings.flows_s and (now >= flows_due or self._joined()):
                flows_due = now + settings.flows_s
                self._flowed = self._serving()
                await self._follow("flows", self._planner.reflow(self._observed()))
            elif settings.reprice_s:
                await self._follow("prices", self._planner.reprice(self._observed()))

    def _reason(self, now: float) -> str:
        """Why the plan itself must be looked at; '' if it need not."""
        self._woken.clear()
        reasons, self._reasons = self._reasons, []
        reasons += self._pools(now)
        if self._nodes is not None and (other_nodes := self._nodes.reason()):
            reasons.append(other_nodes)
        if reasons:
            return "; ".join(reasons)
        work = self._meter.work()
        for domain, seen in work.items():
            self._baseline.setdefault(domain, seen)
        changed, figure = drift(self._baseline, work)
        if changed <= self._settings.drift or self._change is not None:
            return ""
        return f"drift of {changed:.0%}: {figure}"

    def _serving(self) -> frozenset[EngineKind]:
        return frozenset(kind for kind, load in self._gateway.load().items() if load.healthy)

    def _joined(self) -> bool:
        """A kind of engine serves that the flows do not know: it has no price, and would draw every trajectory."""
        return self._flowed is not None and not self._serving() <= self._flowed

    def _pools(self, now: float) -> list[str]:
        """Pools that went down for longer than `gone_s`, and those that came back."""
        healthy: dict[str, int] = {}
        for kind, load in self._gateway.load().items():
            healthy[kind.pool] = healthy.get(kind.pool, 0) + load.healthy
        reasons = []
        for pool, count in healthy.items():
            if count:
                self._down_since.pop(pool, None)
                if pool in self._down:
                    self._down.discard(pool)
                    reasons.append(f"pool {pool} is back")
            elif pool not in self._down and now - self._down_since.setdefault(pool, now) >= self._settings.gone_s:
                self._down.add(pool)
                reasons.append(f"pool {pool} is down")
        return reasons

    async def _follow(self, what: str, asked: Awaitable[Routes]) -> None:
        try:
            routes = await self._ask(what, asked)
        except _PlannerFailed:
            return
        async with self._gateway.still():
            said = notable_change(self._gateway.routes, routes)
            self._gateway.follow(routes)
        if said:
            self._event("repriced", what, change=said)

    async def _replan(self, trigger: str) -> None:
        try:
            observed = await self._there()
        except RollartError as error:  # a part that is given up did not end as it should
            self._event("rebalance_failed", trigger, cause=str(error))
            return self._again()
        # Decided on this work, whatever comes of it: the same drift does not ask twice.
        self._baseline.update(observed.work)
        try:
            proposal = await self._ask("a plan", self._planner.replan(observed, trigger))
        except _PlannerFailed:
            self._again()
            return
        if proposal is None:
            self._event("rebalance_rejected", trigger, why="the plan that runs is the best one")
            return
        wanted, why = worth_moving(proposal, self._settings.horizon_s)
        if not wanted:
            self._event("rebalance_rejected", trigger, why=why, **_figures(proposal))
        elif self._fleet is None and not proposal.router_only:
            self._event("rebalance_proposed", trigger, why=why, **_figures(proposal))
        else:
            await self._apply(trigger, proposal, why, observed.work)

    async def _apply(self, trigger: str, proposal: Proposal, why: str, work: Mapping[str, DomainWork]) -> None:
        before = self._rate(self._settings.measure_s)
        flips = [m for m in proposal.moves if m.kind is FleetMoveKind.FLIP]
        async with self._gateway.still():
            short = self._short(flips)
            if short is None:
                for move in flips:
                    self._flip(move)
                if proposal.router_only:
                    self._gateway.follow(proposal.routes)
        if short is not None:
            self._event("rebalance_rejected", trigger, why=f"the fleet changed: {short}", **_figures(proposal))
            return
        if not proposal.router_only and not await self._move(trigger, proposal):
            self._again()
            return
        self._planner.adopt(proposal)
        self._adopted(work)
        now = asyncio.get_running_loop().time()
        self._flowed = self._serving()
        self._event("rebalanced", trigger, why=why, **_figures(proposal))
        if self._change is not None:
            self._event("rebalance_measured", self._change.trigger, superseded=True)
        predicted = proposal.rate_after / proposal.rate_now - 1 if proposal.rate_now > 0 else None
        self._change = _Change(now, trigger, predicted, before)

    def _adopted(self, work: Mapping[str, DomainWork]) -> None:
        engines = [[e, seat.pool, str(seat.role), seat.tp] for e, seat in self._gateway.seats().items()]
        measured = {domain: asdict(seen) for domain, seen in work.items()}
        self._event(ADOPTED, "fleet", engines=json.dumps(engines), work=json.dumps(measured))

    async def _move(self, trigger: str, proposal: Proposal) -> bool:
        """Drains and starts, one after the other, then the routes. False if one failed: what was done stays done, and
        the next look plans from there. Only where nothing serves any more what was drained last comes back first."""
        assert self._fleet is not None
        async with self._gateway.still():
            self._gateway.follow(transition_routes(self._gateway.routes, proposal.routes))
        drained: FleetMove | None = None
        for move in order_moves(proposal.moves, serving=len(self._gateway.stable()), free=self._fleet.free()):
            try:
                await self._step(move)
            except RollartError as error:
                self._event("rebalance_failed", trigger, move=str(move), cause=str(error), **_figures(proposal))
                if drained is not None and not self._gateway.stable():
                    await self._undo(drained)
                return False
            drained = move if move.kind is FleetMoveKind.DRAIN else drained
        async with self._gateway.still():
            self._gateway.follow(proposal.routes)
        return True

    async def _undo(self, drained: FleetMove) -> None:
        """Nothing serves: the run waits for this engine. Its last error ends the run."""
        for attempt in range(1, UNDO_ATTEMPTS):
            with contextlib.suppress(RollartError):
                return await self._step(reverse_drain(drained))
            await asyncio.sleep(min(0.25 * 2**attempt, 5.0))
        await self._step(reverse_drain(drained))

    async def _there(self) -> FleetObservation:
        """What is observed, on the devices that are there."""
        if self._nodes is None:
            return self._observed()
        devices = self._nodes.devices()
        if self._fleet is not None:
            await self._fleet.resize(devices)
        return replace(self._observed(), devices=devices, load=self._nodes.load(self._gateway))

    async def _vacate(self) -> None:
        """Engines leave nodes that are to go."""
        for move in () if self._nodes is None or self._fleet is None else self._nodes.departures(self._gateway):
            try:
                await self._step(move)
            except RollartError as error:
                self._event("rebalance_failed", "a node is to go", move=str(move), cause=str(error))

    def _again(self) -> None:
        if self._nodes is not None:
            self._nodes.retry()

    async def _step(self, move: FleetMove) -> None:
        assert self._fleet is not None
        async with self._leases.hold("rebalance", str(move), self._settings.move_s, Expiry.RETRY):
            await self._fleet.apply(move)

    def _short(self, flips: list[FleetMove]) -> str | None:
        """The first flip that the engines there are cannot make."""
        used: dict[EngineKind, int] = {}
        for move in flips:
            assert move.before is not None, "a flip has a role before"
            kind = EngineKind(move.pool, move.before, move.tp)
            used[kind] = used.get(kind, 0) + move.replicas
            have = len(self._gateway.at(kind))
            if used[kind] > have:
                return f"{move}, but there are {have}"
        return None

    def _flip(self, move: FleetMove) -> None:
        assert move.before is not None
        assert move.after is not None
        for engine in self._gateway.at(EngineKind(move.pool, move.before, move.tp))[: move.replicas]:
            self._gateway.flip(engine, move.after)

    async def _ask(self, what: str, asked: Awaitable[T]) -> T:
        """The planner's answer. `_PlannerFailed` if it fails or takes too long, with an event unless the last time
        that the same was asked failed in the same way."""
        try:
            async with self._leases.hold("rebalance", f"the planner: {what}", self._settings.planner_s, Expiry.RETRY):
                answer = await asked
        except Exception as error:
            cause = str(error) if isinstance(error, RollartError) else f"{type(error).__name__}: {error}"
            if self._failing.get(what) != cause:
                self._failing[what] = cause
                self._event("rebalance_failed", what, cause=cause)
            raise _PlannerFailed from None
        self._failing.pop(what, None)
        return answer

    def _observed(self) -> FleetObservation:
        window = self._settings.flows_s or self._settings.measure_s
        rate = self._rate(window)
        return FleetObservation(
            work=self._meter.work(),
            load=self._gateway.load(),
            rate=rate or 0.0,
            seconds=0.0 if rate is None else window,
            movable=self._fleet is not None,
        )

    def _sample(self, now: float) -> None:
        self._samples.append((now, self._meter.finished))
        keep = max(self._settings.measure_s, self._settings.flows_s)
        while len(self._samples) > 2 and self._samples[1][0] <= now - keep:
            self._samples.popleft()

    def _rate(self, window: float) -> float | None:
        """Trajectories/s finished over the last `window` seconds; None before that much was seen."""
        now, last = self._samples[-1]
        start = next(((t, n) for t, n in reversed(self._samples) if t <= now - window), None)
        return None if start is None else (last - start[1]) / (now - start[0])

    def _measure(self, now: float) -> None:
        """The effect of the last change, once there was time to see it."""
        change = self._change
        if change is None or now < change.at + self._settings.settle_s + self._settings.measure_s:
            return
        self._change = None
        after = self._rate(self._settings.measure_s)
        gain = after / change.before - 1 if change.before and after is not None else None
        self._event(
            "rebalance_measured",
            change.trigger,
            predicted_gain=change.predicted,
            measured_gain=gain,
            rate_before=change.before,
            rate_after=after,
            window_s=self._settings.measure_s,
        )

    def _event(self, kind: str, subject: str, **fields: str | int | float | bool | None) -> None:
        self._recorder.event(RunEvent(asyncio.get_running_loop().time(), kind, subject, fields))


def _figures(proposal: Proposal) -> dict[str, str | float]:
    figures: dict[str, str | float] = {
        "moves": "; ".join(map(str, proposal.moves)) or "flows and prices only",
        "rate_now": proposal.rate_now,
        "rate_after": proposal.rate_after,
        "cost": proposal.cost,
    }
    if proposal.usd_per_hour is not None:
        figures["usd_per_hour_now"], figures["usd_per_hour_after"] = proposal.usd_per_hour
    return figures
