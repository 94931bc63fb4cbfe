"""What the papers published beside what the simulated world gives.

    python -m benchmarks.papers [--rows RA-7,RA-12] [--seeds 2] [--json]

Per figure: published (a band as low..high), simulated, their ratio (against the nearer edge of a band), and whether it
is within 15 or 25 %; `tuned` where a constant was chosen for it, which then proves nothing and is not counted,
nor are published upper bounds (`kept`). Per row:
which claims about order and sign hold, and for misses the likely cause. Conditions are the papers' but for what a row
says that it makes smaller. Exit status 1 if an order or a sign is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.papers import affinity, hardware, offload, rollpacker, schedules, theory
from benchmarks.papers.row import Figure, Found, Row

ROWS: tuple[Row, ...] = (*theory.ROWS, *hardware.ROWS, *affinity.ROWS, *offload.ROWS, *schedules.ROWS, *rollpacker.ROWS)


@dataclass(frozen=True, slots=True)
class Done:
    row: Row
    found: Found
    cpu_s: float

    @property
    def ordered(self) -> bool:
        return all(c.holds for c in self.found.claims)

    def figures(self) -> list[Figure]:
        """Those that count."""
        return [f for f in self.found.figures if not f.tuned and not f.bound]


def chosen(names: str | None) -> tuple[Row, ...]:
    """The rows of these comma-separated ids; ValueError for one that is not there."""
    if names is None:
        return ROWS
    by_id = {r.id: r for r in ROWS}
    wanted = [n.strip() for n in names.split(",")]
    if unknown := [n for n in wanted if n not in by_id]:
        raise ValueError(f"no row {', '.join(unknown)} (rule: some of {', '.join(by_id)})")
    return tuple(by_id[n] for n in wanted)


def play(row: Row, seeds: int) -> Done:
    began = time.process_time()
    return Done(row, row.play(seeds), time.process_time() - began)


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
        published = f"{f.published:g}" if f.most is None else f"{f.published:g}..{f.most:g}"
        out.append(f"      {f.name:<44}{published:>12}{f.simulated:>11.3f}{f.ratio:>8.2f}  {verdict(f)}")
    out += [f"      {'holds' if c.holds else 'WRONG'}: {c.text}" for c in found.claims]
    if found.note:
        out.append(f"      {found.note}")
    if row.miss and (not done.ordered or any(not f.within(0.25) for f in done.found.figures)):
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


def _json(results: Sequence[Done]) -> str:
    rows = [
        {
            "id": d.row.id, "title": d.row.title, "conditions": d.row.conditions, "cpu_s": round(d.cpu_s, 2),
            "figures": [
                {"name": f.name, "published": f.published, "most": f.most, "simulated": f.simulated,
                 "ratio": f.ratio, "verdict": verdict(f)} for f in d.found.figures
            ],
            "claims": {c.text: c.holds for c in d.found.claims},
            "note": d.found.note, "miss": d.row.miss,
        }
        for d in results
    ]  # fmt: skip
    return json.dumps({"rows": rows, "summary": summary(results)}, indent=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        rows = chosen(arguments.rows)
    except ValueError as error:
        parser.error(str(error))
    results: list[Done] = []
    for row in rows:
        results.append(play(row, arguments.seeds))
        if not arguments.json:
            print("\n".join(lines(results[-1])), flush=True)
    if arguments.json:
        print(_json(results))
    else:
        s = summary(results)
        print(
            f"order and sign: {s['rows_ordered']} of {s['rows']} rows; figures not tuned: {s['within_15']} of "
            f"{s['figures']} within 15 %, {s['within_25']} within 25 %; rows with all within 25 %: "
            f"{s['rows_within_25']} of {s['rows_with_figures']}"
        )
    sys.exit(0 if all(d.ordered for d in results) else 1)


if __name__ == "__main__":
    main()
