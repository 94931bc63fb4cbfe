"""The loops that a host's environments run on (a shared one, or one per environment on a thread), and calls on them."""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rollart.adapters.envs.wire import CallStatus
from rollart.errors import one_line
from rollart.foreign import UserCodeGuard, end_in_forks
from rollart.ports import Environment
from serverless.deploy.handler import children_end_here

__all__ = [
    "DomainFactory",
    "EnvironmentLoop",
    "InvalidResult",
    "encode_result",
    "load_factories",
    "run_loop",
    "run_on_loop",
    "run_timed",
]


@dataclass(frozen=True, slots=True)
class DomainFactory:
    """Makes a domain's environments; `problem` is the reason if it cannot."""

    make: Callable[[], Environment] | None
    blocking: bool = False
    problem: str = ""
    images: Callable[[int], Sequence[str]] | None = None
    """The images that the episode of a seed needs, if the environment declares them."""


def load_factories(domains: Mapping[str, Any]) -> dict[str, DomainFactory]:
    """Import each domain's environment and make one instance."""
    return {
        name: _load_factory(str(one["environment"]), dict(one.get("arguments", {}))) for name, one in domains.items()
    }


def _load_factory(path: str, arguments: dict[str, Any]) -> DomainFactory:
    module, _, name = path.partition(":")
    try:
        with UserCodeGuard():
            make = getattr(importlib.import_module(module), name)
    except Exception as error:  # the import of a user's module may raise anything
        return DomainFactory(None, problem=f"'{path}' cannot be imported: {one_line(error, 500)}")
    try:
        with UserCodeGuard():
            made = make(**arguments)
    except Exception as error:
        return DomainFactory(None, problem=f"'{path}' cannot be made with {arguments}: {one_line(error, 500)}")
    return DomainFactory(
        lambda: make(**arguments), blocking=bool(getattr(made, "blocking", False)), images=getattr(made, "images", None)
    )


@dataclass(slots=True)
class EnvironmentLoop:
    """The loop that an episode's calls run on; `thread` if it has one of its own."""

    loop: asyncio.AbstractEventLoop
    thread: threading.Thread | None = None

    @classmethod
    def on_thread(cls, name: str) -> EnvironmentLoop:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=run_loop, args=(loop,), name=name, daemon=True)
        thread.start()
        return cls(loop, thread)

    def stop(self) -> None:
        """End the loop's own thread once it is in no call."""
        if self.thread is not None:
            self.loop.call_soon_threadsafe(self.loop.stop)


def run_loop(loop: asyncio.AbstractEventLoop) -> None:
    end_in_forks(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


class InvalidResult(Exception):
    """The environment returned an invalid result."""


def encode_result(packed: Callable[[], Any]) -> Any:
    try:
        return packed()
    except (TypeError, ValueError) as error:
        raise InvalidResult(str(error)) from None


async def run_timed(name: str, lock: asyncio.Lock, work: Callable[[], Awaitable[Any]]) -> tuple[CallStatus, Any, float]:
    """Run a call on the environment's loop. Returns how it ended, its result or the error as text, and its seconds."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    task.set_name(name)
    began = loop.time()
    try:
        async with lock:
            with children_end_here():  # a process that an environment forks must not continue as the host
                value = await work()
    except InvalidResult as error:
        return CallStatus.LIED, str(error), loop.time() - began
    except asyncio.CancelledError:
        if task.cancelling():
            raise
        return CallStatus.RAISED, "CancelledError of its own", loop.time() - began
    except BaseException as error:  # SystemExit too: it ends the episode, not the host
        return CallStatus.RAISED, one_line(error, 500), loop.time() - began
    return CallStatus.OK, value, loop.time() - began


def run_on_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
    """Run a coroutine on another thread's loop; cancelling the returned future cancels it there."""
    future: Future[Any] = asyncio.run_coroutine_threadsafe(work, loop)
    return asyncio.wrap_future(future)
