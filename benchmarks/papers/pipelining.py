"""Schedules of a pipeline of F/B/W stages, by event simulation (Adaptra, arXiv 2504.19232): planned, replayed, refined.

A stage runs one operation at a time, without preemption. A forward needs the activations of the stage above, a backward
the gradient of the stage below, each one link delay after it was computed; the weights' part W needs only the stage's
own backward, and no operation depends on it. Micro-batches are processed in order at every stage.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollart.policy.pipeline import ROUNDING

LEAST_SLACK = 2
"""Slackness of a link without delay: one micro-batch on its way forward and one on its way back (Adaptra)."""


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """Seconds per micro-batch: forward, backward for the input, backward for the weights (off the critical path)."""

    forward_s: float
    backward_s: float
    weight_s: float

    def __post_init__(self) -> None:
        if not all(0 < x < math.inf for x in (self.forward_s, self.backward_s, self.weight_s)):
            raise ValueError(f"{self}: every time must be positive and finite")

    @property
    def turn_s(self) -> float:
        """One forward and one backward: the period at which a stage returns its input."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class Pipeline:
    """`delays_s[i]` is the delay that the link between stages i and i+1 adds to each activation (forward) and to each
    gradient (backward) without keeping either stage busy; shape (stages - 1,). `memory` is the most micro-batches whose
    activations a stage can hold between their forward and their backward: M / M_F of the paper."""

    stages: tuple[PipelineStage, ...]
    delays_s: tuple[float, ...]
    micro_batches: int
    memory: int | None = None

    def __post_init__(self) -> None:
        if not self.stages or len(self.delays_s) != len(self.stages) - 1:
            raise ValueError(f"{len(self.stages)} stages with {len(self.delays_s)} links: one link less than stages")
        if not all(0 <= c < math.inf for c in self.delays_s):
            raise ValueError(f"delays_s {self.delays_s}: a link's delay is finite and not negative")
        if self.micro_batches < 1 or (self.memory is not None and self.memory < 1):
            raise ValueError(f"micro_batches {self.micro_batches}, memory {self.memory}: at least 1")

    @property
    def most(self) -> int:
        """Upper bound of every quota: the number of micro-batches, or the memory for them."""
        return self.micro_batches if self.memory is None else min(self.micro_batches, self.memory)


def initial_quotas(pipeline: Pipeline) -> tuple[int, ...]:
    """In-flight micro-batches per stage before any delay is known: the first stage's capacity, spread over the links as
    evenly as possible, the first links having one more; 1 at the last stage (Adaptra's initial schedule). Without a
    bound on memory, the slack of a zero-bubble schedule: two per link."""
    links = len(pipeline.stages) - 1
    first = pipeline.most if pipeline.memory is not None else min(pipeline.most, 1 + LEAST_SLACK * links)
    quotas, share, rest = [first], *divmod(first - 1, max(links, 1))
    for link in range(links):
        quotas.append(quotas[-1] - share - (1 if link < rest else 0))
    return tuple(quotas)


def adapted_quotas(pipeline: Pipeline, *, most_slack: int | None = None) -> tuple[int, ...]:
    """In-flight micro-batches per stage that absorb the measured delays (Adaptra's adaptation): from the last stage on,
    a link's slack is the round trip of its upper stage over the period of its lower one, and at least 2.

    Bounded by the micro-batches and by memory; where memory is short, the upper links lose their slack first. The paper
    also bounds the slack by N - 2S (`most_slack`), which has no effect for many micro-batches and starves short
    iterations: by up to 31 % at N = 2S + 2.
    """
    if most_slack is not None and most_slack < 1:
        raise ValueError(f"most_slack {most_slack}: a link without slack never moves; at least 1")
    quotas = [1]
    for link in reversed(range(len(pipeline.delays_s))):
        upper, lower = pipeline.stages[link], pipeline.stages[link + 1]
        slack = max(
            math.ceil((upper.turn_s + 2 * pipeline.delays_s[link]) / lower.turn_s * (1 - ROUNDING)), LEAST_SLACK
        )
        quotas.append(quotas[-1] + (slack if most_slack is None else min(slack, most_slack)))
    return tuple(min(x, pipeline.most) for x in reversed(quotas))


def slackness(quotas: Sequence[int]) -> tuple[int, ...]:
    """Per link, how many micro-batches its upper stage has in flight beyond its lower one; shape (stages - 1,)."""
    return tuple(a - b for a, b in itertools.pairwise(quotas))


def absorbed_delay(pipeline: Pipeline, quotas: Sequence[int]) -> tuple[float, ...]:
    """Per link, the largest delay that costs nothing beyond its own two crossings: the c of `tF_i + tB_i + 2c = slack x
    (tF_{i+1} + tB_{i+1})`, which is (slack - 1) t for equal times (Adaptra, Theorem 1)."""
    stages, slack = pipeline.stages, slackness(quotas)
    return tuple(max((s * stages[i + 1].turn_s - stages[i].turn_s) / 2, 0.0) for i, s in enumerate(slack))


def accumulated_delay(pipeline: Pipeline, quotas: Sequence[int]) -> float:
    """Order of the delay of one iteration under a static order, in seconds (Adaptra, Theorem 1): c for a link whose
    delay is absorbed, N c / (slack + 1) for any other; slow links add up. A growth law with a constant of order 1, not
    a forecast: `pipelining.replayed` gives the exact figure."""
    total = 0.0
    for delay, room, slack in zip(pipeline.delays_s, absorbed_delay(pipeline, quotas), slackness(quotas), strict=True):
        absorbed = delay <= room * (1 + ROUNDING)
        total += delay if absorbed else pipeline.micro_batches * delay / (slack + 1)
    return total


SAME_TIME = 1e-9
"""Share of the shortest operation within which two events count as simultaneous: floating-point error must not order
events of equal time."""


class PipelineOp(enum.StrEnum):
    """Forward, backward for the input, backward for the weights."""

    F = "F"
    B = "B"
    W = "W"


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """One iteration: the order of operations of each stage, their start times (seconds, same shape), and the end of the
    last one. `quotas` is None for a replay."""

    orders: tuple[tuple[PipelineOp, ...], ...]
    starts_s: tuple[tuple[float, ...], ...]
    makespan_s: float
    quotas: tuple[int, ...] | None = None

    def bubble(self, pipeline: Pipeline) -> float:
        """Idle share of stage time, in [0, 1)."""
        busy = sum(s.turn_s + s.weight_s for s in pipeline.stages) * pipeline.micro_batches
        return 1.0 - busy / (self.makespan_s * len(pipeline.stages))


def planned(pipeline: Pipeline, quotas: Sequence[int]) -> PipelineSchedule:
    """The schedule that follows from quotas under the pipeline's delays: a stage runs only forwards until its quota is
    in flight; from then on B before F before W, with never more than the quota between forward and backward.

    The makespan is greedy, not optimal: a stage takes a ready operation and does not wait for a better one. Cost O(N S
    log(N S)). ValueError for quotas that cannot run.
    """
    return _Run(pipeline, tuple(quotas), None).run()


def replayed(pipeline: Pipeline, orders: Sequence[Sequence[PipelineOp]]) -> PipelineSchedule:
    """A fixed order under the pipeline's delays: a stage waits for the next operation of its list even if another is
    ready. ValueError for an order that does not have N of each operation or that deadlocks."""
    want = dict.fromkeys(PipelineOp, pipeline.micro_batches)
    if len(orders) != len(pipeline.stages) or any({op: list(o).count(op) for op in PipelineOp} != want for o in orders):
        raise ValueError(f"an order runs each of F, B, W {pipeline.micro_batches} times at each stage")
    return _Run(pipeline, None, tuple(tuple(o) for o in orders)).run()


def refined(pipeline: Pipeline, *, runs: int = 64) -> PipelineSchedule:
    """The adapted schedule, improved by simulated steps to neighbouring quotas until none is better or `runs`
    simulations were spent. Useful for stages of unequal times: the closed form considers two neighbouring stages at a
    time and was up to 16 % slower there. With equal stages it is already as good as any quotas and is returned
    unchanged. Ties keep the smaller quotas."""
    best = planned(pipeline, adapted_quotas(pipeline))
    tried = {best.quotas}
    enough = least_makespan(pipeline) * (1 + SAME_TIME)
    while best.makespan_s > enough:
        at = best
        for quotas in _neighbours(best.quotas or (), pipeline.most):
            if quotas in tried:
                continue
            if len(tried) >= runs:
                return at
            tried.add(quotas)
            other = planned(pipeline, quotas)
            if (other.makespan_s, sum(quotas)) < (at.makespan_s, sum(at.quotas or ())):
                at = other
        if at.makespan_s >= best.makespan_s * (1 - SAME_TIME):
            break
        best = at
    return best


def least_makespan(pipeline: Pipeline) -> float:
    """Lower bound in seconds for any order: a stage has all of its work to do after the first activation arrives, and
    one micro-batch must travel down and back."""
    head, bound, way = 0.0, 0.0, 0.0
    for stage, delay in zip(pipeline.stages, (*pipeline.delays_s, 0.0), strict=True):
        bound = max(bound, head + pipeline.micro_batches * (stage.turn_s + stage.weight_s))
        head += stage.forward_s + delay
        way += stage.turn_s + 2 * delay
    return max(bound, way + pipeline.stages[0].weight_s)


def check_quotas(pipeline: Pipeline, quotas: Sequence[int]) -> None:
    """ValueError for quotas that deadlock (a stage waits for more micro-batches than the stage above supplies) or do
    not fit."""
    if len(quotas) != len(pipeline.stages) or any(a < b for a, b in itertools.pairwise(quotas)):
        raise ValueError(
            f"quotas {tuple(quotas)}: one per stage ({len(pipeline.stages)}), none above the one before it"
        )
    if quotas[-1] < 1 or quotas[0] > pipeline.most:
        raise ValueError(f"quotas {tuple(quotas)}: between 1 and {pipeline.most} (micro-batches, memory)")


def _neighbours(quotas: tuple[int, ...], most: int) -> list[tuple[int, ...]]:
    """One or two more, or the maximum, for every stage up to some link; one or two less at one stage; in the order
    tried."""
    found: list[tuple[int, ...]] = []
    stages = range(len(quotas))
    for i in stages:
        for up in (1, 2, most):
            found.append(tuple(min(most, x + up) if k <= i else x for k, x in enumerate(quotas)))
        for down in (1, 2):
            found.append(tuple(x - down if k == i else x for k, x in enumerate(quotas)))
    return [x for x in found if x[-1] >= 1 and all(a >= b for a, b in itertools.pairwise(x))]


@dataclass(slots=True)
class _StageState:
    """Counts of started operations (f, b, w) and of arrived inputs; `order` is filled during the run."""

    times: dict[PipelineOp, float]
    quota: int
    fixed: tuple[PipelineOp, ...] | None
    given: int = 0
    returned: int = 0
    f: int = 0
    b: int = 0
    w: int = 0
    busy: bool = False
    order: list[PipelineOp] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)

    def ready(self, op: PipelineOp) -> bool:
        if op is PipelineOp.F:
            return self.f < self.given
        return self.b < self.returned if op is PipelineOp.B else self.w < self.b

    def choose(self) -> PipelineOp | None:
        if self.fixed is not None:
            op = self.fixed[len(self.order)] if len(self.order) < len(self.fixed) else None
            return op if op is not None and self.ready(op) else None
        if self.f < self.quota:
            return PipelineOp.F if self.f < self.given else None
        if self.b < self.returned:
            return PipelineOp.B
        if self.f < self.given and self.f - self.b < self.quota:
            return PipelineOp.F
        return PipelineOp.W if self.w < self.b else None

    def start(self, op: PipelineOp, now: float) -> None:
        self.busy = True
        self.order.append(op)
        self.starts.append(now)
        if op is PipelineOp.F:
            self.f += 1
        elif op is PipelineOp.B:
            self.b += 1
        else:
            self.w += 1


class _Run:
    """Events: (time, number, stage, operation, arrives). An event is the end of the operation or, if `arrives`, the
    arrival of its input."""

    def __init__(
        self, pipeline: Pipeline, quotas: tuple[int, ...] | None, orders: tuple[tuple[PipelineOp, ...], ...] | None
    ) -> None:
        if quotas is not None:
            check_quotas(pipeline, quotas)
        self.pipeline, self.quotas = pipeline, quotas
        self.stages = [
            _StageState(
                {PipelineOp.F: s.forward_s, PipelineOp.B: s.backward_s, PipelineOp.W: s.weight_s},
                quotas[i] if quotas else 0,
                orders[i] if orders else None,
            )
            for i, s in enumerate(pipeline.stages)
        ]
        self.stages[0].given = pipeline.micro_batches
        self.events: list[tuple[float, int, int, PipelineOp, bool]] = []
        self.number = 0
        self.end = 0.0

    def run(self) -> PipelineSchedule:
        same = SAME_TIME * min(min(s.times.values()) for s in self.stages)
        for i in range(len(self.stages)):
            self._dispatch(i, 0.0)
        while self.events:
            until = self.events[0][0] + same
            touched = set()
            while self.events and self.events[0][0] <= until:
                now, _, i, op, arrives = heapq.heappop(self.events)
                touched.add(i)
                if arrives:
                    self._arrive(i, op)
                else:
                    self._finish(i, op, now)
            for i in sorted(touched):
                self._dispatch(i, now)
        stuck = [i for i, s in enumerate(self.stages) if s.w < self.pipeline.micro_batches]
        if stuck:
            raise ValueError(f"the order of stage {stuck[0]} waits for a later operation: no deadlock-free order")
        starts = tuple(tuple(s.starts) for s in self.stages)
        return PipelineSchedule(tuple(tuple(s.order) for s in self.stages), starts, self.end, self.quotas)

    def _dispatch(self, i: int, now: float) -> None:
        stage = self.stages[i]
        op = None if stage.busy else stage.choose()
        if op is not None:
            stage.start(op, now)
            self._push(now + stage.times[op], i, op, arrives=False)

    def _finish(self, i: int, op: PipelineOp, now: float) -> None:
        """The stage is free and its result is in transfer. The last stage starts the backward of its own forward at
        once."""
        stage = self.stages[i]
        stage.busy = False
        self.end = max(self.end, now)
        if op is PipelineOp.F and i + 1 < len(self.stages):
            self._send(i + 1, op, now, self.pipeline.delays_s[i])
        elif op is PipelineOp.F:
            stage.returned += 1
        elif op is PipelineOp.B and i > 0:
            self._send(i - 1, op, now, self.pipeline.delays_s[i - 1])

    def _send(self, to: int, op: PipelineOp, now: float, delay: float) -> None:
        self._push(now + delay, to, op, arrives=True)

    def _arrive(self, i: int, op: PipelineOp) -> None:
        if op is PipelineOp.F:
            self.stages[i].given += 1
        else:
            self.stages[i].returned += 1

    def _push(self, at: float, i: int, op: PipelineOp, *, arrives: bool) -> None:
        self.number += 1
        heapq.heappush(self.events, (at, self.number, i, op, arrives))
