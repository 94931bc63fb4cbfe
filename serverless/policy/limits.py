"""The adaptive time limit of an item, learned from correct answers to the same prompt. Pure.

RollPacker (arXiv 2509.21009), reward scheduler: T = min(max(T_min, factor * T_anchor), T_max), where T_anchor is the
longest time of a correct answer so far.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from serverless.keys import canonical, sha256
from serverless.types import Item, Scored

__all__ = ["AnchorTimes", "LimitPolicy", "prompt_key"]


@dataclass(frozen=True, slots=True)
class LimitPolicy:
    factor: float = 1.5
    min_s: float = 2.0
    max_s: float = 30.0
    correct: float = 1.0
    metric: str = "seconds"

    def limit(self, anchor_s: float | None) -> float:
        """Time limit of an item in seconds; the maximum before the first correct answer."""
        if anchor_s is None:
            return self.max_s
        return min(max(self.min_s, self.factor * anchor_s), self.max_s)


def prompt_key(item: Item) -> str:
    """The key of a prompt: metadata `group`, else a digest of the reference and of every message but the last
    assistant's ('' without a canonical form: all such items share one anchor)."""
    group = item.metadata.get("group")
    if isinstance(group, str | int):
        return str(group)
    messages: list[Mapping[str, str]] = list(item.messages)
    for position in range(len(messages) - 1, -1, -1):
        if messages[position].get("role") == "assistant":
            del messages[position]
            break
    try:
        return sha256(canonical([item.reference_answer, [dict(m) for m in messages]]))
    except (TypeError, ValueError):
        return ""


class AnchorTimes:
    """The time of the slowest correct answer by prompt. Bounds: an anchor never decreases, so a limit never does, and
    an answer no slower than a correct one to the same prompt is never cut (factor >= 1), up to `max_s`.

    Keeps `most` prompts; the one with the longest time since a correct answer is dropped first.
    """

    def __init__(self, policy: LimitPolicy, *, most: int = 100_000) -> None:
        self._policy = policy
        self._most = most
        self._slowest: OrderedDict[str, float] = OrderedDict()

    def limit(self, key: str) -> float:
        return self._policy.limit(self._slowest.get(key))

    def learn(self, key: str, outcome: Scored, seconds: float) -> None:
        """Record a correct answer. `seconds` is the duration of the call, used if the function reports no time of the
        item: the longer of the two, so the limit errs on the long side."""
        if outcome.value < self._policy.correct:
            return
        took = max(0.0, outcome.metrics.get(self._policy.metric, seconds))
        self._slowest[key] = max(self._slowest.get(key, 0.0), took)
        self._slowest.move_to_end(key)
        if len(self._slowest) > self._most:
            self._slowest.popitem(last=False)
