"""What a run must be for its versions to be scored, and for the best one to be found."""

from __future__ import annotations

import pytest

from rollart.errors import SpecError
from rollart.settings.load import load_run
from rollart.settings.resolve import concurrent_episodes
from tests.settings.test_flow import text
from tests.settings.test_stream import RUN, Write


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


def test_pass_at_k_needs_k_samples(write: Write) -> None:
    held_out = {"episodes": 4, "temperatures": [1.0], "samples": 4, "pass_at": [1, 8]}
    with pytest.raises(SpecError, match=r"pass_at has 8 \(rule: at most `samples`, 4\)"):
        load_run(write(text([], evaluation=held_out)))
    assert load_run(write(text([], evaluation=held_out | {"pass_at": []}))).evaluation.passes == (4,)


def test_environments_have_room_for_episodes_beside_the_rollout(write: Write) -> None:
    held_out = {"episodes": 2, "temperatures": [0.5, 1.0], "samples": 3}
    apart, beside = (
        concurrent_episodes(load_run(write(text([], evaluation=held_out | more)))) for more in ({}, {"every": 5})
    )
    assert apart.held_out == 2 * len(RUN["domains"]) * 7
    assert apart.most == max(apart.running, apart.held_out)
    assert beside.most == apart.running + apart.held_out
