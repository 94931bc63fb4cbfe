"""One episode of an agent program: its requests, its end, and its cleanup."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from rollart.adapters.proxy.chat import ChatFormat
from rollart.adapters.proxy.harness import GRACE_S, Agent, HarnessRunner, ProxyEpisode
from rollart.adapters.proxy.server import Proxy
from rollart.errors import SpecError
from rollart.launch import prepare
from rollart.launch.servers import serve_app
from rollart.model import Completion, FinishReason, Observation, SegmentKind, Step, VersionSpan
from rollart.settings.run import DomainSpec, HarnessSpec
from rollart.sim import loop
from tests.proxy.agents import chat, endless
from tests.proxy.scripted import spelling


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    path = tmp_path_factory.mktemp("spelling")
    spelling(path)
    return ChatFormat(path)


def play(
    form: ChatFormat, agent: Agent, scenario: Callable[[ProxyEpisode], Awaitable[None]], *, context: int = 256
) -> None:
    async def body() -> None:
        proxy = Proxy(form)
        async with asyncio.timeout(120), serve_app(proxy.app(), host="127.0.0.1", port=0) as url:
            async with HarnessRunner(proxy, url, context=context) as harnesses:
                episode = harnesses.factory(agent, {})("lake-1.0r2", 7)
                await scenario(episode)
                await episode.close()
            async with aiohttp.ClientSession() as http, http.get(f"{url}/sessions") as answer:
                assert (await answer.json())["sessions"] == [], "its session is gone"

    asyncio.run(body())


def world(form: ChatFormat) -> Completion:
    ids = form.encode("world") + form.stop_ids
    return Completion(ids, (-0.5,) * len(ids), (VersionSpan(3, 0, len(ids)),), FinishReason.STOP)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def one_answer(base_url: str, session: str, seed: int) -> float:
    assert (session, seed, base_url.rpartition("/s/")[2]) == ("lake-1.0r2", 7, f"{session}/v1")
    async with aiohttp.ClientSession() as http:
        return float((await chat(http, base_url, [user("hi")]))["content"] == "world")


def test_its_requests_are_the_trajectorys_and_its_answer_is_the_reward(form: ChatFormat) -> None:
    async def scenario(episode: ProxyEpisode) -> None:
        wanted = await episode.wanted()
        assert wanted is not None
        assert form.text(wanted.token_ids) == "<|user|>hi<|end|><|answer|>"
        assert (wanted.max_tokens, wanted.stop_token_ids) == (1, form.stop_ids)
        episode.answer(world(form))
        assert await episode.wanted() is None
        assert [s.kind for s in episode.segments()] == [SegmentKind.PROMPT, SegmentKind.ACTION]
        ending = episode.ending()
        assert (ending.reward, ending.done, ending.success) == (1.0, True, None)
        assert ending.metadata == {"branches": 1, "sampled_elsewhere": 0}

    play(form, one_answer, scenario)


@pytest.mark.parametrize(
    ("base", "path", "body"),
    [
        ("{base_url}", "/chat/completions", {}),
        ("{base_url}", "/v1/chat/completions", {}),  # a program written for a base URL without /v1
        ("{base_url}", "/v1/messages", {"max_tokens": 9}),  # clients of Anthropic's API append another /v1
    ],
)
def test_the_base_url_is_one_that_clients_take_as_it_is(
    form: ChatFormat, base: str, path: str, body: dict[str, Any]
) -> None:
    async def program(base_url: str, session: str, seed: int) -> float:
        asked = {"model": "policy", "messages": [user("hi")], **body}
        async with aiohttp.ClientSession() as http, http.post(base.format(base_url=base_url) + path, json=asked) as got:
            return float(got.status == 200)

    async def scenario(episode: ProxyEpisode) -> None:
        assert await episode.wanted() is not None
        episode.answer(world(form))
        assert await episode.wanted() is None
        assert episode.ending().reward == 1.0

    play(form, program, scenario)


@pytest.mark.parametrize("path", ["/chat/completion", "/v2/chat/completions"])
def test_a_program_at_a_wrong_url_is_told_the_right_one(form: ChatFormat, path: str) -> None:
    async def program(base_url: str, session: str, seed: int) -> None:
        async with aiohttp.ClientSession() as http, http.post(f"{base_url}{path}", json={}) as answer:
            assert answer.status == 404
            said = (await answer.json())["error"]["message"]
            assert f"{base_url}{path}" in said, "what was asked"
            assert f"the base URL is {base_url} for clients of OpenAI's API" in said
            assert f"{base_url.removesuffix('/v1')} for those of Anthropic's" in said
        unopened = base_url.replace(session, "other") + "/chat/completions"
        body = {"model": "policy", "messages": [user("hi")]}
        async with aiohttp.ClientSession() as http, http.post(unopened, json=body) as answer:
            assert answer.status == 404
            assert f"session other is not open at {unopened}" in (await answer.json())["error"]["message"]

    async def scenario(episode: ProxyEpisode) -> None:
        assert await episode.wanted() is None
        assert episode.ending().reward == 0.0

    play(form, program, scenario)


def test_a_reward_may_be_told_to_the_proxy_or_be_a_step(form: ChatFormat) -> None:
    async def told(base_url: str, session: str, seed: int) -> None:
        end = f"{base_url.rpartition('/s/')[0]}/sessions/{session}/end"
        async with aiohttp.ClientSession() as http, http.post(end, json={"reward": 0.5, "success": True}):
            return

    async def stepped(base_url: str, session: str, seed: int) -> Step:
        return Step(Observation("over"), reward=0.5, success=True, metadata={"reference_answer": "4"})

    for agent in (told, stepped):

        async def scenario(episode: ProxyEpisode) -> None:
            assert await episode.wanted() is None
            assert (episode.ending().reward, episode.ending().success) == (0.5, True)

        play(form, agent, scenario)


def test_the_longest_branch_is_trained(form: ChatFormat) -> None:
    async def branching(base_url: str, session: str, seed: int) -> None:
        async with aiohttp.ClientSession() as http:
            messages = [user("hi")]
            messages.append(await chat(http, base_url, messages))
            await chat(http, base_url, [*messages, user("more")])
            await chat(http, base_url, [user("something else")])

    async def scenario(episode: ProxyEpisode) -> None:
        while await episode.wanted() is not None:
            episode.answer(world(form))
        assert [s.turn for s in episode.segments()] == [0, 0, 1, 1]
        assert episode.ending().metadata == {"branches": 2, "sampled_elsewhere": 2}

    play(form, branching, scenario)


def test_out_of_turns_or_room_is_an_end_and_no_fault(form: ChatFormat) -> None:
    async def turns(episode: ProxyEpisode) -> None:
        assert await episode.wanted() is not None
        episode.exhaust()
        episode.answer(world(form))
        assert await episode.wanted() is None
        assert (episode.ending().reward, episode.ending().success) == (0.0, False)

    async def room(episode: ProxyEpisode) -> None:
        asked = 0
        while await episode.wanted() is not None:
            episode.answer(world(form))
            asked += 1
        assert asked == 2
        assert episode.ending().success is False

    play(form, endless, turns)
    play(form, endless, room, context=40)


def test_what_it_raises_is_told(form: ChatFormat) -> None:
    async def broken(base_url: str, session: str, seed: int) -> None:
        raise OSError("the sandbox is gone")

    async def scenario(episode: ProxyEpisode) -> None:
        with pytest.raises(OSError, match="the sandbox is gone"):
            await episode.wanted()

    play(form, broken, scenario)


def test_one_that_exits_ends_its_episode_and_not_the_run(form: ChatFormat) -> None:
    async def exiting(base_url: str, session: str, seed: int) -> None:
        sys.exit(0)

    async def scenario(episode: ProxyEpisode) -> None:
        with pytest.raises(RuntimeError, match="it exited with 0"):
            await episode.wanted()

    play(form, exiting, scenario)


def test_one_that_is_closed_while_it_waits_is_cancelled(form: ChatFormat) -> None:
    ended = []

    async def waiting(base_url: str, session: str, seed: int) -> None:
        try:
            await endless(base_url, session, seed)
        finally:
            ended.append(session)

    async def scenario(episode: ProxyEpisode) -> None:
        assert await episode.wanted() is not None

    play(form, waiting, scenario)
    assert ended == ["lake-1.0r2"]


@pytest.mark.parametrize(
    ("harness", "arguments", "said"),
    [
        ("tests.proxy.agents:nobody", {}, "has no 'nobody'"),
        ("json:dumps", {}, "is no coroutine function"),
        ("tests.proxy.agents:endless", {"word": "x"}, "refuses its arguments"),
    ],
)
def test_a_harness_that_is_none_is_told_before_a_run(harness: str, arguments: dict[str, Any], said: str) -> None:
    spec = DomainSpec(name="odd", environment=HarnessSpec(harness=harness), environment_args=arguments)
    with pytest.raises(SpecError, match=said):
        prepare.harness_factory(spec, None)


def test_a_harness_has_nothing_to_be_played_with() -> None:
    spec = DomainSpec(name="two", environment=HarnessSpec(harness="tests.proxy.agents:two_answers"))
    assert prepare.harness_factory(spec, None) is None, "nothing is played: a plan"
    with pytest.raises(SpecError, match="domain 'two' is a harness"):
        prepare.environment_factory(spec)()


def test_one_that_swallows_its_cancellation_is_left_behind(
    form: ChatFormat, capsys: pytest.CaptureFixture[str]
) -> None:
    swallowed = []

    async def deaf(base_url: str, session: str, seed: int) -> None:
        while True:
            try:
                await asyncio.sleep(3600.0)
            except asyncio.CancelledError:
                swallowed.append(session)

    async def main() -> None:
        proxy, clock = Proxy(form), asyncio.get_running_loop()
        async with HarnessRunner(proxy, "http://nowhere", context=256) as harnesses:
            began = harnesses.factory(deaf, {})
            first = began("lake-1", 7)
            began("lake-2", 7)
            await asyncio.sleep(1.0)
            await first.close()
            assert clock.time() == 1.0 + GRACE_S
        assert clock.time() == 1.0 + 2 * GRACE_S, "one whose trajectory never closed it, too"

    loop.run(main(), seed=1)
    assert swallowed == ["lake-1", "lake-1", "lake-2", "lake-2"]
    said = capsys.readouterr().err.splitlines()
    assert [f"harness lake-{n} did not end when it was cancelled" in line for n, line in enumerate(said, 1)] == [
        True
    ] * 2
