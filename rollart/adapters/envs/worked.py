"""The worked examples of an environment as episodes, so that any holder of its episodes can give them too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollart.adapters.envs.lookup import attribute_at
from rollart.model import Observation, Step

METHOD = "worked_example"
"""Method of an environment that has worked examples: `worked_example(seed) -> (prompt, answer)`, or, for one of several
turns, `(prompt, answer, observation, answer, ...)`."""

WORKED = "rollart.adapters.envs.worked:WorkedExamples"


def worked_example_domain(domain: str) -> str:
    """The domain name under which hosts serve worked examples. No real domain name contains a space."""
    return f"worked examples of {domain}"


def checked_example(texts: Sequence[str]) -> Sequence[str]:
    """ValueError unless `texts` are observations and answers in turn, the last one an answer."""
    if isinstance(texts, str) or len(texts) < 2 or len(texts) % 2 or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"a worked example is (prompt, answer, observation, answer, ...), got {texts!r:.200}")
    return texts


class WorkedExamples:
    """One example per episode: `reset(seed)` shows its first text, each step the next one. Implements
    `rollart.ports.Environment` over an environment by import path, which is made at the first reset and never reset
    itself."""

    def __init__(self, environment: str, arguments: Mapping[str, Any]) -> None:
        self._make, self._arguments = attribute_at(environment, "environment"), dict(arguments)
        self.blocking = getattr(self._make, "blocking", False) is True
        """As declared by the environment's class."""
        self._path = environment
        self._inner: Any = None
        self._rest: list[str] = []

    async def reset(self, seed: int) -> Observation:
        if self._inner is None:
            self._inner = self._make(**self._arguments)
        solve = getattr(self._inner, METHOD, None)
        if solve is None:
            raise ValueError(f"environment '{self._path}' gives no worked examples")
        prompt, *self._rest = checked_example(solve(seed))
        return Observation(prompt)

    async def step(self, action: str) -> Step:
        if self._inner is None:
            raise RuntimeError("step before reset")
        return Step(Observation(self._rest.pop(0)), done=not self._rest)

    async def close(self) -> None:
        inner, self._inner = self._inner, None
        if inner is not None:
            await inner.close()
