"""The examples of environments are specs without a problem, and runs that train on what they play."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollart.launch.preflight import environment_problems
from rollart.settings.cluster import ClusterSpec
from rollart.settings.load import load_file
from rollart.settings.resolve import read_specs
from rollart.settings.run import RunSpec
from tests.adapters.openenv_process import PYTHON
from tests.e2e.harness import ROOT, Home, Launched, ledger

EXAMPLES = ROOT / "examples/environments"
NEEDS = {"gymnasium": "gymnasium", "verifiers": "verifiers", "openenv": PYTHON, "workshop": "json"}
"""By run a module or a file without which it cannot be played here."""

SMALL = ("steps=2", "batch.trajectories=8", "evaluation.episodes=4", "training.epochs=1")


def there(name: str) -> None:
    need = NEEDS[name]
    if not (Path(need).exists() if os.sep in need else importlib.util.find_spec(need)):
        pytest.skip(f"needs {need}")


def test_every_example_is_a_spec_without_a_problem() -> None:
    kinds = {path.stem: type(load_file(path)) for path in EXAMPLES.glob("*.yaml")}
    assert {name for name, kind in kinds.items() if kind is RunSpec} == NEEDS.keys()
    assert {name for name, kind in kinds.items() if kind is ClusterSpec} == {"hosts"}


@pytest.mark.parametrize("name", ["gymnasium", "workshop"])
def test_its_environments_can_be_made(name: str) -> None:
    there(name)
    assert environment_problems(read_specs(EXAMPLES / f"{name}.yaml")) == []


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    one = Home(tmp_path)
    yield one
    one.close()


def played(home: Home, name: str, *more: str) -> dict[str, int]:
    """Run a few steps of it; events by kind."""
    run = Launched(home.path, ["launch", str(EXAMPLES / f"{name}.yaml"), "--name", name, *SMALL, *more])
    run.finished()
    with ledger(home.path / "runs" / name) as database:
        return dict(database.execute("SELECT kind, count(*) FROM events GROUP BY kind").fetchall())


@pytest.mark.slow
def test_it_runs_as_text(home: Home) -> None:
    there("verifiers")
    assert "infra_fault" not in played(home, "verifiers")


@pytest.mark.slow
def test_it_runs_on_hosts_with_what_they_have_ahead(home: Home) -> None:
    events = played(home, "workshop", "--cluster", str(EXAMPLES / "hosts.yaml"))
    assert "infra_fault" not in events
    assert events["host_started"] == 2
    assert events["environments_made"]


@pytest.mark.slow
def test_it_runs_behind_its_server(home: Home) -> None:
    there("openenv")
    command = [PYTHON, str(EXAMPLES / "openenv_server.py"), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
            assert "infra_fault" not in played(home, "openenv", f"domains.letters.environment_args.url={url}")
        finally:
            server.kill()


def test_the_lakes_words_are_those_of_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollart.quickstart.tokenizer import vocabulary

    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "own_worlds", raising=False)
    from own_worlds import LAYOUTS, place  # type: ignore[import-not-found]

    words = {word for cell in range(16) for word in place(cell).split()}
    assert words | {letter for layout in LAYOUTS.values() for letter in layout} <= vocabulary().keys()
