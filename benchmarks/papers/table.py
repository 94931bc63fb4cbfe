"""Rows that were played, as lines for a terminal and as the table of docs/simulation.md."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from benchmarks.papers.row import Done, Figure

__all__ = ["counts", "lines", "markdown", "summary", "verdict"]

WIDTH = 128
"""Of a line of the docs."""


def verdict(figure: Figure) -> str:
    if figure.tuned:
        return "tuned"
    if figure.bound and figure.ratio == 1:
        return "kept"
    return "15 %" if figure.within(0.15) else "25 %" if figure.within(0.25) else "miss"


def lines(done: Done) -> list[str]:
    row, found = done.row, done.found
    out = [f"{row.id:<6}{row.title} ({row.conditions}); {done.cpu_s:.1f} s"]
    for f in found.figures:
        out.append(f"      {f.name:<44}{_published(f):>12}{f.simulated:>11.3f}{f.ratio:>8.2f}  {verdict(f)}")
    out += [f"      {'holds' if c.holds else 'WRONG'}: {c.text}" for c in found.claims]
    if found.note:
        out.append(f"      {found.note}")
    if done.missed and row.miss:
        out.append(f"      likely cause: {row.miss}")
    return out


def summary(results: Sequence[Done]) -> dict[str, int]:
    counted = [f for d in results for f in d.figures()]
    return {
        "rows": len(results),
        "rows_ordered": sum(d.ordered for d in results),
        "figures": len(counted),
        "within_15": sum(f.within(0.15) for f in counted),
        "within_25": sum(f.within(0.25) for f in counted),
        "rows_with_figures": sum(bool(d.figures()) for d in results),
        "rows_within_25": sum(bool(d.figures()) and all(f.within(0.25) for f in d.figures()) for d in results),
    }


def counts(results: Sequence[Done]) -> str:
    s = summary(results)
    return (
        f"order and sign: {s['rows_ordered']} of {s['rows']} rows; figures not tuned: {s['within_15']} of "
        f"{s['figures']} within 15 %, {s['within_25']} within 25 %; rows with all within 25 %: "
        f"{s['rows_within_25']} of {s['rows_with_figures']}"
    )


def markdown(results: Sequence[Done]) -> str:
    """A line per figure and per wrong order, the counts, and the likely cause of each missed row."""
    out = ["| row | figure | published | simulated | deviation | |", "|---|---|---|---|---|---|"]
    for d in results:
        for f in d.found.figures:
            away = f"{100 * (f.ratio - 1):+.0f} %".replace("-0 %", "0 %").replace("+0 %", "0 %")
            out.append(f"| {d.row.id} | {f.name} | {_published(f)} | {f.simulated:.4g} | {away} | {verdict(f)} |")
        out += [f"| {d.row.id} | {c.text} | | no | | wrong |" for c in d.found.claims if not c.holds]
    causes = [
        textwrap.fill(f"- **{d.row.id}**: {d.row.miss}.", WIDTH, subsequent_indent="  ")
        for d in results
        if d.missed and d.row.miss
    ]
    return "\n".join([*out, "", f"{counts(results).capitalize()}.", "", "Likely causes of what is off:", "", *causes])


def _published(figure: Figure) -> str:
    return f"{figure.published:.4g}" if figure.most is None else f"{figure.published:.4g}..{figure.most:.4g}"
