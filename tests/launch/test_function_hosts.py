"""Function hosts of a run: their number, placement and billing."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from placement.types import Assignment, Role
from rollart.errors import SpecError
from rollart.launch.clusters import plan_bundles
from rollart.launch.hosts import (
    function_actor,
    function_host_names,
    initial_function_hosts,
    planned_function_hosts,
    provider_run_id,
)
from rollart.launch.preflight import dry_run_lines
from rollart.settings.resolve import Resolved, resolve_files

FAKE = Path(__file__).parents[2] / "configs/clusters/ray-fake.yaml"


def resolved(*overrides: str, cluster: Path | None = None) -> Resolved:
    return resolve_files(None, cluster, [f"cluster.{one}" for one in overrides])


def with_rewards(run: Resolved, count: int) -> Resolved:
    """A run whose plan has that many reward parts of two cores each."""
    (first, *others) = run.cluster.pools
    given = tuple(Assignment(Role.REWARD, n, first.name, (10 + 2 * n, 11 + 2 * n)) for n in range(count))
    pools = [first.model_copy(update={"count": 10 + 2 * count}), *others]
    cluster = run.cluster.model_copy(update={"pools": pools})
    return replace(run, cluster=cluster, plan=replace(run.plan, assignments=(*run.plan.assignments, *given)))


def test_asking_where_a_host_would_be_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    function_actor(resolved("functions.local.hosts=2"), Path(), "reward-0", "")
    assert list(tmp_path.iterdir()) == []


def room(run: Resolved, name: str) -> tuple[dict[str, float], dict[str, str]]:
    actor = function_actor(run, Path(), name, "secret")
    assert "secret" not in str(actor.args), "arguments are there for every user of the machine to read"
    return dict(actor.resources), dict(actor.labels)


def test_on_one_machine_workers_are_the_controllers_unless_the_spec_says_otherwise() -> None:
    run = resolved()
    assert (initial_function_hosts(run), list(dry_run_lines(run))) == ((), [])
    assert initial_function_hosts(with_rewards(run, 2)) == ()
    two = resolved("functions.local.hosts=2")
    assert initial_function_hosts(two) == ("reward-0", "reward-1")
    assert room(two, "reward-1") == ({}, {"pool": "here"})
    assert function_actor(two, Path(), "reward-1", "").factory.endswith("program:Program")


def test_on_ray_there_is_a_host_for_each_machine_of_the_pool_of_cores() -> None:
    run = resolved(cluster=FAKE)
    assert initial_function_hosts(run) == ("reward-0",)
    assert room(run, "reward-0") == ({}, {"gpu": "none"})
    assert function_actor(run, Path(), "reward-0", "").factory.endswith("ray_host:NodeProgram")
    wide = resolved("functions.local.pool=h20", cluster=FAKE)
    assert initial_function_hosts(wide) == ("reward-0", "reward-1")
    assert room(wide, "reward-1") == ({}, {"gpu": "H20"})
    assert initial_function_hosts(resolved("functions.local.hosts=0", cluster=FAKE)) == ()
    assert initial_function_hosts(resolved("functions.local.hosts=3", cluster=FAKE)) == (
        "reward-0",
        "reward-1",
        "reward-2",
    )


def test_other_providers_need_none() -> None:
    run = resolved("functions.backend=modal", "functions.local.hosts=2")
    assert initial_function_hosts(run) == ()
    assert initial_function_hosts(resolved("functions.backend=[modal,local]", "functions.local.hosts=2"))


def test_cores_that_the_plan_gave_to_rewards_go_to_hosts_first_and_are_paid_by_them() -> None:
    on_ray = ("runtime.backend=ray",)
    run = with_rewards(resolved(*on_ray), 2)
    assert initial_function_hosts(run) == ("reward-0", "reward-1")
    assert planned_function_hosts(run) == {"reward-0", "reward-1"}
    assert [bundle.name for bundle in plan_bundles(run) if bundle.name.startswith("reward")] == ["reward-0", "reward-1"]
    assert {bundle.name: dict(bundle.resources) for bundle in plan_bundles(run)}["reward-1"] == {"CPU": 2.0}
    assert room(run, "reward-1") == ({"CPU": 2.0}, {"pool": "here"})
    three = with_rewards(resolved(*on_ray, "functions.local.hosts=3"), 2)
    assert [room(three, name)[0] for name in initial_function_hosts(three)] == [{"CPU": 2.0}, {"CPU": 2.0}, {}]
    one = with_rewards(resolved(*on_ray, "functions.local.hosts=1"), 2)
    assert planned_function_hosts(one) == {"reward-0"}


def test_the_dry_run_lists_them() -> None:
    run = with_rewards(resolved("runtime.backend=ray", "functions.local.hosts=2"), 1)
    assert list(dry_run_lines(run)) == [
        "reward-0: function workers on a node with pool=here, in 2 CPU",
        "reward-1: function workers on a node with pool=here, beside its other parts",
    ]


def test_hosts_that_come_later_get_names_that_no_part_had() -> None:
    run = with_rewards(resolved("runtime.backend=ray", "functions.local.hosts=2"), 1)
    used = frozenset({"reward-1", "reward-2", "reward-4"})
    assert list(itertools.islice(function_host_names(run, used), 4)) == ["reward-0", "reward-1", "reward-3", "reward-5"]


def test_an_unknown_pool_is_said_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(FAKE.read_text() + "  local: {pool: corse}\n")
    with pytest.raises(SpecError) as caught:
        resolve_files(None, file, [])
    assert "functions.local.pool is 'corse' (rule: a pool of the cluster" in caught.value.message
    assert f"{file}:" in caught.value.message


def test_a_run_has_an_id_of_its_own_though_it_was_killed_while_that_was_written(tmp_path: Path) -> None:
    kept = tmp_path / "functions" / "run"
    kept.parent.mkdir()
    kept.write_text("")
    run = provider_run_id(tmp_path)
    assert run.startswith(f"{tmp_path.name}-")
    assert provider_run_id(tmp_path) == run == kept.read_text()
