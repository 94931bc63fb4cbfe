"""What things cost: lookups in a dated price list, and the bill of a function call."""

from __future__ import annotations

from pathlib import Path

from rollart.errors import SpecError
from rollart.spec.load import builtin, load_prices
from rollart.spec.prices import PriceEntry, PriceList
from rollart.spec.suggest import did_you_mean

__all__ = ["PriceBook"]


class PriceBook:
    """Prices by name and unit. Floats: sums stay far above a double's rounding at any run's size."""

    def __init__(self, prices: PriceList) -> None:
        self._table: dict[tuple[str, str], PriceEntry] = {(p.name, p.unit): p for p in prices.prices}

    @classmethod
    def load(cls, path: str | Path | None = None) -> PriceBook:
        """From a file; the shipped list if none is given."""
        return cls(load_prices(builtin("prices.yaml") if path is None else path))

    def device_hour(self, device: str) -> PriceEntry:
        """Price of one device for an hour. SpecError if nobody has stated one."""
        found = self._table.get((device, "device-hour"))
        if found is None:
            hint = did_you_mean(device, [name for name, unit in self._table if unit == "device-hour"])
            raise SpecError(f"device '{device}' has no price{hint}", remedy="add it to the cluster's price_list")
        return found

    def function_usd(self, provider: str, *, billed_s: float, memory_mb: float, requests: int = 1) -> float:
        """Bill of `requests` calls that ran `billed_s` seconds together on workers of `memory_mb` and one core.

        Adds up whatever the provider has a price for: GB-seconds (1 GB = 1024 MB, as AWS counts), GiB-seconds,
        core-seconds, requests. A provider without any price costs nothing here; `sources` shows that.
        """
        memory_s = billed_s * memory_mb / 1024.0
        amounts = {
            "GB-second": memory_s, "GiB-second": memory_s, "core-second": billed_s, "million-requests": requests / 1e6,
        }  # fmt: skip
        return sum(
            self._table[provider, unit].usd * amount
            for unit, amount in amounts.items()
            if (provider, unit) in self._table
        )

    def charges_idle(self, provider: str) -> bool:
        """Whether the provider has a price for workers that wait."""
        return any(name == provider and unit.startswith("idle-") for name, unit in self._table)

    def idle_usd(self, provider: str, *, seconds: float, memory_mb: float) -> float:
        """Bill of `seconds` worker-seconds in which no call ran, on workers of `memory_mb` and one core; 0 where the
        provider charges nothing for them."""
        memory_s = seconds * memory_mb / 1024.0
        amounts = {"idle-GB-second": memory_s, "idle-GiB-second": memory_s, "idle-core-second": seconds}
        return sum(
            self._table[provider, unit].usd * amount
            for unit, amount in amounts.items()
            if (provider, unit) in self._table
        )

    def sources(self, name: str) -> tuple[PriceEntry, ...]:
        """Every price of a name, for the foot of a report."""
        return tuple(entry for (known, _), entry in self._table.items() if known == name)
