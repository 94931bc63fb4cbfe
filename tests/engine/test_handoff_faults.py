"""Failures of a hand-off: each is a HandoffFailed, and the same request without the hand-off succeeds."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest

from rollart.engine.handoff import HandoffSettings
from rollart.engine.shm import SharedKvFiles
from rollart.errors import EngineError, HandoffFailed
from rollart.model import FinishReason, PauseMode, WeightsRef
from tests.engine.models import greedy
from tests.engine.pd import (
    LOGITS_BYTES,
    TOKEN_BYTES,
    Side,
    ask,
    prefilled,
    same,
    side,
    split,
    with_engines,
)


def test_kv_is_handed_out_once(qwen: Path, shm: str) -> None:
    async def scenario(p: Side, d: Side, _: Side) -> None:
        params = await prefilled(p.client, ask("0", range(20)))
        await d.client.generate(ask("a", range(20), params))
        with pytest.raises(HandoffFailed, match="was taken"):
            await d.client.generate(ask("b", range(20), params))
        assert (await d.client.generate(ask("c", range(20)))).finish is FinishReason.LENGTH

    with_engines(qwen, scenario, shm=shm)


def test_a_wrong_token_gets_nothing(qwen: Path) -> None:
    async def scenario(p: Side, d: Side, _: Side) -> None:
        params = await prefilled(p.client, ask("0", range(20)))
        with pytest.raises(HandoffFailed, match="the token is not that of the export"):
            await d.client.generate(ask("a", range(20), {**params, "remote_token": "0" * 32}))
        await d.client.generate(ask("b", range(20), params))

    with_engines(qwen, scenario)


def test_an_ended_lease_is_told_from_one_that_never_was(qwen: Path, shm: str) -> None:
    async def scenario(p: Side, d: Side, _: Side) -> None:
        params = await prefilled(p.client, ask("0", range(20)))
        exports, now = p.server.handoffs.exports, asyncio.get_running_loop().time
        exports.now = lambda: now() + 29.0
        exports.sweep()
        assert len(exports) == 1
        exports.now = lambda: now() + 30.0
        exports.sweep()
        with pytest.raises(HandoffFailed, match="its lease ended"):
            await d.client.generate(ask("a", range(20), params))
        with pytest.raises(HandoffFailed, match="it was never here"):
            await d.client.generate(ask("a", range(20), {**params, "remote_request_id": "x", "remote_file": ""}))
        assert d.server.handoffs.failed == 2
        assert exports.expired == 1
        exports.now = now
        returned = (await split(p.client, d.client, ask("b", range(20), session="s"))).kv_transfer
        late = d.server.handoffs.exports
        late.now = lambda: now() + 479.0
        late.sweep()
        assert returned
        assert len(late) == 1, "what waits for the next turn waits longer"

    with_engines(qwen, scenario, shm=shm)


def test_pending_kv_is_bounded(qwen: Path, shm: str) -> None:
    async def scenario(p: Side, d: Side, _: Side) -> None:
        first, second, third = [await prefilled(p.client, ask(f"{i}", range(20))) for i in range(3)]
        exports = p.server.handoffs.exports
        assert (len(exports), exports.dropped) == (2, 1)
        assert exports.bytes == 2 * (20 * TOKEN_BYTES + LOGITS_BYTES)
        with pytest.raises(HandoffFailed, match="room ran out"):
            await d.client.generate(ask("a", range(20), first))
        for name, params in (("b", second), ("c", third)):
            await d.client.generate(ask(name, range(20), params))
        exports.sweep()
        assert (len(exports), exports.bytes) == (0, 0)

    with_engines(qwen, scenario, shm=shm, settings=HandoffSettings(pending_bytes=50 * TOKEN_BYTES))


@pytest.mark.parametrize("how", ["abort", "release"])
@pytest.mark.parametrize("streaming", [True, False])
def test_kv_that_nobody_wants_is_dropped_on_request(qwen: Path, shm: str, how: str, streaming: bool) -> None:
    async def scenario(p: Side, d: Side, _: Side) -> None:
        params = await prefilled(p.client, ask("0", range(20), session="s"))
        await (p.client.abort(["0-p"]) if how == "abort" else p.client.release("s"))
        await p.client.stats()
        with pytest.raises(HandoffFailed, match="aborted" if how == "abort" else "session ended"):
            await d.client.generate(ask("a", range(20), params, session="s"))
        assert len(p.server.handoffs.exports) == 0

    with_engines(qwen, scenario, shm=shm, streaming=streaming)


def test_old_kv_goes_with_its_weights_and_with_a_reset(qwen: Path, qwen_next: Path, shm: str) -> None:
    async def scenario(p: Side, d: Side, _: Side) -> None:
        params = await prefilled(p.client, ask("0", range(20)))
        await p.client.update_weights(WeightsRef(1, str(qwen_next)))
        with pytest.raises(HandoffFailed, match="weights are version 1 now"):
            await d.client.generate(ask("a", range(20), params))
        await d.client.update_weights(WeightsRef(1, str(qwen_next)))
        params = await prefilled(p.client, ask("1", range(20)))
        await p.client.control("/reset_prefix_cache", {})
        with pytest.raises(HandoffFailed, match="prefix cache was reset"):
            await d.client.generate(ask("b", range(20), params))

    with_engines(qwen, scenario, shm=shm)


def test_a_dead_prefill_engine_is_a_failed_hand_off(qwen: Path) -> None:
    async def scenario(p: Side, d: Side, whole: Side) -> None:
        params = await prefilled(p.client, ask("0", range(20)))
        with pytest.raises(HandoffFailed, match="failed") as dead:
            await d.client.generate(ask("a", range(20), {**params, "remote_port": 1}))
        assert dead.value.retryable
        with pytest.raises(HandoffFailed):
            await d.client.generate(ask("a", range(20), {**params, "remote_host": "no such host"}))
        same(await d.client.generate(ask("a", range(20))), await whole.client.generate(ask("a", range(20))))

    with_engines(qwen, scenario)


def test_kv_in_shared_memory_outlives_the_prefill_engines_port(qwen: Path, tmp_path: Path) -> None:
    async def scenario(p: Side, d: Side, whole: Side) -> None:
        params = await prefilled(p.client, ask("0", range(20)))
        same(
            await d.client.generate(ask("a", range(20), {**params, "remote_port": 1})),
            await whole.client.generate(ask("a", range(20))),
        )

    with_engines(qwen, scenario, shm=str(tmp_path))


def test_another_host_or_a_file_that_is_gone_means_the_socket(qwen: Path, tmp_path: Path) -> None:
    async def scenario(p: Side, d: Side, _: Side) -> None:
        params = await prefilled(p.client, ask("0", range(20)))
        await d.client.generate(ask("a", range(20), {**params, "remote_boot_id": "elsewhere"}))
        params = await prefilled(p.client, ask("1", range(20)))
        await d.client.generate(ask("b", range(20), {**params, "remote_file": "../../etc/passwd"}))
        assert d.counters["shm"] == 0
        assert d.server.handoffs.pulled["socket"].pulls == 2

    with_engines(qwen, scenario, shm=str(tmp_path))


def test_full_shared_memory_means_the_socket(qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rollart.engine.shm.SharedKvFiles.write", full)

    async def scenario(p: Side, d: Side, _: Side) -> None:
        await split(p.client, d.client, ask("0", range(20)))
        assert d.server.handoffs.pulled["socket"].pulls == 1

    with_engines(qwen, scenario, shm=str(tmp_path))


def test_bytes_that_changed_on_the_way_are_refused(qwen: Path, tmp_path: Path) -> None:
    async def scenario(p: Side, d: Side, _: Side) -> None:
        params = await prefilled(p.client, ask("0", range(20)))
        files = p.server.handoffs.files
        path = files.root / str(params["remote_file"])
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
        with pytest.raises(HandoffFailed, match="checksum"):
            await d.client.generate(ask("a", range(20), params))

    with_engines(qwen, scenario, shm=str(tmp_path))


def test_a_silent_prefill_engine_costs_the_requests_own_timeout(qwen: Path) -> None:
    """The prefill engine accepts the connection and sends nothing; the decode engine serves other requests."""

    async def scenario(p: Side, d: Side, _: Side) -> None:
        opened = asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            opened.set()
            await reader.read()
            writer.close()

        async with await asyncio.start_server(silent, "127.0.0.1", 0) as mute:
            port = mute.sockets[0].getsockname()[1]
            params = {**await prefilled(p.client, ask("0", range(20))), "remote_port": port}
            loop = asyncio.get_running_loop()
            before = loop.time()
            slow = asyncio.create_task(d.client.generate(ask("a", range(20), {**params, "timeout_s": 7})))
            await opened.wait()
            assert (await d.client.stats()).waiting == 1
            assert (await d.client.generate(ask("b", [1, 2]))).finish is FinishReason.LENGTH
            limit = d.server.handoffs.pull_timeouts["a"]
            assert before + 7.0 <= (limit.when() or 0.0) <= loop.time() + 7.0
            limit.reschedule(loop.time())  # the seven seconds are over
            with pytest.raises(HandoffFailed, match="in 7 s"):
                await slow
            assert (await d.client.stats()).waiting == 0

    with_engines(qwen, scenario)


@pytest.mark.parametrize("how", ["cancel", "abort"])
@pytest.mark.parametrize("streaming", [True, False])
def test_a_request_given_up_during_its_pull_leaves_nothing(qwen: Path, how: str, streaming: bool) -> None:
    async def scenario(p: Side, d: Side, _: Side) -> None:
        hung_up, opened = asyncio.Event(), asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            opened.set()
            await reader.read()
            hung_up.set()
            writer.close()

        async with await asyncio.start_server(silent, "127.0.0.1", 0) as mute:
            port = mute.sockets[0].getsockname()[1]
            params = {**await prefilled(p.client, ask("0", range(20))), "remote_port": port}
            task = asyncio.create_task(d.client.generate(ask("a", range(20), params, session="s")))
            await opened.wait()
            with pytest.raises(EngineError, match="'a' is in use"):
                await d.client.generate(ask("a", range(20), params))
            if how == "cancel":
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                await d.client.abort(["a"])
                answer = await task
                assert (answer.finish, answer.token_ids) == (FinishReason.ABORT, ())
            while d.server.handoffs.pull_timeouts:
                await asyncio.sleep(0)
            assert not d.server.handoffs.runner.busy
            assert (await d.client.generate(ask("a", range(20), session="s"))).finish is FinishReason.LENGTH

    with_engines(qwen, scenario, streaming=streaming)


def test_another_shape_is_a_failed_hand_off(qwen: Path, llama: Path) -> None:
    async def body() -> None:
        async with side(qwen) as p, side(llama) as d:
            params = await prefilled(p.client, ask("0", range(20)))
            with pytest.raises(HandoffFailed, match="is not this model's"):
                await d.client.generate(ask("a", range(20), params))
            params = await prefilled(p.client, ask("1", range(20)))
            with pytest.raises(HandoffFailed, match="another prompt"):
                await p.client.generate(ask("b", range(1, 21), params))

    asyncio.run(body())


def test_a_session_that_goes_while_its_suffix_is_on_the_way_is_computed_here(qwen: Path, shm: str) -> None:
    async def scenario(p: Side, d: Side, whole: Side) -> None:
        prompt = list(range(1, 21))
        first = await split(p.client, d.client, ask("0", prompt, session="s"))
        second = ask("1", [*prompt, *first.token_ids, 4, 5], session="s")
        params = await prefilled(p.client, second, first.kv_transfer)
        pull, runner = d.server.handoffs.pull, d.server.handoffs.runner

        async def evicting(*arguments: Any) -> Any:
            block = await pull(*arguments)
            runner.release("s")
            return block

        d.server.handoffs.pull = evicting  # type: ignore[method-assign]
        answer = await d.client.generate(dataclasses.replace(second, kv_transfer=params))
        assert answer.token_ids == greedy(qwen, second.token_ids, 6)
        assert runner.dropped_imports == 1

    with_engines(qwen, scenario, shm=shm)


def test_a_copy_that_nobody_waits_for_leaves_no_file(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollart.engine.handoff.OFFLOAD_BYTES", 0)
    copying, go_on, removed = threading.Event(), threading.Event(), threading.Event()
    write, remove = SharedKvFiles.write, SharedKvFiles.remove

    def slow(self: SharedKvFiles, parts: Any) -> str:
        copying.set()
        assert go_on.wait(60)
        return write(self, parts)

    def noted(self: SharedKvFiles, place: str) -> None:
        remove(self, place)
        removed.set()

    monkeypatch.setattr(SharedKvFiles, "write", slow)
    monkeypatch.setattr(SharedKvFiles, "remove", noted)

    async def scenario(p: Side, d: Side, _: Side) -> None:
        kv = {"do_remote_decode": True, "do_remote_prefill": False}
        await p.client.generate(ask("connects", range(20)))
        idle = len(asyncio.all_tasks())
        task = asyncio.create_task(p.client.generate(ask("0", range(20), kv, tokens=1)))
        while not copying.is_set():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while len(asyncio.all_tasks()) > idle:
            await asyncio.sleep(0)
        go_on.set()
        while not removed.is_set():
            await asyncio.sleep(0)
        assert [f.name for f in tmp_path.rglob("*") if f.is_file()] == ["lock", "lock"]

    with_engines(qwen, scenario, shm=str(tmp_path))


def test_a_lost_connection_gives_up_its_pulls(qwen: Path) -> None:
    async def scenario(p: Side, d: Side, _: Side) -> None:
        params = await prefilled(p.client, ask("0", range(20)))
        await d.client.pause(PauseMode.KEEP)
        task = asyncio.create_task(d.client.generate(ask("a", range(20), params)))
        while not d.server.handoffs.runner.busy:
            await asyncio.sleep(0)
        assert d.client.stream is not None
        d.client.stream.close()
        with pytest.raises(EngineError, match="connection lost"):
            await task
        while d.server.handoffs.runner.busy:
            await asyncio.sleep(0)
        await d.client.resume()

    with_engines(qwen, scenario)
