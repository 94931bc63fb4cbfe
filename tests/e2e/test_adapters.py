"""Two domains with adapters of their own over a mixture of experts, one engine and one trainer, on real processes."""

from __future__ import annotations

import copy
import json

import pytest
from safetensors.torch import load_file

from rollart.lora import ADAPTER_MODEL
from rollart.tools.export import export_version
from tests.e2e.harness import MOVES_WEIGHTS, STEPS, Home, events, ledger, sound, tiny

pytestmark = pytest.mark.slow  # starts a trainer and an engine: torch twice, about 8 s

EXPERTS = {
    "model__init__architectures": ["Qwen3MoeForCausalLM"],
    "model__init__model_type": "qwen3_moe",
    "model__init__num_hidden_layers": 2,
    "model__init__num_experts": 4,
    "model__init__num_experts_per_tok": 2,
    "model__init__moe_intermediate_size": 16,
}


def test_both_adapters_learn_and_the_engine_samples_with_them(home: Home) -> None:
    """And every trained token is replayed on the experts that the engine chose for it."""
    pytest.importorskip("peft")
    spec = tiny(
        **EXPERTS,
        domains__0__advantage=MOVES_WEIGHTS,
        schedule="sync",
        staleness=0,
        training__lora={"rank": 4},
        checkpoints__keep=STEPS + 1,
        training__lr=0.05,
        weights__store={"kind": "files", "url": "store", "local": str(home.path / "disk")},
    )
    spec["domains"].append(copy.deepcopy(spec["domains"][0]))
    for domain, name in zip(spec["domains"], ("left", "down"), strict=True):
        domain |= {"name": name, "adapter": name}
    home.launch(spec).finished()
    with ledger(home.directory) as db:
        metrics = [json.loads(one) for (one,) in db.execute("SELECT metrics FROM versions WHERE version > 0")]
    sound(home.directory)
    assert [one["replayed_share"] for one in metrics] == [1.0] * STEPS
    assert max(one["behaviour_gap"] for one in metrics) < 1e-4, "the log-probabilities of engine and trainer"
    weights = home.directory / "weights"
    for name in ("left", "down"):
        first, last = (load_file(weights / f"v{n:06d}" / name / ADAPTER_MODEL) for n in (0, STEPS))
        moved = {key: float((last[key] - first[key]).abs().max()) for key in first}
        assert max(moved.values()) > 0.01
    both = [load_file(weights / f"v{STEPS:06d}" / name / ADAPTER_MODEL) for name in ("left", "down")]
    assert any(not both[0][key].equal(both[1][key]) for key in both[0])
    files = sum((weights / f"v{STEPS:06d}" / name / ADAPTER_MODEL).stat().st_size for name in ("left", "down"))
    sent = [one["sent_bytes"] for one in events(home.directory, "weights_pushed")]
    assert max(sent[1:]) < files + 4096, "the weights below went with the first version"
    refused = home.run("export", "tiny-1", "-o", "out", "--adapter", "up")
    assert (refused.returncode, "has no adapter 'up': it has the adapters down, left" in refused.stderr) == (2, True)
    export_version(home.directory, "latest", home.path / "out", force=False, adapter="left")
    assert (home.path / "out" / "model.safetensors").is_file()
