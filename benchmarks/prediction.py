"""Predict wall time and dollars of real local runs by simulating them from their ledgers.

    python -m benchmarks.prediction [--only NAME ...] [--steps 20] [--repeat 1] [--keep DIR] [--json]

Each workload is run for real on this machine (an engine, a trainer, functions and the controller as processes), then
simulated as `rollart simulate RUN --check` does: its trajectories repeated, engines, trainer and functions at the
speeds in its own ledger, and the product's scheduler on virtual time. The time before and after the training loop is
not simulated and is taken as recorded: the deviation of the loop is shown beside that of the whole run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.local_prediction import quota, variant
from rollart.launch.launch import launch
from rollart.report.simulation import SimulationCheck
from rollart.tools.replay import check_replay, prepare_from_run


def games(run: dict[str, Any]) -> None:
    """Games alone: prefill-heavy, one-token actions; asynchronous, bound by the trainer."""
    quota(run, lake=96)


def words(run: dict[str, Any]) -> None:
    """Words alone, one epoch, synchronous: every step waits for its rollout."""
    quota(run, spell=160)
    run |= {"schedule": "sync_plus", "staleness": 0}
    run["training"]["epochs"] = 1


def slow_mix(run: dict[str, Any]) -> None:
    """Both, with games whose every move takes 0.15 s; one epoch, asynchronous: bound by the environment."""
    quota(run, lake=32, spell=64)
    run["domains"][0]["environment"] = "benchmarks.local_prediction:SlowLake"
    run["training"]["epochs"] = 1


WORKLOADS: dict[str, Callable[[dict[str, Any]], None]] = {f.__name__: f for f in (games, words, slow_mix)}


def recorded_and_predicted(edit: Callable[[dict[str, Any]], None], directory: Path, *, steps: int) -> SimulationCheck:
    """Run it in `directory`, then simulate it."""
    resolved = variant(edit, directory, steps=steps)
    run = directory / edit.__name__
    run.mkdir()
    (run / "resolved.yaml").write_text(resolved.to_yaml())
    launch(resolved, run_dir=run)
    return check_replay(prepare_from_run(run))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(WORKLOADS), help="Workloads to run. Default: all.")
    parser.add_argument("--steps", type=int, default=20, help="Training steps of each run.")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="Keep the runs there, for `rollart simulate RUN --check`.")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = []
    for name in given.only or WORKLOADS:
        for n in range(given.repeat):
            with tempfile.TemporaryDirectory(prefix="rollart-prediction-") as scratch:
                directory = Path(scratch) if given.keep is None else given.keep / str(n)
                directory.mkdir(parents=True, exist_ok=True)
                found = recorded_and_predicted(WORKLOADS[name], directory, steps=given.steps)
            rows.append(row(name, found))
            if not given.json:
                show(rows[-1])
    if given.json:
        json.dump(rows, sys.stdout, indent=2)


def row(name: str, found: SimulationCheck) -> dict[str, Any]:
    return {
        "workload": name,
        "steps": found.recorded.steps,
        "loop_s": found.recorded.loop_s,
        "predicted_loop_s": found.simulated.loop_s,
        "loop_error": _deviation(found.simulated.loop_s, found.recorded.loop_s),
        "loop_usd_error": _deviation(found.simulated.loop_usd, found.recorded.loop_usd),
        "wall_s": found.recorded.wall_s,
        "predicted_wall_s": found.wall_s,
        "wall_error": _deviation(found.wall_s, found.recorded.wall_s),
        "usd": found.recorded.usd,
        "predicted_usd": found.usd,
        "usd_error": _deviation(found.usd, found.recorded.usd),
        "load": os.getloadavg()[0],
    }


def _deviation(predicted: float, recorded: float) -> float:
    """Relative; 0 if nothing was recorded."""
    return predicted / recorded - 1.0 if recorded else 0.0


def show(one: dict[str, Any]) -> None:
    print(
        f"{one['workload']:10} {one['steps']:3} steps  loop {one['loop_s']:6.2f} s, predicted "
        f"{one['predicted_loop_s']:6.2f} ({one['loop_error']:+.1%}, USD {one['loop_usd_error']:+.1%})  run "
        f"{one['wall_s']:6.2f} s, predicted {one['predicted_wall_s']:6.2f} ({one['wall_error']:+.1%}, "
        f"USD {one['usd_error']:+.1%})  load {one['load']:.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
