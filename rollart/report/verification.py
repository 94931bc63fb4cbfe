"""The audit of a run's ledger, for `rollart verify`: each prompt has one end, nothing is trained twice, and no second
is missing or counted twice. Pure: a reader in, violations out. Dollars are seconds × units × prices, row by row, so
they are conserved where seconds are; the amounts are checked here too.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rollart.ledger.database import CONSUMED, DROPPED, LIVE
from rollart.ledger.intervals import RESOURCE_CLOSED, RESOURCE_OPENED, ResourceState
from rollart.ledger.reader import GroupRow, LedgerReader, VersionRow
from rollart.policy.schedules import resolve
from rollart.report.rows import ENGINE_ROLES
from rollart.report.tables import Report, Row, as_count, as_text, table

TOLERANCE_S = 1e-6
"""Rounding of sums of clock readings, in seconds."""

APART_S = 1e-4
"""Seconds by which a turn's own readings of the clock may be apart from those of its engine's state."""

UNFLUSHED_S = 2.0
"""Busy seconds that an engine may lose in a kill, though the trajectories that paid for them are recorded: clocks are
flushed once a second."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A row that breaks a rule."""

    rule: str
    row: str
    found: str


@dataclass(frozen=True, slots=True)
class LedgerAudit:
    """The result: how many rows each rule was held against, and the rows that break one. `dispositions` counts
    trajectories by (domain, purpose, outcome), `prompts` groups by (domain, end)."""

    checked: Mapping[str, int]
    violations: Sequence[Violation]
    dispositions: Mapping[tuple[str, str, str], int]
    prompts: Mapping[tuple[str, str], int]
    incarnations: int
    """Lives of the run: the most that any of its resources was opened."""

    @property
    def sound(self) -> bool:
        return not self.violations


PROMPTS = "each prompt is trained, dropped with a reason, or waiting"
ONCE = "each sample is trained once, with its whole group, from one trajectory"
VERSIONS = "versions and steps follow each other, with the samples that they count"
STALENESS = "no trained sample is older than the staleness bound"
TRAJECTORIES = "the parts of a trajectory's time are within it"
SECONDS = "each resource is in one state at each second of its incarnations"
DOLLARS = "no second, unit, price or bill is negative"
ENGINES = "trajectories pay for no more seconds than engines were busy"


def verify(reader: LedgerReader) -> LedgerAudit:
    """Hold every rule against the ledger of a run, live or ended, whatever its lives."""
    groups, versions = reader.groups(), reader.versions()
    checked: Counter[str] = Counter()
    found = [*_prompts(groups, versions), *_samples(reader, groups, versions, checked)]
    found += _versions(versions)
    for id_, t0, t1, env_s, reward_s in reader.torn(TOLERANCE_S):
        text = f"{t1 - t0:g} s from {t0:g}, {env_s:g} of them in its environment, {reward_s:g} for its reward"
        found.append(Violation(TRAJECTORIES, id_, text))
    dispositions: Counter[tuple[str, str, str]] = Counter()
    charged, turns = 0.0, 0
    for row in reader.charge_sums():
        dispositions[row.domain, row.purpose, row.outcome] += row.trajectories
        charged, turns = charged + row.engine_seconds, turns + row.turns
    opened, closed = _times(reader.ends(RESOURCE_OPENED)), _times(reader.ends(RESOURCE_CLOSED))
    stretches, busy = _intervals(reader, checked)
    found += [v for resource, of in stretches.items() for v in untiled(resource, of, opened.get(resource, ()))]
    found += _bills(reader, checked)
    killed = sum(max(0, len(of) - len(closed.get(resource, ()))) for resource, of in opened.items())
    if busy is not None:
        checked[ENGINES] = sum(dispositions.values())
        if charged > busy + APART_S * turns + UNFLUSHED_S * killed:
            found.append(Violation(ENGINES, "all", f"{charged:.6f} s charged, {busy:.6f} s busy"))
    checked |= {PROMPTS: len(groups), VERSIONS: len(versions), TRAJECTORIES: sum(dispositions.values())}
    prompts = Counter((group.domain, _end(group)) for group in groups)
    return LedgerAudit(checked, found, dispositions, prompts, max(map(len, opened.values()), default=1))


def _end(group: GroupRow) -> str:
    return {LIVE: "waiting", CONSUMED: "trained"}.get(group.state, group.reason)


def _prompts(groups: Sequence[GroupRow], versions: Sequence[VersionRow]) -> Iterator[Violation]:
    known = {row.version for row in versions}
    for group in groups:
        if group.state == DROPPED and not group.reason:
            yield Violation(PROMPTS, group.id, "dropped without a reason")
        elif group.state == CONSUMED and group.version not in known:
            yield Violation(PROMPTS, group.id, f"trained into version {group.version}, which is not recorded")
        elif group.state not in (LIVE, CONSUMED, DROPPED):
            yield Violation(PROMPTS, group.id, f"state {group.state}")


def _samples(
    reader: LedgerReader, groups: Sequence[GroupRow], versions: Sequence[VersionRow], checked: Counter[str]
) -> Iterator[Violation]:
    by_id = {group.id: group for group in groups}
    members: Counter[tuple[str, str]] = Counter()
    sums: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    bound = _staleness(reader)
    for id_, group_id, state, v0, version, tokens, rows in reader.samples():
        checked[ONCE] += 1
        group = by_id.get(group_id)
        if state != CONSUMED or version is None:
            if group is not None and state == LIVE and group.state != LIVE:
                yield Violation(ONCE, id_, f"waits, though its group {group_id} is over")
            continue
        sums[version][0] += 1
        sums[version][1] += tokens
        member = id_.rpartition(".")[2].partition("r")[0]
        members[group_id, member] += 1
        if rows != 1:
            yield Violation(ONCE, id_, f"trained into version {version}, with {rows} finished trajectories")
        if group is None or group.version != version:
            yield Violation(ONCE, id_, f"trained into version {version}, its group {group_id} was not")
        if members[group_id, member] > 1:
            yield Violation(ONCE, id_, f"member {member} of {group_id} is trained again")
        if bound is not None:
            checked[STALENESS] += 1
            if version - 1 - v0 > bound:
                yield Violation(STALENESS, id_, f"trained from v{version - 1}, begun under v{v0} (bound {bound})")
    trained = Counter(group.version for group in groups if group.state == CONSUMED)
    for row in versions:
        counted = (row.groups, row.samples, row.tokens)
        present = (trained[row.version], *sums[row.version])
        if row.groups and counted != present:  # without groups the samples were given, and have no rows
            text = f"counts {counted} groups, samples and tokens; the ledger has {present}"
            yield Violation(VERSIONS, f"v{row.version}", text)


def _staleness(reader: LedgerReader) -> int | None:
    """The bound that the run enforced; None if it enforced none, or its settings are not recorded."""
    run = reader.config().get("run", {})
    if "schedule" not in run:
        return None
    rules = resolve(run["schedule"], run.get("staleness"))
    return rules.alpha if rules.drops_stale else None


def _versions(versions: Sequence[VersionRow]) -> Iterator[Violation]:
    for before, row in itertools.pairwise(versions):
        if (row.version, row.step) != (before.version + 1, before.step + 1):
            text = f"step {row.step}, after v{before.version} of step {before.step}"
            yield Violation(VERSIONS, f"v{row.version}", text)


def _times(events: Iterable[tuple[float, str]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for t, subject in events:
        found[subject].append(t)
    return found


def _intervals(
    reader: LedgerReader, checked: Counter[str]
) -> tuple[dict[str, list[tuple[float, float]]], float | None]:
    """The stretches of each resource, and the busy seconds of engines (None: no engine is recorded)."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    busy: float | None = None
    for role, resource, t0, t1, state, _ in reader.spans():
        found[resource].append((t0, t1))
        if role in ENGINE_ROLES:
            busy = (busy or 0.0) + (t1 - t0 if state == ResourceState.BUSY else 0.0)
    checked[SECONDS] = sum(map(len, found.values()))
    return found, busy


def untiled(
    resource: str, stretches: Iterable[tuple[float, float]], opened: Sequence[float] = ()
) -> Iterator[Violation]:
    """Stretches that overlap, end before they begin, or leave a gap before them, unless the resource was `opened` again
    within the stretch behind the gap: what it did before that was another incarnation. (The first stretch of a resumed
    run's resource begins with the life of the run, before the resource itself is opened.)"""
    until: float | None = None
    for t0, t1 in sorted(stretches):
        if t1 < t0:
            yield Violation(SECONDS, resource, f"ends at {t1:.6f} before it begins at {t0:.6f}")
        if until is not None and t0 < until - TOLERANCE_S:
            yield Violation(SECONDS, resource, f"in two states from {t0:.6f} to {min(t1, until):.6f}")
        elif until is not None and t0 > until + TOLERANCE_S and not _within(t0, t1, opened):
            yield Violation(SECONDS, resource, f"in no state from {until:.6f} to {t0:.6f}")
        until = t1 if until is None else max(until, t1)


def _within(t0: float, t1: float, times: Sequence[float]) -> bool:
    return any(t0 - TOLERANCE_S <= time <= t1 + TOLERANCE_S for time in times)


def _bills(reader: LedgerReader, checked: Counter[str]) -> Iterator[Violation]:
    for interval in reader.interval_sums():
        checked[DOLLARS] += 1
        if min(interval.seconds, interval.unit_seconds, interval.usd) < 0:
            yield Violation(DOLLARS, interval.resource, f"{interval.seconds:g} s, ${interval.usd:g}")
    for call in reader.invocation_sums():
        checked[DOLLARS] += 1
        if min(call.billed_s, call.cold_billed_s) < 0 or call.cold_billed_s > call.billed_s + TOLERANCE_S * call.calls:
            text = f"{call.billed_s:g} s billed, of them {call.cold_billed_s:g} s of start-up"
            yield Violation(DOLLARS, call.function, text)


def verification(run: str, audit: LedgerAudit) -> Report:
    """The audit as a report: every violation is a row."""
    tables = (_rules(audit), _violations(audit), _ends(audit), _outcomes(audit))
    verdict = "sound" if audit.sound else f"{len(audit.violations):,} violations"
    return Report("verification", run, tables, (f"{verdict}; {audit.incarnations} incarnation(s)",))


@table("rules", "Rules")
def _rules(audit: LedgerAudit) -> Iterator[Row]:
    broken = Counter(violation.rule for violation in audit.violations)
    for rule in (PROMPTS, ONCE, VERSIONS, STALENESS, TRAJECTORIES, SECONDS, DOLLARS, ENGINES):
        yield {
            "rule": as_text(rule, wrap=True),
            "rows": as_count(audit.checked.get(rule, 0)),
            "violations": as_count(broken[rule]),
        }


@table("violations", "Violations", optional=True)
def _violations(audit: LedgerAudit) -> Iterator[Row]:
    for one in audit.violations:
        yield {"row": one.row, "found": as_text(one.found, wrap=True), "rule": as_text(one.rule, wrap=True)}


@table("prompts", "Prompts by their end")
def _ends(audit: LedgerAudit) -> Iterator[Row]:
    for (domain, end), n in sorted(audit.prompts.items()):
        yield {"domain": domain, "end": end, "prompts": as_count(n)}


@table("trajectories", "Trajectories by their outcome")
def _outcomes(audit: LedgerAudit) -> Iterator[Row]:
    for (domain, purpose, outcome), n in sorted(audit.dispositions.items()):
        yield {"domain": domain, "purpose": purpose, "outcome": outcome, "trajectories": as_count(n)}
