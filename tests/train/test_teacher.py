"""A reference policy behind an endpoint: steps as with the same model in the trainer, and what servers do wrong."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from tokenizers import Tokenizer, models

from rollart.errors import TrainerError, UsageError
from rollart.settings.training import TeacherSpec
from rollart.train.batch import InvalidSamples
from rollart.train.learner import Learner
from rollart.train.server import TrainerService
from rollart.train.teacher import TeacherEndpoint
from serverless.retries import TEACHER
from tests.train.test_accumulation import state
from tests.train.trainkit import VOCAB, batch, config, publish_version, sample

QUICK = dataclasses.replace(TEACHER, first_s=0.001, longest_s=0.001)

LOGPROB = {"logprob": -2.0, "rank": 1}


class CompletionsServer:
    """The completions route of vLLM, or with `echo` that of the OpenAI API, over a model or a constant."""

    def __init__(self, teacher: Learner | None = None, *, vocab: int = VOCAB, echo: bool = False) -> None:
        self.teacher, self.vocab, self.echo = teacher, vocab, echo
        self.statuses: list[int] = []
        """Statuses of the next requests in place of their answers."""
        self.first_row: dict[str, Any] = {}
        """In place of the row of each prompt's second token."""
        self.headers: set[str | None] = set()
        self.models: set[str | None] = set()
        self.active = self.most = self.asked = 0

    async def complete(self, request: web.Request) -> web.Response:
        self.active += 1
        self.most, self.asked = max(self.most, self.active), self.asked + 1
        try:
            await asyncio.sleep(0)
            return self._answer(request.headers.get("Authorization"), await request.json())
        finally:
            self.active -= 1

    def _answer(self, token: str | None, body: dict[str, Any]) -> web.Response:
        self.headers.add(token)
        self.models.add(body.get("model"))
        if self.statuses and (status := self.statuses.pop(0)) != 200:
            return web.Response(status=status, text="overloaded\nby others")
        ids = body["prompt"]
        if (largest := max(ids)) >= self.vocab:
            error = {"error": {"message": f"Token id {largest} is out of vocabulary", "code": 400}}
            return web.json_response(error, status=400)
        values = self._values(ids)
        choice: dict[str, Any] = {"text": "x", "logprobs": None}
        if self.echo and body.get("echo"):
            shown = {"token_logprobs": [None, *values, -1.0], "tokens": [str(i) for i in [*ids, 0]]}
            choice["logprobs"] = shown
        elif not self.echo and "prompt_logprobs" in body:
            rows = [{str(i): LOGPROB | {"logprob": v}} for i, v in zip(ids[1:], values, strict=True)]
            choice["prompt_logprobs"] = [None, self.first_row or rows[0], *rows[1:]]
        return web.json_response({"choices": [choice]})

    def _values(self, ids: list[int]) -> list[float]:
        if self.teacher is None:
            return [-2.0] * (len(ids) - 1)
        with torch.no_grad():
            scores = self.teacher.policy.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        return [float(scores[at, token]) for at, token in enumerate(ids[1:])]


@contextlib.contextmanager
def served(server: CompletionsServer) -> Iterator[str]:
    """The base URL of the server, which runs in a thread."""
    loop, runner = asyncio.new_event_loop(), None

    async def start() -> tuple[web.AppRunner, int]:
        app = web.Application()
        app.router.add_post("/v1/completions", server.complete)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, runner.addresses[0][1]

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        runner, port = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        if runner is not None:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def endpoint(url: str, tokenizer: Path | None = None, **spec: Any) -> TeacherEndpoint:
    given = TeacherSpec.model_validate({"url": url} | spec)
    return TeacherEndpoint(given, VOCAB, None if tokenizer is None else str(tokenizer), retries=QUICK)


@pytest.mark.parametrize("echo", [False, True])
def test_a_step_is_that_with_the_teacher_in_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, echo: bool
) -> None:
    teacher = Learner(config(tmp_path, seed=1))
    with torch.no_grad():
        teacher.policy.model.get_input_embeddings().weight.mul_(4.0)  # an opinion about the next token
    path = publish_version(teacher, tmp_path, 7)
    samples = batch([sample(str(i)) for i in range(6)] + [sample("empty", turns=[(3, 0)])])
    server = CompletionsServer(teacher, echo=echo)
    monkeypatch.setenv("TEACHER_TOKEN", "secret")
    with served(server) as url:
        spec = {"url": url, "model": "teacher", "token_env": "TEACHER_TOKEN", "concurrency": 2}
        far, near = (
            Learner(config(tmp_path, algorithm="opd", loss={"reference": reference}, domains={"a": {}}, lr=1e-2))
            for reference in (spec, str(path))
        )
        assert far.reference.logprobs(samples) == pytest.approx(near.reference.logprobs(samples), abs=1e-6)
        for version in range(2):
            ours, wanted = (one.train(samples, version).metrics["reference_kl"] for one in (far, near))
            assert ours == pytest.approx(wanted, abs=1e-6)
    assert abs(wanted) > 0.01
    for name, tensor in state(near).items():
        if isinstance(tensor, torch.Tensor):
            assert torch.allclose(tensor.double(), state(far)[name].double(), atol=1e-6), name
    assert server.headers == {"Bearer secret"}
    assert server.models == {"teacher"}
    assert server.most <= 2
    assert server.asked == 3 * 6 + (2 if echo else 1), "one per sample with loss, and the first request of each form"


def test_a_teacher_is_asked_again_while_it_is_overloaded() -> None:
    server = CompletionsServer()
    samples = batch([sample("s")])
    with served(server) as url:
        teacher = endpoint(url)
        teacher.check()
        server.statuses = [500, 429]
        assert set(teacher.logprobs(samples)[samples.mask]) == {-2.0}
        assert server.asked == 4
        server.statuses = [503] * QUICK.attempts
        with pytest.raises(TrainerError, match="does not answer: status 503: overloaded by others, 6 attempts in a"):
            teacher.logprobs(samples)
        server.statuses = [404]
        with pytest.raises(TrainerError, match="refuses 8 tokens of a sample: status 404"):
            teacher.logprobs(samples)
    with pytest.raises(TrainerError, match=r"the teacher at http.* does not answer: .*6 attempts in a row .start it"):
        teacher.column(samples, 0)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"5": LOGPROB}, "answers with token 5, asked for 2"),
        ({"2": LOGPROB | {"logprob": float("nan")}}, "gives token 2 the log-probability nan"),
        ({"2": LOGPROB | {"decoded_token": "\u0120other"}}, "token 2 is '\u0120other', and the policy's 'w2'"),
    ],
)
def test_a_teacher_with_other_tokens_is_refused(tmp_path: Path, row: dict[str, Any], problem: str) -> None:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.save(str(tmp_path / "tokenizer.json"))
    server = CompletionsServer()
    with served(server) as url:
        right = endpoint(url, tmp_path)
        server.first_row = {"2": LOGPROB | {"decoded_token": "\u2581w2"}}
        right.check()
        server.first_row = row
        with pytest.raises(UsageError) as caught:
            endpoint(url, tmp_path / "tokenizer.json").check()
    assert problem in caught.value.message
    assert caught.value.remedy == "give training.loss.reference a model with the policy's tokenizer"


def test_a_teacher_without_log_probabilities_of_the_policys_tokens_is_refused() -> None:
    smaller, silent = CompletionsServer(vocab=VOCAB - 1), CompletionsServer()
    silent.first_row = {"none": None}
    with served(smaller) as url, pytest.raises(UsageError, match="up to 23: status 400: Token id 23 is out of vocab"):
        endpoint(url).check()
    with served(silent) as url, pytest.raises(UsageError, match="its answer has no log-probabilities of the prompt"):
        endpoint(url).check()
    with pytest.raises(UsageError, match=r"environment has no variable NO_SUCH_TOKEN .export NO_SUCH_TOKEN=…"):
        endpoint("http://127.0.0.1:9/v1", token_env="NO_SUCH_TOKEN").check()


def test_legal_actions_are_refused_with_their_samples() -> None:
    samples = batch([sample("free"), sample("bound", restricted=True)])
    with pytest.raises(InvalidSamples, match="sample bound has legal actions") as caught:
        endpoint("http://127.0.0.1:9/v1").column(samples, 0)
    assert caught.value.samples == ("bound",)
    known = dataclasses.replace(samples, reference=np.zeros(len(samples.tokens)))
    assert endpoint("http://127.0.0.1:9/v1").column(known, 0) is known.reference


def test_a_trainer_does_not_start_without_its_teacher(tmp_path: Path) -> None:
    setup = config(tmp_path, algorithm="opd", loss={"reference": "http://127.0.0.1:9/v1"})
    assert json.loads(setup.model_dump_json())["loss"]["reference"]["url"] == "http://127.0.0.1:9/v1"
    with pytest.raises(UsageError, match=r"the teacher at http://127.0.0.1:9/v1 does not answer: .* .start it, or cor"):
        TrainerService(setup)
