"""Exposed beside busy seconds of each part of a run: by how much the run would be shorter if the part took no time.
Pure, but for `read_parts`.

Exposed seconds of parts do not add up: two parts that hide each other expose nothing, and both together may expose all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rollart.ledger.reader import LedgerReader, TrajectorySpan
from rollart.policy.schedules import SCHEDULES, Admission, InFlightHandling
from rollart.report.exposure import TRAINER, RunTiming, Span, TrajectoryLife
from rollart.report.rows import RunRows
from rollart.report.tables import Row, as_seconds, as_share, as_usd, ratio, table

GENERATION, RESETS, ENVIRONMENTS, REWARDS = "generation", "environment resets", "environment steps", "rewards"
TRAINING, PUBLISHES = "training", "publishes"

ROLLOUT = (GENERATION, RESETS, ENVIRONMENTS, REWARDS)
"""Parts of a trajectory's time."""


@dataclass(frozen=True, slots=True)
class ExposedPart:
    """A part of a run: seconds that trajectories (or the trainer) spent in it, added up, and seconds by which the run
    would be shorter without it."""

    part: str
    busy_s: float
    exposed_s: float


def read_parts(reader: LedgerReader, trajectories: Iterable[TrajectorySpan]) -> list[ExposedPart]:
    """The parts of a recorded or simulated run with these trajectories; none for a run without a training step."""
    config = reader.config()
    schedule = config.get("simulated", {}).get("schedule") or config.get("run", {}).get("schedule")
    rules = SCHEDULES.get(schedule, {})
    return exposed_parts(
        [t for t in trajectories if t.purpose != "eval"],
        [Span(*row[:5]) for row in reader.spans() if row[0] == TRAINER],
        drained=rules.get("in_flight") is InFlightHandling.DRAINED,
        next_batch=rules.get("admission") is Admission.NEXT_BATCH,
    )


def exposed_parts(
    trajectories: Sequence[TrajectorySpan], spans: Sequence[Span], *, drained: bool = False, next_batch: bool = False
) -> list[ExposedPart]:
    """The parts; see `RunTiming` for the model and its limits. A reset is counted as waited for, prefetched or not."""
    lives = [TrajectoryLife(t.domain, t.t0, t.t1, t.group, t.version, t.reward_s) for t in trajectories]
    timing = RunTiming(spans, lives, drained=drained, next_batch=next_batch)
    if not timing.training_s:
        return []
    seconds: dict[str, Callable[[TrajectorySpan], float]] = {
        RESETS: lambda t: min(t.reset_s, t.t1 - t.t0),
        ENVIRONMENTS: lambda t: t.env_s,
        REWARDS: lambda t: t.reward_s or 0.0,
        GENERATION: lambda t: max(0.0, t.t1 - t.t0 - t.reset_s - t.env_s - (t.reward_s or 0.0)),
    }
    found = []
    for part in ROLLOUT:
        saved = {n: s for n, t in enumerate(trajectories) if (s := seconds[part](t)) > 0.0}
        found.append(ExposedPart(part, math.fsum(saved.values()), timing.exposed_s(saved)))
    found.append(ExposedPart(TRAINING, timing.training_s, timing.exposed_s({}, training=True)))
    found.append(ExposedPart(PUBLISHES, timing.publishing_s, timing.exposed_s({}, publishing=True)))
    return found


@table("exposed", "Seconds by part: busy, and exposed (by which the run would be shorter without the part)")
def exposed_table(rows: RunRows, parts: Sequence[ExposedPart]) -> Iterator[Row]:
    run_s = rows.facts.seconds
    usd_per_s = math.fsum(usd * hours for usd, hours in rows.device_hours) / run_s if run_s else 0.0
    for part in sorted(parts, key=lambda part: -part.exposed_s):
        yield {
            "part": part.part,
            "busy_s": as_seconds(part.busy_s),
            "exposed_s": as_seconds(part.exposed_s),
            "share_of_run": as_share(ratio(part.exposed_s, run_s)),
            "exposed_usd": as_usd(part.exposed_s * usd_per_s),
        }
