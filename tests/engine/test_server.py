"""The HTTP surface as vLLM's clients see it, and the hand-off of KV between two servers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollart.adapters.engines.http import HttpEngine
from rollart.errors import EngineError
from rollart.model import EngineId, FinishReason, GenerateRequest, PauseMode, Sampling, WeightsRef
from tests.engine.hosting import served
from tests.engine.models import greedy, publish, publish_adapter

Call = Callable[..., Awaitable[tuple[int, Any]]]


def with_server(directory: Path, scenario: Callable[[str, Call], Awaitable[None]], **options: int) -> None:
    """Run a scenario with a URL and a function that posts (or gets) JSON."""

    async def body() -> None:
        async with served(directory, **options) as url, aiohttp.ClientSession() as http, asyncio.timeout(60):

            async def call(path: str, body: object = None, *, method: str = "POST", **headers: str) -> tuple[int, Any]:
                async with http.request(method, url + path, json=body, headers=headers) as answer:
                    kind = answer.content_type
                    return answer.status, await (answer.json() if kind == "application/json" else answer.text())

            await scenario(url, call)

    asyncio.run(body())


GREEDY = {"max_tokens": 4, "temperature": 0}


def test_a_generate_answer_has_vllms_shape(qwen: Path) -> None:
    async def scenario(url: str, call: Call) -> None:
        status, answer = await call(
            "/inference/v1/generate",
            {"request_id": "r", "token_ids": [1, 2, 3], "sampling_params": GREEDY},
            **{"X-Session-ID": "s"},
        )
        assert status == 200
        choice = answer["choices"][0]
        assert tuple(choice["token_ids"]) == greedy(qwen, [1, 2, 3], 4)
        assert [c["token_id"] for c in choice["logprobs"]["content"]] == choice["token_ids"]
        assert choice["finish_reason"] == "length"
        assert choice["weight_versions"] == [{"version": 5, "start": 0, "end": 4, "stamp": ""}]
        assert answer["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    with_server(qwen, scenario, version=5)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"token_ids": [1, 600]}, "token id 600"),
        ({"token_ids": [1] * 64}, "the engine's context is 64"),
        ({"token_ids": "abc"}, "token_ids must be a list"),
        ({"token_ids": [1, "a"]}, "token_ids holds 'a'"),
        ({"token_ids": [2**70]}, "no 64-bit integer"),
        ({"token_ids": [1], "sampling_params": {"max_tokens": "x"}}, "max_tokens is 'x'"),
        ({"token_ids": [1], "sampling_params": {"max_tokens": math.inf}}, "max_tokens is inf"),
        ({"token_ids": [1], "kv_transfer_params": {"remote_num_tokens": math.nan}}, "remote_num_tokens is nan"),
        ({"token_ids": [1], "sampling_params": {"top_p": 2}}, "top_p is 2"),
        ({"token_ids": [1], "sampling_params": [1]}, "sampling_params must be an object"),
        ({"token_ids": [1], "kv_transfer_params": "p"}, "kv_transfer_params must be an object"),
        ({"token_ids": [1], "kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params lack"),
        ([1], "must be a JSON object"),
    ],
)
def test_a_bad_request_is_400_with_one_line(qwen: Path, body: object, words: str) -> None:
    async def scenario(url: str, call: Call) -> None:
        status, answer = await call("/inference/v1/generate", body)
        assert status == 400
        assert words in answer["error"]["message"]
        assert "\n" not in answer["error"]["message"]
        assert answer["error"]["retryable"] is False

    with_server(qwen, scenario)


def test_abort_understands_ids_with_and_without_vllms_prefix(qwen: Path) -> None:
    async def scenario(url: str, call: Call) -> None:
        await call("/pause?mode=keep")
        for name, form in (("a", "a"), ("b", "generate-tokens-b")):
            body = {"request_id": name, "token_ids": [1], "sampling_params": GREEDY}
            task = asyncio.ensure_future(call("/inference/v1/generate", body))
            while "vllm:num_requests_waiting 1" not in (await call("/metrics", method="GET"))[1]:
                await asyncio.sleep(0)
            await call("/abort_requests", {"request_ids": [form]})
            assert (await task)[1]["choices"][0]["finish_reason"] == "abort"

    with_server(qwen, scenario)


def test_the_weight_update_protocol(qwen: Path, qwen_next: Path, llama: Path, tmp_path: Path) -> None:
    async def scenario(url: str, call: Call) -> None:
        async def refused(path: str, body: object, words: str) -> None:
            status, answer = await call(path, body)
            assert status == 400
            assert words in answer["error"]["message"]

        path = {"update_info": {"path": str(qwen_next)}}
        await refused("/update_weights", path, "no weight update was started")
        assert (await call("/init_weight_transfer_engine", {}))[0] == 200
        assert (await call("/start_weight_update", {}))[0] == 200
        await refused("/finish_weight_update", {"weight_version": 1}, "no weights are staged")
        unfinished = publish(tmp_path / "torn", 1, marker=False)
        await refused("/update_weights", {"update_info": {"path": str(unfinished)}}, "no COMPLETE marker")
        await refused("/update_weights", {"update_info": {"path": str(llama)}}, "another architecture")
        await refused("/update_weights", {"update_info": {}}, "update_info.path")
        assert (await call("/update_weights", path))[0] == 200
        await refused("/finish_weight_update", {"weight_version": "x"}, "must be an integer")
        assert (await call("/weight_info", method="GET"))[1]["weight_version"] == 0
        assert (await call("/finish_weight_update", {"weight_version": 3}))[0] == 200
        assert (await call("/weight_info", method="GET"))[1] == {
            "weight_version": 3,
            "stamp": "",
            "path": str(qwen_next),
        }
        answer = await call("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": GREEDY})
        assert tuple(answer[1]["choices"][0]["token_ids"]) == greedy(qwen_next, [1, 2], 4)

    with_server(qwen, scenario)


def test_versions_with_adapters_are_loaded_forwards_and_back(qwen: Path, tmp_path: Path) -> None:
    """From a checkpoint without an adapter, which an engine may start with."""
    versions = [publish_adapter(tmp_path / f"v{seed}", seed, qwen) for seed in (1, 2)]
    (torn := publish_adapter(tmp_path / "v3", 3, qwen) / "adapter_model.safetensors").write_bytes(b"torn")

    async def scenario(url: str, call: Call) -> None:
        prompt = {"token_ids": [1, 2], "sampling_params": GREEDY}
        answers = []
        for number, path in enumerate([*versions, versions[0], qwen]):
            assert (await call("/start_weight_update", {}))[0] == 200
            assert (await call("/update_weights", {"update_info": {"path": str(torn.parent)}}))[0] == 400
            assert (await call("/update_weights", {"update_info": {"path": str(path)}}))[0] == 200
            assert (await call("/finish_weight_update", {"weight_version": number}))[0] == 200
            answers.append(tuple((await call("/inference/v1/generate", prompt))[1]["choices"][0]["token_ids"]))
        assert answers == [greedy(path, [1, 2], 4) for path in [*versions, versions[0], qwen]]
        assert len(set(answers)) == 3

    with_server(qwen, scenario)


def test_small_routes(qwen: Path) -> None:
    async def scenario(url: str, call: Call) -> None:
        assert (await call("/health", method="GET"))[0] == 200
        assert (await call("/is_paused", method="GET"))[1] == {"is_paused": False}
        assert (await call("/pause?mode=no"))[0] == 400
        await call("/pause?mode=wait")
        assert (await call("/is_paused", method="GET"))[1] == {"is_paused": True}
        await call("/resume")
        assert (await call("/reset_prefix_cache"))[1] == {"success": True}
        assert (await call("/rollart/release_session", {"session": "x"}))[1] == {"released": False}
        await call("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": GREEDY})
        text = (await call("/metrics", method="GET"))[1]
        assert "# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total 4\n" in text
        assert 'vllm:request_success_total{finished_reason="length"} 1' in text

    with_server(qwen, scenario)


def ask(name: str, prompt: list[int], transfer: dict[str, object] | None = None, tokens: int = 8) -> GenerateRequest:
    return GenerateRequest(name, "", tuple(prompt), Sampling(tokens, temperature=0.0), kv_transfer=transfer)


def test_prefill_on_one_server_and_decode_on_another(qwen: Path, qwen_next: Path) -> None:
    async def body() -> None:
        async with served(qwen) as p_url, served(qwen) as d_url, asyncio.timeout(60):
            p, d = HttpEngine(EngineId("p"), p_url), HttpEngine(EngineId("d"), d_url)
            prompt = list(range(1, 30))
            first = await p.generate(ask("a", prompt, {"do_remote_decode": True, "do_remote_prefill": False}, 1))
            params = dict(first.kv_transfer or {})
            assert params["remote_num_tokens"] == 29
            split = await d.generate(ask("a", prompt, params))
            whole = await p.generate(ask("b", prompt))
            assert split.token_ids == whole.token_ids == greedy(qwen, prompt, 8)
            assert split.logprobs == pytest.approx(whole.logprobs, abs=1e-5)
            assert split.cached_tokens == 29
            with pytest.raises(EngineError, match="KV pull refused") as again:
                await d.generate(ask("a", prompt, params))
            assert again.value.retryable
            stale = await p.generate(ask("c", prompt, {"do_remote_decode": True, "do_remote_prefill": False}, 1))
            await d.update_weights(WeightsRef(1, str(qwen_next)))
            with pytest.raises(EngineError, match="computed under weights 0, this engine has 1") as fenced:
                await d.generate(ask("c", prompt, dict(stale.kv_transfer or {})))
            assert fenced.value.retryable
            gone = {**params, "remote_port": 1, "weight_version": 1}
            with pytest.raises(EngineError, match="failed") as dead:
                await d.generate(ask("d", prompt, gone))
            assert dead.value.retryable
            await p.close()
            await d.close()

    asyncio.run(body())


def test_http_engine_converts_what_goes_wrong(qwen: Path) -> None:
    async def body() -> None:
        async with served(qwen) as url, asyncio.timeout(60):
            e = HttpEngine(EngineId("e"), url)
            with pytest.raises(EngineError, match="prompt holds token id 99") as bad:
                await e.generate(ask("a", [99]))
            assert not bad.value.retryable
            with pytest.raises(EngineError, match="does not exist"):
                await e.update_weights(WeightsRef(1, "/nowhere"))
            await e.close()
            with pytest.raises(EngineError, match="was closed"):
                await e.generate(ask("a", [1]))
        e = HttpEngine(EngineId("e"), url)
        with pytest.raises(EngineError) as dead:
            await e.generate(ask("a", [1]))
        assert dead.value.retryable
        assert not await e.healthy()
        await e.close()

    asyncio.run(body())


def test_a_stream_that_breaks_aborts_its_requests_and_is_opened_again(qwen: Path) -> None:
    async def body() -> None:
        async with served(qwen) as url, asyncio.timeout(60):
            e, other = HttpEngine(EngineId("e"), url), HttpEngine(EngineId("o"), url)
            await e.pause(PauseMode.KEEP)
            task = asyncio.create_task(e.generate(ask("a", [1, 2])))
            kept = asyncio.create_task(other.generate(ask("b", [1, 2])))
            while (await e.stats()).waiting < 2:
                await asyncio.sleep(0)
            with pytest.raises(EngineError, match="'b' is in use"):
                await e.generate(ask("b", [1, 2]))
            assert e.stream is not None
            e.stream.close()
            with pytest.raises(EngineError, match="connection lost") as lost:
                await task
            assert lost.value.retryable
            while (await e.stats()).waiting > 1:
                await asyncio.sleep(0)
            await e.resume()
            assert (await e.generate(ask("a", [1, 2]))).finish is FinishReason.LENGTH
            assert (await kept).finish is FinishReason.LENGTH
            await e.close()
            await other.close()

    asyncio.run(body())


@pytest.mark.parametrize("frame", [b"\xff\xff\xff\xff", b"\x01\0\0\0\xc1", b"\x03\0\0\0\x91\x91\xa1"])
def test_a_foreign_stream_is_hung_up_on(qwen: Path, frame: bytes) -> None:
    async def scenario(url: str, call: Call) -> None:
        port = (await call("/rollart/stream", method="GET"))[1]["port"]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(frame)
        assert await reader.read() == b""
        writer.close()
        assert (await call("/health", method="GET"))[0] == 200

    with_server(qwen, scenario)


def test_a_long_idle_pause_answers_everything_else(qwen: Path) -> None:
    async def body() -> None:
        async with served(qwen) as url, asyncio.timeout(60):
            e = HttpEngine(EngineId("e"), url)
            await e.pause(PauseMode.ABORT)
            task = asyncio.create_task(e.generate(ask("a", [1, 2])))
            for _ in range(10):
                await e.stats()
            assert not task.done()
            await e.resume()
            assert (await task).finish is FinishReason.LENGTH
            await e.close()

    asyncio.run(body())
