"""Dependence of a function's answers on its earlier calls, seen by running it: what the reading of its source
(`analysis.stateless`) cannot see, such as state behind a C extension, a file that is read back, a draw without a seed.

Each item is called alone, all in one order and then in the reverse one, in one warm worker. The two answers to an item
differ in everything that such state can be: the number and the order of calls before, and the time.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from serverless import wire
from serverless.errors import SpecInvalid
from serverless.providers.base import Reply
from serverless.spec import FunctionSpec
from serverless.types import FaultKind, InfraFault, Item, ModelFault, Outcome, Scored

TOLERANCE = 1e-6
"""Scores that differ by less, absolutely and relatively, are the same: sums of parallel code have rounding errors."""

OrderedCall = Callable[[list[wire.WireItem], float], Awaitable[Reply]]
"""Calls the function in the one worker, with a time limit in seconds."""


@dataclass(frozen=True, slots=True)
class HistoryDifference:
    """Two answers to one item. `first_call` and `second_call` count from 1, of `calls`."""

    item: str
    first: Outcome
    second: Outcome
    first_call: int
    second_call: int
    calls: int

    def __str__(self) -> str:
        return (
            f"item {self.item}: {_text(self.first)} as call {self.first_call} of {self.calls}, {_text(self.second)} as "
            f"call {self.second_call}, in the reverse order"
        )


async def find_differences(
    spec: FunctionSpec, items: Sequence[Item], call: OrderedCall, *, limit_s: float
) -> tuple[int, list[HistoryDifference]]:
    """The number of items with two answers, and those whose answers differ. Half of `limit_s` is for each order:
    items that do not fit are left out."""
    now = asyncio.get_running_loop().time
    ends = now() + limit_s

    async def answer(item: Item) -> Outcome:
        event = [wire.encode(item)]
        reply = await call(event, max(0.001, min(spec.timeout_s + spec.init_timeout_s, ends - now())))
        if reply.fault is not None:
            return reply.fault
        return wire.outcomes(reply.body, event, deterministic=spec.deterministic)[0]

    first: list[Outcome] = []
    for item in items:
        if first and now() > ends - limit_s / 2:
            break
        first.append(await answer(item))
    second: list[Outcome] = []
    for item in reversed(items[: len(first)]):
        if now() > ends:
            break
        second.append(await answer(item))
    twice = items[len(first) - len(second) : len(first)]
    before, after = first[len(first) - len(second) :], second[::-1]
    pairs = zip(before, after, strict=True)
    answered = sum(not isinstance(a, InfraFault) and not isinstance(b, InfraFault) for a, b in pairs)
    return answered, differences(twice, before, after, calls=2 * len(first))


def differences(
    items: Sequence[Item], first: Sequence[Outcome], second: Sequence[Outcome], *, calls: int
) -> list[HistoryDifference]:
    """The items whose answers differ: `second` holds those of the reverse order, by item. `calls` were made in all; the
    items are the last of the first order. Pure."""
    skipped = calls // 2 - len(items)
    return [
        HistoryDifference(item.id, a, b, n, calls + 1 - n, calls)
        for n, item, a, b in zip(itertools.count(skipped + 1), items, first, second, strict=False)
        if not is_same(a, b)
    ]


def is_same(first: Outcome, second: Outcome) -> bool:
    """True if two answers to an item mean the same to a trainer. A fault of the platform is no answer, so it differs
    from none; one of the function's code differs from a score."""
    if _no_answer(first) or _no_answer(second):
        return True
    match first, second:
        case Scored(), Scored():
            steps = (first.steps or (), second.steps or ())
            values = [(first.value, second.value), *zip(*steps, strict=False)]
            return len(steps[0]) == len(steps[1]) and all(
                math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE) for a, b in values
            )
        case ModelFault(), ModelFault():
            return math.isclose(first.floor, second.floor, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        case InfraFault(), InfraFault():
            return True
        case _:
            return False


def refusal(function: str, found: Sequence[HistoryDifference]) -> SpecInvalid:
    """The error for a function that is declared deterministic, and is not."""
    others = f" ({len(found) - 1} other items differ too)" if len(found) > 1 else ""
    return SpecInvalid(
        f"function {function} is declared deterministic, but its answers depend on earlier calls or on the time: "
        f"{found[0]}{others}",
        remedy="remove the counter, file, unseeded draw, clock or cache with effects, or declare deterministic=False",
    )


def _no_answer(outcome: Outcome) -> bool:
    of_code = (FaultKind.CRASH, FaultKind.BAD_ANSWER)
    return isinstance(outcome, InfraFault) and (outcome.retryable or outcome.kind not in of_code)


def _text(outcome: Outcome) -> str:
    match outcome:
        case Scored():
            return f"{outcome.value:g}"
        case ModelFault():
            return f"a model fault ({outcome.reason})"
        case InfraFault():
            return f"{outcome.kind} ({outcome.detail})"
