"""The tokens of language models in the ledger, the budget and the cost report: each once, at the endpoint's price."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from rollart.launch.functions import LedgerMeter, units_by_provider
from rollart.ledger.database import FILE, UPGRADES
from rollart.ledger.reader import LedgerReader
from rollart.ledger.store import Ledger
from rollart.report.cost import cost, cost_lines
from rollart.report.rows import collect
from rollart.settings.prices import PriceEntry, PriceList
from serverless.meter import NO_SCORE, TokenBill
from serverless.types import Cause, Invocation, TokenUsage
from tests.report.test_report import cells

UNITS = {"input": 2.0, "cached": 0.5, "output": 8.0}


def prices(*names: str) -> PriceList:
    entries = [
        PriceEntry(name=name, unit=f"million-{kind}-tokens", usd=usd, source="the test", date=dt.date(2026, 7, 1))
        for name in names
        for kind, usd in UNITS.items()
    ]
    local = PriceEntry(name="local", unit="GB-second", usd=1.0, source="the test", date=dt.date(2026, 7, 1))
    return PriceList(prices=[local, *entries])


def bill(usage: TokenUsage, cause: str = Cause.CALL, function: str = "judge") -> TokenBill:
    return TokenBill(function, "local", 1.0, cause, usage)


JUDGED = TokenUsage("judge.example:8000", "org/model:8b", 3, 1_000_000, 200_000, 40_000, 100_000)
USD = 2.0 + 0.2 * 0.5 + 0.04 * 2.0 + 0.8
"""By hand; the cache has no price for writes, which cost as much as other input."""


@pytest.mark.parametrize("name", ["org/model:8b", "judge.example:8000/org/model:8b"])
def test_tokens_are_priced_by_model_at_its_endpoint_or_anywhere(name: str) -> None:
    listed = prices(name)
    assert listed.token_usd(JUDGED) == pytest.approx(USD)
    assert listed.prices_tokens(JUDGED)
    other = TokenUsage("other.example", "org/other", 1, 1000)
    assert (listed.token_usd(other), listed.prices_tokens(other)) == (0.0, False)


def test_the_price_at_the_endpoint_comes_first() -> None:
    cheap = [entry.model_copy(update={"usd": 0.0}) for entry in prices("org/model:8b").prices]
    listed = PriceList(prices=[*cheap, *prices("judge.example:8000/org/model:8b").prices])
    assert listed.token_usd(JUDGED) == pytest.approx(USD)


def written(directory: Path, *bills: TokenBill) -> list[float]:
    """Dollars spent after each life of a run."""
    spent = []

    async def main() -> None:
        for life in range(2):
            with Ledger(directory, clock=lambda: 0.0, prices=prices("org/model:8b"), inline=True) as ledger:
                spent.append(ledger.spent_usd)
                if not life:
                    meter = LedgerMeter(ledger)
                    for one in bills:
                        meter.tokens(one)
                    await ledger.flush()
                    spent.append(ledger.spent_usd)

    asyncio.run(main())
    return spent


def test_the_budget_counts_tokens_in_every_life(tmp_path: Path) -> None:
    assert written(tmp_path, bill(JUDGED), bill(JUDGED, NO_SCORE)) == pytest.approx([0.0, 2 * USD, 2 * USD])


def test_the_report_has_each_token_and_dollar_once(tmp_path: Path) -> None:
    free = TokenUsage("other.example", "unknown", 1, 500, 0, 0, 50)
    written(tmp_path, bill(JUDGED), bill(JUDGED, NO_SCORE), bill(free, function="second"))
    with LedgerReader(tmp_path) as reader:
        run = collect(reader, "r")
    run = type(run)(**{**{name: getattr(run, name) for name in run.__slots__}, "prices": prices("org/model:8b")})
    lines = cost_lines(run)
    assert sum(line.usd for line in lines) == pytest.approx(2 * USD)
    assert {(line.resource, line.cause): line.usd for line in lines if line.usd} == pytest.approx(
        {
            ("judge.example:8000/org/model:8b:judge", ""): USD,
            ("judge.example:8000/org/model:8b:judge", "tokens without a score"): USD,
        }
    )
    report = cost(run)
    table = {(row["function"], row["cause"]): row for row in cells(report, "tokens")}
    assert [table["judge", "call"][k] for k in ("requests", "input", "cached", "cache_write", "output")] == [
        3,
        1_000_000,
        200_000,
        40_000,
        100_000,
    ]
    assert (table["second", "call"]["usd"], table["second", "call"]["cost"]) == (None, "unpriced")
    billed = [row for row in cells(report, "prices") if row["cost"] == "billed"]
    assert sum(row["usd"] for row in billed) == pytest.approx(2 * USD)
    assert any(note.startswith("other.example/unknown: no price is known") for note in report.notes)


def test_calls_without_an_answer_are_pointed_out_where_tokens_are_billed(tmp_path: Path) -> None:
    with Ledger(tmp_path, clock=lambda: 0.0, inline=True) as ledger:
        for function in ("judge", "exact"):
            ledger.invocation(Invocation(function, "local", "w", 0, 1, 0.0, 1.0, 512, 1, "timeout"))
        ledger.tokens(bill(JUDGED))
    with LedgerReader(tmp_path) as reader:
        notes = cost(collect(reader, "r")).notes
    assert any(note.startswith("1 calls of judge gave no answer") for note in notes)


def test_a_file_of_the_version_before_has_no_tokens_and_is_upgraded(tmp_path: Path) -> None:
    with Ledger(tmp_path, clock=lambda: 0.0, inline=True):
        pass
    with contextlib.closing(sqlite3.connect(tmp_path / FILE)) as connection, connection:
        connection.execute("DROP TABLE tokens")
        connection.execute("ALTER TABLE trajectories DROP COLUMN reward_s")
        connection.execute("UPDATE meta SET value = '4' WHERE key = 'schema_version'")
    assert 4 in UPGRADES
    with LedgerReader(tmp_path) as reader:
        assert reader.token_sums() == []
    written(tmp_path, bill(JUDGED))
    with LedgerReader(tmp_path) as reader:
        (row,) = reader.token_sums()
    assert (row.function, row.cause, row.usage) == ("judge", "call", JUDGED)


def test_models_are_no_providers_of_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    listed: Any = prices("org/model:8b")
    monkeypatch.setattr("rollart.launch.functions.load_prices", lambda path: listed)
    assert units_by_provider() == {"local": {"GB-second": 1.0}}
