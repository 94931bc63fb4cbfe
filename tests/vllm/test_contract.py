"""The contract suite of the embedded engine, run against a real vLLM server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from rollart.adapters.engines.vllm import PROBE_FILE, VllmEngine
from rollart.collective import BroadcastOrder
from rollart.errors import EngineError
from rollart.model import EngineId, PauseMode, WeightsRef
from rollart.train.learner import Learner
from rollart.train.sending import BroadcastSender
from tests.contracts.broadcasting import BroadcastVllm, give
from tests.contracts.engine_contract import EngineContract, Scenario, Subject, check, request
from tests.engine.models import greedy, reference
from tests.train.trainkit import batch, config, sample
from tests.vllm.hosting import CONFIG, TIED, needs_vllm, publish, server

pytestmark = [pytest.mark.slow, needs_vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def url(root: Path) -> Iterator[str]:
    with server(publish(root / "v0", 0), root / "vllm.log") as url:
        yield url


def test_a_teacher_scores_samples_as_the_trainer_does_with_its_directory(url: str, root: Path) -> None:
    """Before any update of the server's weights: the file's first test."""
    path = str(root / "v0")
    model = {"model": {"path": path}, "device": "cpu", "domains": {"a": {}}}
    samples = batch([sample(str(i), vocab=CONFIG["vocab_size"]) for i in range(6)], CONFIG["vocab_size"])
    far, near = (
        Learner(config(root, algorithm="opd", loss={"reference": reference}, **model)).reference.logprobs(samples)
        for reference in (f"{url}/v1", path)
    )
    assert far == pytest.approx(near, abs=1e-4)
    assert far.std() > 0.1


def publisher(root: Path) -> Callable[[int], WeightsRef]:
    return lambda version: WeightsRef(version, str(publish(root / f"v{version}", version)))


async def to_version(engine: VllmEngine, weights: WeightsRef) -> None:
    await engine.pause(PauseMode.KEEP)
    await engine.update_weights(weights)
    await engine.resume()


async def play(url: str, root: Path, scenario: Scenario, kind: type[VllmEngine] = VllmEngine) -> None:
    """With version 0 loaded, an empty cache, and no state of earlier tests."""
    engine = kind(EngineId("e0"), url)
    try:
        async with asyncio.timeout(120):
            await to_version(engine, publisher(root)(0))
            await scenario(Subject(engine, publisher(root)))
            await engine.resume()
    finally:
        await engine.close()


class TestVllm(EngineContract):
    PREFIX = tuple(range(1, 41))
    RELEASES = False
    GAUGES = False
    LONG = 200

    @pytest.fixture(autouse=True)
    def _served(self, url: str, root: Path) -> None:
        self.url, self.root = url, root

    def run(self, scenario: Scenario) -> None:
        asyncio.run(play(self.url, self.root, scenario))

    def test_log_probabilities_are_those_of_the_weights(self) -> None:
        """Greedy tokens and their log-probabilities, against a forward pass in double precision."""

        async def scenario(s: Subject) -> None:
            for version in (0, 3):
                await to_version(self._vllm(s), s.publish(version))
                answer = await s.engine.generate(request(f"v{version}", (5, 17, 2, 40), max_tokens=24, temperature=0.0))
                ids = (5, 17, 2, 40, *answer.token_ids)
                expected = reference(self.root / f"v{version}", ids)[3:-1]
                assert answer.token_ids == tuple(expected.argmax(-1).tolist())
                assert answer.logprobs == pytest.approx(expected.max(-1).values.tolist(), abs=1e-4)

        self.run(scenario)

    def test_log_probabilities_are_after_temperature_and_legal_actions(self) -> None:
        async def scenario(s: Subject) -> None:
            turn = request("a", (5, 17), max_tokens=1, temperature=0.7, allowed=(3, 8, 21))
            answer = await s.engine.generate(turn)
            legal = reference(self.root / "v0", (5, 17))[-1][[3, 8, 21]] / 0.7
            expected = dict(zip((3, 8, 21), legal.log_softmax(-1).tolist(), strict=True))
            assert answer.logprobs == pytest.approx([expected[answer.token_ids[0]]], abs=1e-4)

        self.run(scenario)

    def test_what_goes_on_after_an_update_is_computed_anew(self) -> None:
        """A request that continues after an update uses no KV of the previous version (I5): it continues like a new
        one."""

        async def scenario(s: Subject) -> None:
            old = await s.engine.stats()
            task = asyncio.create_task(s.engine.generate(request("a", self.PREFIX, max_tokens=200, temperature=0.0)))
            while (await s.engine.stats()).generated_tokens - old.generated_tokens < 3:
                await asyncio.sleep(0)
            await to_version(self._vllm(s), s.publish(4))
            long = await task
            if long.spans[-1].version == 4:
                kept = long.spans[-1].start
                rest = request("b", (*self.PREFIX, *long.token_ids[:kept]), max_tokens=200 - kept, temperature=0.0)
                assert (await s.engine.generate(rest)).token_ids == long.token_ids[kept:]

        self.run(scenario)

    def test_a_version_that_computes_something_else_is_found_out(self) -> None:
        """The probe of a version holds log-probabilities of its weights; here another version's weights are loaded."""

        async def scenario(s: Subject) -> None:
            engine = VllmEngine(EngineId("held"), self.url, tolerance=1e-3)
            try:
                for number, says in ((5, 5), (6, 5)):
                    weights, ids = s.publish(number), [1 + 7 * i % 30 for i in range(40)]
                    rows = reference(self.root / f"v{says}", ids)
                    logprobs = [rows[i, token].item() for i, token in enumerate(ids[1:])]
                    probe = {"token_ids": ids, "logprobs": logprobs}
                    (Path(weights.path) / PROBE_FILE).write_text(json.dumps(probe))
                    await engine.pause(PauseMode.KEEP)
                    await engine.update_weights(weights)
                    with contextlib.nullcontext() if says == number else pytest.raises(EngineError, match="v6 is"):
                        await engine.resume()
            finally:
                await engine.close()

        self.run(scenario)

    def test_a_version_that_is_torn_changes_nothing(self) -> None:
        async def scenario(s: Subject) -> None:
            before = await s.engine.generate(request("a", max_tokens=9, temperature=0.0))
            torn = publish(self.root / "torn", 9)
            (torn / "COMPLETE").unlink()
            for path in (torn, publish(self.root / "other", 9, TIED)):
                await s.engine.pause(PauseMode.KEEP)
                with pytest.raises(EngineError, match=r"not a whole version|another model"):
                    await s.engine.update_weights(WeightsRef(9, str(path)))
                await s.engine.resume()
            after = await s.engine.generate(request("b", max_tokens=9, temperature=0.0))
            check(after, [0])
            assert after.token_ids == before.token_ids

        self.run(scenario)

    def test_an_update_that_nobody_ended_is_in_nobodys_way(self) -> None:
        """A controller that was killed between the begin and the end of an update."""

        async def scenario(s: Subject) -> None:
            engine = self._vllm(s)
            await engine.pause(PauseMode.KEEP)
            await engine.control("/start_weight_update", {})
            with pytest.raises(EngineError, match="already active"):
                await engine.control("/start_weight_update", {})
            await to_version(engine, s.publish(2))
            answer = await engine.generate(request("a", (5, 17), max_tokens=4, temperature=0.0))
            check(answer, [2])
            assert answer.token_ids == greedy(self.root / "v2", (5, 17), 4)

        self.run(scenario)

    def test_a_server_that_was_started_anew_serves_nobody_before_it_has_loaded(self) -> None:
        """The weights have vLLM's default name for the initial weights."""

        async def scenario(s: Subject) -> None:
            engine = self._vllm(s)
            await engine.control("/update_weight_version", {"new_version": "default"})
            with pytest.raises(EngineError, match="was restarted") as refused:
                await engine.generate(request("a", max_tokens=4))
            assert refused.value.retryable
            assert engine.silent.is_set()
            assert not await engine.healthy()
            await to_version(engine, s.publish(0))
            assert await engine.healthy()
            check(await engine.generate(request("b", max_tokens=4)), [0])

        self.run(scenario)

    @staticmethod
    def _vllm(s: Subject) -> VllmEngine:
        assert isinstance(s.engine, VllmEngine)
        return s.engine


class TestVllmByBroadcast(EngineContract):
    """Versions arrive in its workers' memory over gloo, not from files."""

    PREFIX = TestVllm.PREFIX
    RELEASES = False
    GAUGES = False
    LONG = TestVllm.LONG

    @pytest.fixture(autouse=True)
    def _served(self, url: str, root: Path) -> None:
        self.url, self.root = url, root

    def run(self, scenario: Scenario) -> None:
        asyncio.run(play(self.url, self.root, scenario, BroadcastVllm))

    test_log_probabilities_are_those_of_the_weights = TestVllm.test_log_probabilities_are_those_of_the_weights
    test_what_goes_on_after_an_update_is_computed_anew = TestVllm.test_what_goes_on_after_an_update_is_computed_anew
    _vllm = staticmethod(TestVllm._vllm)

    def test_a_broadcast_of_another_model_is_not_kept_and_the_files_are_read(self) -> None:
        async def body() -> None:
            engine, sender = (
                VllmEngine(EngineId("e0"), self.url),
                BroadcastSender(torch.device("cpu"), rank=0, host="127.0.0.1"),
            )
            try:
                await to_version(engine, publisher(self.root)(0))
                before = await engine.generate(request("a", max_tokens=9, temperature=0.0))
                order = BroadcastOrder(sender.address(), "g", "gloo", 2, 1, "another", 3, limit_s=60.0)
                sent = await give(sender, order, publish(self.root / "tied", 9, TIED), engine)
                assert "another model: tie_word_embeddings is True" in sent.errors[1]
                engine.received(3, "another")  # as if it had received it
                await to_version(engine, publisher(self.root)(3))
                answer = await engine.generate(request("b", max_tokens=9, temperature=0.0))
                assert answer.spans[0].version == 3
                assert answer.token_ids != before.token_ids
            finally:
                sender.leave(wait_s=60.0)
                await engine.close()

        asyncio.run(body())
