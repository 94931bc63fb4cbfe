"""The Dockerfile against the repository: what it copies is there, and what it installs is declared."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from rollart.compose.infra import render
from rollart.spec.load import builtin

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "infra/Dockerfile").read_text()


def test_what_is_copied_is_there() -> None:
    copied = [name for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE) for name in line.split()[:-1]]
    assert {"pyproject.toml", "rollart", "placement", "serverless"} <= set(copied)
    assert all((ROOT / name).exists() for name in copied)


def test_pods_of_vllm_engines_have_its_image() -> None:
    files = render("kuberay", None, builtin("clusters/local-vllm.yaml")).files
    assert b"image: rollart-vllm:" in files["raycluster.yaml"]
    assert "-t rollart-vllm:" in DOCKERFILE


def test_what_is_installed_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert f"rollart:{project['version']}" in DOCKERFILE
    assert set(re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE, re.MULTILINE)) == {"node", "engine", "functions"}
