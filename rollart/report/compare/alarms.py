"""Alarms of a run: signs in its ledger that it learns less, or costs more, than it could. Pure but for reading."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType

from rollart.ledger.events import FUNCTION_HEALTH, HANDOFFS, OFFLOAD_STAGE
from rollart.ledger.intervals import ResourceState
from rollart.ledger.reader import LedgerReader, TrajectorySpan
from rollart.model import AbortReason
from rollart.policy.collapse import LEAST_EFFECTIVE, WINDOW
from rollart.report import bias
from rollart.report.cost import WARM_START
from rollart.report.exposure import TRAINER, WAITS_FOR_SAMPLES
from rollart.report.rows import ENGINE_ROLES, RunRows
from rollart.report.tables import Report, Row, as_number, as_text, table
from serverless.pipeline.stages import OffloadStage

ZERO_VARIANCE = 0.5
"""Share of trained groups without a gradient: above it more than half of the rollout trains nothing."""

BEHAVIOUR_GAP = 0.3
"""Mean |log π − log μ| at which docs/training.md ("Early stop") advises to stop."""

STALE_LOSSES = 0.02
"""Share of training trajectories that are aborted as too stale."""

FAILED_HANDOFFS = 0.05
"""Share of hand-offs that fail: each is prefilled twice."""

TRAINER_IDLE = 0.25
"""Share of the loop in which the trainer waits for samples."""

ENGINES_IDLE = 0.5
"""Share of their serving time in which engines have no request."""

FAULT_SHARE = 0.5
"""Share of the fault rate that ends a run (`faults.max_rate`)."""

EVENT_ALARMS = {
    "learning_stopped": "no gradient, no entropy or no differences of rewards for three steps: it learns nothing",
    "samples_too_stale": "a lower staleness learns more from as many samples",
    "filter_exhausted": "prompts have no learning signal: choose others, or raise rollout.filter.max_refills",
    "prefill_barred": "a prefill engine's hand-offs failed in a row: see `rollart logs` of it",
    "engine_lost": "an engine died; its sessions were computed again",
    "host_lost": "an environment host died; its episodes began again",
    "trainer_restarted": "the trainer died; its step was repeated",
}
"""Events that are alarms by themselves, and their meaning."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A sign of a problem: a figure of a subject and its limit (None for an event that should not occur)."""

    alarm: str
    subject: str
    value: float
    unit: str
    limit: float | None
    meaning: str


STALE = "stale losses"

EFFECTIVE_SHARE = "effective share"

TOO_STALE = (EFFECTIVE_SHARE, "samples_too_stale")
"""Alarms of samples that are too old to learn from."""

EXPIRED = "its deadline passed: `leases` of the run spec, or the part that did not answer"


def read_alarms(reader: LedgerReader, rows: RunRows, trajectories: Iterable[TrajectorySpan]) -> list[Alarm]:
    """The alarms of a recorded or simulated run, from its ledger and what was read from it already."""
    events = {kind: len(reader.events(kind)) for kind in EVENT_ALARMS}
    # "prefill on engine-3" is one kind of wait with that on engine-4.
    waits = Counter(str(e.fields.get("waiting_for")).partition(" on ")[0] for e in reader.events("lease_expired"))
    lost = bias.bias(rows.run, *bias.read_attempts(reader))
    scored = "simulated" not in reader.config()  # the scores of a plan's simulation are alike
    return [
        *(_of_scores(trajectories) if scored else ()),
        *(Alarm(kind, "run", n, "events", None, EVENT_ALARMS[kind]) for kind, n in events.items() if n),
        *(Alarm("expired waits", name, n, "events", None, EXPIRED) for name, n in waits.most_common()),
        *alarms_of(rows, {(str(d), str(s)): f for d, s, f in _findings(lost)}),
    ]


def alarms_of(rows: RunRows, biases: Mapping[tuple[str, str], str] = MappingProxyType({})) -> Iterator[Alarm]:
    """The alarms that need no more than the sums of a run, and findings of its bias report by domain and set."""
    yield from _of_metrics(rows)
    yield from _of_losses(rows, biases)
    yield from _of_handoffs(rows)
    yield from _of_functions(rows)
    yield from _of_idle_time(rows)


def _of_scores(trajectories: Iterable[TrajectorySpan]) -> Iterator[Alarm]:
    scores: dict[tuple[str, str], list[float]] = defaultdict(list)
    for t in trajectories:
        if t.version is not None and t.score is not None:
            scores[t.domain, t.group].append(t.score)
    alike: dict[str, list[bool]] = defaultdict(list)
    for (domain, _), members in scores.items():
        if len(members) > 1:
            alike[domain].append(min(members) == max(members))
    for domain, equal in sorted(alike.items()):
        share = sum(equal) / len(equal)
        if share > ZERO_VARIANCE:
            meaning = "trained groups of equal rewards have no gradient: rollout.filter.zero_variance, or other prompts"
            yield Alarm("zero variance", domain, share, "share of groups", ZERO_VARIANCE, meaning)


def _of_metrics(rows: RunRows) -> Iterator[Alarm]:
    metrics = [row.metrics for row in rows.versions if row.samples][-WINDOW:]
    gap, effective = ([float(of[m]) for of in metrics if m in of] for m in ("behaviour_gap", "effective_share"))
    if gap and median(gap) > BEHAVIOUR_GAP:
        meaning = "engines and trainer disagree: staleness, or different arithmetic"
        yield Alarm("behaviour gap", f"last {len(gap)} steps", median(gap), "median", BEHAVIOUR_GAP, meaning)
    if effective and median(effective) < LEAST_EFFECTIVE:
        subject, meaning = f"last {len(effective)} steps", "samples are too stale to learn from: a lower staleness"
        yield Alarm(EFFECTIVE_SHARE, subject, median(effective), "median", LEAST_EFFECTIVE, meaning)


def _of_losses(rows: RunRows, findings: Mapping[tuple[str, str], str]) -> Iterator[Alarm]:
    """Aborts of stale trajectories, and the biases of all losses that a test shows."""
    trained = [charge for charge in rows.charges if charge.purpose != "eval"]
    for domain in sorted({charge.domain for charge in trained}):
        own = [charge for charge in trained if charge.domain == domain]
        stale = sum(c.trajectories for c in own if c.outcome == AbortReason.STALE)
        share = stale / sum(c.trajectories for c in own)
        if share > STALE_LOSSES:
            meaning = "aborted past the staleness bound: schedule paced, a higher staleness, or shorter trajectories"
            yield Alarm(STALE, domain, share, "share of trajectories", STALE_LOSSES, meaning)
    for (domain, fate), text in findings.items():
        lost = sum(c.trajectories for c in trained if c.domain == domain and c.outcome == fate)
        yield Alarm("biased losses", f"{domain}: {fate}", lost, "trajectories", None, text)


def _findings(report: Report) -> Iterator[tuple[str, str, str]]:
    """Domain, set and findings of the lost sets in a bias report."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    (table, *_) = report.tables
    at = {column.name: n for n, column in enumerate(table.columns)}
    for row in table.rows:
        if row[at["set"]] not in (bias.TRAINED, bias.DELAYED) and row[at["finding"]]:
            text = str(row[at["finding"]])
            found[str(row[at["domain"]]), str(row[at["set"]])].append(text.rpartition(": ")[2])
    yield from ((domain, fate, f"no random loss: {', '.join(texts)}") for (domain, fate), texts in found.items())


def _of_handoffs(rows: RunRows) -> Iterator[Alarm]:
    sums = {
        name: math.fsum(float(event.fields.get(name) or 0) for event in rows.events_of(HANDOFFS))
        for name in ("decoded", "failed", "empty")
    }
    whole = sums["decoded"] + sums["failed"]
    if whole and sums["failed"] / whole > FAILED_HANDOFFS:
        meaning = "timed out or refused, and prefilled again: leases.handoff_s, the link, or engines without prefill"
        yield Alarm("failed hand-offs", "prefill to decode", sums["failed"] / whole, "share", FAILED_HANDOFFS, meaning)
    if sums["decoded"] and sums["empty"] == sums["decoded"]:
        yield Alarm("empty hand-offs", "prefill to decode", 1.0, "share", 0.0, "prefill engines work for nothing")


def _of_functions(rows: RunRows) -> Iterator[Alarm]:
    for event in rows.events_of(OFFLOAD_STAGE):
        acted = event.fields.get("acted")
        if event.fields.get("stage") == OffloadStage.BREAKER and acted:
            meaning = "the circuit breaker was open: the provider failed several calls in a row"
            yield Alarm("function breaker", event.subject, float(acted), "items", None, meaning)
    for event in rows.events_of(FUNCTION_HEALTH):
        outcomes, faults = (float(event.fields.get(name) or 0) for name in ("outcomes", "faults"))
        limit = FAULT_SHARE * (rows.fault_threshold or 0.0)
        if outcomes and limit and faults / outcomes > limit:
            meaning = "infrastructure faults are near faults.max_rate, which ends the run"
            yield Alarm("function faults", event.subject, faults / outcomes, "share of items", limit, meaning)


def _of_idle_time(rows: RunRows) -> Iterator[Alarm]:
    states: dict[tuple[str, str], float] = defaultdict(float)
    for i in rows.intervals:
        role = "engines" if i.role in ENGINE_ROLES else i.role
        outside = role == TRAINER and i.state == ResourceState.IDLE and i.cause != WAITS_FOR_SAMPLES
        if i.cause != WARM_START and not outside:
            states[role, i.state] += i.unit_seconds
    for role, limit, meaning in (
        (TRAINER, TRAINER_IDLE, "it waits for samples: see the exposed parts of the rollout"),
        ("engines", ENGINES_IDLE, "they wait for environments, rewards or admission"),
    ):
        life = math.fsum(states[role, state] for state in (ResourceState.BUSY, ResourceState.IDLE, ResourceState.SYNC))
        idle = states[role, ResourceState.IDLE] / life if life else 0.0
        if idle > limit:
            yield Alarm("idle", role, idle, "share of its time", limit, meaning)


@table("alarms", "Alarms", optional=True)
def alarms_table(alarms: Sequence[Alarm]) -> Iterator[Row]:
    for alarm in alarms:
        yield {
            "alarm": alarm.alarm.replace("_", " "),
            "subject": alarm.subject,
            "value": as_number(alarm.value),
            "unit": alarm.unit,
            "limit": as_number(alarm.limit),
            "meaning": as_text(alarm.meaning, wrap=True),
        }
