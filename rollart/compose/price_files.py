"""Price lists as files: the effective prices of a cluster, reading several formats, merging, and writing."""

from __future__ import annotations

import csv
import datetime as dt
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from rollart.compose.price_offers import ec2_prices, lambda_prices, products_of, products_of_offer
from rollart.errors import SpecError, UsageError
from rollart.spec.fleet import merged_prices
from rollart.spec.load import builtin, load_cluster, load_prices, price_list
from rollart.spec.prices import PriceEntry, PriceList

__all__ = ["PriceChange", "base_list", "price_changes", "effective_prices", "merge_into", "read_prices", "write_prices"]

COLUMNS = ("name", "unit", "usd", "source", "date")


@dataclass(frozen=True, slots=True)
class PriceChange:
    """A price before and after a merge; `before` is None for a new entry. `same`: only the source or the date
    changed."""

    name: str
    unit: str
    before: float | None
    after: float
    source: str

    @property
    def same(self) -> bool:
        return self.before == self.after


def effective_prices(cluster: Path | None) -> list[PriceEntry]:
    """All effective prices of a cluster: those of its list, overridden by its `price_list` and its pools. The shipped
    prices without a cluster."""
    listed = base_list(cluster)
    if cluster is None:
        return listed.prices
    spec = load_cluster(cluster)
    prices = {(p.name, p.unit): p for p in merged_prices(listed, spec.price_list).prices}
    day = dt.date.fromtimestamp(cluster.stat().st_mtime)
    for pool in spec.pools:
        if pool.price is not None:
            prices[f"{pool.device}@{pool.name}", "device-hour"] = PriceEntry.model_construct(
                name=f"{pool.device}@{pool.name}",
                unit="device-hour",
                usd=pool.price,
                date=day,
                source=f"pool '{pool.name}' of {cluster.name}",
            )
    return list(prices.values())


def base_list(cluster: Path | None) -> PriceList:
    """The list that a cluster spec names, by default the shipped one."""
    named = None if cluster is None else load_cluster(cluster).prices
    return load_prices(builtin("prices.yaml") if named is None or cluster is None else cluster.parent / named)


def read_prices(path: Path, *, region: str = "") -> list[PriceEntry]:
    """Entries of a file: a YAML price list, CSV or JSON of name, unit, usd, source and date, or an AWS offer file
    (AWSLambda, AmazonEC2). UsageError or SpecError with the location of the first problem."""
    try:
        if path.suffix == ".csv":
            return price_list({"prices": _csv(path)}, where=str(path)).prices
        if path.suffix == ".json":
            return _json(path, region)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {getattr(error, 'strerror', None) or error}", remedy="give a price file") from None
    return load_prices(path).prices


def _csv(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
        if missing:
            raise SpecError(
                f"columns {', '.join(missing)} are missing (rule: {','.join(COLUMNS)})", where=f"{path}:1:1"
            )
        rows = []
        for row in reader:
            if None in row or None in row.values():
                raise SpecError(f"a row needs {len(COLUMNS)} values", where=f"{path}:{reader.line_num}:1")
            rows.append({column: row[column].strip() for column in COLUMNS})
        return rows


def _json(path: Path, region: str) -> list[PriceEntry]:
    try:
        given = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise SpecError(f"not JSON: {error.msg}", where=f"{path}:{error.lineno}:{error.colno}") from None
    if isinstance(given, dict) and "offerCode" in given:
        readers = {"AWSLambda": lambda_prices, "AmazonEC2": ec2_prices}
        reader = readers.get(given["offerCode"])
        if reader is None:
            raise UsageError(f"{path}: an offer of {given['offerCode']} (rule: one of {', '.join(readers)})")
        found = reader(*products_of_offer(given), region)
    elif isinstance(given, dict) and "PriceList" in given:
        products, day = products_of(json.loads(one) if isinstance(one, str) else one for one in given["PriceList"])
        found = [*lambda_prices(products, day, region), *ec2_prices(products, day, region)]
    else:
        prices = given.get("prices") if isinstance(given, dict) else given
        return price_list({"prices": prices}, where=str(path)).prices
    if not found:
        where = f" of {region}" if region else ""
        raise UsageError(f"{path}: no price{where} that is of use here", remedy="check the offer and --region")
    return found


def price_changes(before: PriceList, new: Iterable[PriceEntry]) -> list[PriceChange]:
    """The changes that new entries make, in their order."""
    known = {(p.name, p.unit): p.usd for p in before.prices}
    return [PriceChange(p.name, p.unit, known.get((p.name, p.unit)), p.usd, p.source) for p in new]


def merge_into(path: Path, new: Sequence[PriceEntry], *, cluster: Path | None, today: dt.date) -> list[PriceChange]:
    """Write a price list with the new entries to `path`, on top of the existing file or, for a new file, of the
    cluster's list. UsageError for the shipped list."""
    if path.resolve() == builtin("prices.yaml").resolve():
        raise UsageError(f"{path} is the shipped price list (rule: it stays as it is)", remedy="give another --into")
    before = load_prices(path) if path.exists() else base_list(cluster)
    write_prices(path, merged_prices(before, new), today=today)
    return price_changes(before, new)


def write_prices(path: Path, prices: PriceList, *, today: dt.date) -> None:
    """Replace the file atomically. UsageError if it cannot be written."""
    lines = [
        f"# Written by `rollart prices` on {today}. Name it in a cluster spec: `prices: {path.name}`.",
        f"currency: {prices.currency}",
        "prices:",
        *(_line(p) for p in prices.prices),
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".new")
        temporary.write_text("\n".join(lines) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", remedy="give a path that can be written with --into") from None


def _line(p: PriceEntry) -> str:
    usd = format(Decimal(repr(p.usd)), "f")
    source = json.dumps(p.source, ensure_ascii=False)
    return f"  - {{name: {json.dumps(p.name)}, unit: {p.unit}, usd: {usd}, date: {p.date}, source: {source}}}"
