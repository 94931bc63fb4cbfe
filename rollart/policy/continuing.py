"""An answer that goes on elsewhere: what was drawn of it becomes part of the prompt, and part of the answer again."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from rollart.model import Completion, CompletionChunk, FinishReason, Sampling, VersionSpan

__all__ = ["completion_from_chunks", "join_completions", "continuation_sampling"]

ODD = 6364136223846793005
"""Knuth's multiplier: seeds that follow each other have nothing in common."""


def completion_from_chunks(pieces: Sequence[CompletionChunk]) -> Completion:
    """What was told of an answer before it broke off, as far as it is known which version drew it."""
    pieces = list(itertools.takewhile(lambda piece: piece.version is not None, pieces))
    spans: list[VersionSpan] = []
    at = 0
    for piece in pieces:
        assert piece.version is not None
        end = at + len(piece.token_ids)
        if spans and spans[-1].version == piece.version:
            spans[-1] = VersionSpan(piece.version, spans[-1].start, end)
        elif end > at:
            spans.append(VersionSpan(piece.version, at, end))
        at = end
    ids = tuple(t for piece in pieces for t in piece.token_ids)
    logprobs = tuple(p for piece in pieces for p in piece.logprobs)
    return Completion(ids, logprobs, tuple(spans), FinishReason.ABORT)


def continuation_sampling(sampling: Sampling, sampled: int) -> Sampling:
    """For the rest of an answer of which `sampled` tokens are there. Of the same seed it would be drawn with the
    numbers that drew the beginning."""
    seed = None if sampling.seed is None else (sampling.seed * ODD + 1) & (2**63 - 1)
    return dataclasses.replace(sampling, max_tokens=sampling.max_tokens - sampled, seed=seed)


def join_completions(kept: Completion | None, rest: Completion) -> Completion:
    """The answer in one piece; what was prefilled anew counts."""
    if kept is None:
        return rest
    n = len(kept.token_ids)
    spans = list(kept.spans)
    for span in rest.spans:
        start = span.start + n
        if spans and spans[-1].version == span.version and spans[-1].end == start:
            spans[-1] = VersionSpan(span.version, spans[-1].start, span.end + n)
        else:
            spans.append(VersionSpan(span.version, start, span.end + n))
    return dataclasses.replace(
        rest,
        token_ids=kept.token_ids + rest.token_ids,
        logprobs=kept.logprobs + rest.logprobs,
        spans=tuple(spans),
        prompt_tokens=kept.prompt_tokens + rest.prompt_tokens,
        cached_tokens=kept.cached_tokens + rest.cached_tokens,
        output_tokens=kept.sampled + rest.sampled,
    )
