"""Real runs with prefill and decode engines, or with engines from the placer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import CLUSTER, Home, events, ledger, sound, tiny

pytestmark = pytest.mark.slow  # real processes: about 8 s per test

SPLIT = {
    **CLUSTER,
    "pools": [{"name": "here", "device": "cpu", "count": 3}],
    "engines": {"prefill": 1, "decode": 1, "max_slots": 16},
}

COMPUTED = {
    **CLUSTER,
    "devices": [
        {"name": "cpu", "tflops_bf16": 0.05, "memory_tb_per_s": 0.01, "source": "an order of magnitude, for a test"}
    ],
    "engines": {"max_slots": 16},
}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path)
    yield made
    made.close()


def test_prefill_and_decode_in_two_processes(home: Home) -> None:
    run = home.launch(tiny(), "placement.router=remote", cluster=SPLIT)
    run.finished()
    sound(home.directory)
    with ledger(home.directory) as db:
        busy = dict(
            db.execute("SELECT resource, sum(t1 - t0) FROM intervals WHERE state = 'busy' GROUP BY resource").fetchall()
        )
    assert busy["prefill-0"] > 0, "prompts are prefilled there"
    assert busy["decode-0"] > 0
    assert {e["subject"] for e in events(home.directory, "engine_started")} == {"prefill-0", "decode-0"}


def test_a_run_on_a_computed_plan_follows_it(home: Home) -> None:
    spec = tiny(
        domains__0__profile={"turns": 2, "first_tokens": 3, "new_tokens": 3, "output_tokens": 1},
        domains__0__environment_args={"turn_s": 0.2},
        placement__rebalance={"reprice_s": 0.2, "flows_s": 0.5},
    )
    home.launch(spec, cluster=COMPUTED).finished()
    sound(home.directory)
    assert events(home.directory, "rebalance_failed") == []
    assert {e["subject"] for e in events(home.directory, "engine_started")} == {"engine-0"}
