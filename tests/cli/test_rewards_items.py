"""What `rewards invoke` takes for an item, and what it refuses instead of scoring it 0."""

from __future__ import annotations

import pytest

from rollart.cli.rewards import call_event
from rollart.errors import UsageError


def test_the_short_form_of_cases_is_an_item() -> None:
    (item,) = call_event('{"prompt": "6*7?", "completion": "42", "reference_answer": "42"}')
    assert item["messages"] == [{"role": "user", "content": "6*7?"}, {"role": "assistant", "content": "42"}]
    assert item["id"] == "0"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"promt": "x", "completion": "y"}', "unknown key 'promt'"),
        ('{"id": "1"}', "both or neither"),
        ('{"messages": [], "completion": "y"}', "both or neither"),
        ("[1]", "item 0 is not an object"),
        ("{", "not JSON"),
    ],
)
def test_what_is_no_item_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call_event(text)
