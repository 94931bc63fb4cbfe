"""Whether a better plan is worth its moves, the order of the moves, and the routes during the transition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rollart.fleet import FleetMove, FleetMoveKind, Proposal, RoutePrices, Routes

__all__ = [
    "MIN_GAIN",
    "PRICE_NEWS",
    "SHARE_NEWS",
    "transition_routes",
    "notable_change",
    "order_moves",
    "reverse_drain",
    "worth_moving",
]

MIN_GAIN = 0.02
"""Relative gain below which a plan is kept, however cheap the moves: a smaller gain is measurement noise, and a plan
that follows noise oscillates."""

SHARE_NEWS, PRICE_NEWS = 0.05, 0.25
"""Changes of a planned share (of a domain's trajectories) and of a price (relative) that are worth an event: prices
change a little at every update."""


def worth_moving(proposal: Proposal, horizon_s: float) -> tuple[bool, str]:
    """Whether to move, and the reason as text: the trajectories gained over the horizon must exceed those lost by
    moving, and the gain must exceed the noise. Ties keep the running plan. Where plans minimise cost, dollars per
    trajectory decide."""
    now, after = proposal.rate_now, proposal.rate_after
    if proposal.usd_per_hour is not None and now > 0 and after > 0:
        return _cheaper(proposal, proposal.usd_per_hour, horizon_s)
    gain = (after - now) * horizon_s
    if after <= now * (1 + MIN_GAIN):
        return False, f"{after:.4g} trajectories/s after {now:.4g} is no gain of {MIN_GAIN:.0%}"
    if gain <= proposal.cost:
        return False, f"{gain:.4g} trajectories gained in {horizon_s:.0f} s do not pay for {proposal.cost:.4g} lost"
    return True, f"{gain:.4g} trajectories gained in {horizon_s:.0f} s for {proposal.cost:.4g} lost"


def order_moves(moves: Iterable[FleetMove], *, serving: int, free: Mapping[str, int]) -> list[FleetMove]:
    """Drains and starts engine by engine, in the given order, with one exception: before a drain of the last serving
    engine comes the first start whose pool has the devices. `serving` engines serve now; `free` counts free devices by
    pool.

    So no more engines than necessary are down at a time, and none serves only where no start fits beside the last one.
    """
    left = [replace(m, replicas=1) for m in moves if m.kind is not FleetMoveKind.FLIP for _ in range(m.replicas)]
    room = dict(free)
    ordered = []
    while left:
        n = 0
        if left[0].kind is FleetMoveKind.DRAIN and serving <= 1:
            n = next(
                (i for i, m in enumerate(left) if m.kind is FleetMoveKind.START and m.tp <= room.get(m.pool, 0)), 0
            )
        move = left.pop(n)
        gives = 1 if move.kind is FleetMoveKind.DRAIN else -1
        serving -= gives
        room[move.pool] = room.get(move.pool, 0) + gives * move.tp
        ordered.append(move)
    return ordered


def reverse_drain(drained: FleetMove) -> FleetMove:
    """The start that reverts a drain."""
    return replace(drained, kind=FleetMoveKind.START, before=None, after=drained.before)


def transition_routes(now: Routes, after: Routes) -> Routes:
    """Routes while engines of both plans serve: the new ones, with the old prices of kinds that the new plan lacks. A
    kind without a price would attract every trajectory."""
    if now.prices is None or after.prices is None:
        return after
    engines = {**now.prices.engines, **after.prices.engines}
    kv = {**now.prices.kv, **after.prices.kv}
    return replace(after, prices=replace(after.prices, engines=engines, kv=kv))


def _cheaper(proposal: Proposal, usd_per_hour: tuple[float, float], horizon_s: float) -> tuple[bool, str]:
    """As `worth_moving` where plans minimise cost: dollars saved over the horizon against the dollars paid for
    trajectories that are lost while engines move."""
    now, after = usd_per_hour[0] / 3600 / proposal.rate_now, usd_per_hour[1] / 3600 / proposal.rate_after
    saved, lost = (now - after) * proposal.rate_after * horizon_s, now * proposal.cost
    prices = f"{1000 * after:.4g} USD per 1,000 trajectories after {1000 * now:.4g}"
    if after >= now * (1 - MIN_GAIN):
        return False, f"{prices} is no gain of {MIN_GAIN:.0%}"
    if saved <= lost:
        return False, f"{saved:.4g} USD saved in {horizon_s:.0f} s do not pay for {lost:.4g} USD lost"
    return True, f"{prices}: {saved:.4g} USD saved in {horizon_s:.0f} s for {lost:.4g} USD lost"


def notable_change(before: Routes, after: Routes) -> str:
    """The first change large enough for an event, as text; '' if there is none."""
    for domain in sorted({*before.shares, *after.shares}):
        a, b = before.shares.get(domain, {}), after.shares.get(domain, {})
        for pool in sorted({*a, *b}):
            if abs(a.get(pool, 0.0) - b.get(pool, 0.0)) > SHARE_NEWS:
                return f"{domain} on {pool}: {a.get(pool, 0.0):.0%} → {b.get(pool, 0.0):.0%}"
    old, new = before.prices or RoutePrices(), after.prices or RoutePrices()
    for kind in sorted({*old.engines, *new.engines}):
        p, q = old.engines.get(kind, 0.0), new.engines.get(kind, 0.0)
        if abs(p - q) > PRICE_NEWS * max(p, q):
            return f"price of {kind.role} tp {kind.tp} on {kind.pool}: {p:.3g} → {q:.3g}"
    return ""
