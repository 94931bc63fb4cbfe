"""Prefill and decode on two vLLM servers over NIXL: equal tokens, the fence, and a prefill server that dies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from placement.types import Role
from rollart.adapters.engines.vllm import VllmEngine
from rollart.errors import HandoffFailed
from rollart.model import Completion, EngineId, GenerateRequest, PauseMode, WeightsRef
from tests.contracts.engine_contract import check, prefilled, request
from tests.e2e.harness import processes
from tests.engine.models import greedy
from tests.serverless.support import alive, descendants, until
from tests.vllm.hosting import TIED, needs_vllm, publish, server

pytestmark = [pytest.mark.slow, needs_vllm, pytest.mark.timeout(900)]

PROMPT = tuple(1 + (7 * i) % 60 for i in range(70))
"""Two whole blocks of 32 tokens and some."""


ATTEMPTS = 12


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    prefill: VllmEngine
    decode: VllmEngine


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pd")


@pytest.fixture(scope="module")
def urls(root: Path) -> Iterator[tuple[str, str]]:
    """Models with tied embeddings, so that weights which an update fails to replace are detected here as well."""
    model = publish(root / "v0", 0, TIED)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as starts:
        made = [server(model, root / f"{role}.log", role=role) for role in (Role.PREFILL, Role.DECODE)]
        prefill, decode = starts.map(stack.enter_context, made)
        yield prefill, decode


@contextlib.asynccontextmanager
async def pair(urls: tuple[str, str], root: Path) -> AsyncIterator[Pair]:
    """Both at version 0."""
    engines = Pair(*(VllmEngine(EngineId(f"e{i}"), url) for i, url in enumerate(urls)))
    async with contextlib.AsyncExitStack() as stack:
        for engine in (engines.prefill, engines.decode):
            stack.push_async_callback(engine.close)
            await load(engine, root, 0)
        async with asyncio.timeout(240):
            yield engines


async def load(engine: VllmEngine, root: Path, version: int) -> None:
    await engine.pause(PauseMode.KEEP)
    await engine.update_weights(WeightsRef(version, str(publish(root / f"v{version}", version, TIED))))
    await engine.resume()


async def handed_over(p: Pair, turn: GenerateRequest) -> Completion:
    """Both legs. vLLM's first connection of two servers times out after 5 s; a loaded machine may need several
    tries."""
    for attempt in range(ATTEMPTS):
        _, rest = await prefilled(p.prefill, dataclasses.replace(turn, request_id=f"{turn.request_id}-{attempt}"))
        with contextlib.suppress(HandoffFailed):
            return await p.decode.generate(rest)
    raise AssertionError(f"{ATTEMPTS} hand-offs failed")


def test_prefill_here_and_decode_there_is_one_engine(urls: tuple[str, str], root: Path) -> None:
    """Equal tokens under both versions, with KV transferred over NIXL, and no KV of the previous version."""

    async def body() -> None:
        async with pair(urls, root) as p:
            for version in (0, 1):
                for engine in (p.prefill, p.decode):
                    await load(engine, root, version)
                before = await p.decode.stats()
                turn = request("a", PROMPT, max_tokens=12, temperature=0.0, salt=f"v{version}")
                two = await handed_over(p, turn)
                check(two, [version])
                assert two.cached_tokens == len(PROMPT) - 1
                assert (await p.decode.stats()).cached_tokens - before.cached_tokens >= len(PROMPT) - 1
                assert two.token_ids == greedy(root / f"v{version}", PROMPT, 12)
                alone = await p.prefill.generate(dataclasses.replace(turn, request_id="b", cache_salt="alone"))
                assert two.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
            part = PROMPT[50:]  # of a block
            two = await handed_over(p, request("c", part, max_tokens=4, temperature=0.0, salt="part"))
            assert two.cached_tokens == len(part) - 1, "prompts shorter than a block are pulled, too"
            assert two.token_ids == greedy(root / "v1", part, 4)

    asyncio.run(body())


def test_versions_are_not_mixed(urls: tuple[str, str], root: Path) -> None:
    """The decode engine has a newer version and does not pull. The prefill engine cannot drop its KV either, before the
    offered KV was pulled or expired."""

    async def body() -> None:
        async with pair(urls, root) as p:
            turn = request("a", PROMPT, max_tokens=4, temperature=0.0, salt="v0")
            _, rest = await prefilled(p.prefill, turn)
            await load(p.decode, root, 1)
            with pytest.raises(HandoffFailed, match="KV is of v0"):
                await p.decode.generate(rest)
            local = await p.decode.generate(dataclasses.replace(rest, kv_transfer=None))
            assert local.token_ids == greedy(root / "v1", PROMPT, 4)
            await load(p.prefill, root, 1)
            two = await handed_over(p, dataclasses.replace(turn, cache_salt="v1"))
            assert two.token_ids == greedy(root / "v1", PROMPT, 4)

    asyncio.run(body())


def test_a_prefill_server_that_died_costs_only_the_hand_off(urls: tuple[str, str], root: Path) -> None:
    """The last test of this module: the server is not restarted."""

    async def body() -> None:
        async with pair(urls, root) as p:
            turn = request("a", PROMPT[::-1], max_tokens=4, temperature=0.0, salt="v0")
            _, rest = await prefilled(p.prefill, turn)
            for process in [p for p in processes(root) if "prefill.log" in p.command]:
                # The engine core outlives the server for a moment, and could still be read from.
                server = descendants(process.pid)
                process.kill()
                await until(lambda server=server: not any(map(alive, server)))
            with pytest.raises(HandoffFailed):
                await p.decode.generate(rest)
            local = await p.decode.generate(dataclasses.replace(rest, request_id="b", kv_transfer=None))
            assert local.token_ids == greedy(root / "v0", PROMPT[::-1], 4)

    asyncio.run(body())
