"""Translation of vLLM's `/inference/v1/generate`: request bodies to `EngineJob`s, `Completion`s to response bodies.

No other module of the engine reads or writes these bodies. EngineError (not retryable) names the invalid field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollart.engine.jobs import EngineJob
from rollart.errors import EngineError, HandoffFailed
from rollart.model import Completion, CompletionChunk, GenerateRequest, Sampling

VLLM_PREFIX = "generate-tokens-"
"""vLLM prepends this to the ids of `/inference/v1/generate`, and aborts only ids with it. Here it is optional."""


def parse_job(body: object, *, session: str, fallback_id: str) -> EngineJob:
    """Parse one request. `session` is the X-Session-ID header; `fallback_id` is used for a request without an id."""
    if not isinstance(body, Mapping):
        raise _bad("the body must be a JSON object")
    sampling = body.get("sampling_params") or {}
    if not isinstance(sampling, Mapping):
        raise _bad("sampling_params must be an object")
    transfer = body.get("kv_transfer_params")
    if transfer is not None and not isinstance(transfer, Mapping):
        raise _bad("kv_transfer_params must be an object")
    salt = body.get("cache_salt")
    seed = sampling.get("seed")
    allowed = sampling.get("allowed_token_ids")
    request = GenerateRequest(
        request_id=str(body.get("request_id") or fallback_id),
        session=session,
        token_ids=_ids(body.get("token_ids"), "token_ids"),
        sampling=Sampling(
            max_tokens=_whole(sampling, "max_tokens", 16),
            temperature=_number(sampling, "temperature", 1.0),
            top_p=_number(sampling, "top_p", 1.0),
            seed=None if seed is None else _whole(sampling, "seed", 0),
            stop_token_ids=_ids(sampling.get("stop_token_ids") or (), "stop_token_ids"),
            allowed_token_ids=None if allowed is None else _ids(allowed, "allowed_token_ids"),
        ),
        cache_salt=None if salt is None else str(salt),
        kv_transfer=transfer,
    )
    decodes_elsewhere = bool(transfer and transfer.get("do_remote_decode"))
    # As with vLLM's `bidirectional_kv_xfer`: a decode engine offers the answer's KV to the prefill engine for the next
    # turn, unless the request disables it. A turn that was prefilled here does so on request.
    returns = bool(transfer and transfer.get("return_kv", session and transfer.get("do_remote_prefill")))
    return EngineJob(
        request,
        ignore_eos=bool(sampling.get("ignore_eos", False)),
        export=decodes_elsewhere,
        returns=returns and not decodes_elsewhere,
        ends=bool(transfer and transfer.get("session_ends")),
        peer_holds=max(0, _whole(transfer or {}, "remote_num_tokens", 0)),
    )


def completion_body(request_id: str, completion: Completion) -> dict[str, Any]:
    """The response body of one finished request."""
    c = completion
    return {
        "request_id": request_id,
        "choices": [
            {
                "index": 0,
                "token_ids": c.token_ids,
                "logprobs": {
                    "content": [{"token_id": t, "logprob": p} for t, p in zip(c.token_ids, c.logprobs, strict=True)]
                },
                "finish_reason": c.finish.value,
                "weight_versions": _spans(c),
            }
        ],
        "usage": usage(c),
        "kv_transfer_params": c.kv_transfer,
    }


def usage(c: Completion) -> dict[str, Any]:
    return {
        "prompt_tokens": c.prompt_tokens,
        "completion_tokens": len(c.token_ids),
        "total_tokens": c.prompt_tokens + len(c.token_ids),
        "prompt_tokens_details": {"cached_tokens": c.cached_tokens},
    }


def piece_body(request_id: str, piece: CompletionChunk, whole: Completion | None = None) -> dict[str, Any]:
    """One event of a streamed response; with `whole`, the last one with tokens. `weight_version` is the version of
    these tokens; vLLM reports versions only at the end."""
    tokens = [{"token_id": t, "logprob": p} for t, p in zip(piece.token_ids, piece.logprobs, strict=True)]
    choice: dict[str, Any] = {
        "index": 0,
        "token_ids": piece.token_ids,
        "logprobs": {"content": tokens},
        "finish_reason": None if whole is None else whole.finish.value,
        "weight_version": piece.version,
        "weight_stamp": piece.stamp,
    }
    if whole is not None:
        choice["weight_versions"] = _spans(whole)
    return {"request_id": request_id, "choices": [choice]}


def _spans(c: Completion) -> list[dict[str, Any]]:
    return [{"version": s.version, "start": s.start, "end": s.end, "stamp": s.stamp} for s in c.spans]


def error_body(error: EngineError, status: int) -> dict[str, Any]:
    """`kind` "handoff": this engine is fine, but the KV named in the request is unavailable."""
    kind = "handoff" if isinstance(error, HandoffFailed) else "engine"
    message = {"message": str(error), "type": type(error).__name__, "code": status}
    return {"error": {**message, "retryable": error.retryable, "kind": kind}}


def strip_prefix(request_id: str) -> str:
    """A request's id without vLLM's prefix, if it has one."""
    return request_id.removeprefix(VLLM_PREFIX)


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


def _whole(values: Mapping[str, Any], name: str, default: int) -> int:
    value = _number(values, name, default)
    if not math.isfinite(value):
        raise _bad(f"{name} is {value!r}, it must be a finite number")
    return int(value)


def _bad(message: str) -> EngineError:
    return EngineError(message, retryable=False)
