"""The price list as text: every price has a unit, a source and a date."""

from __future__ import annotations

import datetime as dt
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
