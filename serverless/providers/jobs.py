"""Calls that run as jobs of their provider: submitted, and polled until they have an answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

HELD_S = 60.0
"""Longest time limit of a function whose calls are held open; others run as jobs. Gateways cut idle connections after
about a minute."""

_UNREACHABLE_S = 60.0
"""Seconds without an answer after which a job is lost: hosts end jobs that are not polled."""

_END_S = 5.0
"""Most seconds to end a job whose deadline has passed."""


async def poll_job(
    ask: Callable[[], Awaitable[T | None]],
    end: Callable[[], Awaitable[object]],
    *,
    lost: tuple[type[Exception], ...],
    pause_s: float,
) -> T:
    """The answer of a job. `ask` waits for it, and returns None while the job runs. A failed request does no harm:
    after an error of `lost` the next one follows in `pause_s`. Raises the last of these errors once the host is
    unreachable. A cancellation, which a deadline is too, ends the job by `end`."""
    now = asyncio.get_running_loop().time
    seen = now()
    try:
        while True:
            try:
                if (answer := await ask()) is not None:
                    return answer
                seen = now()
            except lost:
                if now() - seen >= _UNREACHABLE_S:
                    raise
                await asyncio.sleep(pause_s)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_END_S):
                await end()
        raise
