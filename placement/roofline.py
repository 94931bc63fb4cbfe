"""The speed of a model on a device: a roofline with a few constants, and its error band.

Seconds of a step = fixed cost + max(arithmetic, memory traffic) + tensor-parallel communication + cost per sequence,
and in prefills of a mixture of experts the time to bring tokens to their experts and back. Fitted on one GPU type and
moved to another by datasheet, decode steps of a dense model come out within a few percent within a generation;
`BANDS` has the figures. The constants are priors until a measurement replaces them. Units as in `placement.types`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Literal

from placement.architecture import DecoderShape
from placement.types import Device, finite_number, require_at_least, require_positive

Precision = Literal["bf16", "fp8"]
"""Number format of the matrix multiplications. That of weights and KV is in the shape's byte figures."""

CALIBRATION_SCHEMA = 1
"""Version of the dict that `Calibration.to_dict` writes."""

MEMORY_SHARE = 0.9
"""Of the device memory an engine may use: vLLM's `gpu_memory_utilization` default."""

RING_SHARE = 0.7
"""Of NVLink's one-directional rate that an all-reduce reaches. Fits the tp 2–8 rows of Llama-3.1-70B on H200."""

ACTIVATION_BYTES = 2.0
"""Of one activation, on the wire and on its way to the experts: bf16 whatever the weights are in."""

SHARES = ("mfu", "mfu_decode", "mbu")
SECONDS = ("step_s", "layer_s", "row_s", "alpha_s", "request_s", "launch_s")
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
    launch_s: float = 0.0
    """Time in which the host launches a layer's operators for a prefill, where no CUDA graph does: a prefill computes
    while it is launched, and takes no less."""
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
            require_at_least(f"constants: {name}", getattr(self, name))
        for name in EFFECTIVE:
            require_positive(f"constants: {name}", getattr(self, name), optional=True)

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
        for name, value in rest.items():
            if name == "rows":
                rest[name] = int(finite_number(name, value))
            elif name in ("error", "worst"):
                rest[name] = finite_number(f"calibration: {name}", value)
            elif not isinstance(value, str):
                raise ValueError(f"calibration: {name} is {value!r} (rule: a string)")
        rest |= {"constants": Constants.from_dict(constants), "notes": tuple(str(n) for n in notes)}
        return Calibration(**rest)  # type: ignore[arg-type]  # every value was checked above


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


def transfer_s(size_bytes: float, gb_per_s: float, latency_s: float = 0.0) -> float:
    """Seconds to move `size_bytes` over a link: latency + size / bandwidth."""
    return latency_s + size_bytes / (gb_per_s * 1e9)


class Roofline:
    """One engine instance of `shape` on `tp` devices.

    ValueError if the model cannot run there. `kv_capacity_bytes` replaces the memory left over, for engines that are
    configured with a size.
    """

    def __init__(
        self,
        shape: DecoderShape,
        device: Device,
        tp: int,
        constants: Constants,
        *,
        precision: Precision = "bf16",
        band: float = 0.0,
        notes: tuple[str, ...] = (),
        kv_capacity_bytes: float | None = None,
    ) -> None:
        reason = _refusal(shape, device, tp, constants, precision, needs_memory=kv_capacity_bytes is None)
        if reason is not None:
            raise ValueError(reason)
        require_positive("kv_capacity_bytes", kv_capacity_bytes, optional=True)
        self.shape, self.device, self.tp, self.constants = shape, device, tp, constants
        self.precision, self.band, self.notes = precision, band, notes
        c, peak = constants, _tflops(device, precision) or 0.0
        self._copies = shape.kv_copies(tp)
        self.flops_per_s = tp * 1e12 * (c.effective_tflops or peak * c.mfu)
        self.decode_flops_per_s = tp * 1e12 * (c.effective_tflops or peak * c.mfu_decode)
        self.bytes_per_s = tp * 1e12 * (c.effective_tb_per_s or (device.memory_tb_per_s or 0.0) * c.mbu)
        self.fixed_s = c.step_s + shape.layers * (c.layer_s + (2 * c.alpha_s if tp > 1 else 0.0))
        """Of every step, however little it computes."""
        self.launch_s = shape.layers * c.launch_s
        self._comm_s = 0.0
        if tp > 1:  # two ring all-reduces per layer and token: 2 (tp − 1) / tp of the activation passes each device
            one_way = (device.nvlink_gb_per_s or math.nan) * 1e9 / 2
            moved = shape.hidden * ACTIVATION_BYTES * 2 * (tp - 1) / tp
            self._comm_s = 2 * shape.layers * moved / (RING_SHARE * one_way)
        passes = c.expert_passes * shape.expert_layers
        self.expert_s = passes * shape.hidden * ACTIVATION_BYTES / self.bytes_per_s
        """Of a prefilled token's way to its experts and back."""
        if kv_capacity_bytes is None:
            memory = tp * (device.memory_gb or 0.0) * 1e9
            kv_capacity_bytes = (memory * MEMORY_SHARE - shape.weight_bytes) / self._copies
        self.kv_capacity_bytes = kv_capacity_bytes
        """Bytes for KV, each sequence counted once (`shape.kv_bytes`); <= 0 if the weights do not fit."""

    def prefill_s(self, new: float, cached: float) -> float:
        """Compute `new` tokens after `cached` ones, alone; the first output token comes with it."""
        work = self._prefill_row_s(1.0, new, cached)
        return self.constants.request_s + self.fixed_s + work + self.constants.row_s

    def decode_step_s(self, batch: float, context: float) -> float:
        """One step that yields one token for each of `batch` sequences of mean context `context`."""
        return self.fixed_s + batch * (self._decode_row_s(batch, context) + self.constants.row_s)

    def mixed_step_s(self, batch: float, context: float, new: float, cached: float) -> float:
        """One step of chunked prefill: `new` tokens of one sequence (after `cached`) beside `batch` decoding ones."""
        shape = self.shape
        prefill = shape.flops(new, cached, min(1.0, new)) / self.flops_per_s
        compute = prefill + batch * shape.decode_flops(context) / self.decode_flops_per_s
        kv = (shape.kv_bytes(cached) if new > 0 else 0.0) + batch * shape.kv_bytes(context)
        memory = (shape.touched_weight_bytes(batch + new) + kv * self._copies) / self.bytes_per_s
        rows = batch + (1 if new > 0 else 0)
        own = (batch + new) * self._comm_s + new * self.expert_s + rows * self.constants.row_s
        return self.fixed_s + max(compute, memory, self.launch_s if new > 0 else 0.0) + own

    def turn_s(self, batch: float, new: float, cached: float, output: float) -> float:
        """Instance-seconds one turn takes of an aggregated instance that serves `batch` turns at a time.

        S = max(1, output) steps, the first of which is the prefill. Fixed cost and weight traffic of a step are shared
        by its `batch` rows; arithmetic, KV traffic, communication and `row_s` are each row's own. With batch 1 it is
        prefill_s + (S − 1) × decode_step_s; for long outputs it tends to S × decode_step_s(batch) / batch + prefill.
        """
        steps = max(1.0, output)
        prefill = self._prefill_row_s(batch, new, cached)
        decode = (steps - 1) * self._decode_row_s(batch, cached + new + steps / 2) if steps > 1 else 0.0
        own = self.constants.request_s + steps * self.constants.row_s
        return own + steps * self.fixed_s / batch + prefill + decode

    def tpot_s(self, batch: float, new: float, cached: float, output: float) -> float:
        """Mean seconds between a client's tokens when `batch` clients keep an aggregated instance busy: its own steps,
        and the prefills of the others that fall between them."""
        step = self.decode_step_s(batch, cached + new + output / 2)
        return step + (batch - 1) * self.prefill_s(new, cached) / max(1.0, output)

    def ttft_s(self, batch: float, new: float, cached: float, output: float) -> float:
        """Mean seconds to the first token in the same loop: the prefill, the step that is running, the acceptance of
        requests that come together, and the queue of prefills (utilisation ρ: ρ / (1 − ρ) of them ahead)."""
        prefill, step = self.prefill_s(new, cached), self.decode_step_s(batch, cached + new + output / 2)
        busy = (batch - 1) * prefill
        waiting = busy / (max(1.0, output) * step + prefill)
        return prefill + step + (batch - 1) * self.constants.request_s + prefill * waiting

    def _prefill_row_s(self, batch: float, new: float, cached: float) -> float:
        """A row's own share of prefills in steps that `batch` rows share: arithmetic, memory or launches, the way to
        the experts and back, and communication."""
        compute = self.shape.flops(new, cached, 1.0) / self.flops_per_s
        weights = self.shape.touched_weight_bytes(max(1.0, batch * new)) / batch
        kv = self.shape.kv_bytes(cached) * self._copies
        bound = max(compute, (weights + kv) / self.bytes_per_s, self.launch_s / batch)
        return bound + new * (self._comm_s + self.expert_s)

    def _decode_row_s(self, batch: float, context: float) -> float:
        """A row's own share of a decode step."""
        compute = self.shape.decode_flops(context) / self.decode_flops_per_s
        weights = self.shape.touched_weight_bytes(batch) / batch
        kv = self.shape.kv_bytes(context) * self._copies
        return max(compute, (weights + kv) / self.bytes_per_s) + self._comm_s


@dataclass(frozen=True, slots=True)
class RooflinePerformance:
    """Makes instances of one model.

    `constants` by device name or generation: calibrated or stated. A device without an entry borrows the calibration of
    another GPU, the nearest first, and without any uses the priors of its generation; notes and band reflect it.
    `kv_capacity_bytes` by device name: the configured KV
    memory of an instance, where it is not all of the remaining memory. `weight_only`: a device without a figure for
    `precision` computes in bf16 on weights that are read at their size (W8A16, W4A16).
    """

    shape: DecoderShape
    constants: Mapping[str, Constants | Calibration] = field(default_factory=dict)
    precision: Precision = "bf16"
    weight_only: bool = False
    kv_capacity_bytes: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.precision not in ("bf16", "fp8"):
            raise ValueError(f"precision is {self.precision!r} (rule: bf16 or fp8)")

    def instance(self, device: Device, tp: int) -> Roofline | str:
        """The instance on `tp` devices of a type, or why there can be none."""
        constants, band, notes = self._choose(device)
        precision = self._precision(device)
        if precision != self.precision:
            notes += (f"{device.name}: no {self.precision} arithmetic: quantized weights are computed with in bf16",)
        try:
            return Roofline(
                self.shape,
                device,
                tp,
                constants,
                precision=precision,
                band=band,
                notes=notes,
                kv_capacity_bytes=self.kv_capacity_bytes.get(device.name),
            )
        except ValueError as error:
            return str(error)

    def _precision(self, device: Device) -> Precision:
        """The number format of the device's arithmetic."""
        return "bf16" if self.weight_only and _tflops(device, self.precision) is None else self.precision

    def _choose(self, device: Device) -> tuple[Constants, float, tuple[str, ...]]:
        """Constants for a device, their band, and notes in words where they come from elsewhere."""
        for key in (device.name, device.generation):
            entry = self.constants.get(key) if key else None
            if isinstance(entry, Calibration):
                return self._carried(entry, device)
            if entry is not None:
                band = band_of("prior", moe=self.shape.is_moe)
                return entry, band, (f"{device.name}: constants as stated, not measured: ±{band:.0%}",)
        # A calibration to borrow: same generation, precision and model first, then by name. None to a CPU or from one,
        # and none that replaced datasheet figures: those are of that device only.
        usable = [
            c
            for c in self.constants.values()
            if isinstance(c, Calibration)
            and c.generation != "cpu"
            and c.constants.effective_tflops is None
            and c.constants.effective_tb_per_s is None
        ]
        if usable and not device.is_cpu:
            return self._carried(min(usable, key=lambda c: self._distance(c, device)), device)
        constants, band, why = prior(device.generation, moe=self.shape.is_moe)
        because = f" ({why})" if why else ""
        note = f"{device.name}: constants are priors of generation '{device.generation or '?'}', not calibrated"
        return constants, band, (f"{note}{because}: ±{band:.0%}",)

    def _distance(self, c: Calibration, device: Device) -> tuple[bool, bool, bool, str]:
        other = not _same(c.generation, device.generation)
        return other, c.precision != self.precision, c.model != self.shape.name, c.device

    def _carried(self, found: Calibration, device: Device) -> tuple[Constants, float, tuple[str, ...]]:
        """Constants of a calibration used on `device`: the widest band among the reasons to doubt them."""
        away: dict[str, str] = {}
        if found.device != device.name and _same(found.generation, device.generation):
            away["same generation"] = "another device of the same generation"
        elif found.device != device.name:
            away["other generation"] = f"generation '{device.generation or '?'}' is another"
        if found.precision != self._precision(device):
            away["other precision"] = f"calibrated in {found.precision}, asked in {self._precision(device)}"
        if found.model != self.shape.name:
            away["other model"] = f"calibrated with {found.model or '?'}, asked for {self.shape.name or '?'}"
        if not away:
            return found.constants, found.error, ()
        band = max(found.error, *(band_of(reason, moe=self.shape.is_moe) for reason in away))
        where = f"constants calibrated on {found.device} ({found.generation or '?'})"
        return found.constants, band, (f"{device.name}: {where}, {', '.join(away.values())}: ±{band:.0%}",)


def _refusal(
    shape: DecoderShape, device: Device, tp: int, constants: Constants, precision: Precision, *, needs_memory: bool
) -> str | None:
    """Why `shape` cannot run, or cannot be predicted, on `tp` devices of a type; None if it can."""
    if constants.effective_tflops is None and _tflops(device, precision) is None:
        return f"no {precision} figure for {device.name}: give tflops_{precision}, or calibrate"
    if constants.effective_tb_per_s is None and device.memory_tb_per_s is None:
        return f"no memory bandwidth for {device.name}: give memory_tb_per_s, or calibrate"
    if needs_memory and device.memory_gb is None:
        return f"no memory size for {device.name}: give memory_gb"
    if tp > 1 and device.nvlink_gb_per_s is None:
        return f"no NVLink figure for {device.name}: give nvlink_gb_per_s"
    if device.devices_per_host is not None and tp > device.devices_per_host:
        return f"tp {tp} exceeds the {device.devices_per_host} devices of one host of {device.name}"
    return shape.allows_tp(tp)


def _tflops(device: Device, precision: Precision) -> float | None:
    return device.tflops_fp8 if precision == "fp8" else device.tflops_bf16


def _same(a: str, b: str) -> bool:
    return a == b and bool(a)
