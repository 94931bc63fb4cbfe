"""The hosts of a cluster, by pool: what a Kubernetes worker group, a node type or a `ray start` is made for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from placement.types import Plan, Pool
from rollart.errors import SpecError
from rollart.spec.cluster import ClusterSpec, PoolSpec
from rollart.spec.environments import UNLESS_QUICK
from rollart.spec.fleet import pool_labels, pools_of
from rollart.spec.prices import PriceList

__all__ = ["HostGroup", "host_groups", "hosts_engines", "shared_label"]

HOST_CORES = 32
"""Cores of a CPU host where the spec does not say `devices_per_host`: a usual size in every cloud."""

GPU_CORES, GPU_MEMORY_GB = 3, 12
"""Cores and host memory that are asked for beside each GPU: what the smallest hosts of one GPU can spare (g5.xlarge has
4 and 16 GB). The spec says nothing of them, and larger hosts have more, which is used where nothing limits it."""

_LABEL = re.compile(r"^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")

CORE_MEMORY_GB = 4.0
"""Memory of a core where the pool has no `memory_gb`."""


@dataclass(frozen=True, slots=True)
class HostGroup:
    """Hosts of one pool that are alike. `hosts` to begin with; `least` and `most` differ where they are rented or may
    come and go. Of one host: `gpus`, `cores` and `memory_gb` (GB of 1e9 bytes)."""

    name: str
    device: str
    labels: Mapping[str, str]
    hosts: int
    least: int
    most: int
    gpus: int
    cores: int
    memory_gb: int
    plays: bool = False
    """It holds environments."""
    spot: bool = False
    """Its hosts are interruptible capacity."""

    @property
    def instance_type(self) -> str | None:
        """The provider's name of such a host, where a label of the pool says it."""
        return self.labels.get("instance_type")


def host_groups(cluster: ClusterSpec, prices: PriceList, plan: Plan | None = None) -> tuple[HostGroup, ...]:
    """One group for each pool. Owned pools are there whole; of rented ones as many hosts as the plan uses to begin
    with, or none without a plan, and no more than the pool has; what a pool calls its `min` always stays. SpecError for
    a pool that no host can be made of."""
    played = _environment_pool(cluster)
    return tuple(
        _group(
            spec, pool, None if plan is None else pool.count - plan.idle.get(pool.name, 0), plays=spec.name == played
        )
        for spec, pool in zip(cluster.pools, pools_of(cluster, prices), strict=True)
    )


def _environment_pool(cluster: ClusterSpec) -> str | None:
    """The pool whose hosts hold environments; None where the head does."""
    spec = cluster.environments
    if not spec.workers or (spec.workers == UNLESS_QUICK and spec.python is None):
        return None
    cores = [pool.name for pool in cluster.pools if pool.device == "cpu"]
    return spec.pool or (cores or [pool.name for pool in cluster.pools])[0]


def hosts_engines(group: HostGroup, found: Sequence[HostGroup]) -> bool:
    """Whether engines may be on these hosts: those with GPUs, or any where there are none."""
    return bool(group.gpus) or not any(g.gpus for g in found)


def shared_label(found: Sequence[HostGroup], label: str, what: str) -> str:
    """The value that all pools have. SpecError if one has none, or two differ."""
    values = {g.name: g.labels.get(label) for g in found}
    missing = [name for name, value in values.items() if value is None]
    if missing:
        raise SpecError(
            f"pool '{missing[0]}' has no label {label} (rule: {what} needs it of every pool)",
            remedy=f"add `labels: {{{label}: ...}}` to the pool",
        )
    if len(set(values.values())) > 1:
        shown = ", ".join(f"{name}: {value}" for name, value in values.items())
        raise SpecError(f"pools differ in label {label} ({shown}) (rule: {what} is of one)")
    return str(next(iter(values.values())))


def _labels(spec: PoolSpec) -> dict[str, str]:
    labels = pool_labels(spec)
    for key, label in labels.items():
        if not _LABEL.match(label) or not _LABEL.match(key.rpartition("/")[2]):
            raise SpecError(
                f"pool '{spec.name}' has the label {key}: {label} (rule of Ray and Kubernetes: up to 63 letters, "
                "digits, '-', '_' and '.', a letter or digit at both ends)"
            )
    return labels


def _group(spec: PoolSpec, pool: Pool, used: int | None, *, plays: bool) -> HostGroup:
    cpu = pool.device.is_cpu
    per_host = pool.device.devices_per_host or (HOST_CORES if cpu else 1)
    per_host = min(per_host, spec.count)
    hosts = -(-spec.count // per_host)
    if cpu:
        per_core = CORE_MEMORY_GB if spec.memory_gb is None else spec.memory_gb / spec.count
        memory = max(1, int(per_core * per_host))
    else:
        memory = GPU_MEMORY_GB * per_host
    least = -(-spec.min // per_host) if spec.min is not None else 0 if spec.rented else hosts
    begin = hosts if not spec.rented else max(least, -(-(used or 0) // per_host))
    return HostGroup(
        name=spec.name,
        device=spec.device,
        labels=_labels(spec),
        hosts=begin,
        least=least,
        most=hosts,
        gpus=0 if cpu else per_host,
        cores=per_host if cpu else GPU_CORES * per_host,
        memory_gb=memory,
        plays=plays,
        spot=spec.spot,
    )
