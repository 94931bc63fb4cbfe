"""Dollars for people: a unit that fits, and no exponent."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.money import dollars, dollars_between, unit_price
from rollart.report.tables import Table, TableColumn, rows_for_people


def test_dollars_have_a_unit_that_fits() -> None:
    shown = [dollars(usd) for usd in (0, 1240.5, 12.4, 0.5, 0.1234, 0.0411, 0.00411, 4.11e-5, 4.11e-9, -0.5, -3e-9)]
    assert shown == [
        *("$0", "$1,240.50", "$12.40", "$0.50", "$0.123", "$0.0411", "0.411 ¢", "0.00411 ¢"),
        *("< 0.0001 ¢", "-$0.50", "> -0.0001 ¢"),
    ]
    prices = [unit_price(usd) for usd in (0, 1.85, 5.28, 0.0472, 1.64e-4, 1.66667e-5, 2e-7, 1234.5)]
    assert prices == [
        *("$0.00", "$1.85", "$5.28", "$0.0472", "$0.164 / 1k", "$16.6667 / 1M", "$0.20 / 1M", "$1,234.50"),
    ]
    assert dollars_between(1240.2, 181.3) == "$1,240 ± 181"
    assert dollars_between(0.0000411, 0.000002) == "0.00411 ¢ ± 0.00020"


@settings(max_examples=60)
@given(st.floats(1e-9, 1e9))
def test_no_dollar_has_an_exponent(usd: float) -> None:
    for shown in (dollars(usd), unit_price(usd), dollars_between(usd, usd / 3)):
        assert "e" not in shown
    if usd >= 1e-6:
        text = dollars(usd)
        number = float(text.strip("$¢ ").replace(",", "")) / (100.0 if "¢" in text else 1.0)
        assert number == pytest.approx(usd, rel=0.006)


def test_values_are_shown_by_the_unit_of_their_row() -> None:
    columns = (TableColumn("unit"), TableColumn("value", "value"))
    rows: tuple[tuple[str, float], ...] = (("USD", 4.11e-5), ("share", 0.25), ("count", 12.0), ("s", 0.5))
    shown = [row[1] for row in rows_for_people(Table("t", "T", columns, rows))]
    assert shown == ["0.00411 ¢", "25.0%", "12", "0.5"]
