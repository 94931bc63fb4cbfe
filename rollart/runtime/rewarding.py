"""From a finished trajectory to a training sample: score it, and lay the rewards on its tokens."""

from __future__ import annotations

import math
from itertools import chain

from rollart.errors import LeaseExpired
from rollart.model import (
    AbortReason,
    InfraFault,
    ModelFault,
    Outcome,
    Scored,
    SegmentKind,
    TrainSample,
    Trajectory,
)
from rollart.policy.lease import Expiry
from rollart.ports import Rewarder
from rollart.runtime.leases import Leases
from rollart.runtime.trajectory import Aborted

__all__ = ["Rewarding", "train_sample"]


class Rewarding:
    """Called by each trajectory's own task, so what waits for a reward is bounded by admission."""

    def __init__(self, rewarder: Rewarder, leases: Leases, *, reward_s: float) -> None:
        self._rewarder = rewarder
        self._leases = leases
        self._reward_s = reward_s

    async def score(self, trajectory: Trajectory) -> TrainSample:
        """The sample, or `Aborted` with INFRA_FAULT: a platform that failed is never a reward."""
        try:
            async with self._leases.hold(trajectory.id, "its reward", self._reward_s * 1.5, Expiry.RETRY):
                outcome = await self._rewarder.score(trajectory, self._reward_s)
        except LeaseExpired as error:
            raise Aborted(AbortReason.INFRA_FAULT, error.cause) from None
        if isinstance(outcome, InfraFault):
            raise Aborted(AbortReason.INFRA_FAULT, f"reward {outcome.kind}: {outcome.detail}")
        return train_sample(trajectory, outcome)


def train_sample(trajectory: Trajectory, outcome: Outcome) -> TrainSample:
    """Flatten a scored trajectory. Step rewards are paid token by token; without them the value is paid at the last
    action token. A ModelFault pays its floor there."""
    match outcome:
        case Scored(value=value, steps=steps):
            score = value
        case ModelFault(floor=floor):
            score, steps = floor, None
        case InfraFault():
            raise ValueError(f"an infrastructure fault is not a sample: {outcome}")
    if not math.isfinite(score) or not all(map(math.isfinite, steps or ())):
        raise Aborted(AbortReason.INFRA_FAULT, f"a reward that is no finite number: {score}")
    action_tokens = trajectory.action_token_count
    paid = list(steps) if steps is not None else [0.0] * (action_tokens - 1) + [score]
    if len(paid) != action_tokens:
        raise ValueError(f"{trajectory.id}: {len(paid)} step rewards for {action_tokens} action tokens")
    payments = iter(paid)
    segments = trajectory.segments
    acts = [s.kind is SegmentKind.ACTION for s in segments]
    restricted = any(s.allowed is not None for s in segments)

    def spread(values: list[object]) -> tuple[object, ...]:
        return tuple(chain.from_iterable((v,) * len(s.token_ids) for s, v in zip(segments, values, strict=True)))

    mask = spread(list(acts))
    return TrainSample(
        id=trajectory.id,
        group=trajectory.group,
        domain=trajectory.domain,
        v0=trajectory.v0,
        token_ids=trajectory.token_ids,
        loss_mask=mask,  # type: ignore[arg-type]
        logprobs=tuple(chain.from_iterable(s.logprobs or (0.0,) * len(s.token_ids) for s in segments)),
        versions=spread([-1 if s.policy_version is None else s.policy_version for s in segments]),  # type: ignore[arg-type]
        turn=spread([s.turn if a else -1 for s, a in zip(segments, acts, strict=True)]),  # type: ignore[arg-type]
        rewards=tuple(next(payments) if m else 0.0 for m in mask),
        score=score,
        success=trajectory.success,
        allowed=spread([s.allowed for s in segments]) if restricted else (),  # type: ignore[arg-type]
    )
