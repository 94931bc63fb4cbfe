"""The list form on the wire: items to events, answers to outcomes. Pure.

Event  `[{id, messages, reference_answer, metadata}]`
Answer `[{id, aggregate_reward_score, metrics_list: [{name, value, type}], step_rewards?, model_fault?, error?,
usage?}]` (the form of Amazon Nova and Bedrock RFT reward Lambdas, with four optional fields of ours).

`model_fault` is a reason and makes `aggregate_reward_score` the floor. `error` is `{type, message, kind?, retryable?,
throttle?, retry_after_s?}`. `usage` is a list of `TokenUsage` by its field names: tokens that the item cost elsewhere.
Invalid parts are `InfraFault(BAD_ANSWER)` for the items concerned: NaN, infinities, booleans and strings are
not scores, an id that was not asked for discredits the whole answer, a missing or doubled id only its item.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import msgpack

from serverless.types import FaultKind, InfraFault, Item, ModelFault, Outcome, Scored, Throttle, TokenUsage

WireItem = dict[str, Any]

_USAGE_FIELDS = frozenset(field.name for field in fields(TokenUsage))


def encode(item: Item) -> WireItem:
    return {
        "id": item.id,
        "messages": [dict(m) for m in item.messages],
        "reference_answer": item.reference_answer,
        "metadata": dict(item.metadata),
    }


def size(wire: WireItem) -> int:
    """Bytes of one item. Raises `TypeError`, `ValueError` or `OverflowError` if a value in it has no wire form."""
    return len(msgpack.packb(wire))


def events(wires: Sequence[WireItem]) -> list[WireItem]:
    """One call's event: ids are made unique within it (`id#n` for a repeated one)."""
    seen: set[str] = set()
    out: list[WireItem] = []
    for position, wire in enumerate(wires):
        if wire["id"] in seen:
            wire = {**wire, "id": f"{wire['id']}#{position}"}
        seen.add(wire["id"])
        out.append(wire)
    return out


def outcomes(body: object, event: Sequence[WireItem], *, deterministic: bool) -> list[Outcome]:
    """One outcome per item of the event, in its order, for any form of the answer."""
    retryable = not deterministic
    if not isinstance(body, list):
        return [_bad(f"the answer is {type(body).__name__}, not a list", retryable)] * len(event)
    asked = {wire["id"] for wire in event}
    answers: dict[str, list[dict[str, Any]]] = {}
    for answer in body:
        key = answer.get("id") if isinstance(answer, dict) else None
        if not isinstance(key, str) or key not in asked:
            return [_bad(f"an answer is for no item of the call: {answer!r:.80}", retryable)] * len(event)
        answers.setdefault(key, []).append(answer)
    found: list[Outcome] = []
    for wire in event:
        try:
            found.append(_one(answers.get(wire["id"], []), wire["id"]))
        except ValueError as error:
            found.append(_bad(str(error), retryable))
    return found


def usage(body: object) -> list[tuple[TokenUsage, bool]]:
    """The tokens that a call's answers report, each with True if its answer is no `error`. Entries of another form are
    not ours, and ignored."""
    if not isinstance(body, list):
        return []
    answers = [answer for answer in body if isinstance(answer, dict) and "usage" in answer]
    return [
        (used, "error" not in answer)
        for answer in answers
        if isinstance(answer["usage"], list)
        for used in map(_tokens, answer["usage"])
        if used is not None
    ]


def _tokens(entry: object) -> TokenUsage | None:
    if not isinstance(entry, dict) or entry.keys() - _USAGE_FIELDS:
        return None
    counts = {name: value for name, value in entry.items() if name not in ("endpoint", "model")}
    if any(type(value) is not int or not 0 <= value < 2**53 for value in counts.values()):
        return None
    return TokenUsage(str(entry.get("endpoint", ""))[:200], str(entry.get("model", ""))[:200], **counts)


def _one(answers: list[dict[str, Any]], key: str) -> Outcome:
    """Raises `ValueError` for an invalid answer."""
    if len(answers) != 1:
        raise ValueError(f"{len(answers)} answers for item {key}")
    answer = answers[0]
    if "error" in answer:
        return _error(answer["error"])
    value = _number(answer.get("aggregate_reward_score"))
    if value is None:
        raise ValueError(f"aggregate_reward_score is {answer.get('aggregate_reward_score')!r:.60}, not a number")
    if "model_fault" in answer:
        return ModelFault(floor=value, reason=str(answer["model_fault"]))
    metrics: dict[str, float] = {}
    entries = answer.get("metrics_list")
    if not isinstance(entries, list | None):
        raise ValueError(f"metrics_list is {type(entries).__name__}, not a list")
    for entry in entries or ():
        name = entry.get("name") if isinstance(entry, dict) else None
        number = _number(entry.get("value")) if isinstance(entry, dict) else None
        if not isinstance(name, str) or number is None:
            raise ValueError(f"a metric is {entry!r:.60}, not a name and a number")
        metrics[name] = number
    steps = answer.get("step_rewards")
    if steps is None:
        return Scored(value, metrics)
    numbers = [_number(step) for step in steps] if isinstance(steps, list) else [None]
    paid = tuple(number for number in numbers if number is not None)
    if len(paid) != len(numbers):
        raise ValueError("step_rewards is not a list of numbers")
    return Scored(value, metrics, paid)


def _number(value: object) -> float | None:
    """A finite number, else None; True is not accepted as 1.0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _error(error: object) -> InfraFault:
    """The fault of an exception in the function's code. Not retryable unless the function declares it: failed code
    fails again."""
    if not isinstance(error, dict):
        return InfraFault(FaultKind.CRASH, retryable=False, detail=str(error)[:500])
    kind = str(error.get("kind"))
    known = FaultKind(kind) if kind in set(FaultKind) else FaultKind.CRASH
    detail = f"{error.get('type', 'Error')}: {error.get('message', '')}"[:500]
    limit, wait = str(error.get("throttle")), _number(error.get("retry_after_s"))
    return InfraFault(
        known,
        retryable=error.get("retryable") is True,
        detail=detail,
        throttle=Throttle(limit) if limit in set(Throttle) else None,
        retry_after_s=None if wait is None else max(0.0, wait),
    )


def _bad(detail: str, retryable: bool) -> InfraFault:
    return InfraFault(FaultKind.BAD_ANSWER, retryable=retryable, detail=detail)
