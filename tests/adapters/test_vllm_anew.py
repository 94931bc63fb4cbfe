"""A server under an address that we were told: it may be another one by now, or be in the middle of something."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollart.adapters.engines.vllm import ANEW_S, VllmEngine
from rollart.errors import EngineError
from rollart.model import EngineId, GenerateRequest, Piece, Sampling, WeightsRef

pytestmark = pytest.mark.asyncio

TURN = GenerateRequest("r", "s", (1, 2), Sampling(2))


@dataclass
class Server:
    """Says which version it has; a `started` server has those that it was started on, and no update under way."""

    version: str = "default"
    updating: bool = False
    loads: bool = True
    asked: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.Response:
        path = request.path
        self.asked.append(path)
        body = await request.json() if request.can_read_body else {}
        match path:
            case "/start_weight_update":
                if self.updating:
                    said = "start_weight_update called while a weight update is already active. Call finish first."
                    return web.json_response({"error": {"message": said}}, status=500)
                self.updating = True
            case "/update_weights":
                self.told.append(body["update_info"]["path"])
                if not self.loads or self.told[-1] == "/dev/null":
                    self.updating = False
                    return web.json_response({"error": {"message": "not a whole version"}}, status=500)
            case "/finish_weight_update":
                self.updating, self.version = False, body["weight_version"]
            case "/weight_info":
                return web.json_response({"weight_version": self.version})
            case "/inference/v1/generate":
                choice = {
                    "token_ids": [3, 4], "logprobs": {"content": [{"logprob": -1.0}] * 2}, "finish_reason": "length",
                    "weight_versions": [{"version": self.version, "start": 0, "end": 2}],
                }  # fmt: skip
                return web.json_response({"choices": [choice]})
        return web.json_response({"success": True})


@contextlib.asynccontextmanager
async def loaded(version: int = 3) -> AsyncIterator[tuple[Server, VllmEngine]]:
    server = Server()
    async with TestServer(server.app()) as site:
        engine = VllmEngine(EngineId("e"), str(site.make_url("")).rstrip("/"), version=version)
        await engine.update_weights(WeightsRef(version, f"v{version}"))
        yield server, engine
        await engine.close()


async def test_one_that_answered_just_now_is_not_asked_again() -> None:
    async with loaded() as (server, engine):
        for _ in range(3):
            assert (await engine.generate(TURN)).spans[0].version == 3
        assert server.asked.count("/weight_info") == 1


async def test_another_server_under_its_address_generates_nothing_for_us() -> None:
    async with loaded() as (server, engine):
        await engine.generate(TURN)
        engine._heard -= ANEW_S
        server.version = "default"
        read: list[Piece] = []
        told = GenerateRequest("r", "s", (1, 2), Sampling(2), told=read.append)
        with pytest.raises(EngineError, match="started anew: its weights are 'default', not v3") as refused:
            await engine.generate(told)
        assert (read, refused.value.retryable) == ([], True)
        assert server.asked.count("/inference/v1/generate") == 1
        assert not await engine.healthy()
        assert "started anew" in engine.why


async def test_one_that_took_its_place_between_two_turns_is_found_out_by_what_it_says() -> None:
    async with loaded() as (server, engine):
        await engine.generate(TURN)
        server.version = "default"
        with pytest.raises(EngineError, match="started anew"):
            await engine.generate(TURN)
        assert engine.silent.is_set()


async def test_of_a_server_that_was_given_no_version_a_word_is_the_one_that_it_started_with() -> None:
    async with TestServer(Server().app()) as site:
        engine = VllmEngine(EngineId("e"), str(site.make_url("")), version=7)
        assert (await engine.generate(TURN)).spans[0].version == 7
        assert await engine.healthy()
        await engine.close()


async def test_an_update_that_nobody_ended_is_ended() -> None:
    async with loaded() as (server, engine):
        server.updating = True
        await engine.update_weights(WeightsRef(4, "v4"))
        assert server.told == ["v3", "/dev/null", "v4"]
        assert (await engine.generate(TURN)).spans[0].version == 4


async def test_while_it_loads_and_after_it_failed_to_nobody_takes_it_for_another() -> None:
    async with loaded() as (server, engine):
        server.loads = False
        with pytest.raises(EngineError, match="not a whole version"):
            await engine.update_weights(WeightsRef(4, "v4"))
        assert await engine.healthy()
        server.loads = True
        await engine.update_weights(WeightsRef(4, "v4"))
        assert await asyncio.wait_for(engine.healthy(), 60)
