"""Agent programs for the tests, as a user writes them: a base URL, the API's bodies, a reward."""

from __future__ import annotations

from typing import Any

import aiohttp

import rollart


async def two_answers(base_url: str, session: str, seed: int, *, word: str = "left") -> rollart.Step:
    """Sends two requests, then asks for a summary in a separate conversation."""
    messages: list[Any] = []
    async with aiohttp.ClientSession() as http:
        for asked in ("You are here", "You are there"):
            messages.append({"role": "user", "content": asked})
            messages.append(await chat(http, base_url, messages))
        await chat(http, base_url, [{"role": "user", "content": "letter"}])
    said = [m["content"] for m in messages if m["role"] == "assistant"]
    right = said.count(word)
    return rollart.Step(rollart.Observation("over"), reward=right / 2, success=right == 2, metadata={"said": said})


async def endless(base_url: str, session: str, seed: int) -> float:
    """Never ends by itself."""
    messages: list[Any] = []
    async with aiohttp.ClientSession() as http:
        while True:
            messages.append({"role": "user", "content": "You are here"})
            messages.append(await chat(http, base_url, messages))


async def chat(http: aiohttp.ClientSession, base_url: str, messages: list[Any]) -> Any:
    body = {"model": "policy", "messages": messages, "max_tokens": 1}
    async with http.post(f"{base_url}/chat/completions", json=body) as answer:
        answer.raise_for_status()
        return (await answer.json())["choices"][0]["message"]
