"""From what was written to what will run: specs, prices and the placer's plan in one frozen value.

The only caller of `placement`. Nothing is started here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from placement.solve import solve
from placement.types import Demand, Device, Plan, Pool, Role, Shortage
from rollart.errors import SpecError
from rollart.spec.cluster import ClusterSpec, PoolSpec
from rollart.spec.load import builtin, load_cluster, load_prices, load_run, saved_specs
from rollart.spec.prices import PriceEntry, PriceList
from rollart.spec.rules import quotas
from rollart.spec.run import RunSpec
from rollart.spec.suggest import did_you_mean

__all__ = ["Resolved", "resolve", "resolve_files", "resolve_saved"]

CLUSTER_PREFIX = "cluster."
"""Overrides that start with it go to the cluster spec; a run spec has no key of that name."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A run that can start. `base` is the directory that relative paths of the run spec start from.

    `quotas` are the trajectories of each domain per step; `usd_per_device_hour` the price by pool.
    """

    run: RunSpec
    cluster: ClusterSpec
    plan: Plan
    prices: PriceList
    quotas: Mapping[str, int]
    usd_per_device_hour: Mapping[str, float]
    base: str = "."

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, in reading order."""
        return {
            "run": self.run.model_dump(mode="json"),
            "cluster": self.cluster.model_dump(mode="json"),
            "quotas": dict(self.quotas),
            "plan": plan_dict(self.plan),
            "usd_per_device_hour": dict(self.usd_per_device_hour),
            "prices": self.prices.model_dump(mode="json"),
            "base": self.base,
        }

    def to_yaml(self) -> str:
        """What `--dry-run` prints."""
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=110)


def resolve_files(
    run: str | Path | None = None, cluster: str | Path | None = None, overrides: Sequence[str] = ()
) -> Resolved:
    """Load, then resolve. Without a run the built-in quickstart, without a cluster this machine."""
    run_path = Path(run) if run is not None else builtin("runs/quickstart.yaml")
    cluster_path = Path(cluster) if cluster is not None else builtin("clusters/local.yaml")
    for_cluster = [o.removeprefix(CLUSTER_PREFIX) for o in overrides if o.startswith(CLUSTER_PREFIX)]
    run_spec = load_run(run_path, [o for o in overrides if not o.startswith(CLUSTER_PREFIX)])
    cluster_spec = load_cluster(cluster_path, for_cluster)
    prices = load_prices(
        cluster_path.parent / cluster_spec.prices if cluster_spec.prices is not None else builtin("prices.yaml")
    )
    return resolve(run_spec, cluster_spec, prices, base=str(run_path.resolve().parent))


def resolve_saved(path: str | Path, overrides: Sequence[str] = ()) -> Resolved:
    """Back from the file that `to_yaml` filled, for a resume: validated and placed again, with overrides."""
    for_cluster = [o.removeprefix(CLUSTER_PREFIX) for o in overrides if o.startswith(CLUSTER_PREFIX)]
    for_run = [o for o in overrides if not o.startswith(CLUSTER_PREFIX)]
    run, cluster, prices, base = saved_specs(path, {"run": for_run, "cluster": for_cluster})
    return resolve(run, cluster, prices, base=base)


def resolve(run: RunSpec, cluster: ClusterSpec, prices: PriceList, *, base: str = ".") -> Resolved:
    """Price the pools and place the parts. SpecError when a pool has no price or a part does not fit."""
    listed = _merged(prices, cluster.price_list)
    hourly = {pool.name: _hourly(pool, listed) for pool in cluster.pools}
    pools = [_pool(pool, hourly[pool.name]) for pool in cluster.pools]
    demands = [
        Demand(Role.ENGINE, cluster.engines.count, cluster.engines.threads, device=cluster.engines.device),
        Demand(Role.TRAINER, 1, cluster.trainer.threads, device=cluster.trainer.device),
    ]
    plan = solve(pools, demands)
    if isinstance(plan, Shortage):
        raise SpecError(
            f"cluster '{cluster.name}' cannot hold the run: {plan.message}",
            remedy="add devices to the pool, or lower engines.count, engines.threads or trainer.threads",
        )
    return Resolved(run, cluster, plan, listed, quotas(run), hourly, base)


def plan_dict(plan: Plan) -> dict[str, Any]:
    """A plan as plain values."""
    return {
        "assignments": [
            {"part": a.name, "role": str(a.role), "pool": a.pool, "devices": list(a.devices)} for a in plan.assignments
        ],
        "idle": dict(plan.idle),
        "usd_per_hour": plan.usd_per_hour,
        "binds": plan.binds,
        "rates": None if plan.rates is None else dict(plan.rates),
    }


def _merged(prices: PriceList, own: Sequence[PriceEntry]) -> PriceList:
    table = {(p.name, p.unit): p for p in (*prices.prices, *own)}
    return PriceList(currency=prices.currency, prices=list(table.values()))


def _hourly(pool: PoolSpec, prices: PriceList) -> float:
    if pool.price is not None:
        return pool.price
    listed = {p.name: p.usd for p in prices.prices if p.unit == "device-hour"}
    if pool.device not in listed:
        raise SpecError(
            f"pool '{pool.name}': device '{pool.device}' has no price{did_you_mean(pool.device, listed)}",
            remedy="give the pool a price (dollars per device-hour) or add one to price_list",
        )
    return listed[pool.device]


def _pool(pool: PoolSpec, hourly: float) -> Pool:
    cpu = pool.device == "cpu"
    return Pool(
        name=pool.name,
        device=Device(pool.device, memory_gb=None if cpu else pool.memory_gb),
        count=pool.count,
        usd_per_device_hour=hourly,
        memory_gb=pool.memory_gb if cpu else None,
        labels=pool.labels,
    )
