"""A dated price list, price lookups in it, and the bill of a function call. Every price has a unit, a source and a
date."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from placement.hardware import device_name
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
"""The unit of a price. A provider without `idle-...` prices charges nothing for an idle worker. A GPU's idle price is
stated even so, since most providers charge it: 0 where there is none."""

PriceKind = Literal["on_demand", "spot", "reserved", "committed"]
"""Kind of a price: at any time; of capacity that may be taken back; of devices reserved for a term; under a commitment
to spend (a savings plan)."""

TOKEN_UNITS: tuple[Unit, ...] = ("million-input-tokens", "million-output-tokens")
"""Units without which the tokens of a model have no bill."""

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


def gpu_price_parts(name: str) -> tuple[str, str]:
    """Provider and GPU type of a price's name, the inverse of `gpu_price_name`; the type is empty for other prices."""
    provider, _, kind = name.partition("-")
    return provider, kind


def merged_prices(prices: PriceList, entries: Sequence[PriceEntry]) -> PriceList:
    """The list with entries added or replaced, by name, unit and kind."""
    table = {(p.name, p.unit, p.kind): p for p in (*prices.prices, *entries)}
    return PriceList(currency=prices.currency, prices=list(table.values()))


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
    kind: PriceKind = "on_demand"
    """Kind of the price: `spot` for pools with `spot: true`, `reserved` and `committed` for pools with that
    `commitment`. Others than on_demand are of device-hours."""

    @model_validator(mode="after")
    def _kind_of_devices(self) -> PriceEntry:
        if self.kind != "on_demand" and self.unit != "device-hour":
            raise ValueError(f"kind is {self.kind} and unit is {self.unit} (rule: on_demand, or of device-hours)")
        return self

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
        return {(p.name, p.unit): p for p in self.prices if p.kind == "on_demand"}

    def device_price(self, device: str, kind: PriceKind = "on_demand") -> PriceEntry | None:
        """The price of an hour of a device, by its name or another name of its type."""
        listed = {p.name: p for p in self.prices if p.unit == "device-hour" and p.kind == kind}
        return listed.get(device) or {device_name(name): p for name, p in listed.items()}.get(device_name(device))

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
        """True if the provider has prices for this GPU, busy and idle, or there is none to pay for."""
        return not gpu or self._has(gpu_price_name(provider, gpu_type(gpu)[0]), "gpu-second", "idle-gpu-second")

    def gpu_prices(self, provider: str) -> dict[str, PriceEntry]:
        """Prices per GPU-second of a provider, by type."""
        priced = ((gpu_price_parts(entry.name), entry) for entry in self.prices if entry.unit == "gpu-second")
        return {kind: entry for (name, kind), entry in priced if name == provider}

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
        name = self._token_price_name(usage)
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
        """True if the model has prices of input and of output: its tokens are otherwise counted without dollars."""
        return self._has(self._token_price_name(usage), *TOKEN_UNITS)

    def sources(self, name: str) -> tuple[PriceEntry, ...]:
        """Every price of a name, for the foot of a report."""
        return tuple(entry for (known, _), entry in self._by_name_and_unit.items() if known == name)

    def incomplete(self) -> Iterator[tuple[PriceEntry, Unit]]:
        """Prices that need another one of the same name, with its unit: a model's input needs an output price, and a
        GPU of a provider that charges idle workers an idle price."""
        for entry in self.prices:
            needed: Unit | None = None
            if entry.unit == "million-input-tokens":
                needed = "million-output-tokens"
            elif entry.unit == "gpu-second" and self._charges_idle_gpus(gpu_price_parts(entry.name)[0]):
                needed = "idle-gpu-second"
            if needed is not None and not self._has(entry.name, needed):
                yield entry, needed

    def _has(self, name: str, *units: str) -> bool:
        return all((name, unit) in self._by_name_and_unit for unit in units)

    def _token_price_name(self, usage: TokenUsage) -> str:
        """The name of the model's prices: at its endpoint where these are complete, or the only ones."""
        names = (f"{usage.endpoint}/{usage.model}", usage.model)
        complete = (name for name in names if self._has(name, *TOKEN_UNITS))
        with_input = (name for name in names if self._has(name, "million-input-tokens"))
        return next(complete, None) or next(with_input, usage.model)

    def _charges_idle_gpus(self, provider: str) -> bool:
        """True if the list has a price for idle workers of the provider, or for one of its idle GPUs."""
        return any(
            unit.startswith("idle-")
            and (name == provider or (unit == "idle-gpu-second" and gpu_price_parts(name)[0] == provider))
            for name, unit in self._by_name_and_unit
        )
