"""What goes wrong for users: one line of cause, one of remedy, an exit code, and nothing left running."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from pathlib import Path

import pytest

from tests.e2e.harness import Home, events, ledger, sound, tiny

pytestmark = pytest.mark.slow  # real processes: up to 10 s per test


def test_model_that_is_not_there(home: Home) -> None:
    home.launch(tiny(model={"path": "nowhere", "context": 16})).failed(2, "nowhere")


def test_directory_that_is_not_a_model(home: Home) -> None:
    (home.path / "model").mkdir()
    home.launch(tiny(model={"path": "model", "context": 16})).failed(2, "model", "config.json does not exist")


def test_model_without_a_tokenizer(home: Home) -> None:
    model = home.path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(tiny()["model"]["init"]))
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    home.launch(tiny(model={"path": "model", "context": 16})).failed(2, "tokenizer.json")


def test_model_with_a_damaged_config(home: Home) -> None:
    model = home.path / "model"
    model.mkdir()
    (model / "config.json").write_text("{")
    spec = tiny(model={"path": "model", "tokenizer": "rollart.quickstart.tokenizer:write_tokenizer", "context": 16})
    run = home.launch(spec)
    assert run.end() in (1, 2)
    assert "config.json" in run.said
    assert "Traceback" not in run.said


@pytest.mark.parametrize(
    ("environment", "word"),
    [
        ("tests.e2e.nowhere:Coin", "tests.e2e.nowhere"),
        ("tests.e2e.worlds:Nothing", "Nothing"),
        ("tests.e2e.worlds:Unmakeable", "no display found"),
        ("broken_module:Coin", "broken_module"),
    ],
)
def test_environment_that_cannot_be_made(home: Home, environment: str, word: str) -> None:
    (home.path / "broken_module.py").write_text("class Coin(:\n")
    home.launch(tiny(domains__0__environment=environment)).failed(2, word)


def test_environment_that_always_breaks(home: Home) -> None:
    run = home.launch(tiny(domains__0__environment="tests.e2e.worlds:BrokenReset"))
    run.failed(5, "the game server is down", "faults.max_rate")
    _no_scores(home)


@pytest.mark.parametrize(
    ("handler", "cause"),
    [("raises", "the answer key is missing"), ("sleeps", "0.3 s")],
)
def test_reward_function_that_always_breaks(home: Home, handler: str, cause: str) -> None:
    spec = tiny(functions__0__handler=handler, functions__0__timeout_s=0.3 if handler == "sleeps" else 5.0)
    home.launch(spec).failed(5, cause)
    _no_scores(home)


def test_reward_whose_answers_depend_on_earlier_calls(home: Home) -> None:
    """Refused on the run's first samples, before any of them is kept or trained."""
    source = Path(__file__).parents[1] / "serverless" / "functions" / "hidden.py"
    (home.path / "hidden.py").write_text(source.read_text())
    spec = tiny(functions__0__source="hidden.py", functions__0__handler="hidden")
    home.launch(spec).failed(2, "its answers depend on earlier calls", "in the reverse order", "deterministic=False")
    with ledger(home.directory) as db:
        assert db.execute("SELECT count(*) FROM samples").fetchone() == (0,)
        assert db.execute("SELECT version FROM versions").fetchall() == [(0,)]


def test_reward_function_that_does_not_load(home: Home) -> None:
    (home.path / "reward.py").write_text("import nothing_of_the_kind\ndef rule(sample):\n    return 1.0\n")
    spec = tiny(functions__0__source="reward.py")
    run = home.launch(spec)
    assert run.end() in (2, 5), run.said
    assert "nothing_of_the_kind" in run.said
    assert "Traceback" not in run.said


def test_observation_that_the_context_does_not_hold(home: Home) -> None:
    spec = tiny(domains__0__environment_args={"text": "move? " * 40})
    home.launch(spec).failed(5, "context", "40 tokens")


def test_engine_that_cannot_start(home: Home) -> None:
    cluster = {
        "name": "greedy",
        "pools": [{"name": "here", "device": "cpu", "count": 2}],
        "engines": {"count": 1, "threads": 1, "max_slots": 2_000_000_000},
    }
    run = home.launch(cluster=cluster)
    run.failed(1, "engine-0", "engine-0.log")


@pytest.mark.parametrize(
    ("change", "code", "word"),
    [
        ({"functions__0__source": "nowhere.py"}, 2, "nowhere.py"),
        ({"functions__0__handler": "nothing"}, 2, "nothing"),
        ({"functions__0__trust": "untrusted"}, 2, "sandbox"),
    ],
)
def test_a_wrong_reward_is_said_before_anything_starts(
    home: Home, change: dict[str, str], code: int, word: str
) -> None:
    run = home.launch(tiny(**change))
    run.failed(code, word)
    assert "starting trainer" not in run.said


def test_runs_directory_that_cannot_be_written(home: Home) -> None:
    (home.path / "runs").write_text("a file")
    home.launch().failed(1, "runs", "--runs-dir")


def test_disk_full(home: Home) -> None:
    """A file system of 3 MB of which something else takes the rest."""
    runs = home.path / "runs"
    runs.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(runs)]).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        run = home.launch(tiny(domains__0__environment_args={"turn_s": 1.0}))
        run.until_step(1)
        ballast = runs / "ballast"
        _fill(ballast)
        run.failed(1, "space", "--resume")
        ballast.unlink()
        home.resume("domains.coin.environment_args.turn_s=0.01").finished()
        sound(home.directory)
    finally:
        home.close()
        subprocess.run(["umount", "-l", str(runs)], check=True)


def test_ledger_that_may_not_grow(home: Home) -> None:
    """The same where nothing may be mounted: the controller's files have a size limit, as a quota sets it."""
    run = home.launch(tiny(domains__0__environment_args={"turn_s": 1.0}))
    run.until_step(1)
    size = 2 * 4096  # two pages: the write-ahead log is begun anew at every publish
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (size, size))
    run.failed(1, "ledger.sqlite")
    home.resume("domains.coin.environment_args.turn_s=0.01").finished()
    sound(home.directory)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            return


def _no_scores(home: Home) -> None:
    """Faults are told as faults: no trajectory was scored, none was trained."""
    assert events(home.directory, "infra_fault")
    with ledger(home.directory) as db:
        assert db.execute("SELECT count(*) FROM samples").fetchone() == (0,)
        assert db.execute("SELECT count(*) FROM trajectories WHERE score IS NOT NULL").fetchone() == (0,)


def test_a_policy_that_has_collapsed_is_told(home: Home) -> None:
    """The run ends as it was asked to; a person and a report see that it learned nothing."""
    run = home.launch(tiny(steps=6, training__lr=1e6))
    run.finished()
    assert "learning stopped: training" in run.said
    assert "gradient was exactly 0" in run.said
