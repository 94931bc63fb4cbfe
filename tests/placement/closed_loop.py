"""A discrete-event simulation of a plan: trajectories in a closed loop over engines whose steps take the time of the
performance model. It knows plans, but not how they are found."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from placement.problem import DomainProfile, Problem
from placement.roofline import Roofline
from placement.types import Flow, KvMode, Placement, Role

__all__ = ["Measured", "simulate"]

Resume = Callable[[], None]
Step = Callable[[Resume], None]
Key = tuple[str, Role, int]


class Clock:
    """Calls in order of their time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._calls: list[tuple[float, int, Resume]] = []

    def after(self, seconds: float, call: Resume) -> None:
        heapq.heappush(self._calls, (self.now + seconds, next(self._order), call))

    def run(self, until: float) -> None:
        while self._calls and self._calls[0][0] <= until:
            self.now, _, call = heapq.heappop(self._calls)
            call()
        self.now = until


@dataclass
class Prompt:
    """`new` tokens to compute after `cached` ones, then `output` to generate, the first of them by the prefill."""

    new: float
    cached: float
    output: int
    begun: Resume
    done: Resume


class Engine:
    """Continuous batching. A prompt is prefilled in its own step while generating sequences wait. With `overlap` it is
    prefilled beside them, as the roofline's ideal of chunked prefill: arithmetic of the prefill over memory traffic of
    the decodes. Without a prompt, steps up to the next end or arrival are taken at once. `left_gb` of KV are not
    promised to any trajectory."""

    def __init__(self, clock: Clock, model: Roofline, *, prefills: bool, decodes: bool, overlap: bool) -> None:
        self.clock, self.model, self.prefills, self.decodes, self.overlap = clock, model, prefills, decodes, overlap
        self.left_gb = model.kv_capacity_bytes / 1e9
        self.residents, self.busy_s = 0, 0.0
        self._queue: deque[Prompt] = deque()
        self._ends: list[tuple[int, int, float, Resume]] = []  # step, order, its context less the steps before it
        self._order = itertools.count()
        self._steps, self._context = 0, 0.0
        self._jump: tuple[float, float, int] | None = None  # when it began, seconds and number of its steps
        self._stepping = False
        self._turn = 0

    def submit(self, prompt: Prompt) -> None:
        self._queue.append(prompt)
        if not self._stepping:
            self._next()
        elif self._jump is not None:
            began, each, count = self._jump
            made = min(count, math.ceil((self.clock.now - began) / each))
            self._jump = (began, each, made)
            self._end_of_jump(began + made * each - self.clock.now, made)

    def _next(self) -> None:
        while self._queue and not self.prefills:  # decoding only: the KV has come, generation starts
            self._join(self._queue.popleft(), 0)
        running = len(self._ends)
        mean = self._context / running + self._steps if running else 0.0
        self._stepping = bool(self._queue or running)
        if self._queue:
            prompt = self._queue.popleft()
            prompt.begun()
            seconds = self.model.prefill_s(prompt.new, prompt.cached)
            if running and self.overlap:
                seconds = self.model.constants.request_s
                seconds += self.model.mixed_step_s(running, mean, prompt.new, prompt.cached)
            self.busy_s += seconds
            self.clock.after(seconds, lambda: self._prefilled(prompt))
        elif running:
            count = max(1, self._ends[0][0] - self._steps)
            each = self.model.decode_step_s(running, mean + count / 2)
            self._jump = (self.clock.now, each, count)
            self._end_of_jump(each * count, count)

    def _prefilled(self, prompt: Prompt) -> None:
        self._advance(1 if self._ends and self.overlap else 0)
        if self.decodes and prompt.output > 1:
            self._join(prompt, 1)
        else:
            self.clock.after(0.0, prompt.done)
        self._next()

    def _end_of_jump(self, seconds: float, count: int) -> None:
        self._turn += 1
        mine = self._turn

        def end() -> None:
            if mine == self._turn and self._jump is not None:
                self.busy_s += self._jump[1] * count
                self._jump = None
                self._advance(count)
                self._next()

        self.clock.after(max(0.0, seconds), end)

    def _join(self, prompt: Prompt, made: int) -> None:
        base = prompt.new + prompt.cached + made - self._steps
        self._context += base
        heapq.heappush(self._ends, (self._steps + prompt.output - made, next(self._order), base, prompt.done))

    def _advance(self, count: int) -> None:
        self._steps += count
        while self._ends and self._ends[0][0] <= self._steps:
            _, _, base, done = heapq.heappop(self._ends)
            self._context -= base
            self.clock.after(0.0, done)


@dataclass
class Wire:
    """One transfer at a time."""

    clock: Clock
    gb_per_s: float
    latency_s: float
    free: float = 0.0

    def send(self, gb: float, resume: Resume) -> None:
        self.free = max(self.free, self.clock.now) + gb / self.gb_per_s
        self.clock.after(self.free - self.clock.now + self.latency_s, resume)


@dataclass
class Measured:
    """Trajectories/s, by deployment the share of its time and the mean GB of KV of one replica, and mean seconds."""

    rate: float
    utilisation: dict[Key, float]
    kv_gb: dict[Key, float]
    seconds: float
    finished: int


@dataclass
class _Totals:
    since: float = 0.0
    finished: int = 0
    seconds: float = 0.0
    kv: dict[Key, float] = field(default_factory=dict)


class _Loop:
    def __init__(self, problem: Problem, plan: Placement, seed: int, overlap: bool) -> None:
        self.problem, self.plan, self.random, self.clock = problem, plan, random.Random(seed), Clock()
        self.totals = _Totals()
        pools = {p.name: p for p in problem.pools}
        self.engines: dict[Key, list[Engine]] = {}
        for d in plan.deployments:
            if d.role in (Role.ENGINE, Role.PREFILL, Role.DECODE):
                model = problem.performance.instance(pools[d.pool].device, d.tp)
                assert isinstance(model, Roofline)
                first, last = d.role is not Role.DECODE, d.role is not Role.PREFILL
                self.engines[d.pool, d.role, d.tp] = [
                    Engine(self.clock, model, prefills=first, decodes=last, overlap=overlap) for _ in range(d.replicas)
                ]
        self.wires = {(min(x.a, x.b), max(x.a, x.b)): Wire(self.clock, x.gb_per_s, x.latency_s) for x in problem.links}
        self.waiting: list[Resume] = []
        self._taken = [0.0] * len(plan.flows)

    def flow(self) -> Flow:
        """The candidate that is furthest behind its share: domains by weight, and paths by rate."""
        rates = [f.rate for f in self.plan.flows]
        i = min(range(len(rates)), key=lambda k: (self._taken[k] / rates[k], k))
        self._taken[i] += 1
        return self.plan.flows[i]

    def admit(self, keys: list[Key], stays: list[Key], gb: float) -> Generator[Step, None, list[Engine]]:
        """An engine of each, the one with the fewest trajectories, once there is room for `gb` of KV where it stays."""
        while True:
            some = [min(self.engines[k], key=lambda e: (k in stays and e.left_gb < gb, e.residents)) for k in keys]
            if all(e.left_gb >= gb or k not in stays for e, k in zip(some, keys, strict=True)):
                break
            yield self.waiting.append
        for engine, key in zip(some, keys, strict=True):
            engine.residents += 1
            engine.left_gb -= gb if key in stays else 0.0
        return some

    def leave(self, some: list[Engine], keys: list[Key], stays: list[Key], gb: float) -> None:
        for engine, key in zip(some, keys, strict=True):
            engine.residents -= 1
            engine.left_gb += gb if key in stays else 0.0
        again, self.waiting = self.waiting, []
        for resume in again:
            self.clock.after(0.0, resume)

    def slot(self, wait: float) -> Generator[Step, None, None]:
        """One trajectory after the other."""
        yield lambda resume: self.clock.after(wait, resume)
        domains = {d.name: d for d in self.problem.domains}
        while True:
            flow, began = self.flow(), self.clock.now
            yield from self.trajectory(flow, domains[flow.domain])
            self.totals.finished += 1
            self.totals.seconds += self.clock.now - began

    def trajectory(self, flow: Flow, d: DomainProfile) -> Generator[Step, None, None]:
        apart = flow.prefill_pool is not None and flow.prefill_tp is not None
        last_key: Key = (flow.pool, Role.DECODE if apart else Role.ENGINE, flow.tp)
        first_key: Key = (flow.prefill_pool or flow.pool, Role.PREFILL, flow.prefill_tp or flow.tp)
        keys = [last_key, first_key] if apart else [last_key]
        stays = [k for k in keys if self.keeps(flow, k)]
        gb = self.mean_gb(d)
        some = yield from self.admit(keys, stays, gb)
        last, first = some[0], some[-1]
        wire = self.wires[min(flow.pool, first_key[0]), max(flow.pool, first_key[0])] if apart else None
        env, prefix, context, output = d.environment, d.prompt.mean * d.shared_prefix, 0.0, 0
        yield self.sleep(env.reset_s)
        for number in range(round(d.turns.mean)):
            prompt = d.prompt.mean if number == 0 else context + d.new_tokens.mean
            cached = prefix if number == 0 or flow.kv is KvMode.RECOMPUTE else context
            sent, back, output = prompt - (prefix if number == 0 else context), output, self.output(d)
            work = Prompt(max(1.0, prompt - cached), cached, output, _nothing, _nothing)
            if wire is None:
                yield self.on(last, work, stays if number else [], context, [last_key], prompt + output / 2)
            else:
                if number:
                    home = context - prefix if flow.kv is KvMode.PULL else back
                    yield self.held(last_key, prompt, self.held(first_key, prompt, self.over(wire, home)))
                yield self.on(first, work, stays if number else [], context, [first_key, last_key], prompt)
                yield self.held(last_key, prompt, self.held(first_key, prompt, self.over(wire, sent)))
                work = Prompt(prompt, 0.0, output, _nothing, _nothing)
                rest = self.held(last_key, prompt + output / 2, self.on(last, work, [], 0.0, [], 0.0))
                follows = number + 1 < round(d.turns.mean) or not d.last_turn_known
                yield self.held(first_key, prompt, rest) if flow.kv is KvMode.KEEP and follows else rest
            context = prompt + output
            wait = self.sleep(env.wait_s)
            for key in stays if number + 1 < round(d.turns.mean) else []:
                wait = self.held(key, context, wait)
            yield wait
        self.leave(some, keys, stays, gb)

    def mean_gb(self, d: DomainProfile) -> float:
        """KV that admission promises to a trajectory, over its turns. Not all trajectories are at their longest at
        once."""
        each = d.new_tokens.mean + d.output_tokens.mean
        middle = d.prompt.mean + d.output_tokens.mean / 2 + each * (d.turns.mean - 1) / 2
        return self.problem.performance.shape.kv_bytes(middle) / 1e9

    def keeps(self, flow: Flow, key: Key) -> bool:
        """Whether a trajectory's KV stays there between its turns."""
        return flow.kv is KvMode.KEEP or (flow.kv is KvMode.PULL and key[1] is Role.DECODE)

    def output(self, d: DomainProfile) -> int:
        return max(1, round(d.output_tokens.mean * self.random.uniform(0.5, 1.5)))

    def sleep(self, seconds: float) -> Step:
        return lambda resume: self.clock.after(seconds, resume)

    def on(
        self, engine: Engine, prompt: Prompt, queued: list[Key], before: float, running: list[Key], after: float
    ) -> Step:
        """Serves the prompt. Until it begins, the KV of `before` tokens is held in `queued`, then that of `after`."""

        def step(resume: Resume) -> None:
            arrived = self.clock.now

            def begun() -> None:
                nonlocal arrived
                for key in queued:
                    self.count(key, before, arrived)
                arrived = self.clock.now

            def done() -> None:
                for key in running:
                    self.count(key, after, arrived)
                resume()

            prompt.begun, prompt.done = begun, done
            engine.submit(prompt)

        return step

    def over(self, wire: Wire, tokens: float) -> Step:
        return lambda resume: wire.send(self.problem.performance.shape.kv_bytes(tokens) / 1e9, resume)

    def held(self, key: Key, tokens: float, step: Step) -> Step:
        """Counts the KV of `tokens` there for as long as the step takes."""

        def counted(resume: Resume) -> None:
            began = self.clock.now

            def ended() -> None:
                self.count(key, tokens, began)
                resume()

            step(ended)

        return counted

    def count(self, key: Key, tokens: float, began: float) -> None:
        gb = self.problem.performance.shape.kv_bytes(tokens) / 1e9
        self.totals.kv[key] = self.totals.kv.get(key, 0.0) + gb * (self.clock.now - max(began, self.totals.since))


def _nothing() -> None: ...


def _run(process: Generator[Step, None, None]) -> None:
    def resume() -> None:
        next(process)(resume)

    resume()


def simulate(
    problem: Problem, plan: Placement, *, lengths: float = 4.0, seed: int = 0, overlap: bool = False
) -> Measured:
    """Simulate as many trajectories in flight as the plan has, for some mean durations after the warm-up."""
    loop = _Loop(problem, plan, seed, overlap)
    under_way = max(1, round(sum(f.rate * f.seconds for f in plan.flows)))
    mean = under_way / plan.rate
    for i in range(under_way):
        _run(loop.slot(mean * i / under_way))
    loop.clock.run(3 * mean)
    loop.totals = _Totals(since=loop.clock.now)
    for engine in itertools.chain(*loop.engines.values()):
        engine.busy_s = 0.0
    loop.clock.run((3 + lengths) * mean)
    seconds = lengths * mean
    return Measured(
        rate=loop.totals.finished / seconds,
        utilisation={k: sum(e.busy_s for e in v) / len(v) / seconds for k, v in loop.engines.items()},
        kv_gb={k: loop.totals.kv.get(k, 0.0) / seconds / len(v) for k, v in loop.engines.items()},
        seconds=loop.totals.seconds / max(1, loop.totals.finished),
        finished=loop.totals.finished,
    )
