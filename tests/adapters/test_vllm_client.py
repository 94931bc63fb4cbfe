"""The client of a vLLM server: tokens that arrive before the version that drew them is known, and losses in between."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollart.adapters.engines.http import HttpEngine
from rollart.adapters.engines.vllm import VllmEngine
from rollart.adapters.proxy.pool import EnginePool
from rollart.errors import EngineError
from rollart.generation import CompletionAssembler
from rollart.leases import Leases
from rollart.ledger.intervals import EngineShares, ResourceClock
from rollart.model import Completion, CompletionChunk, EngineId, GenerateRequest, Sampling, WeightsRef
from rollart.serving.engine_registry import GatewayLimits
from rollart.serving.gateway import Gateway
from rollart.testing.ledger import MemoryRecorder

PROMPT, MOST = (0,), 6


class Server:
    """Says one more than the last token, two at a time, the next two once `more` is put; `None` there ends it without
    a word. Which version drew what comes with the last token, as from vLLM 0.32."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.more = asyncio.Queue[bool | None]()
        self.asked: list[list[int]] = []
        self.refuses = False

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/finish_weight_update", self._finish)
        app.router.add_get("/rollart/stream", self._none)
        app.router.add_route("*", "/{anything:.*}", self._well)
        return app

    async def _none(self, request: web.Request) -> web.Response:
        raise web.HTTPNotFound

    async def _well(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True})

    async def _finish(self, request: web.Request) -> web.Response:
        if self.refuses:
            return web.json_response({"error": {"message": "no room"}}, status=500)
        self.version = int((await request.json())["weight_version"])
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.asked.append(asked["token_ids"])
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        last, most, drew = asked["token_ids"][-1], asked["sampling_params"]["max_tokens"], list[int]()
        while len(drew) < most:
            if await self.more.get() is None:
                assert request.transport is not None
                request.transport.abort()
                return answer
            ids = list(range(last + len(drew) + 1, last + len(drew) + 3))
            drew += [self.version] * 2
            choice = {"token_ids": ids, "logprobs": {"content": [{"logprob": -0.5} for _ in ids]}}
            if len(drew) >= most:
                spans = [{"version": str(v), "start": i, "end": i + 1} for i, v in enumerate(drew)]
                choice |= {"finish_reason": "length", "weight_versions": spans}
            await answer.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")
        return answer


class Asked:
    """A turn under way, and what was read of it. `told` is set by every token that the engine tells."""

    def __init__(self) -> None:
        self.read: list[CompletionChunk] = []
        self.news = asyncio.Event()

    @property
    def ids(self) -> list[int]:
        return [t for piece in self.read for t in piece.token_ids]

    def hear(self, piece: CompletionChunk) -> None:
        self.read.append(piece)
        self.news.set()

    async def heard(self, tokens: int) -> None:
        while len(self.ids) < tokens:
            self.news.clear()
            await self.news.wait()


class Watched(VllmEngine):
    """Says when tokens came, also those that are not shown."""

    def __init__(self, name: str, url: str) -> None:
        super().__init__(EngineId(name), url, version=0)
        self.came = Asked()

    async def generate(self, request: GenerateRequest) -> Completion:
        told = request.on_chunk
        assert told is not None

        def both(piece: CompletionChunk) -> None:
            told(piece)
            self.came.hear(piece)

        return await super().generate(
            GenerateRequest(
                request.request_id,
                request.session,
                request.token_ids,
                request.sampling,
                request.cache_salt,
                on_chunk=both,
            )
        )


@contextlib.asynccontextmanager
async def fleet() -> AsyncIterator[tuple[list[Server], list[Watched], Gateway]]:
    async with contextlib.AsyncExitStack() as stack:
        servers, engines = [Server(), Server()], list[Watched]()
        recorder = MemoryRecorder()
        gateway = Gateway(Leases(recorder), limits=GatewayLimits(), version=0, on_suspect=lambda _: None)
        for i, server in enumerate(servers):
            site = await stack.enter_async_context(TestServer(server.app()))
            engines.append(Watched(f"e{i}", str(site.make_url("")).rstrip("/")))
            stack.push_async_callback(engines[-1].close)
            now = asyncio.get_running_loop().time
            clock = ResourceClock(role="engine", resource=f"e{i}", recorder=recorder, clock=now)
            gateway.join(engines[-1], version=0, shares=EngineShares(clock, clock=now))
        yield servers, engines, gateway


def ask(gateway: Gateway, asked: Asked) -> asyncio.Future[Completion]:
    return asyncio.ensure_future(
        gateway.generate("s", PROMPT, Sampling(MOST), spend=lambda _: None, on_chunk=asked.hear)
    )


def versions(answer: Completion) -> list[int]:
    return [s.version for s in answer.spans for _ in range(s.start, s.end)]


@pytest.mark.asyncio
async def test_what_was_told_is_of_the_version_that_was_loaded_when_it_was_asked_for() -> None:
    async with fleet() as ((first, second), _, gateway):
        await gateway.update(WeightsRef(3, "v3"), lambda _: None)
        asked = Asked()
        answer = ask(gateway, asked)
        first.more.put_nowait(True)
        await asked.heard(2)
        first.more.put_nowait(None)
        for _ in range(2):
            second.more.put_nowait(True)
        whole = await answer
        assert second.asked == [[0, 1, 2]]
        assert versions(whole) == [3] * MOST
        assert {piece.version for piece in asked.read} == {3}


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.asyncio
async def test_tokens_that_came_after_an_update_began_are_drawn_anew(refused: bool) -> None:
    async with fleet() as ((first, second), (engine, _), gateway):
        asked = Asked()
        answer = ask(gateway, asked)
        first.more.put_nowait(True)
        await asked.heard(2)
        first.refuses = refused
        with contextlib.suppress(EngineError):
            await engine.update_weights(WeightsRef(1, "v1"))
        first.more.put_nowait(True)
        await engine.came.heard(4)
        assert engine.came.read[-1].version is None
        assert asked.ids == [1, 2]
        first.more.put_nowait(None)
        for _ in range(2):
            second.more.put_nowait(True)
        whole = await answer
        assert second.asked == [[0, 1, 2]], "the two of which nobody knows what drew them are drawn anew"
        assert whole.token_ids == (1, 2, 3, 4, 5, 6)
        assert versions(whole) == [0] * MOST


@pytest.mark.asyncio
async def test_an_answer_that_is_whole_names_its_versions_itself() -> None:
    async with fleet() as ((first, _), _, gateway):
        asked = Asked()
        answer = ask(gateway, asked)
        first.more.put_nowait(True)
        await asked.heard(2)
        await gateway.update(WeightsRef(1, "v1"), lambda _: None)
        for _ in range(2):
            first.more.put_nowait(True)
        assert versions(await answer) == [0, 0, 1, 1, 1, 1]
        assert asked.ids == [1, 2]


@pytest.mark.asyncio
async def test_a_proxy_of_its_own_cannot_know_and_says_so() -> None:
    async with contextlib.AsyncExitStack() as stack:
        servers = [Server(version=7), Server(version=7)]
        sites = [await stack.enter_async_context(TestServer(s.app())) for s in servers]
        engines = [HttpEngine(EngineId(f"e{i}"), str(s.make_url("")).rstrip("/")) for i, s in enumerate(sites)]
        pool = EnginePool(engines)
        stack.push_async_callback(pool.close)
        session, asked = pool.session("s"), Asked()
        answer = asyncio.ensure_future(session.generate(PROMPT, Sampling(MOST), asked.hear))
        servers[0].more.put_nowait(True)
        await asked.heard(2)
        servers[0].more.put_nowait(None)
        with pytest.raises(EngineError, match="broke off"):
            await answer
        assert not servers[1].asked, "what the client has read cannot be kept, nor unsaid"
        for _ in range(3):
            servers[1].more.put_nowait(True)
        again = await session.generate(PROMPT, Sampling(MOST), asked.hear)
        assert versions(again) == [7] * MOST, "the session went on to the other engine"


def test_an_end_that_nobody_knows_is_an_engines_error() -> None:
    events = CompletionAssembler("http://e", 0, None, lambda: 0)
    with pytest.raises(EngineError, match="repetition"):
        events.add(json.dumps({"choices": [{"token_ids": [], "finish_reason": "repetition"}]}).encode())


@pytest.mark.asyncio
async def test_a_server_may_say_much_at_once() -> None:
    """vLLM puts together what a slow reader did not take."""
    many = 13_000

    async def all_at_once(request: web.Request) -> web.Response:
        told = [{"token_id": i, "logprob": -0.123456789} for i in range(many)]
        choice = {"token_ids": list(range(many)), "logprobs": {"content": told}, "finish_reason": "length"}
        return web.Response(body=f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n".encode())

    app = web.Application()
    app.router.add_post("/inference/v1/generate", all_at_once)
    async with TestServer(app) as server:
        engine = VllmEngine(EngineId("e"), str(server.make_url("")).rstrip("/"), version=2)
        request = GenerateRequest("r", "s", PROMPT, Sampling(many), on_chunk=lambda _: None)
        answer = await engine.generate(request)
        await engine.close()
    assert answer.token_ids == tuple(range(many))
    assert versions(answer) == [2] * many
