"""Price lookups in a dated price list, and the bill of a function call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
        items = self.function_items(provider, billed_s=billed_s, memory_mb=memory_mb, requests=requests)
        return sum(price.usd * amount for price, amount in items)

    def function_items(
        self, provider: str, *, billed_s: float, memory_mb: float, requests: int
    ) -> Iterator[tuple[PriceEntry, float]]:
        """Amounts of the units that the provider has a price for: GB-seconds (1 GB = 1024 MB, as AWS counts),
        GiB-seconds, core-seconds, requests."""
        memory_s = billed_s * memory_mb / 1024.0
        return self._items(
            provider,
            {
                "GB-second": memory_s,
                "GiB-second": memory_s,
                "core-second": billed_s,
                "million-requests": requests / 1e6,
            },
        )

    def billed(self, provider: str) -> bool:
        """True if the provider's calls are billed; otherwise they are part of no total and no budget."""
        return provider != ON_OWN_CORES

    def charges_idle(self, provider: str) -> bool:
        """True if the provider has a price for workers that wait."""
        return any(name == provider and unit.startswith("idle-") for name, unit in self._table)

    def idle_usd(self, provider: str, *, seconds: float, memory_mb: float) -> float:
        """Bill of `seconds` worker-seconds in which no call ran, on workers of `memory_mb` and one core; 0 where the
        provider charges nothing for them."""
        return sum(p.usd * amount for p, amount in self.idle_items(provider, seconds=seconds, memory_mb=memory_mb))

    def idle_items(self, provider: str, *, seconds: float, memory_mb: float) -> Iterator[tuple[PriceEntry, float]]:
        """Amounts of idle worker time that the provider has a price for."""
        memory_s = seconds * memory_mb / 1024.0
        return self._items(
            provider, {"idle-GB-second": memory_s, "idle-GiB-second": memory_s, "idle-core-second": seconds}
        )

    def sources(self, name: str) -> tuple[PriceEntry, ...]:
        """Every price of a name, for the foot of a report."""
        return tuple(entry for (known, _), entry in self._table.items() if known == name)

    def _items(self, provider: str, amounts: Mapping[str, float]) -> Iterator[tuple[PriceEntry, float]]:
        for unit, amount in amounts.items():
            if (price := self._table.get((provider, unit))) is not None:
                yield price, amount
