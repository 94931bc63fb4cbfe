"""What stays light: `import rollart` and `rollart --help` load nothing heavy."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollart.ledger.store import Ledger
from tests.sources import PRODUCT, source

ROOT = Path(__file__).parent.parent
HEAVY = [
    "torch",
    "transformers",
    "ray",
    "boto3",
    "aiobotocore",
    "modal",
    "scipy",
    "aiohttp",
    "numpy",
    "vllm",
    "gymnasium",
    "huggingface_hub",
]


RUNNING_PARTS = [
    f"rollart.{package}" for package in ("adapters", "control", "launch", "serving", "strategies", "supervise")
]
"""Packages of a run's parts, which commands that only read a ledger or a spec do not need."""


def loaded(code: str) -> set[str]:
    """Modules, and the packages that they are in, that a fresh interpreter has loaded after running `code`."""
    listing = f"{code}\nimport sys; print('\\n'.join(sys.modules), file=sys.__stdout__)"
    out = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=True)
    return set(out.stdout.split())


def invoked(*commands: str) -> str:
    """Code that invokes commands one after the other."""
    runs = "\n".join(f"    run({command.split()})" for command in commands)
    return f"""
import contextlib, io
from rollart.cli.main import run
with contextlib.redirect_stdout(io.StringIO()):
{runs}"""


@pytest.mark.parametrize(
    "code",
    [
        "import rollart",
        "import serverless, placement",
        invoked("--help"),
        "import placement.assign",
        "import rollart.adapters.env_hosts.host",
    ],
    ids=["rollart", "serverless-placement", "help", "placement", "environment-host"],
)
def test_light(code: str) -> None:
    assert sorted(loaded(code) & set(HEAVY)) == []


def test_commands_that_start_nothing_load_no_parts_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their start-up is most of their time, and a report runs often."""
    monkeypatch.delenv("ROLLART_VLLM_PYTHON", raising=False)
    (tmp_path / "resolved.yaml").touch()
    Ledger(tmp_path, clock=lambda: 0.0, config={"prices": {"prices": []}}).close()
    reports = [f"report {name} {tmp_path}" for name in ("cost", "utilization", "timeline", "curve", "bias", "offload")]
    of_runs = loaded(invoked(f"status {tmp_path}", *reports))
    assert "rollart.report.offload" in of_runs
    assert sorted(of_runs & {*HEAVY, *RUNNING_PARTS, "rollart.settings.run"}) == []
    of_specs = loaded(invoked("prices list", f"validate {tmp_path}/missing.yaml", "schema run", "doctor"))
    assert "rollart.settings.run" in of_specs
    assert sorted(of_specs & {*HEAVY, *RUNNING_PARTS}) == []


def test_nothing_of_the_machine_is_in_the_sources() -> None:
    """No absolute path of somebody's machine, no document that users do not have."""
    for path in [*PRODUCT, *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]:
        if path.exists():
            text = source(path)
            assert "/work/" not in text, path


def test_documents_name_files_that_exist() -> None:
    """Paths in backticks, from the root or from `rollart/`; `NAME.py` is one that the reader adds."""
    for document in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for path in re.findall(r"`(\w+(?:/\w+)+\.py)`", document.read_text()):
            there = (ROOT / path).exists() or (ROOT / "rollart" / path).exists()
            assert there or path.endswith("/NAME.py"), f"{document.name}: {path}"


def test_the_formatter_is_never_switched_off() -> None:
    mark = "# fmt: " + "skip"
    trees = [ROOT / name for name in ("rollart", "placement", "serverless", "tests", "benchmarks", "integrations")]
    files = [p for tree in trees for p in tree.rglob("*.py")]
    assert [p for p in files if mark in p.read_text()] == []
