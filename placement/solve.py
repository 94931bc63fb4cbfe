"""Which part runs on which devices. Pure: pools and demands in, a plan or the shortage out.

With one eligible pool per demand there is nothing to optimise: demands are placed in the order given, each on the
eligible pool with the most free devices (ties: the first named), on its lowest free indices. No part spans pools.
"""

from __future__ import annotations

from collections.abc import Sequence

from placement.types import Assignment, Demand, Plan, Pool, Shortage

__all__ = ["solve"]


def solve(pools: Sequence[Pool], demands: Sequence[Demand]) -> Plan | Shortage:
    """Place every demand, or say which one does not fit."""
    used = {pool.name: 0 for pool in pools}
    memory = {pool.name: 0.0 for pool in pools}
    assignments: list[Assignment] = []
    for demand in demands:
        for replica in range(demand.replicas):
            fitting = [p for p in pools if _fits(p, demand, used[p.name], memory[p.name])]
            if not fitting:
                return Shortage(demand, _shortage(pools, demand, replica, used, memory))
            pool = max(fitting, key=lambda p: p.count - used[p.name])
            start = used[pool.name]
            assignments.append(Assignment(demand.role, replica, pool.name, tuple(range(start, start + demand.devices))))
            used[pool.name] += demand.devices
            memory[pool.name] += demand.memory_gb
    return Plan(
        assignments=tuple(assignments),
        idle={p.name: p.count - used[p.name] for p in pools},
        usd_per_hour=sum(p.count * p.usd_per_device_hour for p in pools),
        binds=_binds(pools, used, memory),
    )


def _eligible(pool: Pool, demand: Demand) -> bool:
    device = demand.device is None or pool.device.name == demand.device
    return device and all(pool.labels.get(k) == v for k, v in demand.labels.items())


def _fits(pool: Pool, demand: Demand, used: int, memory: float) -> bool:
    if not _eligible(pool, demand) or pool.count - used < demand.devices:
        return False
    return _memory_of(pool, demand) is None or demand.memory_gb + memory <= (_memory_of(pool, demand) or 0.0)


def _memory_of(pool: Pool, demand: Demand) -> float | None:
    """Memory that the demand's replica may use: the host's on a CPU pool, its devices' (each alone) otherwise."""
    if pool.device.is_cpu:
        return pool.memory_gb
    return None if pool.device.memory_gb is None else pool.device.memory_gb * pool.count


def _shortage(
    pools: Sequence[Pool], demand: Demand, replica: int, used: dict[str, int], memory: dict[str, float]
) -> str:
    wanted = f"{demand.role} {replica + 1} of {demand.replicas} needs {demand.devices} {demand.device or 'device'}(s)"
    eligible = [p for p in pools if _eligible(p, demand)]
    if not eligible:
        asked = ", ".join(f"{k}={v}" for k, v in demand.labels.items())
        return f"{wanted}{' with ' + asked if asked else ''}, and no pool has such devices"
    state = "; ".join(
        f"pool '{p.name}' has {p.count - used[p.name]} of {p.count} {p.device.name} free" for p in eligible
    )
    if any(p.count - used[p.name] >= demand.devices for p in eligible):
        state += "; memory is short: " + ", ".join(
            f"{memory[p.name] + demand.memory_gb:g} GB of {_memory_of(p, demand):g} GB on '{p.name}'" for p in eligible
        )
    return f"{wanted}, and {state}"


def _binds(pools: Sequence[Pool], used: dict[str, int], memory: dict[str, float]) -> str:
    """The resource with the largest share in use; devices before memory on a tie."""
    shares = [(used[p.name] / p.count, f"{p.device.name} of pool '{p.name}'", used[p.name], p.count) for p in pools]
    share, what, n, count = max(shares, key=lambda s: s[0])
    host = [(memory[p.name] / p.memory_gb, p) for p in pools if p.memory_gb and p.device.is_cpu and memory[p.name] > 0]
    if host and (top := max(host, key=lambda h: h[0]))[0] > share:
        return f"host memory of pool '{top[1].name}': {memory[top[1].name]:g} of {top[1].memory_gb:g} GB in use"
    return f"{what}: {n} of {count} in use"
