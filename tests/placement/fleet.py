"""A small mixed fleet and two domains that want different hardware, for tests that need a real plan."""

from __future__ import annotations

from collections.abc import Mapping

from placement.architecture import shape_of
from placement.hardware import device
from placement.problem import DomainProfile, EnvironmentCost, Problem, Quantity
from placement.roofline import RooflinePerformance
from placement.types import Link, Pool

QWEN3_8B: Mapping[str, object] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
"""The relevant fields of `config.json` of Qwen/Qwen3-8B."""

PERFORMANCE = RooflinePerformance(shape_of(QWEN3_8B, name="Qwen3-8B"))

AGENTIC = DomainProfile(
    "agentic", Quantity(20), Quantity(1500), Quantity(100), weight=2, environment=EnvironmentCost(wait_s=0.5)
)
MATH = DomainProfile("math", Quantity(1), Quantity(500), Quantity(8000))


def problem(h800: int = 4, h20: int = 8, *, cross_gb_per_s: float = 25.0, **wishes: object) -> Problem:
    """H800 and H20 pools, joined; both domains unless others are given."""
    pools = [Pool(k.lower(), device(k), n, usd) for k, n, usd in (("H800", h800, 5.28), ("H20", h20, 1.85)) if n]
    links = [Link(p.name, p.name, 100.0) for p in pools]
    if len(pools) == 2:
        links.append(Link("h800", "h20", cross_gb_per_s))
    given: dict[str, object] = {"domains": (AGENTIC, MATH), "tensor_parallel": (1, 2), "links": tuple(links)}
    return Problem(pools=tuple(pools), performance=PERFORMANCE, **(given | wishes))  # type: ignore[arg-type]
