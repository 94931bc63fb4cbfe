"""A trainer on several hosts: the arguments of each, and the whole on a Ray cluster that loses a host."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from rollart.engine.weights import read_tensors
from rollart.errors import PartDied, SpecError, TrainerError
from rollart.fleet import ActorSpec, Node
from rollart.launch.clusters import plan_bundles
from rollart.launch.engines import TrainerProgram
from rollart.launch.layout import trainer_actors, trainer_host_parts
from rollart.launch.trainer import MultiHostTrainer
from rollart.leases import Leases
from rollart.ledger.intervals import ResourceClock
from rollart.model import WeightsRef
from rollart.ports import Handle
from rollart.settings.resolve import Resolved, resolve_files
from rollart.sim import loop as virtual
from rollart.testing.ledger import MemoryRecorder
from tests.contracts.ray_fixture import ray_cluster_of
from tests.e2e.harness import CLUSTER, tiny
from tests.train.test_ranks import CLOSE, SAMPLES, alone, close, setup, weights
from tests.train.trainkit import batch, publish_version


def resolved(path: Path, trainer: dict[str, Any], pool: Mapping[str, Any], *, backend: str = "ray") -> Resolved:
    pools = [{"name": "here", "device": "cpu", "count": 4}, {"name": "learners", "price": 2.0, **pool}]
    cluster = CLUSTER | {"pools": pools, "trainer": trainer, "engines": {"count": 1, "device": "cpu"}}
    cluster |= {"runtime": {"backend": backend}} if backend == "ray" else {}
    (path / "run.yaml").write_text(yaml.safe_dump(tiny()))
    (path / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    return resolve_files(path / "run.yaml", path / "cluster.yaml")


GPUS = {"device": "H100", "count": 8, "devices_per_host": 4}


def test_each_host_is_told_its_ranks_and_asks_for_its_devices(tmp_path: Path) -> None:
    run = resolved(tmp_path, {"threads": 8, "device": "H100"}, GPUS)
    first, second = trainer_actors(run, tmp_path, tmp_path / "trainer.json")
    assert [a.name for a in (first, second)] == ["trainer-0", "trainer-0-host-1"]
    assert [dict(a.resources) for a in (first, second)] == [{"GPU": 4.0}, {"GPU": 4.0}]
    config = ["--config", str(tmp_path / "trainer.json")]
    assert first.args[2] == [*config, "--rank", "0", "--here", "4"]
    assert second.args[2] == [*config, "--rank", "4", "--here", "4"]
    assert first.args[3] != second.args[3], "a log each"
    groups = {g.name: dict(g.resources) for g in plan_bundles(run) if g.name.startswith("trainer")}
    assert groups == {"trainer-0": {"GPU": 4.0}, "trainer-0-host-1": {"GPU": 4.0}}, "reserved before any of them starts"


@pytest.mark.parametrize(
    ("threads", "pool", "backend"),
    [(4, GPUS, "ray"), (8, {"device": "H100", "count": 8}, "ray"), (8, GPUS, "local")],
)
def test_where_one_host_has_enough_it_is_one_program(
    tmp_path: Path, threads: int, pool: Mapping[str, Any], backend: str
) -> None:
    run = resolved(tmp_path, {"threads": threads, "device": "H100"}, pool, backend=backend)
    [actor] = trainer_actors(run, tmp_path, tmp_path / "trainer.json")
    assert actor.args[2] == ["--config", str(tmp_path / "trainer.json")]
    assert actor.resources == {"GPU": float(threads)}


@pytest.mark.parametrize(("ranks", "shares"), [(None, [(0, 1), (1, 1)]), (3, None), (4, [(0, 2), (2, 2)])])
def test_cores_of_several_hosts_have_a_rank_each_or_more(
    tmp_path: Path, ranks: int | None, shares: list[tuple[int, int]] | None
) -> None:
    trainer: dict[str, Any] = {"threads": 4, "device": "cpu-learner"}
    pool = {"device": "cpu", "count": 4, "devices_per_host": 2, "price": 0.1}
    del trainer["device"]
    path = resolved_on_cores(tmp_path, trainer | ({} if ranks is None else {"ranks": ranks}), pool)
    if shares is not None:
        assert [(s.first, s.ranks) for s in trainer_host_parts(path)] == shares
        return
    found = trainer_host_parts(path)
    assert [s.ranks for s in found] == [1, 2]
    assert [s.first for s in found] == [0, 1]


def resolved_on_cores(path: Path, trainer: dict[str, Any], pool: Mapping[str, Any]) -> Resolved:
    """The trainer in a pool of its own, the only one with enough cores."""
    pools = [{"name": "here", "device": "H100", "count": 1, "price": 2.0}, {"name": "learners", **pool}]
    engines = {"count": 1, "device": "H100"}
    cluster = CLUSTER | {"pools": pools, "trainer": trainer, "engines": engines, "runtime": {"backend": "ray"}}
    (path / "run.yaml").write_text(yaml.safe_dump(tiny()))
    (path / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    return resolve_files(path / "run.yaml", path / "cluster.yaml")


def test_a_host_without_a_rank_is_refused(tmp_path: Path) -> None:
    pool = {"device": "cpu", "count": 4, "devices_per_host": 2, "price": 0.1}
    run = resolved_on_cores(tmp_path, {"threads": 4, "ranks": 1}, pool)
    with pytest.raises(SpecError, match=r"trainer.ranks is 1, .* \(rule: at least one on each of the 2 hosts"):
        trainer_actors(run, tmp_path, tmp_path / "trainer.json")


class Away:
    """An actor whose node is gone, and which may be restarting for ever; or a serving one."""

    def __init__(self, *, there: bool) -> None:
        self.there = there
        self.calls: list[str] = []

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(method)
        if method in ("ready", "wait") or not self.there:
            await asyncio.Event().wait()
        return "127.0.0.1:1"


def test_a_start_that_is_given_up_waits_for_no_host_that_never_comes_back() -> None:
    async def scenario() -> None:
        leader, gone, other = Away(there=True), Away(there=False), Away(there=True)
        hosts = MultiHostTrainer([cast(Handle, host) for host in (leader, gone, other)])
        began = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await hosts.call("start", [])
        assert asyncio.get_running_loop().time() - began < 100
        assert all(host.calls[-1] == "stop" for host in (leader, gone, other))

    virtual.run(scenario())


async def refused(trainer: TrainerProgram) -> str:
    """Train until a step is refused because the node is gone; the reason."""
    while True:
        try:
            await trainer.train(SAMPLES, 1)
        except TrainerError as error:
            return error.message


LEARNERS = {"pool": "learners"}


def program(name: str, config: Path, *arguments: str) -> ActorSpec:
    """The `trainer_actors` of a host with one core."""
    args = (name, "rollart.train", ["--config", str(config), *arguments], str(config.parent / f"{name}.log"))
    return ActorSpec(
        name=name,
        factory="rollart.adapters.clusters.ray_host:NodeProgram",
        args=args,
        kwargs={"env": {}},
        resources={"CPU": 1.0},
        labels=LEARNERS,
        max_concurrency=6,
    )


@pytest.mark.slow  # a Ray cluster of four nodes, a trainer of two processes, started twice
@pytest.mark.timeout(600)
def test_two_ranks_on_two_nodes_learn_what_one_learns_and_outlive_a_node(tmp_path: Path) -> None:
    """Weights after imitation and steps equal those of one process to 1e-9. Then the node of rank 1 is killed: pending
    requests fail at once, the trainer restarts on the spare node, and continues from the last version."""
    pytest.importorskip("ray")
    one = alone(tmp_path / "one")
    config = tmp_path / "trainer.json"
    config.write_text(json.dumps(setup(tmp_path / "weights")))
    head = Node("head", {"pool": "controller"}, {"CPU": 1.0})
    learners = [Node(f"n{i}", LEARNERS, {"CPU": 1.0}) for i in range(3)]

    async def scenario() -> None:
        runtime = cluster.runtime()
        await runtime.start()
        hosts: MultiHostTrainer | None = None
        trainer: TrainerProgram | None = None
        try:
            first = await runtime.spawn(program("trainer-0", config, "--rank", "0", "--here", "1"))
            second = await runtime.spawn(program("trainer-0-host-1", config, "--rank", "1", "--here", "1"))
            assert first.node != second.node
            hosts = MultiHostTrainer([first, second])
            recorder = MemoryRecorder()
            clock = ResourceClock(
                role="trainer", resource="trainer-0", recorder=recorder, clock=asyncio.get_running_loop().time
            )
            at: list[WeightsRef] = []
            trainer = TrainerProgram(
                hosts, Leases(recorder), recorder, clock, current=lambda: at[-1] if at else None, start_s=300.0
            )
            await trainer.start()
            await trainer.imitate(SAMPLES, 2)
            one.imitate(batch(SAMPLES), 2)
            report, expected = await trainer.train(SAMPLES, 0), one.train(batch(SAMPLES), 0)
            assert report.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-6)
            at.append(await trainer.publish(1))
            assert close(read_tensors(at[-1].path), weights(one), CLOSE)
            publish_version(one, tmp_path / "one", 1, ())
            cluster.kill_node(second.node)
            async with asyncio.timeout(240):
                assert re.search("the trainer's host 1: |lost each other", await refused(trainer))
            await trainer.recover()
            assert second.node not in ("", first.node)
            report, expected = await trainer.train(SAMPLES, 1), one.train(batch(SAMPLES), 1)
            assert report.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-6)
            assert close(read_tensors((await trainer.publish(2)).path), weights(one), CLOSE)
        finally:
            if trainer is not None:
                await trainer.close()
            if hosts is not None:
                await hosts.aclose()
            await runtime.close()

    with ray_cluster_of([head, *learners], tmp_path / "ray") as cluster:
        asyncio.run(scenario())


@pytest.mark.slow  # a trainer's first rank waits for others, in a process
def test_a_host_that_cannot_start_ends_the_others_and_says_why(tmp_path: Path) -> None:
    from rollart.adapters.clusters.local import LocalRuntime

    config = tmp_path / "trainer.json"
    config.write_text(json.dumps(setup(tmp_path / "weights")))

    async def scenario() -> None:
        runtime = LocalRuntime([Node("n", LEARNERS, {"CPU": 2.0})])
        await runtime.start()
        try:
            here = "rollart.adapters.clusters.program:Program"
            first = await runtime.spawn(replace(program("trainer-0", config, "--rank", "0"), factory=here))
            second = await runtime.spawn(replace(program("trainer-1", config, "--rank", "2"), factory=here))
            with pytest.raises(PartDied, match=r"trainer-1: .*--rank 2: the config has parallel.ranks 2"):
                await asyncio.wait_for(MultiHostTrainer([first, second]).call("start", []), 120)
            assert "SIGTERM" in await first.call("wait"), "rank 0 waits for nobody"
        finally:
            await runtime.close()

    asyncio.run(scenario())
