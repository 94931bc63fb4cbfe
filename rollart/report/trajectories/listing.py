"""The list of a run's trajectories, and the dollars of each. Pure: a reader in, a report out.

The busy dollars of engines are shared by the engine seconds of trajectories, those of environments by the seconds in
environments, and those of reward functions by the seconds that trajectories waited for rewards. So the dollars of all
trajectories add up to what these roles cost while busy; the rest (idle time, weight updates, training) is no
trajectory's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollart.ledger.intervals import ResourceState
from rollart.ledger.reader import LedgerReader, TrajectoryRow
from rollart.model import AbortReason
from rollart.report.cost import cost_lines
from rollart.report.functions import REWARD
from rollart.report.rows import ENGINE_ROLES, RunRows, collect
from rollart.report.tables import Report, Row, as_count, as_number, as_seconds, as_text, as_usd, table

SHORT = {
    AbortReason.INFRA_FAULT.value: "fault",
    AbortReason.GROUP_DROPPED.value: "dropped",
    "evaluated": "eval",
}
"""Outcomes with a shorter name for people; the others are those of the ledger."""

ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True)
class SecondPrices:
    """Dollars per second of a trajectory on engines, in its environment and in wait for its reward."""

    engine: float
    environment: float
    reward: float

    @classmethod
    def of(cls, reader: LedgerReader, rows: RunRows | None = None) -> SecondPrices:
        """`rows`: those of the run, if they were read already."""
        engine, environment, reward = reader.phase_seconds()
        usd = {"engine": 0.0, ENVIRONMENT: 0.0, REWARD: 0.0}
        busy_s = 0.0
        for line in cost_lines(rows or collect(reader, "")):
            role = "engine" if line.role in ENGINE_ROLES else line.role
            if role in usd and line.state == ResourceState.BUSY:
                usd[role] += line.usd
                busy_s += line.seconds if role == "engine" else 0.0
        # As in `report cost`: engine time that no trajectory paid for is unattributed.
        whole = max(engine, busy_s)
        return cls(_per(usd["engine"], whole), _per(usd[ENVIRONMENT], environment), _per(usd[REWARD], reward))

    def usd(self, row: TrajectoryRow) -> dict[str, float]:
        """Dollars of a trajectory by phase."""
        return {
            "engine": self.engine * row.engine_s,
            "reset": self.environment * row.reset_s,
            "environment": self.environment * row.env_s,
            "reward": self.reward * (row.reward_s or 0.0),
        }


def _per(usd: float, seconds: float) -> float:
    return usd / seconds if seconds > 0 else 0.0


def outcome_of(row: TrajectoryRow) -> str:
    """The name of its outcome for people."""
    return SHORT.get(row.outcome, row.outcome)


def recorded_outcomes(outcome: str | None) -> list[str]:
    """The ledger's names of an outcome; empty for all outcomes."""
    return [] if outcome is None else [name for name, short in SHORT.items() if short == outcome] or [outcome]


def listing(
    reader: LedgerReader, run: str, *, domain: str | None, outcome: str | None, sort: str, most: int | None
) -> Report:
    """The trajectories of a domain and with an outcome, at most `most`, the largest by `sort` (end, tokens, reward or
    usd) first."""
    prices, outcomes = SecondPrices.of(reader), recorded_outcomes(outcome)
    rows = list(reader.trajectories(domain=domain, outcomes=outcomes, order=order_of(sort, prices), most=most))
    count = len(rows) if most is None else reader.trajectory_count(domain=domain, outcomes=outcomes)
    notes = [f"{len(rows):,} of {count:,} trajectories" + ("" if len(rows) == count else " (-n 0 shows all)")]
    notes.append("tokens are sampled ones; usd is the share by seconds of what engines, environments and rewards cost")
    return Report("trajectories", run, (listed(rows, prices),), tuple(notes))


def order_of(sort: str, prices: SecondPrices) -> str:
    """The order of the ledger's rows with the largest by `sort` first."""
    by_usd = (
        f"{prices.engine!r} * t.engine_seconds + {prices.environment!r} * (t.reset_s + t.env_s) "
        f"+ {prices.reward!r} * coalesce(t.reward_s, 0.0)"
    )
    column = {"end": "t.t1", "tokens": "t.action_tokens", "reward": "t.score", "usd": by_usd}[sort]
    return f"{column} DESC, t.rowid DESC"


@table("trajectories", "Trajectories")
def listed(rows: Sequence[TrajectoryRow], prices: SecondPrices) -> Iterator[Row]:
    for row in rows:
        usd = sum(prices.usd(row).values())
        yield {
            "trajectory": row.id,
            "domain": row.domain,
            "outcome": outcome_of(row),
            "step": as_count(row.step),
            "v0": as_count(row.v0 if row.v0 >= 0 else None, people=False),
            "turns": as_count(row.turns),
            "tokens": as_count(row.action_tokens),
            "prefilled_tokens": as_count(row.prompt_tokens, people=False),
            "reward": as_number(row.score),
            "success": as_text(None if row.success is None else "yes" if row.success else "no", people=False),
            "began_s": as_seconds(row.t0, people=False),
            "seconds": as_number(row.t1 - row.t0),
            "engine_s": as_number(row.engine_s, people=False),
            "reset_s": as_number(row.reset_s, people=False),
            "environment_s": as_number(row.env_s, people=False),
            "reward_s": as_number(row.reward_s, people=False),
            "usd_per_thousand": as_usd(1000.0 * usd),
            "usd": as_usd(usd, people=False),
        }
