"""The embedded trainer's number of processes, and their arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart.adapters.text import HubTokenizer
from rollart.errors import SpecError
from rollart.launch.layout import trainer_actors, trainer_ranks
from rollart.launch.preflight import dry_run_lines
from rollart.launch.prepare import runtime_domains, trainer_config
from rollart.quickstart.tokenizer import write_tokenizer
from rollart.settings.planning import publishing_of, run_shape
from rollart.settings.resolve import Resolved, resolve_files
from rollart.train.config import load_config
from tests.e2e.harness import CLUSTER, tiny

GPUS = [{"name": "here", "device": "cpu", "count": 4}, {"name": "gpus", "device": "H100", "count": 4, "price": 2.0}]


def resolved(path: Path, trainer: dict[str, Any], pools: Any = None, **run: Any) -> Resolved:
    pools = pools or [{"name": "here", "device": "cpu", "count": 8}]
    engines = {"count": 1, "device": "cpu"}
    (path / "run.yaml").write_text(yaml.safe_dump(tiny(**run)))
    cluster = CLUSTER | {"pools": pools, "trainer": trainer, "engines": engines}
    (path / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    return resolve_files(path / "run.yaml", path / "cluster.yaml")


def told(path: Path, run: Resolved) -> dict[str, Any]:
    written: dict[str, Any] = json.loads(trainer_config(run, path, path).read_text())
    return written


@pytest.mark.parametrize(
    ("trainer", "pools", "ranks", "threads"),
    [
        ({"threads": 4}, None, 1, 4),
        ({"threads": 4, "ranks": 2}, None, 2, 2),
        ({"threads": 3, "ranks": 2}, None, 2, 1),
        ({"threads": 2, "device": "H100"}, GPUS, 2, 1),
        ({"threads": 1, "device": "H100"}, GPUS, 1, 1),
    ],
)
def test_ranks_are_those_given_or_one_per_gpu(
    tmp_path: Path, trainer: dict[str, Any], pools: Any, ranks: int, threads: int
) -> None:
    run = resolved(tmp_path, trainer, pools)
    assert trainer_ranks(run) == ranks
    config = told(tmp_path, run)
    assert (config["parallel"]["ranks"], config["threads"]) == (ranks, threads)
    actor = trainer_actors(run, tmp_path, tmp_path / "trainer.json")[0]
    env = dict(actor.kwargs["env"])
    assert env["OMP_NUM_THREADS"] == str(threads)
    assert env.get("CUDA_VISIBLE_DEVICES") == (",".join(map(str, range(ranks))) if pools else None)


def test_the_trainer_reads_what_it_is_told(tmp_path: Path) -> None:
    trainer = {"threads": 2, "ranks": 2, "dtype": "bfloat16", "activation_checkpointing": True, "bucket_mb": 7}
    run = resolved(tmp_path, trainer, training__lora={"rank": 3, "targets": ["q_proj"]})
    trainer_config(run, tmp_path, tmp_path)
    config = load_config(tmp_path / "trainer.json")
    assert config.parallel.ranks == 2
    assert config.parallel.dtype == "bfloat16"
    assert config.parallel.activation_checkpointing
    assert not config.parallel.compile
    assert config.parallel.bucket_mb == 7
    assert config.lora is not None
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (3, 32.0, ["q_proj"])


@pytest.mark.parametrize(("publish", "moves"), [("adapter", 4 * 3 * (16 + 16)), ("merged", None)])
def test_plans_and_dry_runs_count_what_moves(tmp_path: Path, publish: str, moves: int | None) -> None:
    run = resolved(tmp_path, {"threads": 1}, training__lora={"rank": 3, "targets": ["q_proj"], "publish": publish})
    shape = run_shape(run)
    found, whole = publishing_of(run.run, run.cluster, shape), shape.weight_bytes / 1e9
    below = f"{4 * shape.parameters / 1e6:,.4g} MB"
    if moves is None:
        assert (found.gb, found.load_gb) == (whole, None)
        assert f"weights: {below} a version, adapters merged" in dry_run_lines(run)
    else:
        assert (found.gb, found.load_gb) == (pytest.approx(moves / 1e9), whole)
        assert f"weights: {moves / 1e6} MB of adapters a version, and {below} below them once" in dry_run_lines(run)


def test_each_domains_adapter_counts_and_reaches_the_trainer_and_its_turns(tmp_path: Path) -> None:
    domains = [tiny()["domains"][0] | {"name": f"d{i}", "adapter": name} for i, name in enumerate("xyx")]
    run = resolved(tmp_path, {"threads": 1}, training__lora={"rank": 3, "targets": ["q_proj"]}, domains=domains)
    moves, shape = 2 * 4 * 3 * (16 + 16), run_shape(run)
    found = publishing_of(run.run, run.cluster, shape)
    assert (found.gb, found.load_gb) == (pytest.approx(moves / 1e9), None)
    below = f"{4 * shape.parameters / 1e6:,.4g} MB"
    assert f"weights: {moves / 1e6} MB of 2 adapters a version, and {below} below them once" in dry_run_lines(run)
    trainer_config(run, tmp_path, tmp_path)
    config = load_config(tmp_path / "trainer.json")
    assert (config.adapters, config.domains["d1"].adapter) == (("x", "y"), "y")
    write_tokenizer(tmp_path)
    tokenizer = HubTokenizer(tmp_path)
    assert [domain.adapter for domain in runtime_domains(run, tokenizer)] == ["x", "y", "x"]


def test_by_default_it_is_one_process_without_adapters(tmp_path: Path) -> None:
    trainer_config(resolved(tmp_path, {"threads": 1}), tmp_path, tmp_path)
    config = load_config(tmp_path / "trainer.json")
    assert not config.parallel.sharded
    assert (config.lora, config.adapters) == (None, ())


def test_ranks_that_the_devices_do_not_allow_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"trainer\.ranks is 3 \(rule: at most trainer\.threads, 2: a device each\)"):
        resolved(tmp_path, {"threads": 2, "ranks": 3})
    with pytest.raises(SpecError, match=r"trainer\.ranks is 1, and the plan gives .* 2 devices of pool 'gpus'"):
        trainer_ranks(resolved(tmp_path, {"threads": 2, "device": "H100", "ranks": 1}, GPUS))


def test_a_streamed_step_has_one_rank(tmp_path: Path) -> None:
    stream = {"training": {"stream": True}, "domains__0__advantage": {"baseline": "group"}}
    for trainer in ({"threads": 2, "ranks": 2}, {"dtype": "bfloat16"}):
        with pytest.raises(SpecError, match=r"several ranks or bfloat16 \(rule: one rank in float32\)"):
            resolved(tmp_path, trainer, **stream)
    with pytest.raises(SpecError, match=r"the trainer has 2 ranks \(rule: one\)"):
        trainer_ranks(resolved(tmp_path, {"threads": 2, "device": "H100"}, GPUS, **stream))
