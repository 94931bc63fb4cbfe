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

from rollart.cli import beat, pidfile

LIMIT_S = 60.0


def test_the_same_process_id_on_another_machine_is_another_process(tmp_path: Path) -> None:
    with pidfile.hold_run(tmp_path):
        mine = pidfile.recorded_controller(tmp_path)
        assert mine is not None
        assert (mine.pid, mine.here, mine.alive, pidfile.live_controller(tmp_path)) == (os.getpid(), True, True, mine)
        assert not replace(mine, started=mine.started - 1).alive, "an id that was given again"
        there = replace(mine, place="another boot")
        assert (there.here, there.alive) == (False, False)
        ours = tmp_path / "again"
        ours.mkdir()
        with pidfile.hold_run(ours):
            again = pidfile.recorded_controller(ours)
            assert again is not None
            assert again.life != mine.life
    assert pidfile.recorded_controller(tmp_path) is None
    assert list(tmp_path.iterdir()) == [ours], "nothing of it is left"


def test_files_of_older_versions_are_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / pidfile.FILE).write_text(json.dumps({"pid": os.getpid(), "started": 1}))
    assert pidfile.live_controller(tmp_path) is None
    (tmp_path / pidfile.FILE).write_text("{")
    assert pidfile.recorded_controller(tmp_path) is None


@pytest.fixture
def signals() -> Iterator[threading.Event]:
    came = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: came.set())
    yield came
    signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_another_machine_sees_it_live_and_stops_it(tmp_path: Path, signals: threading.Event) -> None:
    """Reason for slow: beats are waited for."""
    with pidfile.hold_run(tmp_path):
        noted = pidfile.recorded_controller(tmp_path)
        assert noted is not None
        moved = replace(noted, place="another boot", host="far")
        (tmp_path / pidfile.FILE).write_text(json.dumps({name: getattr(moved, name) for name in moved.__slots__}))
        assert pidfile.live_controller(tmp_path) == moved
        assert not beat.send_request(tmp_path, "of a life before", "stop", lost_s=2 * beat.HEARTBEAT_INTERVAL_S)
        assert not signals.is_set()
        assert beat.send_request(tmp_path, moved.life, "stop", lost_s=LIMIT_S)
        assert signals.wait(LIMIT_S)
    assert not beat.has_heartbeat(tmp_path, moved.life, lost_s=2 * beat.HEARTBEAT_INTERVAL_S)
