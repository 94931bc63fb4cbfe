"""The controller's event loop, which excludes its own pauses from deadlines, and a watchdog thread for blocked loops.

A deadline bounds how long others take, so it counts only the time in which the controller could have heard them. When
the loop did not run, because the process was stopped (Ctrl-Z, a migrated machine) or because one callback did not
return, every timer moves by the length of the pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import os
import selectors
import signal
import sys
import sysconfig
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from rollart.errors import one_line
from rollart.user_code import HeldTooLong, abandon_task, guard_of, in_user_code, isolate_user_code

T = TypeVar("T")

POLL_S = 1.0
"""Period of the watchdog, and the longest single wait of the loop: the resolution at which a pause is measured."""

PAUSE_S = 1.0
"""Delay beyond which the loop counts as paused. A shorter delay is load."""

REPORT_S = 10
"""Polls after which the blocking call is reported."""

KILL_S = 30
"""Polls after the first interruption of a blocking call until the process ends: the call swallows interruptions."""

CANCEL_S = 2.0
"""Seconds that cancelled tasks have to end after the main task has ended."""

TICK_S = 1.0
"""CPU time of the process between two polls by the main thread itself, which interrupt a call that holds Python's
interpreter lock: the watchdog's thread cannot run then."""

STOP_S = 45
"""Polls after the first signal until the process ends: less than `rollart stop` waits."""

INTERRUPT = signal.SIGUSR2
"""Sent to the main thread to interrupt a call there."""


class ControllerLoop(asyncio.SelectorEventLoop):
    """`paused_s`: total seconds of all pauses so far. `on_pause` is called with each pause, before any timer that is
    due. `busy_since`, read by the watchdog's thread, is the start of the loop's current iteration, None while it
    waits."""

    def __init__(self) -> None:
        self.paused_s = 0.0
        self.busy_since: float | None = None
        self.on_pause: Callable[[float], None] = lambda seconds: None
        self.watched = False
        """True while a `LoopWatchdog` handles signals: no exception of a callback is an interrupt then."""
        self._new_timers: list[tuple[asyncio.TimerHandle, float]] = []
        """Timers of the current iteration, and when they were set."""
        super().__init__(_Selector(self))

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        timer = super().call_at(when, callback, *args, context=context)
        self._new_timers.append((timer, self.time()))
        return timer

    def end_iteration(self) -> None:
        """The iteration is over."""
        began, self.busy_since = self.busy_since, None
        if began is not None and self.time() - began > PAUSE_S:
            self.shift_timers(self.time() - began)
        self._new_timers.clear()

    def shift_timers(self, seconds: float) -> None:
        """Move every timer by the part of the pause after it was set."""
        self.paused_s += seconds
        now, timers = self.time(), self._scheduled  # type: ignore[attr-defined]
        for timer in timers:
            timer._when += seconds
        for timer, since in self._new_timers:
            timer._when -= max(0.0, seconds - (now - since))  # type: ignore[attr-defined]
        heapq.heapify(timers)
        self.on_pause(seconds)


class _Selector(selectors.DefaultSelector):
    """The loop's only wait, so it can measure whether the loop runs. It returns at least every `POLL_S`."""

    def __init__(self, loop: ControllerLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        loop = self._loop
        loop.end_iteration()
        wait, began = POLL_S if timeout is None else min(timeout, POLL_S), loop.time()
        found = super().select(wait)
        ended = loop.time()
        if ended - began - wait > PAUSE_S:
            loop.shift_timers(ended - began - wait)
        loop.busy_since = ended
        return found


def running_s() -> float:
    """The loop's time without its pauses: the clock for durations that limit other parts."""
    loop = asyncio.get_running_loop()
    return loop.time() - (loop.paused_s if isinstance(loop, ControllerLoop) else 0.0)


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a `ControllerLoop`. A task that does not end when it is cancelled is left behind."""
    loop = ControllerLoop()
    isolate_user_code(loop)
    try:
        asyncio.set_event_loop(loop)
        return _run_to_completion(loop, loop.create_task(main))
    finally:
        try:
            loop.run_until_complete(_cancel_remaining())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def _run_to_completion(loop: ControllerLoop, main: asyncio.Task[T]) -> T:
    """An exit in a callback of users' code, or a stopped loop, ends nothing else."""
    while True:
        try:
            return loop.run_until_complete(main)
        except (SystemExit, KeyboardInterrupt, RuntimeError) as error:
            if main.done() or not loop.watched:
                raise
            print(f"rollart: a callback on the controller's loop: {one_line(error)}", file=sys.stderr, flush=True)


async def _cancel_remaining() -> None:
    rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in rest:
        task.cancel()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CANCEL_S):
            await asyncio.shield(asyncio.gather(*rest, return_exceptions=True))
    for task in rest:
        abandon_task(task)


class LoopWatchdog:
    """Owns a thread and the signal handlers of the main thread; use `with watching()` on the loop.

    The first SIGINT, SIGTERM or SIGHUP calls `stop` on the loop. The second ends the process at once, and so does the
    thread `STOP_S` later. A call that blocks the loop is reported by `say` after `REPORT_S`. Users' code is interrupted
    with `HeldTooLong` after `limit_s`, or as soon as the run is to stop; if it swallows interruptions for `KILL_S`,
    `end` ends the process.

    The thread counts its own polls: a stopped process has none. While a call keeps the thread from running (a regular
    expression, a power of large numbers), a timer of the process's CPU time polls in its place.
    """

    def __init__(
        self,
        loop: ControllerLoop,
        *,
        stop: Callable[[], None],
        say: Callable[[str, float], None],
        end: Callable[[str, bool], None],
        limit_s: float,
    ) -> None:
        """`say(holder, seconds)` and `end(why, interrupted)` are called on any thread; `end` does not return."""
        self._loop, self._stop, self._say, self._end = loop, stop, say, end
        self.limit_s = limit_s
        self._done = threading.Event()
        self._interruption = ""
        """Message for the call that is to be interrupted."""
        self._stopping = False
        self._iteration: float | None = None
        self._polls = 0
        """Polls since the loop's current iteration began."""
        self._call: FrameType | None = None
        """The guard of the call that blocked the loop at the last poll."""
        self._call_polls, self._patience, self._interruptions = 0, limit_s, 0
        self._all_polls = self._ticked_at = self._starved = 0
        self._handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {}
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._main = threading.get_ident()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the loop while the body runs. Signals are handled in the main thread only."""
        self._handlers = {
            signal.SIGINT: self._signalled,
            signal.SIGTERM: self._signalled,
            INTERRUPT: self._interrupted,
            signal.SIGVTALRM: self._ticked,
        }
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            self._handlers[signal.SIGHUP] = self._signalled
        before = {number: signal.signal(number, answer) for number, answer in self._handlers.items()}
        signal.setitimer(signal.ITIMER_VIRTUAL, TICK_S, TICK_S)
        self._loop.watched = True
        self._thread.start()
        try:
            yield
        finally:
            self._loop.watched = False
            self._done.set()
            self._thread.join()
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _watch(self) -> None:
        asked = 0
        while not self._done.wait(POLL_S):
            asked += self._stopping
            if asked >= STOP_S:
                self._end(f"{len(asyncio.all_tasks(self._loop))} tasks did not end within {STOP_S} s", True)
            self._poll()

    def _poll(self) -> None:
        self._all_polls += 1
        since = self._loop.busy_since
        if since is None or since != self._iteration:
            self._iteration, self._polls, self._call, self._call_polls, self._interruptions = since, 0, None, 0, 0
            self._loop.call_soon_threadsafe(self._take_signals)
            return
        # The loop is in the same iteration as at the last poll.
        self._polls += 1
        frame = sys._current_frames().get(self._main)
        holder, call = self._holder(frame), guard_of(frame)
        if call is not self._call or not self._call_polls:
            # A call after an interrupted one in the same iteration has less time: there may be hundreds.
            self._call, self._call_polls = call, 0
            self._patience = min(self.limit_s, REPORT_S) if self._interruptions else self.limit_s
        self._call_polls += 1
        seconds = self._call_polls * POLL_S
        if self._polls == REPORT_S:
            self._say(holder, self._polls * POLL_S)
        if self._call_polls >= self._patience or (self._stopping and self._polls > 1):
            self._interruption = f"it held the controller for {seconds:.0f} s in {holder}"
            signal.pthread_kill(self._main, INTERRUPT)
        if self._call_polls >= self._patience + KILL_S and in_user_code(frame):
            self._end(f"{holder} has held the controller for {seconds:.0f} s, and swallows interruptions", False)

    def _ticked(self, number: int, frame: FrameType | None) -> None:
        """Two ticks without a poll of the thread mean that it cannot run."""
        self._starved = self._starved + 1 if self._all_polls == self._ticked_at else 0
        if self._starved > 1:
            self._poll()
        self._ticked_at = self._all_polls

    def _take_signals(self) -> None:
        """Restore the signal handlers: users' code may have replaced them."""
        for number, answer in self._handlers.items():
            if signal.getsignal(number) != answer:
                signal.signal(number, answer)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if self._stopping:
            self._end("", True)
        self._stopping = True
        self._loop.call_soon_threadsafe(self._stop)
        since = self._loop.busy_since
        if since is not None and self._loop.time() - since > 2 * POLL_S and in_user_code(frame):
            raise HeldTooLong("it held the controller when the run was stopped")

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self._interruption and in_user_code(frame):
            held, self._interruption = self._interruption, ""
            self._interruptions += 1
            raise HeldTooLong(held)

    def _holder(self, frame: FrameType | None) -> str:
        """The source line that the main thread executes (the innermost of users' code if there is one), and its
        task."""
        task = asyncio.current_task(self._loop)
        inner = frame
        while frame is not None and _in_library(frame.f_code.co_filename):
            frame = frame.f_back
        where, found = "", frame or inner
        if found is not None:
            where = f"{found.f_code.co_qualname} ({Path(found.f_code.co_filename).name}:{found.f_lineno})"
        return f"{where}, {task.get_name()}" if task is not None else where


_LIBRARY = tuple({sysconfig.get_path("stdlib"), str(Path(__file__).parent)})


def _in_library(file: str) -> bool:
    return file.startswith(("<", *_LIBRARY)) and f"{os.sep}site-packages{os.sep}" not in file
