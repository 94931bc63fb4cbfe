"""The computation of `rollart rewards doctor`: a function under injected faults, as a run would see it.

Each fault is injected into calls of the function through the whole pipeline, over real local workers: into each item's
first call (`once`), or into every call (`always`). Faults of the platform are a quota, a rate limit, lost, late, empty
and malformed answers, crashes and exhausted memory. Faults inside the function are refused connections and refused
memory: code that catches them and returns a score turns an outage into a reward.
"""

from __future__ import annotations

import asyncio
import datetime
import enum
import json
import os
import pathlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from serverless.deploy import faulty_handler
from serverless.deploy.package import Package
from serverless.meter import MeterSink, NullMeter
from serverless.pipeline.offload import Offload
from serverless.pipeline.stages import OffloadStage, PipelineSpec
from serverless.providers.base import Backend, Reply
from serverless.providers.faults import REASONS, fault_of_status
from serverless.rehearse import RehearsalCase, cost
from serverless.spec import FunctionSpec
from serverless.types import Cause, FaultKind, InfraFault, Invocation, Item, ModelFault, Outcome, Scored, Throttle

CASES = 4
"""Cases per fault: a rehearsal takes seconds."""

RETRY_AFTER_S = 0.2

LEAST_LIMIT_S, ROOM = 0.3, 5.0
"""The time limit of a call under rehearsal, in seconds and in times of the slowest case, unless the function's own is
shorter."""

_CONCURRENCY = 4

_PAUSE_S = 0.1
"""Pauses of the pipeline after faults of a provider, which a run counts in seconds."""

_SLACK_S, _LIMITS = 3.0, 4.0
"""The deadline of an item beyond the function's start: seconds, and time limits of a call."""


class InjectedFault(enum.StrEnum):
    QUOTA = "quota"
    """429 without Retry-After: no more than one call at a time, or none."""
    RATE = "rate"
    """429 with Retry-After."""
    LOST = "lost"
    """The connection breaks after the call was executed."""
    SLOW = "slow"
    EMPTY = "empty"
    MALFORMED = "malformed"
    """A score that is text."""
    CRASH = "crash"
    OUT_OF_MEMORY = "out_of_memory"
    NETWORK = "network"
    """Connections that the function makes are refused. If it makes any, its score is one without them."""
    MEMORY = "memory"
    """Allocations of the function are refused; a deterministic function that then scores otherwise has met that."""


INSIDE = frozenset({InjectedFault.NETWORK, InjectedFault.MEMORY})
"""Faults that the function's own code meets."""


@dataclass(frozen=True, slots=True)
class FaultResult:
    """What a run would see of a fault, None for the result without one.

    `outcomes` counts items: `scored`, `declared` (the floor of `timeout_floor`), `number` (the fault became one), or
    the kind of a masked fault. `numbers` are those of the faults that became one, by item. `reached` is False if the
    function's code cannot be seen to have met the fault. `usd_per_million` is the price of the calls per million items.
    """

    fault: InjectedFault | None
    always: bool
    outcomes: Mapping[str, int]
    numbers: Mapping[str, float]
    calls: int
    retries: int
    seconds: float
    usd_per_million: float | None
    reached: bool


@dataclass(frozen=True, slots=True)
class FaultRehearsal:
    """`limit_s` is the time limit that the calls had."""

    function: str
    version: str
    items: int
    limit_s: float
    without: FaultResult
    results: tuple[FaultResult, ...]

    @property
    def numbers(self) -> int:
        """The faults that became numbers."""
        return sum(len(one.numbers) for one in self.results)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "numbers": self.numbers}


async def rehearse_faults(
    package: Package,
    cases: Sequence[RehearsalCase],
    *,
    local: Callable[[MeterSink], Backend],
    prices: Mapping[str, float],
    settings: PipelineSpec,
) -> FaultRehearsal:
    """Rehearse every fault on the first cases, one per core at once: slow imports of many workers would run out of
    time. `local` makes the backend of local workers, `prices` are a
    provider's, in US dollars by unit. Raises `BackendFailed` and similar errors if the function cannot run at all."""
    items = [case.item for case in cases[:CASES]]
    short = settings.model_copy(
        update={
            "breaker": settings.breaker.model_copy(update={"open_s": _PAUSE_S, "max_open_s": 2 * _PAUSE_S}),
            "admission": settings.admission.model_copy(update={"max_wait_s": _PAUSE_S}),
            "cache": settings.cache.model_copy(update={"enabled": False}),
        }
    )
    meter = _Bills()
    async with local(meter) as backend:
        given = _FaultRun(package, items, short, prices, backend, meter)
        without, expected = await given.run(None, True, package.spec.timeout_s, ())
        slowest_s = max((one.t1 - one.t0 for one in meter.bills(package.spec.name)), default=0.0)
        limit_s = min(package.spec.timeout_s, max(LEAST_LIMIT_S, ROOM * slowest_s))
        turns = asyncio.Semaphore(max(2, os.cpu_count() or 1))

        async def in_turn(fault: InjectedFault, always: bool) -> tuple[FaultResult, list[Outcome]]:
            async with turns:
                return await given.run(fault, always, limit_s, expected)

        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(in_turn(fault, always))
                for fault in InjectedFault
                for always in ((True,) if fault in INSIDE else (False, True))
            ]
    results = tuple(task.result()[0] for task in tasks)
    return FaultRehearsal(package.spec.name, package.version, len(items), limit_s, without, results)


class _Bills(NullMeter):
    def __init__(self) -> None:
        self._bills: dict[str, list[Invocation]] = {}

    def invocation(self, invocation: Invocation) -> None:
        self._bills.setdefault(invocation.function, []).append(invocation)

    def bills(self, function: str) -> list[Invocation]:
        return self._bills.get(function, [])


@dataclass(frozen=True, slots=True)
class _FaultRun:
    """Runs the items under one fault. Each fault has workers of its own."""

    package: Package
    items: Sequence[Item]
    settings: PipelineSpec
    prices: Mapping[str, float]
    local: Backend
    meter: _Bills

    async def run(
        self, fault: InjectedFault | None, always: bool, limit_s: float, expected: Sequence[Outcome]
    ) -> tuple[FaultResult, list[Outcome]]:
        loop, spec = asyncio.get_running_loop(), self.package.spec
        own = {"timeout_s": limit_s, "concurrency": min(spec.concurrency, _CONCURRENCY), "warm": 0}
        package = self.package
        if fault is not None:
            name = f"{spec.name[:40]}-{fault}-{'always' if always else 'once'}"
            package = replace(package, version=f"{package.version}-faulty", files=_faulty_files(package.files))
            package = replace(package, spec=spec.model_copy(update={**own, "name": name}))
        backend, name = _FaultyBackend(self.local, fault, always), package.spec.name
        began = loop.time()
        async with Offload([package], backend, settings=self.settings) as offload:
            deadline_s = _SLACK_S + spec.init_timeout_s + _LIMITS * limit_s
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(offload.submit(name, item, deadline_s)) for item in self.items]
            retries = offload.stages()[name][OffloadStage.RETRY].acted
        outcomes = [task.result() for task in tasks]
        before = expected or outcomes
        kinds = [
            _kind(outcome, known, fault, always, spec, fired=item.id in backend.fired)
            for item, outcome, known in zip(self.items, outcomes, before, strict=True)
        ]
        numbers = {
            item.id: outcome.value if isinstance(outcome, Scored) else outcome.floor
            for item, outcome, kind in zip(self.items, outcomes, kinds, strict=True)
            if kind == "number" and not isinstance(outcome, InfraFault)
        }
        usd = [cost(spec, self.prices, one.billed_s, len(self.items)) for one in self.meter.bills(name)]
        result = FaultResult(
            fault,
            always,
            dict(Counter(kinds)),
            numbers,
            backend.calls,
            retries,
            loop.time() - began,
            None if None in usd else sum(one for one in usd if one is not None),
            reached=fault not in INSIDE or bool(backend.fired) or list(before) != outcomes,
        )
        return result, outcomes


def _kind(
    outcome: Outcome, known: Outcome, fault: InjectedFault | None, always: bool, spec: FunctionSpec, *, fired: bool
) -> str:
    if isinstance(outcome, InfraFault):
        return str(outcome.kind)
    if fault is InjectedFault.SLOW and isinstance(outcome, ModelFault) and outcome.floor == spec.timeout_floor:
        return "declared"
    if fault is not None and always and fault not in INSIDE:  # there is no answer that could be a score
        return "number"
    return "number" if fired or (spec.deterministic and outcome != known) else "scored"


def _faulty_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    handler = pathlib.Path(faulty_handler.__file__).read_bytes()
    return {**files, "rollart_original.py": files["rollart_handler.py"], "rollart_handler.py": handler}


class _FaultyBackend:
    """Implements `Backend` around another, and injects a fault into its calls."""

    def __init__(self, backend: Backend, fault: InjectedFault | None, always: bool) -> None:
        self.provider = backend.provider
        self.deploy = backend.deploy
        self.calls = 0
        self.fired: set[str] = set()
        """The items for which code of the function met the fault."""
        self._backend = backend
        self._fault = fault
        self._always = always
        self._running = 0
        self._seen: set[str] = set()
        self._refused_until: float | None = None

    async def invoke(
        self, function: str, event: Sequence[dict[str, Any]], *, deadline_s: float, cause: Cause = Cause.CALL
    ) -> Reply:
        self.calls += 1
        ids = {str(one["id"]) for one in event}
        faulty = self._always or not ids <= self._seen
        self._seen |= ids
        if (refusal := self._refusal()) is not None:
            return Reply(fault=refusal)
        self._running += 1
        try:
            named = str(self._fault) if faulty and self._fault not in _OF_THE_PROVIDER else ""
            sent = [{**event[0], faulty_handler.FAULT: named}, *event[1:]] if named and event else event
            reply = await self._backend.invoke(function, sent, deadline_s=deadline_s, cause=cause)
        finally:
            self._running -= 1
        answers = [one for one in reply.body if isinstance(one, dict)] if isinstance(reply.body, list) else []
        self.fired |= {str(one["id"]) for one in answers if faulty_handler.FIRED in one}
        if faulty and self._fault is InjectedFault.LOST:
            bill = replace(reply.invocation, provider_id="") if reply.invocation is not None else None
            lost = InfraFault(FaultKind.UNAVAILABLE, retryable=True, detail="the connection broke")
            return Reply(fault=lost, invocation=bill)
        return reply

    def _refusal(self) -> InfraFault | None:
        now = asyncio.get_running_loop().time()
        if self._fault is InjectedFault.QUOTA and self._running >= (0 if self._always else 1):
            return _too_many(Throttle.CONCURRENCY, {})
        if self._fault is InjectedFault.RATE:
            self._refused_until = self._refused_until or now + RETRY_AFTER_S
            if self._always or now < self._refused_until:
                return _too_many(Throttle.RATE, {"Retry-After": f"{RETRY_AFTER_S:g}"})
        return None

    async def __aenter__(self) -> _FaultyBackend:
        return self

    async def __aexit__(self, *exc: object) -> None: ...


_OF_THE_PROVIDER = frozenset({None, InjectedFault.QUOTA, InjectedFault.RATE, InjectedFault.LOST})


def _too_many(throttle: Throttle, headers: Mapping[str, str]) -> InfraFault:
    body = json.dumps({"Reason": REASONS[throttle]}).encode()
    return fault_of_status(429, body, headers, datetime.datetime.now(datetime.UTC))
