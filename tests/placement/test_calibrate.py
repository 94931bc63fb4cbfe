"""Calibration: the constants behind the rows are recovered; constants that rows do not identify stay at their priors
and are listed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from placement.architecture import shape_of
from placement.calibrate import FREE, FREE_EFFECTIVE, FREE_LAUNCHED, Fit, Row, errors, fit, predict
from placement.hardware import device
from placement.roofline import PRIORS, Calibration, Constants, Roofline, RooflinePerformance

SHAPE = shape_of(
    {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    name="Llama-3.1-8B",
)
TINY = shape_of(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 192,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
    name="tiny",
    weight_bytes_per_parameter=4.0,
    kv_bytes_per_element=4.0,
)
DEVICES = {name: device(name) for name in ("H100", "H200", "H20", "cpu")}
QWEN_1_4B = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 22,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
H200_DECODE_MS = [
    (1, 269, 1.87),
    (8, 269, 1.78),
    (32, 269, 2.12),
    (64, 270, 2.4),
    (128, 270, 3.01),
    (1, 1037, 1.92),
    (8, 1037, 2.1),
    (32, 1038, 2.79),
    (64, 1040, 3.62),
    (128, 1044, 5.05),
    (1, 2061, 1.77),
    (8, 2062, 2.3),
    (32, 2064, 3.49),
    (64, 2068, 5.2),
    (128, 2076, 7.84),
]
"""(batch, context, milliseconds) of the embedded engine, bf16, by `benchmarks/gpu.py` (2026-11-28)."""
H200_PREFILL_MS = [(128, 12.53), (512, 14.67), (1024, 13.3), (2048, 16.77)]
"""(tokens, milliseconds), likewise."""
TRUTH = Constants(mfu=0.48, mfu_decode=0.35, mbu=0.74, layer_s=90e-6, row_s=70e-6, alpha_s=9e-6)


def probe(name: str, tps: tuple[int, ...] = (1, 4)) -> list[Row]:
    """Prefills and decode steps such as a short probe takes; the seconds are still to be filled in."""
    blank = Row("prefill", 1.0, name)
    prefills = [replace(blank, new=n, cached=c, tp=tp) for n in (64, 512, 4096, 16384) for c in (0, 4096) for tp in tps]
    decodes = [
        replace(blank, kind="decode", batch=b, context=c, tp=tp)
        for b in (1, 8, 64, 256)
        for c in (256, 2048, 8192)
        for tp in tps
    ]
    return prefills + decodes


def measured(rows: list[Row], truth: Constants = TRUTH, noise: float = 0.03, seed: int = 1) -> list[Row]:
    """The rows with the seconds that `truth` predicts, times log-normal noise."""
    random = Random(seed)
    return [
        replace(
            r, seconds=predict(r, Roofline(SHAPE, DEVICES[r.device], r.tp, truth)) * math.exp(random.gauss(0, noise))
        )
        for r in rows
    ]


@pytest.mark.slow  # a fit of six constants to 80 rows, with its hold-out: over half a second
def test_known_constants_are_found_again() -> None:
    found = fit(measured([*probe("H20"), *probe("H200")]), SHAPE, DEVICES)
    for name in ("mfu", "mfu_decode", "mbu", "layer_s", "row_s", "alpha_s"):
        rel = 0.3 if name == "alpha_s" else 0.15  # a tenth of a step at most: 3 % of noise leaves it ±20 %
        assert getattr(found.calibration.constants, name) == pytest.approx(getattr(TRUTH, name), rel=rel), name
    assert found.kept == ()
    assert found.calibration.error < 0.05
    assert (found.calibration.device, found.calibration.generation) == ("H20+H200", "hopper")
    unseen = measured(probe("H100"), noise=0.0)
    assert max(errors(unseen, found.calibration.constants, SHAPE, DEVICES, "bf16")) < 0.05


def test_what_the_rows_do_not_say_stays_at_its_prior() -> None:
    """Decode steps on one device at a time say nothing of prefill or of all-reduces; memory-bound ones nothing of
    arithmetic."""
    rows = [r for r in measured(probe("H200", tps=(1,))) if r.kind == "decode" and r.batch < 200]
    found = fit(rows, SHAPE, DEVICES)
    assert found.kept == ("mfu", "mfu_decode", "alpha_s")
    assert found.calibration.constants.mfu == PRIORS["hopper"].mfu
    assert found.calibration.constants.alpha_s == PRIORS["hopper"].alpha_s
    assert "mfu is not identified by these rows and stays at 0.56" in found.calibration.notes
    assert found.calibration.constants.mbu == pytest.approx(TRUTH.mbu, rel=0.1)  # nine rows with 3 % of noise


def test_prefills_that_are_launched_one_by_one_on_a_real_h200() -> None:
    """Prefills of 128 to 1,024 tokens take the same time there: arithmetic hides behind launches."""
    shape = shape_of(QWEN_1_4B, weight_bytes_per_parameter=2.0, kv_bytes_per_element=2.0)
    rows = [Row("decode", ms / 1e3, "H200", batch=batch, context=context) for batch, context, ms in H200_DECODE_MS]
    rows += [Row("prefill", ms / 1e3, "H200", new=new) for new, ms in H200_PREFILL_MS]
    found = fit(rows, shape, DEVICES, free=FREE_LAUNCHED)
    assert found.calibration.error < 0.1
    assert max(found.by_kind.values()) < 0.05
    assert shape.layers * found.calibration.constants.launch_s == pytest.approx(12.5e-3, rel=0.1)
    assert fit(rows, shape, DEVICES, free=FREE).calibration.error > 0.4


def test_a_closed_loop_can_be_fitted_too() -> None:
    blank = Row("tpot", 1.0, "H200")
    rows = [replace(blank, batch=b, new=n, output=o) for b in (2, 16, 64) for n in (256, 4096) for o in (128, 1024)]
    found = fit(measured(rows), SHAPE, DEVICES, free=("mfu", "mbu", "layer_s", "row_s"))
    assert found.calibration.error < 0.06
    assert found.calibration.constants.mfu == pytest.approx(TRUTH.mfu, rel=0.15)
    assert found.by_kind.keys() == {"tpot"}


def test_a_cpu_core_with_a_tiny_model() -> None:
    """Steps of a tiny model are nearly all fixed cost: it is found, and the rates that rows cannot tell are named."""
    truth = Constants(
        effective_tflops=0.02, effective_tb_per_s=0.01, step_s=1.8e-3, layer_s=0.0, row_s=2.5e-4, request_s=6e-4
    )
    random, rows = Random(3), list[Row]()
    blank = Row("step", 1.0, "cpu")
    wanted = [replace(blank, batch=b, context=c, new=n) for b in (1, 2, 4, 8, 16) for c in (20, 200) for n in (0, 30)]
    wanted += [replace(blank, kind="prefill", new=n) for n in (8, 64, 256, 1024)]
    wanted += [replace(blank, kind="turn", batch=b, new=40, output=o) for b in (1, 4, 16) for o in (8, 64)]
    for row in wanted:
        exact = predict(row, Roofline(TINY, DEVICES["cpu"], 1, truth, kv_capacity_bytes=1e9))
        rows.append(replace(row, seconds=exact * math.exp(random.gauss(0, 0.03))))
    found = fit(rows, TINY, DEVICES, free=FREE_EFFECTIVE, start=replace(PRIORS["cpu"], layer_s=0.0))
    assert found.calibration.constants.step_s == pytest.approx(truth.step_s, rel=0.1)
    assert found.calibration.constants.row_s == pytest.approx(truth.row_s, rel=0.1)
    assert found.calibration.constants.request_s == pytest.approx(0.6e-3, rel=0.3)
    assert found.calibration.constants.effective_tflops == pytest.approx(truth.effective_tflops, rel=0.3)
    assert any(n.startswith("effective_tb_per_s is only bounded by these rows") for n in found.calibration.notes)
    assert found.calibration.error < 0.05
    core = RooflinePerformance(TINY, {"cpu": found.calibration}, kv_capacity_bytes={"cpu": 1e9})
    instance = core.instance(DEVICES["cpu"], 1)
    assert not isinstance(instance, str)
    assert (instance.band, instance.notes) == (found.calibration.error, ())


def test_the_held_out_rows_judge() -> None:
    """A row that no constants explain, held out, shows in the error; the order of the rows changes nothing."""
    rows = measured(probe("H200", tps=(1,)), noise=0.0)
    clean = fit(rows, SHAPE, DEVICES, free=("mfu", "mbu"), start=TRUTH)
    assert clean.calibration.error < 1e-3
    ordered = sorted(rows, key=lambda r: (r.kind, r.device, r.tp, r.new, r.cached, r.batch, r.context))
    spoilt = [replace(r, seconds=r.seconds * 2) if i == 2 else r for i, r in enumerate(ordered)]  # the first one held
    found = fit(spoilt, SHAPE, DEVICES, free=("mfu", "mbu"), start=TRUTH)
    assert found.calibration.worst == pytest.approx(0.5, abs=0.01)
    assert fit(spoilt[::-1], SHAPE, DEVICES, free=("mfu", "mbu"), start=TRUTH) == found


def test_repetitions_are_held_out_together() -> None:
    """A setting measured twice that no constants explain: seeing one of the two must not excuse the other."""
    rows = measured(probe("H200", tps=(1,)), noise=0.0)
    ordered = sorted(rows, key=lambda r: (r.kind, r.device, r.tp, r.new, r.cached, r.batch, r.context))
    odd = replace(ordered[2], seconds=ordered[2].seconds * 2)
    found = fit([*ordered[:2], odd, odd, *ordered[3:]], SHAPE, DEVICES, free=("mfu", "mbu"), start=TRUTH)
    alone = fit([*ordered[:2], odd, *ordered[3:]], SHAPE, DEVICES, free=("mfu", "mbu"), start=TRUTH)
    assert found.calibration.worst == pytest.approx(alone.calibration.worst)


def test_too_few_rows_to_hold_any_out_are_not_trusted() -> None:
    found = fit(measured(probe("H200", tps=(1,))[:1], noise=0.0), SHAPE, DEVICES, free=("mfu",))
    assert found.calibration.error == 0.25
    assert found.calibration.notes[0].startswith("no row was held out of 1")


def test_a_weight_counts_as_so_many_rows() -> None:
    one = measured(probe("H200", tps=(1,))[:9])
    twice = fit([*one, *one[:3]], SHAPE, DEVICES, free=("mfu", "layer_s"))
    weighted = fit(
        [replace(r, weight=2.0 if r in one[:3] else 1.0) for r in one],
        SHAPE,
        DEVICES,
        free=("mfu", "layer_s"),
    )
    assert weighted.calibration.constants.mfu == pytest.approx(twice.calibration.constants.mfu, rel=1e-3)
    assert weighted.calibration.constants.layer_s == pytest.approx(twice.calibration.constants.layer_s, rel=1e-3)


def test_dicts_and_back() -> None:
    rows = measured(probe("H200", tps=(1,)))
    found = fit(rows, SHAPE, DEVICES, free=("mfu", "mbu"), engine="vllm 0.33", date="2026-11-21", source="probe")
    text = json.dumps(found.to_dict())
    assert Fit.from_dict(json.loads(text)) == found
    assert json.loads(text)["schema_version"] == 1
    assert Calibration.from_dict(found.calibration.to_dict()) == found.calibration
    assert Calibration.from_dict(found.to_dict()) == found.calibration


GOOD = Row("decode", 0.01, "H200", batch=4, context=100)
DATA = Calibration(TRUTH, "H200", "hopper", "bf16", "m", 0.1).to_dict()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Row("warmup", 1.0, "H200"), "kind is 'warmup'"),  # type: ignore[arg-type]
        (lambda: Row("decode", 0.0, "H200"), "seconds is 0"),
        (lambda: Row("decode", math.nan, "H200"), "seconds is nan"),
        (lambda: Row("decode", 1.0, "H200", batch=0), "batch is 0"),
        (lambda: Row("decode", 1.0, "H200", new=-1), "new is -1"),
        (lambda: Row("decode", 1.0, "H200", weight=0), "weight is 0"),
        (lambda: fit([], SHAPE, DEVICES), "rows is empty"),
        (lambda: fit([replace(GOOD, tp=3)], SHAPE, DEVICES), "tp 3 does not divide"),
        (lambda: fit([replace(GOOD, device="cpu")], SHAPE, DEVICES), "no bf16 figure for cpu"),
        (lambda: Calibration.from_dict({**DATA, "schema_version": 2}), "schema_version is 2"),
        (lambda: Calibration.from_dict({**DATA, "colour": "red"}), "'colour' is not a field"),
        (lambda: Calibration.from_dict({k: v for k, v in DATA.items() if k != "model"}), "'model' is required"),
        (lambda: Calibration.from_dict({**DATA, "error": "small"}), "error is 'small'"),
        (lambda: Calibration.from_dict({**DATA, "error": -0.1}), "error is -0.1"),
        (lambda: Calibration.from_dict({**DATA, "precision": "int4"}), "precision is 'int4'"),
        (lambda: Calibration.from_dict({**DATA, "engine": 3}), "engine is 3"),
        (lambda: Calibration.from_dict({**DATA, "constants": {"mfu": 2.0}}), "mfu is 2"),
        (lambda: Calibration.from_dict({**DATA, "constants": {"mfi": 0.5}}), "unknown field 'mfi'"),
        (lambda: Calibration.from_dict({**DATA, "constants": 1}), "constants is not a table"),
        (lambda: Fit.from_dict(DATA), "field 'fit' is required"),
    ],
)
def test_nonsense_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
