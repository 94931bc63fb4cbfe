"""Fault injection in a simulated run: parts go down and come back on a schedule, or at seeded exponential rates.

A subject is anything with two calls, down and up; a host is several subjects that fail together. A part that is down
for two reasons comes back when both are over.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from rollart.sim.engine import ModelledEngine
from rollart.sim.environments import SimulatedHost
from rollart.sim.workload import entity_generator


@dataclass(frozen=True, slots=True)
class FaultTarget:
    """Something that can be taken down and brought back."""

    down: Callable[[], None]
    up: Callable[[], None]


def engine_target(part: ModelledEngine, version: Callable[[], int]) -> FaultTarget:
    """An engine that dies; it comes back with the result of `version`."""

    def down() -> None:
        part.fail = True

    return FaultTarget(down, lambda: part.restart(version()))


def host_target(of: SimulatedHost) -> FaultTarget:
    """A host of environments: its environments break, and it gets no new ones."""
    return FaultTarget(lambda: of.turn(up=False), lambda: of.turn(up=True))


@dataclass(frozen=True, slots=True)
class Outage:
    """These subjects are down from `at` for `seconds` (infinite: permanently)."""

    subjects: Sequence[str]
    at: float
    seconds: float = math.inf


@dataclass(frozen=True, slots=True)
class FaultRate:
    """Each of these subjects dies `every_s` after it last came back, on average, and is down for `seconds`, on average;
    both exponential. A subject has one name, or several that fail together (a host of engines)."""

    subjects: Sequence[tuple[str, ...]]
    every_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class FaultTransition:
    t: float
    subject: str
    up: bool


@dataclass
class FaultPlan:
    """Run `run` as a task beside the simulated run, and cancel it at the end. `happened` lists the transitions in
    order.

    ValueError if a plan names an unknown subject.
    """

    subjects: Mapping[str, FaultTarget]
    outages: Sequence[Outage] = ()
    rates: Sequence[FaultRate] = ()
    seed: int = 0
    happened: list[FaultTransition] = field(default_factory=list)
    _reasons: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        groups = [*(o.subjects for o in self.outages), *(s for r in self.rates for s in r.subjects)]
        for name in (name for group in groups for name in group):
            if name not in self.subjects:
                raise ValueError(f"faults of {name!r}, which is not there (rule: one of {', '.join(self.subjects)})")

    async def run(self) -> None:
        """Returns after the last transition; with rates, never."""
        loop = asyncio.get_running_loop()
        agenda: list[Iterable[tuple[float, Sequence[str], bool]]] = [
            *([(o.at, o.subjects, False), (o.at + o.seconds, o.subjects, True)] for o in self.outages),
            *(self._failures(subject, rate) for rate in self.rates for subject in rate.subjects),
        ]
        for at, names, up in heapq.merge(*agenda, key=itemgetter(0)):
            if at == math.inf:
                return
            await asyncio.sleep(at - loop.time())
            for name in names:
                self._change(name, up=up, now=loop.time())

    def _failures(self, names: Sequence[str], rate: FaultRate) -> Iterator[tuple[float, Sequence[str], bool]]:
        """Failures and recoveries of one subject, from its own generator."""
        rng = entity_generator(self.seed, "faults", *names)
        at = 0.0
        while True:
            for mean, up in ((rate.every_s, False), (rate.seconds, True)):
                at += rng.expovariate(1.0 / mean)
                yield at, names, up

    def _change(self, name: str, *, up: bool, now: float) -> None:
        """Called when a reason to be down begins or ends."""
        self._reasons[name] += -1 if up else 1
        if self._reasons[name] == (0 if up else 1):
            self.happened.append(FaultTransition(now, name, up))
            (self.subjects[name].up if up else self.subjects[name].down)()
