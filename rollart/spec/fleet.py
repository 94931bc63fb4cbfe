"""The cluster spec as values of `placement`: pools with devices and prices, links, and prices of functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from placement.hardware import canonical, catalogue, override
from placement.publish import STORE
from placement.types import Device, Link, Pool
from placement.workload import FunctionPrice
from rollart.errors import SpecError
from rollart.spec.cluster import ClusterSpec, DeviceSpec, PoolSpec
from rollart.spec.prices import PriceEntry, PriceList
from rollart.spec.suggest import did_you_mean

__all__ = ["device_name", "function_price", "links_of", "merged_prices", "pool_labels", "pools_of", "store_links_of"]

GIB_IN_GB = 1.073741824


def pools_of(cluster: ClusterSpec, prices: PriceList) -> tuple[Pool, ...]:
    """Every pool. SpecError for a pool without a price, or with figures that no device has."""
    own = {device.name: device for device in cluster.devices}
    return tuple(_pool(pool, own.get(pool.device), prices) for pool in cluster.pools)


def pool_labels(pool: PoolSpec) -> dict[str, str]:
    """Labels of every node of a pool: parts choose their nodes by `pool`."""
    return {"pool": pool.name, "device": pool.device, **pool.labels}


def links_of(cluster: ClusterSpec) -> tuple[Link, ...]:
    """Links between pools, which KV crosses."""
    return tuple(link for link in _links(cluster) if not _to_store(cluster, link))


def store_links_of(cluster: ClusterSpec) -> tuple[Link, ...]:
    """Links to the store of weight versions, which only weights cross."""
    return tuple(link for link in _links(cluster) if _to_store(cluster, link))


def _links(cluster: ClusterSpec) -> tuple[Link, ...]:
    return tuple(Link(link.a, link.b, link.gb_per_s, link.latency_ms / 1000.0) for link in cluster.links)


def _to_store(cluster: ClusterSpec, link: Link) -> bool:
    """True if the link ends at the store. A pool of the same name takes precedence."""
    return STORE in (link.a, link.b) and STORE not in {pool.name for pool in cluster.pools}


def merged_prices(prices: PriceList, own: Sequence[PriceEntry]) -> PriceList:
    """The list with entries added or replaced, by name and unit."""
    table = {(p.name, p.unit): p for p in (*prices.prices, *own)}
    return PriceList(currency=prices.currency, prices=list(table.values()))


def function_price(cluster: ClusterSpec, prices: PriceList) -> FunctionPrice | None:
    """Prices of functions; None where the list has none for the backend. SpecError for an unknown provider."""
    provider = cluster.functions.price or cluster.functions.chain[0]
    units = {p.unit: p.usd for p in prices.prices if p.name == provider and p.unit != "device-hour"}
    if not units:
        if cluster.functions.price is None:
            return None
        known = sorted({p.name for p in prices.prices if p.unit != "device-hour"})
        raise SpecError(
            f"functions.price is '{provider}' (rule: a provider of the price list{did_you_mean(provider, known)})",
            remedy="add its prices to price_list",
        )
    return FunctionPrice(
        provider=provider,
        usd_per_gb_s=units.get("GB-second", 0.0) + units.get("GiB-second", 0.0) / GIB_IN_GB,
        usd_per_core_s=units.get("core-second", 0.0),
        usd_per_million_requests=units.get("million-requests", 0.0),
        usd_per_gpu_s=units.get("gpu-second"),
    )


def _pool(pool: PoolSpec, own: DeviceSpec | None, prices: PriceList) -> Pool:
    device = _device(pool, own)
    return Pool(
        name=pool.name,
        device=device,
        count=pool.count,
        usd_per_device_hour=_hourly(pool, prices),
        memory_gb=pool.memory_gb if device.is_cpu else None,
        labels=pool.labels,
        rented=pool.rented,
    )


def _device(pool: PoolSpec, own: DeviceSpec | None) -> Device:
    """The type's figures: the cluster's, else the catalogue's, else none; the pool's own figures replace them."""
    try:
        if own is not None:
            figures = own.model_dump(exclude_none=True, exclude={"name", "base", "source"})
            device = override(own.name, base=own.base, source=own.source, **figures)
        else:
            device = _known(pool.device)
    except ValueError as error:
        raise SpecError(f"pool '{pool.name}': {error}") from None
    if pool.memory_gb is not None and not device.is_cpu:
        device = replace(device, memory_gb=pool.memory_gb)
    if pool.devices_per_host is not None:
        device = replace(device, devices_per_host=pool.devices_per_host)
    return device


def device_name(name: str) -> str:
    """The catalogue's canonical name of a device type; an unknown name is returned unchanged."""
    try:
        return canonical(name)
    except ValueError:
        return name


def _known(name: str) -> Device:
    entry = catalogue().get(device_name(name))
    return Device(name) if entry is None else entry.device


def _hourly(pool: PoolSpec, prices: PriceList) -> float:
    if pool.price is not None:
        return pool.price
    listed = {p.name: p.usd for p in prices.prices if p.unit == "device-hour"}
    if pool.device in listed:
        return listed[pool.device]
    synonyms = {device_name(name): usd for name, usd in listed.items()}
    if device_name(pool.device) not in synonyms:
        raise SpecError(
            f"pool '{pool.name}': device '{pool.device}' has no price{did_you_mean(pool.device, listed)}",
            remedy="give the pool a price (dollars per device-hour) or add one to price_list",
        )
    return synonyms[device_name(pool.device)]
