"""Adapters of domains in one trainer: each learns as if its domain were trained alone, and versions hold all."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rollart.architecture import read_architecture, stamp_of
from rollart.collective import BroadcastOrder
from rollart.engine.network import Network
from rollart.engine.weights import WeightStaging, read_stacked
from rollart.errors import TrainerError, UsageError
from rollart.lora import ADAPTER_MODEL, adapter_names, write_merged
from rollart.train import checkpoint
from rollart.train.learner import Learner
from rollart.train.policy import adapter_tensors, published_tensors
from rollart.train.sending import BroadcastSender, outgoing_version
from tests.engine.families import check_random_requests
from tests.train.trainkit import VOCAB, batch, config, publish_version, sample

pytest.importorskip("peft")
pytestmark = pytest.mark.slow  # importing peft takes seconds

ADVANTAGE = {"advantage": {"level": "turn", "baseline": "group"}}
DOMAINS = {"a": ADVANTAGE | {"adapter": "train"}, "b": ADVANTAGE | {"adapter": "math"}}
"""One of the names is that of a method of modules, which peft refuses."""
SAMPLES = [
    sample(str(i), turns=[(2, 2), (3, 1 + i % 2)], domain="aab"[i % 3], group=f"{i % 3}", restricted=i % 2 == 0)
    for i in range(9)
]
SETUP: dict[str, Any] = {
    "lora": {"rank": 4, "alpha": 8.0},
    "domain_balance": "domains",
    "max_tokens_per_microbatch": 16,
    "weight_decay": 0.1,
    "grad_clip": 0.0,
    "lr": 0.02,
    "eps": 1e-12,
}


def learner(root: Path, **changes: Any) -> Learner:
    return Learner(config(root, layers=2, **{"domains": DOMAINS, **SETUP, **changes}))


def factors(of: Learner, adapter: str) -> dict[str, torch.Tensor]:
    """Copies of an adapter's factors, by the name of the weight."""
    found = published_tensors(of.policy.model, adapter)
    return {f"{n}/{i}": f.detach().clone() for n, t in found.items() for i, f in enumerate(t.parts[1:])}


def moments(of: Learner, adapter: str) -> dict[str, torch.Tensor]:
    """AdamW's first moments of an adapter: after one step (1 - β₁) times the gradient."""
    state = of.optimizer("policy").state
    names = {
        p: n.replace(f".default_{adapter}.", ".").replace(".default.", ".")
        for n, p in adapter_tensors(of.policy.model).items()
    }
    own = published_tensors(of.policy.model, adapter)
    return {names[f]: state[f]["exp_avg"] for t in own.values() for f in t.parts[1:] if f in state}


@pytest.mark.parametrize("changes", [{}, {"stream": True}, {"loss": {"kind": "decoupled"}}])
def test_each_adapter_learns_as_if_its_domain_were_alone(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Each domain's mean has half of the loss: its gradient is half of that of a trainer with one adapter and its
    samples alone, since no micro-batch is of two adapters (to the bit, where these have a fixed order). AdamW's updates
    are the same."""
    both = learner(tmp_path, **changes)
    for domain, adapter in (("a", "train"), ("b", "math")):
        alone = learner(tmp_path, domains={domain: ADVANTAGE}, **changes)
        mine = [s for s in SAMPLES if s.domain == domain]
        fresh = learner(tmp_path, **changes)
        for version in range(3):
            fresh.train(batch(SAMPLES), version)
            alone.train(batch(mine), version)
            if version == 0:
                whole, one = moments(fresh, adapter), moments(alone, "")
                assert whole.keys() == one.keys()
                for name in one:
                    assert torch.allclose(2 * whole[name], one[name], rtol=1e-4, atol=1e-8)
                    assert "stream" not in changes or torch.equal(2 * whole[name], one[name])
                assert any(one[name].abs().max() > 0 for name in one)
        apart, own = factors(fresh, adapter), factors(alone, "")
        assert all(torch.allclose(apart[name], own[name], atol=1e-5) for name in own)
        start = factors(both, adapter)
        assert all((apart[name] - start[name]).abs().max() > 1e-3 for name in start), "or nothing was learned"
        gap = np.abs(fresh.logprobs(batch(mine)) - alone.logprobs(batch(mine)))
        assert gap.max() < 1e-4
    frozen = {n for n, p in both.policy.model.named_parameters() if not p.requires_grad}
    assert not any(".lora_" in n for n in frozen)


def test_a_step_without_an_adapters_samples_leaves_it_as_it_was(tmp_path: Path) -> None:
    """Weight decay and AdamW's moments included; clipping is by the norm of all gradients."""
    own = learner(tmp_path, grad_clip=1e-3)
    own.train(batch(SAMPLES), 0)
    mine, before = [s for s in SAMPLES if s.domain == "a"], factors(own, "math")
    held, moved = {n: m.clone() for n, m in moments(own, "math").items()}, factors(own, "train")
    own.train(batch(mine), 1)
    assert all(torch.equal(before[n], f) for n, f in factors(own, "math").items())
    assert all(torch.equal(held[n], m) for n, m in moments(own, "math").items())
    assert any(not torch.equal(moved[n], f) for n, f in factors(own, "train").items())


def test_domains_may_share_an_adapter_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    shared = learner(tmp_path, domains={name: {**one, "adapter": "one"} for name, one in DOMAINS.items()})
    plain = learner(tmp_path, domains=dict.fromkeys("ab", ADVANTAGE))
    for each in (shared, plain):
        each.train(batch(SAMPLES), 0)
    assert (shared.logprobs(batch(SAMPLES)) == plain.logprobs(batch(SAMPLES))).all()
    with pytest.raises(ValueError, match="domain 'c' is not configured"):
        shared.logprobs(batch([sample("x", domain="c")]))


def test_a_restored_trainer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    straight, other = learner(tmp_path), learner(tmp_path)
    straight.train(batch(SAMPLES), 0)
    path = publish_version(straight, tmp_path, 1, ())
    assert adapter_names(path) == ("math", "train")
    assert not list(path.glob("*model*"))
    merged = tmp_path / "merged"
    merged.mkdir()
    write_merged(path, merged, "math")
    found, want = load_file(merged / "model.safetensors"), published_tensors(straight.policy.model, "math")
    assert all(torch.allclose(found[name], t.merge(t.parts, t.scale), atol=1e-6) for name, t in want.items())
    straight.train(batch(SAMPLES), 1)
    checkpoint.restore_version(other, path, 1)
    other.train(batch(SAMPLES), 1)
    assert (straight.logprobs(batch(SAMPLES)) == other.logprobs(batch(SAMPLES))).all()
    for changes in ({"domains": dict.fromkeys("ab", ADVANTAGE)}, {"domains": {"a": DOMAINS["a"]}}):
        with pytest.raises(TrainerError, match="holds a different model"):
            checkpoint.restore_version(learner(tmp_path, **changes), path, 1)
    (path / "math" / ADAPTER_MODEL).write_bytes(b"torn")
    with pytest.raises(TrainerError, match="is damaged: its sha256 differs"):
        checkpoint.restore_version(learner(tmp_path), path, 1)
    with pytest.raises(UsageError, match=r"has no adapter '' \(it has math, train\)"):
        learner(tmp_path, model={"path": str(path)})


def test_an_engine_computes_what_peft_computes_with_each_adapter(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    own = learner(tmp_path, lr=0.05)
    paths = []
    for version in range(2):
        own.train(batch(SAMPLES), version)
        paths.append(publish_version(own, tmp_path, version, ()))
    models = [
        {
            name: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(p / "base"), p / name).eval()
            for name in ("math", "train")
        }
        for p in paths
    ]
    check_random_requests(paths, models, seed="domains", vocab=VOCAB, adapters=("math", "train"))
    assert len({(p / "base/model.safetensors").stat().st_ino for p in paths}) == 1
    assert len({stamp_of(p) for p in paths}) == 2


def test_a_reference_has_the_adapters_of_its_version(tmp_path: Path) -> None:
    own = learner(tmp_path, loss={"kl": 0.1})
    own.imitate(batch(SAMPLES), 2)
    publish_version(own, tmp_path, 0, ())
    first = own.logprobs(batch(SAMPLES))
    own.train(batch(SAMPLES), 0)
    assert abs(own.reference.logprobs(batch(SAMPLES)) - first).max() < 1e-5
    assert abs(own.logprobs(batch(SAMPLES)) - first).max() > 1e-3


def test_a_broadcast_has_all_adapters_and_reaches_engines_with_the_weights_below(tmp_path: Path) -> None:
    own = learner(tmp_path)
    start = publish_version(own, tmp_path, 0, ())
    own.train(batch(SAMPLES), 0)
    outgoing = outgoing_version(checkpoint.take_snapshot(own))
    path = publish_version(own, tmp_path, 1, ())
    sender = BroadcastSender(torch.device("cpu"), rank=0, host="127.0.0.1")
    network = Network(read_architecture(start), context=8, device=torch.device("cpu"), dtype=torch.float32)
    first = read_stacked(network, start)
    network.load(first.tensors, first.adapters)
    engine = WeightStaging(network, str(start))
    order = BroadcastOrder(sender.address(), "g", "gloo", 2, 1, "v1-a", 1, limit_s=60.0)
    try:
        engine.take_part(asdict(replace(order, first=1)))
        sent = sender.send(order, outgoing, bucket=4096)
        staged = asyncio.run(engine.stage({"path": "/gone", "stamp": "v1-a"}))
    finally:
        sender.leave(wait_s=60.0)
        engine.receiver.close()
    assert not sent.errors
    assert not staged.tensors
    files = sum((path / name / ADAPTER_MODEL).stat().st_size for name in ("math", "train"))
    assert sent.bytes < files + 64 * len(outgoing.tensors)
    want = read_stacked(
        Network(read_architecture(path), context=8, device=torch.device("cpu"), dtype=torch.float32), path
    )
    assert want.adapters is not None
    assert staged.adapters is not None
    for name, adapter in want.adapters.items():
        for weight, pair in adapter.factors.items():
            assert all(map(torch.equal, pair, staged.adapters[name].factors[weight]))
