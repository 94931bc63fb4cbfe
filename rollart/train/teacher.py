"""A reference policy behind a server with the OpenAI completions API: log-probabilities of the tokens of samples.

Two forms of the request are known. vLLM's has `prompt_logprobs`, whose answer names the ids of the tokens. Others
(SGLang, OpenAI's legacy API) return the prompt with `echo` and its `logprobs`, without ids. The server computes them
over its whole vocabulary, at temperature 1, in its own precision: they differ from those of the same weights in the
trainer by rounding, and from request to request if the server's batches do.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np

from rollart.errors import RollartError, TrainerError, UsageError, first_line
from rollart.settings.training import TeacherSpec
from rollart.train.batch import FloatArray, InvalidSamples, TrainingBatch
from rollart.train.ranks import Ranks
from serverless.retries import TEACHER, RetryPolicy

REQUEST_S = 600.0
"""Longest wait for an answer, seconds: a busy server queues long samples behind others."""

PROBED_TOKENS = 16
"""Tokens of the first request, spread over the vocabulary, with its last one."""

WORD_MARKS = "\u2581\u0120 \n"
"""Marks of a word's start, which servers show or leave out."""

REMEDY = "give training.loss.reference a model with the policy's tokenizer"


class _Refused(Exception):
    """The server answers, but not this request. A line with the status and the server's text."""


class _Unavailable(Exception):
    """The server does not answer, or is overloaded: another attempt may succeed."""


class _ScoredToken(NamedTuple):
    id: int | None
    """None where the answer has no ids."""
    logprob: float
    text: str | None


class TeacherEndpoint:
    """The reference policy of a KL penalty behind an endpoint. Thread-safe; calls run one at a time, each with up to
    `concurrency` requests. With several ranks, rank 0 asks."""

    def __init__(
        self,
        spec: TeacherSpec,
        vocab_size: int,
        tokenizer: str | None = None,
        *,
        ranks: Ranks | None = None,
        retries: RetryPolicy = TEACHER,
    ) -> None:
        """`tokenizer`: the policy's `tokenizer.json`, or a directory with it, to compare tokens with the teacher's."""
        self._spec, self._vocab_size, self._tokenizer = spec, vocab_size, tokenizer
        self._channel, self._retries = (ranks or Ranks()).torch, retries
        self._echo: bool | None = None
        """True for the form with `echo`; None before the first request."""
        self._lock = threading.Lock()
        self._name = f"the teacher at {spec.url}" + (f" ({spec.model})" if spec.model else "")

    def check(self) -> None:
        """Ask for a few tokens, in one attempt per form. `UsageError` if the server does not answer with their
        log-probabilities, or has other tokens than the policy."""
        with self._lock:
            if self._echo is None:
                self._echo = asyncio.run(self._probe())

    def logprobs(self, batch: TrainingBatch, version: int = 0) -> FloatArray:
        """Log-probability of every token [T], 0.0 for tokens without loss. `TrainerError` if the server stays away or
        cannot score a sample; `InvalidSamples` for samples with legal actions, which it cannot normalise over."""
        _refuse_legal_sets(batch)
        self.check()
        used = batch.used_lengths
        samples = np.flatnonzero(used > 0)
        starts = batch.offsets[samples]
        prompts = [batch.tokens[a : a + n + 1].tolist() for a, n in zip(starts, used[samples], strict=True)]
        with self._lock:
            scored = asyncio.run(self._score(prompts))
        out = np.zeros(len(batch.tokens), np.float64)
        for start, row in zip(starts, scored, strict=True):
            out[start : start + len(row)] = row
        return np.where(batch.mask, out, 0.0)

    def column(self, batch: TrainingBatch, version: int) -> FloatArray:
        """The same, taken from the batch if it contains them. All ranks call it, and have rank 0's values."""
        if batch.reference is not None:
            return batch.reference
        _refuse_legal_sets(batch)
        problem, found = None, None
        if self._channel.leads:
            try:
                found = self.logprobs(batch, version)
            except RollartError as error:
                problem = TrainerError(error.message, remedy=error.remedy)
        self._channel.agree(problem)
        shared: FloatArray = self._channel.exchange(found)[0]
        return shared

    async def _probe(self) -> bool:
        """True if the server needs the form with `echo`."""
        ids, texts = self._probed_tokens()
        refusal = ""
        async with self._session() as session:
            for echo in (False, True):
                try:
                    answer = await self._post(session, ids, echo=echo)
                    rows = _rows(answer, ids, echo=echo)
                except _Unavailable as error:
                    raise UsageError(
                        f"{self._name} does not answer: {error}", remedy="start it, or correct training.loss.reference"
                    ) from None
                except _Refused as error:
                    refusal = refusal or str(error)
                    continue
                if rows is None:
                    continue
                self._logprobs(ids, rows)
                for token, row, own in zip(ids[1:], rows, texts[1:], strict=True):
                    if own and row.text is not None and row.text.strip(WORD_MARKS) != own:
                        other = f"token {token} is {row.text!r}, and the policy's {own!r}"
                        raise UsageError(
                            f"{self._name} has another tokenizer: {other}",
                            remedy=REMEDY,
                        )
                return echo
        raise UsageError(
            f"{self._name} cannot score tokens of the policy up to {max(ids)}: "
            f"{refusal or 'its answer has no log-probabilities of the prompt'}",
            remedy=f"{REMEDY}, behind a server with prompt_logprobs (vLLM), or echo and logprobs",
        )

    def _probed_tokens(self) -> tuple[list[int], list[str]]:
        """Token ids, and each one's text where it is an ASCII word, which servers show alike."""
        count, known = self._vocab_size, None
        if self._tokenizer is not None:
            from tokenizers import Tokenizer

            path = Path(self._tokenizer)
            known = Tokenizer.from_file(str(path / "tokenizer.json" if path.is_dir() else path))
            count = min(count, known.get_vocab_size())  # a model's last rows may stand for no token
        ids = [*range(0, count - 1, -(-count // PROBED_TOKENS)), count - 1]
        texts = [("" if known is None else known.decode([i], skip_special_tokens=False)).strip() for i in ids]
        return ids, [text if text.isascii() and text.isalnum() else "" for text in texts]

    async def _score(self, prompts: Sequence[list[int]]) -> list[list[float]]:
        async with self._session() as session:
            try:
                async with asyncio.TaskGroup() as tasks:
                    asked = [tasks.create_task(self._score_one(session, ids)) for ids in prompts]
            except ExceptionGroup as group:
                raise group.exceptions[0] from None
            return [task.result() for task in asked]

    async def _score_one(self, session: aiohttp.ClientSession, ids: list[int]) -> list[float]:
        """Log-probability of each token; 0.0 for the first, which nothing precedes."""
        echo = bool(self._echo)
        try:
            answer = await self._retries.run(functools.partial(self._post, session, ids, echo=echo), _Unavailable)
        except _Unavailable as error:
            raise TrainerError(
                f"{self._name} does not answer: {error}, {self._retries.attempts} attempts in a row",
                remedy="start it again and resume the run",
            ) from None
        except _Refused as error:
            raise TrainerError(f"{self._name} refuses {len(ids)} tokens of a sample: {error}") from None
        rows = _rows(answer, ids, echo=echo)
        if rows is None:
            raise TrainerError(f"{self._name} did not answer with the log-probabilities of {len(ids)} tokens")
        try:
            return self._logprobs(ids, rows)
        except UsageError as error:
            raise TrainerError(error.message, remedy=error.remedy) from None

    def _logprobs(self, ids: Sequence[int], rows: Sequence[_ScoredToken]) -> list[float]:
        """The rows' log-probabilities; `UsageError` if they are of other tokens, or no numbers."""
        for token, row in zip(ids[1:], rows, strict=True):
            if row.id not in (None, token):
                raise UsageError(f"{self._name} answers with token {row.id}, asked for {token}", remedy=REMEDY)
            if not math.isfinite(row.logprob):
                raise UsageError(f"{self._name} gives token {token} the log-probability {row.logprob}", remedy=REMEDY)
        return [0.0, *(row.logprob for row in rows)]

    def _session(self) -> aiohttp.ClientSession:
        variable, headers = self._spec.token_env, {}
        if variable is not None:
            if not (token := os.environ.get(variable, "")):
                raise UsageError(
                    f"training.loss.reference: the trainer's environment has no variable {variable}",
                    remedy=f"export {variable}=…",
                )
            headers["Authorization"] = f"Bearer {token}"
        return aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=REQUEST_S),
            connector=aiohttp.TCPConnector(limit=self._spec.concurrency, force_close=True),
        )

    async def _post(self, session: aiohttp.ClientSession, ids: list[int], *, echo: bool) -> Any:
        body: dict[str, Any] = {"prompt": ids, "max_tokens": 1, "temperature": 1.0}
        body |= {"echo": True, "logprobs": 1} if echo else {"prompt_logprobs": 0}
        if self._spec.model is not None:
            body["model"] = self._spec.model
        try:
            async with session.post(f"{self._spec.url.rstrip('/')}/completions", json=body) as response:
                text, status = await response.text(errors="replace"), response.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _Unavailable(first_line(error)) from None
        if status != 200:
            kind = _Unavailable if status in (408, 429) or status >= 500 else _Refused
            raise kind(f"status {status}: {_message(text)}")
        try:
            return json.loads(text)
        except ValueError:
            raise _Refused(f"not JSON: {text[:80]!r}") from None


def _rows(answer: Any, ids: Sequence[int], *, echo: bool) -> list[_ScoredToken] | None:
    """One row per token after the first, which nothing precedes; None if the answer has no such rows."""
    count = len(ids)
    try:
        choice = answer["choices"][0]
        if echo:
            found = choice["logprobs"]
            values, texts = found["token_logprobs"][:count], found["tokens"][:count]
            rows = [_ScoredToken(None, float(v), t) for v, t in zip(values[1:], texts[1:], strict=True)]
        else:
            rows = [_vllm_row(row, token) for row, token in zip(choice["prompt_logprobs"], ids, strict=True) if row]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return None
    return rows if len(rows) == count - 1 else None


def _vllm_row(row: Mapping[str, Any], token: int) -> _ScoredToken:
    """The entry of the prompt's token, or that of another one in a row without it."""
    named = str(token) if str(token) in row else next(iter(row))
    return _ScoredToken(int(named), float(row[named]["logprob"]), row[named].get("decoded_token"))


def _refuse_legal_sets(batch: TrainingBatch) -> None:
    restricted = batch.loss.sample[batch.legal[batch.loss.position] > 0]
    if len(restricted):
        names = tuple(batch.ids[s] for s in np.unique(restricted))
        raise InvalidSamples(
            f"sample {names[0]} has legal actions, whose log-probabilities a teacher behind an endpoint gives over its "
            "whole vocabulary: give training.loss.reference a model's directory, or the domain free text",
            names,
        )


def _message(text: str) -> str:
    """The message of an error's body, in one line."""
    try:
        body = json.loads(text)
        error = body.get("error", body)
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, AttributeError):
        pass
    return " ".join(text.split())[:200] or "no text"
