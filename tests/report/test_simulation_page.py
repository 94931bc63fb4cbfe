"""Pages: well-formed, closed to the network, safe whatever names hold, and with the figures of the JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest

from rollart.report.charts import Bar, BarGroup, BarSegment, bar_chart, nice_ticks
from rollart.report.pages import simulation_page
from rollart.report.render import element, page, render
from rollart.report.simulation import FIGURES, SimulationFigures, simulation
from rollart.report.tables import DOLLARS, PERCENT, PLAIN, Report, Table, TableColumn, estimate
from rollart.report.timeline import timeline_of

EVIL = "</title><script>alert(1)</script>\"'&<img src=x onerror=alert(1)>\x00"


def found(schedule: str, seed: int, **more: Any) -> SimulationFigures:
    fields: dict[str, Any] = {
        "schedule": schedule,
        "seed": seed,
        "trace": "t",
        "seconds": 100.0,
        "steps": 4,
        "skipped": 1,
        "step_s": 20.0 + seed,
        "waited_s": 10.0 + seed,
        "train_s": 8.0,
        "publish_s": 2.0,
        "trajectories_per_s": 3.0,
        "tokens_per_s": 900.0,
        "engine_busy": 0.5,
        "usd_per_1k": 40.0,
        "wasted": 0.25,
        "lags": {0: 30, 1: 10},
        "waste": {"engine: idle": 3.0, "engine: sync": 1.0},
        "waits": {"engine: idle": 7200.0},
    }
    return SimulationFigures(**(fields | more))


def parsed(text: str) -> ElementTree.Element:
    assert text.startswith("<!DOCTYPE html>\n")
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def texts(root: ElementTree.Element, name: str) -> list[str]:
    return ["".join(found.itertext()) for found in root.iter(name)]


class Tags(HTMLParser):
    """What a browser would see."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


ALLOWED = {
    "html",
    "head",
    "meta",
    "title",
    "style",
    "body",
    "main",
    "header",
    "h1",
    "h2",
    "h3",
    "p",
    "section",
    "div",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "details",
    "summary",
    "ul",
    "li",
    "span",
    "svg",
    "g",
    "rect",
    "line",
    "path",
    "text",
}


def closed(text: str) -> None:
    """Nothing that runs or loads, in what a browser makes of it."""
    tags = Tags(text).seen
    assert {tag for tag, _ in tags} <= ALLOWED
    keys = {key for _, attributes in tags for key in attributes}
    assert not {key for key in keys if key.startswith("on")} | (keys & {"src", "href", "style", "xlink:href"})
    assert "url(" not in text
    assert "@import" not in text
    policies = [a["content"] for _, a in tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_a_page_with_everything() -> None:
    spans = [("engine", "engine-0", 0.0, 60.0, "busy", 2.0), ("engine", "engine-0", 60.0, 100.0, "idle", 2.0)]
    drawn = timeline_of(100.0, spans, [("lake", 0.0, 50.0, 1.0, 9.0)], [("exact", 5.0, 6.0, 0.1, 0.2)], bins=20)
    all_found = [found(name, seed) for name in ("sync", "rollart") for seed in (0, 1)]
    report = simulation("r", all_found, ("a note",))
    text = simulation_page(report, [replace(drawn, label="sync, seed 0"), replace(drawn, label="rollart, seed 0")])
    closed(text)
    root = parsed(text)
    assert texts(root, "h1") == ["Simulation of r"]
    assert {
        "Step time",
        "Throughput",
        "Cost",
        "Staleness",
        "Idle and waste by cause",
        "Waiting by cause",
        "sync, seed 0",
        "rollart, seed 0",
    } <= set(texts(root, "h3"))
    assert len(list(root.iter("svg"))) == 6 + 2
    assert "a note" in texts(root, "li")


def test_its_figures_are_those_of_the_json() -> None:
    values = {"sync": (21.25, 23.75), "rollart": (10.5, 11.5)}
    all_found = [found(name, n, step_s=v, usd_per_1k=10 * v) for name, own in values.items() for n, v in enumerate(own)]
    report = simulation("r", all_found)
    tables = json.loads(render(report, "json"))["tables"]
    step = next(row for row in tables["figures"] if row["figure"] == "step_s")
    assert (step["sync"], step["rollart"]) == (22.5, 11.0)
    assert step["sync ±"] == pytest.approx(12.7062 * 1.25, rel=1e-4), "Student's t of two seeds"
    titles = texts(parsed(simulation_page(report, [])), "title")
    for name in values:
        drawn = [t for t in titles if t.startswith(f"{name}: ")]
        for told, key in zip(drawn, ("step_s", "trajectories_per_s", "usd_per_1k"), strict=True):
            row = next(row for row in tables["figures"] if row["figure"] == key)
            mean, half = numbers(told)
            assert mean == pytest.approx(row[name], rel=5e-3)
            assert half == pytest.approx(row[f"{name} ±"], rel=0.05, abs=1e-9)
    for n, table in enumerate(("waste", "waits")):
        for row in tables[table]:
            told = [t for t in titles if t.startswith(f"{row['cause']}: sync: ")][
                n if row["cause"] == "engine: idle" else 0
            ]
            assert numbers(told.removeprefix(f"{row['cause']}: "))[0] == pytest.approx(row["sync"], rel=5e-3)


def numbers(title: str) -> tuple[float, float]:
    """Of `NAME: MEAN ± HALF`."""
    mean, half = re.match(r"[^:]*: ([\d.,]+) ± ([\d.,]+)", title).groups()  # type: ignore[union-attr]
    return float(mean.replace(",", "")), float(half.replace(",", ""))


def test_the_json_is_keyed_and_has_every_simulation() -> None:
    report = simulation("r", [found("sync", 0), found("sync", 1), found("areal", 0, waste={}, waits={}, lags={2: 5})])
    tables = json.loads(render(report, "json"))["tables"]
    assert list(tables) == ["figures", "lags", "waste", "waits", "simulations"]
    assert [row["figure"] for row in tables["figures"]] == [f.key for f in FIGURES]
    assert [set(row) for row in tables["lags"]] == [{"lag in versions", "sync", "sync ±", "areal", "areal ±"}] * 3
    assert [row["areal"] for row in tables["lags"]] == [0, 0, 1]
    assert tables["waste"][0]["areal"] == 0
    assert tables["waste"][0]["areal ±"] is None, "one seed has no interval"
    assert [(row["schedule"], row["seed"], row["step_s"]) for row in tables["simulations"]] == [
        ("sync", 0, 20.0),
        ("sync", 1, 21.0),
        ("areal", 0, 20.0),
    ]
    assert "Simulations" not in render(report, "table")
    assert "±" in render(report, "table")


def test_names_are_text_and_nothing_else() -> None:
    spans = [(EVIL, EVIL, 0.0, 10.0, EVIL, 1.0)]
    drawn = timeline_of(10.0, spans, [(EVIL, 0.0, 5.0, 1.0, 1.0)], [(EVIL, 1.0, 2.0, 0.0, 0.0)], pools={EVIL: EVIL})
    report = simulation(EVIL, [found(EVIL, 0, waste={EVIL: 1.0}, waits={EVIL: 9.0}, trace=EVIL)], (EVIL,))
    text = simulation_page(report, [replace(drawn, label=EVIL)])
    closed(text)
    assert EVIL.replace("\x00", "\ufffd") in texts(parsed(text), "li")
    table = Table("t", EVIL, (TableColumn(EVIL), TableColumn("n", "number")), ((EVIL, 1),))
    closed(page(Report(EVIL, EVIL, (table,), (EVIL,))))


def test_nothing_to_draw() -> None:
    text = simulation_page(simulation("r", [found("sync", 0, lags={}, waste={}, waits={}, usd_per_1k=0.0)]), [])
    closed(text)
    assert texts(parsed(text), "p").count("nothing") == 3
    closed(page(Report("cost", "r", (Table("t", "T", (TableColumn("a"),), ()),))))


def test_an_interval_is_cut_before_it_hides_the_bars() -> None:
    """Two seeds far apart have an interval of many times their mean."""
    svg = bar_chart("t", [BarGroup("a", (Bar("a", (BarSegment("a", 10.0, "s0"),), 1000.0),))])
    (rect,) = ElementTree.fromstring(str(svg)).iter("rect")
    assert float(rect.get("width") or 0) > 200


@pytest.mark.parametrize("most", [1e-6, 0.03, 1.0, 7.3, 48.0, 4999.0, 5.3e9])
def test_ticks_are_round_and_few(most: float) -> None:
    ticks = nice_ticks(most)
    assert 3 <= len(ticks) <= 8
    assert ticks[0] == 0
    assert ticks[-1] <= most * 1.001
    assert f"{ticks[1]:.0e}"[0] in "125"


def test_markup_is_escaped_by_construction() -> None:
    node = element("text", "a < b & c", None, class_='x"y', data_n=1.50, gone=None)
    assert str(node) == '<text class="x&quot;y" data-n="1.5">a &lt; b &amp; c</text>'
    assert str(element("meta", charset="utf-8")) == '<meta charset="utf-8"/>'
    ElementTree.fromstring(str(element("p", "".join(map(chr, range(0x300))) + "\ud800\uffff")))


@pytest.mark.parametrize(
    ("value", "half", "unit", "told"),
    [
        (1.0012, 0.0569, PLAIN, "1.001 ± 0.057"),
        (907.3, 27.13, PLAIN, "907 ± 27"),
        (22.5, 15.88, PLAIN, "22.5 ± 15.9"),
        (0.878, 0.00417, PERCENT, "87.80% ± 0.42%"),
        (156.1, 2e-12, PLAIN, "156 ± 0"),
        (0.0, 0.0, PLAIN, "0"),
        (12345.6, 804.0, PLAIN, "12,346 ± 804"),
        (0.583, None, PLAIN, "0.583"),
        (3.2, None, DOLLARS, "$3.20"),
        (0.0, 0.5, DOLLARS, "$0.00 ± 0.50"),
        (0.0012, None, DOLLARS, "0.12 ¢"),
        (1240.3, 181.0, DOLLARS, "$1,240 ± 181"),
        (0.0000411, 0.000002, DOLLARS, "0.00411 ¢ ± 0.00020"),
        (0.125, None, PERCENT, "12.5%"),
        (4310.2, None, DOLLARS, "$4,310"),
        (-3.14159, 0.02, PLAIN, "-3.142 ± 0.020"),
    ],
)
def test_a_mean_has_the_digits_that_its_interval_bears(value: float, half: float | None, unit: str, told: str) -> None:
    assert estimate(value, half, unit) == told
