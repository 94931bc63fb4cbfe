"""Advice as values: alarms of a ledger, exposed parts, and trials that are advised only beyond their intervals."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollart.ledger.reader import LedgerReader, TrajectorySpan
from rollart.ledger.store import Ledger
from rollart.model import Group, GroupId, TrajectoryId
from rollart.ports import Charge, Interval, RunEvent
from rollart.report.compare.advice import NO_ADVICE, Trial, TrialSet, advice
from rollart.report.compare.alarms import read_alarms
from rollart.report.compare.parts import exposed_parts
from rollart.report.rows import collect
from rollart.report.simulation import SimulationFigures
from tests.ledger.conftest import make_sample
from tests.report.test_exposure import spans
from tests.report.test_report import cells, rows

SEEDS = 4


def trial(name: str, rates: Sequence[float], usd: float = 10.0) -> Trial:
    """A trial whose simulations train `rates` trajectories per second."""
    figures = [
        SimulationFigures("async", seed, "", 10.0, 5, 1, 1.0, 0.0, 0.5, 0.1, rate, 100.0, 0.5, usd, 0.2)
        for seed, rate in enumerate(rates)
    ]
    return Trial(name, "a test", "", figures)


def trials(*others: Trial) -> TrialSet:
    return TrialSet(trial("nothing", (1.0, 1.25, 0.8, 1.0)).figures, others, 1000)


def test_a_gain_is_that_of_pairs_of_seeds() -> None:
    """Seeds differ by half, and each gains exactly a fifth of its seconds: the gain's interval is that of a fifth."""
    found = trials(trial("faster", (1.25, 1.5625, 1.0, 1.25)))
    gain = found.gain(found.trials[0])
    assert gain.saved_s == pytest.approx(0.2 * (1000 + 800 + 1250 + 1000) / 4)
    assert gain.share_s == pytest.approx(0.2)
    assert gain.half_s < gain.saved_s
    assert gain.verdict == "saves time"


def test_noise_is_no_gain_and_a_small_gain_is_no_advice() -> None:
    noise, small = trial("noise", (1.6, 0.9, 1.1, 1.0)), trial("small", (1.01, 1.2625, 0.808, 1.01))
    slower = trial("slower", (0.5, 0.625, 0.4, 0.5))
    found = trials(noise, small, slower)
    assert [found.gain(t).verdict for t in found.trials] == ["no difference", "no difference", "costs time"]
    report = advice(rows(), (), (), found, None, ())
    assert cells(report, "advice") == []
    assert NO_ADVICE in report.notes
    assert [row["change"] for row in cells(report, "tried")] == ["nothing", "noise", "small", "slower"]
    assert cells(report, "tried")[0]["saved_s"] == 0


def test_more_trials_need_more_evidence() -> None:
    """The same figures as one of many trials are no evidence: one in twenty of them would look like a gain."""
    once = trial("once", (1.15, 1.5, 0.92, 1.3))
    assert trials(once).gain(once).saves_time
    assert not trials(*[once] * 20).gain(once).saves_time


def test_dollars_alone_are_advised_unless_they_cost_time() -> None:
    cheaper = trial("cheaper", (1.0, 1.25, 0.8, 1.0), usd=5.0)
    slower = trial("slower", (0.5, 0.625, 0.4, 0.5), usd=5.0)
    faster = trial("faster", (1.25, 1.5625, 1.0, 1.25))
    found = trials(cheaper, slower, faster)
    assert [t.change for t in found.best()] == ["faster", "cheaper"], "time first"
    assert found.gain(cheaper).verdict == "saves dollars"
    together = trial("faster cheaper", (1.25, 1.5625, 1.0, 1.25), usd=5.0)
    report = advice(rows(), (), (), found, together, ("a note",), recorded_s=500.0)
    assert [(row["rank"], row["change"]) for row in cells(report, "advice")] == [
        (1, "faster"),
        (2, "cheaper"),
        (None, "faster cheaper"),
    ]
    assert any("rollart launch RUN.yaml faster" in note for note in report.notes)
    assert any("with care" in note for note in report.notes), "the simulation takes twice the recorded seconds"


def test_at_most_three_are_advised() -> None:
    found = trials(*(trial(f"t{n}", [r * (1.2 + n / 10) for r in (1.0, 1.25, 0.8, 1.0)]) for n in range(5)))
    assert [t.change for t in found.best()] == ["t4", "t3", "t2"]


def test_other_seeds_are_no_pair() -> None:
    found = trials()
    with pytest.raises(ValueError, match="seed by seed"):
        found.gain(Trial("other", "", "", trial("", [1.0] * 5).figures[1:]))


def test_parts_of_a_run_that_waits_for_rewards() -> None:
    """Two steps of one trajectory each, one after the other: 1 s of reset, 2 s in its environment, 4 s of reward and
    3 s of generation, then 1 s of training and 1 s of publishing."""
    lives = [
        TrajectorySpan(f"{n}.0", "lake", "train", "trained", n, f"{n}", n + 1, 2, 8, 4, 1.0, 1.0, t, t + 10, 1, 2, 4)
        for n, t in enumerate((0.0, 12.0))
    ]
    found = exposed_parts(lives, spans((0, 10, 11, 12), (12, 22, 23, 24)))
    assert {p.part: (p.busy_s, p.exposed_s) for p in found} == {
        "environment resets": (2, 2),
        "environment steps": (4, 4),
        "rewards": (8, 8),
        "generation": (6, 6),
        "training": (2, 2),
        "publishes": (2, 2),
    }
    assert exposed_parts(lives, []) == [], "a run without a step"


async def record(directory: Path) -> None:
    """A run with one alarm of every kind."""
    with Ledger(directory, clock=lambda: 0.0, config={"run": {"faults": {"max_rate": 0.05}}}, inline=True) as ledger:
        ledger.interval(Interval("engine", "engine-0", 0.0, 2.0, "busy"))
        ledger.interval(Interval("engine", "engine-0", 2.0, 8.0, "idle", "starved"))
        ledger.interval(Interval("trainer", "trainer-0", 0.0, 5.0, "idle", "waits_for_samples"))
        ledger.interval(Interval("trainer", "trainer-0", 5.0, 8.0, "busy"))
        for group in ("a", "b"):
            await ledger.admit(GroupId(group), "lake", 0)
            samples = tuple(make_sample(f"{group}.{n}", group) for n in range(2))
            for n, sample in enumerate(samples):
                await ledger.finish(sample, charge(f"{group}.{n}", "finished"))
            metrics = {"behaviour_gap": 0.5, "effective_share": 0.6}
            step = 1 if group == "a" else 2
            await ledger.commit(
                version=step, step=step, consumed=[Group(GroupId(group), "lake", samples)], metrics=metrics
            )
        ledger.charge(charge("c.0", "stale"))
        for kind, subject, fields in (
            ("samples_too_stale", "training", {"step": 2}),
            ("lease_expired", "a.0", {"waiting_for": "prefill on engine-3"}),
            ("lease_expired", "a.1", {"waiting_for": "prefill on engine-4"}),
            ("handoffs", "v1", {"decoded": 9, "failed": 1, "empty": 0}),
            ("offload_stage", "exact", {"stage": "breaker", "entered": 9, "acted": 4}),
            ("function_health", "exact", {"outcomes": 100, "faults": 4}),
        ):
            ledger.event(RunEvent(1.0, kind, subject, fields))


def charge(name: str, outcome: str) -> Charge:
    rest = {"first_tokens": 4, "reset_s": 0.5, "env_s": 0.4, "reward_s": 0.25}
    return Charge(TrajectoryId(name), "lake", outcome, 0, 0.3, 2, 8, 4, True, 1.0, "train", 1.0, 3.0, **rest)


def test_alarms_of_a_ledger(tmp_path: Path) -> None:
    asyncio.run(record(tmp_path))
    with LedgerReader(tmp_path) as reader:
        alarms = read_alarms(reader, collect(reader, "run"), reader.trajectory_spans())
    found = {(a.alarm, a.subject): (a.value, a.limit) for a in alarms}
    assert found == {
        ("zero variance", "lake"): (1.0, 0.5),
        ("behaviour gap", "last 2 steps"): (0.5, 0.3),
        ("effective share", "last 2 steps"): (0.6, 0.75),
        ("samples_too_stale", "run"): (1, None),
        ("stale losses", "lake"): (0.2, 0.02),
        ("failed hand-offs", "prefill to decode"): (0.1, 0.05),
        ("expired waits", "prefill"): (2, None),
        ("function breaker", "exact"): (4.0, None),
        ("function faults", "exact"): (0.04, 0.025),
        ("idle", "trainer"): (0.625, 0.25),
        ("idle", "engines"): (0.75, 0.5),
    }
