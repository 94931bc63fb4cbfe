"""Advice: changes that were simulated, against the null model of changing nothing. Pure.

A trial is compared with the unchanged run seed by seed. Its interval is Student's t over these differences, at a
confidence that holds for all trials together (Bonferroni): with ten trials at 95 % each, one in three reports would
advise a change that does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollart.report.compare.alarms import Alarm, alarms_table
from rollart.report.compare.parts import ExposedPart, exposed_table
from rollart.report.rows import RunRows
from rollart.report.simulation import SimulationFigures, interval
from rollart.report.tables import Report, Row, Table, as_count, as_seconds, as_share, as_text, as_usd, ratio, table

LEAST_SHARE = 0.02
"""Least share of a run's seconds or dollars that is worth a trial, and advice: simulations of recorded runs deviate by
a few percent (docs/simulation.md), of which a comparison of two simulations cancels most."""

MOST_ADVISED = 3
"""Changes to judge at a time."""

UNSURE = 0.25
"""Deviation of the unchanged run's simulation from the recorded run beyond which the report warns."""

NOTHING = "nothing"

NO_ADVICE = "no change that was tried saves more than its interval"


@dataclass(frozen=True, slots=True)
class Trial:
    """A change, why it was tried, its effect besides speed ('' for none), and its simulations by seed."""

    change: str
    reason: str
    side_effect: str
    figures: Sequence[SimulationFigures]


@dataclass(frozen=True, slots=True)
class TrialGain:
    """Seconds and dollars that a trial saves for `trajectories` trained trajectories, each with half of its interval,
    and as shares of the unchanged run's."""

    saved_s: float
    half_s: float
    share_s: float
    saved_usd: float
    half_usd: float
    share_usd: float

    @property
    def saves_time(self) -> bool:
        return self.saved_s > self.half_s and self.share_s >= LEAST_SHARE

    @property
    def costs_time(self) -> bool:
        return -self.saved_s > self.half_s

    @property
    def saves_dollars(self) -> bool:
        return self.saved_usd > self.half_usd and self.share_usd >= LEAST_SHARE

    @property
    def helps(self) -> bool:
        return self.saves_time or (self.saves_dollars and not self.costs_time)

    @property
    def verdict(self) -> str:
        if self.saves_time:
            return "saves time"
        if self.costs_time:
            return "costs time"
        return "saves dollars" if self.saves_dollars else "no difference"


@dataclass(frozen=True, slots=True)
class TrialSet:
    """All trials of a run, the unchanged run, and the trained trajectories for which seconds and dollars are stated."""

    unchanged: Sequence[SimulationFigures]
    trials: Sequence[Trial]
    trajectories: int

    def seconds(self, figures: SimulationFigures) -> float:
        return self.trajectories / figures.trajectories_per_s

    def usd(self, figures: SimulationFigures) -> float:
        return figures.usd_per_1k * self.trajectories / 1000

    def gain(self, trial: Trial) -> TrialGain:
        """Of a trial of this set, or of several changes together. ValueError for other seeds, or fewer than two."""
        pairs = list(zip(self.unchanged, trial.figures, strict=True))
        if len(pairs) < 2 or any(a.seed != b.seed for a, b in pairs):
            raise ValueError("trials are compared seed by seed (rule: the same seeds, two at least)")
        confidence = 1 - 0.05 / max(1, len(self.trials))
        whole_s, _ = interval([self.seconds(a) for a, _ in pairs])
        whole_usd, _ = interval([self.usd(a) for a, _ in pairs])
        saved_s, half_s = interval([self.seconds(a) - self.seconds(b) for a, b in pairs], confidence)
        saved_usd, half_usd = interval([self.usd(a) - self.usd(b) for a, b in pairs], confidence)
        shares = ratio(saved_s, whole_s) or 0.0, ratio(saved_usd, whole_usd) or 0.0
        return TrialGain(saved_s, half_s or 0.0, shares[0], saved_usd, half_usd or 0.0, shares[1])

    def best(self) -> list[Trial]:
        """At most `MOST_ADVISED` trials that help, the one that saves the largest share of seconds or dollars first."""
        gains = [(trial, self.gain(trial)) for trial in self.trials]
        helpful = [(trial, gain) for trial, gain in gains if gain.helps]
        helpful.sort(key=lambda pair: (not pair[1].saves_time, -max(pair[1].share_s, pair[1].share_usd)))
        return [trial for trial, _ in helpful[:MOST_ADVISED]]


def advice(
    rows: RunRows,
    alarms: Sequence[Alarm],
    parts: Sequence[ExposedPart],
    found: TrialSet | None,
    together: Trial | None,
    notes: Sequence[str],
    recorded_s: float | None = None,
) -> Report:
    """The report. `found`: None if nothing was simulated; `together`: the advised changes in one simulation;
    `recorded_s`: seconds of the recorded loop."""
    best = [] if found is None else found.best()
    foot = [*([] if found is None else _notes(found, best, recorded_s)), *notes]
    tables = (alarms_table(alarms), exposed_table(rows, parts), _tried(found), _advised(found, best, together))
    return Report("advise", rows.run, tables, tuple(foot))


def _tried(found: TrialSet | None) -> Table:
    title = "Changes, simulated"
    if found is not None:
        title += f"; seconds and dollars for {found.trajectories:,} trained trajectories"
    return Table.of("tried", title, () if found is None else _trials(found), optional=True)


def _trials(found: TrialSet) -> Iterator[Row]:
    unchanged = Trial(NOTHING, "the run as it is", "", found.unchanged)
    for trial in (unchanged, *found.trials):
        gain = found.gain(trial)
        yield {
            "change": trial.change,
            "seconds": as_seconds(interval([found.seconds(f) for f in trial.figures])[0]),
            "saved_s": as_seconds(gain.saved_s),
            "±_s": as_seconds(gain.half_s),
            "saved": as_share(gain.share_s),
            "saved_usd": as_usd(gain.saved_usd),
            "±_usd": as_usd(gain.half_usd, people=False),
            "verdict": "-" if trial is unchanged else gain.verdict,
            "reason": as_text(trial.reason, wrap=True),
        }


@table("advice", "Advice", optional=True)
def _advised(found: TrialSet | None, best: Sequence[Trial], together: Trial | None) -> Iterator[Row]:
    """The advised changes, and their effect together, which is not the sum of their gains."""
    if found is None:
        return
    for n, trial in enumerate([*best, *([] if together is None else [together])], 1):
        gain = found.gain(trial)
        yield {
            "rank": as_count(None if trial is together else n),
            "change": trial.change,
            "saved_s": as_seconds(gain.saved_s),
            "±_s": as_seconds(gain.half_s),
            "saved": as_share(gain.share_s),
            "saved_usd": as_usd(gain.saved_usd),
            "±_usd": as_usd(gain.half_usd),
            "side_effect": as_text(trial.side_effect, wrap=True),
        }


def _notes(found: TrialSet, best: Sequence[Trial], recorded_s: float | None) -> Iterator[str]:
    if best:
        yield f"apply the first with: rollart launch RUN.yaml {best[0].change}"
    else:
        yield (NO_ADVICE if found.trials else "no change was tried: no part is exposed for long enough")
    seeds, count = len(found.unchanged), len(found.trials)
    yield f"±: half of an interval over {seeds} seeds, compared in pairs; 95 % for all {count} trials together"
    if recorded_s:
        simulated_s, _ = interval([found.seconds(f) for f in found.unchanged])
        apart = simulated_s / recorded_s - 1
        more, warning = "more" if apart > 0 else "less", ": take the advice with care" if abs(apart) > UNSURE else ""
        yield f"simulated unchanged, the loop takes {abs(apart):.0%} {more} than recorded{warning}"
