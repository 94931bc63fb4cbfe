"""What a run may ask of rollout: bounds, and where tail batching has its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollart.errors import SpecError
from rollart.settings.load import load_run
from rollart.settings.rules import quotas

Write = Callable[..., Path]
RUN = (Path(__file__).parent / "run.yaml").read_text()


def test_a_run_starts_no_more_than_it_needs_by_default(write: Write) -> None:
    rollout = load_run(write()).rollout
    assert (rollout.redundancy.groups, rollout.redundancy.size, rollout.redundancy.health) == (1.0, 1.0, False)
    assert rollout.tail_batching is None


def test_an_empty_mapping_asks_for_tail_batching_as_published(write: Write) -> None:
    run = load_run(write(RUN + "schedule: sync_plus\nrollout: {tail_batching: {}}\n"))
    assert run.rollout.tail_batching is not None
    assert (run.rollout.tail_batching.eta_prompts, run.rollout.tail_batching.eta_responses) == (1.25, 1.25)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rollout: {redundancy: {size: 0.5}}", "rollout.redundancy.size is 0.5 (rule: greater than or equal to 1"),
        ("rollout: {redundancy: {groups: 9}}", "rollout.redundancy.groups is 9 (rule: less than or equal to 4"),
        ("rollout: {redundancy: {size: 1.1}}", "rollout.redundancy.size is 1.1 (rule: at least 1.125 with groups of 8"),
        (
            "rollout: {lending: {}}",
            "rollout.lending is given under `schedule: async` with training.stream false (rule: sync",
        ),
        (
            "rollout: {parallelism: {quiet_steps: 0}}",
            "rollout.parallelism.quiet_steps is 0 (rule: greater than or equal",
        ),
        ("rollout: {concurrency: {start: 8, least: 9}}", "start is 8 (rule: least 9 <= start <= most 1024)"),
        ("rollout: {concurrency: {low: 0.95}}", "low is 0.95 (rule: below `high`, which is 0.95)"),
        ("rollout: {concurrency: {decrease: 1.0}}", "rollout.concurrency.decrease is 1.0 (rule: less than 1)"),
        ("rollout: {concurrency: {settle_s: 1.0}}", "settle_s is 1 (rule: at least interval_s, 5"),
        ("rollout: {prefetch: -1}", "rollout.prefetch is -1 (rule: 'auto' or greater than or equal to 0)"),
        ("rollout: {tail_batching: {eta: 2}}", "unknown key 'eta' in rollout.tail_batching"),
        ("rollout: {tail_batching: {}}", "given under `schedule: async` (rule: under sync or sync_plus"),
        ("schedule: one_off\nrollout: {tail_batching: {}}", "given under `schedule: one_off`"),
        (
            "schedule: sync\nrollout: {tail_batching: {}, redundancy: {size: 1.5}}",
            "given beside rollout.redundancy (rule: one of them",
        ),
        ("rollout: {filter: {zero_variance: 7}}", "rollout.filter.zero_variance is 7"),
        (
            "rollout: {filter: {max_additional_running_prompts: 4}}",
            "max_additional_running_prompts is 4 (rule: with zero_variance",
        ),
        (
            "schedule: sync\nrollout: {tail_batching: {}, filter: {zero_variance: true, "
            "max_additional_running_prompts: 4}}",
            "max_additional_running_prompts is 4 beside rollout.tail_batching (rule: 0",
        ),
    ],
)
def test_what_cannot_be_is_refused_at_its_place(write: Write, text: str, problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_run(write(RUN + text + "\n"))
    assert problem in caught.value.message
    assert "run.yaml:1" in caught.value.message, "the line of it"
    assert len(caught.value.message.splitlines()) == 1, "once"


def test_a_round_has_no_token_budget(write: Write) -> None:
    text = RUN.replace("trajectories: 16", "trajectories: 16\n  tokens: 1000")
    with pytest.raises(SpecError, match=r"with batch\.tokens 1000"):
        load_run(write(text + "schedule: sync\nrollout: {tail_batching: {}}\n"))


@pytest.mark.parametrize("schedule", ["sync", "sync_plus", "one_off"])
def test_a_schedule_of_whole_batches_has_no_token_budget_that_leaves_groups_behind(write: Write, schedule: str) -> None:
    text = RUN.replace("trajectories: 16", "trajectories: 16\n  tokens: 1000")
    with pytest.raises(
        SpecError, match=rf"batch\.tokens is 1000 under `schedule: {schedule}` \(rule: a schedule of whole"
    ):
        load_run(write(text + f"schedule: {schedule}\n"))
    even = text.replace("tokens: 1000", "tokens: 1000\n  sampler: token_budget")
    assert load_run(write(even + f"schedule: {schedule}\n")).batch.tokens == 1000
    assert load_run(write(text + "schedule: rollart\n")).batch.tokens == 1000


def test_only_what_has_no_advantage_is_filtered(write: Write) -> None:
    """A group of like rewards teaches something where its mean is not its baseline."""
    text = RUN.replace("max_tokens: 4", "max_tokens: 4\n    advantage: {baseline: none}")
    with pytest.raises(SpecError, match=r"domain 'lake' has advantage.baseline 'none' and group_size 8 \(rule: group"):
        load_run(write(text + "rollout: {filter: {zero_variance: true}}\n"))
    filtering = load_run(write(RUN + "rollout: {filter: {zero_variance: true}}\n")).rollout.filter
    assert (filtering.max_additional_running_prompts, filtering.max_refills, filtering.exhausted) == (0, 10.0, "fail")


TWO = RUN.replace(
    "functions:",
    """  - name: sums
    environment: tests.envs:Lake
    group_size: 8
    max_tokens: 4
    weight: 3
    rewards: [{function: exact}]
functions:""",
).replace("trajectories: 16", "trajectories: 64")


def test_floors_and_caps_hold_in_the_quotas_that_a_plan_is_made_for(write: Write) -> None:
    assert quotas(load_run(write(TWO))) == {"lake": 16, "sums": 48}
    capped = load_run(write(TWO.replace("weight: 3", "weight: 3\n    cap: 0.5")))
    assert quotas(capped) == {"lake": 32, "sums": 32}
    assert capped.fair
    assert not load_run(write(TWO)).fair
    assert load_run(write(TWO + "rollout: {fairness: {}}\n")).fair


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("weight: 3", "floor: 0.7\n    cap: 0.5", "domain 'sums' has floor 0.7 (rule: at most its cap, 0.5)"),
        ("max_tokens: 4", "max_tokens: 4\n    floor: 0.6", "floors add up to 1.2, their caps to 2 (rule: 1 lies"),
        ("weight: 3", "group_size: 4\n    cap: 0.5", "(rule: one group_size in all domains, where these have [4, 8])"),
        ("trajectories: 64", "trajectories: 64\n  tokens: 9000", "(rule: no token budget)"),
    ],
)
def test_shares_that_cannot_be_are_refused(write: Write, old: str, new: str, problem: str) -> None:
    text = TWO + "rollout: {fairness: {slack: 0.25}}\n"
    if "group_size" in new:
        head, tail = text.split("- name: sums")
        text = head + "- name: sums" + tail.replace("    group_size: 8\n", "")
    with pytest.raises(SpecError) as caught:
        load_run(write(text.replace(old, new)))
    assert problem in caught.value.message


def test_members_of_a_group_are_tasks_of_their_own_by_default(write: Write) -> None:
    assert load_run(write()).rollout.replication
    assert not load_run(write(RUN + "rollout: {replication: false}\n")).rollout.replication
