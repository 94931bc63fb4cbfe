"""Rescoring: the kept items of a run through a reward function, by the pipeline that a run uses."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollart.errors import UsageError, did_you_mean
from rollart.launch.functions import backend, function_settings, translated_errors
from rollart.ledger.kept import KeptTrajectory
from rollart.ledger.reader import LedgerReader
from rollart.report.rescore import RescoredItem
from rollart.settings.cluster import ClusterFunctions
from serverless.deploy.package import Package
from serverless.meter import NullMeter, TokenBill
from serverless.pipeline.offload import Offload
from serverless.pipeline.stages import PipelineSpec, StageSpec
from serverless.types import Invocation, Outcome

PENDING_CALLS = 4
"""Full calls per worker that are prepared ahead, so that no worker waits for this process."""


class CallMeter(NullMeter):
    """Collects the bills of calls and of language models' tokens."""

    def __init__(self) -> None:
        self.calls: list[Invocation] = []
        self.bills: list[TokenBill] = []

    def tokens(self, bill: TokenBill) -> None:
        self.bills.append(bill)

    def invocation(self, invocation: Invocation) -> None:
        self.calls.append(invocation)


@dataclass(frozen=True, slots=True)
class KeptIndex:
    """What a selection of kept items needs to know of each."""

    id: str
    t: float
    group: str
    functions: tuple[str, ...]


def index_kept(reader: LedgerReader) -> list[KeptIndex]:
    """Every scored trajectory that a run kept, without its content."""
    return [KeptIndex(k.id, k.t, k.group, tuple(s.function for s in k.scores)) for k in reader.kept() if k.scores]


def read_chosen(reader: LedgerReader, chosen: Iterable[KeptIndex]) -> list[KeptTrajectory]:
    """The chosen items that the run still has: a live run may have deleted some meanwhile."""
    wanted = {(one.id, one.t) for one in chosen}
    return [kept for kept in reader.kept({id_ for id_, _ in wanted}) if (kept.id, kept.t) in wanted]


def old_function(items: Iterable[KeptIndex], named: str | None, new: str) -> str:
    """The function whose recorded outcomes are compared: the named one, else the only one, else the one with the new
    one's name. UsageError if that leaves a choice."""
    known = sorted({function for item in items for function in item.functions})
    if named is not None:
        if named not in known:
            raise UsageError(
                f"no kept item was scored by '{named}'{did_you_mean(named, known)}",
                remedy=f"--function names one of: {', '.join(known)}",
            )
        return named
    if len(known) == 1:
        return known[0]
    if new in known:
        return new
    raise UsageError(
        f"the run has {len(known)} functions, and none is named '{new}'",
        remedy=f"name the one to compare with: --function {' | '.join(known)}",
    )


def draw(items: Sequence[KeptIndex], most: int | None) -> list[KeptIndex]:
    """At most `most` items in their order, by whole groups drawn at random as far as they fit. The same for the same
    items."""
    if most is None or len(items) <= most:
        return list(items)
    groups: dict[str, list[int]] = defaultdict(list)
    for n, item in enumerate(items):
        groups[item.group].append(n)
    order = sorted(groups)
    random.Random(0).shuffle(order)
    chosen: list[int] = []
    for group in order:
        if len(chosen) + len(groups[group]) <= most:
            chosen += groups[group]
    chosen = chosen or groups[order[0]][:most]
    return [items[n] for n in sorted(chosen)]


async def rescore(
    package: Package,
    items: Sequence[KeptTrajectory],
    function: str,
    *,
    times: int,
    provider: str,
    functions: ClusterFunctions,
    deadline_s: float,
) -> tuple[list[RescoredItem], CallMeter, float]:
    """Score every item `times` times. Returns the items with the recorded outcome of `function`, the bills, and the
    seconds. Every answer is executed: none comes from a cache or from an equal item, unless each is asked for once."""
    meter, spec, loop = CallMeter(), package.spec, asyncio.get_running_loop()
    settings: PipelineSpec = function_settings("pipeline", functions)
    if times > 1:
        settings = settings.model_copy(update={"dedupe": StageSpec(enabled=False)})
    pending = asyncio.Semaphore(min(spec.queue, PENDING_CALLS * spec.concurrency * spec.batch.max_items))
    with translated_errors():
        async with (
            backend(provider, functions, meter=meter) as target,
            Offload([package], target, settings=settings, meter=meter, quota=functions.quota) as offload,
        ):
            began = loop.time()

            async def answer(item: KeptTrajectory) -> Outcome:
                async with pending:
                    return await offload.submit(spec.name, item.item, deadline_s)

            async with asyncio.TaskGroup() as group:
                asked = [[group.create_task(answer(item)) for _ in range(times)] for item in items]
            seconds = loop.time() - began
    found = []
    for item, tasks in zip(items, asked, strict=True):
        old = item.outcome(function)
        assert old is not None, "only items that the function scored are given"
        found.append(RescoredItem(item, old, tuple(task.result() for task in tasks)))
    return found, meter, seconds
