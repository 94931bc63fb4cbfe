"""Answers that depend on earlier calls are found by calling in two orders; those that do not are not."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.sim import loop as virtual
from serverless.history import HistoryDifference, find_differences, is_same, refusal
from serverless.providers.base import Reply
from serverless.spec import FunctionSpec
from serverless.types import FaultKind, InfraFault, Item, ModelFault, Outcome, Scored
from tests.serverless.support import item

SPEC = FunctionSpec(name="f", source="f.py", timeout_s=5.0, init_timeout_s=5.0)
CRASH = InfraFault(FaultKind.CRASH, retryable=False, detail="KeyError: 'x'")
LOST = InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail="gone")


def check(
    function: Callable[[dict[str, Any]], Any], items: Sequence[Item], *, call_s: float = 0.0, limit_s: float = 60.0
) -> tuple[int, list[HistoryDifference]]:
    """A function of one item that gives its score, an `error` or a fault of the whole call."""

    async def call(event: list[dict[str, Any]], deadline_s: float) -> Reply:
        await asyncio.sleep(min(call_s, deadline_s))
        if call_s > deadline_s:
            return Reply(fault=InfraFault(FaultKind.DEADLINE, retryable=False))
        (one,) = event
        given = function(one)
        if isinstance(given, InfraFault):
            return Reply(fault=given)
        answer = given if isinstance(given, dict) else {"aggregate_reward_score": given, "metrics_list": []}
        return Reply([{"id": one["id"], **answer}])

    found: tuple[int, list[HistoryDifference]] = virtual.run(find_differences(SPEC, items, call, limit_s=limit_s))
    return found


def items(n: int) -> list[Item]:
    return [item(f"i{k}", n=k) for k in range(n)]


@given(st.integers(1, 12))
def test_a_function_of_its_item_passes(n: int) -> None:
    assert check(lambda one: one["metadata"]["n"] / 3, items(n)) == (n, [])


@given(st.integers(1, 12))
def test_a_counter_is_found_in_every_item(n: int) -> None:
    count = itertools.count()
    twice, found = check(lambda one: next(count), items(n))
    assert (twice, len(found)) == (n, n)
    first = found[0]
    assert (first.first_call, first.second_call, first.calls) == (1, 2 * n, 2 * n)
    assert "i0: 0 as call 1 of" in str(first)


@given(st.integers(2, 12))
def test_the_influence_of_the_call_before_is_found(n: int) -> None:
    """A call twice in the same order would not show it."""
    before = [0]

    def function(one: dict[str, Any]) -> float:
        last, before[0] = before[0], one["metadata"]["n"] + 1
        return float(last)

    assert check(function, items(n))[1]


def test_a_memory_of_items_is_found() -> None:
    known: set[str] = set()

    def function(one: dict[str, Any]) -> float:
        new = one["id"] not in known
        known.add(one["id"])
        return float(new)

    assert len(check(function, items(3))[1]) == 3


def test_a_memo_without_effect_passes() -> None:
    known: dict[str, float] = {}
    assert check(lambda one: known.setdefault(one["id"], len(one["id"]) / 7), items(4)) == (4, [])


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (Scored(0.1), Scored(0.1 + 1e-9, {"seconds": 3.0}), True),
        (Scored(0.1), Scored(0.2), False),
        (Scored(1.0, steps=(0.5, 0.5)), Scored(1.0, steps=(0.4, 0.6)), False),
        (Scored(1.0, steps=(1.0,)), Scored(1.0, steps=None), False),
        (ModelFault(0.0, "cut"), ModelFault(0.0, "cut at 12"), True),
        (ModelFault(0.0, "cut"), ModelFault(-1.0, "cut"), False),
        (ModelFault(0.0, "cut"), Scored(0.0), False),
        (CRASH, Scored(0.0), False),
        (CRASH, CRASH, True),
        (LOST, Scored(0.0), True),
    ],
)
def test_what_a_trainer_gets_is_compared(first: Outcome, second: Outcome, same: bool) -> None:
    assert is_same(first, second) is same
    assert is_same(second, first) is same


def test_a_fault_of_the_platform_proves_nothing() -> None:
    count = itertools.count()
    assert check(lambda one: LOST if next(count) % 2 else 1.0, items(4)) == (0, [])
    crashed = {"error": {"type": "KeyError", "message": "x"}}
    assert check(lambda one: crashed, items(2)) == (0, []), "no item was answered"
    calls = itertools.count()
    assert len(check(lambda one: 1.0 if next(calls) < 2 else crashed, items(2))[1]) == 2


@given(st.integers(1, 30), st.floats(0.1, 4.0))
def test_a_check_ends_in_time_and_calls_what_fits_twice(n: int, call_s: float) -> None:
    calls = itertools.count()
    twice, found = check(lambda one: float(next(calls) < 0), items(n), call_s=call_s, limit_s=10.0)
    assert found == []
    assert next(calls) * call_s <= 10.0 + 1e-6
    assert twice >= min(n, int(5.0 / call_s)) - 1


def test_a_refusal_has_the_difference() -> None:
    count = itertools.count()
    error = refusal("exact", check(lambda one: next(count), items(2))[1])
    assert "item i0: 0 as call 1 of 4, 3 as call 4, in the reverse order (1 other items differ too)" in error.message
    assert "deterministic=False" in error.remedy
