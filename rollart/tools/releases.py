"""Two versions of a deployed function compared: scores, faults, latency and cost, from recorded runs or from cases."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollart.errors import StorageFailed, UsageError
from rollart.ledger.database import FILE
from rollart.ledger.events import FUNCTION_HEALTH, FUNCTION_VERSION
from rollart.ledger.reader import LedgerReader
from rollart.report.curve import wilson
from rollart.report.offload import SERVED
from rollart.settings.prices import PriceList, function_gpus
from rollart.tools.rescore import CallMeter
from serverless import wire
from serverless.providers.base import Backend, DeployedFunction
from serverless.rehearse import RehearsalCase
from serverless.types import Cause, InfraFault, ModelFault, Outcome, Scored

MODEL_FAULT = "model"


@dataclass(slots=True)
class VersionFigures:
    """Figures of one version. `outcomes` counts items, `faults` those that failed, by kind of fault (`model`: the
    policy's own). `runs` counts the recorded runs that called it."""

    version: str
    outcomes: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    scores: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Durations of successful calls that started no worker."""
    items: int = 0
    usd: float = 0.0
    runs: int = 0

    @property
    def infra_faults(self) -> int:
        """Items that no score came of: faults of the platform and exceptions of the reward."""
        return sum(n for kind, n in self.faults.items() if kind != MODEL_FAULT)

    @property
    def fault_share(self) -> float | None:
        return self.infra_faults / self.outcomes if self.outcomes else None

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.scores) if self.scores else None

    @property
    def p50_s(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def usd_per_million(self) -> float | None:
        return self.usd / self.items * 1e6 if self.items else None

    def add(self, outcome: Outcome) -> None:
        self.outcomes += 1
        if isinstance(outcome, InfraFault):
            self.faults[str(outcome.kind)] += 1
        elif isinstance(outcome, ModelFault):
            self.faults[MODEL_FAULT] += 1
        self.add_score(outcome)

    def add_score(self, outcome: Outcome) -> None:
        if isinstance(outcome, Scored):
            self.scores.append(outcome.value)
        elif isinstance(outcome, ModelFault):
            self.scores.append(outcome.floor)

    def add_run(self, run: VersionFigures) -> None:
        """Add the figures of one recorded run."""
        self.runs += 1
        self.outcomes += run.outcomes
        self.faults += run.faults
        self.scores += run.scores
        self.seconds += run.seconds
        self.items += run.items
        self.usd += run.usd


def recorded_figures(
    function: str, versions: Sequence[DeployedFunction], runs: Path, prices: PriceList
) -> tuple[list[VersionFigures], list[str]]:
    """The figures of each version over the recorded runs below `runs` that called it, and no other version, at its
    provider; and a note for each run that cannot be read."""
    found = {one.version: VersionFigures(one.version) for one in versions}
    providers = {one.version: one.provider for one in versions}
    notes: list[str] = []
    for directory in sorted(path.parent for path in runs.glob(f"*/{FILE}")):
        try:
            with LedgerReader(directory) as reader:
                events = [event for event in reader.events(FUNCTION_VERSION) if event.subject == function]
                called = {str(event.fields.get("version")) for event in events}
                if len(called) == 1 and called <= found.keys():
                    version = called.pop()
                    run = _run_figures(reader, function, version, providers[version], prices)
                    if run is not None:
                        found[version].add_run(run)
        except UsageError:  # a run without a journal
            continue
        except StorageFailed as error:
            notes.append(f"run {directory.name} is left out: {error.message}")
    return list(found.values()), notes


def _run_figures(
    reader: LedgerReader, function: str, version: str, provider: str, prices: PriceList
) -> VersionFigures | None:
    """The figures of a recorded run whose function had this version; None if the run made no call of it at the
    provider. Calls are those of `SERVED`, and latencies those of successful ones. Scores are those of kept items
    (`keep` of the run). Outcomes, scores and tokens have no provider: they are the run's, and the cost of tokens is
    shared out by items."""
    served = [call for call in reader.invocation_sums() if call.function == function and call.cause in SERVED]
    here = [call for call in served if call.provider == provider]
    if not here:
        return None
    figures = VersionFigures(version)
    for event in reader.events(FUNCTION_HEALTH):
        if event.subject == function:
            figures.outcomes += int(event.fields.get("outcomes") or 0)
            figures.faults[MODEL_FAULT] += int(event.fields.get("model_faults") or 0)
            kinds = {k.removeprefix("fault."): v for k, v in event.fields.items() if k.startswith("fault.")}
            figures.faults.update({kind: int(n or 0) for kind, n in kinds.items()})
    gpu = function_gpus(reader.config()).get(function, "")
    figures.items = sum(call.items for call in here if call.status == "ok")
    figures.usd = sum(
        prices.function_usd(provider, billed_s=call.billed_s, memory_mb=call.memory_mb, requests=call.calls, gpu=gpu)
        for call in here
    )
    items = sum(call.items for call in served if call.status == "ok")
    if items:
        tokens = (one for one in reader.token_sums() if one.function == function and one.cause != Cause.HEDGE)
        figures.usd += sum(prices.token_usd(one.usage) for one in tokens) * figures.items / items
    figures.seconds = [
        call.t1 - call.t0
        for call in reader.calls(provider)
        if call.function == function and call.cause in SERVED and call.status == "ok" and not call.cold_start_s
    ]
    for kept in reader.kept():
        scored = kept.outcome(function)
        if scored is not None and scored.version == version:
            figures.add_score(scored.outcome)
    return figures


async def measured_figures(
    version: DeployedFunction,
    backend: Backend,
    meter: CallMeter,
    cases: Sequence[RehearsalCase],
    prices: PriceList,
    *,
    gpu: str,
) -> VersionFigures:
    """The figures of a version over the cases, each called alone on the provider, after a first call that only starts a
    worker. `backend` calls this version, and `meter` gets its bills, which include the function's `gpu`."""
    figures = VersionFigures(version.version)
    await backend.invoke(version.function, [wire.encode(cases[0].item)], deadline_s=_LONGEST_S)
    meter.calls.clear()
    meter.bills.clear()
    for case in cases:
        event = [wire.encode(case.item)]
        reply = await backend.invoke(version.function, event, deadline_s=_LONGEST_S)
        answers = [reply.fault] if reply.fault else wire.outcomes(reply.body, event, deterministic=True)
        figures.add(answers[0])
        bill = reply.invocation
        if bill is not None and bill.status == "ok" and not bill.cold_start_s:
            figures.seconds.append(bill.t1 - bill.t0)
    figures.items = len(cases)
    figures.usd = sum(
        prices.function_usd(call.provider, billed_s=call.billed_s, memory_mb=call.memory_mb, gpu=gpu)
        for call in meter.calls
    ) + sum(prices.token_usd(one.usage) for one in meter.bills)
    return figures


_LONGEST_S = 120.0
"""The time limit of a case's call, cold start included."""


def fault_difference(before: VersionFigures, after: VersionFigures) -> tuple[float, float] | None:
    """The 95 % interval of the difference of both fault shares, after less before; None without outcomes of both.

    Newcombe's hybrid of Wilson's score intervals (Statistics in Medicine 17, 1998, method 10): it holds for shares of
    0, for which the normal approximation gives no width.
    """
    if not before.outcomes or not after.outcomes:
        return None
    p, q = before.infra_faults / before.outcomes, after.infra_faults / after.outcomes
    low_p, high_p = wilson(before.infra_faults, before.outcomes)
    low_q, high_q = wilson(after.infra_faults, after.outcomes)
    return q - p - math.hypot(q - low_q, high_p - p), q - p + math.hypot(high_q - q, p - low_p)


def fault_kinds(figures: Iterable[VersionFigures]) -> Mapping[str, None]:
    """The kinds of faults that any version had, in the order in which they are met."""
    return dict.fromkeys(kind for one in figures for kind, n in one.faults.items() if n)
