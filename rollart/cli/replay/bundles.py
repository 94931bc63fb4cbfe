"""`rollart bundle` and `rollart replay`."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import click

from rollart.cli.context import find_run, print_report
from rollart.errors import RunFailed
from rollart.launch.functions import packages_in
from rollart.tools.bundle import read_bundle, write_bundle
from rollart.tools.replay_step import replay_report, replay_step


def bundle(run: str | None, step: int | None, out: Path, weights: bool, runs_dir: Path) -> None:
    directory = find_run(run, runs_dir)
    written = write_bundle(directory, step, out, weights=weights)
    click.echo(
        f"step {written.step} of {written.run} in {out}: {out.stat().st_size / 1e6:,.1f} MB, "
        f"{written.samples:,} samples, {written.trajectories:,} trajectories, "
        + (f"v{written.version} with its optimizer" if weights else "no weights")
    )
    for name, function in written.functions.items():
        if function.why:
            click.echo(f"  {name} is not called again: {function.why}")
    for note in written.notes:
        click.echo(f"  {note}")


def replay(
    source: Path, rewards: str | None, device: str, tolerance: float | None, allow_unsafe: bool, output: str
) -> None:
    packages = () if rewards is None else packages_in(rewards)
    with tempfile.TemporaryDirectory(prefix="rollart-replay-") as directory:
        unpacked = read_bundle(source, Path(directory))
        found = asyncio.run(
            replay_step(unpacked, rewards=packages, device=device, tolerance=tolerance, allow_unsafe=allow_unsafe)
        )
    print_report(replay_report(found), output)
    if difference := found.first_difference:
        step = f"step {found.manifest.step} of run '{found.manifest.run}'"
        raise RunFailed(f"{step} is not repeated: {difference}")
