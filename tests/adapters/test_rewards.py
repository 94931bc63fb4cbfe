"""The rewarder over serverless: a domain's reward, its credit assignment, and that a fault is never a number."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.adapters.rewards.keeping import KeepingRewarder
from rollart.adapters.rewards.offload import OffloadRewarder, combine
from rollart.errors import UsageError
from rollart.ledger.kept import KeptScore
from rollart.model import (
    GroupId,
    InfraFault,
    ModelFault,
    Outcome,
    Purpose,
    Scored,
    Segment,
    SegmentKind,
    Trajectory,
    TrajectoryId,
    Turn,
    item_of,
)
from rollart.settings.run import DomainSpec, RewardUse
from rollart.sim import loop as virtual
from serverless.inline import InlineScorer
from serverless.pipeline.offload import Offload
from serverless.providers.simulated import Profile, SimulatedBackend
from serverless.types import FaultKind, Item
from tests.serverless.support import package


def use(function: str, weight: float = 1.0, pays: str = "last") -> RewardUse:
    return RewardUse(function=function, weight=weight, pays=pays)


def domain(*uses: RewardUse, env_weight: float = 0.0) -> DomainSpec:
    return DomainSpec.model_construct(name="lake", rewards=list(uses), env_reward_weight=env_weight)


def trajectory(tokens: tuple[int, ...] = (2, 1), env: tuple[float, ...] = (), **metadata: Any) -> Trajectory:
    """Turns with so many action tokens each, between observations; a turn may be split over two versions."""
    env = env or (0.0,) * len(tokens)
    segments, turns = [], []
    for n, count in enumerate(tokens):
        segments.append(Segment(SegmentKind.OBSERVATION if n else SegmentKind.PROMPT, n, (7, 8)))
        for part, version in ((count - count // 2, 3), (count // 2, 4)):
            if part:
                segments.append(Segment(SegmentKind.ACTION, n, (1,) * part, version, (-0.5,) * part))
        turns.append(Turn(n, f"o{n}", f"a{n}", ("t",) * count, env[n]))
    return Trajectory(
        TrajectoryId("t1"),
        GroupId("g"),
        "lake",
        0,
        Purpose.TRAIN,
        3,
        tuple(segments),
        tuple(turns),
        True,
        f"o{len(tokens)}",
        metadata,
    )


def test_an_item_is_the_conversation_and_how_it_went() -> None:
    item = item_of(trajectory(env=(0.0, 1.0), reference_answer=42, board="x"))
    assert item == Item(
        "t1",
        (
            {"role": "user", "content": "o0"},
            {"role": "assistant", "content": "a0"},
            {"role": "user", "content": "o1"},
            {"role": "assistant", "content": "a1"},
        ),
        "42",
        {
            "reference_answer": 42,
            "board": "x",
            "observations": ["o0", "o1", "o2"],
            "env_rewards": [0.0, 1.0],
            "action_tokens": ["t", "t", "t"],
            "success": True,
        },
    )
    assert item.completion == "a1"


def test_scores_are_weighted_and_paid_last_and_environment_rewards_at_their_turns() -> None:
    rewards = domain(use("a", 2.0), use("b", 0.5), env_weight=10.0)
    outcome = combine(trajectory((2, 3), (0.1, 0.2)), rewards, [Scored(1.0, {"m": 3.0}), Scored(-2.0)])
    assert outcome == Scored(
        pytest.approx(4.0),
        {"env_reward": pytest.approx(0.3), "a": 1.0, "a/m": 3.0, "b": -2.0},
        pytest.approx((0.0, 1.0, 0.0, 0.0, 3.0)),
    )


@pytest.mark.parametrize(
    ("steps", "paid"),
    [
        ((0.25, 0.5), (0.0, 0.25, 0.5 + 0.25)),
        ((0.1, 0.2, 0.3), (0.1, 0.2, 0.3 + 0.4)),
    ],
)
def test_step_rewards_are_paid_by_turn_or_by_token_and_their_rest_at_the_end(
    steps: tuple[float, ...], paid: tuple[float, ...]
) -> None:
    rewards = domain(use("pv", 1.0, "steps"))
    outcome = combine(trajectory((2, 1)), rewards, [Scored(1.0, {}, steps)])
    assert isinstance(outcome, Scored)
    assert outcome.steps == pytest.approx(paid)


@pytest.mark.parametrize("steps", [None, (), (1.0,), (1.0,) * 4])
def test_step_rewards_that_fit_nothing_are_a_bad_answer(steps: tuple[float, ...] | None) -> None:
    outcome = combine(trajectory((2, 1)), domain(use("pv", 1.0, "steps")), [Scored(1.0, {}, steps)])
    assert isinstance(outcome, InfraFault)
    assert outcome.kind is FaultKind.BAD_ANSWER


def test_a_function_that_pays_last_may_give_steps_of_any_length() -> None:
    outcome = combine(trajectory(), domain(use("a")), [Scored(1.0, {}, (1.0,) * 9)])
    assert isinstance(outcome, Scored)
    assert outcome.steps == (0.0, 0.0, 1.0)


def test_any_infrastructure_fault_is_the_whole_outcome() -> None:
    rewards = domain(use("a"), use("b"), use("c"), env_weight=1.0)
    crash, timeout = InfraFault(FaultKind.CRASH, False), InfraFault(FaultKind.TIMEOUT, True)
    assert combine(trajectory(), rewards, [ModelFault(0.0, "x"), timeout, crash]) == timeout


def test_a_model_fault_makes_the_whole_one_with_the_combined_floor() -> None:
    rewards = domain(use("a", 2.0), use("b", 1.0), env_weight=1.0)
    outcome = combine(trajectory(env=(0.0, 0.5)), rewards, [Scored(1.0), ModelFault(-1.0, "empty")])
    assert outcome == ModelFault(1.5, "b: empty")


@settings(max_examples=60, deadline=None)
@given(data=st.data(), tokens=st.lists(st.integers(0, 4), min_size=1, max_size=5).map(tuple))
def test_credits_add_up_to_the_value(data: Any, tokens: tuple[int, ...]) -> None:
    number = st.floats(-10.0, 10.0)
    terms, outcomes = [], []
    for n in range(data.draw(st.integers(0, 3))):
        pays = data.draw(st.sampled_from(["last", "steps"]))
        length = data.draw(st.sampled_from([len(tokens), sum(tokens)]))
        terms.append(use(f"f{n}", data.draw(number), pays))
        outcomes.append(Scored(data.draw(number), {}, tuple(data.draw(number) for _ in range(length))))
    env = tuple(data.draw(number) for _ in tokens)
    rewards = domain(*terms, env_weight=data.draw(number))
    outcome = combine(trajectory(tokens, env), rewards, outcomes)
    assert isinstance(outcome, Scored)
    assert outcome.steps is not None
    assert len(outcome.steps) == sum(tokens)
    if sum(tokens):
        assert sum(outcome.steps) == pytest.approx(outcome.value, abs=1e-6)


def rewarded(rewards: DomainSpec, *, profile: Profile | None = None, **metadata: Any) -> tuple[Outcome, float]:
    """Score one trajectory with two simulated functions, `value` and `length`; and the seconds it took."""
    packages = [package(name="value"), package(name="length")]
    functions = {"value": lambda s: s.metadata["value"], "length": lambda s: len(s.messages)}
    profiles = dict.fromkeys(functions, profile or Profile(cold_start_s=0.0, call_s=1.0, item_s=0.0))

    async def main() -> tuple[Outcome, float]:
        async with SimulatedBackend(functions, profiles=profiles) as backend, Offload(packages, backend) as offload:
            rewarder = OffloadRewarder(offload, [rewards])
            outcome = await rewarder.score(trajectory(**metadata), 30.0)
            return outcome, asyncio.get_running_loop().time()

    return virtual.run(main())


def test_the_functions_of_a_domain_are_called_at_once() -> None:
    outcome, seconds = rewarded(domain(use("value"), use("length", 0.5)), value=1.0)
    assert isinstance(outcome, Scored)
    assert outcome.value == 3.0
    assert seconds < 1.1


def test_a_domain_without_functions_is_paid_by_its_environment() -> None:
    outcome, seconds = rewarded(domain(env_weight=2.0))
    assert outcome == Scored(0.0, {"env_reward": 0.0}, (0.0, 0.0, 0.0))
    assert seconds == 0.0


def test_a_failed_function_is_a_value_and_no_number() -> None:
    outcome, _ = rewarded(domain(use("value"), use("length")))
    assert outcome == InfraFault(FaultKind.CRASH, False, "KeyError: 'value'")
    crashing = Profile(faults={FaultKind.CRASH: 1.0})
    outcome, _ = rewarded(domain(use("length")), profile=crashing)
    assert isinstance(outcome, InfraFault)


def test_metadata_that_cannot_travel_is_the_environments_fault() -> None:
    outcome, _ = rewarded(domain(use("value")), value=object())
    assert isinstance(outcome, InfraFault)
    assert outcome.kind is FaultKind.ENVIRONMENT


def test_a_reward_that_is_no_function_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match=r"'judge'.*functions: value, length"):
        rewarded(domain(use("judge")))


def reported(outcomes: dict[str, Outcome]) -> tuple[str, float | None, tuple[KeptScore, ...]]:
    """Trajectory, reward and scores that a run keeps of one trajectory with these outcomes."""
    found: list[tuple[str, float | None, tuple[KeptScore, ...]]] = []

    class Fixed(InlineScorer):
        def __init__(self, outcome: Outcome) -> None:
            self._outcome = outcome

        async def score(self, item: Item) -> Outcome:
            return self._outcome

    async def main() -> None:
        uses = [use(name, 2.0) for name in outcomes]
        offload = Offload([], SimulatedBackend({}))
        local = {name: Fixed(outcome) for name, outcome in outcomes.items()}

        def sink(*scored: Any) -> None:
            found.append(scored)

        rewarder = KeepingRewarder(offload, [domain(*uses)], local, versions={"a": "digest"}, sink=sink)
        await rewarder.score(trajectory(reference_answer="r"), 1.0)

    virtual.run(main())
    return found[0]


def test_the_outcomes_of_all_functions_are_kept() -> None:
    id_, value, scores = reported({"a": Scored(0.5), "b": ModelFault(-1.0, "no answer")})
    assert (id_, value) == ("t1", -1.0)
    assert [(s.function, s.version, s.weight, s.outcome) for s in scores] == [
        ("a", "digest", 2.0, Scored(0.5)),
        ("b", "", 2.0, ModelFault(-1.0, "no answer")),
    ]


def test_a_trajectory_without_a_reward_has_no_value() -> None:
    _, value, scores = reported({"a": Scored(0.5), "b": InfraFault(FaultKind.CRASH, retryable=False)})
    assert (value, len(scores)) == (None, 2)
