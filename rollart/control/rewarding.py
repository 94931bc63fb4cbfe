"""Conversion of a finished trajectory to a training sample: scoring, and assignment of rewards to tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from rollart.control.trajectory import TrajectoryAborted
from rollart.errors import LeaseExpired
from rollart.leases import Expiry, Leases
from rollart.model import (
    AbortReason,
    InfraFault,
    ModelFault,
    Outcome,
    Scored,
    Segment,
    SegmentKind,
    TrainSample,
    Trajectory,
)
from rollart.ports import Rewarder


class TrajectoryScorer:
    """Called by each trajectory's own task, so admission bounds the number of trajectories that wait for a reward."""

    def __init__(
        self,
        rewarder: Rewarder,
        leases: Leases,
        *,
        reward_s: float,
        success_at: Mapping[str, float | None] = MappingProxyType({}),
    ) -> None:
        """`success_at`: by domain, the score from which a trajectory without a verdict is a success."""
        self._success_at = success_at
        self._rewarder = rewarder
        self._leases = leases
        self._reward_s = reward_s

    async def score(self, trajectory: Trajectory) -> TrainSample:
        """Score a trajectory. `TrajectoryAborted` with INFRA_FAULT if the platform fails, which is never a reward."""
        try:
            async with self._leases.hold(trajectory.id, "its reward", self._reward_s * 1.5, Expiry.RETRY):
                outcome = await self._rewarder.score(trajectory, self._reward_s)
        except LeaseExpired as error:
            raise TrajectoryAborted(AbortReason.INFRA_FAULT, error.cause) from None
        if isinstance(outcome, InfraFault):
            raise TrajectoryAborted(AbortReason.INFRA_FAULT, f"reward {outcome.kind}: {outcome.detail}")
        return train_sample(trajectory, outcome, self._success_at.get(trajectory.domain))


def train_sample(trajectory: Trajectory, outcome: Outcome, success_at: float | None = None) -> TrainSample:
    """Flatten a scored trajectory into columns per token. Step rewards are assigned one per action token; without them
    the value goes to the last action token, and so does the floor of a ModelFault. `success_at`: score from which a
    trajectory without a verdict is a success."""
    match outcome:
        case Scored(value=value, steps=steps):
            score = value
        case ModelFault(floor=floor):
            score, steps = floor, None
        case InfraFault():
            raise ValueError(f"an infrastructure fault is not a sample: {outcome}")
    if not math.isfinite(score) or not all(map(math.isfinite, steps or ())):
        raise TrajectoryAborted(AbortReason.INFRA_FAULT, f"a reward that is no finite number: {score}")
    action_tokens = trajectory.action_token_count
    paid = list(steps) if steps is not None else [0.0] * (action_tokens - 1) + [score]
    if len(paid) != action_tokens:
        raise ValueError(f"{trajectory.id}: {len(paid)} step rewards for {action_tokens} action tokens")
    spread = _TokenColumns()
    for segment in trajectory.segments:
        spread.add(segment, paid)
    return TrainSample(
        id=trajectory.id,
        group=trajectory.group,
        domain=trajectory.domain,
        v0=trajectory.v0,
        token_ids=tuple(spread.token_ids),
        loss_mask=tuple(spread.mask),
        logprobs=tuple(spread.logprobs),
        versions=tuple(spread.versions),
        turn=tuple(spread.turn),
        rewards=tuple(spread.rewards),
        score=score,
        success=score >= success_at if success_at is not None and trajectory.success is None else trajectory.success,
        allowed=tuple(spread.allowed) if spread.restricted else (),
        truncated=trajectory.truncated,
        experts=_padded(trajectory.experts, len(spread.token_ids)),
    )


def _padded(experts: tuple[bytes, ...], tokens: int) -> tuple[bytes, ...]:
    """Experts of each token: unknown, which is all bits set, of the last ones, which no token has followed."""
    return experts and experts + (b"\xff" * len(experts[0]),) * (tokens - len(experts))


@dataclass(slots=True)
class _TokenColumns:
    """Columns per token of a trajectory's segments, built in one pass because every trajectory goes through here."""

    token_ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    allowed: list[tuple[int, ...] | None] = field(default_factory=list)
    restricted: bool = False
    paid: int = 0

    def add(self, segment: Segment, paid: Sequence[float]) -> None:
        n = len(segment.token_ids)
        self.token_ids += segment.token_ids
        if segment.kind is SegmentKind.ACTION:
            assert segment.policy_version is not None
            self.mask += (True,) * n
            self.logprobs += segment.logprobs
            self.versions += (segment.policy_version,) * n
            self.turn += (segment.turn,) * n
            self.rewards += paid[self.paid : self.paid + n]
            self.paid += n
        else:
            self.mask += (False,) * n
            self.logprobs += (0.0,) * n
            self.versions += (-1,) * n
            self.turn += (-1,) * n
            self.rewards += (0.0,) * n
        self.allowed += (segment.allowed,) * n
        self.restricted = self.restricted or segment.allowed is not None
