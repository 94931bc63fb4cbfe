"""Each family trains: trainer and embedded engine compute the same policy, and transformers loads what is published."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollart.train.learner import Learner
from tests.engine.families import MODELS, VOCAB, make
from tests.engine.models import DEVICE
from tests.train.test_engine_agreement import generated
from tests.train.trainkit import batch, config, publish_version, sample

pytestmark = pytest.mark.slow  # imports transformers


@pytest.mark.parametrize("name", MODELS)
def test_trains_and_is_published(name: str, tmp_path: Path) -> None:
    """Sequences are longer than the windows. Three steps change the weights."""
    from transformers import AutoModelForCausalLM

    make(name, tmp_path / "model", scale=0.05)
    learner = Learner(config(tmp_path, model={"path": str(tmp_path / "model")}, lr=1e-2))
    before = {key: value.clone() for key, value in learner.policy.model.state_dict().items()}
    for version in range(3):
        learner.train(batch([sample(str(i), turns=[(13, 9)], vocab=VOCAB) for i in range(4)], VOCAB), version)
    changed = [key for key, value in learner.policy.model.state_dict().items() if not torch.equal(value, before[key])]
    assert len(changed) == len(before)
    path = publish_version(learner, tmp_path, 3)
    made = batch(generated(path, torch.float32, 1.0), VOCAB, learner.policy.experts)
    assert (made.experts is not None) == ("moe" in name)
    assert learner.logprobs(made) == pytest.approx(made.logprobs, abs=1e-4)
    ids = torch.arange(40, device=DEVICE)[None] % VOCAB
    with torch.no_grad():
        ours = learner.policy.model(input_ids=ids).logits
        theirs = AutoModelForCausalLM.from_pretrained(path).to(DEVICE).eval()(input_ids=ids).logits
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
