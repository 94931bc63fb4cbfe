"""Environments on virtual time: scripts played by hosts that may be slow, crowded or broken.

A `SimulatedDomain` is one domain: its environments know their trajectory's script when they are reset. The text of an
observation is its mass (`mass`), and its `max_tokens` is the length of the engine's answer, so that only the product's
own validation lies between a workload and an engine. The run's context limit, which counts pieces, must be high enough
not to apply.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from rollart.errors import EnvironmentFault
from rollart.model import Observation, Step
from rollart.sim.draws import entity_generator
from rollart.sim.links import SharedLink
from rollart.sim.loop import sleeping
from rollart.sim.workload import Script, Workload

__all__ = ["SimulatedHost", "ModelledEnvironment", "ResetFaults", "SimulatedDomain"]


@dataclass(frozen=True, slots=True)
class ResetFaults:
    """Faults of resets besides their duration's distribution. With probability `fail` a reset raises when its time is
    over; with probability `stall` it takes `stall_s` longer. In a burst, both have the probabilities `burst_fail` and
    `burst_stall` on the hosts that it hits: a registry or a link that is overrun takes many down together (RA-2).

    Bursts come `burst_every_s` apart on average (exponential), for `burst_s`, each on a share `burst_hosts` of hosts.
    """

    fail: float = 0.0
    stall: float = 0.0
    stall_s: float = 400.0
    burst_every_s: float = math.inf
    burst_s: float = 120.0
    burst_hosts: float = 0.25
    burst_fail: float = 0.0
    burst_stall: float = 1.0

    def __post_init__(self) -> None:
        for name in ("fail", "stall", "burst_hosts", "burst_fail", "burst_stall"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)} (rule: a probability)")


@dataclass(slots=True)
class SimulatedHost:
    """A machine that runs environments. Concurrent environments share `work`, in seconds of one environment alone (a
    link of as many "GB/s" as the machine has cores, with at most 1 per stream); None: environments do not slow each
    other down."""

    name: str
    work: SharedLink | None = None
    up: bool = True
    active: int = 0
    node: str = ""
    """The machine that fails with it; its own if not given."""
    on_change: Callable[[bool], None] | None = None
    """Called with the new state when it goes down or comes back."""
    failures: int = 0
    """Number of times that it went down."""

    def turn(self, *, up: bool) -> None:
        self.failures += self.up and not up
        self.up = up
        if self.on_change is not None:
            self.on_change(up)


@dataclass
class SimulatedDomain:
    """One domain's environments. Give `make` to the product as the domain's factory; or `on`, where the product chooses
    the host (`sim.hosts`).

    `make` takes hosts in turn. The members of a prompt are counted in the order they are reset in.
    """

    workload: Workload
    seed: int = 0
    name: str = ""
    hosts: Sequence[SimulatedHost] = field(default_factory=lambda: (SimulatedHost("host-0"),))
    faults: ResetFaults | None = None
    solved: float | None = None
    """Mean share of trajectories with reward 1 instead of 0; None: each trajectory has its script's reward, and nothing
    is drawn."""
    resets: int = 0
    failed_resets: int = 0
    steps: int = 0
    _members: dict[int, int] = field(default_factory=dict)
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

    def on(self, host: SimulatedHost) -> ModelledEnvironment:
        return ModelledEnvironment(self, host)

    def script(self, prompt: int) -> tuple[Script, int]:
        """The next member's script, and which member that is."""
        member = self._members.get(prompt, 0)
        self._members[prompt] = member + 1
        return self.workload.script(prompt, member), member

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
        self.failed_resets += fails
        return fails, faults.stall_s if stalls else 0.0

    def _in_burst(self, faults: ResetFaults, host: SimulatedHost, now: float) -> bool:
        """Bursts are drawn as time passes, and a host's part in each by a hash, so that the result does not depend on
        the caller."""
        if faults.burst_every_s == math.inf:
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
        self._script, member = world.script(seed)
        self._reward = self._script.reward if world.solved is None else float(world.solves(seed, member))
        self._turn = 0
        if not self._live:
            self._live = True
            host.active += 1
        world.resets += 1
        fails, stalled = world.reset_trouble(seed, member, host, asyncio.get_running_loop().time())
        if stalled:
            await asyncio.sleep(stalled)
        await self._spend(self._script.reset_s)
        if fails:
            raise ConnectionError(f"the container of {host.name} did not start")
        return self._observation()

    async def step(self, action: str) -> Step:
        script, turn = self._script, self._turn
        self._world.steps += 1
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
        host = self._host
        if host.work is not None:
            await host.work.transfer(seconds)
        elif seconds:
            await sleeping(seconds)
        if not host.up:
            raise EnvironmentFault(host.name, "its host is down", incident=f"{host.name} down {host.failures}")


_FINAL_OBSERVATION = Observation("1")
"""The last observation, which the policy never answers."""
