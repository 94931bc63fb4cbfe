"""Transition from the running plan to a new one: ordered moves and the cost of each.

Three kinds of move. A *flip* gives an instance another role among engine, prefill and decode: every engine can do all
three, so that only the router's choice changes and nothing is lost. A *drain* ends an instance (its trajectories
continue on other engines) and frees its devices; a *start* loads an instance on free ones. Another tp is a drain and a
start. A trainer whose devices change is drained and started whole, because its ranks restore a checkpoint at the new
size.

Order: all flips; then, pool by pool, drains and starts: first the pools that a trainer leaves, then the others with
something to drain, then the rest. In a pool a drain comes first, then at once every start that it made room for, then
the next drain: as few devices as possible are down at a time, and at no point are more devices in use than the larger
of the two plans uses. A trainer is drained after the engines and started before them, so that training pauses for as
short as possible, and there are never two of it. Ties: the larger tp, then roles in the order of `Role`, pools by name.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from placement.problem import RunningPlan
from placement.types import ROLLOUT_ROLES, Deployment, Pool, Role

_ORDER = {role: position for position, role in enumerate(Role)}


class MoveKind(enum.StrEnum):
    FLIP = "flip"
    DRAIN = "drain"
    START = "start"


@dataclass(frozen=True, slots=True)
class MoveCosts:
    """The costs of moves: a started device earns nothing for `restart_s` seconds, a trainer's for `restore_s`
    (checkpoint included). A device-hour costs `usd_per_device_hour`, by pool (absent: 0)."""

    restart_s: float = 120.0
    restore_s: float = 300.0
    usd_per_device_hour: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(pools: Iterable[Pool], running: RunningPlan) -> MoveCosts:
        """The costs that the solver assumed, at the pools' prices: a trainer's restore takes as long as any restart."""
        return MoveCosts(running.restart_s, running.restart_s, {p.name: p.usd_per_device_hour for p in pools})


@dataclass(frozen=True, slots=True)
class Move:
    """One step: `replicas` instances of `tp` devices in `pool` go from role `before` to `after`.

    `before` is None for a start, `after` for a drain. `device_seconds` are lost by it, worth `usd`.
    """

    kind: MoveKind
    pool: str
    before: Role | None
    after: Role | None
    tp: int
    replicas: int
    device_seconds: float
    usd: float
    words: str


_Key = tuple[str, Role, int]
"""(pool, role, tp): instances with the same key are the same to the router."""


def diff(old: Iterable[Deployment], new: Iterable[Deployment], *, costs: MoveCosts) -> tuple[Move, ...]:
    """The moves that turn `old` into `new`; batch and utilisation figures are predictions and move nothing."""
    have, want = _count(old), _count(new)
    moves = list(_flips(have, want, costs))
    drains, starts = have - want, want - have
    if _trainers(have) != _trainers(want):
        drains |= _trainers(have)
        starts |= _trainers(want)
    left = {k[0] for k in drains if k[1] is Role.TRAINER}
    drained = {k[0] for k in drains}
    for pool in sorted(drained | {k[0] for k in starts}, key=lambda p: (p not in left, p not in drained, p)):
        use, room = (sum(n * k[2] for k, n in counts.items() if k[0] == pool) for counts in (have, want))
        moves += _pool_moves(pool, drains, starts, max(room - use, 0), costs)
    return tuple(moves)


def _count(deployments: Iterable[Deployment]) -> Counter[_Key]:
    counts: Counter[_Key] = Counter()
    for d in deployments:
        counts[(d.pool, d.role, d.tp)] += d.replicas
    return +counts


def _trainers(counts: Counter[_Key]) -> Counter[_Key]:
    return Counter({key: n for key, n in counts.items() if key[1] is Role.TRAINER and n})


def _flips(have: Counter[_Key], want: Counter[_Key], costs: MoveCosts) -> Iterator[Move]:
    """As many flips as there can be: at one pool and tp, surplus roles against missing ones. `have` changes with
    them."""
    for pool, tp in sorted({(pool, tp) for pool, role, tp in [*have, *want] if role in ROLLOUT_ROLES}):
        surplus = {r: have[(pool, r, tp)] - want[(pool, r, tp)] for r in ROLLOUT_ROLES}
        for before in ROLLOUT_ROLES:
            for after in ROLLOUT_ROLES:
                replicas = min(surplus[before], -surplus[after])
                if replicas > 0:
                    surplus[before] -= replicas
                    surplus[after] += replicas
                    have[(pool, before, tp)] -= replicas
                    have[(pool, after, tp)] += replicas
                    yield _move(MoveKind.FLIP, pool, before, after, tp, replicas, costs)


def _pool_moves(pool: str, drains: Counter[_Key], starts: Counter[_Key], free: int, costs: MoveCosts) -> Iterator[Move]:
    """Unit by unit, then neighbours of the same kind joined. `free`: devices that may be taken at once."""
    down = _units(pool, drains, trainer_first=False)
    up = _units(pool, starts, trainer_first=True)
    steps: list[tuple[MoveKind, _Key, int]] = []
    while down or up:
        if down:
            key, replicas = down.pop(0)
            free += key[2] * replicas
            steps.append((MoveKind.DRAIN, key, replicas))
        trains = any(key[1] is Role.TRAINER for key, _ in down)
        # Once nothing is left to drain, all of `up` fits: `free` is the surplus of the new plan's devices over the
        # running ones.
        while up and up[0][0][2] * up[0][1] <= free and not (trains and up[0][0][1] is Role.TRAINER):
            key, replicas = up.pop(0)
            free -= key[2] * replicas
            steps.append((MoveKind.START, key, replicas))
    for (kind, (_, role, tp)), group in groupby(steps, key=lambda step: step[:2]):
        before, after = (role, None) if kind is MoveKind.DRAIN else (None, role)
        yield _move(kind, pool, before, after, tp, sum(replicas for _, _, replicas in group), costs)


def _units(pool: str, counts: Counter[_Key], *, trainer_first: bool) -> list[tuple[_Key, int]]:
    """The units of draining and starting: one instance, or all instances of a trainer, which are ranks of one job."""
    keys = [key for key in counts if key[0] == pool]
    keys.sort(key=lambda k: ((k[1] is Role.TRAINER) is not trainer_first, -k[2], _ORDER[k[1]]))
    return [
        unit for key in keys for unit in ([(key, counts[key])] if key[1] is Role.TRAINER else [(key, 1)] * counts[key])
    ]


def _move(
    kind: MoveKind, pool: str, before: Role | None, after: Role | None, tp: int, replicas: int, costs: MoveCosts
) -> Move:
    trainer = Role.TRAINER in (before, after)
    start_s = costs.restore_s if trainer else costs.restart_s
    lost = start_s * tp * replicas if kind is MoveKind.START else 0.0
    what = f"{replicas} × tp {tp} on {pool}"
    if kind is MoveKind.FLIP:
        words = f"flip {what}: {before} → {after} (router only, free)"
    else:
        why = ""
        if trainer:
            why = ", from its checkpoint" if kind is MoveKind.START else ": its devices change"
        words = f"{kind} {before or after} {what}{why} ({lost:,.0f} device-seconds)"
    usd = lost / 3600.0 * costs.usd_per_device_hour.get(pool, 0.0)
    return Move(kind, pool, before, after, tp, replicas, lost, usd, words)
