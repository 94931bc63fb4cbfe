"""The same engine by brute force: time goes on in small pieces of a step, and everything is added up anew in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollart.sim.steps import PrefillWork, StepModel

PIECE = 1 / 32
"""Of a step, that time goes on by."""


@dataclass
class Ask:
    at: float
    prompt: int
    output: int
    done: float = 0.0
    phase: str = "later"
    finished: float = -1.0
    preempted: int = 0


def simulate(asks: Sequence[Ask], model: StepModel, *, slots: int, chunk: int, kv: int, watermark: int) -> None:
    """Fills in `finished` and `preempted`. Each request has its own session, which is not used again."""
    now, waiting, work, left = 0.0, [], None, 0.0
    later = sorted(asks, key=lambda a: a.at)
    while any(a.finished < 0 for a in asks):
        while later and later[0].at <= now:
            later[0].phase = "waiting"
            waiting.append(later.pop(0))
        running = [a for a in asks if a.phase == "decode"]
        if work is None:
            work = _admit(waiting, asks, model, slots=slots, chunk=chunk, kv=kv, watermark=watermark)
            left = 0.0 if work is None else work.steps
        if work is None and not running:
            now = later[0].at
            continue
        piece = min([PIECE, *([left] if work else []), *(a.output - a.done for a in running)])
        n = len(running)
        context = sum(a.prompt + a.done + piece / 2 - 0.5 for a in running)
        lines = model.decoding(n) if work is None else model.mixed(n, work)
        now += piece * lines.at(context)
        for a in running:
            a.done += piece
        left -= piece
        for a in running:
            if a.done >= a.output - 1e-9:
                a.phase, a.finished = "over", now
        if work is not None and left <= 1e-9:
            work = None
            for a in asks:
                if a.phase == "prefill":
                    a.done, a.phase = a.done + 1, "decode"
                    if a.done >= a.output:
                        a.phase, a.finished = "over", now
        _preempt(asks, waiting, kv)


def _admit(
    waiting: list[Ask], asks: Sequence[Ask], model: StepModel, *, slots: int, chunk: int, kv: int, watermark: int
) -> PrefillWork | None:
    running = sum(a.phase == "decode" for a in asks)
    budget = max(chunk - running, chunk // 4, 1)
    taken: list[Ask] = []
    while waiting and sum(a.prompt + int(a.done) for a in taken) < budget and running + len(taken) < slots:
        need = waiting[0].prompt + int(waiting[0].done) + 1
        used = sum(a.prompt + a.done + (a.phase == "prefill") for a in asks if a.phase in ("decode", "prefill"))
        if need + (watermark if running or taken else 0) > kv - used:
            break
        taken.append(waiting.pop(0))
        taken[-1].phase = "prefill"
    return model.work([(a.prompt + int(a.done), 0) for a in taken], budget) if taken else None


def _preempt(asks: Sequence[Ask], waiting: list[Ask], kv: int) -> None:
    while True:
        running = [a for a in asks if a.phase == "decode"]
        held = sum(a.prompt + a.done + 1 for a in asks if a.phase == "prefill")
        if not running or sum(a.prompt + a.done for a in running) + held < kv - 1e-9:
            return
        victim = max(running, key=lambda a: a.at)
        victim.phase, victim.done, victim.preempted = "waiting", float(int(victim.done + 1e-6)), victim.preempted + 1
        waiting.insert(0, victim)
