"""A dated price list, price lookups in it, and the bill of a function call. Every price has a unit, a source and a
date."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from functools import cached_property
from typing import Literal

from pydantic import Field

from rollart.settings.base import Name, SpecEntry

Unit = Literal[
    "device-hour",
    "GB-second",
    "GiB-second",
    "core-second",
    "gpu-second",
    "million-requests",
    "idle-GB-second",
    "idle-GiB-second",
    "idle-core-second",
]
"""The unit of a price. A provider without `idle-...` prices charges nothing for an idle worker."""

STALE_DAYS = 180
"""A price older than this is pointed out: list prices of GPUs have moved by a third within half a year."""


ON_OWN_CORES = "local"
"""The provider whose workers run on cores that the run pays for by the hour. Its calls have no bill of their own: its
prices give the cost of the calls elsewhere."""


class PriceEntry(SpecEntry):
    """The price of one unit, with its source and date."""

    name: Name
    """Device type (`cpu`, `H800`) or meter (`aws-lambda-x86`, `modal-cpu`)."""
    unit: Unit = "device-hour"
    """The unit; `idle-...`: of workers that wait for calls."""
    usd: float = Field(ge=0, le=1e6)
    """Dollars per unit."""
    source: str = Field(min_length=1)
    """Source of the price."""
    date: dt.date
    """Date on which the source was read (YYYY-MM-DD)."""

    def age_days(self, today: dt.date) -> int:
        return (today - self.date).days


class PriceList(SpecEntry):
    """A dated price list. Prices move: every entry can be overridden in a cluster spec."""

    currency: Literal["USD"] = "USD"
    """Currency of every price."""
    prices: list[PriceEntry] = Field(min_length=1)
    """Prices by name and unit; names repeat across units."""

    @cached_property
    def _by_name_and_unit(self) -> dict[tuple[str, str], PriceEntry]:
        """Prices are floats: at any run's size, sums stay far above a double's rounding error."""
        return {(p.name, p.unit): p for p in self.prices}

    def function_usd(self, provider: str, *, billed_s: float, memory_mb: float, requests: int = 1) -> float:
        """Price of `requests` calls that ran `billed_s` seconds in total on workers of `memory_mb` and one core. A
        provider without any price costs nothing here; `sources` shows that. See `billed` for whether the price is a
        bill."""
        return sum(price.usd * amount for price, amount in self.items(provider, billed_s, memory_mb, requests))

    def billed(self, provider: str) -> bool:
        """True if the provider's calls are billed; otherwise they are part of no total and no budget."""
        return provider != ON_OWN_CORES

    def charges_idle(self, provider: str) -> bool:
        """True if the provider has a price for workers that wait."""
        return any(name == provider and unit.startswith("idle-") for name, unit in self._by_name_and_unit)

    def idle_usd(self, provider: str, *, seconds: float, memory_mb: float) -> float:
        """Bill of `seconds` worker-seconds in which no call ran, on workers of `memory_mb` and one core; 0 where the
        provider charges nothing for them."""
        return sum(price.usd * amount for price, amount in self.items(provider, seconds, memory_mb, None))

    def items(
        self, provider: str, seconds: float, memory_mb: float, requests: int | None
    ) -> Iterator[tuple[PriceEntry, float]]:
        """Amounts of the units that the provider has a price for: GB-seconds (1 GB = 1024 MB, as AWS counts),
        GiB-seconds, core-seconds, requests; without `requests`, the units of idle worker time."""
        idle, memory_s = "idle-" if requests is None else "", seconds * memory_mb / 1024.0
        amounts = {f"{idle}GB-second": memory_s, f"{idle}GiB-second": memory_s, f"{idle}core-second": seconds}
        if requests is not None:
            amounts["million-requests"] = requests / 1e6
        for unit, amount in amounts.items():
            if (price := self._by_name_and_unit.get((provider, unit))) is not None:
                yield price, amount

    def sources(self, name: str) -> tuple[PriceEntry, ...]:
        """Every price of a name, for the foot of a report."""
        return tuple(entry for (known, _), entry in self._by_name_and_unit.items() if known == name)
