"""Rollout engines lent to training while a rollout ends (RollPacker §3.4).

Unfinished trajectories continue, with the tokens they have, on fewer engines. The devices of the other engines train on
finished groups, and return before the next rollout.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollart.control.trajectory import TrajectoryState
from rollart.errors import EngineError, LeaseExpired
from rollart.fleet import EngineRole
from rollart.model import EngineId, EngineStats, Purpose, TrajectoryId
from rollart.policy.parallelism import (
    LendingPlan,
    LendingRefusal,
    LendingRefusalReason,
    RolloutInstance,
    RolloutRequest,
    plan_lending,
)
from rollart.ports import Recorder, RunEvent
from rollart.serving.gateway import Gateway

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


class DeviceLender:
    """A task of the run: `run` never returns. It waits for trajectories to finish (`rolled`, unblocked by any), for the
    counters of engines, and for turns to leave a lent engine. Any task may call `give_back` at any time, and it takes
    effect at once: a publish calls it before weights move, and so does the loss of an engine, since the remaining
    engines are then too few. `borrow` is called with all engines whose devices train; it never waits.

    Invariant: engines are lent only if the remaining trajectories fit on the remaining engines, and never while weights
    move.
    """

    def __init__(
        self,
        gateway: Gateway,
        recorder: Recorder,
        borrow: Callable[[Sequence[EngineId]], None],
        *,
        settings: LendingSettings,
        behind: Callable[[], bool] = lambda: True,
    ) -> None:
        """`behind`: True if the trainer has work now; a trainer that waits for samples cannot use more devices."""
        self._behind = behind
        self._gateway = gateway
        self._recorder = recorder
        self._borrow = borrow
        self._settings = settings
        self._live: dict[TrajectoryId, TrajectoryState] = {}
        self._lengths: dict[str, list[float]] = {}
        self._recent: dict[str, deque[float]] = {}
        self._fresh: list[tuple[str, float]] = []
        self._done = self._checked = 0
        self._stirred = asyncio.Event()
        self._epoch = 0
        """Counts changes that invalidate a running decision or loan."""
        self.lent: tuple[EngineId, ...] = ()

    def began(self, live: TrajectoryState) -> None:
        if live.purpose is Purpose.TRAIN:
            self._live[live.id] = live

    def rolled(self, live: TrajectoryState) -> None:
        """Record the length of a trajectory after its last turn."""
        self._live.pop(live.id, None)
        self._done += 1
        name, length = live.domain.name, float(live.length)
        self._fresh.append((name, length))
        self._stirred.set()

    def left(self, live: TrajectoryState) -> None:
        """Forget a trajectory that ended with any outcome."""
        self._live.pop(live.id, None)

    def lost(self, engine: EngineId) -> None:
        """Return all lent engines after the loss or suspicion of an engine: the trajectories may no longer fit."""
        self.give_back(f"{engine} is in doubt")

    def give_back(self, why: str = "the rollout is over") -> None:
        """Let every lent engine serve again."""
        self._epoch += 1
        lent, self.lent = self.lent, ()
        if lent:
            self._borrow(())
            for engine in lent:
                self._gateway.take_back(engine)
            self._event("engines_returned", why, engines=" ".join(lent))

    def published(self) -> None:
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
        if 100 * self._done < 20 * total or 100 * self._done > 50 * total or not self._behind():
            return  # `plan_lending` would refuse: skip the queries of the engines
        seats = self._gateway.seats()
        stats = {e: s for e, s in (await self._gateway.stats()).items() if s.kv_tokens}
        if epoch != self._epoch or any(s.role is not EngineRole.ENGINE for s in seats.values()):
            return
        size = self._settings.bytes_per_token
        instances = [RolloutInstance(e, seats[e].tp, size * (s.kv_tokens or 0)) for e, s in stats.items() if e in seats]
        decision = plan_lending(
            self._done,
            instances,
            self._requests(stats),
            self._lengths,
            size,
            checked=self._checked,
            headroom=self._settings.headroom,
        )
        if isinstance(decision, LendingPlan):
            await self._lend(decision)
            return
        self._checked = decision.checked
        self._tell(decision)

    def _requests(self, stats: dict[EngineId, EngineStats]) -> list[RolloutRequest]:
        """Live trajectories with their engines. The progress of a turn is unknown: each is assumed to hold the mean KV
        of its engine's turns, if that is more than its context at the start."""
        homes = self._gateway.homes()
        mean = {e: s.kv_used * (s.kv_tokens or 0) / s.running for e, s in stats.items() if s.running}
        found = []
        for live in self._live.values():
            home = homes.get(live.id)
            context = live.length if home is None else max(live.length, int(mean.get(home, 0.0)))
            most = self._settings.context_tokens
            context = min(context, most)
            found.append(RolloutRequest(live.id, home, live.domain.name, context, context, most))
        return found

    async def _lend(self, decision: LendingPlan) -> None:
        epoch = self._epoch
        self.lent = tuple(EngineId(e) for e in decision.instances)
        try:
            for engine in self.lent:
                await self._gateway.lend(engine, seconds=self._settings.move_s)
                if epoch != self._epoch:  # given back meanwhile, perhaps before this engine was lent
                    self._gateway.take_back(engine)
                    return
        except (EngineError, LeaseExpired) as error:
            self.give_back(str(error))
            return
        await asyncio.sleep(self._settings.setup_s)
        if epoch != self._epoch:
            return
        self._borrow(self.lent)
        self._event(
            "engines_lent",
            " ".join(self.lent),
            devices=decision.devices,
            moved=len(decision.migrations),
            recomputed_tokens=sum(m.recompute for m in decision.migrations),
            done=self._done,
            left=len(self._live),
        )

    def _tell(self, kept: LendingRefusal) -> None:
        if kept.reason in (LendingRefusalReason.KV, LendingRefusalReason.WHOLE):
            self._event("engines_kept", kept.reason.value, why=kept.detail)

    def _event(self, kind: str, subject: str, **fields: str | int | float | bool | None) -> None:
        self._recorder.event(RunEvent(asyncio.get_running_loop().time(), kind, subject, fields))
