"""Validation of the values that users' environments return.

An invalid value is the environment's fault, like an exception: an infrastructure fault, never a reward. NumPy scalars
are converted to plain numbers.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Awaitable

from rollart.model import Observation, Step

__all__ = ["checked_observation", "checked_step", "declares_quick", "require_awaitable"]

CALLS = ("reset", "step", "close")


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
