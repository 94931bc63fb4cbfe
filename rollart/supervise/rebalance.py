"""Online rebalancing of a run: updates of prices and flows, and changes of the engine instances.

Three intervals, set by queueing and by solver times: prices every few seconds; flows for fixed instances about every
half minute; instances when the workload has drifted, an engine is lost for good, a pool is down, or on request. The
first functions decide whether a better plan is worth its moves, their order, and the routes during the transition.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections import deque
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from typing import TypeVar

from rollart.errors import RollartError
from rollart.fleet import (
    DomainWork,
    EngineKind,
    FleetMove,
    FleetMoveKind,
    FleetObservation,
    Proposal,
    RoutePrices,
    Routes,
)
from rollart.leases import Expiry, Leases
from rollart.ledger.events import PLAN_ADOPTED
from rollart.policy.workload import WorkloadMeter, drift
from rollart.ports import Fleet, Planner, Recorder, RunEvent
from rollart.serving.gateway import Gateway
from rollart.settings.placement import RebalanceSpec
from rollart.supervise.nodes import NodeTracker
from rollart.supervise.supervisor import loop_time
from serverless.retries import DRAINED_ENGINE

MIN_GAIN = 0.02
"""Relative gain below which a plan is kept, however cheap the moves: a smaller gain is measurement noise, and a plan
that follows noise oscillates."""

SHARE_NEWS, PRICE_NEWS = 0.05, 0.25
"""Changes of a planned share (of a domain's trajectories) and of a price (relative) that are worth an event: prices
change a little at every update."""


def worth_moving(proposal: Proposal, horizon_s: float) -> tuple[bool, str]:
    """Whether to move, and the reason as text: the trajectories gained over the horizon must exceed those lost by
    moving, and the gain must exceed the noise. Ties keep the running plan. Where plans minimise cost, dollars per
    trajectory decide."""
    now, after = proposal.rate_now, proposal.rate_after
    if proposal.usd_per_hour is not None and now > 0 and after > 0:
        return _cheaper(proposal, proposal.usd_per_hour, horizon_s)
    gain = (after - now) * horizon_s
    if after <= now * (1 + MIN_GAIN):
        return False, f"{after:.4g} trajectories/s after {now:.4g} is no gain of {MIN_GAIN:.0%}"
    if gain <= proposal.cost:
        return False, f"{gain:.4g} trajectories gained in {horizon_s:.0f} s do not pay for {proposal.cost:.4g} lost"
    return True, f"{gain:.4g} trajectories gained in {horizon_s:.0f} s for {proposal.cost:.4g} lost"


def order_moves(moves: Iterable[FleetMove], *, serving: int, free: Mapping[str, int]) -> list[FleetMove]:
    """Drains and starts engine by engine, in the given order, with one exception: before a drain of the last serving
    engine comes the first start whose pool has the devices. `serving` engines serve now; `free` counts free devices by
    pool.

    So no more engines than necessary are down at a time, and none serves only where no start fits beside the last one.
    """
    left = [replace(m, replicas=1) for m in moves if m.kind is not FleetMoveKind.FLIP for _ in range(m.replicas)]
    room = dict(free)
    ordered = []
    while left:
        n = 0
        if left[0].kind is FleetMoveKind.DRAIN and serving <= 1:
            n = next(
                (i for i, m in enumerate(left) if m.kind is FleetMoveKind.START and m.tp <= room.get(m.pool, 0)), 0
            )
        move = left.pop(n)
        gives = 1 if move.kind is FleetMoveKind.DRAIN else -1
        serving -= gives
        room[move.pool] = room.get(move.pool, 0) + gives * move.tp
        ordered.append(move)
    return ordered


def reverse_drain(drained: FleetMove) -> FleetMove:
    """The start that reverts a drain."""
    return replace(drained, kind=FleetMoveKind.START, before=None, after=drained.before)


def transition_routes(now: Routes, after: Routes) -> Routes:
    """Routes while engines of both plans serve: the new ones, with the old prices of kinds that the new plan lacks. A
    kind without a price would attract every trajectory."""
    if now.prices is None or after.prices is None:
        return after
    engines = {**now.prices.engines, **after.prices.engines}
    kv = {**now.prices.kv, **after.prices.kv}
    return replace(after, prices=replace(after.prices, engines=engines, kv=kv))


def _cheaper(proposal: Proposal, usd_per_hour: tuple[float, float], horizon_s: float) -> tuple[bool, str]:
    """As `worth_moving` where plans minimise cost: dollars saved over the horizon against the dollars paid for
    trajectories that are lost while engines move."""
    now, after = usd_per_hour[0] / 3600 / proposal.rate_now, usd_per_hour[1] / 3600 / proposal.rate_after
    saved, lost = (now - after) * proposal.rate_after * horizon_s, now * proposal.cost
    prices = f"{1000 * after:.4g} USD per 1,000 trajectories after {1000 * now:.4g}"
    if after >= now * (1 - MIN_GAIN):
        return False, f"{prices} is no gain of {MIN_GAIN:.0%}"
    if saved <= lost:
        return False, f"{saved:.4g} USD saved in {horizon_s:.0f} s do not pay for {lost:.4g} USD lost"
    return True, f"{prices}: {saved:.4g} USD saved in {horizon_s:.0f} s for {lost:.4g} USD lost"


def notable_change(before: Routes, after: Routes) -> str:
    """The first change large enough for an event, as text; '' if there is none."""
    for domain in sorted({*before.shares, *after.shares}):
        a, b = before.shares.get(domain, {}), after.shares.get(domain, {})
        for pool in sorted({*a, *b}):
            if abs(a.get(pool, 0.0) - b.get(pool, 0.0)) > SHARE_NEWS:
                return f"{domain} on {pool}: {a.get(pool, 0.0):.0%} → {b.get(pool, 0.0):.0%}"
    old, new = before.prices or RoutePrices(), after.prices or RoutePrices()
    for kind in sorted({*old.engines, *new.engines}):
        p, q = old.engines.get(kind, 0.0), new.engines.get(kind, 0.0)
        if abs(p - q) > PRICE_NEWS * max(p, q):
            return f"price of {kind.role} tp {kind.tp} on {kind.pool}: {p:.3g} → {q:.3g}"
    return ""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RebalanceSettings:
    """`spec`: the run's `placement.rebalance`. The planner may take `planner_s` to answer, and a single drain or start
    `move_s`.

    `measure_s` is the window before and after a change over which its effect is measured; the second one begins
    `settle_s` after the change. Until the measurement, drift alone triggers no other change. `gone_s`: a pool without a
    serving engine for this long is down. `baseline`: the workload that the running plan assumed; if it is empty, the
    first measured workload.
    """

    spec: RebalanceSpec = field(default_factory=RebalanceSpec)
    measure_s: float = 300.0
    settle_s: float = 60.0
    gone_s: float = 60.0
    planner_s: float = 60.0
    move_s: float = 600.0
    baseline: Mapping[str, DomainWork] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Change:
    """An applied change whose effect is not measured yet."""

    applied_at: float
    trigger: str
    predicted: float | None
    before: float | None


class _PlannerFailed(Exception):
    """The planner failed, which differs from finding no better plan."""


@dataclass(eq=False)
class Rebalancer:
    """A task of the run: `run` never returns. Any task may call `notify`.

    It waits for its timer or a notification, for the planner (which computes elsewhere), and for the end of a weight
    update before it changes routes or roles. An update waits for the rebalancer only while routes and roles are
    replaced, which takes no time. A failed planner or fleet is only recorded: the run continues with its present
    routes.
    """

    gateway: Gateway
    planner: Planner
    leases: Leases
    recorder: Recorder
    meter: WorkloadMeter
    _: KW_ONLY
    settings: RebalanceSettings
    fleet: Fleet | None = None
    """Applies drains and starts; without it, these are only proposed."""
    _nodes: NodeTracker | None = field(default=None, init=False)
    _baseline: dict[str, DomainWork] = field(default_factory=dict, init=False)
    _reasons: list[str] = field(default_factory=list, init=False)
    _woken: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _samples: deque[tuple[float, int]] = field(default_factory=deque, init=False)
    _change: _Change | None = field(default=None, init=False)
    _down_since: dict[str, float] = field(default_factory=dict, init=False)
    _down: set[str] = field(default_factory=set, init=False)
    _flowed: frozenset[EngineKind] | None = field(default=None, init=False)
    """Kinds of engine that served when flows were last computed."""
    _failing: dict[str, str] = field(default_factory=dict, init=False)
    """Planner requests whose last attempt failed, with the cause."""

    def __post_init__(self) -> None:
        self._baseline.update(self.settings.baseline)

    def follow(self, nodes: NodeTracker) -> None:
        """Plan for the present nodes of an elastic cluster, as nodes join and leave."""
        self._nodes = nodes
        nodes.follow(self._woken.set)

    def notify(self, reason: str) -> None:
        """Request a new plan. `reason`: text of an event that the plan did not account for, such as an engine lost for
        good or a changed price."""
        self._reasons.append(reason)
        self._woken.set()

    async def run(self) -> None:
        settings = self.settings
        period = min((s for s in (settings.spec.reprice_s, settings.spec.flows_s) if s > 0), default=settings.measure_s)
        flows_due = loop_time() + settings.spec.flows_s
        self._samples.append((loop_time(), self.meter.finished))
        while True:
            with contextlib.suppress(TimeoutError):
                nodes = math.inf if self._nodes is None else self._nodes.availability.wait(loop_time())
                async with asyncio.timeout(min(period, nodes)):
                    await self._woken.wait()
            now = loop_time()
            self._samples.append((now, self.meter.finished))
            kept_s = max(settings.measure_s, settings.spec.flows_s)
            while len(self._samples) > 2 and self._samples[1][0] <= now - kept_s:
                self._samples.popleft()
            self._measure(now)
            reason = self._reason(now)
            await self._vacate()
            if reason:
                await self._replan(reason)
                await self._vacate()
            elif settings.spec.flows_s and (now >= flows_due or self._joined()):
                flows_due = now + settings.spec.flows_s
                self._flowed = self._serving()
                await self._follow("flows", self.planner.reflow(self._observed()))
            elif settings.spec.reprice_s:
                await self._follow("prices", self.planner.reprice(self._observed()))

    def _reason(self, now: float) -> str:
        """The reason to make a new plan; '' if there is none."""
        self._woken.clear()
        reasons, self._reasons = self._reasons, []
        reasons += self._pools(now)
        if self._nodes is not None and (other_nodes := self._nodes.reason()):
            reasons.append(other_nodes)
        if reasons:
            return "; ".join(reasons)
        work = self.meter.work()
        for domain, seen in work.items():
            self._baseline.setdefault(domain, seen)
        changed, figure = drift(self._baseline, work)
        if changed <= self.settings.spec.drift or self._change is not None:
            return ""
        return f"drift of {changed:.0%}: {figure}"

    def _serving(self) -> frozenset[EngineKind]:
        return frozenset(kind for kind, load in self.gateway.load().items() if load.healthy)

    def _joined(self) -> bool:
        """True if a kind of engine serves that the flows do not cover: without a price it would attract every
        trajectory."""
        return self._flowed is not None and not self._serving() <= self._flowed

    def _pools(self, now: float) -> list[str]:
        """Pools that have been down for `gone_s`, and pools that are back, as reasons."""
        healthy: dict[str, int] = {}
        for kind, load in self.gateway.load().items():
            healthy[kind.pool] = healthy.get(kind.pool, 0) + load.healthy
        reasons = []
        for pool, count in healthy.items():
            if count:
                self._down_since.pop(pool, None)
                if pool in self._down:
                    self._down.discard(pool)
                    reasons.append(f"pool {pool} is back")
            elif pool not in self._down and now - self._down_since.setdefault(pool, now) >= self.settings.gone_s:
                self._down.add(pool)
                reasons.append(f"pool {pool} is down")
        return reasons

    async def _follow(self, what: str, asked: Awaitable[Routes]) -> None:
        try:
            routes = await self._ask(what, asked)
        except _PlannerFailed:
            return
        async with self.gateway.moving:
            said = notable_change(self.gateway.turns.router.routes, routes)
            self.gateway.turns.follow(routes)
        if said:
            self._event("repriced", what, change=said)

    async def _replan(self, trigger: str) -> None:
        try:
            observed = await self._there()
        except RollartError as error:  # a part that was given up did not end properly
            self._event("rebalance_failed", trigger, cause=str(error))
            return self._again()
        # The baseline changes whatever the outcome: the same drift does not trigger a second plan.
        self._baseline.update(observed.work)
        try:
            proposal = await self._ask("a plan", self.planner.replan(observed, trigger))
        except _PlannerFailed:
            self._again()
            return
        if proposal is None:
            self._event("rebalance_rejected", trigger, why="the plan that runs is the best one")
            return
        wanted, why = worth_moving(proposal, self.settings.spec.horizon_s)
        if not wanted:
            self._event("rebalance_rejected", trigger, why=why, **_figures(proposal))
        elif self.fleet is None and not proposal.router_only:
            self._event("rebalance_proposed", trigger, why=why, **_figures(proposal))
        else:
            await self._apply(trigger, proposal, why, observed.work)

    async def _apply(self, trigger: str, proposal: Proposal, why: str, work: Mapping[str, DomainWork]) -> None:
        before = self._rate(self.settings.measure_s)
        flips = [m for m in proposal.moves if m.kind is FleetMoveKind.FLIP]
        async with self.gateway.moving:
            short = self._short(flips)
            if short is None:
                for move in flips:
                    assert move.before is not None
                    assert move.after is not None
                    for engine in self.gateway.engines_of(EngineKind(move.pool, move.before, move.tp))[: move.replicas]:
                        self.gateway.flip(engine, move.after)
                if proposal.router_only:
                    self.gateway.turns.follow(proposal.routes)
        if short is not None:
            self._event("rebalance_rejected", trigger, why=f"the fleet changed: {short}", **_figures(proposal))
            return
        if not proposal.router_only and not await self._move(trigger, proposal):
            self._again()
            return
        self.planner.adopt(proposal)
        self._event(PLAN_ADOPTED, "fleet", **adopted_plan(self.gateway, work))
        self._flowed = self._serving()
        self._event("rebalanced", trigger, why=why, **_figures(proposal))
        if self._change is not None:
            self._event("rebalance_measured", self._change.trigger, superseded=True)
        predicted = proposal.rate_after / proposal.rate_now - 1 if proposal.rate_now > 0 else None
        self._change = _Change(loop_time(), trigger, predicted, before)

    async def _move(self, trigger: str, proposal: Proposal) -> bool:
        """Apply drains and starts one after the other, then the routes. False if a move failed: completed moves stay,
        and the next plan starts from there. If no engine serves any more, the last drained engine is first restored."""
        assert self.fleet is not None
        async with self.gateway.moving:
            self.gateway.turns.follow(transition_routes(self.gateway.turns.router.routes, proposal.routes))
        drained: FleetMove | None = None
        for move in order_moves(proposal.moves, serving=len(self.gateway.stable()), free=self.fleet.free()):
            try:
                await self._step(move)
            except RollartError as error:
                self._event("rebalance_failed", trigger, move=str(move), cause=str(error), **_figures(proposal))
                if drained is not None and not self.gateway.stable():
                    await self._undo(drained)
                return False
            drained = move if move.kind is FleetMoveKind.DRAIN else drained
        async with self.gateway.moving:
            self.gateway.turns.follow(proposal.routes)
        return True

    async def _undo(self, drained: FleetMove) -> None:
        """Restore a drained engine, which the run waits for because no other serves. The last error ends the run."""
        await DRAINED_ENGINE.run(lambda: self._step(reverse_drain(drained)), RollartError)

    async def _there(self) -> FleetObservation:
        """The observation, with the devices of the present nodes."""
        if self._nodes is None:
            return self._observed()
        devices = self._nodes.devices()
        if self.fleet is not None:
            await self.fleet.resize(devices)
        return replace(self._observed(), devices=devices, load=self._nodes.load(self.gateway))

    async def _vacate(self) -> None:
        """Drain the engines on leaving nodes."""
        for move in () if self._nodes is None or self.fleet is None else self._nodes.departures(self.gateway):
            try:
                await self._step(move)
            except RollartError as error:
                self._event("rebalance_failed", "a node is to go", move=str(move), cause=str(error))

    def _again(self) -> None:
        if self._nodes is not None:
            self._nodes.retry()

    async def _step(self, move: FleetMove) -> None:
        assert self.fleet is not None
        async with self.leases.hold("rebalance", str(move), self.settings.move_s, Expiry.RETRY):
            await self.fleet.apply(move)

    def _short(self, flips: list[FleetMove]) -> str | None:
        """The first flip for which there are too few engines, as text; None if all flips are possible."""
        used: dict[EngineKind, int] = {}
        for move in flips:
            assert move.before is not None, "a flip has a role before"
            kind = EngineKind(move.pool, move.before, move.tp)
            used[kind] = used.get(kind, 0) + move.replicas
            have = len(self.gateway.engines_of(kind))
            if used[kind] > have:
                return f"{move}, but there are {have}"
        return None

    async def _ask(self, what: str, asked: Awaitable[T]) -> T:
        """The planner's answer. `_PlannerFailed` if the planner fails or takes too long, with an event unless the
        previous request of this kind failed with the same cause."""
        try:
            async with self.leases.hold("rebalance", f"the planner: {what}", self.settings.planner_s, Expiry.RETRY):
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
        window = self.settings.spec.flows_s or self.settings.measure_s
        rate = self._rate(window)
        return FleetObservation(
            work=self.meter.work(),
            load=self.gateway.load(),
            rate=rate or 0.0,
            seconds=0.0 if rate is None else window,
            movable=self.fleet is not None,
        )

    def _rate(self, window: float) -> float | None:
        """Trajectories/s finished over the last `window` seconds; None until samples cover the window."""
        now, last = self._samples[-1]
        start = next(((t, n) for t, n in reversed(self._samples) if t <= now - window), None)
        return None if start is None else (last - start[1]) / (now - start[0])

    def _measure(self, now: float) -> None:
        """Record the measured effect of the last change, once its window has passed."""
        change = self._change
        if change is None or now < change.applied_at + self.settings.settle_s + self.settings.measure_s:
            return
        self._change = None
        after = self._rate(self.settings.measure_s)
        gain = after / change.before - 1 if change.before and after is not None else None
        self._event(
            "rebalance_measured",
            change.trigger,
            predicted_gain=change.predicted,
            measured_gain=gain,
            rate_before=change.before,
            rate_after=after,
            window_s=self.settings.measure_s,
        )

    def _event(self, kind: str, subject: str, **fields: str | int | float | bool | None) -> None:
        self.recorder.event(RunEvent(loop_time(), kind, subject, fields))


def adopted_plan(gateway: Gateway, work: Mapping[str, DomainWork]) -> dict[str, str]:
    """Fields of `PLAN_ADOPTED`: the present engines, which a resume starts, and the measured workload."""
    engines = [[e, seat.pool, str(seat.role), seat.tp] for e, seat in gateway.seats().items()]
    measured = {domain: asdict(work_of) for domain, work_of in work.items()}
    return {"engines": json.dumps(engines), "work": json.dumps(measured)}


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
