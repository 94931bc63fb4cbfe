"""Commands: what they print where, how they fail, and with which code."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart.cli import controller
from rollart.cli.runs import new_lines
from rollart.errors import (
    BudgetExceeded,
    FaultRateExceeded,
    PartDied,
    ProviderError,
    RunFailed,
    SpecError,
    StoppedEarly,
)
from rollart.ledger.store import Ledger
from rollart.ports import RunEvent

Call = Callable[..., Any]


def ledger_in(directory: Path) -> None:
    import asyncio

    from rollart.ledger.store import Ledger
    from rollart.ports import Interval

    async def main() -> None:
        with Ledger(directory, clock=lambda: 0.0, config={"run": {"steps": 2}}, inline=True) as ledger:
            ledger.interval(Interval("engine", "engine-0", 0, 3600, "busy", "", 1, 2.0))
            await ledger.commit(version=1, step=1, consumed=[], metrics={})

    asyncio.run(main())


def wrapped(error: BaseException) -> RuntimeError:
    """As CPython 3.11 does with whatever is raised in `__set_name__`."""
    outer = RuntimeError("Error calling __set_name__ on 'Field' instance 'a' in 'B'")
    outer.__cause__ = error
    return outer


class TestLaunch:
    def test_it_resolves_makes_a_directory_and_calls_compose(self, rollart: Call, launch_calls: Any) -> None:
        done = rollart("launch", "run.yaml", "steps=5", "cluster.engines.max_slots=8", "--name", "mine")
        assert done.code == 0
        assert f"run directory: {Path('runs/mine')}" in done.out
        assert "step   1/2  lake █████░░░░░░░░░░░░░░░ 0.25" in done.err
        ((resolved, directory, resume),) = launch_calls.calls
        assert (resolved.run.steps, resolved.cluster.engines.max_slots, resume) == (5, 8, False)
        assert directory == Path("runs/mine")
        assert yaml.safe_load((directory / "resolved.yaml").read_text()) == resolved.to_dict()
        assert not (directory / controller.PID_FILE).exists()

    def test_runs_are_numbered_and_names_are_used_once(self, rollart: Call, launch_calls: Any) -> None:
        for _ in range(2):
            assert rollart("launch", "run.yaml").code == 0
        assert [call[1].name for call in launch_calls.calls] == ["test-1", "test-2"]
        done = rollart("launch", "run.yaml", "--name", "test-1")
        assert done.code == 2
        assert "run 'test-1' exists" in done.err
        assert "--resume test-1" in done.err
        for options in ((), ("--dry-run",)):
            done = rollart("launch", "run.yaml", "--name", "../x", *options)
            assert (done.code, done.out) == (2, "")
            assert "--name '../x' (rule: one directory name)" in done.err

    def test_a_run_that_stops_early_is_reported_and_has_an_exit_code(
        self, rollart: Call, launch_calls: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = launch_calls.launch

        def launch(*arguments: Any, **more: Any) -> None:
            whole(*arguments, **more)
            raise StoppedEarly("stopped after step 4 of 9: enough", remedy="--resume continues")

        monkeypatch.setattr("rollart.cli.launch.start", launch)
        done = rollart("launch", "run.yaml")
        assert done.code == 6
        assert "stopped after step 4 of 9: enough" in done.err
        assert "run directory: runs" in done.out

    def test_a_run_that_never_began_leaves_no_directory(self, rollart: Call, launch_calls: Any) -> None:
        def refuse(directory: Path) -> None:
            raise SpecError("no such thing", remedy="mend it")

        launch_calls.action = refuse
        assert rollart("launch", "run.yaml", "--name", "mine").code == 2
        assert list(Path("runs").iterdir()) == []

    def test_a_run_whose_environment_changes_the_directory_ends_as_any(self, rollart: Call, launch_calls: Any) -> None:
        launch_calls.action = lambda directory: os.chdir("/")
        done = rollart("launch", "run.yaml", "--name", "mine")
        assert (done.code, f"run directory: {Path('runs/mine')}" in done.out) == (0, True)
        assert not (Path("runs/mine") / controller.PID_FILE).exists()

    def test_dry_run_prints_what_would_run(self, rollart: Call, launch_calls: Any) -> None:
        done = rollart("launch", "run.yaml", "--dry-run")
        assert (done.code, done.err, launch_calls.calls) == (0, "", [])
        assert yaml.safe_load(done.out)["plan"]["assignments"][0]["part"] == "engine-0"
        assert not Path("runs").exists()

    def test_without_a_file_it_is_the_quickstart(self, rollart: Call, launch_calls: Any) -> None:
        assert yaml.safe_load(rollart("launch", "--dry-run").out)["run"]["name"] == "quickstart"

    @pytest.mark.parametrize(
        "override",
        [
            "seed=3",
            "model.context=64",
            "model.init={model_type: llama}",
            "domains.lake.group_size=4",
            "domains.lake.environment=tests.contracts.worlds:Coin",
            "training.lora={rank: 2}",
        ],
    )
    def test_resume_refuses_what_its_records_depend_on(self, rollart: Call, launch_calls: Any, override: str) -> None:
        rollart("launch", "run.yaml", "--name", "mine")
        kept = (Path("runs/mine") / "resolved.yaml").read_text()
        done = rollart("launch", "--resume", "mine", override)
        key = override.partition("=")[0]
        assert (done.code, len(launch_calls.calls)) == (2, 1)
        assert f"a resume changes {key}" in done.err
        assert "(rule: as recorded; " in done.err
        assert (Path("runs/mine") / "resolved.yaml").read_text() == kept

    def test_resume_shows_and_records_what_it_changes(self, rollart: Call, launch_calls: Any) -> None:
        rollart("launch", "run.yaml", "--name", "mine")
        again = rollart("launch", "--resume", "mine")
        assert (again.code, "changes" in again.err) == (0, False)
        done = rollart("launch", "--resume", "mine", "training.lr=0.001", "cluster.engines.max_slots=8")
        assert done.code == 0
        assert "this resume changes training.lr: 1e-05 -> 0.001" in done.err
        assert "this resume changes cluster.engines.max_slots: " in done.err
        with contextlib.closing(sqlite3.connect("runs/mine/ledger.sqlite")) as ledger:
            configs = dict(ledger.execute("SELECT key, value FROM meta WHERE key LIKE 'config%'"))
        rates = {key: json.loads(config)["run"]["training"]["lr"] for key, config in configs.items()}
        assert rates == {"config.0": 1e-5, "config": 1e-3}

    def test_resume_continues_as_it_was_started(self, rollart: Call, launch_calls: Any) -> None:
        rollart("launch", "run.yaml", "steps=5", "--name", "mine")
        assert rollart("launch", "--resume", "mine", "budget.usd=1").code == 0
        resolved, directory, resume = launch_calls.calls[-1]
        assert (resolved.run.steps, resolved.run.budget.usd, directory.name, resume) == (5, 1, "mine", True)
        assert "continues a run as it was started" in rollart("launch", "run.yaml", "--resume", "mine").err
        done = rollart("launch", "--resume", "mime")
        assert done.code == 2
        assert "did you mean 'mine'?" in done.err

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (["none.yaml"], "rollart: none.yaml: no such file"),
            (["run.yaml", "other.yaml"], "'other.yaml' is neither the run file nor key=value"),
            (["run.yaml", "stepz=1"], "override 'stepz=1': unknown key 'stepz' in run"),
            (["run.yaml", "environments.workers=2"], "did you mean 'cluster.environments.workers=2'?"),
            (["run.yaml", "--cluster", "c.yaml"], "rollart: c.yaml: no such file"),
            (["run.yaml", "--clusterr", "c.yaml"], "No such option"),
            (["run.yaml", "--runs-dir", "run.yaml"], "rollart: run.yaml: cannot be written"),
        ],
    )
    def test_wrong_uses_are_a_line_and_a_remedy(
        self, rollart: Call, launch_calls: Any, arguments: list[str], expected: str
    ) -> None:
        done = rollart("launch", *arguments)
        assert done.code == (1 if "cannot be written" in expected else 2)
        assert expected in done.err
        assert "Traceback" not in done.err
        assert done.out == ""

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (RunFailed("it broke", remedy="mend it"), 1),
            (ProviderError("no key"), 3),
            (BudgetExceeded("spent"), 4),
            (FaultRateExceeded("too many"), 5),
            (KeyboardInterrupt(), 130),
            (ExceptionGroup("g", [PartDied("engine-0", "gone"), FaultRateExceeded("too many")]), 5),
            (BaseExceptionGroup("g", [KeyboardInterrupt()]), 130),
            (wrapped(KeyboardInterrupt()), 130),
            (wrapped(ValueError()), 1),
        ],
    )
    def test_errors_have_their_codes(self, rollart: Call, launch_calls: Any, error: BaseException, code: int) -> None:
        def fail(directory: Path) -> None:
            raise error

        launch_calls.action = fail
        done = rollart("launch", "run.yaml")
        assert done.code == code
        assert "Traceback" not in done.err
        assert "rollart: " in done.err
        if isinstance(error, RunFailed):
            assert "rollart: it broke\n  remedy: mend it\n" in done.err

    def test_an_unexpected_error_leaves_its_traceback_in_the_run(self, rollart: Call, launch_calls: Any) -> None:
        def fail(directory: Path) -> None:
            raise ZeroDivisionError("by zero\nsecond line")

        launch_calls.action = fail
        done = rollart("launch", "run.yaml", "--name", "mine")
        assert done.code == 1
        assert "rollart: unexpected ZeroDivisionError: by zero\n" in done.err
        assert "runs/mine/error.log" in done.err
        assert "Traceback" in Path("runs/mine/error.log").read_text()

    def test_a_running_run_is_not_started_again(self, rollart: Call, launch_calls: Any) -> None:
        codes: list[int] = []
        launch_calls.action = lambda directory: (
            codes.append(rollart("launch", "--resume", "mine").code) if not codes else None
        )
        rollart("launch", "run.yaml", "--name", "mine")
        assert codes == [2]


class TestReports:
    @pytest.fixture
    def run(self, rollart: Call, launch_calls: Any) -> None:
        launch_calls.action = ledger_in
        assert rollart("launch", "run.yaml", "--name", "mine").code == 0

    @pytest.mark.parametrize("what", ["cost", "utilization", "curve"])
    def test_of_the_latest_run_in_every_format(self, rollart: Call, run: None, what: str) -> None:
        found = json.loads(rollart("report", what, "-o", "json").out)
        assert (found["schema_version"], found["report"], found["run"]) == (2, what, "mine")
        assert rollart("report", what, "mine", "-o", "csv").out.startswith("run,report,table,row,column,value\n")
        table = rollart("report", what, "runs/mine")
        assert table.out.startswith(f"{what} of mine\n")
        assert "\x1b" not in table.out

    def test_status(self, rollart: Call, run: None) -> None:
        rows = json.loads(rollart("status", "-o", "json").out)["tables"]["status"]
        found = {row["what"]: row["value"] for row in rows}
        assert (found["state"], found["step"], found["steps"], found["usd"]) == ("stopped", 1, 2, 2.0)

    def test_a_run_that_has_ended_is_watched_once(self, rollart: Call, run: None) -> None:
        watched = rollart("status", "--watch")
        assert (watched.code, watched.out.count("status of mine")) == (0, 1)
        assert re.search(r"^Devices, last \d+ s$", watched.out, re.MULTILINE)
        refused = rollart("status", "--watch", "-o", "json")
        assert (refused.code, refused.out) == (2, "")
        assert "--watch with -o json (rule: a table)" in refused.err

    def test_status_of_a_run_that_stopped_early_until_it_goes_on(self, rollart: Call, run: None) -> None:
        def found() -> dict[str, Any]:
            rows = json.loads(rollart("status", "-o", "json").out)["tables"]["status"]
            return {row["what"]: row["value"] for row in rows}

        assert "stopped_early" not in found()
        for t, kind, why in ((10.0, "stopped_early", "entropy was below 0.1"), (20.0, "starting", "")):
            with Ledger(Path("runs/mine"), clock=lambda: 0.0, inline=True) as ledger:
                ledger.event(RunEvent(t, kind, "run", {"why": why}))
            assert found().get("stopped_early", "") == why

    @pytest.mark.parametrize("command", [["report", "cost"], ["status"], ["stop"]])
    def test_unknown_runs(self, rollart: Call, run: None, command: list[str]) -> None:
        done = rollart(*command, "mime")
        assert done.code == 2
        assert "no run 'mime' in runs; did you mean 'mine'?" in done.err
        assert "no runs in elsewhere" in rollart(*command, "--runs-dir", "elsewhere").err

    def test_a_run_without_a_ledger(self, rollart: Call, run: None) -> None:
        Path("runs/mine/ledger.sqlite").unlink()
        assert "no ledger here" in rollart("report", "cost").err

    def test_stop_of_a_run_that_is_not_running(self, rollart: Call, run: None) -> None:
        assert "run 'mine' is not running" in rollart("stop").err
        Path("runs/mine/run.pid").write_text(json.dumps({"pid": os.getpid(), "started": 1}))
        assert "is not running" in rollart("stop").err, "an id that changed hands is not the run"
        Path("runs/mine/run.pid").write_text("garbage")
        assert "is not running" in rollart("stop").err


class TestSpecs:
    def test_validate(self, rollart: Call) -> None:
        Path("bad.yaml").write_text("name: x\npools: []\ncoun: 3\n")
        done = rollart("validate", "run.yaml", "bad.yaml", "none.yaml")
        assert done.code == 2
        assert done.out == "run.yaml: ok (RunSpec)\n"
        assert [line.split(":")[1].strip() for line in done.err.splitlines()] == ["bad.yaml", "bad.yaml", "none.yaml"]

    def test_schema(self, rollart: Call) -> None:
        assert json.loads(rollart("schema", "cluster").out)["properties"]["pools"]
        assert rollart("schema", "clusterr").code == 2

    def test_plan_of_given_engines(self, rollart: Call) -> None:
        found = json.loads(rollart("plan", "run.yaml", "-o", "json").out)
        assert [row["part"] for row in found["tables"]["parts"]] == ["engine-0", "trainer-0"]
        assert "$0.0944 per hour" in found["notes"][0]
        assert "no prediction: no plan: no pool can serve lake" in found["notes"][-1]
        assert "cannot hold the run" in rollart("plan", "run.yaml", "cluster.trainer.threads=9").err

    def test_doctor(self, rollart: Call) -> None:
        done = rollart("doctor", "-o", "json")
        found = {row["what"]: row["result"] for row in json.loads(done.out)["tables"]["checks"]}
        assert (found["python"], found["ports"]) == ("ok", "ok")
        assert done.code == 0
        done = rollart("doctor", "training.lora={rank: 2}", "cluster.runtime.backend=ray", "-o", "json")
        found = {row["what"]: row["result"] for row in json.loads(done.out)["tables"]["checks"]}
        asked = {what.removeprefix("this run: ") for what in found if what.startswith("this run: ")}
        assert asked == {"torch", "transformers", "peft", "ray", "gymnasium", "reasoning_gym"}
        assert (found["this run: peft"] == "ok") == (found["peft"] == "ok")
        assert done.code == int("fails" in found.values())

    def test_no_command_and_a_wrong_one(self, rollart: Call) -> None:
        done = rollart("lanch")
        assert done.code == 2
        assert "launch" in done.err
        for command in ([], ["report"]):
            done = rollart(*command)
            assert done.code == 2
            assert "Usage: rollart" in done.err
            assert "rollart: " not in done.err
        assert rollart("--version").code == 0


CHILD = """
import asyncio, signal, sys, types
if BACKGROUND:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
from rollart.ports import RunEvent
module = types.ModuleType("rollart.launch.launch")
def launch(resolved, *, run_dir, resume, on_progress, since_s):
    async def main():
        try:
            on_progress(RunEvent(0.0, "engine_started", "engine-0", {"version": 0}))
            await asyncio.Event().wait()
        finally:
            (run_dir / "closed").write_text("in order")
            if STUBBORN:
                import threading
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                threading.Event().wait()
    asyncio.run(main())
module.launch = launch
sys.modules["rollart.launch.launch"] = module
from rollart.cli.main import main
main(["launch", "run.yaml", "--name", "mine"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("stubborn", "background"), [(False, False), (True, False), (False, True)])
def test_stop_ends_a_real_run(rollart: Call, stubborn: bool, background: bool) -> None:
    """Slow: a real process. In the background of a script it starts with SIGINT ignored."""
    code = CHILD.replace("STUBBORN", str(stubborn)).replace("BACKGROUND", str(background))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert child.stderr is not None
        assert any("engine-0 serves v0" in line for line in child.stderr), "it ended before it was ready"
        if stubborn:
            done = rollart("stop", "--wait", "0.5")
            assert done.code == 1
            assert "has not stopped within 0.5 s" in done.err
            assert "killed" in rollart("stop", "mine", "--wait", "0.5", "--kill").err
            assert child.wait() == -9
        else:
            assert "run mine stopped" in rollart("stop").err
            assert child.wait() == 130
        assert Path("runs/mine/closed").read_text() == "in order"
        assert rollart("stop").code == 2
    finally:
        child.kill()
        child.stderr.close()  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_closed_pipe_is_not_an_error() -> None:
    """Slow: a real process."""
    command = f"{sys.executable} -m rollart.cli.main schema run | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.strip() in ("0",)
    assert "Traceback" not in done.stderr


class TestLogs:
    @pytest.fixture
    def logs(self, rollart: Call, launch_calls: Any) -> Path:
        assert rollart("launch", "run.yaml", "--name", "mine").code == 0
        directory = Path("runs/mine/logs")
        directory.mkdir(exist_ok=True)
        (directory / "engine-0.log").write_text("".join(f"line {i}\n" for i in range(30)))
        (directory / "trainer-0.log").write_text("a\nb\n")
        return directory

    def test_of_a_role_a_part_or_all(self, rollart: Call, logs: Path) -> None:
        assert rollart("logs", "--role", "trainer").out == "trainer-0: a\ntrainer-0: b\n"
        assert rollart("logs", "--role", "engine-0", "-n", "2").out == "engine-0: line 28\nengine-0: line 29\n"
        latest = rollart("logs")
        assert len(latest.out.splitlines()) == 22
        assert latest.err == "engine-0: last 20 of 30 lines (all: -n 30)\n"
        assert rollart("logs", "-f", "--role", "trainer").out == "trainer-0: a\ntrainer-0: b\n", "it has ended"

    def test_of_nobody(self, rollart: Call, logs: Path) -> None:
        done = rollart("logs", "--role", "prefill")
        assert done.code == 2
        assert "no log of 'prefill'" in done.err
        assert "engine-0, trainer-0" in done.err


def test_following_shows_lines_once_they_are_whole(tmp_path: Path) -> None:
    path, seen = tmp_path / "engine-0.log", dict[Path, int]()
    path.write_text("one\ntw")
    assert list(new_lines(path, seen)) == ["one"]
    assert list(new_lines(path, seen)) == []
    path.write_text("one\ntwo\n")
    assert list(new_lines(path, seen)) == ["two"]


@pytest.mark.slow  # a process
def test_an_exit_function_that_never_returns_holds_no_command() -> None:
    """An environment in the controller may have registered it."""
    code = (
        "import atexit, threading\n"
        "from rollart.cli import main\n"
        "atexit.register(threading.Event().wait)\n"
        "main.EXIT_S = 0.2\n"
        "main.main(['--help'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "Usage:" in done.stdout) == (0, True)
