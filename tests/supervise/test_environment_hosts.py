"""The fleet of environment hosts on virtual time: places, deaths, hangs, retirement, and ends of hosts that fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.control.scheduler import FaultMeter
from rollart.errors import EnvironmentFault, FaultRateExceeded, LeaseExpired, PartDied, UsageError
from rollart.hosted import EnvironmentOrigin, EpisodeImages, HostHealth
from rollart.leases import Expiry
from rollart.model import AbortReason, Observation, Step
from rollart.policy.host_slots import PlacementPriority, PlacementRequest
from rollart.policy.hosts import MemoryRules
from rollart.supervise.environment_hosts import EnvironmentHostSupervisor, HostedEnvironment
from rollart.supervise.supervisor import HostLimits
from rollart.testing.laws import find_tiling_errors
from tests.supervise.hosts import HostBench, HostProcess, play, running

LIMITS = HostLimits(per_host=4, health_s=10.0, start_s=5.0, call_s=30.0)


class Place:
    """A host's client: one life of it. Calls take a second."""

    image_domains: frozenset[str] = frozenset()

    def __init__(self, part: Part, life: int) -> None:
        self._part, self._life = part, life
        self.life, self.node = f"{part.id} of process {life}", part.machine or f"node of {part.id}"
        self.episodes: set[str] = set()
        self.stuck_s = 0.0
        self.left: tuple[str, ...] = ()
        self.memory, self.machine = 0, 10 * 10**9
        self.silent = False
        self._gone = asyncio.Event()

    @property
    def id(self) -> str:
        return self._part.id

    @property
    def alive(self) -> bool:
        return not self._gone.is_set()

    async def reset(self, episode: str, domain: str, seed: int) -> tuple[tuple[Observation, EnvironmentOrigin], float]:
        await self._take()
        self.episodes.add(episode)
        return (Observation(self.id), EnvironmentOrigin("cold", 0.0)), 1.0

    async def step(self, episode: str, action: str) -> tuple[Step, float]:
        assert episode in self.episodes
        if action == "hang":
            await self._gone_or(asyncio.Event().wait())
        await self._take()
        return Step(Observation(self.id), 1.0, action == "end"), 1.0

    async def close(self, episode: str) -> None:
        if not self.alive:
            raise self._error()
        self.episodes.discard(episode)

    async def health(self) -> HostHealth:
        if self.silent:
            await self._gone_or(asyncio.Event().wait())
        return HostHealth(len(self.episodes), self.stuck_s, "step of tale-0", self.left, self.memory, self.machine)

    async def lost(self) -> str:
        await self._gone.wait()
        return "its connection broke"

    async def aclose(self) -> None:
        self._gone.set()

    async def _take(self) -> None:
        await self._gone_or(asyncio.sleep(1.0))

    async def _gone_or(self, work: Awaitable[Any]) -> None:
        """Wait for the work; the end of this life unblocks with its fault."""
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(self._gone.wait())
            doing = tasks.create_task(_of(work))
            over = asyncio.Event()
            for task in (waiting, doing):
                task.add_done_callback(lambda _: over.set())
            await over.wait()
            waiting.cancel()
            doing.cancel()
        if not self.alive:
            raise self._error()

    def _error(self) -> EnvironmentFault:
        return EnvironmentFault(self.id, "its connection broke", incident=f"{self.id} of process {self._life}")


async def _of(work: Awaitable[Any]) -> None:
    await work


class Part(HostProcess[Place]):
    role = "environment"
    machine = ""
    client: type[Place] = Place

    async def start(self) -> Place:
        if self.lives:
            await self.lives[-1].aclose()
        return await self.begin(lambda: self.client(self, len(self.lives)))


class Bench(HostBench[Part]):
    def __init__(self, count: int, limits: HostLimits = LIMITS) -> None:
        super().__init__(Part)
        self.make: Callable[[str], Awaitable[Part]] = self.part
        self.fleet: EnvironmentHostSupervisor = EnvironmentHostSupervisor(
            lambda name: self.make(name), count, leases=self.leases, recorder=self.recorder, limits=limits
        )
        self._make_environment = self.fleet.environment("tale")

    def environment(self) -> HostedEnvironment:
        made = self._make_environment()
        assert isinstance(made, HostedEnvironment)
        return made

    @property
    def live(self) -> dict[str, int]:
        return {name: host.live for name, host in self.fleet.hosts.items()}


def test_episodes_are_spread_and_wait_for_a_place() -> None:
    async def main() -> None:
        bench = Bench(2)
        async with running(bench):
            held = [bench.environment() for _ in range(8)]
            await asyncio.gather(*(one.reset(0) for one in held))
            assert bench.live == {"environment-0": 4, "environment-1": 4}
            late = bench.environment()
            async with asyncio.TaskGroup() as tasks:
                waiting = tasks.create_task(late.reset(0))
                await asyncio.sleep(5.0)
                assert not waiting.done()
                assert late.host == ""
                await held[3].close()
            assert late.host == bench.parts[waiting.result().text].id
            await late.close()
            await late.close()
            assert sum(bench.live.values()) == 7

    play(main)


def test_a_dead_host_takes_its_episodes_and_no_others_and_comes_back() -> None:
    async def main() -> None:
        bench = Bench(2)
        async with running(bench):
            one, two = bench.environment(), bench.environment()
            await asyncio.gather(one.reset(0), two.reset(0))
            dead = bench.parts[one.host]
            async with asyncio.TaskGroup() as tasks:
                step = tasks.create_task(fault_of(one.step("left")))
                other = tasks.create_task(two.step("left"))
                await asyncio.sleep(0.5)
                await dead.die()
                # Nothing goes to it, from this moment on.
                third = bench.environment()
                assert (await third.reset(0)).text != dead.id
            assert other.result().reward == 1.0
            assert (step.result().host, step.result().incident) == (dead.id, f"{dead.id} of process 0")
            told = {"cause": "its process was killed by SIGKILL", "episodes": 1}
            assert bench.events("host_lost") == [(dead.id, told)]
            await one.close()
            await asyncio.sleep(3.0)
            assert len(dead.lives) == 2
            assert bench.fleet.faults() == {dead.id: 1, two.host: 0}
        assert find_tiling_errors(bench.recorder.intervals) == []
        lost = {(i.state, i.cause) for i in bench.recorder.intervals if i.resource == dead.id}
        assert lost >= {("startup", "host_restart"), ("startup", "")}

    play(main)


@pytest.mark.parametrize(
    ("trouble", "cause"),
    [
        (lambda place: setattr(place, "silent", True), "it was silent for 10 s"),
        (lambda place: setattr(place, "stuck_s", 12.0), "step of tale-0 blocked all of its episodes for 12.0 s"),
        (lambda place: setattr(place, "left", ("tale-0",)), "1 call never ended and holds a thread (tale-0)"),
    ],
)
def test_a_host_that_hangs_is_started_again(trouble: Callable[[Place], None], cause: str) -> None:
    async def main() -> None:
        bench = Bench(2)
        async with running(bench):
            part = bench.parts["environment-1"]
            trouble(part.lives[0])
            await asyncio.sleep(20.0)
            assert [(s, f["cause"]) for s, f in bench.events("host_lost")] == [("environment-1", cause)]
            assert len(part.lives) == 2
            assert len(bench.parts["environment-0"].lives) == 1

    play(main)


def test_a_host_with_calls_that_never_end_rests_until_it_is_empty() -> None:
    async def main() -> None:
        bench = Bench(2)
        async with running(bench):
            one, two = bench.environment(), bench.environment()
            await asyncio.gather(one.reset(0), two.reset(0))
            part = bench.parts[one.host]
            part.lives[0].left = ("tale-7",)
            await asyncio.sleep(10.0)
            assert len(part.lives) == 1
            others = [bench.environment() for _ in range(3)]
            assert {(await other.reset(0)).text for other in others} == {two.host}
            await one.close()
            await asyncio.sleep(5.0)
            assert len(part.lives) == 2
            assert await bench.environment().reset(0) == Observation(part.id)
            # The others rest too where nobody else is: a place is better than none.
            for each in bench.parts.values():
                each.lives[-1].left = ("tale-8",)
            await asyncio.sleep(10.0)
            assert (await bench.environment().reset(0)).text

    play(main)


@pytest.mark.parametrize("ends", [True, False])
def test_a_host_above_its_memory_gets_no_episodes_and_is_started_again(ends: bool) -> None:
    """Once its episodes have ended, or have had their time; they wait for it where there is no other."""

    async def main() -> None:
        bench = Bench(1, replace(LIMITS, memory=MemoryRules(2e9, drain_s=100.0)))
        async with running(bench):
            one, two = bench.environment(), bench.environment()
            await one.reset(0)
            (part,) = bench.parts.values()
            part.lives[0].memory = int(1.9e9)
            await asyncio.sleep(10.0)
            assert bench.events("host_draining") == []
            part.lives[0].memory = int(2.2e9)
            await asyncio.sleep(10.0)
            cause = "its memory is 2.20 GB, its bound 2.00 GB (environments.memory_gb); it played tale"
            assert bench.events("host_draining") == [(part.id, {"cause": cause, "episodes": 1})]
            async with asyncio.TaskGroup() as tasks:
                waiting = tasks.create_task(two.reset(0))
                await asyncio.sleep(50.0)
                assert not waiting.done()
                assert (await one.step("left")).reward == 1.0
                if ends:
                    await one.close()
                    await asyncio.sleep(10.0)
                else:
                    fault = await fault_of(one.step("hang"))
                    assert fault.incident == f"{part.id} of process 0"
            assert bench.events("host_lost") == [(part.id, {"cause": cause, "episodes": int(not ends)})]
            assert (len(part.lives), two.host) == (2, part.id)

    play(main)


def test_a_host_far_above_its_memory_is_started_again_at_once_and_another_serves() -> None:
    async def main() -> None:
        bench = Bench(2)
        async with running(bench):
            one, two = bench.environment(), bench.environment()
            await asyncio.gather(one.reset(0), two.reset(0))
            for part in bench.parts.values():  # their share: 70 % of 10 GB for both
                for life in part.lives:
                    life.memory = int(3.4e9)
            dead = bench.parts[one.host]
            dead.lives[0].memory = int(4.5e9)
            await asyncio.sleep(3.0)
            cause = "its memory is 4.50 GB, its bound 3.50 GB (environments.memory_gb: auto, for 2 hosts on 10.0 GB)"
            lost = [(name, fields["cause"]) for name, fields in bench.events("host_lost")]
            assert lost == [(dead.id, f"{cause}; it played tale")]
            assert (await two.step("left")).reward == 1.0

    # Hosts of one machine share it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Part, "machine", "here")
        play(main)


def test_a_step_that_hangs_until_its_lease_ends_counts_against_its_host_and_a_cancelled_one_does_not() -> None:
    async def main() -> None:
        bench = Bench(1)
        async with running(bench):
            for seconds, faults in ((LIMITS.call_s, 1), (3.0, 1)):
                one = bench.environment()
                await one.reset(0)
                with pytest.raises(Exception, match="waited"):
                    async with bench.leases.hold("tale-0", "step", seconds, Expiry.GAP_FILL):
                        await one.step("hang")
                await one.close()
                assert bench.fleet.faults() == {"environment-0": faults}
            assert bench.events("host_lost") == []

    play(main)


def test_a_host_retires_with_its_last_episode_and_new_ones_take_over() -> None:
    async def main() -> None:
        bench = Bench(2)
        async with running(bench):
            one, two = bench.environment(), bench.environment()
            await asyncio.gather(one.reset(0), two.reset(0))
            await bench.fleet.resize(1)
            assert len(bench.fleet.names) == 1
            going = bench.parts["environment-1"]
            others = [bench.environment() for _ in range(3)]
            for other in others:
                assert (await other.reset(0)).text == "environment-0"
            assert not going.closed
            leaving = one if one.host == going.id else two
            assert (await leaving.step("left")).reward == 1.0
            await leaving.close()
            await asyncio.sleep(0.1)
            assert going.closed
            assert bench.events("host_retired") == [(going.id, {"episodes": 1, "faults": 0})]
            await bench.fleet.resize(3)
            await asyncio.sleep(2.0)
            assert sorted(bench.live) == ["environment-0", "environment-2", "environment-3"]
            await bench.fleet.resize(0)
            assert len(bench.fleet.names) == 1
        assert all(part.closed for part in bench.parts.values())
        assert find_tiling_errors(bench.recorder.intervals) == []

    play(main)


def test_a_host_that_never_starts_is_given_up_while_another_serves() -> None:
    async def main() -> None:
        bench = Bench(2)
        async with running(bench):
            bench.broken.add("environment-1")
            await bench.parts["environment-1"].die()
            await asyncio.sleep(60.0)
            assert [(s, f["restarts"]) for s, f in bench.events("host_given_up")] == [("environment-1", 5)]
            assert sorted(bench.live) == ["environment-0"]

    play(main)


def test_the_last_host_that_cannot_be_kept_ends_the_run() -> None:
    async def main() -> None:
        bench = Bench(1)
        bench.broken.add("environment-0")
        with pytest.raises(BaseExceptionGroup) as group:
            await bench.fleet.run()
        (error,) = group.value.exceptions
        assert isinstance(error, PartDied)
        why = "environment-0: ended with status 1 before it was ready, after 5 restarts"
        assert str(error) == f"{why} (rollart logs --role environment-0)"

    play(main)


def test_a_host_that_is_given_up_does_not_end_the_run_while_another_is_on_its_way() -> None:
    async def main() -> None:
        bench = Bench(2, replace(LIMITS, start_s=300.0))
        async with running(bench):
            slow, broken = bench.parts["environment-0"], bench.parts["environment-1"]
            slow.start_s = 60.0
            bench.broken.add("environment-1")
            await slow.die()
            await broken.die()
            await asyncio.sleep(59.0)
            assert [s for s, _ in bench.events("host_given_up")] == ["environment-1"]
            await asyncio.sleep(2.0)
            assert bench.fleet.up() == {"environment-0"}

    play(main)


@pytest.mark.parametrize(("patience_s", "comes"), [(600.0, True), (600.0, False), (0.0, False)])
def test_the_last_host_waits_for_a_node_as_long_as_the_run_does(patience_s: float, comes: bool) -> None:
    async def main() -> None:
        bench = Bench(1, replace(LIMITS, patience_s=patience_s))

        async def scenario() -> None:
            async with running(bench):
                (part,) = bench.parts.values()
                part.homeless = True
                await part.die()
                await asyncio.sleep(0.9 * patience_s)
                part.homeless = not comes
                await asyncio.sleep(60.0 + 0.2 * patience_s)

        began = asyncio.get_running_loop().time()
        if comes:
            await scenario()
            assert len(bench.parts["environment-0"].lives) == 2
        else:
            with pytest.raises(ExceptionGroup) as group:
                await scenario()
            assert group.group_contains(PartDied, match="no node could ever hold it")
            assert max(patience_s, 5.0) < asyncio.get_running_loop().time() - began < patience_s + 60.0

    play(main)


def test_a_host_that_does_not_come_back_takes_its_episodes_once() -> None:
    async def main() -> None:
        bench = Bench(2)
        async with running(bench):
            environments = [bench.environment() for _ in range(4)]
            for environment in environments:
                await environment.reset(1)
            bench.broken.add("environment-1")
            await bench.parts["environment-1"].die()
            for environment in environments:
                with contextlib.suppress(EnvironmentFault):
                    await environment.step("on")
            await asyncio.sleep(60.0)
            assert sum(f["episodes"] for _, f in bench.events("host_lost")) == 2
            for environment in environments:
                await environment.close()

    play(main)


def test_no_host_is_made_after_one_of_the_first_could_not_be() -> None:
    async def main() -> None:
        bench = Bench(3)
        make = bench.make

        async def made(name: str) -> Part:
            if name == "environment-1":
                raise UsageError("no room")
            await asyncio.sleep(5.0)
            return await make(name)

        bench.make = made
        with pytest.raises(ExceptionGroup) as group:
            await bench.fleet.run()
        assert group.value.split(UsageError)[1] is None
        await asyncio.sleep(10.0)
        assert not bench.parts
        assert not bench.fleet.clocks

    play(main)


def test_episodes_that_are_cancelled_where_their_host_died_do_not_count_as_its_good_ones() -> None:
    async def main() -> None:
        bench = Bench(2)
        async with running(bench):
            part = bench.parts["environment-1"]
            for life in range(6):
                while len(part.lives) <= life:
                    await asyncio.sleep(0.5)
                held = [bench.environment() for _ in range(4)]
                async with asyncio.TaskGroup() as tasks:
                    resets = [tasks.create_task(one.reset(0)) for one in held]
                    await asyncio.sleep(0.2)
                    assert bench.live["environment-1"] == 2
                    await part.die()
                    for reset in resets:
                        reset.cancel()
                for one in held:
                    await one.close()
            await asyncio.sleep(10.0)
            assert [(s, f["restarts"]) for s, f in bench.events("host_given_up")] == [("environment-1", 5)]

    play(main)


def test_a_call_to_a_life_that_is_over_does_not_make_its_host_busy() -> None:
    async def main() -> None:
        bench = Bench(1)
        async with running(bench):
            one = bench.environment()
            await one.reset(0)
            part = bench.parts["environment-0"]
            await part.die()
            await asyncio.sleep(0.1)
            assert part.clock.state == "startup"
            await fault_of(one.step("left"))
            assert part.clock.state == "startup"
            await one.close()

    play(main)


def test_hosts_are_ready_once_the_last_of_them_is() -> None:
    async def main() -> None:
        bench = Bench(2)
        make, room = bench.make, asyncio.Event()

        async def made(name: str) -> Part:
            if name == "environment-1":
                await room.wait()
            part = await make(name)
            assert isinstance(part, Part)
            return part

        bench.make = made
        async with asyncio.TaskGroup() as tasks:
            fleet = tasks.create_task(bench.fleet.run())
            ready = tasks.create_task(bench.fleet.ready())
            await asyncio.sleep(5.0)
            assert bench.parts["environment-0"].lives
            assert not ready.done()
            room.set()
            await ready
            assert bench.parts["environment-1"].lives
            fleet.cancel()

    play(main)


class Pictured(Place):
    """Needs images, and whoever lists them never answers."""

    image_domains = frozenset({"tale"})

    async def images(self, episode: str, domain: str, seed: int, *, pull: bool) -> tuple[EpisodeImages, float]:
        await self._gone_or(asyncio.Event().wait())
        raise AssertionError("it is never over")


def test_a_host_that_never_says_which_images_it_has_is_waited_for_under_a_lease() -> None:
    async def main() -> None:
        bench = Bench(1)
        make = bench.make

        async def made(name: str) -> Part:
            part = await make(name)
            part.client = Pictured
            return part

        bench.make = made
        async with running(bench):
            one = bench.environment()
            with pytest.raises(LeaseExpired, match=r"waited 600\.0 s for a host to name the images of its environment"):
                await one.prepare(0, "tale-0")
            assert one.host == ""
            assert bench.live == {"environment-0": 0}

    play(main)


@pytest.mark.slow
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_places_are_conserved_whatever_dies(seed: int, count: int) -> None:
    """Loads are the episodes that are open, none is above its bound, and in the end nothing is held."""

    async def main() -> None:
        rng, bench = Random(seed), Bench(count)
        open_, named = 0, set[str]()

        async def episode() -> None:
            nonlocal open_
            environment = bench.environment()
            await asyncio.sleep(rng.uniform(0, 10))
            try:
                await environment.reset(0)
                open_ += 1
                try:
                    for _ in range(rng.randrange(4)):
                        await environment.step("left")
                        assert max(bench.live.values()) <= LIMITS.per_host
                finally:
                    open_ -= 1
            except EnvironmentFault as fault:
                named.add(fault.host)
            finally:
                await environment.close()

        async def chaos() -> None:
            for _ in range(6):
                await asyncio.sleep(rng.uniform(0, 5))
                part = rng.choice(list(bench.parts.values()))
                match rng.randrange(3):
                    case 0 if part.lives:
                        await part.die()
                    case 1:
                        await bench.fleet.resize(rng.randrange(1, 5))
                    case _ if part.lives:
                        part.lives[-1].stuck_s = 99.0

        async with running(bench):
            async with asyncio.TaskGroup() as tasks:
                for _ in range(24):
                    tasks.create_task(episode())
                tasks.create_task(chaos())
            assert open_ == 0
            assert named <= set(bench.parts)
            assert set(bench.live.values()) == {0}
        assert find_tiling_errors(bench.recorder.intervals) == []
        assert all(part.closed for part in bench.parts.values())

    play(main, seed)


def test_the_end_of_a_host_is_one_fault_and_ends_that_take_more_than_is_left_stop_a_run() -> None:
    meter = FaultMeter(max_rate=0.05, min_count=10)
    for number in range(200):
        meter.ended(AbortReason.INFRA_FAULT, "its connection broke", incident="environment-0 of process 1")
        meter.check()
        assert (meter.attempts, meter.faults, meter.losses.shared_losses) == (1, 1, number)
    for _ in range(100):
        meter.ended(None)
    meter.ended(AbortReason.INFRA_FAULT, "", incident="environment-1 of process 2")
    meter.check()
    meter.ended(AbortReason.INFRA_FAULT, "", incident="environment-0 of process 3")
    with pytest.raises(FaultRateExceeded, match="199 of the last 302 trajectories were lost with 3 ends"):
        meter.check()


def test_ends_of_hosts_stop_no_run_before_the_count_nor_beyond_the_rate_that_its_spec_gives() -> None:
    for max_rate, min_count, each in ((0.05, 10, 3), (1.0, 1, 500)):
        meter = FaultMeter(max_rate=max_rate, min_count=min_count)
        for end in range(3):
            for _ in range(each):
                meter.ended(AbortReason.INFRA_FAULT, "its connection broke", incident=f"environment-{end}")
                meter.check()
    meter = FaultMeter(max_rate=0.6, min_count=10)
    for _ in range(100):
        meter.ended(None)
    for end in range(3):
        for _ in range(52):
            meter.ended(AbortReason.INFRA_FAULT, "its connection broke", incident=f"environment-{end}")
            meter.check()
    for _ in range(2):
        meter.check()  # 153 of 256, then 154 of 257
        meter.ended(AbortReason.INFRA_FAULT, "its connection broke", incident="environment-2")
    with pytest.raises(FaultRateExceeded, match="155 of the last 258 trajectories were lost"):
        meter.check()


def test_ends_of_hosts_that_are_long_past_stop_no_run() -> None:
    """Three outages, each with a hundred attempts of a window of two hundred, hundreds of good ones apart."""
    meter = FaultMeter(max_rate=0.05, min_count=10, window=200)
    for end in range(9):
        for _ in range(100):
            meter.ended(AbortReason.INFRA_FAULT, "", incident=f"environment-{end}")
            meter.check()
        for _ in range(150):
            meter.ended(None)
            meter.check()
    for end in range(3):
        for _ in range(40):
            meter.ended(AbortReason.INFRA_FAULT, "", incident=f"environment-{end} again")
    with pytest.raises(FaultRateExceeded, match=r"117 of the last 200 .* with 3 ends of environment hosts .limit 50%"):
        meter.check()


def test_hosts_of_one_node_that_end_together_are_one_incident() -> None:
    async def main() -> None:
        bench = Bench(3)
        async with running(bench):
            held = [bench.environment() for _ in range(3)]
            await asyncio.gather(*(one.reset(0) for one in held))
            for name in ("environment-0", "environment-1"):
                bench.parts[name].lives[0].node = "node-a"
            ends = []
            for part in bench.parts.values():
                await part.die()
                await asyncio.sleep(1.0)
            for one in held:
                ends.append((await fault_of(one.step("left"))).incident)  # all learn of it late
                await one.close()
            by_host = dict(zip(bench.parts, ends, strict=True))
            assert by_host["environment-0"] == by_host["environment-1"] != by_host["environment-2"]

    play(main)


def test_a_place_of_a_life_that_is_over_is_not_freed_in_another() -> None:
    async def main() -> None:
        bench = Bench(1)
        async with running(bench):
            part, held = bench.parts["environment-0"], [bench.environment() for _ in range(2)]
            await held[0].reset(0)
            await part.die()
            await asyncio.sleep(3.0)
            await held[1].reset(0)
            assert bench.live == {"environment-0": 1}
            await part.die()
            await asyncio.sleep(0.1)  # it is down, and its first life's episode ends now
            await held[0].close()
            assert bench.live == {"environment-0": 1}
            await held[1].close()
            assert bench.live == {"environment-0": 0}

    play(main)


def test_what_is_ahead_of_need_gives_its_place_up_the_newest_first() -> None:
    async def main() -> None:
        bench, given_up = Bench(1), list[str]()
        async with running(bench):
            ahead: dict[str, HostedEnvironment] = {}

            async def close(name: str) -> None:
                await ahead[name].close()

            async with asyncio.TaskGroup() as tasks:

                def give_up(name: str) -> None:
                    given_up.append(name)
                    tasks.create_task(close(name))

                first = bench.environment()
                await first.prepare(0, "first")
                for name in ("a", "b", "c"):
                    ahead[name] = bench.environment()
                    await ahead[name].prepare(
                        0, name, PlacementRequest(PlacementPriority.AHEAD), partial(give_up, name)
                    )
                ahead["b"].keep()
                late = [bench.environment() for _ in range(2)]
                await asyncio.gather(*(one.prepare(0, "late") for one in late))
                assert given_up == ["c", "a"]
                assert bench.live == {"environment-0": LIMITS.per_host}
                # A third waits for one that runs.
                third = bench.environment()
                waiting = tasks.create_task(third.prepare(0, "third"))
                await asyncio.sleep(5.0)
                assert not waiting.done()
                await first.close()
                await waiting
                for one in (*late, third, ahead["b"]):
                    await one.close()
            assert bench.live == {"environment-0": 0}
            assert [f["waited"] for s, f in bench.events("environment_places") if s == "train"] == [1, 2]

    play(main)


def test_a_place_that_is_given_to_one_that_waits_no_more_goes_to_the_next() -> None:
    async def main() -> None:
        bench = Bench(1)
        async with running(bench):
            held = [bench.environment() for _ in range(4)]
            for one in held:
                await one.prepare(0, "held")
            async with asyncio.TaskGroup() as tasks:
                some = [bench.environment() for _ in range(3)]
                waiting = [tasks.create_task(one.prepare(0, "some")) for one in some]
                await asyncio.sleep(1.0)
                waiting[1].cancel()
                await held[0].close()  # granted to the first, which is cancelled before it knows
                waiting[0].cancel()
                await asyncio.sleep(1.0)
                assert waiting[2].done()
                assert some[2].host == "environment-0"
            for one in (*held, *some):
                await one.close()
            assert bench.live == {"environment-0": 0}

    play(main)


async def fault_of(work: Awaitable[Any]) -> EnvironmentFault:
    try:
        await work
    except EnvironmentFault as fault:
        return fault
    raise AssertionError("no fault")
