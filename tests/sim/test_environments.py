"""Environments, trainers and faults of the simulated world."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from placement.hardware import device
from rollart.errors import EnvironmentFault, TrainerError
from rollart.model import GroupId, TrainSample, TrajectoryId, WeightsRef
from rollart.settings.faults import ResetTroubleSpec
from rollart.sim import faults
from rollart.sim.environments import ModelledEnvironment, SimulatedDomain, SimulatedHost
from rollart.sim.faults import FaultPlan, FaultRate, FaultTarget, Outage
from rollart.sim.links import LinkProfile, SharedLink
from rollart.sim.loop import run
from rollart.sim.trainers import ModelledTrainer, TrainerSpeed
from rollart.sim.weights import WeightTransfer
from rollart.sim.workload import PRESETS, Constant, GeneratedWorkload, MassTokenizer, WorkloadShape
from tests.sim.models import engine, shape, turn


def now() -> float:
    return asyncio.get_running_loop().time()


SWE = PRESETS["swe"]
PLAIN = dataclasses.replace(SWE, reset_s=Constant(10.0), step_s=Constant(1.0))


def world(of: WorkloadShape = PLAIN, **more: object) -> SimulatedDomain:
    return SimulatedDomain(GeneratedWorkload(of, 0), **more)  # type: ignore[arg-type]


def test_an_episode_shows_and_asks_for_what_its_script_says() -> None:
    async def main() -> float:
        w, encode = world(), MassTokenizer().encode
        script = GeneratedWorkload(PLAIN, 0).script(7, 0)
        environment = w.make()
        seen = await environment.reset(7)
        for i in range(script.turns):
            assert (encode(seen.text), seen.max_tokens) == ((script.shown[i],), script.answers[i])
            step = await environment.step(str(seen.max_tokens))
            assert step.done is (i == script.turns - 1)
            seen = step.observation
        assert step.metadata["payload_bytes"] == script.payload_bytes
        await environment.close()
        assert w.hosts[0].active == 0
        return now() - script.turns

    assert run(main()) == pytest.approx(10.0)


def test_members_of_a_prompt_are_counted_as_they_come() -> None:
    async def main() -> list[str]:
        w = world()
        return [(await w.make().reset(seed)).text for seed in (1, 1, 2, 1)]

    found, drawn = run(main()), GeneratedWorkload(PLAIN, 0)
    assert found == [str(drawn.script(p, m).shown[0]) for p, m in ((1, 0), (1, 1), (2, 0), (1, 2))]


async def resets(w: SimulatedDomain, count: int) -> tuple[list[float], int]:
    """Seconds of each, and how many failed."""
    seconds, failed = [0.0] * count, 0

    async def one(i: int) -> None:
        nonlocal failed
        began = now()
        try:
            await w.make().reset(i)
        except ConnectionError:
            failed += 1
        seconds[i] = now() - began

    async with asyncio.TaskGroup() as tasks:
        for i in range(count):
            tasks.create_task(one(i))
    return seconds, failed


def test_resets_fail_and_stall_at_their_rates_and_always_the_same_ones() -> None:
    trouble = ResetTroubleSpec(fail=0.1, stall=0.05, stall_s=300.0)
    (seconds, failed), (again, _) = (run(resets(world(faults=trouble), 300)) for _ in range(2))
    assert 12 < failed < 50
    assert 4 < sum(s > 300 for s in seconds) < 35
    assert seconds == again


def test_ra_2_a_burst_takes_a_share_of_the_hosts_for_a_while() -> None:
    trouble = ResetTroubleSpec(burst_every_s=1000.0, burst_s=200.0, burst_hosts=0.5, stall_s=400.0)

    async def main() -> list[tuple[float, set[int]]]:
        hosts = [SimulatedHost(f"h{i}") for i in range(8)]
        w, found = world(hosts=hosts, faults=trouble), []
        for _ in range(100):
            at = now()
            seconds, _ = await resets(w, 8)
            found.append((at, {i for i, s in enumerate(seconds) if s > 100}))
            await asyncio.sleep(50.0)
        return found

    found = run(main())
    hit = [hosts for _, hosts in found if hosts]
    assert 0.05 < len(hit) / len(found) < 0.4
    assert 2 < sum(map(len, hit)) / len(hit) < 6


def test_a_host_that_is_down_breaks_what_runs_there_and_takes_nothing_new() -> None:
    async def main() -> None:
        hosts = [SimulatedHost("a"), SimulatedHost("b")]
        w = world(hosts=hosts)
        on_a = ModelledEnvironment(w, hosts[0]), ModelledEnvironment(w, hosts[0])
        incidents = set()
        for environment in on_a:
            await environment.reset(0)
        faults.host_target(hosts[0]).down()
        for environment in on_a:
            with pytest.raises(EnvironmentFault) as fault:
                await environment.step("1")
            incidents.add(fault.value.incident)
        assert len(incidents) == 1, "what one host takes with it is one incident"
        await asyncio.gather(*(w.make().reset(i) for i in range(4)))
        assert (hosts[0].active, hosts[1].active) == (2, 4)
        faults.host_target(hosts[1]).down()
        with pytest.raises(ConnectionError):
            w.make()

    run(main())


def sample(name: str, prompt: int, answer: int) -> TrainSample:
    none = (0.0, 0.0)
    return TrainSample(
        TrajectoryId(name),
        GroupId("g"),
        "d",
        0,
        (prompt, answer),
        (False, True),
        none,
        (-1, 0),
        (-1, 0),
        none,
        1.0,
        success=True,
    )


def test_a_step_takes_the_flops_of_its_tokens() -> None:
    speed = TrainerSpeed(shape(), device("H800"), 32, mfu=0.4, epochs=2, seconds_per_step=3.0)
    trainer = ModelledTrainer(speed, publish_s=1.5)

    async def main() -> None:
        report = await trainer.train([sample("a", 6000, 2000), sample("b", 1000, 3000)], 0)
        flops = shape().train_flops(8000, 4000) + shape().train_flops(4000, 2000)
        assert now() == report.seconds == pytest.approx(3.0 + 2 * flops / (32 * 989.5e12 * 0.4))
        # 6 FLOPs per parameter and token, and attention besides.
        assert 0.9 < (report.seconds - 3.0) * 32 * 989.5e12 * 0.4 / (2 * 6 * 8.19e9 * 12_000) < 1.4
        assert report.trained_tokens == 5000
        began = now()
        assert (await trainer.publish(4)).version == 4
        assert now() - began == pytest.approx(1.5)

    run(main())


def test_a_publish_pushes_the_weights_and_engines_load_them() -> None:
    async def main() -> None:
        ways = {"e": SharedLink(LinkProfile(4.0))}
        transfer = WeightTransfer(16.0, push=SharedLink(LinkProfile(2.0)), pull=ways.__getitem__, load_gb_per_s=8.0)
        transfer.subscribe("e")
        trainer = ModelledTrainer(TrainerSpeed(shape(), device("H800"), 8), transfer=transfer)
        ref = await trainer.publish(1)
        assert now() == pytest.approx(8.0)
        await transfer.load("e", ref)
        assert now() == pytest.approx(8.0 + 1 / 4 + 2.0)

    run(main())


def test_a_trainer_that_dies_breaks_its_step_and_comes_back_restored() -> None:
    async def main() -> None:
        trainer = ModelledTrainer(TrainerSpeed(shape(), device("H800"), 1, seconds_per_step=50.0))
        task = asyncio.create_task(trainer.train([sample("a", 10, 10)], 0))
        await asyncio.sleep(5.0)
        trainer.fail = True
        with pytest.raises(TrainerError):
            await task
        with pytest.raises(TrainerError):
            await trainer.publish(1)
        await trainer.restore(WeightsRef(0, ""))
        report = await trainer.train([sample("a", 10, 10)], 0)
        assert now() > 55.0
        assert report.trained_tokens == 10

    run(main())


def link_outage(link: SharedLink) -> FaultTarget:
    def set_rate(rate: float) -> None:
        link.rate = rate

    return FaultTarget(lambda: set_rate(0.0), lambda: set_rate(1.0))


def test_outages_happen_when_they_are_due_and_overlap_without_harm() -> None:
    async def main() -> None:
        e, way = engine(), SharedLink(LinkProfile(1.0))
        subjects = {"e": faults.engine_target(e, lambda: 5), "way": link_outage(way)}
        plan = FaultPlan(subjects, [Outage(["e"], 10.0, 20.0), Outage(["e", "way"], 15.0, 30.0), Outage(["way"], 90.0)])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(plan.run())
            await asyncio.sleep(12.0)
            assert e.fail
            await asyncio.sleep(20.0)
            assert (e.fail, way.rate) == (True, 0.0)
            await asyncio.sleep(20.0)
            assert (e.fail, e.version, way.rate) == (False, 5, 1.0)
            await e.generate(turn("a", 10, 10))
        assert way.rate == 0.0
        assert [(h.t, h.subject, h.up) for h in plan.happened] == [
            (10.0, "e", False),
            (15.0, "way", False),
            (45.0, "e", True),
            (45.0, "way", True),
            (90.0, "way", False),
        ]

    run(main())


def test_rates_are_met_and_seeded() -> None:
    async def main(seed: int) -> list[tuple[float, str, bool]]:
        hosts = {f"h{i}": SimulatedHost(f"h{i}") for i in range(10)}
        subjects = {name: faults.host_target(h) for name, h in hosts.items()}
        plan = FaultPlan(
            subjects, rates=[FaultRate([*((h,) for h in list(subjects)[:8]), ("h8", "h9")], 900.0, 100.0)], seed=seed
        )
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(50_000.0):
                await plan.run()
        return [(h.t, h.subject, h.up) for h in plan.happened]

    found = run(main(1))
    assert found == run(main(1)) != run(main(2))
    deaths = sum(not up for _, _, up in found)
    assert deaths == pytest.approx(10 * 50.0, rel=0.15)
    together = [{s for t, s, _ in found if t == at} for at in {t for t, s, _ in found if s == "h8"}]
    assert all(names == {"h8", "h9"} for names in together)


def test_faults_of_what_is_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="not there"):
        FaultPlan({}, [Outage(["ghost"], 1.0)])
