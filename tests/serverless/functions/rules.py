"""A rule: the completion's answer equals the reference."""

from __future__ import annotations

import re

from serverless.declare import reward
from serverless.types import Item, ModelFault, Scored

_MARKED = re.compile(r"<answer>(.*?)</answer>|\\boxed\{([^{}]*)\}|####\s*(.+)", re.DOTALL)
"""The marks of an answer in policies' instructions; the last mark counts, an unmarked completion is the answer
itself."""


@reward(memory_mb=128, timeout_s=5)
def exact_match(sample: Item) -> Scored | ModelFault:
    """1.0 if the answer is the reference up to case and white space, else 0.0. No completion is the policy's fault."""
    if sample.reference_answer is None:
        raise ValueError(f"item {sample.id} has no reference_answer to match")
    if not sample.completion.strip():
        return ModelFault(floor=0.0, reason="empty completion")
    marks = _MARKED.findall(sample.completion)
    answer = next(part for part in marks[-1] if part) if marks and any(marks[-1]) else sample.completion
    hit = _normal(answer) == _normal(sample.reference_answer)
    return Scored(float(hit), {"marked": float(bool(marks))})


def _normal(text: str) -> str:
    return " ".join(text.split()).casefold()
