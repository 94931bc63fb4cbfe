"""Users' code on the controller's loop (environments, agent programs): guards around it, and validation of its values.

An error, an exit, a cancellation or a blocked loop is a fault of the call that made it, and of nothing else. An invalid
value is the environment's fault, like an exception: an infrastructure fault, never a reward. NumPy scalars are
converted to plain numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import inspect
import math
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextvars import ContextVar, Token
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

from rollart.errors import one_line
from rollart.model import Observation, Step
from serverless.deploy.handler import end_if_child

T = TypeVar("T")

F = TypeVar("F", bound=Callable[..., Any])

GRACE_S = 10.0
"""Seconds that a cancelled call may take to end. It is cancelled again half-way, then left behind."""

CALLS = ("reset", "step", "close")

_INSIDE: ContextVar[bool] = ContextVar("user_code", default=False)
"""True in users' code. Tasks inherit it from the task that starts them."""

_GIVEN_UP: set[asyncio.Task[Any]] = set()
"""Cancelled calls that have not ended: the loop itself holds tasks weakly."""

_GUARDS: set[CodeType] = set()

_HERE: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
"""Loops that run in no fork of this process."""


class HeldTooLong(BaseException):
    """Raised inside a call of users' code that blocks the loop. No Exception: many calls retry on any Exception."""


class UserCodeGuard:
    """`with UserCodeGuard():` around a call, in one task or before the loop runs.

    Only an Exception, or the cancellation of the task by its owner, propagates; anything else becomes a RuntimeError.
    The same holds in tasks that are started inside, where the loop was prepared (`isolate_user_code`). A process that
    the call forks ends here. Before the loop runs, an interrupt or SIGTERM of the process propagates unchanged, and
    signal handlers set by the code are removed.
    """

    __slots__ = ("_cancelling", "_process", "_signals", "_task", "_token")

    def __enter__(self) -> None:
        self._process = os.getpid()
        try:
            self._task = asyncio.current_task()
        except RuntimeError:  # no loop runs: classes named in a spec are imported and constructed before it starts
            self._task = None
        self._cancelling = 0 if self._task is None else self._task.cancelling()
        self._signals = _Signals() if self._task is None and threading.current_thread() is _MAIN else None
        self._token: Token[bool] = _INSIDE.set(True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_if_child(self._process, error)
        _INSIDE.reset(self._token)
        signalled = self._signals is not None and self._signals.restored()
        if error is None or isinstance(error, Exception) or signalled:
            return
        if isinstance(error, asyncio.CancelledError) and self._task and self._task.cancelling() > self._cancelling:
            return
        raise _contained_error(error) from None


class _Signals:
    """Records the interrupts and terminations of the process, which also reach their previous handlers."""

    __slots__ = ("_before", "_came")

    def __init__(self) -> None:
        self._came = False
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number, handler in self._before.items():
            if callable(handler):
                signal.signal(number, self._note)

    def restored(self) -> bool:
        """Restore the handlers; true if a signal came meanwhile."""
        for number, handler in self._before.items():
            if handler is not None:  # not C code's
                signal.signal(number, handler)
        return self._came

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        handler = self._before[signal.Signals(number)]
        assert callable(handler)
        handler(number, frame)


_MAIN = threading.main_thread()


def guard(function: F) -> F:
    """Mark a function of the product that calls users' code: frames above it on the stack are users' code."""
    _GUARDS.add(function.__code__)
    return function


def guard_of(frame: FrameType | None) -> FrameType | None:
    """The innermost guard below a frame on the stack: one per call of users' code."""
    outer = None if frame is None else frame.f_back
    while outer is not None and outer.f_code not in _GUARDS:
        outer = outer.f_back
    return outer


def in_user_code(frame: FrameType | None) -> bool:
    """True if the frame runs on behalf of a guarded call, and is not the guard itself, or in a callback that users'
    code scheduled on the loop."""
    if _INSIDE.get():
        return True
    return frame is not None and frame.f_code not in _GUARDS and guard_of(frame) is not None


@contextlib.contextmanager
def importable(directory: str | Path) -> Iterator[None]:
    """Make the modules in a directory importable, as those beside a run file are during a run."""
    path = str(directory)
    added = path not in sys.path
    if added:
        sys.path.insert(0, path)
    try:
        yield
    finally:
        if added:
            with contextlib.suppress(ValueError):
                sys.path.remove(path)


def isolate_user_code(loop: asyncio.AbstractEventLoop) -> None:
    """From now on, tasks started by users' code end alone, and the loop runs in no fork made by users' code."""
    loop.set_task_factory(_task)
    loop.set_exception_handler(_in_a_line)
    end_in_forks(loop)


def end_in_forks(loop: asyncio.AbstractEventLoop) -> None:
    """A fork of this process ends as soon as its code yields to the loop: the loop's sockets belong to this process."""
    _HERE.add(loop)


def _forked() -> None:
    for loop in _HERE:
        if not loop.is_closed():
            loop._ready.clear()  # type: ignore[attr-defined]
            loop.call_soon(os._exit, 0)


os.register_at_fork(after_in_child=_forked)


def _in_a_line(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report an exception of a callback or background task of users' code, which no other code awaits."""
    error, task, handle = context.get("exception"), context.get("future"), context.get("handle")
    started = isinstance(task, asyncio.Task) and getattr(task.get_coro(), "cr_code", None) is _contained.__code__
    if error is None or not (started or (handle is not None and handle._context.get(_INSIDE, False))):
        loop.default_exception_handler(context)
        return
    trace = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(trace[-1].filename)}:{trace[-1].lineno})" if trace else ""
    subject = f"task '{task.get_name()}'" if isinstance(task, asyncio.Task) else "a callback"
    print(f"rollart: {subject} of users' code ended: {one_line(error, 500)}{where}", file=sys.stderr, flush=True)


def cancel_call(task: asyncio.Task[Any]) -> None:
    """Cancel a call of users' code without waiting for its end. After `GRACE_S` it is left behind."""
    if task.done():
        return
    _GIVEN_UP.add(task)
    task.add_done_callback(_ended)
    task.cancel()
    loop = asyncio.get_running_loop()
    loop.call_later(GRACE_S / 2, task.cancel)
    loop.call_later(GRACE_S, abandon_task, task)


def abandon_task(task: asyncio.Task[Any]) -> None:
    """Forget a cancelled task that has not ended: neither the end of the loop nor of the process waits for it."""
    if task.done() or task not in asyncio.all_tasks():
        return
    asyncio.tasks._unregister_task(task)
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))  # never collected: collection would resume its code
    with contextlib.suppress(OSError):  # stderr is closed
        print(
            f"rollart: {task.get_name()} did not end when it was cancelled: left behind (rule: let CancelledError "
            "through)",
            file=sys.stderr,
            flush=True,
        )


def _ended(task: asyncio.Task[Any]) -> None:
    _GIVEN_UP.discard(task)
    if not task.cancelled():
        task.exception()  # retrieved: its caller is gone


def _task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    if not _INSIDE.get():
        return asyncio.Task(coroutine, loop=loop, **options)
    task = asyncio.Task(_contained(coroutine), loop=loop, **options)
    task.add_done_callback(lambda _: coroutine.close())  # it may have been cancelled before it began
    return task


@guard
async def _contained(coroutine: Coroutine[Any, Any, T]) -> T:
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt, HeldTooLong) as error:
        raise _contained_error(error) from None


def _contained_error(error: BaseException) -> RuntimeError:
    if isinstance(error, SystemExit):
        return RuntimeError(f"it exited with {error.code!r}")
    if isinstance(error, asyncio.CancelledError):
        return RuntimeError("it let a CancelledError of its own out")
    if isinstance(error, HeldTooLong):
        return RuntimeError(str(error))
    return RuntimeError(f"it raised {one_line(error)}")


def require_awaitable(call: object, method: str) -> Awaitable[object]:
    """The awaitable that an environment's method returned. TypeError if the method is no coroutine."""
    if not inspect.isawaitable(call):
        raise TypeError(f"{method} answered {type(call).__name__} at once (rule: `async def {method}`)")
    return call


def declares_quick(environment: object) -> bool:
    """True if the environment's class promises, by `quick = True`, that its calls return without waiting.

    A subclass that overrides one of the calls must repeat the promise: it may wait where its base does not.
    """
    if getattr(environment, "quick", False) is not True:
        return False
    for kind in type(environment).__mro__:
        if "quick" in vars(kind):
            return True
        if any(name in vars(kind) for name in CALLS):
            return False
    return False


def checked_observation(value: object) -> Observation:
    """TypeError or ValueError, describing the value, for an invalid observation."""
    if not isinstance(value, Observation):
        raise TypeError(f"answered {type(value).__name__} where a rollart.Observation is due")
    if not isinstance(value.text, str):
        raise TypeError(f"an observation's text is {type(value.text).__name__}, not str")
    if value.actions is not None and not value.actions:
        raise ValueError("an observation with no legal action (rule: at least one, or None for free text)")
    if value.max_tokens is not None and value.max_tokens < 1:
        raise ValueError(f"an observation's max_tokens is {value.max_tokens} (rule: at least 1)")
    return value


def checked_step(value: object) -> Step:
    """The step with plain numbers. TypeError or ValueError for an invalid step."""
    if not isinstance(value, Step):
        raise TypeError(f"answered {type(value).__name__} where a rollart.Step is due")
    checked_observation(value.observation)
    try:
        given: object = value.reward
        if isinstance(given, str | bytes):  # text is no score of a reward function either
            raise TypeError
        reward = float(value.reward)
    except (TypeError, ValueError):
        raise TypeError(f"a step's reward is {value.reward!r}, not a number") from None
    if not math.isfinite(reward):
        raise ValueError(f"a step's reward is {reward} (rule: finite)")
    if (
        type(value.reward) is float
        and type(value.done) is bool
        and (value.success is None or type(value.success) is bool)
    ):
        return value
    success = None if value.success is None else bool(value.success)
    return dataclasses.replace(value, reward=reward, done=bool(value.done), success=success)
