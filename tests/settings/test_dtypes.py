"""Number formats of the parts: bfloat16 on GPUs, float32 on cores, or as specified; in plans, commands and probes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import yaml

from placement.types import Role
from rollart.engine.__main__ import parse_arguments
from rollart.errors import SpecError
from rollart.launch.layout import engine_actor, engine_command, engine_tolerance, required_vllm_options
from rollart.launch.preflight import dry_run_lines
from rollart.launch.prepare import trainer_config
from rollart.settings.load import builtin
from rollart.settings.planning import run_shape
from rollart.settings.resolve import Resolved, resolve_files

BOTH = [{"name": "cores", "device": "cpu", "count": 8}, {"name": "gpus", "device": "H100", "count": 4, "price": 2.0}]


def resolved(path: Path, engines: str, trainer: str, *overrides: str) -> Resolved:
    """One engine and the trainer on these device types."""
    cluster = {"name": "c", "pools": BOTH, "engines": {"count": 1, "device": engines}, "trainer": {"device": trainer}}
    (path / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    return resolve_files(None, path / "cluster.yaml", overrides)


def engine_of(run: Resolved, path: Path) -> argparse.Namespace:
    """The engine's own interpretation of its command line."""
    arguments = engine_actor(run, path, run.plan.of(Role.ENGINE)[0]).args[2]
    assert isinstance(arguments, list)
    return parse_arguments([*arguments, "--model", "m"])


def trainer_of(run: Resolved, path: Path) -> str:
    said = json.loads(trainer_config(run, path, path).read_text())["parallel"]["dtype"]
    assert isinstance(said, str)
    return said


@pytest.mark.parametrize(
    ("engines", "trainer", "overrides", "served", "trained"),
    [
        ("cpu", "cpu", (), "float32", "float32"),
        ("H100", "H100", (), "bfloat16", "bfloat16"),
        ("H100", "cpu", (), "bfloat16", "float32"),
        ("H100", "H100", ("cluster.engines.dtype=float16",), "float16", "bfloat16"),
        ("H100", "H100", ("cluster.engines.dtype=float32", "cluster.trainer.dtype=float32"), "float32", "float32"),
        ("cpu", "cpu", ("cluster.engines.dtype=bfloat16", "cluster.trainer.dtype=bfloat16"), "bfloat16", "bfloat16"),
    ],
)
def test_what_the_spec_leaves_open_follows_the_device(
    tmp_path: Path, engines: str, trainer: str, overrides: tuple[str, ...], served: str, trained: str
) -> None:
    run = resolved(tmp_path, engines, trainer, *overrides)
    told = engine_of(run, tmp_path)
    assert (told.dtype, told.device) == (served, "cpu" if engines == "cpu" else "cuda")
    assert trainer_of(run, tmp_path) == trained
    lines = list(dry_run_lines(run))
    assert (f"engine-0: computes in {served} on cuda" in lines) == (engines != "cpu")
    assert (f"trainer-0: computes in {trained} on cuda" in lines) == (trainer != "cpu")
    assert bool(lines) == ((engines, served, trained) != ("cpu", "float32", "float32"))


def test_a_streamed_step_on_a_gpu_is_in_float32(tmp_path: Path) -> None:
    stream = ["training.stream=true", "training.epochs=1", "training.minibatches=1"]
    stream += [f"domains.{name}.advantage.baseline=none" for name in ("frozen_lake", "spell_backward")]
    assert trainer_of(resolved(tmp_path, "H100", "H100", *stream), tmp_path) == "float32"


def test_plans_count_the_bytes_of_engines_in_float32(tmp_path: Path) -> None:
    def widths(*overrides: str) -> tuple[float, float]:
        run = resolved(tmp_path, "H100", "H100", *overrides)
        shape = run_shape(run)
        return shape.weight_bytes_per_parameter, shape.kv_bytes_per_element

    assert widths() == widths("cluster.engines.dtype=bfloat16") == (2.0, 2.0)
    assert widths("cluster.engines.dtype=float32") == (4.0, 4.0)
    assert widths("cluster.engines.dtype=float32", "placement.weight_bytes=1") == (1.0, 4.0)


VLLM = builtin("clusters/local-vllm.yaml")


def test_vllm_takes_its_own_dtype_or_that_of_all_engines() -> None:
    for overrides, dtype in (
        ([], "float32"),
        (["cluster.engines.vllm.dtype=auto"], "auto"),
        (["cluster.engines.vllm.dtype=auto", "cluster.engines.dtype=bfloat16"], "bfloat16"),
    ):
        run = resolve_files(None, VLLM, overrides)
        engine = run.plan.of(Role.ENGINE)[0]
        args = engine_command(run, engine).args
        assert args[args.index("--dtype") + 1] == dtype
        assert required_vllm_options(run, engine).dtype == dtype
    with pytest.raises(SpecError, match=r"dtype float16 and vllm\.dtype float32 \(rule: one of them"):
        resolve_files(None, VLLM, ["cluster.engines.dtype=float16"])


def test_the_coarser_side_says_how_far_a_probe_may_be_off(tmp_path: Path) -> None:
    free = VLLM.read_text().replace("    probe: 0.001\n", "")
    (tmp_path / "free.yaml").write_text(free)

    def tolerance(*overrides: str) -> float:
        return engine_tolerance(resolve_files(None, tmp_path / "free.yaml", overrides))

    assert tolerance() == 0.01
    assert tolerance("cluster.engines.vllm.dtype=auto") == 0.2, "vLLM serves float32 weights in bfloat16"
    assert tolerance("cluster.trainer.dtype=bfloat16") == 0.2
    assert tolerance("cluster.engines.vllm.probe=0.5") == 0.5
    assert engine_tolerance(resolve_files(None, VLLM)) == 0.001
