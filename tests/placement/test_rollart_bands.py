"""The placer against what RollArt measured (arXiv 2512.22560): order and sign, and where the model cannot follow, why.

Published figures are of whole training steps on real clusters; ours are the roofline's with a datasheet's priors: no
constant of it is fitted to them. So the tests hold the order of the alternatives and the side of 1 that a ratio is on,
and say in their docstring what ratio the model gives beside the published one.

Turns and tokens per domain are not published, and everything hangs on them. One figure is used to choose them: RA-3's
0.53 for FrozenLake, which the model gives only to actions of a word or two. That one is a calibration; the ratios of
GEM-Math, RA-11 and RA-18 are predictions.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import rollart
from placement.architecture import shape_of
from placement.assign import assign
from placement.hardware import device
from placement.problem import Problem, Restriction
from placement.roofline import RooflinePerformance
from placement.solve import solve
from placement.types import Demand, Deployment, Link, Placement, Plan, Pool, Role
from placement.workload import DomainProfile, EnvironmentCost, Quantity

QWEN3 = {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False}
MODELS: dict[str, dict[str, object]] = {
    "8B": QWEN3 | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "32B": QWEN3 | {
        "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "30B-A3B": QWEN3 | {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
        "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip
"""What matters of `config.json` of Qwen/Qwen3-8B, -32B and -30B-A3B."""

USD = {"H800": 5.28, "H20": 1.85}
"""Per hour, RollMux Table 1. A 2.85 of H20 costs as much as one H800."""


def domain(name: str, turns: float, new: float, output: float, *, wait_s: float = 0.0) -> DomainProfile:
    environment = EnvironmentCost(wait_s=wait_s)
    return DomainProfile(name, Quantity(turns), Quantity(new), Quantity(output), environment=environment)


FROZEN_LAKE = domain("frozen_lake", 40, 1500, 10)
"""Prefill-heavy: an action is a word or two. Chosen so that RA-3's 0.53 comes out, and used as it is for RA-11."""
WORDY_LAKE = domain("frozen_lake", 40, 800, 50)
"""The same task with a sentence per action: what one would have assumed."""
GEM_MATH = domain("gem_math", 3, 500, 2000)
"""Decode-heavy, at most 5 turns."""
SWE = domain("swe", 40, 500, 300)
"""40 turns to 32k tokens."""


def pools(h800: int, h20: int) -> tuple[Pool, ...]:
    counts = {"h800": ("H800", h800), "h20": ("H20", h20)}
    return tuple(Pool(name, device(kind), n, USD[kind]) for name, (kind, n) in counts.items() if n)


def links(h800: int, h20: int) -> tuple[Link, ...]:
    """400 Gb/s per host of 8 in a pool, of which half send while half receive; 200 Gb/s between the two (§7.1)."""
    found = [Link(name, name, 50.0 * n / 8 / 2) for name, n in (("h800", h800), ("h20", h20)) if n]
    if h800 and h20:
        found.append(Link("h800", "h20", 25.0 * min(h800, h20) / 8))
    return tuple(found)


def problem(model: str, h800: int, h20: int, domains: tuple[DomainProfile, ...], **wishes: object) -> Problem:
    performance = RooflinePerformance(shape_of(MODELS[model], name=model))
    return Problem(pools=pools(h800, h20), domains=domains, performance=performance, **wishes)  # type: ignore[arg-type]


def rate(asked: Problem) -> float:
    found = solve(asked)
    assert isinstance(found, Placement), found
    return found.rate


def h20_over_h800(work: DomainProfile, in_flight: int | None) -> float:
    """RA-3's set-up: Qwen3-8B on 2 H800 against 6 H20, which cost the same; how many times the H800s' rate."""
    rates = [
        rate(
            problem(
                "8B", h800, h20, (work,), in_flight=in_flight, tensor_parallel=(1,), restriction=Restriction.AGGREGATED
            )
        )
        for h800, h20 in ((2, 0), (0, 6))
    ]
    return rates[1] / rates[0]


@pytest.mark.parametrize("in_flight", [16, 32, 64])
def test_ra_3_equal_money_goes_further_on_h800_for_prefill_and_on_h20_for_decode(in_flight: int) -> None:
    """Published: H20 at 0.53 of the H800s' rate on FrozenLake; on GEM-Math H800 at 0.49–0.79 of the H20s', over a sweep
    of batch sizes. The model, with 16 to 64 trajectories in flight: 0.53–0.54 by choice of the work (0.91–0.98 with a
    sentence per action: the order, not the size), and 0.61–0.77."""
    assert 0.5 < h20_over_h800(FROZEN_LAKE, in_flight) < 0.56
    assert h20_over_h800(WORDY_LAKE, in_flight) < 1
    assert 0.49 < 1 / h20_over_h800(GEM_MATH, in_flight) < 0.79


@pytest.mark.slow  # solves 18 plans
def test_ra_3_without_the_bound_on_trajectories_in_flight_h20_is_overrated() -> None:
    """Batches limited by memory alone fill six H20 as well as two H800, and the model leaves the published band: H800
    at 0.34 of the H20s' rate on GEM-Math (0.28 with 8,000 tokens in one turn; published 0.49–0.79). The fewer are in
    flight, the fewer share the fixed costs and weight traffic of each H20: 0.82 with 8 of them. On the wordier
    FrozenLake the sign itself is wrong without the bound (H20 at 1.04 of the H800s' rate) and right with it."""
    assert h20_over_h800(WORDY_LAKE, None) > 1
    bounds = [8, 16, 32, 64, 128, 256, None]
    ratios = [1 / h20_over_h800(GEM_MATH, bound) for bound in bounds]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] < 0.49 < ratios[3]
    assert 1 / h20_over_h800(domain("long", 1, 500, 8000), None) < 0.3


def mixes(model: str, restriction: Restriction, *, in_flight: int | None) -> tuple[float, float]:
    """RA-11's set-up, beside 32 H800 that train: rates of 64 H800 + 24 H20 over 72 H800's and over 208 H20's."""
    found = []
    for h800, h20 in ((64, 24), (72, 0), (0, 208)):
        asked = problem(
            model, h800, h20, (FROZEN_LAKE, GEM_MATH),
            in_flight=in_flight, links=links(h800, h20), restriction=restriction, tensor_parallel=(1, 2, 4), gap=1e-3,
        )  # fmt: skip
        found.append(rate(asked))
    return found[0] / found[1], found[0] / found[2]


@pytest.mark.slow  # solves 6 plans
def test_ra_11_a_mix_beats_either_type_for_the_same_money() -> None:
    """Published: 1.12–1.37 over H800 only and 1.30–1.68 over H20 only, with each domain on its type. The model, with
    the domains of RA-3, batch 512 and α = 1 (1,024 in flight), Qwen3-8B: 1.16 and 1.52 if domains may be divided over
    pools, 1.24 and 1.63 with prefill and decode apart.

    It hangs on the work: with the wordier FrozenLake and 8,000 tokens of math, which what is published does not
    exclude, 208 H20 beat the mix (0.86 to 0.88)."""
    over_h800, over_h20 = mixes("8B", Restriction.AGGREGATED, in_flight=1024)
    assert over_h800 > 1.1
    assert over_h20 > 1.3
    full = mixes("8B", Restriction.FULL, in_flight=1024)
    assert full[0] >= over_h800
    assert full[1] >= over_h20


def test_ra_11_holds_for_the_larger_model() -> None:
    """Qwen3-32B: 1.08 over H800 only and 1.76 over H20 only. Published bands are over 8B to 32B together."""
    over_h800, over_h20 = mixes("32B", Restriction.AGGREGATED, in_flight=1024)
    assert over_h800 > 1.05
    assert over_h20 > 1.3


@pytest.mark.slow  # solves 3 plans
def test_ra_11_a_pool_per_domain_can_be_worse_than_one_type() -> None:
    """Strict affinity, as RollArt has it, loses to 72 H800 where pool sizes do not fit the demand: 0.96 (24 H20 are
    fewer than the decode-heavy half asks for)."""
    assert mixes("8B", Restriction.STRICT, in_flight=1024)[0] < 1.0


def divided(model: str, prefills: int, decodes: int) -> tuple[float, float]:
    """RA-18's set-up, xPyD of 8 H800 per P and 8 H20 per D at batch 128: rates of that split, and of the solver's own,
    over what the same devices do aggregated."""
    h800, h20 = 8 * prefills, 8 * decodes
    wishes = {"in_flight": 128, "tensor_parallel": (4,), "links": links(h800, h20), "gap": 1e-3}
    split = (
        Deployment("h800", Role.PREFILL, 4, h800 // 4),
        Deployment("h20", Role.DECODE, 4, h20 // 4),
    )
    aggregated = rate(problem(model, h800, h20, (SWE,), restriction=Restriction.AGGREGATED, **wishes))
    manual = rate(problem(model, h800, h20, (SWE,), fixed=split, **wishes))
    return manual / aggregated, rate(problem(model, h800, h20, (SWE,), **wishes)) / aggregated


@pytest.mark.slow  # solves 9 plans
@pytest.mark.parametrize("model", ["32B", "30B-A3B"])
def test_ra_18_the_solver_s_split_is_at_least_as_good_as_the_best_manual_one(model: str) -> None:
    """Published for 1P3D and 2P2D: 1.03 and 1.05 (32B dense), 1.11 and 1.21 (30B-A3B), 3P1D worst. The model's manual
    splits: 1.26 and 0.99 (dense), 1.00 and 0.86 (MoE), 0.60 and 0.62 for 3P1D; its own: 1.26 and 1.22, 1.06 and 1.03.

    So the order of splits and the gain are there, and that the mixture of experts gains more than the dense
    model is not: the roofline gives it the least, since its decode step on either type is mostly fixed cost. What
    RollArt's baseline loses by running prefills between decode steps of vLLM 0.8.4 is not in the model."""
    manual, own = zip(*(divided(model, p, 4 - p) for p in (1, 2, 3)), strict=True)
    assert all(mine >= theirs * (1 - 1e-3) for mine, theirs in zip(own, manual, strict=True))
    assert all(mine >= 1 - 1e-3 for mine in own)
    assert min(manual) == manual[2]
    assert max(own) >= 1.03


def test_ra_21_the_mixed_cluster_costs_0_838_of_the_baseline() -> None:
    """96 H800 + 32 H20 against 128 H800, at the prices that rollart ships: (96·5.28 + 32·1.85) / (128·5.28)."""
    listed = yaml.safe_load((Path(rollart.__file__).parent / "configs" / "prices.yaml").read_text())["prices"]
    usd = {p["name"]: p["usd"] for p in listed if p["unit"] == "device-hour"}

    def hourly(h800: int, h20: int) -> float:
        mixed = [Pool(k.lower(), device(k), n, usd[k]) for k, n in (("H800", h800), ("H20", h20)) if n]
        plan = assign(mixed, [Demand(Role.ENGINE, 1, 8)])
        assert isinstance(plan, Plan)
        return plan.usd_per_hour

    assert (hourly(128, 0), hourly(96, 32)) == (pytest.approx(675.84), pytest.approx(566.08))
    assert round(hourly(96, 32) / hourly(128, 0), 3) == 0.838
