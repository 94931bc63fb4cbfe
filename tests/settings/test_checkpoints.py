"""What a run must be for its best version to be found."""

from __future__ import annotations

import pytest

from rollart.errors import SpecError
from rollart.settings.load import load_run
from tests.settings.test_flow import text
from tests.settings.test_stream import Write


@pytest.mark.parametrize(
    ("best_by", "episodes", "problem"),
    [
        ("success", 0, "checkpoints.best_by is by success (rule: with evaluation.episodes above 0; or by `reward`)"),
        ("reward.nowhere", 0, "checkpoints.best_by is 'reward.nowhere' (rule: of an entry of `domains`"),
        ("loss", 0, "checkpoints.best_by"),
    ],
)
def test_a_best_version_that_no_step_can_find_is_refused(
    write: Write, best_by: str, episodes: int, problem: str
) -> None:
    with pytest.raises(SpecError) as caught:
        load_run(write(text([], checkpoints={"best_by": best_by}, evaluation={"episodes": episodes})))
    assert problem in str(caught.value)
