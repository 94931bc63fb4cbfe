"""Adapters of several domains on one engine: every request is computed with its own, whatever runs beside it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollart.adapters.engines.http import HttpEngine
from rollart.engine.runner import Runner
from rollart.engine.weights import WeightStaging
from rollart.errors import EngineError, UsageError
from rollart.model import Completion, EngineId, GenerateRequest, Sampling, WeightsRef
from tests.engine.hosting import hosted
from tests.engine.models import VOCAB, finish, job, publish, publish_adapter, publish_adapters, run_one, runner
from tests.engine.test_decoding import decoding

SEEDS = {"code": 5, "math": 6, "web": 7}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_b", "out_proj", "o_proj", "gate_proj")


def merged(tmp_path: Path, base: Path) -> dict[str, Runner]:
    """An engine with merged weights for each adapter of `SEEDS`."""
    return {name: runner(publish_adapter(tmp_path / f"merged-{name}", s, base)) for name, s in SEEDS.items()}


def check(one: Completion, other: Completion) -> None:
    assert one.token_ids == other.token_ids
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("decodes", [False, True], ids=["packed", "decode-steps"])
def test_each_request_is_that_of_an_engine_with_its_merged_weights(qwen: Path, tmp_path: Path, decodes: bool) -> None:
    version, alone = publish_adapters(tmp_path / "v1", SEEDS, qwen), merged(tmp_path, qwen)
    own, rng = (decoding if decodes else runner)(version), random.Random(1)
    jobs = [(n, [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]) for n in (*SEEDS, *SEEDS)]
    for i, (name, prompt) in enumerate(jobs):
        own.add(job(str(i), prompt, adapter=name, max_tokens=6))
        if i == 3:
            own.step()
    found = finish(own)
    for i, (name, prompt) in enumerate(jobs):
        check(found[str(i)].completion, run_one(alone[name], job(str(i), prompt, max_tokens=6)).completion)
    assert len({found[str(i)].completion.logprobs for i in range(len(jobs))}) == len(jobs)


def test_a_prefix_is_of_one_adapter(qwen: Path, tmp_path: Path) -> None:
    version, alone = publish_adapters(tmp_path / "v1", SEEDS, qwen), merged(tmp_path, qwen)
    own, prompt = runner(version), [1, 2, 3, 4]
    for name, cached in (("code", 0), ("math", 0), ("math", 4)):
        done = run_one(own, job(name, [*prompt, 9], session="s", adapter=name, max_tokens=1)).completion
        check(done, run_one(alone[name], job(name, [*prompt, 9], max_tokens=1)).completion)
        assert done.cached_tokens == cached


def test_deterministic_engines_give_one_completion_in_any_company(qwen: Path, tmp_path: Path) -> None:
    version = publish_adapters(tmp_path / "v1", SEEDS, qwen)
    alone, busy = (runner(version, deterministic=True) for _ in range(2))
    for name in SEEDS:
        busy.add(job(name, [3, 1], adapter=name, max_tokens=5))
    found = finish(busy)
    for name in SEEDS:
        assert found[name].completion == run_one(alone, job(name, [3, 1], adapter=name, max_tokens=5)).completion


@pytest.mark.parametrize(
    ("several", "name", "message"),
    [
        (True, "other", "there is no adapter 'other': the engine has the adapters code, math, web"),
        (True, None, "the request names no adapter: the engine has the adapters code, math, web"),
        (False, "math", "there is no adapter 'math': the engine has no adapters"),
    ],
)
def test_an_unknown_adapter_is_one_clear_error(
    qwen: Path, tmp_path: Path, several: bool, name: str | None, message: str
) -> None:
    async def ask(directory: Path, streaming: bool) -> None:
        async with hosted(directory) as (url, _):
            engine = HttpEngine(EngineId("e"), url, streaming=streaming)
            with pytest.raises(EngineError, match=message) as caught:
                await engine.generate(GenerateRequest("r", "s", (1, 2), Sampling(max_tokens=1), adapter=name))
            assert not caught.value.retryable
            await engine.close()

    directory = publish_adapters(tmp_path / "v1", SEEDS, qwen) if several else qwen
    for streaming in (True, False):
        asyncio.run(ask(directory, streaming))


def test_servers_take_the_adapter_as_the_requests_model_and_load_versions(qwen: Path, tmp_path: Path) -> None:
    versions = [publish_adapters(tmp_path / f"v{i}", {n: s + 10 * i for n, s in SEEDS.items()}, qwen) for i in (0, 1)]
    alone = [run_one(runner(publish_adapter(tmp_path / f"m{i}", 6 + 10 * i, qwen)), job("a", [1, 2])) for i in (0, 1)]
    request = GenerateRequest("r", "s", (1, 2), Sampling(max_tokens=8, temperature=0.0), adapter="math")

    async def ask(streaming: bool) -> list[Completion]:
        async with hosted(versions[0]) as (url, _):
            engine = HttpEngine(EngineId("e"), url, streaming=streaming)
            assert await engine.context() == 64
            found = [await engine.generate(request)]
            await engine.update_weights(WeightsRef(1, str(versions[1])))
            found.append(await engine.generate(request))
            await engine.close()
            return found

    for streaming in (True, False):
        for one, other in zip(asyncio.run(ask(streaming)), alone, strict=True):
            check(one, other.completion)


@pytest.mark.parametrize(
    ("names", "modules", "base", "message"),
    [
        ({"code": 1, "math": 2}, ("q_proj", "down_proj"), 0, "has the adapters code, math, the engine code, math, web"),
        (SEEDS, ("q_proj",), 0, "adapter 'code' changes other weights than the engine's adapters"),
        ({}, (), 0, "has the adapters none"),
        (SEEDS, ("q_proj", "down_proj"), 8, ""),
    ],
)
def test_versions_with_other_adapters_are_refused_and_other_weights_below_are_read(
    qwen: Path, tmp_path: Path, names: dict[str, int], modules: Sequence[str], base: int, message: str
) -> None:
    own = runner(publish_adapters(tmp_path / "v0", SEEDS, qwen))
    below = publish(tmp_path / "below", base) if base else qwen
    other = publish_adapters(tmp_path / "v1", names, below, modules) if names else qwen
    staging = WeightStaging(own.network, str(tmp_path / "v0"))
    if message:
        with pytest.raises(EngineError, match=message):
            asyncio.run(staging.stage({"path": str(other)}))
        return
    for version in (tmp_path / "v0", other):
        staged = asyncio.run(staging.stage({"path": str(version)}))
        assert bool(staged.tensors) == (version == other), "weights that the engine has are not read again"
    own.load(staged.tensors, 1, staged.stamp, staged.adapters)
    one = run_one(own, job("a", [1, 2], adapter="web")).completion
    check(one, run_one(runner(publish_adapter(tmp_path / "m", 7, below)), job("a", [1, 2])).completion)


def test_an_engine_without_adapters_refuses_versions_with_several(qwen: Path, tmp_path: Path) -> None:
    staging = WeightStaging(runner(qwen).network, str(qwen))
    version = publish_adapters(tmp_path / "v1", SEEDS, qwen)
    with pytest.raises(EngineError, match=r"has no adapter '' \(it has code, math, web\)"):
        asyncio.run(staging.stage({"path": str(version)}))
    with pytest.raises(UsageError, match=r"change model\.embed_tokens\.weight, which takes none"):
        runner(publish_adapters(tmp_path / "v2", SEEDS, qwen, ("embed_tokens",)))


@pytest.mark.slow  # importing peft and transformers takes seconds
@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("qwen3.5", DELTA),
        ("phi3", ("qkv_proj", "gate_up_proj")),
        ("qwen3-moe", ATTENTION),
    ],
)
def test_random_requests_of_all_adapters_are_what_peft_computes(
    family: str, modules: Sequence[str], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    from tests.engine.families import check_random_requests, make

    make(family, tmp_path / "below")
    paths, models = [], []
    for version in range(2):
        seeds = {"code": 2 * version, "math": 2 * version + 1}
        path = publish_adapters(tmp_path / f"v{version}", seeds, tmp_path / "below", modules)
        paths.append(path)
        models.append(
            {
                name: peft.PeftModel.from_pretrained(
                    AutoModelForCausalLM.from_pretrained(path / "base", attn_implementation="eager"), path / name
                ).eval()
                for name in seeds
            }
        )
    check_random_requests(paths, models, seed=f"adapters of {family}", adapters=("code", "math"))
