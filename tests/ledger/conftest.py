from __future__ import annotations

from collections.abc import Callable

import pytest

from rollart.model import Group, GroupId, TrainSample, TrajectoryId


def make_sample(id_: str, group: str, *, domain: str = "lake", tokens: int = 4, v0: int = 0) -> TrainSample:
    """A sample whose second half was sampled."""
    half = tokens // 2
    return TrainSample(
        id=TrajectoryId(id_),
        group=GroupId(group),
        domain=domain,
        v0=v0,
        token_ids=tuple(range(tokens)),
        loss_mask=(False,) * half + (True,) * (tokens - half),
        logprobs=(0.0,) * half + (-0.1 / 3,) * (tokens - half),
        versions=(-1,) * half + (v0,) * (tokens - half),
        turn=(-1,) * half + (0,) * (tokens - half),
        rewards=(0.0,) * tokens,
        score=1 / 3,
        success=True,
    )


@pytest.fixture
def sample() -> Callable[..., TrainSample]:
    return make_sample


@pytest.fixture
def group() -> Callable[..., Group]:
    def group(id_: str, *samples: TrainSample) -> Group:
        return Group(GroupId(id_), "lake", samples)

    return group
