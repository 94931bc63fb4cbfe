"""verifiers environments, made once per process: their rows by seed, their scores, and their errors."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import json
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rollart.adapters.envs.lookup import attribute_at
from rollart.adapters.envs.split import held_out_item
from rollart.errors import one_line
from rollart.model import Observation, Step

__all__ = ["VerifiersEnvironment", "load_verifiers_environment"]

_DRAWS = 2000

_REWARD_ERRORS: contextvars.ContextVar[list[str]] = contextvars.ContextVar("broken reward functions")
"""Errors of reward functions while the context's episode is scored."""

_LOADED: dict[str, VerifiersEnvironment] = {}


@dataclass(frozen=True, slots=True)
class VerifiersEnvironment:
    """A verifiers environment, shared by the episodes of a process."""

    name: str
    env: Any
    train: Any
    held_out: Any
    """Rows for evaluation; None: an eighth of `train`."""

    def row(self, rng: random.Random, *, held_out: bool) -> dict[str, Any]:
        """A row of the dataset: the same for a seed in every process."""
        if self.held_out is not None:
            rows = self.held_out if held_out else self.train
            return dict(rows[rng.randrange(len(rows))])
        for _ in range(_DRAWS):
            row = dict(self.train[rng.randrange(len(self.train))])
            if held_out_item(json.dumps(row.get("prompt"), default=str)) is held_out:
                return row
        side = "held-out" if held_out else "training"
        raise ValueError(
            f"no {side} row among the {len(self.train)} of {self.name}: give it an evaluation dataset or more rows"
        )

    def check(self, state: Any) -> None:
        """Raise the error of a rollout, unless the policy caused it by a call that its tools refuse."""
        from verifiers.errors import ToolError

        error = state.get("error")
        if error is not None and not isinstance(error, ToolError):
            raise RuntimeError(f"{self.name} failed: {one_line(error.__cause__ or error, 300)}")

    async def score(self, state: Any) -> float:
        """The rubric's reward. RuntimeError if one of its functions raised."""
        broken: list[str] = []
        mark = _REWARD_ERRORS.set(broken)
        try:
            await self.env.rubric.score_rollout(state)
        finally:
            _REWARD_ERRORS.reset(mark)
        with contextlib.suppress(Exception):
            await self.env.rubric.cleanup(state)
        if broken:
            raise RuntimeError(f"{self.name}: {'; '.join(broken)}")
        return float(state["reward"])

    def step(self, state: Any, row: Mapping[str, Any], reward: float, *, success_at: float | None) -> Step:
        """The episode's last step."""
        least = success_at if success_at is not None else float(getattr(self.env, "pass_threshold", 0.5))
        metadata = {
            "reference_answer": str(row.get("answer", "")),
            "info": row.get("info") or {},
            "metrics": dict(state.get("metrics") or {}),
            "success": reward >= least,
        }
        return Step(Observation(""), reward, done=True, success=reward >= least, metadata=metadata)


def load_verifiers_environment(env: str, arguments: Mapping[str, Any]) -> VerifiersEnvironment:
    """The environment, made at its first use in the process. ImportError without verifiers' v0 API, ValueError for an
    environment that cannot be made or whose rubric scores whole groups."""
    key = json.dumps([env, dict(arguments)], sort_keys=True, default=repr)
    if key not in _LOADED:
        _LOADED[key] = _load(env, dict(arguments))
    return _LOADED[key]


def _load(name: str, arguments: dict[str, Any]) -> VerifiersEnvironment:
    _check_api_version()
    with _preserve_signal_handlers():
        made = _make_environment(name, arguments)
    if getattr(made, "rubric", None) is None or not callable(getattr(made, "rollout", None)):
        raise ValueError(f"{name} made {type(made).__name__}, which is no verifiers environment")
    if made.rubric.has_group_rewards:
        raise ValueError(f"the rubric of {name} scores whole groups (rule: one rollout at a time)")
    _record_reward_errors(made.rubric)
    held_out = made.get_eval_dataset() if made.eval_dataset_source is not None else None
    train = made.get_dataset() if made.dataset_source is not None else None
    if train is None:
        raise ValueError(f"{name} has an evaluation dataset only")
    return VerifiersEnvironment(name, made, train, held_out)


def _check_api_version() -> None:
    """ImportError if the installed verifiers lacks the v0 API."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("verifiers")
    except PackageNotFoundError:
        raise ImportError("the package verifiers is not installed (below 0.4, which dropped this API)") from None
    if tuple(int(part) for part in found.split(".")[:2] if part.isdigit()) >= (0, 4):
        raise ImportError(
            f"verifiers {found} has the v1 API only, whose environments ask an endpoint: install 'verifiers<0.4', or "
            "start them against `rollart proxy`"
        )


def _make_environment(name: str, arguments: dict[str, Any]) -> Any:
    if ":" in name:
        return attribute_at(name, "env")(**arguments)
    from verifiers import load_environment

    try:
        return load_environment(name, **arguments)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


@contextlib.contextmanager
def _preserve_signal_handlers() -> Iterator[None]:
    """A verifiers environment takes over SIGINT and SIGTERM when it is made; this restores the run's own handlers."""
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("a verifiers environment is made on the main thread only (it sets signal handlers)")
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _record_reward_errors(rubric: Any) -> None:
    """Wrap the reward functions so that their errors are recorded: their rubric would log an error and pay 0."""
    for inner in getattr(rubric, "rubrics", ()):
        _record_reward_errors(inner)
    rubric.funcs[:] = [
        function if hasattr(function, "_records_errors") else _recording_errors(function) for function in rubric.funcs
    ]


def _recording_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    name = getattr(function, "__name__", type(function).__name__)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            answer = function(*args, **kwargs)
        except Exception as error:
            _record_error(name, error)
            raise
        return _await_recording_errors(name, answer) if inspect.isawaitable(answer) else answer

    called.__name__ = name
    called._records_errors = True  # type: ignore[attr-defined]
    return called


async def _await_recording_errors(name: str, answer: Any) -> Any:
    try:
        return await answer
    except Exception as error:
        _record_error(name, error)
        raise


def _record_error(name: str, error: Exception) -> None:
    broken = _REWARD_ERRORS.get(None)
    if broken is not None:
        broken.append(f"reward function {name} raised {one_line(error, 300)}")
