"""A mixture of experts in a whole run on real processes: its trainer replays the experts that its engine chose."""

from __future__ import annotations

import json

import pytest

from tests.e2e.harness import STEPS, Home, ledger, sound, tiny

pytestmark = pytest.mark.slow  # starts a trainer and an engine: torch twice, about 6 s

EXPERTS = {
    "model__init__architectures": ["Qwen3MoeForCausalLM"],
    "model__init__model_type": "qwen3_moe",
    "model__init__num_hidden_layers": 2,
    "model__init__num_experts": 4,
    "model__init__num_experts_per_tok": 2,
    "model__init__moe_intermediate_size": 16,
}


def test_every_trained_token_is_replayed(home: Home) -> None:
    home.launch(tiny(**EXPERTS)).finished()
    sound(home.directory)
    with ledger(home.directory) as db:
        metrics = [json.loads(one) for (one,) in db.execute("SELECT metrics FROM versions WHERE version > 0")]
    assert [one["replayed_share"] for one in metrics] == [1.0] * STEPS
    assert metrics[0]["mismatch_gap"] < 1e-4
