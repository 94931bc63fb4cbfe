"""Supervision of engines: an engine that dies or stops answering is restarted with the current weights, a bounded
number of times; a run without progress fails with the open leases and their owners.

Engines' counters become activity rows of the ledger, one per engine and interval.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

from rollart.controller_loop import running_s
from rollart.errors import BudgetExceeded, EngineError, LeaseExpired, NoPlace, PartDied, RollartError, RunFailed
from rollart.fleet import EnginePlacement
from rollart.leases import Expiry, Leases
from rollart.ledger.events import ENGINE_DID
from rollart.ledger.intervals import EngineShares, ResourceState
from rollart.model import EngineId, EngineStats, WeightsRef
from rollart.money import dollars
from rollart.ports import Engine, Recorder, RunEvent
from rollart.serving.gateway import Gateway
from rollart.settings.run import BudgetSpec
from rollart.supervise.supervisor import SupervisedPart, Supervisor, loop_time
from serverless.retries import ENGINE_FIRST_START, PART_START

HEALTH_S = 5.0
"""Limit of a health check. An engine answers from its event loop even while it computes: seconds of silence mean that
it hangs."""

REAP_S = 0.5
"""Seconds to wait for the exit of a dead process."""

MAX_RESTARTS = 5
"""Consecutive restarts after which an engine is given up if another one serves."""

RESTARTS_FORGIVEN_AFTER_S = 600.0
"""Serving time since its last start that resets an engine's restart count: the bound is against crash loops."""

ENGINE_RESTART = "engine_restart"
"""The cause of the start of an engine that was lost."""

NO_NODE = "no_node"
"""The cause of the wait for a node: no node can hold the engine, and no other engine serves."""


class EnginePart(Protocol):
    """An engine's process as supervision sees it."""

    @property
    def id(self) -> EngineId: ...

    async def start(self, weights: WeightsRef) -> Engine:
        """Start the process with these weights; a process left from before is killed first. `PartDied` if it fails."""

    async def wait(self) -> str:
        """Returns when the process ends, with the cause as text."""


@dataclass(slots=True, kw_only=True)
class SupervisedEngine(SupervisedPart):
    """An engine through all of its restarts."""

    part: EnginePart
    client: Engine | None = None
    """The engine while it serves or is suspected."""
    suspected: asyncio.Event = field(default_factory=asyncio.Event)
    reads: int | None = None
    """The version that it loads while it starts."""
    serves_since: float = 0.0
    waits: bool = False
    """True while it waits for a node, and no other engine serves."""
    watch: asyncio.Task[None] | None = None

    @property
    def id(self) -> EngineId:
        return self.part.id


@dataclass(eq=False)
class EngineSupervisor(Supervisor[SupervisedEngine]):
    """Owns the start and restart of every engine. Any task may call `suspect`, any number of times. One task per engine
    waits for the end of the process or a suspicion, whichever comes first, and restarts the engine. `run` owns those
    tasks; while it runs, the fleet may `add` engines that it started and `release` engines that it stops.

    If no engine serves and only a node is lacking, the run waits for a node, at most `patience_s`.
    """

    failures = (PartDied, LeaseExpired, EngineError)
    max_restarts = MAX_RESTARTS

    gateway: Gateway
    leases: Leases
    recorder: Recorder
    _: KW_ONLY
    shares: Mapping[EngineId, EngineShares]
    weights: Callable[[], WeightsRef]
    start_s: float
    on_gone: Callable[[EngineId, str], None] = lambda *_: None
    patience_s: float = 0.0
    waited: int = field(default=0, init=False)
    """Attempts to place an engine while none is left: they count as progress of the run."""
    _engines: dict[EngineId, SupervisedEngine] = field(default_factory=dict, init=False)
    _tasks: asyncio.TaskGroup | None = field(default=None, init=False)

    async def begin(self, parts: Sequence[EnginePart]) -> None:
        """Start all parts concurrently, each with the attempts of `ENGINE_FIRST_START`. A part whose attempts all fail
        is given up if another one serves; otherwise `PartDied` with its last cause."""
        failed: dict[EngineId, PartDied] = {}
        starts = ENGINE_FIRST_START.attempts

        async def first_start(part: EnginePart) -> None:
            tries = 0

            async def start() -> None:
                nonlocal tries
                tries += 1
                try:
                    await self.bring_up(part)
                except self.failures as error:
                    cause = error.message.removeprefix(f"{part.id}: ")
                    self._event("engine_lost", part.id, cause=f"{cause} (start {tries} of {starts})")
                    raise

            try:
                await ENGINE_FIRST_START.run(start, self.failures)
            except self.failures as error:
                cause, remedy = error.message.removeprefix(f"{part.id}: "), error.remedy or "see its log"
                failed[part.id] = PartDied(part.id, f"{cause}, {starts} starts in a row", remedy=remedy)

        async with asyncio.TaskGroup() as tasks:
            for part in parts:
                tasks.create_task(first_start(part), name=f"start {part.id}")
        for part in parts:
            if (error := failed.get(part.id)) is not None:
                if not self.gateway.spare(part.id):
                    raise error
                self._give_up(part.id, error.message, starts)

    async def run(self, parts: Sequence[EnginePart]) -> None:
        """Supervise these engines and added ones forever. The first engine that cannot be kept alive ends the run."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for part in parts:
                if part.id in self._engines:  # else it was given up
                    self.add(part.id)
            await asyncio.Event().wait()

    def add(self, engine_id: EngineId) -> None:
        """The engine has started: supervise it from now on."""
        assert self._tasks is not None, "engines are added while `run` runs"
        engine = self._engines[engine_id]
        engine.watch = self._tasks.create_task(self.keep(engine), name=f"watch {engine_id}")

    async def release(self, engine_id: EngineId) -> None:
        """Stop supervising an engine whose end is intended: it is not restarted, and its exit is not a failure."""
        engine = self._engines.pop(engine_id, None)
        if engine is not None and engine.watch is not None:
            engine.watch.cancel()
            await asyncio.gather(engine.watch, return_exceptions=True)

    async def abandon(self, engine_id: EngineId, cause: str) -> bool:
        """Stop restarting the engine. False, without any change, if no other engine serves."""
        if not self.gateway.spare(engine_id):
            return False
        await self.release(engine_id)
        self.gateway.leave(engine_id)
        self._event("engine_given_up", engine_id, cause=cause)
        return True

    def suspect(self, engine_id: EngineId) -> None:
        engine = self._engines.get(engine_id)
        if engine is not None:
            engine.suspected.set()

    async def bring_up(
        self, part: EnginePart, seat: EnginePlacement | None = None, *, cause: str = ""
    ) -> SupervisedEngine:
        """Start the engine and let it join the gateway, in `seat` if it is new there. `cause`: the reason recorded with
        the startup time, if the start is a loss."""
        engine, shares, weights = self._engines.get(part.id), self.shares[part.id], self.weights()
        if engine is None:
            engine = self._engines[part.id] = SupervisedEngine(part=part)
        shares.hold(ResourceState.STARTUP, cause)
        engine.suspected.clear()
        engine.reads = weights.version
        try:
            async with self.leases.hold(part.id, "its start", self.start_s, Expiry.RESTART_PART):
                client = await part.start(weights)
        finally:
            engine.reads = None
        version = await self.gateway.bring_in(
            client, loaded=weights.version, weights=self.weights, shares=shares, seat=seat
        )
        engine.client = client
        self._event("engine_started", part.id, version=version)
        return engine

    def versions_in_use(self) -> tuple[int, ...]:
        """Versions that starting engines are reading: they must not be pruned."""
        return tuple(engine.reads for engine in self._engines.values() if engine.reads is not None)

    async def start(self, part: SupervisedEngine, *, restart: bool) -> None:
        if restart:
            await self.bring_up(part.part, cause=NO_NODE if part.waits else ENGINE_RESTART)
        part.serves_since, part.waits = loop_time(), False

    async def watch(self, part: SupervisedEngine) -> str:
        while (cause := await self._trouble(part)) is None:
            pass
        if loop_time() - part.serves_since > RESTARTS_FORGIVEN_AFTER_S:
            part.restarts = 0
        return cause

    def cause(self, part: SupervisedEngine, error: RollartError) -> str:
        return str(error)

    async def lose(self, part: SupervisedEngine, cause: str) -> None:
        if part.client is None:
            await asyncio.sleep(PART_START.pause_s(part.restarts))
            return
        part.client = None
        self.gateway.lose(part.id)
        self._event("engine_lost", part.id, cause=cause)

    def spare(self, part: SupervisedEngine) -> bool:
        return self.gateway.spare(part.id)

    def check_patience(self, part: SupervisedEngine, cause: str, failed: Exception | None, seconds: float) -> None:
        if not isinstance(failed, NoPlace) or not self.patience_s:
            raise PartDied(
                part.id,
                f"{cause}, after {MAX_RESTARTS} restarts",
                remedy="see its log; rollart launch --resume continues the run",
            )
        if seconds >= self.patience_s:
            raise PartDied(
                part.id,
                f"no engine is left, and no node came for one within {self.patience_s:g} s: {cause}",
                remedy="start nodes, then rollart launch --resume",
            )
        self.waited += 1
        if not any(engine.waits for engine in self._engines.values()):
            self._event("no_engine_left", part.id, cause=cause, wait_s=self.patience_s)
        part.waits = True
        self.shares[part.id].hold(ResourceState.DOWN, NO_NODE)

    def give_up(self, part: SupervisedEngine, cause: str) -> None:
        self._give_up(part.id, cause, MAX_RESTARTS)

    def _give_up(self, engine_id: EngineId, cause: str, restarts: int) -> None:
        del self._engines[engine_id]
        self.gateway.leave(engine_id)
        self._event("engine_given_up", engine_id, cause=cause, restarts=restarts)
        self.on_gone(engine_id, cause)

    async def _trouble(self, engine: SupervisedEngine) -> str | None:
        """The cause, once the engine is gone; None if a suspicion was wrong and the engine serves again.

        A broken connection may be noticed before the exit that broke it, and the exit gives the better cause.
        """
        died = asyncio.Event()
        cause: list[str] = []

        async def ended() -> None:
            cause.append(await engine.part.wait())
            died.set()
            engine.suspected.set()

        async with asyncio.TaskGroup() as tasks:
            waiter = tasks.create_task(ended(), name=f"end of {engine.id}")
            await engine.suspected.wait()
            engine.suspected.clear()
            serves = not died.is_set() and await self._rejoin(engine)
            if not serves:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REAP_S):
                        await died.wait()
            waiter.cancel()
        if cause:
            return cause[0]
        return None if serves else self.gateway.condemned(engine.id) or "it stopped answering"

    async def _rejoin(self, engine: SupervisedEngine) -> bool:
        """True if a suspected engine passes a health check: it continues, or joins the gateway again. A slow turn or a
        single failed connection is no reason for a restart."""
        client = engine.client
        if client is None or self.gateway.condemned(engine.id):
            return False
        try:
            async with self.leases.hold(engine.id, "its health check", HEALTH_S, Expiry.RESTART_PART):
                if not await client.healthy():
                    return False
            if not self.gateway.trust(engine.id):
                await self.gateway.bring_in(client, loaded=None, weights=self.weights, shares=self.shares[engine.id])
        except (EngineError, LeaseExpired):
            return False
        return True

    def _event(self, kind: str, subject: str, **fields: str | int | float | None) -> None:
        self.recorder.event(RunEvent(loop_time(), kind, subject, fields))


CHECK_S = 1.0
"""Seconds between two checks of a run's progress and budget."""


async def watch_progress(
    leases: Leases,
    recorder: Recorder,
    *,
    progress: Callable[[], int],
    stall_s: float,
    check: Callable[[], Awaitable[None]],
    budget: BudgetSpec,
    seconds: Callable[[], float],
    spent_usd: Callable[[], float],
    spent: Callable[[float], None] = lambda usd: None,
) -> None:
    """Check the run every `CHECK_S`: a run without progress for `stall_s` fails, and the error names the longest
    waits; an exceeded budget ends the run. Waits only for its own timer and for `check`. `seconds` and `spent_usd`
    cover all lives of the run; `spent` is called with the dollars of a run that has a budget in dollars."""
    changed = running_s()
    last = progress()
    while True:
        await asyncio.sleep(CHECK_S)
        await check()
        now = running_s()
        if progress() != last:
            last, changed = progress(), now
        if budget.wall_s is not None and seconds() > budget.wall_s:
            raise BudgetExceeded(
                f"the run has taken {seconds():.0f} s of a budget of {budget.wall_s:.0f} s",
                remedy="raise budget.wall_s, then rollart launch --resume",
            )
        if budget.usd is not None:
            usd = spent_usd()
            spent(usd)
            if usd > budget.usd:
                raise BudgetExceeded(
                    f"the run has cost {dollars(usd)} of a budget of {dollars(budget.usd)}",
                    remedy="raise budget.usd, then rollart launch --resume",
                )
        if now - changed > stall_s:
            holders = "; ".join(leases.describe()) or "no lease is open"
            recorder.event(RunEvent(loop_time(), "stalled", "run", {"holders": holders}))
            raise RunFailed(
                f"no progress for {now - changed:.0f} s: {holders}", remedy="rollart launch --resume continues"
            )


EVERY_S = 10.0
"""Seconds between two readings. Each costs the controller as much time as a request, and a row per engine."""

COUNTERS = (
    "prompt_tokens",
    "generated_tokens",
    "cached_tokens",
    "external_tokens",
    "prefill_seconds",
    "decode_seconds",
    "preemptions",
    "ended",
    "steps",
    "latencies",
    "latency_seconds",
)
"""Counters of `EngineStats` that grow from the start of an engine."""


class EngineMeter:
    """`run` never returns; it waits for its timer and for the engines' counters. `look` is called once more at the end
    of the run. A restarted engine counts from zero. The activity of an engine between its last reading and its death
    is lost."""

    def __init__(self, stats: Callable[[], Awaitable[Mapping[EngineId, EngineStats]]], recorder: Recorder) -> None:
        self._stats = stats
        self._recorder = recorder
        self._seen: dict[EngineId, dict[str, float]] = {}
        self._at = 0.0

    async def run(self) -> None:
        self._at = loop_time()
        self._seen = {engine: _counted(stats) for engine, stats in (await self._stats()).items()}
        while True:
            await asyncio.sleep(EVERY_S)
            await self.look()

    async def look(self) -> None:
        now = loop_time()
        for engine, stats in (await self._stats()).items():
            before, counted = self._seen.get(engine, {}), _counted(stats)
            if any(counted[name] < value for name, value in before.items()):
                before = {}
            did = {name: value - before.get(name, 0.0) for name, value in counted.items()}
            self._seen[engine] = counted
            if did["prompt_tokens"] or did["generated_tokens"]:
                fields = {"seconds": now - self._at, "kv_used": stats.kv_used, "running": stats.running, **did}
                self._recorder.event(RunEvent(now, ENGINE_DID, engine, fields))
        self._at = now


def _counted(stats: EngineStats) -> dict[str, float]:
    return {name: float(getattr(stats, name)) for name in COUNTERS}
