"""Kept trajectories: as they ended, each once, within their bound, and none without its row."""

from __future__ import annotations

import contextlib
import random
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rollart.ledger.database import FILE
from rollart.ledger.kept import (
    KEPT_DIRECTORY,
    KeptScore,
    KeptTrajectory,
    RoutedTurn,
    decode_kept,
    encode_kept,
)
from rollart.ledger.payloads import PayloadDamaged
from rollart.ledger.reader import LedgerReader
from rollart.ledger.store import Ledger
from rollart.model import InfraFault, ModelFault, Scored, Segment, SegmentKind, TrainSample, item_of
from rollart.sim import loop as virtual
from serverless.types import FaultKind, Throttle
from tests.kept import charge, kept


def text(length: int, seed: int = 1) -> str:
    return random.Random(seed).randbytes(length // 2).hex()


def read(directory: Path) -> list[KeptTrajectory]:
    with LedgerReader(directory) as reader:
        return list(reader.kept())


def rows(directory: Path, sql: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(directory / FILE)) as connection:
        return [one for (one,) in connection.execute(sql)]


numbers = st.floats(allow_nan=False, allow_infinity=False)
outcomes = st.one_of(
    st.builds(Scored, numbers, st.dictionaries(st.text(max_size=5), numbers), st.none() | st.tuples(numbers, numbers)),
    st.builds(ModelFault, numbers, st.text(max_size=9)),
    st.builds(
        InfraFault,
        st.sampled_from(FaultKind),
        st.booleans(),
        st.text(max_size=9),
        st.none() | st.sampled_from(Throttle),
        st.none() | numbers,
    ),
)


float32s = st.floats(-30.0, 0.0, width=32)
segments = st.one_of(
    st.builds(
        lambda ids, turn, version, allowed: Segment(
            SegmentKind.ACTION, turn, tuple(i for i, _ in ids), version, tuple(p for _, p in ids), allowed
        ),
        st.lists(st.tuples(st.integers(0, 2**31 - 1), float32s), max_size=4),
        st.integers(0, 3),
        st.integers(0, 9),
        st.none() | st.tuples(st.integers(0, 5), st.integers(0, 5)),
    ),
    st.builds(
        lambda kind, ids, turn: Segment(kind, turn, tuple(ids)),
        st.sampled_from([SegmentKind.PROMPT, SegmentKind.OBSERVATION]),
        st.lists(st.integers(0, 2**31 - 1), max_size=4),
        st.integers(0, 3),
    ),
)
seconds = st.floats(0.0, 99.0, width=32)
names = st.text(max_size=5)
routes = st.builds(
    RoutedTurn, seconds, seconds, seconds, names, st.just(""), names, st.integers(0, 9), st.integers(0, 9)
)


@given(
    outcomes, st.none() | numbers, st.text(max_size=20), st.lists(segments, max_size=4), st.lists(routes, max_size=2)
)
@settings(max_examples=60)
def test_every_trajectory_reads_as_it_was(
    outcome: Any, value: float | None, said: str, segments: list[Segment], routes: list[RoutedTurn]
) -> None:
    """Any text, lone surrogates too; log-probabilities are float32."""
    one = kept("g.1", said, KeptScore("f", "v", 0.25, outcome), value=value, metadata={"deep": {"list": [1, None]}})
    given = replace(one, trajectory=replace(one.trajectory, segments=tuple(segments)), routes=tuple(routes), t=2.0)
    found = decode_kept(encode_kept(given), 2.0)
    assert found == given
    assert found.item == item_of(given.trajectory)


step = st.one_of(
    st.tuples(st.just("item"), st.integers(0, 3_000)),
    st.tuples(st.just("aborted"), st.integers(0, 500)),
    st.tuples(st.sampled_from(["scored", "flush", "kill", "close"]), st.just(0)),
)


@example([("item", 3_000)] * 40 + [("kill", 0)] + [("item", 3_000)] * 10, 0.03)
@given(st.lists(step, max_size=15), st.sampled_from([0.03, 5.0]))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_is_lost_or_doubled_within_the_bound(
    tmp_path: Path, sample: Callable[..., TrainSample], steps: list[tuple[str, int]], max_mb: float
) -> None:
    """Over kills and resumes the kept items are those of the trajectories' rows: all of them, or the newest ones."""
    root = Path(tempfile.mkdtemp(dir=tmp_path))
    rng, lives = random.Random(1), 0

    async def take(ledger: Ledger, do: str, size: int, id_: str) -> None:
        if do == "flush":
            return await ledger.flush()
        ledger.keep(kept(id_, rng.randbytes(size // 2).hex()))
        if do == "item":
            await ledger.finish(sample(id_, "g"), charge(id_))
        elif do == "aborted":
            ledger.charge(charge(id_, "stale"))

    async def live(directory: Path) -> None:
        """Take steps until the life ends: a kill leaves what is on disk at that moment, which the next life copies."""
        with Ledger(directory, clock=lambda: 0.0, inline=True, kept_mb=max_mb) as ledger:
            while steps:
                do, size = steps.pop()
                if do == "kill":
                    shutil.copytree(directory, root / f"{lives + 1}")
                if do in ("kill", "close"):
                    return
                await take(ledger, do, size, f"g.{lives}.{len(steps)}")
                assert sum(f.stat().st_size for f in (directory / KEPT_DIRECTORY).glob("*")) <= max_mb * 1e6

    while steps:
        virtual.run(live(root / f"{lives}"))
        lives += (root / f"{lives + 1}").exists()
        found = [one.id for one in read(root / f"{lives}")]
        written = rows(root / f"{lives}", "SELECT id FROM trajectories ORDER BY rowid")
        assert found == written[len(written) - len(found) :], "the newest, in order, each once"
        assert max_mb < 1 or found == written
    shutil.rmtree(root, ignore_errors=True)


def test_a_trajectory_above_an_eighth_of_the_bound_is_not_kept(tmp_path: Path) -> None:
    with Ledger(tmp_path, clock=lambda: 0.0, inline=True, kept_mb=0.08) as ledger:
        for id_, size in (("g.small", 10), ("g.large", 10_001)):
            ledger.keep(kept(id_, "x" * size))
            ledger.charge(charge(id_))
    assert [one.id for one in read(tmp_path)] == ["g.small"]


def test_metadata_without_a_wire_form_is_left_out(tmp_path: Path) -> None:
    with Ledger(tmp_path, clock=lambda: 0.0, inline=True, kept_mb=1) as ledger:
        ledger.keep(kept("g.a", metadata={"board": object()}))
        ledger.charge(charge("g.a"))
    (one,) = read(tmp_path)
    assert (one.trajectory.metadata, one.trajectory.turns) == ({}, kept("g.a").trajectory.turns)


def test_scores_are_kept_with_their_trajectory_and_others_are_ignored(tmp_path: Path) -> None:
    scores = (KeptScore("exact", "d1", 1.0, Scored(0.5)),)
    with Ledger(tmp_path, clock=lambda: 0.0, inline=True, kept_mb=1) as ledger:
        ledger.keep(kept("g.a", value=None))
        ledger.scored("g.a", 0.5, scores)
        ledger.scored("g.unknown", 0.5, scores)
        for id_ in ("g.a", "g.unknown"):
            ledger.charge(charge(id_, t1=7.0))
    (one,) = read(tmp_path)
    assert (one.id, one.value, one.scores, one.t) == ("g.a", 0.5, scores, 7.0)
    assert (one.outcome("exact"), one.outcome("other")) == (scores[0], None)


def test_of_failed_ones_alone_those_with_a_fault_are_kept(tmp_path: Path) -> None:
    with Ledger(tmp_path, clock=lambda: 0.0, inline=True, kept_mb=1, only_failed=True) as ledger:
        for id_, outcome, score in (
            ("g.good", "finished", Scored(0.0)),
            ("g.policy", "finished", ModelFault(0.0, "cut off")),
            ("g.platform", "infra_fault", InfraFault(FaultKind.CRASH, retryable=True)),
            ("g.stale", "stale", Scored(0.0)),
            ("g.environment", "infra_fault", None),
        ):
            ledger.keep(kept(id_))
            if score is not None:
                ledger.scored(id_, None, (KeptScore("f", "", 1.0, score),))
            ledger.charge(charge(id_, outcome))
    assert [one.id for one in read(tmp_path)] == ["g.policy", "g.platform", "g.environment"]


def test_some_are_read_by_their_ids(tmp_path: Path) -> None:
    """Of the blocks, and of what is no block yet."""
    with Ledger(tmp_path, clock=lambda: 0.0, inline=True, kept_mb=0.2) as ledger:
        for n in range(9):
            ledger.keep(kept(f"g.{n}", text(5_000, n)))
            ledger.charge(charge(f"g.{n}"))
    with LedgerReader(tmp_path) as reader:
        for wanted in ({"g.0", "g.8"}, {"g.4"}, {"g.9"}, set()):
            assert {one.id for one in reader.kept(wanted)} == wanted & {f"g.{n}" for n in range(9)}


def test_a_ledger_without_kept_trajectories_has_no_trace_of_them(tmp_path: Path) -> None:
    with Ledger(tmp_path, clock=lambda: 0.0, inline=True) as ledger:
        ledger.keep(kept("g.a"))
        ledger.charge(charge("g.a"))
    assert read(tmp_path) == []
    assert not (tmp_path / KEPT_DIRECTORY).exists()
    assert not rows(tmp_path, "SELECT name FROM sqlite_master WHERE name LIKE 'kept%' OR name LIKE '%blocks'")


def test_a_damaged_block_is_an_error(tmp_path: Path) -> None:
    with Ledger(tmp_path, clock=lambda: 0.0, inline=True, kept_mb=0.2) as ledger:
        for n in range(4):
            ledger.keep(kept(f"t.{n}", text(16_000, n)))
            ledger.charge(charge(f"t.{n}"))
    assert len(read(tmp_path)) == 4
    (file,) = (tmp_path / KEPT_DIRECTORY).glob("*.seg")
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    with pytest.raises(PayloadDamaged, match="is damaged"):
        read(tmp_path)
