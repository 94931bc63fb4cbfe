"""The session cache is bounded in sessions, tokens and bytes, and never evicts a session in use."""

from __future__ import annotations

from typing import Any

import pytest

from rollart.adapters.proxy.chat import ChatFormat
from rollart.adapters.proxy.sessions import GROWTH_RESERVE, SessionLimits
from tests.proxy.scripted import spelling
from tests.proxy.test_server import CHAT, HI, Ask, Speaker, with_proxy


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    path = tmp_path_factory.mktemp("spelling")
    spelling(path)
    return ChatFormat(path)


async def figures(ask: Ask) -> dict[str, float]:
    _, text, _ = await ask("/metrics", method="GET")
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in text.splitlines())}


def test_ended_sessions_go_first_and_active_ones_never(form: ChatFormat) -> None:
    async def scenario(ask: Ask, speaker: Speaker, url: str) -> None:
        for name in ("a", "b", "c"):
            assert (await ask(f"/s/{name}{CHAT}", HI))[0] == 200
        status, body, headers = await ask(f"/s/d{CHAT}", HI)
        assert (status, headers["Retry-After"]) == (503, "5")
        assert "holds 3 sessions" in body["error"]["message"]
        for name in ("c", "b"):
            assert (await ask(f"/sessions/{name}/end", {"reward": 1}))[0] == 200
        assert (await ask(f"/s/d{CHAT}", HI))[0] == 200
        assert {s["session"] for s in (await ask("/sessions", method="GET"))[1]["sessions"]} == {"a", "c", "d"}
        status, body, _ = await ask("/sessions/b", method="GET")
        assert (status, "given up" in body["error"]["message"]) == (410, True)
        assert (await ask(f"/s/c{CHAT}", HI))[0] == 200, "it was not over after all"
        assert (await ask(f"/s/e{CHAT}", HI))[0] == 503
        seen = await figures(ask)
        assert seen['rollart_proxy_sessions{state="idle"}'] == 3
        assert seen['rollart_proxy_given_up_total{why="ended"}'] == 1
        assert seen["rollart_proxy_refused_total"] == 2

    with_proxy(form, scenario, limits=SessionLimits(sessions=3))


@pytest.mark.parametrize("of", ["tokens", "size"])
def test_what_sessions_hold_is_bounded(form: ChatFormat, of: str) -> None:
    async def scenario(ask: Ask, speaker: Speaker, url: str) -> None:
        def most(figures: dict[str, float]) -> tuple[float, float]:
            name = "tokens" if of == "tokens" else "bytes"
            return figures[f"rollart_proxy_{name}"], figures[f'rollart_proxy_limit{{of="{name}"}}']

        answers: list[Any] = []
        while not answers or answers[-1][0] == 200:
            answers.append(await ask(f"/s/long{CHAT}", HI))
        status, body, headers = answers[-1]
        assert (status, headers["Retry-After"]) == (429, "5")
        assert "the proxy is full" in body["error"]["message"]
        assert (await ask(f"/s/other{CHAT}", HI))[0] == 503
        held, limit = most(await figures(ask))
        one = held / (len(answers) - 1)
        assert limit * GROWTH_RESERVE <= held < limit * GROWTH_RESERVE + one, "less than one answer beyond"
        assert (await ask("/sessions/long/end", {}))[0] == 200
        assert (await ask(f"/s/other{CHAT}", HI))[0] == 200
        held, _ = most(await figures(ask))
        assert held == pytest.approx(one)
        assert (await ask("/sessions/other", method="DELETE"))[0] == 200
        assert most(await figures(ask))[0] == 0

    with_proxy(form, scenario, limits=SessionLimits(**{of: 200 if of == "tokens" else 10_000}))
