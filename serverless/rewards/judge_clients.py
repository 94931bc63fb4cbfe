"""Asks a judge through the `openai` or `anthropic` client, and reads what came back: text, tokens, limits and faults.

The clients retry nothing (`max_retries=0`): the pipeline does, within its budget. Errors are values: `JudgeFailed`
carries the fault of the item. No message of a fault contains the key.

  401, 403            UNAVAILABLE, final: credentials
  429                 THROTTLED (rate) with the wait of its headers; final if the account's quota is used up
  408, 409, 5xx, 529  UNAVAILABLE, retryable, with the wait of `Retry-After`
  other 4xx           ENVIRONMENT, final: the request is wrong, and stays so
  no answer           TIMEOUT or UNAVAILABLE, retryable
  refused             BAD_ANSWER, final: the same text is refused again
  cut off, or not a   BAD_ANSWER, retryable where the judge samples
  verdict
"""

from __future__ import annotations

import datetime as dt
import email.utils
import importlib
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from serverless.errors import ExtraMissing
from serverless.types import FaultKind, InfraFault, Throttle, TokenUsage

URLS = {"openai": "https://api.openai.com/v1", "anthropic": "https://api.anthropic.com"}

_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:([\d.]+)s)?(?:([\d.]+)ms)?")
"""OpenAI's `x-ratelimit-reset-*`: 1h2m3.5s, 6ms."""

_DETAIL = 300
"""Characters of an endpoint's message that a fault keeps."""

_NO_QUOTA = frozenset({"insufficient_quota", "billing_hard_limit_reached", "billing_not_active"})


class JudgeFailed(Exception):
    """A request without a usable answer, as the fault of its item."""

    def __init__(self, fault: InfraFault) -> None:
        super().__init__(fault.detail)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """Settings of the requests. `structured`: how the form of the verdict is enforced."""

    api: str
    url: str
    model: str
    temperature: float | None
    max_tokens: int
    structured: str
    timeout_s: float
    extra: Mapping[str, Any]

    @property
    def endpoint(self) -> str:
        """Host and port of the API, without credentials."""
        return urlsplit(self.url or URLS[self.api]).netloc.rpartition("@")[2]

    @property
    def samples_vary(self) -> bool:
        """True if a repeated request may get another answer."""
        return self.temperature is None or self.temperature > 0.0


@dataclass(frozen=True, slots=True)
class JudgeReply:
    """An answered request. `text` is the verdict's JSON unless `fault` is why there is none; `hold_s`: the endpoint
    announced that it refuses requests for so long."""

    usage: TokenUsage
    text: str = ""
    fault: InfraFault | None = None
    hold_s: float = 0.0


class JudgeClient(Protocol):
    async def ask(self, system: str, user: str, schema: Mapping[str, Any]) -> JudgeReply:
        """Raises `JudgeFailed` for a request without an answer."""


def library(api: str) -> Any:
    """The imported client library of an API. Raises `ExtraMissing`."""
    try:
        return importlib.import_module(api)
    except ImportError:
        raise ExtraMissing(api, "judge") from None


def client(settings: JudgeSettings, key: str) -> JudgeClient:
    """A client with a key. Raises `ExtraMissing`."""
    return (_OpenAi if settings.api == "openai" else _Anthropic)(library(settings.api), settings, key)


class _OpenAi:
    """Chat completions, which every OpenAI-compatible server has."""

    def __init__(self, library: Any, settings: JudgeSettings, key: str) -> None:
        self._library, self._settings, self._key = library, settings, key
        url = settings.url or URLS["openai"]
        self._client = library.AsyncOpenAI(
            api_key=key or "none", base_url=url, max_retries=0, timeout=settings.timeout_s
        )

    async def ask(self, system: str, user: str, schema: Mapping[str, Any]) -> JudgeReply:
        settings = self._settings
        # OpenAI's own models refuse `max_tokens`; compatible servers know it longest.
        limit = "max_tokens" if settings.url else "max_completion_tokens"
        request: dict[str, Any] = {"model": settings.model, limit: settings.max_tokens}
        if settings.temperature is not None:
            request["temperature"] = settings.temperature
        if settings.structured == "schema":
            form = {"name": "verdict", "strict": True, "schema": dict(schema)}
            request["response_format"] = {"type": "json_schema", "json_schema": form}
        else:
            system = f"{system}\n\nAnswer with one JSON object of this schema and nothing else:\n{json.dumps(schema)}"
            if settings.structured == "json":
                request["response_format"] = {"type": "json_object"}
        request["messages"] = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        try:
            raw = await self._client.chat.completions.with_raw_response.create(**request, extra_body=settings.extra)
        except self._library.APIError as error:
            raise JudgeFailed(_failed(error, settings, self._key)) from None
        return read_openai(await _body(raw), raw.headers, settings)


class _Anthropic:
    """Messages with a forced tool, whose input is the verdict."""

    def __init__(self, library: Any, settings: JudgeSettings, key: str) -> None:
        self._library, self._settings, self._key = library, settings, key
        url = settings.url or URLS["anthropic"]
        self._client = library.AsyncAnthropic(
            api_key=key or "none", base_url=url, max_retries=0, timeout=settings.timeout_s
        )

    async def ask(self, system: str, user: str, schema: Mapping[str, Any]) -> JudgeReply:
        settings = self._settings
        tool = {"name": "verdict", "description": "Give the verdict.", "input_schema": dict(schema)}
        request: dict[str, Any] = {"model": settings.model, "max_tokens": settings.max_tokens, "system": system}
        extra = dict(settings.extra)
        if settings.temperature is not None:  # no argument of recent clients: not every model takes it
            extra["temperature"] = settings.temperature
        request |= {"tools": [tool], "tool_choice": {"type": "tool", "name": "verdict"}}
        messages = [{"role": "user", "content": user}]
        try:
            raw = await self._client.messages.with_raw_response.create(**request, messages=messages, extra_body=extra)
        except self._library.APIError as error:
            raise JudgeFailed(_failed(error, settings, self._key)) from None
        return read_anthropic(await _body(raw), raw.headers, settings)


async def _body(raw: Any) -> str:
    """The text of a raw response: an attribute or a coroutine function, by client and version."""
    text = raw.text() if callable(raw.text) else raw.text
    return str(await text) if inspect.isawaitable(text) else str(text)


def read_openai(body: str, headers: Mapping[str, str], settings: JudgeSettings) -> JudgeReply:
    """Read a chat completion. Raises `JudgeFailed` if it has another form."""
    try:
        answer = json.loads(body)
        counts, choices = answer.get("usage") or {}, answer["choices"]
        if counts and choices == []:  # content filters of compatible servers
            choices = [{"message": {}, "finish_reason": "content_filter"}]
        message, finish = choices[0]["message"], choices[0].get("finish_reason")
        details = counts.get("prompt_tokens_details") or {}
        cached, written = int(details.get("cached_tokens") or 0), int(details.get("cache_write_tokens") or 0)
        prompt, completion = int(counts.get("prompt_tokens", 0)), int(counts.get("completion_tokens", 0))
        refusal, text = message.get("refusal"), message.get("content")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise JudgeFailed(_other_form(body, settings)) from None
    usage = TokenUsage(
        settings.endpoint, settings.model, 1, max(0, prompt - cached - written), cached, written, completion
    )
    fault = None
    if refusal or finish == "content_filter":
        fault = _refused(refusal or "the content filter stopped it")
    elif finish == "length":
        fault = _cut(settings)
    elif not isinstance(text, str) or not text.strip():
        fault = nonsense("it is empty", settings)
    return JudgeReply(usage, text if isinstance(text, str) else "", fault, announced_hold_s(headers))


def read_anthropic(body: str, headers: Mapping[str, str], settings: JudgeSettings) -> JudgeReply:
    """Read a message. Raises `JudgeFailed` if it has another form."""
    try:
        answer = json.loads(body)
        counts, stop = answer.get("usage") or {}, answer.get("stop_reason")
        names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "output_tokens")
        prompt, cached, written, output = (int(counts.get(name) or 0) for name in names)
        inputs = [block["input"] for block in answer["content"] if block["type"] == "tool_use"]
        words = " ".join(block["text"] for block in answer["content"] if block["type"] == "text")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise JudgeFailed(_other_form(body, settings)) from None
    usage = TokenUsage(settings.endpoint, settings.model, 1, prompt, cached, written, output)
    fault = None
    if stop == "refusal":
        fault = _refused(words or "stop_reason is refusal")
    elif stop in ("max_tokens", "model_context_window_exceeded"):
        fault = _cut(settings)
    elif len(inputs) != 1:
        fault = nonsense(f"it has {len(inputs)} verdicts: {words[:_DETAIL]!r}", settings)
    text = json.dumps(inputs[0]) if len(inputs) == 1 else ""
    return JudgeReply(usage, text, fault, announced_hold_s(headers))


def nonsense(reason: str, settings: JudgeSettings) -> InfraFault:
    """The fault of an answer that is no verdict."""
    detail = f"the judge {settings.model} gave no verdict: {reason}"
    return InfraFault(FaultKind.BAD_ANSWER, retryable=settings.samples_vary, detail=detail)


def _refused(reason: str) -> InfraFault:
    return InfraFault(FaultKind.BAD_ANSWER, retryable=False, detail=f"the judge refused: {reason[:_DETAIL]}")


def _cut(settings: JudgeSettings) -> InfraFault:
    detail = f"the judge's answer was cut off at {settings.max_tokens} tokens: raise max_tokens"
    return InfraFault(FaultKind.BAD_ANSWER, retryable=settings.samples_vary, detail=detail)


def _other_form(body: str, settings: JudgeSettings) -> InfraFault:
    detail = f"{settings.endpoint} answered with another form than the {settings.api} API: {body[:100]!r}"
    return InfraFault(FaultKind.BAD_ANSWER, retryable=True, detail=detail)


def _failed(error: Any, settings: JudgeSettings, key: str) -> InfraFault:
    """The fault of a client's error, whose classes have the same names in both libraries."""
    status = getattr(error, "status_code", None)
    if status is None:
        late = type(error).__name__ == "APITimeoutError"
        detail = f"no answer of {settings.endpoint} in {settings.timeout_s:g} s (request_timeout_s)"
        if late:
            return InfraFault(FaultKind.TIMEOUT, retryable=True, detail=detail)
        cause = getattr(error, "__cause__", None) or error
        return InfraFault(
            FaultKind.UNAVAILABLE, retryable=True, detail=_without(f"{settings.endpoint}: {cause}", key)[:_DETAIL]
        )
    text = _without(_message(error.body) or str(error), key)[:_DETAIL]
    code = getattr(error, "code", None) or getattr(error, "type", None) or ""
    return fault_of_status(status, text, str(code), error.response.headers, settings)


def fault_of_status(
    status: int, text: str, code: str, headers: Mapping[str, str], settings: JudgeSettings
) -> InfraFault:
    """The fault of an error response, by the table above."""
    where = settings.endpoint
    if status in (401, 403):  # the endpoint's message may repeat parts of the key
        detail = f"credentials: {where} refused the key ({status}); check the secret that `key_env` names"
        return InfraFault(FaultKind.UNAVAILABLE, retryable=False, detail=detail)
    wait = retry_after_s(headers)
    if status == 429:
        if code in _NO_QUOTA:
            detail = f"credentials: the account's quota at {where} is used up: {text}"
            return InfraFault(FaultKind.UNAVAILABLE, retryable=False, detail=detail)
        held = wait if wait is not None else announced_hold_s(headers) or None
        detail = f"{where} refused the request (429): {text}"
        return InfraFault(FaultKind.THROTTLED, True, detail, Throttle.RATE, held)
    if status in (408, 409) or status >= 500:
        detail = f"{where} failed ({status}): {text}"
        return InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail=detail, retry_after_s=wait)
    detail = f"{where} does not accept the request ({status}): {text}"
    return InfraFault(FaultKind.ENVIRONMENT, retryable=False, detail=detail)


def retry_after_s(headers: Mapping[str, str], now: dt.datetime | None = None) -> float | None:
    """The wait that a response requests, from `retry-after-ms` or `retry-after` (seconds or an HTTP date)."""
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000.0
    given = headers.get("retry-after")
    seconds = _number(given)
    if seconds is not None or given is None:
        return seconds
    try:
        when = email.utils.parsedate_to_datetime(given)
    except (TypeError, ValueError):
        return None
    aware = when if when.tzinfo is not None else when.replace(tzinfo=dt.UTC)  # of the zone -0000
    return max(0.0, (aware - (now or dt.datetime.now(dt.UTC))).total_seconds())


def announced_hold_s(headers: Mapping[str, str], now: dt.datetime | None = None) -> float:
    """Seconds for which the endpoint announces to refuse requests: a limit has nothing left until its reset."""
    longest = 0.0
    for limit in ("requests", "tokens"):
        if _number(headers.get(f"x-ratelimit-remaining-{limit}")) == 0.0:
            longest = max(longest, _duration(headers.get(f"x-ratelimit-reset-{limit}", "")))
    for limit in ("requests", "tokens", "input-tokens", "output-tokens"):
        if _number(headers.get(f"anthropic-ratelimit-{limit}-remaining")) == 0.0:
            longest = max(longest, _until(headers.get(f"anthropic-ratelimit-{limit}-reset", ""), now))
    return longest


def _duration(text: str) -> float:
    """Seconds of OpenAI's form of a duration, or of a plain number of seconds; 0 for another text."""
    plain = _number(text)
    if plain is not None:
        return plain
    found = _DURATION.fullmatch(text.strip())
    if found is None or not any(found.groups()):
        return 0.0
    hours, minutes, seconds, milliseconds = (_number(part) or 0.0 for part in found.groups())
    return hours * 3600.0 + minutes * 60.0 + seconds + milliseconds / 1000.0


def _until(text: str, now: dt.datetime | None) -> float:
    """Seconds until an RFC 3339 time; 0 for another text."""
    try:
        when = dt.datetime.fromisoformat(text)
    except ValueError:
        return 0.0
    if when.tzinfo is None:
        return 0.0
    return max(0.0, (when - (now or dt.datetime.now(dt.UTC))).total_seconds())


def _number(text: str | None) -> float | None:
    """A finite number of at least 0."""
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if 0.0 <= number < 1e9 else None


def _message(body: object) -> str:
    """The message of an error body of either API: {"error": {"message"}} or {"message"}."""
    inner = body.get("error", body) if isinstance(body, Mapping) else None
    message = inner.get("message") if isinstance(inner, Mapping) else None
    return message if isinstance(message, str) else ""


def _without(text: str, key: str) -> str:
    return text.replace(key, "***") if key else text
