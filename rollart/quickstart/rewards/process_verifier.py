"""Process reward: which of the policy's tokens are the derivation's?

`metadata.action_tokens` has the policy's tokens, the stop token included; `metadata.derivation` has the tokens of the
worked answer. Every position is scored independently: credit up to the first error only was tried and does not learn,
because a policy that errs early would get no signal about the rest.
Self-contained: only the standard library.
"""

from __future__ import annotations

from typing import Any


def handler(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`step_rewards` has one number per action token: 1.0 where it is right (stopping right included), else 0.0.

    `aggregate_reward_score` is their sum; the metric `steps_right` is their share of the derivation.
    """
    return [_score(item) for item in items]


def _score(item: dict[str, Any]) -> dict[str, Any]:
    actions: list[str] = item["metadata"]["action_tokens"]
    derivation: list[str] = item["metadata"]["derivation"]
    if not derivation:
        raise ValueError(f"item {item['id']!r} has an empty derivation: its environment gives no worked steps")
    steps = [float(i < len(derivation) and token == derivation[i]) for i, token in enumerate(actions)]
    value = sum(steps) / len(derivation)
    return {
        "id": item["id"],
        "aggregate_reward_score": float(sum(steps)),
        "metrics_list": [{"name": "steps_right", "value": value, "type": "Metric"}],
        "step_rewards": steps,
    }
