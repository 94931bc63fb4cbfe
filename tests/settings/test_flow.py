"""What flows to the trainer: columns that are filled while a batch is rolled out, and what samples weigh in it."""

from __future__ import annotations

import pytest
import yaml

from rollart.errors import SpecError
from rollart.settings.load import load_run
from tests.settings.test_stream import RUN, Write


def text(columns: list[str], *, kl: float = 0.1, baseline: str = "group", **more: object) -> str:
    domains = [d | {"advantage": {"baseline": baseline}} for d in RUN["domains"]]
    training = {"columns": columns, "loss": {"kl": kl}}
    return yaml.safe_dump(RUN | {"training": training, "domains": domains} | more)


def test_columns_stream_where_they_are_read_and_known(write: Write) -> None:
    both = ["ref_logprobs", "advantage"]
    assert load_run(write(text(both))).training.columns == both
    assert load_run(write(text(["ref_logprobs"], baseline="domain"))).training.columns == ["ref_logprobs"]
    assert load_run(write(text(["advantage"], kl=0.0, baseline="none"))).training.columns == ["advantage"]


@pytest.mark.parametrize(
    ("columns", "changes", "problem"),
    [
        (["advantage", "advantage"], {}, "training.columns is advantage, advantage (rule: each at most once)"),
        (["ref_logprobs"], {"kl": 0.0}, "has ref_logprobs (rule: with training.loss.kl above 0)"),
        (["advantage"], {"baseline": "domain"}, "group or none with advantage in training.columns"),
        (["advantage"], {"batch": {"sampler": "token_budget", "tokens": 99}}, "with batch.sampler token_budget"),
        (["reward"], {}, "training.columns.0"),
    ],
)
def test_what_no_column_can_be_is_refused(
    write: Write, columns: list[str], changes: dict[str, object], problem: str
) -> None:
    with pytest.raises(SpecError) as caught:
        load_run(write(text(columns, **changes)))  # type: ignore[arg-type]
    assert problem in caught.value.message


def test_age_decay_belongs_to_batches_by_deadline(write: Write) -> None:
    late = {"sampler": "deadline", "deadline_s": 5, "age_decay": 0.5}
    assert load_run(write(yaml.safe_dump(RUN | {"schedule": "rollart", "batch": late}))).batch.age_decay == 0.5
    with pytest.raises(SpecError, match="age_decay is given with sampler 'fifo'"):
        load_run(write(yaml.safe_dump(RUN | {"batch": {"age_decay": 0.5}})))
