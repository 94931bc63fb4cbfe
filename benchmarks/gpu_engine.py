"""The model, the device, and the engine's phases of `gpu.py`."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from placement.architecture import DecoderShape, shape_of
from placement.calibrate import FREE_EFFECTIVE, FREE_LAUNCHED, Row, fit, predict
from placement.hardware import device
from placement.roofline import Constants, Roofline
from placement.types import Device
from rollart.architecture import architecture_of
from rollart.engine.jobs import EngineJob
from rollart.engine.network import Network
from rollart.engine.runner import Runner
from rollart.model import GenerateRequest, Sampling

AIM = 0.6
"""Share of the datasheet's memory bandwidth that decoding is to reach at its best batch."""

STEPS = 24
"""Decode steps that are timed at each setting; their median counts."""


STEP_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Size:
    """A model (fields of Qwen3's config) and the work that fits it: `decode` (batch, context), `prefill` tokens,
    `train` (samples, tokens each, tokens of a micro-batch), `play` (groups, answers each, prompt, answer) tokens."""

    config: Mapping[str, int]
    slots: int
    context: int
    decode: tuple[tuple[int, int], ...]
    prefill: tuple[int, ...]
    train: tuple[int, int, int]
    play: tuple[int, int, int, int]


def _size(layers: int, hidden: int, intermediate: int, *, heads: int = 16, kv_heads: int = 8) -> Size:
    config = {
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
    }
    decode = tuple((b, c) for c in (256, 1024, 2048) for b in (1, 8, 32, 64, 128))
    return Size(config, 128, 2304, decode, (128, 512, 1024, 2048), (32, 1024, 4096), (16, 4, 128, 128))


SIZES = {
    "0.6b": _size(28, 1024, 3072),
    "1.4b": _size(22, 2048, 6144),
    "tiny": Size(
        {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
        },
        8,
        160,
        ((1, 32), (4, 32), (8, 32), (1, 96), (4, 96), (8, 96)),
        (16, 32, 64, 128),
        (8, 32, 128),
        (2, 4, 12, 6),
    ),
}
"""By name; `0.6b` is Qwen3-0.6B, `1.4b` Qwen3-1.7B without six of its layers."""


@dataclass(slots=True)
class Bench:
    """The case, and the results so far."""

    size: Size
    device: torch.device
    dtype: str
    scratch: Path
    known: Device
    report: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    @property
    def config(self) -> dict[str, Any]:
        """Of Hugging Face."""
        return {
            **self.size.config,
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "max_position_embeddings": 4096,
            "rope_theta": 1e6,
        }

    @property
    def shape(self) -> DecoderShape:
        width = 2.0 if self.dtype == "bfloat16" else 4.0
        return shape_of(self.config, weight_bytes_per_parameter=width, kv_bytes_per_element=width)

    @property
    def vocab(self) -> int:
        return self.size.config["vocab_size"]

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], *, repeat: int) -> float:
        """Median, after two to warm up."""
        taken = []
        for i in range(repeat + 2):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            if i > 1:
                taken.append(time.perf_counter() - began)
        return statistics.median(taken)


def ceilings(bench: Bench) -> dict[str, Any]:
    """Reached by a copy (bytes read and written) and by a product of two square matrices of random values."""
    large = bench.device.type == "cuda"
    source = torch.empty((1 << 32) if large else (1 << 24), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    copied = bench.seconds(lambda: target.copy_(source), repeat=5)
    n, dtype = (8192, torch.bfloat16) if large else (256, torch.float32)
    a, b = (torch.randn(n, n, device=bench.device, dtype=dtype) for _ in range(2))
    multiplied = bench.seconds(lambda: a @ b, repeat=5)
    return {
        "copy_tb_per_s": 2 * source.numel() / copied / 1e12,
        "matmul_tflops": 2 * n**3 / multiplied / 1e12,
        "datasheet_tb_per_s": bench.known.memory_tb_per_s,
        "datasheet_tflops": bench.known.tflops_bf16,
    }


def serving(bench: Bench) -> Runner:
    """An engine of random weights in this process."""
    config = {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True, "rope_theta": 1e6}
    architecture = architecture_of(config | bench.size.config, "the benchmark")
    dtype = getattr(torch, bench.dtype)
    network = Network(architecture, context=bench.size.context, device=bench.device, dtype=dtype)
    g = torch.Generator(bench.device).manual_seed(0)
    network.load(
        {
            name: torch.ones(shape, device=bench.device)
            if len(shape) == 1
            else torch.randn(shape, generator=g, device=bench.device, dtype=dtype) * 0.02
            for name, shape in network.shapes()
        }
    )
    return Runner(network, slots=bench.size.slots, context=bench.size.context, step_tokens=STEP_TOKENS)


def decode(bench: Bench) -> dict[str, Any]:
    """The best share of the datasheet's bandwidth (of the measured copy's where there is none), and every setting."""
    runner = serving(bench)
    decoder = runner.decoder
    settings: list[dict[str, Any]] = []
    found = bench.report["phases"]["decode"] = {
        "best_share": None,
        "best_tokens_per_s": None,
        "aim": AIM,
        "operations": type(decoder.operations).__name__ if decoder else "packed",
        "why": "no GPU",
        "graphs": 0,
        "settings": settings,
        "kernels": [],
    }
    for batch, context in bench.size.decode:
        settings.append(decoding(bench, runner, batch, context))
        found["best_share"] = max((s["share"] or 0.0) for s in settings)
        found["best_tokens_per_s"] = max(s["tokens_per_s"] for s in settings)
        if decoder is not None:
            found |= {"why": decoder.why, "graphs": len(decoder.graphs)}
        save(bench)
    if decoder is not None:
        fill(bench, runner, *bench.size.decode[-1])
        found["kernels"] = kernels(lambda: again(runner))
    return found


def decoding(bench: Bench, runner: Runner, batch: int, context: int) -> dict[str, Any]:
    fill(bench, runner, batch, context)
    table = runner.table
    runner.step()  # captures
    before, taken = table.kv[table.active()].mean(), []
    for _ in range(STEPS):
        began = time.perf_counter()
        runner.step()
        taken.append(time.perf_counter() - began)
    mean = float(before + table.kv[table.active()].mean()) / 2
    alone = bench.seconds(lambda: again(runner), repeat=10) if runner.decoder is not None else None
    runner.abort()
    seconds = statistics.median(taken)
    moved = bench.shape.weight_bytes + batch * bench.shape.kv_bytes(mean)
    measured = bench.report["phases"].get("ceilings", {}).get("copy_tb_per_s")
    bandwidth = bench.known.memory_tb_per_s or measured
    found = {
        "batch": batch,
        "context": mean,
        "step_ms": 1e3 * seconds,
        "device_ms": 1e3 * alone if alone else None,
        "tokens_per_s": batch / seconds,
        "gb": moved / 1e9,
        "share": moved / seconds / 1e12 / bandwidth if bandwidth else None,
        "share_of_copy": moved / seconds / 1e12 / measured if measured else None,
    }
    bench.rows.append(Row("decode", seconds, bench.known.name, batch=batch, context=mean))
    on_device = f" ({1e3 * alone:.3f} of it the device)" if alone else ""
    say(
        f"  batch {batch:4} at {mean:6.0f}: {1e3 * seconds:8.3f} ms{on_device} {batch / seconds:10,.0f} tok/s",
        found["share"],
    )
    return found


def fill(bench: Bench, runner: Runner, batch: int, context: int) -> None:
    """Prefill `batch` prompts of `context` tokens, until all of them decode."""
    runner.abort()
    rounds = -(-batch * context // STEP_TOKENS) + 1
    for i in range(batch):
        sampling = Sampling(max_tokens=rounds + STEPS + 4, seed=i)
        runner.add(EngineJob(GenerateRequest(f"{i}", "", prompt(bench, i, context), sampling)))
    table = runner.table
    while runner.stats().waiting or (table.known > table.kv + 1)[table.active()].any():
        runner.step()


def again(runner: Runner) -> None:
    """The step that comes next, without sampling: it may be repeated."""
    table, slots = runner.table, runner.table.active()
    assert runner.decoder is not None
    with torch.inference_mode():
        runner.decoder.step(table.tokens[slots, table.kv[slots]], table.kv[slots], slots)


def kernels(work: Callable[[], object]) -> list[dict[str, Any]] | str:
    """Where the device's time goes in one call: name, calls, microseconds of all of them."""
    if not torch.cuda.is_available():
        return "there is no GPU to profile"
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            work()
            torch.cuda.synchronize()
        events = sorted(profile.key_averages(), key=lambda e: -e.device_time_total)[:16]
        return [{"name": e.key[:100], "calls": e.count, "us": e.device_time_total} for e in events]
    except Exception as error:  # a profiler that does not run here must not cost the figures
        return f"{type(error).__name__}: {error}"


def prefill(bench: Bench) -> dict[str, Any]:
    """One prompt alone, and the longest twice in one step; the share is of the datasheet's peak, else the measured."""
    runner, shape = serving(bench), bench.shape
    peak = bench.known.tflops_bf16 or bench.report["phases"].get("ceilings", {}).get("matmul_tflops")
    settings, counter = [], 0
    for copies, new in [*((1, n) for n in bench.size.prefill), (2, bench.size.prefill[-1])]:

        def work(copies: int = copies, new: int = new) -> None:
            nonlocal counter
            for _ in range(copies):
                counter += 1
                sampling = Sampling(max_tokens=1, seed=counter)
                runner.add(EngineJob(GenerateRequest(f"{counter}", "", prompt(bench, counter, new), sampling)))
            while runner.busy:
                runner.step()

        seconds = bench.seconds(work, repeat=5)
        flops = copies * shape.flops(new, 0, 1)
        found = {
            "prompts": copies,
            "new": new,
            "ms": 1e3 * seconds,
            "tokens_per_s": copies * new / seconds,
            "mfu": flops / seconds / 1e12 / peak if peak else None,
        }
        settings.append(found)
        if copies == 1:
            bench.rows.append(Row("prefill", seconds, bench.known.name, new=new))
        say(f"  {copies} x {new:5} tokens: {1e3 * seconds:8.3f} ms {copies * new / seconds:10,.0f} tok/s", found["mfu"])
    return {"best_mfu": max(s["mfu"] or 0.0 for s in settings), "settings": settings}


def calibration(bench: Bench, out: Path | None) -> dict[str, Any]:
    """Constants for `placement`, written where a cluster spec's `calibration` can name them; every row predicted."""
    if not bench.rows:
        raise RuntimeError("nothing was measured that could be fitted")
    known, shape = bench.known, bench.shape
    stated = known.tflops_bf16 is not None and known.memory_tb_per_s is not None
    start = None if stated else Constants(effective_tflops=0.05, effective_tb_per_s=0.01, step_s=5e-4, layer_s=0.0)
    fitted = fit(
        bench.rows,
        shape,
        {known.name: known},
        free=FREE_LAUNCHED if stated else FREE_EFFECTIVE,
        start=start,
        engine="rollart.engine",
        date=time.strftime("%Y-%m-%d"),
        source="benchmarks/gpu.py",
    )
    if out is not None:
        out.write_text(json.dumps(fitted.to_dict(), indent=2) + "\n")
    instance = Roofline(shape, known, 1, fitted.calibration.constants, kv_capacity_bytes=1.0)
    pairs = []
    for row in bench.rows:
        predicted = predict(row, instance)
        case = f"new {row.new:g}" if row.kind == "prefill" else f"batch {row.batch:g}, context {row.context:g}"
        pairs.append({"kind": row.kind, "of": case, "measured_ms": 1e3 * row.seconds, "predicted_ms": 1e3 * predicted})
        say(f"  {row.kind:8} {case:26} measured {1e3 * row.seconds:9.3f} ms, predicted {1e3 * predicted:9.3f} ms")
    return {
        "constants": asdict(fitted.calibration.constants),
        "error_held_out": fitted.calibration.error,
        "error": fitted.train_error,
        "notes": list(fitted.calibration.notes),
        "rows": pairs,
    }


def known_device(name: str, generation: str, memory_gb: float | None) -> Device:
    """The catalogue's, where the name that the driver gives holds one of its names as a word and the memory is its."""
    words = name.replace("-", " ").split()
    if not {"PCIE", "NVL", "MIG"} & {word.upper() for word in words}:  # other cards than the modules of that name
        for word in words:
            try:
                found = device(word)
            except ValueError:
                continue
            if None in (memory_gb, found.memory_gb) or abs(memory_gb - found.memory_gb) < 0.15 * found.memory_gb:
                return found
    return Device(name.replace(" ", "-"), generation=generation)


def prompt(bench: Bench, number: int, length: int) -> tuple[int, ...]:
    return tuple((7919 * number + 104_729 * j) % (bench.vocab - 1) + 1 for j in range(length))


def say(text: str, share: float | None = None) -> None:
    print(text + ("" if share is None else f"   {share:6.1%} of the peak"), file=sys.stderr, flush=True)


def save(bench: Bench) -> None:
    path = bench.report["file"]
    if path:
        temporary = Path(f"{path}.new")
        temporary.write_text(json.dumps(bench.report, indent=1) + "\n")
        temporary.replace(path)
