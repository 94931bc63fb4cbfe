"""Price lookups in a dated price list, and the bill of a function call."""

from __future__ import annotations

from collections.abc import Iterator

from rollart.settings.prices import PriceEntry, PriceList

ON_OWN_CORES = "local"
"""The provider whose workers run on cores that the run pays for by the hour. Its calls have no bill of their own: its
prices give the cost of the calls elsewhere."""


class PriceBook:
    """Prices by name and unit. Floats: at any run's size, sums stay far above a double's rounding error."""

    def __init__(self, prices: PriceList) -> None:
        self._table: dict[tuple[str, str], PriceEntry] = {(p.name, p.unit): p for p in prices.prices}

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
        return any(name == provider and unit.startswith("idle-") for name, unit in self._table)

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
            if (price := self._table.get((provider, unit))) is not None:
                yield price, amount

    def sources(self, name: str) -> tuple[PriceEntry, ...]:
        """Every price of a name, for the foot of a report."""
        return tuple(entry for (known, _), entry in self._table.items() if known == name)
