"""Engines and the trainer as programs on the cluster: device assignment, billing, processes, and their clients."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from placement.types import ROLLOUT_ROLES, Assignment, Role
from rollart.adapters.engines.http import HttpEngine
from rollart.adapters.engines.vllm import VllmEngine, VllmHost
from rollart.adapters.engines.vllm_options import VllmOptions, wrong_options
from rollart.adapters.trainers.http import HttpTrainer
from rollart.adapters.weights.buckets import first_failure_only
from rollart.errors import LeaseExpired, PartDied, RollartError, RunFailed, TrainerError, TrainerRefused
from rollart.fleet import EngineKind
from rollart.launch.broadcasts import WeightBroadcaster
from rollart.launch.clusters import exit_cause, place_actor
from rollart.launch.layout import (
    attached_urls,
    device_clock,
    engine_actor,
    engine_tolerance,
    free_devices,
    part_clock,
    required_vllm_options,
)
from rollart.launch.routing import engine_placement
from rollart.launch.start_limits import engine_start_limits, watch_start
from rollart.launch.trainer import MultiHostTrainer
from rollart.launch.weight_store import SharedWeightStore, write_agreement
from rollart.leases import Expiry, Leases
from rollart.ledger.intervals import EngineShares, ResourceClock, ResourceState
from rollart.ledger.store import Ledger
from rollart.model import EngineId, PauseMode, TrainReport, TrainSample, WeightsRef
from rollart.ports import Engine, Handle, Recorder, RunEvent, Runtime
from rollart.settings.planning import pools_of
from rollart.settings.resolve import Resolved
from rollart.supervise.fleet import ReservedEngine
from serverless.retries import TRAINER_START, TRAINER_WORK

T = TypeVar("T")
C = TypeVar("C", bound=HttpEngine)
LocalPath = Callable[[WeightsRef], Awaitable[str]]

RETRY_S = 1.0
"""Seconds between health checks of a lost server: starting one takes a minute."""


def _start_cause(error: RollartError) -> str:
    return error.message.removeprefix("trainer: ").removeprefix("trainer-0: ")


class EngineConnection(Generic[C]):
    """The part of an engine that has its client, and joins broadcasts while it runs."""

    def __init__(self, name: EngineId, local: LocalPath | None, broadcasts: WeightBroadcaster | None) -> None:
        """`local`: local path of a version on the engine's host, once it is there; without it the host reads published
        files. `broadcasts`: broadcasts that the running engine takes part in."""
        self.id = name
        self._local, self._broadcasts = local, broadcasts
        self._client: C | None = None

    async def start(self, weights: WeightsRef) -> Engine:
        await self.close()
        await self._open(weights)
        assert self._client is not None, "just opened"
        if self._broadcasts is not None:
            self._broadcasts.join(self._client)
        return self._client

    async def _open(self, weights: WeightsRef) -> None:
        """Set the client, which serves these weights afterwards."""
        raise NotImplementedError

    async def close(self) -> None:
        if self._broadcasts is not None:
            self._broadcasts.leave(self.id)
        if self._client is not None:
            await self._client.close()
            self._client = None


class EngineProgram(EngineConnection[HttpEngine]):
    """Implements `supervise.EnginePart` over a `Program` actor."""

    def __init__(
        self,
        name: EngineId,
        program: Handle,
        *,
        watch: Callable[[Handle], Coroutine[Any, Any, None]],
        client: Callable[..., HttpEngine] = HttpEngine,
        local: LocalPath | None = None,
        broadcasts: WeightBroadcaster | None = None,
    ) -> None:
        """`watch`: watches a start of the program. `client`: (id, url, version) -> Engine."""
        super().__init__(name, local, broadcasts)
        self._program, self._watch, self._connect = program, watch, client

    async def _open(self, weights: WeightsRef) -> None:
        path = weights.path if self._local is None else await self._local(weights)
        arguments = ["--model", path, "--weight-version", str(weights.version)]
        async with first_failure_only(), asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._watch(self._program), name=f"start of {self.id}")
            address = str(await self._program.call("start", arguments))
            watching.cancel()
        self._client = self._connect(self.id, address, version=weights.version, local=self._local)
        await self._client.started_with(weights)

    async def wait(self) -> str:
        return await exit_cause(self._program)


class AttachedEngine(EngineConnection[VllmEngine]):
    """Implements `supervise.EnginePart` over a vLLM server that is not managed by rollart: it loads the run's weights,
    and keeps running after the run. Failed calls reveal its end."""

    def __init__(
        self,
        name: EngineId,
        url: str,
        *,
        needed: VllmOptions,
        tolerance: float = 0.0,
        local: LocalPath | None = None,
        broadcasts: WeightBroadcaster | None = None,
    ) -> None:
        """`needed`: options that the server must have been started with."""
        super().__init__(name, local, broadcasts)
        self._url, self._needed, self._tolerance = url, needed, tolerance
        self._served = False

    async def _open(self, weights: WeightsRef) -> None:
        client = self._client = VllmEngine(
            self.id, self._url, version=weights.version, tolerance=self._tolerance, local=self._local
        )
        while not await client.healthy():
            if not self._served:
                raise PartDied(
                    self.id, f"nothing answers at {self._url}", remedy="start the server, or mend engines.attach"
                )
            await asyncio.sleep(RETRY_S)  # its operator restarts it; the caller's lease bounds the wait
        wrong = wrong_options(self._needed, await client.options())
        if wrong:
            raise PartDied(
                self.id,
                f"{self._url} was started with other options: {'; '.join(wrong)}",
                remedy="`rollart launch --dry-run` prints the required ones",
            )
        if self._local is not None:
            await self._local(weights)  # pulled before the engine is paused
        await client.pause(PauseMode.ABORT)  # running requests belong to an earlier life of the run
        await client.update_weights(weights)
        await client.resume()
        await client.tried()
        client.silent.clear()
        self._served = True

    async def wait(self) -> str:
        assert self._client is not None, "it was started"
        await self._client.silent.wait()  # its process cannot be waited for
        return self._client.why


class TrainerProgram:
    """Implements the `Trainer` port over a `Program` actor, and restarts it when it dies.

    One caller at a time: training, then publish. A staged version is published during the next step, and columns are
    filled during either. `recover` restarts the process and restores the current version. Unfinished work of the dead
    process is lost, which is correct: none of it was committed.
    """

    def __init__(
        self,
        program: Handle | MultiHostTrainer,
        leases: Leases,
        recorder: Recorder,
        clock: ResourceClock,
        *,
        current: Callable[[], WeightsRef | None],
        start_s: float,
        max_restarts: int = 3,
        agreement: TrainSample | None = None,
        share: Callable[[WeightsRef], Awaitable[None]] | None = None,
        broadcasts: WeightBroadcaster | None = None,
    ) -> None:
        """`agreement`: the probe that engines are compared on after they load a version; None: no comparison. `share`:
        distributes a published version further; a publish ends after it. `broadcasts`: sends a version to engines while
        it is written."""
        self._program, self._leases, self._recorder, self._clock = program, leases, recorder, clock
        self._current, self._start_s, self._max_restarts = current, start_s, max_restarts
        self._agreement, self._share, self._broadcasts = agreement, share, broadcasts
        self._staged = -1
        self._probe_logprobs: tuple[int, tuple[float, ...]] = (-1, ())
        self._restarts = 0
        self._cause = ""
        """Why the latest restart failed."""
        self.client: HttpTrainer | None = None

    async def start(self) -> None:
        """The first start, with the attempts of `TRAINER_START`. `PartDied` with the last cause."""
        try:
            await TRAINER_START.run(self._start, (PartDied, TrainerError, LeaseExpired), failed=self._start_failed)
        except (PartDied, TrainerError, LeaseExpired) as error:
            cause = f"{_start_cause(error)}, {TRAINER_START.attempts} starts in a row"
            raise PartDied("trainer-0", cause, remedy=error.remedy or "see its log") from None

    async def _start_failed(self, error: BaseException, tries: int) -> None:
        assert isinstance(error, RollartError)
        self._restarted(tries, _start_cause(error))
        await self.close()

    async def _start(self) -> None:
        async with self._leases.hold("trainer", "its start", self._start_s, Expiry.RESTART_PART):
            self.client = HttpTrainer(await self._program.call("start", []))
            await self.client.greet()

    def _restarted(self, restarts: int, cause: str = "") -> None:
        now = asyncio.get_running_loop().time()
        fields = {"restarts": restarts} | ({"cause": cause} if cause else {})
        self._recorder.event(RunEvent(now, "trainer_restarted", "trainer", fields))

    async def recover(self) -> None:
        """Restart the process and continue from the current version. `TrainerError` after `max_restarts`."""
        self._restarts += 1
        if self._restarts > self._max_restarts:
            cause = f": {self._cause}" if self._cause else ""
            raise TrainerError(f"the trainer died {self._restarts} times{cause}", remedy="see its log")
        self._clock.enter(ResourceState.DOWN, "trainer_restart")
        await self.close()
        self._probe_logprobs, self._staged = (-1, ()), -1
        self._restarted(self._restarts)
        try:
            await self._start()
        except PartDied as error:  # its node may have died unnoticed until now
            self._cause = _start_cause(error)
            await self.recover()
            return
        self._cause = ""
        current = self._current()
        if current is not None:
            await self.restore(current)

    async def train(self, samples: Sequence[TrainSample], version: int) -> TrainReport:
        report = await self._running_client().train(samples, version)
        self._restarts = 0  # the bound is on crash loops, not on restarts in a long life
        return report

    @property
    def streams(self) -> bool:
        return self.client is not None and self.client.streams

    async def begin(self, version: int) -> None:
        await self._running_client().begin(version)

    async def accumulate(self, samples: Sequence[TrainSample]) -> None:
        await self._running_client().accumulate(samples)

    async def finish(self) -> TrainReport:
        report = await self._running_client().finish()
        self._restarts = 0
        return report

    async def imitate(self, samples: Sequence[TrainSample], batches: int) -> TrainReport:
        return await self._running_client().imitate(samples, batches)

    async def logprobs(self, samples: Sequence[TrainSample]) -> list[tuple[float, ...]]:
        return await self._running_client().logprobs(samples)

    async def reference(self, samples: Sequence[TrainSample]) -> list[tuple[float, ...]]:
        return await self._running_client().reference(samples)

    async def advantages(self, samples: Sequence[TrainSample]) -> list[tuple[float, ...]]:
        return await self._running_client().advantages(samples)

    async def stage(self, version: int) -> None:
        """Stage a version. The next step may begin when this returns, so the probe is scored before that."""
        await self._stage(version)
        if self._agreement is not None:
            (found,) = await self.logprobs([self._agreement])
            self._probe_logprobs = version, found

    async def publish(self, version: int) -> WeightsRef:
        weights = await self._publish(version)
        if self._agreement is not None:
            staged, found = self._probe_logprobs
            if staged != version:  # the trainer still has the published weights
                (found,) = await self.logprobs([self._agreement])
            write_agreement(weights, self._agreement, found)
        if self._share is not None:
            await self._share(weights)
        return weights

    async def _stage(self, version: int) -> None:
        if self._broadcasts is not None and self._broadcasts.has_engines:
            await self._running_client().stage(version, send=True)
        else:
            await self._running_client().stage(version)
        self._staged = version

    async def _publish(self, version: int) -> WeightsRef:
        """Write the version to disk, and broadcast it to engines at the same time."""
        client = self._running_client()
        if self._broadcasts is None or not self._broadcasts.has_engines:
            return await client.publish(version)
        if self._staged != version:
            await self._stage(version)
        async with first_failure_only(), asyncio.TaskGroup() as tasks:
            tasks.create_task(self._broadcasts.send(client, version), name=f"a broadcast of v{version}")
            return await client.publish(version)

    async def restore(self, weights: WeightsRef, *, optimizer: bool = True) -> None:
        self._staged = -1
        async with self._leases.hold("trainer", f"v{weights.version}", self._start_s, Expiry.RESTART_PART):
            await self._running_client().restore(weights, optimizer=optimizer)

    async def supervised(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run trainer work before training begins. If the trainer dies, hangs or fails, it is restarted and the work
        repeated, with the attempts of `TRAINER_WORK` in all."""

        async def recover(error: BaseException, tries: int) -> None:
            with contextlib.suppress(PartDied, TrainerError, LeaseExpired):  # a failed recovery counts as a try
                await self.recover()

        failures = (PartDied, TrainerError, LeaseExpired)
        return await TRAINER_WORK.run(
            work, lambda e: isinstance(e, failures) and not isinstance(e, TrainerRefused), failed=recover
        )

    async def close(self) -> None:
        client, self.client = self.client, None
        if client is not None:
            await client.aclose()

    def _running_client(self) -> HttpTrainer:
        if self.client is None:
            raise TrainerError("the trainer is not running")
        return self.client


@dataclass(frozen=True, slots=True)
class _PlacedEngine:
    part: EngineProgram | AttachedEngine
    program: Handle | None
    clock: ResourceClock
    host: VllmHost | None = None

    async def close(self) -> None:
        await self.part.close()
        if self.host is not None:
            await self.host.close()


class ClusterEngineSite:
    """Implements `EngineSite`. Owns the engines, their clocks, and one clock per pool for paid devices that are idle.

    Called by the fleet, one change at a time. Invariant: no two parts hold the same device, and every device of a pool
    that is not rented is billed at any time.
    """

    def __init__(
        self,
        resolved: Resolved,
        directory: Path,
        ledger: Ledger,
        runtime: Runtime,
        *,
        names: Iterable[str] = (),
        stored: SharedWeightStore | None = None,
        broadcasts: WeightBroadcaster | None = None,
        began: float | None = None,
    ) -> None:
        """`names`: names of parts in earlier lives of the run, not reused for new engines. `stored`: the weight store
        that engines pull from; None: engines read the run's directory. `broadcasts`: sends new versions to engines
        earlier. `began`: start of billing for pools that are not rented; now by default."""
        self._watch = functools.partial(watch_start, limits=engine_start_limits(resolved), recorder=ledger)
        self._stored, self._broadcasts = stored, broadcasts
        self._resolved = resolved
        self._directory = directory
        self._ledger = ledger
        self._runtime = runtime
        self._pools = {pool.name: pool for pool in pools_of(resolved.cluster, resolved.prices)}
        self._sizes = {name: pool.count for name, pool in self._pools.items()}
        """Present devices by pool."""
        self._resized = False
        self._assignments = {a.name: a for a in resolved.plan.assignments}
        self.engines: dict[EngineId, _PlacedEngine] = {}
        """Engines that hold devices, by id."""
        self._idle_clocks: dict[str, ResourceClock] = {}
        self._next: Counter[Role] = Counter()
        for name in (*names, *self._assignments):
            role, _, number = name.rpartition("-")
            if role in ROLLOUT_ROLES and number.isdecimal():
                self._next[Role(role)] = max(self._next[Role(role)], int(number) + 1)
        now = asyncio.get_running_loop().time()
        owned = sum(pool.count * pool.usd_per_device_hour for pool in self._pools.values() if not pool.rented)
        self._usd, self._usd_at = 0.0 if began is None else (now - began) / 3600.0 * owned, now
        self.shares: dict[EngineId, EngineShares] = {}

    async def open(self) -> None:
        """Create the plan's engines by role, without starting them."""
        for assignment in self._resolved.plan.of(*ROLLOUT_ROLES):
            await self._make_engine(assignment)
        for pool in self._pools:
            self._rebill_idle(pool)

    @property
    def parts(self) -> list[EngineProgram | AttachedEngine]:
        return [engine.part for engine in self.engines.values()]

    @property
    def clocks(self) -> list[ResourceClock]:
        """Open clocks, of engines and of idle devices."""
        return [*(engine.clock for engine in self.engines.values()), *self._idle_clocks.values()]

    def free(self) -> Mapping[str, int]:
        return {name: size - len(self._taken(name)) for name, size in self._sizes.items()}

    def where(self) -> Mapping[EngineId, str]:
        """The node of each engine; '' for an engine without a node."""
        return {e: "" if engine.program is None else engine.program.node for e, engine in self.engines.items()}

    def resize(self, devices: Mapping[str, int]) -> None:
        self._accumulate_cost()
        self._resized = True
        self._sizes = {name: min(pool.count, devices.get(name, 0)) for name, pool in self._pools.items()}
        for pool in self._pools:
            self._rebill_idle(pool)

    async def place(self, kind: EngineKind) -> ReservedEngine:
        taken = self._taken(kind.pool)
        pool, free = self._pools[kind.pool], self.free()[kind.pool]
        if self._resized:  # the pool is partial: the runtime knows which nodes have free devices
            pool = replace(pool, device=replace(pool.device, devices_per_host=None))
        devices = free_devices(pool, taken, kind.tp) if kind.tp <= free else None
        if devices is None:
            raise RunFailed(f"pool '{kind.pool}' has {free} free devices, and no {kind.tp} of them in one host")
        assignment = Assignment(kind.role, self._next[kind.role], kind.pool, devices)
        part = await self._make_engine(assignment)
        self._next[kind.role] += 1
        self._rebill_idle(kind.pool)
        return ReservedEngine(part, engine_placement(self._resolved, assignment))

    async def clear(self, engine_id: EngineId) -> None:
        engine = self.engines.pop(engine_id, None)
        if engine is None:
            return
        if self._stored is not None:
            self._stored.leave(engine_id)
        try:
            await engine.close()
            if engine.program is not None:
                await engine.program.kill()
                await self._runtime.release(engine_id)
        finally:
            engine.clock.close()
            self._accumulate_cost()
            pool = self._assignments.pop(engine_id).pool
            self._rebill_idle(pool)

    async def close(self) -> None:
        """End of the run: release the engines, whose processes the runtime stops, and end all billing."""
        for engine in self.engines.values():
            await engine.close()
        for clock in self.clocks:
            clock.close()

    def spent_usd(self) -> float:
        """Dollars for the cluster's devices since the run's process began, busy or idle."""
        now = asyncio.get_running_loop().time()
        taken = {name: len(self._taken(name)) for name in self._pools}
        per_hour = sum(
            (taken[name] if pool.rented else max(taken[name], self._sizes[name])) * pool.usd_per_device_hour
            for name, pool in self._pools.items()
        )
        return self._usd + (now - self._usd_at) / 3600.0 * per_hour

    async def _make_engine(self, assignment: Assignment) -> EngineProgram | AttachedEngine:
        name, url = EngineId(assignment.name), attached_urls(self._resolved).get(assignment.name)
        program: Handle | None = None
        host: VllmHost | None = None
        if url is None:
            actor = engine_actor(self._resolved, self._directory, assignment)
            program = await place_actor(self._resolved, self._runtime, actor)
        elif self._stored is not None:
            host = VllmHost(name, url, self._stored.location)
        local: LocalPath | None = None
        if self._stored is not None and (puller := program or host) is not None:
            self._stored.join(puller)  # it pulls new versions ahead of the engine
            local = functools.partial(self._stored.local, puller)
        part: EngineProgram | AttachedEngine
        tolerance = engine_tolerance(self._resolved)
        if program is None:
            assert url is not None, "engines without a URL have a program"
            needed = required_vllm_options(self._resolved, assignment)
            part = AttachedEngine(
                name, url, needed=needed, tolerance=tolerance, local=local, broadcasts=self._broadcasts
            )
        else:
            vllm = self._resolved.cluster.engines.kind == "vllm"
            client = functools.partial(VllmEngine, tolerance=tolerance) if vllm else HttpEngine
            part = EngineProgram(
                name, program, watch=self._watch, client=client, local=local, broadcasts=self._broadcasts
            )
        self._accumulate_cost()
        self._assignments[assignment.name] = assignment
        clock = part_clock(self._resolved, self._ledger, assignment)
        self.engines[part.id] = _PlacedEngine(part, program, clock, host)
        self.shares[part.id] = EngineShares(clock, clock=asyncio.get_running_loop().time)
        return part

    def _taken(self, pool: str) -> set[int]:
        return {device for a in self._assignments.values() if a.pool == pool for device in a.devices}

    def _accumulate_cost(self) -> None:
        """Accumulate the cost at the current rate, before assignments change."""
        self._usd, self._usd_at = self.spent_usd(), asyncio.get_running_loop().time()

    def _rebill_idle(self, pool: str) -> None:
        """Restart the clock of the pool's idle devices after their number changed."""
        old = self._idle_clocks.pop(pool, None)
        if old is not None:
            old.close()
        unused = self.free()[pool]
        if unused > 0 and not self._pools[pool].rented:
            self._idle_clocks[pool] = device_clock(
                self._resolved,
                self._ledger,
                "unused",
                f"unused-{pool}",
                pool,
                unused,
                state="idle",
                cause="not_in_plan",
            )
