"""The commands that call, watch and scale deployed rewards."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from rollart.cli.completion import DIGEST, remember
from rollart.cli.context import FOR_PEOPLE, cluster_functions, print_report
from rollart.errors import RunFailed, UsageError
from rollart.launch.functions import (
    REFERENCE,
    DeploymentTrial,
    attach_function,
    backend,
    canonical_provider,
    deployer,
    is_deployable,
    one_package,
    translated_errors,
)
from rollart.money import unit_price
from rollart.report.tables import Report, Row, Table, as_count, as_seconds, as_share, as_text, as_usd, table
from serverless import wire
from serverless.meter import MeterSink
from serverless.providers.base import DeployedFunction, Deployer, LogLine, Reply, split_reference
from serverless.types import InfraFault

T = TypeVar("T")


def list_(provider: str, cluster: Path | None, root: Path, output: str) -> None:
    found = list(on_provider(provider, cluster, root, lambda target: target.functions()))
    _remember(root, provider, found, everything=True)
    show_deployed(found, output)


def versions(function: str, provider: str, cluster: Path | None, root: Path, output: str) -> None:
    found = list(on_provider(provider, cluster, root, lambda target: target.versions(function)))
    _remember(root, provider, found, everything=False)
    show_deployed(found, output)


def _remember(root: Path, provider: str, found: Sequence[DeployedFunction], *, everything: bool) -> None:
    """Keep names for completion; those of this machine are read where they are."""
    if (name := canonical_provider(provider)) != "local":
        remember(root, name, found, everything=everything)


def invoke(
    source: str, item: str | None, provider: str, cluster: Path | None, root: Path, seconds: float, output: str
) -> None:
    as_json = output == "json"
    event = call_event(sys.stdin.read() if item is None else item)
    name, functions = canonical_provider(provider), cluster_functions(cluster)
    package, function = None, split_reference(source)[0]
    if not names_deployed(source):
        found = one_package(source)
        spec = found.spec.model_copy(update={"warm": 0})  # it is called once
        package, function = replace(found, spec=spec), spec.name

    async def main() -> tuple[Reply, DeployedFunction | None]:
        async with backend(name, functions, root=root) as target:
            chosen = None
            if package is not None:
                await target.deploy(package)
            elif not is_deployable(name):
                raise UsageError(f"'{function}' cannot be called by its name on '{name}'", remedy="give its file")
            else:
                async with deployer(name, functions, root=root) as control:
                    chosen = await attach_function(target, control, source, draw=secrets.SystemRandom().random())
            return await target.invoke(function, event, deadline_s=seconds), chosen

    with translated_errors():
        reply, chosen = asyncio.run(main())
    version = {} if chosen is None else {"version": chosen.version, "number": chosen.provider_version}
    if reply.fault is not None:
        if as_json:
            charged = reply.invocation and asdict(reply.invocation)
            failure = {"schema_version": 1, "answer": None, "fault": asdict(reply.fault), "bill": charged, **version}
            click.echo(json.dumps(failure, indent=2, ensure_ascii=False))
        raise RunFailed(f"{function} on {name}: {reply.fault.kind}: {reply.fault.detail}")
    bill, body = reply.invocation, _without_nan(reply.body)
    called = {"schema_version": 1, "answer": body, "bill": bill and asdict(bill), **version}
    click.echo(json.dumps(called if as_json else body, indent=2, ensure_ascii=False))
    if bill is not None and not as_json:
        cold = f", cold start {bill.cold_start_s:.3f} s" if bill.cold_start_s else ""
        by = "" if chosen is None else f", by version {chosen.provider_version} ({chosen.version[:DIGEST]})"
        click.echo(f"billed {bill.billed_s:.3f} s at {bill.memory_mb} MB{cold}{by}", err=True)
    outcomes = zip(event, wire.outcomes(reply.body, event, deterministic=True), strict=True)
    failed = [(item["id"], outcome) for item, outcome in outcomes if isinstance(outcome, InfraFault)]
    if failed:
        key, first = failed[0]
        raise RunFailed(f"{len(failed)} of {len(event)} items failed: {key}: {first.kind}: {_printable(first.detail)}")


def _without_nan(body: object) -> Any:
    """The answer of a call with null in place of NaN and infinities, which JSON does not have."""
    return json.loads(json.dumps(body), parse_constant=lambda _: None)


def names_deployed(source: str) -> bool:
    """True for the name of a deployed function, with a version or without, as distinct from a file or a package.
    UsageError for NAME@."""
    path = Path(source)
    if path.is_file() or (path / "__init__.py").exists():
        return False
    function, at, version = source.partition("@")
    if at and not version and re.fullmatch(REFERENCE, function) is not None:
        raise UsageError(f"'{source}' has no version (rule: NAME or NAME@VERSION)", remedy="give a version after @")
    return re.fullmatch(REFERENCE, source) is not None


def logs(
    function: str,
    provider: str,
    cluster: Path | None,
    root: Path,
    since_s: float,
    limit: int,
    run: str,
    trajectory: str,
    follow: bool,
    output: str,
) -> None:
    def wanted(line: LogLine) -> bool:
        return line.run.startswith(run) and (not trajectory or trajectory in line.items)

    if follow:
        if output not in ("table", "json"):
            raise UsageError(f"-f with -o {output} (rule: table, or json: an object a line)", remedy="drop one")

        async def print_new(target: Deployer) -> None:
            async for line in target.follow(function, since_s=since_s):
                if wanted(line):
                    row = _log_row(line)
                    click.echo(json.dumps({"schema_version": 1, **row}) if output == "json" else _log_text(row))

        on_provider(provider, cluster, root, print_new)
        return
    most = sys.maxsize if run or trajectory else limit + 1
    found = on_provider(provider, cluster, root, lambda target: target.logs(function, since_s=since_s, limit=most))
    lines = [line for line in found if wanted(line)]
    if len(lines) > limit:
        click.echo(f"{function}: the last {limit:,} lines, there are more (--limit)", err=True)
    if not lines and output == "table":
        chosen = " of these calls" if run or trajectory else ""
        click.echo(f"{function}: no output{chosen} in the last {since_s:g} s (--since)", err=True)
    rows = [_log_row(line) for line in lines[-limit:]]
    if output == "json":
        click.echo(json.dumps({"schema_version": 1, "lines": rows}, indent=2, ensure_ascii=False))
    elif output in ("csv", "html"):
        print_report(Report("logs", function, (Table.of("lines", "Lines", rows),)), output)
    else:
        for row in rows:
            click.echo(_log_text(row))


def _log_row(line: LogLine) -> dict[str, str]:
    """`trajectory` names all items of a call that scored several together."""
    return {
        "t": line.t,
        "source": line.source,
        "run": line.run,
        "trajectory": ",".join(line.items),
        "text": line.text,
    }


def _log_text(row: dict[str, str]) -> str:
    """A line for a terminal. Control characters are escaped: a reward prints whatever the policy wrote."""
    first, *others = row["trajectory"].split(",")
    trajectory = f"{first} and {len(others)} more" if others else first
    shown = " ".join(filter(None, (row["t"], row["source"], row["run"], trajectory, row["text"])))
    return _printable(shown)


def _printable(text: str) -> str:
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")
"""C0 and C1 control characters but the tab."""


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
    scaled = on_provider(
        provider, cluster, root, lambda target: target.scale(function, warm=warm, concurrency=concurrency)
    )
    show_deployed([scaled], output)


def delete(function: str, provider: str, cluster: Path | None, root: Path, yes: bool, output: str) -> None:
    canonical_provider(provider)  # before the user is asked
    if not yes and not confirmed(
        f"delete '{function}' and all its versions on {provider}?", f"'{function}' is not deleted"
    ):
        click.echo(f"{function} stays", err=True)
        return
    on_provider(provider, cluster, root, lambda target: target.delete(function))
    if output == "json":
        click.echo(json.dumps({"schema_version": 1, "deleted": function, "provider": canonical_provider(provider)}))
    click.echo(f"{function} is deleted on {provider}", err=True)


def confirmed(question: str, otherwise: str) -> bool:
    """Ask the user. UsageError, which begins with `otherwise`, where there is no input."""
    try:
        return click.confirm(question, err=True)
    except click.Abort as stop:
        if isinstance(stop.__context__, EOFError):  # no input, as distinct from an interrupt at the question
            click.echo(err=True)
            raise UsageError(f"{otherwise}: nobody answers", remedy="give --yes") from None
        raise


def on_provider(
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


_TEXT, _LIST, _OBJECT, _TEXT_OR_NULL = "text", "a list", "an object", "text or null"
_ITEM = {
    "id": _TEXT,
    "messages": _LIST,
    "prompt": _TEXT_OR_NULL,
    "completion": _TEXT,
    "reference_answer": _TEXT_OR_NULL,
    "metadata": _OBJECT,
}
"""The keys of an item with their types, as `serverless.rehearse.read_cases` takes them."""
_TYPES = {_TEXT: str, _LIST: list, _OBJECT: dict, _TEXT_OR_NULL: str | None}
_EXAMPLE = 'give {"id": …, "messages": […]}'


def call_event(text: str) -> list[dict[str, Any]]:
    """The event of a call with the items in a JSON text. UsageError for anything but items."""
    if not text.strip():
        raise UsageError("no item", remedy="give --item, or JSON on standard input")
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"the item is not JSON: {error}", remedy=_EXAMPLE) from None
    event = given if isinstance(given, list) else [given]
    if not event:
        raise UsageError("no item in the list", remedy=_EXAMPLE)
    positions: dict[str, int] = {}
    for n, one in enumerate(event):
        if not isinstance(one, dict):
            raise UsageError(f"item {n} is not an object", remedy=_EXAMPLE)
        if problem := _item_problem(one):
            raise UsageError(f"item {n}: {problem}", remedy=_EXAMPLE)
        if "completion" in one:  # the short form of cases.jsonl
            asked = [] if one.get("prompt") is None else [{"role": "user", "content": one["prompt"]}]
            one["messages"] = [*asked, {"role": "assistant", "content": one.pop("completion")}]
        one.pop("prompt", None)
        key = one["id"] = one.get("id") or str(n)
        if positions.setdefault(key, n) != n:
            raise UsageError(
                f"items {positions[key]} and {n} have the id '{key}' (rule: each id of a call is of one item)",
                remedy="give each item its own id",
            )
        one.setdefault("reference_answer", None)
        one.setdefault("metadata", {})
    return event


def _item_problem(item: dict[str, Any]) -> str:
    """What is wrong with an item, '' for a valid one."""
    if unknown := sorted(item.keys() - _ITEM.keys()):
        return f"unknown key '{unknown[0]}' (rule: {', '.join(_ITEM)})"
    if ("messages" in item) == ("completion" in item):
        return f"it has both or neither of messages and completion (rule: {', '.join(_ITEM)})"
    for key, kind in _ITEM.items():
        if key in item and not isinstance(item[key], _TYPES[kind]):
            return f"{key} is {json.dumps(item[key], ensure_ascii=False):.60} (rule: {kind})"
    if item.get("messages") == []:
        return "messages is empty (rule: at least one message)"
    for n, message in enumerate(item.get("messages", ())):
        if not isinstance(message, dict) or not all(isinstance(value, str) for value in message.values()):
            return f"messages.{n} is {json.dumps(message, ensure_ascii=False):.60} (rule: an object of texts)"
    return ""


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
            was = "current" if d.current else f"a canary with {d.weight:.4g} of the calls"
            notes.append(f"{d.function}: unchanged: version {d.version[:DIGEST]} was {was} already")
    tables = [deployed_table(found, people=people)]
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


@table("functions", "Functions")
def deployed_table(found: Sequence[DeployedFunction], *, people: bool) -> Iterator[Row]:
    for d in found:
        yield {
            "function": d.function,
            "provider": d.provider,
            "version": d.version[:DIGEST] if people else d.version,
            "number": d.provider_version,
            "current": "yes" if d.current else "",
            "weight": as_share(None if people and not d.weight else d.weight),
            "created": d.created[:19] if people else d.created,
            "MB": as_count(d.memory_mb),
            "warm": as_count(d.warm),
            "most": as_count(d.concurrency or None),  # 0: no limit of its own, or not known
            "endpoint": as_text(d.endpoint, people=False),
        }


def trial_line(trial: DeploymentTrial) -> str:
    failed = "" if trial.call.status == "ok" else f" ({trial.call.status})"
    usd = unit_price(trial.usd) if trial.billed else f"no bill here, {unit_price(trial.usd)} elsewhere"
    return f"trial{failed} of {trial.call.billed_s:.3g} s at {trial.call.memory_mb} MB: {usd}"
