"""The Rewarder over serverless: a trajectory becomes an item, several functions' outcomes become one.

The reward of a trajectory is
  Σ weight x score of its domain's functions + env_reward_weight x Σ rewards of the environment.
Every part of it is credited to an action token, so the per-token rewards of a scored trajectory always add up to its
value:
  environment               each turn's reward at the turn's last action token
  a function, pays "last"   at the trajectory's last action token
  a function, pays "steps"  at the tokens of its `step_rewards` (one per turn, or one per action token: the length
                            decides, turns first), and the rest of its score at the last action token
The reward of a turn without action tokens is credited to the last action token before it (else to the first).

Functions that keep state run in this process, one call at a time; all others are offloaded.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from rollart.errors import UsageError
from rollart.model import InfraFault, Item, ModelFault, Outcome, Scored, SegmentKind, Trajectory, item_of
from rollart.settings.run import DomainSpec, RewardUse
from serverless.inline import InlineScorer
from serverless.spec import FunctionSpec
from serverless.types import FaultKind


class RewardCalls(Protocol):
    """The calls of functions: an `Offload`, or one with a check before it."""

    @property
    def functions(self) -> Mapping[str, FunctionSpec]: ...

    async def submit(self, function: str, item: Item, deadline_s: float) -> Outcome: ...


class OffloadRewarder:
    """Implements `Rewarder`. Any number of tasks may call `score`, each waits for its own functions.

    The functions of a domain are called concurrently: those in `local` in this process, all others by `offload`. An
    InfraFault of any is the whole outcome, never a number (the first in the domain's order, if several); a ModelFault
    of any makes the whole a ModelFault, whose floor is the combined value with that function's floor as its score.
    """

    def __init__(
        self, offload: RewardCalls, domains: Iterable[DomainSpec], local: Mapping[str, InlineScorer] | None = None
    ) -> None:
        self._offload, self._local = offload, local or {}
        self._domains = {domain.name: domain for domain in domains}
        functions = dict.fromkeys((*offload.functions, *self._local))
        for domain in self._domains.values():
            for use in domain.rewards:
                if use.function not in functions:
                    known = ", ".join(functions) or "none"
                    raise UsageError(
                        f"domain {domain.name} is rewarded by {use.function!r}, which is no function",
                        remedy=f"functions: {known}",
                    )

    async def score(self, trajectory: Trajectory, deadline_s: float) -> Outcome:
        domain = self._domains.get(trajectory.domain)
        if domain is None:
            raise UsageError(f"no rewards are planned for domain {trajectory.domain!r}")
        if not domain.rewards:
            return combine(trajectory, domain, [])
        item = item_of(trajectory)
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(self._submit(use.function, item, deadline_s)) for use in domain.rewards]
        return self._combined(trajectory, domain, item, [call.result() for call in calls])

    def _combined(self, trajectory: Trajectory, domain: DomainSpec, item: Item, outcomes: Sequence[Outcome]) -> Outcome:
        return combine(trajectory, domain, outcomes)

    async def _submit(self, function: str, item: Item, deadline_s: float) -> Outcome:
        """See `Offload.submit`. The deadline of a local function covers its wait for its turn and its awaits."""
        scorer = self._local.get(function)
        if scorer is None:
            return await self._offload.submit(function, item, deadline_s)
        try:
            async with asyncio.timeout(deadline_s):
                return await scorer.score(item)
        except TimeoutError:
            detail = f"no outcome of {function} in {deadline_s:g} s"
            return InfraFault(FaultKind.DEADLINE, retryable=False, detail=detail)


def combine(trajectory: Trajectory, domain: DomainSpec, outcomes: Sequence[Outcome]) -> Outcome:
    """One outcome from the outcomes of a domain's reward functions, in their order. Pure.

    `Scored.steps` has one number per action token and sums to `Scored.value`, unless there is no action token.
    """
    counts = Counter[int]()
    for segment in trajectory.segments:
        if segment.kind is SegmentKind.ACTION:
            counts[segment.turn] += len(segment.token_ids)
    # For every turn the position of its last action token, counted over action tokens alone.
    ends = [max(total - 1, 0) for total in itertools.accumulate(counts[turn.index] for turn in trajectory.turns)]
    token_credits = [0.0] * trajectory.action_token_count
    env = [domain.env_reward_weight * turn.env_reward for turn in trajectory.turns]
    _credit(token_credits, ends, env)
    value = sum(env)
    metrics: dict[str, float] = {"env_reward": sum(turn.env_reward for turn in trajectory.turns)}
    fault_reasons: list[str] = []
    for use, outcome in zip(domain.rewards, outcomes, strict=True):
        if isinstance(outcome, InfraFault):
            return outcome
        if isinstance(outcome, ModelFault):
            fault_reasons.append(f"{use.function}: {outcome.reason}")
            value += use.weight * outcome.floor
            continue
        fault = _credit_score(token_credits, ends, use, outcome)
        if fault is not None:
            return fault
        value += use.weight * outcome.value
        metrics[use.function] = outcome.value
        metrics.update({f"{use.function}/{name}": number for name, number in outcome.metrics.items()})
    if fault_reasons:
        return ModelFault(floor=value, reason="; ".join(fault_reasons))
    return Scored(value, metrics, tuple(token_credits))


def _credit_score(
    token_credits: list[float], ends: Sequence[int], use: RewardUse, outcome: Scored
) -> InfraFault | None:
    """Credit a function's score; the fault if its step rewards fit neither the turns nor the action tokens."""
    remainder = outcome.value
    if use.pays == "steps":
        steps = outcome.steps
        if steps is None or len(steps) not in (len(ends), len(token_credits)):
            got = "none" if steps is None else str(len(steps))
            detail = (
                f"{use.function} gave {got} step_rewards for {len(ends)} turns and {len(token_credits)} action tokens"
            )
            return InfraFault(FaultKind.BAD_ANSWER, retryable=False, detail=detail)
        _credit(
            token_credits,
            ends if len(steps) == len(ends) else range(len(token_credits)),
            [use.weight * step for step in steps],
        )
        remainder -= sum(steps)
    if token_credits:
        token_credits[-1] += use.weight * remainder
    return None


def _credit(token_credits: list[float], positions: Sequence[int], amounts: Sequence[float]) -> None:
    if token_credits:
        for position, amount in zip(positions, amounts, strict=True):
            token_credits[position] += amount
