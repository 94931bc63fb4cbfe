from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rollart.engine import driver as module
from rollart.engine.driver import Driver
from rollart.engine.jobs import FinishedJob
from rollart.errors import EngineError
from rollart.model import FinishReason, PauseMode
from tests.engine.models import greedy, job, runner


@pytest.fixture(params=["inline", "thread"], autouse=True)
def _where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of stepping: on the loop, and (as if every step were long) in the worker thread."""
    if request.param == "thread":
        monkeypatch.setattr(module, "INLINE_S", -1.0)


def drive(directory: Path, scenario: Callable[[Driver], Awaitable[None]], *, slots: int = 8) -> None:
    async def body() -> None:
        driver = Driver(runner(directory, slots=slots))
        task = asyncio.create_task(driver.run())
        try:
            async with asyncio.timeout(60):
                await scenario(driver)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(body())


async def generated(driver: Driver, tokens: int) -> None:
    """Wait until this many tokens were sampled."""
    while driver.runner.generated_tokens < tokens:
        await asyncio.sleep(0)


def generate(driver: Driver, name: str, max_tokens: int = 8) -> asyncio.Task[FinishedJob]:
    return asyncio.create_task(driver.generate(job(name, [1, 2, 3], max_tokens=max_tokens)))


def test_many_at_once(qwen: Path) -> None:
    async def scenario(driver: Driver) -> None:
        answers = await asyncio.gather(*(generate(driver, f"{i}") for i in range(20)))
        assert {c.token_ids for f in answers for c in [f.completion]} == {greedy(qwen, [1, 2, 3], 8)}

    drive(qwen, scenario)


def test_keep_freezes_and_resume_goes_on(qwen: Path) -> None:
    async def scenario(driver: Driver) -> None:
        task = generate(driver, "a", 50)
        await generated(driver, 5)
        await driver.pause(PauseMode.KEEP)
        late = generate(driver, "b")
        frozen = driver.runner.generated_tokens
        for _ in range(20):
            await asyncio.sleep(0)
        assert driver.paused
        assert driver.runner.generated_tokens == frozen < 50
        await driver.resume()
        assert (await task).completion.token_ids == greedy(qwen, [1, 2, 3], 50)
        assert (await late).completion.finish is FinishReason.LENGTH

    drive(qwen, scenario)


def test_wait_drains_and_holds_newcomers(qwen: Path) -> None:
    async def scenario(driver: Driver) -> None:
        first = generate(driver, "a", 30)
        await generated(driver, 1)
        pausing = asyncio.create_task(driver.pause(PauseMode.WAIT))
        await asyncio.sleep(0)
        late = generate(driver, "b")
        held = generate(driver, "c")
        await pausing
        assert first.done() or driver.runner.generated_tokens == 30
        assert driver.held == 2
        assert not late.done()
        await driver.abort(["c"])
        assert (await held).completion.finish is FinishReason.ABORT
        await driver.pause(PauseMode.WAIT)
        await driver.resume()
        assert (await late).completion.finish is FinishReason.LENGTH

    drive(qwen, scenario)


def test_abort_mode_ends_all_with_what_they_have(qwen: Path) -> None:
    async def scenario(driver: Driver) -> None:
        want = greedy(qwen, [1, 2, 3], 30)
        tasks = [generate(driver, f"{i}", 30) for i in range(3)]
        await generated(driver, 6)
        await driver.pause(PauseMode.ABORT)
        for c in [f.completion for f in await asyncio.gather(*tasks)]:
            assert c.finish is FinishReason.ABORT
            assert c.token_ids == want[: len(c.token_ids)]
        await driver.resume()
        assert (await generate(driver, "x")).completion.finish is FinishReason.LENGTH

    drive(qwen, scenario)


def test_a_later_pause_frees_an_earlier_one_that_drains(qwen: Path) -> None:
    async def scenario(driver: Driver) -> None:
        task = generate(driver, "a", 50)
        await generated(driver, 1)
        draining = asyncio.create_task(driver.pause(PauseMode.WAIT))
        await asyncio.sleep(0)
        await driver.pause(PauseMode.KEEP)
        await draining
        await driver.resume()
        assert (await task).completion.finish is FinishReason.LENGTH

    drive(qwen, scenario)


def test_cancelling_frees_the_slot_and_the_id(qwen: Path) -> None:
    async def scenario(driver: Driver) -> None:
        for _ in range(3):
            running, waiting = generate(driver, "a", 50), generate(driver, "b", 50)
            await generated(driver, driver.runner.generated_tokens + 3)
            running.cancel()
            waiting.cancel()
            await asyncio.gather(running, waiting, return_exceptions=True)
        await driver.apply(lambda: None)
        assert not driver.runner.busy
        assert (await generate(driver, "a")).completion.finish is FinishReason.LENGTH

    drive(qwen, scenario, slots=1)


def test_refusals_reach_the_caller(qwen: Path) -> None:
    async def scenario(driver: Driver) -> None:
        with pytest.raises(EngineError, match="prompt is empty"):
            await driver.generate(job("a", []))
        draining = asyncio.create_task(driver.pause(PauseMode.WAIT))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="prompt is empty"):
            await driver.generate(job("a", []))
        await draining
        await driver.resume()
        first = generate(driver, "a", 20)
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="'a' is in use"):
            await driver.generate(job("a", [1]))
        assert (await first).completion.finish is FinishReason.LENGTH

    drive(qwen, scenario)


def test_a_failing_step_fails_its_requests_and_the_driver(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        driver = Driver(runner(qwen))
        monkeypatch.setattr(driver.runner.network, "forward", None)
        stepping, task = asyncio.create_task(driver.run()), generate(driver, "a")
        with pytest.raises(EngineError, match="failed in a step") as failed:
            await task
        assert failed.value.retryable
        with pytest.raises(TypeError):
            await stepping

    asyncio.run(body())
