"""The program around a vLLM server, without a vLLM."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollart.adapters.engines.vllm_server import announce_ready


@pytest.mark.parametrize("broken", [0, 2])
@pytest.mark.asyncio
async def test_it_is_ready_once_it_names_its_version(
    broken: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that breaks is no reason to start it again, which takes minutes."""
    monkeypatch.setattr("rollart.adapters.engines.vllm_server.HEALTH_POLL_S", 0.0)
    told: list[object] = []

    async def healthy(request: web.Request) -> web.Response:
        return web.Response()

    async def name(request: web.Request) -> web.Response:
        told.append(await request.json())
        assert capsys.readouterr().out == "", "not ready yet"
        if len(told) <= broken and request.transport is not None:
            request.transport.close()
        return web.json_response({})

    app = web.Application()
    app.add_routes([web.get("/health", healthy), web.post("/update_weight_version", name)])
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        assert await announce_ready(url, "3", "/model")
    assert {str(t) for t in told} == {str({"new_version": "3"})}
    assert len(told) > broken
    assert capsys.readouterr().out == f"ready {url}\n"
