"""What is made of engines' own counters: the table, and rows for the calibrator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from placement.calibrate import Row
from rollart.ledger.events import ENGINE_DID
from rollart.ports import RunEvent
from rollart.report.rows import RunRows
from rollart.report.utilization import engine_rows, engines

DEVICES = {"engine-0": ("H200", 2), "prefill-0": ("H800", 4)}


def did(subject: str, **fields: float) -> RunEvent:
    none = dict.fromkeys(
        (
            "prompt_tokens",
            "generated_tokens",
            "cached_tokens",
            "external_tokens",
            "prefill_seconds",
            "decode_seconds",
            "preemptions",
            "ended",
            "steps",
            "latencies",
            "latency_seconds",
            "kv_used",
        ),
        0.0,
    )
    return RunEvent(0.0, ENGINE_DID, subject, {**none, **fields})


VLLM = did(
    "engine-0",
    prompt_tokens=1000.0,
    generated_tokens=400.0,
    cached_tokens=600.0,
    external_tokens=100.0,
    ended=10.0,
    steps=50.0,
    latencies=390.0,
    latency_seconds=7.8,
    prefill_seconds=0.5,
    kv_used=0.25,
    preemptions=2.0,
)


def test_an_interval_of_vllm_is_one_mean_step() -> None:
    (row,) = engine_rows([VLLM], DEVICES)
    assert row == Row("step", 7.8 / 390, "H200", 2, new=8.0, batch=8.0, context=120.0)


def test_an_embedded_engine_says_how_long_it_computed() -> None:
    (row,) = engine_rows(
        [
            did(
                "engine-0",
                prompt_tokens=100.0,
                generated_tokens=80.0,
                ended=10.0,
                steps=40.0,
                prefill_seconds=0.3,
                decode_seconds=0.1,
            )
        ],
        DEVICES,
    )
    assert (row.kind, row.seconds, row.batch) == ("step", pytest.approx(0.01), 2.0)


def test_an_engine_that_only_prefills_gives_the_time_to_a_token() -> None:
    alone = did(
        "prefill-0",
        prompt_tokens=9000.0,
        cached_tokens=3000.0,
        generated_tokens=30.0,
        ended=30.0,
        steps=30.0,
        prefill_seconds=6.0,
    )
    (row,) = engine_rows([alone], DEVICES)
    assert row == Row("prefill", 0.2, "H800", 4, new=200.0, cached=100.0, weight=30.0)


@pytest.mark.parametrize(
    "event", [did("engine-0", ended=5.0, steps=19.0, prefill_seconds=1.0), did("engine-9", ended=5.0, steps=99.0)]
)
def test_what_says_little_makes_no_row(event: RunEvent) -> None:
    assert engine_rows([event], DEVICES) == []


def test_the_table_has_rates_over_all_intervals() -> None:
    rows = cast(RunRows, cast(Any, SimpleNamespace(events_of=lambda kind: [VLLM, VLLM])))
    ((name, prompt, hits, pulled, sampled, rate, steps, batch, step_ms, kv, preemptions),) = engines(rows).rows
    assert (name, prompt, sampled, steps, preemptions) == ("engine-0", 2000, 800, 100, 4)
    assert (hits, pulled, rate, batch, step_ms, kv) == (0.5, 0.1, 800.0, 8.0, pytest.approx(20.0), 0.25)
