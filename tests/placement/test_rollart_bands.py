"""The placer against RollArt's measurements (arXiv 2512.22560): order and sign, and the reason where the model differs.

Published figures are of whole training steps on real clusters; ours are the roofline's with a datasheet's priors: no
constant of it is fitted to them. So the tests check the order of the alternatives and the side of 1 that a ratio is on,
and their docstrings give the model's ratio beside the published one.

Turns and tokens per domain are not published, and all results depend on them. One figure is used to choose them: RA-3's
0.53 for FrozenLake, which the model gives only to actions of a word or two. That figure is a calibration; the ratios of
GEM-Math, RA-11 and RA-18 are predictions. They are of rollout alone: the command's plans for RA-11 and RA-18, with
trainer, window and publish, are in `benchmarks.papers.planned`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import rollart
from placement.architecture import shape_of
from placement.assign import assign
from placement.hardware import device
from placement.problem import DomainProfile, EnvironmentCost, Problem, Quantity, Restriction
from placement.roofline import RooflinePerformance
from placement.solve import solve
from placement.types import Demand, Deployment, Link, Placement, Plan, Pool, Role

QWEN3 = {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False}
MODELS: dict[str, dict[str, object]] = {
    "8B": QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "32B": QWEN3
    | {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "30B-A3B": QWEN3
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
"""The relevant fields of `config.json` of Qwen/Qwen3-8B, -32B and -30B-A3B."""

USD = {"H800": 5.28, "H20": 1.85}
"""Per hour, RollMux Table 1. A 2.85 of H20 costs as much as one H800."""


def domain(name: str, turns: float, new: float, output: float, *, wait_s: float = 0.0) -> DomainProfile:
    environment = EnvironmentCost(wait_s=wait_s)
    return DomainProfile(name, Quantity(turns), Quantity(new), Quantity(output), environment=environment)


FROZEN_LAKE = domain("frozen_lake", 40, 1500, 10)
"""Prefill-heavy: an action is a word or two. Chosen so that RA-3's 0.53 comes out, and used as it is for RA-11."""
WORDY_LAKE = domain("frozen_lake", 40, 800, 50)
"""The same task with a sentence per action, as one would have assumed."""
GEM_MATH = domain("gem_math", 3, 500, 2000)
"""Decode-heavy, at most 5 turns."""
SWE = domain("swe", 40, 500, 300)
"""40 turns to 32k tokens."""


def pools(h800: int, h20: int) -> tuple[Pool, ...]:
    counts = {"h800": ("H800", h800), "h20": ("H20", h20)}
    return tuple(Pool(name, device(kind), n, USD[kind]) for name, (kind, n) in counts.items() if n)


def links(h800: int, h20: int, *, cross_gb_per_s: float = 25.0) -> tuple[Link, ...]:
    """400 Gb/s per host of 8 in a pool, of which half send while half receive; 200 Gb/s between the two (§7.1)."""
    found = [Link(name, name, 50.0 * n / 8 / 2) for name, n in (("h800", h800), ("h20", h20)) if n]
    if h800 and h20:
        found.append(Link("h800", "h20", cross_gb_per_s * min(h800, h20) / 8))
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
            model,
            h800,
            h20,
            (FROZEN_LAKE, GEM_MATH),
            in_flight=in_flight,
            links=links(h800, h20),
            restriction=restriction,
            tensor_parallel=(1, 2, 4),
            gap=1e-3,
        )
        found.append(rate(asked))
    return found[0] / found[1], found[0] / found[2]


@pytest.mark.slow  # solves 6 plans
def test_ra_11_a_mix_beats_either_type_for_the_same_money() -> None:
    """Published: 1.12–1.37 over H800 only and 1.30–1.68 over H20 only, with each domain on its type. The model, with
    the domains of RA-3, batch 512 and α = 1 (1,024 in flight), Qwen3-8B: 1.16 and 1.52 if domains may be divided over
    pools, 1.24 and 1.63 with prefill and decode apart.

    The ratio depends on the work: with the wordier FrozenLake and 8,000 tokens of math, which the publication does not
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


def divided(
    model: str, prefills: int, *, work: DomainProfile = SWE, cross_gb_per_s: float = 25.0
) -> tuple[float, float]:
    """RA-18's set-up, xPyD of 8 H800 per P and 8 H20 per D (x + y = 4) at batch 128: rates of that split, and of the
    solver's own, over the aggregated rate of the same devices. The devices of the published baseline are not stated.
    The same devices is the strictest reading for a split of many H20, and the only reading that isolates the effect of
    splitting."""
    h800, h20 = 8 * prefills, 8 * (4 - prefills)
    wires = links(h800, h20, cross_gb_per_s=cross_gb_per_s)
    wishes = {"in_flight": 128, "tensor_parallel": (4,), "links": wires, "gap": 1e-3}
    split = (
        Deployment("h800", Role.PREFILL, 4, h800 // 4),
        Deployment("h20", Role.DECODE, 4, h20 // 4),
    )
    aggregated = rate(problem(model, h800, h20, (work,), restriction=Restriction.AGGREGATED, **wishes))
    manual = rate(problem(model, h800, h20, (work,), fixed=split, **wishes))
    return manual / aggregated, rate(problem(model, h800, h20, (work,), **wishes)) / aggregated


RA_18 = {"32B": ((1.26, 0.99, 0.60), (1.26, 1.22, 1.12)), "30B-A3B": ((1.01, 0.87, 0.63), (1.07, 1.04, 1.02))}
"""The model's gains of 1P3D, 2P2D and 3P1D, and of its own splits of the same devices."""


@pytest.mark.slow  # solves 9 plans
@pytest.mark.parametrize("model", RA_18)
def test_ra_18_the_solver_s_split_is_at_least_as_good_as_the_best_manual_one(model: str) -> None:
    """Published for 1P3D and 2P2D: 1.03 and 1.05 (32B dense), 1.11 and 1.21 (30B-A3B), 3P1D worst. That splitting
    gains, that 3P1D is worst and that a computed split is never below a manual one come out. Two things do not: the
    model gives the dense one the larger gain, and 1P3D the larger of the two. The tests below say why."""
    manual, own = zip(*(divided(model, p) for p in (1, 2, 3)), strict=True)
    assert all(mine >= theirs * (1 - 1e-3) for mine, theirs in zip(own, manual, strict=True))
    assert max(own) >= max(manual) * (1 - 1e-3)
    assert all(mine >= 1 - 1e-3 for mine in own)
    assert min(manual) == manual[2] < 1 < max(own)
    assert (manual, own) == (pytest.approx(RA_18[model][0], abs=0.03), pytest.approx(RA_18[model][1], abs=0.03))


def test_ra_18_what_a_split_takes_off_the_h20() -> None:
    """Why the dense model gains more here. Of a turn of SWE (500 in after 16,000, 300 out; TP 4, 16 at a time), H20
    spends 149 of 415 ms on prefill with the dense model and 31 of 227 ms with the mixture, whose 3.3e9 active
    parameters ask for a tenth of the arithmetic, and whose steps, half fixed cost, take as long as the dense model's. A
    split relieves the decoding devices of that share: 1.56 at the most, and 1.16. The cost of sharing an engine is not
    the reason. Where prefills stall the decoding, each with a step of its own, a simulation gives 1.19 and 1.04 for
    1P3D; where they share steps 1.16 and 1.00 (`test_closed_loop` holds the model to it). Nor are savings of a prefill
    engine that batches prompts: there are none here, where P is busy for 0.41 and 0.28 of its time. A mixture that
    reached an eighth of H20's peak in prefill, rather than the half that this model assumes and that is published for
    another mixture, would gain as much as the dense model."""
    shares = {}
    for model in RA_18:
        h20 = RooflinePerformance(shape_of(MODELS[model], name=model)).instance(device("H20"), 4)
        assert not isinstance(h20, str)
        turn = h20.turn_s(16, 500, 16_000, 300)
        shares[model] = 1 - 299 * h20.decode_step_s(16, 16_500 + 150) / 16 / turn
    assert shares == {"32B": pytest.approx(0.36, abs=0.01), "30B-A3B": pytest.approx(0.14, abs=0.01)}


@pytest.mark.slow  # solves 18 plans
def test_ra_18_the_published_order_is_that_of_a_link_that_binds() -> None:
    """The mixture first, and 2P2D before 1P3D before 3P1D: this order results where the hand-over binds. Its KV is 98
    kB per token against 262 kB at 1.7 times the rate, and 2P2D has two pairs of hosts to carry it.

    Here 1 GB/s per pair of hosts and only new tokens' KV moving: 0.37, 0.74, 0.37 against 0.24, 0.45, 0.22. The same
    happens at 20 GB/s if whole contexts move every turn, as they must in an engine that cannot return KV from decode to
    prefill. To gain as published as well, the link would have to bind the dense model and not the mixture: at 75 to 100
    GB/s per pair of hosts with whole contexts moving, 1P3D gives 0.89 to 1.18 and 1.01. That is three to four times the
    200 Gb/s stated. The solver does not hand over more KV than the link can carry: its own splits gain on any link."""
    gains = {model: [divided(model, p, cross_gb_per_s=1.0) for p in (1, 2, 3)] for model in RA_18}
    (dense, _), (experts, _) = ([list(column) for column in zip(*gains[m], strict=True)] for m in RA_18)
    assert all(e > 1.3 * d for e, d in zip(experts, dense, strict=True))
    for manual in (dense, experts):
        assert manual[1] > 1.5 * manual[0] > 1.5 * manual[2] * (1 - 1e-3)
    assert all(own >= 1 - 1e-3 for rows in gains.values() for _, own in rows)


@pytest.mark.slow  # solves 12 plans
def test_ra_18_order_hangs_on_the_work() -> None:
    """With long observations and short actions (700 in, 100 out), as "prefill-heavy" may mean: 1P3D gives the mixture
    1.32 and the dense model, whose one P keeps D at 0.38 of its time, 1.23; 2P2D then is the better one of the dense
    model, at 1.47, and 1.09 of the mixture. So each half of the published order can be had, and not both from the same
    work."""
    observant = domain("swe", 40, 700, 100)
    dense, experts = ([divided(model, p, work=observant)[0] for p in (1, 2)] for model in RA_18)
    assert experts[0] > dense[0] > 1
    assert dense[1] > dense[0]
    assert dense[1] > experts[1] > 1


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
