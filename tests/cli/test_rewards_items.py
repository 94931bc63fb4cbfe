"""What `rewards invoke` takes for an item, and what it refuses instead of scoring it 0."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollart.cli.rewards.operate import call_event
from rollart.errors import UsageError

Call = Callable[..., Any]


def test_the_short_form_of_cases_is_an_item() -> None:
    (item,) = call_event('{"prompt": "6*7?", "completion": "42", "reference_answer": "42"}')
    assert item["messages"] == [{"role": "user", "content": "6*7?"}, {"role": "assistant", "content": "42"}]
    assert item["id"] == "0"
    (item,) = call_event('{"id": "", "prompt": null, "completion": "42", "reference_answer": null}')
    assert (item["id"], item["messages"]) == ("0", [{"role": "assistant", "content": "42"}])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"promt": "x", "completion": "y"}', "unknown key 'promt'"),
        ('{"id": "1"}', "both or neither"),
        ('{"messages": [], "completion": "y"}', "both or neither"),
        ("[1]", "item 0 is not an object"),
        ("{", "not JSON"),
        ("[]", "no item in the list"),
        ('{"completion": 5}', r"item 0: completion is 5 \(rule: text\)"),
        ('{"completion": null}', "completion is null"),
        ('{"completion": "y", "prompt": []}', "prompt is .* text or null"),
        ('{"completion": "y", "id": 1}', "id is 1"),
        ('{"completion": "y", "metadata": null}', "metadata is null .* an object"),
        ('{"completion": "y", "reference_answer": 42}', "reference_answer is 42"),
        ('{"messages": {}}', "messages is {} .* a list"),
        ('{"messages": []}', "messages is empty"),
        ('{"messages": [{"role": "user", "content": 5}]}', r"messages\.0 is .* an object of texts"),
        ('[{"completion": "y"}, {"completion": "y", "id": "0"}]', "items 0 and 1 have the id '0'"),
    ],
)
def test_what_is_no_item_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call_event(text)


@pytest.mark.slow  # function workers are processes
def test_a_score_that_is_no_number_fails_its_item_in_strict_json(rollart: Call) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    Path("f.py").write_text(
        "from rollart import reward\n\n@reward\ndef f(sample):\n    return float(sample.completion)\n"
    )
    items = json.dumps([{"id": "a", "completion": "nan"}, {"id": "b", "completion": "0.5"}])
    for form in ("json", "text"):
        done = rollart("rewards", "invoke", "f.py", "--item", items, "-o", form)
        assert done.code == 1
        assert "1 of 2 items failed: a: bad_answer: aggregate_reward_score is nan, not a number" in done.err
        shown = json.loads(done.out, parse_constant=refuse)
        answers = shown["answer"] if form == "json" else shown
        assert [one["aggregate_reward_score"] for one in answers] == [None, 0.5]


@pytest.mark.slow  # function workers are processes
def test_a_hidden_state_is_refused_at_deployment_with_the_difference(rollart: Call) -> None:
    """Nothing is deployed. `test` warns of the same."""
    source = Path(__file__).parents[1] / "serverless" / "functions" / "hidden.py"
    Path("hidden.py").write_text(source.read_text())
    unchecked = rollart("rewards", "deploy", "hidden.py", "--dry-run")
    assert unchecked.code == 0, unchecked.err
    assert "not checked for dependence on earlier calls: there is no cases.jsonl" in unchecked.out
    lines = [{"id": f"c{n}", "completion": f"{n}"} for n in range(3)]
    Path("cases.jsonl").write_text("\n".join(map(json.dumps, lines)))
    refused = rollart("rewards", "deploy", "hidden.py")
    assert refused.code == 2
    assert "item c0: 1 as call 1 of 6, 6 as call 6, in the reverse order (2 other items differ too)" in refused.err
    assert json.loads(rollart("rewards", "list", "--json").out)["tables"]["functions"] == []
    assert "item c0: 1 as call 1 of 6" in rollart("rewards", "test", "hidden.py").out.replace("\n", " ")
    Path("hidden.py").write_text(source.read_text().replace("@reward(", "@reward(deterministic=False, "))
    assert rollart("rewards", "deploy", "hidden.py", "--dry-run").code == 0
