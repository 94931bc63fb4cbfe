"""Success against samples: settings of training beside each other, on several seeds.

    python benchmarks/learning.py ROWS [--settings sync async 'a4: staleness=4'] [--seeds 0 1 2] [--seconds 3000]
    python benchmarks/learning.py ROWS --show

A setting is a name of `SETTINGS`, or `NAME: KEY=VALUE …` with keys of the run spec. Each run (setting, seed) is a
process of its own, of the quickstart or of `--run SPEC`, and ends as one line of the file ROWS. A run whose line is
there is not repeated, so that the matrix can be made in parts, of at most `--seconds` each. With `--slow S` a step of
every environment first waits max(0, N(10, 10)) × S seconds (`tasks/slow_steps.py`): S is the mean time of a turn.

For each domain the table has the samples until the success while training (the mean of three steps) reaches the target
of `TARGETS`, the held-out success before training, which is the null model, and after it; then the seconds until all
targets are reached. Each is a median with its least and greatest value. `x sync` is the ratio of the medians of samples
to those of the setting `sync` on the same seeds; a run that does not reach its target counts with all its samples, and
a ratio with such runs is marked with `>`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollart.settings.algorithms import PRESETS
from rollart.settings.resolve import resolve_files

SETTINGS = {
    "shipped": (),
    "sync": ("schedule=sync", "staleness=0"),
    "sync_plus": ("schedule=sync_plus", "staleness=0"),
    "async": ("schedule=async", "staleness=1"),
    "paced": ("schedule=paced", "staleness=1"),
    **{name: (f"training.algorithm={name}",) for name in PRESETS},
}
TARGETS = {"frozen_lake": 0.8, "spell_backward": 0.6, "code": 0.8}
TASKS = Path(__file__).parent / "tasks"

MOST_BANDS = 5
"""Settings whose bands can be told apart."""

MEAN_OF = 3
"""Steps of the mean that is compared with the target: one step of 64 samples varies by 0.05."""

CHILD = """
import json, sys
from rollart.launch.launch import launch
from rollart.settings.algorithms import PRESETS
from rollart.settings.resolve import resolve_files
found = {"steps": [], "times": [], "held_out": {}}
began = None
def watch(event):
    global began
    values = {k[8:]: v for k, v in event.fields.items() if k.startswith("success.")}
    if event.kind == "evaluated":
        found["held_out"][event.subject] = values
        began = event.t if began is None else began
    elif event.kind == "step":
        found["times"].append(event.t - began)
        found["steps"].append({k: v for k, v in event.fields.items() if isinstance(v, float)})
spec, directory, *overrides = sys.argv[1:]
resolved = resolve_files(spec or None, overrides=overrides)
launch(resolved, run_dir=directory, on_progress=watch)
print(json.dumps(found | {"batch": {d.name: d.trajectories for d in resolved.run.domains}}))
"""


def run(spec: str, overrides: Sequence[str], seed: int) -> dict[str, Any]:
    """One run in a process of its own: the values of each step, held-out success, seconds and CPU-seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    paths = os.pathsep.join((str(TASKS), *filter(None, [os.environ.get("PYTHONPATH")])))
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-c", CHILD, spec, str(Path(directory) / "run"), *overrides, f"seed={seed}"]
        environment = os.environ | {"PYTHONPATH": paths}
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(overrides)} seed={seed}: the run ended with exit code {done.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"wall_s": time.monotonic() - began, "cpu_s": cpu, "load": os.getloadavg()[0]}


def slow_steps(spec: str, turn_s: float) -> list[str]:
    """Overrides by which the environments of `spec` take as long as those of RollArt's evaluation."""
    overrides = []
    for i, domain in enumerate(resolve_files(spec or None).run.domains if turn_s else ()):
        arguments = {"of": domain.environment, "turn_s": turn_s, **domain.environment_args}
        overrides += [f"domains.{i}.environment=slow_steps:SlowSteps"]
        overrides += [f"domains.{i}.environment_args={json.dumps(arguments)}"]
    return overrides


def steps_to(row: dict[str, Any], domain: str) -> int | None:
    """The number of steps until the target of `domain` is reached, None if it is not."""
    values = [step[f"success.{domain}"] for step in row["steps"]]
    means = [statistics.mean(values[i - MEAN_OF : i]) for i in range(MEAN_OF, len(values) + 1)]
    reached = (i + MEAN_OF for i, mean in enumerate(means) if mean >= TARGETS.get(domain, 1.0))
    return next(reached, None)


def span(values: Sequence[float], digits: int) -> str:
    """The median, the least and the greatest value."""
    low, middle, high = (f"{one:,.{digits}f}" for one in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low}–{high})"


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table of the rows of one spec."""
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    samples: dict[tuple[str, str], dict[int, tuple[float, bool]]] = {}
    for row in rows:
        for domain, batch in row["batch"].items():
            steps = steps_to(row, domain)
            found = (batch * (steps or len(row["steps"])), steps is not None)
            samples.setdefault((row["setting"], domain), {})[row["seed"]] = found
    for setting in settings:
        its = [row for row in rows if row["setting"] == setting]
        print(f"{setting}: {' '.join(its[-1]['overrides']) or 'as shipped'} ({len(its)} seeds)")
        for domain in its[-1]["batch"]:
            mine, sync = samples[setting, domain], samples.get(("sync", domain), {})
            seeds = mine.keys() & sync.keys()
            ratio = ""
            if seeds and setting != "sync":
                medians = [statistics.median(one[seed][0] for seed in seeds) for one in (mine, sync)]
                whole = all(mine[seed][1] for seed in seeds)
                ratio = f", {'' if whole else '> '}{medians[0] / medians[1]:.2f} x sync"
            missed = sum(not reached for _, reached in mine.values())
            start, end = ([row["held_out"][label][domain] for row in its] for label in ("start", "end"))
            print(
                f"  {domain:16} {span([n for n, _ in mine.values()], 0)} samples to {TARGETS.get(domain, 1.0)}"
                f"{f' ({missed} not)' if missed else ''}{ratio}; held out {span(start, 2)} -> {span(end, 2)}"
            )
        reached = []
        for row in its:
            ends = [steps_to(row, domain) for domain in row["batch"]]
            reached += [row["times"][max(end or 0 for end in ends) - 1]] if all(ends) else []
        seconds = f"{span(reached, 0)} s to all targets, " if reached else ""
        cpu, load = span([row["cpu_s"] for row in its], 0), span([row["load"] for row in its], 1)
        print(f"  {seconds}{span([row['wall_s'] for row in its], 0)} s wall, {cpu} CPU-s, load {load}")


def plot(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw success while training (the mean of three steps) against samples: a panel per domain, and per setting the
    median over the seeds, with a band from the least to the greatest value where settings are few."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    domains, settings = list(rows[0]["batch"]), list(dict.fromkeys(row["setting"] for row in rows))
    figure = Figure(figsize=(6.0 * len(domains), 4.5), layout="constrained")
    for domain, axes in zip(domains, figure.subplots(1, len(domains), squeeze=False)[0], strict=True):
        axes.set_prop_cycle(color=colormaps["tab20"].colors)  # the algorithms are eleven
        for setting in settings:
            its = [row for row in rows if row["setting"] == setting]
            steps = min(len(row["steps"]) for row in its)
            values = [[step[f"success.{domain}"] for step in row["steps"][:steps]] for row in its]
            means = [[statistics.mean(one[i : i + MEAN_OF]) for i in range(steps - MEAN_OF + 1)] for one in values]
            at = [its[0]["batch"][domain] * (i + MEAN_OF) for i in range(steps - MEAN_OF + 1)]
            (line,) = axes.plot(at, [statistics.median(column) for column in zip(*means, strict=True)], label=setting)
            if len(settings) <= MOST_BANDS:
                low, high = ([of(column) for column in zip(*means, strict=True)] for of in (min, max))
                axes.fill_between(at, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        axes.set(title=domain, xlabel="samples", ylabel="success while training", ylim=(0, 1))
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
    FigureCanvasAgg(figure).print_png(str(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--run", default="", help="a run spec in place of the quickstart")
    parser.add_argument("--slow", type=float, default=0.0, metavar="S", help="slow environments, see above")
    parser.add_argument("--settings", nargs="+", default=["sync", "async"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run later than this")
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="also draw success against samples")
    arguments = parser.parse_args()
    began = time.monotonic()
    slow = slow_steps(arguments.run, arguments.slow)

    def rows() -> list[dict[str, Any]]:
        lines = arguments.rows.read_text().splitlines() if arguments.rows.exists() else []
        return [
            row
            for row in map(json.loads, lines)
            if (row["run"], row.get("slow", 0.0)) == (arguments.run, arguments.slow)
        ]

    for seed in arguments.seeds if not arguments.show else ():
        for setting in arguments.settings:
            name, _, changes = setting.partition(":")
            overrides = list(SETTINGS[name] if name in SETTINGS else changes.split())
            if any(row["setting"] == name and row["seed"] == seed for row in rows()):
                continue
            if time.monotonic() - began > arguments.seconds:
                break
            row = {"run": arguments.run, "slow": arguments.slow, "setting": name, "overrides": overrides, "seed": seed}
            found = run(arguments.run, [*slow, *overrides], seed)
            with arguments.rows.open("a") as file:
                file.write(json.dumps(row | found) + "\n")
    if not rows():
        sys.exit(f"{arguments.rows}: no row of {arguments.run or 'the quickstart'} with --slow {arguments.slow:g}")
    show(rows())
    if arguments.plot is not None:
        plot(rows(), arguments.plot)


if __name__ == "__main__":
    main()
