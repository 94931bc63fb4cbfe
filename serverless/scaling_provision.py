"""Adjusts a provider's paid level of provisioned workers: rarely, with every second metered, and reset at the end."""

from __future__ import annotations

import asyncio
import json
import logging
import pathlib
from collections.abc import Callable
from dataclasses import dataclass, field

from serverless.backends.base import ProvisionedBackend
from serverless.meter import MeterSink, WorkerSpan, WorkerState
from serverless.scaling_decide import Hysteresis
from serverless.scaling_seen import CallStatistics
from serverless.spec import FunctionSpec

__all__ = ["ProvisionedLevels", "Provisioner"]

_REQUEST_S = 300.0
"""Lambda may take minutes to prepare provisioned environments."""

_BACK_S = 30.0
"""Limit on resetting a level at the end. It is one request, which does not wait for environments."""

_SPAN_S = 60.0
"""Interval of metering. A process that is killed leaves at most this much time unmetered."""


@dataclass(slots=True)
class ProvisionedLevels:
    """The levels from before a run changed them, stored in a file. A run that was killed leaves its own level at the
    provider, and the resumed run must not take it for the user's. Nothing is stored if `path` is None."""

    path: pathlib.Path | None = None
    before: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is None or not self.path.exists():
            return
        try:
            read = json.loads(self.path.read_text())
            self.before = {str(key): int(level) for key, level in read.items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            logging.getLogger(__name__).warning("%s is not read: %s", self.path, error)

    def remember(self, key: str, level: int | None) -> None:
        """Record the original level of a function. `level` None: the original level is in force again."""
        if level is None:
            self.before.pop(key, None)
        else:
            self.before[key] = level
        if self.path is not None:
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps(self.before))
            partial.replace(self.path)


LevelCallback = Callable[[int, int, str, str], None]
"""(level before, level after, reason, error text or '')."""


class Provisioner:
    """Manages the provisioned level of one function on one provider.

    `run` waits for calls of `want` and is unblocked by them. After `run` has ended, `restore` resets the original
    level. A failed request is reported and retried at the next permitted change; no exception reaches the caller. The
    level stays within 0..concurrency and never falls below the original one.
    """

    def __init__(
        self,
        spec: FunctionSpec,
        backend: ProvisionedBackend,
        *,
        meter: MeterSink,
        statistics: CallStatistics,
        levels: ProvisionedLevels,
        on_change: LevelCallback,
        hysteresis: Hysteresis | None = None,
    ) -> None:
        self._spec = spec
        self._backend = backend
        self._meter = meter
        self._statistics = statistics
        self._levels = levels
        self._on_change = on_change
        self._hysteresis = hysteresis or Hysteresis()
        self._key = f"{backend.provider}/{spec.name}"
        self._wanted, self._why = 0, "idle"
        self._requested = asyncio.Event()
        self._original: int | None = None
        self._since = 0.0
        self._billed_s = 0.0
        self.level = 0

    def want(self, workers: int, why: str) -> None:
        self._wanted, self._why = workers, why
        self._requested.set()

    async def run(self) -> None:
        """Follow the wanted level until cancelled."""
        now = asyncio.get_running_loop().time
        try:
            while True:
                await self._requested.wait()
                self._requested.clear()
                if self._original is None and not await self._read_level():
                    continue
                assert self._original is not None
                wanted = max(self._original, min(self._wanted, self._spec.concurrency))
                level = self._hysteresis.next(now(), self.level, wanted)
                if level != self.level:
                    await self._change(level)
                elif now() - self._since >= _SPAN_S:
                    self._report()
        finally:
            self._report()

    async def restore(self) -> None:
        """Reset the original level if this run or an earlier life of it changed the level."""
        if self._key not in self._levels.before:
            return
        level, why = self._levels.before[self._key], "set back"
        before = self.level
        try:
            async with asyncio.timeout(_BACK_S):
                await self._backend.provision(self._spec.name, level)
        except Exception as error:
            self._on_change(before, level, why, _first_line(error))
            return
        finally:
            self._report()
        self.level = level
        self._levels.remember(self._key, None)
        self._on_change(before, level, why, "")

    async def _read_level(self) -> bool:
        """Read the current level before the first change. Returns False if it cannot be read yet."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._hysteresis.changed + self._hysteresis.up_s:
            return False
        try:
            async with asyncio.timeout(_REQUEST_S):
                self.level = await self._backend.provisioned(self._spec.name)
        except Exception as error:
            self._hysteresis.changed_at(loop.time())
            self._on_change(0, 0, "look", _first_line(error))
            return False
        # The file wins over the provider's level: a killed run may have left its own level there.
        self._original = self._levels.before.get(self._key, self.level)
        self._since, self._billed_s = loop.time(), self._statistics.billed_s
        return True

    async def _change(self, level: int) -> None:
        loop = asyncio.get_running_loop()
        before, why = self.level, self._why
        self._report()
        assert self._original is not None
        try:
            # Recorded before the request: the request may take effect even if its answer is lost.
            self._levels.remember(self._key, self._original)
            async with asyncio.timeout(_REQUEST_S):
                await self._backend.provision(self._spec.name, level)
        except Exception as error:
            self._on_change(before, level, why, _first_line(error))
        else:
            self.level = level
            if level == self._original:
                self._levels.remember(self._key, None)
            self._on_change(before, level, why, "")
        finally:
            self._hysteresis.changed_at(loop.time())

    def _report(self) -> None:
        """Meter the time at the current level since the last report, as one worker with the memory of all. A new level
        counts from the time of its request. If the provider's call bills cover the same container seconds, meter only
        the unused part."""
        now = asyncio.get_running_loop().time()
        since, self._since = self._since, now
        billed, self._billed_s = self._statistics.billed_s - self._billed_s, self._statistics.billed_s
        if self._original is None or now <= since:
            return
        seconds = self.level * (now - since)
        if self._backend.calls_included:
            seconds = max(0.0, seconds - billed)
        memory_mb = round(self._spec.memory_mb * seconds / (now - since))
        if memory_mb:
            span = WorkerSpan(
                self._spec.name, self._backend.provider, "provisioned", since, now, WorkerState.IDLE, memory_mb
            )
            self._meter.worker(span)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
