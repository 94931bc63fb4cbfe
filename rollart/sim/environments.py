"""Environments on virtual time: scripts played by hosts that may be slow or broken.

A `SimulatedDomain` is one domain: its environments know their trajectory's script when they are reset. The text of an
observation is its mass (`workload`), and its `max_tokens` is the length of the engine's answer, so that only the
product's own validation lies between a workload and an engine. The run's context limit, which counts pieces, must be
high enough not to apply.

`ModelledHosts` are the parts of the product's own fleet of environment hosts (`supervise.environment_hosts`), which
selects among them, keeps them alive and counts the losses of their failures as in a run.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from rollart.errors import EnvironmentFault, one_line
from rollart.hosted import EnvironmentOrigin, EpisodeImages, HostHealth
from rollart.leases import Leases
from rollart.ledger.intervals import ResourceClock
from rollart.model import Observation, Step
from rollart.ports import Environment, Recorder
from rollart.settings.faults import ResetTroubleSpec
from rollart.sim.loop import sleeping
from rollart.sim.site import HostReservation
from rollart.sim.workload import Workload, entity_generator
from rollart.supervise.autoscaling import HostAutoscaler
from rollart.supervise.environment_hosts import EnvironmentHostSupervisor
from rollart.supervise.supervisor import HostLimits


@dataclass
class SimulatedDomain:
    """One domain's environments. `make` is the factory of a domain without host selection; where the product chooses
    the host, it is `ModelledEnvironment`.

    `make` takes hosts in turn. The members of a prompt are counted in the order they are reset in.
    """

    workload: Workload
    seed: int = 0
    name: str = ""
    hosts: Sequence[SimulatedHost] = field(default_factory=lambda: (SimulatedHost("host-0"),))
    faults: ResetTroubleSpec | None = None
    solved: float | None = None
    """Mean share of trajectories with reward 1 instead of 0; None: each trajectory has its script's reward, and nothing
    is drawn."""
    members: Counter[int] = field(default_factory=Counter)
    """Resets so far, by prompt."""
    _bursts: list[float] = field(default_factory=list)
    """Start times of bursts, as far as drawn."""
    _luck: Random | None = None
    _made: int = 0

    def make(self) -> ModelledEnvironment:
        """An environment on the next host that is up."""
        for _ in range(len(self.hosts)):
            host = self.hosts[self._made % len(self.hosts)]
            self._made += 1
            if host.up:
                return ModelledEnvironment(self, host)
        raise ConnectionError(f"no host of {self.name or 'the environments'} is up")

    def solves(self, prompt: int, member: int) -> bool:
        """True if this member earns its reward. Prompts differ: the chance of each is drawn from a Beta distribution
        with mean `solved` and a total of 1, most of which lies near 0 and 1, as pass rates do."""
        if self.solved is None or self.solved in (0.0, 1.0):
            return self.solved != 0.0
        chance = entity_generator(self.seed, self.name, "chance", prompt).betavariate(self.solved, 1.0 - self.solved)
        return entity_generator(self.seed, self.name, "solved", prompt, member).random() < chance

    def reset_trouble(self, prompt: int, member: int, host: SimulatedHost, now: float) -> tuple[bool, float]:
        """True if this reset fails, and the seconds that it stalls."""
        faults = self.faults
        if faults is None:
            return False, 0.0
        rng = entity_generator(self.seed, self.name, "reset", prompt, member)
        burst = self._in_burst(faults, host, now)
        fails = rng.random() < (faults.burst_fail if burst else faults.fail)
        stalls = rng.random() < (faults.burst_stall if burst else faults.stall)
        return fails, faults.stall_s if stalls else 0.0

    def _in_burst(self, faults: ResetTroubleSpec, host: SimulatedHost, now: float) -> bool:
        """Bursts are drawn as time passes, and a host's part in each by a hash, so that the result does not depend on
        the caller."""
        if faults.burst_every_s is None:
            return False
        bursts = self._bursts
        if self._luck is None:
            self._luck = entity_generator(self.seed, self.name, "bursts")
            bursts.append(self._luck.expovariate(1.0 / faults.burst_every_s))
        while bursts[-1] <= now:
            bursts.append(bursts[-1] + self._luck.expovariate(1.0 / faults.burst_every_s))
        first = bisect_right(bursts, now - faults.burst_s)
        return any(
            bursts[i] <= now and entity_generator(self.seed, self.name, host.name, i).random() < faults.burst_hosts
            for i in range(first, len(bursts))
        )


class ModelledEnvironment:
    """Implements `ports.Environment`. A call on a host that went down raises EnvironmentFault, the same incident for
    every environment there."""

    __slots__ = ("_host", "_live", "_reward", "_script", "_turn", "_world")

    def __init__(self, world: SimulatedDomain, host: SimulatedHost) -> None:
        self._world, self._host = world, host
        self._turn = 0
        self._live = False

    async def reset(self, seed: int) -> Observation:
        world, host = self._world, self._host
        member = world.members[seed]
        world.members[seed] += 1
        self._script = world.workload.script(seed, member)
        self._reward = self._script.reward if world.solved is None else float(world.solves(seed, member))
        self._turn = 0
        if not self._live:
            self._live = True
            host.active += 1
        fails, stalled = world.reset_trouble(seed, member, host, asyncio.get_running_loop().time())
        if stalled:
            await asyncio.sleep(stalled)
        await self._spend(self._script.reset_s)
        if fails:
            raise ConnectionError(f"the container of {host.name} did not start")
        return self._observation()

    async def step(self, action: str) -> Step:
        script, turn = self._script, self._turn
        await self._spend(script.step_s[turn])
        self._turn = turn + 1
        if self._turn < script.turns:
            return Step(self._observation())
        return Step(_FINAL_OBSERVATION, self._reward, True, self._reward > 0, {"payload_bytes": script.payload_bytes})

    async def close(self) -> None:
        if self._live:
            self._live = False
            self._host.active -= 1

    def _observation(self) -> Observation:
        script, turn = self._script, self._turn
        return Observation(str(script.shown[turn]), None, script.answers[turn])

    async def _spend(self, seconds: float) -> None:
        if seconds:
            await sleeping(seconds)
        if not (host := self._host).up:
            raise EnvironmentFault(host.name, "its host is down", incident=f"{host.name} down {host.failures}")


_FINAL_OBSERVATION = Observation("1")
"""The last observation, which the policy never answers."""


@dataclass(slots=True)
class SimulatedHost:
    """A machine that runs environments, which do not slow each other down."""

    name: str
    up: bool = True
    active: int = 0
    node: str = ""
    """The machine that fails with it; its own if not given."""
    on_change: Callable[[bool], None] = lambda _: None
    """Called with the new state when it goes down or comes back."""
    failures: int = 0
    """Number of times that it went down."""

    def turn(self, *, up: bool) -> None:
        self.failures += self.up and not up
        self.up = up
        self.on_change(up)


HostedEnvironmentFactory = Callable[[SimulatedHost], Environment]
"""An environment on a host."""


@dataclass
class ModelledHosts:
    """The hosts of one simulated run. `environment` returns a domain's environment factory; call `open` once the run's
    leases exist. A fleet that grows beyond `hosts` gets additional machines, or with `room` the machines with free
    devices."""

    hosts: Sequence[SimulatedHost]
    make: dict[str, HostedEnvironmentFactory]
    """By domain; it may be filled until the run begins."""
    limits: HostLimits
    start_s: float = 0.0
    count: int | None = None
    """The initial number, if not all of `hosts`."""
    later: int = 0
    """The first number of hosts that are added later."""
    room: Callable[[str], Awaitable[HostReservation]] | None = None
    """Reserves devices on a machine. `RollartError` if none are found in time."""
    fleet: EnvironmentHostSupervisor = field(init=False)
    parts: dict[str, ModelledHost] = field(default_factory=dict)

    def environment(self, domain: str) -> Callable[[], Environment]:
        return lambda: self.fleet.environment(domain)()

    def open(self, leases: Leases, recorder: Recorder) -> EnvironmentHostSupervisor:
        """The fleet, not running yet. Its hosts have the names of these machines."""
        given = {f"environment-{n}": host for n, host in enumerate(self.hosts)}

        async def part(name: str) -> ModelledHost:
            host = given.get(name) or SimulatedHost(name)
            room = None if self.room is None else await self.room(name)
            clock = ResourceClock(role="environment", resource=host.name, recorder=recorder, clock=_now)
            made = self.parts[host.name] = ModelledHost(host, self.make, clock, start_s=self.start_s, room=room)
            return made

        count = len(self.hosts) if self.count is None else self.count
        self.fleet = EnvironmentHostSupervisor(
            part, count, leases=leases, recorder=recorder, limits=self.limits, later=self.later
        )
        return self.fleet


async def run_autoscaled_hosts(
    fleet: EnvironmentHostSupervisor, keepers: Callable[[EnvironmentHostSupervisor], Sequence[HostAutoscaler]]
) -> None:
    """Run the hosts and, once the initial hosts serve, the tasks that keep their number. These tasks end first: a host
    that is starting needs the fleet."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fleet.run(), name="hosts of environments")
        await fleet.ready()
        async with asyncio.TaskGroup() as keeping:
            for keeper in keepers(fleet):
                keeping.create_task(keeper.run(), name="keep the number of hosts")


@dataclass(eq=False)
class ModelledHost:
    """Implements `HostPart`: a process that runs whenever its machine is up; with a `room`, on any machine
    with free devices."""

    host: SimulatedHost
    make: Mapping[str, HostedEnvironmentFactory]
    clock: ResourceClock
    start_s: float
    room: HostReservation | None
    lives: list[ModelledHostInstance] = field(default_factory=list, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __post_init__(self) -> None:
        self.id, self.host.on_change = self.host.name, self._watch
        if self.room is not None:
            self.room.on_change = self._watch

    @property
    def node(self) -> str:
        return self.host.node if self.room is None else self.room.machine

    async def start(self) -> ModelledHostInstance:
        while True:
            while not self._there():
                self._changed.clear()
                await self._changed.wait()
            await asyncio.sleep(self.start_s)
            if self._there():
                break
        self.lives.append(ModelledHostInstance(self.host, self.make, len(self.lives), node=self.node))
        return self.lives[-1]

    async def wait(self) -> str:
        return await self.lives[-1].lost()

    async def close(self) -> None:
        self.host.on_change = lambda _: None
        if self.room is not None:
            self.room.on_change = lambda _: None
            self.room.leave()

    def _there(self) -> bool:
        return self.host.up and (self.room is None or self.room.take())

    def _watch(self, up: bool) -> None:
        if not up and self.lives:
            self.lives[-1].end("its machine went down")
        self._changed.set()


T = TypeVar("T")

START_S = 1e6
"""Longest wait for a machine that is down, in virtual seconds."""

COLD_START = EnvironmentOrigin("cold", 0.0)


class ModelledHostInstance:
    """Implements `EnvironmentHost`: a host from one start to its end. The end unblocks its calls."""

    image_domains: frozenset[str] = frozenset()

    def __init__(
        self, host: SimulatedHost, make: Mapping[str, HostedEnvironmentFactory], number: int, *, node: str
    ) -> None:
        self._host, self._make = host, make
        self.id, self.node = host.name, node or host.node or host.name
        self.life = f"{host.name} of life {number}"
        self.episodes: dict[str, Environment] = {}
        self.most = 0
        """The most episodes that it held at a time."""
        self._calls: dict[asyncio.Task[object], None] = {}  # the order of a set differs between runs
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        return not self._over.done()

    async def reset(self, episode: str, domain: str, seed: int) -> tuple[tuple[Observation, EnvironmentOrigin], float]:
        if self.alive and episode not in self.episodes:
            self.episodes[episode] = self._make[domain](self._host)
            self.most = max(self.most, len(self.episodes))
        began = _now()
        shown = await self._call(lambda: self.episodes[episode].reset(seed))
        return (shown, COLD_START), _now() - began

    async def step(self, episode: str, action: str) -> tuple[Step, float]:
        began = _now()
        step = await self._call(lambda: self.episodes[episode].step(action))
        return step, _now() - began

    async def close(self, episode: str) -> None:
        try:
            if (environment := self.episodes.get(episode)) is not None:
                await environment.close()
        finally:
            self.episodes.pop(episode, None)
        if not self.alive:
            raise self._error()

    async def images(self, episode: str, domain: str, seed: int, *, pull: bool) -> tuple[EpisodeImages, float]:
        raise EnvironmentFault(self.id, f"no images of domain '{domain}' here")

    async def health(self) -> HostHealth:
        return HostHealth(len(self.episodes))

    async def lost(self) -> str:
        return await asyncio.shield(self._over)

    async def aclose(self) -> None:
        self.end("its connection was closed")

    def end(self, cause: str) -> None:
        """End the host: its calls fail with `cause`."""
        if self.alive:
            self._over.set_result(cause)
            for task in list(self._calls):
                task.cancel()

    async def _call(self, work: Callable[[], Awaitable[T]]) -> T:
        if not self.alive:
            raise self._error()
        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        self._calls[task] = None
        try:
            return await work()
        except asyncio.CancelledError:
            # A cancellation of the task itself, or by a lease, in the same instant stays a cancellation.
            if not self._over.done() or task.uncancel() > before:
                raise
            raise self._error() from None
        except Exception as error:
            if self._over.done():
                raise self._error() from None
            raise EnvironmentFault(self.id, f"raised {one_line(error, 500)}") from None
        finally:
            self._calls.pop(task, None)

    def _error(self) -> EnvironmentFault:
        return EnvironmentFault(self.id, self._over.result(), incident=self.life)


def _now() -> float:
    return asyncio.get_running_loop().time()
