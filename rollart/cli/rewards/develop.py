"""The commands of a reward's author: create it, test it on cases, compare its cost on each provider."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from rollart.cli.completion import DIGEST
from rollart.cli.context import cluster_functions, print_report
from rollart.errors import RunFailed
from rollart.launch.functions import (
    backend,
    canonical_provider,
    cases_beside,
    function_settings,
    packages_in,
    translated_errors,
    units_by_provider,
)
from rollart.report.tables import Report, Row, Table, as_count, as_number, as_usd, table
from rollart.settings.cluster import ClusterFunctions
from rollart.settings.load import builtin, load_prices
from rollart.settings.prices import PriceList
from rollart.tools.prices import effective_prices
from serverless.deploy import template
from serverless.fault_rehearsal import FaultRehearsal, rehearse_faults
from serverless.meter import MeterSink
from serverless.providers.base import Backend
from serverless.rehearse import Rehearsal, RehearsalCase, read_cases, rehearse
from serverless.types import InfraFault, ModelFault, Scored, TokenUsage


def init(directory: Path, name: str | None, output: str) -> None:
    with translated_errors():
        written = template.write(directory, name or directory.resolve().name.replace("-", "_"))
    if output == "json":
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
    notes += [
        f"{name}: tokens of a language model, spent wherever the function runs"
        for name in sorted({asked_model(used) for one in found for used in one.tokens})
    ]
    print_report(Report("plan", "rewards", (costs,), tuple(notes)), output)


def doctor(
    source: str, cases: Path | None, cluster: Path | None, provider: str, allow_unsafe: bool, output: str
) -> None:
    packages, items = packages_in(source), _cases(source, cases)
    functions, listed = cluster_functions(cluster), PriceList(prices=effective_prices(cluster))
    prices = units_by_provider(listed).get(canonical_provider(provider), {})
    if allow_unsafe:
        functions = functions.model_copy(update={"allow_unsafe": True})
    settings = function_settings("pipeline", functions)

    def local(meter: MeterSink) -> Backend:
        return backend("local", functions, meter=meter)

    with translated_errors():
        found = [
            asyncio.run(rehearse_faults(one, items, local=local, prices=prices, settings=settings)) for one in packages
        ]
    if output == "json":
        click.echo(json.dumps({"schema_version": 1, "rewards": [one.to_json() for one in found]}, indent=2))
    else:
        notes = tuple(f"{one.function}: time limit of a call {one.limit_s:.3g} s, {one.items} items" for one in found)
        print_report(Report("doctor", "rewards", (_faults(found),), notes), output)
    numbers = [f"{one.function}: {one.numbers}" for one in found if one.numbers]
    if numbers:
        raise RunFailed(
            f"faults that became numbers: {', '.join(numbers)}",
            remedy="let the reward raise what it cannot handle: an exception masks the sample",
        )
    unscored = [one.function for one in found if not one.without.outcomes.get("scored")]
    if unscored:
        raise RunFailed(
            f"nothing can be seen of {', '.join(unscored)}: none of the cases is scored without a fault",
            remedy=f"rollart rewards test {source}",
        )


@table("faults", "Injected faults")
def _faults(found: Sequence[FaultRehearsal]) -> Iterator[Row]:
    for one in found:
        for r in (one.without, *one.results):
            numbers = ", ".join(f"{item}: {number:g}" for item, number in r.numbers.items())
            outcomes = ", ".join(
                f"{count} {_FAULT_OUTCOMES.get(k, f'masked ({k})')}" for k, count in r.outcomes.items()
            )
            yield {
                "function": one.function,
                "fault": "none" if r.fault is None else str(r.fault),
                "calls_with_it": "" if r.fault is None else "every" if r.always else "first",
                "outcome": (outcomes if r.reached else "not met") + (f" ({numbers})" if numbers else ""),
                "calls": as_count(r.calls),
                "retries": as_count(r.retries),
                "seconds": as_number(r.seconds),
                "usd_per_million": as_usd(r.usd_per_million),
            }


_FAULT_OUTCOMES = {"scored": "scored", "declared": "timeout_floor", "number": "BECAME A NUMBER"}


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
        for asked, usd in token_costs(one).items():
            run = None if usd is None else usd * items / 1e6
            yield {
                "function": one.function,
                "provider": asked,
                "usd_per_million": as_usd(usd),
                "usd_per_run": as_usd(run),
                "usd_per_month": as_usd(None if run is None else run * runs_per_month),
                "month_against_now": as_usd(None if base is None or run is None else 0.0),
                "note": _NO_PRICE if usd is None else "",
            }


_NO_PRICE = "no price is known for the model"


def token_costs(found: Rehearsal, prices: PriceList | None = None) -> dict[str, float | None]:
    """US dollars of the tokens per million items by endpoint and model, None without a price; at the shipped prices if
    none are given."""
    prices = prices or load_prices(builtin("prices.yaml"))
    return {
        asked_model(used): prices.token_usd(used) / found.token_items * 1e6 if prices.prices_tokens(used) else None
        for used in found.tokens
    }


def asked_model(used: TokenUsage) -> str:
    return f"{used.endpoint}/{used.model}"


def _rehearsed(source: str, cases: Path | None, *, allow_unsafe: bool = False) -> list[Rehearsal]:
    """Every reward of FILE run on the cases, those beside it if none are given."""
    packages, items = packages_in(source), _cases(source, cases)
    with translated_errors():

        async def all_of_them() -> list[Rehearsal]:
            prices = units_by_provider()
            async with backend("local", ClusterFunctions(allow_unsafe=allow_unsafe)) as target:
                return [await rehearse(package, items, backend=target, prices=prices) for package in packages]

        return asyncio.run(all_of_them())


def _cases(source: str, cases: Path | None) -> list[RehearsalCase]:
    with translated_errors():
        return read_cases(cases or cases_beside(source))


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
                "outcome": outcome_text(r.outcome),
                "ms": as_number(r.seconds * 1e3),
            }
            for r in one.results
        ]
        facts = (
            ("one item", "ms", one.single_s and one.single_s * 1e3),
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
        token_usd = token_costs(one)
        tokens: list[Row] = [
            {
                "endpoint": used.endpoint,
                "model": used.model,
                "requests": as_number(used.requests / one.token_items),
                "input": as_number(used.input_tokens / one.token_items),
                "cached": as_number((used.cached_tokens + used.cache_write_tokens) / one.token_items),
                "output": as_number(used.output_tokens / one.token_items),
                "usd_per_million": as_usd(usd := token_usd[asked_model(used)]),
                "note": _NO_PRICE if usd is None else "",
            }
            for used in one.tokens
        ]
        tables = (
            Table.of("cases", "Cases", cases),
            Table.of("measured", "Measured here", ({"what": w, "unit": u, "value": as_number(v)} for w, u, v in facts)),
            Table.of("costs", "US dollars per million items", costs),
            Table.of("tokens", "Tokens of language models per item, beside these costs", tokens, optional=True),
        )
        notes = (*one.warnings, f"version {one.version[:DIGEST]}")
        print_report(Report("test", one.function, tables, notes), output)


def outcome_text(outcome: object) -> str:
    match outcome:
        case Scored():
            return f"{outcome.value:g}"
        case ModelFault():
            return f"{outcome.floor:g} (model fault: {outcome.reason})"
        case InfraFault():
            return f"fault: {outcome.kind}"
        case _:
            return str(outcome)
