"""Answers of engines that cannot be read, or not be used: another engine is asked."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Sequence

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollart.adapters.engines.http import EngineStream, HttpEngine
from rollart.adapters.engines.vllm import VllmEngine
from rollart.adapters.proxy.pool import EnginePool
from rollart.errors import WrongAnswer
from rollart.model import EngineId, GenerateRequest, Sampling

ASKED = GenerateRequest("r", "s", (1, 2), Sampling(max_tokens=1))


def body(logprob: float = -0.5, ids: Sequence[int] = (1,)) -> str:
    content = [{"logprob": logprob} for _ in ids]
    choice = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": "length"}
    return json.dumps({"choices": [choice], "usage": {"prompt_tokens": 2}})


def server(text: str) -> TestServer:
    async def generate(request: web.Request) -> web.Response:
        return web.Response(text=text, content_type="application/json")

    app = web.Application()
    app.router.add_post("/inference/v1/generate", generate)
    return TestServer(app)


@pytest.mark.asyncio
@pytest.mark.parametrize("engine", [HttpEngine, VllmEngine])
@pytest.mark.parametrize(
    "garbage", ["\x00\x01", "[]", "{}", '{"choices": []}', '{"choices": [null]}', body().replace("-0.5", "null")]
)
async def test_a_garbage_body_may_be_asked_of_another_engine(garbage: str, engine: type[HttpEngine]) -> None:
    async with server(garbage) as site:
        client = engine(EngineId("e"), str(site.make_url("")))
        with pytest.raises(WrongAnswer, match="not understood") as wrong:
            await client.generate(ASKED)
        assert wrong.value.retryable
        await client.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\xffgarbage", b"\x03\0\0\0\xc1\xc1\xc1", b"\x01\0\0\0\x05"])
async def test_garbage_on_the_stream_ends_the_requests_that_wait_on_it(garbage: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(garbage)

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening:
        host, port = listening.sockets[0].getsockname()
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_connection(lambda: EngineStream("e"), host, port)
        with pytest.raises(WrongAnswer, match="not understood"):
            await stream.generate(ASKED)
        await asyncio.sleep(0)
        assert not stream.open, "what follows cannot be understood either"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("wrong", "vocab"),
    [(body(math.inf), None), (body(ids=[1, 1]), None), (body(ids=[-1]), None), (body(ids=[9]), 9)],
    ids=["log-probability", "more than asked for", "no id", "not in the vocabulary"],
)
async def test_a_proxy_of_its_own_asks_another_engine(wrong: str, vocab: int | None) -> None:
    async with server(wrong) as bad, server(body()) as good:
        engines = [HttpEngine(EngineId(f"e{i}"), str(site.make_url(""))) for i, site in enumerate((bad, good))]
        pool = EnginePool(engines, vocab=vocab)
        session = pool.session("s")
        ask: Callable[..., Awaitable[object]] = session.generate
        assert session.engine is engines[0]
        await ask((1, 2), Sampling(max_tokens=1))
        assert session.engine is engines[1]
        await pool.close()
