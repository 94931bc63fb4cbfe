"""The roofline against measured runs, calibrated on H200 alone and carried to other GPUs by datasheet."""

from __future__ import annotations

from dataclasses import replace

import pytest

from placement.calibrate import errors
from placement.roofline import PRIORS
from tests.oracles.silicon import CASES, DEVICES, LLAMA, Case, package, rows, shape
from tests.oracles.table import Line, fit_h200, lines, main

pytestmark = [
    pytest.mark.skipif(package() is None, reason="aiconfigurator-core is not installed (see silicon.py)"),
    pytest.mark.slow,  # reads a 5,221-line file and fits: a second or two
]

Table = dict[tuple[str, str, str], Line]


@pytest.fixture(scope="module")
def table() -> Table:
    return {(line.measure, line.constants, line.device): line for line in lines(LLAMA, ("tpot", "ttft"))}


def test_the_rows_are_those_that_fit_in_kv_memory() -> None:
    assert {name: len(found) for name, found in rows(LLAMA, "tpot").items()} == {"H100": 41, "H200": 54, "B200": 56}


@pytest.mark.parametrize(("device", "most"), [("H200", 0.04), ("H100", 0.05), ("B200", 0.10)])
def test_tpot_carries_to_other_gpus(table: Table, device: str, most: float) -> None:
    assert table["tpot", "fitted on H200", device].mape <= most


@pytest.mark.parametrize(("device", "most"), [("H200", 0.16), ("H100", 0.20), ("B200", 0.33)])
def test_first_tokens_are_predicted_worse(table: Table, device: str, most: float) -> None:
    assert table["tpot", "fitted on H200", device].mape < table["ttft", "fitted on H200", device].mape <= most


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_stated_bands_hold(case: Case) -> None:
    """What an instance says of its error is not less than the mean error on rows that it was not fitted to; of dense
    models nor is it with priors alone (mixtures of experts differ too much between engines and formats for that)."""
    judged = [line for line in lines(case) if line.constants == "fitted on H200" or case.name.startswith("Llama")]
    assert len(judged) >= 2
    for line in judged:
        if line.device != "H200" or line.constants == "priors":
            assert line.mape <= line.band, line


def test_the_fit_does_not_depend_on_where_it_starts() -> None:
    far = replace(PRIORS["hopper"], mfu=0.2, mbu=0.4, layer_s=200e-6, row_s=3e-6, alpha_s=10e-6)
    constants = fit_h200(LLAMA, "tpot", far).calibration.constants
    for device, most in (("H100", 0.05), ("B200", 0.10)):
        wrong = errors(rows(LLAMA, "tpot")[device], constants, shape(LLAMA), DEVICES, "fp8")
        assert sum(wrong) / len(wrong) <= most


def test_it_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    assert "| Llama-3.1-70B FP8, vLLM | TPOT | fitted on H200 | H100 | 41 |" in capsys.readouterr().out
