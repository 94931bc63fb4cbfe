"""Rollout engines lent to training while a rollout ends (RollPacker, arXiv 2509.21009, §3.4).

Unfinished trajectories continue, with the tokens they have, on fewer engines. The devices of the other engines train on
finished groups, and return before the next rollout. `plan_lending` is pure: values in, a plan or a refusal with its
reason out.
"""

from __future__ import annotations

import asyncio
import enum
import heapq
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from rollart.control.strategy import RolloutStrategy
from rollart.control.trajectory import TrajectoryState
from rollart.errors import EngineError, LeaseExpired
from rollart.fleet import EngineRole
from rollart.model import EngineId, EngineStats, Group, Purpose, TrajectoryId
from rollart.policy.lengths import conditional_quantile
from rollart.ports import Recorder, RunEvent
from rollart.serving.gateway import Gateway

LEND_FROM, LEND_TO, LEND_EVERY = 20, 50, 5
"""Percent of a rollout's requests that are done: lending is considered from `LEND_FROM` to `LEND_TO`, once per
`LEND_EVERY` (RollPacker). Earlier, too much KV is in use; later, too little of the rollout is left to pay for the
move."""

LEND_QUANTILE = 0.9
"""Quantile of a request's final length, given its length so far. Summed over requests it is well above the total that
they will need, which is the margin: a wrong decision to lend costs preemptions, a wrong refusal only the gain."""


@dataclass(frozen=True, slots=True)
class RolloutInstance:
    """One rollout engine: a whole TP group. `kv_bytes` is its room for KV cache."""

    id: str
    devices: int
    kv_bytes: float


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """An unfinished response: its instance (None: it waits), its context in tokens with the prompt (the KV that it
    holds), the tokens generated so far, and the most that it may generate."""

    id: str
    instance: str | None
    domain: str
    context: int
    generated: int
    most_tokens: int


@dataclass(frozen=True, slots=True)
class Migration:
    """The request continues on `target` with its tokens; `recompute` of them are prefilled again (its KV)."""

    request: str
    source: str | None
    target: str
    recompute: int


class LendingRefusalReason(enum.Enum):
    """Why no instance is lent now."""

    EARLY = "early"
    LATE = "late"
    CHECKED = "checked"
    """This interval of progress was checked already."""
    WHOLE = "whole"
    """No half exists without splitting a TP group."""
    KV = "kv"
    """The remaining requests would not fit on the remaining instances."""


@dataclass(frozen=True, slots=True)
class LendingPlan:
    """The instances that go to training, and the migrations that precede it. `peak_bytes` is the projected peak KV of
    each remaining instance."""

    instances: tuple[str, ...]
    devices: int
    migrations: tuple[Migration, ...]
    peak_bytes: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class LendingRefusal:
    """`checked`, the number of checks so far, is passed to the next call."""

    reason: LendingRefusalReason
    checked: int
    detail: str


def plan_lending(
    done: int,
    instances: Sequence[RolloutInstance],
    requests: Sequence[RolloutRequest],
    lengths: Mapping[str, Sequence[float]],
    bytes_per_token: float,
    *,
    checked: int = 0,
    quantile: float = LEND_QUANTILE,
    headroom: float = 1.0,
) -> LendingPlan | LendingRefusal:
    """Whether half of the rollout instances can train for the rest of this rollout. `done` counts finished requests,
    `requests` are unfinished; `lengths` are generated tokens of finished responses per domain, ascending.

    Considered from 20 % to 50 % done, once per 5 %. The loan is half of the devices, or the next smaller set that
    splits no TP group; among several sets, the one with the fewest tokens to prefill again, then the
    first in the given order. Instances are lent only if every remaining instance has room, times `headroom`, for the
    projected peak KV of its requests. A request of a domain without longer finished responses is assumed to reach its
    limit.
    """
    total = done + len(requests)
    if 100 * done < LEND_FROM * total or total == 0:
        return LendingRefusal(LendingRefusalReason.EARLY, checked, f"{done} of {total} done is less than {LEND_FROM} %")
    if 100 * done > LEND_TO * total:
        return LendingRefusal(LendingRefusalReason.LATE, checked, f"{done} of {total} done is more than {LEND_TO} %")
    interval = (100 * done - LEND_FROM * total) // (LEND_EVERY * total) + 1
    if interval <= checked:
        return LendingRefusal(
            LendingRefusalReason.CHECKED, checked, f"looked at within this {LEND_EVERY} % of progress"
        )
    held: dict[str, int] = defaultdict(int)
    for request in requests:
        if request.instance is not None:
            held[request.instance] += request.context
    lent = _half(instances, held)
    if not lent:
        return LendingRefusal(
            LendingRefusalReason.WHOLE,
            interval,
            f"no half of {len(instances)} instances leaves TP groups whole",
        )
    staying = [x for x in instances if x.id not in lent]
    placed, migrations = _placed(requests, staying, lengths, quantile)
    peaks = {x.id: peak_kv_tokens(placed[x.id]) * bytes_per_token for x in staying}
    for x in staying:
        if peaks[x.id] > headroom * x.kv_bytes:
            detail = f"{x.id} would need {peaks[x.id] / 1e9:.3g} GB of KV and has {headroom * x.kv_bytes / 1e9:.3g} GB"
            return LendingRefusal(LendingRefusalReason.KV, interval, detail)
    devices = sum(x.devices for x in instances if x.id in lent)
    return LendingPlan(tuple(x.id for x in instances if x.id in lent), devices, tuple(migrations), peaks)


def peak_kv_tokens(requests: Iterable[tuple[float, float]]) -> float:
    """The most tokens of KV that (context, remaining tokens) pairs hold together, when each gets one token per step
    until it is done. O(n log n): the peak is at the end of one of them."""
    peak = contexts = 0.0
    for n, (context, rest) in enumerate(sorted(requests, key=lambda x: -x[1]), 1):
        contexts += context
        peak = max(peak, contexts + n * rest)
    return peak


def _half(instances: Sequence[RolloutInstance], held: Mapping[str, int]) -> frozenset[str]:
    """Subset sum: the most devices up to half, then the fewest held tokens, then the given order."""
    room = sum(x.devices for x in instances) // 2
    cost: dict[int, int] = {0: 0}
    choices: list[dict[int, int]] = []
    for x in instances:
        chosen: dict[int, int] = {}
        for reached, so_far in sorted(cost.items(), reverse=True):
            to, tokens = reached + x.devices, so_far + held.get(x.id, 0)
            if to <= room and (to not in cost or tokens < cost[to]):
                cost[to] = tokens
                chosen[to] = reached
        choices.append(chosen)
    devices = max(cost)
    lent: set[str] = set()
    for x, chosen in zip(reversed(instances), reversed(choices), strict=True):
        if devices in chosen:
            lent.add(x.id)
            devices = chosen[devices]
    return frozenset(lent)


def _placed(
    requests: Sequence[RolloutRequest],
    staying: Sequence[RolloutInstance],
    lengths: Mapping[str, Sequence[float]],
    quantile: float,
) -> tuple[dict[str, list[tuple[float, float]]], list[Migration]]:
    """(context, remaining tokens) of the requests of each remaining instance. Requests that run there stay; the others
    are placed, the largest first, on the least full instance (relative to its own room; ties go to the given order)."""
    placed: dict[str, list[tuple[float, float]]] = {x.id: [] for x in staying}
    full = dict.fromkeys(placed, 0.0)
    moving = []
    for request in requests:
        load = float(request.context), _rest(request, lengths, quantile)
        if request.instance in placed:
            placed[request.instance].append(load)
            full[request.instance] += sum(load)
        else:
            moving.append((request, load))
    free = [(full[x.id] / x.kv_bytes, n) for n, x in enumerate(staying)]
    heapq.heapify(free)
    migrations = []
    for request, load in sorted(moving, key=lambda x: -sum(x[1])):
        share, n = free[0]
        target = staying[n]
        heapq.heapreplace(free, (share + sum(load) / target.kv_bytes, n))
        placed[target.id].append(load)
        migrations.append(Migration(request.id, request.instance, target.id, request.context))
    return placed, migrations


def _rest(request: RolloutRequest, lengths: Mapping[str, Sequence[float]], quantile: float) -> float:
    limit = float(max(request.most_tokens - request.generated, 0))
    final = conditional_quantile(lengths.get(request.domain, ()), request.generated, quantile)
    return limit if final is None else min(final - request.generated, limit)


HISTORY = 2000
"""Lengths of finished trajectories that are kept per domain: enough for a quantile of the longest percent."""


@dataclass(frozen=True, slots=True)
class LendingSettings:
    """`setup_s`: seconds until lent devices train, since the trainer's state is transferred to them. The projected peak
    of KV must fit into `headroom` times the memory of each remaining engine. The attempt ends if turns do not leave an
    engine within `move_s`. `context_tokens` bounds a trajectory."""

    setup_s: float = 10.0
    headroom: float = 1.0
    move_s: float = 60.0
    context_tokens: int = 4096
    bytes_per_token: float = 1.0
    """KV bytes per token."""


@dataclass(eq=False)
class DeviceLender(RolloutStrategy):
    """A task of the run: `run` never returns. It waits for trajectories to finish (`rolled`, unblocked by any), for the
    counters of engines, and for turns to leave a lent engine. Any task may call `give_back` at any time, and it takes
    effect at once: a publish calls it before weights move, and so does the loss of an engine, since the remaining
    engines are then too few. `borrow` is called with all engines whose devices train; it never waits.

    Invariant: engines are lent only if the remaining trajectories fit on the remaining engines, and never while weights
    move. `behind`: True if the trainer has work now; a trainer that waits for samples cannot use more devices.
    """

    gateway: Gateway
    recorder: Recorder
    borrow: Callable[[Sequence[EngineId]], None]
    _: KW_ONLY
    settings: LendingSettings
    behind: Callable[[], bool] = lambda: True

    def __post_init__(self) -> None:
        self._live: dict[TrajectoryId, TrajectoryState] = {}
        self._lengths: dict[str, list[float]] = {}
        self._recent: dict[str, deque[float]] = {}
        self._fresh: list[tuple[str, float]] = []
        self._done = self._checked = 0
        self._stirred = asyncio.Event()
        self._epoch = 0
        """Counts changes that invalidate a running decision or loan."""
        self.lent: tuple[EngineId, ...] = ()

    def began(self, state: TrajectoryState) -> None:
        if state.purpose is Purpose.TRAIN:
            self._live[state.id] = state

    def rolled(self, state: TrajectoryState) -> None:
        self._live.pop(state.id, None)
        self._done += 1
        name, length = state.domain.name, float(state.length)
        self._fresh.append((name, length))
        self._stirred.set()

    def left(self, state: TrajectoryState) -> None:
        self._live.pop(state.id, None)

    def lost(self, engine: EngineId) -> None:
        """Return all lent engines after the loss or suspicion of an engine: the trajectories may no longer fit."""
        self.give_back(f"{engine} is in doubt")

    def give_back(self, why: str = "the rollout is over") -> None:
        """Let every lent engine serve again."""
        self._epoch += 1
        lent, self.lent = self.lent, ()
        if lent:
            self.borrow(())
            for engine in lent:
                self.gateway.take_back(engine)
            self._event("engines_returned", why, engines=" ".join(lent))

    def before_publish(self) -> None:
        self.give_back()

    def background(self) -> Mapping[str, Callable[[], Coroutine[Any, Any, None]]]:
        return {"lending": self.run}

    def published(self, version: int, consumed: Sequence[Group]) -> None:
        """The next rollout begins. Lengths enter the history only now: during a rollout, the ended trajectories are the
        short ones."""
        self._done = self._checked = 0
        for name, length in self._fresh:
            recent, ascending = self._recent.setdefault(name, deque()), self._lengths.setdefault(name, [])
            recent.append(length)
            insort(ascending, length)
            if len(recent) > HISTORY:
                ascending.remove(recent.popleft())
        self._fresh.clear()

    async def run(self) -> None:
        while True:
            await self._stirred.wait()
            self._stirred.clear()
            if not self.lent:
                await self._look()

    async def _look(self) -> None:
        epoch = self._epoch
        total = self._done + len(self._live)
        if 100 * self._done < 20 * total or 100 * self._done > 50 * total or not self.behind():
            return  # `plan_lending` would refuse: skip the queries of the engines
        seats = self.gateway.seats()
        stats = {e: s for e, s in (await self.gateway.stats()).items() if s.kv_tokens}
        if epoch != self._epoch or any(s.role is not EngineRole.ENGINE for s in seats.values()):
            return
        size = self.settings.bytes_per_token
        instances = [RolloutInstance(e, seats[e].tp, size * (s.kv_tokens or 0)) for e, s in stats.items() if e in seats]
        decision = plan_lending(
            self._done,
            instances,
            self._requests(stats),
            self._lengths,
            size,
            checked=self._checked,
            headroom=self.settings.headroom,
        )
        if isinstance(decision, LendingPlan):
            await self._lend(decision)
            return
        self._checked = decision.checked
        self._report(decision)

    def _requests(self, stats: dict[EngineId, EngineStats]) -> list[RolloutRequest]:
        """Live trajectories with their engines. The progress of a turn is unknown: each is assumed to hold the mean KV
        of its engine's turns, if that is more than its context at the start."""
        assignments = self.gateway.assignments()
        mean = {e: s.kv_used * (s.kv_tokens or 0) / s.running for e, s in stats.items() if s.running}
        found = []
        for state in self._live.values():
            sticky = assignments.get(state.id)
            context = state.length if sticky is None else max(state.length, int(mean.get(sticky, 0.0)))
            most = self.settings.context_tokens
            context = min(context, most)
            found.append(RolloutRequest(state.id, sticky, state.domain.name, context, context, most))
        return found

    async def _lend(self, decision: LendingPlan) -> None:
        epoch = self._epoch
        self.lent = tuple(EngineId(e) for e in decision.instances)
        try:
            for engine in self.lent:
                await self.gateway.lend(engine, seconds=self.settings.move_s)
                if epoch != self._epoch:  # given back meanwhile, perhaps before this engine was lent
                    self.gateway.take_back(engine)
                    return
        except (EngineError, LeaseExpired) as error:
            self.give_back(str(error))
            return
        await asyncio.sleep(self.settings.setup_s)
        if epoch != self._epoch:
            return
        self.borrow(self.lent)
        self._event(
            "engines_lent",
            " ".join(self.lent),
            devices=decision.devices,
            moved=len(decision.migrations),
            recomputed_tokens=sum(m.recompute for m in decision.migrations),
            done=self._done,
            left=len(self._live),
        )

    def _report(self, kept: LendingRefusal) -> None:
        if kept.reason in (LendingRefusalReason.KV, LendingRefusalReason.WHOLE):
            self._event("engines_kept", kept.reason.value, why=kept.detail)

    def _event(self, kind: str, subject: str, **fields: str | int | float | bool | None) -> None:
        self.recorder.event(RunEvent(asyncio.get_running_loop().time(), kind, subject, fields))
