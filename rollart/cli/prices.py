"""`rollart prices`: prices with their sources and dates."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from pathlib import Path

import click

from rollart.cli.context import FOR_PEOPLE, cluster_functions, print_report
from rollart.errors import UsageError
from rollart.report.tables import Report, Row, Table, as_count, as_price, as_text
from rollart.settings.load import load_prices
from rollart.settings.prices import STALE_DAYS
from rollart.tools.prices import SOURCES, PriceChange, base_list, effective_prices, merge_into, read_prices
from rollart.tools.prices import refresh_prices as ask


def list_(cluster: Path | None, output: str) -> None:
    today, found = dt.date.today(), effective_prices(cluster)
    rows: list[Row] = [
        {
            "name": p.name,
            "unit": p.unit,
            "kind": p.kind,
            "usd": as_price(p.usd),
            "date": str(p.date),
            "age_days": as_count(p.age_days(today)),
            "source": as_text(p.source, wrap=True),
        }
        for p in sorted(found, key=lambda p: (p.unit != "device-hour", p.name, p.unit))
    ]
    old = [p.name for p in found if p.age_days(today) > STALE_DAYS]
    aged = f"{len(old)} of {len(found)} prices are older than {STALE_DAYS} days ({', '.join(dict.fromkeys(old))})"
    notes = (f"{aged}: see `rollart prices refresh` and `import`",) if old else ()
    named = "the shipped list" if cluster is None else str(cluster)
    print_report(Report("prices", named, (Table.of("prices", "US dollars", rows),), notes), output)


def import_(file: Path, cluster: Path | None, into: Path, region: str, output: str) -> None:
    _show(merge_into(into, read_prices(file, region=region), cluster=cluster, today=dt.date.today()), into, output)


def refresh(providers: tuple[str, ...], cluster: Path | None, into: Path, region: str, output: str) -> None:
    from rollart.launch.functions import canonical_provider  # late: `prices list` needs no provider

    chosen = list(dict.fromkeys(canonical_provider(name) for name in providers)) or list(SOURCES)
    if unknown := [name for name in chosen if name not in SOURCES]:
        raise UsageError(
            f"'{unknown[0]}' tells no prices (rule: one of {', '.join(SOURCES)})",
            remedy="put its prices in a file and use `rollart prices import`",
        )
    functions = cluster_functions(cluster)
    known = load_prices(into) if into.exists() else base_list(cluster)
    today = dt.date.today()
    found = ask(chosen, functions, known, root=Path(".rollart/functions"), today=today, region=region)
    _show(merge_into(into, found.entries, cluster=cluster, today=today), into, output)
    if found.unused:
        click.echo(f"not used: {', '.join(found.unused)}", err=True)
    for provider, error in found.failed.items():
        click.echo(f"not refreshed: {provider}: {error.message}", err=True)
        if error.remedy:
            click.echo(f"  remedy: {error.remedy}", err=True)


def _show(changed: Sequence[PriceChange], into: Path, output: str) -> None:
    people = output in FOR_PEOPLE
    rows: list[Row] = [
        {
            "name": c.name,
            "unit": c.unit,
            "kind": c.kind,
            "before": as_price(c.before),
            "after": as_price(c.after),
            "source": as_text(c.source, wrap=True),
        }
        for c in changed
        if not (people and c.same)
    ]
    same = sum(c.same for c in changed)
    notes = (f"{same} as before, now of a new date",) if same else ()
    print_report(Report("prices", str(into), (Table.of("changes", "Changed: US dollars", rows),), notes), output)
