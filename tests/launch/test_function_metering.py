"""From the pipeline into the ledger and its reports, on virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollart.launch.functions import LedgerMeter, offload_events
from rollart.ledger.reader import LedgerReader
from rollart.ledger.store import Ledger
from rollart.report.cost import cost
from rollart.report.rows import collect
from rollart.report.utilization import utilization
from rollart.sim import loop as virtual
from rollart.testing.functions import LimitedAccount
from rollart.testing.ledger import MemoryRecorder
from serverless.meter import WorkerSpan, WorkerState
from serverless.pipeline.offload import Offload
from serverless.types import Invocation
from tests.report.test_report import cells
from tests.serverless.modelled import Modelled, takes
from tests.serverless.support import Books, Simulated, item, package


def test_a_call_of_the_pool_reaches_the_report(tmp_path: Path) -> None:
    """The ledger's worker time equals the meter's; dollars are those of calls, with starts listed separately."""
    books, work = Books(), package(batch={"max_items": 1}, concurrency=2, keep_alive_s=5.0)

    async def main() -> None:
        clock = asyncio.get_running_loop().time
        with Ledger(tmp_path, clock=clock, inline=True) as ledger:
            meter = LedgerMeter(ledger)

            class Both(Books):
                def invocation(self, invocation: Any) -> None:
                    books.invocation(invocation)
                    meter.invocation(invocation)

                def worker(self, span: Any) -> None:
                    books.worker(span)
                    meter.worker(span)

            async with Simulated().open([work], Both()) as backend, Offload([work], backend, meter=meter) as offload:
                for n in range(6):
                    await offload.submit("behave", item(str(n), value=float(n)), 100.0)
                    await asyncio.sleep(1.0 if n < 3 else 7.0)
                for event in offload_events(offload, clock()):
                    ledger.event(event)

    virtual.run(main())
    usage = books.usage["behave"]
    with LedgerReader(tmp_path) as reader:
        run = collect(reader, "r")
        queued = [call.queued_s for call in reader.calls()]
    assert {w.state: w.seconds for w in run.workers} == pytest.approx(
        {str(state): seconds for state, seconds in usage.worker_s.items() if seconds}
    )
    assert min(queued) >= 0
    (calls,) = run.invocations
    assert calls.cold_starts == usage.cold_starts >= 3
    assert 0 < calls.cold_billed_s <= calls.billed_s
    (row,) = cells(cost(run), "function_workers")
    assert row["idle_s"] == pytest.approx(usage.worker_s[WorkerState.IDLE])
    assert {e.fields["stage"]: e.fields["entered"] for e in run.events_of("offload_stage")}["validate"] == 6
    (health,) = cells(utilization(run), "health")
    assert (health["outcomes"], health["infra_faults"]) == (6, 0)


def test_refused_calls_reach_the_report_with_the_other_runs_of_the_machine(tmp_path: Path) -> None:
    work = package(batch={"max_items": 1}, concurrency=32)

    async def run(name: str) -> None:
        clock = asyncio.get_running_loop().time
        with Ledger(tmp_path / name, clock=clock, inline=True) as ledger:
            backend = LimitedAccount(6).backend(0.05, retry_after_s=1.0)
            async with Offload([work], backend, quota=30) as offload, asyncio.TaskGroup() as group:
                for n in range(40):
                    group.create_task(offload.submit("behave", item(str(n), value=float(n)), 100.0))
            call = Invocation("behave", "limited", "w", 0.0, 1.0, 0.0, 1.0, 512, 1, "ok")
            LedgerMeter(ledger).invocation(call)
            for event in offload_events(offload, clock(), tmp_path / name):
                ledger.event(event)

    for name in ("first", "second"):
        virtual.run(run(name))
    with LedgerReader(tmp_path / "second") as reader:
        read = collect(reader, "second")
    for report in (cost, utilization):
        refused, delayed = cells(report(read), "refused")
        assert (refused["limit"], refused["beside"], delayed["limit"]) == ("concurrency", "first", "quota")
        assert refused["calls"] >= 24


def test_events_tell_what_happened_and_nothing_else() -> None:
    quiet = package("behave", name="quiet", batch={"max_items": 1})
    busy = package("behave", batch={"max_items": 1})

    async def main() -> Any:
        async with Offload([busy, quiet], Modelled(takes(1.0))) as offload:
            await offload.submit("behave", item("a", value=1.0), 100.0)
            return list(offload_events(offload, 7.0))

    events = virtual.run(main())
    assert {e.subject for e in events} == {"behave"}, "nothing passed through the other"
    assert all(e.t == 7.0 for e in events)
    assert all(v for e in events if e.kind == "offload_stage" for v in e.fields.values()), "no zeros"
    (health,) = [e for e in events if e.kind == "function_health"]
    assert (health.fields["outcomes"], health.fields["faults"]) == (1, 0)


def test_faults_are_told_by_kind() -> None:
    from tests.serverless.modelled import fails

    one = package("behave", batch={"max_items": 1})

    async def main() -> Any:
        async with Offload([one], Modelled(fails("crash", retryable=False))) as offload:
            await offload.submit("behave", item("a", value=1.0), 100.0)
            return list(offload_events(offload, 0.0))

    (health,) = [e for e in virtual.run(main()) if e.kind == "function_health"]
    assert (health.fields["faults"], health.fields["fault.crash"]) == (1, 1)


def test_a_span_without_length_is_left_out() -> None:
    books = MemoryRecorder()
    meter = LedgerMeter(books)
    meter.worker(WorkerSpan("f", "local", "w", 1.0, 1.0, WorkerState.IDLE, 512))
    meter.worker(WorkerSpan("f", "local", "w", 1.0, 2.0, WorkerState.IDLE, 512))
    assert [span.t1 for span in books.spans] == [2.0]
