"""OpenEnv's client against servers that lie: every answer that is none is a fault with the host's name."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from rollart.adapters.envs.openenv import OpenEnv, endpoints, sole_text_field
from rollart.errors import EnvironmentFault, SpecError
from rollart.model import Step
from rollart.settings.run import DomainSpec

SHOWN = {"type": "observation", "data": {"observation": {"text": "go"}, "reward": None, "done": False}}


def observed(**data: Any) -> str:
    return json.dumps({"type": "observation", "data": {"observation": {"text": "x"}, "done": False, **data}})


async def served(
    answers: list[Any], play: Callable[[str], Awaitable[None]], *, schema: dict[str, Any] | None = None
) -> list[Any]:
    """Play against a server that answers each frame with the next of `answers` (text, bytes, or None: it closes); the
    frames that it was sent."""
    asked: list[Any] = []

    async def session(request: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        coming = iter(answers)
        async for message in ws:
            if message.type is WSMsgType.TEXT:
                frame = json.loads(message.data)
                asked.append(frame)
                if frame["type"] == "close":
                    break
                answer = next(coming)
                if answer is None:
                    break
                await (ws.send_bytes(answer) if isinstance(answer, bytes) else ws.send_str(answer))
        await ws.close()
        return ws

    async def described(request: web.Request) -> web.Response:
        return web.json_response({"action": schema})

    app = web.Application()
    app.add_routes([web.get("/ws", session), web.get("/schema", described)])
    runner = web.AppRunner(app)
    await runner.setup()
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    try:
        await web.SockSite(runner, listening).start()
        await play(f"http://127.0.0.1:{listening.getsockname()[1]}")
    finally:
        await runner.cleanup()
    return asked


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("{", "answered a step with a malformed frame"),
        ("[]", "answered a step with a malformed frame"),
        (b"\x00", "the session was closed at its step .*binary"),
        (None, r"the session was closed at its step \(code 1000, close\)"),
        ('{"type": "state", "data": {}}', "answered a step with a frame of type 'state'"),
        ('{"type": "observation"}', "an invalid observation"),
        (observed(observation="x"), "an invalid observation"),
        (observed(done="yes"), "an invalid observation"),
        (observed(reward="much"), "an invalid observation"),
        (observed(reward=float("nan")), "an invalid observation.*reward is nan"),
        ('{"type": "error", "data": {"code": "SESSION_ERROR", "message": "it\\nbroke"}}', "SESSION_ERROR.*it broke"),
        ('{"type": "error", "data": null}', "at its step: None"),
    ],
)
def test_a_server_that_violates_the_protocol_is_named(answer: Any, message: str) -> None:
    async def play(url: str) -> None:
        env = OpenEnv(url, action="say")
        assert (await env.reset(4)).text == "go"
        with pytest.raises(EnvironmentFault, match=f"{message}.* on 127.0.0.1:") as caught:
            await env.step("hello")
        assert caught.value.host == url.removeprefix("http://")
        await env.close()

    asked = asyncio.run(served([json.dumps(SHOWN), answer], play))
    assert asked[0]["data"]["seed"] == 4
    assert asked[1] == {"type": "step", "data": {"say": "hello"}}


def test_an_episode_that_is_over_before_it_began_is_a_fault() -> None:
    async def play(url: str) -> None:
        env = OpenEnv(url, action="say")
        with pytest.raises(EnvironmentFault, match="over before its first step"):
            await env.reset(1)
        await env.close()

    asyncio.run(served([observed(done=True)], play))


def test_an_action_with_one_field_needs_no_name_and_json_is_taken_whole() -> None:
    schema = {"properties": {"metadata": {}, "code": {}, "verbose": {}}, "required": ["code"]}
    end = observed(reward=True, done=True, observation={"text": "x", "success": False})
    steps: list[Step] = []

    async def named(url: str) -> None:
        env = OpenEnv(url)
        await env.reset(1)
        steps.append(await env.step(" 1 + 1 "))
        await env.close()

    async def whole(url: str) -> None:
        env = OpenEnv(url, action="json", invalid_reward=-1.0)
        await env.reset(1)
        for text in ("no json", "[1]"):
            lost = await env.step(text)
            assert (lost.reward, lost.done, lost.observation.text) == (-1.0, False, "go")
        steps.append(await env.step('{"a": [1]}'))
        await env.close()

    asked = asyncio.run(served([json.dumps(SHOWN), end], named, schema=schema))
    assert asked[1]["data"] == {"code": "1 + 1"}
    asked = asyncio.run(served([json.dumps(SHOWN), end], whole))
    assert asked[1]["data"] == {"a": [1]}
    for step in steps:
        assert (step.reward, step.done, step.success) == (1.0, True, False)


def test_legal_actions_come_from_the_observation() -> None:
    shown = observed(observation={"board": [0, 1], "legal_actions": [3, 5]})

    async def play(url: str) -> None:
        env = OpenEnv(url, action="say", actions_from="legal_actions")
        first = await env.reset(1)
        assert first.actions == ("3", "5")
        assert json.loads(first.text) == {"board": [0, 1], "legal_actions": [3, 5]}
        await env.close()

    asyncio.run(served([shown], play))


def test_several_fields_without_a_name_are_a_fault() -> None:
    with pytest.raises(EnvironmentFault, match=r"fields \['a', 'b'\].*`action`"):
        sole_text_field({"properties": {"a": {}, "b": {}}}, "host")


def test_addresses() -> None:
    assert endpoints(["ws://a:1/ws", "https://b/env/"]) == ("http://a:1", "https://b/env")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": "a:1"}, "http, https, ws or wss"),
        ({"url": []}, "at least one server"),
        ({"url": "http://a", "token_env": "NO_SUCH_VARIABLE"}, "no variable of that name"),
        ({"url": "http://a", "action": "no_such:function"}, "there is no module 'no_such'"),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(arguments: dict[str, Any], message: str) -> None:
    from rollart.launch.prepare import environment_factory

    spec = DomainSpec(name="x", environment="rollart.adapters.envs.openenv:OpenEnv", environment_args=arguments)
    with pytest.raises(SpecError, match=message):
        environment_factory(spec)
