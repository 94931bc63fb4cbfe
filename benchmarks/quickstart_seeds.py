"""The quickstart on several seeds: held-out success per domain after the warm start and at the end, and its cost.

    python benchmarks/quickstart_seeds.py [--seeds 0 1 2 3 4] [--json]

The rise from start to end is RL alone: the warm start lies before `start`. Greedy, on the spec's evaluation episodes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHILD = """
import json, sys
from rollart.launch.launch import launch
from rollart.settings.resolve import resolve_files
success = {}
def watch(event):
    if event.kind == "evaluated":
        success[event.subject] = {k[8:]: v for k, v in event.fields.items() if k.startswith("success.")}
launch(resolve_files(overrides=["seed=" + sys.argv[1]]), run_dir=sys.argv[2], on_progress=watch)
print(json.dumps(success))
"""


def run(seed: int) -> dict[str, Any]:
    """One run in a process of its own: success by domain, wall seconds, CPU seconds of all its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(seed), str(Path(directory) / "run")],
            check=True,
            capture_output=True,
            text=True,
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "seed": seed,
        "wall_s": time.monotonic() - began,
        "cpu_s": cpu,
        "load": os.getloadavg()[0],
        **json.loads(done.stdout.splitlines()[-1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = []
    for seed in arguments.seeds:
        result = run(seed)
        results.append(result)
        if not arguments.json:
            rises = "   ".join(
                f"{d} {result['start'][d]:.2f} -> {result['end'][d]:.2f} ({result['end'][d] - result['start'][d]:+.2f})"
                for d in result["end"]
            )
            took = f"{result['wall_s']:.0f} s wall, {result['cpu_s']:.0f} s CPU, load {result['load']:.1f}"
            print(f"seed {seed}   {rises}   {took}", flush=True)
    if arguments.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
