"""The trace of a run: every event has the fields of the trace event format, slices of a thread nest, and every
trajectory, turn, call and interval of the ledger is in it once."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.cli.main import run
from rollart.ledger.events import ENGINE_DID, TURN
from rollart.ledger.store import Ledger
from rollart.model import Group, GroupId, TrajectoryId
from rollart.ports import Charge, Interval, RunEvent
from rollart.report.perfetto import TraceLanes, TraceTracks
from serverless.types import Invocation
from tests.ledger.conftest import make_sample

# Fields by phase, "Event Descriptions" of the trace event format: those that all events have, and their own.
COMMON = {"ph", "name", "pid", "args"}
FIELDS: dict[str, set[str]] = {
    "X": {"tid", "ts", "dur"},
    "C": {"tid", "ts"},
    "M": set(),
    "i": {"tid", "ts", "s"},
    "s": {"tid", "ts", "id", "cat"},
    "f": {"tid", "ts", "id", "cat", "bp"},
}
METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}

Trace = list[dict[str, Any]]


def charge(name: str, t0: float, t1: float, outcome: str = "finished", v0: int = 0) -> Charge:
    rest = {"first_tokens": 4, "reset_s": 0.5, "env_s": 0.4, "reward_s": 0.25}
    return Charge(TrajectoryId(name), "lake", outcome, v0, 0.3, 2, 8, 4, True, 1.0, "train", t0, t1, **rest)


async def record(directory: Path, v0: int = 0) -> None:
    """Two groups of two trajectories, the first of which is trained, a stale trajectory, calls and faults."""
    price = {"name": "modal", "unit": "core-second", "usd": 0.01, "source": "a test", "date": "2026-11-01"}
    with Ledger(directory, clock=lambda: 0.0, config={"prices": {"prices": [price]}}) as ledger:
        ledger.interval(Interval("engine", "engine-0", 0.0, 4.0, "busy", "", 2.0, 1.5))
        ledger.interval(Interval("engine", "engine-0", 4.0, 9.0, "idle", "starved", 2.0, 1.5))
        ledger.interval(Interval("trainer", "trainer-0", 5.0, 7.0, "busy"))
        ledger.event(RunEvent(3.0, ENGINE_DID, "engine-0", {"kv_used": 0.25, "running": 3}))
        counts = {"version": 0, "tokens": 2, "prompt_tokens": 8, "cached_tokens": 4}
        for n, at in enumerate((1.0, 1.25)):
            fields = {"turn": n, "generation_s": 0.2, "environment_s": 0.05, "engine": "engine-0"}
            ledger.event(RunEvent(at + 0.75, TURN, "a.0", {**fields, **counts}))
        samples = {}
        for group in ("a", "b"):
            await ledger.admit(group, "lake", 0)
            samples[group] = [make_sample(f"{group}.{n}", group) for n in range(2)]
            for n, sample in enumerate(samples[group]):
                await ledger.finish(sample, charge(sample.id, 1.0 + n, 3.0 + n))
        await ledger.commit(
            version=1, step=1, consumed=[Group(GroupId("a"), "lake", tuple(samples["a"]))], metrics={"loss": 0.5}
        )
        ledger.event(RunEvent(7.5, "step", "training", {"step": 1, "version": 1, "train_s": 2.0}))
        ledger.charge(charge("c.0", 2.0, 8.0, "stale", v0))
        ledger.event(RunEvent(8.5, "engine_lost", "engine-1", {}))
        ledger.invocation(Invocation("exact", "modal", "w0", 3.0, 4.0, 0.25, 1.0, 128, 2, "ok", queued_s=0.5))
        ledger.invocation(Invocation("exact", "modal", "w1", 3.5, 4.5, 0.0, 1.0, 128, 2, "ok"))
    (directory / "resolved.yaml").write_text("")


@pytest.fixture
def trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Trace:
    asyncio.run(record(tmp_path))
    assert run(["report", "timeline", str(tmp_path), "-o", "perfetto"]) == 0
    events: Trace = json.loads(capsys.readouterr().out)["traceEvents"]
    return events


def threads(events: Trace) -> dict[tuple[int, int], str]:
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    named = [e for e in events if e["name"] == "thread_name"]
    return {(e["pid"], e["tid"]): f"{processes[e['pid']]} {e['args']['name']}" for e in named}


def test_events_have_the_fields_of_the_trace_event_format(trace: Trace) -> None:
    tracks = threads(trace)
    for event in trace:
        phase = event["ph"]
        assert event.keys() | {"args"} == COMMON | FIELDS[phase] | ({"tid"} & event.keys())
        if phase == "M":
            assert event["name"] in METADATA
        else:
            assert (event["pid"], event["tid"]) in tracks
            assert isinstance(event["ts"], int)
        if phase == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())


def test_slices_of_a_thread_nest(trace: Trace) -> None:
    by_thread = defaultdict(list)
    for event in trace:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            by_thread[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
    for slices in by_thread.values():
        ends: list[int] = []
        for start, minus in sorted(slices):
            while ends and ends[-1] <= start:
                ends.pop()
            assert not ends or start - minus <= ends[-1]
            ends.append(start - minus)


def test_every_part_of_the_run_is_in_the_trace(trace: Trace) -> None:
    tracks = threads(trace)
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for event in trace:
        if event["ph"] in "XiC":
            found[tracks[event["pid"], event["tid"]]][event["name"]] += 1
    assert found["engine engine-0"] == {"busy": 1, "idle": 1, "engine-0 kv_used": 1, "engine-0 running": 1}
    assert found["run steps"]["step 1"] == found["run steps"]["train and publish"] == 1
    assert found["run faults and drops"] == {"engine_lost": 1}
    of_trajectories: Counter[str] = sum((found[t] for t in found if t.startswith("trajectories")), Counter())
    assert {n for n in of_trajectories if "." in n} == {"a.0", "a.1", "b.0", "b.1", "c.0"}
    assert [of_trajectories[n] for n in ("turn 0", "turn 1", "reward", "reset")] == [1, 1, 5, 5]
    of_groups: Counter[str] = sum((found[t] for t in found if t.startswith("groups")), Counter())
    assert of_groups == {"a": 1, "b": 1}
    of_calls: Counter[str] = sum((found[t] for t in found if t.startswith("calls")), Counter())
    assert [of_calls[n] for n in ("ok", "queued", "cold start", "running")] == [2, 1, 1, 2]


def test_an_arrow_leads_from_a_trajectory_to_the_step_that_trained_it(trace: Trace) -> None:
    starts, ends = ([e for e in trace if e["ph"] == phase] for phase in "sf")
    assert [e["id"] for e in starts] == [e["id"] for e in ends] == [1, 2]
    (step,) = (e for e in trace if e["ph"] == "X" and e["name"] == "step 1")
    sources = {e["name"]: e for e in trace if e["ph"] == "X" and e["args"].get("trained into") == 1}
    assert sources.keys() == {"a.0", "a.1"}
    for start, end in zip(starts, ends, strict=True):
        assert (end["pid"], end["tid"]) == (step["pid"], step["tid"])
        assert step["ts"] <= end["ts"] <= step["ts"] + step["dur"]
        assert any(
            (start["pid"], start["tid"]) == (e["pid"], e["tid"]) and e["ts"] <= start["ts"] <= e["ts"] + e["dur"]
            for e in sources.values()
        )
        assert start["ts"] <= end["ts"]


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 10)), max_size=30))
def test_slices_of_a_lane_take_turns(stretches: list[tuple[int, int]]) -> None:
    """With no more lanes than slices at a time."""
    lanes = TraceLanes(TraceTracks(), "x")
    last: dict[tuple[int, int], int] = {}
    for t0, seconds in sorted(stretches):
        lane = lanes.take(t0, t0 + seconds)
        assert last.get(lane, 0) <= t0
        last[lane] = t0 + seconds
    peak = max((sum(a <= t0 < a + s for a, s in stretches) for t0, _ in stretches), default=0)
    assert len(last) == peak
