"""Instance kinds (pool × role × TP), and the connections between pools that KV may take."""

from __future__ import annotations

from dataclasses import dataclass

from placement.performance import InstanceModel
from placement.problem import Problem, Restriction
from placement.types import ROLLOUT_ROLES, Device, Pool, Role

__all__ = ["KvChannel", "RefusalReason", "InstanceKind", "kv_channels", "instance_kinds"]

AGGREGATED_ONLY = (Restriction.AGGREGATED, Restriction.STRICT, Restriction.NO_AFFINITY)
RefusalReason = tuple[str, str, str]
"""The reason that something cannot run: pool, domain ("" for all domains) and text."""


@dataclass(frozen=True, slots=True)
class InstanceKind:
    """Instances of one role on `tp` devices of one pool: at most `most` of them; `kv_gb` of KV memory each."""

    pool: int
    role: Role
    tp: int
    most: int
    kv_gb: float


@dataclass(frozen=True, slots=True)
class KvChannel:
    """The connection that KV takes between two pools: GB/s in all, of one transfer, and seconds before the first byte.

    `pools` are their names in sorted order.
    """

    pools: tuple[str, str]
    gb_per_s: float
    latency_s: float


def kv_channels(problem: Problem) -> dict[tuple[str, str], KvChannel]:
    """The connections that KV may take, by names in sorted order. Between two pools these are the problem's links;
    within a pool also its devices' figures: NVLink if the pool is one host, else the hosts' network, of which half the
    devices send while the other half receive."""
    found: dict[tuple[str, str], KvChannel] = {}
    for link in problem.links:
        key = (min(link.a, link.b), max(link.a, link.b))
        found.setdefault(key, KvChannel(key, link.gb_per_s, link.latency_s))
    for pool in problem.pools:
        device, key = pool.device, (pool.name, pool.name)
        one_host = device.devices_per_host is not None and pool.count <= device.devices_per_host
        speed = device.link_gb_per_s
        if one_host and device.nvlink_gb_per_s is not None:
            speed = device.nvlink_gb_per_s / 2
        if key not in found and speed is not None and pool.count > 1:
            found[key] = KvChannel(key, speed * pool.count / 2, 0.0)
    return dict(sorted(found.items()))


def instance_kinds(problem: Problem, reasons: list[RefusalReason]) -> tuple[list[InstanceKind], list[InstanceModel]]:
    roles = {Role.ENGINE} if problem.restriction in AGGREGATED_ONLY else set(ROLLOUT_ROLES)
    if problem.restriction is Restriction.PD_ONLY:
        roles -= {Role.ENGINE}
    offered = [r for r in ROLLOUT_ROLES if r in roles & problem.roles]
    known: dict[tuple[Device, int], InstanceModel | str] = {}
    units: list[InstanceKind] = []
    models: list[InstanceModel] = []
    for index, pool in enumerate(problem.pools):
        if problem.device_types is not None and pool.device.name not in problem.device_types:
            continue
        for tp in _tensor_parallel_sizes(problem, pool):
            model = _model(problem, pool, tp, known)
            if isinstance(model, str):
                reasons.append((pool.name, "", f"{pool.name}, {tp} per instance: {model}"))
                continue
            for role in offered:
                units.append(InstanceKind(index, role, tp, _max_instances(pool, tp), model.kv_capacity_bytes / 1e9))
                models.append(model)
    return units, models


def _tensor_parallel_sizes(problem: Problem, pool: Pool) -> list[int]:
    """The offered TP sizes, and the sizes of running or given instances, which were offered before."""
    given = (*(problem.fixed or ()), *(problem.running.deployments if problem.running else ()))
    return sorted({*problem.tensor_parallel, *(d.tp for d in given if d.role in ROLLOUT_ROLES and d.pool == pool.name)})


def _model(
    problem: Problem, pool: Pool, tp: int, known: dict[tuple[Device, int], InstanceModel | str]
) -> InstanceModel | str:
    if tp > pool.count:
        return f"the pool has {pool.count}"
    if pool.device.devices_per_host is not None and tp > pool.device.devices_per_host:
        return f"a host has {pool.device.devices_per_host}, and an instance does not span hosts"
    key = (pool.device, tp)
    if key not in known:
        shape = problem.performance.shape
        refused = shape.allows_tp(tp)
        known[key] = problem.performance.instance(pool.device, tp) if refused is None else refused
        model = known[key]
        if not isinstance(model, str) and model.kv_capacity_bytes <= 0:
            verb = "has" if tp == 1 else "have"
            have = "" if pool.device.memory_gb is None else f", {tp} {pool.device.name} {verb}"
            size = "" if pool.device.memory_gb is None else f" {pool.device.memory_gb * tp:g} GB"
            known[key] = f"the model needs {shape.weight_bytes / 1e9:.4g} GB for its weights{have}{size}"
    return known[key]


def _max_instances(pool: Pool, tp: int) -> int:
    host = pool.device.devices_per_host
    if host is None:
        return pool.count // tp
    return pool.count // host * (host // tp) + pool.count % host // tp
