"""The Dockerfile against the repository: the files that it copies exist, the extras that it installs are declared."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from rollart.infra.kuberay import FILES_OWNER
from rollart.settings.cluster import PYTHON_VARIABLE
from rollart.settings.load import builtin
from rollart.tools.infra import (
    ENGINE_IMAGES,
    ENVIRONMENT_IMAGE,
    ENVIRONMENT_PYTHON_PREFIX,
    HOST_IMAGE,
    VLLM_PYTHON,
    render,
)

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "infra/Dockerfile").read_text()


def test_copied_files_exist() -> None:
    copied = [name for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE) for name in line.split()[:-1]]
    assert {"pyproject.toml", "rollart", "placement", "serverless"} <= set(copied)
    assert all((ROOT / name).exists() for name in copied)


def test_pods_of_vllm_engines_have_its_image() -> None:
    files = render("kuberay", None, builtin("clusters/local-vllm.yaml")).files
    assert b"image: rollart-vllm:" in files["raycluster.yaml"]
    assert "-t rollart-vllm:" in DOCKERFILE


def test_installed_extras_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert f"rollart:{project['version']}" in DOCKERFILE
    targets = {"node", "engine", "environments", "functions"}
    assert set(re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE, re.MULTILINE)) == targets
    assert set(re.findall(r"--target (\w+)", DOCKERFILE)) == targets


def test_paths_that_rendered_files_name_are_in_the_images() -> None:
    assert f"ENV {PYTHON_VARIABLE}={VLLM_PYTHON}" in DOCKERFILE
    assert f"python -m venv {VLLM_PYTHON.removesuffix('/bin/python')} " in DOCKERFILE
    assert f"python -m venv {ENVIRONMENT_PYTHON_PREFIX.rstrip('/')} " in DOCKERFILE
    for name in {*ENGINE_IMAGES.values(), HOST_IMAGE, ENVIRONMENT_IMAGE}:
        assert f"-t {name}:" in DOCKERFILE


def test_every_instruction_exists_in_docker() -> None:
    """The Dockerfile checked without Docker: instructions, stages that exist before they are used, arguments that
    are declared in the stage that uses them."""
    stages: list[str] = []
    declared: set[str] = set()
    for line in DOCKERFILE.replace("\\\n", " ").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        word, rest = line.split(maxsplit=1)
        assert word in {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER"}
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            assert base in stages or base.startswith("python:${PYTHON}")
            stages.append(name)
            declared = set()
        elif word == "ARG":
            declared.add(rest.partition("=")[0])
        else:
            assert set(re.findall(r"\$\{(\w+)\}", rest)) <= declared, line


def test_no_image_runs_as_root() -> None:
    users = re.findall(r"^(?:FROM \S+ AS|USER) (\w+)$", DOCKERFILE, re.MULTILINE)
    stages = {"node", "engine", "environments", "functions"}
    last = dict.fromkeys(stages, "root")
    for word in users:
        if word in stages:
            stage = word
        else:
            last[stage] = word
    assert set(last.values()) == {"rollart"}
    assert f"useradd --uid {FILES_OWNER} " in DOCKERFILE
