"""Models of the Hugging Face Hub, from a server on this machine: only what is needed is fetched, and once; a run keeps
the commit that it began with; whatever goes wrong is one line."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart.cli.main import run as rollart
from rollart.errors import ProviderError, StorageFailed
from rollart.hub import HubModel
from rollart.infra.needs import spec_files
from rollart.launch.prepare import fetch_model, prepare_tokenizer, run_model
from rollart.launch.resume import fork_problems
from rollart.quickstart.spelling import EOS
from rollart.quickstart.tokenizer import write_tokenizer
from rollart.settings.planning import pinned
from rollart.settings.resolve import read_specs
from rollart.settings.training import LoraSpec
from tests.e2e.harness import CLUSTER, Home, ledger, tiny
from tests.hub import HubServer, commit_of, serving, use
from tests.launch.test_preflight import QWEN, weights
from tests.tools.test_export import FILES, record, write_files

ID = "Owner/tiny-0.5B"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def files(tmp_path: Path, **more: bytes) -> dict[str, bytes]:
    """A sharded model with its tokenizer, beside files that no run needs."""
    tokenizer = write_tokenizer(tmp_path / "made").parent
    index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}
    return {
        "config.json": json.dumps(QWEN).encode(),
        "model.safetensors.index.json": json.dumps(index).encode(),
        **{file.name: file.read_bytes() for file in tokenizer.iterdir()},
        **{name: weights() + bytes(1000 + number) for number, name in enumerate(SHARDS)},
        "pytorch_model.bin": b"bin",
        "original/consolidated.safetensors": b"original",
        **more,
    }


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with serving(HubServer(ID, {"main": files(tmp_path)})) as server:
        use(monkeypatch, server.url, tmp_path / "cache")
        yield server


def model(tmp_path: Path, revision: str | None = None) -> HubModel:
    return HubModel(ID, revision, tmp_path / ID)


def written(tmp_path: Path, **changes: Any) -> list[str]:
    """Arguments that name a run of the model and a cluster."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny(model={"path": ID, "context": 16}, **changes)))
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    return [str(tmp_path / "run.yaml"), "--cluster", str(tmp_path / "cluster.yaml")]


def nothing(count: int) -> None:
    pass


def test_only_what_is_needed_is_fetched_and_once(hub: HubServer, tmp_path: Path) -> None:
    directory = model(tmp_path).snapshot()
    assert directory.name == commit_of(hub.branches["main"])
    at_commit = model(tmp_path, directory.name)
    sizes = at_commit.sizes([*SHARDS, "no.safetensors"])
    assert sizes == {name: len(hub.branches["main"][name]) for name in SHARDS}
    arrived: list[int] = []
    at_commit.fetch(SHARDS, arrived.append)
    assert sum(arrived) == sum(sizes.values())
    asked = dict(hub.asked)
    assert asked.keys() == {"api", "config.json", "model.safetensors.index.json", *SHARDS} | {
        name for name in hub.branches["main"] if name.startswith("tokenizer")
    }
    hub.down = True
    assert replace(at_commit, tried=tmp_path).snapshot() == directory
    at_commit.fetch(SHARDS, arrived.append)
    assert dict(hub.asked) == asked, "a cached commit is not asked for again"


@pytest.mark.slow  # huggingface_hub waits a second before it goes on
def test_a_download_that_breaks_off_goes_on_where_it_was(hub: HubServer, tmp_path: Path) -> None:
    hub.branches["main"][SHARDS[0]] = weights() + bytes(12_000_000)  # the library writes pieces of 10 MB
    at_commit = model(tmp_path, model(tmp_path).snapshot().name)
    hub.breaks[SHARDS[0]] = 11_000_000
    at_commit.fetch(SHARDS, nothing)
    assert hub.asked[SHARDS[0]] == 2
    whole = len(hub.branches["main"][SHARDS[0]])
    assert hub.sent[SHARDS[0]] < whole + 2_000_000
    assert (model(tmp_path).snapshot() / SHARDS[0]).stat().st_size == whole


def test_an_interrupted_download_keeps_its_complete_files(hub: HubServer, tmp_path: Path) -> None:
    at_commit = model(tmp_path, model(tmp_path).snapshot().name)
    begun: list[int] = []

    def full(count: int) -> None:
        begun.append(count)
        if len(begun) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(StorageFailed, match=r"is full: Owner/tiny-0.5B could not be fetched \(make room"):
        at_commit.fetch(SHARDS, full)
    at_commit.fetch(SHARDS, nothing)
    assert (hub.asked[SHARDS[0]], hub.asked[SHARDS[1]]) == (1, 2)


def test_a_stopped_launch_does_not_wait_for_a_download(hub: HubServer, tmp_path: Path) -> None:
    arguments = written(tmp_path)
    specs = pinned(read_specs(arguments[0], arguments[2]))
    hub.sends.clear()

    async def main() -> None:
        fetching = asyncio.get_running_loop().create_task(fetch_model(specs, tmp_path / "run", lambda event: None))
        while not hub.asked[SHARDS[0]]:
            await asyncio.sleep(0.01)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        assert not hub.sent[SHARDS[1]]

    asyncio.run(main())
    hub.sends.set()


def test_a_hub_that_holds_the_sizes_of_the_weights_does_not_hold_the_launch(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = written(tmp_path)
    specs = pinned(read_specs(arguments[0], arguments[2]))
    monkeypatch.setattr("rollart.hub.SMALL_FILES_S", 0.5)
    hub.announces.clear()

    async def main() -> None:
        fetching = asyncio.get_running_loop().create_task(fetch_model(specs, tmp_path / "run", lambda event: None))
        while not hub.held.is_set():
            await asyncio.sleep(0.01)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching

    asyncio.run(main())
    hub.announces.set()
    for thread in threading.enumerate():
        if ID in thread.name:
            thread.join(10)


def gated(hub: HubServer, use: Callable[..., None]) -> None:
    hub.gated, hub.token = True, "hf_other"


def down(hub: HubServer, use: Callable[..., None]) -> None:
    hub.down = True


def dead(hub: HubServer, use: Callable[..., None]) -> None:
    use("http://127.0.0.1:9")


def offline(hub: HubServer, use: Callable[..., None]) -> None:
    use(hub.url, offline=True)


def other(hub: HubServer, use: Callable[..., None]) -> None:
    hub.model = "Owner/another"


def fine(hub: HubServer, use: Callable[..., None]) -> None:
    pass


@pytest.mark.parametrize(
    ("trouble", "changes", "code", "message"),
    [
        (gated, {}, 3, "shows it only to accounts that its owner has admitted (403)"),
        (down, {}, 3, "answers 503"),
        (dead, {}, 3, "cannot be reached for the files that the cache lacks (ConnectError"),
        (offline, {}, 3, "where HF_HUB_OFFLINE forbids to fetch them"),
        (other, {}, 2, "knows no such model (401; rule: a directory, or the id OWNER/NAME of a model)"),
        (fine, {"model__revision": "v9"}, 2, "model.revision is 'v9' (rule: a branch, tag or commit"),
        (fine, {"model__path": "made", "model__revision": "v9"}, 2, "and model.path a directory"),
        (fine, {"model__path": "a/b/c"}, 2, "(rule: a directory with weights, or the id OWNER/NAME"),
    ],
)
def test_what_goes_wrong_is_one_line(
    hub: HubServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    trouble: Callable[..., None],
    changes: dict[str, Any],
    code: int,
    message: str,
) -> None:
    arguments = written(tmp_path, **changes)

    def reached(url: str, **options: Any) -> None:
        use(monkeypatch, url, tmp_path / "cache", **options)

    trouble(hub, reached)
    assert rollart(["launch", *arguments, "--runs-dir", str(tmp_path / "runs")]) == code
    errors = capsys.readouterr().err
    assert message in errors
    assert len(errors.splitlines()) <= 2, errors
    assert ("there is no directory" in errors) != ("revision" in changes or "model__revision" in changes)
    assert not (tmp_path / "runs").exists()


def test_offline_a_model_without_its_weights_is_refused_before_a_start(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_commit = model(tmp_path, model(tmp_path).snapshot().name)
    arguments = written(tmp_path, model__revision=at_commit.revision)
    use(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache", offline=True)
    assert rollart(["validate", arguments[0], arguments[2]]) == 3
    assert "where HF_HUB_OFFLINE forbids to fetch them" in capsys.readouterr().err
    use(monkeypatch, hub.url, tmp_path / "cache")
    at_commit.fetch(SHARDS, nothing)
    use(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache", offline=True)
    assert rollart(["validate", arguments[0], arguments[2]]) == 0


def test_a_hub_that_trickles_is_given_up(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollart.hub.SMALL_FILES_S", 0.0)
    with pytest.raises(ProviderError, match="did not send its small files within 0 s"):
        model(tmp_path).snapshot()


def test_a_model_without_safetensors_is_refused(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (*SHARDS, "model.safetensors.index.json"):
        del hub.branches["main"][name]
    assert rollart(["validate", written(tmp_path)[0], str(tmp_path / "cluster.yaml")]) == 2
    assert "model.path: Owner/tiny-0.5B has no model.safetensors" in capsys.readouterr().err


def test_a_token_opens_a_gated_model(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated, hub.token = True, "hf_mine"
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    assert (model(tmp_path).snapshot() / "config.json").exists()


def test_a_dry_run_pins_the_commit_and_fetches_no_weights(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = written(tmp_path)
    assert rollart(["launch", *arguments, "--dry-run"]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert resolved["run"]["model"]["revision"] == commit_of(hub.branches["main"])
    assert rollart(["plan", *arguments]) == 0
    assert not {*SHARDS} & hub.asked.keys()


@pytest.mark.parametrize(
    ("config", "problem"), [({}, ""), ({"hidden_size": 64}, "model.path differs from v000001"), (None, "revision")]
)
def test_a_fork_by_id_is_compared_with_the_commit(
    hub: HubServer, tmp_path: Path, config: dict[str, int] | None, problem: str
) -> None:
    """With adapters, whose base weights are those of the recorded commit."""
    run, theirs = tmp_path / "old", QWEN | (config or {})
    lora = LoraSpec().model_dump(mode="json")
    commit = commit_of(hub.branches["main"]) if config is not None else "0" * 40
    record(run, 2, {}, model={"path": ID, "revision": commit}, training={"lora": lora}, seed=7)
    write_files(run, 1, FILES | {"config.json": json.dumps(theirs)})
    arguments = written(tmp_path, fork={"run": "old", "version": 1}, training={"lora": lora})
    found = [f"{one}" for one in fork_problems(read_specs(arguments[0], arguments[2]))]
    assert (problem in "".join(found), len(found)) == (True, 1 if problem else 0), found


def test_adapters_belong_to_the_directory_and_not_to_its_name(tmp_path: Path) -> None:
    """Two runs whose files lie in different directories, each with a `policy` beside it."""
    lora = LoraSpec().model_dump(mode="json")
    for name in ("one", "two"):
        (tmp_path / name / "policy").mkdir(parents=True)
        (tmp_path / name / "policy" / "config.json").write_text(json.dumps(QWEN))
    run = tmp_path / "one"
    record(run, 2, {}, model={"path": "policy"}, training={"lora": lora})
    write_files(run, 1, FILES | {"config.json": json.dumps(QWEN)})
    for base, count in (("one", 0), ("two", 1)):
        spec = tiny(model={"path": "policy", "context": 16}, fork={"run": str(run), "version": 1})
        (tmp_path / base / "run.yaml").write_text(yaml.safe_dump(spec | {"training": {"lora": lora}}))
        (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
        specs = read_specs(str(tmp_path / base / "run.yaml"), str(tmp_path / "cluster.yaml"))
        found = [f"{one}" for one in fork_problems(specs)]
        assert len(found) == count, found
        assert all("model.path is" in one for one in found)


def test_a_directory_wins_over_an_id(hub: HubServer, tmp_path: Path) -> None:
    arguments = written(tmp_path)
    (tmp_path / ID).mkdir(parents=True)
    specs = read_specs(arguments[0], arguments[2])
    assert pinned(specs) is specs
    assert run_model(specs, tmp_path / "run") == tmp_path / ID
    assert not hub.asked


def test_nodes_of_a_cluster_read_the_model_from_the_runs_directory(hub: HubServer, tmp_path: Path) -> None:
    arguments, run_dir = written(tmp_path), tmp_path / "shared" / "run"
    remote = "cluster.runtime.backend=ray", "cluster.runtime.address=10.0.0.1:6379"
    specs = pinned(read_specs(arguments[0], arguments[2], remote))
    shown: list[Any] = []
    asyncio.run(fetch_model(specs, run_dir, shown.append))
    size = sum(len(hub.branches["main"][name]) for name in SHARDS)
    assert shown[-1].fields == {"bytes": size, "of": size}
    shutil.rmtree(tmp_path / "cache")  # of the controller's machine
    directory = run_model(specs, run_dir)
    assert directory == run_dir / "model" == prepare_tokenizer(specs, run_dir)
    for name in ("config.json", "tokenizer.json", *SHARDS):
        assert (directory / name).read_bytes() == hub.branches["main"][name]
    assert not (directory / "pytorch_model.bin").exists()
    assert spec_files(specs.run, specs.cluster, tmp_path, tmp_path).keys() == set(), "pods need no directory for it"


@pytest.mark.slow  # a run of real processes: 10 s
def test_a_run_by_id_goes_on_with_the_commit_that_it_began_with(tmp_path: Path, hub: HubServer) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    init = tiny()["model"]["init"]

    def checkpoint(seed: int) -> dict[str, bytes]:
        torch.manual_seed(seed)
        made = tmp_path / f"seed-{seed}"
        config = {key: value for key, value in init.items() if key not in ("architectures", "torch_dtype")}
        Qwen3ForCausalLM(Qwen3Config(**config)).save_pretrained(made, max_shard_size="8KB")
        write_tokenizer(made)
        (made / "chat_template.jinja").write_text(f"{{% for m in messages %}}{{{{ m.content }}}} {EOS} {{% endfor %}}")
        return {file.name: file.read_bytes() for file in made.iterdir()}

    hub.branches["main"] = first = checkpoint(0)
    assert len([name for name in first if name.endswith(".safetensors")]) > 1
    home = Home(tmp_path)
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": ""}
    spec = tiny(model={"path": ID, "context": 16}, steps=1, domains__0__chat=True)
    with pytest.MonkeyPatch.context() as patch:
        for key, value in environment.items():
            patch.setenv(key, value)
        one = home.launch(spec)
        one.finished()
        assert f"fetching {ID}: 0.00 of 0.00 GB" in one.said
        hub.branches["main"] = checkpoint(1)
        patch.setenv("HF_HUB_OFFLINE", "1")
        resumed = home.run("launch", "--resume", "tiny-1", "steps=2", "--dry-run")
    assert resumed.returncode == 0, resumed.stderr
    assert yaml.safe_load(resumed.stdout)["run"]["model"]["revision"] == commit_of(first)
    with ledger(home.directory) as db:
        lengths = {length for (length,) in db.execute("SELECT first_tokens FROM trajectories")}
    assert lengths == {2}, "the observation is one token, and the template ends a message with another"
    trainer = json.loads((home.directory / "trainer.json").read_text())
    assert Path(trainer["model"]["path"]).name == commit_of(first)
