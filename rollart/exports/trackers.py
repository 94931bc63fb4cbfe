"""Every step's numbers for experiment trackers, through their own clients."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rollart.exports.figures import EVALUATION, STEP
from rollart.ledger.events import EVALUATION_SAMPLED
from rollart.ledger.reader import LedgerReader
from rollart.ports import RunEvent
from rollart.report.cost import cost_lines
from rollart.report.rows import collect
from rollart.settings.telemetry import Tracker


class TrackerClient(Protocol):
    """A tracker's run."""

    def configure(self, config: Mapping[str, Any]) -> None:
        """The run's specs."""

    def log(self, step: int, unix_s: float, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoardClient:
    """Writes event files into `tensorboard` in the run's directory."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary import Writer

        self._directory = directory / "tensorboard"
        self._writer = Writer(str(self._directory))

    def configure(self, config: Mapping[str, Any]) -> None:
        (self._directory / "config.json").write_text(json.dumps(config, indent=2))

    def log(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, wall_time=unix_s)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbClient:
    """A run of Weights & Biases; without a network as `WANDB_MODE=offline` below the run's directory."""

    def __init__(self, directory: Path) -> None:
        import wandb

        self._teardown = wandb.teardown
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "rollart"),
            name=directory.name,
            dir=str(directory),
            settings={"console": "off"},
        )

    def configure(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(dict(config), allow_val_change=True)

    def log(self, step: int, unix_s: float, values: Mapping[str, float]) -> None:
        self._run.log({**values, "version": step, "unix_s": unix_s})

    def close(self) -> None:
        self._run.finish()
        self._teardown()  # its service writes the last records after `finish`


CLIENTS: Mapping[Tracker, type[TensorBoardClient] | type[WandbClient]] = {
    "tensorboard": TensorBoardClient,
    "wandb": WandbClient,
}


class TrackerFollower:
    """Logs a run's steps and evaluations to trackers as they come, and its costs so far with each step. `look` and
    `close` are called by one thread; what was logged before a resume is not logged again."""

    def __init__(self, directory: Path, trackers: Sequence[Tracker], reader: LedgerReader | None) -> None:
        """`reader`: of the ledger before this life; None for a new run."""
        self._run = directory.name
        self._row = 0 if reader is None else reader.events_after(0, STEP)[0]
        self._clients: list[TrackerClient] = [CLIENTS[tracker](directory) for tracker in trackers]
        self._configured = False

    def look(self, reader: LedgerReader) -> None:
        if not self._configured and (config := reader.config()):
            self._configured = True
            for client in self._clients:
                client.configure(config)
        self._row, events = reader.events_after(self._row, STEP, EVALUATION, EVALUATION_SAMPLED)
        if not events:
            return
        utc, metrics = reader.utc(), {row.version: row.metrics for row in reader.versions()}
        costs = dict(_costs(reader, self._run))
        for n, event in enumerate(events):
            version = int(event.fields["version"] or 0)
            values = dict(_numbers(event))
            if event.kind == STEP:
                values |= {f"train/{name}": value for name, value in metrics.get(version, {}).items()}
            if n == len(events) - 1:
                values |= costs
            values = {name: value for name, value in values.items() if math.isfinite(value)}
            for client in self._clients:
                client.log(version, utc.unix_s(event.t), values)

    def close(self, reader: LedgerReader) -> None:
        self.look(reader)
        for client in self._clients:
            client.close()


def _numbers(event: RunEvent) -> Iterator[tuple[str, float]]:
    """The numbers of a step, or those of a domain's evaluation under its name."""
    prefix = "step" if event.kind == STEP else f"held_out/{event.subject}"
    if event.kind == EVALUATION_SAMPLED:
        prefix += f"/temperature {event.fields['temperature']}"
    for name, value in event.fields.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in ("version", "temperature"):
            yield f"{prefix}/{name}", float(value)


def _costs(reader: LedgerReader, run: str) -> Iterator[tuple[str, float]]:
    """Dollars so far, in all and by role."""
    usd: dict[str, float] = {}
    for line in cost_lines(collect(reader, run)):
        usd[line.role] = usd.get(line.role, 0.0) + line.usd
    yield from ((f"usd/{role}", value) for role, value in sorted(usd.items()))
    yield "usd/total", math.fsum(usd.values())
