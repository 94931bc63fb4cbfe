"""Time limits of engine starts, and the events meanwhile: on virtual time, with logs that grow or stay silent."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

import pytest

from rollart.cli.progress import ProgressLines, strip_log_prefix
from rollart.errors import PartDied, SpecError
from rollart.launch.engines import EngineProgram
from rollart.launch.start_limits import (
    LOG_SILENCE_S,
    START_S,
    VLLM_START_FACTOR,
    VLLM_START_S,
    StartLimits,
    engine_start_limits,
    trainer_start_s,
    watch_start,
)
from rollart.model import EngineId, WeightsRef
from rollart.ports import RunEvent
from rollart.settings.load import builtin
from rollart.settings.resolve import Resolved, resolve_files
from rollart.sim.loop import run
from tests.launch.test_weight_store import Events

VLLM = "name: h\npools: [{name: a, device: H200, count: 8}]\nengines: {kind: vllm, count: 1, threads: 4}\n"

LIMITS = StartLimits(300.0, 1200.0)


def resolved(tmp_path: Path, *overrides: str, cluster: str = VLLM) -> Resolved:
    path = tmp_path / "cluster.yaml"
    path.write_text(cluster)
    return resolve_files(None, path, overrides)


@pytest.mark.slow
def test_by_itself_it_follows_the_kind_of_engine_and_the_size_of_the_model(tmp_path: Path) -> None:
    small = resolve_files(None, builtin("clusters/local.yaml"))
    assert engine_start_limits(small) == StartLimits(START_S, START_S)
    assert trainer_start_s(small) == START_S
    assert engine_start_limits(resolved(tmp_path)) == StartLimits(VLLM_START_S, VLLM_START_FACTOR * VLLM_START_S)
    large = resolve_files(builtin("runs/agentic-math-32b.yaml"), builtin("clusters/rollart-96h800-32h20.yaml"))
    assert 200 < engine_start_limits(large).seconds - START_S < 400, "32e9 parameters of 4 bytes at 0.5 GB/s"
    assert trainer_start_s(large) == engine_start_limits(large).seconds


def test_a_number_is_the_limit_whatever_a_log_says(tmp_path: Path) -> None:
    given = resolved(tmp_path, "leases.engine_start_s=77")
    assert engine_start_limits(given) == StartLimits(77.0, 77.0)
    assert trainer_start_s(given) == 77.0
    for wrong in ("0", "soon"):
        with pytest.raises(SpecError, match="engine_start_s"):
            resolved(tmp_path, f"leases.engine_start_s={wrong}")


class Program:
    """Starts at `ready_s`, and writes a line every so many seconds until `talks_s`."""

    name, node = "engine-0", "here"

    def __init__(self, ready_s: float, talks_s: float, every_s: float = 20.0) -> None:
        self.ready_s, self.talks_s, self.every_s = ready_s, talks_s, every_s
        self.began = 0.0

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        loop = asyncio.get_running_loop()
        if method == "start":
            self.began = loop.time()
            await asyncio.sleep(self.ready_s)
            return "http://127.0.0.1:1"
        assert method == "said"
        lines = int(min(loop.time() - self.began, self.talks_s) // self.every_s)
        return 30 * lines, f"(Worker pid=9) INFO 11-22 18:30:12 [loader.py:5] shard {lines}" if lines else ""


def started(program: Program, limits: StartLimits = LIMITS) -> tuple[float, Events, PartDied | None]:
    """Seconds of the start, its events, and its error."""
    events = Events()

    async def body() -> tuple[float, PartDied | None]:
        made: Any = program
        recorder: Any = events
        watch = functools.partial(watch_start, limits=limits, recorder=recorder)
        part = EngineProgram(EngineId("engine-0"), made, watch=watch)
        loop, failed = asyncio.get_running_loop(), None
        began = loop.time()
        try:
            await part.start(WeightsRef(0, "v0"))
        except PartDied as error:
            failed = error
        await part.close()
        return loop.time() - began, failed

    took, failed = run(body())
    return took, events, failed


def test_one_that_is_there_at_once_is_no_news() -> None:
    took, events, failed = started(Program(9.0, 9.0))
    assert (took, events.seen, failed) == (9.0, [], None)


def test_one_that_goes_on_telling_gets_longer() -> None:
    took, events, failed = started(Program(1000.0, 1000.0))
    assert failed is None
    assert took == 1000.0
    assert len(events.seen) == 99
    assert events.seen[-1].fields == {
        "seconds": 990.0,
        "said": "(Worker pid=9) INFO 11-22 18:30:12 [loader.py:5] shard 49",
    }


@pytest.mark.parametrize(
    ("program", "limits", "after"),
    [
        (Program(5000.0, 0.0), LIMITS, 300.0),
        (Program(5000.0, 100.0), LIMITS, 300.0),
        (Program(5000.0, 500.0), LIMITS, 500.0 + LOG_SILENCE_S),
        (Program(5000.0, 5000.0), LIMITS, 1200.0),
        (Program(5000.0, 5000.0), StartLimits(33.0, 33.0), 33.0),
    ],
)
def test_one_that_is_late_is_given_up_with_its_last_line(program: Program, limits: StartLimits, after: float) -> None:
    took, _, failed = started(program, limits)
    assert failed is not None
    assert 0.99 * after <= took <= after + 20
    assert took < limits.most_s
    last = int(min(took, program.talks_s) // program.every_s)
    assert (f"shard {last}" if last else "its last line: none") in str(failed)
    assert "leases.engine_start_s" in failed.remedy


def test_a_start_that_fails_by_itself_says_why_it_did() -> None:
    class Dies(Program):
        async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
            if method == "start":
                await asyncio.sleep(50.0)
                raise PartDied("engine-0", "ended with status 1 before it was ready: no room")
            return await super().call(method, *args, **kwargs)

    took, _, failed = started(Dies(1.0, 0.0))
    assert (took, failed is not None and "no room" in str(failed)) == (50.0, True)


def test_a_person_reads_the_words_of_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = "(EngineCore pid=77) INFO 11-22 18:30:12 [core.py:109] Loading weights took 4.2 s"
    ProgressLines(colour=False)(RunEvent(0.0, "engine_starting", "engine-0", {"seconds": 40.2, "said": line}))
    assert capsys.readouterr().err == "   0.0s  engine-0 starts (40 s): Loading weights took 4.2 s\n"
    assert strip_log_prefix("Loading shards: 50% | 1/2 [00:01<00:01]") == "Loading shards: 50% | 1/2 [00:01<00:01]"
    assert len(strip_log_prefix("x" * 500)) == 120
