"""For tests and benchmarks of functions: a meter that sums calls and worker time, and an account with a limit that
several runs share."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serverless.deploy.package import Package
from serverless.meter import LeftProcesses, Saving, TokenBill, WorkerSpan, WorkerState
from serverless.providers.base import Reply
from serverless.types import Cause, FaultKind, InfraFault, Invocation, Throttle, TokenUsage
from serverless.usage import total


@dataclass(slots=True)
class FunctionUsage:
    """Totals of one function."""

    invocations: int = 0
    items: int = 0
    cold_starts: int = 0
    cold_start_s: float = 0.0
    billed_s: float = 0.0
    gb_s: float = 0.0
    saved_items: int = 0
    saved_s: float = 0.0
    tokens: list[TokenUsage] = field(default_factory=list)
    """One entry per endpoint and model."""
    worker_s: dict[WorkerState, float] = field(default_factory=lambda: dict.fromkeys(WorkerState, 0.0))
    left: list[str] = field(default_factory=list)
    """Processes that outlived their calls."""
    statuses: dict[str, int] = field(default_factory=dict)

    @property
    def total_worker_s(self) -> float:
        return sum(self.worker_s.values())


class Meter:
    """Sums calls and worker time by function."""

    def __init__(self) -> None:
        self._usage: dict[str, FunctionUsage] = {}

    @property
    def usage(self) -> Mapping[str, FunctionUsage]:
        return self._usage

    def invocation(self, invocation: Invocation) -> None:
        usage = self._usage.setdefault(invocation.function, FunctionUsage())
        usage.invocations += 1
        usage.items += invocation.items
        usage.cold_starts += invocation.cold_start_s > 0.0
        usage.cold_start_s += invocation.cold_start_s
        usage.billed_s += invocation.billed_s
        usage.gb_s += invocation.billed_s * invocation.memory_mb / 1024.0
        usage.statuses[invocation.status] = usage.statuses.get(invocation.status, 0) + 1

    def worker(self, span: WorkerSpan) -> None:
        self._usage.setdefault(span.function, FunctionUsage()).worker_s[span.state] += span.t1 - span.t0

    def saving(self, saving: Saving) -> None:
        usage = self._usage.setdefault(saving.function, FunctionUsage())
        usage.saved_items += saving.items
        usage.saved_s += saving.billed_s

    def tokens(self, bill: TokenBill) -> None:
        usage = self._usage.setdefault(bill.function, FunctionUsage())
        usage.tokens = total([*usage.tokens, bill.usage])

    def left(self, left: LeftProcesses) -> None:
        self._usage.setdefault(left.function, FunctionUsage()).left.append(left.processes)


class LimitedAccount:
    """A provider's account on virtual time that runs at most `capacity` calls at once, of any number of runs. With
    `dips` it runs `dips` calls at most in the last 0.3 s of each second."""

    def __init__(self, capacity: int, *, dips: int | None = None) -> None:
        self.full = capacity
        self._dips = dips
        self.running = 0

    @property
    def capacity(self) -> int:
        now = asyncio.get_running_loop().time()
        return self._dips if self._dips is not None and now % 1.0 >= 0.7 else self.full

    def backend(
        self,
        call_s: float,
        *,
        spread: float = 0.0,
        network_s: float = 0.0,
        throttle: Throttle | None = Throttle.CONCURRENCY,
        retry_after_s: float | None = None,
        seed: int = 0,
    ) -> LimitedBackend:
        """A run's backend in this account."""
        return LimitedBackend(self, call_s, spread, network_s, throttle, retry_after_s, seed)


class LimitedBackend:
    """Calls of one run in an account. A call takes `call_s`, give or take a share `spread`, and `network_s` before and
    after it. A call above the account's capacity is refused with `throttle` and `retry_after_s`, after 5 ms if there is
    no network. A call that is repeated earlier than its refusal permits fails an assertion."""

    provider = "limited"

    def __init__(
        self,
        account: LimitedAccount,
        call_s: float,
        spread: float,
        network_s: float,
        throttle: Throttle | None,
        retry_after_s: float | None,
        seed: int,
    ) -> None:
        self._account = account
        self._range = call_s * (1.0 - spread), call_s * (1.0 + spread)
        self._rng = random.Random(seed)
        self._network_s = network_s
        self._fault = InfraFault(FaultKind.THROTTLED, True, "too many calls", throttle, retry_after_s)
        self._permitted: dict[str, float] = {}
        self.refused = 0
        self.ended: list[float] = []
        """The times at which calls ended."""

    async def deploy(self, package: Package) -> None: ...

    async def invoke(
        self, function: str, event: Sequence[dict[str, Any]], *, deadline_s: float, cause: Cause = Cause.CALL
    ) -> Reply:
        loop = asyncio.get_running_loop()
        began, account = loop.time(), self._account
        assert began >= self._permitted.get(event[0]["id"], 0.0) - 1e-9, "a refused call was repeated too early"
        if self._network_s:
            await asyncio.sleep(self._network_s)
        if account.running >= account.capacity:
            self.refused += 1
            await asyncio.sleep(self._network_s or 0.005)
            self._permitted[event[0]["id"]] = loop.time() + (self._fault.retry_after_s or 0.0)
            return Reply(fault=self._fault)
        account.running += 1
        call_s = self._rng.uniform(*self._range)
        try:
            await asyncio.sleep(call_s)
        finally:
            account.running -= 1
        self.ended.append(loop.time())
        if self._network_s:
            await asyncio.sleep(self._network_s)
        now = loop.time()
        bill = Invocation(function, self.provider, "w", began, now, 0.0, call_s, 512, len(event), "ok", cause)
        return Reply([{"id": e["id"], "aggregate_reward_score": 1.0, "metrics_list": []} for e in event], None, bill)

    async def __aenter__(self) -> LimitedBackend:
        return self

    async def __aexit__(self, *exc: object) -> None: ...


def fairness(shares: Sequence[float]) -> float:
    """Jain's index: 1 if all shares are equal, 1/n if one run has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 0.0
