"""Rule reward: is the final answer the reference answer?

A handler on the list contract `[{id, messages, reference_answer, metadata}]` →
`[{id, aggregate_reward_score, metrics_list}]`. Stands alone: nothing but the standard library.
"""

from __future__ import annotations

from typing import Any

ANSWER_MARK = "="
STOP = "<eos>"


def handler(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """1.0 for each item whose answer matches, 0.0 otherwise."""
    return [_score(item) for item in items]


def _score(item: dict[str, Any]) -> dict[str, Any]:
    reference = item.get("reference_answer")
    if reference is None:
        raise ValueError(f"item {item['id']!r} has no reference_answer")
    value = float(_normal(_answer(item["messages"]), reference) == reference.strip().lower())
    return {
        "id": item["id"],
        "aggregate_reward_score": value,
        "metrics_list": [{"name": "exact_match", "value": value, "type": "Reward"}],
    }


def _answer(messages: list[dict[str, str]]) -> str | None:
    """The text after the last mark; None without a mark."""
    content = next((m["content"] for m in reversed(messages) if m["role"] == "assistant"), "")
    _, mark, tail = content.rpartition(ANSWER_MARK)
    return tail if mark else None


def _normal(answer: str | None, reference: str) -> str | None:
    """In lower case and without spaces; numbers of worked steps are dropped where the reference has none."""
    if answer is None:
        return None
    numbers = any(c.isdigit() for c in reference)
    words = answer.replace(STOP, "").split()
    return "".join(word for word in words if numbers or not word.isdigit()).lower()
