"""The command that scores recorded rollouts again."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from pathlib import Path

import click

from rollart.cli.context import RESOLVED, cluster_functions, find_run, print_report
from rollart.cli.rewards.operate import names_deployed
from rollart.errors import RunFailed, UsageError
from rollart.launch.functions import canonical_provider, deployer, one_package, translated_errors
from rollart.ledger.reader import LedgerReader
from rollart.report.offload import SERVED
from rollart.report.rescore import Rescoring, rescore_report
from rollart.settings.cluster import ClusterFunctions
from rollart.settings.load import saved_specs
from rollart.tools.rescore import draw, index_kept, old_function, read_chosen
from rollart.tools.rescore import rescore as rescore_items
from serverless.deploy.package import Package
from serverless.providers.base import find_version, split_reference


def rescore(
    run: str,
    source: str,
    times: int,
    function: str | None,
    sample: int | None,
    tolerance: float,
    threshold: float | None,
    provider: str,
    cluster: Path | None,
    root: Path,
    allow_unsafe: bool,
    runs_dir: Path,
    output: str,
) -> None:
    directory = find_run(run, runs_dir)
    name = canonical_provider(provider)
    specs, saved, prices, _ = saved_specs(directory / RESOLVED, {})
    functions = saved.functions if cluster is None else cluster_functions(cluster)
    if allow_unsafe:
        functions = functions.model_copy(update={"allow_unsafe": True})
    package = _package(source, name, functions, root)
    with LedgerReader(directory) as reader:
        index = index_kept(reader)
        if not index:
            called = any(call.cause in SERVED and call.status == "ok" for call in reader.invocation_sums())
            if not called and specs.keep.items != "none":
                raise UsageError(
                    f"no reward function has scored a trajectory of run '{directory.name}' yet",
                    remedy=f"rollart launch --resume {directory}",
                )
            raise UsageError(
                f"run '{directory.name}' has no kept items to score again (its `keep` is '{specs.keep.items}')",
                remedy="launch the run with keep=all",
            )
        old = old_function(index, function, package.spec.name)
        scored = [item for item in index if old in item.functions]
        chosen = read_chosen(reader, draw(scored, sample))
    click.echo(f"{len(chosen):,} items × {times} with {package.spec.name} on {name}", err=True)
    limit = package.spec.timeout_s + package.spec.init_timeout_s
    items, bills, seconds = asyncio.run(
        rescore_items(
            package,
            chosen,
            old,
            times=times,
            provider=name,
            functions=functions,
            deadline_s=max(specs.leases.reward_s, 3.0 * limit),
        )
    )
    found = Rescoring(
        run=directory.resolve().name,
        old=old,
        new=package.spec.name,
        version=package.version,
        provider=name,
        items=tuple(items),
        available=len(scored),
        calls=tuple(bills.calls),
        tokens=tuple(bills.bills),
        seconds=seconds,
        prices=prices,
        tolerance=tolerance,
        threshold=threshold,
        gpu=package.spec.gpu,
    )
    print_report(rescore_report(found), output)
    if not any(one.scores for one in items):
        raise RunFailed(
            f"{package.spec.name} scored none of {len(items):,} items", remedy="see the table of faults, and try `test`"
        )


def _package(source: str, provider: str, functions: ClusterFunctions, root: Path) -> Package:
    """The reward to compare, from its file or as it was deployed; its workers start when it is called."""
    if names_deployed(source):
        found = asyncio.run(_deployed(source, provider, functions, root))
    else:
        found = one_package(source)
    return replace(found, spec=found.spec.model_copy(update={"warm": 0}))


async def _deployed(reference: str, provider: str, functions: ClusterFunctions, root: Path) -> Package:
    function, wanted = split_reference(reference)
    with translated_errors():
        async with deployer(provider, functions, root=root) as control:
            draw = secrets.SystemRandom().random()
            chosen = find_version(function, await control.versions(function), wanted, draw=draw)
            return await control.package(function, chosen.provider_version)
