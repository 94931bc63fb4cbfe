"""Failures of real processes: crashes, limits, kills, and no leftovers."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import tempfile
from collections.abc import Coroutine
from typing import Any

import pytest

from rollart.testing.functions import Meter
from serverless.errors import BackendFailed, FunctionFailed
from serverless.pipeline.offload import Offload
from serverless.pipeline.stages import PipelineSpec, RetrySpec
from serverless.providers.base import LogLine
from serverless.types import FaultKind, InfraFault, Item, ModelFault, Outcome, Scored
from serverless.wire import encode
from serverless.workers import logs
from serverless.workers.local import LocalBackend
from tests.serverless.support import PROVIDERS, Books, alive, descendants, item, package, until
from tests.serverless.workers.controller import kill_controller

pytestmark = pytest.mark.slow  # real processes


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """As `asyncio.run`, and no process and no directory may be left."""
    before, temporary = set(descendants()), pathlib.Path(tempfile.gettempdir()).glob("rollart-functions-*")
    known = set(temporary)
    result = asyncio.run(main)
    assert set(descendants()) <= before
    assert set(pathlib.Path(tempfile.gettempdir()).glob("rollart-functions-*")) <= known
    return result


async def submit_all(items: list[Item], *, retry: RetrySpec | None = None, **settings: Any) -> list[Outcome]:
    one = package(**settings)
    stages = PipelineSpec(retry=retry or RetrySpec())
    async with LocalBackend() as backend, Offload([one], backend, settings=stages) as offload:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(offload.submit("behave", i, 60.0)) for i in items]
        return [task.result() for task in tasks]


def only_fault(outcomes: list[Outcome], guilty: int) -> InfraFault:
    assert [isinstance(o, Scored) for o in outcomes] == [n != guilty for n in range(len(outcomes))], outcomes
    fault = outcomes[guilty]
    assert isinstance(fault, InfraFault)
    return fault


@pytest.mark.parametrize(
    ("what", "kind", "detail"),
    [
        ("exit", FaultKind.CRASH, "the worker exited with code 3"),
        ("leave", FaultKind.CRASH, "the worker exited with code 4"),
        ("eat", FaultKind.OUT_OF_MEMORY, "more than 128 MB (memory_mb)"),
    ],
)
def test_of_a_shared_call_that_dies_only_the_guilty_item_faults(what: str, kind: FaultKind, detail: str) -> None:
    items = [item(str(n), do=what if n == 2 else "score") for n in range(6)]
    outcomes = run(submit_all(items, batch={"max_items": 6, "max_wait_ms": 100}, retry=RetrySpec(max_attempts=1)))
    fault = only_fault(outcomes, 2)
    assert (fault.kind, fault.detail) == (kind, detail)


def test_of_a_shared_call_that_is_too_slow_only_the_guilty_item_faults() -> None:
    items = [item(str(n), do="sleep", seconds=9.0 if n == 0 else 0.0) for n in range(4)]
    outcomes = run(
        submit_all(items, batch={"max_items": 4, "max_wait_ms": 100}, timeout_s=1.5, retry=RetrySpec(max_attempts=1))
    )
    assert only_fault(outcomes, 0) == InfraFault(FaultKind.TIMEOUT, True, "no answer in 1.5 s (timeout_s)")


def test_a_time_limit_that_is_the_policys_fault_is_a_model_fault() -> None:
    items = [item("a", do="sleep", seconds=9.0)]
    [outcome] = run(submit_all(items, timeout_s=0.2, timeout_floor=-1.0))
    assert outcome == ModelFault(-1.0, "no answer in 0.2 s (timeout_s)")


def test_a_function_that_does_not_load_says_so_at_once() -> None:
    async def main() -> Outcome:
        one = package("broken")
        async with LocalBackend() as backend, Offload([one], backend) as offload:
            return await offload.submit("broken", item(), 60.0)

    fault = run(main())
    assert isinstance(fault, InfraFault)
    assert (fault.kind, fault.retryable) == (FaultKind.CRASH, False)
    assert "No module named 'no_such_module'" in fault.detail


def test_a_killed_worker_is_replaced_and_its_call_retried() -> None:
    async def main() -> tuple[Outcome, Outcome]:
        one = package(timeout_s=10.0)
        async with LocalBackend() as backend, Offload([one], backend) as offload:
            pid = int((await offload.submit("behave", item(do="pid"), 60.0)).value)  # type: ignore[union-attr]
            async with asyncio.TaskGroup() as group:
                task = group.create_task(offload.submit("behave", item(do="sleep", seconds=0.3), 60.0))
                await asyncio.sleep(0.1)
                os.kill(pid, signal.SIGKILL)
            pid = int((await offload.submit("behave", item(do="pid"), 60.0)).value)  # type: ignore[union-attr]
            os.kill(pid, signal.SIGKILL)
            await until(lambda: backend.load("behave").workers == 0)
            return task.result(), await offload.submit("behave", item(), 60.0)

    assert run(main()) == (Scored(1.0), Scored(1.0))


def test_a_killed_zygote_takes_its_workers_along_and_the_next_call_works() -> None:
    async def main() -> Outcome:
        one = package()
        async with LocalBackend() as backend, Offload([one], backend) as offload:
            worker = int((await offload.submit("behave", item(do="pid"), 60.0)).value)  # type: ignore[union-attr]
            [first] = backend.zygote_pids
            os.kill(first, signal.SIGKILL)
            outcome = await offload.submit("behave", item(), 60.0)
            await until(lambda: first not in backend.zygote_pids)
            await until(lambda: not alive(worker))
            return outcome

    assert run(main()) == Scored(1.0)


def test_a_zygote_killed_under_a_call_costs_a_retry() -> None:
    async def main() -> Outcome:
        one = package(timeout_s=10.0)
        async with LocalBackend() as backend, Offload([one], backend) as offload:
            await offload.submit("behave", item(), 60.0)
            async with asyncio.TaskGroup() as group:
                task = group.create_task(offload.submit("behave", item(do="sleep", seconds=0.3), 60.0))
                await asyncio.sleep(0.1)
                os.kill(*backend.zygote_pids, signal.SIGKILL)
            return task.result()

    assert run(main()) == Scored(1.0)


def test_what_a_function_started_ends_with_it(tmp_path: pathlib.Path) -> None:
    async def main() -> tuple[int, int]:
        one = package(timeout_s=1.5)
        file = tmp_path / "pids"
        async with LocalBackend() as backend:
            await backend.deploy(one)
            event = [encode(item(do="orphan", file=str(file)))]
            reply = await backend.invoke("behave", event, deadline_s=60.0)
            assert reply.fault is not None
            assert reply.fault.kind is FaultKind.TIMEOUT
            worker, child = map(int, file.read_text().split())
            await until(lambda: not alive(child) and not alive(worker))
            return worker, child

    run(main())


def test_a_daemon_ends_with_its_worker_and_does_not_hold_the_call_up(tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        one, file = package(timeout_s=50.0), tmp_path / "pids"  # the daemon lives for 60 s
        async with LocalBackend() as backend:
            await backend.deploy(one)
            reply = await backend.invoke("behave", [encode(item(do="daemon", file=str(file)))], deadline_s=60.0)
            assert reply.fault == InfraFault(FaultKind.CRASH, True, "the worker exited with code 3")
            await until(lambda: not any(alive(int(p)) for p in file.read_text().split()))

    run(main())


def test_a_long_log_starts_anew(tmp_path: pathlib.Path) -> None:
    async def main() -> Outcome:
        one = package()
        async with LocalBackend(root=tmp_path) as backend, Offload([one], backend) as offload:
            return await offload.submit("behave", item(do="print"), 60.0)

    assert run(main()) == Scored(1.0)
    assert (tmp_path / "logs" / "behave" / "0.log").stat().st_size == 0


def test_of_a_long_output_with_secrets_the_log_has_the_beginning_and_the_end(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-0123456789")

    async def main() -> list[list[str]]:
        one, found = package("wordy", batch={"max_items": 1}), []
        log = tmp_path / "logs" / "wordy" / "0.log"
        async with LocalBackend(root=tmp_path) as backend, Offload([one], backend) as offload:
            for megabytes in (40, 0):
                assert await offload.submit("wordy", item(megabytes=megabytes), 60.0) == Scored(1.0)
                found.append(log.read_text().splitlines())
        return found

    long, both = run(main())
    assert long[0].endswith("the first line")
    assert long[2] == "[secret JUDGE_KEY]"
    assert long[-2].endswith("the last line")
    assert long[-1].startswith("END RequestId: ")
    assert sum(map(len, long)) < 14 * 2**20
    (cut,) = (line for line in long if "of output were cut here" in line)
    assert int(cut[1:].split()[0]) > 26 * 2**20
    assert both[: len(long)] == long
    assert len(both) == len(long) + 23, "the next call is logged whole"


def test_a_killed_controller_leaves_no_process_and_no_file() -> None:
    kill_controller(
        """
        for n in range(2):
            event = [encode(item(do="sleep", seconds=60.0))]
            group.create_task(backend.invoke("behave", event, deadline_s=60.0))
        await until(lambda: len(descendants()) == 3)
        await asyncio.sleep(0.2)
        """,
        processes=3,
        settings="concurrency=2, timeout_s=60.0",
    )


def test_closing_with_calls_in_flight_is_quick() -> None:
    async def main() -> float:
        one = package(timeout_s=60.0)
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group, LocalBackend() as backend, Offload([one], backend) as offload:
            task = group.create_task(offload.submit("behave", item(do="sleep", seconds=60.0), 60.0))
            await asyncio.sleep(0.3)
            began = loop.time()
        assert isinstance(task.result(), InfraFault)
        return loop.time() - began

    assert run(main()) < 20.0


def test_functions_see_no_environment_of_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLART_SECRET", "x")
    assert run(submit_all([item(do="environ")])) == [Scored(1.0, {"leaked": 0.0})]


def test_the_lambda_context_is_there() -> None:
    async def main() -> Outcome:
        one = package("lambdas:lambda_handler", memory_mb=128, timeout_s=5.0)
        async with LocalBackend() as backend, Offload([one], backend) as offload:
            return await offload.submit("lambda_handler", item(), 60.0)

    assert run(main()) == Scored(1.0)


def test_items_of_an_async_function_run_concurrently() -> None:
    async def main() -> list[float]:
        books = Books()
        one = package("lambdas:concurrent", concurrency=1, timeout_s=30.0, batch={"max_items": 20, "max_wait_ms": 500})
        async with (
            LocalBackend(meter=books) as backend,
            Offload([one], backend) as offload,
            asyncio.TaskGroup() as group,
        ):
            for n in range(20):
                group.create_task(offload.submit("concurrent", item(str(n), seconds=0.5), 60.0))
        return [i.billed_s for i in books.invocations]

    [billed] = run(main())
    assert billed < 5.0, "one after the other they take 10"


def test_logs_are_kept_per_worker_in_a_given_directory(tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        one = package()
        async with LocalBackend(root=tmp_path) as backend, Offload([one], backend) as offload:
            await offload.submit("behave", item(do="raise"), 60.0)

    run(main())
    assert "ValueError: no such a" in (tmp_path / "logs" / "behave" / "0.log").read_text()


def printed(backend: LocalBackend, *, since_s: float = 3600.0, limit: int = 1000) -> list[LogLine]:
    return logs.read(backend.root / "logs", "behave", since_s=since_s, limit=limit)


def test_logs_say_who_printed_what_and_when(tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        one = package(concurrency=1)
        async with LocalBackend(root=tmp_path, run="lake-1") as backend:
            await backend.deploy(one)
            for key, do in (("a", "raise"), ("quiet", "score"), ("b", "raise"), ("c", "whisper")):
                await backend.invoke("behave", [encode(item(key, do=do))], deadline_s=60.0)
            lines = printed(backend)
            assert [line.text for line in lines if line.text.startswith("ValueError")] == [
                "ValueError: no such a",
                "ValueError: no such b",
            ]
            assert all(line.t and line.source == "0" for line in lines)
            assert {(line.run, line.items) for line in lines if line.text} == {("lake-1", ("a",)), ("lake-1", ("b",))}
            assert [line.t for line in lines] == sorted(line.t for line in lines)
            assert [line.text for line in printed(backend, limit=1)] == [lines[-1].text]
            assert printed(backend, since_s=-3600.0) == []

    run(main())


def test_a_worker_that_died_left_its_last_words(tmp_path: pathlib.Path) -> None:
    async def main() -> list[LogLine]:
        one = package(concurrency=1)
        async with LocalBackend(root=tmp_path) as backend:
            await backend.deploy(one)
            await backend.invoke("behave", [encode(item("a", do="last words"))], deadline_s=60.0)
            return printed(backend)

    assert [(line.t, line.text) for line in run(main())] == [("", "about to die")]


def test_a_function_that_preloads_has_a_zygote_of_its_own() -> None:
    async def main() -> None:
        plain, preloading = package(), package("lambdas:imported", preload=("fractions",))
        other = package("lambdas:imported", name="other")
        async with LocalBackend() as backend:
            for one in (plain, preloading, other):
                await backend.deploy(one)
            assert len(backend.zygote_pids) == 2
            bodies = []
            for name in ("imported", "other"):
                reply = await backend.invoke(name, [encode(item())], deadline_s=60.0)
                assert isinstance(reply.body, list)
                bodies.append(reply.body[0]["aggregate_reward_score"])
            assert bodies == [1.0, 0.0]
            assert len(backend.zygote_pids) == 2

    run(main())


def test_a_preload_that_cannot_be_imported_is_refused_at_deployment() -> None:
    async def main() -> None:
        async with LocalBackend() as backend:
            with pytest.raises(FunctionFailed, match="preloads no_such_module, which cannot be imported here"):
                await backend.deploy(package(preload=("no_such_module",)))

    run(main())


def test_a_zygote_that_is_asked_to_end_takes_no_packages_along() -> None:
    async def main() -> Outcome:
        one = package()
        async with LocalBackend() as backend, Offload([one], backend) as offload:
            await offload.submit("behave", item(), 60.0)
            [first] = backend.zygote_pids
            os.kill(first, signal.SIGTERM)
            await until(lambda: not alive(first))
            return await offload.submit("behave", item("again", value=0.5), 60.0)

    assert run(main()) == Scored(0.5)


def test_it_runs_on_uvloop() -> None:
    uvloop = pytest.importorskip("uvloop")
    before = set(descendants())
    outcomes = uvloop.run(submit_all([item("a"), item("b", do="exit")], retry=RetrySpec(max_attempts=1)))
    assert only_fault(outcomes, 1).detail == "the worker exited with code 3"
    assert set(descendants()) <= before


def test_a_missing_requirement_is_refused_at_deployment() -> None:
    async def main() -> None:
        async with LocalBackend() as backend:
            with pytest.raises(FunctionFailed, match=r"requires no-such-dist>=1.*pip install"):
                await backend.deploy(package(requirements=("no-such-dist>=1",)))

    run(main())


@pytest.mark.parametrize("preload", [(), ("xml.dom",)])
def test_a_zygote_that_hangs_is_replaced_and_the_calls_that_waited_are_made(preload: tuple[str, ...]) -> None:
    """Stopped, not dead: its socket stays open, and no new worker would ever come."""

    async def main() -> list[Outcome]:
        one = package(concurrency=3, preload=preload)
        async with LocalBackend() as backend, Offload([one], backend) as offload:
            pid = int((await offload.submit("behave", item(do="pid"), 60.0)).value)  # type: ignore[union-attr]
            first = backend.zygote_pids[-1]
            os.kill(first, signal.SIGSTOP)
            os.kill(pid, signal.SIGKILL)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(offload.submit("behave", item(str(n)), 60.0)) for n in range(6)]
            assert not alive(first)
            return [task.result() for task in tasks]

    assert run(main()) == [Scored(1.0)] * 6


def test_a_zygote_that_hangs_as_it_imports_is_replaced() -> None:
    async def main() -> Outcome:
        one = package(preload=("xml.dom",))
        async with LocalBackend() as backend:
            deploying = asyncio.create_task(backend.deploy(one))
            await until(lambda: backend.zygote_pids)
            os.kill(backend.zygote_pids[0], signal.SIGSTOP)
            with pytest.raises(BackendFailed, match="does not answer"):
                await deploying
            async with Offload([one], backend) as offload:
                return await offload.submit("behave", item(), 60.0)

    assert run(main()) == Scored(1.0)


@pytest.mark.parametrize("provider", ["local", "hosted"])
def test_a_process_that_outlives_its_call_ends_with_its_worker(provider: str) -> None:
    """The answer counts. What was started with the function, and what has ended, does not count as left behind."""
    does = ("none", "ended", "none", "shared", "child", "daemon", "none")

    async def main() -> tuple[list[Outcome], Outcome]:
        one = package("leaves:Leaves", concurrency=1, batch={"max_items": 1}, deterministic=False, stateless=True)
        async with PROVIDERS[provider]().open([one]) as backend, Offload([one], backend) as offload:
            answers = [await offload.submit("Leaves", item("a", do=do), 60.0) for do in does]
            failed = await offload.submit("Leaves", item("a", do="child", raises=True), 60.0)
            started = [int(a.metrics["started"]) for a in answers if isinstance(a, Scored)]
            await until(lambda: not any(alive(pid) for pid in started if pid))
            return answers, failed

    answers, failed = run(main())
    assert isinstance(failed, InfraFault)
    assert failed.detail == "ValueError: after it started a process"
    workers = [a.value for a in answers if isinstance(a, Scored)]
    assert len(workers) == 7
    assert len(set(workers[:5])) == 1, "one worker, with its helper, until a call leaves a process"
    assert len({*workers[4:]}) == 3, "each process that is left ends a worker"
    zombies = [a.metrics["zombies"] for a in answers if isinstance(a, Scored)]
    assert zombies[2] == 0, "an orphan that has ended is reaped"


def test_a_function_learns_how_its_helper_ended() -> None:
    async def main() -> list[Outcome]:
        one = package("helped:Helped", concurrency=1, deterministic=False, stateless=True)
        async with LocalBackend() as backend, Offload([one], backend) as offload:
            return [await offload.submit("Helped", item("a", do=do), 60.0) for do in ("crash", "look")]

    assert run(main()) == [Scored(1.0), Scored(3.0)]


def test_processes_left_behind_are_reported() -> None:
    async def main() -> Meter:
        meter = Meter()
        one = package("leaves:Leaves", concurrency=1, deterministic=False, stateless=True)
        async with LocalBackend(meter=meter) as backend:
            await backend.deploy(one)
            for do in ("none", "child"):
                await backend.invoke("Leaves", [encode(item(do=do))], deadline_s=60.0)
        return meter

    (left,) = run(main()).usage["Leaves"].left
    assert left.startswith("sleep (")
