"""How generations travel between an engine and its clients: `/inference/v1/generate` of vLLM, and the engine's stream.

Each format stands here with both of its directions: clients (`adapters.engines`) write requests and read answers, the
embedded engine reads requests and writes answers. `EngineError` (not retryable) names the invalid field of a request;
KeyError, TypeError, ValueError and AttributeError mean that an answer is not of this protocol.

Beside HTTP the embedded engine offers a stream (`rollart.framing`), whose port `GET /rollart/stream` names: an agent's
turn on a tiny model computes for less than 0.1 ms, an HTTP exchange costs several times that. All requests of one loop
iteration travel as one frame, and so do all answers of one step. A message is a list that starts with its kind:

    g  number, request_id, session, token_ids, max_tokens, temperature, top_p, seed, stop ids, allowed ids, cache_salt,
       kv_transfer_params; experts_from, if the experts are wanted (or nil); the adapter, if it names one
    G  the same, streamed: answered with p messages before the c
    a  request_ids to abort: they are answered with their tokens so far
    x  number of a cancelled request: it is not answered
    r  session to release
    p  number, token_ids, logprobs, version, stamp: the tokens drawn since the last p
    c  number, token_ids, logprobs, [[version, start, end, stamp]], finish, prompt_tokens, cached_tokens,
       kv_transfer_params; the experts of each token, if they are wanted and there are some
    e  number, error message, retryable, kind ("handoff" for unavailable KV)

Messages of one connection are handled in order; losing it aborts its requests. Answers carry a request's number, not
its id: a cancelled id may be sent again before its first answer arrives.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollart.errors import EngineError, HandoffFailed, WrongAnswer
from rollart.model import Completion, CompletionChunk, FinishReason, GenerateRequest, Sampling, VersionSpan

VLLM_PREFIX = "generate-tokens-"
"""vLLM prepends this to the ids of `/inference/v1/generate`, and aborts only ids with it: aborting the bare id does
nothing and reports success. For the embedded engine it is optional."""

SEED_MASK = 2**64 - 1
"""Seeds have 64 bits in a message; the engine reduces seeds modulo 2^64 anyway."""

MESSAGE_SAMPLING = ("max_tokens", "temperature", "top_p", "seed", "stop_token_ids", "allowed_token_ids")

RETRYABLE = {408, 409, 425, 429}
"""Client errors that may not recur on another engine or a later call. Server errors are retryable as well."""


def request_body(request: GenerateRequest) -> dict[str, object]:
    s = request.sampling
    sampling: dict[str, object] = {
        "max_tokens": s.max_tokens,
        "temperature": s.temperature,
        "top_p": s.top_p,
        "logprobs": 0,
        "seed": s.seed,
        "stop_token_ids": s.stop_token_ids or None,
        "allowed_token_ids": s.allowed_token_ids,
    }
    body: dict[str, object] = {
        "request_id": request.request_id,
        "token_ids": request.token_ids,
        "sampling_params": {name: value for name, value in sampling.items() if value is not None},
        "cache_salt": request.cache_salt,
        "kv_transfer_params": None if request.kv_transfer is None else dict(request.kv_transfer),
        "experts_from": request.experts_from,
        "model": request.adapter,
    }
    return {name: value for name, value in body.items() if value is not None}


def parse_request(body: object, *, session: str, fallback_id: str) -> GenerateRequest:
    """`session` is the X-Session-ID header; `fallback_id` is used for a request without an id. As with vLLM, `model`
    names an adapter."""
    if not isinstance(body, Mapping):
        raise _bad("the body must be a JSON object")
    sampling = body.get("sampling_params") or {}
    if not isinstance(sampling, Mapping):
        raise _bad("sampling_params must be an object")
    transfer = body.get("kv_transfer_params")
    if transfer is not None and not isinstance(transfer, Mapping):
        raise _bad("kv_transfer_params must be an object")
    salt, seed, allowed = body.get("cache_salt"), sampling.get("seed"), sampling.get("allowed_token_ids")
    adapter = body.get("model")
    return GenerateRequest(
        request_id=str(body.get("request_id") or fallback_id),
        session=session,
        token_ids=_ids(body.get("token_ids"), "token_ids"),
        sampling=Sampling(
            max_tokens=whole_number(sampling, "max_tokens", 16),
            temperature=_number(sampling, "temperature", 1.0),
            top_p=_number(sampling, "top_p", 1.0),
            seed=None if seed is None else whole_number(sampling, "seed", 0),
            stop_token_ids=_ids(sampling.get("stop_token_ids") or (), "stop_token_ids"),
            allowed_token_ids=None if allowed is None else _ids(allowed, "allowed_token_ids"),
        ),
        cache_salt=None if salt is None else str(salt),
        kv_transfer=transfer,
        experts_from=None if body.get("experts_from") is None else max(0, whole_number(body, "experts_from", 0)),
        adapter=None if adapter is None else str(adapter),
    )


def whole_number(values: Mapping[str, Any], name: str, default: int) -> int:
    """The field of a request's object; EngineError if it is no finite number."""
    value = _number(values, name, default)
    if not math.isfinite(value):
        raise _bad(f"{name} is {value!r}, it must be a finite number")
    return int(value)


def request_message(number: int, request: GenerateRequest) -> Sequence[object]:
    """The request as a message, streamed if it has `on_chunk`."""
    s = request.sampling
    return (
        "g" if request.on_chunk is None else "G",
        number,
        request.request_id,
        request.session,
        request.token_ids,
        s.max_tokens,
        s.temperature,
        s.top_p,
        None if s.seed is None else s.seed & SEED_MASK,
        s.stop_token_ids,
        s.allowed_token_ids,
        request.cache_salt,
        None if request.kv_transfer is None else dict(request.kv_transfer),
        *_optional(request.experts_from, request.adapter),
    )


def body_of_message(message: Sequence[Any]) -> tuple[int, str, dict[str, Any]]:
    """Number, session and body of a request that came as a message."""
    _, number, name, session, token_ids, *others = message
    sampling, (salt, transfer, *optional) = others[: len(MESSAGE_SAMPLING)], others[len(MESSAGE_SAMPLING) :]
    experts_from, adapter = [*optional, None, None][:2]
    return (
        number,
        str(session),
        {
            "request_id": name,
            "token_ids": token_ids,
            "cache_salt": salt,
            "kv_transfer_params": transfer,
            "experts_from": experts_from,
            "model": adapter,
            "sampling_params": dict(zip(MESSAGE_SAMPLING, sampling, strict=True)),
        },
    )


def _optional(*fields: object) -> Sequence[object]:
    """The fields at the end of a message, without those that are not given after the last that is."""
    given = [index for index, value in enumerate(fields) if value is not None]
    return fields[: given[-1] + 1] if given else ()


def completion_body(request_id: str, c: Completion) -> dict[str, Any]:
    """The response body of one finished request."""
    choice = _choice(c.token_ids, c.logprobs) | {"finish_reason": c.finish.value, "weight_versions": _spans(c)}
    choice |= _experts(c)
    return {"request_id": request_id, "choices": [choice], "usage": usage(c), "kv_transfer_params": c.kv_transfer}


def chunk_body(request_id: str, chunk: CompletionChunk, whole: Completion | None = None) -> dict[str, Any]:
    """One event of a streamed response; with `whole`, the last one with tokens. `weight_version` is the version of
    these tokens; vLLM reports versions only at the end."""
    choice = _choice(chunk.token_ids, chunk.logprobs) | {
        "finish_reason": None if whole is None else whole.finish.value,
        "weight_version": chunk.version,
        "weight_stamp": chunk.stamp,
    }
    if whole is not None:
        choice |= {"weight_versions": _spans(whole)} | _experts(whole)
    return {"request_id": request_id, "choices": [choice]}


def usage(c: Completion) -> dict[str, Any]:
    return {
        "prompt_tokens": c.prompt_tokens,
        "completion_tokens": len(c.token_ids),
        "total_tokens": c.prompt_tokens + len(c.token_ids),
        "prompt_tokens_details": {"cached_tokens": c.cached_tokens},
    }


def parse_completion(answer: Mapping[str, Any], first: int) -> Completion:
    """Inverse of `completion_body`. `first` is the version of a server whose version is not a number."""
    choice = answer["choices"][0]
    ids = tuple(choice["token_ids"])
    spans = _parse_spans(choice, first)
    prompt_tokens, cached_tokens = _parse_usage(answer.get("usage") or {})
    return Completion(
        token_ids=ids,
        logprobs=tuple(float(c["logprob"]) for c in choice["logprobs"]["content"]),
        spans=spans if spans is not None else (VersionSpan(first, 0, len(ids)),) if ids else (),
        finish=FinishReason(choice["finish_reason"]),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        kv_transfer=answer.get("kv_transfer_params"),
        experts=_parse_experts(choice),
    )


class CompletionAssembler:
    """Assembles a completion and emits its tokens as they arrive. `add` the data of every event, then `completion`.

    vLLM reports the versions that drew the tokens only with the last ones. Until then, tokens are labelled with the
    version that `version_source` returns at that moment (None: unknown). `first` is used for a server whose version is
    not a number."""

    def __init__(
        self,
        url: str,
        first: int,
        on_chunk: Callable[[CompletionChunk], None] | None,
        version_source: Callable[[], int | None],
    ) -> None:
        self._url, self._first, self._on_chunk, self._version_source = url, first, on_chunk, version_source
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: tuple[VersionSpan, ...] | None = None
        self._finish: FinishReason | None = None
        self._usage: Mapping[str, Any] = {}
        self._experts: tuple[bytes, ...] = ()

    def add(self, data: bytes) -> None:
        """EngineError for an error event; WrongAnswer for an invalid event."""
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
            if "error" in event:
                code = event["error"].get("code") if isinstance(event["error"], Mapping) else None
                raise parse_error(self._url, " while it generated", code if isinstance(code, int) else 500, data)
            self._usage = event.get("usage") or self._usage
            for choice in event["choices"]:
                self._add(choice)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise WrongAnswer(f"{self._url}: event not understood: {error!r}") from error

    def completion(self) -> Completion:
        """EngineError if the events ended before the completion did."""
        if self._finish is None:
            raise EngineError(f"{self._url}: the answer broke off", retryable=True, remedy="is the engine alive?")
        spans = self._spans
        if spans is None:
            version = self._version_source()
            known = self._first if version is None else version
            spans = (VersionSpan(known, 0, len(self._ids)),) if self._ids else ()
        counts = _parse_usage(self._usage)
        ids, logprobs = tuple(self._ids), tuple(self._logprobs)
        return Completion(ids, logprobs, spans, self._finish, *counts, experts=self._experts)

    def _add(self, choice: Mapping[str, Any]) -> None:
        ids = tuple(choice.get("token_ids") or ())
        logprobs = tuple(float(c["logprob"]) for c in (choice.get("logprobs") or {}).get("content") or ())
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} tokens with {len(logprobs)} log-probabilities")
        self._ids += ids
        self._logprobs += logprobs
        if choice.get("finish_reason") is not None:
            self._finish = FinishReason(choice["finish_reason"])
        spans = _parse_spans(choice, self._first)
        self._spans = self._spans if spans is None else spans
        self._experts = _parse_experts(choice) or self._experts
        if ids and self._on_chunk is not None and self._finish is None:
            named = choice.get("weight_version")
            version = self._version_source() if named is None else _parse_version(named, self._first)
            self._on_chunk(CompletionChunk(ids, logprobs, version, choice.get("weight_stamp")))


def completion_message(number: int, c: Completion) -> Sequence[object]:
    spans = [(s.version, s.start, s.end, s.stamp) for s in c.spans]
    counts = c.prompt_tokens, c.cached_tokens
    experts = (c.experts,) if c.experts else ()
    return ("c", number, c.token_ids, c.logprobs, spans, c.finish.value, *counts, c.kv_transfer, *experts)


def parse_completion_message(message: Sequence[Any]) -> Completion:
    _, _, token_ids, logprobs, spans, finish, prompt_tokens, cached_tokens, transfer, *experts = message
    versions = tuple(VersionSpan(*s) for s in spans)
    counts = prompt_tokens, cached_tokens
    every = tuple(experts[0]) if experts else ()
    return Completion(token_ids, logprobs, versions, FinishReason(finish), *counts, transfer, experts=every)


def chunk_message(number: int, chunk: CompletionChunk) -> Sequence[object]:
    return ("p", number, chunk.token_ids, chunk.logprobs, chunk.version, chunk.stamp)


def parse_chunk_message(message: Sequence[Any]) -> CompletionChunk:
    return CompletionChunk(*message[2:])


def error_body(error: EngineError, status: int) -> dict[str, Any]:
    """`kind` "handoff": this engine is fine, but the KV named in the request is unavailable."""
    message = {"message": str(error), "type": type(error).__name__, "code": status}
    return {"error": {**message, "retryable": error.retryable, "kind": _kind(error)}}


def parse_error(url: str, path: str, status: int, raw: bytes) -> EngineError:
    """The error of a failed response, with the server's own message and `retryable` flag if its JSON has them."""
    retryable, kind = status >= 500 or status in RETRYABLE, None
    try:
        error = json.loads(raw)["error"]
    except (ValueError, KeyError, TypeError):
        error = raw[:200].decode(errors="replace")
    if isinstance(error, Mapping):
        retryable, kind = bool(error.get("retryable", retryable)), error.get("kind")
        error = error.get("message", "")
    return _error(f"{url}{path} answered {status}: {' '.join(str(error).split())}", retryable, kind)


def error_message(number: int, error: EngineError) -> Sequence[object]:
    return ("e", number, str(error), error.retryable, _kind(error))


def parse_error_message(url: str, message: Sequence[Any]) -> EngineError:
    _, _, text, retryable, kind = message
    return _error(f"{url}: {text}", retryable, kind)


def _choice(token_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    tokens = [{"token_id": t, "logprob": p} for t, p in zip(token_ids, logprobs, strict=True)]
    return {"index": 0, "token_ids": token_ids, "logprobs": {"content": tokens}}


def _spans(c: Completion) -> list[dict[str, Any]]:
    return [{"version": s.version, "start": s.start, "end": s.end, "stamp": s.stamp} for s in c.spans]


def _parse_spans(choice: Mapping[str, Any], first: int) -> tuple[VersionSpan, ...] | None:
    if choice.get("weight_versions") is None:
        return None
    return tuple(
        VersionSpan(_parse_version(s["version"], first), s["start"], s["end"], s.get("stamp"))
        for s in choice["weight_versions"]
    )


def _experts(c: Completion) -> dict[str, Any]:
    """The field of a choice with the experts, if there are some: the tokens' bytes in a row, as base64."""
    if not c.experts:
        return {}
    return {"experts": {"token_bytes": len(c.experts[0]), "data": base64.b64encode(b"".join(c.experts)).decode()}}


def _parse_experts(choice: Mapping[str, Any]) -> tuple[bytes, ...]:
    if not (found := choice.get("experts")):
        return ()
    data, width = base64.b64decode(found["data"]), int(found["token_bytes"])
    return tuple(data[i : i + width] for i in range(0, len(data), width))


def _parse_version(value: object, first: int) -> int:
    """vLLM's versions are strings; before the first update the string is not a number, and `first` is returned."""
    return int(str(value)) if str(value).isdigit() else first


def _parse_usage(counts: Mapping[str, Any]) -> tuple[int, int]:
    """Prompt tokens, and cached ones of them."""
    return counts.get("prompt_tokens", 0), (counts.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _ids(value: object, name: str) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _bad(f"{name} must be a list of token ids")
    for token in value:
        if type(token) is not int:
            raise _bad(f"{name} holds {token!r}, which is not a token id")
        if not -(2**63) <= token < 2**63:
            raise _bad(f"{name} holds {token}, which is no 64-bit integer")
    return tuple(value)


def _number(values: Mapping[str, Any], name: str, default: float) -> float:
    value = values.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _bad(f"{name} is {value!r}, it must be a number")
    return value


def _bad(message: str) -> EngineError:
    return EngineError(message, retryable=False)


def _kind(error: EngineError) -> str:
    return "handoff" if isinstance(error, HandoffFailed) else "engine"


def _error(text: str, retryable: bool, kind: object) -> EngineError:
    return HandoffFailed(text) if kind == "handoff" else EngineError(text, retryable=retryable)
