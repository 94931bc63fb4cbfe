"""Shared helpers of the hand-off tests: a prefill and a decode engine, and one engine that does both."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart.adapters.engines.http import HttpEngine
from rollart.engine.handoff import HandoffSettings
from rollart.engine.server import EngineServer
from rollart.model import Completion, EngineId, GenerateRequest, Sampling
from rollart.ports import Engine
from rollart.serving.handoff import decode_params, prefill_request
from tests.engine.hosting import hosted

Params = Mapping[str, object] | None

LIMIT_S = 120.0


@dataclass(slots=True)
class Side:
    """One engine: its client and, in this process, its server."""

    client: HttpEngine
    server: EngineServer

    @property
    def counters(self) -> dict[str, int]:
        """Counters of transferred and computed tokens."""
        h, r = self.server.handoffs, self.server.handoffs.runner
        return {
            "shm": h.pulled["shm"].bytes,
            "socket": h.pulled["socket"].bytes,
            "imported": r.imported_tokens,
            "computed": r.prompt_tokens - r.cached_tokens,
        }


@contextlib.asynccontextmanager
async def side(directory: Path, *, shm: str = "", streaming: bool = True, **options: Any) -> AsyncIterator[Side]:
    settings = dataclasses.replace(options.pop("settings", HandoffSettings()), shm=shm)
    async with hosted(directory, handoff=settings, **options) as (url, server):
        client = HttpEngine(EngineId(url), url, streaming=streaming)
        try:
            async with asyncio.timeout(LIMIT_S):
                yield Side(client, server)
        finally:
            await client.close()


def ask(
    name: str,
    prompt: Sequence[int],
    kv: Params = None,
    *,
    session: str = "",
    tokens: int = 6,
    temperature: float = 0.0,
    salt: str | None = None,
) -> GenerateRequest:
    sampling = Sampling(tokens, temperature=temperature, seed=7)
    return GenerateRequest(name, session, tuple(prompt), sampling, cache_salt=salt, kv_transfer=kv)


async def prefilled(
    p: Engine, request: GenerateRequest, returned: Params = None, *, last: bool = False
) -> dict[str, object]:
    """The prefill leg, as a router does it; returns the `kv_transfer_params` for the decode engine."""
    answer = await p.generate(prefill_request(request, returned, last=last))
    return dict(decode_params(answer, str(p.id), last=last))


async def split(p: Engine, d: Engine, request: GenerateRequest, returned: Params = None) -> Completion:
    """Both legs of a turn."""
    params = await prefilled(p, request, returned)
    return await d.generate(dataclasses.replace(request, kv_transfer=params))


def conversation(turns: int, seed: int, *, vocab: int = 61, longest: int = 20) -> list[list[int]]:
    """The environment's observation at each turn."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(rng.randint(1, longest))] for _ in range(turns)]


TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
"""KV of one token of the test model: keys and values, layers, kv heads, head_dim, fp32."""

LOGITS_BYTES = 61 * 4

Pair = Callable[[Side, Side, Side], Awaitable[None]]


def with_engines(directory: Path, scenario: Pair, *, shm: str = "", **options: Any) -> None:
    """Run a scenario with a prefill engine, a decode engine, and one that does both."""

    async def body() -> None:
        async with (
            side(directory, shm=shm, **options) as p,
            side(directory, shm=shm, **options) as d,
            side(directory) if not options else side(directory, **options) as whole,
        ):
            await scenario(p, d, whole)

    asyncio.run(body())


def same(a: Completion, b: Completion) -> None:
    assert a.token_ids == b.token_ids
    assert a.logprobs == b.logprobs, "the very bits"
    assert a.spans == b.spans
    assert a.finish is b.finish
