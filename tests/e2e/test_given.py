"""Supervised fine-tuning in real processes: a run that is killed continues with the right samples."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from rollart.control.given import GivenBatches
from rollart.errors import SpecError
from rollart.launch.prepare import given_samples
from rollart.launch.resume import refuse_changed
from rollart.quickstart.tokenizer import vocabulary
from rollart.settings.resolve import resolve_saved
from rollart.train.config import load_config
from rollart.train.learner import Learner
from tests.e2e.harness import Home, ledger, tiny
from tests.train.trainkit import batch

pytestmark = pytest.mark.slow  # two lives of a trainer: about 5 s each

LINES, BATCH, EPOCHS = 30, 7, 8
STEPS = 5 * EPOCHS


def test_a_killed_run_continues_with_the_next_samples(home: Home) -> None:
    """Its last version has the weights, to the bit, of a learner that is given each epoch's lines once."""
    words = [word for word in vocabulary() if not word.startswith("<")]
    lines = [{"prompt": words[i], "completion": f" {words[i + 1]} {words[i + 2]}"} for i in range(LINES)]
    (home.path / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    spec = tiny(batch={"trajectories": BATCH}, domains=[], functions=[])
    del spec["steps"], spec["staleness"]
    spec["training"] = {"algorithm": "sft", "data": "train.jsonl", "epochs": EPOCHS, "lr": 1e-2, "minibatches": 2}
    run = home.launch(spec)
    run.until_step(3)
    run.kill()
    run.end()
    assert run.step() < STEPS
    home.resume().finished()
    with ledger(home.directory) as db:
        rows = db.execute("SELECT version, samples, tokens FROM versions ORDER BY version").fetchall()
    assert rows[1:] == [(v, n, 3 * n) for v in range(1, STEPS + 1) for n in [BATCH if v % 5 else LINES % BATCH]]

    learner = Learner(load_config(home.directory / "trainer.json"))
    saved = resolve_saved(home.directory / "resolved.yaml")
    batches = GivenBatches(given_samples(saved, home.directory / "tokenizer"), BATCH, saved.run.seed)
    for step in range(STEPS):
        learner.train(batch(batches((), step), vocab=128), version=step)
    found = load_file(home.directory / "weights" / f"v{STEPS:06}" / "model.safetensors")
    ours = learner.policy.model.state_dict()
    assert all(torch.equal(found[name], ours[name]) for name in found)
    with pytest.raises(SpecError, match=r"a resume changes batch\.trajectories: 7 -> 9 \(rule: as recorded; the"):
        refuse_changed(resolve_saved(home.directory / "resolved.yaml", ["batch.trajectories=9"]), home.directory)
    with (home.path / "train.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(SpecError, match=r"training\.data is 'train\.jsonl' with SHA-256 .*as training\.data_sha256"):
        given_samples(saved, home.directory / "tokenizer")
