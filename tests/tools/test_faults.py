"""Fault plans in simulations: the faults, the product's reaction, and the reported cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rollart.cli.commands import cli
from rollart.errors import FaultRateExceeded, RollartError, SpecError
from rollart.ledger.intervals import ResourceState
from rollart.ledger.reader import LedgerReader
from rollart.report.simulation import FaultCost, ObservedFaults, SimulationFigures, faults_table
from rollart.settings.faults import FaultPlanSpec
from rollart.settings.load import load_faults
from rollart.settings.resolve import Resolved, forecast, read_specs
from rollart.testing.laws import find_tiling_errors
from rollart.tools.faults import fault_targets
from rollart.tools.simulate import simulate
from rollart.tools.simulations import SimulationTask, simulate_all, simulation_finding
from tests.tools.test_simulate import CLUSTER, RUN

STEPS = 4


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> Resolved:
    directory = tmp_path_factory.mktemp("specs")
    (directory / "r.yaml").write_text(RUN)
    (directory / "c.yaml").write_text(CLUSTER)
    return forecast(read_specs(directory / "r.yaml", directory / "c.yaml", ["faults.max_rate=1"]))


def planned(**plan: Any) -> FaultPlanSpec:
    return FaultPlanSpec.model_validate(plan)


def played(resolved: Resolved, directory: Path, plan: FaultPlanSpec | None, *, steps: int = STEPS) -> SimulationFigures:
    return simulation_finding(simulate(resolved, directory, steps=steps, faults=plan))


def test_a_plan_without_trouble_changes_nothing(resolved: Resolved, tmp_path: Path) -> None:
    plain, planless = (played(resolved, tmp_path / str(n), plan, steps=2) for n, plan in enumerate((None, planned())))
    assert plain.trace == planless.trace
    assert plain.faults is planless.faults is None


def test_parts_have_the_names_of_the_plan(resolved: Resolved) -> None:
    parts = fault_targets(resolved)
    names = [a.name for a in resolved.plan.assignments]
    assert set(names) <= set(parts)
    assert all(set(parts[name]) <= set(names) for name in parts if name.startswith("machine-"))
    big = [a.name for a in resolved.plan.assignments if a.pool == "big"]
    assert sorted(parts["machine-big-0"]) == sorted(big), "eight devices are one host"
    assert not any(name.startswith("machine-wide") for name in parts), "nothing is said of its hosts"


def test_the_same_plan_and_seed_do_the_same(resolved: Resolved, tmp_path: Path) -> None:
    plan = planned(hosts=3, rates=[{"parts": ["engine-*", "host-*"], "every_s": 20, "seconds": 5}])
    one, same = (played(resolved, tmp_path / str(n), plan) for n in range(2))
    other = played(resolved, tmp_path / "other", plan.model_copy(update={"seed": 1}))
    assert one.trace == same.trace != other.trace
    assert one.faults is not None
    assert one.faults == same.faults
    assert one.faults.observed.outages


def test_engines_that_die_are_down_paid_and_come_back(resolved: Resolved, tmp_path: Path) -> None:
    plan = planned(outages=[{"parts": ["engine-*"], "at_s": 6, "seconds": 30}])
    calm = played(resolved, tmp_path / "calm", None)
    found = played(resolved, tmp_path / "run", plan)
    engines = sum(a.name.startswith("engine-") for a in resolved.plan.assignments)
    cost = found.faults
    assert cost is not None
    assert cost.observed.outages == {"engine": engines}
    assert cost.observed.down_s == {"engine": pytest.approx(30.0 * engines)}
    assert cost.observed.lost_kv_tokens > 0
    assert cost.down_device_s > 0
    assert cost.down_usd > 0
    assert found.seconds > calm.seconds + 20, "nothing could be generated for 30 s"
    assert found.steps == STEPS
    with LedgerReader(tmp_path / "run") as reader:
        assert not find_tiling_errors(reader.intervals()), "every second of every device is in one state"


def test_a_trainer_waits_for_its_devices(resolved: Resolved, tmp_path: Path) -> None:
    plan = planned(outages=[{"parts": ["trainer-0"], "at_s": 1, "seconds": 40}])
    found = played(resolved, tmp_path / "run", plan)
    assert found.faults is not None
    assert found.faults.observed.down_s == {"trainer": pytest.approx(40.0)}
    with LedgerReader(tmp_path / "run") as reader:
        down = [i for i in reader.intervals() if i.role == "trainer" and i.state == ResourceState.DOWN]
    assert sum(i.seconds for i in down) > 10
    assert max(i.t1 for i in down) == pytest.approx(41.0), "it goes on as soon as they are back"


def test_a_trainer_that_is_gone_for_good_ends_the_run(resolved: Resolved, tmp_path: Path) -> None:
    plan = planned(outages=[{"parts": ["trainer-0"], "at_s": 1}])
    with pytest.raises(RollartError, match="start"):
        simulate_all([SimulationTask(resolved, "rollart", 0, STEPS, tmp_path, faults=plan)])


def test_hosts_take_their_environments_with_them(resolved: Resolved, tmp_path: Path) -> None:
    plan = planned(hosts=4, outages=[{"parts": ["host-0", "host-1"], "at_s": 3, "seconds": 4}])
    found = played(resolved, tmp_path / "run", plan)
    assert found.faults is not None
    assert found.faults.observed.outages == {"host": 2}
    assert any(cause.startswith("environment") for cause in found.faults.aborted)
    assert found.faults.aborted_engine_s >= 0
    assert sum(found.lags.values()) == STEPS * 16, "what broke was begun again"


def test_hosts_have_the_names_that_they_have_when_the_cluster_is_launched(resolved: Resolved, tmp_path: Path) -> None:
    environments = resolved.cluster.environments.model_copy(update={"workers": 4})
    hosted = replace(resolved, cluster=resolved.cluster.model_copy(update={"environments": environments}))
    assert {f"environment-{n}" for n in range(4)} <= set(fault_targets(hosted))
    plan = planned(outages=[{"parts": ["environment-0", "environment-1"], "at_s": 3, "seconds": 4}])
    found = played(hosted, tmp_path / "run", plan)
    assert found.faults is not None
    assert found.faults.observed.outages == {"environment": 2}
    assert any(cause.startswith("environment") for cause in found.faults.aborted)
    assert sum(found.lags.values()) == STEPS * 16, "what broke was begun again"
    (tmp_path / "faults.yaml").write_text("outages:\n  - {parts: [host-0], at_s: 1}\n")
    with pytest.raises(SpecError, match=r"names 'host-0' .rule: a part of this run"):
        load_faults(tmp_path / "faults.yaml", list(fault_targets(hosted)))


def test_hosts_of_function_workers_go_down_and_no_reward_is_lost(resolved: Resolved, tmp_path: Path) -> None:
    local = resolved.cluster.functions.local.model_copy(update={"hosts": 2})
    functions = resolved.cluster.functions.model_copy(update={"local": local})
    hosted = replace(resolved, cluster=resolved.cluster.model_copy(update={"functions": functions}))
    assert {"reward-0", "reward-1"} <= set(fault_targets(hosted))
    assert not {"reward-0", "reward-1"} & set(fault_targets(resolved)), "on one machine workers are the controller's"
    assert played(hosted, tmp_path / "calm", None).trace == played(resolved, tmp_path / "none", None).trace
    plan = planned(rates=[{"parts": ["reward-*"], "every_s": 3.0, "seconds": 1.0}])
    found = played(hosted, tmp_path / "run", plan)
    assert found.faults is not None
    assert found.faults.observed.outages["reward"] > 2
    assert sum(found.lags.values()) == STEPS * 16
    with LedgerReader(tmp_path / "run") as reader:
        calls = [(c.status, c.cause) for c in reader.calls()]
    assert ("crash", "call") in calls
    assert ("ok", "retry") in calls
    assert not any(cause.startswith("reward") for cause in found.faults.aborted), found.faults.aborted


def test_a_run_ends_where_faults_pass_its_threshold(resolved: Resolved, tmp_path: Path) -> None:
    strict = forecast_with(resolved, max_rate=0.05, min_count=5)
    plan = planned(resets={"fail": 0.5})
    with pytest.raises(FaultRateExceeded, match="the container of host-0 did not start"):
        simulate_all([SimulationTask(strict, "rollart", 0, STEPS, tmp_path, faults=plan)])


def test_a_simulated_host_that_ends_is_one_fault_and_its_episodes_are_begun_again(
    resolved: Resolved, tmp_path: Path
) -> None:
    """As in a run, the product's own fleet restarts it. Waiting for the only host is not a fault."""
    strict = forecast_with(resolved, max_rate=0.05, min_count=2)
    plan = planned(outages=[{"parts": ["host-0"], "at_s": 3, "seconds": 1000}])
    found = simulation_finding(simulate(strict, tmp_path / "one", steps=STEPS, faults=plan))
    assert sum(found.lags.values()) == STEPS * 16
    with LedgerReader(tmp_path / "one") as reader:
        (lost,) = reader.events("host_lost")
        faults = reader.events("infra_fault")
        (down,) = [i for i in reader.intervals() if i.role == "environment" and i.cause == "host_restart"]
        waits = {event.subject: event.fields for event in reader.events("environment_places")}
    assert lost.fields["cause"] == "its machine went down"
    assert 1 < len(faults) <= int(lost.fields["episodes"] or 0)
    assert {str(event.fields["detail"]).partition(": ")[2] for event in faults} == {
        "its machine went down (rollart logs --role host-0)"
    }
    assert down.t1 - down.t0 == pytest.approx(1000.0)
    assert 900 < float(waits["train"]["longest_s"] or 0) <= 1000
    ends = planned(hosts=2, rates=[{"parts": ["host-*"], "every_s": 2, "seconds": 1}])
    strict = forecast_with(resolved, max_rate=0.5, max_attempts_per_group=99, min_count=5)
    with pytest.raises(FaultRateExceeded, match="trajectories were lost with 3 ends of environment hosts"):
        simulate_all([SimulationTask(strict, "rollart", 0, STEPS, tmp_path, faults=ends)])


def forecast_with(resolved: Resolved, **faults: float) -> Resolved:
    run = resolved.run
    return replace(resolved, run=run.model_copy(update={"faults": run.faults.model_copy(update=faults)}))


def test_a_narrow_link_makes_publishes_longer(resolved: Resolved, tmp_path: Path) -> None:
    calm = played(resolved, tmp_path / "calm", None)
    narrow = {"parts": ["link-weights"], "at_s": 0, "left": 0.5}
    half = played(resolved, tmp_path / "half", planned(outages=[narrow]))
    worst = played(resolved, tmp_path / "worst", planned(outages=[narrow, {**narrow, "left": 0.25}]))
    assert calm.publish_s < half.publish_s < worst.publish_s
    assert half.publish_s < 2.1 * calm.publish_s


def test_functions_fail_and_start_as_the_plan_says(resolved: Resolved, tmp_path: Path) -> None:
    plan = planned(functions=[{"throttled": 0.2, "crash": 0.1, "cold_start_s": 3.0, "concurrency": 2}])
    found = played(resolved, tmp_path / "run", plan)
    assert found.faults is not None
    assert set(found.faults.failed_calls) == {"throttled", "crash"}
    with LedgerReader(tmp_path / "run") as reader:
        calls = reader.calls()
    assert max(c.cold_start_s for c in calls) == pytest.approx(3.0)
    moments = sorted([(c.t0, 1) for c in calls] + [(c.t1, -1) for c in calls])
    most = at_once = 0
    for _, change in moments:
        at_once += change
        most = max(most, at_once)
    assert most <= 2


def test_resets_that_stall_make_steps_longer(resolved: Resolved, tmp_path: Path) -> None:
    calm = played(resolved, tmp_path / "calm", None)
    found = played(resolved, tmp_path / "run", planned(resets={"stall": 0.2, "stall_s": 20}))
    assert found.seconds > calm.seconds + 10


def test_the_table_is_a_mean_over_seeds() -> None:
    costs = [FaultCost(ObservedFaults({"engine": n}, {"engine": 3600.0 * n}, n, 0)) for n in (1, 3)]
    rows = {row[0]: row[2] for row in faults_table({"sync": costs}).rows}
    assert rows["engine outages"] == 2
    assert rows["engine down"] == pytest.approx(2.0)
    assert rows["answers lost with engines"] == 2


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RUN)
    (tmp_path / "c.yaml").write_text(CLUSTER)
    (tmp_path / "f.yaml").write_text("outages: [{parts: [engine-0], at_s: 5, seconds: 10}]\n")
    done = CliRunner().invoke(
        cli,
        [
            "simulate",
            str(tmp_path / "r.yaml"),
            "--cluster",
            str(tmp_path / "c.yaml"),
            "--faults",
            str(tmp_path / "f.yaml"),
            "--steps",
            "2",
            "-o",
            "json",
            "faults.max_rate=1",
        ],
    )
    assert done.exit_code == 0, done.output
    rows = {row["what"]: row["async"] for row in json.loads(done.stdout)["tables"]["faults"]}
    assert rows["engine outages"] == 1
