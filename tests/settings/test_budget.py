"""A budget's notices and the tags of costs, as a spec gives them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rollart.settings.cluster import PoolSpec
from rollart.settings.run import BudgetSpec


def test_a_webhook_is_a_url_or_the_name_of_a_variable() -> None:
    for notify in ("https://hooks.slack.com/services/x", "SLACK_WEBHOOK"):
        assert BudgetSpec(usd=1.0, notify=notify).notify == notify
    assert BudgetSpec().warn_at == 0.8


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"notify": "SLACK_WEBHOOK"}, "notices are about a budget in dollars"),
        ({"usd": 1.0, "notify": "hooks.slack.com/x"}, "an http or https URL"),
        ({"usd": 1.0, "warn_at": 0}, "greater than 0"),
        ({"usd": 1.0, "warn_at": 80}, "less than or equal to 1"),
    ],
)
def test_what_no_notice_can_be_made_of_is_refused(given: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValidationError, match=rule):
        BudgetSpec.model_validate(given)


@pytest.mark.parametrize("tags", [{"month": "x"}, {"role": "x"}, {"team": ""}, {"a b": "x"}, {"team": 3}])
def test_a_tag_has_a_name_of_its_own_and_a_text(tags: dict[str, Any]) -> None:
    assert PoolSpec(name="p", count=1, tags={"team": "agents"}).tags == {"team": "agents"}
    with pytest.raises(ValidationError):
        PoolSpec.model_validate({"name": "p", "count": 1, "tags": tags})
