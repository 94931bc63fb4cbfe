"""What the models say about themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from rollart.errors import UsageError
from rollart.settings.base import descriptions
from rollart.settings.cluster import ClusterFunctions
from rollart.settings.load import KINDS, json_schema
from rollart.settings.reference import nested_models, reference


def test_the_page_is_current() -> None:
    assert Path("docs/spec.md").read_text() == reference(), "python -m rollart.settings.reference > docs/spec.md"


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_is_described_and_nothing_else_is_allowed(kind: str) -> None:
    models: list[type[BaseModel]] = [KINDS[kind], *nested_models(KINDS[kind], set())]
    for model in models:
        if model is ClusterFunctions:  # it has keys of installed providers, and refuses others
            with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
                ClusterFunctions.model_validate({"no_such_provider": {}})
        else:
            assert model.model_config["extra"] == "forbid"
        assert all(descriptions(model).get(name) for name in model.model_fields), model
    assert json_schema(kind)["additionalProperties"] is False


def test_no_such_schema() -> None:
    with pytest.raises(UsageError, match="did you mean 'run'"):
        json_schema("rum")
