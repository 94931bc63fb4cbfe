"""The benchmark of a GPU, on a CPU: it runs to its end, says on what, and loses nothing to a phase that fails."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_engine
from placement.roofline import Calibration
from placement.types import Device
from rollart.engine.cache import KvCache
from rollart.engine.decoding import GraphDecoder
from rollart.engine.runner import Runner

ROOT = Path(__file__).resolve().parents[2]

ABSENT = ("ray", "gymnasium", "reasoning_gym", "aiobotocore", "pyarrow", "openai")
"""What a machine with PyTorch, transformers and pydantic alone may lack."""


def bench(tmp_path: Path, **report: Any) -> gpu_engine.Bench:
    about: dict[str, Any] = {"file": "", "phases": {}, "failed": {}, "seconds": {}}
    about |= {"limit_s": 600.0, "began": time.monotonic()} | report
    known = Device("cpu", generation="cpu")
    return gpu_engine.Bench(gpu_engine.SIZES["tiny"], torch.device("cpu"), "float32", tmp_path, known, about)


@pytest.mark.slow  # an engine and a trainer, each a process
def test_it_runs_to_its_end_with_nothing_else_installed(tmp_path: Path) -> None:
    """Every figure is there; the constants are what a cluster spec's `calibration` reads; engine and trainer agree."""
    lacking = tmp_path / "lacking"
    lacking.mkdir()
    for name in ABSENT:
        (lacking / f"{name}.py").write_text(f"raise ImportError('{name} is not installed')")
    out, constants = tmp_path / "gpu.json", tmp_path / "calibration.json"
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--device", "cpu", "-o", "json"]
    command += ["--json", str(out), "--calibration", str(constants), "--limit", "500"]
    env = {**os.environ, "PYTHONPATH": str(lacking), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads(out.read_text())
    assert report["device"]["kind"] == "cpu"
    assert report["failed"] == {}
    phases = report["phases"]
    assert set(phases) == {"ceilings", "decode", "prefill", "calibration", "training", "run"}
    tiny = gpu_engine.SIZES["tiny"]
    assert [s["batch"] for s in phases["decode"]["settings"]] == [b for b, _ in tiny.decode]
    assert all(s["tokens_per_s"] > 0 and s["share"] > 0 for s in phases["decode"]["settings"])
    assert len(phases["calibration"]["rows"]) == len(tiny.decode) + len(tiny.prefill)
    calibrated = Calibration.from_dict(json.loads(constants.read_text()))
    assert calibrated.to_dict()["constants"] == phases["calibration"]["constants"]
    assert phases["training"]["tokens"] == 256
    assert phases["training"]["published_gb"] > 0
    assert [step["behaviour_gap"] < 1e-4 for step in phases["run"]["steps"]] == [True, True]
    assert not list(tmp_path.glob("rollart-gpu-*")), "nothing is left behind"


def test_a_phase_that_fails_is_told_and_the_next_one_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    made = bench(tmp_path, file=str(file))

    def broken() -> None:
        raise RuntimeError("out of memory\nand more")

    gpu.phase(made, "first", broken, most=60)
    told = json.loads(file.read_text())
    assert told["failed"] == {"first": "RuntimeError: out of memory"}
    assert "in broken" in told["traces"]["first"], "for whoever looks into it"
    assert "Traceback" not in capsys.readouterr().err
    gpu.phase(made, "second", lambda: {"figure": 1}, most=60)
    assert json.loads(file.read_text())["phases"] == {"second": {"figure": 1}}
    made.report["limit_s"] = 0.0
    gpu.phase(made, "third", lambda: pytest.fail("it must not begin"), most=60)
    assert made.report["failed"]["third"] == "no time was left"


def test_a_phase_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    made = bench(tmp_path)
    gpu.phase(made, "endless", lambda: [time.sleep(0.01) for _ in iter(int, 1)], most=0.05)
    assert made.report["failed"]["endless"] == "TimeoutError: endless took more than 0 s"


@pytest.mark.slow
def test_decoding_by_steps_of_a_fixed_shape_is_measured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way that a GPU takes, but for the graphs."""
    serving = gpu_engine.serving

    def with_decoder(made: gpu_engine.Bench) -> Runner:
        runner = serving(made)
        network = runner.network
        runner.cache = KvCache(
            network.architecture,
            slots=made.size.slots + 1,
            context=made.size.context,
            device=network.device,
            dtype=network.dtype,
        )
        runner.decoder = GraphDecoder(network, runner.cache, capture=False)
        return runner

    monkeypatch.setattr(gpu_engine, "serving", with_decoder)
    monkeypatch.setattr(gpu_engine, "STEPS", 2)
    made = bench(tmp_path)
    made.size = dataclasses.replace(made.size, slots=3, context=32, decode=((2, 5), (3, 9)))
    found = gpu_engine.decode(made)
    assert found["operations"] == "TorchOperations"
    assert found["why"] == "fused kernels are for CUDA devices, this is cpu"
    assert all(s["device_ms"] > 0 for s in found["settings"])
    assert found["kernels"] == "there is no GPU to profile"
    assert len(made.rows) == len(made.size.decode)


@pytest.mark.parametrize(
    ("name", "memory_gb", "known"),
    [
        ("NVIDIA H100 80GB HBM3", 85.0, "H100"),
        ("NVIDIA H200", 150.1, "H200"),
        ("NVIDIA H20", 102.0, "H20"),
        ("NVIDIA A100-SXM4-80GB", 85.1, "A100-80"),
        ("NVIDIA A100-SXM4-40GB", 42.4, "NVIDIA-A100-SXM4-40GB"),
        ("NVIDIA A100-PCIE-40GB", 42.4, "NVIDIA-A100-PCIE-40GB"),
        ("NVIDIA H100 PCIe", 85.0, "NVIDIA-H100-PCIe"),
        ("NVIDIA H100 NVL", 99.9, "NVIDIA-H100-NVL"),
        ("Some Card", 8.0, "Some-Card"),
    ],
)
def test_a_card_is_found_in_the_catalogue_by_the_drivers_name_and_its_memory(
    name: str, memory_gb: float, known: str
) -> None:
    assert gpu_engine.known_device(name, "hopper", memory_gb).name == known


@pytest.mark.parametrize("model", ["0.6b", "1.4b"])
def test_models_have_the_size_of_their_name_and_fit_a_card_of_80_gb(model: str, tmp_path: Path) -> None:
    size = gpu_engine.SIZES[model]
    made = gpu_engine.Bench(size, torch.device("cpu"), "bfloat16", tmp_path, Device("x"), {})
    shape = made.shape
    assert shape.parameters / 1e9 == pytest.approx(float(model[:3]), rel=0.05)
    kv = (size.slots + 1) * shape.kv_bytes(size.context)
    assert (shape.weight_bytes + kv) / 1e9 < 60
    rounds = max(-(-batch * context // gpu_engine.STEP_TOKENS) for batch, context in size.decode)
    longest = max(context for _, context in size.decode)
    assert longest + rounds + 1 + gpu_engine.STEPS + 4 <= size.context, "answers are not cut short"
    assert max(batch for batch, _ in size.decode) <= size.slots
