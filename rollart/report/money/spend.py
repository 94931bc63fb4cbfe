"""A run's charges as sums over time and by tag, and those of many runs by any of their fields. Pure: charges in, tables
out. The charges are the rows of FOCUS, so the sums of every table are theirs and the ledger's (property test)."""

from __future__ import annotations

import datetime as dt
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rollart.errors import UsageError, did_you_mean
from rollart.ledger.intervals import ResourceState
from rollart.ledger.utc import HOUR_S
from rollart.report.focus import DEVICES, FUNCTIONS, TOKENS, FocusCharge
from rollart.report.tables import Report, Row, Table, as_count, as_number, as_share, as_usd, ratio, table

MOST_HOURS = 48
"""Hours of a run up to which its dollars are shown by hour; a longer run has them by day."""

UNTAGGED = "(none)"
"""Value of a tag for charges that lack it."""

SERVICES = (DEVICES.name, FUNCTIONS.name, TOKENS.name)


@dataclass(slots=True)
class SpendSums:
    """Dollars of one run by (hour of UTC, service), and by tag and value."""

    by_hour: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    by_tag: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))


def spend_sums(charges: Iterable[FocusCharge]) -> SpendSums:
    """One pass over the charges of a run."""
    found = SpendSums()
    for charge in charges:
        found.by_hour[charge.hour, charge.service.name] += charge.usd
        for tag in charge.tags.items():
            found.by_tag[tag] += charge.usd
    return found


@table("over_time", "Cost over time (UTC)", optional=True)
def over_time(sums: SpendSums) -> Iterator[Row]:
    """Dollars by hour, or by day of a run of more than `MOST_HOURS`."""
    hours = {hour for hour, _ in sums.by_hour}
    size = 1 if len(hours) <= MOST_HOURS else 24
    periods: dict[tuple[int, str], float] = defaultdict(float)
    for (hour, service), usd in sums.by_hour.items():
        periods[hour // size, service] += usd
    so_far = 0.0
    for period in sorted({period for period, _ in periods}):
        parts = [periods.get((period, service), 0.0) for service in SERVICES]
        usd = math.fsum(parts)
        so_far += usd
        yield {
            "from": _utc(period * size, "%Y-%m-%d %H:00" if size == 1 else "%Y-%m-%d"),
            "usd": as_usd(usd),
            "so_far_usd": as_usd(so_far),
            **{
                f"{name.lower().replace(' ', '_')}_usd": as_usd(part)
                for name, part in zip(SERVICES, parts, strict=True)
            },
        }


@table("by_tag", "Cost by tag", optional=True)
def by_tag(sums: SpendSums) -> Iterator[Row]:
    """Dollars by the values of each tag; those of each tag add up to the total."""
    total = math.fsum(sums.by_hour.values())
    for tag in sorted({tag for tag, _ in sums.by_tag}):
        own = {value: usd for (name, value), usd in sums.by_tag.items() if name == tag}
        rest = total - math.fsum(own.values())
        if rest > 1e-9 * total:
            own[UNTAGGED] = own.get(UNTAGGED, 0.0) + rest
        for value, usd in sorted(own.items(), key=lambda item: -item[1]):
            yield {"tag": tag, "value": value, "usd": as_usd(usd), "share": as_share(ratio(usd, total))}


@dataclass(frozen=True, slots=True)
class RunCharge:
    """A charge of one of several runs."""

    run: str
    cluster: str
    charge: FocusCharge


KEYS: Mapping[str, Callable[[RunCharge], str]] = {
    "run": lambda one: one.run,
    "cluster": lambda one: one.cluster,
    "month": lambda one: _utc(one.charge.hour, "%Y-%m"),
    "day": lambda one: _utc(one.charge.hour, "%Y-%m-%d"),
    "service": lambda one: one.charge.service.name,
    "provider": lambda one: one.charge.provider or one.cluster,
    "role": lambda one: one.charge.role,
    "pool": lambda one: one.charge.pool or UNTAGGED,
    "sku": lambda one: one.charge.sku,
    "price": lambda one: one.charge.kind,
}
"""Fields of charges by which a fleet's dollars are grouped, beside the tags of its runs and pools."""


@dataclass(slots=True)
class FleetSums:
    """Charges of many runs, added up by the keys of `by`."""

    by: Sequence[str]
    groups: dict[tuple[str, ...], FleetGroup] = field(default_factory=dict)
    tags: set[str] = field(default_factory=set)
    runs: set[str] = field(default_factory=set)

    def add(self, one: RunCharge) -> None:
        tags = one.charge.tags
        self.tags.update(tags)
        self.runs.add(one.run)
        key = tuple(KEYS[k](one) if k in KEYS else tags.get(k, UNTAGGED) for k in self.by)
        group = self.groups.setdefault(key, FleetGroup())
        group.runs.add(one.run)
        group.usd += one.charge.usd
        if one.charge.service is DEVICES:
            group.device_hours += one.charge.amount
        if one.charge.state != ResourceState.BUSY:
            group.not_busy_usd += one.charge.usd


@dataclass(slots=True)
class FleetGroup:
    """The sums of one group."""

    runs: set[str] = field(default_factory=set)
    usd: float = 0.0
    not_busy_usd: float = 0.0
    device_hours: float = 0.0


def fleet(name: str, sums: FleetSums, notes: Sequence[str] = ()) -> Report:
    """The report of many runs. UsageError for a key that is neither a field nor a tag of any charge."""
    for key in sums.by:
        known = [*KEYS, *sorted(sums.tags)]
        if key not in known and sums.groups:
            raise UsageError(
                f"--by {key}: no run has such a tag{did_you_mean(key, known)} (rule: of {', '.join(known)})",
                remedy="give the runs `tags`, or another key",
            )
    total = math.fsum(group.usd for group in sums.groups.values())
    rows: list[Row] = [
        {
            **dict(zip(sums.by, key, strict=True)),
            "runs": as_count(len(group.runs)),
            "device_hours": as_number(group.device_hours),
            "usd": as_usd(group.usd),
            "share": as_share(ratio(group.usd, total)),
            "not_busy_usd": as_usd(group.not_busy_usd),
        }
        for key, group in sorted(sums.groups.items())
    ]
    title = f"Cost by {', '.join(sums.by)}"
    return Report("fleet", name, (Table.of("fleet", title, rows), _fleet_total(sums, total)), tuple(notes))


def _fleet_total(sums: FleetSums, total: float) -> Table:
    row: Row = {"runs": as_count(len(sums.runs)), "usd": as_usd(total)}
    return Table.of("total", "Total of what is billed", [row])


def _utc(hour: int, form: str) -> str:
    return dt.datetime.fromtimestamp(hour * HOUR_S, dt.UTC).strftime(form)
