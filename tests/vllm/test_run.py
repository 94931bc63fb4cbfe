"""The quickstart with vLLM as its engine: only the cluster file differs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.harness import ROOT, Launched, events, ledger, processes
from tests.vllm.hosting import needs_vllm

pytestmark = [pytest.mark.slow, needs_vllm, pytest.mark.timeout(900)]

CLUSTER = ROOT / "rollart/configs/clusters/local-vllm.yaml"
STEPS = 4


def test_the_quickstart_trains_on_vllm_and_survives_its_death(tmp_path: Path) -> None:
    """After a step vLLM's API server is killed: its engine core ends with it, and a restarted server serves the rest.
    New versions, adapters alone, arrive in its workers' memory by broadcast; the restarted server begins with files."""
    arguments = [f"steps={STEPS}", "evaluation.episodes=0", "schedule=sync", "staleness=0"]
    arguments += ["weights.collective.backend=auto", "training.lora={rank: 8}"]
    run = Launched(tmp_path, ["launch", "--cluster", str(CLUSTER), *arguments])
    directory = tmp_path / "runs" / "quickstart-1"
    try:
        run.until(lambda: re.search(r"step +2/", run.said), "two steps are made", 500)
        (server,) = [
            p for p in processes(tmp_path) if "vllm.entrypoints" in p.command and "vllm_server" not in p.command
        ]
        server.kill()
        assert run.end(500) == 0, run.said
    finally:
        for process in processes(tmp_path):
            process.kill()
    assert [e["subject"] for e in events(directory, "engine_lost")] == ["engine-0"], run.said
    assert len(events(directory, "engine_started")) == 2
    assert events(directory, "infra_fault") == []
    received = [e["version"] for e in events(directory, "weights_received")]
    assert received[0] == 1
    assert received[-1] == STEPS, "the one that was started again takes part"
    assert (directory / "weights" / f"v{STEPS:06d}" / "probe.json").exists(), "every version was held to the trainer"
    whole = (directory / "weights/base/model.safetensors").stat().st_size
    assert all(e["bytes"] < whole / 4 for e in events(directory, "weights_sent"))
    with ledger(directory) as db:
        assert [v for (v,) in db.execute("SELECT version FROM versions ORDER BY version")] == list(range(STEPS + 1))
        lags = db.execute("SELECT v0, version FROM samples WHERE state = 1").fetchall()
    assert len(lags) == STEPS * 48
    assert all(version - 1 == v0 for v0, version in lags), "every sample is of the version that was trained on"
