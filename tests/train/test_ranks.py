"""Real ranks over gloo in two processes: they learn the same as one, publish in shares, and die together."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollart.adapters.trainers.http import HttpTrainer
from rollart.architecture import read_architecture
from rollart.collective import BroadcastOrder, WeightReceiver
from rollart.engine.weights import read_tensors
from rollart.errors import TrainerError, TrainerRefused
from rollart.lora import ADAPTER_MODEL
from rollart.model import WeightsRef
from rollart.train import checkpoint
from rollart.train.learner import Learner
from tests.train.trainkit import batch, config, publish_version, sample

pytestmark = pytest.mark.slow  # starts processes that load torch

SAMPLES = [
    sample(f"{i}", turns=[(2 + i % 3, 2), (3, i % 4)], group=f"g{i // 2}", restricted=i % 3 == 1, domain="ab"[i % 2])
    for i in range(9)
]
SETUP: dict[str, Any] = {
    "epochs": 2,
    "minibatches": 2,
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "warmup": 5,
    "weight_decay": 0.01,
    "eps": 1e-3,
    "max_tokens_per_microbatch": 16,
    "loss": {
        "kind": "decoupled",
        "ratio": "geometric",
        "aggregation": "sample",
        "entropy": 0.01,
        "entropy_target": 3.0,
    },
    "domain_balance": "domains",
    "critic": {"lr": 2e-3},
    "domains": {
        "a": {"advantage": {"level": "turn", "gamma": 0.8, "baseline": "critic"}},
        "b": {"advantage": {"level": "turn", "baseline": "domain"}},
    },
}
"""A critic for one of two domains."""

CLOSE = 1e-9
"""Of weights, after updates of some 1e-3; float32 would be 1e-7."""
INIT = {
    "vocab_size": 24,
    "hidden_size": 18,
    "intermediate_size": 35,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
"""Sizes that two ranks cannot halve evenly."""


def setup(root: Path, **changes: Any) -> dict[str, Any]:
    """`trainer.json` of two ranks. In float64 rounding hides no error; with this eps Adam's updates depend on the
    gradient's scale, so that a mean in place of a sum over the ranks shows. Activations are recomputed, with the same
    result."""
    return (
        {
            "model": {"init": INIT, "seed": 3, "dtype": "float64"},
            "weights_root": str(root),
            "durable": False,
            "parallel": {"ranks": 2, "activation_checkpointing": True},
        }
        | SETUP
        | changes
    )


def alone(root: Path, **changes: Any) -> Learner:
    """The same in this process."""
    raw = {"model": setup(root)["model"], **SETUP, **changes}
    return Learner(config(root, **raw))


class Ranks:
    """The program with its ranks, and a client per test (a client belongs to one event loop)."""

    def __init__(self, root: Path, **changes: Any) -> None:
        root.mkdir(parents=True, exist_ok=True)
        path = root / "trainer.json"
        path.write_text(json.dumps(setup(root / "weights", **changes)))
        self.weights = root / "weights"
        self.log = (root / "log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rollart.train", "--config", str(path)],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline().split()
        assert line[:1] == ["ready"], Path(self.log.name).read_text()
        self.url = line[1]

    def use(self, work: Callable[[HttpTrainer], Coroutine[Any, Any, None]]) -> None:
        async def inside() -> None:
            trainer = HttpTrainer(self.url)
            try:
                await work(trainer)
            finally:
                await trainer.aclose()

        asyncio.run(inside())

    def children(self) -> list[int]:
        """Process ids of the other ranks."""
        pid = self.process.pid
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [int(child) for child in text.split()]

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(120)
        finally:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.log.close()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("two"))
    try:
        yield ranks
    finally:
        ranks.close()


async def logprobs(trainer: HttpTrainer) -> torch.Tensor:
    return torch.tensor([value for row in await trainer.logprobs(SAMPLES) for value in row])


def own_logprobs(learner: Learner) -> torch.Tensor:
    return torch.from_numpy(learner.logprobs(batch(SAMPLES))).float()


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[n], b[n], atol=tolerance, rtol=0) for n in a)


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {n: t.detach().clone() for n, t in learner.policy.model.state_dict().items()}


def moments(learner: Learner) -> dict[str, torch.Tensor]:
    """The critic's weights too."""
    assert learner.critic is not None
    critic = {f"critic.{n}": p for n, p in learner.critic.model.named_parameters()}
    names = {p: n for n, p in [*learner.policy.model.named_parameters(), *critic.items()]}
    states = [learner.optimizers[name].state for name in ("policy", "critic")]
    found = {f"{names[p]}/{key}": value for state in states for p, one in state.items() for key, value in one.items()}
    return found | {n: p.detach() for n, p in critic.items()}


def test_every_rank_broadcasts_what_it_writes(two: Ranks) -> None:
    """Each over a group of its own with all workers; the received tensors equal those in the files."""
    receivers = [WeightReceiver(torch.device("cpu")) for _ in range(2)]

    async def work(trainer: HttpTrainer) -> None:
        address, lanes = await trainer.meet()
        assert lanes == 2
        order = BroadcastOrder(address, "g", "gloo", 3, lanes, "s", 7, limit_s=60.0)
        with pytest.raises(TrainerError, match="version 7 was not staged to be sent"):
            await trainer.send(asdict(order), bucket_bytes=1000)
        await trainer.stage(7, send=True)
        for first, receiver in enumerate(receivers, start=1):
            receiver.take_part(replace(order, first=first))
        sent, published = await asyncio.gather(trainer.send(asdict(order), bucket_bytes=1000), trainer.publish(7))
        assert sent.errors == {}
        assert sent.has.keys() == {1, 2}
        files = read_tensors(published.path)
        shares = [size for size, _ in sent.has.values()]
        assert shares == [sent.bytes] * 2
        for receiver in receivers:
            received = receiver.take("s")
            assert received is not None
            assert received.tensors.keys() == files.keys()
            assert all(torch.equal(received.tensors[name], tensor) for name, tensor in files.items())

    try:
        two.use(work)
    finally:
        for receiver in receivers:
            receiver.close()


def test_two_ranks_learn_what_one_learns_and_each_goes_on_from_the_other(two: Ranks, tmp_path: Path) -> None:
    """Imitation, three steps of four updates, Adam's state; then two ranks' version on one rank, and back."""
    one = alone(tmp_path)

    async def work(trainer: HttpTrainer) -> None:
        start = await trainer.publish(0)
        assert torch.allclose(await logprobs(trainer), own_logprobs(one), atol=1e-6)
        imitated, expected = await trainer.imitate(SAMPLES, 3), one.imitate(batch(SAMPLES), 3)
        assert imitated.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-6)
        for version in range(3):
            report, expected = await trainer.train(SAMPLES, version), one.train(batch(SAMPLES), version)
            assert report.trained_tokens == expected.trained_tokens
            same = report.metrics.keys() & expected.metrics.keys() - {"cpu_seconds", "padding_share"}
            assert {n: report.metrics[n] for n in same} == pytest.approx({n: expected.metrics[n] for n in same})
            assert same | {"cpu_seconds", "padding_share"} == expected.metrics.keys()
        path = Path((await trainer.publish(3)).path)
        assert close(read_tensors(path), weights(one), CLOSE)
        other = alone(tmp_path)
        checkpoint.restore_version(other, path, 3)
        assert other.counters == one.counters
        assert close(weights(other), weights(one), CLOSE)
        assert close(moments(other), moments(one), CLOSE)
        other.train(batch(SAMPLES), 3)
        single = publish_version(other, tmp_path, 4, ())
        await trainer.restore(WeightsRef(start.version, start.path))
        await trainer.restore(WeightsRef(4, str(single)))
        assert torch.allclose(await logprobs(trainer), own_logprobs(other), atol=1e-6)
        await trainer.train(SAMPLES, 4)
        other.train(batch(SAMPLES), 4)
        assert close(read_tensors((await trainer.publish(5)).path), weights(other), CLOSE)

    two.use(work)


def test_a_version_is_written_in_shares_that_engines_read(two: Ranks) -> None:
    async def work(trainer: HttpTrainer) -> None:
        await trainer.train(SAMPLES, 0)
        path = Path((await trainer.publish(7)).path)
        marker = json.loads((path / "COMPLETE").read_text())
        names = {str(f.relative_to(path)) for f in path.rglob("*") if f.is_file()} - {"COMPLETE"}
        assert marker["files"].keys() == names
        assert names == {
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "trainer/optimizer-00001-of-00002.safetensors",
            "trainer/optimizer-00002-of-00002.safetensors",
            "trainer/state.json",
        }
        sizes = [(path / f"model-0000{i}-of-00002.safetensors").stat().st_size for i in (1, 2)]
        assert max(sizes) < 0.6 * sum(sizes), "each rank writes about half"
        assert read_architecture(path).layers == INIT["num_hidden_layers"]
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        assert close(dict(loaded.state_dict().items()), read_tensors(path), 0.0)

    two.use(work)


def test_refusals_and_damage_are_the_same_on_every_rank_and_the_ranks_go_on(two: Ranks, tmp_path: Path) -> None:
    async def work(trainer: HttpTrainer) -> None:
        with pytest.raises(TrainerRefused, match=r"^train: domain 'z' is not configured"):
            await trainer.train([sample("x", domain="z")], 0)
        with pytest.raises(TrainerRefused, match=r"^imitate: none of the 0 samples"):
            await trainer.imitate([], 1)
        path = Path((await trainer.publish(8)).path)
        before = await logprobs(trainer)
        for share in (1, 2):  # each file is checked by one rank only
            file = path / f"model-0000{share}-of-00002.safetensors"
            whole = file.read_bytes()
            file.write_bytes(whole[:-4] + b"\1\2\3\4")
            with pytest.raises(TrainerError, match=rf"restore: .*model-0000{share}-of-00002.safetensors is damaged"):
                await trainer.restore(WeightsRef(8, str(path)))
            file.write_bytes(whole)
        await trainer.restore(WeightsRef(8, str(path)))
        assert torch.equal(await logprobs(trainer), before)
        assert await trainer.logprobs([]) == []

    two.use(work)


def test_what_was_staged_is_written_beside_the_next_step(two: Ranks) -> None:
    async def work(trainer: HttpTrainer) -> None:
        await trainer.train(SAMPLES, 0)
        expected = read_tensors((await trainer.publish(20)).path)
        await trainer.stage(21)
        async with asyncio.TaskGroup() as group:
            step = group.create_task(trainer.train(SAMPLES, 20))
            published = group.create_task(trainer.publish(21))
        assert step.result().trained_tokens
        assert close(read_tensors(published.result().path), expected, 0.0)
        assert not close(read_tensors((await trainer.publish(22)).path), expected, CLOSE)

    two.use(work)


def test_in_bf16_a_rank_that_is_lost_is_named_and_takes_the_trainer_with_it(tmp_path: Path) -> None:
    """At once, for pending and for later requests; no process is left running. Before that, bf16 learns about the same
    as float32, from weights that stay float32, also where bf16 is published."""
    model = {"init": INIT, "seed": 3}
    one = alone(tmp_path, model=model)
    parallel = {"ranks": 2, "dtype": "bfloat16", "activation_checkpointing": True}
    ranks = Ranks(tmp_path, model=model, published_dtype="bfloat16", parallel=parallel)
    [child] = ranks.children()
    watched = os.pidfd_open(child)
    try:

        async def work(trainer: HttpTrainer) -> None:
            report, expected = await trainer.train(SAMPLES, 0), one.train(batch(SAMPLES), 0)
            assert report.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=0.02)
            assert report.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=0.05)
            ref = await trainer.publish(1)
            published = read_tensors(ref.path)
            assert {t.dtype for t in published.values()} == {torch.bfloat16}
            resumed = alone(tmp_path, model=model)
            checkpoint.restore_version(resumed, Path(ref.path), 1)
            trained = weights(resumed)
            assert {t.dtype for t in trained.values()} == {torch.float32}
            assert all(torch.equal(trained[name].bfloat16(), t) for name, t in published.items())
            assert close(trained, weights(one), 1e-3)
            assert not close(trained, weights(one), 1e-9)
            os.kill(child, signal.SIGSTOP)  # the step waits for it in the middle of a collective
            asyncio.get_running_loop().call_later(0.05, os.kill, child, signal.SIGKILL)
            with pytest.raises(TrainerError, match=r"train: rank 1 of 2 \(process \d+\) was killed by signal 9"):
                await trainer.train(SAMPLES, 1)
            with pytest.raises(TrainerError, match="logprobs: rank 1 of 2"):
                await trainer.logprobs(SAMPLES)
            assert not await trainer.healthy()
            assert (Path(ref.path) / "COMPLETE").is_file()

        ranks.use(work)
    finally:
        ranks.close()
        os.close(watched)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_ranks_that_somebody_else_starts_meet(tmp_path: Path) -> None:
    """Like a job queue: each rank is started separately, with the address of rank 0."""
    path = tmp_path / "trainer.json"
    path.write_text(json.dumps(setup(tmp_path / "weights")))
    command = [sys.executable, "-m", "rollart.train", "--config", str(path), "--meet"]
    processes = [subprocess.Popen([*command, ":0"], stdout=subprocess.PIPE, text=True)]
    try:
        meet = said(processes[0], "meet")
        processes.append(subprocess.Popen([*command, meet, "--rank", "1"], stdout=subprocess.PIPE, text=True))
        leader, follower = processes
        url = said(leader, "ready")
        assert said(follower, "ready") == "rank-1"

        async def work() -> None:
            trainer = HttpTrainer(url)
            assert (await trainer.train(SAMPLES, 0)).trained_tokens
            await trainer.aclose()

        asyncio.run(work())
        leader.send_signal(signal.SIGTERM)
        assert leader.wait(120) == 0
        assert follower.wait(120) == 0, "a follower ends when its leader does"
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def said(process: subprocess.Popen[str], word: str) -> str:
    """The rest of the next line, which begins with `word`."""
    assert process.stdout is not None
    first, _, rest = process.stdout.readline().strip().partition(" ")
    assert first == word
    return rest


def test_a_rank_that_cannot_load_the_reference_is_named_on_all_and_the_ranks_go_on(tmp_path: Path) -> None:
    """One of two ranks cannot open files: the step is refused at once, where the other rank would have waited for it in
    the forward pass. Then pairs of samples, which any rank may hold, are on two ranks what they are on one; also a
    step without samples of a domain, whose adapter has no gradient then."""
    pytest.importorskip("peft")
    changes: dict[str, Any] = {
        "loss": {"kind": "dpo", "kl": 0.3},
        "epochs": 1,
        "critic": None,
        "lora": {"rank": 3},
        "domains": {"a": {"adapter": "x"}, "b": {"adapter": "y"}},
    }
    one = alone(tmp_path / "one", **changes)
    publish_version(one, tmp_path / "one", 0, ())
    ranks = Ranks(tmp_path, **changes)
    [child] = ranks.children()
    try:

        async def work(trainer: HttpTrainer) -> None:
            await trainer.publish(0)
            before = resource.prlimit(child, resource.RLIMIT_NOFILE)
            resource.prlimit(child, resource.RLIMIT_NOFILE, (0, before[1]))
            with pytest.raises(TrainerError, match=r"train: rank 1: cannot load the model at .*v000000"):
                async with asyncio.timeout(60):
                    await trainer.train(SAMPLES, 0)
            resource.prlimit(child, resource.RLIMIT_NOFILE, before)
            for version in range(3):
                samples = SAMPLES if version < 2 else [s for s in SAMPLES if s.domain == "a"]
                report, expected = await trainer.train(samples, version), one.train(batch(samples), version)
                for name in ("loss", "reference_kl", "grad_norm"):
                    assert report.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-6, abs=1e-12)
            path = Path((await trainer.publish(3)).path)
            for adapter in ("x", "y"):
                same = publish_version(one, tmp_path / "one", 3) / adapter / ADAPTER_MODEL
                assert close(load_file(path / adapter / ADAPTER_MODEL), load_file(same), CLOSE)

        ranks.use(work)
    finally:
        ranks.close()


def test_a_rank_that_the_config_does_not_have_is_refused_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "trainer.json"
    path.write_text(json.dumps(setup(tmp_path / "weights")))
    command = [sys.executable, "-m", "rollart.train", "--config", str(path), "--rank", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr == "rollart.train: rank 2: --rank 2: the config has parallel.ranks 2\n"


def test_two_ranks_replay_experts_and_write_each_experts_tensors(tmp_path: Path) -> None:
    """Five experts, which two ranks cannot halve; then the version on one rank."""
    layers = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 7, "mlp_only_layers": [0]}
    model = {"init": INIT | layers | {"model_type": "qwen3_moe"}, "seed": 3, "dtype": "float64"}
    chosen = [replace(one, experts=tuple(bytes((n % 5, (n + 2) % 5)) for n in one.token_ids)) for one in SAMPLES]
    one, ranks = alone(tmp_path, model=model), Ranks(tmp_path / "ranks", model=model)
    made = batch(chosen, 24, one.policy.experts)

    async def work(trainer: HttpTrainer) -> None:
        report, expected = await trainer.train(chosen, 0), one.train(made, 0)
        assert report.metrics["replayed_share"] == expected.metrics["replayed_share"] == 1.0
        published = Path((await trainer.publish(1)).path)
        files = read_tensors(published)
        assert close(files, read_tensors(publish_version(one, tmp_path, 1)), CLOSE)
        assert "model.layers.1.mlp.experts.4.gate_proj.weight" in files
        other = alone(tmp_path, model=model)
        checkpoint.restore_version(other, published, 1)
        assert close(weights(other), weights(one), CLOSE)
        await trainer.restore(WeightsRef(1, str(published)))
        await trainer.train(chosen, 1)
        other.train(made, 1)
        last = read_tensors((await trainer.publish(2)).path)
        assert close(last, read_tensors(publish_version(other, tmp_path, 2)), CLOSE)

    try:
        ranks.use(work)
    finally:
        ranks.close()
