"""The FOCUS 1.2 table: its columns, types and periods, and its sums, which are the cost report's and the ledger's."""

from __future__ import annotations

import csv
import datetime as dt
import io
import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.cli.main import run
from rollart.ledger.events import UTC_CLOCK
from rollart.ledger.reader import LedgerReader
from rollart.ledger.store import Ledger
from rollart.ledger.utc import HOUR_S, UtcTimes, hourly_parts
from rollart.ports import Interval, RunEvent
from rollart.report.cost import cost_lines
from rollart.report.focus import COLUMNS, focus_charges, focus_csv, focus_rows
from rollart.report.money.spend import FleetSums, RunCharge, by_tag, spend_sums
from rollart.report.rows import collect
from rollart.settings.load import builtin, load_prices
from serverless.meter import TokenBill, WorkerSpan, WorkerState
from serverless.types import Invocation, TokenUsage

PRICES = load_prices(builtin("prices.yaml"))
CONFIG: dict[str, Any] = {
    "cluster": {"name": "lab", "pools": [{"name": "here", "device": "cpu"}, {"name": "own", "device": "H20"}]},
    "plan": {"assignments": [{"part": "engine-0", "pool": "own"}, {"part": "trainer-0", "pool": "here"}]},
    "usd_per_device_hour": {"here": 0.0472, "own": 1.85},
    "prices": PRICES.model_dump(mode="json"),
}
TAGGED = {
    **CONFIG,
    "run": {"tags": {"team": "agents"}},
    "cluster": {
        **CONFIG["cluster"],
        "pools": [
            CONFIG["cluster"]["pools"][0],
            {"name": "own", "device": "H20", "tags": {"team": "infra", "owner": "ada"}},
        ],
    },
}
NEW_YEAR = dt.datetime(2026, 12, 31, 22, 30, tzinfo=dt.UTC).timestamp()

# FOCUS 1.2, columns with feature level Mandatory (specification, "Columns"), and the charge categories and services
# that it allows.
MANDATORY = {
    "BilledCost",
    "BillingAccountId",
    "BillingAccountName",
    "BillingCurrency",
    "BillingPeriodEnd",
    "BillingPeriodStart",
    "ChargeCategory",
    "ChargeClass",
    "ChargeDescription",
    "ChargePeriodEnd",
    "ChargePeriodStart",
    "ContractedCost",
    "EffectiveCost",
    "InvoiceIssuerName",
    "ListCost",
    "PricingQuantity",
    "PricingUnit",
    "ProviderName",
    "PublisherName",
    "ServiceCategory",
    "ServiceName",
}
OTHERS = {
    "AvailabilityZone",
    "BillingAccountType",
    "CapacityReservationId",
    "CapacityReservationStatus",
    "ChargeFrequency",
    "CommitmentDiscountCategory",
    "CommitmentDiscountId",
    "CommitmentDiscountName",
    "CommitmentDiscountQuantity",
    "CommitmentDiscountStatus",
    "CommitmentDiscountType",
    "CommitmentDiscountUnit",
    "ConsumedQuantity",
    "ConsumedUnit",
    "ContractedUnitPrice",
    "InvoiceId",
    "ListUnitPrice",
    "PricingCategory",
    "PricingCurrency",
    "PricingCurrencyContractedUnitPrice",
    "PricingCurrencyEffectiveCost",
    "PricingCurrencyListUnitPrice",
    "RegionId",
    "RegionName",
    "ResourceId",
    "ResourceName",
    "ResourceType",
    "ServiceSubcategory",
    "SkuId",
    "SkuMeter",
    "SkuPriceDetails",
    "SkuPriceId",
    "SubAccountId",
    "SubAccountName",
    "SubAccountType",
    "Tags",
}
NUMBERS = {
    "BilledCost",
    "ConsumedQuantity",
    "ContractedCost",
    "ContractedUnitPrice",
    "EffectiveCost",
    "ListCost",
    "ListUnitPrice",
    "PricingQuantity",
}
TIMES = {"BillingPeriodEnd", "BillingPeriodStart", "ChargePeriodEnd", "ChargePeriodStart"}
NULLABLE = {"ChargeClass", "x_Cause"} | {n for n in OTHERS if n.startswith(("CommitmentDiscount", "Region"))}
"""Null for these charges: they are no corrections, useful time has no cause of waste, and devices have no region."""
SUBCATEGORIES = {
    "Compute": {"Serverless Compute", "Other (Compute)"},
    "AI and Machine Learning": {"Generative AI"},
}


def record(
    directory: Path,
    rows: Sequence[Any],
    starts: Sequence[tuple[float, float]] = ((0.0, NEW_YEAR),),
    config: Mapping[str, Any] = CONFIG,
) -> None:
    with Ledger(directory, clock=lambda: 0.0, config=dict(config), prices=PRICES, inline=True) as ledger:
        for t, unix_s in starts:
            ledger.event(RunEvent(t, UTC_CLOCK, "run", {"unix_s": unix_s}))
        for row in rows:
            ledger.record(row)


def invocation(function: str, provider: str, t0: float, seconds: float, **more: Any) -> Invocation:
    given: dict[str, Any] = {"cold_start_s": 0.0, "memory_mb": 1024, "items": 3, "status": "ok"} | more
    worker = given.pop("worker", "w0")
    return Invocation(function, provider, worker, t0, t0 + seconds, billed_s=seconds, **given)


SAMPLE = (
    Interval("engine", "engine-0", 0.0, 9000.0, "busy", "", 2.0, 1.85),
    Interval("engine", "engine-0", 9000.0, 9100.0, "idle", "starved", 2.0, 1.85),
    Interval("trainer", "trainer-0", 100.0, 200.0, "busy", "", 1.0, 0.0472),
    invocation("exact", "aws_lambda", 3590.0, 20.0, cold_start_s=2.0),
    invocation("exact", "modal", 5.0, 20.0),
    invocation("exact", "local", 5.0, 20.0),
    WorkerSpan("exact", "aws_lambda", "w0", 0.0, 50.0, WorkerState.IDLE, 1024),
    TokenBill("judge", "aws_lambda", 10.0, "call", TokenUsage("api.openai.com", "gpt-5-mini", 1, 1000, 100, 0, 50)),
)


@pytest.fixture
def table(tmp_path: Path) -> list[dict[str, str]]:
    record(tmp_path, SAMPLE)
    with LedgerReader(tmp_path) as reader:
        return list(csv.DictReader(io.StringIO(focus_csv(focus_rows(reader, "quick")))))


def test_the_columns_are_those_of_focus_1_2(table: list[dict[str, str]]) -> None:
    names = list(table[0])
    own = [name for name in names if name.startswith("x_")]
    assert names == [*sorted(set(names) - set(own)), *own]
    assert set(names) - set(own) >= MANDATORY
    assert set(names) - set(own) <= MANDATORY | OTHERS


def test_values_have_the_types_and_forms_of_focus_1_2(table: list[dict[str, str]]) -> None:
    assert {"engine", "trainer", "reward"} == {row["x_Role"] for row in table}
    for row in table:
        assert {name for name, value in row.items() if not value} <= NULLABLE
        for name in NUMBERS:
            assert "e" not in row[name].lower()
            assert float(row[name]) >= 0
        for name in TIMES:
            at = dt.datetime.strptime(row[name], "%Y-%m-%dT%H:%M:%SZ")
            assert (at.minute, at.second) == (0, 0)
        assert row["BillingCurrency"] == "USD"
        assert (row["ChargeCategory"], row["ChargeFrequency"]) == ("Usage", "Usage-Based")
        assert row["PricingCategory"] == "Standard"
        assert row["ServiceSubcategory"] in SUBCATEGORIES[row["ServiceCategory"]]
        assert json.loads(row["Tags"])["run"] == "quick"
        assert all(key.startswith("x_") for key in json.loads(row["SkuPriceDetails"]))
        for cost, price in (("ListCost", "ListUnitPrice"), ("ContractedCost", "ContractedUnitPrice")):
            assert float(row[cost]) == pytest.approx(float(row[price]) * float(row["PricingQuantity"]))
        assert row["BilledCost"] == row["EffectiveCost"] == row["ContractedCost"] == row["ListCost"]


@pytest.mark.parametrize(
    ("pool", "category", "discount", "kind"),
    [
        ({"rented": True, "spot": True, "price": 0.9}, "Dynamic", "", ""),
        ({"commitment": "reserved", "price": 0.9}, "Committed", "Usage", "Reservation"),
        ({"commitment": "committed", "price": 0.9}, "Committed", "Spend", "Savings Plan"),
    ],
)
def test_kinds_of_prices_have_the_columns_of_their_discount(
    tmp_path: Path, pool: dict[str, Any], category: str, discount: str, kind: str
) -> None:
    """Two device-hours of each: one used, one of devices that the run did not use."""
    pools = [CONFIG["cluster"]["pools"][0], {"name": "own", "device": "H20", **pool}]
    config = {**CONFIG, "cluster": {"name": "lab", "pools": pools}, "usd_per_device_hour": {"here": 0.0472, "own": 0.9}}
    lives = [("decode", "engine-0", "busy"), ("unused", "unused-own", "idle")]
    record(tmp_path, [Interval(*who, 0.0, 1800.0, state, "", 4.0, 0.9) for *who, state in lives], config=config)
    with LedgerReader(tmp_path) as reader:
        used, unused = sorted(focus_rows(reader, "quick"), key=lambda row: str(row["x_Role"]))
    for row in (used, unused):
        assert (row["PricingCategory"], row["BilledCost"], row["ListCost"]) == (category, 1.8, 3.7)
        assert (row["ContractedUnitPrice"], row["ListUnitPrice"]) == (0.9, 1.85)
        assert (row["CommitmentDiscountCategory"] or "", row["CommitmentDiscountType"] or "") == (discount, kind)
        assert row["CommitmentDiscountId"] == ("lab/own" if discount else None)
        assert row["CommitmentDiscountQuantity"] == {"": None, "Usage": 2.0, "Spend": 1.8}[discount]
        assert row["CommitmentDiscountUnit"] == {"": None, "Usage": "Device-Hours", "Spend": "USD"}[discount]
    if discount:
        assert (used["CommitmentDiscountStatus"], unused["CommitmentDiscountStatus"]) == ("Used", "Unused")
        assert (used["ConsumedQuantity"], unused["ConsumedQuantity"]) == (2.0, None)


def test_charges_are_cut_at_the_hours_and_months_of_utc(table: list[dict[str, str]]) -> None:
    """The run begins at 22:30 of the year's last day: 9,000 s are half an hour, an hour and an hour."""
    engine = [row for row in table if row["ResourceName"] == "engine-0" and row["x_State"] == "busy"]
    found = [(row["ChargePeriodStart"], row["BillingPeriodStart"], float(row["PricingQuantity"])) for row in engine]
    assert found == [
        ("2026-12-31T22:00:00Z", "2026-12-01T00:00:00Z", pytest.approx(1.0)),
        ("2026-12-31T23:00:00Z", "2026-12-01T00:00:00Z", pytest.approx(2.0)),
        ("2027-01-01T00:00:00Z", "2027-01-01T00:00:00Z", pytest.approx(2.0)),
    ]
    assert {row["BillingPeriodEnd"] for row in engine} == {"2027-01-01T00:00:00Z", "2027-02-01T00:00:00Z"}
    assert {(row["SkuId"], row["PricingUnit"]) for row in engine} == {("H20", "Device-Hours")}


def test_a_resumed_run_has_the_dates_of_its_lives() -> None:
    utc = UtcTimes([(0.0, 1000.0), (60.0, 90_000.0)])
    assert [utc.unix_s(t) for t in (0.0, 59.0, 60.0, 61.0)] == [1000.0, 1059.0, 90_000.0, 90_001.0]


@given(st.floats(0, 1e6), st.floats(0, 1e5))
def test_hourly_parts_lose_no_second(start: float, seconds: float) -> None:
    parts = list(hourly_parts(start, start + seconds))
    assert math.fsum(part for _, part in parts) == pytest.approx(seconds, abs=1e-6)
    assert all(0 <= part <= HOUR_S for _, part in parts)
    assert [hour for hour, _ in parts] == sorted({hour for hour, _ in parts})


SECONDS = st.floats(0, 20_000).map(lambda s: round(s, 3))
STRETCH = st.tuples(SECONDS, SECONDS).map(sorted)
INTERVALS = st.builds(
    lambda resource, t, state, cause, units, price: Interval(*resource, *t, state, cause, units, price),
    st.sampled_from([("engine", "engine-0"), ("trainer", "trainer-0"), ("unused", "unused-own"), ("decode", "x")]),
    STRETCH,
    st.sampled_from(["busy", "idle", "down"]),
    st.sampled_from(["", "starved"]),
    st.sampled_from([0.5, 1.0, 8.0]),
    st.sampled_from([0.0, 0.0472, 1.85, 3.3]),
)
CALLS = st.builds(
    lambda provider, t0, seconds, start, status, cause, worker, memory: invocation(
        "exact",
        provider,
        t0,
        seconds,
        cold_start_s=start,
        status=status,
        cause=cause,
        worker=worker,
        memory_mb=memory,
    ),
    st.sampled_from(["aws_lambda", "modal", "local", "elsewhere"]),
    SECONDS,
    st.floats(0, 900),
    st.floats(0, 5),
    st.sampled_from(["ok", "timeout"]),
    st.sampled_from(["call", "retry"]),
    st.sampled_from(["", "w0", "w1"]),
    st.sampled_from([512, 2048]),
)
WORKERS = st.builds(
    lambda provider, t, state: WorkerSpan("exact", provider, "w0", *t, state, 1024),
    st.sampled_from(["aws_lambda", "local"]),
    STRETCH,
    st.sampled_from(list(WorkerState)),
)
BILLS = st.builds(
    lambda t, model, cause, tokens: TokenBill(
        "judge", "aws_lambda", t, cause, TokenUsage("api.openai.com", model, 1, *tokens)
    ),
    SECONDS,
    st.sampled_from(["gpt-5-mini", "a-model-without-a-price"]),
    st.sampled_from(["call", "retry"]),
    st.tuples(*[st.integers(0, 100_000)] * 4),
)


@pytest.mark.slow  # writes a ledger per example
@settings(max_examples=25, deadline=None)
@given(st.lists(st.one_of(INTERVALS, CALLS, WORKERS, BILLS), max_size=12), st.booleans())
def test_the_rows_add_up_to_the_cost_report_and_to_the_ledger(rows: list[Any], resumed: bool) -> None:
    """By resource, state and cause, to a thousandth of a cent; the dollars of functions are those of their lines. So do
    the tables over time, by tag, and of a fleet."""
    starts = [(0.0, NEW_YEAR), (5000.0, NEW_YEAR + 90_000.0)][: 1 + resumed]
    with tempfile.TemporaryDirectory() as directory:
        record(Path(directory), rows, starts, TAGGED)
        with LedgerReader(directory) as reader:
            lines = cost_lines(collect(reader, "quick"))
            charged = list(focus_rows(reader, "quick"))
            sums, several = spend_sums(focus_charges(reader)), FleetSums(["team", "month", "pool"])
            for charge in focus_charges(reader):
                several.add(RunCharge("quick", "lab", charge))
            ledger_usd = math.fsum(row.usd for row in rows if isinstance(row, Interval))
    by_charge: dict[tuple[Any, ...], float] = defaultdict(float)
    for line in lines:
        by_charge[line.role, line.resource, str(line.state), line.cause] += line.usd
    for row in charged:
        usd = row["BilledCost"]
        assert isinstance(usd, float)
        by_charge[row["x_Role"], row["ResourceName"], row["x_State"], row["x_Cause"] or ""] -= usd
    assert all(abs(rest) < 1e-5 for rest in by_charge.values()), by_charge
    devices = math.fsum(float(row["BilledCost"]) for row in charged if row["ServiceName"] == "Devices")  # type: ignore[arg-type]
    assert devices == pytest.approx(ledger_usd, abs=1e-5)
    assert all(row.keys() == COLUMNS.keys() for row in charged)
    total = math.fsum(line.usd for line in lines)
    assert math.fsum(sums.by_hour.values()) == pytest.approx(total, abs=1e-5)
    assert math.fsum(group.usd for group in several.groups.values()) == pytest.approx(total, abs=1e-5)
    for tag in ("team", "owner"):
        shown = [dict(zip(["tag", "value", "usd", "share"], row, strict=True)) for row in by_tag(sums).rows]
        own = math.fsum(float(row["usd"] or 0.0) for row in shown if row["tag"] == tag)
        assert own == pytest.approx(total if any(row["tag"] == tag for row in shown) else 0.0, abs=1e-5)


def test_the_command_prints_and_writes_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, out = tmp_path / "quick", tmp_path / "new" / "cost.csv"
    record(run_dir, SAMPLE)
    (run_dir / "resolved.yaml").write_text("")
    assert run(["report", "cost", str(run_dir), "-o", "focus"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("BilledCost,")
    assert run(["report", "cost", str(run_dir), "-o", "focus", "--into", str(out)]) == 0
    assert out.read_text() == printed
    assert run(["report", "cost", str(run_dir), "-o", "json", "--into", str(out)]) == 0
    assert json.loads(out.read_text())["report"] == "cost"
    assert capsys.readouterr().out == ""


@pytest.mark.slow  # needs pyarrow, which the fast suite's environment lacks
def test_parquet_holds_the_same_rows_in_types_of_its_own(tmp_path: Path) -> None:
    from pyarrow import parquet

    record(tmp_path, SAMPLE)
    (tmp_path / "resolved.yaml").write_text("")
    assert run(["report", "cost", str(tmp_path), "-o", "focus", "--into", str(tmp_path / "cost.parquet")]) == 0
    found = parquet.read_table(tmp_path / "cost.parquet")
    with LedgerReader(tmp_path) as reader:
        assert found.to_pylist() == list(focus_rows(reader, tmp_path.name))
    assert str(found.schema.field("ChargePeriodStart").type) == "timestamp[ms, tz=UTC]"
    assert [field.nullable for field in found.schema] == [nullable for _, nullable in COLUMNS.values()]
