"""Kept trajectories, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollart.ledger.kept import KeptScore, KeptTrajectory, RoutedTurn
from rollart.model import GroupId, Purpose, Segment, SegmentKind, Trajectory, TrajectoryId, Turn
from rollart.ports import Charge


def kept(
    id_: str,
    answer: str = "an answer",
    *scores: KeptScore,
    domain: str = "lake",
    value: float | None = 0.0,
    metadata: Mapping[str, object] | None = None,
    routes: tuple[RoutedTurn, ...] = (),
) -> KeptTrajectory:
    """A trajectory of one turn, sampled across versions 1 and 2; its group is that of its id."""
    segments = (
        Segment(SegmentKind.PROMPT, 0, (7, 8)),
        Segment(SegmentKind.ACTION, 0, (1, 2), 1, (-0.5, -0.25), (1, 2, 3)),
        Segment(SegmentKind.ACTION, 0, (3,), 2, (-1.5,)),
    )
    trajectory = Trajectory(
        TrajectoryId(id_),
        GroupId(id_.rpartition(".")[0]),
        domain,
        5,
        Purpose.TRAIN,
        1,
        segments,
        (Turn(0, "6 x 7?", answer, ("4", "2", "!"), 0.25),),
        True,
        "well done",
        {"reference_answer": "42"} if metadata is None else metadata,
        0.5,
    )
    return KeptTrajectory(trajectory, routes, value, scores)


def charge(id_: str, outcome: str = "finished", *, t0: float = 0.0, t1: float = 1.0, **more: Any) -> Charge:
    """The row of a trajectory of one turn."""
    given: dict[str, Any] = {"domain": "lake", "v0": 1, "engine_seconds": 0.5, "turns": 1, "prompt_tokens": 2}
    given |= {"action_tokens": 3, "success": True, "score": 1.0, "purpose": "train", "t0": t0, "t1": t1}
    return Charge(TrajectoryId(id_), outcome=outcome, **(given | more))
