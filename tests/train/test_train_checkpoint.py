"""Published versions: complete or absent, and a restored trainer continues as if it had never stopped."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from rollart.adapters.weights import directory
from rollart.errors import TrainerError, UsageError, VersionDamaged
from rollart.train import checkpoint
from rollart.train.learner import Learner
from tests.train.trainkit import batch, config, publish_version, sample

SAMPLES = [sample(str(i), turns=[(2, 2), (3, i % 3)]) for i in range(6)]


def step(learner: Learner, version: int) -> None:
    learner.train(batch(SAMPLES), version)


def state(learner: Learner) -> dict[str, torch.Tensor]:
    critic = {} if learner.critic is None else learner.critic.model.state_dict(prefix="critic.")
    return {n: t.clone() for n, t in (learner.policy.model.state_dict() | critic).items()}


PPO: dict[str, Any] = {"algorithm": "ppo", "domains": {"a": {}}}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize(
    "changes",
    [{}, {"published_dtype": "bfloat16"}, {"optimizer": "muon"}, PPO],
    ids=["adamw", "bfloat16", "muon", "critic"],
)
def test_a_restored_trainer_goes_on_bit_for_bit(tmp_path: Path, changes: dict[str, Any]) -> None:
    setup = config(tmp_path, epochs=2, minibatches=2, warmup=20, **changes)
    straight = Learner(setup)
    straight.imitate(batch(SAMPLES), 2)
    step(straight, 0)
    path = publish_version(straight, tmp_path, 1, ())
    step(straight, 1)
    other = Learner(setup)
    step(other, 0)
    step(other, 1)
    checkpoint.restore_version(other, path, 1)
    step(other, 1)
    assert same(state(straight), state(other))
    assert other.counters == straight.counters


def test_a_fork_starts_with_the_weights_and_a_fresh_optimizer(tmp_path: Path) -> None:
    old = Learner(config(tmp_path, warmup=20))
    for version in range(3):
        step(old, version)
    path = publish_version(old, tmp_path, 3, ())
    fork = Learner(config(tmp_path, warmup=20))
    step(fork, 0)
    checkpoint.restore_version(fork, path, 3, optimizer=False)
    assert same(state(old), state(fork))
    assert fork.counters.updates == 0
    new = Learner(config(tmp_path, warmup=20, model={"path": str(path)}))
    step(fork, 0)
    step(new, 0)
    assert same(state(new), state(fork))


def test_a_critic_is_beside_a_version_and_starts_anew_where_there_is_none(tmp_path: Path) -> None:
    from safetensors import safe_open

    first, plain = Learner(config(tmp_path, **PPO)), Learner(config(tmp_path))
    before = publish_version(first, tmp_path, 0, ())
    step(first, 0)
    after = publish_version(first, tmp_path, 1, ())
    with (
        safe_open(after / "model.safetensors", "pt") as model,
        safe_open(after / "trainer/optimizer.safetensors", "pt") as kept,
    ):
        assert set(model.keys()) == {n for n, _ in plain.policy.model.named_parameters()}
        assert "critic/lm_head.weight/weight" in kept.keys()  # noqa: SIM118 - not a mapping
    checkpoint.restore_version(plain, after, 1)  # a trainer without a critic leaves it
    assert same(state(plain), state(first))
    step(plain, 1)
    without = publish_version(plain, tmp_path, 2, ())
    for path, version, optimizer in ((before, 0, True), (without, 2, True), (after, 1, False)):
        fresh, used = Learner(config(tmp_path, **PPO)), Learner(config(tmp_path, **PPO))
        step(used, 0)
        for learner in (fresh, used):
            checkpoint.restore_version(learner, path, version, optimizer=optimizer)
            assert learner.critic is not None
            assert not learner.critic.started
            step(learner, version)
        assert same(state(fresh), state(used)), "the critic begins with the restored policy"
    other = Learner(config(tmp_path, layers=1, **PPO))
    checkpoint.restore_version(other, after, 1)
    assert other.critic is not None
    assert other.critic.started
    assert same(state(other), state(first))


def test_a_version_from_before_any_training_can_be_restored(tmp_path: Path) -> None:
    straight, other = Learner(config(tmp_path)), Learner(config(tmp_path))
    path = publish_version(straight, tmp_path, 0, ())
    step(other, 0)
    checkpoint.restore_version(other, path, 0)
    step(straight, 0)
    step(other, 0)
    assert same(state(straight), state(other))


def test_a_restore_in_the_middle_of_imitation_goes_on_too(tmp_path: Path) -> None:
    straight, other = Learner(config(tmp_path)), Learner(config(tmp_path))
    straight.imitate(batch(SAMPLES), 2)
    checkpoint.restore_version(other, publish_version(straight, tmp_path, 0, ()), 0)
    for learner in (straight, other):
        learner.imitate(batch(SAMPLES), 2)
    assert same(state(straight), state(other))


def test_a_version_is_a_hugging_face_directory(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = tmp_path / "words.json"
    tokenizer.write_text("{}")
    learner = Learner(config(tmp_path, tokenizer=str(tokenizer)))
    path = publish_version(learner, tmp_path, 3, checkpoint.tokenizer_files(str(tokenizer)))
    assert path.name == "v000003"
    assert {f.name for f in path.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "trainer",
        "COMPLETE",
    }
    assert json.loads((path / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    loaded = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded(input_ids=ids).logits, learner.policy.model(input_ids=ids).logits)


def test_weights_are_published_in_bfloat16_and_trained_in_float32(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    learner = Learner(config(tmp_path, published_dtype="bfloat16"))
    step(learner, 0)
    path = publish_version(learner, tmp_path, 1, ())
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert loaded.dtype == torch.bfloat16, "as its config says"
    assert same({n: t.bfloat16() for n, t in state(learner).items()}, loaded.state_dict())
    plain = Learner(config(tmp_path))
    checkpoint.restore_version(plain, path, 1)
    assert same(state(learner), state(plain)), "a resume without the setting takes what was trained"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_the_files_of_a_version_have_the_mode_of_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    """Engines of another user read them from a shared directory."""
    learner = Learner(config(tmp_path))
    before = os.umask(umask)
    try:
        published = publish_version(learner, tmp_path, 3, ())
    finally:
        os.umask(before)
    files = [path for path in Path(published).rglob("*") if path.is_file()]
    assert {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in files} == {p.name: oct(mode) for p in files}
    assert any(path.suffix == ".safetensors" for path in files)


def test_the_store_sees_what_the_trainer_publishes(tmp_path: Path) -> None:
    learner = Learner(config(tmp_path))
    store = directory.DirectoryWeightStore(tmp_path)
    assert directory.MARKER == checkpoint.MARKER
    for version in (0, 1):
        assert str(publish_version(learner, tmp_path, version, ())) == store.path(version)
    assert store.versions() == [0, 1]


def test_publishing_a_version_again_replaces_it(tmp_path: Path) -> None:
    learner = Learner(config(tmp_path))
    step(learner, 0)
    publish_version(learner, tmp_path, 1, ())
    step(learner, 1)
    expected = state(learner)
    path = publish_version(learner, tmp_path, 1, ())
    other = Learner(config(tmp_path))
    checkpoint.restore_version(other, path, 1)
    assert same(state(other), expected)
    assert [p.name for p in tmp_path.iterdir()] == ["v000001"]


@pytest.mark.parametrize(
    ("owner", "where"),
    [(checkpoint, "save_tensors"), (Path, "write_text"), (checkpoint, "_digest"), (checkpoint, "_swap")],
)
def test_a_full_disk_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, where: str
) -> None:
    def full(*_: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    learner = Learner(config(tmp_path))
    publish_version(learner, tmp_path, 1, ())
    monkeypatch.setattr(owner, where, full)
    with pytest.raises(TrainerError, match=r"cannot publish version 2 under .*: No space left on device"):
        publish_version(learner, tmp_path, 2, ())
    assert [p.name for p in tmp_path.iterdir()] == ["v000001"]


def test_a_directory_that_is_not_a_whole_version_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    learner = Learner(config(tmp_path))
    good = publish_version(learner, tmp_path, 1, ())
    step(learner, 1)
    before = state(learner)

    def damaged(name: str) -> Path:
        return Path(shutil.copytree(good, tmp_path / f"copy-{name}"))

    torn, cut, empty, inference = (damaged(n) for n in ("torn", "cut", "empty", "inference"))
    (torn / "COMPLETE").unlink()
    with (cut / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\1\2\3\4")
    (empty / "COMPLETE").write_text("")
    marker = json.loads((inference / "COMPLETE").read_text())
    del marker["files"]["trainer/optimizer.safetensors"]
    (inference / "COMPLETE").write_text(json.dumps(marker))
    unreadable = damaged("unreadable")
    (unreadable / "model.safetensors").unlink()
    (unreadable / "model.safetensors").symlink_to("model.safetensors")
    gone = damaged("gone")
    (gone / "model.safetensors").unlink()
    for path, version, message in (
        (torn, 1, "has no COMPLETE marker"),
        (cut, 1, "model.safetensors is damaged"),
        (empty, 1, "COMPLETE is damaged"),
        (inference, 1, "has no trainer/optimizer.safetensors"),
        (good, 2, "holds version 1, not 2"),
        (tmp_path / "v000009", 9, "has no COMPLETE marker"),
        (gone, 1, "model.safetensors is not there"),
        (unreadable, 1, "model.safetensors cannot be read: Too many levels of symbolic links"),
    ):
        with pytest.raises(TrainerError, match=message) as caught:
            checkpoint.restore_version(learner, path, version)
        assert isinstance(caught.value, VersionDamaged) == (path != unreadable), "an error of the disk is no damage"
    assert same(state(learner), before)


def test_another_model_is_refused(tmp_path: Path) -> None:
    path = publish_version(Learner(config(tmp_path, layers=2)), tmp_path, 1, ())
    with pytest.raises(TrainerError, match="holds a different model"):
        checkpoint.restore_version(Learner(config(tmp_path)), path, 1)


def test_leftovers_of_a_killed_trainer_are_removed_at_the_start(tmp_path: Path) -> None:
    (tmp_path / ".tmp-v000002").mkdir()
    (tmp_path / "v000001").mkdir()
    checkpoint.remove_partial_writes(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["v000001"]
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        checkpoint.remove_partial_writes(tmp_path / "file")
    with pytest.raises(UsageError, match=r"no tokenizer.json at"):
        checkpoint.tokenizer_files(str(tmp_path / "v000001"))
