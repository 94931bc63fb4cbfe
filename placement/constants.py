"""Constants of the roofline, their priors without a measurement, and their error bands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Literal

__all__ = [
    "BANDS",
    "CALIBRATION_SCHEMA",
    "EXPERT_PASSES",
    "PRIORS",
    "Calibration",
    "Constants",
    "Precision",
    "TrainingConstants",
    "band_of",
    "prior",
]

Precision = Literal["bf16", "fp8"]
"""Number format of the matrix multiplications. That of weights and KV is in the shape's byte figures."""

CALIBRATION_SCHEMA = 1
"""Version of the dict that `Calibration.to_dict` writes."""

SHARES = ("mfu", "mfu_decode", "mbu")
SECONDS = ("step_s", "layer_s", "row_s", "alpha_s", "request_s")
EFFECTIVE = ("effective_tflops", "effective_tb_per_s")


@dataclass(frozen=True, slots=True)
class Constants:
    """Properties of an engine on a device that datasheets do not state. Shares in (0, 1], seconds at least 0.

    A step takes `step_s` + layers × `layer_s` however little it computes, and `row_s` more per sequence in it.
    """

    mfu: float = 0.56
    """Share of the dense peak that prefill reaches."""
    mfu_decode: float = 0.56
    """The same for decode steps."""
    mbu: float = 0.88
    """Share of the memory bandwidth that a step reaches."""
    step_s: float = 0.0
    layer_s: float = 60e-6
    row_s: float = 30e-6
    alpha_s: float = 2.5e-6
    """Latency of one all-reduce (two per layer and step) when an instance spans devices."""
    request_s: float = 0.0
    """Fixed cost of accepting one request."""
    expert_passes: float = 0.0
    """How often the hidden state of a prefilled token goes through memory per expert layer: sorting by expert, padding,
    weighting, summing. Nothing in a dense model."""
    effective_tflops: float | None = None
    """Reached TFLOP/s of one device, in place of datasheet × share; for devices without figures (CPU cores)."""
    effective_tb_per_s: float | None = None
    """Reached memory TB/s of one device, likewise."""

    def __post_init__(self) -> None:
        for name in SHARES:
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ValueError(f"constants: {name} is {value} (rule: in (0, 1])")
        for name in (*SECONDS, "expert_passes"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"constants: {name} is {value} (rule: a finite number, at least 0)")
        for name in EFFECTIVE:
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"constants: {name} is {value} (rule: a finite number above 0, or left out)")

    def to_dict(self) -> dict[str, float | None]:
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, object]) -> Constants:
        """ValueError for names that are not constants and for values that are not numbers."""
        known = {f.name for f in fields(Constants)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ValueError(f"constants: unknown field {unknown[0]!r} (rule: one of {', '.join(sorted(known))})")
        values: dict[str, float | None] = {}
        for name, value in data.items():
            values[name] = None if value is None and name in EFFECTIVE else finite_number(f"constants: {name}", value)
        return Constants(**values)  # type: ignore[arg-type]  # None only where the field allows it


@dataclass(frozen=True, slots=True)
class TrainingConstants:
    """Properties of training that no datasheet states. `rollart calibrate --from RUN` fits `mfu`, and `activations`
    from the peak memory of the trainer's GPUs."""

    mfu: float = 0.40
    """Share of the dense bf16 peak while a device computes. Source: 38 to 43 % on H100 (Llama 3, arXiv 2407.21783,
    table 4)."""
    overlap: float = 0.7
    """Share of the shorter of arithmetic and communication that runs at the same time as the longer. A guess: FSDP
    gathers one block ahead, but neither the first gather nor the last reduction is hidden."""
    activations: float = 1.0
    """Factor of the activations and logits that the architecture asks for. A guess until it is calibrated."""
    logit_copies: float = 2.0
    """Copies in float32 of the logits of a micro-batch: log-probabilities kept for the backward pass, and their
    gradient. A guess: fused losses hold one or less, others more for a moment."""
    reserve: float = 0.10
    """Share of the memory for the CUDA context, NCCL's buffers, gathered blocks and fragmentation. A guess, the same
    as vLLM's default for engines (`gpu_memory_utilization`, 0.9)."""
    pcie_gb_per_s: float = 32.0
    """Of a device without NVLink, in one direction. Source: PCI Express 4.0 x16, as the data sheets of L40S, L4 and A10
    state it (64 GB/s both ways)."""
    pcie_share: float = 0.5
    """Of that rate where all devices of a host communicate at a time. A guess: two devices share a root port."""
    host_gb_per_s: float = 50.0
    """Network of a host, one direction, where neither the device nor a link of the pool with itself states it. A guess:
    400 Gb/s, as in RollArt's cluster."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not (math.isfinite(value) and value >= 0 and (value > 0 or f.name in ("overlap", "reserve"))):
                raise ValueError(f"training constants: {f.name} is {value} (rule: a finite number above 0)")
            if value > 1 and f.name in ("mfu", "overlap", "pcie_share", "reserve"):
                raise ValueError(f"training constants: {f.name} is {value} (rule: a share, at most 1)")

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    @staticmethod
    def from_dict(data: object) -> TrainingConstants:
        """ValueError for names that are not constants and for values that are not numbers."""
        known = [f.name for f in fields(TrainingConstants)]
        if not isinstance(data, Mapping) or set(data) - set(known):
            raise ValueError(f"training constants are {data!r} (rule: a table of {', '.join(known)})")
        return TrainingConstants(**{name: finite_number(f"training constants: {name}", v) for name, v in data.items()})


PRIORS: Mapping[str, Constants] = {
    "hopper": Constants(),
    "ampere": Constants(mbu=0.85),
    "ada": Constants(mbu=0.85),
    "blackwell": Constants(),
    "cdna3": Constants(mfu=0.45, mfu_decode=0.45, mbu=0.80),
    "cpu": Constants(mfu=0.25, mfu_decode=0.25, mbu=0.5, step_s=2e-3, layer_s=50e-6, row_s=200e-6),
}
"""Constants before any measurement, by device generation.

hopper, blackwell: middle of the ranges that fits to public runs of vLLM and TensorRT-LLM of 2025–26 gave (prefill
0.52–0.60 of peak, 0.80–0.95 of bandwidth, 50–70 µs per layer of dense models with CUDA graphs; H100, H200 and B200
rows of `silicon_sample.csv` in aiconfigurator-core 0.12). row_s and alpha_s: the fit of Llama-3.1-70B FP8 on H200 to
the same rows (32 µs, 2.4 µs).
ampere, ada: the same, bandwidth share at the lower end (Splitwise's A100 rows, ISCA 2024; TensorRT-LLM 0.6 on L40S).
cdna3: no measured rows were at hand; shares at or below the lower ends.
cpu: an order of magnitude for PyTorch on server cores, not measured by anyone we can cite: calibrate instead.
"""

MOE_LAYER_S = 105e-6
"""Seconds per layer and step of mixture-of-experts models, GPUs: middle of 80–130 µs (gpt-oss-120b, MiniMax-M2.5 and
Qwen3-235B rows of the same file)."""

EXPERT_PASSES: Mapping[str, float] = {"hopper": 330.0, "blackwell": 120.0}
"""`expert_passes` of mixture-of-experts models on GPUs; other generations get Hopper's.

With a dense model's share of peak, fits to the same file (TPOT of MiniMax-M2.5 FP8 and gpt-oss-120b on vLLM) give 240
to 420 on H100 and H200: the middle. On B200 they give 0 to 60, and times to first token some hundreds: 120 is between.
It is far more than the necessary traffic: it also covers unfused kernels and the losses of experts with few tokens
each. Without the term the rows of Hopper ask for a prefill share of 0.15 to 0.30 of peak, where dense models have 0.55
to 0.59, and the time that 7,168 more tokens of prompt add to the first token is 0.14 to 0.52 of the measured time
(dense: 0.84 to 0.98).

It is counted in bytes, not as a smaller share of peak, because devices with less arithmetic per byte lose less: of
DeepSeek-R1's published prefill on H100 (52.3k tokens/s per node of 8, LMSYS) and H20 (16.5k, Ant Group with SGLang)
this gives 0.94 and 0.90, and without the term 2.2 and 1.05. The rows of H100 and H200 alone do not distinguish the two
forms: H200's fits carry to H100 as well with a smaller share (13.0 and 15.6 %) as with this (14.2 and 15.9 %).
"""

BANDS: Mapping[str, tuple[float, float]] = {
    "prior": (0.25, 0.35),
    "prior, untested generation": (0.40, 0.50),
    "prior, cpu": (0.75, 0.75),
    "same generation": (0.10, 0.18),
    "other generation": (0.25, 0.40),
    "other precision": (0.25, 0.35),
    "other model": (0.15, 0.40),
}
"""Relative errors to expect, (dense, mixture of experts), when constants are carried elsewhere.

From fits to one set of measured runs and predictions of another (mean absolute percentage errors): datasheet priors
within a generation 15–25 %; calibrated on H200, moved to H100: 2.8 % (dense decode), 12.9–17.8 % (MoE); moved to B200:
7.4 % decode and 25 % first token (dense), 17–37 % (MoE; 97 % where kernels changed with the precision); H100 FP8 to
A100 FP16: 16 %; 70B to another dense model: 12.1 %. The larger of the figures that apply is used, since a plan mixes
prefill and decode. "other model" of MoE is without measurement of its own: as bad as the worst that is.
The bands are of steps, turns and throughput. Times to first token under load, which are mostly queueing and front end,
are not covered: 13–28 % off after a fit, 42–65 % with priors.
"""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Constants fitted to measured rows of one engine, device, model and precision, and the error they had on rows held
    out of the fit (`error`: mean absolute relative error; `worst`: the largest)."""

    constants: Constants
    device: str
    generation: str
    precision: Precision
    model: str
    error: float
    worst: float = 0.0
    rows: int = 0
    engine: str = ""
    date: str = ""
    source: str = ""
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for name in ("error", "worst"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"calibration of {self.device}: {name} is {value} (rule: finite, at least 0)")
        if self.precision not in ("bf16", "fp8"):
            raise ValueError(f"calibration of {self.device}: precision is {self.precision!r} (rule: bf16 or fp8)")

    def to_dict(self) -> dict[str, object]:
        """Only JSON types."""
        return {"schema_version": CALIBRATION_SCHEMA, **asdict(self), "notes": list(self.notes)}

    @staticmethod
    def from_dict(data: Mapping[str, object]) -> Calibration:
        """ValueError, naming the field, for anything `to_dict` would not write, but for the details of the fit that
        `calibrate.Fit.to_dict` adds: they are left aside."""
        version = data.get("schema_version")
        if version != CALIBRATION_SCHEMA:
            raise ValueError(f"calibration: schema_version is {version!r} (rule: {CALIBRATION_SCHEMA})")
        rest = {name: value for name, value in data.items() if name not in ("schema_version", "fit")}
        known = {f.name for f in fields(Calibration)}
        needed = known - {"worst", "rows", "engine", "date", "source", "notes"}
        for name in sorted((set(rest) - known) | (needed - set(rest))):
            rule = "not a field of a calibration" if name in rest else "required"
            raise ValueError(f"calibration: field {name!r} is {rule}")
        constants, notes = rest.pop("constants"), rest.pop("notes", [])
        if not isinstance(constants, Mapping) or not isinstance(notes, list | tuple):
            raise ValueError("calibration: constants is not a table or notes is not a list")
        values: dict[str, object] = {}
        for name, value in rest.items():
            if name in ("error", "worst", "rows"):
                values[name] = (
                    int(finite_number(name, value)) if name == "rows" else finite_number(f"calibration: {name}", value)
                )
            elif isinstance(value, str):
                values[name] = value
            else:
                raise ValueError(f"calibration: {name} is {value!r} (rule: a string)")
        values |= {"constants": Constants.from_dict(constants), "notes": tuple(str(n) for n in notes)}
        return Calibration(**values)  # type: ignore[arg-type]  # every value was checked above


def prior(generation: str, *, moe: bool) -> tuple[Constants, float, str | None]:
    """The prior constants of a generation, their relative error, and a note for the reader.

    A generation that has no prior gets Hopper's, with the band and the note of an untested one.
    """
    if generation == "cpu":
        note = "constants are an order of magnitude for a CPU"
        return PRIORS["cpu"], band_of("prior, cpu", moe=moe), note
    base = PRIORS.get(generation, PRIORS["hopper"])
    passes = EXPERT_PASSES.get(generation, EXPERT_PASSES["hopper"])
    constants = replace(base, layer_s=MOE_LAYER_S, expert_passes=passes) if moe else base
    if generation in PRIORS and generation != "cdna3":
        return constants, band_of("prior", moe=moe), None
    what = f"no measured rows for generation '{generation}'" if generation else "the generation is not stated"
    return constants, band_of("prior, untested generation", moe=moe), what


def band_of(reason: str, *, moe: bool) -> float:
    """Relative error to expect for a reason of `BANDS`."""
    return BANDS[reason][1 if moe else 0]


def finite_number(what: str, value: object) -> float:
    """`value` as a finite float, or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{what} is {value!r} (rule: a finite number)")
    return float(value)
