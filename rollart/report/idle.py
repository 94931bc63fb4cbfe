"""Estimates of unmetered worker time, from the calls. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from rollart.ledger.reader import CallRow, WorkerSum
from serverless.meter import WorkerState
from serverless.spec import FunctionSpec

ESTIMATED = frozenset({"modal"})
"""Providers that bill a container while it waits, but do not report that time to the client."""

KEEP_ALIVE_S = float(FunctionSpec.model_fields["keep_alive_s"].default)

Key = tuple[str, str, int]


def estimated_workers(calls: Iterable[CallRow], keep_s: Mapping[str, float]) -> list[WorkerSum]:
    """Worker-seconds by (function, provider, memory, state).

    A container waits between two of its calls, and after its last one, but no longer than the function's keep-alive
    (`keep_s`; the default of functions where it is unknown): then it scales down, so longer waits are not counted even
    if a minimum of containers kept it. Start-up and work are as billed. Calls of an unknown container (`worker` is
    empty) have no idle time. At most calls x keep-alive seconds are idle.
    """
    seconds: dict[Key, dict[WorkerState, float]] = defaultdict(lambda: dict.fromkeys(WorkerState, 0.0))
    until: dict[tuple[Key, str], float] = {}
    for call in sorted(calls, key=lambda c: c.t0):
        key = (call.function, call.provider, call.memory_mb)
        states = seconds[key]
        states[WorkerState.COLD] += call.cold_billed_s
        states[WorkerState.BUSY] += call.billed_s - call.cold_billed_s
        if not call.worker:
            continue
        before = until.get((key, call.worker))
        if before is not None:
            states[WorkerState.IDLE] += min(max(0.0, call.t0 - before), _keep(keep_s, key))
        until[key, call.worker] = max(call.t1, before or 0.0)
    for key, _ in until:
        seconds[key][WorkerState.IDLE] += _keep(keep_s, key)
    return [
        WorkerSum(*key, str(state), total, True)
        for key, states in sorted(seconds.items())
        for state, total in states.items()
        if total > 0
    ]


def _keep(keep_s: Mapping[str, float], key: Key) -> float:
    return keep_s.get(key[0], KEEP_ALIVE_S)
