"""One trajectory of a run: its row, its dollars, its content if that was kept, and the calls that may have scored
it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollart.errors import UsageError
from rollart.ledger.kept import KeptTrajectory
from rollart.ledger.reader import LedgerReader, TrajectoryRow
from rollart.report.trajectories.listing import SecondPrices
from serverless.types import Invocation


@dataclass(frozen=True, slots=True)
class FoundTrajectory:
    """`usd` by phase; `calls` by function, those that ran while the trajectory waited for its reward. `lives`: rows
    with its id, of which this is the last one: a member of a group that was killed with the run begins again."""

    row: TrajectoryRow
    usd: Mapping[str, float]
    kept: KeptTrajectory | None
    calls: Mapping[str, Sequence[Invocation]]
    lives: int
    keep: str
    """`keep` of the run; '' if it is unknown."""


def find_trajectory(reader: LedgerReader, id_: str) -> FoundTrajectory:
    """UsageError if the run has no trajectory with this id."""
    rows = list(reader.trajectories(id_=id_))
    if not rows:
        members = sorted({row.id for row in reader.trajectories(group=id_)})
        hint = f": it is a group, of {', '.join(members)}" if members else ""
        raise UsageError(f"no trajectory '{id_}' has ended{hint}", remedy="`rollart trajectories` lists them")
    row = max(rows, key=lambda r: r.t1)
    kept = next((one for one in reader.kept({id_}) if one.t == row.t1), None)
    calls = {}
    if row.reward_s is not None:
        functions = [] if kept is None else [score.function for score in kept.scores]
        calls = {name: reader.calls_between(name, row.t1 - row.reward_s, row.t1) for name in functions}
    keep = reader.config().get("run", {}).get("keep", {}).get("items", "")
    return FoundTrajectory(row, SecondPrices.of(reader).usd(row), kept, calls, len(rows), keep)
