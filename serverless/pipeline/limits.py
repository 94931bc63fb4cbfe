"""The adaptive time limit of an item, learned from correct answers to the same prompt. Pure.

RollPacker (arXiv 2509.21009), reward scheduler: T = min(max(T_min, factor * T_anchor), T_max), where T_anchor is the
longest time of a correct answer so far.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from serverless.keys import canonical, sha256
from serverless.pipeline.stages import LimitsSpec
from serverless.types import Item, Scored


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

    def __init__(self, settings: LimitsSpec, *, most: int = 100_000) -> None:
        self._settings = settings
        self._most = most
        self._slowest: OrderedDict[str, float] = OrderedDict()

    def limit(self, key: str) -> float:
        """Time limit of an item in seconds; the maximum before the first correct answer."""
        settings, anchor_s = self._settings, self._slowest.get(key)
        if anchor_s is None:
            return settings.max_s
        return min(max(settings.min_s, settings.factor * anchor_s), settings.max_s)

    def learn(self, key: str, outcome: Scored, seconds: float) -> None:
        """Record a correct answer. `seconds` is the duration of the call, used if the function reports no time of the
        item: the longer of the two, so the limit errs on the long side."""
        if outcome.value < self._settings.correct:
            return
        took = max(0.0, outcome.metrics.get(self._settings.metric, seconds))
        self._slowest[key] = max(self._slowest.get(key, 0.0), took)
        self._slowest.move_to_end(key)
        if len(self._slowest) > self._most:
            self._slowest.popitem(last=False)
