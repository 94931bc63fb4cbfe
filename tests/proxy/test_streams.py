"""The real client on a stream whose engines die or are interrupted in mid-stream. Engines and proxy are processes."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.hosting import process
from tests.proxy.scripted import WORLD, scripted
from tests.proxy.test_clients import KEY, call, proxy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # two engines and a proxy as processes

openai = pytest.importorskip("openai")

MOST = 3000
"""Tokens of an answer: enough to stop its engine during generation."""

TRIES = 20


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[Any]]]:
    directory = scripted(tmp_path_factory.mktemp("endless"), endless=True)
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(process(directory, "--max-context", str(MOST + 100))) for _ in range(2)]
        arguments = [word for url, _ in engines for word in ("--engine", url)]
        url = stack.enter_context(proxy(*arguments, "--tokenizer", str(directory)))
        yield url, list(engines)


def begun(url: str, session: str, engine: str) -> tuple[str, Any]:
    """The start of an answer, and its rest. The engine is stopped in between."""
    client = openai.OpenAI(base_url=f"{url}/s/{session}/v1", api_key=KEY, max_retries=0)
    for _ in range(TRIES):
        chunks = client.chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": "hi"}],
            temperature=0,
            max_tokens=MOST,
            stream=True,
            stream_options={"include_usage": True},
        )
        first = next(c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content)
        call(f"{engine}/pause?mode=keep", {}, method="POST")
        if _running(engine):
            return first, chunks
        call(f"{engine}/resume", {}, method="POST")
        chunks.close()
    raise AssertionError(f"the answer was whole before its engine could be stopped, {TRIES} times")


def test_a_stream_survives_what_it_can_and_tells_what_it_cannot(parts: tuple[str, list[Any]]) -> None:
    url, [(first, first_process), (second, second_process)] = parts
    said, rest = begun(url, "s", first)
    _kill(first_process)
    assert _whole(said, rest) == (WORLD * MOST)[:MOST], "it went on at the other engine"
    actions = [s for s in _branch(url, "s", -1) if s["kind"] == "action"]
    assert sum(len(s["token_ids"]) for s in actions) == sum(len(s["logprobs"]) for s in actions) == MOST

    said, rest = begun(url, "s", second)
    call(f"{second}/pause?mode=abort", {}, method="POST")
    call(f"{second}/resume", {}, method="POST")
    assert _whole(said, rest) == (WORLD * MOST)[:MOST], "it went on after the interruption"

    turns = len(call(f"{url}/sessions/s")["turns"])
    said, rest = begun(url, "s", second)
    _kill(second_process)
    with pytest.raises(openai.APIError, match=r"connection lost|is the engine alive"):
        _whole(said, rest)
    assert len(call(f"{url}/sessions/s")["turns"]) == turns, "nothing of it was captured"


def _whole(said: str, rest: Any) -> str:
    usage = None
    for chunk in rest:
        usage = chunk.usage or usage
        said += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    assert usage is not None
    assert usage.completion_tokens == MOST
    return said


def _branch(url: str, session: str, number: int) -> list[Any]:
    return list(call(f"{url}/sessions/{session}")["branches"][number]["segments"])


def _running(engine: str) -> bool:
    import urllib.request

    with urllib.request.urlopen(f"{engine}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return any(line.startswith("vllm:num_requests_running") and float(line.split()[-1]) > 0 for line in lines)


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(timeout=60)
