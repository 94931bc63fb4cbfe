"""A plan assigns every part its own devices, or names the shortage."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.assign import assign
from placement.types import Demand, Device, Plan, Pool, Role

CPU = Device("cpu")
H800 = Device("H800", memory_gb=80)


def test_one_pool() -> None:
    plan = assign([Pool("here", CPU, 4, 0.05)], [Demand(Role.ENGINE, 2, 1), Demand(Role.TRAINER, 1, 1)])
    assert isinstance(plan, Plan)
    assert [(a.name, a.devices) for a in plan.assignments] == [
        ("engine-0", (0,)),
        ("engine-1", (1,)),
        ("trainer-0", (2,)),
    ]
    assert (plan.idle, plan.usd_per_hour, plan.rates) == ({"here": 1}, 0.2, None)
    assert plan.binds == "cpu of pool 'here': 3 of 4 in use"
    assert len(plan.of(Role.ENGINE)) == 2


def test_devices_and_names_choose_the_pool() -> None:
    pools = [Pool("a", CPU, 9), Pool("b", H800, 8), Pool("c", H800, 8)]
    plan = assign(pools, [Demand(Role.TRAINER, 1, 4, device="H800", pool="c")])
    assert isinstance(plan, Plan)
    assert plan.assignments[0].pool == "c"


@pytest.mark.parametrize(
    ("demand", "expected"),
    [
        (Demand(Role.ENGINE, 1, 1, device="B200"), "no pool has such devices"),
        (Demand(Role.ENGINE, 3, 4), "engine 3 of 3 needs 4 device(s), and pool 'a' has 0 of 8 H800 free"),
    ],
)
def test_a_shortage_says_the_numbers(demand: Demand, expected: str) -> None:
    found = assign([Pool("a", H800, 8)], [demand])
    assert isinstance(found, str)
    assert expected in found


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
    plan = assign(pools, demands)
    if isinstance(plan, str):
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


def test_parts_of_a_role_are_numbered_over_its_demands_and_rented_devices_are_paid_when_used() -> None:
    pools = [Pool("own", CPU, 4, usd_per_device_hour=1.0), Pool("rent", CPU, 9, usd_per_device_hour=10.0, rented=True)]
    demands = [Demand(Role.ENGINE, 2, 1, pool="own"), Demand(Role.ENGINE, 1, 2, pool="rent")]
    plan = assign(pools, demands)
    assert isinstance(plan, Plan)
    assert [a.name for a in plan.assignments] == ["engine-0", "engine-1", "engine-2"]
    assert plan.usd_per_hour == 4 * 1.0 + 2 * 10.0


def test_no_instance_spans_hosts_and_the_trainer_takes_what_is_left() -> None:
    pool = Pool("a", Device("H800", memory_gb=80, devices_per_host=8), 96)
    demands = [
        Demand(Role.TRAINER, 1, 74),
        Demand(Role.PREFILL, 6, 2),
        Demand(Role.PREFILL, 1, 4),
        Demand(Role.ENGINE, 1, 2),
    ]
    plan = assign([pool], [*demands, Demand(Role.ENGINE, 1, 4)])
    assert isinstance(plan, Plan)
    assert plan.idle == {"a": 0}
    for part in plan.assignments:
        assert part.role is Role.TRAINER or len({i // 8 for i in part.devices}) == 1
    assert [a.name for a in plan.assignments][:2] == ["trainer-0", "prefill-0"]
    assert sorted(i for a in plan.assignments for i in a.devices) == list(range(96))


def test_free_devices_on_two_hosts_are_no_room() -> None:
    pool = Pool("a", Device("H800", memory_gb=80, devices_per_host=8), 12)
    found = assign([pool], [Demand(Role.ENGINE, 1, 8), Demand(Role.ENGINE, 1, 3), Demand(Role.ENGINE, 1, 4)])
    assert isinstance(found, str)
    assert "0 of 12 H800 free" in found
    pool = Pool("a", Device("H800", memory_gb=80, devices_per_host=8), 16)
    found = assign([pool], [Demand(Role.ENGINE, 2, 5), Demand(Role.ENGINE, 1, 6)])
    assert isinstance(found, str)
    assert "but not in one host" in found


def test_what_runs_the_model_takes_gpus_first() -> None:
    """Also with many free cores beside them; the remaining parts still run."""
    pools = [Pool("cores", CPU, 512), Pool("gpus", H800, 4)]
    demands = [
        Demand(Role.PREFILL, 2, 1),
        Demand(Role.DECODE, 1, 1),
        Demand(Role.TRAINER, 1, 1),
        Demand(Role.REWARD, 1, 1),
    ]
    plan = assign(pools, demands)
    assert isinstance(plan, Plan)
    assert [a.pool for a in plan.assignments] == ["gpus"] * 4 + ["cores"]
    more = assign(pools, [Demand(Role.ENGINE, 5, 1)])
    assert isinstance(more, Plan)
    assert [a.pool for a in more.assignments] == ["gpus"] * 4 + ["cores"]


def plainly(pool: Pool, demands: list[Demand]) -> dict[tuple[Role, int], tuple[int, ...]] | None:
    """The rule for one pool, written out with lists of indices: every part looks at every free device."""
    host = pool.device.devices_per_host
    free = list(range(pool.count))
    parts = [
        (d, sum(e.replicas for e in demands[:n] if e.role is d.role) + i)
        for n, d in enumerate(demands)
        for i in range(d.replicas)
    ]

    def spans(demand: Demand) -> bool:
        return demand.role is Role.TRAINER or (host is not None and demand.devices > host)

    if host is not None:
        parts.sort(key=lambda part: (spans(part[0]), -part[0].devices))
    placed = {}
    for demand, index in parts:
        groups = [free]
        if host is not None and not spans(demand):
            groups = [[i for i in free if i // host == h] for h in range(pool.count // host + 1)]
        room = [group for group in groups if len(group) >= demand.devices]
        if not room:
            return None
        placed[demand.role, index] = tuple(min(room, key=len)[: demand.devices])
        free = [i for i in free if i not in placed[demand.role, index]]
    return placed


@given(
    st.one_of(st.none(), st.integers(1, 8)),
    st.integers(1, 40),
    st.lists(st.tuples(st.sampled_from(list(Role)), st.integers(1, 4), st.integers(1, 10)), min_size=1, max_size=5),
)
def test_counting_what_hosts_have_left_is_as_good_as_listing_it(
    host: int | None, count: int, wanted: list[tuple[Role, int, int]]
) -> None:
    pool = Pool("a", Device("H800", devices_per_host=host), count)
    demands = [Demand(*w) for w in wanted]
    plan, expected = assign([pool], demands), plainly(pool, demands)
    if expected is None:
        assert isinstance(plan, str)
    else:
        assert isinstance(plan, Plan)
        assert {(a.role, a.replica): a.devices for a in plan.assignments} == expected


@pytest.mark.slow  # 50,000 parts; half a minute if each of them scanned every device
def test_a_hundred_thousand_devices_take_a_second() -> None:
    pool = Pool("a", Device("H800", memory_gb=80, devices_per_host=8), 100_000)
    started = time.process_time()
    plan = assign([pool], [Demand(Role.TRAINER, 1, 2000), Demand(Role.ENGINE, 49_000, 2)])
    assert isinstance(plan, Plan)
    assert plan.idle == {"a": 0}
    assert time.process_time() - started < 5.0
