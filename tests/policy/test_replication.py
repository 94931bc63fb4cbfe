"""Queue scheduling and dynamic filtering, played out on a clock of the test's own."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.policy.replication import Assignment, DispatchQueue, DynamicFilter, Piece, Unit, Verdict


def makespan(unit: Unit, prompts: list[list[float]], workers: int, slots: int) -> float:
    """When the last response ends; a worker's slots run side by side, a piece ends with its longest response."""
    queue = DispatchQueue(unit)
    for i, lengths in enumerate(prompts):
        queue.add(str(i), len(lengths))
    all_slots = {f"w{i}": slots for i in range(workers)}
    free, now = dict(all_slots), 0.0
    ends: list[tuple[float, str, int]] = []
    started: set[tuple[str, int]] = set()
    while queue.waiting() or ends:
        for a in queue.assign(free, all_slots):
            lengths = [prompts[int(a.piece.prompt)][r] for r in a.piece.responses]
            for r in a.piece.responses:
                assert (a.piece.prompt, r) not in started, "a response started twice"
                started.add((a.piece.prompt, r))
            width = min(len(lengths), all_slots[a.worker])
            free[a.worker] -= width
            assert free[a.worker] >= 0
            # A piece that is wider than the worker runs in rounds.
            lasts = sum(max(lengths[i : i + width]) for i in range(0, len(lengths), width))
            heapq.heappush(ends, (now + lasts, a.worker, width))
        now, worker, width = heapq.heappop(ends)
        free[worker] += width
    assert len(started) == sum(map(len, prompts)), "every response ran"
    return now


@settings(max_examples=35, deadline=None)
@given(st.lists(st.lists(st.floats(0.1, 20), min_size=1, max_size=6), min_size=1, max_size=12), st.integers(1, 4))
def test_single_responses_keep_the_bound_of_list_scheduling(prompts: list[list[float]], workers: int) -> None:
    """ROLL Flash §2: makespan <= Q * mean / K + longest."""
    flat = [x for p in prompts for x in p]
    slots = 2
    makes = makespan(Unit.PER_RESPONSE, prompts, workers, slots)
    assert makes <= sum(flat) / (workers * slots) + max(flat) + 1e-9
    assert makes >= max(sum(flat) / (workers * slots), max(flat)) - 1e-9
    makespan(Unit.PER_PROMPT, prompts, workers, slots)


def test_replication_shortens_a_rollout_with_a_heavy_tail() -> None:
    rng = random.Random(5)
    prompts = [[rng.lognormvariate(0, 1.2) for _ in range(16)] for _ in range(32)]
    whole, single = (makespan(unit, prompts, 4, 16) for unit in (Unit.PER_PROMPT, Unit.PER_RESPONSE))
    assert single < 0.6 * whole


def test_pieces_in_order_to_the_worker_with_most_room() -> None:
    queue = DispatchQueue(Unit.PER_PROMPT)
    for prompt, responses in (("a", 3), ("b", 2), ("c", 1)):
        queue.add(prompt, responses)
    slots = {"x": 4, "y": 4}
    assert queue.assign({"x": 2, "y": 3}, slots) == (
        Assignment("y", Piece("a", (0, 1, 2))),
        Assignment("x", Piece("b", (0, 1))),
    )
    assert queue.cancel("c") == 1
    assert queue.waiting() == 0
    queue.add("wide", 9)
    queue.add("d", 1)
    assert queue.assign({"x": 3, "y": 1}, slots) == (), "the wide one waits for an idle worker, nobody overtakes it"
    assert queue.assign({"x": 4, "y": 1}, slots)[0] == Assignment("x", Piece("wide", tuple(range(9))))
    single = DispatchQueue(Unit.PER_RESPONSE)
    single.add("a", 3)
    assert single.assign({"x": 1, "y": 1}, slots) == (
        Assignment("x", Piece("a", (0,))),
        Assignment("y", Piece("a", (1,))),
    )
    assert single.cancel("a") == 1
    with pytest.raises(ValueError, match="0 responses"):
        single.add("b", 0)


rewards = st.lists(st.sampled_from([0.0, 1.0, None]), min_size=1, max_size=3)


@given(st.integers(1, 6), st.integers(0, 4), st.none() | st.integers(0, 10), st.lists(rewards, max_size=40))
def test_the_filter_stops_at_its_target_and_not_before(
    target: int, extra: int, more: int | None, ends: list[list[float | None]]
) -> None:
    chosen = DynamicFilter(target, extra, None if more is None else target + more)
    live = list(range(chosen.start()))
    launched = len(live)
    stopped = False
    for group in ends:
        if not live:
            break
        decision = chosen.ended(f"g{live.pop(0)}", group)
        assert not (stopped and decision.launch), "nothing is launched after the stop"
        live += range(launched, launched + decision.launch)
        launched += decision.launch
        assert len(live) == chosen.live
        assert launched == chosen.launched
        assert len(chosen.qualified) <= target
        assert decision.stop == (len(chosen.qualified) == target)
        if not decision.stop:
            full = len(live) == target + extra - len(chosen.qualified)
            assert full or launched == chosen.most, "as many run as should"
            assert decision.exhausted == (not live)
        if not stopped and None not in group:
            assert (decision.verdict is Verdict.QUALIFIED) == (len(set(group)) > 1)
        if not stopped and None in group:
            assert decision.verdict is Verdict.FAULTY, "a fault is neither a reward nor a difference"
        stopped = stopped or decision.stop


def test_bad_use_is_said() -> None:
    chosen = DynamicFilter(1)
    with pytest.raises(ValueError, match="was not launched"):
        chosen.ended("a", [1.0])
    assert chosen.start() == 1
    assert chosen.ended("a", [1.0, 0.0]).stop
    with pytest.raises(ValueError, match="group a ended twice"):
        chosen.ended("a", [1.0])
    with pytest.raises(ValueError, match="most 2 at least"):
        DynamicFilter(3, most=2)
