"""The one handler file: adapts a user's reward to the list contract, under Lambda's `handler(event, context)`.

Packed verbatim as `rollart_handler.py` beside `rollart_manifest.json`; the same file runs under every backend.
As in Lambda, the function is loaded when the module is imported (the init phase), once per worker.

What an item's code does, and what becomes of it:
  returns a number, Scored or a dict             its score
  returns ModelFault, {"model_fault": why}, or   the policy's fault, with its floor
    raises PolicyFault
  raises any other Exception                     `error` of this item only (CRASH, not retryable: code that failed
                                                 on an item fails on it again)
  raises MemoryError or SystemExit, or dies      the call's failure; the worker is replaced
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import inspect
import json
import pathlib
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from serverless.errors import PolicyFault
from serverless.types import InfraFault, Item, ModelFault, Scored

ListHandler = Callable[[list[dict[str, Any]], Any], Any]

OPTIONS = "__rollart_reward__"
"""Where `serverless.declare.reward` leaves its options."""


def adapt(target: Any, *, takes: str = "auto", artefacts: pathlib.Path | None = None) -> ListHandler:
    """Turn a user's callable into a list handler. A class is instantiated, and `load(artefacts)` called, once."""
    if takes == "auto":
        takes = _recognise(target)
    if inspect.isclass(target):
        target = target()
        if hasattr(target, "load"):
            target.load(artefacts)
    if takes == "event":
        return lambda event, context: target(event, context)
    if takes == "items":
        return lambda event, context: target(event)
    if is_async(target):
        runner = asyncio.Runner()
        return lambda event, context: runner.run(score_concurrently(target, event))
    return lambda event, context: [_score(target, raw) for raw in event]


def is_async(target: Any) -> bool:
    """Whether it scores one item as a coroutine; the items of a call then run concurrently."""
    return inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(type(target).__call__)


def _recognise(target: Any) -> str:
    """One `Item`, unless the parameters of an undecorated function (of a class's `__call__`) say otherwise: two of them
    are Lambda's, and a single one called `items` or `event` is the list."""
    takes = getattr(getattr(target, OPTIONS, None), "settings", {}).get("takes", "auto")
    if takes != "auto":
        return str(takes)
    if hasattr(target, OPTIONS):
        return "item"
    call = functools.partial(target.__call__, None) if inspect.isclass(target) else target
    required = [
        p
        for p in inspect.signature(call).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) == 2:
        return "event"
    return "items" if len(required) == 1 and required[0].name in ("items", "event") else "item"


def _score(target: Callable[[Item], Any], raw: dict[str, Any]) -> dict[str, Any]:
    try:
        return _answer(raw["id"], target(_item(raw)))
    except Exception as error:
        return _failure(raw["id"], error)


async def score_concurrently(target: Callable[[Item], Awaitable[Any]], event: list[dict[str, Any]]) -> list[Any]:
    """What `adapt` runs for a coroutine function, for callers that have a loop already."""

    async def one(raw: dict[str, Any]) -> dict[str, Any]:
        try:
            return _answer(raw["id"], await target(_item(raw)))
        except Exception as error:
            return _failure(raw["id"], error)

    return list(await asyncio.gather(*(one(raw) for raw in event)))


def _item(raw: dict[str, Any]) -> Item:
    return Item(raw["id"], tuple(raw["messages"]), raw.get("reference_answer"), raw.get("metadata") or {})


def _answer(key: str, result: Any) -> dict[str, Any]:
    """The wire form of what an item's code returned. A wrong value is passed on: the caller judges it."""
    if isinstance(result, InfraFault):
        fault = {"type": "InfraFault", "message": result.detail, "kind": str(result.kind)}
        return {"id": key, "error": {**fault, "retryable": result.retryable}}
    if isinstance(result, ModelFault):
        return _model_fault(key, result.reason, result.floor)
    if isinstance(result, Scored):
        return _scored(key, result.value, result.metrics, result.steps)
    if isinstance(result, dict):
        if "model_fault" in result and "aggregate_reward_score" not in result:
            return _model_fault(key, result["model_fault"], result.get("floor", 0.0))
        if "aggregate_reward_score" in result or "error" in result:
            return {**result, "id": key}
        return _scored(key, result.get("score"), result.get("metrics") or {}, result.get("steps"))
    return _scored(key, result, {}, None)


def _scored(key: str, value: Any, metrics: Any, steps: Any) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "id": key,
        "aggregate_reward_score": _plain(value),
        "metrics_list": [{"name": k, "value": _plain(v), "type": "Metric"} for k, v in metrics.items()],
    }
    if steps is not None:
        answer["step_rewards"] = [_plain(s) for s in steps]
    return answer


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch, and booleans, become floats; anything else is left for the caller to refuse."""
    if isinstance(value, str) or value is None or not hasattr(value, "__float__"):
        return None if value is None else repr(value)[:60]
    return float(value)


def _model_fault(key: str, reason: object, floor: Any) -> dict[str, Any]:
    return {"id": key, "aggregate_reward_score": _plain(floor), "metrics_list": [], "model_fault": str(reason)}


def _failure(key: str, error: Exception) -> dict[str, Any]:
    if isinstance(error, PolicyFault):
        return _model_fault(key, error.reason, error.floor)
    if isinstance(error, MemoryError):
        raise error
    traceback.print_exception(error)
    return {"id": key, "error": {"type": type(error).__name__, "message": str(error), "retryable": False}}


def load(root: pathlib.Path) -> ListHandler:
    """The packed function of a directory: import its source file and adapt the attribute of the manifest."""
    manifest = json.loads((root / "rollart_manifest.json").read_text())
    for path in (root / "artefacts", root / "function"):
        if str(path) not in sys.path:
            sys.path.insert(0, str(path))
    spec = importlib.util.spec_from_file_location("rollart_function", root / "function" / manifest["file"])
    if spec is None or spec.loader is None:
        raise ImportError(f"{manifest['file']} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["rollart_function"] = module
    spec.loader.exec_module(module)
    return adapt(getattr(module, manifest["attribute"]), takes=manifest["takes"], artefacts=root / "artefacts")


if __name__ == "rollart_handler":
    _loaded = load(pathlib.Path(__file__).parent)

    def handler(event: list[dict[str, Any]], context: Any) -> Any:
        return _loaded(event, context)
