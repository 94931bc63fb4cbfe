"""Supervision of engines: an engine that dies or stops answering is restarted with the current weights, a bounded
number of times; a run without progress fails with the open leases and their owners.

Engines' counters become activity rows of the ledger, one per engine and interval.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from rollart.controller_loop import running_s
from rollart.errors import BudgetExceeded, EngineError, LeaseExpired, NoPlace, PartDied, RunFailed
from rollart.fleet import EnginePlacement
from rollart.leases import Expiry, Leases
from rollart.ledger.intervals import ENGINE_DID, EngineShares, ResourceState
from rollart.model import EngineId, EngineStats, WeightsRef
from rollart.ports import Engine, Recorder, RunEvent
from rollart.serving.gateway import Gateway
from rollart.supervise.supervisor import back_off_s

HEALTH_S = 5.0
"""Limit of a health check. An engine answers from its event loop even while it computes: seconds of silence mean that
it hangs."""


REAP_S = 0.5
"""Seconds to wait for the exit of a dead process."""


RESTARTS_FORGIVEN_AFTER_S = 600.0
"""Serving time since its last start that resets an engine's restart count: the bound is against crash loops."""


FIRST_STARTS = 3
"""Attempts at the first start of an engine: one failure may be chance, three are a misconfiguration."""

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


class EngineSupervisor:
    """Owns the start and restart of every engine. Any task may call `suspect`, any number of times. One task per engine
    waits for the end of the process or a suspicion, whichever comes first. `run` owns those tasks; while it runs, the
    fleet may `add` engines that it started and `release` engines that it stops.
    """

    def __init__(
        self,
        gateway: Gateway,
        leases: Leases,
        recorder: Recorder,
        *,
        shares: Mapping[EngineId, EngineShares],
        weights: Callable[[], WeightsRef],
        start_s: float,
        max_restarts: int = 5,
        on_gone: Callable[[EngineId, str], None] = lambda *_: None,
        patience_s: float = 0.0,
    ) -> None:
        """`patience_s`: how long the run waits for a node while no engine is left and none could be placed."""
        self._patience_s = patience_s
        self._waiting: dict[str, None] = {}
        self.waited = 0
        """Attempts to place an engine while none is left: they count as progress of the run."""
        self._gateway = gateway
        self._leases = leases
        self._recorder = recorder
        self._shares = shares
        self._weights = weights
        self._start_s = start_s
        self._max_restarts = max_restarts
        self._on_gone = on_gone
        self._suspicion: dict[str, asyncio.Event] = {}
        self._engines: dict[str, Engine] = {}
        self._starting: dict[str, int] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._never_started: set[str] = set()

    async def begin(self, parts: Sequence[EnginePart]) -> None:
        """Start all parts concurrently, each with up to `FIRST_STARTS` attempts. A part whose attempts all fail is
        given up if another one serves; otherwise `PartDied` with its last cause."""
        failed: dict[str, PartDied] = {}

        async def bring_up(part: EnginePart) -> None:
            for tries in range(1, FIRST_STARTS + 1):
                try:
                    return await self.start(part)
                except (PartDied, LeaseExpired, EngineError) as error:
                    cause = error.message.removeprefix(f"{part.id}: ")
                    self._event("engine_lost", part.id, cause=f"{cause} (start {tries} of {FIRST_STARTS})")
                    failed[part.id] = PartDied(
                        part.id, f"{cause}, {FIRST_STARTS} starts in a row", remedy=error.remedy or "see its log"
                    )
                if tries < FIRST_STARTS:
                    await asyncio.sleep(back_off_s(tries))
            self._never_started.add(part.id)

        async with asyncio.TaskGroup() as tasks:
            for part in parts:
                tasks.create_task(bring_up(part), name=f"start {part.id}")
        for part in parts:
            if part.id in self._never_started:
                if not self._gateway.spare(part.id):
                    raise failed[part.id]
                self._give_up(part.id, failed[part.id].message, FIRST_STARTS)

    async def run(self, parts: Sequence[EnginePart]) -> None:
        """Watch these engines and added ones forever. The first engine that cannot be kept alive ends the run."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for part in parts:
                if part.id not in self._never_started:
                    self.add(part)
            await asyncio.Event().wait()

    def add(self, part: EnginePart) -> None:
        """The engine has started: watch it from now on."""
        assert self._tasks is not None, "engines are added while `run` runs"
        self._watches[part.id] = self._tasks.create_task(self.watch(part), name=f"watch {part.id}")

    async def release(self, engine_id: EngineId) -> None:
        """Stop watching an engine whose end is intended: it is not restarted, and its exit is not a failure."""
        watch = self._watches.pop(engine_id, None)
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        self._suspicion.pop(engine_id, None)
        self._engines.pop(engine_id, None)
        self._waiting.pop(engine_id, None)

    async def give_up(self, engine_id: EngineId, cause: str) -> bool:
        """Stop restarting the engine. False, without any change, if no other engine serves."""
        if not self._gateway.spare(engine_id):
            return False
        await self.release(engine_id)
        self._gateway.leave(engine_id)
        self._event("engine_given_up", engine_id, cause=cause)
        return True

    def suspect(self, engine_id: EngineId) -> None:
        event = self._suspicion.get(engine_id)
        if event is not None:
            event.set()

    async def start(self, part: EnginePart, seat: EnginePlacement | None = None, *, cause: str = "") -> None:
        """Start the engine and let it join the gateway, in `seat` if it is new there. `cause`: the reason recorded with
        the startup time, if the start is a loss."""
        shares = self._shares[part.id]
        shares.hold(ResourceState.STARTUP, cause)
        self._suspicion[part.id] = asyncio.Event()
        weights = self._weights()
        self._starting[part.id] = weights.version
        try:
            async with self._leases.hold(part.id, "its start", self._start_s, Expiry.RESTART_PART):
                engine = await part.start(weights)
        finally:
            del self._starting[part.id]
        self._engines[part.id] = engine
        version = await self._gateway.bring_in(
            engine, loaded=weights.version, weights=self._weights, shares=shares, seat=seat
        )
        self._event("engine_started", part.id, version=version)

    def versions_in_use(self) -> tuple[int, ...]:
        """Versions that starting engines are reading: they must not be pruned."""
        return tuple(self._starting.values())

    async def watch(self, part: EnginePart) -> None:
        """Wait for the engine's end or a suspicion, then restart it; forever, unless it is given up.

        After `max_restarts` the engine is given up, with an event, if another one serves. If none serves and only a
        node is lacking, the run waits for a node, at most `patience_s`; otherwise `PartDied`.
        """
        loop = asyncio.get_running_loop()
        restarts, served_since = 0, loop.time()
        while True:
            cause = await self._trouble(part)
            if cause is None:
                continue
            if loop.time() - served_since > RESTARTS_FORGIVEN_AFTER_S:
                restarts = 0
            self._gateway.lose(part.id)
            self._event("engine_lost", part.id, cause=cause)
            lost_at, homeless = loop.time(), False
            while True:
                restarts += 1
                if restarts > self._max_restarts:
                    if self._gateway.spare(part.id):
                        self._give_up(part.id, cause, self._max_restarts)
                        return
                    self._wait(part.id, cause, homeless=homeless, waited_s=loop.time() - lost_at)
                try:
                    await self.start(part, cause=NO_NODE if part.id in self._waiting else ENGINE_RESTART)
                    served_since = loop.time()
                    if part.id in self._waiting:
                        del self._waiting[part.id]
                        restarts = 0
                    break
                except (PartDied, LeaseExpired, EngineError) as error:
                    cause, homeless = str(error), isinstance(error, NoPlace)
                    await asyncio.sleep(back_off_s(restarts))

    def _wait(self, engine_id: EngineId, cause: str, *, homeless: bool, waited_s: float) -> None:
        """No engine serves: record the wait for a node. `PartDied` if the wait is over or a node would not help."""
        if not homeless or not self._patience_s:
            raise PartDied(
                engine_id,
                f"{cause}, after {self._max_restarts} restarts",
                remedy="see its log; rollart launch --resume continues the run",
            )
        if waited_s >= self._patience_s:
            raise PartDied(
                engine_id,
                f"no engine is left, and no node came for one within {self._patience_s:g} s: {cause}",
                remedy="start nodes, then rollart launch --resume",
            )
        self.waited += 1
        if not self._waiting:
            self._event("no_engine_left", engine_id, cause=cause, wait_s=self._patience_s)
        self._waiting[engine_id] = None
        self._shares[engine_id].hold(ResourceState.DOWN, NO_NODE)

    def _give_up(self, engine_id: EngineId, cause: str, restarts: int) -> None:
        self._gateway.leave(engine_id)
        self._waiting.pop(engine_id, None)
        self._event("engine_given_up", engine_id, cause=cause, restarts=restarts)
        self._on_gone(engine_id, cause)

    async def _trouble(self, part: EnginePart) -> str | None:
        """The cause, once the engine is gone; None if a suspicion was wrong and the engine serves again.

        A broken connection may be noticed before the exit that broke it, and the exit gives the better cause.
        """
        suspicion = self._suspicion[part.id]
        died = asyncio.Event()
        cause: list[str] = []

        async def ended() -> None:
            cause.append(await part.wait())
            died.set()
            suspicion.set()

        async with asyncio.TaskGroup() as tasks:
            waiter = tasks.create_task(ended(), name=f"end of {part.id}")
            await suspicion.wait()
            suspicion.clear()
            serves = not died.is_set() and await self._rejoin(part)
            if not serves:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REAP_S):
                        await died.wait()
            waiter.cancel()
        if cause:
            return cause[0]
        return None if serves else self._gateway.condemned(part.id) or "it stopped answering"

    async def _rejoin(self, part: EnginePart) -> bool:
        """True if a suspected engine passes a health check: it continues, or joins the gateway again. A slow turn or a
        single failed connection is no reason for a restart."""
        engine, shares = self._engines[part.id], self._shares[part.id]
        if self._gateway.condemned(part.id):
            return False
        try:
            async with self._leases.hold(part.id, "its health check", HEALTH_S, Expiry.RESTART_PART):
                if not await engine.healthy():
                    return False
            if not self._gateway.trust(part.id):
                await self._gateway.bring_in(engine, loaded=None, weights=self._weights, shares=shares)
        except (EngineError, LeaseExpired):
            return False
        return True

    def _event(self, kind: str, subject: str, **fields: str | int | float | None) -> None:
        self._recorder.event(RunEvent(asyncio.get_running_loop().time(), kind, subject, fields))


class Watchdog:
    """Checks the run every `period_s`: a run without progress for `stall_s` fails, and the error names the longest
    waits; an exceeded budget ends the run. It waits only for its own timer and for `check`. `seconds` and `spent_usd`
    cover all lives of the run."""

    def __init__(
        self,
        leases: Leases,
        recorder: Recorder,
        *,
        progress: Callable[[], int],
        stall_s: float,
        check: Callable[[], Awaitable[None]],
        period_s: float = 1.0,
        seconds: Callable[[], float] = lambda: 0.0,
        budget_wall_s: float | None = None,
        budget_usd: float | None = None,
        spent_usd: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._leases = leases
        self._recorder = recorder
        self._progress = progress
        self._stall_s = stall_s
        self._check = check
        self._period_s = period_s
        self._seconds = seconds
        self._wall_s = budget_wall_s
        self._usd = budget_usd
        self._spent = spent_usd

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        changed = running_s()
        last = self._progress()
        while True:
            await asyncio.sleep(self._period_s)
            await self._check()
            now = running_s()
            if self._progress() != last:
                last, changed = self._progress(), now
            self._budget()
            if now - changed > self._stall_s:
                holders = "; ".join(self._leases.describe()) or "no lease is open"
                self._recorder.event(RunEvent(loop.time(), "stalled", "run", {"holders": holders}))
                raise RunFailed(
                    f"no progress for {now - changed:.0f} s: {holders}", remedy="rollart launch --resume continues"
                )

    def _budget(self) -> None:
        if self._wall_s is not None and self._seconds() > self._wall_s:
            raise BudgetExceeded(
                f"the run has taken {self._seconds():.0f} s of a budget of {self._wall_s:.0f} s",
                remedy="raise budget.wall_s, then rollart launch --resume",
            )
        if self._usd is not None and self._spent() > self._usd:
            raise BudgetExceeded(
                f"the run has cost ${self._spent():.4f} of a budget of ${self._usd:.4f}",
                remedy="raise budget.usd, then rollart launch --resume",
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
        self._at = asyncio.get_running_loop().time()
        self._seen = {engine: _counted(stats) for engine, stats in (await self._stats()).items()}
        while True:
            await asyncio.sleep(EVERY_S)
            await self.look()

    async def look(self) -> None:
        now = asyncio.get_running_loop().time()
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
