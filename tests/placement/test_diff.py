"""Moves from one plan to another: complete, in an order that the inventory allows, and no dearer than they must be."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.diff import Move, MoveCosts, MoveKind, diff
from placement.problem import RunningPlan
from placement.types import ROLLOUT_ROLES, Deployment, Device, Pool, Role

H800, H20 = Device("H800", memory_gb=80), Device("H20", memory_gb=96)
COSTS = MoveCosts(restart_s=120, restore_s=300, usd_per_device_hour={"h800": 5.28, "h20": 1.85})


def plans(*roles: Role) -> st.SearchStrategy[list[Deployment]]:
    one = st.builds(
        Deployment,
        pool=st.sampled_from(["h20", "h800"]),
        role=st.sampled_from(roles),
        tp=st.sampled_from([1, 2, 4, 8]),
        replicas=st.integers(1, 5),
        batch=st.floats(1, 64),
    )
    return st.lists(one, max_size=7)


deployments = plans(*Role)
without_trainer = plans(*(r for r in Role if r is not Role.TRAINER))


def frees(move: Move) -> int:
    """Devices of the pool that a move frees; below 0 if it takes some."""
    devices = move.tp * move.replicas
    return {MoveKind.FLIP: 0, MoveKind.DRAIN: devices, MoveKind.START: -devices}[move.kind]


def counted(plan: list[Deployment]) -> dict[tuple[str, Role, int], int]:
    counts: Counter[tuple[str, Role, int]] = Counter()
    for d in plan:
        counts[(d.pool, d.role, d.tp)] += d.replicas
    return dict(counts)


def applied(old: list[Deployment], moves: tuple[Move, ...]) -> dict[tuple[str, Role, int], int]:
    """The instances once the moves are done; no move takes more than there are."""
    counts = Counter(counted(old))
    for move in moves:
        if move.before is not None:
            counts[move.pool, move.before, move.tp] -= move.replicas
            assert counts[move.pool, move.before, move.tp] >= 0
        if move.after is not None:
            counts[move.pool, move.after, move.tp] += move.replicas
    return dict(+counts)


def in_use(plan: list[Deployment]) -> Counter[str]:
    use: Counter[str] = Counter()
    for d in plan:
        use[d.pool] += d.devices
    return use


@given(deployments, deployments)
def test_the_moves_turn_the_old_plan_into_the_new_one(old: list[Deployment], new: list[Deployment]) -> None:
    assert applied(old, diff(old, new, costs=COSTS)) == counted(new)


@given(deployments)
def test_a_plan_is_no_move_away_from_itself(plan: list[Deployment]) -> None:
    assert diff(plan, list(reversed(plan)), costs=COSTS) == ()


@given(deployments, deployments)
def test_devices_in_use_never_exceed_what_either_plan_uses(old: list[Deployment], new: list[Deployment]) -> None:
    before, after = in_use(old), in_use(new)
    use = Counter(before)
    for move in diff(old, new, costs=COSTS):
        use[move.pool] -= frees(move)
        assert 0 <= use[move.pool] <= max(before[move.pool], after[move.pool])
    assert +use == after


@given(without_trainer, without_trainer)
def test_order(old: list[Deployment], new: list[Deployment]) -> None:
    """Flips, then drains and starts. In a pool a drain comes first, and every drain after a start was needed: the next
    start did not fit yet, or none was left."""
    moves = diff(old, new, costs=COSTS)
    kinds = [m.kind for m in moves]
    assert MoveKind.FLIP not in kinds[kinds.count(MoveKind.FLIP) :]
    limit = {p: max(in_use(old)[p], in_use(new)[p]) for p in ("h20", "h800")}
    use = in_use(old)
    for pool in limit:
        mine = [m for m in moves if m.pool == pool and m.kind is not MoveKind.FLIP]
        if any(m.kind is MoveKind.DRAIN for m in mine):
            assert mine[0].kind is MoveKind.DRAIN
        for position, move in enumerate(mine):
            if move.kind is MoveKind.DRAIN and position and mine[position - 1].kind is MoveKind.START:
                later = [m for m in mine[position:] if m.kind is MoveKind.START]
                assert not later or use[pool] + later[0].tp > limit[pool]
            use[pool] -= frees(move)


@given(deployments, deployments)
def test_a_trainer_leaves_a_pool_before_one_starts_there(old: list[Deployment], new: list[Deployment]) -> None:
    """And where it changes at all, all of it moves: its ranks restore one checkpoint together."""
    moves = [m for m in diff(old, new, costs=COSTS) if Role.TRAINER in (m.before, m.after)]
    for pool in ("h20", "h800"):
        kinds = [m.kind for m in moves if m.pool == pool]
        assert kinds == sorted(kinds, key=[MoveKind.DRAIN, MoveKind.START].index)
    if moves:
        trainers = [sum(d.devices for d in plan if d.role is Role.TRAINER) for plan in (old, new)]
        assert [-sum(frees(m) for m in moves if m.kind is k) for k in (MoveKind.DRAIN, MoveKind.START)] == [
            -trainers[0],
            trainers[1],
        ]


@pytest.mark.slow
@given(deployments, deployments)
def test_flips_are_free_and_as_many_as_there_can_be(old: list[Deployment], new: list[Deployment]) -> None:
    """At one pool and tp, after the flips only one side is left over: instances to end, or instances to begin."""
    moves = diff(old, new, costs=COSTS)
    assert all(m.device_seconds == 0 == m.usd for m in moves if m.kind is MoveKind.FLIP)
    for pool in ("h20", "h800"):
        for tp in (1, 2, 4, 8):
            rest = {
                m.kind
                for m in moves
                if (m.pool, m.tp) == (pool, tp)
                and m.kind is not MoveKind.FLIP
                and (m.before or m.after) in ROLLOUT_ROLES
            }
            assert len(rest) <= 1


@given(deployments, deployments)
def test_a_move_costs_its_device_seconds(old: list[Deployment], new: list[Deployment]) -> None:
    for move in diff(old, new, costs=COSTS):
        seconds = {MoveKind.FLIP: 0, MoveKind.DRAIN: 0, MoveKind.START: 120}[move.kind]
        if move.kind is MoveKind.START and move.after is Role.TRAINER:
            seconds = 300
        assert move.device_seconds == seconds * move.tp * move.replicas
        assert move.usd == pytest.approx(move.device_seconds / 3600 * {"h20": 1.85, "h800": 5.28}[move.pool])


def summary(moves: tuple[Move, ...]) -> list[tuple[str, str, int, int]]:
    return [(str(m.kind), f"{m.before}→{m.after}", m.tp, m.replicas) for m in moves]


def test_a_role_change_is_a_flip_and_the_rest_is_drained() -> None:
    old = [Deployment("h20", Role.ENGINE, 4, 5)]
    new = [Deployment("h20", Role.DECODE, 4, 3), Deployment("h20", Role.PREFILL, 4, 1)]
    assert summary(diff(old, new, costs=COSTS)) == [
        ("flip", "engine→prefill", 4, 1),
        ("flip", "engine→decode", 4, 3),
        ("drain", "engine→None", 4, 1),
    ]


def test_another_tp_is_one_drain_and_one_start_at_a_time() -> None:
    moves = diff([Deployment("h20", Role.ENGINE, 2, 4)], [Deployment("h20", Role.ENGINE, 4, 2)], costs=COSTS)
    assert summary(moves) == [
        ("drain", "engine→None", 2, 2),
        ("start", "None→engine", 4, 1),
        ("drain", "engine→None", 2, 2),
        ("start", "None→engine", 4, 1),
    ]
    assert sum(m.device_seconds for m in moves) == 8 * 120
    assert moves[1].words == "start engine 1 × tp 4 on h20 (480 device-seconds)"


def test_a_trainer_that_changes_is_restored_whole() -> None:
    old = [Deployment("h800", Role.TRAINER, 8, 4), Deployment("h800", Role.ENGINE, 8, 2)]
    new = [Deployment("h800", Role.TRAINER, 8, 5), Deployment("h800", Role.ENGINE, 8, 1)]
    moves = diff(old, new, costs=COSTS)
    assert summary(moves) == [
        ("drain", "engine→None", 8, 1),
        ("drain", "trainer→None", 8, 4),
        ("start", "None→trainer", 8, 5),
    ]
    assert sum(m.device_seconds for m in moves) == 40 * 300
    assert "its devices change" in moves[1].words
    assert "from its checkpoint" in moves[2].words


def test_pools_with_something_to_drain_come_first() -> None:
    old = [Deployment("h800", Role.ENGINE, 1, 1)]
    new = [Deployment("h20", Role.ENGINE, 1, 1)]
    assert [(m.kind, m.pool) for m in diff(old, new, costs=COSTS)] == [
        (MoveKind.DRAIN, "h800"),
        (MoveKind.START, "h20"),
    ]


def test_costs_follow_the_problem() -> None:
    running = RunningPlan((), restart_s=60)
    costs = MoveCosts.of([Pool("h20", H20, 8, 1.85)], running)
    assert (costs.restart_s, costs.restore_s, costs.usd_per_device_hour) == (60, 60, {"h20": 1.85})
