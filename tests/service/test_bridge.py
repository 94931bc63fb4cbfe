"""The bridge to an external trainer: batches out, versions in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import pytest

from rollart.adapters.service import bridge as bridge_module
from rollart.adapters.service.bridge import TASK, Bridge
from rollart.adapters.service.state import ExperienceRequest, RequestRefused
from rollart.adapters.trainers.http import HttpTrainer, encode_samples
from rollart.errors import TrainerError, TrainerRefused
from rollart.launch.servers import serve_app
from rollart.model import GroupId, TrainSample, TrajectoryId
from rollart.sim import loop


def virtual(main: Callable[[], Awaitable[None]]) -> None:
    loop.run(main(), seed=1)


def sample(name: str, group: str, score: float, *, v0: int = 0) -> TrainSample:
    return TrainSample(
        id=TrajectoryId(name),
        group=GroupId(group),
        domain="coin",
        v0=v0,
        token_ids=(5, 6, 7),
        loss_mask=(False, True, True),
        logprobs=(0.0, -0.5, -0.25),
        versions=(-1, v0, v0 + 1),
        turn=(-1, 0, 0),
        rewards=(0.0, 0.0, 0.0),
        score=score,
        success=None,
    )


def batch(version: int) -> dict[str, Any]:
    samples = [sample(f"{g}.{m}", g, float(m)) for g in ("a", "b") for m in range(2)]
    return {"samples": encode_samples(samples), "version": version}


def saved(path: Path) -> str:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return str(path)


def test_a_batch_goes_out_whole_and_its_version_comes_back(tmp_path: Path) -> None:
    async def main() -> None:
        bridge = Bridge(tmp_path / "weights")
        desk = bridge.state
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(bridge.publish({"version": 0}))
            await asyncio.sleep(1.0)
            await desk.notify(0, saved(tmp_path / "outside-0"))
        assert (tmp_path / "weights" / "v000000" / "COMPLETE").is_file()
        assert first.result() == {"version": 0, "path": str(tmp_path / "weights" / "v000000"), "bytes": 7}
        async with asyncio.TaskGroup() as tasks:
            training = tasks.create_task(bridge.train(batch(0)))
            lease, (rows,) = await desk.lease_rows(ExperienceRequest(TASK, 1), 60.0, lease_s=60.0, key="k")
            assert [(r.values["group"], r.values["score"], r.values["batch"], r.version) for r in rows] == [
                (0, 0.0, 1, 0),
                (0, 1.0, 1, 0),
                (1, 0.0, 1, 0),
                (1, 1.0, 1, 0),
            ]
            assert rows[0].values["token_ids"] == [5, 6, 7]
            assert rows[0].values["loss_mask"] == [0, 1, 1]
            assert rows[0].values["logprobs"] == pytest.approx([0.0, -0.5, -0.25])
            assert (rows[0].values["versions"], rows[0].values["domain"]) == ([-1, 0, 1], "coin")
            assert await desk.done(lease)
            await asyncio.sleep(9.0)
            assert not training.done()
            await desk.notify(1, saved(tmp_path / "outside-1"))
        assert training.result()["trained_tokens"] == 8
        assert training.result()["seconds"] >= 9.0

    virtual(main)


def test_a_step_that_the_run_gave_up_is_offered_again(tmp_path: Path) -> None:
    async def main() -> None:
        bridge = Bridge(tmp_path)
        await bridge.restore({"version": 4, "path": "/v4"})
        assert await bridge.state.weights(-1, 0.0) == (4, "/v4")
        for _ in range(2):  # the second round follows a restore
            training = asyncio.ensure_future(bridge.train(batch(4)))
            _, (rows,) = await bridge.state.lease_rows(ExperienceRequest(TASK, 1), 60.0, lease_s=600.0, key="after-4")
            assert len(rows) == 4
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)
            await bridge.restore({"version": 4, "path": "/v4"})
            assert bridge.state.status()["rows"] == 0

    virtual(main)


def test_a_version_may_be_saved_where_the_run_will_have_it(tmp_path: Path) -> None:
    async def main() -> None:
        bridge = Bridge(tmp_path)
        await bridge.state.notify(0, saved(tmp_path / "v000000"))
        for _ in range(2):  # published again, as after a lost answer
            assert (await bridge.publish({"version": 0}))["bytes"] == 7
            assert (tmp_path / "v000000" / "COMPLETE").is_file()

    virtual(main)


def test_what_the_outside_does_wrong_is_said(tmp_path: Path) -> None:
    async def main() -> None:
        bridge = Bridge(tmp_path)
        with pytest.raises(RequestRefused, match="v3 is not due: no batch is on offer"):
            await bridge.state.notify(3, "/nowhere")
        await bridge.state.notify(0, "/nowhere")
        with pytest.raises(TrainerError, match="announced /nowhere for v0"):
            await bridge.publish({"version": 0})
        with pytest.raises(TrainerRefused, match="does no imitate"):
            await bridge.refuse("imitate", {})

    virtual(main)


def test_a_version_is_copied_once_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled publish continues to copy; the next one waits for it."""
    here, go, inside = threading.Event(), threading.Event(), []

    def slow(*arguments: Any) -> Path:
        inside.append(len(inside))
        here.set()
        assert go.wait(60)
        inside.append("out")
        return taken_over(*arguments)

    taken_over = bridge_module.adopt_version
    monkeypatch.setattr(bridge_module, "adopt_version", slow)

    async def main() -> None:
        bridge = Bridge(tmp_path / "weights")
        await bridge.state.notify(0, saved(tmp_path / "outside"))
        first = asyncio.create_task(bridge.publish({"version": 0}))
        await asyncio.to_thread(here.wait, 60)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.create_task(bridge.publish({"version": 0}))
        await asyncio.sleep(0)
        go.set()
        assert (await second)["bytes"] == 7

    asyncio.run(main())
    assert inside == [0, "out", 2, "out"]


def test_a_batch_that_cannot_be_offered_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge_module, "CAPACITY_ROWS", 3)

    async def main() -> None:
        bridge = Bridge(tmp_path)
        async with serve_app(bridge.app(), host="127.0.0.1", port=0) as url:
            trainer = HttpTrainer(url)
            try:
                samples = [sample(f"a.{m}", "a", 0.0) for m in range(4)]
                with pytest.raises(TrainerError, match="4 rows do not fit"):
                    await trainer.train(samples, 0)
            finally:
                await trainer.aclose()
            body = msgpack.packb({"version": 0})
            async with aiohttp.ClientSession() as client, client.post(f"{url}/train", data=body) as answer:
                assert answer.status == 400
                assert "cannot be read" in msgpack.unpackb(await answer.read())["error"]

    asyncio.run(main())


def test_a_version_is_taken_from_whoever_was_given_the_batch(tmp_path: Path) -> None:
    """A slow trainer's step on a withdrawn batch does not count as a step on the next batch."""

    async def main() -> None:
        bridge = Bridge(tmp_path)
        desk = bridge.state
        await bridge.restore({"version": 4, "path": "/v4"})
        said: list[str] = []
        desk.changed = lambda: said.append(f"{desk.due} {desk.taken}")
        slow: list[str] = []
        for attempt in range(2):
            training = asyncio.create_task(bridge.train(batch(4)))
            await asyncio.sleep(1.0)
            with pytest.raises(RequestRefused, match="not made of the batch on offer"):
                await desk.notify(5, "/v5")
            with pytest.raises(RequestRefused, match="the batch on offer makes v5"):
                await desk.notify(6, "/v6")
            if attempt == 0:
                _, (rows,) = await desk.lease_rows(ExperienceRequest(TASK, 1), 0.0, lease_s=60.0)
                slow = [rows[0].group]
                training.cancel()
                await asyncio.gather(training, return_exceptions=True)
                with pytest.raises(RequestRefused, match="no batch is on offer"):
                    await desk.notify(5, "/v5", slow[0])
        _, (rows,) = await desk.lease_rows(ExperienceRequest(TASK, 1), 0.0, lease_s=60.0)
        with pytest.raises(RequestRefused, match="not made of the batch on offer"):
            await desk.notify(5, "/v5", slow[0])
        await desk.notify(5, "/v5", rows[0].group)
        assert (await training)["trained_tokens"] == 8
        assert said == ["5 False", "5 True", "None False", "5 False", "5 True", "5 True", "None False"]
        await desk.notify(5, "/v5", rows[0].group)

    virtual(main)
