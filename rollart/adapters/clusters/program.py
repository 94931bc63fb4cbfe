"""An actor that runs one program (an engine, a trainer) as a subprocess on its node and watches it, and the check that
the program's address can be reached from here.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rollart.adapters.weights.buckets import PullProgress, PullResult
from rollart.adapters.weights.hosts import HostWeightCopy, WeightStoreLocation
from rollart.errors import PartDied, ProviderError
from rollart.lifeline import terminate

LOG_TAIL_BYTES = 8192
"""Bytes at the end of a log that are searched for its last line."""

STOP_S = 5.0
"""Seconds between SIGTERM and SIGKILL: enough to finish a write, short enough for Ctrl-C."""

CONNECT_S = 10.0
"""Seconds that a connection may take: a network that drops packets sends no error."""

ADDRESS_METHODS = ("start", "ready")
"""Methods of a `Program` that return the address it serves at."""


class Program:
    """Runs `python -m module args...`. The program prints `ready ADDRESS` once it serves; its stderr goes to `log`.

    `start` may be called again after the program ended; it stops a program that still runs. `wait` returns when the
    program ends. One program at a time.
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
        """`python`: an interpreter other than this one, which must have rollart installed."""
        self._name = name
        # The pid of the process that starts the program, which the program must not outlive.
        watched = "rollart.lifeline"
        self._argv = [python or sys.executable, "-m", watched, str(os.getpid()), module, *args]
        self._log = Path(log)
        self._env = dict(env or {})
        self._process: asyncio.subprocess.Process | None = None
        self._copy: HostWeightCopy | None = None

    async def start(self, extra: list[str]) -> str:
        """The address that the program serves at. `PartDied` with the last line of its log if it ends before it is
        ready."""
        await self._launch(extra)
        return await self._wait_for_line("ready")

    async def begin(self, extra: list[str]) -> str:
        """Start the program, and wait only until it prints `meet ADDRESS`, the rendezvous of its other parts; `ready`
        waits for the rest. Errors as for `start`."""
        await self._launch(extra)
        return await self._wait_for_line("meet")

    async def ready(self) -> str:
        """The address that the program serves at, after `begin`."""
        return await self._wait_for_line("ready")

    async def wait(self) -> str:
        """The cause, as text, once the program ended."""
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
        """SIGKILL at once, for a program that hangs and would not react to SIGTERM."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def said(self) -> tuple[int, str]:
        """Bytes of the log so far, and its last line."""
        try:
            return self._log.stat().st_size, self._last_line()
        except OSError:
            return 0, ""

    async def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def pull(
        self, location: WeightStoreLocation, version: int, stamp: str, keep: Sequence[int], coming: bytes | None = None
    ) -> tuple[str, PullResult]:
        """Pull a version of the weights from the store to this host, where the program can load it. The program need
        not run. See `HostWeightCopy.pull_stamped`."""
        self._copy = self._copy or HostWeightCopy(location)
        return await self._copy.pull_stamped(version, stamp, keep, coming)

    async def arrived(
        self, location: WeightStoreLocation, manifest: bytes, digests: Sequence[str], over: bool, whole: bool
    ) -> None:
        """`HostWeightCopy.arrived`."""
        self._copy = self._copy or HostWeightCopy(location)
        await self._copy.arrived(manifest, digests, over=over, whole=whole)

    async def pulling(self) -> PullProgress | None:
        """Progress of the current or last pull; None if there was none."""
        return None if self._copy is None else self._copy.progress

    async def aclose(self) -> None:
        await self.stop()
        if self._copy is not None:
            await self._copy.aclose()

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
                # A process group of its own: Ctrl-C in the terminal reaches only the controller, which stops its parts.
                start_new_session=True,
            )

    async def _wait_for_line(self, keyword: str) -> str:
        """The address on the next line that begins with this keyword. `PartDied` if the program ends before it."""
        process = self._process
        if process is None or process.stdout is None:
            raise PartDied(self._name, "was never started")
        while line := await process.stdout.readline():
            words = line.decode(errors="replace").split()
            if len(words) == 2 and words[0] == keyword:
                return words[1]
        code = await process.wait()
        raise PartDied(
            self._name, f"ended with status {code} before it was ready: {self._last_line()}", remedy=f"see {self._log}"
        )

    def _last_line(self) -> str:
        try:
            with self._log.open("rb") as log:
                log.seek(max(0, self._log.stat().st_size - LOG_TAIL_BYTES))
                lines = log.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return "no log"
        return lines[-1].strip()[:300] if lines else "it said nothing"


async def check_reachable(name: str, node: str, address: str, *, reached: bool) -> None:
    """Check that a program on another machine can be reached at its address. An address that does not answer is a
    `ProviderError` unless another one was `reached` before, since no restart would help. Later, or if the connection is
    refused, it is the death of the part, since the program may have ended meanwhile."""
    url = urlsplit(address)
    if url.hostname is None or url.port is None:
        return
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(url.hostname, url.port)
    except ConnectionRefusedError:
        raise PartDied(
            name,
            f"{address} on node {node} refuses connections: it has ended, or its port is closed",
            remedy="open the nodes' ports to the controller's machine",
        ) from None
    except OSError as error:  # includes timeouts
        cause = error.strerror or f"no answer within {CONNECT_S:g} s"
        if reached:
            raise PartDied(name, f"nothing answers at {address} on node {node}: {cause}") from None
        raise ProviderError(
            f"{name} serves at {address} on node {node}, which this machine does not reach: {cause}",
            remedy="open the nodes' ports to this machine, or launch where their network can be reached",
        ) from None
    writer.close()
