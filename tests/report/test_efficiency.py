"""Useful FLOPs and bytes of engines and trainers, against counts by hand and the datasheets."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.architecture import shape_of
from placement.hardware import catalogue
from rollart.launch.plan import work_events
from rollart.ledger import events
from rollart.ledger.intervals import IntervalSum
from rollart.ledger.reader import VersionRow
from rollart.ports import RunEvent
from rollart.report.rows import RunRows
from rollart.report.tables import Table
from rollart.report.usage.efficiency import efficiency, engine_work, trainer_work
from rollart.settings.resolve import resolve_files
from tests.report.test_report import rows

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}
SHAPE = shape_of(CONFIG)
LINEAR = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128)
"""Weights of the two layers' matrices: queries and output, keys and values, feed-forward."""
NORMS = 2 * (2 * 64 + 2 * 16) + 64
PAIR = 2 * 4 * 4 * 16
"""FLOPs of a query and a key, in both layers."""


def counters(requests: int, prompt: int, cached: int, generated: int, steps: int) -> dict[str, float]:
    return {
        "ended": requests,
        "prompt_tokens": requests * prompt,
        "cached_tokens": requests * cached,
        "generated_tokens": requests * generated,
        "steps": steps,
    }


def test_an_engines_work_counted_by_hand() -> None:
    """One prompt of 100 tokens, 60 of them cached, and 11 sampled tokens, of which the prefill samples the first."""
    work = engine_work(SHAPE, counters(1, 100, 60, 11, 11))
    token, output = 2 * (LINEAR + NORMS), 2 * 64 * 1000
    prefill = 40 * token + output + PAIR * (100**2 - 60**2) / 2
    decode = 10 * (token + output + PAIR * 105.5)
    assert work.flops == pytest.approx(prefill + decode)
    weights, kv = 2 * (LINEAR + NORMS + 64_000), 2 * 2 * 2 * 16 * 2
    assert work.bytes == pytest.approx(11 * weights + 10 * 105.5 * kv)


@given(st.integers(1, 50), st.integers(1, 500), st.floats(0, 1), st.integers(1, 300), st.integers(1, 8))
def test_work_adds_up_and_a_cache_saves_some(n: int, prompt: int, hit: float, new: int, batch: int) -> None:
    cached, steps = int(hit * prompt), -(-n * new // batch)
    whole, one = (engine_work(SHAPE, counters(k, prompt, cached, new, steps)) for k in (n, 1))
    assert whole.flops == pytest.approx(n * one.flops)
    assert whole.flops <= engine_work(SHAPE, counters(n, prompt, 0, new, steps)).flops


def recorded(*, placed: dict[str, tuple[str, int]], device: str) -> RunRows:
    """A run of one engine and one trainer on devices of a type; each was busy for half of 100 s."""
    of = catalogue()[device]
    rates = {"engine_tflops": of.tflops_bf16, "trainer_tflops": of.tflops_bf16, "tb_per_s": of.memory_tb_per_s}
    metrics = {"computed_tokens": 4_000.0, "padding_share": 0.2}
    told = [
        RunEvent(0.0, events.MODEL_SHAPE, "policy", {"config": json.dumps(CONFIG), "weight_bytes": 2, "kv_bytes": 2}),
        RunEvent(0.0, events.POOL_PEAK, "here", {"device": device, **rates}),
        *(RunEvent(t, events.ENGINE_DID, "engine-0", {**counters(10, 100, 60, 11, 50)}) for t in (1.0, 2.0)),
    ]
    return rows(
        intervals=[
            IntervalSum(role, f"{role}-0", state, "", 50, 50, 1.0, 0, 100)
            for role in ("engine", "trainer", "env_host")
            for state in ("busy", "idle")
        ],
        versions=[VersionRow(0, 0, 0, 0, 0, {}), *(VersionRow(v, v, 1, 10, 500, metrics) for v in (1, 2))],
        events=told,
        placed=placed,
        epochs=2,
    )


def cells(table: Table) -> dict[str, dict[str, Any]]:
    found = [dict(zip([c.name for c in table.columns], row, strict=True)) for row in table.rows]
    return {row["part"]: row for row in found}


def test_utilization_is_work_over_the_datasheets_of_all_devices() -> None:
    run = recorded(placed={"engine-0": ("here", 2), "trainer-0": ("here", 4)}, device="H800")
    found, work = cells(efficiency(run)), engine_work(SHAPE, counters(20, 100, 60, 11, 100))
    assert found.keys() == {"engine-0", "trainer-0"}
    engine, trainer, of = found["engine-0"], found["trainer-0"], catalogue()["H800"]
    assert of.tflops_bf16
    assert of.memory_tb_per_s
    assert work.bytes is not None
    assert engine["devices"] == "2 x H800"
    assert engine["mfu"] == pytest.approx(work.flops / (50 * 2 * of.tflops_bf16 * 1e12))
    assert engine["mfu_of_life"] == pytest.approx(engine["mfu"] / 2)
    assert engine["mbu"] == pytest.approx(work.bytes / (50 * 2 * of.memory_tb_per_s * 1e12))
    # 2 versions x 4,000 tokens in 2 epochs over 10 samples: sequences of 200 tokens.
    flops = 3 * 8_000 * (2 * (LINEAR + NORMS + 64_000) + PAIR * 100)
    assert trainer_work(SHAPE, run).flops == pytest.approx(flops)
    assert trainer["mfu"] == pytest.approx(flops / (50 * 4 * of.tflops_bf16 * 1e12))
    assert trainer["padding"] == pytest.approx(0.2)


def test_without_a_datasheet_the_rates_stay() -> None:
    found = cells(efficiency(recorded(placed={"engine-0": ("here", 1)}, device="cpu")))
    assert found["engine-0"]["mfu"] is None
    assert found["engine-0"]["gflop_per_s"] > 0
    assert found["trainer-0"]["devices"] is None


def test_a_run_records_what_the_report_needs() -> None:
    shape, *pools = work_events(resolve_files(None), 1.0)
    config = json.loads(str(shape.fields["config"]))
    assert shape_of(config).parameters > 100_000
    assert [(pool.subject, pool.fields["device"]) for pool in pools] == [("here", "cpu")]
