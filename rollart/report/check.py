"""A recorded run beside its simulation. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollart.report.tables import Cell, Report, Table, TableColumn


@dataclass(frozen=True, slots=True)
class RunTotals:
    """Seconds and dollars of a run from start to end (`wall_s`, `usd`), and of its training loop: from the start of the
    first step's rollouts to the publish of the last step's version. `waited_s` to `publish_s` are the trainer's parts
    of the loop, `engine_busy_s` adds up over engines."""

    steps: int
    wall_s: float
    loop_s: float
    usd: float
    loop_usd: float
    waited_s: float
    train_s: float
    publish_s: float
    engine_busy_s: float


@dataclass(frozen=True, slots=True)
class SimulationCheck:
    """A recorded run, and its simulated training loop. The time outside the loop (starts, warm start, evaluations) is
    no part of a simulation and is taken as recorded."""

    recorded: RunTotals
    simulated: RunTotals

    @property
    def wall_s(self) -> float:
        """Predicted seconds of the run."""
        return self.recorded.wall_s - self.recorded.loop_s + self.simulated.loop_s

    @property
    def usd(self) -> float:
        """Predicted dollars of the run."""
        return self.recorded.usd - self.recorded.loop_usd + self.simulated.loop_usd

    @property
    def loop_error(self) -> float:
        """Relative deviation of the loop's time."""
        return self.simulated.loop_s / self.recorded.loop_s - 1.0

    @property
    def loop_usd_error(self) -> float:
        """Relative deviation of the loop's dollars; 0 if the loop costs nothing."""
        return self.simulated.loop_usd / self.recorded.loop_usd - 1.0 if self.recorded.loop_usd else 0.0

    @property
    def wall_error(self) -> float:
        return self.wall_s / self.recorded.wall_s - 1.0

    @property
    def usd_error(self) -> float:
        return self.usd / self.recorded.usd - 1.0 if self.recorded.usd else 0.0


def check_report(run: str, check: SimulationCheck, notes: Sequence[str] = ()) -> Report:
    """The report: recorded against predicted."""
    a, b = check.recorded, check.simulated
    per: tuple[tuple[str, Callable[[RunTotals], float]], ...] = (
        ("step", lambda o: o.loop_s / o.steps),
        ("waiting for samples, a step", lambda o: o.waited_s / o.steps),
        ("training, a step", lambda o: o.train_s / o.steps),
        ("publish, a step", lambda o: o.publish_s / o.steps),
        ("engines busy, a step", lambda o: o.engine_busy_s / o.steps),
    )
    outside_s, outside_usd = a.wall_s - a.loop_s, a.usd - a.loop_usd
    rows: list[tuple[Cell, ...]] = [_row(what, "s", of(a), of(b)) for what, of in per]
    rows += [
        _row("training loop", "s", a.loop_s, b.loop_s),
        _row("training loop", "USD", a.loop_usd, b.loop_usd),
        ("before and after it", "s", outside_s, outside_s, None),
        ("before and after it", "USD", outside_usd, outside_usd, None),
        _row("wall time", "s", a.wall_s, check.wall_s),
        _row("dollars", "USD", a.usd, check.usd),
    ]
    columns = (
        TableColumn("what"),
        TableColumn("unit"),
        TableColumn("recorded", "number"),
        TableColumn("predicted", "number"),
        TableColumn("deviation", "share"),
    )
    table = Table("check", f"Recorded against simulated, {a.steps} steps", columns, tuple(rows))
    return Report("check", run, (table,), ("before and after the loop: as recorded", *notes))


def _row(label: str, unit: str, recorded: float, predicted: float) -> tuple[Cell, ...]:
    return label, unit, recorded, predicted, predicted / recorded - 1.0 if recorded else None
