"""What a run must be for its versions to be scored, and for the best one to be found."""

from __future__ import annotations

import pytest
import yaml

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


@pytest.mark.parametrize(
    ("condition", "problem"),
    [
        ({"metric": "approx_kl"}, "a threshold `above` or `below` (rule: exactly one)"),
        ({"metric": "approx_kl", "above": 1, "below": 0}, "a threshold `above` or `below` (rule: exactly one)"),
        ({"metric": "loss", "above": 1}, "stop_when.0.metric"),
        ({"metric": "success.nowhere", "above": 1}, "stop_when.0.metric is 'success.nowhere' (rule: of an entry"),
        ({"metric": "reference_kl", "above": 1}, "(rule: with training.loss.kl above 0)"),
        ({"metric": "held_out_success", "above": 0.9}, "(rule: with evaluation.episodes and evaluation.every)"),
        ({"metric": "zero_variance", "above": 0.9}, "(rule: with a domain whose group_size is above 1)"),
    ],
)
def test_a_stop_on_a_metric_that_the_run_lacks_is_refused(
    write: Write, condition: dict[str, object], problem: str
) -> None:
    domains = [d | {"group_size": 1, "advantage": {"baseline": "none"}} for d in RUN["domains"]]
    with pytest.raises(SpecError) as caught:
        load_run(write(yaml.safe_dump(RUN | {"domains": domains, "stop_when": [condition]})))
    assert problem in str(caught.value)
