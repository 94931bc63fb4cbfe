"""The embedded engine and trainer on one GPU, against its roofline: decode, prefill, training, publish, one short run.

    python3 benchmarks/gpu.py [--json FILE] [--calibration FILE] [--model 1.4b] [--device cuda] [--limit 450] [-o json]

Self-contained: PyTorch, transformers and pydantic (with their dependencies) beside this repository, no network; the
model is a Qwen3 with random weights, made here. Phases run one after the other: a failed phase is reported and the next
one begins, and the results so far are in FILE after each. None begins after `--limit` seconds.

    ceilings     the rates that this device reaches in a copy and in a matrix product, beside those of its datasheet
    decode       a step of `batch` sequences at `context`: time, and the share of the memory's bandwidth if weights and
                 KV are read once; the device's own time, and its kernels at the largest setting
    prefill      a prompt alone: time, and the share of the peak that its arithmetic is
    calibration  the roofline's constants fitted to these rows, and its prediction for each
    training     a step of the trainer's process, its share of the peak (6 FLOPs per parameter and token, and
                 attention); a publish
    run          engine and trainer as processes: two steps of roll-out, training, publish, loading; their agreement

`--device cpu` takes a tiny model and shows that the program works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import json
import os
import platform
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # before the directory of this file, which has a `placement` of its own

import torch  # noqa: E402

from benchmarks.gpu_engine import SIZES, Bench, calibration, ceilings, decode, known_device, prefill, save, say  # noqa: E402
from benchmarks.gpu_trainer import learning  # noqa: E402

GENERATIONS = {7: "volta", 8: "ampere", 9: "hopper", 10: "blackwell"}
"""By the major number of the compute capability, for cards that the catalogue does not have."""


def main() -> int:
    arguments = _arguments()
    cuda = arguments.device == "cuda"
    if cuda and not torch.cuda.is_available():
        print("benchmarks/gpu.py: torch sees no CUDA device (--device cpu runs a tiny model)", file=sys.stderr)
        return 2
    report: dict[str, Any] = {
        "schema_version": 1,
        "device": _device(arguments.device),
        "model": arguments.model,
        "dtype": arguments.dtype,
        "torch": torch.__version__,
        "limit_s": arguments.limit,
        "began": time.monotonic(),
        "file": str(arguments.json or ""),
        "phases": {},
        "failed": {},
        "seconds": {},
    }
    if cuda:
        major = torch.cuda.get_device_capability()[0]
        known = known_device(
            torch.cuda.get_device_name(),
            GENERATIONS.get(major, ""),
            torch.cuda.get_device_properties(0).total_memory / 1e9,
        )
    else:
        known = known_device("cpu", "cpu", None)
        torch.set_num_threads(1)
    # A call into the driver that never returns blocks SIGALRM: then the process ends, and FILE has the results so far.
    faulthandler.dump_traceback_later(arguments.limit + 90, exit=True)
    say(f"{report['device']['name']} ({known.name} of the catalogue), {arguments.model} in {arguments.dtype}")
    with tempfile.TemporaryDirectory(prefix="rollart-gpu-") as scratch:
        bench = Bench(
            SIZES[arguments.model], torch.device(arguments.device), arguments.dtype, Path(scratch), known, report
        )
        phase(bench, "ceilings", lambda: ceilings(bench), most=60)
        phase(bench, "decode", lambda: decode(bench), most=180)
        phase(bench, "prefill", lambda: prefill(bench), most=90)
        phase(bench, "calibration", lambda: calibration(bench, arguments.calibration), most=60)
        phase(bench, "run", lambda: asyncio.run(learning(bench)), most=300)
        for log in sorted(Path(scratch).glob("*.log")):
            report.setdefault("logs", {})[log.stem] = log.read_text(errors="replace")[-2000:]
    save(bench)
    print(json.dumps(report, indent=1) if arguments.output == "json" else _summary(report))
    return 1 if report["failed"] else 0


def phase(bench: Bench, name: str, work: Callable[[], Any], *, most: float) -> None:
    """Run a phase within `most` seconds and the rest of the limit; an exception becomes its result."""
    left = bench.report["limit_s"] - (time.monotonic() - bench.report["began"])
    if left < 5:
        bench.report["failed"][name] = "no time was left"
        say(f"{name}: no time was left")
        return
    say(f"{name} ({left:.0f} s left)")
    began = time.monotonic()

    def late(*_: object) -> None:
        raise TimeoutError(f"{name} took more than {min(most, left):.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, min(most, left))
    try:
        bench.report["phases"][name] = work()
    except Exception as error:
        bench.report.setdefault("traces", {})[name] = traceback.format_exc()[-4000:]
        bench.report["failed"][name] = f"{type(error).__name__}: {error}".splitlines()[0][:500]
        say(f"{name}: failed: {bench.report['failed'][name]}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    bench.report["seconds"][name] = time.monotonic() - began
    save(bench)
    if bench.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _summary(report: Mapping[str, Any]) -> str:
    """A line per figure."""
    phases = report["phases"]

    def of(name: str, *keys: str) -> Any:
        value: Any = phases.get(name, {})
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    lines = [
        ("copy, TB/s", of("ceilings", "copy_tb_per_s"), of("ceilings", "datasheet_tb_per_s")),
        ("matrix product, TFLOP/s", of("ceilings", "matmul_tflops"), of("ceilings", "datasheet_tflops")),
        ("decode, best share of the memory's bandwidth", of("decode", "best_share"), of("decode", "aim")),
        ("decode, tokens/s", of("decode", "best_tokens_per_s"), None),
        ("prefill, best share of the peak", of("prefill", "best_mfu"), None),
        ("training, share of the peak", of("training", "mfu"), None),
        ("publish, s", of("training", "publish_s"), None),
        ("calibration, error on rows held out", of("calibration", "error_held_out"), None),
    ]
    out = [f"{report['device']['name']}, {report['model']} in {report['dtype']}"]
    for name, value, beside in lines:
        shown = "-" if value is None else f"{value:,.4g}"
        out.append(f"{name:46} {shown:>10}" + ("" if beside is None else f"   (datasheet or aim {beside:,.4g})"))
    out += [f"failed: {name}: {why}" for name, why in report["failed"].items()]
    return "\n".join(out)


def _device(name: str) -> dict[str, Any]:
    if name == "cpu":
        return {"kind": "cpu", "name": f"CPU, {platform.machine()}", "cores": os.cpu_count()}
    about = torch.cuda.get_device_properties(0)
    return {
        "kind": "cuda",
        "name": about.name,
        "memory_gb": about.total_memory / 1e9,
        "cuda": torch.version.cuda,
        "multiprocessors": about.multi_processor_count,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=list(SIZES), help="default: 1.4b, tiny on a CPU")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="default: bfloat16, float32 on a CPU")
    parser.add_argument("--limit", type=float, default=450.0, help="seconds after which no phase begins")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results so far here after each phase")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="write the constants for plans here")
    parser.add_argument("-o", dest="output", choices=["table", "json"], default="table")
    arguments = parser.parse_args()
    gpu = arguments.device == "cuda"
    arguments.model = arguments.model or ("1.4b" if gpu else "tiny")
    arguments.dtype = arguments.dtype or ("bfloat16" if gpu else "float32")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
