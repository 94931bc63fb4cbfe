"""Why a trajectory went as it did: each decision about it, with the figure behind it. Pure: a reader in, a report out.

Everything is derived from rows and events that a run records anyway, and from the routes of its turns where its content
is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollart.ledger.database import CONSUMED, DROPPED
from rollart.ledger.kept import RoutedTurn
from rollart.ledger.reader import GroupRow, LedgerReader, TrajectoryRow
from rollart.model import AbortReason, Purpose
from rollart.policy.schedules import Schedule, resolve
from rollart.ports import RELAUNCH_MARK, RunEvent
from rollart.report.tables import Report, Row, as_number, as_text, figure, table
from rollart.report.trajectories.found import FoundTrajectory
from rollart.report.trajectories.view import outcome_text

STEP = "step"


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision at second `t` of the run, and its reason."""

    t: float
    decision: str
    because: str


@dataclass(frozen=True, slots=True)
class RunHistory:
    """The run's part in decisions about a domain: the end of each step by version, the domain's groups in the order of
    their admission with the begin of their first and the end of their last trajectory, and settings."""

    versions: Mapping[int, float]
    groups: Sequence[GroupRow]
    began: Mapping[str, float]
    ended: Mapping[str, float]
    schedule: Schedule | None
    quota: int | None
    """Samples of the domain in a batch, if the run fixes them."""
    group_size: int

    def current(self, t: float) -> int:
        """The newest version that was trained by second `t`."""
        return max((version for version, at in self.versions.items() if at <= t), default=0)

    def over(self, group: GroupRow) -> float | None:
        """When the group was trained or dropped; None while it is neither."""
        if group.state == CONSUMED and group.version is not None:
            return self.versions.get(group.version, self.ended.get(group.id))
        return self.ended.get(group.id) if group.state == DROPPED else None


def read_history(reader: LedgerReader, domain: str) -> RunHistory:
    """The history of a domain."""
    versions = {int(e.fields["version"] or 0): e.t for e in reader.events(STEP) if "version" in e.fields}
    began: dict[str, float] = {}
    ended: dict[str, float] = {}
    for id_, t0, t1 in reader.group_times(domain):
        began[id_], ended[id_] = t0, t1
    for kind in ("group_dropped", "group_redundant", "group_deferred"):
        ended |= {group: t for t, group in reader.ends(kind)}
    run: Mapping[str, Any] = reader.config().get("run", {})
    spec: Mapping[str, Any] = next((d for d in run.get("domains", ()) if d["name"] == domain), {})
    return RunHistory(
        versions,
        [group for group in reader.groups() if group.domain.removesuffix(RELAUNCH_MARK) == domain],
        began,
        ended,
        resolve(run["schedule"], run.get("staleness")) if "schedule" in run else None,
        spec.get("trajectories"),
        spec.get("group_size", 1),
    )


def why(reader: LedgerReader, run: str, found: FoundTrajectory) -> Report:
    """Every decision about a trajectory, in order of time."""
    row = found.row
    history = read_history(reader, row.domain)
    members = list(reader.trajectories(group=row.group))
    events = reader.events_about(row.id, row.group)
    decisions = [
        *_admitted(row, history, members),
        *_turns(row, () if found.kept is None else found.kept.routes),
        *_events(events),
        *_rewarded(found),
        *_ended(row, history, members),
    ]
    notes = [] if found.kept is not None else ["the routes of its turns are not known: its content was not kept"]
    ordered = sorted(decisions, key=lambda d: d.t)
    return Report("decisions", f"{row.id} of {run}", (_decisions(ordered),), tuple(notes))


@table("decisions", "Decisions")
def _decisions(decisions: Iterable[Decision]) -> Iterator[Row]:
    for one in decisions:
        yield {
            "second": as_number(round(one.t, 6)),
            "decision": as_text(one.decision),
            "because": as_text(one.because, wrap=True),
        }


def _admitted(row: TrajectoryRow, history: RunHistory, members: Sequence[TrajectoryRow]) -> Iterator[Decision]:
    if row.purpose == Purpose.EVAL:
        yield Decision(row.t0, "began", "an evaluation: it is never trained")
        return
    number = next((n for n, group in enumerate(history.groups) if group.id == row.group), None)
    if number is not None:
        t = history.began[row.group]
        others = [g for g in history.groups[:number] if (end := history.over(g)) is None or end > t]
        held = (len(others) + 1) * history.group_size
        text = f"prompt {number + 1:,} of {row.domain}, seed {history.groups[number].seed}"
        if history.schedule is not None:
            rules = history.schedule
            batches = rules.alpha + 1 if rules.windowed else 1
            limit = f" of {batches * history.quota:,}" if history.quota is not None else ""
            text += f"; with its group {held:,}{limit} samples waited, ran or trained"
            text += f" (staleness {rules.alpha}, schedule {rules.name}: {batches} batches)"
        yield Decision(t, "its group was admitted", text)
    earlier = [r for r in members if _member(r) == _member(row) and r.t1 <= row.t0]
    reason = f"attempt {len(earlier) + 1}, after {', '.join(r.outcome for r in earlier)}" if earlier else "attempt 1"
    yield Decision(row.t0, "began", f"{reason}; the environment's reset took {row.reset_s:.3f} s")


def _member(row: TrajectoryRow) -> str:
    return row.id.rpartition(".")[2].partition("r")[0]


def _turns(row: TrajectoryRow, routes: Sequence[RoutedTurn]) -> Iterator[Decision]:
    for n, route in enumerate(routes):
        again = n > 0 and routes[n - 1].asked == route.asked
        waited = f"waited {route.routed - route.asked:.3f} s, " if route.routed - route.asked >= 0.001 else ""
        text = (
            f"{route.why}; {waited}{route.running} turns ran there; {route.engine_s:.4f} engine seconds, "
            f"{route.prefilled:,} tokens prefilled"
        )
        place = f"{route.engine}, prefilled on {route.prefill}" if route.prefill else route.engine
        yield Decision(row.t0 + route.routed, f"turn {'again ' if again else ''}to {place}", text)


def _events(events: Iterable[RunEvent]) -> Iterator[Decision]:
    for event in events:
        text = ", ".join(f"{name} {value}" for name, value in event.fields.items() if value not in (None, ""))
        yield Decision(event.t, event.kind.replace("_", " "), text)


def _rewarded(found: FoundTrajectory) -> Iterator[Decision]:
    row, kept = found.row, found.kept
    if row.reward_s is None:
        return
    yield Decision(row.t1 - row.reward_s, "asked for its reward", f"it took {row.reward_s:.3f} s")
    for score in () if kept is None else kept.scores:
        ran = found.calls.get(score.function, ())
        calls = f"; {len(ran)} call(s) on {', '.join(sorted({call.provider for call in ran}))}" if ran else ""
        text = f"{outcome_text(score.outcome)}; weight {score.weight:g}{calls}"
        yield Decision(row.t1, f"scored by {score.function}", text)


def _ended(row: TrajectoryRow, history: RunHistory, members: Sequence[TrajectoryRow]) -> Iterator[Decision]:
    scored = [r.score for r in members if r.score is not None]
    alpha = None if history.schedule is None else history.schedule.alpha
    bound = "" if alpha is None else f" (bound {alpha})"
    group = next((g for g in history.groups if g.id == row.group), None)
    over = None if group is None else history.over(group)
    reward = "without a reward" if row.score is None else f"with reward {figure(row.score)}"
    match row.outcome:
        case "trained":
            at = history.versions.get(row.version or 0, row.t1)
            lag = (row.version or 1) - 1 - row.v0
            yield Decision(row.t1, "finished", f"{reward}; {len(scored)} of its group were scored")
            yield Decision(at, f"trained in step {row.step}, into v{row.version}", f"staleness {lag}{bound}")
        case "waiting":
            yield Decision(row.t1, "waits", f"{reward}; no step has taken its group")
        case "evaluated":
            yield Decision(row.t1, "evaluated", reward if row.score is not None else f"success {row.success}")
        case AbortReason.FILTERED:
            rewards = ", ".join(map(figure, scored))
            yield Decision(over or row.t1, "filtered", f"the rewards of its group are alike: {rewards}")
        case AbortReason.STALE:
            current = history.current(row.t1)
            text = f"staleness {current - row.v0}{bound}: begun under v{row.v0}, while v{current} was current"
            yield Decision(row.t1, "dropped as stale", text if row.v0 >= 0 else f"before its first token{bound}")
        case AbortReason.REDUNDANT:
            yield Decision(row.t1, "ended as redundant", f"{reward}; others ended first: {len(scored)} of its group")
        case other:
            yield Decision(row.t1, f"ended: {other.replace('_', ' ')}", reward)
