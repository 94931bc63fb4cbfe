"""The simplest simulated parts: they implement the ports, take time on the loop and nothing else.

With all durations at 0 they are the no-op parts of `benchmarks/controller.py`; on the virtual loop they serve the tests
of the invariants. Every draw comes from a `random.Random` of the entity's own, seeded by (seed, id). On a
`SimulatedSite` the product's own fleet and supervision start and stop engines.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rollart.errors import EngineError, PartDied, RunFailed, TrainerError, TrainerRefused
from rollart.fleet import EngineKind, EnginePlacement
from rollart.ledger.intervals import EngineShares, ResourceClock
from rollart.model import (
    Completion,
    EngineId,
    EngineStats,
    FinishReason,
    GenerateRequest,
    InfraFault,
    Observation,
    Outcome,
    PauseMode,
    Scored,
    Step,
    TrainReport,
    TrainSample,
    Trajectory,
    VersionSpan,
    WeightsRef,
)
from rollart.ports import Engine, Recorder
from rollart.sim.trainers import group_mean_advantages
from rollart.supervise.fleet import ReservedEngine
from serverless.types import FaultKind


class FailableEngine(Engine, Protocol):
    """An engine in a simulated process: with `fail` every call to it fails."""

    fail: bool

    def restart(self, version: int) -> None: ...


class WordTokenizer:
    """One token per character code: enough for parts without meaningful text."""

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def token(self, token_id: int) -> str:
        return chr(token_id)

    def token_id(self, text: str) -> int:
        return ord(text)


class SimulatedEngine:
    """Generates `tokens` tokens in `seconds(rng)`; keeps requests through a pause and spans their versions.

    A request in flight at a change of weights gets its first half under the old and its second half under the new
    version; after a pause with ABORT it ends without tokens, when its time is over. `fail` makes the engine refuse
    everything, retryably, until set to False.
    """

    def __init__(
        self,
        name: str,
        *,
        version: int,
        seed: int = 0,
        tokens: int = 1,
        seconds: Callable[[random.Random], float] | None = None,
        load_s: Callable[[random.Random], float] | None = None,
    ) -> None:
        self._id = EngineId(name)
        self._load_s = load_s
        self._lives = 0
        self._version = version
        self._tokens = tokens
        self._seconds = seconds
        self._random = random.Random(f"{seed}:{name}")
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._epoch = 0
        self.running = 0
        self.served = 0
        self.fail = False
        self.kv_tokens: int | None = None
        """The KV capacity that it reports."""

    @property
    def id(self) -> EngineId:
        return self._id

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, request: GenerateRequest) -> Completion:
        self._check()
        self.running += 1
        first = self._version
        try:
            if not self._resumed.is_set():
                await self._resumed.wait()
                first = self._version
            epoch = self._epoch
            if self._seconds is not None:
                await asyncio.sleep(self._seconds(self._random))
                if epoch != self._epoch:
                    return Completion((), (), (), FinishReason.ABORT, len(request.token_ids), 0)
                if not self._resumed.is_set():
                    await self._resumed.wait()
            self._check()
        finally:
            self.running -= 1
        self.served += 1
        n, last = self._tokens, self._version
        half = n // 2
        spans = (
            (VersionSpan(last, 0, n),)
            if first == last or not half
            else (
                VersionSpan(first, 0, half),
                VersionSpan(last, half, n),
            )
        )
        return Completion((97,) * n, (-1.0,) * n, spans, FinishReason.LENGTH, len(request.token_ids), 0)

    async def abort(self, request_ids: Sequence[str]) -> None:
        return None

    async def release(self, session: str) -> None:
        return None

    async def pause(self, mode: PauseMode) -> None:
        self._check()
        self._epoch += mode is PauseMode.ABORT
        self._resumed.clear()

    async def resume(self) -> None:
        self._resumed.set()

    async def update_weights(self, weights: WeightsRef) -> None:
        self._check()
        life = self._lives
        if self._load_s is not None:
            await asyncio.sleep(self._load_s(self._random))
            self._check()
            if life != self._lives:
                raise EngineError(f"{self._id} died", retryable=True)
        self._version = weights.version

    def restart(self, version: int) -> None:
        """Restart after a failure, with these weights."""
        self.fail = False
        self._lives += 1
        self._version = version
        self._resumed.set()

    async def stats(self) -> EngineStats:
        return EngineStats(self.running, 0, 0, self.served * self._tokens, 0, 0.0, 0.0, kv_tokens=self.kv_tokens)

    async def healthy(self) -> bool:
        return not self.fail

    def _check(self) -> None:
        if self.fail:
            raise EngineError(f"{self._id} is down", retryable=True)


class SimulatedEnvironment:
    """`turns` turns; a reset and a step take `seconds(rng)` each and fail with probability `fault_rate`."""

    def __init__(
        self,
        *,
        turns: int,
        seed: int = 0,
        seconds: Callable[[random.Random], float] | None = None,
        fault_rate: float = 0.0,
    ) -> None:
        self._turns = turns
        self._world_seed = seed
        self._seconds = seconds
        self._fault_rate = fault_rate
        self._turn = 0

    async def reset(self, seed: int) -> Observation:
        self._random = random.Random(f"{self._world_seed}:{seed}") if self._seconds or self._fault_rate else None
        await self._take_time()
        return Observation("look")

    async def step(self, action: str) -> Step:
        await self._take_time()
        self._turn += 1
        done = self._turn >= self._turns
        return Step(Observation("go"), reward=1.0 if done else 0.0, done=done, success=done)

    async def close(self) -> None:
        return None

    async def _take_time(self) -> None:
        if self._random is None:
            return
        if self._seconds is not None:
            await asyncio.sleep(self._seconds(self._random))
        if self._random.random() < self._fault_rate:
            raise ConnectionError("the simulated environment broke")


@dataclass(slots=True)
class SimulatedRewarder:
    """Scores `value(rng)` (1.0) after `seconds(rng)`; an infrastructure fault with probability `fault_rate`."""

    seed: int = 0
    seconds: Callable[[random.Random], float] | None = None
    fault_rate: float = 0.0
    value: Callable[[random.Random], float] | None = None

    async def score(self, trajectory: Trajectory, deadline_s: float) -> Outcome:
        if self.seconds is None and self.value is None and not self.fault_rate:
            return Scored(1.0)
        rng = random.Random(f"{self.seed}:{trajectory.id}")
        if self.seconds is not None:
            await asyncio.sleep(self.seconds(rng))
        if rng.random() < self.fault_rate:
            return InfraFault(FaultKind.CRASH, retryable=True, detail="the simulated function crashed")
        return Scored(1.0 if self.value is None else self.value(rng))


@dataclass(slots=True)
class SimulatedTrainer:
    """Takes `seconds(rng)` a step and records every batch with its version, for tests.

    With `streams` each call of a step takes `seconds(rng)`, a failure drops the accumulated samples, and a call out of
    order is a `TrainerError`. `fail_steps` and `refuse_steps` count calls that train: `train`, `accumulate`, `finish`.
    A publish takes `push_s(rng)`; those that `fail_pushes` counts end with the trainer's death.
    """

    seed: int = 0
    seconds: Callable[[random.Random], float] | None = None
    fail_steps: frozenset[int] = frozenset()
    refuse_steps: frozenset[int] = frozenset()
    drift: float = 0.0
    """KL between a version and the next, nats per token."""
    push_s: Callable[[random.Random], float] | None = None
    fail_pushes: frozenset[int] = frozenset()
    batches: list[tuple[int, tuple[TrainSample, ...]]] = field(default_factory=list)
    streams: bool = False
    accumulated: list[int] = field(default_factory=list)
    """Samples of every portion that was accumulated, in the order of calls."""
    column_s: Callable[[random.Random], float] | None = None
    fail_columns: frozenset[int] = frozenset()
    """Calls that fill columns and end with the trainer's death."""
    asked: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    """Of calls that filled columns: which, of which samples."""
    pushes: int = 0
    staged: set[int] = field(default_factory=set)
    calls: int = 0
    _lives: int = 1
    _columns: int = 0
    _open: tuple[int, list[TrainSample]] | None = None

    async def train(self, samples: Sequence[TrainSample], version: int) -> TrainReport:
        await self._work()
        self.batches.append((version, tuple(samples)))
        return TrainReport(sum(map(sum, (s.loss_mask for s in samples))), 0.0, {})

    async def begin(self, version: int) -> None:
        self._open = (version, [])

    async def accumulate(self, samples: Sequence[TrainSample]) -> None:
        _, held = self._begun()
        await self._work()
        if {s.id for s in held} & {s.id for s in samples}:
            raise TrainerRefused("a sample is in this step already")
        held.extend(samples)
        self.accumulated.append(len(samples))

    async def finish(self) -> TrainReport:
        version, samples = self._begun()
        await self._work()
        self._open = None
        self.batches.append((version, tuple(samples)))
        return TrainReport(sum(map(sum, (s.loss_mask for s in samples))), 0.0, {})

    def _begun(self) -> tuple[int, list[TrainSample]]:
        if self._open is None:
            raise TrainerError("no step was begun")
        return self._open

    async def _work(self) -> None:
        self.calls += 1
        calls, life = self.calls, self._lives
        if self.seconds is not None:
            await asyncio.sleep(self.seconds(random.Random(f"{self.seed}:{calls}")))
        if life != self._lives:
            raise TrainerError("the simulated trainer died")
        if self.calls in self.fail_steps:
            self._die()
            raise TrainerError("the simulated trainer died")
        if self.calls in self.refuse_steps:
            raise TrainerRefused("the simulated trainer will not have it")

    async def imitate(self, samples: Sequence[TrainSample], batches: int) -> TrainReport:
        return TrainReport(0, 0.0, {})

    async def logprobs(self, samples: Sequence[TrainSample]) -> list[tuple[float, ...]]:
        now = self.batches[-1][0] + 1 if self.batches else 0
        return [
            tuple(
                p - math.sqrt(2.0 * self.drift * max(now - v, 0)) if v >= 0 else p
                for p, v in zip(s.logprobs, s.versions, strict=True)
            )
            for s in samples
        ]

    async def reference(self, samples: Sequence[TrainSample]) -> list[tuple[float, ...]]:
        await self._column("ref_logprobs", samples)
        return [tuple(p - 0.25 if m else 0.0 for p, m in zip(s.logprobs, s.loss_mask, strict=True)) for s in samples]

    async def advantages(self, samples: Sequence[TrainSample]) -> list[tuple[float, ...]]:
        await self._column("advantage", samples)
        return group_mean_advantages(samples)

    async def _column(self, column: str, samples: Sequence[TrainSample]) -> None:
        self._columns += 1
        calls, life = self._columns, self._lives
        if self.column_s is not None:
            await asyncio.sleep(self.column_s(random.Random(f"{self.seed}:column:{calls}")))
        if life == self._lives and calls in self.fail_columns:
            self._die()
        if life != self._lives:
            raise TrainerError("the simulated trainer died")
        self.asked.append((column, tuple(s.id for s in samples)))

    async def stage(self, version: int) -> None:
        if self._open is not None:
            raise TrainerError("a step was begun and is not finished")
        self.staged.add(version)

    async def publish(self, version: int) -> WeightsRef:
        staged = version in self.staged
        if self._open is not None and not staged:
            raise TrainerError("a step was begun and is not finished")
        self.pushes += 1
        dies = self.pushes in self.fail_pushes
        if self.push_s is not None:
            await asyncio.sleep(self.push_s(random.Random(f"{self.seed}:push:{self.pushes}")))
        if dies:
            self._die()
        if dies or (staged and version not in self.staged):
            raise TrainerError("the simulated trainer died")
        self.staged.discard(version)
        return WeightsRef(version, f"v{version:06d}")

    async def restore(self, weights: WeightsRef, *, optimizer: bool = True) -> None:
        self._die()

    def _die(self) -> None:
        self._lives += 1
        self._open = None
        self.staged.clear()


class SimulatedPart:
    """An engine's process. A start takes `start_s` and fails while the site is broken; `die` ends the process."""

    def __init__(self, engine: FailableEngine, site: SimulatedSite) -> None:
        self._engine = engine
        self._site = site
        self._ended = asyncio.Event()
        self.runs = False

    @property
    def id(self) -> EngineId:
        return self._engine.id

    async def start(self, weights: WeightsRef) -> Engine:
        await asyncio.sleep(self._site.start_s)
        if self._site.broken:
            raise PartDied(self.id, "no such device")
        self._engine.restart(weights.version)
        self._ended = asyncio.Event()
        self.runs = True
        return self._engine

    async def wait(self) -> str:
        await self._ended.wait()
        return "its process was killed by SIGKILL"

    def die(self) -> None:
        """Calls to the engine break, as those to a process that is gone."""
        self._engine.fail, self.runs = True, False
        self._ended.set()


class SimulatedSite:
    """Implements `EngineSite` over `devices` by pool. `make` creates an engine with a name; while `broken`, no process
    starts. Invariant: free devices and devices held by engines add up to `devices`.
    """

    def __init__(
        self,
        devices: Mapping[str, int],
        make: Callable[[str], FailableEngine],
        recorder: Recorder,
        *,
        start_s: float = 5.0,
    ) -> None:
        self._devices = dict(devices)
        self._make = make
        self._recorder = recorder
        self.start_s = start_s
        self.broken = False
        self.parts: dict[EngineId, SimulatedPart] = {}
        self.shares: dict[EngineId, EngineShares] = {}
        self._held: dict[EngineId, tuple[EngineKind, ResourceClock]] = {}
        self._made = 0

    def free(self) -> Mapping[str, int]:
        free = dict(self._devices)
        for kind, _ in self._held.values():
            free[kind.pool] -= kind.tp
        return free

    def resize(self, devices: Mapping[str, int]) -> None:
        self._devices = {pool: devices.get(pool, 0) for pool in self._devices}

    async def place(self, kind: EngineKind) -> ReservedEngine:
        free = self.free().get(kind.pool, 0)
        if free < kind.tp:
            raise RunFailed(f"pool {kind.pool} has {free} free devices (rule: {kind.tp} for a start)")
        now = asyncio.get_running_loop().time
        part = SimulatedPart(self._make(f"engine-{self._made}"), self)
        self._made += 1
        clock = ResourceClock(
            role="engine", resource=part.id, recorder=self._recorder, clock=now, units=kind.tp, usd_per_unit_hour=1.0
        )
        self._held[part.id] = kind, clock
        self.parts[part.id], self.shares[part.id] = part, EngineShares(clock, clock=now)
        return ReservedEngine(part, EnginePlacement(kind.pool, role=kind.role, tp=kind.tp))

    async def clear(self, engine_id: EngineId) -> None:
        if engine_id not in self._held:
            return
        self.parts.pop(engine_id).die()
        await asyncio.sleep(0.1)
        _, clock = self._held.pop(engine_id)
        clock.close()

    def close(self) -> None:
        """The run is over: nothing is billed any more."""
        for _, clock in self._held.values():
            clock.close()
