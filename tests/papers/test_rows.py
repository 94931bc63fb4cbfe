"""What the suite is for: orders and signs of published comparisons hold in the simulated world."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

import rollart
from benchmarks.papers.__main__ import ROWS, _json, chosen, play
from benchmarks.papers.row import Figure
from benchmarks.papers.table import lines, summary, verdict

FAST = ("AD", "RA-7", "RA-16")
WRONG = {
    "RA-11": {"Qwen3-8B: the mix beats either type", "Qwen3-32B: the mix beats either type"},
    "RA-18": {"apart is faster", "a mixture of experts gains more than a dense model"},
}
"""Claims that the model does not follow; each row says why. One that comes to hold must leave this list."""


def test_a_figure_is_judged_by_the_nearer_edge_of_its_band() -> None:
    inside, above, below = (Figure("x", 0.5, x, most=0.8) for x in (0.6, 0.9, 0.4))
    assert (inside.ratio, above.ratio, below.ratio) == (1.0, pytest.approx(1.125), pytest.approx(0.8))
    assert [verdict(f) for f in (inside, above, below)] == ["15 %", "15 %", "25 %"]
    assert verdict(Figure("x", 1.0, 1.3)) == "miss"
    assert [verdict(Figure("x", 0.0, x, most=0.33)) for x in (0.2, 0.5)] == ["kept", "miss"]
    assert verdict(Figure("x", 1.0, 1.0, tuned=True)) == "tuned"


def test_rows_are_chosen_by_id() -> None:
    assert [r.id for r in chosen("RA-7, AD")] == ["RA-7", "AD"]
    assert chosen(None) == ROWS
    assert len({r.id for r in ROWS}) == len(ROWS)
    with pytest.raises(ValueError, match="no row RA-99"):
        chosen("RA-99")


def test_the_cheapest_rows_hold() -> None:
    done = [play(row, 1) for row in chosen(",".join(FAST))]
    assert all(d.ordered for d in done), [d.row.id for d in done if not d.ordered]
    assert all(f.within(0.01) for f in done[0].found.figures), "Adaptra's example is exact"
    assert json.loads(_json(done))["summary"] == summary(done)
    assert any("RA-7" in line for line in lines(done[1]))


@pytest.mark.slow  # each plays whole runs: up to a minute
@pytest.mark.parametrize("name", [r.id for r in ROWS if r.id not in FAST])
def test_order_and_sign_hold(name: str) -> None:
    done = play(chosen(name)[0], 1)
    assert {c.text for c in done.found.claims if not c.holds} == WRONG.get(name, set())


@pytest.mark.slow  # two runs
def test_a_row_is_the_same_twice() -> None:
    row = chosen("RA-1")[0]
    assert row.play(1) == row.play(1)


def test_the_docs_have_a_line_of_every_row_and_count_them_right() -> None:
    text = (Path(rollart.__file__).parent.parent / "docs" / "simulation.md").read_text()
    table = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if re.match(r"\| R?[A-Z]", line)
    ]
    assert [r.id for r in ROWS] == list(dict.fromkeys(cells[0] for cells in table))
    assert {(c[0], c[1]) for c in table if c[5] == "wrong"} == {(k, text) for k, v in WRONG.items() for text in v}
    judged = Counter(cells[5] for cells in table if float(cells[2].partition("..")[0] or 0))
    near, far, off = judged["15 %"], judged["25 %"], judged["miss"]
    assert f"{near} of {near + far + off} within 15 %, {near + far} within 25 %" in text
