"""The trainer over HTTP, through the port: in process on a private port, and as the real program (slow)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer

from rollart.adapters.trainers.http import HttpTrainer
from rollart.errors import TrainerError, TrainerRefused, VersionDamaged
from rollart.model import TrainReport, WeightsRef
from rollart.train import checkpoint
from rollart.train import server as commands
from rollart.train.config import TrainerConfig
from rollart.train.ranks import RankChannel, Ranks
from rollart.train.server import TrainerService
from tests.train.trainkit import config, sample

SAMPLES = [sample(str(i), turns=[(2, 2), (1, 1 + i % 2)], restricted=i == 1) for i in range(4)]


@contextlib.asynccontextmanager
async def serving(setup: TrainerConfig) -> AsyncIterator[tuple[HttpTrainer, TrainerService]]:
    service = TrainerService(setup)
    server = TestServer(service.app())
    await server.start_server()
    trainer = HttpTrainer(str(server.make_url("")))
    try:
        yield trainer, service
    finally:
        await trainer.aclose()
        await server.close()


@pytest.mark.asyncio
async def test_the_port_end_to_end(tmp_path: Path) -> None:
    async with serving(config(tmp_path)) as (trainer, _):
        imitated = await trainer.imitate(SAMPLES, 2)
        assert imitated.metrics["updates"] == 2
        report = await trainer.train(SAMPLES, 0)
        assert report.trained_tokens == sum(sum(s.loss_mask) for s in SAMPLES)
        ref = await trainer.publish(1)
        assert ref == WeightsRef(1, str(tmp_path / "v000001"))
        one = await trainer.logprobs(SAMPLES)
        assert [tuple(v != 0 for v in row) for row in one] == [s.loss_mask for s in SAMPLES]
        await trainer.train(SAMPLES, 1)
        assert await trainer.logprobs(SAMPLES) != one
        await trainer.restore(ref)
        assert await trainer.logprobs(SAMPLES) == one


@pytest.mark.asyncio
async def test_refusals_reach_the_caller_as_one_line(tmp_path: Path) -> None:
    async with serving(config(tmp_path)) as (trainer, service):
        with pytest.raises(TrainerError, match=r"^train: domain 'z' is not configured, the trainer knows a, b$"):
            await trainer.train([sample("x", domain="z")], 0)
        with pytest.raises(VersionDamaged, match=r"^restore: .* has no COMPLETE marker"):
            await trainer.restore(WeightsRef(1, str(tmp_path)))
        with pytest.raises(TrainerError, match="none of the 0 samples"):
            await trainer.imitate([], 1)
        assert await trainer.logprobs([]) == []
        bad = dataclasses.replace(SAMPLES[0], score=float("nan"))
        with pytest.raises(TrainerRefused) as refused:
            await trainer.train([bad, *SAMPLES[1:]], 0)
        assert refused.value.samples == (bad.id,)
        service.learner.train = lambda *_: 1 / 0  # type: ignore[assignment, method-assign]
        with pytest.raises(TrainerError, match=r"^train: ZeroDivisionError: division by zero$"):
            await trainer.train(SAMPLES, 0)


def streaming(root: Path) -> TrainerConfig:
    return config(root, stream=True, domains={"a": {"advantage": {"baseline": "group"}}})


@pytest.mark.asyncio
async def test_a_step_in_pieces_through_the_port(tmp_path: Path) -> None:
    """Another order gives the same bytes; a restore in the middle starts the step again."""
    async with serving(streaming(tmp_path / "a")) as (whole, _), serving(streaming(tmp_path / "b")) as (pieces, _):
        assert not whole.streams
        await whole.greet()
        assert whole.streams
        await whole.train(SAMPLES, 0)
        start = await pieces.publish(0)
        await pieces.begin(0)
        await pieces.accumulate(SAMPLES[:3])
        with pytest.raises(TrainerError, match=r"^publish: version 1 cannot be published: a step was begun"):
            await pieces.publish(1)
        await pieces.restore(start)
        with pytest.raises(TrainerError, match=r"^finish: no step was begun ") as lost:
            await pieces.finish()
        assert not isinstance(lost.value, TrainerRefused), "not the samples' fault: begin again"
        await pieces.begin(0)
        for one in reversed(SAMPLES):
            await pieces.accumulate([one])
            with pytest.raises(TrainerRefused, match=rf"^accumulate: sample {one.id} is in this step already$"):
                await pieces.accumulate([one])
        report = await pieces.finish()
        assert report.trained_tokens == sum(sum(s.loss_mask) for s in SAMPLES)
        paths = [Path((await trainer.publish(1)).path) for trainer in (whole, pieces)]
        for name in ("model.safetensors", "trainer/optimizer.safetensors", "trainer/state.json"):
            assert (paths[0] / name).read_bytes() == (paths[1] / name).read_bytes(), name


@pytest.mark.asyncio
async def test_a_trainer_that_does_not_stream_says_so(tmp_path: Path) -> None:
    async with serving(config(tmp_path)) as (trainer, _):
        await trainer.greet()
        assert not trainer.streams
        with pytest.raises(TrainerError, match=r"^begin: the trainer was not configured to stream"):
            await trainer.begin(0)
    with pytest.raises(TrainerError, match="no greeting"):
        await trainer.greet()
    await trainer.aclose()


@pytest.mark.asyncio
async def test_a_publish_that_hangs_and_is_given_up_leaves_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk hangs and the trainer is restored and continues; then the disk resumes the old write."""
    hangs, release, write = threading.Event(), threading.Event(), checkpoint.save_tensors

    def slow(path: Path, tensors: Any, rows: Any) -> None:
        if not hangs.is_set():
            hangs.set()
            release.wait()
        write(path, tensors, rows)

    async with serving(config(tmp_path)) as (trainer, _):
        start = await trainer.publish(0)
        await trainer.train(SAMPLES, 0)
        monkeypatch.setattr(checkpoint, "save_tensors", slow)
        given_up = asyncio.create_task(trainer.publish(1))
        await asyncio.to_thread(hangs.wait)
        await trainer.restore(start)
        await trainer.train(SAMPLES[:2], 0)
        release.set()
        with pytest.raises(TrainerError, match=r"^publish: version 1 was given up while it was written"):
            await given_up
        assert [p.name for p in tmp_path.iterdir()] == ["v000000"]
        published = await trainer.publish(1)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["v000000", "v000001"]
        now = await trainer.logprobs(SAMPLES)
        await trainer.restore(published)
        assert await trainer.logprobs(SAMPLES) == now


@pytest.mark.asyncio
async def test_what_is_not_a_request_is_a_400(tmp_path: Path) -> None:
    async with serving(config(tmp_path)) as (trainer, _), ClientSession() as session:
        for body in (b"", b"\xc1", b"\x01", b"\x80"):
            async with session.post(f"{trainer.url}/publish", data=body) as response:
                assert response.status == 400
                await response.read()


@pytest.mark.asyncio
async def test_health_and_metrics_answer_while_a_step_runs(tmp_path: Path) -> None:
    async with serving(config(tmp_path)) as (trainer, service), ClientSession() as session:
        await trainer.train(SAMPLES, 0)
        await trainer.publish(4)
        running, release = asyncio.Event(), threading.Event()
        loop, work = asyncio.get_running_loop(), service.learner.train

        def slow(*arguments: Any) -> Any:
            loop.call_soon_threadsafe(running.set)
            assert release.wait(60)
            return work(*arguments)

        service.learner.train = slow  # type: ignore[assignment, method-assign]
        async with asyncio.TaskGroup() as group:
            step = group.create_task(trainer.train(SAMPLES, 4))
            await running.wait()
            assert await trainer.healthy()
            async with session.get(f"{trainer.url}/health") as response:
                assert await response.json() == {"status": "ok", "version": 4, "queued": 1, "stream": False}
            async with session.get(f"{trainer.url}/metrics") as response:
                text = await response.text()
            assert not step.done()
            release.set()
        assert "rollart_trainer_steps_total 1.0\n" in text
        assert 'rollart_trainer_last{metric="loss"}' in text


@pytest.mark.asyncio
async def test_a_trainer_that_is_gone_is_a_trainer_error() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        trainer = HttpTrainer(f"http://127.0.0.1:{free.getsockname()[1]}")
    with pytest.raises(TrainerError, match="train failed: Cannot connect"):
        await trainer.train(SAMPLES, 0)
    assert not await trainer.healthy()
    await trainer.aclose()


def write_config(root: Path, **changes: Any) -> Path:
    init = {
        "vocab_size": 24,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    raw = {
        "model": {"init": init},
        "weights_root": str(root / "weights"),
        "domains": {"a": {"advantage": {"level": "turn", "baseline": "domain"}}},
    }
    path = root / "trainer.json"
    path.write_text(json.dumps(raw | changes))
    return path


def command(path: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "rollart.train", "--config", str(path), *more]


@pytest.mark.slow
@pytest.mark.asyncio
async def test_the_program_serves_and_stops_on_sigterm(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(*command(write_config(tmp_path)), stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 300)).decode().split()
        assert line[0] == "ready"
        trainer = HttpTrainer(line[1])
        assert (await trainer.train(SAMPLES, 0)).trained_tokens > 0
        assert (await trainer.publish(1)).path == str(tmp_path / "weights" / "v000001")
        await trainer.aclose()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.slow
def test_the_program_dies_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys\n"
        "child = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
    )
    parent = subprocess.run(
        [sys.executable, "-c", script, *command(write_config(tmp_path))], stdout=subprocess.PIPE, text=True, timeout=300
    )
    pid = int(parent.stdout)
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    import select

    gone, _, _ = select.select([handle], [], [], 60)
    os.close(handle)
    if not gone:
        os.kill(pid, signal.SIGKILL)
    assert gone


@pytest.mark.slow
def test_what_is_wrong_at_the_start_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cases = [
            (command(write_config(tmp_path), "--port", port), "Address already in use"),
            (command(tmp_path / "nothing.json"), "cannot read"),
        ]
        for arguments, message in cases:
            done = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
            assert done.returncode == 2
            assert message in done.stderr
            assert len(done.stderr.splitlines()) == 1
    done = subprocess.run(
        command(write_config(tmp_path, model={"path": str(tmp_path)})), capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "has no config.json" in done.stderr


@pytest.mark.asyncio
async def test_what_was_staged_is_published_beside_the_next_step(tmp_path: Path) -> None:
    """The version is that of the moment of staging, whatever is trained later; a restore drops it."""
    async with serving(config(tmp_path / "a")) as (plain, _), serving(config(tmp_path / "b")) as (staged, service):
        await plain.train(SAMPLES, 0)
        expected = Path((await plain.publish(1)).path)
        await staged.train(SAMPLES, 0)
        await staged.stage(1)
        began, goes_on = threading.Event(), threading.Event()
        train = service.learner.train

        def held(*args: Any) -> TrainReport:
            began.set()
            assert goes_on.wait(60)
            return train(*args)

        service.learner.train = held  # type: ignore[method-assign]
        step = asyncio.ensure_future(staged.train(SAMPLES, 1))
        await asyncio.to_thread(began.wait, 60)
        path = Path((await staged.publish(1)).path)  # although the learner's thread is busy
        goes_on.set()
        await step
        for name in ("model.safetensors", "trainer/optimizer.safetensors", "trainer/state.json", "config.json"):
            assert (path / name).read_bytes() == (expected / name).read_bytes(), name
        await staged.stage(2)
        await staged.train(SAMPLES, 2)
        await staged.restore(WeightsRef(1, str(path)))
        assert await staged.logprobs(SAMPLES) == await plain.logprobs(SAMPLES)
        again = Path((await staged.publish(2)).path)
        assert (again / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()


@pytest.mark.asyncio
async def test_columns_are_filled_beside_a_step_and_are_those_of_the_step(tmp_path: Path) -> None:
    domains = {"a": {"advantage": {"baseline": "group"}}}
    async with serving(config(tmp_path, loss={"kl": 0.1}, domains=domains)) as (trainer, service):
        await trainer.publish(0)
        began, goes_on = threading.Event(), threading.Event()
        train = service.learner.train

        def held(*args: Any) -> TrainReport:
            began.set()
            assert goes_on.wait(60)
            return train(*args)

        service.learner.train = held  # type: ignore[method-assign]
        step = asyncio.ensure_future(trainer.train(SAMPLES, 0))
        await asyncio.to_thread(began.wait, 60)
        reference = await trainer.reference(SAMPLES)  # although the learner's thread is busy
        advantage = await trainer.advantages(SAMPLES)
        assert not step.done()
        goes_on.set()
        computed = await step
        assert [tuple(v != 0 for v in row) for row in reference] == [s.loss_mask for s in SAMPLES]
        assert await trainer.reference(SAMPLES[1:2]) == reference[1:2]
        columns = zip(SAMPLES, reference, advantage, strict=True)
        filled = [dataclasses.replace(s, reference=r, advantage=a) for s, r, a in columns]
        await trainer.restore(WeightsRef(0, str(tmp_path / "v000000")))
        assert (await trainer.train(filled, 0)).metrics["loss"] == computed.metrics["loss"]


def test_every_thread_that_computes_begins_on_its_ranks_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: dict[str, torch.device] = {}
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.setdefault(threading.current_thread().name[:7], device)
    )
    ranks = Ranks()
    ranks.device = torch.device("cuda:3")
    service = TrainerService(config(tmp_path), ranks)
    for pool in (service.torch_pool, service.disk_pool, service.column_pool):
        pool.submit(lambda: None).result()
        pool.shutdown()
    assert chosen == dict.fromkeys(("torch_0", "disk_0", "columns"), torch.device("cuda:3"))


def test_a_follower_enters_each_thread_before_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Gone(RankChannel):
        def receive_command(self) -> tuple[str, bytes]:
            said.append("hears")
            raise TrainerError("rank 0 is gone")

    monkeypatch.setattr(commands, "exit_process", lambda status: None)
    commands.follow_rank_zero({Gone(): {}}, enter=lambda: said.append("entered"))
    assert said == ["entered", "hears"]
