"""A run's dollars by its plan: the forecast before it starts, and the plan against the bill. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rollart.ledger.reader import RunFacts
from rollart.money import dollars, dollars_between
from rollart.report.charts import duration
from rollart.report.rows import pool_prices
from rollart.report.tables import Row, as_count, as_number, as_text, as_usd, as_value, ratio, table


@dataclass(frozen=True, slots=True)
class PlannedCost:
    """Dollars of all devices, and of functions, from the first step to the last, at the plan's rate; without the
    start-up. `half` is what the relative error band of the rate makes of them."""

    steps: int
    seconds: float
    usd: float
    half: float
    usd_per_hour: float
    rate: float
    """Trained trajectories per second."""
    trajectories: int
    """Trained ones of the whole run."""
    oldest: str
    """Date of the oldest of the devices' prices; empty if none has one."""

    @property
    def text(self) -> str:
        """`$1,240 ± 180 to step 500, in 2 d 3 h`."""
        return f"{dollars_between(self.usd, self.half)} to step {self.steps:,}, in {duration(self.seconds)}"

    @property
    def basis(self) -> str:
        priced = f", device prices of {self.oldest} and later" if self.oldest else ""
        return f"the plan's rate of {self.rate:.3g} trajectories/s ± {self.half / self.usd:.0%}{priced}"


@dataclass(frozen=True, slots=True)
class SimulatedCost:
    """Dollars per 1,000 trained trajectories of simulations: a mean, half of its 95 % interval (None for one
    simulation), and the simulations in words."""

    usd_per_1k: float
    half: float | None
    basis: str


def planned_cost(config: Mapping[str, Any]) -> PlannedCost | None:
    """From a run's configuration (`Resolved.to_dict`). None for a plan without a rate, and for one that costs
    nothing."""
    found, run = config.get("plan", {}).get("placement"), config.get("run", {})
    steps, trajectories = run.get("steps"), run.get("batch", {}).get("trajectories")
    if not found or not steps or not trajectories or not found.get("rate") or not found.get("usd_per_hour_all"):
        return None
    seconds = steps * trajectories / found["rate"]
    usd = seconds / 3600.0 * found["usd_per_hour_all"]
    dates = [pool.date for pool in pool_prices(config) if pool.date and pool.usd]
    return PlannedCost(
        steps=steps,
        seconds=seconds,
        usd=usd,
        half=usd * found.get("band", 0.0),
        usd_per_hour=found["usd_per_hour_all"],
        rate=found["rate"],
        trajectories=steps * trajectories,
        oldest=min(dates, default=""),
    )


def forecast_lines(config: Mapping[str, Any]) -> Iterator[str]:
    """The run's dollars by its plan, before it starts, and a warning if the budget is below all of their interval.
    Nothing for a plan without a rate or a price."""
    found, budget = planned_cost(config), config.get("run", {}).get("budget", {}).get("usd")
    if found is not None:
        yield f"forecast: {found.text} ({found.basis})"
        if budget is not None and found.usd - found.half > budget:
            yield f"warning: budget.usd is {dollars(budget)}: by the forecast the run stops before its last step"


@table("forecast", "Forecast of the whole run, without its start", optional=True)
def forecast_table(found: PlannedCost | None, beside: SimulatedCost | None = None) -> Iterator[Row]:
    """Dollars to the last step by the plan, and by its simulation."""
    if found is None:
        return
    rows: list[tuple[float, float | None, str]] = [(found.usd, found.half, found.basis)]
    if beside is not None:
        thousands = found.trajectories / 1000.0
        half = None if beside.half is None else beside.half * thousands
        rows.append((beside.usd_per_1k * thousands, half, beside.basis))
    for usd, half, basis in rows:
        yield {
            "to_step": as_count(found.steps),
            "usd": as_usd(usd),
            "±": as_usd(half),
            "hours": as_number(found.seconds / 3600.0 if basis == found.basis else None),
            "basis": as_text(basis, wrap=True),
        }


@table("plan", "Plan against actual", optional=True)
def plan_table(planned: PlannedCost | None, facts: RunFacts, usd: float) -> Iterator[Row]:
    """The plan's figures beside those of the run so far; `ratio` is actual over planned. Empty without a plan that has
    a rate and a price."""
    if planned is None or not facts.seconds:
        return
    share = (facts.step or 0) / planned.steps
    trained = facts.trained_samples
    thousand = planned.usd_per_hour / 3600.0 / planned.rate * 1000.0
    figures = (
        (f"to step {facts.step or 0:,}", "USD", planned.usd * share, usd),
        ("per hour", "USD", planned.usd_per_hour, usd / facts.seconds * 3600.0),
        ("per 1,000 trained trajectories", "USD", thousand, ratio(usd * 1000.0, trained)),
        ("trajectories trained", "1/s", planned.rate, trained / facts.seconds),
    )
    for what, unit, plan, actual in figures:
        yield {
            "what": what,
            "unit": unit,
            "plan": as_value(plan),
            "actual": as_value(actual),
            "ratio": as_number(None if actual is None else ratio(actual, plan)),
        }
