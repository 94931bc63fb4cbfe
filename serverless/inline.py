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
from collections.abc import Mapping
from typing import Any

from serverless import wire
from serverless.deploy.handler import adapt
from serverless.errors import SpecInvalid
from serverless.meter import NO_SCORE, MeterSink, NullMeter, TokenBill
from serverless.signatures import OPTIONS
from serverless.types import Cause, FaultKind, InfraFault, Item, Outcome

_ENVIRONMENT_NAMES = ("env", "environment")


def inline(
    target: Any,
    *,
    takes: str = "auto",
    environment: object = None,
    artefacts: pathlib.Path | None = None,
    timeout_s: float | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> InlineScorer:
    """A scorer for a reward that `@reward` accepts; a class is instantiated with `arguments` and loaded here, once.

    A parameter `env` or `environment` receives `environment`. `timeout_s` limits a call of an async reward. Raises
    `SpecInvalid` for parameters of no known convention, and for a reward that is declared untrusted.
    """
    if getattr(getattr(target, OPTIONS, None), "settings", {}).get("trust") == "untrusted":
        name = getattr(target, "__name__", type(target).__name__)
        raise SpecInvalid(f"{name} is untrusted: it cannot run in this process", remedy="make it stateless")
    if environment is not None:
        if inspect.isclass(target):
            target, arguments = target(**arguments or {}), None
            if hasattr(target, "load"):
                target.load(artefacts)
        parameters = inspect.signature(target).parameters
        if given := {name: environment for name in _ENVIRONMENT_NAMES if name in parameters}:
            target = functools.partial(target, **given)
    return InlineScorer(adapt(target, takes=takes, artefacts=artefacts, arguments=arguments), timeout_s=timeout_s)


class InlineScorer:
    """Owns the state of one reward. Calls run one at a time in order of arrival. Any task of one event loop may
    call."""

    def __init__(self, handler: Any, *, timeout_s: float | None = None) -> None:
        self._handler = handler
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._function = ""
        self._meter: MeterSink = NullMeter()

    def meter_tokens(self, function: str, meter: MeterSink) -> None:
        """Report the tokens that the reward's requests consume, as those of `function` at provider `inline`."""
        self._function, self._meter = function, meter

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
        for used, scored in wire.usage(body):
            now, cause = asyncio.get_running_loop().time(), Cause.CALL if scored else NO_SCORE
            self._meter.tokens(TokenBill(self._function, "inline", now, cause, used))
        return wire.outcomes(body, event, deterministic=True)[0]
