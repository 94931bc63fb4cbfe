"""What was trained beside what was drawn and lost: the test behind it, and the report on a ledger by the command."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rollart.ledger.store import Ledger
from rollart.model import Group, GroupId, TrainSample, TrajectoryId
from rollart.ports import Charge, RunEvent
from rollart.report.bias import distance, p_value

values = st.lists(st.integers(0, 20).map(float), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(values, values)
def test_the_distance_is_that_of_the_reference(a: list[float], b: list[float]) -> None:
    assert distance(a, b) == pytest.approx(stats.ks_2samp(a, b).statistic, abs=1e-12)


@pytest.mark.parametrize(("n", "m"), [(30, 50), (200, 40), (300, 300)])
def test_the_p_value_is_near_the_exact_one(n: int, m: int) -> None:
    """On samples without ties, where the exact distribution is known."""
    draw = random.Random(n * m)
    for shift in (0.0, 0.2, 0.5):
        a, b = [draw.gauss(0, 1) for _ in range(n)], [draw.gauss(shift, 1) for _ in range(m)]
        exact = stats.ks_2samp(a, b, method="exact")
        assert p_value(distance(a, b), n, m) == pytest.approx(exact.pvalue, rel=0.15, abs=0.06)


class Recorded:
    """A ledger whose trajectories are written down as a run does. One publish trains what is `trained`."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._trained: list[Group] = []

    async def group(
        self, name: str, lengths: list[int], fate: str, *, attempt: str = "finished", suffix: str = ""
    ) -> None:
        """A group of trajectories that ended as `attempt`, and what became of it: trained, open or a reason."""
        group = GroupId(name)
        await self._ledger.admit(group, "math~" if "~" in name else "math", 0)
        samples = []
        for n, length in enumerate(lengths):
            trajectory = TrajectoryId(f"{name}.{n}{suffix}")
            if attempt == "finished":
                samples.append(sample(trajectory, group, length))
                await self._ledger.finish(samples[-1], charge(trajectory, length, attempt, score=float(n % 2)))
            else:
                self.attempt(trajectory, length, attempt)
        if fate == "trained":
            self._trained.append(Group(group, "math", tuple(samples)))
        elif fate != "open":
            await self._ledger.drop(group, fate)

    def attempt(self, trajectory: str, length: int, outcome: str) -> None:
        self._ledger.charge(charge(trajectory, length, outcome))

    def defer(self, group: str) -> None:
        self._ledger.event(RunEvent(0.0, "admission_deferred", group, {"domain": "math"}))

    async def end(self) -> None:
        await self._ledger.commit(version=1, step=1, consumed=self._trained, metrics={})


def charge(trajectory: str, length: int, outcome: str, score: float | None = None) -> Charge:
    return Charge(
        TrajectoryId(trajectory),
        domain="math",
        outcome=outcome,
        v0=0,
        engine_seconds=1.0,
        turns=1,
        prompt_tokens=1,
        action_tokens=length,
        success=None,
        score=score,
        purpose="train",
        t0=0.0,
        t1=1.0,
        first_tokens=1,
    )


def sample(trajectory: TrajectoryId, group: GroupId, length: int) -> TrainSample:
    n = length + 1
    return TrainSample(
        trajectory,
        group,
        "math",
        0,
        (1,) * n,
        (False, *(True,) * length),
        (0.0,) * n,
        (0,) * n,
        (0,) * n,
        (0.0,) * n,
        1.0,
        True,
    )


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """What `rollart report bias` says of a run that a coroutine has recorded."""
    from rollart.cli.main import run

    def of(write: Callable[[Recorded], Any], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
        directory = tmp_path / "run"

        async def main() -> None:
            with Ledger(directory, clock=lambda: 0.0, config={}, inline=True) as ledger:
                recorded = Recorded(ledger)
                await write(recorded)
                await recorded.end()

        asyncio.run(main())
        (directory / "resolved.yaml").write_text("")
        assert run(["report", "bias", str(directory), "-o", "json"]) == 0
        tables: dict[str, Any] = json.loads(capsys.readouterr().out)["tables"]
        return tables

    return of


def row(tables: Mapping[str, Any], table: str, **wanted: str) -> dict[str, Any]:
    (found,) = (r for r in tables[table] if wanted.items() <= r.items())
    return dict(found)


def test_a_schedule_that_drops_what_is_long_is_seen_to(report: Any, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(1)
    lengths = [[round(math.exp(draw.gauss(4, 1))) for _ in range(2)] for _ in range(200)]

    async def write(recorded: Recorded) -> None:
        for n, own in enumerate(lengths):
            await recorded.group(f"math-{n}", own, "stale" if max(own) > 150 else "trained")

    tables = report(write, capsys)
    kept = [length for own in lengths if max(own) <= 150 for length in own]
    every = [length for own in lengths for length in own]
    trained = row(tables, "bias", set="trained", figure="length")
    assert trained["mean"] == pytest.approx(sum(kept) / len(kept))
    assert trained["mean_against"] == pytest.approx(sum(every) / len(every))
    assert trained["ks"] == pytest.approx(stats.ks_2samp(kept, every).statistic)
    assert trained["p"] < 1e-6
    assert trained["finding"] == "length of trained is lower"
    assert row(tables, "bias", set="stale", figure="length")["finding"] == "stale is no random loss: length is higher"
    assert row(tables, "bias", set="trained", figure="reward")["finding"] == ""
    assert row(tables, "sets", set="drawn")["prompts"] == 200


def test_a_loss_by_chance_is_no_bias(report: Any, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(2)

    async def write(recorded: Recorded) -> None:
        for n in range(200):
            own = [round(math.exp(draw.gauss(4, 1))) for _ in range(2)]
            await recorded.group(f"math-{n}", own, "infra_fault" if n % 5 == 0 else "trained")

    assert {r["finding"] for r in report(write, capsys)["bias"]} == {""}


def test_every_reason_of_loss_has_its_rows(report: Any, capsys: pytest.CaptureFixture[str]) -> None:
    reasons = ("stale", "filtered", "redundant", "infra_fault", "deferred", "refused")

    async def write(recorded: Recorded) -> None:
        await recorded.group("math-0", [10, 20], "trained")
        for n, reason in enumerate(reasons):
            await recorded.group(f"math-{n + 1}", [5, 5], reason, attempt="finished" if n < 3 else reason)
        await recorded.group("math-90", [], "refused")  # refused before anything was generated
        await recorded.group("math-91", [7], "open")

    tables = report(write, capsys)
    sets = {r["set"]: r for r in tables["sets"]}
    assert list(sets) == ["drawn", "trained", *sorted(reasons), "open"]
    assert {name: sets[name]["prompts"] for name in ("drawn", "refused", "open", "stale")} == {
        "drawn": 8,
        "refused": 2,
        "open": 1,
        "stale": 1,
    }
    assert sets["infra_fault"]["cut_short"] == 1.0
    assert {r["set"] for r in tables["bias"]} == {"trained", *reasons}, "what is open is no loss"


def test_prompts_that_started_late_have_a_row_and_are_no_loss(report: Any, capsys: pytest.CaptureFixture[str]) -> None:
    async def write(recorded: Recorded) -> None:
        for n in range(4):
            await recorded.group(f"math-{n}", [10 * n], "trained")
        recorded.defer("math-2")
        recorded.defer("math-3")

    tables = report(write, capsys)
    sets = {r["set"]: r for r in tables["sets"]}
    assert {name: (r["prompts"], r["length"]) for name, r in sets.items()} == {
        "drawn": (4, 15.0),
        "trained": (4, 15.0),
        "delayed": (2, 25.0),
    }
    assert row(tables, "bias", set="delayed", figure="length")["against"] == "drawn"


def test_a_prompt_that_was_put_off_or_tried_again_is_drawn_once(
    report: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its first attempt is what was drawn; one that a fault cut is not, the next one is."""

    async def write(recorded: Recorded) -> None:
        await recorded.group("math-0", [90], "deferred", attempt="deferred")
        await recorded.group("math-0~2", [40], "trained")
        recorded.attempt("math-1.0", 3, "infra_fault")
        await recorded.group("math-1", [60], "trained", suffix="r2")
        recorded.attempt("math-2.0", 500, "stale")
        await recorded.group("math-2", [20], "trained", suffix="r2")

    sets = {r["set"]: r for r in report(write, capsys)["sets"]}
    drawn, trained = sets["drawn"], sets["trained"]
    assert (drawn["prompts"], drawn["trajectories"], drawn["length"]) == (3, 3, (90 + 60 + 500) / 3)
    assert (trained["prompts"], trained["length"]) == (3, 40.0)
    assert {name: sets[name]["trajectories"] for name in ("deferred", "infra_fault", "stale")} == {
        "deferred": 1,
        "infra_fault": 1,
        "stale": 1,
    }
