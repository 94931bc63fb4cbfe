"""The pages of the dashboard, from values to markup. Pure.

Every page is whole without its script, which draws the charts, replaces the page's main part when the run has gone on,
and lets a timeline be zoomed with the pointer. Elements escape their texts and attributes (`report.render`), so that
what a model wrote stays text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote, urlencode

from rollart.dashboard import values
from rollart.dashboard.readings import RunSnapshot
from rollart.dashboard.values import Plot
from rollart.report.charts import (
    LEFT,
    PAINT,
    RIGHT,
    TIMELINE_WIDTH,
    Bar,
    BarGroup,
    BarSegment,
    bar_chart,
    duration,
    legend,
)
from rollart.report.compare.alarms import alarms_of, alarms_table
from rollart.report.cost import cost
from rollart.report.curve import curve
from rollart.report.functions import calls
from rollart.report.pages import cost_charts, timeline_card
from rollart.report.render import Child, MarkupElement, card, element, notes, table_of, tables_of
from rollart.report.tables import DOLLARS, PERCENT, Report, Table, estimate, figure
from rollart.report.timeline import CALLS, TRAJECTORIES, TURNS, Timeline
from rollart.report.trajectories.view import message_cards
from rollart.report.utilization import utilization

TABS = ("overview", "cost", "utilization", "timeline", "trajectories", "engines", "functions", "environments")

ENGINE_TABLES = ("engines", "efficiency", "handoffs", "concurrency", "updates", "broadcasts")
FUNCTION_TABLES = ("health", "refused")
ENVIRONMENT_TABLES = ("environments", "places", "nodes")
RESOURCE_TABLES = ("resources", "down", "rates", "domains", "shares", "cancelled", "filtered")
"""Tables of the utilization report by the page that shows them."""

SORTS = ("end", "tokens", "reward", "usd")

PAGE_ROWS = 50
"""Trajectories on a page."""

AT_END = "at the last step, by forecast"

MOST_COMPARED = 8
"""Runs beside each other: as many as there are colours."""


@dataclass(frozen=True, slots=True)
class PageHead:
    """What surrounds the main part of a page. `changes`: the address of the events that replace it; '' for a page that
    stays as it is."""

    title: str
    run: str = ""
    state: str = ""
    tab: str = ""
    changes: str = ""
    single: bool = False
    """The dashboard shows this run alone."""


@dataclass(frozen=True, slots=True)
class TrajectoryFilter:
    """The trajectories that a page lists: those from row `offset` on."""

    domain: str = ""
    outcome: str = ""
    sort: str = SORTS[0]
    offset: int = 0

    def query(self, offset: int) -> str:
        given = {"domain": self.domain, "outcome": self.outcome, "sort": self.sort, "offset": offset or ""}
        return urlencode({name: value for name, value in given.items() if value})


def document(head: PageHead, parts: Sequence[Child]) -> str:
    """A whole page."""
    metas = (
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{head.title} · rollart"),
        *(element("link", rel="stylesheet", href=f"/static/{name}.css") for name in ("report", "uplot", "dashboard")),
        *(element("script", src=f"/static/{name}.js", defer="") for name in ("uplot", "dashboard")),
    )
    tabs = [
        element("a", tab, href=tab_path(head.run, tab), aria_current="page" if tab == head.tab else None)
        for tab in (TABS if head.run else ())
    ]
    top = element(
        "header",
        element("a", "rollart", href="/", class_="brand")
        if not head.single
        else element("span", "rollart", class_="brand"),
        element("h1", head.title),
        element("span", head.state, class_=f"state {head.state}") if head.state else None,
        element("nav", *tabs) if tabs else None,
        class_="top",
    )
    body = element("body", top, element("main", *parts, id="live"), data_changes=head.changes if head.changes else None)
    return f"<!DOCTYPE html>\n{element('html', element('head', *metas), body, lang='en')}\n"


def run_path(run: str) -> str:
    return f"/runs/{quote(run, safe='')}"


def tab_path(run: str, tab: str) -> str:
    return run_path(run) if tab == TABS[0] else f"{run_path(run)}/{tab}"


def trajectory_path(run: str, id_: str) -> str:
    return f"{tab_path(run, 'trajectories')}/{quote(id_, safe='')}"


def figures(shown: Sequence[tuple[str, str | None]]) -> MarkupElement:
    """Key figures in a row; those without a value are left out."""
    items = [element("div", element("dt", name), element("dd", text)) for name, text in shown if text is not None]
    return element("dl", *items, class_="figures")


def plot_card(plot: Plot) -> MarkupElement:
    """A chart, drawn by the page's script."""
    data = json.dumps(plot.to_json(), allow_nan=False, separators=(",", ":"))
    drawn = element(
        "div",
        class_="plot",
        id=f"plot-{plot.title}".replace(" ", "-"),
        data_plot=data,
        role="img",
        aria_label=plot.title,
    )
    return card(plot.title, drawn, under=plot.under or f"by {plot.x_label}")


def cards(plots: Sequence[Plot]) -> MarkupElement | None:
    return element("div", *map(plot_card, plots), class_="cards spaced") if plots else None


def _metrics(plots: Sequence[Plot]) -> Iterator[Child]:
    """The trainer's metrics: those that are looked at most, and the others on demand."""
    yield cards([plot for plot in plots if values.is_first(plot)])
    others = cards([plot for plot in plots if not values.is_first(plot)])
    if others is not None:
        yield element(
            "details", element("summary", "Further metrics of the trainer"), others, id="metrics", class_="card"
        )


def table_card(table: Table) -> MarkupElement:
    return card(table.title, table_of(table))


def not_yet(snapshot: RunSnapshot) -> list[Child]:
    """The page of a run without a ledger."""
    why = "the run is starting: it has no ledger yet" if snapshot.running else "it ended before it had a ledger"
    return [element("p", why, class_="muted")]


def overview(snapshot: RunSnapshot) -> Iterator[Child]:
    """Key figures, alarms, curves and where the dollars go."""
    rows = snapshot.rows
    assert rows is not None
    usd, steps = values.total_usd(rows), snapshot.settings.get("steps")
    facts = rows.facts
    yield figures(
        [
            ("step", f"{facts.step or 0:,}" + (f" of {steps:,}" if steps else "")),
            ("policy version", None if facts.version is None else f"v{facts.version:,}"),
            ("run time", duration(facts.seconds)),
            ("trained trajectories", f"{facts.trained_samples:,}"),
            ("waiting trajectories", f"{facts.live_samples:,}"),
            ("billed so far", figure(usd, DOLLARS)),
            ("per hour", figure(usd * 3600 / facts.seconds, DOLLARS) if facts.seconds else None),
            (AT_END, _at_end(snapshot)),
        ]
    )
    found = alarms_table([*alarms_of(rows)])
    yield card(found.title, table_of(found) if found.rows else element("p", "none", class_="muted"))
    lost = values.lost_work(snapshot)
    if lost.rows:
        yield table_card(lost)
    step = values.step_plot(snapshot.steps)
    yield element(
        "div",
        *map(plot_card, [*values.success_plots([rows]), *([step] if step else [])]),
        _states(values.role_states(rows)),
        *cost_charts(cost(rows))[:2],
        class_="cards spaced",
    )
    yield from _metrics(values.metric_plots([rows]))
    yield table_card(next(t for t in curve(rows).tables if t.name == "summary"))
    if snapshot.faults:
        yield table_card(values.last_faults(snapshot.faults))


def _at_end(snapshot: RunSnapshot) -> str | None:
    forecast = values.at_end(snapshot)
    return None if forecast is None else estimate(forecast.usd, forecast.half, DOLLARS)


def _states(rows_states: Mapping[str, Mapping[str, float]]) -> MarkupElement:
    """Shares of device time by role."""
    painted = [(state, PAINT[state]) for state in PAINT]
    groups = []
    for role, states in rows_states.items():
        segments = tuple(BarSegment(name, states[state], paint) for state, (paint, name) in painted if state in states)
        groups.append(BarGroup(role, (Bar(role, segments, value=states.get("busy", 0.0)),)))
    seen = {state for states in rows_states.values() for state in states}
    keys = legend((name, paint) for state, (paint, name) in painted if state in seen)
    return card(
        "Utilization",
        keys,
        bar_chart("Utilization", groups, unit=PERCENT),
        under="share of device time, busy at the right",
    )


def cost_page(snapshot: RunSnapshot) -> Iterator[Child]:
    """The cost report, with its charts."""
    assert snapshot.rows is not None
    report = cost(snapshot.rows)
    usd = values.total_usd(snapshot.rows)
    yield figures([("billed so far", figure(usd, DOLLARS)), (AT_END, _at_end(snapshot))])
    yield element("div", *cost_charts(report), class_="cards spaced")
    yield from tables_of(report)
    yield from notes(report.notes)


def table_cards(report: Report, names: Sequence[str]) -> list[MarkupElement]:
    """Those of these tables of a report that are for people and have rows."""
    return [table_card(t) for t in report.tables if t.name in names and t.people and t.rows]


def utilization_page(snapshot: RunSnapshot) -> Iterator[Child]:
    assert snapshot.rows is not None
    yield element("div", _states(values.role_states(snapshot.rows)), class_="cards spaced")
    yield from table_cards(utilization(snapshot.rows), RESOURCE_TABLES)


def engines_page(snapshot: RunSnapshot) -> Iterator[Child]:
    assert snapshot.rows is not None
    plots = values.engine_plots(snapshot.rows)
    yield cards(plots) or element("p", "engines report their counters every 10 s: no report yet", class_="muted")
    yield from table_cards(utilization(snapshot.rows), ENGINE_TABLES)


def functions_page(snapshot: RunSnapshot, found: Timeline) -> Iterator[Child]:
    """Concurrent calls, cold starts, queues and faults of functions."""
    assert snapshot.rows is not None
    yield cards(values.band_plots(found, CALLS))
    yield table_card(calls(snapshot.rows))
    yield from table_cards(utilization(snapshot.rows), FUNCTION_TABLES)
    yield from table_cards(cost(snapshot.rows), ("function_workers", "tokens", "savings", "stages"))


def environments_page(snapshot: RunSnapshot, found: Timeline) -> Iterator[Child]:
    """Concurrent trajectories by phase, and their environments' hosts."""
    assert snapshot.rows is not None
    yield cards(values.band_plots(found, TRAJECTORIES))
    yield from table_cards(utilization(snapshot.rows), ("domains", *ENVIRONMENT_TABLES))


def timeline_page(run: str, found: Timeline, *, whole: bool) -> Iterator[Child]:
    """The timeline; a stretch of it is dragged over, or typed."""
    if not found.bands:
        yield element("p", "nothing was recorded in this stretch", class_="muted")
        return
    begins, ends = found.begins, found.begins + found.seconds
    inputs = [
        element("label", f"{label} ", element("input", name=name, value=f"{at:.6g}", inputmode="decimal", size="10"))
        for name, label, at in (("t0", "from second", begins), ("t1", "to", ends))
    ]
    path = tab_path(run, "timeline")
    wider = urlencode({"t0": f"{max(0.0, begins - found.seconds):.6f}", "t1": f"{ends + found.seconds:.6f}"})
    yield element(
        "form",
        *inputs,
        element("button", "zoom"),
        element("a", "zoom out", href=f"{path}?{wider}") if not whole else None,
        element("a", "whole run", href=path) if not whole else None,
        element("span", "or drag over the chart", class_="muted"),
        action=path,
        class_="bar",
    )
    yield element(
        "div",
        timeline_card(found),
        class_="zoom",
        data_begins=begins,
        data_seconds=found.seconds,
        data_left=LEFT / TIMELINE_WIDTH,
        data_right=1.0 - RIGHT / TIMELINE_WIDTH,
    )
    links = [
        element("li", element("a", band.name, href=trajectory_path(run, band.name)), f" {band.members} turns")
        for band in found.bands
        if band.kind == TURNS
    ]
    if links:
        yield card("Trajectories in this stretch", element("ul", *links, class_="links"))


def trajectories_page(
    run: str, chosen: TrajectoryFilter, listed: Table, count: int, domains: Sequence[str], outcomes: Sequence[str]
) -> Iterator[Child]:
    """A page of the trajectory list; `count`: how many there are in all."""
    path = tab_path(run, "trajectories")
    yield element(
        "form",
        _select("domain", chosen.domain, ("", *domains)),
        _select("outcome", chosen.outcome, ("", *outcomes)),
        _select("sort", chosen.sort, SORTS),
        element("button", "show"),
        action=path,
        class_="bar",
    )
    last = min(count, chosen.offset + len(listed.rows))
    before, after = chosen.offset - PAGE_ROWS, chosen.offset + PAGE_ROWS
    pager = element(
        "p",
        f"{min(chosen.offset + 1, last):,} to {last:,} of {count:,} trajectories ",
        element("a", "previous", href=f"{path}?{chosen.query(before)}", rel="prev") if before >= 0 else None,
        " ",
        element("a", "next", href=f"{path}?{chosen.query(after)}", rel="next") if after < count else None,
        class_="pager",
    )
    links = [element("a", str(row[0]), href=trajectory_path(run, str(row[0]))) for row in listed.rows]
    yield pager
    yield card(listed.title, table_of(listed, links), under="the largest by the sort first; tokens are sampled ones")


def _select(name: str, chosen: str, options: Sequence[str]) -> MarkupElement:
    items = [
        element("option", option or "all", value=option, selected="" if option == chosen else None)
        for option in options
    ]
    return element("label", f"{name} ", element("select", *items, name=name))


def trajectory_page(run: str, report: Report, decisions: Report, found: Timeline) -> Iterator[Child]:
    """A trajectory: its phases, its messages, and why it went as it did."""
    yield element("p", element("a", "all trajectories", href=tab_path(run, "trajectories")))
    yield timeline_card(found)
    yield from message_cards(report)
    for own, name in ((decisions, "decisions"), (report, "rewards"), (report, "phases"), (report, "summary")):
        yield from table_cards(own, (name,))
    yield from notes([*report.notes, *decisions.notes])


def runs_page(snapshots: Sequence[RunSnapshot]) -> Iterator[Child]:
    """Runs with their state; those that are ticked are shown side by side."""
    if not snapshots:
        yield element("p", "no runs yet", class_="muted")
        return
    heads = [
        element(
            "span",
            element("input", type="checkbox", name="run", value=one.name, aria_label=f"compare {one.name}"),
            element("a", one.name, href=run_path(one.name)),
        )
        for one in snapshots
    ]
    table = table_of(values.runs_table(snapshots), heads)
    yield element("form", card("Runs", table), element("button", "compare"), action="/compare")


def compare_page(snapshots: Sequence[RunSnapshot]) -> Iterator[Child]:
    """Curves, figures and dollars of several runs."""
    rows = [one.rows for one in snapshots if one.rows is not None]
    keys = element("p", *(element("a", f"{one.name} ({one.state}) ", href=run_path(one.name)) for one in snapshots))
    yield keys
    if not rows:
        yield element("p", "none of them has a ledger", class_="muted")
        return
    yield cards(values.success_plots(rows))
    reports = {one.run: {t.name: t for r in (cost(one), utilization(one)) for t in r.tables} for one in rows}
    for name, width, value in (
        ("total", 2, "value"),
        ("by_role", 1, "usd"),
        ("waste", 2, "usd"),
        ("rates", 1, "per_second"),
    ):
        found = values.side_by_side({run: own[name] for run, own in reports.items()}, keys=width, value=value)
        yield card(found.title, table_of(found), under=value.replace("_", " "))
    yield from _metrics(values.metric_plots(rows))


def failure(text: str) -> list[Child]:
    return [element("p", text, role="alert")]
