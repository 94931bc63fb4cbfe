"""What limits a plan, in words, most important first."""

from __future__ import annotations

from placement.milp import Answer, Floats
from placement.program import Program

__all__ = ["words"]


def words(p: Program, best: Answer, x: Floats) -> tuple[str, ...]:
    """The rows whose prices are above 0, by how much of the rate they hold back: price × what is there."""
    pools, t = p.problem.pools, p.tableau
    weight: dict[str, float] = {}

    def count(what: str, value: float) -> None:
        if value > 1e-7:
            weight[what] = weight.get(what, 0.0) + value

    for u, unit in enumerate(t.units):
        n = float(x[p.units[u]])
        pool = pools[unit.pool]
        count(_devices(p, x, unit.pool), best.duals["load", u] * n * p.problem.utilisation)
        count(f"KV memory of {unit.role} on {pool.name}", best.duals["kv", u] * n)
    for channel in t.channels:
        a, b = channel.pools
        name = f"link {a}–{b}" if a != b else f"the network inside {a}"
        count(f"{name}: {channel.gb_per_s:g} GB/s", best.duals["link", channel.pools])
    limit = p.problem.trajectories_in_flight
    if p.matrix.has(("in flight",)):
        count(f"trajectories in flight: {limit:,.0f} of {limit:,.0f}", best.duals["in flight",])
    for j, own in enumerate(p.slopes):
        name = p.problem.domains[j].name
        count(f"the window: {limit * t.weights[j]:,.0f} places for {name}", best.duals["window", j] / own)
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


def _devices(p: Program, x: Floats, g: int) -> str:
    pool = p.problem.pools[g]
    used = sum(round(float(x[column])) * devices for q, column, devices in p.used() if q == g)
    where = "" if pool.device.name == pool.name else f" of {pool.name}"
    return f"{pool.device.name} devices{where}: {used} of {pool.count}"
