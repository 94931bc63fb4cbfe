"""Costs in the FinOps Open Cost and Usage Specification, version 1.2 (https://focus.finops.org): a row per resource,
hour of UTC and charge.

The rows hold what is billed, as the cost report does: their sums agree (property test). A charge is one price of one
resource in one state for one cause. The columns are all mandatory ones, the conditional ones whose condition holds
here, and null ones that tools of version 1.0 ask for in any case: there are no regions or invoices, and one currency.
Charges of spot, reserved and committed prices have the price on demand as their list price. Names with `x_` are our
own.
"""

from __future__ import annotations

import csv
import datetime as dt
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rollart.errors import UsageError
from rollart.ledger.intervals import ResourceState
from rollart.ledger.reader import InvocationSum, LedgerReader
from rollart.ledger.utc import HOUR_S, hourly_parts
from rollart.report import functions
from rollart.report.rows import (
    ESTIMATED,
    PoolPrice,
    idle_stretches,
    pool_prices,
    price_list,
    unmetered_calls,
)
from rollart.settings.prices import PriceEntry, PriceKind, PriceList, function_gpus
from serverless.meter import NO_SCORE, WorkerState

FocusValue: TypeAlias = str | float | dt.datetime | None

FocusType: TypeAlias = Literal["string", "decimal", "datetime"]

COLUMNS: Mapping[str, tuple[FocusType, bool]] = {
    "BilledCost": ("decimal", False),
    "BillingAccountId": ("string", False),
    "BillingAccountName": ("string", True),
    "BillingAccountType": ("string", True),
    "BillingCurrency": ("string", False),
    "BillingPeriodEnd": ("datetime", False),
    "BillingPeriodStart": ("datetime", False),
    "ChargeCategory": ("string", False),
    "ChargeClass": ("string", True),
    "ChargeDescription": ("string", True),
    "ChargeFrequency": ("string", False),
    "ChargePeriodEnd": ("datetime", False),
    "ChargePeriodStart": ("datetime", False),
    "CommitmentDiscountCategory": ("string", True),
    "CommitmentDiscountId": ("string", True),
    "CommitmentDiscountName": ("string", True),
    "CommitmentDiscountQuantity": ("decimal", True),
    "CommitmentDiscountStatus": ("string", True),
    "CommitmentDiscountType": ("string", True),
    "CommitmentDiscountUnit": ("string", True),
    "ConsumedQuantity": ("decimal", True),
    "ConsumedUnit": ("string", True),
    "ContractedCost": ("decimal", False),
    "ContractedUnitPrice": ("decimal", True),
    "EffectiveCost": ("decimal", False),
    "InvoiceIssuerName": ("string", False),
    "ListCost": ("decimal", False),
    "ListUnitPrice": ("decimal", True),
    "PricingCategory": ("string", True),
    "PricingQuantity": ("decimal", True),
    "PricingUnit": ("string", True),
    "ProviderName": ("string", False),
    "PublisherName": ("string", False),
    "RegionId": ("string", True),
    "RegionName": ("string", True),
    "ResourceId": ("string", True),
    "ResourceName": ("string", True),
    "ResourceType": ("string", True),
    "ServiceCategory": ("string", False),
    "ServiceName": ("string", False),
    "ServiceSubcategory": ("string", False),
    "SkuId": ("string", True),
    "SkuMeter": ("string", True),
    "SkuPriceDetails": ("string", True),
    "SkuPriceId": ("string", True),
    "SubAccountId": ("string", True),
    "SubAccountName": ("string", True),
    "SubAccountType": ("string", True),
    "Tags": ("string", True),
    "x_Cause": ("string", True),
    "x_Role": ("string", False),
    "x_State": ("string", False),
}
"""Type of each column, and whether it may be null, in the order of the table."""

UNUSED: Mapping[str, FocusValue] = {name: None for name in COLUMNS if name.startswith(("CommitmentDiscount", "Region"))}

UNUSED_ROLE = "unused"
"""Role of devices of paid pools that a run does not use."""

PROVIDERS = {"aws_lambda": "AWS", "modal": "Modal"}

DEVICE_HOUR = "device-hour"

CATEGORIES: Mapping[PriceKind, str] = {
    "on_demand": "Standard",
    "spot": "Dynamic",
    "reserved": "Committed",
    "committed": "Committed",
}
"""PricingCategory of each kind of price."""

COMMITMENTS: Mapping[PriceKind, tuple[str, str]] = {
    "reserved": ("Usage", "Reservation"),
    "committed": ("Spend", "Savings Plan"),
}
"""CommitmentDiscountCategory and CommitmentDiscountType."""


@dataclass(frozen=True, slots=True)
class FocusService:
    """The service of a charge, in the categories of the specification."""

    category: str
    subcategory: str
    name: str


DEVICES = FocusService("Compute", "Other (Compute)", "Devices")
FUNCTIONS = FocusService("Compute", "Serverless Compute", "Functions")
TOKENS = FocusService("AI and Machine Learning", "Generative AI", "Language models")


@dataclass(frozen=True, slots=True)
class FocusCharge:
    """`amount` units of a price, used by one resource in one hour of UTC, counted from 1970."""

    hour: int
    service: FocusService
    provider: str
    role: str
    resource: str
    state: str
    cause: str
    sku: str
    unit: str
    price: float
    amount: float
    source: str = ""
    date: str = ""
    pool: str = ""
    kind: PriceKind = "on_demand"
    list_price: float | None = None
    """The price on demand; None: `price`."""
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def usd(self) -> float:
        return self.price * self.amount


def focus_charges(reader: LedgerReader) -> Iterator[FocusCharge]:
    """Every charge of the run, in order of time within devices, functions and tokens, with the tags of the run and of
    its pool."""
    config = reader.config()
    tags = config.get("run", {}).get("tags", {})
    by_pool = {pool["name"]: {**tags, **pool.get("tags", {})} for pool in config.get("cluster", {}).get("pools", ())}
    for charge in _charges(reader, config):
        own = by_pool.get(charge.pool, tags)
        yield replace(charge, tags=own) if own else charge


def _charges(reader: LedgerReader, config: Mapping[str, Any]) -> Iterator[FocusCharge]:
    book, gpus, utc = price_list(config), function_gpus(config), reader.utc()
    yield from _devices(reader, config)
    for hour, call in reader.invocation_hours(utc):
        if book.billed(call.provider):
            yield from _call(hour, call, book, gpus.get(call.function, ""))
    idle = [
        (hour, (w.function, w.provider, w.memory_mb), w.seconds)
        for hour, w in reader.worker_hours(utc)
        if w.state == WorkerState.IDLE and w.provider not in ESTIMATED
    ]
    for key, t0, t1 in idle_stretches(*unmetered_calls(reader, config)):
        idle += ((hour, key, seconds) for hour, seconds in hourly_parts(utc.unix_s(t0), utc.unix_s(t0) + t1 - t0))
    sums: dict[tuple[int, tuple[str, str, int]], float] = {}
    for hour, key, seconds in idle:
        sums[hour, key] = sums.get((hour, key), 0.0) + seconds
    for (hour, (function, provider, memory_mb)), seconds in sorted(sums.items()):
        if book.billed(provider):
            for price, amount in book.items(provider, seconds, memory_mb, None, gpus.get(function, "")):
                yield _function(hour, provider, function, ResourceState.IDLE, functions.IDLE, price, amount)
    for hour, row in reader.token_hours(utc):
        used = row.usage
        cause = "tokens without a score" if row.cause == NO_SCORE else functions.overhead(row.cause)
        resource = f"{used.endpoint}/{used.model}:{row.function}"
        for price, amount in book.token_items(used):
            yield FocusCharge(
                hour,
                TOKENS,
                used.endpoint,
                functions.REWARD,
                resource,
                ResourceState.BUSY,
                cause,
                *_priced(price, amount),
            )


def _devices(reader: LedgerReader, config: Mapping[str, Any]) -> Iterator[FocusCharge]:
    pools = {pool.pool: pool for pool in pool_prices(config)}
    homes = {a["part"]: a["pool"] for a in config.get("plan", {}).get("assignments", ())}
    for row in reader.interval_hours(reader.utc()):
        pool = pools.get(homes.get(row.resource, row.resource.removeprefix("unused-")))
        if pool is None or pool.usd != row.price:
            pool = next((other for other in pools.values() if other.usd == row.price), None)
        known = pool or PoolPrice("", "device", row.price, "recorded by the run from an earlier price list", "")
        yield FocusCharge(
            row.hour,
            DEVICES,
            "",
            row.role,
            row.resource,
            row.state,
            row.cause,
            known.device,
            DEVICE_HOUR,
            row.price,
            row.unit_seconds / HOUR_S,
            known.source,
            known.date,
            known.pool,
            known.kind,
            known.list_usd,
        )


def _call(hour: int, call: InvocationSum, book: PriceList, gpu: str) -> Iterator[FocusCharge]:
    """The parts of `functions.lines`: start-up apart from work, unless the call failed."""
    start_s = min(call.cold_billed_s, call.billed_s) if call.status == "ok" else 0.0
    parts = (
        (ResourceState.BUSY, functions.cause_of(call), call.billed_s - start_s, call.calls),
        (ResourceState.STARTUP, functions.COLD_START, start_s, 0),
    )
    for state, cause, seconds, requests in parts:
        for price, amount in book.items(call.provider, seconds, call.memory_mb, requests, gpu):
            if amount:
                yield _function(hour, call.provider, call.function, state, cause, price, amount)


def _function(
    hour: int, provider: str, function: str, state: str, cause: str, price: PriceEntry, amount: float
) -> FocusCharge:
    resource = f"{provider}:{function}"
    return FocusCharge(
        hour,
        FUNCTIONS,
        PROVIDERS.get(provider, provider),
        functions.REWARD,
        resource,
        state,
        cause,
        *_priced(price, amount),
    )


def focus_rows(reader: LedgerReader, run: str) -> Iterator[dict[str, FocusValue]]:
    """The rows of the run: `COLUMNS`, in any order."""
    cluster = str(reader.config().get("cluster", {}).get("name", "")) or "rollart"
    for charge in focus_charges(reader):
        yield _row(charge, run, cluster)


def _row(charge: FocusCharge, run: str, cluster: str) -> dict[str, FocusValue]:
    begins = dt.datetime.fromtimestamp(charge.hour * HOUR_S, dt.UTC)
    month = begins.replace(day=1, hour=0)
    provider = charge.provider or cluster
    unit, consumed_unit, consumed = _units(charge)
    list_price = charge.price if charge.list_price is None else charge.list_price
    usd = charge.usd
    cause = f" ({charge.cause})" if charge.cause else ""
    details = {"x_Source": charge.source, "x_Date": charge.date}
    tags = {**charge.tags, "run": run, "role": charge.role, "pool": charge.pool}
    return {
        **UNUSED,
        "BilledCost": usd,
        "BillingAccountId": cluster,
        "BillingAccountName": cluster,
        "BillingAccountType": "Cluster",
        "BillingCurrency": "USD",
        "BillingPeriodEnd": (month + dt.timedelta(days=31)).replace(day=1),
        "BillingPeriodStart": month,
        "ChargeCategory": "Usage",
        "ChargeClass": None,
        "ChargeDescription": f"{charge.sku}: {charge.role} {charge.resource}, {charge.state}{cause}",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodEnd": begins + dt.timedelta(hours=1),
        "ChargePeriodStart": begins,
        "ConsumedQuantity": consumed,
        "ConsumedUnit": consumed_unit,
        "ContractedCost": usd,
        "ContractedUnitPrice": charge.price,
        "EffectiveCost": usd,
        "InvoiceIssuerName": provider,
        "ListCost": list_price * charge.amount,
        "ListUnitPrice": list_price,
        "PricingCategory": CATEGORIES[charge.kind],
        "PricingQuantity": charge.amount,
        "PricingUnit": unit,
        "ProviderName": provider,
        "PublisherName": provider,
        "ResourceId": f"{run}/{charge.resource}",
        "ResourceName": charge.resource,
        "ResourceType": charge.role,
        "ServiceCategory": charge.service.category,
        "ServiceName": charge.service.name,
        "ServiceSubcategory": charge.service.subcategory,
        "SkuId": charge.sku,
        "SkuMeter": charge.unit,
        "SkuPriceDetails": json.dumps({key: value for key, value in details.items() if value}, ensure_ascii=False),
        "SkuPriceId": f"{charge.sku}/{charge.unit}",
        "SubAccountId": run,
        "SubAccountName": run,
        "SubAccountType": "Run",
        "Tags": json.dumps({key: value for key, value in tags.items() if value}, ensure_ascii=False),
        "x_Cause": charge.cause or None,
        "x_Role": charge.role,
        "x_State": charge.state,
        **_commitment(charge, cluster),
    }


def _commitment(charge: FocusCharge, cluster: str) -> dict[str, FocusValue]:
    """The columns of a commitment. The devices of a pool that the run did not use are its unused part, of which nothing
    is consumed."""
    if charge.kind not in COMMITMENTS:
        return {}
    category, kind = COMMITMENTS[charge.kind]
    unused = charge.role == UNUSED_ROLE
    unit, _, consumed = _units(charge)
    found: dict[str, FocusValue] = {
        "CommitmentDiscountCategory": category,
        "CommitmentDiscountId": f"{cluster}/{charge.pool}",
        "CommitmentDiscountName": charge.pool,
        "CommitmentDiscountQuantity": consumed if category == "Usage" else charge.usd,
        "CommitmentDiscountStatus": "Unused" if unused else "Used",
        "CommitmentDiscountType": kind,
        "CommitmentDiscountUnit": unit if category == "Usage" else "USD",
    }
    return found | ({"ConsumedQuantity": None, "ConsumedUnit": None} if unused else {})


def _units(charge: FocusCharge) -> tuple[str, str, float]:
    """Unit of the price, and unit and quantity of what was used, in the form of the specification's UnitFormat."""
    if charge.unit.startswith("million-"):
        thing = "Requests" if charge.unit.endswith("requests") else "Tokens"
        return f"1000000 {thing}", thing, charge.amount * 1e6
    what, _, time = charge.unit.removeprefix("idle-").rpartition("-")
    named = {"device": "Device", "core": "Core", "gpu": "GPU"}.get(what, what)
    unit = f"{named}-{time.capitalize()}s"
    return unit, unit, charge.amount


def focus_csv(rows: Iterable[Mapping[str, FocusValue]]) -> str:
    """The table as CSV: null is empty, times are ISO 8601 in UTC, numbers have no exponent."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([_text(row[name]) for name in COLUMNS] for row in rows)
    return out.getvalue()


def _text(value: FocusValue) -> str:
    match value:
        case None:
            return ""
        case dt.datetime():
            return value.strftime("%Y-%m-%dT%H:%M:%SZ")
        case float():
            return f"{Decimal(repr(value)):f}"
        case _:
            return value


def write_parquet(rows: Sequence[Mapping[str, FocusValue]], path: Path) -> None:
    """The same table as Parquet, with decimals as doubles and times as UTC timestamps. UsageError without pyarrow."""
    try:
        import pyarrow  # late: an extra
        import pyarrow.parquet
    except ImportError:
        raise UsageError("Parquet needs pyarrow", remedy="pip install 'rollart[parquet]'") from None
    types = {
        "string": pyarrow.string(),
        "decimal": pyarrow.float64(),
        "datetime": pyarrow.timestamp("ms", tz="UTC"),
    }
    schema = pyarrow.schema([pyarrow.field(n, types[kind], nullable) for n, (kind, nullable) in COLUMNS.items()])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema), path)


def _priced(price: PriceEntry, amount: float) -> tuple[str, str, float, float, str, str]:
    """The fields of a charge from the name of its price to the price's date."""
    return price.name, price.unit, price.usd, amount, price.source, str(price.date)
