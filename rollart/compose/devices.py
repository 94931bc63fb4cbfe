"""Devices of a pool for a single engine beside the parts that run there. `placement.assign` places whole plans."""

from __future__ import annotations

from collections.abc import Collection

from placement.types import Pool

__all__ = ["free_devices"]


def free_devices(pool: Pool, taken: Collection[int], count: int) -> tuple[int, ...] | None:
    """The lowest free devices for one engine, on one host: the fullest host with enough free devices, the first among
    equals. An engine larger than a host may span hosts. None if the devices do not suffice."""
    size = min(pool.device.devices_per_host or pool.count, pool.count)
    starts = range(0, pool.count, size)
    hosts = [[i for i in range(s, min(s + size, pool.count)) if i not in taken] for s in starts]
    if count > size:
        hosts = [[i for host in hosts for i in host]]
    fitting = [host for host in hosts if len(host) >= count]
    return tuple(min(fitting, key=len)[:count]) if fitting else None
