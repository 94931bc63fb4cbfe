"""Reports as text: tables and pages for people, JSON and CSV for machines.

A page is one self-contained HTML file, without network or scripts. It forbids itself to load or run anything (its
content security policy), follows the reader's light or dark theme, and prints. Colours are those of Okabe and Ito,
which are distinguishable with any kind of colour vision.

HTML and SVG are values: a tree of elements whose texts and attributes are escaped by construction. Names from specs and
ledgers can contain any characters; no function here takes a string as markup. The output is well-formed both as XML and
as HTML.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rollart.report.tables import Report, Table, TableColumn, for_people, rows_for_people

SCHEMA_VERSION = 2
"""Version of the JSON: grows when a key is removed or changes its meaning, not when a key is added."""

LEAST_TEXT = 7
"""Least width of a text that may be broken."""

GAP = 3
"""Columns between two cells."""

POLICY = "default-src 'none'; style-src 'unsafe-inline'"

STYLE = """
:root{color-scheme:light dark;--bg:#f5f6f8;--card:#fff;--ink:#1a1f26;--muted:#5a6572;--line:#e1e5ea;--grid:#e9ecf0;
--idle:#d3d9e0;--busy:#0072b2;--sync:#e69f00;--startup:#cc79a7;--down:#d55e00;--step:#009e73;--elsewhere:#56b4e9;
--c0:#0072b2;--c1:#e69f00;--c2:#009e73;--c3:#cc79a7;--c4:#56b4e9;--c5:#d55e00;--c6:#8c8c8c;--c7:#b8a900}
@media (prefers-color-scheme:dark){:root{--bg:#0e1217;--card:#161b22;--ink:#e6eaf0;--muted:#98a4b1;--line:#2a323c;
--grid:#232a33;--idle:#39434f;--busy:#3d9bd6;--sync:#e8ab26;--startup:#d28fb5;--down:#e4793a;--step:#1fb28a;
--elsewhere:#7cc4ee;--c0:#3d9bd6;--c1:#e8ab26;--c2:#1fb28a;--c3:#d28fb5;--c4:#7cc4ee;--c5:#e4793a;--c6:#a3a3a3;
--c7:#d8ca3c}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:14px/1.5 -apple-system,'Segoe UI',Roboto,'Helvetica Neue','Noto Sans',Arial,sans-serif}
main{max-width:1240px;margin:0 auto;padding:28px 24px 48px}
header{margin-bottom:22px}
h1{font-size:24px;line-height:1.25;margin:0 0 4px;font-weight:650}
h2{font-size:18px;margin:32px 0 12px;font-weight:650}
h3{font-size:14px;margin:0;font-weight:650}
p{margin:0}
.muted,.sub{color:var(--muted)}
.sub{font-size:12.5px;margin:1px 0 8px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:16px}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px;min-width:0;
break-inside:avoid;margin:0 0 16px}
.cards .card{margin:0}
.spaced{margin-bottom:16px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:5px 10px;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;color:var(--muted);font-size:12.5px;white-space:nowrap}
tbody tr:last-child td{border-bottom:0}
td.n,th.n{text-align:right;white-space:nowrap}
th:first-child,td:first-child{padding-left:2px}
details{margin:0 0 16px}
summary{cursor:pointer;font-weight:650}
summary h3{display:inline}
details .scroll{margin-top:10px}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 16px;margin:0 0 8px;padding:0;font-size:12.5px;
color:var(--muted)}
.swatch{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px}
.chart{display:block;width:100%;height:auto;font-size:12px}
.chart text{fill:var(--ink)}
.chart .tick{fill:var(--muted);font-size:11px}
.chart .value{font-size:11.5px;font-variant-numeric:tabular-nums}
.chart .grid{stroke:var(--grid)}
.chart .base{stroke:var(--muted);stroke-opacity:.6}
.chart .whisker{stroke:var(--ink);fill:none;stroke-width:1.3}
.chart .halo{stroke:var(--card);fill:none;stroke-width:3.2;stroke-opacity:.75}
.chart .hover{fill:var(--ink);fill-opacity:0}
.chart .hover:hover{fill-opacity:.14}
.chart .bar:hover rect{opacity:.82}
.wide{min-width:820px}
ul.notes{color:var(--muted);font-size:12.5px;padding-left:18px;margin:8px 0 0}
.notes li{overflow-wrap:anywhere}
.message{white-space:pre-wrap;overflow-wrap:anywhere}
.busy{fill:var(--busy);background:var(--busy)}.sync{fill:var(--sync);background:var(--sync)}
.idle{fill:var(--idle);background:var(--idle)}.startup{fill:var(--startup);background:var(--startup)}
.down{fill:var(--down);background:var(--down)}.step{fill:var(--step);background:var(--step)}
.elsewhere{fill:var(--elsewhere);background:var(--elsewhere)}.other{fill:var(--muted);background:var(--muted)}
.s0{fill:var(--c0);background:var(--c0)}.s1{fill:var(--c1);background:var(--c1)}
.s2{fill:var(--c2);background:var(--c2)}.s3{fill:var(--c3);background:var(--c3)}
.s4{fill:var(--c4);background:var(--c4)}.s5{fill:var(--c5);background:var(--c5)}
.s6{fill:var(--c6);background:var(--c6)}.s7{fill:var(--c7);background:var(--c7)}
@media print{body{background:var(--card)}main{max-width:none;padding:0}}
"""
"""The style sheet has no `<`, `>`, `&` or `"`, which HTML and XML parse differently here."""

VOID = frozenset({"br", "input", "link", "meta"})
"""HTML elements that have no end tag."""

FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
"""Characters that XML 1.0 forbids."""


def render(report: Report, form: str, *, width: int = 110, colour: bool = False) -> str:
    """The report as `table`, `json`, `csv` or `html`, ending in a newline. `width` and `colour` are for tables."""
    match form:
        case "json":
            return json.dumps(_json(report), indent=2, ensure_ascii=False) + "\n"
        case "csv":
            return _csv(report)
        case "table":
            return _text(report, width, colour)
        case "html":
            return page(report)
        case _:
            raise ValueError(f"format {form!r} (rule: one of table, json, csv, html)")


def _json(report: Report) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "report": report.kind,
        "run": report.run,
        "tables": {
            table.name: [
                {column.name: cell for column, cell in zip(table.columns, row, strict=True)} for row in table.rows
            ]
            for table in report.tables
        },
        "notes": list(report.notes),
    }


def _csv(report: Report) -> str:
    """Long form, one cell a line, so that tables of different columns fit in one file."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["run", "report", "table", "row", "column", "value"])
    for table in report.tables:
        for n, row in enumerate(table.rows):
            for column, cell in zip(table.columns, row, strict=True):
                writer.writerow([report.run, report.kind, table.name, n, column.name, "" if cell is None else cell])
    return out.getvalue()


def _text(report: Report, width: int, colour: bool) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=colour, no_color=not colour, highlight=False)
    console.print(Text(f"{report.kind} of {report.run}", style="bold"))
    for table in filter(lambda t: t.people, report.tables):
        console.print()
        console.print(Text(table.title, style="bold"))
        if not table.rows:
            console.print("  nothing yet")
            continue
        shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        table = for_people(table)
        cells = rows_for_people(table)
        needed = [_needed(column, [row[n] for row in cells]) for n, column in enumerate(table.columns)]
        gaps = GAP * (len(needed) - 1)
        tight = sum(needed) + gaps > width
        folded = [LEAST_TEXT if c.kind == "text" else least for c, least in zip(table.columns, needed, strict=True)]
        # The first column names the row, and is copied into the next command.
        named = needed[0] + sum(folded[1:]) + gaps <= width
        for n, (column, least) in enumerate(zip(table.columns, needed, strict=True)):
            text = column.kind == "text"
            whole = not column.wrap and (not tight or (n == 0 and named))
            shown.add_column(
                Text(column.name.replace("_", " ")),
                justify="left" if text else "right",
                overflow="fold",
                min_width=None if text else least,
                no_wrap=text and whole,
            )
        for row in cells:
            shown.add_row(*(Text(cell) for cell in row))
        console.print(shown)
    for note in report.notes:
        console.print(Text(note, style="dim"))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _needed(column: TableColumn, cells: Sequence[str]) -> int:
    """Least width of a column: headings may break between words, numbers never, texts only if the whole table is too
    wide."""
    heading = max(map(len, column.name.split("_")))
    return heading if column.wrap else max(heading, *map(len, cells))


@dataclass(frozen=True, slots=True)
class MarkupElement:
    """An element. `str()` of it is its markup."""

    name: str
    attributes: tuple[tuple[str, str], ...]
    children: tuple[MarkupElement | str, ...]

    def __str__(self) -> str:
        return "".join(self._pieces())

    def _pieces(self) -> Iterator[str]:
        yield f"<{self.name}"
        for key, value in self.attributes:
            yield f' {key}="{_escaped(value)}"'
        if self.name in VOID:
            yield "/>"
            return
        yield ">"
        for child in self.children:
            if isinstance(child, str):
                yield _escaped(child)
            else:
                yield from child._pieces()
        yield f"</{self.name}>"


Child: TypeAlias = MarkupElement | str | None


def element(tag: str, /, *children: Child, **attributes: str | float | None) -> MarkupElement:
    """`element("text", "a < b", x=1, class_="label")`. In attribute names a trailing `_` is removed, other `_` become
    `-`. None is left out, among attributes and children."""
    given = tuple(
        (key.rstrip("_").replace("_", "-"), value if isinstance(value, str) else number(value))
        for key, value in attributes.items()
        if value is not None
    )
    return MarkupElement(tag, given, tuple(child for child in children if child is not None))


def number(value: float) -> str:
    """A coordinate with at most two decimals, without trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"


def _escaped(text: str) -> str:
    text = FORBIDDEN.sub("\ufffd", text)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def page(report: Report, charts: Sequence[MarkupElement] = ()) -> str:
    """Any report: charts, if there are any, then its tables and notes."""
    title = f"{report.kind[:1].upper()}{report.kind[1:]} of {report.run}"
    return document(title, "", [*charts, *tables_of(report), *notes(report.notes)])


def tables_of(report: Report) -> list[MarkupElement]:
    """A card for each table for people."""
    return [card(table.title, table_of(table)) for table in report.tables if table.people]


def document(title: str, about: str, parts: Sequence[MarkupElement]) -> str:
    """A whole page, ending in a newline."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        MarkupElement("meta", (("http-equiv", "Content-Security-Policy"), ("content", POLICY)), ()),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", STYLE),
    )
    top = element("header", element("h1", title), element("p", about, class_="muted") if about else None)
    body = element("body", element("main", top, *parts))
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def card(title: str, *parts: Child, under: str = "") -> MarkupElement:
    """A titled box; `under` is its subtitle: the unit, or a note on how to read it."""
    return element("section", element("h3", title), element("p", under, class_="sub"), *parts, class_="card")


def folded(table: Table) -> MarkupElement:
    """A table that opens on demand."""
    return element("details", element("summary", element("h3", table.title)), table_of(table), class_="card")


def table_of(table: Table, first: Sequence[Child] | None = None) -> MarkupElement:
    """The table for people, as HTML. `first`: what stands in the first cell of each row in place of its text."""
    table = for_people(table)
    if not table.rows:
        return element("p", "nothing yet", class_="muted")
    classes = ["n" if column.kind != "text" else None for column in table.columns]
    heads = [
        element("th", column.name.replace("_", " "), scope="col", class_=kind)
        for column, kind in zip(table.columns, classes, strict=True)
    ]
    cells: list[list[Child]] = [[*row] for row in rows_for_people(table)]
    for row, child in zip(cells, first or (), strict=first is not None):
        row[0] = child
    rows = [
        element("tr", *(element("td", cell, class_=kind) for cell, kind in zip(row, classes, strict=True)))
        for row in cells
    ]
    shown = element("table", element("thead", element("tr", *heads)), element("tbody", *rows))
    return element("div", shown, class_="scroll")


def notes(lines: Iterable[str]) -> Iterable[MarkupElement]:
    """Notes for the foot; empty without notes."""
    items = [element("li", line) for line in lines]
    if items:
        yield element("ul", *items, class_="notes")
