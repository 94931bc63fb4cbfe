"""A whole run on real processes, watched and ended from outside."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import signal
import subprocess
import threading
import urllib.request
from collections import Counter
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart.ledger.reader import LedgerReader
from rollart.report.cost import cost_lines
from rollart.report.perfetto import trace_events
from rollart.report.rows import collect
from tests.e2e.harness import (
    BATCH,
    CLUSTER,
    LIMIT_S,
    ROLLART,
    STEPS,
    Home,
    environment,
    events,
    held,
    ledger,
    processes,
    sound,
    tiny,
)
from tests.exports.collector import OtlpCollector, collecting

pytestmark = pytest.mark.slow  # every test starts a trainer and an engine: torch twice, about 6 s


def test_a_run_reaches_its_end_and_leaves_nothing_behind(home: Home) -> None:
    with collecting() as collector:
        telemetry = {
            "turns": 1.0,
            "metrics": {"port": 0},
            "otlp": {"endpoint": collector.url, "share": 1.0},
            "track": ["tensorboard"],
        }
        run = home.launch(tiny(telemetry=telemetry, **held(home)))
        run.until_step(STEPS - 1)
        running = home.run("status", "-o", "json")
        _scraped(home.directory, run.said)
        home.open()
        run.finished()
    sound(home.directory)
    _exported(home.directory, collector)
    assert events(home.directory, "lease_expired") == []
    assert running.returncode == 0, running.stderr
    assert (_status(running.stdout)["state"], _status(running.stdout)["process"]) == ("running", run.process.pid)
    after = _status(home.run("status", "tiny-1", "-o", "json").stdout)
    assert (after["state"], after["step"], after["trained_trajectories"]) == ("finished", 4, 4 * BATCH)
    rows = [*csv.DictReader(io.StringIO(home.run("report", "cost", "-o", "focus").stdout))]
    with LedgerReader(home.directory) as reader:
        lines = cost_lines(collect(reader, "tiny-1"))
    assert math.fsum(float(row["BilledCost"]) for row in rows) == pytest.approx(math.fsum(line.usd for line in lines))
    begun = datetime.fromisoformat(min(row["ChargePeriodStart"] for row in rows))
    assert timedelta() <= datetime.now(UTC) - begun < timedelta(hours=2)


def _scraped(directory: Path, said: str) -> None:
    """The metrics of a run that waits are its ledger's; seconds and dollars go on."""
    from prometheus_client.parser import text_string_to_metric_families

    from rollart.exports.metrics import read_figures

    (url,) = re.findall(r"metrics at (\S+)", said)
    before = {figure.name: figure for figure in read_figures(directory)}
    with urllib.request.urlopen(url) as response:
        families = {family.name: family for family in text_string_to_metric_families(response.read().decode())}
    after = {figure.name: figure for figure in read_figures(directory)}
    assert after.keys() == families.keys()
    for name, figure in after.items():
        assert families[name].type == figure.kind
        found = {tuple(s.labels[label] for label in figure.labels): s.value for s in families[name].samples}
        assert all(before[name].values.get(labels, 0.0) <= value + 1e-9 for labels, value in found.items()), name
        assert all(found[labels] <= value + 1e-9 for labels, value in figure.values.items() if labels in found), name
    assert families["rollart_steps"].samples[0].value == STEPS - 1
    trained = [s for s in families["rollart_trajectories"].samples if s.labels["outcome"] == "trained"]
    assert [s.value for s in trained] == [(STEPS - 1) * BATCH]


def _exported(directory: Path, collector: OtlpCollector) -> None:
    """Trace, spans and tracker have every step, and every trajectory with its turns, on an engine."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with LedgerReader(directory) as reader:
        trajectories = {t.trajectory: t for t in reader.trajectory_spans()}
        trace = list(trace_events(reader, "tiny-1"))
        metrics = {row.version: row.metrics for row in reader.versions()}
    turns = sum(t.turns for t in trajectories.values())
    drawn = [event for event in trace if re.fullmatch(r"turn \d", event["name"])]
    assert len(drawn) == turns
    assert {event["args"]["engine"] for event in drawn} == {"engine-0"}
    sent = Counter(span.name for span in collector.spans())
    assert sent["generation"] == sent["environment"] == turns
    assert {name for name in sent if name in trajectories} == trajectories.keys()
    assert [sent[f"step {n}"] for n in range(1, STEPS + 1)] == [1] * STEPS
    assert collector.metrics()["rollart_steps"].sum.data_points[0].as_double == STEPS
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    logged = {point.step: point.tensor_proto.float_val[0] for point in events.Tensors("train/loss")}
    assert logged == pytest.approx({n: metrics[n]["loss"] for n in range(1, STEPS + 1)})
    assert not (directory / "logs" / "exports.log").read_text()


def test_stop_from_another_shell_and_resume(home: Home) -> None:
    """The run names a deployed function with a canary: it draws a version, which the resume keeps."""
    paid = {_deploy(home, 0.25): {1.0, 0.25}, _deploy(home, 0.5, "--canary", "0.5"): {1.0, 0.5}}
    named = {"name": "rule", "function": "rule@live", "batch_items": 8}
    run = home.launch(tiny(functions__0=named, keep="all", **held(home)))
    run.until_step(1)
    drawn = yaml.safe_load((home.directory / "resolved.yaml").read_text())["releases"]["rule"]
    assert drawn["weights"] == {"1": 0.5, "2": 0.5}
    again = home.run("launch", "--resume", "tiny-1")
    assert again.returncode == 2
    assert "is running" in again.stderr
    watching = [*ROLLART, "status", "--watch"]
    watched = subprocess.Popen(watching, cwd=home.path, env=environment(), stdout=subprocess.PIPE, text=True)
    assert watched.stdout is not None
    assert next(line for line in watched.stdout if line.startswith("state")).split() == ["state", "running"]
    stopped = home.run("stop", "tiny-1")
    assert stopped.returncode == 0, stopped.stderr
    run.failed(130, "interrupted", "--resume")
    *_, last = watched.communicate(timeout=LIMIT_S)[0].rpartition("status of tiny-1")
    assert watched.returncode == 0
    assert re.search(r"^state +stopped$", last, re.MULTILINE)
    assert _status(home.run("status", "-o", "json").stdout)["state"] == "stopped"
    assert home.run("stop").returncode == 2
    promoted = home.run("rewards", "promote", "rule", "-y", "-o", "json")
    assert promoted.returncode == 0, promoted.stderr
    compared = {row["number"]: row for row in json.loads(promoted.stdout)["tables"]["comparison"]}
    called, other = compared.pop(drawn["number"]), *compared.values()
    assert min(paid[drawn["version"]]) <= called["score"] <= 1.0
    assert (called["items"] > 0, called["usd_per_million"] > 0.0) == (True, True)
    assert (other["items"], other["score"]) == (0, None)
    _deploy(home, 0.75)
    home.open()
    home.resume().finished()
    sound(home.directory, paid=paid[drawn["version"]])
    assert yaml.safe_load((home.directory / "resolved.yaml").read_text())["releases"]["rule"] == drawn
    report = home.run("report", "cost", "tiny-1")
    assert f"rule@live: version {drawn['version'][:12]} ({drawn['number']} on local), drawn with 0.5" in report.stdout
    versions = [(event["version"], event["number"]) for event in events(home.directory, "function_version")]
    assert versions == [(drawn["version"], drawn["number"])] * 2


def _deploy(home: Home, wrong: float, *options: str) -> str:
    """Deploy a version of the function `rule` that pays so for a wrong answer; its digest."""
    text = f"1.0 if sample.messages[-1]['content'] == sample.reference_answer else {wrong}"
    head = "from rollart import reward\n\n\n@reward(memory_mb=128, timeout_s=5.0, deterministic=False)\n"
    (home.path / "rule.py").write_text(f"{head}def rule(sample):\n    return {text}\n")
    done = home.run("rewards", "deploy", "rule.py", "-o", "json", *options)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["tables"]["functions"][0]["version"])


def test_engines_load_what_their_host_pulled_from_a_store(home: Home) -> None:
    store = {"kind": "files", "url": "store", "local": str(home.path / "disk")}
    cluster = {**CLUSTER, "engines": {"count": 2, "threads": 1, "max_slots": 16}}
    cluster["pools"] = [{"name": "here", "device": "cpu", "count": 3}]
    run = home.launch(tiny(weights__store=store, weights__overlap=True, **held(home)), cluster=cluster)
    run.until_step(1)
    (name,) = {p.name for p in (home.path / "store").iterdir()}
    disk = home.path / "disk" / name
    loaded = [p for p in processes(home.path) if str(disk / "v000000") in p.command]
    assert len(loaded) == 2
    home.open()
    run.finished()
    sound(home.directory)
    assert [e["subject"] for e in events(home.directory, "weights_pushed")] == [f"v{v}" for v in range(STEPS + 1)]
    pulled = [e["version"] for e in events(home.directory, "weights_pulled") if e["received_bytes"]]
    assert sorted(pulled) == list(range(STEPS + 1)), "one copy for the two engines of the host"
    assert events(home.directory, "weights_not_pulled") == events(home.directory, "engine_lost") == []
    home.resume(f"steps={STEPS + 1}").finished()
    sound(home.directory, steps=STEPS + 1)
    assert [p.name for p in (home.path / "store").iterdir()] == [name]


def test_a_reward_that_keeps_state_runs_beside_the_environments(home: Home) -> None:
    home.launch(tiny(functions__0__handler="counts")).finished()
    sound(home.directory)
    (said,) = events(home.directory, "reward_beside")
    assert said["subject"] == "rule"
    assert "SEEN" in str(said["why"])
    with ledger(home.directory) as db:
        assert db.execute("SELECT count(*) FROM invocations").fetchone() == (0,)
        assert {s for (s,) in db.execute("SELECT score FROM trajectories WHERE score IS NOT NULL")} == {1.0}


def test_a_run_ends_at_its_budget_of_time(home: Home) -> None:
    run = home.launch(tiny(domains__0__environment_args={"turn_s": 1.0}, budget__wall_s=1.5))
    run.failed(4, "budget", "--resume")


def test_a_budget_of_dollars_counts_the_bills_of_functions(home: Home) -> None:
    """A call over HTTP at $1 passes a budget of which the seconds of devices take nothing; a webhook hears of it."""
    notices: list[str] = []

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            items = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/hook":
                notices.append(items["text"])
                items = []
            said = [{"id": item["id"], "aggregate_reward_score": 1.0, "metrics_list": []} for item in items]
            body = json.dumps(said).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None: ...

    price = {"name": "http", "unit": "million-requests", "usd": 1e6, "source": "a test", "date": "2026-07-01"}
    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/rule"
            functions = {"backend": "http", "http": {"rule": url}}
            run = home.launch(
                tiny(
                    **held(home),
                    budget__usd=0.9,
                    budget__warn_at=1e-9,
                    budget__notify=f"http://127.0.0.1:{server.server_port}/hook",
                ),
                cluster={**CLUSTER, "functions": functions, "price_list": [price]},
            )
            run.failed(4, "budget", "--resume")
            alarms = events(home.directory, "budget_alarm")
            assert [alarm["subject"] for alarm in alarms] == ["warn_at", "exceeded"]
            assert notices == [f"rollart, run {home.directory.name}: {alarm['text']}" for alarm in alarms]
            assert [notice["sent"] for notice in events(home.directory, "notice")] == [True, True]
        finally:
            server.shutdown()
            thread.join()


def test_a_finished_run_may_be_resumed_with_more_steps(home: Home) -> None:
    run = home.launch(tiny(steps=2))
    run.finished()
    home.resume("steps=4").finished()
    sound(home.directory)


def test_ctrl_c_before_anything_runs(home: Home) -> None:
    run = home.launch()
    run.until(lambda: home.directory.exists(), "the run has a directory")
    run.kill(signal.SIGINT)
    assert run.end() == 130, run.said
    assert "Traceback" not in run.said


def _status(text: str) -> dict[str, object]:
    return {row["what"]: row["value"] for row in json.loads(text)["tables"]["status"]}
