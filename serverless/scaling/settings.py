"""The settings of live scaling of workers.

scaling:
  forecast: {horizon_s: 20}
  keep_alive: {max_s: 300}
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from serverless.pipeline.stages import StageSpec


class ReactiveSpec(StageSpec):
    """Knative's autoscaler. Its default windows suit web traffic (60 s stable, 6 s panic, the last worker stays 30 s).
    A rollout's burst ends within that time, so the windows are shorter here, and the last worker is left to keep-alive.
    """

    target: float = Field(default=1.0, gt=0.0, le=1.0)
    utilisation: float = Field(default=0.7, gt=0.0, le=1.0)
    """Concurrent calls per worker: `target` times this."""
    stable_s: float = Field(default=15.0, gt=0.0)
    panic_share: float = Field(default=0.2, gt=0.0, le=1.0)
    """The panic window as a share of the stable one."""
    panic_threshold: float = Field(default=2.0, gt=1.0)
    max_up: float = Field(default=1000.0, gt=1.0)
    max_down: float = Field(default=2.0, gt=1.0)
    grace_s: float = Field(default=0.0, ge=0.0)
    """Seconds that the last worker stays after the last call."""
    down_delay_s: float = Field(default=0.0, ge=0.0)
    """Seconds over which the maximum of the wanted numbers applies."""


class ForecastSpec(StageSpec):
    """Workers for the forecast calls of live trajectories."""

    horizon_s: Annotated[float, Field(gt=0.0)] | Literal["auto"] = "auto"
    """The forecast horizon in seconds. auto: a little more than the observed cold start plus two ticks."""
    z: float = Field(default=1.64, ge=0.0)
    """Standard deviations above the expected calls: 1.64 suffices in 19 of 20 ticks."""
    min_seen: int = Field(default=8, ge=1)
    """Trajectories of a kind that must have ended before it is forecast. The first to end are the shortest, and would
    make all others appear overdue."""


class KeepAliveSpec(StageSpec):
    """Keep-alive of idle workers: until the idle time has cost as much as a cold start (ski rental)."""

    trust: float = Field(default=0.5, gt=0.0, le=1.0)
    """1 ignores the forecast of the next call."""
    min_s: float = Field(default=1.0, ge=0.0)
    max_s: float | None = Field(default=None, ge=0.0)
    """Bounds, in seconds; None: the function's own `keep_alive_s` is the longest."""


class ScalingSpec(StageSpec):
    """Settings of `serverless.scaling.scaler.Scaler`."""

    tick_s: float = Field(default=1.0, gt=0.0)
    """Seconds between ticks."""
    reactive: ReactiveSpec = ReactiveSpec()
    forecast: ForecastSpec = ForecastSpec()
    keep_alive: KeepAliveSpec = KeepAliveSpec()
    provisioned: bool = False
    """Also on providers that charge for provisioned workers by the second (Lambda's provisioned concurrency, Modal's
    `min_containers`). The original level is restored at the end."""
