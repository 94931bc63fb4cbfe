"""Changes of tensor parallelism that follow preemption during a run (RollPacker, arXiv 2509.21009, §3.2).

A change is decided after each step from the engines' counters, and applied by the fleet. `next_tensor_parallelism`
gives RollPacker's decision; here a change moves whole engines, so the cost of preemption is weighed against the cost of
draining and starting. Units: engine-seconds, of engines of the current size.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from rollart.control.strategy import RolloutStrategy
from rollart.errors import RollartError
from rollart.fleet import EngineKind, EngineRole, FleetMove, FleetMoveKind
from rollart.leases import Expiry, Leases
from rollart.ledger.events import PLAN_ADOPTED
from rollart.model import EngineId, Group
from rollart.policy.workload import WorkloadMeter
from rollart.ports import Fleet, Recorder, RunEvent
from rollart.serving.gateway import Gateway
from rollart.supervise.rebalance import adopted_plan, order_moves, reverse_drain
from serverless.retries import DRAINED_ENGINE


@dataclass(frozen=True, slots=True)
class TensorParallelRule:
    """Bounds and thresholds. `sizes` are the TP sizes that the model's heads allow, ascending, each twice the previous
    one; a TP group stays within the `devices` of one host.

    A halving that had to be reverted doubles the quiet steps before the next halving, up to `most_quiet_steps`; a
    doubling for another cause resets them. So a load that needs a size is disturbed ever less often.
    """

    sizes: tuple[int, ...]
    devices: int
    rise: float = 1.05
    quiet_steps: int = 4
    most_quiet_steps: int = 64
    noise: int = 1
    """Preemptions per step below which an increase is ignored."""


@dataclass(frozen=True, slots=True)
class TensorParallelState:
    """State between steps. Keep one for each kind of round: the preemptions of short and long rounds of tail batching
    are not comparable."""

    tp: int
    preemptions: int | None = None
    quiet: int = 0
    patience: int | None = None
    """Quiet steps before the next halving; None: the rule's."""
    since_halved: int | None = None


def next_tensor_parallelism(
    rule: TensorParallelRule, state: TensorParallelState, preemptions: int
) -> tuple[TensorParallelState, str]:
    """The next state after a rollout step with `preemptions` preemptions and, where its `tp` differs, the reason ('' if
    not).

    An increase to more than `rise` times the previous step's doubles the TP size (weights take less of each device, so
    there is more KV per sequence); `quiet_steps` consecutive steps without preemption halve it (more engines, less
    communication). A constant number of preemptions changes nothing.
    """
    patience = state.patience or rule.quiet_steps
    quiet = 0 if preemptions else state.quiet + 1
    since = None if state.since_halved is None else state.since_halved + 1
    same = replace(state, preemptions=preemptions, quiet=quiet, patience=patience, since_halved=since)
    before = state.preemptions
    if before is not None and preemptions >= rule.noise and preemptions > rule.rise * before:
        if state.tp == rule.sizes[-1]:
            return same, ""
        regret = since is not None and since <= patience
        patience = min(2 * patience, rule.most_quiet_steps) if regret else rule.quiet_steps
        grown = replace(same, tp=2 * state.tp, patience=patience, since_halved=None)
        return grown, f"preemptions {before} -> {preemptions}: tp {state.tp} -> {2 * state.tp}"
    if quiet >= patience and state.tp > rule.sizes[0]:
        halved = replace(same, tp=state.tp // 2, quiet=0, since_halved=0)
        return halved, f"no preemption in {quiet} steps: tp {state.tp} -> {state.tp // 2}"
    return same, ""


LEAST_GAIN = 0.02
"""Assumed share of engine time that smaller engines save, by fewer all-reduces. The true share depends on the batch;
this is the least that is worth a change."""


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """Counters of the engines of one kind, since some moment."""

    preemptions: int = 0
    computed_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def __add__(self, other: EngineCounters) -> EngineCounters:
        return EngineCounters(
            self.preemptions + other.preemptions,
            self.computed_tokens + other.computed_tokens,
            self.prefill_s + other.prefill_s,
            self.decode_s + other.decode_s,
        )

    def since(self, before: EngineCounters) -> EngineCounters:
        """The increase since `before`; all of it where an engine restarted in between."""
        if self.preemptions < before.preemptions or self.computed_tokens < before.computed_tokens:
            return self
        return EngineCounters(
            self.preemptions - before.preemptions,
            self.computed_tokens - before.computed_tokens,
            max(self.prefill_s - before.prefill_s, 0.0),
            max(self.decode_s - before.decode_s, 0.0),
        )


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """One step of one kind of engine: its seconds, the engines that served, their counters, and the mean context of a
    turn in tokens. `speedup`: how much faster the same devices generate in engines of twice the size when the KV memory
    is full in both, since a larger engine keeps more KV and runs larger batches; 1 if unknown."""

    step_s: float
    engines: int
    did: EngineCounters
    context: float
    speedup: float = 1.0


def preemption_loss_s(step: StepMeasurement) -> float:
    """Engine-seconds spent on computing preempted requests again: one context per preemption, at the measured prefill
    time per token; never more than all prefills."""
    did = step.did
    if not did.preemptions or not did.computed_tokens:
        return 0.0
    return min(did.preemptions * step.context * did.prefill_s / did.computed_tokens, did.prefill_s)


def resharding_pays(step: StepMeasurement, *, grows: bool, move_s: float, horizon_s: float) -> tuple[bool, str]:
    """Whether to change, and the reason as text. Larger engines save at most the preemption loss and, of the remaining
    compute, the gain of larger batches; smaller ones save `LEAST_GAIN` of the time; either over the steps of the
    horizon. Each engine is unavailable for `move_s`, once."""
    if step.step_s <= 0:
        return False, "no time has passed"
    lost = preemption_loss_s(step)
    busy = step.did.prefill_s + step.did.decode_s - lost
    per_step = lost + busy * (1 - 1 / step.speedup) if grows else LEAST_GAIN * step.step_s * step.engines
    gain, cost = per_step * horizon_s / step.step_s, move_s * step.engines
    text = f"{gain:.0f} engine-seconds in {horizon_s:.0f} s for {cost:.0f} of moving {step.engines} engines"
    return gain > cost, text


def resharding_moves(pool: str, role: EngineRole, tp: int, to: int, engines: int) -> list[FleetMove]:
    """Drains and starts with as few engines unavailable at a time as possible: two drains and a start of twice the
    size, or a drain and two starts of half the size. An odd engine keeps its size."""
    drain = FleetMove(FleetMoveKind.DRAIN, pool, tp, 1, before=role)
    start = FleetMove(FleetMoveKind.START, pool, to, 1, after=role)
    if to > tp:
        return [drain, drain, start] * (engines // 2)
    return [drain, start, start] * engines


EngineGroup = tuple[str, EngineRole]
"""Pool and role. Its engines have one size, except during a change."""


@dataclass(frozen=True, slots=True)
class ReshardSettings:
    """`rules` by pool; a pool without a rule keeps its sizes. A change must pay for itself within `horizon_s`. Before
    the first change, `restart_s` is the estimate of a move's duration. `move_s` is the lease of one move. `refuses`
    returns the reason why a kind of engine cannot be started anywhere, or ''."""

    rules: Mapping[str, TensorParallelRule]
    horizon_s: float = 3600.0
    restart_s: float = 120.0
    move_s: float = 600.0
    refuses: Callable[[EngineKind], str] = lambda _: ""
    speed: Callable[[EngineKind, float], float] = lambda *_: 1.0
    """Tokens/s per device of a kind of engine whose KV memory is full of sequences of a context, in tokens."""


@dataclass(eq=False)
class Resharder(RolloutStrategy):
    """A task of the run: `run` never returns. It waits for a publish (`published`), for the engines' counters, and for
    the fleet; no other task waits for it. Its settings give the possible sizes. `move_by` sets the fleet; without a
    fleet the task does nothing.

    A failed move ends the change: the engines drained for it are started again, and that size is not tried again in
    this run. Invariant: at most one change runs at a time, and a step in which engines moved is not evaluated.
    """

    gateway: Gateway
    leases: Leases
    recorder: Recorder
    meter: WorkloadMeter
    _: KW_ONLY
    settings: ReshardSettings
    round_: Callable[[], str] = lambda: ""

    def __post_init__(self) -> None:
        self._fleet: Fleet | None = None
        self._stepped = asyncio.Event()
        self._ended: tuple[float, str] = (0.0, "")
        self._began: float | None = None
        self._counted: dict[EngineId, EngineCounters] = {}
        self._states: dict[tuple[EngineGroup, str], TensorParallelState] = {}
        """By engines and kind of round; all kinds of round share the size."""
        self._refused: set[EngineKind] = set()
        self._move_s = self.settings.restart_s
        self.moving = False

    def move_by(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def background(self) -> Mapping[str, Callable[[], Coroutine[Any, Any, None]]]:
        return {"parallelism": self.run}

    def published(self, version: int, consumed: Sequence[Group]) -> None:
        """Signal the end of a step, which belongs to the current round."""
        self._ended = asyncio.get_running_loop().time(), self.round_()
        self._stepped.set()

    async def run(self) -> None:
        self._began = asyncio.get_running_loop().time()
        while True:
            await self._stepped.wait()
            self._stepped.clear()
            ended, round_ = self._ended
            if self._fleet is not None and await self._look(ended, round_):
                # The counters of the meantime belong to no step: the next evaluated step begins with the next publish.
                self._stepped.clear()
                await self._stepped.wait()
                self._stepped.clear()
                await self._count()
            self._began = asyncio.get_running_loop().time()

    async def _look(self, ended: float, round_: str) -> bool:
        """Evaluate the step for each group of engines. True if engines moved."""
        did = await self._count()
        seats, moved = self.gateway.seats(), False
        by_kind: dict[EngineKind, list[EngineId]] = {}
        for engine in sorted(self.gateway.stable()):
            if engine in seats:
                by_kind.setdefault(seats[engine].kind, []).append(engine)
        groups: dict[EngineGroup, EngineKind] = {}
        for kind in sorted(by_kind, key=lambda k: (-len(by_kind[k]), k)):  # most engines define the kind
            groups.setdefault((kind.pool, kind.role), kind)
        for group, kind in groups.items():
            engines = by_kind[kind]
            counted = sum((did.get(e, EngineCounters()) for e in engines), EngineCounters())
            step = StepMeasurement(ended - (self._began or 0.0), len(engines), counted, self._context())
            moved |= await self._judge(group, kind, step, round_)
        return moved

    async def _judge(self, group: EngineGroup, kind: EngineKind, step: StepMeasurement, round_: str) -> bool:
        rule = self.settings.rules.get(kind.pool)
        if rule is None or kind.tp not in rule.sizes:
            return False
        key = group, round_
        before = self._states.get(key, TensorParallelState(kind.tp))
        if before.tp != kind.tp:
            before = replace(before, tp=kind.tp, preemptions=None, quiet=0)
        after, why = next_tensor_parallelism(rule, before, step.did.preemptions)
        if after.tp == kind.tp:
            self._states[key] = after
            return False
        target = kind._replace(tp=after.tp)
        self._states[key] = replace(after, tp=kind.tp, quiet=0, since_halved=before.since_halved)
        if after.tp > kind.tp and step.engines < 2:
            return self._kept(kind, why, "one engine cannot be two halves of another")
        refusal = self.settings.refuses(target)
        if refusal or target in self._refused:
            if target not in self._refused:
                self._refused.add(target)
                self._event("rebalance_failed", why, move=f"tp {kind.tp} → {target.tp} on {kind.pool}", cause=refusal)
            return False
        if after.tp > kind.tp and step.context:
            speed = self.settings.speed
            step = replace(step, speedup=speed(target, step.context) / speed(kind, step.context))
        pays, figures = resharding_pays(
            step, grows=after.tp > kind.tp, move_s=self._move_s, horizon_s=self.settings.horizon_s
        )
        if not pays:
            return self._kept(kind, why, figures)
        if await self._change(kind, target, step.engines, f"{why}; {figures}"):
            self._states[key] = after
        return True

    async def _change(self, kind: EngineKind, target: EngineKind, engines: int, why: str) -> bool:
        """Change the group engine by engine. False if a move failed."""
        assert self._fleet is not None
        self._price(kind, target)
        began, made = asyncio.get_running_loop().time(), 0
        moves = resharding_moves(kind.pool, kind.role, kind.tp, target.tp, engines)
        pending: list[FleetMove] = []
        drains, starts = (2, 1) if target.tp > kind.tp else (1, 2)
        left = (drains, starts)
        for move in order_moves(moves, serving=len(self.gateway.stable()), free=self._fleet.free()):
            try:
                await self._step(move)
            except RollartError as error:
                self._refused.add(target)
                self._event("rebalance_failed", why, move=str(move), cause=str(error))
                await self._bring_back(pending, left)
                return False
            made += 1
            if move.kind is FleetMoveKind.DRAIN:
                pending.append(move)
                left = (left[0] - 1, left[1])
            else:
                left = (left[0], left[1] - 1)
            if left == (0, 0):
                pending, left = [], (drains, starts)
        now = asyncio.get_running_loop().time()
        self._move_s = (now - began) / max(made // (drains + starts), 1)
        self._event(PLAN_ADOPTED, "fleet", **adopted_plan(self.gateway, self.meter.work()))
        self._event(
            "parallelism_changed",
            f"{kind.role} on {kind.pool}",
            before=kind.tp,
            after=target.tp,
            moves=made,
            seconds=round(now - began, 3),
            why=why,
        )
        return True

    async def _bring_back(self, drained: list[FleetMove], left: tuple[int, int]) -> None:
        """Restart the engines drained for the failed move, as far as their devices are free. If no engine serves, the
        run waits for the restart: its last error ends the run."""
        assert self._fleet is not None
        for move in drained:
            if move.tp > self._fleet.free().get(move.pool, 0):
                continue
            back = reverse_drain(move)
            try:
                await DRAINED_ENGINE.run(
                    functools.partial(self._step, back),
                    lambda error: isinstance(error, RollartError) and not self.gateway.stable(),
                )
            except RollartError as error:
                if not self.gateway.stable():
                    raise
                self._event("rebalance_failed", "undo", move=str(back), cause=str(error))

    async def _step(self, move: FleetMove) -> None:
        assert self._fleet is not None
        self.moving = True
        try:
            async with self.leases.hold("parallelism", str(move), self.settings.move_s, Expiry.RETRY):
                await self._fleet.apply(move)
        finally:
            self.moving = False

    def _price(self, kind: EngineKind, target: EngineKind) -> None:
        """Set the price of the new kind from the price of its devices: an engine without a price would attract every
        trajectory."""
        routes = self.gateway.turns.router.routes
        prices = routes.prices
        if prices is None or target in prices.engines or kind not in prices.engines:
            return
        engines = {**prices.engines, target: prices.engines[kind] * target.tp / kind.tp}
        kv = {**prices.kv, target: prices.kv.get(kind, 0.0)}
        self.gateway.turns.follow(replace(routes, prices=replace(prices, engines=engines, kv=kv)))

    async def _count(self) -> dict[EngineId, EngineCounters]:
        """The increase of each responding engine's counters since the last call."""
        found: dict[EngineId, EngineCounters] = {}
        for engine, stats in (await self.gateway.stats()).items():
            computed = stats.prompt_tokens - stats.cached_tokens
            now = EngineCounters(stats.preemptions, computed, stats.prefill_seconds, stats.decode_seconds)
            found[engine] = now.since(self._counted.get(engine, EngineCounters()))
            self._counted[engine] = now
        return found

    def _context(self) -> float:
        """Mean context of a turn in finished trajectories, in tokens."""
        work = self.meter.work().values()
        whole = sum(w.share for w in work)
        if not whole:
            return 0.0
        later = [(w, (w.turns - 1) * w.new_tokens + w.turns * w.output_tokens) for w in work]
        return sum(w.share * (w.first_tokens + more / 2) for w, more in later) / whole

    def _kept(self, kind: EngineKind, why: str, figures: str) -> bool:
        self._event("parallelism_kept", f"{kind.role} on {kind.pool}", tp=kind.tp, why=f"{why}; {figures}")
        return False

    def _event(self, kind: str, subject: str, **fields: str | int | float | bool | None) -> None:
        self.recorder.event(RunEvent(asyncio.get_running_loop().time(), kind, subject, fields))
