"""The sample table: exactly once per task, never early, tasks apart, groups whole, bounded, whatever happens when."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.policy.sample_table import (
    Fifo,
    PickedRow,
    ReadyRows,
    SampleRow,
    SampleTable,
    Selection,
    TakenRows,
    WholeGroups,
)

COLUMNS = ("responses", "reward", "ref", "advantage")
TASKS = {
    "score": ({"responses"}, False),
    "ref": ({"responses"}, False),
    "train": ({"reward", "ref", "advantage"}, True),
}


def table(capacity: int = 64) -> SampleTable:
    made = SampleTable(COLUMNS, capacity=capacity)
    for name, (columns, whole) in TASKS.items():
        made.declare(name, sorted(columns), whole_groups=whole)
    return made


class World:
    """Random writers and consumers, with the truth kept beside the table."""

    def __init__(self, rng: random.Random, capacity: int) -> None:
        self.rng, self.capacity, self.table = rng, capacity, table(capacity)
        self.rows: dict[str, SampleRow] = {}
        self.unwritten: dict[str, set[str]] = {}
        self.taken: dict[str, Counter[str]] = {t: Counter() for t in TASKS}
        self.dropped: set[str] = set()
        self.freed: set[str] = set()
        self.open: list[tuple[str, int, int]] = []
        self.groups = 0

    def add(self) -> None:
        if not self.open:
            size = self.rng.randint(1, 4)
            if size > self.table.room():
                return
            self.open.append((f"g{self.groups}", size, 0))
            self.groups += 1
        group, size, here = self.open.pop()
        row = SampleRow(f"{group}.{here}", group, size, self.rng.randint(1, 99), self.rng.randint(0, 3))
        self.table.add(row)
        self.rows[row.id], self.unwritten[row.id] = row, set(COLUMNS)
        if here + 1 < size:
            self.open.append((group, size, here + 1))

    def put(self) -> None:
        choices = [(r, c) for r, cs in self.unwritten.items() for c in sorted(cs)]
        if choices:
            row, column = self.rng.choice(choices)
            self.unwritten[row].discard(column)
            held = row not in self.dropped and row not in self.freed
            assert self.table.put(row, column) is held, "put reports whether the row is still held"

    def ready(self, task: str) -> set[str]:
        """The rows that must be ready now, from the definition."""
        columns, whole = TASKS[task]
        gone = {*self.dropped, *self.taken[task]}
        written = {r for r, cs in self.unwritten.items() if not cs & columns and r not in self.dropped}
        full = Counter(self.rows[r].group for r in written)
        return {r for r in written - gone if not whole or full[self.rows[r].group] == self.rows[r].group_size}

    def take(self, task: str) -> None:
        assert set(self.table.ready(task)) == self.ready(task)
        sampler = WholeGroups(1) if TASKS[task][1] else Fifo(self.rng.randint(1, 5), at_least=1)
        got = self.table.take(task, sampler)
        assert (got is None) == (not self.ready(task))
        if got is None:
            return
        for pick in got.batches[0]:
            assert not self.unwritten[pick.row.id] & TASKS[task][0], "served before all columns were written"
        self.taken[task].update(got.consumed)
        assert set(got.freed) == {r for r in got.consumed if all(r in self.taken[t] for t in TASKS)}
        self.freed.update(got.freed)

    def drop(self) -> None:
        group = f"g{self.rng.randrange(max(self.groups, 1))}"
        mine = {r for r, row in self.rows.items() if row.group == group}
        if mine and any(g == group for g, _, _ in self.open):
            return
        held = self.table.drop(group)
        assert set(held) == mine - self.freed - self.dropped
        self.dropped.update(held)


@settings(max_examples=35, deadline=None)
@given(st.integers(0, 2**32), st.integers(4, 24))
def test_the_promises_of_the_table(seed: int, capacity: int) -> None:
    world = World(random.Random(seed), capacity)
    for _ in range(150):
        action = world.rng.random()
        if action < 0.3:
            world.add()
        elif action < 0.7:
            world.put()
        elif action < 0.98:
            world.take(world.rng.choice(sorted(TASKS)))
        else:
            world.drop()
        assert len(world.table) <= capacity
        assert len(world.table) == len(set(world.rows) - world.freed - world.dropped)
    while world.open:
        world.add()
    while any(world.unwritten.values()):
        world.put()
    for task in TASKS:
        while world.ready(task):
            world.take(task)
        assert max(world.taken[task].values(), default=1) == 1, "exactly once"
        assert set(world.taken[task]) >= set(world.rows) - world.dropped, "and all of them"
    assert len(world.table) == 0
    assert world.table.room() == capacity, "all room came back"


def test_a_slow_task_holds_up_no_other_and_keeps_the_row() -> None:
    t = table()
    for i in range(3):
        t.add(SampleRow(f"r{i}", "g", 3, 10), "responses")
    assert t.take("score", Fifo(2)) == TakenRows(
        (tuple(PickedRow(SampleRow(f"r{i}", "g", 3, 10), 10) for i in range(2)),), ("r0", "r1"), ()
    )
    assert [*t.ready("ref")] == ["r0", "r1", "r2"]
    assert t.take("train", WholeGroups(1)) is None
    t.put("r0", "reward", "ref", "advantage")
    assert [*t.ready("train")] == [], "a whole group or nothing"
    t.put("r1", "reward", "ref", "advantage")
    t.put("r2", "reward", "ref", "advantage")
    got = t.take("train", WholeGroups(1))
    assert got is not None
    assert got.freed == (), "two tasks still need them"
    assert t.take("ref", Fifo(3)).freed == ("r0", "r1")  # type: ignore[union-attr]
    assert t.take("score", Fifo(1)).freed == ("r2",)  # type: ignore[union-attr]
    assert len(t) == 0


def test_the_consumer_that_asks_more_often_gets_more() -> None:
    t = SampleTable(["x"], capacity=400)
    t.declare("work", ["x"])
    for i in range(400):
        t.add(SampleRow(str(i), str(i), 1, 1), "x")
    got: Counter[str] = Counter()
    for tick in range(300):
        for worker, every in (("fast", 1), ("slow", 3)):
            if tick % every == 0 and (taken := t.take("work", Fifo(1))) is not None:
                got[worker] += len(taken.consumed)
    assert got == {"fast": 300, "slow": 100}


def test_streaming_hands_over_in_half_the_time_of_batches() -> None:
    """Two balanced stages over 32 rows, a row a second each: as a batch 64 s, in micro-batches of 2 rows 34 s."""

    def lasts(micro: int) -> int:
        t = SampleTable(["a", "b"], capacity=32)
        t.declare("first", ["a"])
        t.declare("second", ["b"])
        for i in range(32):
            t.add(SampleRow(str(i), str(i), 1, 1), "a")
        now, free_at, written = 0, {"first": 0, "second": 0}, dict[int, tuple[str, ...]]()
        while len(t):
            for row in written.pop(now, ()):
                t.put(row, "b")
            for task in ("first", "second"):
                if now >= free_at[task] and (got := t.take(task, Fifo(micro))) is not None:
                    free_at[task] = now + micro
                    if task == "first":
                        written[now + micro] = got.consumed
            now += 1
        return free_at["second"]

    assert lasts(32) == 64
    assert lasts(2) == 34


def test_groups_are_dropped_whole() -> None:
    t = table()
    for i, version in enumerate((0, 3, 3)):
        t.add(SampleRow(f"r{i}", "g" if i < 2 else "h", 2, 1, version), "responses")
    assert t.drop("g") == ("r0", "r1")
    assert t.drop("g") == ()
    assert not t.put("r0", "reward")
    assert [*t.ready("score")] == ["r2"]


def test_a_group_that_began_always_fits() -> None:
    t = table(capacity=5)
    t.add(SampleRow("a0", "a", 3, 1))
    assert t.room() == 2
    with pytest.raises(ValueError, match="group b of 3 rows does not fit: 3 of 5 are taken"):
        t.add(SampleRow("b0", "b", 3, 1))
    t.add(SampleRow("b0", "b", 2, 1))
    for row in ("a1", "a2"):
        t.add(SampleRow(row, "a", 3, 1))
    with pytest.raises(ValueError, match="group a has 3 rows, 3 are here"):
        t.add(SampleRow("a3", "a", 3, 1))


def test_bad_use_is_said() -> None:
    t = table()
    t.add(SampleRow("a", "g", 2, 4), "responses")
    t.add(SampleRow("b", "g", 2, 4), "responses", "reward", "ref", "advantage")
    for call, message in (
        (lambda: t.add(SampleRow("a", "g", 2, 1)), "row a is in the table already"),
        (lambda: t.put("a", "responses"), "column responses was written before"),
        (lambda: t.put("a", "nonsense"), "unknown column nonsense"),
        (lambda: t.take("nobody", Fifo(1)), "unknown task nobody: declared are score, ref, train"),
        (lambda: t.declare("late", ["ref"]), "declare it before the first row"),
        (lambda: SampleRow("x", "g", 0, 1), "group size 0"),
        (lambda: SampleTable(["a", "a"], capacity=1), "each once"),
        (lambda: SampleTable(["a"], capacity=1).add(SampleRow("x", "g", 1, 1)), "no task is declared"),
        (lambda: SampleTable(["a"], capacity=1).declare("t", []), "reads no column"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_sampler_cannot_break_the_rules() -> None:
    t = table()
    rows = [SampleRow("a", "g", 2, 4), SampleRow("b", "g", 2, 4)]
    for row in rows:
        t.add(row, *COLUMNS)
    a, b = (PickedRow(r, r.tokens) for r in rows)

    def refused(task: str, selection: Selection, message: str) -> None:
        def sampler(_: ReadyRows) -> Selection:
            return selection

        before = [*t.ready(task)]
        with pytest.raises(ValueError, match=message):
            t.take(task, sampler)
        assert [*t.ready(task)] == before, "nothing was consumed"

    refused("score", Selection(((a,),), ("a", "c")), "which is not ready")
    refused("score", Selection(((a, a),), ("a",)), "picked a row twice")
    refused("score", Selection(((a,),), ("b",)), "did not consume")
    refused("score", Selection(((PickedRow(rows[0], 5),),), ("a",)), "more tokens")
    refused("train", Selection(((b,),), ("b",)), "split group g")
