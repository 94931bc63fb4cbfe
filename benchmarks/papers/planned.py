"""RA-11 and RA-18 as specs, planned by the code that `rollart plan` calls, without a constant for either row.

    python -m benchmarks.papers.planned [--specs DIR]

Prints the table of docs/placement.md; `--specs` writes run.yaml and cluster.yaml of each fleet there instead, for
`rollart plan RUN --cluster CLUSTER`. The work is that of the shapes that `rollart simulate` draws from, the model's
constants are the priors, the publish speeds the preset `rollart`.

A ratio within 1 % of 1 has no sign. Where the sign is not the published one, the plan is solved again with one
term of the model at a time moved away from its value, doubled or halved up to 16 times, then bisected. The table names
the term that has to move least, and its value then; "none alone" where no term within its bounds gives it.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks.papers.models import CONFIGS, shape
from placement.problem import Problem, Restriction
from placement.roofline import Calibration, prior
from placement.solve import solve
from placement.types import Deployment, Placement, Role
from rollart.settings.planning import Specs, planning_problem, solve_placement
from rollart.settings.resolve import forecast, read_specs
from rollart.sim.workload import PRESETS, GeneratedWorkload

__all__ = ["SIGN", "Ratio", "Term", "mixed", "needed", "split", "splits_own"]

Values = dict[str, Any]

SIGN = 1.01
"""A ratio above it is a gain."""
HOST_GB_PER_S, CROSS_GB_PER_S = 50.0, 25.0
"""Of one host of 8 GPUs: within a cluster (400 Gb/s), and between the two (200 Gb/s). RollArt §7.1."""
TRAINERS = 32
AGENTIC = ("frozenlake", "webshop", "gem_math", "gem_game")
"""RollArt's tasks, sampled uniformly; 32B has SWE besides (Table 1)."""
FLEETS = ((64, 24), (72, 0), (0, 208))
"""H800 and H20 of the mix and of either type for the same money."""
IN_FLIGHT = 256
"""Of RA-18: (α + 1) × the batch of 128. Stated, so that no plan counts how long places are held: those of given engines
do not."""
RANGE, STEP, CLOSE = 16.0, 2.0, 0.1
"""Largest factor by which a term is moved up or down, the factor of each step, and the tolerance of the bisection."""
SHARES = ("mfu", "mbu")
DRAWN = 2048
"""Trajectories whose means and quantiles are a domain's profile."""


@cache
def _scripts(name: str) -> tuple[Values, ...]:
    drawn = [GeneratedWorkload(PRESETS[name], 0, name=name).script(n, 0) for n in range(DRAWN)]
    return tuple(
        {
            "turns": s.turns,
            "first_tokens": s.shown[0],
            "new_tokens": sum(s.shown[1:]) / (s.turns - 1) if s.turns > 1 else None,
            "output_tokens": sum(s.answers) / s.turns,
            "wait_s": sum(s.step_s) / s.turns,
            "reset_s": s.reset_s,
        }
        for s in drawn
    )


def profile(name: str) -> Values:
    """The work of the shape `name`, as a spec's `profile`."""

    def quantity(key: str) -> Values:
        values = sorted(s[key] for s in _scripts(name) if s[key] is not None)
        p50, p90 = (round(float(values[int(q * (len(values) - 1))]), 1) for q in (0.5, 0.9))
        return {"mean": round(sum(values) / len(values), 3), "p50": p50, "p90": p90}

    waits = {key: quantity(key)["mean"] for key in ("wait_s", "reset_s")}
    return {k: quantity(k) for k in ("turns", "first_tokens", "new_tokens", "output_tokens")} | {"environment": waits}


def run_of(model: str, shapes: Sequence[str], *, batch: int = 512, **placement: object) -> Values:
    """The run spec: 32k of context, groups of 8, α = 1, versions through a store, 32 H800 that train."""
    return {
        "name": model.lower(),
        "model": {"config": dict(CONFIGS[model]), "context": 32768},
        "schedule": "rollart",
        "staleness": 1,
        "batch": {"trajectories": batch},
        "leases": {"generate_s": 3600, "env_step_s": 600, "reward_s": 600, "train_s": 3600, "publish_s": 1200},
        "weights": {"store": {"kind": "files", "url": "/var/lib/rollart/versions"}},
        "domains": [
            {
                "name": name,
                "environment": "rollart.adapters.envs.frozen_lake:FrozenLakeText",
                "group_size": 8,
                "max_turns": PRESETS[name].most_turns or 50,
                "max_tokens": PRESETS[name].answers.cap,
                "profile": profile(name),
            }
            for name in shapes
        ],
        "placement": {"train": {"pool": "train", "devices": TRAINERS, "mfu": 0.40}, **placement},
    }


def cluster_of(h800: int, h20: int) -> Values:
    """The cluster spec: so many devices that roll out, beside those that train."""
    counts = {"train": ("H800", TRAINERS), "h800": ("H800", h800), "h20": ("H20", h20)}
    there = [name for name, (_, n) in counts.items() if n]
    hosts = {name: n / 8 for name, (_, n) in counts.items()}
    links = [{"a": a, "b": a, "gb_per_s": HOST_GB_PER_S * hosts[a] / 2} for a in there]
    for i, a in enumerate(there):
        for b in there[i + 1 :]:
            speed = CROSS_GB_PER_S if b == "h20" else HOST_GB_PER_S
            links.append({"a": a, "b": b, "gb_per_s": speed * min(hosts[a], hosts[b])})
    pools: list[Values] = [
        {"name": a, "device": counts[a][0], "count": counts[a][1], "devices_per_host": 8} for a in there
    ]
    return {
        "name": f"rollart-{h800}h800-{h20}h20",
        "pools": [*pools, {"name": "env", "device": "cpu", "count": 4096, "memory_gb": 16384}],
        "links": links,
        "engines": {"max_slots": 256},
        "publish": {"preset": "rollart"},
    }


@dataclass(frozen=True, slots=True)
class Term:
    """A constant of the model or a stated figure, and how far it may be moved. `keys`: the overrides that set it, as
    multiples of the value; without any it is an engine's constant, which a calibration file sets."""

    name: str
    value: float
    low: float
    high: float
    keys: tuple[tuple[str, float], ...] = ()

    def overrides(self, value: float) -> tuple[str, ...]:
        whole = ".0f" if self.name.endswith("in_flight") else ".6g"
        return tuple(f"{key}={format(value * times, whole)}" for key, times in self.keys)


def _constants(model: str, moved: tuple[Term, float] | None) -> list[dict[str, object]]:
    """The priors as a calibration file, with one of them moved."""
    base, _, _ = prior("hopper", moe=shape(model).is_moe)
    found = []
    for device in ("H800", "H20"):
        mine = base
        if moved is not None and moved[0].name.startswith(f"{device}."):
            mine = replace(base, **{moved[0].name.partition(".")[2]: moved[1]})
        found.append(Calibration(mine, device, "hopper", "bf16", model, 0.0).to_dict())
    return found


@contextmanager
def _specs(model: str, run: Values, cluster: Values, moved: tuple[Term, float] | None) -> Iterator[Specs]:
    """Both as files, read as the command reads them, with one term moved."""
    with tempfile.TemporaryDirectory() as at:
        if moved is not None and not moved[0].keys:
            (Path(at) / "constants.yaml").write_text(yaml.safe_dump(_constants(model, moved)))
            cluster = {**cluster, "calibration": ["constants.yaml"]}
        for name, values in (("run", run), ("cluster", cluster)):
            (Path(at) / f"{name}.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        overrides = () if moved is None else moved[0].overrides(moved[1])
        yield read_specs(Path(at) / "run.yaml", Path(at) / "cluster.yaml", overrides)


def _null(problem: Problem) -> float:
    found = solve(replace(problem, restriction=Restriction.NO_AFFINITY))
    return found.best_rate if isinstance(found, Placement) else math.nan


@cache
def mixed(model: str, moved: tuple[Term, float] | None = None) -> tuple[tuple[float, float], tuple[float, float], str]:
    """RA-11: the mix over 72 H800 and over 208 H20, the null model's on the mix over both, and the mix's bottleneck."""
    rates, null, binds = [], math.nan, ""
    for h800, h20 in FLEETS:
        with _specs(model, *_ra_11(model, h800, h20), moved) as specs:
            found = forecast(specs)
            assert found.plan.placement is not None
            assert found.problem is not None
            rates.append(found.plan.placement.best_rate)
            if h800 and h20:
                binds = found.plan.placement.binds[0]
                null = math.nan if moved else _null(found.problem)
    mix, *types = rates
    return (mix / types[0], mix / types[1]), (null / types[0], null / types[1]), binds


def _ra_11(model: str, h800: int, h20: int) -> tuple[Values, Values]:
    shapes = (*AGENTIC, "swe") if model == "Qwen3-32B" else AGENTIC
    return run_of(model, shapes, tensor_parallel=[1, 2, 4], prefill_decode="off"), cluster_of(h800, h20)


def _ra_18(model: str, p: int) -> tuple[Values, Values]:
    return run_of(model, ["swe"], batch=128, tensor_parallel=[4], in_flight=IN_FLIGHT), cluster_of(8 * p, 32 - 8 * p)


def _given(specs: Specs, p: int, roles: tuple[Role, Role]) -> tuple[Placement, Problem]:
    fixed = [
        Deployment("h800", roles[0], 4, 2 * p),
        Deployment("h20", roles[1], 4, 8 - 2 * p),
        Deployment("train", Role.TRAINER, 1, TRAINERS),
    ]
    question = planning_problem(specs, fixed)
    return solve_placement(question), question.problem


@cache
def split(model: str, p: int, moved: tuple[Term, float] | None = None) -> tuple[float, float, str]:
    """RA-18: xPyD of given engines over the same engines with both roles, the null model's on these, the bottleneck."""
    with _specs(model, *_ra_18(model, p), moved) as specs:
        whole, problem = _given(specs, p, (Role.ENGINE, Role.ENGINE))
        apart, _ = _given(specs, p, (Role.PREFILL, Role.DECODE))
        null = math.nan if moved else _null(problem)
    return apart.rate / whole.rate, null / whole.rate, apart.binds[0]


def splits_own(model: str, p: int) -> float:
    """The computed plan of the same devices over the given engines with both roles."""
    with _specs(model, *_ra_18(model, p), None) as specs:
        found = forecast(specs).plan.placement
        assert found is not None
        return found.best_rate / _given(specs, p, (Role.ENGINE, Role.ENGINE))[0].rate


def _engines(model: str) -> tuple[Term, ...]:
    base, _, _ = prior("hopper", moe=shape(model).is_moe)
    names = ("mfu", "mbu", "layer_s", "expert_passes") if shape(model).is_moe else ("mfu", "mbu", "layer_s")
    return tuple(
        Term(f"{device}.{name}", value, value / RANGE, 1.0 if name in SHARES else value * RANGE)
        for device in ("H20", "H800")
        for name in names
        for value in (getattr(base, name),)
    )


RESERVE = Term("placement.utilisation", 0.95, 0.95 / RANGE, 1.0, (("placement.utilisation", 1.0),))


def _terms_of_ra_11(model: str) -> tuple[Term, ...]:
    speeds = {"push": 0.45, "pull": 2.6, "load": 6.46}
    publish = tuple((f"cluster.publish.{name}_gb_per_s", v / speeds["push"]) for name, v in speeds.items())
    training = Term("placement.train.mfu", 0.40, 0.40 / RANGE, 1.0, (("placement.train.mfu", 1.0),))
    return (*_engines(model), RESERVE, training, Term("publish.push_gb_per_s", 0.45, 0.45 / RANGE, 450, publish))


def _terms_of_ra_18(model: str, p: int) -> tuple[Term, ...]:
    link = CROSS_GB_PER_S * min(p, 4 - p)
    return (
        *_engines(model),
        RESERVE,
        Term("placement.in_flight", IN_FLIGHT, IN_FLIGHT / RANGE, IN_FLIGHT * RANGE, (("placement.in_flight", 1.0),)),
        Term("pools.h800.memory_gb", 80, 80 / RANGE, 80 * RANGE, (("cluster.pools.1.memory_gb", 1.0),)),
        Term("links.h800-h20", link, link / RANGE, link * RANGE, (("cluster.links.5.gb_per_s", 1.0),)),
    )


def needed(ratio: Callable[[Term, float], float], terms: Sequence[Term]) -> tuple[Term, float] | None:
    """The term that has to move least for the ratio to be a gain, and its value then; None if none alone gives one."""
    reach, found = 1.0, list[tuple[Term, float]]()
    while reach < RANGE and not found:
        reach, before = reach * STEP, reach
        for term in terms:
            for near, far in ((before, reach), (1 / before, 1 / reach)):
                no, yes = (min(max(term.value * x, term.low), term.high) for x in (near, far))
                if no != yes and ratio(term, yes) > SIGN:
                    found.append((term, _bisected(ratio, term, no, yes)))
    return min(found, key=lambda f: abs(math.log(f[1] / f[0].value)), default=None)


def _bisected(ratio: Callable[[Term, float], float], term: Term, no: float, yes: float) -> float:
    while abs(math.log(yes / no)) > CLOSE:
        middle = math.sqrt(yes * no)
        no, yes = (no, middle) if ratio(term, middle) > SIGN else (middle, yes)
    return yes


@dataclass(frozen=True, slots=True)
class Ratio:
    """One figure: the published value, the plan's and the null model's, the bottleneck, and the effect of a term."""

    name: str
    published: str
    plan: float
    null: float
    binds: str
    terms: tuple[Term, ...]
    moved: Callable[[Term, float], float]

    def cause(self) -> str:
        """The term that has to move least for a gain."""
        if self.plan > SIGN:
            return ""
        found = needed(self.moved, self.terms)
        return "none alone" if found is None else f"`{found[0].name}` {found[0].value:.3g} → {found[1]:.2g}"


def ratios_of_ra_11(model: str) -> tuple[Ratio, Ratio]:
    plan, null, binds = mixed(model)

    def one(i: int, name: str, published: str) -> Ratio:
        return Ratio(
            f"{model}: mix over {name}",
            published,
            plan[i],
            null[i],
            binds,
            _terms_of_ra_11(model),
            lambda term, value: mixed(model, (term, value))[0][i],
        )

    return one(0, "72 H800", "1.12–1.37"), one(1, "208 H20", "1.30–1.68")


PUBLISHED = {"Qwen3-32B": ("1.03", "1.05", "worst"), "Qwen3-30B-A3B": ("1.11", "1.21", "worst")}


def ratio_of_ra_18(model: str, p: int) -> Ratio:
    plan, null, binds = split(model, p)
    return Ratio(
        f"{model}: {p}P{4 - p}D",
        PUBLISHED[model][p - 1],
        plan,
        null,
        binds,
        _terms_of_ra_18(model, p),
        lambda term, value: split(model, p, (term, value))[0],
    )


def table() -> Iterator[str]:
    yield "| row | figure | published | plan | null model | binds | the term that has to move least for a gain |"
    yield "|---|---|---|---|---|---|---|"
    for model in ("Qwen3-8B", "Qwen3-32B"):
        yield from (_line("RA-11", r) for r in ratios_of_ra_11(model))
    for model in PUBLISHED:
        yield from (_line("RA-18", ratio_of_ra_18(model, p)) for p in (1, 2, 3))


def _line(row: str, r: Ratio) -> str:
    gains = r.published != "worst"
    cause = (r.cause() or "the sign is the published one") if gains else ""
    return f"| {row} | {r.name} | {r.published} | {r.plan:.2f} | {r.null:.2f} | {r.binds} | {cause} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specs", type=Path)
    at = parser.parse_args().specs
    if at is None:
        for line in table():
            print(line, flush=True)
        return
    asked = [(model, _ra_11(model, *fleet)) for model in ("Qwen3-8B", "Qwen3-32B") for fleet in FLEETS]
    asked += [(model, _ra_18(model, p)) for model in PUBLISHED for p in (1, 2, 3)]
    for model, (run, cluster) in asked:
        folder = at / f"{model}-{cluster['name']}-{run['batch']['trajectories']}"
        folder.mkdir(parents=True, exist_ok=True)
        for name, values in (("run", run), ("cluster", cluster)):
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        print(folder)


if __name__ == "__main__":
    main()
