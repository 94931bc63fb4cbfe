"""How cells are read by people."""

from __future__ import annotations

from rollart.report.tables import TableColumn, cell_text


def test_milliseconds_that_are_none_are_none() -> None:
    wait = TableColumn("wait", "ms")
    assert [cell_text(v, wait) for v in (0.0, 2.132e-11, -3e-9, 0.25, 12.5, 1234.5)] == [
        "0",
        "0",
        "0",
        "0.25",
        "12.5",
        "1,234",
    ]
