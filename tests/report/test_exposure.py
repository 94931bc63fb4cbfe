"""Exposed seconds: a run retimed from its ledger, by hand and as laws."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.report.exposure import TRAINER, RunTiming, Span, TrajectoryLife
from rollart.report.offload import CallTrace, offload
from serverless.types import Invocation
from tests.report.test_offload import call
from tests.report.test_report import cells, rows


def spans(*steps: tuple[float, float, float, float]) -> list[Span]:
    """Steps of a trainer as (waits from, trains from, publishes from, until)."""
    found = []
    for waits, trains, publishes, until in steps:
        found += [
            Span(TRAINER, "trainer-0", waits, trains, "idle"),
            Span(TRAINER, "trainer-0", trains, publishes, "busy"),
            Span(TRAINER, "trainer-0", publishes, until, "sync"),
        ]
    return found


def test_only_the_last_trajectory_of_a_batch_is_exposed() -> None:
    """Two steps of two groups: batches are complete at 10 and 22 s, when their last trajectories end."""
    lives = [
        TrajectoryLife("lake", 0, 4, "a", 1),
        TrajectoryLife("lake", 0, 10, "b", 1),
        TrajectoryLife("lake", 12, 15, "c", 2),
        TrajectoryLife("lake", 12, 22, "d", 2),
    ]
    timing = RunTiming(spans((0, 10, 11, 12), (12, 22, 23, 24)), lives)
    assert timing.exposed_s({}) == 0
    assert timing.exposed_s({0: 3, 2: 3}) == 0
    assert timing.exposed_s({1: 3, 3: 3}) == 6
    assert timing.exposed_s({1: 9}) == 6, "then the other group ends last"
    assert timing.exposed_s({1: -2}) == -2


def test_seconds_behind_training_are_hidden() -> None:
    """One step ahead: the second batch is complete at 8 s, and the trainer is free at 12 s."""
    lives = [TrajectoryLife("lake", 0, 2, "a", 1), TrajectoryLife("lake", 0, 8, "b", 2)]
    timing = RunTiming(spans((0, 2, 11, 12), (12, 12, 21, 22)), lives)
    assert timing.exposed_s({1: 5}) == 0
    assert timing.exposed_s({0: 1, 1: 5}) == 1
    assert timing.exposed_s({1: -7}) == -3, "it is then complete at 15 s"


def test_a_publish_that_waits_for_running_trajectories_is_exposed_to_their_rewards() -> None:
    lives = [TrajectoryLife("lake", 0, 2, "a", 1), TrajectoryLife("lake", 2, 8, "b", 2)]
    steps = spans((0, 2, 3, 9), (9, 9, 10, 11))
    assert RunTiming(steps, lives, drained=True).exposed_s({1: 4}) == 4
    assert RunTiming(steps, lives, drained=True).exposed_s({1: 6}) == 5, "training ends at 3 s"
    assert RunTiming(steps, lives).exposed_s({1: 4}) == 0


def test_streamed_groups_are_accumulated_before_the_batch_is_whole() -> None:
    """The first group is accumulated from 2 to 6 s; the second comes at 10 s."""
    lives = [TrajectoryLife("lake", 0, 2, "a", 1), TrajectoryLife("lake", 0, 10, "b", 1)]
    stream = [
        Span(TRAINER, "trainer-0", 0, 2, "idle"),
        Span(TRAINER, "trainer-0", 2, 6, "busy"),
        Span(TRAINER, "trainer-0", 6, 10, "idle"),
        Span(TRAINER, "trainer-0", 10, 12, "busy"),
        Span(TRAINER, "trainer-0", 12, 13, "sync"),
    ]
    timing = RunTiming(stream, lives)
    assert timing.exposed_s({1: 3}) == 3
    assert timing.exposed_s({1: 9, 0: 2}) == 6, "accumulation takes 4 s"


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[Span], list[TrajectoryLife], bool]:
    """A run of groups that begin at a moment of the trainer, each taken first come first served."""
    seconds = st.integers(0, 20).map(float)
    drained, per_step = draw(st.booleans()), draw(st.integers(1, 3))
    trained: list[tuple[float, float, float, float]] = []
    lives: list[TrajectoryLife] = []
    waiting: list[tuple[float, str]] = []
    moments, at, group = [0.0], 0.0, 0
    for step in range(draw(st.integers(1, 4))):
        while len(waiting) < per_step or draw(st.integers(0, 2)) == 2:
            cause = moments[-1]
            members = draw(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=3))
            group += 1
            lives += [TrajectoryLife("lake", cause + gap, cause + gap + s, f"g{group}") for gap, s in members]
            waiting.append((cause + max(gap + s for gap, s in members), f"g{group}"))
            if len(waiting) > 3 * per_step:
                break
        waiting.sort()
        batch, waiting = waiting[:per_step], waiting[per_step:]
        whole = max([at, *(end for end, _ in batch)])
        lives = [
            life._replace(version=step + 1) if life.group in {name for _, name in batch} else life for life in lives
        ]
        done = whole + draw(seconds)
        ended = (max([done, *(end for end, _ in waiting)]) if drained else done) + draw(seconds) + 1
        trained.append((at, whole, done, ended))
        moments += [whole, ended]
        at = ended
    return spans(*trained), lives, drained


@settings(max_examples=50)
@given(runs(), st.data())
def test_laws_of_retiming(run: tuple[list[Span], list[TrajectoryLife], bool], data: st.DataObject) -> None:
    """Nothing saved is nothing gained; more saved is never less gained; a step gains at most the largest saving."""
    steps, lives, drained = run
    timing = RunTiming(steps, lives, drained=drained)
    assert timing.exposed_s({}) == pytest.approx(0)
    shares = st.lists(st.floats(0, 1), min_size=len(lives), max_size=len(lives))
    whole = [life.ended - life.began for life in lives]
    some = [share * most for share, most in zip(data.draw(shares), whole, strict=True)]
    more = [s + share * (most - s) for s, share, most in zip(some, data.draw(shares), whole, strict=True)]
    gained, gained_more = timing.exposed_s(dict(enumerate(some))), timing.exposed_s(dict(enumerate(more)))
    published = sum(span.state == "sync" for span in steps)
    assert -1e-9 <= gained <= gained_more + 1e-9
    assert gained <= published * max(some, default=0.0) * (2 if drained else 1) + 1e-9
    training, publishing = timing.exposed_s({}, training=True), timing.exposed_s({}, publishing=True)
    assert -1e-9 <= training <= timing.training_s + 1e-9
    assert -1e-9 <= publishing <= timing.publishing_s + 1e-9
    both = timing.exposed_s({}, training=True, publishing=True)
    assert max(training, publishing) - 1e-9 <= both <= timing.training_s + timing.publishing_s + 1e-9


def test_the_report_of_two_functions_of_one_trajectory() -> None:
    """The trajectory waits for the slower function: without it, for the other."""
    lives = [TrajectoryLife("lake", 0, 10, "a", 1)]
    slow, quick = call(4, 6.0), call(4, 2.0, function="g")
    fields: dict[str, Any] = {
        "domains": {"f": frozenset({"lake"}), "g": frozenset({"lake"})},
        "specs": {},
        "core_usd_hour": 3.6,
        "spans": spans((0, 10, 11, 12)),
    }
    calls: list[Invocation] = [slow, quick]
    trace = CallTrace(calls, lives, **fields)
    report = offload(rows(invocations=[], device_hours=[(36.0, 100 / 3600)]), trace, counterfactual_s={"f": 3.0})
    exposed = {row["function"]: row for row in cells(report, "exposed")}
    assert (exposed["f"]["exposed_s"], exposed["f"]["busy_s"]) == (4, 6)
    assert exposed["g"]["exposed_s"] == 0
    assert exposed["(all)"]["exposed_s"] == 6
    assert exposed["f"]["exposed_usd"] == pytest.approx(4 * 36 / 3600)
    assert (exposed["f"]["simulated_s"], exposed["f"]["error_of_run"]) == (3, pytest.approx(0.01))
    ways = {(row["function"], row["served_by"]): row for row in cells(report, "ways")}
    assert ways["f", "dedicated, enough"]["exposed_s"] == 4
    assert ways["(all)", "inline"]["exposed_s"] == 8, "one call after the other"
    assert ways["(all)", "inline"]["total_usd"] == pytest.approx(8 * 3.6 / 3600 + 8 * 36 / 3600)


def test_calls_of_evaluations_are_not_taken_for_those_of_trained_trajectories() -> None:
    """An evaluated trajectory ends just before a trained one, whose reward took 1 s."""
    lives = [TrajectoryLife("lake", 0, 6), TrajectoryLife("lake", 0, 10, "a", 1)]
    calls = [call(1, 5.0), call(9, 1.0)]
    trace = CallTrace(calls, lives, {"f": frozenset({"lake"})}, {}, 3.6, spans=spans((0, 10, 11, 12)))
    (row,) = cells(offload(rows(invocations=[]), trace), "exposed")
    assert row["exposed_s"] == 1
    unmatched = CallTrace(calls, [], {"f": frozenset({"lake"})}, {}, 3.6, spans=spans((0, 10, 11, 12)))
    (row,) = cells(offload(rows(invocations=[]), unmatched), "exposed")
    assert (row["busy_s"], row["exposed_s"]) == (6, None)


def test_waits_in_the_pipeline_are_part_of_a_reward() -> None:
    """The call of 2 s was made 3 s after the trajectory asked for its reward."""
    lives = [TrajectoryLife("lake", 0, 10, "a", 1, reward_s=5.0)]
    trace = CallTrace([call(8, 2.0)], lives, {"f": frozenset({"lake"})}, {}, 3.6, spans=spans((0, 10, 11, 12)))
    report = offload(rows(invocations=[]), trace)
    (row,) = cells(report, "exposed")
    assert (row["busy_s"], row["exposed_s"]) == (2, 5)
    (dedicated,) = [row for row in cells(report, "ways") if row["served_by"] == "dedicated, enough"]
    assert dedicated["exposed_s"] == 2, "a worker of its own takes the call when it is asked for"


def test_the_break_even_rate_is_where_the_costs_are_equal() -> None:
    from rollart.ledger.reader import InvocationSum

    billed = [InvocationSum("f", "local", 1024, "ok", 100, 100, 0, 0.0, 200.0)]
    calls = [call(n) for n in range(0, 400, 4)]
    trace = CallTrace(calls, [], {}, {}, core_usd_hour=0.036)
    (summary,) = cells(offload(rows(invocations=billed), trace), "summary")
    assert summary["break_even_per_s"] * summary["functions_usd"] / 100 == pytest.approx(0.036 / 3600)
    dear = CallTrace(calls, [], {}, {}, core_usd_hour=3.6)
    (summary,) = cells(offload(rows(invocations=billed), dear), "summary")
    assert summary["break_even_per_s"] is None, "a worker serves half a call per second"
