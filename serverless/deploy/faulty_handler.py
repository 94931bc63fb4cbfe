"""A handler that injects faults into calls of another: `rollart_handler.py` of a package under fault rehearsal, whose
own handler is beside it as `rollart_original.py`.

The first item of a call names the fault (`FAULT`). An answer has the key `FIRED` if code of the function met it.
"""
# ruff: noqa: TID251 - a worker process; the loop's clock is in another one.

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import resource
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

FAULT, FIRED = "rollart_fault", "rollart_fired"


def inject(original: Callable[[Any, Any], Any], event: list[dict[str, Any]], context: Any) -> Any:
    fault = event[0].pop(FAULT, "") if event else ""
    if fault == "crash":
        os._exit(1)
    if fault == "slow":
        time.sleep(context.get_remaining_time_in_millis() / 1000.0 + 3600.0)
    if fault == "out_of_memory":
        bytearray((int(context.memory_limit_in_mb) + 64) << 20)
    if fault == "network":
        with _refused_connections() as attempts:
            body = original(event, context)
        return [{**answer, FIRED: True} for answer in body] if attempts and isinstance(body, list) else body
    if fault == "memory":
        with _no_more_memory():
            return original(event, context)
    body = original(event, context)
    if fault == "empty":
        return []
    if fault == "malformed":
        return [{**answer, "aggregate_reward_score": "0.0"} for answer in body]
    return body


@contextlib.contextmanager
def _refused_connections() -> Iterator[list[object]]:
    """Refuse the connections that Python code makes, and look-ups of names. Yields the attempts."""
    attempts: list[object] = []

    def refuse(*arguments: Any, **_: Any) -> Any:
        attempts.append(arguments)
        raise ConnectionRefusedError(111, "Connection refused (injected)")

    kept = socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo
    socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse  # type: ignore[method-assign]
    try:
        yield attempts
    finally:
        socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo = kept  # type: ignore[method-assign]


@contextlib.contextmanager
def _no_more_memory() -> Iterator[None]:
    """Refuse memory beyond what this process has now."""
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (resource.getpagesize(), limits[1]))  # Linux takes 0 for no limit
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


if __name__ == "rollart_handler":
    _spec = importlib.util.spec_from_file_location(__name__, pathlib.Path(__file__).with_name("rollart_original.py"))
    assert _spec is not None
    assert _spec.loader is not None
    _original = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_original)

    def handler(event: list[dict[str, Any]], context: Any) -> Any:
        return inject(_original.handler, event, context)
