"""Scores in this process, with the environment: for trusted rewards that keep state and so cannot be offloaded.

The conventions and outcomes are those of a function, without the isolation of a separate process: there is no memory
limit, and a synchronous reward that does not return blocks its caller.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import pathlib
import traceback
from typing import Any

from serverless import wire
from serverless.deploy.handler import adapt
from serverless.errors import SpecInvalid
from serverless.signatures import OPTIONS
from serverless.types import FaultKind, InfraFault, Item, Outcome

_ENVIRONMENT_NAMES = ("env", "environment")


def inline(
    target: Any,
    *,
    takes: str = "auto",
    environment: object = None,
    artefacts: pathlib.Path | None = None,
    timeout_s: float | None = None,
) -> InlineScorer:
    """A scorer for a reward that `@reward` accepts; a class is instantiated and loaded here, once.

    A parameter `env` or `environment` receives `environment`. `timeout_s` limits a call of an async reward. Raises
    `SpecInvalid` for parameters of no known convention, and for a reward that is declared untrusted.
    """
    if getattr(getattr(target, OPTIONS, None), "settings", {}).get("trust") == "untrusted":
        name = getattr(target, "__name__", type(target).__name__)
        raise SpecInvalid(f"{name} is untrusted: it cannot run in this process", remedy="make it stateless")
    if environment is not None:
        if inspect.isclass(target):
            target = target()
            if hasattr(target, "load"):
                target.load(artefacts)
        parameters = inspect.signature(target).parameters
        if given := {name: environment for name in _ENVIRONMENT_NAMES if name in parameters}:
            target = functools.partial(target, **given)
    return InlineScorer(adapt(target, takes=takes, artefacts=artefacts), timeout_s=timeout_s)


class InlineScorer:
    """Owns the state of one reward. Calls run one at a time in order of arrival. Any task of one event loop may
    call."""

    def __init__(self, handler: Any, *, timeout_s: float | None = None) -> None:
        self._handler = handler
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()

    async def score(self, item: Item) -> Outcome:
        """The outcome of one item, for any behaviour of the reward; `CancelledError` propagates."""
        event = [wire.encode(item)]
        async with self._turn:
            try:
                async with asyncio.timeout(self._timeout_s) as limit:
                    body = self._handler(event, None)
                    if inspect.isawaitable(body):
                        body = await body
            except MemoryError as error:
                return InfraFault(FaultKind.OUT_OF_MEMORY, retryable=False, detail=str(error)[:500])
            except (Exception, SystemExit) as error:
                if limit.expired():
                    detail = f"no answer in {self._timeout_s:g} s (timeout_s)"
                    return InfraFault(FaultKind.TIMEOUT, retryable=False, detail=detail)
                traceback.print_exception(error)
                detail = f"{type(error).__name__}: {error}"[:500]
                return InfraFault(FaultKind.CRASH, retryable=False, detail=detail)
        return wire.outcomes(body, event, deterministic=True)[0]
