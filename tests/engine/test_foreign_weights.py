"""Foreign weights loaded under the number of a published version: their stamp reveals them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from rollart.adapters.engines.http import HttpEngine
from rollart.architecture import stamp_of
from rollart.engine.weights import read_tensors
from rollart.errors import ForeignWeights
from rollart.model import CompletionChunk, EngineId, GenerateRequest, PauseMode, Sampling, VersionSpan, WeightsRef
from tests.engine.hosting import served
from tests.engine.models import job, runner

Swap = Callable[[Path], Awaitable[None]]


def version(source: Path, directory: Path, number: int = 3) -> WeightsRef:
    """A copy of a checkpoint, published as by a trainer."""
    shutil.copytree(source, directory)
    digest = hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
    marker = {"schema": 1, "version": number, "files": {"model.safetensors": digest}}
    (directory / "COMPLETE").write_text(json.dumps(marker))
    return WeightsRef(number, str(directory), stamp=stamp_of(directory))


def with_engine(
    published: WeightsRef, scenario: Callable[[HttpEngine, Swap], Awaitable[None]], *, streaming: bool = True
) -> None:
    """An engine with `published` loaded, its client, and a function that loads any directory as the same version."""

    async def body() -> None:
        async with served(Path(published.path)) as url, aiohttp.ClientSession() as http, asyncio.timeout(60):

            async def swap(directory: Path) -> None:
                for path, data in (
                    ("/start_weight_update", {}),
                    ("/update_weights", {"update_info": {"path": str(directory)}}),
                    ("/finish_weight_update", {"weight_version": published.version}),
                ):
                    async with http.post(url + path, json=data) as answer:
                        assert answer.status == 200

            client = HttpEngine(EngineId("e"), url, streaming=streaming)
            await client.pause(PauseMode.KEEP)
            await client.update_weights(published)
            await client.resume()
            await scenario(client, swap)
            await client.close()

    asyncio.run(body())


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("streaming", [True, False])
def test_an_answer_of_foreign_weights_is_wrong(
    qwen: Path, qwen_next: Path, tmp_path: Path, streaming: bool, told: bool, marked: bool
) -> None:
    ours = version(qwen, tmp_path / "ours")
    theirs = Path(version(qwen_next, tmp_path / "theirs").path) if marked else qwen_next
    pieces: list[CompletionChunk] = []

    def asked(name: str) -> GenerateRequest:
        return GenerateRequest(name, "s", (1, 2, 3), Sampling(8), on_chunk=pieces.append if told else None)

    async def scenario(client: HttpEngine, swap: Swap) -> None:
        assert len((await client.generate(asked("before"))).token_ids) == 8
        seen = len(pieces)
        await swap(theirs)
        with pytest.raises(ForeignWeights, match="published as v3"):
            await client.generate(asked("while"))
        assert len(pieces) == seen, "tokens of foreign weights would be kept, and trained on"
        await swap(Path(ours.path))
        assert len((await client.generate(asked("after"))).token_ids) == 8

    with_engine(ours, scenario, streaming=streaming)


def test_an_update_and_a_start_compare_what_was_loaded(qwen: Path, qwen_next: Path, tmp_path: Path) -> None:
    ours, theirs = version(qwen, tmp_path / "ours"), version(qwen_next, tmp_path / "theirs")

    async def scenario(client: HttpEngine, swap: Swap) -> None:
        await client.started_with(ours)
        with pytest.raises(ForeignWeights):
            await client.started_with(theirs)
        with pytest.raises(ForeignWeights):
            await client.update_weights(WeightsRef(4, theirs.path, stamp=ours.stamp))
        await client.update_weights(WeightsRef(4, theirs.path))

    with_engine(ours, scenario)


def test_each_span_has_the_stamp_of_what_drew_it(qwen: Path, qwen_next: Path) -> None:
    """Weights that are loaded and replaced within one answer get separate spans, under the same number."""
    engine = runner(qwen)
    engine.stamp = "ours"
    engine.add(job("r", (1, 2), max_tokens=3))
    engine.step()
    engine.load(read_tensors(qwen_next), 0, "theirs")
    engine.step()
    engine.load(read_tensors(qwen), 0, "ours")
    (finished,) = engine.step()
    assert [(s, s.stamp) for s in finished.completion.spans] == [
        (VersionSpan(0, at, at + 1), stamp) for at, stamp in enumerate(("ours", "theirs", "ours"))
    ]
