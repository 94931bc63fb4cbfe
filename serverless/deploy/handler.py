"""The one handler file: adapts a user's reward to the list contract, under Lambda's `handler(event, context)`.

Packed verbatim as `rollart_handler.py` beside `rollart_manifest.json`; the same file runs under every backend.
As in Lambda, the function is loaded when the module is imported (the init phase), once per worker.

An item's code and its result:
  returns a number, Scored or a dict             its score
  returns ModelFault, {"model_fault": why}, or   the policy's fault, with its floor
    raises PolicyFault
  raises any other Exception                     `error` of this item only (CRASH, not retryable: code that failed
                                                 on an item fails on it again)
  raises MemoryError or SystemExit, or dies      the call's failure; the worker is replaced
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import json
import os
import pathlib
import sys
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from typing import Any

from serverless import output
from serverless.calling import CALLS, ConventionAdapter
from serverless.errors import PolicyFault, SpecInvalid
from serverless.signatures import ACCEPTED, OPTIONS, CallableSignature, Convention, Unknown, of_object, recognise
from serverless.types import InfraFault, Item, ModelFault, Scored, TokenUsage
from serverless.usage import encoded, recorded, recording, unattributed

REFERENCE = "rollart_reference"
"""The key of an event, and of an answer, that is stored elsewhere (`serverless.providers.payloads`)."""

_ANSWER_BYTES = 6_000_000
"""Larger answers to such an event are stored too: Lambda's limit of an answer is 6 MB."""

_FETCH_S = 60.0
"""Time limit to read a stored event or write an answer."""

ListHandler = Callable[[list[dict[str, Any]], Any], Any]


def adapt(
    target: Any,
    *,
    takes: str = "auto",
    artefacts: pathlib.Path | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> ListHandler:
    """Adapt a user's callable to a list handler. A class is instantiated with `arguments`, and `load(artefacts)`
    called, once; a function gets them with each call.

    The handler of an async callable runs it to its end, or returns an awaitable if called inside a running event loop.
    A process that the callable forks ends where the callable returns: it must not answer in its parent's place. Raises
    `SpecInvalid` for parameters of no known convention (`serverless.signatures`).
    """
    bound = () if inspect.isclass(target) else tuple(arguments or ())
    convention = convention_of(target, takes, bound)
    shape = of_object(target).without(bound)
    if inspect.isclass(target):
        target = target(**arguments or {})
        if hasattr(target, "load"):
            target.load(artefacts)
    elif arguments:
        target = functools.partial(target, **arguments)
    call, asynchronous = CALLS.get(convention), is_async(target)
    target = _ending_children(target, asynchronous)
    if call is None:
        listed = target if convention is Convention.EVENT else lambda event, context: target(event)
        return _AsyncHandler(_billed_async(listed)) if asynchronous else _billed(listed)
    if asynchronous:
        return _AsyncHandler(_billed_async(lambda event, _: _score_all(target, call, shape, event)))
    if call.batch:
        return _billed(lambda event, _: _score_batch(target, call, shape, event))
    return _billed(lambda event, _: _score_each(target, call, shape, event))


def end_if_child(process: int, error: BaseException | None = None) -> None:
    """End this process if it is a child of `process`, with the exit code of a program that `error` ends: the parent may
    wait for it."""
    if os.getpid() == process:
        return
    code = int(error is not None)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        traceback.print_exception(error)
    sys.stdout.flush()
    os._exit(code)


@contextlib.contextmanager
def children_end_here() -> Iterator[None]:
    """End a process forked in the block when it leaves the block."""
    process = os.getpid()
    try:
        yield
    except BaseException as error:
        end_if_child(process, error)
        raise
    end_if_child(process)


def _ending_children(target: Callable[..., Any], asynchronous: bool) -> Callable[..., Any]:
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        with children_end_here():
            return await target(*args, **kwargs)

    def called(*args: Any, **kwargs: Any) -> Any:
        with children_end_here():
            return target(*args, **kwargs)

    return awaited if asynchronous else called


def convention_of(target: Any, takes: str = "auto", arguments: Collection[str] = ()) -> Convention:
    """The convention of a callable: `takes`, else that of `@reward(takes=)`, else by its parameters beside those of a
    function that get `arguments`."""
    if takes == "auto":
        takes = getattr(getattr(target, OPTIONS, None), "settings", {}).get("takes", "auto")
    if takes != "auto":
        return Convention(takes)
    found = recognise(of_object(target).without(arguments))
    if isinstance(found, Unknown):
        name = getattr(target, "__name__", type(target).__name__)
        raise SpecInvalid(f"{name}: {found.reason}", remedy=f"write it as one of: {'; '.join(ACCEPTED)}")
    return found


def is_async(target: Any) -> bool:
    """True if the callable scores as a coroutine. The items of a call then run concurrently if it takes one at a
    time."""
    while isinstance(target, functools.partial):
        target = target.func
    return inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(
        target.__call__ if inspect.isclass(target) else type(target).__call__
    )


def _billed(handler: ListHandler) -> ListHandler:
    """Add the tokens that were recorded outside the context of an item, in threads say, to the first answer."""

    def run(event: list[dict[str, Any]], context: Any) -> Any:
        recorded.set(None)
        answers = handler(event, context)
        return _with_unattributed(answers) if unattributed else answers

    return run


def _billed_async(handler: Callable[..., Awaitable[Any]]) -> ListHandler:
    async def run(event: list[dict[str, Any]], context: Any) -> Any:
        recorded.set(None)
        answers = await handler(event, context)
        return _with_unattributed(answers) if unattributed else answers

    return run


def _with_unattributed(answers: Any) -> Any:
    if not isinstance(answers, list) or not answers or not isinstance(answers[0], dict):
        return answers  # for the next call
    used = [TokenUsage(**one) for one in answers[0].get("usage", ())] + unattributed
    unattributed.clear()
    return [_with_usage(answers[0], used), *answers[1:]]


class _AsyncHandler:
    """Runs an async handler in an event loop that lives as long as the worker: clients and pools stay usable."""

    def __init__(self, handler: ListHandler) -> None:
        import asyncio

        self._handler = handler
        self._runner = asyncio.Runner()

    def __call__(self, event: list[dict[str, Any]], context: Any) -> Any:
        import asyncio

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._runner.run(self._handler(event, context))
        return self._handler(event, context)

    def close(self) -> None:
        self._runner.close()


async def score_concurrently(target: Callable[..., Awaitable[Any]], event: list[dict[str, Any]]) -> list[Any]:
    """Score concurrently, for callers with a running event loop; `adapt` runs the same for a coroutine function."""
    answers: list[Any] = await adapt(target)(event, None)
    return answers


def _score_each(
    target: Callable[..., Any], call: ConventionAdapter, shape: CallableSignature, event: list[dict[str, Any]]
) -> list[Any]:
    used = recording()
    answers = []
    for raw in event:
        answer = _score(target, call, shape, raw)
        answers.append(_with_usage(answer, used) if used else answer)
    return answers


def _score(
    target: Callable[..., Any], call: ConventionAdapter, shape: CallableSignature, raw: dict[str, Any]
) -> dict[str, Any]:
    try:
        output.current.item = raw["id"]
        args, kwargs = call.arguments([_item(raw)], shape)
        return _answer(raw["id"], call.results(target(*args, **kwargs), 1)[0])
    except Exception as error:
        return _failure(raw["id"], error)


def _score_batch(
    target: Callable[..., Any], call: ConventionAdapter, shape: CallableSignature, event: list[dict[str, Any]]
) -> list[Any]:
    """Score a batch. An error with several items is the call's, and the caller isolates the guilty one. With a single
    item it is the item's."""
    if not event:
        return []
    used = recording()
    try:
        args, kwargs = call.arguments([_item(raw) for raw in event], shape)
        answers = _answers(event, call.results(target(*args, **kwargs), len(event)))
    except Exception as error:
        answers = _failed(event, error)
    return [_with_usage(answers[0], used), *answers[1:]] if used else answers


async def _score_all(
    target: Callable[..., Any], call: ConventionAdapter, shape: CallableSignature, event: list[dict[str, Any]]
) -> list[Any]:
    import asyncio

    async def some(raws: list[dict[str, Any]]) -> list[Any]:
        used = recording()
        try:
            if not call.batch:
                output.concurrent_item.set(raws[0]["id"])
            args, kwargs = call.arguments([_item(raw) for raw in raws], shape)
            answers = _answers(raws, call.results(await target(*args, **kwargs), len(raws)))
        except Exception as error:
            answers = _failed(raws, error)
        return [_with_usage(answers[0], used), *answers[1:]] if used else answers

    if call.batch or len(event) <= 1:  # a single item runs in the caller's task, which a SystemExit then reaches
        return await some(event) if event else []
    return [answers[0] for answers in await asyncio.gather(*(some([raw]) for raw in event))]


def _with_usage(answer: dict[str, Any], used: list[TokenUsage]) -> dict[str, Any]:
    """The answer with the tokens of its item, which are removed from `used`; those of a batch are in its first
    answer."""
    answer = {**answer, "usage": encoded(used)}
    used.clear()
    return answer


def _answers(event: list[dict[str, Any]], results: list[Any]) -> list[Any]:
    return [_answer(raw["id"], result) for raw, result in zip(event, results, strict=True)]


def _failed(event: list[dict[str, Any]], error: Exception) -> list[Any]:
    if len(event) > 1:
        raise error
    return [_failure(event[0]["id"], error)]


def _item(raw: dict[str, Any]) -> Item:
    messages = raw.get("messages")
    if messages is None:  # the names of Bedrock's handlers
        messages = [{"role": "assistant", "content": raw["modelResponse"]}]
    reference = raw.get("reference_answer", raw.get("referenceAnswer"))
    return Item(raw["id"], tuple(messages), reference, raw.get("metadata") or {})


def _answer(key: str, result: Any) -> dict[str, Any]:
    """The wire form of an item's return value. An invalid value is passed on for the caller to check."""
    if isinstance(result, InfraFault):
        fault: dict[str, Any] = {"type": "InfraFault", "message": result.detail, "kind": str(result.kind)}
        if result.throttle is not None:
            fault["throttle"] = str(result.throttle)
        if result.retry_after_s is not None:
            fault["retry_after_s"] = result.retry_after_s
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
    """Convert numbers of numpy and torch, and booleans, to floats; other values are left for the caller to reject."""
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


class PayloadUnavailable(Exception):
    """A stored event could not be read, or an answer not be stored. The caller treats it as a fault of the platform."""


def by_reference(handler: ListHandler, urls: dict[str, str], context: Any) -> Any:
    """Call a handler with the event at `urls["get"]`. A large answer is written to `urls["put"]`."""
    event = json.loads(_transfer(urls["get"]))
    answer = handler(event, context)
    body = json.dumps(answer).encode()
    if len(body) <= _ANSWER_BYTES:
        return answer
    _transfer(urls["put"], body)
    return {REFERENCE: True}


def _transfer(url: str, body: bytes | None = None) -> bytes:
    """GET, or PUT a body. The URL is a credential, so no error shows it."""
    import urllib.request

    request = urllib.request.Request(url, data=body, method="GET" if body is None else "PUT")
    request.add_header("Content-Type", "application/json")  # urllib declares a form otherwise
    try:
        with urllib.request.urlopen(request, timeout=_FETCH_S) as response:
            data: bytes = response.read()
            return data
    except OSError as error:  # urllib's errors are
        raise PayloadUnavailable(
            f"{request.method}: {type(error).__name__}: {getattr(error, 'reason', error)}"
        ) from None


def load(root: pathlib.Path) -> ListHandler:
    """The packed function of a directory: import its source and adapt the attribute of the manifest."""
    manifest = json.loads((root / "rollart_manifest.json").read_text())
    for path in (root / "artefacts", root / "function", root / "shims"):
        if str(path) not in sys.path:
            sys.path.insert(0, str(path))
    with children_end_here():
        module = _module(root / "function", manifest)
        target, arguments = getattr(module, manifest["attribute"]), manifest.get("arguments")
        return adapt(target, takes=manifest["takes"], artefacts=root / "artefacts", arguments=arguments)


def _module(directory: pathlib.Path, manifest: dict[str, Any]) -> Any:
    """Import a file under a unique private name, or a package under its own name, which its imports use."""
    if manifest.get("package"):
        name = str(manifest["module"])
        for known in [n for n in sys.modules if n.partition(".")[0] == name.partition(".")[0]]:
            if not str(getattr(sys.modules[known], "__file__", "")).startswith(str(directory)):
                del sys.modules[known]
        importlib.invalidate_caches()
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location("rollart_function", directory / manifest["file"])
    if spec is None or spec.loader is None:
        raise ImportError(f"{manifest['file']} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["rollart_function"] = module
    spec.loader.exec_module(module)
    return module


def _loaded_function(root: pathlib.Path) -> ListHandler:
    secrets = json.loads((root / "rollart_manifest.json").read_text()).get("secrets")
    if not secrets:
        return load(root)
    from serverless.secret_runtime import GuardedFunction

    return GuardedFunction(secrets, root / "function", lambda: load(root))


if __name__ == "rollart_handler":
    output.attribute()
    _loaded = _loaded_function(pathlib.Path(__file__).parent)

    def handler(event: Any, context: Any) -> Any:
        if isinstance(event, dict) and REFERENCE in event:
            return by_reference(handler, event[REFERENCE], context)
        output.current.begin(event, context)
        try:
            return _loaded(event, context)
        finally:
            output.current.end()
