"""The hosts of a cluster, by pool: input of a Kubernetes worker group, a node type or a `ray start`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from placement.types import Plan, Pool
from rollart.errors import SpecError
from rollart.settings.cluster import UNLESS_QUICK, ClusterSpec, PoolSpec
from rollart.settings.planning import pool_labels, pools_of
from rollart.settings.prices import PriceList

HOST_CORES = 32
"""Cores of a CPU host if the spec has no `devices_per_host`: a usual size in every cloud."""

GPU_CORES, GPU_MEMORY_GB = 3, 12
"""Cores and host memory in GB that are requested for each GPU, since the spec does not declare them. The smallest hosts
with one GPU can spare this much (g5.xlarge has 4 cores and 16 GB). Larger hosts have more; processes without a limit
use it."""

_LABEL = re.compile(r"^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")

CORE_MEMORY_GB = 4.0
"""Memory per core if the pool has no `memory_gb`."""


@dataclass(frozen=True, slots=True)
class HostGroup:
    """Equal hosts of one pool. `hosts` is their initial number; `least` and `most` differ if they are rented or may
    come and go. Per host: `gpus`, `cores` and `memory_gb` (GB of 1e9 bytes)."""

    name: str
    labels: Mapping[str, str]
    hosts: int
    least: int
    most: int
    gpus: int
    cores: int
    memory_gb: int
    plays: bool = False
    """True if the hosts run environments."""
    spot: bool = False
    """True if the hosts are interruptible capacity."""

    @property
    def instance_type(self) -> str | None:
        """The provider's name of such a host, if the pool has it as a label."""
        return self.labels.get("instance_type")


def host_groups(cluster: ClusterSpec, prices: PriceList, plan: Plan | None = None) -> tuple[HostGroup, ...]:
    """One group for each pool. Of an owned pool all hosts are present from the start. A rented pool starts with the
    hosts that the plan uses, or none without a plan, and never exceeds its size; its `min` hosts always stay. SpecError
    for a pool that cannot be divided into hosts."""
    environments, played, groups = cluster.environments, None, []
    if environments.workers and (environments.workers != UNLESS_QUICK or environments.python is not None):
        cores = [pool.name for pool in cluster.pools if pool.device == "cpu"]
        played = environments.pool or (cores or [pool.name for pool in cluster.pools])[0]
    for spec, pool in zip(cluster.pools, pools_of(cluster, prices), strict=True):
        used = 0 if plan is None else pool.count - plan.idle.get(pool.name, 0)
        groups.append(_group(spec, pool, used, plays=spec.name == played))
    return tuple(groups)


def hosts_engines(group: HostGroup, found: Sequence[HostGroup]) -> bool:
    """True if engines may run on these hosts: hosts with GPUs, or all if the cluster has none."""
    return bool(group.gpus) or not any(g.gpus for g in found)


def _group(spec: PoolSpec, pool: Pool, used: int, *, plays: bool) -> HostGroup:
    cpu, labels = pool.device.is_cpu, pool_labels(spec)
    for key, label in labels.items():
        if not _LABEL.match(label) or not _LABEL.match(key.rpartition("/")[2]):
            raise SpecError(
                f"pool '{spec.name}' has the label {key}: {label} (rule of Ray and Kubernetes: up to 63 letters, "
                "digits, '-', '_' and '.', a letter or digit at both ends)"
            )
    per_host = min(pool.device.devices_per_host or (HOST_CORES if cpu else 1), spec.count)
    hosts = -(-spec.count // per_host)
    per_core = CORE_MEMORY_GB if spec.memory_gb is None else spec.memory_gb / spec.count
    memory = max(1, int(per_core * per_host)) if cpu else GPU_MEMORY_GB * per_host
    least = -(-spec.min // per_host) if spec.min is not None else 0 if spec.rented else hosts
    begin = hosts if not spec.rented else max(least, -(-used // per_host))
    return HostGroup(
        name=spec.name,
        labels=labels,
        hosts=begin,
        least=least,
        most=hosts,
        gpus=0 if cpu else per_host,
        cores=per_host if cpu else GPU_CORES * per_host,
        memory_gb=memory,
        plays=plays,
        spot=spec.spot,
    )
