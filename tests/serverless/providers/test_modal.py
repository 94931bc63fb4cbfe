"""Calls on Modal: the real client and container runtime, over the test plane."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest

from serverless.deploy.modal_app import ModalDeployer
from serverless.deploy.package import Package, build
from serverless.errors import BackendFailed, CredentialsMissing, UnknownFunction
from serverless.pipeline.offload import Offload
from serverless.providers.base import Reply
from serverless.providers.modal import ModalBackend
from serverless.providers.modal_client import ModalSettings
from serverless.spec import FunctionSpec
from serverless.types import FaultKind, InfraFault, Outcome, Scored, Throttle
from serverless.wire import encode
from tests.serverless.modal_plane.provider import MISSING, PlaneProcess, running_plane
from tests.serverless.support import Books, alive, item, until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

FUNCTIONS = pathlib.Path(__file__).parents[1] / "modal_plane" / "functions"

LONG_S = 60.0


@pytest.fixture(scope="module")
def plane() -> Iterator[PlaneProcess]:
    with running_plane() as one:
        yield one


def acts(**settings: Any) -> Package:
    spec = FunctionSpec(name="acts", source="acts.py", handler="acts", takes="items", **settings)
    return build(spec, base=FUNCTIONS)


class Case:
    """`acts` deployed in an app of its own, a backend, and its books."""

    def __init__(self, plane: PlaneProcess, backend: ModalBackend, books: Books, prefix: str) -> None:
        self.plane = plane
        self.backend = backend
        self.books = books
        self.app = f"{prefix}acts"

    async def call(self, *, deadline_s: float = LONG_S, **what: Any) -> Reply:
        return await self.backend.invoke("acts", [encode(item(**what))], deadline_s=deadline_s)

    def containers(self) -> list[int]:
        return list(self.plane.pool(self.app)["containers"])

    def running(self) -> int:
        return int(self.plane.pool(self.app)["running"])


@contextlib.asynccontextmanager
async def deployed(plane: PlaneProcess, one: Package, **options: Any) -> AsyncIterator[Case]:
    prefix, books = plane.prefix(), Books()
    async with (
        ModalDeployer(ModalSettings(prefix=prefix)) as deployer,
        ModalBackend(ModalSettings(prefix=prefix), meter=books, **options) as backend,
    ):
        await deployer.deploy(one)
        try:
            yield Case(plane, backend, books, prefix)
        finally:
            with contextlib.suppress(UnknownFunction, BackendFailed):
                await deployer.delete(one.spec.name)


def done(reply: Reply) -> Any:
    assert reply.fault is None, reply.fault
    assert isinstance(reply.body, list)
    return reply.body[0]["done"]


def fault(reply: Reply) -> InfraFault:
    assert reply.fault is not None, reply.body
    assert reply.body is None
    return reply.fault


def test_many_calls_share_as_many_containers_as_allowed(plane: PlaneProcess) -> None:
    async def main() -> tuple[list[Reply], Books]:
        async with deployed(plane, acts(concurrency=2, timeout_s=30)) as case:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(case.call(do="sleep", seconds=0.1, n=n)) for n in range(60)]
            return [task.result() for task in tasks], case.books

    replies, books = asyncio.run(main())
    assert [done(reply) for reply in replies] == ["sleep"] * 60
    bills = [reply.invocation for reply in replies if reply.invocation is not None]
    assert len({bill.worker for bill in bills}) == 2
    assert len({bill.provider_id for bill in bills}) == 60
    assert all(bill.billed_s >= 0.1 for bill in bills)
    assert books.usage["acts"].billed_s == pytest.approx(sum(bill.billed_s for bill in bills))
    assert sum(bill.cold_start_s > 0.0 for bill in bills) == 1  # the other container began with the trial


@pytest.mark.parametrize("timeout_s", [30, 901])  # the second is submitted and polled
def test_payloads_above_lambdas_limit_go_and_come(plane: PlaneProcess, timeout_s: int) -> None:
    text = "é" * 4_000_000

    async def main() -> Reply:
        async with deployed(plane, acts(timeout_s=timeout_s)) as case:
            return await case.call(do="echo", text=text)

    assert done(asyncio.run(main())) == text
    assert plane.state()["calls"][-1]["blob"]


def test_every_call_went_as_cbor(plane: PlaneProcess) -> None:
    async def main() -> None:
        async with deployed(plane, acts()) as case:
            done(await case.call())
            assert {call["data_format"] for call in plane.state()["calls"]} == {4}  # DATA_FORMAT_CBOR

    asyncio.run(main())


def test_an_exception_is_the_calls_fault_and_the_container_lives(plane: PlaneProcess) -> None:
    async def main() -> tuple[Reply, Reply]:
        async with deployed(plane, acts(concurrency=1)) as case:
            return await case.call(do="raise", text="mine"), await case.call()

    first, second = asyncio.run(main())
    assert fault(first) == InfraFault(FaultKind.CRASH, retryable=False, detail="ValueError: mine")
    assert first.invocation is not None
    assert second.invocation is not None
    assert first.invocation.worker == second.invocation.worker != ""


def test_a_call_over_its_time_limit_is_ended_and_not_run_again(plane: PlaneProcess, tmp_path: pathlib.Path) -> None:
    count = tmp_path / "count"

    async def main() -> None:
        async with deployed(plane, acts(concurrency=1, timeout_s=1)) as case:
            late = await case.call(do="sleep", seconds=40, count=str(count))
            assert (fault(late).kind, fault(late).retryable) == (FaultKind.TIMEOUT, True)
            assert late.invocation is not None
            assert late.invocation.billed_s == pytest.approx(1.0)
            assert done(await case.call()) is None

    asyncio.run(main())
    assert count.read_text() == "x"


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ({"do": "exit"}, FaultKind.CRASH),
        ({"do": "leave"}, FaultKind.CRASH),
        ({"do": "eat", "mb": 400}, FaultKind.OUT_OF_MEMORY),
        ({"do": "memory_error"}, FaultKind.OUT_OF_MEMORY),
    ],
)
def test_a_container_that_dies_fails_its_call_once(
    plane: PlaneProcess, tmp_path: pathlib.Path, what: dict[str, Any], kind: FaultKind
) -> None:
    count = tmp_path / "count"

    async def main() -> None:
        async with deployed(plane, acts(concurrency=1, memory_mb=256, timeout_s=30)) as case:
            dead = await case.call(count=str(count), **what)
            assert (fault(dead).kind, fault(dead).retryable) == (kind, True), fault(dead)
            assert dead.invocation is not None
            assert dead.invocation.billed_s > 0.0
            assert done(await case.call(do="after")) == "after"

    asyncio.run(main())
    assert count.read_text() == "x"


def test_a_crash_loop_ends_in_faults_not_in_endless_starts(plane: PlaneProcess, tmp_path: pathlib.Path) -> None:
    broken = tmp_path / "broken"
    (tmp_path / "flaky.py").write_text(
        "import pathlib\n\n"
        f"if pathlib.Path({str(broken)!r}).exists():\n    raise RuntimeError('no licence')\n\n\n"
        "def flaky(items):\n    return [{'id': i['id'], 'aggregate_reward_score': 1.0} for i in items]\n"
    )
    one = build(
        FunctionSpec(name="flaky", source="flaky.py", handler="flaky", takes="items", concurrency=4), base=tmp_path
    )

    async def main() -> None:
        async with deployed(plane, one) as case:
            broken.touch()
            app = case.app.replace("acts", "flaky")
            for pid in plane.pool(app)["containers"]:
                os.kill(pid, signal.SIGKILL)
            await until(lambda: not plane.pool(app)["containers"], LONG_S)
            before = plane.pool(app)["starts"]
            event = [encode(item())]
            replies = await asyncio.gather(*(case.backend.invoke("flaky", event, deadline_s=LONG_S) for _ in range(10)))
            assert {(fault(r).kind, fault(r).retryable) for r in replies} == {(FaultKind.CRASH, False)}
            assert all("RuntimeError: no licence" in fault(r).detail for r in replies)
            assert plane.pool(app)["starts"] - before <= 8  # three in a row, and those begun together
            await until(lambda: not plane.pool(app)["containers"], LONG_S)
            broken.unlink()
            healed = await case.backend.invoke("flaky", event, deadline_s=LONG_S)
            assert healed.fault is None

    asyncio.run(main())


@pytest.mark.parametrize(
    ("message", "throttle", "retryable"),
    [
        ("Function call rate limit exceeded", Throttle.RATE, True),
        ("Workspace billing cycle spend limit reached", Throttle.RESERVED, False),
    ],
)
def test_a_throttled_call_is_told_at_once_and_never_billed(
    plane: PlaneProcess, message: str, throttle: Throttle, retryable: bool
) -> None:
    async def main() -> None:
        async with deployed(plane, acts()) as case:
            done(await case.call())
            before = plane.state()["requests"]["FunctionMap"]
            plane.fail("FunctionMap", "RESOURCE_EXHAUSTED", message)
            told = await case.call()
            assert (fault(told).kind, fault(told).throttle) == (FaultKind.THROTTLED, throttle)
            assert fault(told).retryable == retryable
            assert told.invocation is None
            assert plane.state()["requests"]["FunctionMap"] == before + 1
            assert len(case.books.invocations) == 1

    asyncio.run(main())


def test_a_throttle_storm_passes_through_the_pipeline(plane: PlaneProcess) -> None:
    async def main() -> Sequence[Outcome]:
        one = acts(timeout_s=10, batch={"max_items": 1})
        async with deployed(plane, one) as case, Offload([one], case.backend) as offload:
            done(await case.call())
            plane.fail("FunctionMap", "RESOURCE_EXHAUSTED", "rate limit", times=3)
            return await asyncio.gather(*(offload.submit("acts", item(str(n), n=n), LONG_S) for n in range(8)))

    outcomes = asyncio.run(main())
    throttled = [o for o in outcomes if not isinstance(o, Scored)]
    assert all(isinstance(o, InfraFault) and o.kind is FaultKind.THROTTLED for o in throttled)
    assert len(throttled) < 3  # each of the three rejections was tried again, unless the retry budget was spent


def test_a_lost_connection_is_tried_again_by_the_client_without_a_second_run(
    plane: PlaneProcess, tmp_path: pathlib.Path
) -> None:
    count = tmp_path / "count"

    async def main() -> None:
        async with deployed(plane, acts()) as case:
            plane.fail("FunctionMap", "UNAVAILABLE", "try again")
            plane.fail("FunctionGetOutputs", "UNAVAILABLE", "try again")
            assert done(await case.call(do="ok", count=str(count))) == "ok"

    asyncio.run(main())
    assert count.read_text() == "x"


def test_a_token_taken_back_is_the_users_to_mend(plane: PlaneProcess) -> None:
    async def main() -> None:
        async with deployed(plane, acts()) as case:
            done(await case.call())
            plane.fail("FunctionMap", "UNAUTHENTICATED", "token revoked")
            with pytest.raises(CredentialsMissing, match=r"token revoked.*modal token new"):
                await case.call()

    asyncio.run(main())


def test_past_its_deadline_a_call_is_given_up(plane: PlaneProcess) -> None:
    async def main() -> None:
        async with deployed(plane, acts(concurrency=1, timeout_s=2)) as case:
            done(await case.call())
            late = await case.call(do="sleep", seconds=1.0, deadline_s=0.2)
            assert (fault(late).kind, fault(late).retryable) == (FaultKind.DEADLINE, False)
            assert late.invocation is not None
            assert late.invocation.status == "deadline"
            assert done(await case.call(do="after")) == "after"

    asyncio.run(main())


def test_a_cancelled_call_is_billed_and_the_backend_goes_on(plane: PlaneProcess) -> None:
    async def main() -> None:
        async with deployed(plane, acts(concurrency=2, timeout_s=30)) as case:
            done(await case.call())
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await case.call(do="sleep", seconds=2)
            assert done(await case.call(do="after")) == "after"
            assert [i.status for i in case.books.invocations] == ["ok", "cancelled", "ok"]
            assert case.books.invocations[1].billed_s > 0.0

    asyncio.run(main())


def test_a_submitted_call_outlives_a_lost_poll_and_is_cancelled_at_its_deadline(
    plane: PlaneProcess, tmp_path: pathlib.Path
) -> None:
    async def main() -> None:
        async with deployed(plane, acts(concurrency=1, timeout_s=901)) as case:
            done(await case.call())
            plane.fail("FunctionGetOutputs", "UNAVAILABLE", times=2)
            assert done(await case.call(do="sleep", seconds=0.3, count=str(tmp_path / "runs"))) == "sleep"
            assert (tmp_path / "runs").read_text() == "x"
            late = await case.call(do="sleep", seconds=2.0, deadline_s=0.3)
            assert (fault(late).kind, late.invocation and late.invocation.status) == (FaultKind.DEADLINE, "deadline")
            assert plane.state()["requests"]["FunctionCallCancel"] == 1

    asyncio.run(main())


def test_an_event_with_no_wire_form_never_leaves(plane: PlaneProcess) -> None:
    async def main() -> None:
        async with deployed(plane, acts()) as case:
            before = plane.state()["requests"].get("FunctionMap", 0)
            reply = await case.backend.invoke("acts", [{"id": "a", "metadata": {"x": object()}}], deadline_s=LONG_S)
            assert fault(reply).kind is FaultKind.ENVIRONMENT
            assert reply.invocation is None
            assert plane.state()["requests"]["FunctionMap"] == before

    asyncio.run(main())


def test_a_function_deleted_meanwhile_is_unknown(plane: PlaneProcess) -> None:
    async def main() -> None:
        async with deployed(plane, acts()) as case:
            done(await case.call())
            pids = case.containers()
            async with ModalDeployer(ModalSettings(prefix=case.app.removesuffix("acts"))) as deployer:
                await deployer.delete("acts")
                assert list(await deployer.functions()) == []
            with pytest.raises(UnknownFunction):
                await case.call()
            await until(lambda: not any(map(alive, pids)), LONG_S)

    asyncio.run(main())


def test_a_plane_that_dies_makes_calls_unavailable() -> None:
    with running_plane() as plane:

        async def main() -> None:
            async with deployed(plane, acts()) as case:
                done(await case.call())
                pids = case.containers()
                plane.process.kill()
                plane.process.wait()
                lost = await case.call()
                assert (fault(lost).kind, fault(lost).retryable) == (FaultKind.UNAVAILABLE, True)
                assert lost.invocation is None
                await until(lambda: not any(map(alive, pids)), LONG_S)

        asyncio.run(main())
