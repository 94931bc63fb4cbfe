"""`rollart export`: the right version, whole, into a directory that nobody else uses."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart.errors import StorageFailed, UsageError
from rollart.ledger.store import Ledger
from rollart.ports import Interval, RunEvent
from rollart.tools.export import export_version

FILES = {
    "config.json": "{}",
    "model.safetensors": "weights",
    "tokenizer.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "trainer/optimizer.safetensors": "moments",
    "trainer/state.json": "{}",
}


def write_files(run: Path, version: int, files: Mapping[str, str] = FILES) -> Path:
    path = run / "weights" / f"v{version:06d}"
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
    (path / "COMPLETE").write_text(json.dumps({"schema": 1, "version": version, "files": digests}))
    return path


def record(run: Path, versions: int, success: Mapping[int, float], *, lost: int | None = None, **spec: Any) -> None:
    """A ledger with versions, the held-out success of some, and later the loss of all versions after `lost`."""

    async def commit(ledger: Ledger) -> None:
        for version in range(versions):
            await ledger.commit(version=version, step=version, consumed=[], metrics={}, stamp="")

    config = {"run": {"domains": [], "steps": 40, "model": {"init": {"model_type": "qwen3"}}} | spec, "base": str(run)}
    with Ledger(run, clock=lambda: 0.0, config=config, inline=True) as ledger:
        asyncio.run(commit(ledger))
        for version, rate in success.items():
            fields = {"version": version, "episodes": 50, "successes": round(50 * rate), "success": rate}
            ledger.event(RunEvent(version, "evaluation", "lake", fields))
        if lost is not None:
            ledger.event(RunEvent(1000.0, "version_lost", f"v{versions}", {"version": lost}))
        ledger.interval(Interval("engine", "engine-0", 0, 3600, "busy", "", 2, 6.0))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "demo"
    record(directory, 6, {0: 0.1, 3: 0.8, 4: 0.6})
    for version in (3, 4, 5):
        write_files(directory, version)
    return directory


@pytest.mark.parametrize(("name", "version"), [("latest", 5), ("best", 3), ("v4", 4), ("4", 4)])
def test_a_version_is_exported_by_name_without_the_optimizer(
    run: Path, tmp_path: Path, name: str, version: int
) -> None:
    done = export_version(run, name, tmp_path / "a" / "out", force=False)
    assert done.kept.version == version
    assert {path.name for path in (tmp_path / "a" / "out").iterdir()} == set(done.files)
    assert set(done.files) == {*(n for n in FILES if "/" not in n), "README.md", "tokenizer_config.json"}


def test_a_version_that_was_not_kept_is_refused_with_those_that_exist(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"v2 of run 'demo' was not kept; there are v3, v4, v5"):
        export_version(run, "v2", tmp_path / "out", force=False)
    with pytest.raises(UsageError, match=r"v9 of run 'demo' does not exist"):
        export_version(run, "v9", tmp_path / "out", force=False)
    assert not (tmp_path / "out").exists()


def test_of_several_adapters_one_is_named(run: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    record(own, 2, {})
    write_files(own, 1, dict.fromkeys(("games/adapter_config.json", "spelling/adapter_config.json", "base/x"), "{}"))
    with pytest.raises(UsageError, match="v1 has the adapters games, spelling, of which one can be merged") as caught:
        export_version(own, "v1", tmp_path / "out", force=False)
    assert caught.value.remedy == "name it, as with --adapter games"
    with pytest.raises(UsageError, match="v1 has no adapter 'lake': it has the adapters games, spelling"):
        export_version(own, "v1", tmp_path / "out", force=False, adapter="lake")
    with pytest.raises(UsageError, match="v5 has no adapter 'games': it has no adapters of domains"):
        export_version(run, "v5", tmp_path / "out", force=False, adapter="games")


def test_evaluations_of_versions_that_were_given_up_do_not_count(tmp_path: Path) -> None:
    record(tmp_path / "demo", 6, {2: 0.3, 4: 0.9}, lost=3)
    for version in (2, 4):
        write_files(tmp_path / "demo", version)
    assert export_version(tmp_path / "demo", "best", tmp_path / "out", force=False).kept.version == 2


def test_without_an_evaluation_no_version_is_the_best(tmp_path: Path) -> None:
    record(tmp_path / "demo", 2, {})
    write_files(tmp_path / "demo", 1)
    with pytest.raises(UsageError, match="none is the best; there are v1"):
        export_version(tmp_path / "demo", "best", tmp_path / "out", force=False)


def test_only_force_replaces_files_and_it_leaves_no_old_weights(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("model-00001-of-00002.safetensors", "notes.txt", "config.json"):
        (out / name).write_text("old")
    with pytest.raises(UsageError, match="is not empty"):
        export_version(run, "latest", out, force=False)
    assert (out / "config.json").read_text() == "old"
    export_version(run, "latest", out, force=True)
    assert (out / "config.json").read_text() == "{}"
    assert (out / "notes.txt").read_text() == "old"
    assert [path.name for path in out.glob("*.safetensors")] == ["model.safetensors"]


def test_a_damaged_version_is_not_exported(run: Path, tmp_path: Path) -> None:
    (run / "weights" / "v000005" / "model.safetensors").write_text("Weights")
    with pytest.raises(StorageFailed, match=r"model\.safetensors is damaged"):
        export_version(run, "latest", tmp_path / "out", force=False)
    assert not (tmp_path / "out").exists()


def test_a_version_that_lacks_a_published_file_is_not_exported(run: Path, tmp_path: Path) -> None:
    (run / "weights" / "v000005" / "model.safetensors").unlink()
    with pytest.raises(StorageFailed, match=r"v5 is damaged: .*model\.safetensors is not there"):
        export_version(run, "latest", tmp_path / "out", force=False)
    assert not (tmp_path / "out").exists()


def test_the_card_has_the_runs_facts(tmp_path: Path) -> None:
    domain = {"name": "lake", "environment": "worlds:Lake", "group_size": 8, "advantage": {"level": "turn"}}
    training = {"lr": 0.001, "loss": {"kind": "ppo", "kl": 0.0}, "lora": None}
    model = {"path": "Qwen/Qwen2.5-0.5B-Instruct", "revision": "7ae5"}
    more = {"model": model, "schedule": "async", "fork": {"run": "/runs/first", "version": 40, "optimizer": True}}
    record(tmp_path / "demo", 3, {2: 0.75}, domains=[domain], training=training, **more)
    write_files(tmp_path / "demo", 2)
    export_version(tmp_path / "demo", "v2", tmp_path / "out", force=False)
    _, head, body = (tmp_path / "out" / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head)["base_model"] == "Qwen/Qwen2.5-0.5B-Instruct"
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in body.splitlines() if line.startswith("|")]
    assert ["Base model", "Qwen/Qwen2.5-0.5B-Instruct at 7ae5"] in rows
    assert ["Started from", "v40 of run `first`"] in rows
    assert ["lake", "75.0%", "50"] in rows
    assert ["lake", "`worlds:Lake`", "8", "level turn"] in rows
    assert ["`loss.kind`", "`ppo`"] in rows
    assert ["Training steps", "2 of 40"] in rows
    assert ["Cost of the whole run", "$12.00"] in rows
    assert ["Hours of the whole run", "1"] in rows


def test_a_directory_that_looks_like_an_id_is_no_model_of_the_hub(tmp_path: Path) -> None:
    record(tmp_path / "demo", 2, {}, model={"path": "models/mine", "revision": None})
    write_files(tmp_path / "demo", 1)
    export_version(tmp_path / "demo", "latest", tmp_path / "out", force=False)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| Base model | `models/mine` |" in card
    assert "base_model:" not in card


def test_generation_settings_of_the_base_model_are_exported(tmp_path: Path) -> None:
    (tmp_path / "demo" / "base").mkdir(parents=True)
    (tmp_path / "demo" / "base" / "generation_config.json").write_text('{"top_k": 20}')
    record(tmp_path / "demo", 2, {}, model={"path": "base"})
    write_files(tmp_path / "demo", 1)
    export_version(tmp_path / "demo", "latest", tmp_path / "out", force=False)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"top_k": 20}


@pytest.mark.slow  # imports torch, transformers and peft
@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_transformers_loads_an_exported_version_and_computes_the_learners_logits(
    tmp_path: Path, lora: dict[str, int] | None
) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rollart.train.learner import Learner
    from tests.train.trainkit import VOCAB, batch, config, publish_version, sample

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    given = tmp_path / "tokenizer"
    given.mkdir()
    words.save(str(given / "tokenizer.json"))
    (given / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    run = tmp_path / "demo"
    learner = Learner(config(run / "weights", lora=lora))
    learner.train(batch([sample(str(n)) for n in range(4)]), 0)
    record(run, 2, {})
    publish_version(learner, run / "weights", 1, tuple(given.iterdir()))
    export_version(run, "latest", tmp_path / "out", force=False)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "w3 w7"}], tokenize=True, return_dict=False)
    assert ids == [3, 7]
    tokens = torch.tensor([ids])
    with torch.no_grad():
        found, want = model(tokens).logits, learner.policy.model(tokens).logits
    assert torch.equal(found, want) if lora is None else torch.allclose(found, want, atol=1e-6)
    assert [path.name for path in (tmp_path / "out").glob("*adapter*")] == []
