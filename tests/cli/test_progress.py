"""What a person watching a run sees."""

from __future__ import annotations

import pytest

from rollart.cli.progress import ProgressLines
from rollart.ports import RunEvent


def dropped(t: float, n: int, domain: str = "math", reason: str = "stale") -> RunEvent:
    return RunEvent(t, "group_dropped", f"{domain}-{n}", {"domain": domain, "reason": reason, "detail": f"at v{n}"})


def step(t: float, number: int) -> RunEvent:
    fields = {"step": number, "steps": 9, "train_s": 1.0, "waited_s": 0.0}
    return RunEvent(t, "step", "training", fields)


def test_dropped_groups_are_one_line_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ProgressLines(colour=False)
    for number in (1, 2, 3):
        for n in range(24):
            lines(dropped(10.0 * number + n / 10, n))
        lines(dropped(10.0 * number + 3, 24, "lake", "infra_fault"))
        lines(step(10.0 * number + 5, number))
    said = [line.split("s  ", 1)[1] for line in capsys.readouterr().err.splitlines()]
    drops = [line for line in said if "dropped" in line]
    assert drops == [
        "group dropped: math-0  domain=math  reason=stale  detail=at v0",
        "group dropped: lake-24  domain=lake  reason=infra_fault  detail=at v24",
        "groups dropped: 23 of math (stale)",
        *["groups dropped: 1 of lake (infra_fault), 24 of math (stale)"] * 2,
    ]
    assert len(said) == len(drops) + 3


def test_drops_are_told_in_a_run_that_makes_no_step(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ProgressLines(colour=False)
    for n in range(301):
        lines(dropped(n / 10, n))
    said = capsys.readouterr().err.splitlines()
    assert 3 <= len(said) <= 4, "the first, and one line every ten seconds"
    assert said[1].endswith("groups dropped: 101 of math (stale)")


def test_leases_that_expire_together_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ProgressLines(colour=False)
    fields = {"waiting_for": "a step of its environment", "seconds": 30.0, "action": "gap_fill"}
    for n in range(200):
        lines(RunEvent(n / 100, "lease_expired", f"lake-{n}", fields))
    lines(RunEvent(3.0, "finished", "run", {"steps": 1, "version": 1}))
    said = [line.split("s  ", 1)[1] for line in capsys.readouterr().err.splitlines()]
    assert said == [
        "lease expired: lake-0  waiting_for=a step of its environment  seconds=30.0  action=gap_fill",
        "leases expired: 199 of a step of its environment (gap_fill)",
        "finished: 1 steps, v1",
    ]


def test_samples_at_a_temperature_have_a_line_with_each_domain_once(capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"version": 20, "temperature": 0.6, "a avg@8": 0.25, "a pass@8": 0.5, "b avg@8": None, "b pass@8": None}
    ProgressLines(colour=False)(RunEvent(0.0, "evaluation_sampled", "step20", fields))
    assert "held-out success at v20 (temperature 0.6):   a avg@8 0.25 pass@8 0.50\n" in capsys.readouterr().err


def test_a_step_shows_the_dollars_so_far_and_at_the_last_step(capsys: pytest.CaptureFixture[str]) -> None:
    lines, fields = ProgressLines(colour=False), {"step": 1, "steps": 9, "train_s": 1.0, "waited_s": 0.0}
    lines(RunEvent(1.0, "step", "training", {**fields, "usd": 1.5}))
    lines(RunEvent(2.0, "step", "training", {**fields, "usd": 1.5, "usd_at_end": 1240.2, "usd_at_end_half": 181.3}))
    lines(RunEvent(3.0, "budget_alarm", "warn_at", {"text": "$8.00 of a budget of $10.00 spent (80%)"}))
    lines(RunEvent(4.0, "notice", "warn_at", {"sent": True, "host": "a.example"}))
    lines(RunEvent(5.0, "notice", "warn_at", {"sent": False, "host": "a.example", "why": "status 404"}))
    shown = [line.partition("s  ")[2].rpartition("wait 0.00s")[2] for line in capsys.readouterr().err.splitlines()]
    assert shown == [
        "  $1.50 so far",
        "  $1.50 so far, $1,240 ± 181 in all",
        "budget: $8.00 of a budget of $10.00 spent (80%)",
        "notice about the budget not sent to a.example: status 404",
    ]
