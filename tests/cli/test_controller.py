"""Whose run it is, seen from the machine that runs it and from others."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollart.cli import controller

LIMIT_S = 60.0


def test_the_same_process_id_on_another_machine_is_another_process(tmp_path: Path) -> None:
    with controller.hold_run(tmp_path):
        mine = controller.recorded_controller(tmp_path)
        assert mine is not None
        assert (mine.pid, mine.here, mine.alive, controller.live_controller(tmp_path)) == (
            os.getpid(),
            True,
            True,
            mine,
        )
        assert not replace(mine, started=mine.started - 1).alive, "an id that was given again"
        there = replace(mine, place="another boot")
        assert (there.here, there.alive) == (False, False)
        ours = tmp_path / "again"
        ours.mkdir()
        with controller.hold_run(ours):
            again = controller.recorded_controller(ours)
            assert again is not None
            assert again.life != mine.life
    assert controller.recorded_controller(tmp_path) is None
    assert list(tmp_path.iterdir()) == [ours], "nothing of it is left"


def test_files_of_older_versions_are_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / controller.PID_FILE).write_text(json.dumps({"pid": os.getpid(), "started": 1}))
    assert controller.live_controller(tmp_path) is None
    (tmp_path / controller.PID_FILE).write_text("{")
    assert controller.recorded_controller(tmp_path) is None


@pytest.fixture
def signals() -> Iterator[threading.Event]:
    came = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: came.set())
    yield came
    signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_another_machine_sees_it_live_and_stops_it(tmp_path: Path, signals: threading.Event) -> None:
    """Reason for slow: beats are waited for."""
    with controller.hold_run(tmp_path):
        noted = controller.recorded_controller(tmp_path)
        assert noted is not None
        moved = replace(noted, place="another boot", host="far")
        (tmp_path / controller.PID_FILE).write_text(
            json.dumps({name: getattr(moved, name) for name in moved.__slots__})
        )
        assert controller.live_controller(tmp_path) == moved
        assert not controller.send_request(
            tmp_path, "of a life before", "stop", lost_s=2 * controller.HEARTBEAT_INTERVAL_S
        )
        assert not signals.is_set()
        assert controller.send_request(tmp_path, moved.life, "stop", lost_s=LIMIT_S)
        assert signals.wait(LIMIT_S)
    assert not controller.has_heartbeat(tmp_path, moved.life, lost_s=2 * controller.HEARTBEAT_INTERVAL_S)
