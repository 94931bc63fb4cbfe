"""A simulated function provider for virtual time: the same pool, with workers that sleep on the event loop.

Latencies and faults are drawn from one seeded `Random` per function, so a run repeats exactly.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serverless.deploy.handler import ListHandler, adapt, is_async, score_concurrently
from serverless.deploy.package import Package
from serverless.meter import MeterSink
from serverless.types import FaultKind, InfraFault
from serverless.workers.pool import PooledBackend, WorkerFault, WorkerLost, WorkerReply, WorkerRequest


@dataclass(frozen=True, slots=True)
class Profile:
    """The simulated behaviour of a function. Seconds; a latency is `call_s + items * item_s`, times a log-normal
    factor.

    The factor's median is 1; `sigma` 0 makes the latency constant. `faults` are probabilities per call, by kind:
    TIMEOUT never answers, CRASH and OUT_OF_MEMORY end the worker halfway, others are answers.
    """

    cold_start_s: float = 0.1
    call_s: float = 0.005
    item_s: float = 0.001
    sigma: float = 0.0
    overhead_s: float = 0.0
    """Round-trip overhead in seconds: waited for, not billed."""
    faults: Mapping[FaultKind, float] | None = None
    failed_start: float = 0.0
    """Probability that a start fails (retryable)."""

    def __post_init__(self) -> None:
        total = sum((self.faults or {}).values())
        if not 0.0 <= total <= 1.0 or not 0.0 <= self.failed_start <= 1.0:
            raise ValueError(f"faults sum to {total:g}, failed_start is {self.failed_start:g}: not in 0..1")


class SimulatedMachines:
    """Simulated machines for workers, as `hosted.WorkerHosts` has real ones: a new worker goes to the machine with the
    fewest, ties to the one named first. A machine that goes down loses its workers."""

    def __init__(self, names: Sequence[str]) -> None:
        self._workers: dict[str, dict[_SimulatedWorker, None]] = {name: {} for name in names}
        self._starting = dict.fromkeys(names, 0)
        self._lives = dict.fromkeys(names, 0)
        self._up = dict.fromkeys(names, True)
        self._changed = asyncio.Event()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._up)

    def turn(self, name: str, *, up: bool) -> None:
        self._up[name] = up
        self._lives[name] += not up
        for worker in () if up else list(self._workers[name]):
            worker.lose()
        self._changed.set()
        self._changed = asyncio.Event()

    async def room(self) -> None:
        """Wait until a machine is up."""
        while not any(self._up.values()):
            await self._changed.wait()

    async def hold(self, start_s: float) -> dict[_SimulatedWorker, None]:
        """Wait `start_s` seconds for a slot on a machine. Returns the machine's workers. Raises `WorkerLost` if the
        machine goes down."""
        up = [name for name, there in self._up.items() if there]
        if not up:
            raise _lost()
        name = min(up, key=lambda name: len(self._workers[name]) + self._starting[name])
        life = self._lives[name]
        self._starting[name] += 1
        try:
            await asyncio.sleep(start_s)
        finally:
            self._starting[name] -= 1
        if self._lives[name] != life:
            raise _lost()
        return self._workers[name]


def _lost() -> WorkerLost:
    return WorkerLost(InfraFault(FaultKind.CRASH, retryable=True, detail="simulated: the machine went down"))


class SimulatedBackend(PooledBackend):
    """Functions on simulated workers. `functions` maps a name to the callable that a real package would
    contain; it runs inline and takes no loop time. Functions without a profile get the default one. Workers run on
    `machines`, or without machines that could fail. Calls are metered under the name `provider`."""

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        *,
        meter: MeterSink | None = None,
        profiles: Mapping[str, Profile] | None = None,
        seed: int = 0,
        machines: SimulatedMachines | None = None,
        provider: str = "simulated",
    ) -> None:
        """`provider`: the name under which invocations are recorded and priced."""
        super().__init__(self, provider, meter, room=None if machines is None else machines.room)
        self._functions = functions
        self._machines = machines
        self._profiles = profiles or {}
        self._seed = seed
        self._rngs: dict[str, random.Random] = {}

    async def start(self, package: Package, slot: int, gone: Callable[[], None]) -> _SimulatedWorker:
        """Implements `Launcher`: a simulated cold start."""
        name = package.spec.name
        profile = self._profiles.get(name, Profile())
        rng = self._rngs.setdefault(name, random.Random(f"{self._seed}/{name}"))
        init_s = profile.cold_start_s * rng.lognormvariate(0.0, profile.sigma)
        fails = rng.random() < profile.failed_start
        machine = None
        if self._machines is None:
            await asyncio.sleep(init_s)
        else:
            machine = await self._machines.hold(init_s)
        if fails:
            raise WorkerFault(InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail="simulated: start failed"))
        made = _SimulatedWorker(self._handler(package), profile, rng, init_s, gone, machine)
        if machine is not None:
            machine[made] = None
        return made

    def _handler(self, package: Package) -> ListHandler:
        target = self._functions[package.spec.name]
        if is_async(target):
            return lambda event, _: score_concurrently(target, event)
        return adapt(target, takes=package.spec.takes, arguments=package.spec.arguments)


@dataclass(slots=True, eq=False)
class _SimulatedWorker:
    handler: ListHandler
    profile: Profile
    rng: random.Random
    init_s: float
    gone: Callable[[], None]
    machine: dict[_SimulatedWorker, None] | None
    """The workers of its machine, None without a machine that may go down."""
    alive: bool = True
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    async def call(self, request: WorkerRequest) -> WorkerReply:
        profile = self.profile
        factor = self.rng.lognormvariate(0.0, profile.sigma)
        seconds = (profile.call_s + profile.item_s * len(request.event)) * factor
        kind = self._fault()
        if kind is FaultKind.TIMEOUT:
            await self._pass(request.remaining_s * 2.0 + 1.0)
        if kind in (FaultKind.CRASH, FaultKind.OUT_OF_MEMORY):
            await self._pass(seconds / 2.0)
            self.alive = False
            raise WorkerFault(InfraFault(kind, retryable=True, detail="simulated"))
        await self._pass(seconds + profile.overhead_s)
        if kind is not None:
            return WorkerReply(None, seconds, InfraFault(kind, retryable=True, detail="simulated"))
        try:
            body = self.handler(list(request.event), None)
            return WorkerReply(await body if inspect.isawaitable(body) else body, seconds)
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"
            return WorkerReply(None, seconds, InfraFault(FaultKind.CRASH, retryable=False, detail=detail))

    def kill(self) -> None:
        self.alive = False
        if self.machine is not None:
            self.machine.pop(self, None)

    def lose(self) -> None:
        """Handle the loss of its machine."""
        self.kill()
        self.lost.set()
        self.gone()

    async def _pass(self, seconds: float) -> None:
        """Let a part of a call's time pass. Raises `WorkerLost` if the machine goes down meanwhile."""
        if self.machine is None:
            await asyncio.sleep(seconds)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.lost.wait()
        if self.lost.is_set():
            raise _lost()

    def _fault(self) -> FaultKind | None:
        draw = self.rng.random()
        for kind, probability in (self.profile.faults or {}).items():
            if draw < probability:
                return kind
            draw -= probability
        return None
