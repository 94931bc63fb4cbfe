"""A real run whose work is not what its profile said: an engine goes, another comes, and nothing of the run is lost."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from rollart.ledger.reader import LedgerReader
from rollart.testing.laws import find_tiling_errors
from tests.e2e.harness import CLUSTER, GATE, Home, Launched, Spec, events, ledger, sound, tiny

pytestmark = pytest.mark.slow  # a trainer, and four engines one after the other: about 20 s per test

STEPS = 20

POOLS: Spec = {
    **CLUSTER,
    "devices": [
        {"name": "cpu", "tflops_bf16": 0.05, "memory_tb_per_s": 0.01, "source": "an order of magnitude, for a test"}
    ],
    "pools": [
        {"name": "train", "device": "cpu", "count": 1, "price": 1.0},
        {"name": "left", "device": "cpu", "count": 2, "price": 1.0, "rented": True},
        {"name": "right", "device": "cpu", "count": 2, "price": 1.0},
    ],
    "engines": {"max_slots": 16},
}


def drifting(**changes: Any) -> Spec:
    """By their profiles the domain on `left` has five turns and the one on `right` one; in truth two and six. At the
    rate wanted, five turns are more than one engine can do. Only six instead of one are a drift: by the time that so
    many have ended, the shorter ones are known too."""
    spec = tiny(
        steps=STEPS,
        model__context=32,
        hw_affinity={"long": "left", "short": "right"},
        placement={
            "objective": "min_cost",
            "rate": 1300,
            "in_flight": 5000,
            "prefill_decode": "off",
            "tensor_parallel": [1],
            "train": {"pool": "train"},
            "rebalance": {"reprice_s": 0.2, "flows_s": 0.5, "drift": 0.7, **changes},
        },
    )
    domain = spec["domains"][0]
    spec["domains"] = [copy.deepcopy(domain) | _domain("long", 5, 2), copy.deepcopy(domain) | _domain("short", 1, 6)]
    return spec


def _domain(name: str, planned: int, real: int) -> Spec:
    return {
        "name": name,
        "max_turns": 6,
        "environment": "tests.e2e.worlds:Held",
        "environment_args": {"turns": real, "turn_s": 0.15, "free": 60, "gate": GATE},
        "profile": {
            "turns": planned,
            "first_tokens": 1,
            "new_tokens": 1,
            "output_tokens": 1,
            "environment": {"wait_s": 0.15},
        },
    }


def started(home: Home) -> list[str]:
    return [e["subject"] for e in events(home.directory, "engine_started")]


def billed(home: Home) -> None:
    """Every second of a device is somebody's, once, whoever comes and goes; none between two lives of the run."""
    with LedgerReader(home.directory) as reader:
        intervals, lives = reader.intervals(), len(reader.events("starting"))
    found = find_tiling_errors(intervals, tolerance=1e-6)
    assert [tear for tear in found if lives == 1 or tear.kind != "gap"] == []


def test_an_engine_is_drained_and_another_started(home: Home) -> None:
    run = home.launch(drifting(), cluster=POOLS)
    has_moved(run)
    shown = json.loads(home.run("status", "-o", "json").stdout)["tables"]["status"]
    home.open()
    run.finished()
    sound(home.directory, steps=STEPS)
    assert events(home.directory, "rebalance_failed") == []
    assert events(home.directory, "engine_lost") == []
    (drained,) = events(home.directory, "engine_drained")
    assert (drained["pool"], drained["cut_short"]) == ("left", False)
    assert started(home)[3:] == ["engine-3"]
    here = {"engine-0", "engine-1", "engine-2", "engine-3"} - {drained["subject"]}
    (adopted,) = events(home.directory, "plan_adopted")
    assert {name: pool for name, pool, _, _ in json.loads(adopted["engines"])}.keys() == here
    assert {row["what"]: row["value"] for row in shown}["engines"] == " ".join(sorted(here))
    billed(home)
    with ledger(home.directory) as db:
        rows = db.execute("SELECT resource, sum(t1 - t0), max(t1), sum(state = 'busy') FROM intervals GROUP BY 1")
        seconds = {resource: (life, end, busy) for resource, life, end, busy in rows}
    assert seconds["engine-3"][2] > 0, "it serves"
    assert seconds[drained["subject"]][1] < seconds["engine-3"][1], "what has gone is not paid"
    assert seconds["unused-right"][1] < seconds["engine-3"][1], "what is used is not idle"
    assert "unused-left" not in seconds, "it is rented"


def in_the_middle(run: Launched) -> None:
    """One has gone, the other is not there yet."""
    run.until(lambda: (run.directory / "logs" / "engine-3.log").exists(), "the fourth engine's process begins")


def has_moved(run: Launched) -> None:
    run.until(lambda: run.step() >= 0 and bool(events(run.directory, "rebalanced")), "the plan is adopted")


def test_kill_in_the_middle_of_a_move_and_resume(home: Home) -> None:
    run = home.launch(drifting(), cluster=POOLS)
    in_the_middle(run)
    run.kill()
    assert run.end() == -9
    home.open()
    assert events(home.directory, "plan_adopted") == []
    home.resume().finished()
    sound(home.directory, steps=STEPS)
    billed(home)
    assert sorted(started(home)[3:6]) == ["engine-0", "engine-1", "engine-2"], "the plan that ran last"


def test_a_resume_starts_what_the_run_had_moved_to(home: Home) -> None:
    run = home.launch(drifting(), cluster=POOLS)
    has_moved(run)
    run.kill()
    run.end()
    home.open()
    (plan,) = events(home.directory, "plan_adopted")
    seats = {name: pool for name, pool, _, _ in json.loads(plan["engines"])}
    resumed = home.resume()
    resumed.finished()
    sound(home.directory, steps=STEPS)
    billed(home)
    assert len(events(home.directory, "plan_resumed")) == 1
    assert set(started(home)[4:7]) == set(seats)
    assert events(home.directory, "rebalance_failed") == []
