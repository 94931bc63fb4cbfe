"""Simulations whose machines join late, leave with notice and die: the plan follows them, with the code of real
runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollart.errors import SpecError, UsageError
from rollart.launch.clusters import fit_to_devices
from rollart.ledger.reader import LedgerReader
from rollart.ports import RunEvent
from rollart.settings.faults import FaultPlanSpec, fault_problems
from rollart.settings.resolve import Resolved, forecast, read_specs
from rollart.testing.laws import find_tiling_errors
from rollart.tools.faults import cluster_machines, fault_targets
from rollart.tools.simulate import SimulationResult, simulate
from tests.tools.test_simulate import RUN

CLUSTER = """\
name: c
runtime: {elastic: {settle_s: 5}}
pools:
  - {name: big, device: H800, count: 2, devices_per_host: 2}
  - {name: wide, device: H20, count: 6, devices_per_host: 2, rented: true}
links:
  - {a: big, b: wide, gb_per_s: 100}
"""

COMPUTED = [
    "placement.tensor_parallel=[1]",
    "placement.prefill_decode=off",
    "placement.train.pool=big",
    "placement.train.devices=2",
    "placement.rate_tolerance=0",
]


WORK = [
    "domains.chat.profile.output_tokens=2000",
    "domains.chat.max_tokens=4096",
    "cluster.engines.max_slots=4",
    "placement.rebalance.restart_s=10",
]
"""Turns of about ten seconds, four at a time: six engines of one device are not too many."""

EITHER = pytest.mark.parametrize(
    "name",
    [pytest.param("computed", marks=pytest.mark.slow), "given"],  # plans are solved three times: seconds
)


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("specs")
    (directory / "r.yaml").write_text(RUN)
    (directory / "c.yaml").write_text(CLUSTER)
    return directory


def made(specs: Path, *overrides: str) -> Resolved:
    return forecast(read_specs(specs / "r.yaml", specs / "c.yaml", [*WORK, *overrides]))


@pytest.fixture(scope="module")
def computed(specs: Path) -> Resolved:
    return made(specs, *COMPUTED)


@pytest.fixture(scope="module")
def given(specs: Path) -> Resolved:
    return made(specs, "cluster.engines.count=6", "cluster.engines.device=H20", "cluster.trainer.device=H800")


def played(resolved: Resolved, directory: Path, *outages: dict[str, object], steps: int = 5) -> SimulationResult:
    return simulate(resolved, directory, steps=steps, faults=FaultPlanSpec.model_validate({"outages": outages}))


def told(directory: Path, *kinds: str) -> list[RunEvent]:
    with LedgerReader(directory) as reader:
        assert find_tiling_errors(reader.intervals(), tolerance=1e-6) == []
        return sorted((event for kind in kinds for event in reader.events(kind)), key=lambda event: event.t)


LATE = {"parts": ["machine-wide-1", "machine-wide-2"], "at_s": 0, "seconds": 40}


@EITHER
def test_engines_start_on_machines_that_join(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    resolved: Resolved = request.getfixturevalue(name)
    before = sum(a.pool == "wide" for a in resolved.plan.assignments)
    assert before == 6, "the plan is one for all that there may be"
    played(resolved, tmp_path, LATE)
    assert [(e.t, e.subject) for e in told(tmp_path, "node_joined")] == [
        (40.0, "machine-wide-1"),
        (40.0, "machine-wide-2"),
    ]
    (rebalanced,) = told(tmp_path, "rebalanced")
    assert rebalanced.subject == "wide has 6 devices after 2"
    assert str(rebalanced.fields["moves"]) == "start 4 × tp 1 on wide: engine"
    assert rebalanced.t > 45.0, "they have to stay first"
    (adopted,) = told(tmp_path, "plan_adopted")
    assert len(json.loads(str(adopted.fields["engines"]))) == 6


@EITHER
def test_a_machine_that_gives_notice_is_left_before_it_goes(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    leaves = {"parts": ["machine-wide-0"], "at_s": 50, "warning_s": 28}
    seen = played(request.getfixturevalue(name), tmp_path, leaves)
    assert seen.observed_faults is not None
    assert seen.observed_faults.outages == {"machine": 1}
    assert [e.t for e in told(tmp_path, "node_leaving", "node_lost")] == [22.0, 50.0]
    drained = told(tmp_path, "engine_drained")
    assert len(drained) == 2
    assert all(22.0 <= e.t < 50.0 and not e.fields["cut_short"] for e in drained)
    assert drained[-1].t > 22.0, "a turn was under way"
    assert seen.observed_faults.lost_tokens == 0
    assert told(tmp_path, "engine_lost") == [], "nobody was there any more"


@pytest.mark.slow  # a hundred seconds of a simulated cluster
def test_what_dies_with_its_machine_is_given_up_and_started_where_one_comes_back(
    given: Resolved, tmp_path: Path
) -> None:
    dies = {"parts": ["machine-wide-2"], "at_s": 30, "seconds": 60}
    played(given, tmp_path, dies, steps=16)
    lost, gone = told(tmp_path, "engine_lost"), told(tmp_path, "engine_given_up")
    assert len(lost) == len(gone) == 2
    assert all(e.t >= 35.0 for e in gone), "they might have come back"
    (rebalanced,) = told(tmp_path, "rebalanced")
    assert rebalanced.subject == "wide has 6 devices after 4"
    assert rebalanced.t > 100.0, "after one that did not live long it has to stay twice as long"


@pytest.mark.slow  # two simulations
def test_the_same_plan_and_seed_do_the_same(given: Resolved, tmp_path: Path) -> None:
    first, second = (played(given, tmp_path / str(n), LATE, steps=3) for n in range(2))
    assert first.trace == second.trace


def test_every_machine_has_a_name_and_the_trainer_goes_with_its_own(given: Resolved) -> None:
    parts = fault_targets(given)
    machines = cluster_machines(given)
    assert {name: m.devices for name, m in machines.items()} == {
        "machine-big-0": 2,
        "machine-wide-0": 2,
        "machine-wide-1": 2,
        "machine-wide-2": 2,
    }
    assert parts["machine-big-0"] == ("machine-big-0", "trainer-0")
    assert parts["machine-wide-2"] == ("machine-wide-2",)
    assert machines["machine-big-0"].taken == 1


def test_a_run_begins_with_the_parts_that_fit(given: Resolved) -> None:
    assert fit_to_devices(given, {"big": 2, "wide": 6}) is given
    begun = fit_to_devices(given, {"big": 2, "wide": 3})
    assert [a.name for a in begun.plan.assignments if a.pool == "wide"] == ["engine-0", "engine-1", "engine-2"]
    assert begun.plan.idle == {"big": 1, "wide": 3}
    with pytest.raises(UsageError, match="no engine of the plan fits"):
        fit_to_devices(given, {"big": 2})


def test_only_machines_give_notice() -> None:
    plan = FaultPlanSpec.model_validate({"outages": [{"parts": ["engine-0"], "at_s": 9, "warning_s": 5}]})
    (problem,) = fault_problems(plan, ["engine-0"])
    assert problem.message == "outages.0.warning_s is 5 for 'engine-0' (rule: machines alone)"


def test_what_cannot_be_elastic_is_said(specs: Path) -> None:
    with pytest.raises(SpecError, match=r"min 3 is more than count 2"):
        made(specs, "cluster.pools.big.min=3")
    with pytest.raises(SpecError, match=r"pool 'big' has min, which is for runtime.elastic"):
        made(specs, "cluster.pools.big.min=1", "cluster.runtime.elastic=false")
    with pytest.raises(SpecError, match=r"rollout.parallelism and runtime.elastic"):
        made(specs, "rollout.parallelism={}")
