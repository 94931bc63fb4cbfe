"""What a person watching `rollart launch` sees: one line per event worth one, one per training step."""

from __future__ import annotations

import click

from rollart.ports import RunEvent

__all__ = ["ProgressLines"]

BAR = 20
"""Characters of a success bar."""


class ProgressLines:
    """Prints events to stderr. Called on the run's loop; owns nothing but the moment of the first event."""

    def __init__(self, *, colour: bool) -> None:
        self._colour = colour
        self._t0: float | None = None
        self._every = 1

    def __call__(self, event: RunEvent) -> None:
        if self._t0 is None:
            self._t0 = event.t
        line = self._line(event)
        if line:
            click.echo(f"{event.t - self._t0:6.1f}s  {line}", err=True)

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
            case "engine_started":
                return f"{event.subject} serves v{fields['version']}"
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


def _successes(event: RunEvent) -> list[tuple[str, float]]:
    prefix = "success."
    return [
        (name.removeprefix(prefix), float(value))
        for name, value in event.fields.items()
        if name.startswith(prefix) and isinstance(value, (int, float))
    ]
