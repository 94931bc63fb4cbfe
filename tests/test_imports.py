"""What stays light: `import rollart` and `rollart --help` load nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
]


def loaded(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after running `code`."""
    listing = f"{code}\nimport sys; print('\\n'.join(sorted({{m.partition('.')[0] for m in sys.modules}})))"
    out = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=True)
    return set(out.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import rollart",
        "import serverless, placement",
        "import io, contextlib\nfrom rollart.cli.main import run\n"
        "with contextlib.redirect_stdout(io.StringIO()): run(['--help'])",
        "import placement.assign",
        "import rollart.adapters.env_hosts.host",
    ],
    ids=["rollart", "serverless-placement", "help", "placement", "environment-host"],
)
def test_light(code: str) -> None:
    assert not loaded(code) & set(HEAVY)


def sources() -> list[Path]:
    return [p for package in ("rollart", "placement", "serverless") for p in sorted((ROOT / package).rglob("*.py"))]


def test_nothing_of_the_machine_is_in_the_sources() -> None:
    """No absolute path of somebody's machine, no document that users do not have."""
    for path in [*sources(), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]:
        if path.exists():
            text = path.read_text()
            assert "/work/" not in text, path


def test_the_formatter_is_never_switched_off() -> None:
    mark = "# fmt: " + "skip"
    trees = [ROOT / name for name in ("rollart", "placement", "serverless", "tests", "benchmarks", "integrations")]
    files = [p for tree in trees for p in tree.rglob("*.py")]
    assert [p for p in files if mark in p.read_text()] == []
