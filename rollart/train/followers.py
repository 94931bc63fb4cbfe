"""The other ranks of a host as child processes of its first: started, watched, and gone when it goes.

Where something else starts every rank (a job queue) with `--rank` and `--meet`, there are no followers here.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

__all__ = ["LocalRankProcesses"]


class LocalRankProcesses:
    """Owns the processes. One thread waits for each; `lost` is called once, from that thread, for the first that ends
    before `stop`, with words that say which and how."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._lost: Callable[[str], None] | None = None
        self._stopping = False

    def start(
        self, arguments: Sequence[str], *, first: int, here: int, ranks: int, lost: Callable[[str], None]
    ) -> None:
        """The `here` − 1 ranks after `first`, each with `arguments` and its numbers. From the main thread: they die
        with the thread that started them."""
        self._lost = lost
        for local in range(1, here):
            rank = first + local
            numbers = ["--rank", str(rank), "--local", str(local)]
            command = [sys.executable, "-m", "rollart.train", *arguments, *numbers]
            # stdout is this process's promise of "ready"; what a follower says goes to the log.
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno())
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(rank, ranks, process), daemon=True).start()

    def call(self, lost: Callable[[str], None]) -> None:
        """From now on tell this one."""
        with self._lock:
            self._lost = lost

    def stop(self) -> None:
        """Kill what is left, and reap it: nothing that a follower holds is promised to anybody."""
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
