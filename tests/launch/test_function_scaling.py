"""A run's function scaling: settings, demand from live trajectories, prices, and recorded events."""

from __future__ import annotations

import asyncio
import pathlib
from dataclasses import replace
from typing import Any

import pytest

from rollart.control.domain import Domain
from rollart.control.groups import ActiveRollouts
from rollart.control.trajectory import TrajectoryState
from rollart.errors import SpecError
from rollart.launch.functions import TrajectoryDemand, function_settings, make_scaler, scaling_prices
from rollart.model import GroupId, Purpose, TrajectoryId
from rollart.settings.cluster import ClusterFunctions
from rollart.settings.resolve import read_specs, resolve_specs
from rollart.settings.run import DomainSpec, RewardUse
from rollart.sim import loop as virtual
from rollart.testing.functions import Meter
from rollart.testing.ledger import MemoryRecorder
from serverless.pipeline.offload import Offload
from serverless.providers.simulated import SimulatedBackend
from serverless.scaling.decisions import StatisticsMeter
from serverless.spec import FunctionSpec
from serverless.types import Item
from tests.serverless.support import package

FUNCTIONS = {"math": ("behave", "style"), "code": ("behave",), "lake": ()}
DOMAINS = [
    DomainSpec.model_construct(name=name, rewards=[RewardUse(function=function) for function in functions])
    for name, functions in FUNCTIONS.items()
]


def live(key: str, domain: str, started: float) -> TrajectoryState:
    one = Domain(domain, lambda: None, quota=1, group_size=1, max_turns=2, max_tokens=4)  # type: ignore[arg-type, return-value]
    return TrajectoryState(TrajectoryId(key), GroupId("g"), one, 0, Purpose.TRAIN, 0, started)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tick_s": -1}, "functions.scaling.tick_s is -1 (rule: greater than 0)"),
        ({"forecast": {"horizon_s": -3}}, "functions.scaling.forecast.horizon_s is -3 (rule: greater than 0)"),
        ({"keep_alive": {"trust": 2}}, "functions.scaling.keep_alive.trust is 2 (rule: less than or equal to 1)"),
        ({"windows": 1}, "functions.scaling.windows is 1"),
    ],
)
def test_a_wrong_setting_is_said_in_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as told:
        function_settings("scaling", ClusterFunctions(scaling=given))
    assert said in str(told.value)
    assert "\n" not in told.value.message


def test_trajectories_that_roll_out_are_known_by_domain_until_they_ask() -> None:
    rolling = ActiveRollouts()
    demand = TrajectoryDemand(rolling, DOMAINS)
    ones = [live("m1", "math", 1.0), live("c1", "code", 2.0), live("m2", "math", 3.0), live("m3", "math", 4.0)]
    for one in ones:
        rolling.begin(one)
    assert demand.live() == {"math": [1.0, 3.0, 4.0], "code": [2.0]}
    rolling.ask(ones[2], 9.0)
    rolling.leave(ones[2])
    rolling.leave(ones[0])  # aborted: it will not ask
    assert demand.live() == {"math": [4.0], "code": [2.0]}
    assert list(demand.ended()) == [("math", 6.0)]
    assert list(demand.ended()) == []
    assert set(demand.kinds("behave")) == {"math", "code"}
    assert set(demand.kinds("style")) == {"math"}
    assert set(demand.kinds("none")) == set()


def test_a_trajectory_that_waits_costs_its_share_of_the_devices_and_a_worker_a_core() -> None:
    resolved = resolve_specs(read_specs())
    found = scaling_prices(resolved, lambda: 8)
    core = max(resolved.usd_per_device_hour.values()) / 3600.0
    assert core > 0.0
    assert found.idle(FunctionSpec(name="f", source="f.py"), "local") == pytest.approx(core)
    assert found.idle(FunctionSpec(name="f", source="f.py", cpu=4.0), "local") == pytest.approx(4.0 * core)
    assert found.waiting() == pytest.approx(resolved.plan.usd_per_hour / 3600.0 / 8)
    assert scaling_prices(resolved, lambda: 0).waiting() == pytest.approx(resolved.plan.usd_per_hour / 3600.0)


def test_changes_are_events_of_the_ledger(tmp_path: pathlib.Path) -> None:
    events, rolling = MemoryRecorder(), ActiveRollouts()
    resolved = resolve_specs(read_specs())

    async def main() -> int:
        seen = StatisticsMeter(Meter())
        one = package(concurrency=8)
        async with (
            SimulatedBackend({"behave": lambda sample: 1.0}, meter=seen) as backend,
            Offload([one], backend, meter=seen) as offload,
        ):
            await offload.submit("behave", Item("a", ()), 60.0)
            for n in range(10):
                done = live(f"e{n}", "code", 0.0)
                rolling.begin(done)
                rolling.ask(done, 1000.0)
            for n in range(2000):
                rolling.begin(live(f"c{n}", "code", -990.0))
            async with make_scaler(
                replace(resolved, run=resolved.run.model_copy(update={"domains": DOMAINS})),
                offload,
                [backend],
                seen=seen,
                rolling=rolling,
                live=lambda: 400,
                events=events,
                directory=tmp_path,
            ):
                await asyncio.sleep(20.0)
                return backend.load("behave").workers

    assert virtual.run(main()) >= 2
    first, last = events.events[0], events.events[-1]
    assert (first.kind, first.subject) == ("function_scaled", "behave")
    assert first.fields["provider"] == "simulated"
    assert first.fields["from"] == 0
    assert {e.fields["why"] for e in events.events} >= {"forecast", "set back"}
    assert last.fields["to"] == 0
    assert list(tmp_path.iterdir()) == [], "nothing was paid for"
