"""A trainer that is not ours, attached to a run: its batches over the service, its versions on the run's engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollart.service import Service, ServiceError
from tests.e2e.harness import CLUSTER, ROOT, STEPS, Home, environment, events, ledger, sound, tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # an engine, and a trainer with torch and transformers

PATIENCE = {"leases__publish_s": 600, "leases__train_s": 600}
"""Seconds that the run waits for an outside trainer to be there, and to take a step."""


def test_a_trainer_of_ones_own_learns_inside_a_run_from_elsewhere(
    home: Home, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It has a token and an address, and shares no directory. It is killed once: another goes on where it was."""
    pytest.importorskip("transformers")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    spec = tiny(**PATIENCE)
    (elsewhere / "config.json").write_text(json.dumps(spec["model"]["init"]))
    trainer = {"threads": 1, "external": "0.0.0.0:0", "external_token": "file"}
    run = home.launch(spec, cluster={**CLUSTER, "trainer": trainer})
    found = run.directory / "service.json"
    run.until(found.exists, "the service's address is told")
    url, token = json.loads(found.read_text())["url"], (run.directory / "service.token").read_text()
    with pytest.raises(ServiceError, match="token is not this service's"):
        Service(url).weights()
    first = _outside(url, token, elsewhere)
    try:
        run.until(lambda: run.step() >= 1, "a step is committed", 600)
    finally:
        first.kill()
        first.communicate()
    second = _outside(url, token, elsewhere)
    try:
        run.until(lambda: run.step() >= STEPS, "the last step is committed", 600)
        run.finished()
        said, errors = second.communicate(timeout=120)
    finally:
        second.kill()
        second.communicate()
    assert second.returncode == 0, errors
    assert json.loads(said.splitlines()[-1])["steps"] < STEPS, "what was trained was not trained again"
    sound(home.directory)
    assert events(home.directory, "lease_expired") == []
    with ledger(home.directory) as db:
        sampled = {v for (v,) in db.execute("SELECT DISTINCT v0 FROM samples")}
    assert max(sampled) > 0, "its versions are what the engines sampled with"


def _outside(url: str, token: str, elsewhere: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "examples/outside_trainer.py", url, "--model", str(elsewhere), "--upload"]
    command += ["--weights", str(elsewhere / "versions"), "--steps", str(STEPS)]
    env = {**environment(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ROLLART_TOKEN": token}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
