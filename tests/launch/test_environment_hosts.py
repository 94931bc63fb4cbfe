"""Environment hosts of a run: their number, placement and billing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from placement.types import Assignment, Role
from rollart.adapters.clusters.local import LocalRuntime
from rollart.errors import SpecError
from rollart.launch import hosts
from rollart.launch.hosts import environment_fleet, environment_host_names, host_actor, host_count
from rollart.launch.layout import pool_nodes
from rollart.launch.strategies import stall_limit_s
from rollart.leases import Leases
from rollart.policy.hosts import BUSY, hosts_for
from rollart.settings.resolve import Resolved, resolve_files
from rollart.sim import loop as virtual
from rollart.testing.ledger import MemoryRecorder

FAKE = Path(__file__).parents[2] / "configs/clusters/ray-fake.yaml"


def resolved(*overrides: str, cluster: Path | None = None) -> Resolved:
    return resolve_files(None, cluster, [f"cluster.environments.{one}" for one in overrides])


def with_cores(run: Resolved, count: int) -> Resolved:
    """A run whose plan has that many environment cores."""
    given = tuple(Assignment(Role.ENVIRONMENT, n, "here", (2 + n,)) for n in range(count))
    pools = [pool.model_copy(update={"count": 2 + count}) for pool in run.cluster.pools]
    cluster = run.cluster.model_copy(update={"pools": pools})
    return replace(run, cluster=cluster, plan=replace(run.plan, assignments=(*run.plan.assignments, *given)))


def test_without_workers_there_are_no_hosts(tmp_path: Path) -> None:
    run = resolved()
    assert (host_count(run), environment_host_names(run)) == (0, frozenset())

    async def main() -> None:
        recorder = MemoryRecorder()
        runtime = LocalRuntime(pool_nodes(run))
        assert environment_fleet(run, tmp_path, runtime, Leases(recorder), recorder, used=frozenset()) is None

    virtual.run(main())


def test_hosts_run_beside_what_the_plan_placed_on_the_pool_of_cores(tmp_path: Path) -> None:
    run = resolved("workers=3", cluster=FAKE)
    assert host_count(run) == 3
    actor = host_actor(run, tmp_path, "environment-0", tmp_path / "environments.json", "secret", given=None)
    assert (dict(actor.resources), dict(actor.labels)) == ({}, {"gpu": "none"})
    assert actor.factory.endswith(":NodeProgram")
    assert "secret" not in str(actor.args), "arguments are there for every user of the machine to read"
    elsewhere = resolved("workers=3", "pool=h20", cluster=FAKE)
    actor = host_actor(elsewhere, tmp_path, "environment-0", tmp_path / "environments.json", "secret", given=None)
    assert dict(actor.labels) == {"gpu": "H20"}


def test_cores_of_the_plan_go_to_hosts_first_and_are_paid_by_them(tmp_path: Path) -> None:
    run = with_cores(resolved("workers=auto"), 2)
    assert host_count(run) == 2
    assert environment_host_names(run) == {"environment-0", "environment-1"}
    three = with_cores(resolved("workers=3"), 2)
    file = tmp_path / "environments.json"
    cores = {a.name: a for a in three.plan.of(Role.ENVIRONMENT)}
    names = [f"environment-{n}" for n in range(3)]
    taken = [dict(host_actor(three, tmp_path, n, file, "", given=cores.get(n)).resources) for n in names]
    assert taken == [{"CPU": 1.0}, {"CPU": 1.0}, {}]
    one = with_cores(resolved("workers=1"), 2)
    assert environment_host_names(one) == {"environment-0"}


def test_auto_is_what_profiles_ask_for_and_room_for_every_trajectory() -> None:
    assert host_count(resolved("workers=auto")) == 1
    more = ["cluster.environments.workers=auto", "cluster.environments.per_worker=50"]
    assert host_count(resolve_files(None, None, [*more, "staleness=3"])) == 4, "4 x 48 trajectories"
    assert hosts_for(cores=3.5, most=64, episodes=10, per_host=512) == 5
    assert hosts_for(cores=80.0, most=64, episodes=10, per_host=512) == 64
    assert hosts_for(cores=7 * BUSY, most=64, episodes=10, per_host=512) == 7
    assert hosts_for(cores=0.0, most=1, episodes=5000, per_host=512) == 10


def test_few_places_are_told_with_their_numbers_and_auto_counts_all() -> None:
    def notes(*overrides: str) -> tuple[str, ...]:
        return resolve_files(None, None, ["staleness=3", *overrides]).notes

    few = "cluster.environments.workers=2", "cluster.environments.per_worker=50"
    (said,) = [note for note in notes(*few) if note.startswith("environments")]
    assert said.startswith(
        "environments: 2 x 50 places (workers x per_worker) for up to 192 episodes at a time (192 traj"
    )
    (said,) = [note for note in notes(*few, "rollout.prefetch=10") if note.startswith("environments")]
    assert "212 episodes at a time (192 trajectories, 20 ahead of need)" in said
    enough = "cluster.environments.workers=2", "cluster.environments.per_worker=96"
    assert notes(*enough) == notes()
    more = ["staleness=3", "cluster.environments.workers=auto", "cluster.environments.per_worker=50"]
    assert host_count(resolve_files(None, None, [*more, "rollout.prefetch=10"])) == 5
    assert host_count(resolve_files(None, None, [*more, "rollout.redundancy.groups=1.5"])) == 5


def test_a_pool_that_is_not_there_is_a_spec_error() -> None:
    with pytest.raises(SpecError, match=r"environments.pool is 'heer' .*did you mean 'here'"):
        resolved("pool=heer")


def test_hosts_that_come_later_have_names_that_nobody_had(tmp_path: Path) -> None:
    run = with_cores(resolved("workers=1"), 2)

    async def main() -> None:
        recorder = MemoryRecorder()
        leases = Leases(recorder)
        runtime = LocalRuntime(pool_nodes(run))
        fleet = environment_fleet(
            run, tmp_path, runtime, leases, recorder, used=frozenset({"environment-4", "engine-9"})
        )
        assert fleet is not None
        assert [next(fleet.new_names) for _ in range(3)] == [f"environment-{n}" for n in (0, 5, 6)]
        await asyncio.sleep(0)

    virtual.run(main())


def test_a_run_is_not_stalled_while_its_hosts_may_start_or_bring_images() -> None:
    before = stall_limit_s(resolved())
    assert stall_limit_s(resolved("workers=0", "pull_s=7200", "start_s=7200")) == before, "nothing is waited for"
    assert stall_limit_s(resolved("workers=2", "start_s=7200")) == 14400
    images = "images=rollart.adapters.envs.images:TarImages"
    assert stall_limit_s(resolved("workers=auto", images, "pull_s=3600")) == 7200
    assert stall_limit_s(resolved("workers=2", images)) == before


def test_a_controller_that_grows_says_so_and_again_at_each_doubling(monkeypatch: pytest.MonkeyPatch) -> None:
    grown, told = iter([1.0, 1.4, 1.6, 1.7, 2.1, 2.3]), list[tuple[str, str, float]]()
    monkeypatch.setattr(hosts, "resident_bytes", lambda below: int(1e9 * next(grown)))

    def say(kind: str, subject: str, *, grown_gb: float, bound_gb: float, cause: str) -> None:
        told.append((kind, cause, grown_gb))

    async def main() -> None:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await hosts.watch_memory(resolved("memory_gb=0.5").cluster.environments, say)

    virtual.run(main())
    assert [(kind, gb) for kind, _, gb in told] == [("controller_memory", 0.6), ("controller_memory", 1.3)]
    assert "(environments.memory_gb)" in told[0][1]
