"""A placement consists of plain values: code that stores it needs no numpy."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping

import pytest

from placement.problem import (
    DomainProfile,
    EnvironmentCost,
    FunctionPrice,
    Problem,
    Quantity,
    RewardCost,
    RunningPlan,
    TrainingWork,
)
from placement.solve import solve
from placement.types import Device, Objective, Placement, Pool
from tests.placement.fakes import FakePerformance
from tests.placement.fleet import problem as fleet

AGENT = DomainProfile(
    "agent",
    Quantity(12),
    Quantity(800),
    Quantity(100),
    environment=EnvironmentCost(3.0, 0.2, 5.0),
    reward=RewardCost(2.0),
)
JUDGED = DomainProfile("judged", Quantity(1), Quantity(300), Quantity(900), reward=RewardCost(1.0, on_gpu=True))


def whole() -> Problem:
    """Everything that a plan can have: training, rewards on devices and functions, environments, a running plan."""
    base = fleet(4, 4, domains=(AGENT, JUDGED), train=TrainingWork(64), in_flight=64, tensor_parallel=(1,))
    cpu = Pool("cores", Device("cpu"), 64, 0.05, memory_gb=256.0, rented=True)
    price = FunctionPrice("f", usd_per_gb_s=2e-5, usd_per_core_s=2e-5)
    pools = (*base.pools, cpu)
    return dataclasses.replace(base, performance=FakePerformance(), pools=pools, functions=price)


def leaves(value: object, at: str) -> Iterator[tuple[str, object]]:
    if dataclasses.is_dataclass(value):
        for part in dataclasses.fields(value):
            yield from leaves(getattr(value, part.name), f"{at}.{part.name}")
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from leaves(key, f"{at} key")
            yield from leaves(entry, f"{at}[{key}]")
    elif isinstance(value, (tuple, list)):
        for i, entry in enumerate(value):
            yield from leaves(entry, f"{at}[{i}]")
    else:
        yield at, value


SLOW = pytest.param(Objective.MAX_THROUGHPUT_PER_DOLLAR, marks=pytest.mark.slow)  # several searches


@pytest.mark.parametrize("objective", [Objective.MAX_THROUGHPUT, Objective.MIN_COST, SLOW])
@pytest.mark.parametrize("moves", [False, True])
def test_every_number_is_a_builtin(objective: Objective, moves: bool) -> None:
    first = solve(whole())
    assert isinstance(first, Placement)
    running = RunningPlan(first.deployments[:2], max_changed_devices=8) if moves else None
    found = solve(dataclasses.replace(whole(), objective=objective, rate=first.rate / 2, running=running))
    assert isinstance(found, Placement), found
    assert found.rewards
    strange = [
        (at, type(value))
        for at, value in leaves(found, "placement")
        if type(value) not in (int, float, str, bool, type(None)) and not isinstance(value, enum.StrEnum)
    ]
    assert not strange
