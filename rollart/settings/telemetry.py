"""What other tools read of a run while it runs (docs/observability.md)."""

from __future__ import annotations

import zlib
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from rollart.ports import RELAUNCH_MARK
from rollart.settings.base import SpecEntry, http_url

Tracker = Literal["tensorboard", "wandb"]


class MetricsSpec(SpecEntry):
    """A page of Prometheus metrics."""

    port: int = Field(ge=0, le=65535)
    """Port of `/metrics`; 0: any free one, which the terminal shows."""
    host: str = Field(default="127.0.0.1", min_length=1)
    """Address on which it listens: by default reachable from this machine alone, since it asks for no password."""


class OtlpSpec(SpecEntry):
    """An OpenTelemetry collector. Headers and certificates are those of OpenTelemetry's own variables
    (`OTEL_EXPORTER_OTLP_HEADERS`)."""

    endpoint: Annotated[str, AfterValidator(http_url)]
    """URL of its OTLP over HTTP, without `/v1/traces`: `http://127.0.0.1:4318`."""
    share: float = Field(default=0.01, ge=0, le=1)
    """Share of the prompts whose trajectories are sent as spans; steps are all sent."""


class TelemetrySpec(SpecEntry):
    """A run's figures for other tools: exported from its ledger by a process of their own, which cannot slow the run
    down or stop it."""

    turns: float = Field(default=0.0, ge=0, le=1)
    """Share of the prompts whose trajectories' turns are recorded in the ledger, for `report timeline -o perfetto` and
    for spans."""
    metrics: MetricsSpec | None = None
    """Prometheus metrics of the run."""
    otlp: OtlpSpec | None = None
    """Spans of the run, sent to an OpenTelemetry collector."""
    track: list[Tracker] = Field(default_factory=list)
    """Experiment trackers that get every step's numbers, evaluations and costs: tensorboard writes into the run's
    directory; wandb as its own variables say (`WANDB_MODE=offline`)."""

    @property
    def exports(self) -> bool:
        """True if the run needs the process that exports."""
        return bool(self.metrics or self.otlp or self.track)


def is_traced(group: str, share: float) -> bool:
    """True for `share` of the prompts, by their names: all trajectories of a prompt, also when it is generated
    again."""
    return zlib.crc32(group.partition(RELAUNCH_MARK)[0].encode()) < share * 2**32
