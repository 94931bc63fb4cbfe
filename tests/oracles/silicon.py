"""Measured serving runs from the `silicon_sample.csv` of an installed aiconfigurator-core 0.12, as calibration rows.

The package is looked for in the environment and in the site-packages directory that ROLLART_ORACLES names; it is not
imported, so its dependencies (pandas, pyarrow) are not needed: `pip install --no-deps aiconfigurator-core==0.12.0`.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from placement.architecture import DecoderShape, shape_of
from placement.calibrate import MeasurementKind, Row
from placement.hardware import device
from placement.roofline import Constants, Precision, Roofline
from placement.types import Device

PACKAGE = "aiconfigurator_core"
SYSTEMS = {"h100_sxm": "H100", "h200_sxm": "H200", "b200_sxm": "B200"}
DEVICES: dict[str, Device] = {name: device(name) for name in SYSTEMS.values()}


@dataclass(frozen=True, slots=True)
class Case:
    """A model on an engine: which rows of the file, and how the model was served. KV cache in bf16, vLLM's default."""

    name: str
    model_path: str
    backend: str
    quant: str
    config: str
    """File of the package's `model_configs` with the model's config.json."""
    weight_bytes: float
    precision: Precision


LLAMA = Case(
    "Llama-3.1-70B FP8, vLLM",
    "meta-llama/Llama-3.1-70B",
    "vllm",
    "fp8",
    "meta-llama--Meta-Llama-3.1-70B_config.json",
    1.0,
    "fp8",
)
LLAMA_TRT = Case(
    "Llama-3.1-70B FP8, TensorRT-LLM",
    "meta-llama/Llama-3.1-70B",
    "trtllm",
    "fp8",
    "meta-llama--Meta-Llama-3.1-70B_config.json",
    1.0,
    "fp8",
)
MINIMAX = Case(
    "MiniMax-M2.5 FP8, vLLM", "MiniMaxAI/MiniMax-M2.5", "vllm", "fp8", "MiniMaxAI--MiniMax-M2.5_config.json", 1.0, "fp8"
)
GPT_OSS = Case(  # 4-bit experts (with their scales 4.25 bits); on Hopper, arithmetic in bf16
    "gpt-oss-120b MXFP4, vLLM", "openai/gpt-oss-120b", "vllm", "nvfp4", "openai--gpt-oss-120b_config.json", 0.53, "bf16"
)
CASES = (LLAMA, LLAMA_TRT, MINIMAX, GPT_OSS)


def package() -> Path | None:
    """The installed package's directory, or None where it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)  # finds a top-level package without running it
    roots = [Path(p) for p in (spec.submodule_search_locations or [])] if spec is not None else []
    if "ROLLART_ORACLES" in os.environ:
        roots.append(Path(os.environ["ROLLART_ORACLES"]) / PACKAGE)
    return next((root for root in roots if (root / "systems" / "silicon_sample.csv").is_file()), None)


def shape(case: Case) -> DecoderShape:
    """The case's model at the precision it was served at."""
    root = package()
    assert root is not None
    config = json.loads((root / "model_configs" / case.config).read_text())
    return shape_of(config, name=case.model_path, weight_bytes_per_parameter=case.weight_bytes)


def rows(case: Case, kind: MeasurementKind) -> dict[str, list[Row]]:
    """Rows by device: aggregated serving, a closed loop of `batch_size` clients, fixed input and output lengths.

    Left out are runs in which fewer than `batch_size` sequences were being served: those that did not fit in KV memory
    together, and those that waited longer than they decoded (the engine admitted fewer); runs with attention replicated
    instead of divided; and rows tagged aic-auto-gap-analysis, whose batch is not the number of clients.
    """
    root, model = package(), shape(case)
    assert root is not None
    found = {name: list[Row]() for name in DEVICES}
    with (root / "systems" / "silicon_sample.csv").open(newline="") as file:
        for line in csv.DictReader(file):
            name = SYSTEMS.get(line["system"])
            if name is None or not _of(case, line):
                continue
            row = Row(
                kind,
                float(line[f"silicon_{kind}_ms"]) / 1000,
                name,
                tp=int(line["tp_size"]),
                new=float(line["isl"]),
                batch=float(line["batch_size"]),
                output=float(line["osl"]),
            )
            instance = Roofline(model, DEVICES[name], row.tp, Constants(), precision=case.precision)
            if row.batch * model.kv_bytes(row.new + row.output) <= instance.kv_capacity_bytes:
                found[name].append(row)
    return found


def _of(case: Case, line: Mapping[str, str]) -> bool:
    wanted = (case.model_path, case.backend, case.quant, "agg", "1")
    is_case = wanted == tuple(
        line[c] for c in ("model_path", "backend", "gemm_quant_mode", "mode", "attention_dp_size")
    )
    if not is_case or "aic-auto-gap-analysis" in line["silicon_data_source"] or int(line["tp_size"]) > 8:
        return False
    return float(line["silicon_ttft_ms"]) <= float(line["silicon_tpot_ms"]) * float(line["osl"])
