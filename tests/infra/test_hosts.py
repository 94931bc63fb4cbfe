"""Hosts of pools: every device is on one, and no more of them are there than the pool has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from placement.types import Plan
from rollart.infra.hosts import HOST_CORES, host_groups
from rollart.settings.cluster import ClusterSpec
from rollart.settings.load import builtin, load_prices

PRICES = load_prices(builtin("prices.yaml"))
COUNTS = st.integers(1, 3000)


@given(
    st.sampled_from(["cpu", "H800", "H20", "L4"]),
    COUNTS,
    st.one_of(st.none(), st.integers(1, 64)),
    st.booleans(),
    COUNTS,
)
def test_devices_have_hosts(device: str, count: int, per_host: int | None, rented: bool, used: int) -> None:
    pool = {"name": "p", "device": device, "count": count, "rented": rented, "price": 1.0}
    spec = ClusterSpec(name="c", pools=[pool if per_host is None else pool | {"devices_per_host": per_host}])  # type: ignore[list-item]
    used = min(used, count)
    plan = Plan((), {"p": count - used}, 0.0, "")
    (bare,), (planned,) = host_groups(spec, PRICES), host_groups(spec, PRICES, plan)
    size = bare.gpus or bare.cores
    assert size <= min(count, per_host or HOST_CORES)
    assert count <= bare.most * size < count + size, "all of them, on as few hosts as there can be"
    if rented:
        assert (bare.hosts, bare.least) == (0, 0)
        assert used <= planned.hosts * size < used + size
    else:
        assert bare == planned
        assert bare.hosts == bare.least == bare.most
    assert (bare.gpus > 0) == (device != "cpu")
    assert bare.memory_gb >= 1
