"""A vLLM server under a known address: it may have been restarted, or another program may answer there."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollart.adapters.engines import vllm
from rollart.adapters.engines.vllm import VllmEngine
from rollart.errors import EngineError
from rollart.model import CompletionChunk, EngineId, GenerateRequest, Sampling, WeightsRef

pytestmark = pytest.mark.asyncio

TURN = GenerateRequest("r", "s", (1, 2), Sampling(2))


@dataclass
class Server:
    """Says which version it has; a `started` server has those that it was started on, and no update under way."""

    version: str = "default"
    updating: bool = False
    loads: bool = True
    workers: int = 1
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
            case "/get_world_size":
                return web.json_response({"world_size": self.workers})
            case "/update_weight_version":
                self.version = body["new_version"]
            case "/collective_rpc":
                return web.json_response({"results": self._by_the_plugin(*body["args"])})
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
                    "token_ids": [3, 4],
                    "logprobs": {"content": [{"logprob": -1.0}] * 2},
                    "finish_reason": "length",
                    "weight_versions": [{"version": self.version, "start": 0, "end": 2}],
                }
                return web.json_response({"choices": [choice]})
        return web.json_response({"success": True})

    def _by_the_plugin(self, call: str, told: str) -> list[dict[str, str]]:
        """The last of its workers is the one that may refuse."""
        said = ""
        if call == "start_weight_update":
            said, self.updating = "already active" if self.updating else "", True
        elif call == "update_weights":
            self.told.append(json.loads(told)["update_info"]["path"])
            if not self.loads or self.told[-1] == "/dev/null":
                said, self.updating = "not a whole version", False
        elif call == "finish_weight_update":
            assert json.loads(told) == {}
            self.updating = False
        return [{"error": ""}] * (self.workers - 1) + [{"error": said}]


@contextlib.asynccontextmanager
async def loaded(version: int = 3, *, workers: int = 1) -> AsyncIterator[tuple[Server, VllmEngine]]:
    server = Server(workers=workers)
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


async def test_another_server_under_its_address_generates_nothing_for_us(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loaded() as (server, engine):
        await engine.generate(TURN)
        monkeypatch.setattr(vllm, "RESTART_CHECK_AFTER_S", 0.0)
        server.version = "default"
        read: list[CompletionChunk] = []
        told = GenerateRequest("r", "s", (1, 2), Sampling(2), on_chunk=read.append)
        with pytest.raises(EngineError, match="restarted: its weights are 'default', not v3") as refused:
            await engine.generate(told)
        assert (read, refused.value.retryable) == ([], True)
        assert server.asked.count("/inference/v1/generate") == 1
        assert not await engine.healthy()
        assert "restarted" in engine.why


async def test_one_that_took_its_place_between_two_turns_is_found_out_by_what_it_says() -> None:
    async with loaded() as (server, engine):
        await engine.generate(TURN)
        server.version = "default"
        with pytest.raises(EngineError, match="restarted"):
            await engine.generate(TURN)
        assert engine.silent.is_set()


async def test_of_a_server_that_was_given_no_version_a_word_is_the_one_that_it_started_with() -> None:
    async with TestServer(Server().app()) as site:
        engine = VllmEngine(EngineId("e"), str(site.make_url("")), version=7)
        assert (await engine.generate(TURN)).spans[0].version == 7
        assert await engine.healthy()
        await engine.close()


@pytest.mark.parametrize("workers", [1, 2])
async def test_an_update_that_nobody_ended_is_ended(workers: int) -> None:
    async with loaded(workers=workers) as (server, engine):
        server.updating = True
        await engine.update_weights(WeightsRef(4, "v4"))
        assert server.told == ["v3", "/dev/null", "v4"]
        assert (await engine.generate(TURN)).spans[0].version == 4


async def test_several_workers_are_asked_so_that_none_of_them_raises() -> None:
    async with loaded(workers=2) as (server, _):
        assert server.version == "3"
        assert [path for path in server.asked if path != "/get_world_size"] == [
            *["/collective_rpc"] * 3,
            "/update_weight_version",
            "/reset_prefix_cache",
        ]


@pytest.mark.parametrize("workers", [1, 2])
async def test_while_it_loads_and_after_it_failed_to_nobody_takes_it_for_another(workers: int) -> None:
    async with loaded(workers=workers) as (server, engine):
        server.loads = False
        with pytest.raises(EngineError, match="not a whole version"):
            await engine.update_weights(WeightsRef(4, "v4"))
        assert await engine.healthy()
        server.loads = True
        await engine.update_weights(WeightsRef(4, "v4"))
        assert await asyncio.wait_for(engine.healthy(), 60)
