"""Trust in engines: validation of their responses on arrival with a score per engine, and a circuit breaker for prefill
engines whose hand-offs fail.

Both are independent of the engine's own health check: a process that passes it may still compute nonsense.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollart.model import Completion, FinishReason, Sampling, VersionSpan

ROUNDING = 1e-3
"""Log-probabilities above 0 by less than this are rounding errors of a certain token; the trainer allows as much."""

WRONG_ANSWERS = 3.0
"""An engine is restarted at this many wrong answers, net of the credit for right ones."""

LEAST_GOOD_SHARE = 0.95
"""An engine with a smaller share of right answers is eventually restarted. An engine with a larger share is not; its
wrong answers cost only their own turns."""


@dataclass(slots=True)
class EngineTrust:
    """Wrong answers of one engine since it started, net of the credit for right answers."""

    wrong: float = 0.0

    def right(self) -> None:
        self.wrong = max(0.0, self.wrong - (1 - LEAST_GOOD_SHARE))

    def failed(self) -> bool:
        """Count one wrong answer. True if the engine must be restarted before its next request."""
        self.wrong += 1.0
        return self.wrong >= WRONG_ANSWERS


def wrong_answer(
    answer: Completion, sampling: Sampling, *, vocab: int | None = None, versions: tuple[int, int] | None = None
) -> str:
    """The defect that makes the answer unusable, or ''.

    `vocab` is the size of the model's vocabulary; None means that ids are not token ids (simulations) and are not
    checked. `versions` is the oldest and the newest version that may have sampled the answer; None allows any version
    from 0 on.
    """
    ids = answer.token_ids
    if not ids and answer.finish is not FinishReason.ABORT:
        return f"no tokens, and it ended with '{answer.finish}'"
    counts = (answer.prompt_tokens, answer.cached_tokens)
    if set(map(type, counts)) != {int} or min(counts) < 0:
        return f"usage {counts} (rule: whole numbers of tokens, at least 0)"
    if vocab is not None and len(ids) > sampling.max_tokens:
        return f"{len(ids)} tokens (rule: at most the {sampling.max_tokens} that were asked for)"
    return (
        wrong_tokens(ids, answer.logprobs, vocab)
        or _not_allowed(ids, sampling, vocab)
        or _wrong_spans(answer.spans, len(ids), versions)
    )


def wrong_tokens(ids: Sequence[int], logprobs: Sequence[float], vocab: int | None) -> str:
    """As `wrong_answer`, for the tokens alone."""
    if len(logprobs) != len(ids):
        return f"{len(logprobs)} log-probabilities for {len(ids)} tokens"
    if not ids:
        return ""
    if not set(map(type, logprobs)) <= {float, int} or not all(map(math.isfinite, logprobs)):
        bad = next(p for p in logprobs if type(p) not in (float, int) or not math.isfinite(p))
        return f"a log-probability of {bad!r} (rule: finite)"
    if max(logprobs) > ROUNDING:
        return f"a log-probability of {max(logprobs):g} (rule: at most 0)"
    if set(map(type, ids)) != {int}:
        return f"token id {next(t for t in ids if type(t) is not int)!r} (rule: a whole number)"
    if vocab is not None and not 0 <= min(ids) <= max(ids) < vocab:
        return f"token id {next(t for t in ids if not 0 <= t < vocab)} (rule: below the vocabulary's size, {vocab})"
    return ""


def _not_allowed(ids: Sequence[int], sampling: Sampling, vocab: int | None) -> str:
    allowed = sampling.allowed_token_ids
    if vocab is None or allowed is None or set(ids) <= set(allowed):
        return ""
    return f"token id {next(t for t in ids if t not in allowed)} (rule: one of the {len(allowed)} that were allowed)"


def _wrong_spans(spans: Sequence[VersionSpan], tokens: int, versions: tuple[int, int] | None) -> str:
    at = 0
    for span in spans:
        if set(map(type, (span.version, span.start, span.end))) != {int} or span.start != at or span.end < at:
            return f"versions of tokens {span.start}..{span.end} after token {at} (rule: of each token in order)"
        oldest, newest = versions or (0, span.version)
        if not oldest <= span.version <= newest:
            return f"tokens of v{span.version} (rule: a version that was published, {oldest} to {newest} here)"
        at = span.end
    return "" if at == tokens else f"versions of {at} tokens for {tokens}"


IN_A_ROW = 3
"""Consecutive failed hand-offs that open the breaker: a single failure may be an expired lease or a lost packet."""

SHORTEST_S, LONGEST_S = 30.0, 300.0
"""The first and the longest back-off; each back-off is twice the previous one. The range spans a KV lease at one end
and a tolerable wait for a restart at the other."""


@dataclass(slots=True)
class HandoffCircuitBreaker:
    """The hand-offs of one engine. After a back-off the engine is tried again: the next failure doubles the back-off,
    and the next success resets the breaker."""

    failures: int = 0
    until: float = 0.0
    back_off_s: float = 0.0

    def open(self, now: float) -> bool:
        """True while the engine receives no hand-offs."""
        return now < self.until

    def failed(self, now: float, *, hopeless: bool = False) -> float | None:
        """Record a failure. Returns the back-off in seconds if the breaker opens now, else None. `hopeless` marks a
        failure that would repeat: the engine cannot hand over at all, so the breaker opens at once."""
        self.failures = max(self.failures + 1, IN_A_ROW if hopeless else 0)
        if self.failures < IN_A_ROW or self.open(now):
            return None
        self.back_off_s = min(max(2 * self.back_off_s, SHORTEST_S), LONGEST_S)
        self.until = now + self.back_off_s
        return self.back_off_s

    def succeeded(self) -> None:
        self.failures, self.until, self.back_off_s = 0, 0.0, 0.0
