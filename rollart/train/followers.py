"""The other ranks of a host, as child processes of the host's first rank, which they die with.

A launcher that starts every rank itself (a job queue, with `--rank` and `--meet`) leaves nothing to start here.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence


class LocalRankProcesses:
    """Owns the processes, each with a thread that waits for its exit. `lost` is called once, from that thread, for the
    first exit before `stop`, with a text that names the rank and the cause."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._lost: Callable[[str], None] | None = None
        self._stopping = False

    def start(
        self, arguments: Sequence[str], *, first: int, here: int, ranks: int, lost: Callable[[str], None]
    ) -> None:
        """Start the `here` − 1 ranks after `first`, each with `arguments` and its numbers. Call it from the main
        thread: the processes die with the thread that started them."""
        self._lost = lost
        for local in range(1, here):
            rank = first + local
            numbers = ["--rank", str(rank), "--local", str(local)]
            command = [sys.executable, "-m", "rollart.train", *arguments, *numbers]
            # stdout is reserved for this process's "ready" line; output of followers goes to the log.
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno())
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(rank, ranks, process), daemon=True).start()

    def set_callback(self, lost: Callable[[str], None]) -> None:
        """Replace the callback for lost ranks."""
        with self._lock:
            self._lost = lost

    def stop(self) -> None:
        """Kill and reap all processes: a follower holds no state that must survive."""
        with self._lock:
            self._stopping = True
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()

    def _watch(self, rank: int, ranks: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        with self._lock:
            lost, self._lost = self._lost, None
            if lost is not None and not self._stopping:
                lost(f"rank {rank} of {ranks} (process {process.pid}) {how}")
