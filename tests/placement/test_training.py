"""The trainer's memory, time and useful size."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from placement.architecture import DecoderShape, shape_of
from placement.hardware import device
from placement.problem import DomainProfile, Problem, Quantity, TrainingConstants, TrainingWork
from placement.roofline import RooflinePerformance
from placement.training import TrainingLayout, adapter_parameters, fit_training_constants, mfu, training_layout
from placement.types import Link, Pool

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}


def shape(hidden: int, wide: int, layers: int, heads: int) -> DecoderShape:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    return shape_of({**QWEN3, **sizes})


SHAPES = {"8B": shape(4096, 12288, 36, 32), "32B": shape(5120, 25600, 64, 64)}


def asked(size: str, name: str, count: int, *links: Link, sequence: int = 16_384, **train: Any) -> Problem:
    domain = DomainProfile("d", Quantity(1), Quantity(500), Quantity(4000))
    return Problem(
        pools=(Pool("p", device(name), count),),
        domains=(domain,),
        performance=RooflinePerformance(SHAPES[size]),
        links=links,
        train=TrainingWork(256, sequence=sequence, **train),
    )


def laid(problem: Problem) -> TrainingLayout:
    assert problem.train is not None
    found = training_layout(problem, problem.pools[0], problem.train)
    assert isinstance(found, TrainingLayout), found
    return found


def device_gb(layout: TrainingLayout, devices: int) -> float:
    """Memory that each of so many devices needs."""
    return layout.state_gb / devices + layout.activations_gb + layout.logits_gb + layout.reserve_gb


def reached(problem: Problem) -> float:
    assert problem.train is not None
    return mfu(problem, problem.pools[0], problem.train)


def test_memory_is_counted_part_by_part() -> None:
    """32B at a context of 40,960: 16 bytes per parameter, the layers' inputs and one layer, two copies of logits."""
    found = laid(asked("32B", "H800", 96, sequence=40_960, recompute=True, split=2))
    assert found.state_gb == pytest.approx(16 * SHAPES["32B"].parameters / 1e9)
    assert found.logits_gb == pytest.approx(40_960 * 151_936 * 4 / 1e9), "two copies over two devices"
    assert found.activations_gb == pytest.approx(
        (2 * 64 * 5120 + 2 * (4 * 5120 + 4 * 25600 + 2 * 64 * 128 + 2048)) * 40_960 / 2 / 1e9
    )
    assert (found.reserve_gb, device_gb(found, found.least) <= 80) == (8.0, True)
    assert device_gb(found, found.least - found.split) > 80, "fewer devices do not hold it"
    problem = asked("32B", "H800", 96, sequence=40_960, recompute=False, split=2)
    assert problem.train is not None
    kept = training_layout(problem, problem.pools[0], problem.train)
    assert isinstance(kept, str)
    assert "activations" in kept, "without recomputation it does not fit"


def test_adapters_need_no_gradients_of_the_model() -> None:
    whole = laid(asked("32B", "H100", 8, split=1, recompute=True))
    rank = adapter_parameters(SHAPES["32B"], 32, ("all-linear",))
    assert rank == pytest.approx(0.27e9, rel=0.02)
    assert adapter_parameters(SHAPES["32B"], 32, ("q_proj",)) == 32 * (5120 + 8192) * 64
    adapted = laid(asked("32B", "H100", 8, split=1, recompute=True, trained_parameters=rank))
    assert whole.least > 8 >= 2 * adapted.least, "half of a host holds it"
    alone, rank = {"split": 1, "recompute": True}, adapter_parameters(SHAPES["8B"], 32, ("all-linear",))
    work = laid(asked("8B", "H100", 1, **alone)).work
    adapted = laid(asked("8B", "H100", 1, trained_parameters=rank, **alone))
    assert adapted.work == pytest.approx(work * 0.75), "no gradients of weights"


def test_the_interconnect_takes_time() -> None:
    short: dict[str, Any] = {"sequence": 4096, "microbatch_tokens": 4096, "recompute": True, "split": 1}
    with_nvlink, without = asked("32B", "H200", 8, **short), asked("32B", "L40S", 96, **short)
    near, slow = asked("32B", "H800", 96, **short), asked("32B", "H800", 96, Link("p", "p", 6.0), **short)
    assert reached(with_nvlink) > 0.27 > 0.20 > reached(without), "PCIe alone does not reach the prior"
    assert reached(asked("32B", "L40S", 96)) < 0.3, "and not with long sequences, which are recomputed"
    assert reached(slow) < reached(near) / 2
    assert reached(asked("8B", "H100", 1, recompute=False, split=1, sequence=1024)) == pytest.approx(0.40), (
        "one device has nothing to wait for"
    )


def test_each_useful_device_has_a_micro_batch() -> None:
    found = laid(asked("8B", "H800", 256))
    assert found.most == 256 * 4500 // 16_384
    assert laid(asked("8B", "H800", 256, minibatches=4)).most < found.most / 3


def test_a_fit_finds_the_constants_of_what_was_measured() -> None:
    truth = TrainingConstants(mfu=0.31, activations=1.7)
    problem = asked("8B", "H100", 8, devices=8, split=1, recompute=True)
    assert problem.train is not None
    pool, train = problem.pools[0], problem.train
    true = training_layout(problem, pool, replace(train, constants=truth))
    assert isinstance(true, TrainingLayout)
    gb = device_gb(true, 8) - true.reserve_gb
    found = fit_training_constants(problem, pool, train, seconds_per_token=true.work / 4500, peak=(gb, 16_384))
    assert found.mfu == pytest.approx(0.31, rel=1e-3)
    assert found.activations == pytest.approx(1.7)
    assert TrainingConstants.from_dict(asdict(found)) == found


@pytest.mark.parametrize(
    ("given", "name"), [({"mfu": 1.5}, "mfu"), ({"mfu": "x"}, "mfu"), ({"speed": 1}, "speed"), (3, "3")]
)
def test_constants_that_mean_nothing_are_named(given: object, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        TrainingConstants.from_dict(given)
