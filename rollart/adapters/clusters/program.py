"""An actor that holds one program (an engine, a trainer) as a subprocess of its node and watches it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollart.adapters.clusters.ending import terminate
from rollart.adapters.weights.buckets import PullProgress, PullResult
from rollart.adapters.weights.hosts import HostWeightCopy, WeightStoreLocation
from rollart.errors import PartDied

__all__ = ["Program"]

TAIL = 8192
"""Bytes of a log that its last line is looked for in."""

STOP_S = 5.0
"""Seconds between SIGTERM and SIGKILL: enough to finish a write, short enough for Ctrl-C."""


class Program:
    """Runs `python -m module args...`; its stdout says `ready ADDRESS` once it serves, its stderr goes to `log`.

    `start` may be called again after the program ended; whatever is left from before is killed first. `wait` returns
    when the program ends. One program at a time.
    """

    def __init__(
        self,
        name: str,
        module: str,
        args: list[str],
        log: str,
        env: Mapping[str, str] | None = None,
        python: str | None = None,
    ) -> None:
        """`python`: an interpreter other than this one, which must know rollart too."""
        self._name = name
        # Runs here, in the process that starts the program and that it must not outlive.
        watched = "rollart.adapters.clusters.pdeathsig"
        self._argv = [python or sys.executable, "-m", watched, str(os.getpid()), module, *args]
        self._log = Path(log)
        self._env = dict(env or {})
        self._process: asyncio.subprocess.Process | None = None
        self._copy: HostWeightCopy | None = None

    async def start(self, extra: list[str]) -> str:
        """The address it serves at. `PartDied` with the last line it said if it ends before it is ready."""
        await self._launch(extra)
        return await self._said("ready")

    async def begin(self, extra: list[str]) -> str:
        """Start it, and wait only until it says `meet ADDRESS`: where its other parts meet it. `ready` waits for the
        rest. Errors as `start`."""
        await self._launch(extra)
        return await self._said("meet")

    async def ready(self) -> str:
        """The address it serves at, after `begin`."""
        return await self._said("ready")

    async def wait(self) -> str:
        """The cause, in words, once the program ended."""
        if self._process is None:
            return "was never started"
        code = await self._process.wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return f"its process was {how}" if code < 0 else f"its process {how}: {self._last_line()}"

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after `STOP_S`; returns when it is reaped."""
        if self._process is not None:
            await terminate(self._process, STOP_S)

    async def kill(self) -> None:
        """SIGKILL at once: of one that hangs, which SIGTERM would not reach."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def said(self) -> tuple[int, str]:
        """Bytes of its log so far, and the last line."""
        try:
            return self._log.stat().st_size, self._last_line()
        except OSError:
            return 0, ""

    async def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def pull(
        self, place: WeightStoreLocation, version: int, stamp: str, keep: Sequence[int], coming: bytes | None = None
    ) -> tuple[str, PullResult]:
        """Bring a version of the weights from their store to this host, where the program can load it, whether it runs
        or not: `HostWeightCopy.pull`."""
        return await (await self._at(place)).pull(version, stamp, keep, coming)

    async def arrived(
        self, place: WeightStoreLocation, manifest: bytes, digests: Sequence[str], over: bool, whole: bool
    ) -> None:
        """`HostWeightCopy.arrived`."""
        await (await self._at(place)).arrived(manifest, digests, over=over, whole=whole)

    async def pulling(self) -> PullProgress | None:
        """How far the pull is that is under way; None: none ever was."""
        return None if self._copy is None else self._copy.progress

    async def _at(self, place: WeightStoreLocation) -> HostWeightCopy:
        if self._copy is None or self._copy.place != place:
            await self._drop()
            self._copy = HostWeightCopy(place)
        return self._copy

    async def aclose(self) -> None:
        await self.stop()
        await self._drop()

    async def _drop(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            await copy.aclose()

    async def _launch(self, extra: list[str]) -> None:
        await self.stop()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                *extra,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, **self._env},
                # A process group of its own: Ctrl-C in the terminal reaches the controller, which stops its parts.
                start_new_session=True,
            )

    async def _said(self, wanted: str) -> str:
        """The address on the next line that begins with this word. `PartDied` if the program ends before."""
        process = self._process
        if process is None or process.stdout is None:
            raise PartDied(self._name, "was never started")
        while line := await process.stdout.readline():
            words = line.decode(errors="replace").split()
            if len(words) == 2 and words[0] == wanted:
                return words[1]
        code = await process.wait()
        raise PartDied(
            self._name, f"ended with status {code} before it was ready: {self._last_line()}", remedy=f"see {self._log}"
        )

    def _last_line(self) -> str:
        try:
            with self._log.open("rb") as log:
                log.seek(max(0, self._log.stat().st_size - TAIL))
                lines = log.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return "no log"
        return lines[-1].strip()[:300] if lines else "it said nothing"
