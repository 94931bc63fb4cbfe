"""`rollart calibrate`: measure this machine, so that its plans have measured constants."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import click

from rollart.cli.context import RESOLVED, find_run, native_output_to_stderr, split_arguments
from rollart.errors import StorageFailed, UsageError
from rollart.report.profile import measured_profiles
from rollart.settings.planning import PUBLISH
from rollart.settings.resolve import Resolved, refuse_given_data, resolve_files, resolve_saved
from rollart.settings.rules import quotas
from rollart.settings.run import RunSpec
from rollart.tools.calibrate import calibrate as run_calibration
from rollart.tools.calibrate import fit_engines, fit_publish, fit_training

STEPS = 16
"""Training steps of a reference run: the first few and the last few do not count."""


def calibrate(
    arguments: tuple[str, ...], cluster: Path | None, out: Path, measured: str | None, runs_dir: Path
) -> None:
    if measured is not None:
        if arguments or cluster is not None:
            raise UsageError("--from takes a run as it was", remedy="leave RUN.yaml, KEY=VALUE and --cluster out")
        _from_run(find_run(measured, runs_dir), out)
        return
    run_file, overrides = split_arguments(arguments)
    if not out.parent.is_dir():
        raise UsageError(f"--output {out}: {out.parent} is no directory")

    with native_output_to_stderr():
        resolved = resolve_files(run_file, cluster, overrides, measure=measured_profiles)
        refuse_given_data(resolved.run, "calibrate")
        if resolved.cluster.engines.kind == "vllm":
            raise UsageError(
                "the engines are vLLM's, and calibrate probes the embedded engine (rule: engines.kind embedded)",
                remedy="make a run, then `rollart calibrate --from RUN` fits what its engines counted",
            )
        try:
            machine, _ = run_calibration(resolved, references(resolved), out=out)
        except OSError as error:
            raise StorageFailed(f"{error.filename or out}: {error.strerror or error}") from None
    fitted = machine.engine.calibration
    click.echo(
        f"{out}: {fitted.device}, {fitted.rows} measurements, off by {fitted.error:.1%} where held out", err=True
    )
    click.echo(f"  name it in the cluster spec: calibration: [{out}]", err=True)


def _from_run(directory: Path, out: Path) -> None:
    with native_output_to_stderr():
        resolved = resolve_saved(directory / RESOLVED, [], measure=measured_profiles)
        fits, training = fit_engines(resolved, directory), fit_training(resolved, directory)
        written: list[dict[str, object]] = [one.to_dict() for one in fits]
        written += [] if training is None else [{"training": asdict(training)}]
        speeds = fit_publish(resolved, directory).stated()
        written += [{PUBLISH: speeds}] if speeds else []
        try:
            out.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise StorageFailed(f"{out}: {error.strerror}") from None
    for one in fits:
        found = one.calibration
        click.echo(f"{out}: {found.device}, {found.rows} intervals, off by {found.error:.1%} where held out", err=True)
    if training is not None:
        click.echo(f"{out}: the trainer reaches {training.mfu:.1%} of its peak while it computes", err=True)
    for name, speed in speeds.items():
        click.echo(f"{out}: publish.{name} {speed:.3g}", err=True)


def references(resolved: Resolved) -> list[Resolved]:
    """Three short runs of the same model whose trajectories differ in turns and in sampled tokens, and whose steps
    differ in length, so that the costs of the controller, the trainer and the functions can be separated."""
    run = resolved.run
    shares = quotas(run)
    small = {name: share * 3 // 8 for name, share in shares.items()}
    made = [
        _short(_mixed(run, small), epochs=1),
        _short(_other_mix(run, shares), epochs=2),
        _short(_shortest(run, shares), epochs=1),
    ]
    return [replace(resolved, run=each, quotas=quotas(each)) for each in made]


def _short(run: RunSpec, *, epochs: int) -> RunSpec:
    """A few steps, without evaluation."""
    return run.model_copy(
        update={
            "steps": STEPS,
            "evaluation": run.evaluation.model_copy(update={"episodes": 0}),
            "training": run.training.model_copy(update={"epochs": epochs}),
        }
    )


def _mixed(run: RunSpec, wanted: Mapping[str, int]) -> RunSpec:
    """The run with about `wanted` trajectories of each domain, in whole groups. A domain with 0 is left out, with the
    functions and warm start that only it needs."""
    domains = [
        d.model_copy(update={"trajectories": max(1, round(wanted[d.name] / d.group_size)) * d.group_size})
        for d in run.domains
        if wanted[d.name]
    ]
    names, used = {d.name for d in domains}, {use.function for d in domains for use in d.rewards}
    warm = run.warm_start
    if warm is not None:
        kept = [name for name in warm.domains if name in names]
        warm = warm.model_copy(update={"domains": kept}) if kept else None
    batch = run.batch.model_copy(update={"trajectories": sum(d.trajectories for d in domains)})
    functions = [f for f in run.functions if f.name in used]
    return run.model_copy(update={"domains": domains, "batch": batch, "functions": functions, "warm_start": warm})


def _other_mix(run: RunSpec, shares: Mapping[str, int]) -> RunSpec:
    """Every domain has the share of its neighbour; where that changes nothing, the longest domain has half the
    turns."""
    values = list(shares.values())
    shifted = [*values[1:], values[0]]
    if shifted != values:
        return _mixed(run, dict(zip(shares, shifted, strict=True)))
    longest = max(run.domains, key=lambda d: d.max_turns)
    if longest.max_turns == 1:
        raise UsageError(
            "every domain has one turn and the same share (rule: mixes of different lengths can be made)",
            remedy="calibrate with a run of several domains, or of several turns",
        )
    return _mixed(_changed(run, longest.name, max_turns=longest.max_turns // 2), shares)


def _shortest(run: RunSpec, shares: Mapping[str, int]) -> RunSpec:
    """Only the domain with the fewest turns; a single domain gets half the tokens per turn."""
    fewest = min(run.domains, key=lambda d: d.max_turns)
    if len(run.domains) == 1:
        return _mixed(_changed(run, fewest.name, max_tokens=max(1, fewest.max_tokens // 2)), shares)
    return _mixed(run, {name: sum(shares.values()) if name == fewest.name else 0 for name in shares})


def _changed(run: RunSpec, name: str, **values: int) -> RunSpec:
    domains = [d.model_copy(update=values) if d.name == name else d for d in run.domains]
    return run.model_copy(update={"domains": domains})
