"""`rollart rewards`: write, test, deploy and operate reward functions. First the commands, then their output for people
and for machines."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from rollart.cli.context import FOR_PEOPLE, cluster_functions, print_report
from rollart.errors import RunFailed, UsageError
from rollart.launch.functions import (
    DeploymentTrial,
    TrialMeter,
    attach_function,
    backend,
    canonical_provider,
    deployer,
    packages_in,
    translated_errors,
    units_by_provider,
)
from rollart.report.tables import Report, Row, Table, as_count, as_number, as_seconds, as_text, as_usd, table
from rollart.settings.cluster import ClusterFunctions
from rollart.settings.prices import PriceList
from rollart.tools.prices import effective_prices
from serverless.deploy import template
from serverless.meter import MeterSink
from serverless.providers.base import DeployedFunction, Deployer
from serverless.rehearse import Rehearsal, read_cases, rehearse
from serverless.types import InfraFault, ModelFault, Scored

T = TypeVar("T")

DIGEST = 12
"""Characters of a version for people: `rollback --to` takes any unambiguous prefix."""


def init(directory: Path, name: str | None, as_json: bool) -> None:
    with translated_errors():
        written = template.write(directory, name or directory.resolve().name.replace("-", "_"))
    if as_json:
        click.echo(json.dumps({"schema_version": 1, "files": [str(path) for path in written]}))
    else:
        for path in written:
            click.echo(str(path))
    source = next(p for p in written if p.suffix == ".py")
    click.echo(f"try it: rollart rewards test {source}", err=True)


def test(source: str, cases: Path | None, allow_unsafe: bool, output: str) -> None:
    found = _rehearsed(source, cases, allow_unsafe=allow_unsafe)
    show_rehearsals(found, output)
    wrong = sum(bool(result.problem) for one in found for result in one.results)
    if wrong:
        raise RunFailed(f"{wrong} of {sum(len(one.results) for one in found)} cases are not as expected")


def deploy(
    source: str, provider: str, cluster: Path | None, root: Path, dry_run: bool, name: str | None, output: str
) -> None:
    packages = packages_in(source, name=name)
    notes = [f"{one.spec.name}: {warning}" for one in packages for warning in one.warnings]
    trials = TrialMeter(PriceList(prices=effective_prices(cluster)))
    done: list[Any] = []

    async def main(target: Deployer) -> None:
        for package in packages:
            done.append(await (target.plan(package) if dry_run else target.deploy(package)))

    try:
        _with(provider, cluster, root, main, meter=trials)
    finally:  # also show what was deployed and billed before another deployment failed
        if dry_run and done:
            rows = [
                {"function": c.function, "provider": c.provider, "change": line}
                for c in done
                for line in c.lines or ("nothing: this version is current",)
            ]
            changes = Table.of("changes", "Would change", rows)
            print_report(Report("deploy", "functions", (changes,), tuple(notes)), output)
        elif done:
            show_deployed(done, output, notes, trials.bills)
        else:
            for bill in trials.bills:
                click.echo(f"{bill.call.function}: {trial_line(bill)}", err=True)


def list_(provider: str, cluster: Path | None, root: Path, output: str) -> None:
    show_deployed(list(_with(provider, cluster, root, lambda target: target.functions())), output)


def versions(function: str, provider: str, cluster: Path | None, root: Path, output: str) -> None:
    show_deployed(list(_with(provider, cluster, root, lambda target: target.versions(function))), output)


def invoke(
    source: str, item: str | None, provider: str, cluster: Path | None, root: Path, seconds: float, as_json: bool
) -> None:
    event = call_event(sys.stdin.read() if item is None else item)
    name, functions = canonical_provider(provider), cluster_functions(cluster)
    path, package, function = Path(source), None, source
    if not re.fullmatch(r"[A-Za-z][\w-]*", source) or path.is_file() or (path / "__init__.py").exists():
        packages = packages_in(source)
        if len(packages) != 1:
            raise UsageError(f"{source} has {len(packages)} rewards", remedy=f"name one: {source}:NAME")
        spec = packages[0].spec.model_copy(update={"warm": 0})  # it is called once
        package, function = replace(packages[0], spec=spec), spec.name

    async def main() -> Any:
        async with backend(name, functions, root=root) as target:
            if package is None:
                await attach_function(target, name, function, root=root)
            else:
                await target.deploy(package)
            return await target.invoke(function, event, deadline_s=seconds)

    with translated_errors():
        reply = asyncio.run(main())
    if reply.fault is not None:
        if as_json:
            bill = reply.invocation and asdict(reply.invocation)
            shown = {"schema_version": 1, "answer": None, "fault": asdict(reply.fault), "bill": bill}
            click.echo(json.dumps(shown, indent=2, ensure_ascii=False))
        raise RunFailed(f"{function} on {name}: {reply.fault.kind}: {reply.fault.detail}")
    bill = reply.invocation
    shown = {"schema_version": 1, "answer": reply.body, "bill": bill and asdict(bill)} if as_json else reply.body
    click.echo(json.dumps(shown, indent=2, ensure_ascii=False))
    if bill is not None and not as_json:
        cold = f", cold start {bill.cold_start_s:.3f} s" if bill.cold_start_s else ""
        click.echo(f"billed {bill.billed_s:.3f} s at {bill.memory_mb} MB{cold}", err=True)
    answers = reply.body if isinstance(reply.body, list) else []
    failed = [one for one in answers if isinstance(one, dict) and "error" in one]
    if failed:
        raise RunFailed(f"{len(failed)} of {len(event)} items failed")


def logs(
    function: str, provider: str, cluster: Path | None, root: Path, since_s: float, limit: int, output: str
) -> None:
    lines = _with(provider, cluster, root, lambda target: target.logs(function, since_s=since_s, limit=limit + 1))
    if len(lines) > limit:
        click.echo(f"{function}: the last {limit:,} lines, there are more (--limit)", err=True)
    rows = [{"t": line.t, "source": line.source, "text": line.text} for line in lines[-limit:]]
    if output == "json":
        click.echo(json.dumps({"schema_version": 1, "lines": rows}, indent=2, ensure_ascii=False))
    elif output in ("csv", "html"):
        print_report(Report("logs", function, (Table.of("lines", "Lines", rows),)), output)
    else:
        for row in rows:
            click.echo(" ".join(filter(None, row.values())))


def scale(
    function: str,
    provider: str,
    cluster: Path | None,
    root: Path,
    warm: int | None,
    concurrency: int | None,
    output: str,
) -> None:
    if warm is None and concurrency is None:
        raise UsageError("nothing to scale", remedy="give --warm, --concurrency or both")
    scaled = _with(provider, cluster, root, lambda target: target.scale(function, warm=warm, concurrency=concurrency))
    show_deployed([scaled], output)


def rollback(function: str, version: str, provider: str, cluster: Path | None, root: Path, output: str) -> None:
    show_deployed([_with(provider, cluster, root, lambda target: target.rollback(function, version))], output)


def delete(function: str, provider: str, cluster: Path | None, root: Path, yes: bool, as_json: bool) -> None:
    canonical_provider(provider)  # before the user is asked
    if not yes:
        try:
            if not click.confirm(f"delete '{function}' and all its versions on {provider}?", err=True):
                click.echo(f"{function} stays", err=True)
                return
        except click.Abort as stop:
            if isinstance(stop.__context__, EOFError):  # no input, as distinct from an interrupt at the question
                click.echo(err=True)
                raise UsageError(f"'{function}' is not deleted: nobody answers", remedy="give --yes") from None
            raise

    _with(provider, cluster, root, lambda target: target.delete(function))
    if as_json:
        click.echo(json.dumps({"schema_version": 1, "deleted": function, "provider": canonical_provider(provider)}))
    click.echo(f"{function} is deleted on {provider}", err=True)


def plan(source: str, cases: Path | None, items: int, runs_per_month: float, before: str | None, output: str) -> None:
    now = None if before is None else canonical_provider(before)
    found = _rehearsed(source, cases)
    costs = _costs(found, items, runs_per_month, now)
    notes = [
        f"{items:,} items a run in full batches, {runs_per_month:g} runs a month, warm calls measured on this machine"
    ]
    notes += [
        f"{name}: with one idle window of one container a run; each further container and pause adds one"
        for name in sorted({c.provider for one in found for c in one.costs if c.usd_idle})
    ]
    print_report(Report("plan", "rewards", (costs,), tuple(notes)), output)


@table("plan", "Cost by provider")
def _costs(found: Sequence[Rehearsal], items: int, runs_per_month: float, now: str | None) -> Iterator[Row]:
    for one in found:
        per_run = {
            c.provider: None if c.usd_batched is None else c.usd_batched * items / 1e6 + c.usd_idle for c in one.costs
        }
        base = None if now is None else per_run.get(now)
        for c in one.costs:
            run = per_run[c.provider]
            yield {
                "function": one.function,
                "provider": c.provider,
                "usd_per_million": as_usd(c.usd_batched),
                "usd_per_run": as_usd(run),
                "usd_per_month": as_usd(None if run is None else run * runs_per_month),
                "month_against_now": as_usd(None if base is None or run is None else (run - base) * runs_per_month),
                "note": c.note,
            }


def _rehearsed(source: str, cases: Path | None, *, allow_unsafe: bool = False) -> list[Rehearsal]:
    """Every reward of FILE run on the cases, those beside it if none are given."""
    packages = packages_in(source)
    path = cases or Path(source.partition(":")[0]).with_name("cases.jsonl")
    with translated_errors():
        items = read_cases(path)

        async def all_of_them() -> list[Rehearsal]:
            prices = units_by_provider()
            async with backend("local", ClusterFunctions(allow_unsafe=allow_unsafe)) as target:
                return [await rehearse(package, items, backend=target, prices=prices) for package in packages]

        return asyncio.run(all_of_them())


def _with(
    provider: str,
    cluster: Path | None,
    root: Path,
    do: Callable[[Deployer], Awaitable[T]],
    *,
    meter: MeterSink | None = None,
) -> T:
    """Call `do` with the provider's control plane, which is closed afterwards."""
    name, functions = canonical_provider(provider), cluster_functions(cluster)

    async def main() -> T:
        async with deployer(name, functions, root=root, meter=meter) as target:
            return await do(target)

    with translated_errors():
        return asyncio.run(main())


_ITEM = ("id", "messages", "prompt", "completion", "reference_answer", "metadata")


def call_event(text: str) -> list[dict[str, Any]]:
    """The event of a call with the items in a JSON text. UsageError for anything but items."""
    if not text.strip():
        raise UsageError("no item", remedy="give --item, or JSON on standard input")
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"the item is not JSON: {error}", remedy='give {"id": …, "messages": […]}') from None
    event = given if isinstance(given, list) else [given]
    for n, one in enumerate(event):
        if not isinstance(one, dict):
            raise UsageError(f"item {n} is not an object", remedy='give {"id": …, "messages": […]}')
        unknown = sorted(one.keys() - _ITEM)
        if unknown or ("messages" in one) == ("completion" in one):
            problem = f"unknown key '{unknown[0]}'" if unknown else "it has both or neither of messages and completion"
            raise UsageError(
                f"item {n}: {problem} (rule: {', '.join(_ITEM)})", remedy='give {"id": …, "messages": […]}'
            )
        if "completion" in one:  # the short form of cases.jsonl
            asked = [{"role": "user", "content": one.pop("prompt")}] if "prompt" in one else []
            one["messages"] = [*asked, {"role": "assistant", "content": one.pop("completion")}]
        one.setdefault("id", str(n))
        one.setdefault("reference_answer", None)
        one.setdefault("metadata", {})
    return event


def show_rehearsals(found: Sequence[Rehearsal], output: str) -> None:
    """Scores, times and costs of tested rewards."""
    if output == "json":
        click.echo(json.dumps({"schema_version": 1, "rewards": [one.to_json() for one in found]}, indent=2))
        return
    for one in found:
        cases: list[Row] = [
            {
                "case": r.case.item.id,
                "result": r.problem or "ok",
                "outcome": _outcome(r.outcome),
                "ms": as_number(r.seconds * 1e3),
            }
            for r in one.results
        ]
        facts = (
            ("one item", "ms", one.single_s * 1e3),
            (f"an item in a call of {one.batch}", "ms", one.batched_item_s and one.batched_item_s * 1e3),
            ("cold start", "ms", one.cold_start_s * 1e3),
            ("memory used", "MB", one.memory_mb),
            ("memory limit", "MB", one.memory_limit_mb),
        )
        costs: list[Row] = [
            {
                "provider": c.provider,
                "one_by_one": as_usd(c.usd_single),
                "in_batches": as_usd(c.usd_batched),
                "note": c.note,
            }
            for c in one.costs
        ]
        tables = (
            Table.of("cases", "Cases", cases),
            Table.of("measured", "Measured here", ({"what": w, "unit": u, "value": as_number(v)} for w, u, v in facts)),
            Table.of("costs", "US dollars per million items", costs),
        )
        notes = (*one.warnings, f"version {one.version[:DIGEST]}")
        print_report(Report("test", one.function, tables, notes), output)


def _outcome(outcome: object) -> str:
    match outcome:
        case Scored():
            return f"{outcome.value:g}"
        case ModelFault():
            return f"{outcome.floor:g} (model fault: {outcome.reason})"
        case InfraFault():
            return f"fault: {outcome.kind}"
        case _:
            return str(outcome)


def show_deployed(
    found: Sequence[DeployedFunction], output: str, notes: Sequence[str] = (), trials: Sequence[DeploymentTrial] = ()
) -> None:
    """Functions or versions. `notes` go to the foot; `trials` are the trial calls made while deploying them."""
    people = output in FOR_PEOPLE
    notes = [*notes]
    for d in found:
        if d.problem:
            scale = f"is current, but its scale could not be read: {d.problem}"
            notes.append(f"{d.function}: version {d.version[:DIGEST]} {scale}")
        elif d.unchanged:
            notes.append(f"{d.function}: unchanged: version {d.version[:DIGEST]} was current already")
    rows: list[Row] = [
        {
            "function": d.function,
            "provider": d.provider,
            "version": d.version[:DIGEST] if people else d.version,
            "number": d.provider_version,
            "current": "yes" if d.current else "",
            "created": d.created[:19] if people else d.created,
            "MB": as_count(d.memory_mb),
            "warm": as_count(d.warm),
            "most": as_count(d.concurrency),
            "endpoint": as_text(d.endpoint, people=False),
        }
        for d in found
    ]
    tables = [Table.of("functions", "Functions", rows)]
    if people:
        notes += [f"{t.call.function}: {trial_line(t)}" for t in trials]
    elif trials:
        calls: list[Row] = [
            {
                "function": t.call.function,
                "provider": t.call.provider,
                "status": t.call.status,
                "billed_s": as_seconds(t.call.billed_s),
                "MB": as_count(t.call.memory_mb),
                "usd": as_usd(t.usd),
            }
            for t in trials
        ]
        tables.append(Table.of("trials", "Trial calls", calls))
    print_report(Report("rewards", "functions", tuple(tables), tuple(notes)), output)


def trial_line(trial: DeploymentTrial) -> str:
    failed = "" if trial.call.status == "ok" else f" ({trial.call.status})"
    usd = f"${trial.usd:.7f}" if trial.billed else f"no bill here, ${trial.usd:.7f} elsewhere"
    return f"trial{failed} of {trial.call.billed_s:.3g} s at {trial.call.memory_mb} MB: {usd}"
