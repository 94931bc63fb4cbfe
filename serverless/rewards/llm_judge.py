"""A ready-made reward: a language model judges the completion, by a rubric or against another answer.

    functions:
      - name: judge
        source: serverless.rewards.llm_judge
        handler: LlmJudge
        arguments:
          model: gpt-5-mini
          criteria:
            correct: The final answer is right and follows from the steps.
            clear: A reader of the field can follow each step.
          samples: 3

Any endpoint with OpenAI's chat completions or Anthropic's messages, through their own clients (extra `judge`).

Scored      0 to 1: the weighted mean of the criteria, each on its scale, or with `compare` the share of comparisons won
            (both orders, a tie is half); of several samples their mean, median or majority. Metrics: each criterion,
            `spread` (standard deviation of the samples), `position_bias` (share of pairs in which the orders disagree)
ModelFault  0.0 for an empty completion
InfraFault  no verdict: refused, cut off, not of the required form, throttled, unavailable, credentials. Never a score.
            If one sample has none, the item has none

Each answered request is on the bill (`serverless.usage`), the ones without a verdict too. Verdicts are cached by
content, that of the item and of these settings (`cache: false` for independent verdicts): members of a group with equal
completions get one verdict.

In a file of one's own, a subclass with settings:

    @reward(takes="item", requirements=("openai",), secrets=("JUDGE_API_KEY",), cache=True, hedge=False,
            stateless=True, timeout_s=45)
    class Judge(LlmJudge):
        def __init__(self):
            super().__init__(model="gpt-5-mini", criteria={"correct": "The final answer is right."})
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from serverless.declare import reward
from serverless.errors import SpecInvalid
from serverless.rewards.judge_clients import (
    URLS,
    JudgeClient,
    JudgeFailed,
    JudgeReply,
    JudgeSettings,
    client,
    library,
    nonsense,
)
from serverless.rewards.judging import (
    MAJORITY,
    MEAN,
    MEDIAN,
    Comparison,
    InvalidVerdict,
    Prompt,
    Rubric,
    aggregated,
    check_template,
    criteria_of,
)
from serverless.rewards.rate_limit import RateLimit, SharedLimit
from serverless.types import FaultKind, InfraFault, Item, ModelFault, Outcome, Scored, Throttle
from serverless.usage import record_tokens

_CHARACTERS_PER_TOKEN = 4.0
"""English text in the tokenizers of both APIs; the estimate is corrected by each answer's count."""

_ANSWER_TOKENS = 256
"""Expected tokens of a verdict with its reasons, which the request's own count replaces."""


@reward(
    memory_mb=1024,
    timeout_s=45.0,
    init_timeout_s=60.0,
    batch={"max_items": 8},
    deterministic=False,
    cache=True,
    hedge=False,
    stateless=True,
    requirements=("openai", "anthropic"),
    preload=("openai", "anthropic"),
    secrets=("JUDGE_API_KEY",),
)
class LlmJudge:
    """Owns a client and its rate limit. The items of a call are judged concurrently.

    model                its name at the endpoint
    api                  openai or anthropic: which API the endpoint has
    url                  its base URL; empty: the company's own
    key_env              the environment variable with the key (one of the function's `secrets`); empty: no key
    criteria, scale      the rubric: name: description, or a list of {name, description, weight, scale}
    compare              "reference" or "metadata.NAME" (a text or several): compare with these instead of scoring;
                         `criteria` then say what counts
    instructions         more for the system prompt
    template             the user's prompt: {question}, {completion}, {reference}, {metadata.NAME}; with `compare`
                         {first} and {second} in place of {completion}
    reasoning            let the judge give its reasons before its verdict
    samples, aggregate   verdicts per prompt, and how they become one: mean, median or majority
    temperature          None: the endpoint's own; 0 for the least spread
    max_tokens           of a verdict with its reasons; beyond it the verdict is cut off, a fault
    structured           schema (JSON schema), json (JSON object) or text, for endpoints of the openai API that do not
                         have the first; the verdict is checked in any case
    requests_per_minute, tokens_per_minute   the endpoint's limits, for this function's workers on one machine; 0: none
    wait_s               most seconds that an item waits here while others use these up; the caller waits longer. More
                         requests per item than a tenth of `requests_per_minute` are spread over the minute, within
                         `timeout_s` of the function
    request_timeout_s    for one request; `timeout_s` of the function is for a call with all of its items
    extra                more fields for the body of each request
    """

    def __init__(
        self,
        *,
        model: str,
        api: str = "openai",
        url: str = "",
        key_env: str = "JUDGE_API_KEY",
        criteria: Mapping[str, str] | Sequence[Mapping[str, Any]] = (),
        scale: Sequence[float] = (0, 10),
        compare: str = "",
        instructions: str = "",
        template: str = "",
        reasoning: bool = True,
        samples: int = 1,
        aggregate: str = MEAN,
        temperature: float | None = None,
        max_tokens: int = 1024,
        structured: str = "schema",
        requests_per_minute: float = 0,
        tokens_per_minute: float = 0,
        wait_s: float = 1.0,
        request_timeout_s: float = 30.0,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        _one_of("api", api, tuple(URLS))
        _one_of("aggregate", aggregate, (MEAN, MEDIAN, MAJORITY))
        _one_of("structured", structured, ("schema", "json", "text"))
        _within("samples", samples, 1, 100, whole=True)
        _within("max_tokens", max_tokens, 1, 1_000_000, whole=True)
        _within("requests_per_minute", requests_per_minute, 0, 1e9)
        _within("tokens_per_minute", tokens_per_minute, 0, 1e12)
        _within("wait_s", wait_s, 0, 600)
        _within("request_timeout_s", request_timeout_s, 0.01, 3600)
        if temperature is not None:
            _within("temperature", temperature, 0, 2)
        texts = {"url": url, "key_env": key_env, "compare": compare, "instructions": instructions, "template": template}
        for name, text in texts.items():
            if not isinstance(text, str):
                raise SpecInvalid(f"{name} is {text!r} (rule: a text)")
        if not isinstance(model, str) or not model:
            raise SpecInvalid(f"model is {model!r} (rule: the name of a model of the endpoint)")
        if url and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc):
            raise SpecInvalid(f"url is {url!r} (rule: an http or https URL)")
        rubric = criteria_of(criteria, scale)
        if compare:
            if compare != "reference" and not (compare.startswith("metadata.") and compare != "metadata."):
                raise SpecInvalid(f"compare is {compare!r} (rule: reference, or metadata.NAME)")
            check_template(template, ("question", "reference", "first", "second"), ("first", "second"))
            self._task: Rubric | Comparison = Comparison(compare, rubric, instructions, template, reasoning)
        else:
            if not rubric:
                raise SpecInvalid("no criteria", remedy="give `criteria`, or `compare` for comparisons")
            check_template(template, ("question", "completion", "reference"), ("completion",))
            self._task = Rubric(rubric, instructions, template, reasoning)
        self._schema = self._task.schema()
        self._samples, self._aggregate, self._wait_s = samples, aggregate, float(wait_s)
        self._settings = JudgeSettings(
            api, url, model, temperature, max_tokens, structured, float(request_timeout_s), dict(extra or {})
        )
        self._key_env = key_env
        self._limit = RateLimit(float(requests_per_minute), float(tokens_per_minute))
        self._shared: SharedLimit | None = None
        self._client: JudgeClient | None = None
        self._key = ""

    @property
    def needed_variables(self) -> dict[str, str]:
        """The environment variables without which no call is answered, by the argument that names them."""
        return {"key_env": self._key_env} if self._key_env else {}

    def load(self, artefacts: pathlib.Path) -> None:
        """Import the client's library before the first call. Raises `ExtraMissing`."""
        library(self._settings.api)

    async def __call__(self, item: Item) -> Outcome:
        if not item.completion.strip():
            return ModelFault(0.0, "empty completion")
        prompts = self._task.prompts(item)
        asked = [prompt for _ in range(self._samples) for prompt in prompts]
        estimates = [self._estimated(prompt) for prompt in asked]
        taken, waits = self._limited().take(*estimates, most_s=self._wait_s)
        if not taken:
            detail = f"the judge's own limit of requests or tokens per minute leaves none for {waits[0]:.3g} s"
            return InfraFault(FaultKind.THROTTLED, True, detail, Throttle.RATE, waits[0])
        # All of them: a request that is under way is paid for.
        calls = map(self._verdict, asked, estimates, waits)
        found = await asyncio.gather(*calls, return_exceptions=True)
        faults = [error.fault for error in found if isinstance(error, JudgeFailed)]
        if faults:  # the one that ends the item's attempts, else the longest wait
            return min(faults, key=lambda fault: (fault.retryable, -(fault.retry_after_s or 0.0)))
        verdicts: list[tuple[Prompt, dict[str, float]]] = []
        for prompt, verdict in zip(asked, found, strict=True):
            if isinstance(verdict, BaseException):
                raise verdict
            verdicts.append((prompt, verdict))
        size = len(prompts)
        samples = [self._task.score(verdicts[n : n + size]) for n in range(0, len(verdicts), size)]
        scores = [score for score, _ in samples]
        metrics = {name: statistics.fmean(own[name] for _, own in samples) for name in samples[0][1]}
        if self._samples > 1:
            metrics["spread"] = statistics.pstdev(scores)
        return Scored(aggregated(scores, self._aggregate), metrics)

    def _estimated(self, prompt: Prompt) -> float:
        """Tokens of a request and its answer."""
        characters = len(prompt.system) + len(prompt.user)
        return characters / _CHARACTERS_PER_TOKEN + min(_ANSWER_TOKENS, self._settings.max_tokens)

    async def _verdict(self, prompt: Prompt, estimate: float, wait_s: float) -> dict[str, float]:
        """Ask once, after `wait_s`. Raises `JudgeFailed`."""
        settings, limit = self._settings, self._limited()
        if wait_s > 0.0:
            await asyncio.sleep(wait_s)
        try:
            reply = await self._ready().ask(prompt.system, prompt.user, self._schema)
        except JudgeFailed as failed:
            limit.settle(estimate, 0.0)
            if failed.fault.kind is FaultKind.THROTTLED:
                limit.hold(failed.fault.retry_after_s or 0.0)
            raise
        self._note(reply, estimate, limit)
        if reply.fault is not None:
            raise JudgeFailed(reply.fault)
        try:
            return self._task.read(reply.text)
        except InvalidVerdict as error:
            raise JudgeFailed(nonsense(str(error), settings)) from None

    def _note(self, reply: JudgeReply, estimate: float, limit: SharedLimit) -> None:
        used = reply.usage
        record_tokens(used)
        prompt = used.input_tokens + used.cached_tokens + used.cache_write_tokens
        limit.settle(estimate, prompt + used.output_tokens)
        if reply.hold_s:
            limit.hold(reply.hold_s)

    def _ready(self) -> JudgeClient:
        """The client, a new one if the secret was rotated. Raises `JudgeFailed` without a key."""
        key = os.environ.get(self._key_env, "") if self._key_env else ""
        if self._key_env and not key:
            detail = f"credentials: the environment variable {self._key_env} is not set: name it in `secrets`"
            raise JudgeFailed(InfraFault(FaultKind.UNAVAILABLE, retryable=False, detail=detail))
        if self._client is None or key != self._key:
            self._client, self._key = client(self._settings, key), key
        return self._client

    def _limited(self) -> SharedLimit:
        """The rate limit, shared by the workers that run the same package on this machine."""
        if self._shared is None:
            root = os.environ.get("LAMBDA_TASK_ROOT")
            names = (self._settings.api, self._settings.endpoint, self._settings.model, self._key_env)
            digest = hashlib.sha256("\0".join(names).encode()).hexdigest()[:16]
            path = None if root is None else pathlib.Path(root).parent / f"judge-limit-{digest}"
            self._shared = SharedLimit(self._limit, path)
        return self._shared


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise SpecInvalid(f"{name} is {value!r} (rule: one of {', '.join(known)})")


def _within(name: str, value: object, low: float, high: float, *, whole: bool = False) -> None:
    fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not fits or not low <= value <= high:  # type: ignore[operator]
        kind = "a whole number" if whole else "a number"
        raise SpecInvalid(f"{name} is {value!r} (rule: {kind}, {low:g} to {high:g})")
