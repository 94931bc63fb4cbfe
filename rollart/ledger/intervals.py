"""Accounting of intervals: meters that make them from state changes, each trajectory's share of engine time, and their
laws. Each resource is in exactly one state at a time, and every sum gives the same total. `rollart.ports.Interval` is
the value; sums and checks are pure.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from rollart.ports import Clock, Interval, Recorder, RunEvent

RESOURCE_OPENED, RESOURCE_CLOSED = "resource_opened", "resource_closed"
"""Events that bound a resource's life: its intervals tile the time between them."""


class ResourceState(enum.StrEnum):
    """The state of a resource. Only `busy` time is useful; the other states are its overhead."""

    STARTUP = "startup"
    BUSY = "busy"
    IDLE = "idle"
    SYNC = "sync"
    DOWN = "down"


class ResourceClock:
    """One resource's state machine. From construction to `close` it is in exactly one state.

    Every change of state or cause emits the interval that ended, so intervals tile by construction. Not thread-safe:
    the task that drives the resource owns the clock.
    """

    def __init__(
        self,
        *,
        role: str,
        resource: str,
        recorder: Recorder,
        clock: Clock,
        units: float = 1.0,
        usd_per_unit_hour: float = 0.0,
        state: str = ResourceState.STARTUP,
        cause: str = "",
    ) -> None:
        self._role, self.resource = role, resource
        self._recorder, self._clock = recorder, clock
        self._units, self._price = units, usd_per_unit_hour
        self.state, self._cause = str(state), cause
        self._since = clock()
        self._closed = False
        self.beside: tuple[ResourceClock, ...] = ()
        """Resources that are temporarily in the same state as this one."""
        self._event(RESOURCE_OPENED)

    def enter(self, state: str, cause: str = "") -> None:
        """Put the resource into `state`. No effect if it is in that state already, or after `close`."""
        for other in self.beside:
            other.enter(state, cause)
        if (state == self.state and cause == self._cause) or self._closed:
            return
        self.flush()
        self.state, self._cause = str(state), cause

    def assign(self, role: str) -> None:
        """Charge the resource's time to another role from now on: devices that engines lend to training."""
        if role != self._role:
            self.flush()
            self._role = role

    def flush(self) -> None:
        """Emit the open interval up to now and keep the state, so that a report of a live run is current."""
        now = self._clock()
        if now > self._since and not self._closed:
            self._recorder.interval(
                Interval(self._role, self.resource, self._since, now, self.state, self._cause, self._units, self._price)
            )
            self._since = now

    def close(self) -> None:
        """The resource is given back and costs nothing from now on. May be called again."""
        if self._closed:
            return
        self.flush()
        self._closed = True
        self._event(RESOURCE_CLOSED)

    def _event(self, kind: str) -> None:
        fields: dict[str, str | int | float | bool | None] = {
            "role": self._role,
            "units": self._units,
            "usd_per_unit_hour": self._price,
        }
        self._recorder.event(RunEvent(self._since, kind, self.resource, fields))


class EngineShares:
    """Charges an engine's busy time to its requests: each of n requests in flight pays 1/n of every second.

    A virtual accumulator grows by dt/n; a request's share is its growth while the request was in flight. O(1) per
    event. The shares of all requests add up to the busy seconds. While the engine is held (weight update) no request
    pays, and the engine's clock is in the state given to `hold`. Drives the engine's `ResourceClock` between busy and
    idle.
    """

    def __init__(self, resource: ResourceClock, *, clock: Clock) -> None:
        self._resource, self._clock = resource, clock
        self._grown = 0.0
        self._at = clock()
        self._entered: dict[str, float] = {}
        self._held = False

    @property
    def requests(self) -> list[str]:
        """The requests in flight."""
        return list(self._entered)

    def begin(self, request: str) -> None:
        """The request is in flight from now on. ValueError if it already is."""
        if request in self._entered:
            raise ValueError(f"request {request} is already in flight")
        self._advance()
        self._entered[request] = self._grown
        if len(self._entered) == 1:
            self._settle()

    def end(self, request: str) -> float:
        """The request has ended; returns its share in engine seconds, or 0 if it was not in flight."""
        self._advance()
        share = self._grown - self._entered.pop(request, self._grown)
        if not self._entered:
            self._settle()
        return share

    def hold(self, state: str = ResourceState.SYNC, cause: str = "") -> None:
        """Stop charging requests: the engine is in `state`."""
        self._advance()
        self._held = True
        self._resource.enter(state, cause)

    def release(self) -> None:
        """End the hold."""
        self._advance()
        self._held = False
        self._settle()

    def _advance(self) -> None:
        now = self._clock()
        entered = self._entered
        if entered and not self._held:
            self._grown += (now - self._at) / len(entered)
        self._at = now

    def _settle(self) -> None:
        if not self._entered:
            self._grown = 0.0  # no request refers to it: reset, so that precision does not degrade
        if not self._held:
            self._resource.enter(ResourceState.BUSY if self._entered else ResourceState.IDLE)


@dataclass(frozen=True, slots=True)
class IntervalSum:
    """Intervals of one resource in one state for one cause, added up. `t0` and `t1` enclose them."""

    role: str
    resource: str
    state: str
    cause: str
    seconds: float
    unit_seconds: float
    usd: float
    t0: float
    t1: float
