"""Assignment of parts to device indices. A pure function from pools and demands to a plan or a shortage.

The user or `solve` decides beforehand how many parts run on which kind of pool. Each part goes to the eligible pool
with the most free devices (ties: the first named), on its lowest free indices; engines and trainers to GPU pools while
there is room. No part spans pools, and none that fits into one host spans hosts: a pool's devices are numbered host by
host. Larger parts are placed first, which leaves no gap that sizes of powers of two could not fill; trainers and parts
larger than a host may span hosts, come last and take what is left. Parts of a role are numbered over all demands of it,
in their order.

The cost is about linear in devices and parts: a host's free devices are always its last ones, so that their number
identifies them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from placement.types import Assignment, Demand, Plan, Pool, Role

_CPU_ROLES = (Role.REWARD, Role.ENVIRONMENT)


class _FreeDevices:
    """The free devices of a pool. A pool that knows no hosts is one host."""

    def __init__(self, pool: Pool) -> None:
        self.free = pool.count
        self._size = min(pool.device.devices_per_host or pool.count, pool.count)
        self._hosted = pool.device.devices_per_host is not None
        self._left = [self._size] * (pool.count // self._size)
        if pool.count % self._size:
            self._left.append(pool.count % self._size)
        self._count = pool.count
        self._lowest = 0  # no host below it has anything left
        self._by_left: dict[int, list[int]] = {}  # heaps of hosts; an entry is stale once its host has less left
        for host, left in enumerate(self._left):
            self._by_left.setdefault(left, []).append(host)

    def fits(self, demand: Demand) -> bool:
        """Whether there are devices for one replica, in one host if it must be in one."""
        if self.free < demand.devices:
            return False
        return self._spans(demand) or self._host(demand.devices) is not None

    def take(self, demand: Demand) -> tuple[int, ...]:
        """The lowest free indices; in one host if the part must be in one: of the fullest host that has room. The
        part has to fit."""
        if not self._spans(demand):
            host = self._host(demand.devices)
            assert host is not None, "only what fits is taken"
            return tuple(self._cut(host, demand.devices))
        taken: list[int] = []
        while len(taken) < demand.devices:
            left = self._left[self._lowest]
            if left:
                taken += self._cut(self._lowest, min(left, demand.devices - len(taken)))
            if not self._left[self._lowest]:
                self._lowest += 1
        return tuple(taken)

    def _spans(self, demand: Demand) -> bool:
        return not self._hosted or demand.devices > self._size or demand.role is Role.TRAINER

    def _host(self, devices: int) -> int | None:
        """The fullest host with so many free devices; of equal ones the first."""
        for left in sorted(k for k in self._by_left if k >= devices):
            hosts = self._by_left[left]
            while hosts and self._left[hosts[0]] != left:
                heappop(hosts)
            if hosts:
                return hosts[0]
            del self._by_left[left]
        return None

    def _cut(self, host: int, devices: int) -> range:
        end = min((host + 1) * self._size, self._count)
        first = end - self._left[host]
        self._left[host] -= devices
        self.free -= devices
        if self._left[host]:
            heappush(self._by_left.setdefault(self._left[host], []), host)
        return range(first, first + devices)


def assign(pools: Sequence[Pool], demands: Sequence[Demand]) -> Plan | str:
    """Place every demand, or describe the shortage of the first demand that does not fit: the requested and the
    available resources with their numbers."""
    rooms = {pool.name: _FreeDevices(pool) for pool in pools}
    number: Counter[Role] = Counter()
    first: list[int] = []
    for demand in demands:
        first.append(number[demand.role])
        number[demand.role] += demand.replicas
    placed: dict[tuple[Role, int], Assignment] = {}
    for n in sorted(range(len(demands)), key=lambda n: _placement_order(pools, demands[n])):
        demand = demands[n]
        eligible = [p for p in pools if _eligible(p, demand)]
        for replica in range(demand.replicas):
            # Parts that run the model go to GPUs, however many CPU cores are free.
            fitting = [p for p in eligible if rooms[p.name].fits(demand)]
            gpus = [p for p in fitting if not p.device.is_cpu] if demand.role not in _CPU_ROLES else []
            pool = max(gpus or fitting, key=lambda p: rooms[p.name].free, default=None)
            if pool is None:
                return _shortage(eligible, demand, replica, rooms)
            index = first[n] + replica
            placed[demand.role, index] = Assignment(demand.role, index, pool.name, rooms[pool.name].take(demand))
    used = {p.name: p.count - rooms[p.name].free for p in pools}
    tight = max(pools, key=lambda p: used[p.name] / p.count)
    tight = max(pools, key=lambda p: used[p.name] / p.count)
    return Plan(
        assignments=tuple(
            placed[d.role, n + i] for d, n in zip(demands, first, strict=True) for i in range(d.replicas)
        ),
        idle={p.name: rooms[p.name].free for p in pools},
        usd_per_hour=sum((used[p.name] if p.rented else p.count) * p.usd_per_device_hour for p in pools),
        binds=f"{tight.device.name} of pool '{tight.name}': {used[tight.name]} of {tight.count} in use",
    )


def _placement_order(pools: Sequence[Pool], demand: Demand) -> tuple[bool, int]:
    """Sort key: parts that must fit into one host first, the largest first; then parts that span hosts. Equal parts
    keep their order."""
    sizes = [p.device.devices_per_host for p in pools if _eligible(p, demand)]
    hosts = [size for size in sizes if size is not None]
    if not hosts:
        return (False, 0)
    return (demand.role is Role.TRAINER or demand.devices > max(hosts), -demand.devices)


def _eligible(pool: Pool, demand: Demand) -> bool:
    return demand.device in (None, pool.device.name) and demand.pool in (None, pool.name)


def _shortage(eligible: Sequence[Pool], demand: Demand, replica: int, rooms: Mapping[str, _FreeDevices]) -> str:
    wanted = f"{demand.role} {replica + 1} of {demand.replicas} needs {demand.devices} {demand.device or 'device'}(s)"
    if not eligible:
        return f"{wanted}, and no pool has such devices"
    state = "; ".join(f"pool '{p.name}' has {rooms[p.name].free} of {p.count} {p.device.name} free" for p in eligible)
    if any(rooms[p.name].free >= demand.devices for p in eligible):
        state += ", but not in one host"
    return f"{wanted}, and {state}"
