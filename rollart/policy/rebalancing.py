"""Whether a better plan is worth moving to."""

from __future__ import annotations

from rollart.fleet import Proposal, RoutePrices, Routes

__all__ = ["MIN_GAIN", "SHARE_NEWS", "PRICE_NEWS", "news", "worth"]

MIN_GAIN = 0.02
"""Relative gain below which a plan is not changed, however cheap the moves: less is the noise of what was measured, and
a plan that follows noise goes back and forth."""

SHARE_NEWS, PRICE_NEWS = 0.05, 0.25
"""Changes of a planned share (of a domain's trajectories) and of a price (relative) that deserve an event: prices move
a little at every look."""


def worth(proposal: Proposal, horizon_s: float) -> tuple[bool, str]:
    """Whether to move, and why in words: the trajectories gained over the horizon must exceed those lost by moving, and
    the gain must not be noise. Ties keep the plan that runs. Where plans are to be cheap, dollars per trajectory
    decide."""
    now, after = proposal.rate_now, proposal.rate_after
    if proposal.usd_per_hour is not None and now > 0 and after > 0:
        return _cheaper(proposal, proposal.usd_per_hour, horizon_s)
    gain = (after - now) * horizon_s
    if after <= now * (1 + MIN_GAIN):
        return False, f"{after:.4g} trajectories/s after {now:.4g} is no gain of {MIN_GAIN:.0%}"
    if gain <= proposal.cost:
        return False, f"{gain:.4g} trajectories gained in {horizon_s:.0f} s do not pay for {proposal.cost:.4g} lost"
    return True, f"{gain:.4g} trajectories gained in {horizon_s:.0f} s for {proposal.cost:.4g} lost"


def _cheaper(proposal: Proposal, usd_per_hour: tuple[float, float], horizon_s: float) -> tuple[bool, str]:
    """The same where trajectories are to be cheap: dollars saved on those made over the horizon against dollars paid
    for those that are not made while engines move."""
    now, after = usd_per_hour[0] / 3600 / proposal.rate_now, usd_per_hour[1] / 3600 / proposal.rate_after
    saved, lost = (now - after) * proposal.rate_after * horizon_s, now * proposal.cost
    prices = f"{1000 * after:.4g} USD per 1,000 trajectories after {1000 * now:.4g}"
    if after >= now * (1 - MIN_GAIN):
        return False, f"{prices} is no gain of {MIN_GAIN:.0%}"
    if saved <= lost:
        return False, f"{saved:.4g} USD saved in {horizon_s:.0f} s do not pay for {lost:.4g} USD lost"
    return True, f"{prices}: {saved:.4g} USD saved in {horizon_s:.0f} s for {lost:.4g} USD lost"


def news(before: Routes, after: Routes) -> str:
    """What changed enough to be told, in words; '' for nothing."""
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
