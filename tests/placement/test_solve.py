"""A plan puts every part on devices of its own, or says what is short."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.solve import solve
from placement.types import Demand, Device, Plan, Pool, Role, Shortage

CPU = Device("cpu")
H800 = Device("H800", memory_gb=80)


def test_one_pool() -> None:
    plan = solve([Pool("here", CPU, 4, 0.05)], [Demand(Role.ENGINE, 2, 1), Demand(Role.TRAINER, 1, 1)])
    assert isinstance(plan, Plan)
    assert [(a.name, a.devices) for a in plan.assignments] == [
        ("engine-0", (0,)), ("engine-1", (1,)), ("trainer-0", (2,))
    ]  # fmt: skip
    assert (plan.idle, plan.usd_per_hour, plan.rates) == ({"here": 1}, 0.2, None)
    assert plan.binds == "cpu of pool 'here': 3 of 4 in use"
    assert len(plan.of(Role.ENGINE)) == 2


def test_devices_and_labels_choose_the_pool() -> None:
    pools = [Pool("a", CPU, 9), Pool("b", H800, 8, labels={"zone": "x"}), Pool("c", H800, 8, labels={"zone": "y"})]
    plan = solve(pools, [Demand(Role.TRAINER, 1, 4, device="H800", labels={"zone": "y"})])
    assert isinstance(plan, Plan)
    assert plan.assignments[0].pool == "c"


@pytest.mark.parametrize(
    ("demand", "expected"),
    [
        (Demand(Role.ENGINE, 1, 1, device="B200"), "no pool has such devices"),
        (Demand(Role.ENGINE, 1, 1, labels={"zone": "z"}), "with zone=z, and no pool has such devices"),
        (Demand(Role.ENGINE, 3, 4), "engine 3 of 3 needs 4 device(s), and pool 'a' has 0 of 8 H800 free"),
        (Demand(Role.ENGINE, 1, 1, memory_gb=641), "memory is short: 641 GB of 640 GB on 'a'"),
    ],
)
def test_a_shortage_says_the_numbers(demand: Demand, expected: str) -> None:
    found = solve([Pool("a", H800, 8)], [demand])
    assert isinstance(found, Shortage)
    assert expected in found.message


def test_host_memory_binds() -> None:
    plan = solve([Pool("a", CPU, 8, memory_gb=10)], [Demand(Role.ENGINE, 2, 1, memory_gb=4)])
    assert isinstance(plan, Plan)
    assert plan.binds == "host memory of pool 'a': 8 of 10 GB in use"


def test_impossible_values_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Pool("a", CPU, 0)
    with pytest.raises(ValueError, match="at least 1"):
        Demand(Role.ENGINE, 0, 1)


@given(
    st.lists(st.tuples(st.sampled_from([CPU, H800]), st.integers(1, 8)), min_size=1, max_size=4),
    st.lists(st.tuples(st.sampled_from(list(Role)), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=4),
)
def test_no_device_is_used_twice(sizes: list[tuple[Device, int]], wanted: list[tuple[Role, int, int]]) -> None:
    pools = [Pool(f"p{i}", device, count, 1.0) for i, (device, count) in enumerate(sizes)]
    demands = [Demand(*w) for w in wanted]
    plan = solve(pools, demands)
    if isinstance(plan, Shortage):
        assert sum(d.replicas * d.devices for d in demands) > sum(p.count for p in pools) - sum(
            max(d.devices for d in demands) - 1 for _ in pools
        )
        return
    used = [(a.pool, device) for a in plan.assignments for device in a.devices]
    assert len(used) == len(set(used)) == sum(d.replicas * d.devices for d in demands)
    for pool in pools:
        mine = [device for name, device in used if name == pool.name]
        assert all(0 <= device < pool.count for device in mine)
        assert plan.idle[pool.name] == pool.count - len(mine)
