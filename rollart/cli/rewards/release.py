"""The commands that release versions of rewards: compare, deploy, promote and roll back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from rollart.cli.completion import DIGEST
from rollart.cli.context import FOR_PEOPLE, cluster_functions, colour, print_report
from rollart.cli.rewards.develop import token_costs
from rollart.cli.rewards.operate import confirmed, deployed_table, on_provider, show_deployed, trial_line
from rollart.errors import FaultRateExceeded, RollartError, UsageError
from rollart.launch.functions import (
    TrialMeter,
    attach_function,
    backend,
    canonical_provider,
    cases_beside,
    function_secrets,
    function_settings,
    import_warnings,
    packages_in,
    translated_errors,
    units_by_provider,
)
from rollart.launch.rewards import check_order
from rollart.report.tables import (
    Report,
    Row,
    Table,
    as_count,
    as_ms,
    as_number,
    as_share,
    as_text,
    as_usd,
    ratio,
    table,
)
from rollart.settings.cluster import ClusterFunctions
from rollart.settings.prices import PriceList
from rollart.tools.prices import effective_prices
from rollart.tools.releases import VersionFigures, fault_difference, fault_kinds, measured_figures, recorded_figures
from rollart.tools.rescore import CallMeter
from serverless.deploy.aws_function import aws_function
from serverless.deploy.changes import file_changes
from serverless.deploy.package import Package
from serverless.providers.base import CANARY, DeployedFunction, Deployer, DeploymentChange, no_canary
from serverless.rehearse import RehearsalCase, read_cases, rehearse
from serverless.secrets import refuse_packed_secrets


def deploy(
    source: str,
    provider: str,
    cluster: Path | None,
    root: Path,
    dry_run: bool,
    name: str | None,
    render: Path | None,
    canary: float | None,
    output: str,
) -> None:
    packages, share = packages_in(source, name=name), canary or 0.0
    with translated_errors():
        for package in packages:
            refuse_packed_secrets(package, function_secrets(cluster_functions(cluster), Path.cwd()))
    if render is not None:
        render_images(packages, provider, cluster, render, output)
        return
    target = canonical_provider(provider)
    notes = [
        f"{one.spec.name}: {text}" for one in packages for text in (*one.warnings, *import_warnings(one, [target]))
    ]
    with translated_errors():
        notes += asyncio.run(check_order(packages, source, cluster_functions(cluster)))
    if dry_run:
        planned = _planned(packages, provider, cluster, root, share)
        print_report(Report("deploy", "functions", (_changes(planned, packages),), (*notes, *_unread(planned))), output)
        return
    trials = TrialMeter(PriceList(prices=effective_prices(cluster)), {one.spec.name: one.spec.gpu for one in packages})
    done: list[Any] = []

    async def main(target: Deployer) -> None:
        for package in packages:
            done.append(await target.deploy(package, canary=share))

    try:
        on_provider(provider, cluster, root, main, meter=trials)
    finally:  # also show what was deployed and billed before another deployment failed
        if done:
            show_deployed(done, output, notes, trials.bills)
        else:
            for bill in trials.bills:
                click.echo(f"{bill.call.function}: {trial_line(bill)}", err=True)


def render_images(
    packages: Sequence[Package], provider: str, cluster: Path | None, directory: Path, output: str
) -> None:
    """Write the build context of each Lambda image below `directory`."""
    if canonical_provider(provider) != "aws_lambda":
        raise UsageError(f"nothing to render for '{provider}'", remedy="Modal builds its images itself")
    rows: list[Row] = []
    with translated_errors():
        settings = function_settings("aws_lambda", cluster_functions(cluster))
        for package in packages:
            function = aws_function(package, settings)
            if function.image is not None:
                function.image.write(directory / package.spec.name)
                image = f"{settings.repository}:{function.image.tag}"
                platform = function.image.platform
                target = str(directory / package.spec.name)
                rows.append(
                    {"function": package.spec.name, "directory": target, "platform": platform, "push_as": image}
                )
    if not rows:
        raise UsageError("no function here has a container image", remedy="give one `image`, or deploy its archive")
    print_report(Report("deploy", "functions", (Table.of("contexts", "Build contexts", rows),)), output)


def diff(
    source: str,
    provider: str,
    cluster: Path | None,
    root: Path,
    name: str | None,
    canary: float | None,
    cases: Path | None,
    cost: bool,
    exit_code: bool,
    output: str,
) -> None:
    packages = packages_in(source, name=name)
    planned = _planned(packages, provider, cluster, root, canary or 0.0)
    files, texts = list[Row](), list[str]()
    for change, package in zip(planned, packages, strict=True):
        for file in file_changes(change.before, package) if change.before is not None else ():
            added, removed = file.lines
            texts.append(file.diff)
            files.append(
                {
                    "function": change.function,
                    "file": file.path,
                    "change": file.change,
                    "added": as_count(added),
                    "removed": as_count(removed),
                    "diff": as_text(file.diff, people=False),
                }
            )
    notes = _unread(planned)
    costs, without = _costs(
        planned, packages, canonical_provider(provider), cluster, _cases(source, cases) if cost else []
    )
    tables = (
        _changes(planned, packages, files=False),
        Table.of("files", "Changed files", files, optional=True),
        Table.of("costs", "US dollars per million items in full batches, at list prices", costs, optional=True),
    )
    if output == "table":
        for line in "".join(texts).splitlines():
            click.echo(_coloured(line))
    print_report(Report("diff", "functions", tables, (*notes, *without)), output)
    if exit_code and any(change.lines for change in planned):
        raise click.exceptions.Exit(1)


def promote(
    function: str,
    provider: str,
    cluster: Path | None,
    root: Path,
    runs: Path,
    cases: Path | None,
    yes: bool,
    force: bool,
    output: str,
) -> None:
    versions = on_provider(provider, cluster, root, lambda target: target.versions(function))
    current = next((one for one in versions if one.current), None)
    canary = next((one for one in versions if CANARY in one.aliases), None)
    if current is None or canary is None:
        with translated_errors():
            raise no_canary(function)
    prices, unread = PriceList(prices=effective_prices(cluster)), list[str]()
    if cases is not None:
        before, after = _on_cases((current, canary), cases, provider, cluster, root, prices)
        source = f"{before.outcomes} cases, each called alone on {provider} now"
    else:
        (before, after), unread = recorded_figures(function, (current, canary), runs, prices)
        source = (
            f"calls on {canonical_provider(provider)} of runs below {runs}: {before.runs} of the current version, "
            f"{after.runs} of the canary"
        )
    difference = fault_difference(before, after)
    worse = difference is not None and difference[0] > 0.0
    notes = [f"from {source}", *unread]
    if not before.outcomes or not after.outcomes:
        notes.append("the versions are not compared: give --cases, or --runs with runs that called both")
    elif cases is not None:
        notes += [
            f"the {role} scored none of {figures.outcomes} cases"
            for role, figures in (("current version", before), ("canary", after))
            if not figures.scores
        ]
    elif not before.scores or not after.scores:
        notes.append("no scores are recorded: runs record them under `keep`")
    if difference is not None:
        low, high = difference
        notes.append(f"faults of the canary less those of the current version: {low:+.1%} to {high:+.1%} (95 %)")
    compared = _comparison((("current", current, before), ("canary", canary, after)))
    refused = worse and not force
    if output == "table" or refused:
        print_report(Report("promote", function, (compared,), tuple(notes)), output)
    if refused:
        raise FaultRateExceeded(
            f"the canary of {function} is not promoted: it has more faults than the current version",
            remedy=f"rollart rewards rollback {function}, or --force",
        )
    number = canary.provider_version
    if not yes and not confirmed(
        f"make version {number} of {function} the only current one?", f"the canary of {function} is not promoted"
    ):
        click.echo(f"version {number} of {function} stays a canary", err=True)
        return
    promoted = on_provider(provider, cluster, root, lambda target: _promote_compared(target, canary))
    if output == "table":
        show_deployed([promoted], output)
    else:
        released = deployed_table([promoted], people=output in FOR_PEOPLE)
        print_report(Report("promote", function, (compared, released), tuple(notes)), output)


async def _promote_compared(target: Deployer, compared: DeployedFunction) -> DeployedFunction:
    """Make the compared canary the only current version. UsageError if it is no longer the canary: minutes may have
    passed since it was compared."""
    function = compared.function
    canary = next((one for one in await target.versions(function) if CANARY in one.aliases), None)
    if canary is None or (canary.version, canary.provider_version) != (compared.version, compared.provider_version):
        now = "there is no canary" if canary is None else f"the canary is version {canary.provider_version}"
        raise UsageError(
            f"version {compared.provider_version} of {function} was compared, and now {now} (rule: only a compared "
            "version is promoted)",
            remedy=f"rollart rewards versions {function}, then promote it again",
        )
    # By its number, where `Deployer.promote` would take a canary that is deployed at this moment.
    return await target.rollback(function, compared.provider_version)


def _on_cases(
    versions: Sequence[DeployedFunction],
    cases: Path,
    provider: str,
    cluster: Path | None,
    root: Path,
    prices: PriceList,
) -> list[VersionFigures]:
    """The figures of each version, from calls on the provider."""
    name, functions = canonical_provider(provider), cluster_functions(cluster)

    async def main(target: Deployer) -> list[VersionFigures]:
        found = []
        for version in versions:
            meter = CallMeter()
            async with backend(name, functions, meter=meter) as calls:
                function, number = version.function, version.provider_version
                await attach_function(calls, target, f"{function}@{number}", draw=0.0)
                # Only Modal has GPUs; elsewhere the package is not read for this.
                gpu = (await target.package(function, number)).spec.gpu if name == "modal" else ""
                found.append(await measured_figures(version, calls, meter, chosen, prices, gpu=gpu))
        return found

    with translated_errors():
        chosen = read_cases(cases)
    return on_provider(provider, cluster, root, main)


@table("comparison", "Current version and canary")
def _comparison(rows: Sequence[tuple[str, DeployedFunction, VersionFigures]]) -> Iterator[Row]:
    kinds = fault_kinds(figures for _, _, figures in rows)
    for role, version, figures in rows:
        faults = {f"{kind}_faults": as_share(ratio(figures.faults[kind], figures.outcomes)) for kind in kinds}
        yield {
            "version": role,
            "number": version.provider_version,
            "digest": as_text(version.version, people=False),
            "weight": as_share(version.weight),
            "items": as_count(figures.outcomes),
            "score": as_number(figures.mean),
            **faults,
            "p50_ms": as_ms(None if figures.p50_s is None else figures.p50_s * 1e3),
            "usd_per_million": as_usd(figures.usd_per_million),
        }


def rollback(function: str, version: str, provider: str, cluster: Path | None, root: Path, output: str) -> None:
    show_deployed([on_provider(provider, cluster, root, lambda target: target.rollback(function, version))], output)


def _planned(
    packages: Sequence[Package], provider: str, cluster: Path | None, root: Path, canary: float
) -> list[DeploymentChange]:
    async def main(target: Deployer) -> list[DeploymentChange]:
        return [await target.plan(package, canary=canary) for package in packages]

    return on_provider(provider, cluster, root, main)


def _changes(planned: Sequence[DeploymentChange], packages: Sequence[Package], *, files: bool = True) -> Table:
    """A row per change; with `files` also one per changed file."""
    rows: list[Row] = []
    for change, package in zip(planned, packages, strict=True):
        lines = list(change.lines)
        if files and change.before is not None:
            for file in file_changes(change.before, package):
                added, removed = file.lines
                lines.append(f"{file.path}: {file.change}" + (f" (+{added} -{removed})" if file.diff else ""))
        unchanged = f"nothing: unchanged, version {package.version[:DIGEST]} is current"
        rows += [
            {"function": change.function, "provider": change.provider, "change": as_text(line, wrap=True)}
            for line in lines or (unchanged,)
        ]
    return Table.of("changes", "Would change", rows)


def _unread(planned: Sequence[DeploymentChange]) -> tuple[str, ...]:
    return tuple(f"{c.function}: its source cannot be compared: {c.problem}" for c in planned if c.problem)


def _coloured(line: str) -> str:
    if not colour() or line.startswith(("+++", "---")):
        return line
    return click.style(line, fg={"+": "green", "-": "red", "@": "cyan"}.get(line[:1]))


def _cases(source: str, cases: Path | None) -> list[RehearsalCase]:
    """The cases given, else those beside the source, else none."""
    beside = cases_beside(source)
    if cases is None and not beside.is_file():
        return []
    with translated_errors():
        return read_cases(cases or beside)


def _costs(
    planned: Sequence[DeploymentChange],
    packages: Sequence[Package],
    provider: str,
    cluster: Path | None,
    cases: Sequence[RehearsalCase],
) -> tuple[list[Row], tuple[str, ...]]:
    """The cost of each changed function before and after, from its cases run on this machine, and notes."""
    changed = [(c.before, package) for c, package in zip(planned, packages, strict=True) if c.lines]
    if not changed:
        return [], ()
    if not cases:
        return [], ("no cost: give --cases, or a cases.jsonl beside the file",)
    prices = PriceList(prices=effective_prices(cluster))
    rows, notes = list[Row](), ["costs are of warm calls, measured on this machine with the cases"]
    for before, after in changed:
        try:
            old, new = (_measured(package, provider, prices, cases) for package in (before, after))
        except RollartError as error:
            notes.append(f"{after.spec.name}: no cost: {error.message}")
            continue
        for name, now in new.items():
            was = old.get(name)
            rows.append(
                {
                    "function": after.spec.name,
                    "provider": name,
                    "before": as_usd(was),
                    "after": as_usd(now),
                    "change": as_usd(None if was is None or now is None else now - was),
                }
            )
    return rows, tuple(notes)


def _measured(
    package: Package | None, provider: str, prices: PriceList, cases: Sequence[RehearsalCase]
) -> dict[str, float | None]:
    """Dollars per million items at the provider (all of them for `local`), and of the tokens of each model that it
    asks; none without a package."""
    if package is None:
        return {}

    async def main() -> dict[str, float | None]:
        async with backend("local", ClusterFunctions()) as target:
            found = await rehearse(package, cases, backend=target, prices=units_by_provider(prices))
            costs = {c.provider: c.usd_batched for c in found.costs if provider in (c.provider, "local")}
            return costs | token_costs(found, prices)

    with translated_errors():
        return asyncio.run(main())
