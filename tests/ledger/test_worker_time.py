"""Worker time in the ledger: exact sums in few rows, priced where idling costs, and files of the version before."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sqlite3
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.errors import StorageFailed
from rollart.ledger.database import FILE
from rollart.ledger.reader import LedgerReader
from rollart.ledger.store import Ledger
from rollart.ports import RunEvent
from rollart.settings.load import builtin, load_prices
from serverless.meter import WorkerSpan, WorkerState
from serverless.types import Invocation

SCHEMA_3 = (Path(__file__).parent / "schema3.sql").read_text()


def zero() -> float:
    return 0.0


spans = st.lists(
    st.builds(
        lambda function, t0, seconds, state: WorkerSpan(function, "local", "w", t0, t0 + seconds, state, 512),
        st.sampled_from("fg"),
        st.floats(0, 300),
        st.floats(1e-6, 100),
        st.sampled_from(WorkerState),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=25)
@given(st.lists(spans, max_size=3))
def test_sums_are_exact_and_rows_are_few(flushes: list[list[WorkerSpan]]) -> None:
    """Whatever a transaction holds: seconds by function and state are the spans', and a row is one minute of them."""
    expected: dict[tuple[str, str], list[float]] = defaultdict(list)
    minutes = set()
    with tempfile.TemporaryDirectory() as directory:
        with Ledger(directory, clock=zero, inline=True) as ledger:
            for flush in flushes:
                for span in flush:
                    ledger.worker(span)
                    expected[span.function, span.state].append(span.t1 - span.t0)
                    minutes.add((span.function, span.state, span.t1 // 60))
                asyncio.run(ledger.flush())
        with LedgerReader(directory) as reader:
            found = {(w.function, w.state): w.seconds for w in reader.worker_sums()}
        with contextlib.closing(sqlite3.connect(Path(directory) / FILE)) as connection:
            rows, counted = connection.execute("SELECT count(*), coalesce(sum(spans), 0) FROM worker_time").fetchone()
    assert found == {k: pytest.approx(math.fsum(v), rel=1e-12) for k, v in expected.items()}
    assert rows == len(minutes)
    assert counted == sum(map(len, flushes))


@pytest.mark.parametrize("inline", [True, False])
def test_idle_workers_are_spent_where_they_cost(tmp_path: Path, inline: bool) -> None:
    hour = [WorkerSpan("f", provider, "w", 0, 3600, WorkerState.IDLE, 1024) for provider in ("aws_lambda", "local")]
    busy = WorkerSpan("f", "aws_lambda", "w", 3600, 7200, WorkerState.BUSY, 1024)

    async def main() -> None:
        for life in (1, 2):
            with Ledger(tmp_path, clock=zero, prices=load_prices(builtin("prices.yaml")), inline=inline) as ledger:
                for span in (*hour, busy):
                    ledger.worker(span)
                await ledger.flush()
                assert ledger.spent_usd == pytest.approx(life * 3600 * 0.0000041667)

    asyncio.run(main())


def older(directory: Path) -> None:
    """A file of version 3, with a first call and a call that failed as it started."""
    with contextlib.closing(sqlite3.connect(directory / FILE)) as connection, connection:
        connection.executescript(SCHEMA_3)
        connection.executemany(
            "INSERT INTO invocations VALUES ('f', 'modal', 'w', ?, ?, ?, ?, 512, 8, 'ok', 'call', '')",
            [(0, 2, 1.5, 2.0), (2, 3, 0, 1.0), (3, 4, 5.0, 0.5)],
        )


def test_an_older_file_is_read_as_it_is(tmp_path: Path) -> None:
    older(tmp_path)
    before = (tmp_path / FILE).read_bytes()
    with LedgerReader(tmp_path) as reader:
        (calls,) = reader.invocation_sums()
        assert (calls.calls, calls.billed_s, calls.cold_billed_s) == (3, 3.5, 2.0)
        assert [call.cold_billed_s for call in reader.calls("modal")] == [1.5, 0, 0.5]
        assert reader.calls("local") == []
        assert reader.worker_sums() == []
        assert reader.facts().live_groups == 0
    assert (tmp_path / FILE).read_bytes() == before


def test_a_resume_upgrades_an_older_file(tmp_path: Path) -> None:
    older(tmp_path)
    with LedgerReader(tmp_path) as reader:
        expected = reader.calls()
    with Ledger(tmp_path, clock=zero, inline=True) as ledger:
        ledger.event(RunEvent(1.0, "x", "y"))
        ledger.worker(WorkerSpan("f", "local", "w", 0.0, 2.0, WorkerState.IDLE, 512))
        ledger.invocation(
            Invocation("g", "local", "w", 1, 2, 0.1, 0.02, 512, 1, "ok", queued_s=0.5, cold_billed_s=0.01)
        )
    with LedgerReader(tmp_path) as reader:
        (new,) = reader.calls("local")
        assert reader.calls("modal") == expected
        assert (new.function, new.queued_s, new.cold_billed_s) == ("g", 0.5, 0.01)
        assert [(w.state, w.seconds) for w in reader.worker_sums()] == [("idle", 2.0)]


@pytest.mark.parametrize("version", ["2", "99", "x"])
def test_an_unknown_version_is_refused(tmp_path: Path, version: str) -> None:
    older(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / FILE)) as connection, connection:
        connection.execute("UPDATE meta SET value = ?", (version,))
    for opened in (lambda: LedgerReader(tmp_path), lambda: Ledger(tmp_path, clock=zero)):
        make: Any = opened
        with pytest.raises(StorageFailed, match=rf"schema version {version} \(rule: 3, 4, 5, 6\)"):
            make()


def test_the_start_up_of_a_bill() -> None:
    call = Invocation("f", "modal", "w", 0, 1, 0.4, 1.0, 512, 1, "ok")
    assert call.start_billed_s == 0.4, "the billed part is not distinguished: all of it"
    fork = Invocation("f", "local", "w", 0, 1, 0.4, 1.0, 512, 1, "ok", cold_billed_s=0.1)
    assert fork.start_billed_s == 0.1, "a fork takes longer than its billed time"
    assert Invocation("f", "local", "w", 0, 1, 0.4, 0.2, 512, 1, "ok").start_billed_s == 0.2
