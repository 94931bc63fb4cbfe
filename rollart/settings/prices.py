"""A dated price list, price lookups in it, and the bill of a function call. Every price has a unit, a source and a
date."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from rollart.settings.base import SpecEntry
from serverless.spec import gpu_type
from serverless.types import TokenUsage

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
    "idle-gpu-second",
    "million-input-tokens",
    "million-cached-tokens",
    "million-cache-write-tokens",
    "million-output-tokens",
]
"""The unit of a price. A provider without `idle-...` prices charges nothing for an idle worker."""

STALE_DAYS = 180
"""A price older than this is pointed out: list prices of GPUs have moved by a third within half a year."""


ON_OWN_CORES = "local"
"""The provider whose workers run on cores that the run pays for by the hour. Its calls have no bill of their own: its
prices give the cost of the calls elsewhere."""


PriceName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:/@-]*$", max_length=200)]
"""A name, or an endpoint and a model: models have '/', ':' and '@' in their names."""


def gpu_price_name(provider: str, kind: str) -> str:
    """The name of the prices of a provider's GPU type: `modal-L4`."""
    return f"{provider}-{kind}"


def function_gpus(config: Mapping[str, Any]) -> dict[str, str]:
    """GPUs of a run's functions by name, from its resolved config; functions without one are left out."""
    written = {entry["name"]: entry.get("gpu") for entry in config.get("run", {}).get("functions", ())}
    effective = {name: given.get("gpu") for name, given in config.get("functions", {}).items()}
    return {name: gpu for name, gpu in {**written, **effective}.items() if gpu}


class PriceEntry(SpecEntry):
    """The price of one unit, with its source and date."""

    name: PriceName
    """Device type (`cpu`, `H800`), meter (`aws_lambda`, `modal`), or for tokens the model, at one endpoint or at any
    (`api.openai.com/gpt-5-mini`, `gpt-5-mini`)."""
    unit: Unit = "device-hour"
    """The unit; `idle-...`: of workers that wait for calls."""
    usd: float = Field(ge=0, le=1e6)
    """Dollars per unit."""
    source: str = Field(min_length=1)
    """Source of the price."""
    date: dt.date
    """Date on which the source was read (YYYY-MM-DD)."""

    @property
    def of_tokens(self) -> bool:
        """True for a price of a language model's tokens."""
        return self.unit.endswith("-tokens")

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

    def function_usd(
        self, provider: str, *, billed_s: float, memory_mb: float, requests: int = 1, gpu: str = ""
    ) -> float:
        """Price of `requests` calls that ran `billed_s` seconds in total on workers of `memory_mb`, one core and
        `gpu`. A provider without any price costs nothing here; `sources` shows that. See `billed` for whether the price
        is a bill."""
        return sum(price.usd * amount for price, amount in self.items(provider, billed_s, memory_mb, requests, gpu))

    def billed(self, provider: str) -> bool:
        """True if the provider's calls are billed; otherwise they are part of no total and no budget."""
        return provider != ON_OWN_CORES

    def charges_idle(self, provider: str) -> bool:
        """True if the provider has a price for workers that wait."""
        return any(name == provider and unit.startswith("idle-") for name, unit in self._by_name_and_unit)

    def idle_usd(self, provider: str, *, seconds: float, memory_mb: float, gpu: str = "") -> float:
        """Bill of `seconds` worker-seconds in which no call ran, on workers of `memory_mb`, one core and `gpu`; 0 where
        the provider charges nothing for them."""
        return sum(price.usd * amount for price, amount in self.items(provider, seconds, memory_mb, None, gpu))

    def prices_gpu(self, provider: str, gpu: str) -> bool:
        """True if the provider has a price for this GPU, or there is none to pay for."""
        return not gpu or (gpu_price_name(provider, gpu_type(gpu)[0]), "gpu-second") in self._by_name_and_unit

    def items(
        self, provider: str, seconds: float, memory_mb: float, requests: int | None, gpu: str = ""
    ) -> Iterator[tuple[PriceEntry, float]]:
        """Amounts of the units that the provider has a price for: GB-seconds (1 GB = 1024 MB, as AWS counts),
        GiB-seconds, core-seconds, GPU-seconds of the type of `gpu`, requests; without `requests`, the units of idle
        worker time."""
        idle, memory_s = "idle-" if requests is None else "", seconds * memory_mb / 1024.0
        amounts = {f"{idle}GB-second": memory_s, f"{idle}GiB-second": memory_s, f"{idle}core-second": seconds}
        if requests is not None:
            amounts["million-requests"] = requests / 1e6
        for unit, amount in amounts.items():
            if (price := self._by_name_and_unit.get((provider, unit))) is not None:
                yield price, amount
        if gpu:
            kind, count = gpu_type(gpu)
            key = gpu_price_name(provider, kind), f"{idle}gpu-second"
            if (price := self._by_name_and_unit.get(key)) is not None:
                yield price, seconds * count

    def token_items(self, usage: TokenUsage) -> Iterator[tuple[PriceEntry, float]]:
        """Millions of tokens by the prices of the model: those at its endpoint, else those at any. Tokens of a prompt
        cache that has no price of its own cost as much as other input."""
        name = f"{usage.endpoint}/{usage.model}"
        if (name, "million-input-tokens") not in self._by_name_and_unit:
            name = usage.model
        for kind in ("input", "cached", "cache_write", "output"):
            tokens = getattr(usage, f"{kind}_tokens")
            price = self._by_name_and_unit.get((name, f"million-{kind.replace('_', '-')}-tokens"))
            if price is None and kind != "output":
                price = self._by_name_and_unit.get((name, "million-input-tokens"))
            if price is not None and tokens:
                yield price, tokens / 1e6

    def token_usd(self, usage: TokenUsage) -> float:
        """The bill of tokens; 0 for a model without a price (`prices_tokens`)."""
        return sum(price.usd * amount for price, amount in self.token_items(usage))

    def prices_tokens(self, usage: TokenUsage) -> bool:
        """True if the model has prices: its tokens are otherwise counted without dollars."""
        names = (f"{usage.endpoint}/{usage.model}", usage.model)
        return any((name, "million-input-tokens") in self._by_name_and_unit for name in names)

    def sources(self, name: str) -> tuple[PriceEntry, ...]:
        """Every price of a name, for the foot of a report."""
        return tuple(entry for (known, _), entry in self._by_name_and_unit.items() if known == name)
