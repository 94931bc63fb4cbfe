"""The check of a run's deterministic functions for dependence on earlier calls, on its first items."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from rollart.errors import SpecError
from rollart.model import InfraFault, Item, Outcome
from serverless import wire
from serverless.deploy.package import Package
from serverless.errors import ServerlessError
from serverless.history import OrderedCall, find_differences, refusal
from serverless.pipeline.offload import Offload
from serverless.providers.base import Reply
from serverless.spec import FunctionSpec

ITEMS = 8
"""Items of a check: each is called twice."""

MOST_CASES = 64
"""Cases of a check."""

GATHER_S = 1.0
"""Longest wait for further items after the first."""

LIMIT_S = 10.0
"""Longest check, in seconds. Scores of the function are held until then, so that none is trained before."""

OneWorker = Callable[[Package], contextlib.AbstractAsyncContextManager[OrderedCall]]
"""Gives calls in one worker of a package, which ends with the context."""

Note = Callable[[str, str, Mapping[str, Any]], None]
"""Receives an event: its kind, the function, and fields."""


class OrderCheckedOffload:
    """An `Offload` whose deterministic functions are checked before the first of their scores is returned.

    Any number of tasks may call `submit`. A task per function waits for `ITEMS` different items, or `GATHER_S` after
    the first, and calls them in one worker in two orders; the callers of its function wait for its end, `GATHER_S` and
    `limit_s` at most. A function with cases is checked on these when this is entered. Invariant: no score of a function
    is returned before its check has ended, and none after it has failed: `submit` then raises. A check that cannot be
    made lets its function pass, with an event.
    """

    def __init__(
        self,
        offload: Offload,
        packages: Sequence[Package],
        worker: OneWorker,
        *,
        note: Note,
        cases: Mapping[str, Sequence[Item]] | None = None,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._cases = cases or {}
        self._offload, self._worker, self._note, self._limit_s = offload, worker, note, limit_s
        self._checks = {p.spec.name: _FunctionCheck(p) for p in packages if p.spec.deterministic}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def functions(self) -> Mapping[str, FunctionSpec]:
        return self._offload.functions

    async def submit(self, function: str, item: Item, deadline_s: float) -> Outcome:
        """See `Offload.submit`. Raises `SpecError` for a function whose answers depend on earlier calls."""
        check = self._checks.get(function)
        if check is None:
            return await self._offload.submit(function, item, deadline_s)
        check.offer(item)
        outcome = await self._offload.submit(function, item, deadline_s)
        await check.ended.wait()
        if check.error is not None:
            raise check.error
        return outcome

    async def __aenter__(self) -> Self:
        for name, items in self._cases.items():
            if (check := self._checks.get(name)) is not None:
                await self._run(check, items[:MOST_CASES])
                if check.error is not None:
                    raise check.error
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        self._tasks = [self._group.create_task(self._check(check)) for check in self._checks.values()]
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await self._group.__aexit__(None, None, None)

    async def _check(self, check: _FunctionCheck) -> None:
        spec = check.package.spec
        await check.first.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GATHER_S):
                await check.enough.wait()
        if not await self._run(check, check.items) and check.error is None:
            self._note("order_not_checked", spec.name, {"why": check.why})
            self._checks.pop(spec.name, None)
        check.ended.set()

    async def _run(self, check: _FunctionCheck, items: Sequence[Item]) -> bool:
        """True if the function was checked and passed."""
        spec, check.faulty = check.package.spec, False
        try:
            async with self._worker(check.package) as call:
                noting = functools.partial(_note_fault, check, call)
                twice, found = await find_differences(spec, items, noting, limit_s=self._limit_s)
        except ServerlessError as error:
            check.why = error.message
            return False
        if found:
            refused = refusal(spec.name, found)
            check.error = SpecError(refused.message, remedy=refused.remedy)
        elif twice:
            self._note("order_checked", spec.name, {"items": twice})
            self._checks.pop(spec.name)
            return True
        return False


async def _note_fault(check: _FunctionCheck, call: OrderedCall, event: list[wire.WireItem], limit_s: float) -> Reply:
    """A call, whose first fault is the reason why a check cannot be made."""
    reply = await call(event, limit_s)
    outcomes = wire.outcomes(reply.body, event, deterministic=True) if reply.fault is None else [reply.fault]
    fault = next((one for one in outcomes if isinstance(one, InfraFault)), None)
    if fault is not None and not check.faulty:
        check.faulty, check.why = True, f"{fault.kind}: {fault.detail}"
    return reply


class _FunctionCheck:
    """The items and the result of one function's check."""

    def __init__(self, package: Package) -> None:
        self.package = package
        self.first, self.enough, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.error: SpecError | None = None
        self.why = "no item had two answers in time"
        """The reason why it could not be checked."""
        self.faulty = False
        self._items: dict[str, Item] = {}

    @property
    def items(self) -> list[Item]:
        return list(self._items.values())

    def offer(self, item: Item) -> None:
        """Take an item that differs from the others, until there are enough."""
        if self.enough.is_set():
            return
        self._items.setdefault(f"{item.messages} {item.reference_answer}", item)
        self.first.set()
        if len(self._items) >= ITEMS:
            self.enough.set()
