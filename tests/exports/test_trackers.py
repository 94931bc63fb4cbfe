"""Experiment trackers' own clients read back every step's numbers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollart.ledger.reader import LedgerReader
from rollart.report.cost import cost_lines
from rollart.report.rows import collect
from tests.report.test_perfetto import record

pytestmark = pytest.mark.slow  # needs the trackers' clients, which the fast suite's environment lacks


def followed(directory: Path, tracker: str) -> float:
    """Record a run and log it; its dollars."""
    from rollart.exports.trackers import TrackerFollower

    directory.mkdir()
    follower = TrackerFollower(directory, [tracker], None)  # type: ignore[list-item]
    asyncio.run(record(directory))
    with LedgerReader(directory) as reader:
        follower.look(reader)
        follower.close(reader)
        return sum(line.usd for line in cost_lines(collect(reader, "quick")))


def test_tensorboard_reads_the_run_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    usd = followed(tmp_path / "quick", "tensorboard")
    found = EventAccumulator(str(tmp_path / "quick" / "tensorboard"))
    found.Reload()
    values = {tag: found.Tensors(tag) for tag in found.Tags()["tensors"]}
    for tag, value in (("train/loss", 0.5), ("step/train_s", 2.0), ("usd/total", usd)):
        (point,) = values[tag]
        assert point.step == 1
        assert point.tensor_proto.float_val[0] == pytest.approx(value)
    assert json.loads((tmp_path / "quick" / "tensorboard" / "config.json").read_text())["prices"]


def log_records(data: bytes, header: int = 7, block: int = 32768) -> Iterator[bytes]:
    """The records of wandb's file: LevelDB's log format after a header of 7 bytes."""
    at, whole = header, b""
    while at < len(data):
        if block - at % block < 7:  # no room for a record's head
            at += block - at % block
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def test_wandb_keeps_the_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    usd = followed(tmp_path / "quick", "wandb")
    (path,) = (tmp_path / "quick" / "wandb").glob("offline-run-*/run-*.wandb")
    logged: dict[str, float] = {}
    config: set[str] = set()
    for data in log_records(path.read_bytes()):
        record_ = Record.FromString(data)
        for item in record_.history.item:
            name = item.key or "/".join(item.nested_key)
            logged[name] = json.loads(item.value_json)
        config |= {update.key or "/".join(update.nested_key) for update in record_.config.update}
        config |= {update.key or "/".join(update.nested_key) for update in record_.run.config.update}
    assert (logged["train/loss"], logged["step/train_s"], logged["version"]) == (0.5, 2.0, 1)
    assert logged["usd/total"] == pytest.approx(usd)
    assert "prices" in config
