"""The hand-off between engines in separate processes. Slow: each test starts two or three (about 2 s each), and one
waits for the timeout of a pull from a stopped process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rollart.adapters.engines.http import HttpEngine
from rollart.engine.shm import SharedKvFiles
from rollart.errors import HandoffFailed
from rollart.fleet import EnginePlacement, EngineRole
from rollart.leases import Leases
from rollart.ledger.intervals import EngineShares, ResourceClock
from rollart.model import EngineId, Sampling
from rollart.policy.routing import PREFILL_RULES, RoutingPolicy
from rollart.serving.engine_registry import GatewayLimits
from rollart.serving.gateway import Gateway
from rollart.testing.ledger import MemoryRecorder
from tests.engine.hosting import process
from tests.engine.models import QWEN, publish
from tests.engine.pd import Params, ask, conversation, prefilled, split

pytestmark = pytest.mark.slow

WIDE = {**QWEN, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "vocab_size": 512}
"""Wide enough that its matrices use oneDNN's layout, with other kernels for one row than for many."""

CONTEXT = 640
LENGTHS = [1, 2, 3, 5, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 191, 192, 193, 255, 256, 257, 400, 600]

Scenario = Callable[[HttpEngine, HttpEngine, HttpEngine], Awaitable[None]]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("wide"), 0, WIDE)


def with_processes(directory: Path, shm: str, scenario: Scenario, *arguments: str) -> None:
    with contextlib.ExitStack() as stack:
        extra = ("--max-context", str(CONTEXT), "--max-step-tokens", "128", "--kv-shm", shm, *arguments)
        urls = [stack.enter_context(process(directory, *extra))[0] for _ in range(3)]

        async def body() -> None:
            engines = [HttpEngine(EngineId(url), url) for url in urls]
            try:
                async with asyncio.timeout(300):
                    await scenario(*engines)
            finally:
                for engine in engines:
                    await engine.close()

        asyncio.run(body())


async def metric(engine: HttpEngine, name: str) -> float:
    lines = (await engine.request("GET", "/metrics")).decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + " "))


def test_every_length_and_every_turn_is_bit_equal_to_one_engine(wide: Path, shm: str) -> None:
    async def scenario(p: HttpEngine, d: HttpEngine, whole: HttpEngine) -> None:
        for n in LENGTHS:
            request = ask(f"{n}", [(7 * i + n) % 512 for i in range(n)], tokens=12)
            two, one = await split(p, d, request), await whole.generate(request)
            assert (two.token_ids, two.logprobs) == (one.token_ids, one.logprobs), n
        for talk in range(3):
            prompt: list[int] = []
            returned: Params = None
            for turn, said in enumerate(conversation(6, seed=talk, vocab=512, longest=90)):
                prompt += said
                request = ask(f"{talk}.{turn}", prompt, session=f"{talk}", tokens=8)
                two, one = await split(p, d, request, returned), await whole.generate(request)
                assert (two.token_ids, two.logprobs) == (one.token_ids, one.logprobs), (talk, turn)
                returned = two.kv_transfer
                prompt += two.token_ids
        assert await metric(d, 'vllm:prompt_tokens_by_source_total{source="local_compute"}') == 0
        assert await metric(d, 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}') > sum(LENGTHS)
        way, other = ("shm", "socket") if shm else ("socket", "shm")
        for engine in (p, d):
            assert await metric(engine, f'rollart:kv_pulls_total{{transport="{way}"}}') >= 15
            assert await metric(engine, f'rollart:kv_pulls_total{{transport="{other}"}}') == 0
        # Every token is computed once, and its KV crosses once in each direction that it is needed.
        computed = 'vllm:prompt_tokens_by_source_total{source="local_compute"}'
        assert await metric(p, computed) == await metric(whole, computed)

    with_processes(wide, shm, scenario)


def test_a_prefill_engine_that_stalls_or_dies_costs_a_bounded_time(wide: Path) -> None:
    with process(wide, "--kv-shm", "") as (p_url, stalled), process(wide, "--kv-shm", "") as (d_url, _):

        async def body() -> None:
            p, d = HttpEngine(EngineId("p"), p_url), HttpEngine(EngineId("d"), d_url)
            loop, request = asyncio.get_running_loop(), ask("a", range(20))
            one, two = await prefilled(p, request), await prefilled(p, dataclasses.replace(request, request_id="b"))
            stalled.send_signal(signal.SIGSTOP)
            began = loop.time()
            with pytest.raises(HandoffFailed, match=r"in 0\.3 s"):
                await d.generate(dataclasses.replace(request, kv_transfer={**one, "timeout_s": 0.3}))
            assert loop.time() - began < 30.0
            stalled.kill()
            stalled.send_signal(signal.SIGCONT)
            stalled.wait(60)
            with pytest.raises(HandoffFailed):
                await d.generate(dataclasses.replace(request, kv_transfer=two))
            assert len((await d.generate(request)).token_ids) == 6
            await p.close()
            await d.close()

        asyncio.run(body())


def test_no_end_of_an_engine_leaves_memory_behind(wide: Path, tmp_path: Path) -> None:
    """SIGTERM cleans up at once; after SIGKILL other engines do, while offered KV can still be taken."""

    def files() -> list[Path]:
        return [f for f in tmp_path.rglob("*") if f.is_file() and f.name != "lock"]

    with (
        process(wide, "--kv-shm", str(tmp_path)) as (d_url, decode),
        process(wide, "--kv-shm", str(tmp_path)) as (p_url, dead),
    ):

        async def body() -> None:
            p, d = HttpEngine(EngineId("p"), p_url), HttpEngine(EngineId("d"), d_url)
            request = ask("a", range(20), session="s")
            params = await prefilled(p, request)
            await prefilled(p, ask("b", range(20)))
            assert len(files()) == 2
            dead.kill()
            dead.wait(60)
            answer = await d.generate(dataclasses.replace(request, kv_transfer=params))
            assert json.dumps(answer.kv_transfer)
            assert len(files()) == 2, "the one that nobody took, and the answer's"
            SharedKvFiles(str(tmp_path)).close()  # any engine's start
            assert len(files()) == 1
            await p.close()
            await d.close()

        asyncio.run(body())
        decode.terminate()
        assert decode.wait(60) == 0
        assert files() == []


@pytest.mark.parametrize("last", [False, True])
def test_a_prefill_engine_keeps_the_kv_of_a_last_turn_no_longer_than_the_hand_over(
    wide: Path, shm: str, last: bool
) -> None:
    """The router's own requests: while the answers are generated elsewhere, and after, the plan counts no byte."""

    async def scenario(p: HttpEngine, d: HttpEngine, _: HttpEngine) -> None:
        recorder = MemoryRecorder()
        seats: dict[str, EnginePlacement] = {
            p.id: EnginePlacement("here", role=EngineRole.PREFILL),
            d.id: EnginePlacement("here", role=EngineRole.DECODE),
        }
        gateway = Gateway(
            Leases(recorder),
            limits=GatewayLimits(),
            version=0,
            on_suspect=lambda _: None,
            recorder=recorder,
            router=RoutingPolicy(rule=PREFILL_RULES["remote"]),
            seats=seats,
        )
        prompts = {f"s{i}": tuple((7 * j + i) % 512 for j in range(200)) for i in range(6)}
        now = asyncio.get_running_loop().time
        for engine in (p, d):
            meter = ResourceClock(role="engine", resource=engine.id, recorder=recorder, clock=now)
            gateway.join(engine, version=0, shares=EngineShares(meter, clock=now))
        for session, tokens in prompts.items():
            await gateway.generate(session, tokens, Sampling(8, seed=1), spend=lambda _: None, last=last)
        assert await metric(d, "vllm:external_prefix_cache_hits_total") == 200 * len(prompts), "all was handed over"
        assert await metric(p, "rollart:kept_tokens") == (0 if last else 200 * len(prompts))
        assert await metric(p, "rollart:pending_kv_export_bytes") == 0

    with_processes(wide, shm, scenario)
