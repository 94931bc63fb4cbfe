"""A request inside the engine, its result, and the rules that refuse it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rollart.engine.cache import KvBlock
from rollart.errors import EngineError
from rollart.generation import parse_request, whole_number
from rollart.model import Completion, CompletionChunk, GenerateRequest


@dataclass(slots=True)
class EngineJob:
    """A request and its progress in the runner. `imported` is KV from another engine. `export` asks for the prompt's KV
    at the end (this engine prefills), `returns` for the KV of prompt and answer (this engine decodes). The peer is
    known to hold the first `peer_holds` tokens, whose KV need not be copied. `ends`: the session ends with this
    request, and its prefix is not kept. `on_chunk` is called with the new tokens after every step but the last;
    `shown` is the number of tokens emitted so far. `deliver` is called once, at the end."""

    request: GenerateRequest
    ignore_eos: bool = False
    imported: KvBlock | None = None
    export: bool = False
    returns: bool = False
    peer_holds: int = 0
    ends: bool = False
    on_chunk: Callable[[CompletionChunk], None] | None = None
    shown: int = 0
    deliver: Callable[[FinishedJob | EngineError], None] = lambda result: None
    prompt: npt.NDArray[np.int64] = field(init=False)
    allowed: npt.NDArray[np.int64] | None = field(init=False)
    slot: int = -1
    cached: int = 0
    logits: Tensor | None = None
    """Logits of the prompt's last token, `[vocab]`: imported from the peer, or to be exported to it."""
    spans: list[tuple[int, int, str]] = field(default_factory=list)
    """(version, index of its first token, stamp of its content), ascending."""

    def __post_init__(self) -> None:
        self.prompt = np.array(self.request.token_ids, np.int64)
        ids = self.request.sampling.allowed_token_ids
        self.allowed = None if ids is None else np.array(sorted(set(ids)), np.int64)


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """A finished request, with its KV if the request asked for it."""

    job: EngineJob
    completion: Completion
    kv: KvBlock | None = None


def parse_job(body: object, *, session: str, fallback_id: str) -> EngineJob:
    """The request of a body, with its hand-offs. Arguments and errors as for `parse_request`."""
    request = parse_request(body, session=session, fallback_id=fallback_id)
    assert isinstance(body, Mapping), "else it was refused"
    transfer = request.kv_transfer or {}
    decodes_elsewhere = bool(transfer.get("do_remote_decode"))
    # As with vLLM's `bidirectional_kv_xfer`: a decode engine offers the answer's KV to the prefill engine for the next
    # turn, unless the request disables it. A turn that was prefilled here does so on request.
    returns = bool(transfer.get("return_kv", session and transfer.get("do_remote_prefill")))
    return EngineJob(
        request,
        ignore_eos=bool((body.get("sampling_params") or {}).get("ignore_eos", False)),
        export=decodes_elsewhere,
        returns=returns and not decodes_elsewhere,
        ends=bool(transfer.get("session_ends")),
        peer_holds=max(0, whole_number(transfer, "remote_num_tokens", 0)),
    )


def refuse_invalid(job: EngineJob, *, vocab: int, context: int) -> None:
    """EngineError, not retryable, for a request that can never run on this model."""
    s, n = job.request.sampling, len(job.prompt)
    if n == 0:
        raise _refused("the prompt is empty")
    if n >= context:
        raise _refused(f"the prompt has {n} tokens, the engine's context is {context}", "start it with --max-context")
    _refuse_ids("prompt", job.prompt, vocab)
    if job.allowed is not None:
        if not len(job.allowed):
            raise _refused("allowed_token_ids is empty", "leave it out to allow every token")
        _refuse_ids("allowed_token_ids", job.allowed, vocab)
    if s.max_tokens < 1:
        raise _refused(f"max_tokens is {s.max_tokens}, it must be at least 1")
    if not (math.isfinite(s.temperature) and s.temperature >= 0.0):
        raise _refused(f"temperature is {s.temperature}, it must be a number of at least 0")
    if not 0.0 < s.top_p <= 1.0:
        raise _refused(f"top_p is {s.top_p}, it must be in (0, 1]")


def _refuse_ids(name: str, ids: npt.NDArray[np.int64], vocab: int) -> None:
    if ids.min() < 0 or ids.max() >= vocab:
        bad = int(ids[(ids < 0) | (ids >= vocab)][0])
        raise _refused(f"{name} holds token id {bad}, the vocabulary has {vocab}")


def _refused(message: str, remedy: str = "") -> EngineError:
    return EngineError(message, retryable=False, remedy=remedy)
