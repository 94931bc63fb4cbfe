"""Continuation of an interrupted completion on another engine.

The tokens drawn so far are appended to the prompt, and afterwards joined with the remainder of the completion.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from rollart.model import Completion, CompletionChunk, FinishReason, Sampling, VersionSpan

ODD = 6364136223846793005
"""Knuth's multiplier: consecutive seeds give unrelated random streams."""


def completion_from_chunks(pieces: Sequence[CompletionChunk]) -> Completion:
    """The received part of an interrupted completion, up to the first chunk whose version is unknown."""
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
    """Sampling for the remainder of a completion of which `sampled` tokens exist. The seed is changed: the same seed
    would repeat the random numbers of the beginning."""
    seed = None if sampling.seed is None else (sampling.seed * ODD + 1) & (2**63 - 1)
    return dataclasses.replace(sampling, max_tokens=sampling.max_tokens - sampled, seed=seed)


def join_completions(kept: Completion | None, rest: Completion) -> Completion:
    """The whole completion; tokens that were prefilled again are counted."""
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
        experts=kept.experts + rest.experts[len(kept.experts) :],
    )
