"""Simulations whose environment hosts are on machines that join late, die and leave with notice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from placement.types import Assignment, Role
from rollart.ledger.reader import LedgerReader
from rollart.settings.faults import FaultPlanSpec
from rollart.settings.resolve import Resolved, forecast, read_specs
from rollart.tools.faults import SimulationFaults, cluster_machines
from rollart.tools.simulate import simulate, simulated_environment_hosts
from tests.launch.test_nodes import CLUSTER, WORK, played, told
from tests.tools.test_simulate import RUN

ENGINES = ["cluster.engines.count=6", "cluster.engines.device=H20", "cluster.trainer.device=H800"]


@pytest.fixture(scope="module")
def on_cores(tmp_path_factory: pytest.TempPathFactory) -> Resolved:
    """Six cores on three machines, all planned for environments."""
    directory = tmp_path_factory.mktemp("specs")
    pool = "  - {name: cores, device: cpu, count: 6, devices_per_host: 2, price: 0.05}\n"
    cluster = CLUSTER.replace("links:\n", f"{pool}links:\n") + "environments: {workers: auto}\n"
    (directory / "r.yaml").write_text(RUN)
    (directory / "c.yaml").write_text(cluster)
    found = forecast(read_specs(directory / "r.yaml", directory / "c.yaml", [*WORK, *ENGINES]))
    cores = [Assignment(Role.ENVIRONMENT, n, "cores", (n,)) for n in range(6)]
    plan = replace(found.plan, assignments=(*found.plan.assignments, *cores), idle={**found.plan.idle, "cores": 0})
    return replace(found, plan=plan)


@pytest.mark.slow
def test_hosts_follow_machines_through_a_run(on_cores: Resolved, tmp_path: Path) -> None:
    late = {"parts": ["machine-cores-2"], "at_s": 0, "seconds": 10}
    dies = {"parts": ["machine-cores-1"], "at_s": 25}
    leaves = {"parts": ["machine-cores-0"], "at_s": 100, "warning_s": 60}
    done = played(on_cores, tmp_path, late, dies, leaves, steps=3)
    assert done.observed_faults is not None
    assert done.observed_faults.outages == {"machine": 2}
    started = [(e.t, e.subject) for e in told(tmp_path, "host_started")]
    assert started == [
        *((0.0, f"environment-{n}") for n in range(4)),
        *((15.0, f"environment-{n}") for n in (6, 7)),  # the machine has stayed for five seconds
    ]
    assert [(e.t, e.subject) for e in told(tmp_path, "host_lost")] == [(25.0, f"environment-{n}") for n in (2, 3)]
    retired = [(e.t, e.subject) for e in told(tmp_path, "host_retired")]
    assert sorted(retired[:2]) == [(30.0, "environment-2"), (30.0, "environment-3")], "they found no room"
    assert sorted(name for _, name in retired[2:]) == ["environment-0", "environment-1"]
    assert all(40.0 < t < 100.0 for t, _ in retired[2:]), "when their last episodes had ended"
    faults = told(tmp_path, "infra_fault")
    assert faults, "episodes ended with the machine"
    assert all(e.t >= 25.0 and "its machine went down" in str(e.fields["detail"]) for e in faults)
    with LedgerReader(tmp_path) as reader:
        assert reader.facts().trained_samples == 3 * 16, "each once"


@pytest.mark.slow  # two simulations
def test_the_same_plan_and_seed_do_the_same(on_cores: Resolved, tmp_path: Path) -> None:
    dies = {"parts": ["machine-cores-1"], "at_s": 10, "seconds": 10}
    first, second = (played(on_cores, tmp_path / str(n), dies, steps=2) for n in range(2))
    assert first.trace == second.trace


def test_without_elastic_machines_take_no_host(on_cores: Resolved, tmp_path: Path) -> None:
    runtime = on_cores.cluster.runtime.model_copy(update={"elastic": None})
    still = replace(on_cores, cluster=on_cores.cluster.model_copy(update={"runtime": runtime}))
    trouble = SimulationFaults(FaultPlanSpec(), still, 0)
    hosts = simulated_environment_hosts(still, trouble, still)
    assert hosts is not None
    assert (hosts.room, hosts.count, trouble.machines) == (None, None, None)
    simulate(still, tmp_path, steps=1)
    assert [e.t for e in told(tmp_path, "host_started")] == [0.0] * 6


def test_what_hosts_have_on_machines_they_take_themselves(on_cores: Resolved) -> None:
    assert [m.taken for name, m in cluster_machines(on_cores).items() if "cores" in name] == [0, 0, 0]
    environments = on_cores.cluster.environments.model_copy(update={"workers": 0})
    without = replace(on_cores, cluster=on_cores.cluster.model_copy(update={"environments": environments}))
    assert [m.taken for name, m in cluster_machines(without).items() if "cores" in name] == [2, 2, 2]
