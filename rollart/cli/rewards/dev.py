"""`rollart rewards dev`: the cases of a file's rewards, run again in warm workers at each save."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from rollart.cli.completion import DIGEST
from rollart.cli.process import INTERRUPTED
from rollart.cli.rewards.develop import outcome_text
from rollart.errors import RollartError, UsageError
from rollart.launch.functions import backend, cases_beside, packages_in, translated_errors, units_by_provider
from rollart.lifeline import stop_event
from rollart.money import dollars
from rollart.settings.cluster import ClusterFunctions
from serverless.analysis.sources import collect
from serverless.declare import declarations
from serverless.deploy.dockerfile import IMAGE
from serverless.deploy.package import Package
from serverless.errors import ServerlessError
from serverless.providers.base import Backend
from serverless.providers.http_server import FunctionHttpServer
from serverless.rehearse import CaseResult, Rehearsal, read_cases, rehearse

POLL_S = 0.1
"""Seconds between two looks at the files: stat of a handful, on any file system."""


def dev(source: str, cases: Path | None, port: int | None, allow_unsafe: bool, output: str) -> None:
    if output not in ("table", "json"):
        raise UsageError(f"-o {output} (rule: table, or json: an object a line)", remedy="drop it")
    packages_in(source)  # a source that cannot be packed ends the command here; later it is a line
    path = cases or cases_beside(source)

    async def main() -> None:
        stopped = stop_event()
        async with contextlib.AsyncExitStack() as stack:
            target = await stack.enter_async_context(backend("local", ClusterFunctions(allow_unsafe=allow_unsafe)))
            if port is not None:
                await _serve(stack, target, port)
            group = await stack.enter_async_context(asyncio.TaskGroup())
            watching = group.create_task(_Rehearsing(source, path, target, output).run())
            await stopped.wait()
            watching.cancel()

    asyncio.run(main())
    raise click.exceptions.Exit(INTERRUPTED)


async def _serve(stack: contextlib.AsyncExitStack, target: Backend, port: int) -> None:
    front = FunctionHttpServer(target, port=port)
    try:
        await stack.enter_async_context(front)
    except OSError as error:
        raise UsageError(f"cannot listen on port {port}: {error.strerror}", remedy="choose another --port") from None
    click.echo(f"the version of the last save answers at {front.url}/functions/NAME", err=True)


class _Rehearsing:
    """Rehearses the rewards of `source` now and after each change of their files. A change during a rehearsal ends it
    and begins the next."""

    def __init__(self, source: str, cases: Path, target: Backend, output: str) -> None:
        self._source = source
        self._cases = cases
        self._target = target
        self._output = output
        self._prices = units_by_provider()
        self._files = {Path(source.partition(":")[0]), cases}
        self._stamped: dict[Path, tuple[int, int] | None] = {}  # of each file, when it was last looked at
        self._last: dict[str, Rehearsal] = {}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            rehearsal: asyncio.Task[None] | None = None
            while True:
                if rehearsal is None or _stamps(self._files) != self._stamped:
                    if rehearsal is not None:
                        await asyncio.sleep(POLL_S)  # an editor may write in steps
                        rehearsal.cancel()
                    self._stamped = _stamps(self._files)
                    rehearsal = group.create_task(self._rehearse())
                await asyncio.sleep(POLL_S)

    def _watch(self, files: set[Path], *, read_after_ns: int) -> None:
        """Watch files that were read since `read_after_ns`. One that was written since may have been read before."""
        self._files |= files
        for path, stamp in _stamps(files).items():
            self._stamped[path] = None if stamp is not None and stamp[0] > read_after_ns else stamp

    async def _rehearse(self) -> None:
        began_ns = time.time_ns()
        try:
            with translated_errors():
                packages = packages_in(self._source)
                self._watch(set(_packed_files(self._source, packages)) - self._files, read_after_ns=began_ns)
                items = read_cases(self._cases)
                found = [await rehearse(one, items, backend=self._target, prices=self._prices) for one in packages]
        except RollartError as error:
            remedy = f" ({error.remedy})" if error.remedy else ""
            text = " ".join(f"{error.message}{remedy}".split())
            click.echo(json.dumps({"schema_version": 1, "error": text}) if self._output == "json" else text)
            return
        if self._output == "json":
            rewards = [{**one.to_json(), "changes": self._changes(one)} for one in found]
            click.echo(json.dumps({"schema_version": 1, "rewards": rewards}))
        else:
            for one in found:
                for line in _lines(one, self._last.get(one.function), self._changes(one)):
                    click.echo(line)
        self._last |= {one.function: one for one in found}

    def _changes(self, one: Rehearsal) -> list[dict[str, str]]:
        """The cases whose result is another one than in the last rehearsal, or in the first one those that fail."""
        last = self._last.get(one.function)
        before = {result.case.item.id: result for result in last.results} if last is not None else {}
        found = []
        for result in one.results:
            change = _change(result, before.get(result.case.item.id))
            if change:
                found.append({"case": result.case.item.id, "change": change, "result": _result(result)})
        return found


def _stamps(files: Iterable[Path]) -> dict[Path, tuple[int, int] | None]:
    """The time of change, in ns, and the size of each file, None for a missing one."""
    found: dict[Path, tuple[int, int] | None] = {}
    for path in files:
        found[path] = None
        with contextlib.suppress(OSError):
            status = path.stat()
            found[path] = status.st_mtime_ns, status.st_size
    return found


def _change(now: CaseResult, before: CaseResult | None) -> str:
    if before is None or bool(now.problem) != bool(before.problem):
        return "fails" if now.problem else "passes" if before is not None else ""
    return f"was {_result(before)}" if _result(now) != _result(before) else ""


def _result(result: CaseResult) -> str:
    return result.problem or outcome_text(result.outcome)


def _packed_files(source: str, packages: list[Package]) -> Iterator[Path]:
    """The files that packages were made of: sources, files of requirements, Dockerfiles with what they copy, and
    artefacts."""
    with contextlib.suppress(ServerlessError):
        found = collect(source, Path())
        yield from found.files.values()
        declared = declarations(found.entry.read_text(encoding="utf-8"), filename=str(found.entry))
        for requirement in (text for settings in declared.values() for text in settings.get("requirements", ())):
            name = requirement.removeprefix("-r ").strip()
            if name != requirement or name.endswith(".txt"):
                yield found.entry.parent / name
    for package in packages:
        if package.spec.image is not None and package.spec.image.dockerfile:
            dockerfile, context = Path(package.spec.image.dockerfile), f"{IMAGE}context/"
            yield dockerfile
            copied = (path.removeprefix(context) for path in package.files if path.startswith(context))
            yield from (dockerfile.parent / path for path in copied)
        for artefact in map(Path, package.spec.artefacts):
            yield from (one for one in artefact.rglob("*") if one.is_file()) if artefact.is_dir() else [artefact]


def _lines(one: Rehearsal, last: Rehearsal | None, changes: list[dict[str, str]]) -> Iterator[str]:
    """A rehearsal for people, with the figures of the last one in parentheses."""
    passed = sum(not result.problem for result in one.results)
    same = " (unchanged)" if last is not None and last.version == one.version else ""
    yield f"{one.function} {one.version[:DIGEST]}{same}: {passed} of {len(one.results)} cases pass"
    for change in changes:
        yield f"  {change['case']}: {change['change']}: {change['result']}"
    single = _compared(one.single_s, last.single_s if last else None, 1e3, "ms")
    batched = _compared(one.batched_item_s, last.batched_item_s if last else None, 1e3, "ms")
    memory = _compared(one.memory_mb, last.memory_mb if last else None, 1.0, "MB")
    yield (
        f"  one item {single}, an item in a call of {one.batch} {batched}, cold start {one.cold_start_s * 1e3:.3g} ms, "
        f"memory {memory} of {one.memory_limit_mb} MB"
    )
    costs = [
        f"{c.provider} {dollars(c.usd_single)}" + (f" ({dollars(c.usd_batched)} in batches)" if c.usd_batched else "")
        for c in one.costs
        if c.usd_single is not None
    ]
    if costs:
        yield f"  per million items: {', '.join(costs)}"
    yield from (f"  warning: {warning}" for warning in one.warnings)


def _compared(now: float | None, before: float | None, scale: float, unit: str) -> str:
    if now is None:
        return "failed" if unit == "ms" else "unknown"
    return f"{now * scale:.3g} {unit}" + (f" (was {before * scale:.3g})" if before is not None else "")
