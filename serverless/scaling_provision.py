"""Keeps a provider's paid-for level near what is wanted: rarely changed, billed while it stands, set back."""

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
"""Lambda may take minutes to have environments ready."""

_BACK_S = 30.0
"""For setting a level back at the end: one request. Nobody waits there for environments."""

_SPAN_S = 60.0
"""What stands is reported this often, so that a process that is killed leaves little unbilled."""


@dataclass(slots=True)
class ProvisionedLevels:
    """What levels were before a run changed them, in a file: a run that was killed left its own, and the one that
    resumes it must not take that for the user's. `path` None keeps nothing."""

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
        """`level` None: it was set back."""
        if level is None:
            self.before.pop(key, None)
        else:
            self.before[key] = level
        if self.path is not None:
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps(self.before))
            partial.replace(self.path)


LevelCallback = Callable[[int, int, str, str], None]
"""(from, to, why, what went wrong or '')."""


class Provisioner:
    """One function on one provider. Owns its level while `run` runs, which waits for `want` and is unblocked by it;
    `back`, after that has ended, sets the level of before. What fails is told and tried again when the next change may
    be; it is nobody's error. The level stays within 0..concurrency, and never falls below that of before.
    """

    def __init__(
        self,
        spec: FunctionSpec,
        backend: ProvisionedBackend,
        *,
        meter: MeterSink,
        book: CallStatistics,
        levels: ProvisionedLevels,
        told: LevelCallback,
        hysteresis: Hysteresis | None = None,
    ) -> None:
        self._spec = spec
        self._backend = backend
        self._meter = meter
        self._book = book
        self._levels = levels
        self._told = told
        self._hysteresis = hysteresis or Hysteresis()
        self._key = f"{backend.provider}/{spec.name}"
        self._wanted, self._why = 0, "idle"
        self._asked = asyncio.Event()
        self._base: int | None = None
        self._since = 0.0
        self._billed_s = 0.0
        self.level = 0

    def want(self, workers: int, why: str) -> None:
        self._wanted, self._why = workers, why
        self._asked.set()

    async def run(self) -> None:
        """Until cancelled."""
        now = asyncio.get_running_loop().time
        try:
            while True:
                await self._asked.wait()
                self._asked.clear()
                if self._base is None and not await self._look():
                    continue
                assert self._base is not None
                wanted = max(self._base, min(self._wanted, self._spec.concurrency))
                level = self._hysteresis.next(now(), self.level, wanted)
                if level != self.level:
                    await self._change(level)
                elif now() - self._since >= _SPAN_S:
                    self._report()
        finally:
            self._report()

    async def back(self) -> None:
        """Set what was before, unless that is what stands."""
        if self._key not in self._levels.before:
            return
        level, why = self._levels.before[self._key], "set back"
        before = self.level
        try:
            async with asyncio.timeout(_BACK_S):
                await self._backend.provision(self._spec.name, level)
        except Exception as error:
            self._told(before, level, why, _line(error))
            return
        finally:
            self._report()
        self.level = level
        self._levels.remember(self._key, None)
        self._told(before, level, why, "")

    async def _look(self) -> bool:
        """What there is before we change anything."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._hysteresis.changed + self._hysteresis.up_s:
            return False
        try:
            async with asyncio.timeout(_REQUEST_S):
                self.level = await self._backend.provisioned(self._spec.name)
        except Exception as error:
            self._hysteresis.changed_at(loop.time())
            self._told(0, 0, "look", _line(error))
            return False
        # One that was killed left its level: what stood before it is what counts.
        self._base = self._levels.before.get(self._key, self.level)
        self._since, self._billed_s = loop.time(), self._book.billed_s
        return True

    async def _change(self, level: int) -> None:
        loop = asyncio.get_running_loop()
        before, why = self.level, self._why
        self._report()
        assert self._base is not None
        try:
            # Written down first: what is asked for may stand even if its answer never comes.
            self._levels.remember(self._key, self._base)
            async with asyncio.timeout(_REQUEST_S):
                await self._backend.provision(self._spec.name, level)
        except Exception as error:
            self._told(before, level, why, _line(error))
        else:
            self.level = level
            if level == self._base:
                self._levels.remember(self._key, None)
            self._told(before, level, why, "")
        finally:
            self._hysteresis.changed_at(loop.time())

    def _report(self) -> None:
        """The level's time since the last report, as one worker of all its memory; a new level counts from when it was
        asked for. Where a call's bill is for the same
        container seconds, only what no call used."""
        now = asyncio.get_running_loop().time()
        since, self._since = self._since, now
        billed, self._billed_s = self._book.billed_s - self._billed_s, self._book.billed_s
        if self._base is None or now <= since:
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


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
