"""Warnings of a run that can start: shown by validate, by the dry run and by the launch."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import yaml

from rollart.cli.main import run as rollart
from tests.e2e.harness import CLUSTER, tiny

EXTRA = pytest.mark.slow
"""Needs an extra, such as Ray, that is installed for the slow tests."""

REWARD = """
import os
def rule(sample) -> float:
    import numpy
    import no_such_module
    return float(len(os.environ["JUDGE_KEY"]) + os.getenv("MODEL", 0) + numpy.sum([]))
"""


@pytest.mark.parametrize(
    ("backend", "wanted"),
    [
        pytest.param(
            "modal",
            [
                "requirement torch==2.6.0+cpu is a local build",
                "it imports no_such_module, which is neither packed nor in its requirements",
                "it imports numpy, which is neither",
                "it reads the environment variable JUDGE_KEY",
                "it reads the environment variable MODEL",
            ],
            marks=EXTRA,
        ),
        pytest.param("aws_lambda", ["torch is larger than the 250 MB that AWS Lambda unpacks"], marks=EXTRA),
        ("local", []),
    ],
)
def test_a_function_that_will_not_work_at_its_provider(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], backend: str, wanted: list[str]
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    function = {"name": "rule", "source": "reward.py", "handler": "rule", "requirements": ["torch==2.6.0+cpu"]}
    run, cluster = tmp_path / "run.yaml", tmp_path / "cluster.yaml"
    run.write_text(yaml.safe_dump(tiny(functions=[function])))
    cluster.write_text(yaml.safe_dump(CLUSTER | {"functions": {"backend": backend}}))
    assert rollart(["validate", str(run), str(cluster)]) == 0
    warned = capsys.readouterr().err
    assert rollart(["launch", str(run), "--cluster", str(cluster), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for text in wanted:
        assert f"{run}: warning: function 'rule': {text}" in warned
        assert f"# warning: function 'rule': {text}" in shown
    assert wanted or "reads the environment variable" not in warned


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        pytest.param({"runtime": {"backend": "ray", "address": "head:6379"}}, True, marks=EXTRA),
        ({"engines": {"kind": "vllm", "count": 1, "attach": ["http://gpu:8000"]}}, True),
        ({}, False),
    ],
)
def test_ports_without_a_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], warned: bool
) -> None:
    run, cluster = tmp_path / "run.yaml", tmp_path / "cluster.yaml"
    run.write_text(yaml.safe_dump(tiny()))
    cluster.write_text(yaml.safe_dump(CLUSTER | changes))
    assert rollart(["validate", str(run), str(cluster)]) == 0
    assert ("answer HTTP without a token" in capsys.readouterr().err) == warned


@pytest.mark.parametrize(("steps", "warned"), [(199, False), (200, True)])
def test_a_long_run_that_keeps_two_versions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int, warned: bool
) -> None:
    run, cluster = tmp_path / "run.yaml", tmp_path / "cluster.yaml"
    run.write_text(yaml.safe_dump(tiny(steps=steps)))
    cluster.write_text(yaml.safe_dump(CLUSTER))
    assert rollart(["validate", str(run), str(cluster)]) == 0
    assert (f"of {steps} versions the last two are kept" in capsys.readouterr().err) == warned


@pytest.mark.parametrize(
    ("version", "required", "warned"),
    [
        ("2.13.0", ["nvidia-cublas-cu12==12.8"], True),
        ("2.13.0+cu128", [], True),
        ("2.13.0+cpu", [], False),
        ("2.13.0", [], False),
    ],
)
def test_cuda_packages_that_no_part_uses(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    version: str,
    required: list[str],
    warned: bool,
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: required)
    run, cluster = tmp_path / "run.yaml", tmp_path / "cluster.yaml"
    run.write_text(yaml.safe_dump(tiny()))
    cluster.write_text(yaml.safe_dump(CLUSTER))
    assert rollart(["validate", str(run), str(cluster)]) == 0
    assert ("torch is installed with gigabytes of CUDA packages" in capsys.readouterr().err) == warned


def test_completion_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("_ROLLART_COMPLETE", "bash_source")
    assert rollart([]) == 2
    assert capsys.readouterr().err.startswith("rollart: tab completion is not supported")


def test_a_shipped_spec_that_is_not_here_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert rollart(["validate", "configs/clusters/local.yaml"]) == 2
    assert "the one that rollart brings is " in capsys.readouterr().err
