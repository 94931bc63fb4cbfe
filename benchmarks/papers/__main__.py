"""What the papers published beside what the simulated world gives.

    python -m benchmarks.papers [--rows RA-7,RA-12] [--seeds 2] [--json | --markdown]

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

from benchmarks.papers import affinity, hardware, offload, rollpacker, schedules, theory
from benchmarks.papers.row import Done, Row
from benchmarks.papers.table import counts, lines, markdown, summary, verdict

ROWS: tuple[Row, ...] = (*theory.ROWS, *hardware.ROWS, *affinity.ROWS, *offload.ROWS, *schedules.ROWS, *rollpacker.ROWS)


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


def _json(results: Sequence[Done]) -> str:
    rows = [
        {
            "id": d.row.id,
            "title": d.row.title,
            "conditions": d.row.conditions,
            "cpu_s": round(d.cpu_s, 2),
            "figures": [
                {
                    "name": f.name,
                    "published": f.published,
                    "most": f.most,
                    "simulated": f.simulated,
                    "ratio": f.ratio,
                    "verdict": verdict(f),
                }
                for f in d.found.figures
            ],
            "claims": {c.text: c.holds for c in d.found.claims},
            "note": d.found.note,
            "miss": d.row.miss,
        }
        for d in results
    ]
    return json.dumps({"rows": rows, "summary": summary(results)}, indent=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows")
    parser.add_argument("--seeds", type=int, default=2)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true")
    form.add_argument("--markdown", action="store_true", help="the table of docs/simulation.md")
    arguments = parser.parse_args()
    try:
        rows = chosen(arguments.rows)
    except ValueError as error:
        parser.error(str(error))
    results: list[Done] = []
    for row in rows:
        results.append(play(row, arguments.seeds))
        if not arguments.json and not arguments.markdown:
            print("\n".join(lines(results[-1])), flush=True)
    if arguments.json:
        print(_json(results))
    elif arguments.markdown:
        print(markdown(results))
    else:
        print(counts(results))
    sys.exit(0 if all(d.ordered for d in results) else 1)


if __name__ == "__main__":
    main()
