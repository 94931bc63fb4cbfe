"""What a person watching sees: of `rollart launch` one line per event worth one and one per training step; of
`rollart simulate` how far each simulation is."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from rollart.cli.context import say
from rollart.ports import RunEvent

if TYPE_CHECKING:
    from rollart.compose.simulations import Progress

__all__ = ["ProgressLines", "SimulationProgress", "tidy"]

EVERY_S = 10.0
"""Seconds between two lines about simulations where they stay, as in a log."""
REDRAWN_S = 0.2
"""And where they are written over, at a terminal."""

BAR = 20
"""Characters of a success bar."""

LINE = 120
"""Characters of a log's line that are shown."""


class ProgressLines:
    """Prints events to stderr. Called on the run's loop; owns nothing but the moment of the first event.

    Dropped groups come by the dozen: the first of a domain and reason has a line, the others are counted in one line
    at the next step, or with the first of them after `EVERY_S`."""

    def __init__(self, *, colour: bool) -> None:
        self._colour = colour
        self._t0: float | None = None
        self._known: set[tuple[str, str]] = set()
        self._dropped: Counter[tuple[str, str]] = Counter()
        self._counted_from = 0.0

    def __call__(self, event: RunEvent) -> None:
        if self._t0 is None:
            self._t0 = event.t
        if event.kind != "group_dropped" or self._first_drop(event):
            lines = [self._drops() if event.kind in ("step", "finished") else "", self._line(event)]
        else:
            lines = [self._drops() if event.t - self._counted_from >= EVERY_S else ""]
        for line in filter(None, lines):
            say(f"{event.t - self._t0:6.1f}s  {line}")

    def _first_drop(self, event: RunEvent) -> bool:
        """True for the first of its domain and reason; others are counted."""
        key = (str(event.fields.get("domain", "")), str(event.fields.get("reason", "")))
        if key not in self._known:
            self._known.add(key)
            return True
        if not self._dropped:
            self._counted_from = event.t
        self._dropped[key] += 1
        return False

    def _drops(self) -> str:
        """The line of the dropped groups that were counted; empty without any."""
        told = ", ".join(f"{n} of {domain} ({reason})" for (domain, reason), n in sorted(self._dropped.items()))
        self._dropped.clear()
        return self._warn(f"groups dropped: {told}") if told else ""

    def _line(self, event: RunEvent) -> str:
        fields = event.fields
        match event.kind:
            case "step":
                return self._step(event)
            case "evaluated":
                shown = "   ".join(f"{d} {rate:.2f}" for d, rate in _successes(event)) or "unknown"
                faults = sum(int(v or 0) for k, v in fields.items() if k.startswith("faults."))
                told = f"   ({faults} episodes lost to faults)" if faults else ""
                return self._bold(f"held-out success at v{fields['version']} (greedy):   {shown}{told}")
            case "warm_start":
                return f"warm start by imitation: {fields['seconds']:.1f} s, {fields['tokens']} tokens"
            case "starting":
                return "starting trainer and reward model"
            case "resumed":
                return (
                    f"resumed at step {fields['step']}, v{fields['version']}, {fields['samples']} finished samples kept"
                )
            case "engine_starting":
                return f"{event.subject} starts ({fields['seconds']:.0f} s): {tidy(str(fields['said']))}"
            case "engine_started":
                return f"{event.subject} serves v{fields['version']}"
            case "join":
                return f"{event.subject}: {fields['command']}"
            case "finished":
                return f"finished: {fields['steps']} steps, v{fields['version']}"
            case _:
                told = "  ".join(f"{k}={v}" for k, v in fields.items() if v not in ("", None))
                return self._warn(f"{event.kind.replace('_', ' ')}: {event.subject}  {told}")

    def _step(self, event: RunEvent) -> str:
        """Every step of a short run, every tenth of a long one; always the last."""
        fields = event.fields
        step, steps = int(fields["step"] or 0), int(fields["steps"] or 0)
        every = max(1, steps // 50)
        if step % every and step != steps:
            return ""
        bars = "   ".join(f"{d} {self._bar(rate)} {rate:.2f}" for d, rate in _successes(event))
        staleness = fields.get("staleness_mean")
        late = f"  staleness {staleness:.2f}" if isinstance(staleness, float) else ""
        return f"step {step:>3}/{steps}  {bars}  train {fields['train_s']:.2f}s  wait {fields['waited_s']:.2f}s{late}"

    def _bar(self, rate: float) -> str:
        full = round(rate * BAR)
        bar = "█" * full + "░" * (BAR - full)
        return click.style(bar, fg="green") if self._colour else bar

    def _bold(self, text: str) -> str:
        return click.style(text, bold=True) if self._colour else text

    def _warn(self, text: str) -> str:
        return click.style(text, fg="yellow") if self._colour else text


def tidy(line: str) -> str:
    """A line of a log without what stands before its words: process, level, time and place."""
    words = line.rpartition("] ")[2].strip() or line.strip()
    return words if len(words) <= LINE else words[: LINE - 1] + "…"


def _successes(event: RunEvent) -> list[tuple[str, float]]:
    prefix = "success."
    return [
        (name.removeprefix(prefix), float(value))
        for name, value in event.fields.items()
        if name.startswith(prefix) and isinstance(value, (int, float))
    ]


class SimulationProgress:
    """Steps, virtual time and seconds of waiting, of the simulations that go on. At a terminal one line that is
    written over; elsewhere a line every `EVERY_S` seconds. Any thread may call; `over` before anything else is said."""

    def __init__(self, names: Sequence[str], steps: int) -> None:
        self._names, self._steps = names, steps
        self._seen: dict[int, Progress] = {}
        self._began = self._told = _now()
        self._terminal = sys.stderr.isatty()
        self._drawn = 0
        self._lock = threading.RLock()

    def __call__(self, said: Progress) -> None:
        with self._lock:
            self._say(said)

    def _say(self, said: Progress) -> None:
        self._seen[said.task] = said
        now = _now()
        if now - self._told < (REDRAWN_S if self._terminal else EVERY_S):
            return
        self._told = now
        line = f"{'; '.join(map(self._of, sorted(self._seen)))} ({now - self._began:,.0f} s)"
        if not self._terminal:
            click.echo(line, err=True)
            return
        line = line[: shutil.get_terminal_size().columns - 1]
        click.echo("\r" + line.ljust(self._drawn), nl=False, err=True)
        self._drawn = len(line)

    def over(self, task: int | None = None) -> None:
        """A simulation has ended, or all have: the line is taken away."""
        with self._lock:
            if task is not None:
                self._seen.pop(task, None)
            if self._drawn:
                click.echo("\r" + " " * self._drawn + "\r", nl=False, err=True)
                self._drawn = 0

    def _of(self, task: int) -> str:
        said = self._seen[task]
        seconds = f"{said.seconds:,.0f}" if said.seconds >= 10 else f"{said.seconds:.2g}"
        return f"{self._names[task]}: step {said.steps} of {self._steps}, {seconds} virtual seconds"


def _now() -> float:
    return time.monotonic()  # noqa: TID251 - people wait in their own time, not in virtual time
