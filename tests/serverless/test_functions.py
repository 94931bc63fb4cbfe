"""The functions that ship: a rule, a process verifier and a reward model."""

from __future__ import annotations

import asyncio
import pathlib

import numpy as np
import pytest
from safetensors.numpy import save_file

from serverless.backends.local import LocalBackend
from serverless.deploy.package import build
from serverless.functions.exact_match import exact_match
from serverless.functions.process_verifier import process_verifier
from serverless.functions.reward_model import WEIGHTS, RewardModel, trigrams
from serverless.pipeline import Offload
from serverless.spec import FunctionSpec
from serverless.types import Item, ModelFault, Outcome, Scored
from tests.serverless.support import item


def said(text: str, reference: str | None = "Forty two") -> Item:
    return Item("a", ({"role": "assistant", "content": text},), reference)


@pytest.mark.parametrize(("text", "value"), [
    ("forty  TWO", 1.0), ("it is <answer>forty two</answer>.", 1.0), (r"\boxed{forty two}", 1.0),
    ("so\n#### forty two", 1.0), ("<answer>41</answer> no, <answer>forty two</answer>", 1.0), ("41", 0.0),
    ("forty two <answer>41</answer>", 0.0), ("<answer></answer>", 0.0),
])
def test_exact_match(text: str, value: float) -> None:
    outcome = exact_match(said(text))
    assert isinstance(outcome, Scored)
    assert outcome.value == value


def test_exact_match_has_no_opinion_without_a_reference() -> None:
    assert exact_match(said("  ")) == ModelFault(0.0, "empty completion")
    with pytest.raises(ValueError, match="no reference_answer"):
        exact_match(said("x", None))


def test_the_process_verifier_pays_turns_that_lead_to_new_states() -> None:
    outcome = process_verifier(item(observations=["s0", "s1", "s1", "s0", "s2"]))
    assert outcome == Scored(0.5, {"repeats": 2.0}, (0.25, 0.0, 0.0, 0.25))
    with pytest.raises(ValueError, match="observations"):
        process_verifier(item())


def weights(directory: pathlib.Path, seed: int = 0) -> pathlib.Path:
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"embed": (64, 8), "w1": (8, 16), "b1": (16,), "w2": (16,), "b2": ()}
    save_file({k: np.asarray(rng.normal(size=s), dtype=np.float32) for k, s in shapes.items()}, directory / WEIGHTS)
    return directory / WEIGHTS


def test_the_reward_models_features_are_the_same_anywhere() -> None:
    assert trigrams("rollart", 64).tolist() == trigrams("rollart", 64).tolist()
    assert len(trigrams("rollart", 64)) == 5
    assert len(trigrams("", 64)) == 1
    assert trigrams("abc", 2**31).tolist() == [_fnv(b"abc") % 2**31]


def _fnv(data: bytes) -> int:
    value = 14695981039346656037
    for byte in data:
        value = (value ^ byte) * 1099511628211 % 2**64
    return value


@pytest.mark.slow  # real processes, numpy in the zygote
def test_the_reward_model_runs_as_a_function_with_its_packed_weights(tmp_path: pathlib.Path) -> None:
    path = weights(tmp_path)
    spec = FunctionSpec(name="rm", source="serverless.functions.reward_model", artefacts=(str(path),))
    here = RewardModel()
    here.load(tmp_path)

    async def main() -> Outcome:
        packed = build(spec)
        assert packed.spec.preload == ("numpy", "safetensors.numpy")
        path.unlink()
        async with LocalBackend() as backend, Offload([packed], backend) as offload:
            return await offload.submit("rm", item(), 20.0)

    outcome, expected = asyncio.run(main()), here(item())
    assert isinstance(outcome, Scored)
    assert outcome.value == pytest.approx(float(expected.value))
    assert 0.0 < outcome.value < 1.0
