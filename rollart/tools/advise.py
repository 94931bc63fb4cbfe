"""`rollart advise`: changes of a run, or of a plan, that a simulation of this very run shows to save time or dollars.

Candidates follow from the alarms and the exposed parts. Each is simulated with the seeds of the unchanged run, and
compared with it seed by seed: trajectories are drawn from the recorded ones by (seed, prompt), so a seed has the same
prompts on both sides. The null model is to change nothing.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollart.errors import RollartError, SpecError
from rollart.ledger.reader import LedgerReader
from rollart.report.compare.advice import LEAST_SHARE, NOTHING, Trial, TrialSet, advice
from rollart.report.compare.alarms import STALE, TOO_STALE, Alarm, read_alarms
from rollart.report.compare.parts import (
    GENERATION,
    PUBLISHES,
    RESETS,
    REWARDS,
    ROLLOUT,
    TRAINING,
    ExposedPart,
    read_parts,
)
from rollart.report.offload import SERVED
from rollart.report.profile import measured_profiles
from rollart.report.rows import RunRows, collect
from rollart.report.simulation import SimulationFigures
from rollart.report.tables import Report
from rollart.settings.resolve import Resolved, forecast, read_specs
from rollart.settings.run import LAG
from rollart.tools.replay import PreparedReplay, prepare_from_run, with_changes
from rollart.tools.simulate import ReplayPlan
from rollart.tools.simulations import SimulationTask, simulate_all
from serverless.types import Invocation

STEPS = 20
"""Most steps of each simulation: the pipeline fills in two, and 18 give a mean."""

SCALING = 4
"""Factor of a function's concurrency, and divisor of its batches, in a trial."""

OVERHEAD = 0.05
"""Share of the seconds of a function's calls from which waits for full batches, or starts of workers, are varied."""

LONG_KEEP_ALIVE_S = 600.0

REDUNDANCY = 1.25
"""Factor of redundancy in a trial: a fifth of the rollout is cancelled."""

DRAINED = ("sync", "sync_plus")
"""Schedules under which training waits for the rollout, and the rollout for training."""

OLDER_SAMPLES = "samples are older by a version: compare success (`rollart report curve`)"
CANCELS = "cancels the longest trajectories: `rollart report bias` shows the selection"


@dataclass(frozen=True, slots=True)
class CandidateChange:
    """Overrides that are tried together, why, and their effect besides speed ('' for none)."""

    keys: tuple[str, ...]
    reason: str
    side_effect: str = ""

    @property
    def text(self) -> str:
        return " ".join(self.keys)


@dataclass(frozen=True, slots=True)
class RunEvidence:
    """Facts of a run, or of its simulation: sums, alarms, exposed parts, and the scoring calls of each function."""

    rows: RunRows
    alarms: Sequence[Alarm]
    parts: Sequence[ExposedPart]
    calls: Mapping[str, Sequence[Invocation]]

    def exposes(self, *parts: str) -> bool:
        """True if one of the parts costs a share of the run's seconds that is worth a trial."""
        return any(p.part in parts and p.exposed_s > LEAST_SHARE * self.rows.facts.seconds for p in self.parts)

    def alarms_of(self, *kinds: str) -> bool:
        return any(alarm.alarm in kinds for alarm in self.alarms)


def read_evidence(directory: Path, name: str) -> RunEvidence:
    calls: dict[str, list[Invocation]] = defaultdict(list)
    with LedgerReader(directory) as reader:
        for call in reader.calls():
            if call.items and call.cause in SERVED:
                calls[call.function].append(call)
        rows, trajectories = collect(reader, name), list(reader.trajectory_spans())
        return RunEvidence(rows, read_alarms(reader, rows, trajectories), read_parts(reader, trajectories), calls)


def observe(directory: Path, name: str) -> Report:
    """The report without simulations: alarms and exposed parts."""
    found = read_evidence(directory, name)
    return advice(found.rows, found.alarms, found.parts, None, None, ())


def candidates(resolved: Resolved, evidence: RunEvidence) -> Iterator[CandidateChange]:
    """Changes for the exposed parts and the alarms. The specs may not allow all of them."""
    run, cluster = resolved.run, resolved.cluster
    if evidence.exposes(REWARDS):
        yield from _of_functions(resolved, evidence)
    if evidence.exposes(RESETS) and run.rollout.prefetch == 0:
        yield CandidateChange(("rollout.prefetch=auto",), "resets are exposed", "more environments at a time")
    if evidence.exposes(GENERATION) and cluster.engines.count is not None:
        more = f"cluster.engines.count={cluster.engines.count + 1}"
        yield CandidateChange((more,), "generation is exposed", "one more engine")
    if evidence.exposes(*ROLLOUT):
        yield from _of_schedule(resolved, evidence)
    elif evidence.alarms_of(STALE):
        yield from _of_staleness(resolved, evidence, "stale trajectories are lost")
    if evidence.exposes(TRAINING) and not run.training.stream:
        yield CandidateChange(("training.stream=true",), "training is exposed")
    if evidence.exposes(PUBLISHES) and not run.weights.overlap and run.schedule not in DRAINED:
        yield CandidateChange(("weights.overlap=true",), "publishes are exposed", OLDER_SAMPLES)
    if cluster.engines.count is not None and cluster.engines.count > 1 and not evidence.exposes(GENERATION):
        fewer = f"cluster.engines.count={cluster.engines.count - 1}"
        yield CandidateChange((fewer,), "generation is hidden: fewer engines may do")


def _of_functions(resolved: Resolved, evidence: RunEvidence) -> Iterator[CandidateChange]:
    for name, spec in resolved.functions.items():
        calls, key = evidence.calls.get(name, ()), f"functions.{name}"
        if not calls:
            continue
        if _most_at_a_time(calls) >= spec.concurrency:
            more = f"{key}.concurrency={min(10_000, SCALING * spec.concurrency)}"
            effect = "more workers; those on the run's own cores compete for them"
            yield CandidateChange((more,), "rewards are exposed, and all workers are in use", effect)
        if sum(call.items for call in calls) > len(calls):
            smaller = f"{key}.batch_items={max(1, spec.batch.max_items // SCALING)}"
            yield CandidateChange((smaller,), "rewards are exposed, and scored in batches", "more calls")
        cold_s, whole_s = sum(c.cold_start_s for c in calls), sum(c.t1 - c.t0 for c in calls)
        if spec.batch.max_wait_ms / 1e3 > OVERHEAD * whole_s / len(calls):
            yield CandidateChange((f"{key}.batch_wait_ms=0",), "rewards are exposed, and wait for others", "more calls")
        if cold_s > OVERHEAD * whole_s and spec.keep_alive_s < LONG_KEEP_ALIVE_S:
            longer = f"{key}.keep_alive_s={LONG_KEEP_ALIVE_S:g}"
            yield CandidateChange((longer,), "rewards are exposed, and workers start anew", "idle workers")


def _most_at_a_time(calls: Sequence[Invocation]) -> int:
    most = now = 0
    for _, change in sorted([*((call.t0, 1) for call in calls), *((call.t1, -1) for call in calls)]):
        now += change
        most = max(most, now)
    return most


def _of_schedule(resolved: Resolved, evidence: RunEvidence) -> Iterator[CandidateChange]:
    run, rollout = resolved.run, resolved.run.rollout
    reason = "the rollout is exposed"
    if run.schedule in LAG:  # stages follow each other
        asynchronous = "schedule=async", "staleness=1"
        yield CandidateChange(asynchronous, f"{reason} under {run.schedule}", OLDER_SAMPLES)
    else:
        yield from _of_staleness(resolved, evidence, reason)
    if rollout.redundancy.groups == 1.0 and rollout.tail_batching is None:
        yield CandidateChange((f"rollout.redundancy.groups={REDUNDANCY}",), f"{reason}: its last groups", CANCELS)
        if run.schedule in DRAINED:
            yield CandidateChange(("rollout.tail_batching={}",), f"{reason}: its longest prompts", "long prompts later")


def _of_staleness(resolved: Resolved, evidence: RunEvidence, reason: str) -> Iterator[CandidateChange]:
    """Nothing makes samples older that are too old to learn from already."""
    if resolved.run.schedule in LAG:
        return
    if not evidence.alarms_of(*TOO_STALE):
        yield CandidateChange((f"staleness={resolved.run.staleness + 1}",), reason, OLDER_SAMPLES)
    if resolved.run.schedule != "paced":
        yield CandidateChange(("schedule=paced",), reason, "batches wait for groups at their bound")


class AdviceSubject:
    """A recorded run, or a plan, and its variants."""

    def __init__(self, recorded: Path | None, run: Path | None, cluster: Path | None, overrides: Sequence[str]) -> None:
        self._run, self._cluster, self._overrides = run, cluster, tuple(overrides)
        self.directory = recorded
        self._prepared: PreparedReplay | None = None
        if recorded is not None:
            self._prepared = prepare_from_run(recorded, cluster, overrides, resample=True)
            self.resolved = self._prepared.resolved
        else:
            self.resolved = forecast(read_specs(run, cluster, overrides, measure=measured_profiles))

    @property
    def replay(self) -> ReplayPlan | None:
        return None if self._prepared is None else self._prepared.replay

    @property
    def note(self) -> str:
        return f"plan: {self.resolved.plan.binds}" if self._prepared is None else self._prepared.note

    @property
    def recorded_s(self) -> float | None:
        """Seconds of the recorded loop; None of a plan, and of a run that was resumed or is under other specs."""
        if self._prepared is None or self._overrides or self._cluster is not None:
            return None
        recording = self._prepared.replay.recording
        return recording.totals.loop_s if recording.starts == 1 else None

    def variant(self, keys: Sequence[str]) -> Resolved:
        """The run with further overrides. SpecError if they break a rule, or the cluster has no room."""
        overrides = [*self._overrides, *keys]
        if self._prepared is not None and self.directory is not None:
            return with_changes(self._prepared, self.directory, self._cluster, overrides).resolved
        return forecast(read_specs(self._run, self._cluster, overrides, measure=measured_profiles))


def advise(
    subject: AdviceSubject,
    name: str,
    *,
    seeds: int,
    steps: int | None = None,
    workers: int | None = None,
    on_trial: Callable[[str], None] = lambda _: None,
) -> Report:
    """The advice for a recorded run, or for a plan, whose evidence is its own simulation. `seeds`: two at least, for an
    interval."""
    resolved, replay, directory = subject.resolved, subject.replay, subject.directory
    if steps is None:
        steps = min(STEPS, resolved.run.steps if replay is None else replay.recording.totals.steps)

    def simulated(variants: Sequence[Resolved], keep: Path | None = None) -> list[list[SimulationFigures]]:
        first = resolved.run.seed
        tasks = [
            SimulationTask(v, v.run.schedule, seed, steps, keep if seed == first else None, replay=replay)
            for v in variants
            for seed in range(first, first + seeds)
        ]
        found = simulate_all(tasks, workers=workers)
        return [found[n : n + seeds] for n in range(0, len(found), seeds)]

    def trials(known: Sequence[ResolvedChange]) -> list[Trial]:
        """The trials of candidates; those whose simulation fails are noted."""
        try:
            figures = simulated([variant for _, variant in known])
        except RollartError as error:
            if len(known) > 1:  # the error does not name the candidate
                return [trial for one in known for trial in trials([one])]
            notes.append(f"not tried: {known[0][0].text}: {_first_line(error)}")
            return []
        return [Trial(c.text, c.reason, c.side_effect, f) for (c, _), f in zip(known, figures, strict=True)]

    with tempfile.TemporaryDirectory(prefix="rollart-advise-", ignore_cleanup_errors=True) as scratch:
        on_trial(NOTHING)
        (unchanged,) = simulated([resolved], None if directory is not None else Path(scratch))
        evidence = read_evidence(directory or Path(scratch), name)
    known, notes = _variants(subject, candidates(resolved, evidence))
    for candidate, _ in known:
        on_trial(candidate.text)
    planned = resolved.run.steps * resolved.run.batch.trajectories
    trained = planned if directory is None else evidence.rows.facts.trained_samples
    found = TrialSet(unchanged, trials(known) if known else [], trained)
    combined = combined_change(subject, found.best())
    together = trials([combined]) if combined else []
    notes.insert(0, subject.note)
    parts = evidence.alarms, evidence.parts
    return advice(evidence.rows, *parts, found, together[0] if together else None, notes, subject.recorded_s)


ResolvedChange = tuple[CandidateChange, Resolved]
"""A candidate that the specs allow, and the run with it."""


def _variants(subject: AdviceSubject, wanted: Iterable[CandidateChange]) -> tuple[list[ResolvedChange], list[str]]:
    """The candidates that the specs allow, resolved, and a note for each other one."""
    found, notes = [], []
    for candidate in wanted:
        try:
            found.append((candidate, subject.variant(candidate.keys)))
        except RollartError as error:
            notes.append(f"not tried: {candidate.text}: {_first_line(error)}")
    return found, notes


def combined_change(subject: AdviceSubject, best: Sequence[Trial]) -> ResolvedChange | None:
    """The advised changes as one, without those that set a key again or that the specs do not allow beside the others;
    None if that leaves fewer than two."""
    keys: dict[str, str] = {}
    combined, found = list[Trial](), None
    for trial in best:
        own = dict(key.split("=", 1) for key in trial.change.split())
        if own.keys() & keys.keys():
            continue
        effects = "; ".join(dict.fromkeys(t.side_effect for t in (*combined, trial) if t.side_effect))
        texts = tuple(f"{key}={value}" for key, value in (keys | own).items())
        variants, _ = _variants(subject, [CandidateChange(texts, "advised", effects)])
        if variants:
            keys, found = keys | own, variants[0]
            combined.append(trial)
    return found if len(combined) > 1 else None


def _first_line(error: RollartError) -> str:
    """The first problem, without the position in the run's saved specs."""
    where = error.where if isinstance(error, SpecError) else ""
    return error.message.splitlines()[0].removeprefix(f"{where}: ")
