"""Function workers on a Ray cluster, with rollart installed from its wheel: no path of the source tree is known to any
process, so that a module that the wheel lacks, or that actors find only beside the source, ends the run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.e2e.harness import BATCH, ROOT, Home, Spec, events, ledger, sound, tiny

pytestmark = pytest.mark.slow  # a wheel, a virtual environment and a Ray cluster: about 20 s on idle cores

CLUSTER: Spec = {
    "name": "fleet",
    "runtime": {"backend": "ray"},
    "pools": [{"name": "here", "device": "cpu", "count": 3}],
    "engines": {"count": 1, "threads": 1, "max_slots": 16},
    "trainer": {"threads": 1},
    "functions": {"backend": "local", "local": {"hosts": 1}},
    "environments": {"workers": 0},
}


@pytest.fixture
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a virtual environment with the wheel, and with this one's packages."""
    source, home = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("rollart", "placement", "serverless"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(home), str(source)]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = home.glob("rollart-*.whl")
    venv.create(home / "venv", with_pip=False, symlinks=True)
    (packages,) = (home / "venv/lib").glob("python3*/site-packages")
    shared = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "shared.pth").write_text("\n".join(shared))  # their .pth files, and so the source tree, are not read
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--target", str(packages), str(wheel)], check=True, timeout=300
    )
    return home / "venv/bin/python"


def test_a_run_scores_on_function_hosts_that_are_ray_actors(
    home: Home, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"NO_COLOR": "1"}
    monkeypatch.setattr("tests.e2e.harness.environment", lambda: kept)
    monkeypatch.setattr("tests.e2e.harness.ROLLART", [str(python), "-m", "rollart.cli.main"])
    code = "import rollart, serverless, placement; from rollart.testing.backends import REWARDS; "
    code += "print(rollart.__file__, serverless.__file__, placement.__file__, REWARDS / 'behave.py', sep='\\n')"
    found = subprocess.run([python, "-c", code], cwd=home.path, env=kept, capture_output=True, text=True, check=True)
    files = [Path(line) for line in found.stdout.splitlines()]
    assert all(file.is_relative_to(python.parents[1]) and file.is_file() for file in files), files
    for name in ("worlds.py", "rewards.py"):
        shutil.copy(ROOT / "tests/e2e" / name, home.path)
    spec = tiny(steps=1, domains__0__environment="worlds:Coin", functions__0__source="rewards.py")
    run = home.launch(spec, cluster=CLUSTER)
    run.finished()
    sound(home.directory, steps=1)
    assert [event["subject"] for event in events(home.directory, "host_started")] == ["reward-0"]
    with ledger(home.directory) as db:
        calls = db.execute("SELECT provider, status, items FROM invocations WHERE items > 0").fetchall()
    assert {(provider, status) for provider, status, _ in calls} == {("local", "ok")}
    assert sum(items for *_, items in calls) >= BATCH
