"""Weights of another run that something loads into an engine of a real run, under the number of the current version."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.harness import STEPS, Home, Launched, Process, events, held, ledger, sound, tiny

pytestmark = pytest.mark.slow  # real processes, of which the engine is started twice: about 10 s

LISTENS = "0A"
"""The state of a socket in /proc/net/tcp."""


def call(url: str, body: object = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=30) as answer:
        return dict(json.load(answer))


def url_of(engine: Process) -> str:
    """Where an engine takes HTTP: one of the ports at which it listens."""
    links = (Path(f"/proc/{engine.pid}/fd") / name for name in os.listdir(f"/proc/{engine.pid}/fd"))
    sockets = {os.readlink(link) for link in links}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    for row in rows:
        if row[3] == LISTENS and f"socket:[{row[9]}]" in sockets:
            url = f"http://127.0.0.1:{int(row[1].partition(':')[2], 16)}"
            with contextlib.suppress(OSError, ValueError):
                call(f"{url}/weight_info")
                return url
    raise AssertionError(f"no port of {engine} answers")


def of_another_run(source: Path, directory: Path) -> Path:
    """A published version with the architecture of `source` and weights of its own."""
    shutil.copytree(source, directory)
    weights, draw = directory / "model.safetensors", torch.Generator().manual_seed(7)
    save_file({name: t + torch.randn(t.shape, generator=draw) for name, t in load_file(weights).items()}, weights)
    marker = json.loads((directory / "COMPLETE").read_text())
    marker["files"]["model.safetensors"] = hashlib.sha256(weights.read_bytes()).hexdigest()
    (directory / "COMPLETE").write_text(json.dumps(marker))
    return directory


def swap(run: Launched, directory: Path, version: int) -> None:
    url = url_of(run.part("rollart.engine"))
    run.until(lambda: call(f"{url}/weight_info")["weight_version"] == version, f"the engine has version {version}")
    call(f"{url}/start_weight_update", {})
    call(f"{url}/update_weights", {"update_info": {"path": str(directory)}})
    call(f"{url}/finish_weight_update", {"weight_version": str(version)})


def test_nothing_that_foreign_weights_generate_is_trained(home: Home) -> None:
    """The last batch begins once they are in: its answers are refused, and generated again by a restarted engine."""
    last = STEPS - 1
    run = home.launch(tiny(**held(home, turn_s=0.15)))
    run.until_step(last)
    swap(run, of_another_run(run.directory / "weights" / f"v{last:06d}", home.path / "foreign"), last)
    home.open()
    run.finished()
    sound(home.directory)
    refused = events(home.directory, "wrong_answer")
    assert refused
    assert all(f"not those that were published as v{last}" in e["what"] for e in refused)
    (lost,) = events(home.directory, "engine_lost")
    assert f"not those that were published as v{last}" in lost["cause"]
    assert events(home.directory, "infra_fault") == []
    with ledger(home.directory) as db:
        (metrics,) = db.execute("SELECT metrics FROM versions WHERE version = ?", (STEPS,)).fetchone()
    assert json.loads(metrics)["behaviour_gap"] < 1e-3, "the trainer computes other probabilities for foreign tokens"
