"""Reading answers: a number is only accepted if the function returned it for that item."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serverless import wire
from serverless.types import FaultKind, InfraFault, ModelFault, Scored
from tests.serverless.support import item

EVENT = wire.events([wire.encode(item(k)) for k in "abc"])


def read(*answers: Any) -> list[Any]:
    return wire.outcomes(list(answers), EVENT, deterministic=True)


def score(key: str, value: Any = 1.0, **more: Any) -> dict[str, Any]:
    return {"id": key, "aggregate_reward_score": value, **more}


def kinds(outcomes: list[Any]) -> list[Any]:
    return [o.kind if isinstance(o, InfraFault) else o for o in outcomes]


def test_answers_are_matched_by_id_in_any_order() -> None:
    assert read(score("c", 3), score("a", 1), score("b", 2)) == [Scored(1.0), Scored(2.0), Scored(3.0)]


def test_a_missing_or_doubled_answer_is_its_items_fault_only() -> None:
    bad = FaultKind.BAD_ANSWER
    assert kinds(read(score("a"), score("c"))) == [Scored(1.0), bad, Scored(1.0)]
    assert kinds(read(score("a"), score("b"), score("b"), score("c"))) == [Scored(1.0), bad, Scored(1.0)]


@pytest.mark.parametrize("stranger", [score("z"), {"aggregate_reward_score": 1.0}, 1.0, None, score(3)])  # type: ignore[arg-type]
def test_an_answer_to_no_item_discredits_all(stranger: Any) -> None:
    assert kinds(read(score("a"), score("b"), score("c"), stranger)) == [FaultKind.BAD_ANSWER] * 3


@pytest.mark.parametrize("body", [None, {}, 1.0, "text", {"errorMessage": "x"}])
def test_a_body_that_is_no_list_is_nobodys_score(body: object) -> None:
    assert kinds(wire.outcomes(body, EVENT, deterministic=True)) == [FaultKind.BAD_ANSWER] * 3


@pytest.mark.parametrize(
    "answer",
    [
        score("a", math.nan),
        score("a", math.inf),
        score("a", True),
        score("a", "1"),
        score("a", None),
        {"id": "a"},
        score("a", 10**400),
        score("a", step_rewards=[1.0, math.nan]),
        score("a", step_rewards=3),
        score("a", metrics_list=[{"name": "m", "value": math.nan}]),
        score("a", metrics_list=[{"value": 1}]),
        score("a", metrics_list={"m": 1}),
        score("a", metrics_list=["m"]),
        score("a", math.nan, model_fault="x"),
    ],
)
def test_what_is_not_a_number_is_not_a_score(answer: dict[str, Any]) -> None:
    assert kinds(wire.outcomes([answer], EVENT[:1], deterministic=True)) == [FaultKind.BAD_ANSWER]


def test_all_fields_are_read() -> None:
    answer = score("a", 0.5, metrics_list=[{"name": "m", "value": 2, "type": "Metric"}], step_rewards=[0, 0.5])
    assert wire.outcomes([answer], EVENT[:1], deterministic=True) == [Scored(0.5, {"m": 2.0}, (0.0, 0.5))]
    assert read(score("a", -1, model_fault="no answer"), score("b"), score("c"))[0] == ModelFault(-1.0, "no answer")
    error = {"id": "a", "error": {"type": "E", "message": "m", "kind": "throttled", "retryable": True}}
    assert read(error, score("b"), score("c"))[0] == InfraFault(FaultKind.THROTTLED, True, "E: m")
    assert read({"id": "a", "error": "broken"}, score("b"), score("c"))[0] == InfraFault(
        FaultKind.CRASH, False, "broken"
    )


def test_a_bad_answer_is_worth_a_retry_only_if_the_function_may_answer_otherwise() -> None:
    [sure] = wire.outcomes([], EVENT[:1], deterministic=True)
    [unsure] = wire.outcomes([], EVENT[:1], deterministic=False)
    assert isinstance(sure, InfraFault)
    assert isinstance(unsure, InfraFault)
    assert (sure.retryable, unsure.retryable) == (False, True)


def test_ids_are_made_unique_within_a_call() -> None:
    same = wire.events([wire.encode(item("x")) for _ in range(3)])
    assert [e["id"] for e in same] == ["x", "x#1", "x#2"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=5) | st.sampled_from(["a", "b"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["id", "aggregate_reward_score", "metrics_list", "step_rewards", "error", "model_fault", "x"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=30, deadline=None)
@given(JSON)
def test_no_answer_breaks_the_reader(body: object) -> None:
    outcomes = wire.outcomes(body, EVENT, deterministic=True)
    assert len(outcomes) == 3
    for outcome in outcomes:
        if isinstance(outcome, Scored):
            assert math.isfinite(outcome.value)
