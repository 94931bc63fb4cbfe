"""`rollart service --data` killed with -9 while trainers and engines use it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollart.service import Service, ServiceError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the service as a process, restarted repeatedly

GROUPS, SIZE, KILLS = 12, 2, 3


@contextlib.contextmanager
def running(data: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "rollart.cli.main", "service", "--data", str(data), "--json"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert started.stdout is not None
        yield json.loads(started.stdout.readline())["url"], started
    finally:
        started.kill()
        started.wait(timeout=60)


class Traffic:
    """A trainer and an engine that repeat each request until some process of the service answers it."""

    def __init__(self) -> None:
        self.alive, self.progress = threading.Event(), threading.Semaphore(0)
        self.service: Service | None = None
        self.done = {"rollout": Counter[str](), "train": Counter[str]()}

    def ask(self, call: Callable[[Service], Any]) -> Any:
        while True:
            assert self.alive.wait(60)
            try:
                assert self.service is not None
                return call(self.service)
            except ServiceError as error:
                if error.status:
                    raise

    def put(self) -> None:
        for group in range(GROUPS):
            self.ask(lambda s, g=group: s.put_prompts([{"prompt": g}], group_size=SIZE, key=f"p{g}"))
            self.progress.release()

    def consume(self, task: str) -> None:
        number, done = 0, self.done[task]
        while sum(done.values()) < GROUPS * SIZE:
            number += 1
            wish = {"timeout_s": 1.0, "lease_s": 600.0, "key": f"{task}-{number}"}
            rows = self.ask(lambda s, wish=wish: s.get_experience(task, 1, **wish))
            for row in rows if task == "rollout" else ():
                assert self.ask(lambda s, r=row: s.put_experience(r.id, response="x" * 70_000))
            if rows:
                assert self.ask(lambda s, rows=rows: s.done(rows))
                done.update(row.id for row in rows)
                self.progress.release()


def test_kill_9_loses_nothing_that_was_answered_and_gives_nothing_out_twice(tmp_path: Path) -> None:
    traffic = Traffic()
    threads = [threading.Thread(target=traffic.put, daemon=True)]
    threads += [threading.Thread(target=traffic.consume, args=(task,), daemon=True) for task in traffic.done]
    with running(tmp_path) as (url, process):
        traffic.service = Service(url)
        tasks = {"rollout": ["prompt"], "train": ["prompt", "response"]}
        traffic.service.init(["prompt", "response"], tasks, whole_groups=["train"], capacity=64)
        traffic.alive.set()
        for thread in threads:
            thread.start()
        _kill_amid(traffic, process)
    for _ in range(KILLS - 1):
        with running(tmp_path) as (url, process):
            traffic.service = Service(url)
            traffic.alive.set()
            _kill_amid(traffic, process)
    with running(tmp_path) as (url, _):
        traffic.service = Service(url)
        traffic.alive.set()
        for thread in threads:
            thread.join(timeout=120)
            assert not thread.is_alive()
        status = traffic.service.status()
    for task, counter in traffic.done.items():
        assert len(counter) == GROUPS * SIZE, task
        assert set(counter.values()) == {1}, task
    assert (status["rows"], status["leases"]) == (0, 0)


def _kill_amid(traffic: Traffic, process: subprocess.Popen[str]) -> None:
    for _ in range(8):
        assert traffic.progress.acquire(timeout=60)
    traffic.alive.clear()
    process.kill()
    process.wait(timeout=60)
