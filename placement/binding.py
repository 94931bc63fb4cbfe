"""The binding constraints of a plan as text, most important first."""

from __future__ import annotations

from collections.abc import Iterator

from placement import holding
from placement.milp import Floats, MilpSolution
from placement.program import PlacementProgram
from placement.types import Pool

__all__ = ["devices_text", "binding_constraints"]


MIN_BINDING_SHARE = 5e-4
"""Constraints that hold back less than this share of the rate are not listed."""


def binding_constraints(p: PlacementProgram, best: MilpSolution, x: Floats) -> tuple[str, ...]:
    """The constraints by the share of the rate that they hold back: the price of a row × its resources. Training and
    publishing count with their share of the holding time of a window's slots."""
    pools, t = p.problem.pools, p.tableau
    weight: dict[str, float] = {}
    used = dict.fromkeys(range(len(pools)), 0)
    for g, column, size in p.device_columns():
        used[g] += round(float(x[column])) * size

    def count(what: str, value: float) -> None:
        if value > MIN_BINDING_SHARE * float(x[p.rate]):
            weight[what] = weight.get(what, 0.0) + value

    for u, unit in enumerate(t.units):
        n = float(x[p.units[u]])
        pool = pools[unit.pool]
        count(devices_text(pool, used[unit.pool]), best.duals["load", u] * n * p.problem.utilisation)
        count(f"KV memory of {unit.role} on {pool.name}", best.duals["kv", u] * n)
    for channel in t.channels:
        a, b = channel.pools
        name = f"link {a}–{b}" if a != b else f"the network inside {a}"
        count(f"{name}: {channel.gb_per_s:g} GB/s", best.duals["link", channel.pools])
    limit = p.problem.trajectories_in_flight
    if p.matrix.has(("in flight",)):
        count(f"trajectories in flight: {limit:,.0f} of {limit:,.0f}", best.duals["in flight",])
    for j, own in enumerate(p.slopes):
        name, price = p.problem.domains[j].name, best.duals["window", j] / own
        count(f"the window: {limit * t.weights[j]:,.0f} places for {name}", price)
        for what, share in _holding_shares(p, x, j, own):
            count(what, price * share)
    train = sum(v for key, v in best.duals.items() if key[0] == "train")
    count("the trainer", train / p.scale if p.scale else 0.0)
    for key, column in p.reward_units.items():
        count(f"rewards on {pools[key[0]].name}", best.duals["scoring", *key] * float(x[column]))
    if p.environments:
        cores = sum(float(x[c]) for c in p.environments.values())
        count("cores for environments", best.duals["environments",] * cores * p.problem.utilisation)
    if p.matrix.has(("budget",)):
        count(f"the budget of ${p.problem.budget_usd_per_hour:g}/h", best.duals["budget",])
    return tuple(sorted(weight, key=lambda w: (-weight[w], w)))


def _holding_shares(p: PlacementProgram, x: Floats, j: int, own: float) -> Iterator[tuple[str, float]]:
    """The shares of a slot's holding time that are training, if more devices would shorten it, and publishing."""
    option = next(option for option in p.trainers if x[option.devices] > 0.5)
    names, size = [pool.name for pool in p.problem.pools], round(float(x[option.devices]))
    train_s = holding.training_step_s(p, option, size)
    serving = {names[unit.pool] for u, unit in enumerate(p.tableau.units) if x[p.units[u]] > 0.5}
    publish_s = p.problem.publish_s(names[option.pool], serving)
    rest = p.held[option.pool][0][j] * own * float(x[option.rate]) / (train_s + publish_s)
    if size < option.most and holding.fixed_trainer_size(p, option) is None:
        yield "the trainer", rest * train_s
    yield f"publishing: {publish_s:.3g} s", rest * publish_s


def devices_text(pool: Pool, used: int) -> str:
    """The text for a pool whose devices bind, of which a plan uses `used`."""
    where = "" if pool.device.name == pool.name else f" of {pool.name}"
    return f"{pool.device.name} devices{where}: {used} of {pool.count}"
