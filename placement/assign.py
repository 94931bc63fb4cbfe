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

from placement.types import Assignment, Demand, Plan, Pool, Role, Shortage

_CPU_ROLES = (Role.REWARD, Role.ENVIRONMENT)


class _FreeDevices:
    """The free devices of a pool. A pool that knows no hosts is one host."""

    def __init__(self, pool: Pool) -> None:
        self.free = pool.count
        self.memory = 0.0
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
        """The lowest free indices; in one host if the part must be in one: of the fullest host that has room.

        ValueError if there is no room.
        """
        if not self._spans(demand):
            host = self._host(demand.devices)
            if host is None:
                raise ValueError(f"no host has {demand.devices} free devices (rule: take what fits)")
            return tuple(self._cut(host, demand.devices))
        taken: list[int] = []
        while len(taken) < demand.devices:
            if self._lowest == len(self._left):
                raise ValueError(f"no {demand.devices} free devices (rule: take what fits)")
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


def assign(pools: Sequence[Pool], demands: Sequence[Demand]) -> Plan | Shortage:
    """Place every demand, or return the shortage of the first demand that does not fit."""
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
            pool = _choose_pool(eligible, demand, rooms)
            if pool is None:
                return Shortage(demand, _shortage_text(eligible, demand, replica, rooms))
            index = first[n] + replica
            taken = rooms[pool.name].take(demand)
            placed[demand.role, index] = Assignment(demand.role, index, pool.name, taken)
            rooms[pool.name].memory += demand.memory_gb
    used = {p.name: p.count - rooms[p.name].free for p in pools}
    return Plan(
        assignments=tuple(
            placed[d.role, n + i] for d, n in zip(demands, first, strict=True) for i in range(d.replicas)
        ),
        idle={p.name: rooms[p.name].free for p in pools},
        usd_per_hour=sum((used[p.name] if p.rented else p.count) * p.usd_per_device_hour for p in pools),
        binds=_binding_resource(pools, used, {name: room.memory for name, room in rooms.items()}),
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
    device = demand.device is None or pool.device.name == demand.device
    named = demand.pool is None or pool.name == demand.pool
    return device and named and all(pool.labels.get(k) == v for k, v in demand.labels.items())


def _choose_pool(eligible: Sequence[Pool], demand: Demand, rooms: Mapping[str, _FreeDevices]) -> Pool | None:
    """The pool of the next replica. Parts that run the model go to GPUs, however many CPU cores are free."""
    fitting = [p for p in eligible if _fits(p, demand, rooms[p.name])]
    gpus = [p for p in fitting if not p.device.is_cpu] if demand.role not in _CPU_ROLES else []
    return max(gpus or fitting, key=lambda p: rooms[p.name].free, default=None)


def _fits(pool: Pool, demand: Demand, room: _FreeDevices) -> bool:
    limit = _memory_of(pool, demand)
    return room.fits(demand) and (limit is None or demand.memory_gb + room.memory <= limit)


def _memory_of(pool: Pool, demand: Demand) -> float | None:
    """Memory that the demand's replica may use: the host's on a CPU pool, its devices' (each alone) otherwise."""
    if pool.device.is_cpu:
        return pool.memory_gb
    return None if pool.device.memory_gb is None else pool.device.memory_gb * pool.count


def _shortage_text(eligible: Sequence[Pool], demand: Demand, replica: int, rooms: Mapping[str, _FreeDevices]) -> str:
    wanted = f"{demand.role} {replica + 1} of {demand.replicas} needs {demand.devices} {demand.device or 'device'}(s)"
    if not eligible:
        asked = ", ".join(f"{k}={v}" for k, v in demand.labels.items())
        return f"{wanted}{' with ' + asked if asked else ''}, and no pool has such devices"
    state = "; ".join(f"pool '{p.name}' has {rooms[p.name].free} of {p.count} {p.device.name} free" for p in eligible)
    enough = [p for p in eligible if rooms[p.name].free >= demand.devices]
    if any(not rooms[p.name].fits(demand) for p in enough):
        state += ", but not in one host"
    elif enough:
        limits = [(p.name, limit) for p in enough if (limit := _memory_of(p, demand)) is not None]
        state += "; memory is short: " + ", ".join(
            f"{rooms[name].memory + demand.memory_gb:g} GB of {limit:g} GB on '{name}'" for name, limit in limits
        )
    return f"{wanted}, and {state}"


def _binding_resource(pools: Sequence[Pool], used: dict[str, int], memory: dict[str, float]) -> str:
    """The resource with the largest share in use; devices before memory on a tie."""
    shares = [(used[p.name] / p.count, f"{p.device.name} of pool '{p.name}'", used[p.name], p.count) for p in pools]
    share, what, n, count = max(shares, key=lambda s: s[0])
    host = [(memory[p.name] / p.memory_gb, p) for p in pools if p.memory_gb and p.device.is_cpu and memory[p.name] > 0]
    if host and (top := max(host, key=lambda h: h[0]))[0] > share:
        return f"host memory of pool '{top[1].name}': {memory[top[1].name]:g} of {top[1].memory_gb:g} GB in use"
    return f"{what}: {n} of {count} in use"
