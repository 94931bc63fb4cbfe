"""Kept items: as they were scored, each once, within their bound, and none without its trajectory's row."""

from __future__ import annotations

import contextlib
import random
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rollart.ledger.database import FILE
from rollart.ledger.kept import KEPT_DIRECTORY, KeptItem, KeptScore, decode_kept, encode_kept
from rollart.ledger.payloads import PayloadDamaged
from rollart.ledger.reader import LedgerReader
from rollart.ledger.store import Ledger
from rollart.model import InfraFault, Item, ModelFault, Scored, TrainSample, TrajectoryId
from rollart.ports import Charge
from rollart.sim import loop as virtual
from serverless.types import FaultKind, Throttle


def kept(id_: str, text: str = "an answer", outcome: Any = None) -> KeptItem:
    item = Item(id_, ({"role": "user", "content": "?"}, {"role": "assistant", "content": text}), "42", {"n": 1})
    return KeptItem(
        item, id_.partition(".")[0], "lake", 3, 0.5, (KeptScore("exact", "d1", 2.0, outcome or Scored(0.5)),), 1.5
    )


def charge(id_: str, outcome: str = "finished") -> Charge:
    return Charge(TrajectoryId(id_), "lake", outcome, 0, 0.5, 1, 1, 1, True, 1.0, "train", 0.0, 1.0)


def read(directory: Path) -> list[KeptItem]:
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


@given(outcomes, st.none() | numbers, st.text(st.characters(codec="utf-8"), max_size=20))
@settings(max_examples=60)
def test_every_outcome_reads_as_it_was(outcome: Any, value: float | None, text: str) -> None:
    given = KeptItem(
        Item("t", ({"role": "assistant", "content": text},), None, {"deep": {"list": [1, None, text]}}),
        *("g", "lake", 7, value),
        (KeptScore("f", "v", 0.25, outcome),),
        2.0,
    )
    assert decode_kept(encode_kept(given), 2.0) == given


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
        found = [one.item.id for one in read(root / f"{lives}")]
        written = rows(root / f"{lives}", "SELECT id FROM trajectories ORDER BY rowid")
        assert found == written[len(written) - len(found) :], "the newest, in order, each once"
        assert max_mb < 1 or found == written
    shutil.rmtree(root, ignore_errors=True)


def test_an_item_above_an_eighth_of_the_bound_is_not_kept(tmp_path: Path) -> None:
    with Ledger(tmp_path, clock=lambda: 0.0, inline=True, kept_mb=0.08) as ledger:
        for id_, size in (("small", 10), ("large", 10_001)):
            ledger.keep(kept(id_, "x" * size))
            ledger.charge(charge(id_))
    assert [one.item.id for one in read(tmp_path)] == ["small"]


def test_an_item_without_a_wire_form_is_not_kept(tmp_path: Path) -> None:
    with Ledger(tmp_path, clock=lambda: 0.0, inline=True, kept_mb=1) as ledger:
        ledger.keep(kept("a", "lone \ud800 surrogate"))
        ledger.charge(charge("a"))
    assert read(tmp_path) == []


def test_a_ledger_without_kept_items_has_no_trace_of_them(tmp_path: Path) -> None:
    with Ledger(tmp_path, clock=lambda: 0.0, inline=True) as ledger:
        ledger.keep(kept("a"))
        ledger.charge(charge("a"))
    assert read(tmp_path) == []
    assert not (tmp_path / KEPT_DIRECTORY).exists()
    assert not rows(tmp_path, "SELECT name FROM sqlite_master WHERE name LIKE 'kept%'")


def test_a_damaged_block_is_an_error(tmp_path: Path) -> None:
    with Ledger(tmp_path, clock=lambda: 0.0, inline=True, kept_mb=0.2) as ledger:
        for n in range(4):
            ledger.keep(kept(f"t{n}", random.Random(n).randbytes(8_000).hex()))
            ledger.charge(charge(f"t{n}"))
    assert len(read(tmp_path)) == 4
    (file,) = (tmp_path / KEPT_DIRECTORY).glob("*.seg")
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    with pytest.raises(PayloadDamaged, match="is damaged"):
        read(tmp_path)
