"""Environments written for verifiers' v0 API (`SingleTurnEnv`, `MultiTurnEnv`, `ToolEnv`; package 0.3 and before).

    environment: rollart.adapters.envs.verifiers:VerifiersText
    environment_args: {env: my-environment, env_args: {level: 2}, render: chatml}

The environment's own rollout runs, unchanged, with a client that asks the policy. Or it runs as an agent program
against the run's capture proxy, with the model's own chat template and tool parser:

    environment: {harness: "rollart.adapters.envs.verifiers:episode"}
    environment_args: {env: my-environment}

Version 0.4 has another API only (v1), whose environments are programs that call an endpoint: start those against
`rollart proxy`. This module imports verifiers only when an environment is made.

An environment is made once per process and shared by its episodes. Its model is a client whose answers come from the
player of the episode, and chat messages become text that continues, for a policy that reads text.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import json
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollart.adapters.envs.lookup import attribute_at
from rollart.adapters.envs.split import held_out_item, held_out_seed
from rollart.adapters.proxy.tool_calls import SPELLINGS, parse_answer
from rollart.errors import one_line
from rollart.model import Observation, Step


class VerifiersText:
    """One episode of a verifiers environment as text. Implements `rollart.ports.Environment`.

    `env` is an installed environment's id, or the `package.module:function` of a factory; `env_args` its arguments. The
    environment is made once per process and shared by its episodes, as in verifiers. A seed draws a row of its dataset;
    held-out seeds draw from its evaluation dataset, or else from the eighth of its rows that no training seed draws.

    `render` writes messages as text: `plain` (contents, one per line), `chatml`, or a `module:function` of (messages,
    tools, first). `tools` is the parser of tool calls in the policy's text (hermes, json, none), for environments with
    tools. A conversation that the environment rewrites instead of extending cannot be shown as text that continues: use
    `episode`.

    The last step pays the rubric's reward; its metadata has the row's `reference_answer` and `info`, and the rubric's
    `metrics`. Success is a reward of `success_at`, or else of the environment's own `pass_threshold`. Errors of the
    environment or of a reward function are raised: verifiers itself would score the latter with 0. A rubric that scores
    whole groups is refused, since members of a group end at different times.
    """

    def __init__(
        self,
        env: str,
        *,
        env_args: Mapping[str, Any] | None = None,
        render: str | MessageRenderer = "plain",
        tools: str = "hermes",
        success_at: float | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self._loaded = load_verifiers_environment(env, env_args or {})
        self._render: MessageRenderer
        if not isinstance(render, str):
            self._render = render
        elif render in _KNOWN or ":" in render:
            self._render = _KNOWN.get(render) or attribute_at(render, "render")
        else:
            raise ValueError(f"render is {render!r} (rule: {', '.join(_KNOWN)} or package.module:function)")
        if tools not in SPELLINGS:
            raise ValueError(f"tools is {tools!r} (rule: one of {', '.join(SPELLINGS)})")
        self._tools, self._success_at, self._max_tokens = tools, success_at, max_tokens
        self._row: Mapping[str, Any] = {}
        self._conversation: Conversation | None = None
        self._task: asyncio.Task[Any] | None = None
        self._shown: Sequence[Mapping[str, Any]] = ()

    async def reset(self, seed: int) -> Observation:
        await self.close()
        self._row = self._loaded.row(random.Random(seed), held_out=held_out_seed(seed))
        conversation = self._conversation = Conversation()
        # The environment's own program: it runs from this reset until close, across the caller's calls.
        rollout = self._loaded.env.rollout(self._row, _client_class()(conversation, self._tools), "policy", {})
        self._task = asyncio.get_running_loop().create_task(rollout, name="verifiers rollout")
        self._task.add_done_callback(lambda _: conversation.end())
        request = await conversation.next_request()
        if request is None:
            await self._state()
            raise RuntimeError(f"{self._loaded.name} was over before it asked for an answer")
        self._shown = request.messages
        return Observation(self._render(request.messages, request.tools, True), max_tokens=self._max_tokens)

    async def step(self, action: str) -> Step:
        if self._conversation is None:
            raise RuntimeError("step before reset")
        self._conversation.answer(action)
        request = await self._conversation.next_request()
        if request is None:
            return await self._loaded.final_step(await self._state(), self._row, success_at=self._success_at)
        known = len(self._shown)
        goes_on = list(request.messages[:known]) == list(self._shown) and len(request.messages) > known + 1
        if not goes_on or request.messages[known].get("role") != "assistant":
            raise RuntimeError(
                f"{self._loaded.name} rewrites its conversation, which text that goes on cannot show: play it as "
                "environment: {harness: rollart.adapters.envs.verifiers:episode}"
            )
        self._shown, new = request.messages, request.messages[known + 1 :]
        return Step(Observation(self._render(new, request.tools, False), max_tokens=self._max_tokens))

    async def close(self) -> None:
        task, self._task, self._conversation = self._task, None, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _state(self) -> Any:
        """The rollout's final state; its errors are raised."""
        assert self._task is not None
        state = await self._task
        self._loaded.check(state)
        return state


async def episode(
    base_url: str,
    session: str,
    seed: int,
    *,
    env: str,
    env_args: Mapping[str, Any] | None = None,
    success_at: float | None = None,
    model: str = "policy",
) -> Step:
    """An agent program for `environment: {harness: ...}`: the environment's rollout against the run's capture proxy."""
    from openai import AsyncOpenAI
    from verifiers.clients import OpenAIChatCompletionsClient

    environment: VerifiersEnvironment = load_verifiers_environment(env, env_args or {})
    row = environment.row(random.Random(seed), held_out=held_out_seed(seed))
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as api:
        state = await environment.env.rollout(row, OpenAIChatCompletionsClient(api), model, {})
    environment.check(state)
    return await environment.final_step(state, row, success_at=success_at)


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

    async def final_step(self, state: Any, row: Mapping[str, Any], *, success_at: float | None) -> Step:
        """The episode's last step, which pays the rubric's reward. RuntimeError if one of its functions raised."""
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
        reward = float(state["reward"])
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
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version("verifiers")
    except PackageNotFoundError:
        raise ImportError("the package verifiers is not installed (below 0.4, which dropped this API)") from None
    if tuple(int(part) for part in installed.split(".")[:2] if part.isdigit()) >= (0, 4):
        raise ImportError(
            f"verifiers {installed} has the v1 API only, whose environments ask an endpoint: install 'verifiers<0.4', "
            "or start them against `rollart proxy`"
        )
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
    async def called(*args: Any, **kwargs: Any) -> Any:
        try:
            answer = function(*args, **kwargs)
            return await answer if inspect.isawaitable(answer) else answer
        except Exception as error:
            broken = _REWARD_ERRORS.get(None)
            if broken is not None:
                broken.append(f"reward function {name} raised {one_line(error, 300)}")
            raise

    called.__name__ = name
    called._records_errors = True  # type: ignore[attr-defined]
    return called


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request for the policy's answer."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]


class Conversation:
    """Connects an environment's rollout, which calls `ask`, with the episode's player, who calls `next_request` and
    `answer` in turn. One request at a time: a second concurrent one is the environment's error, since the player could
    not answer it."""

    def __init__(self) -> None:
        self._requests: asyncio.Queue[ModelRequest | None] = asyncio.Queue()
        self._answer: asyncio.Future[str] | None = None

    async def ask(self, request: ModelRequest) -> str:
        """The policy's text."""
        if self._answer is not None:
            raise RuntimeError("it asks for two answers at a time (play it as a harness)")
        self._answer = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(request)
        try:
            return await self._answer
        finally:
            self._answer = None

    async def next_request(self) -> ModelRequest | None:
        """The next request; None once the rollout is over."""
        return await self._requests.get()

    def answer(self, text: str) -> None:
        if self._answer is None or self._answer.done():
            raise RuntimeError("step after the episode's end")
        self._answer.set_result(text)

    def end(self) -> None:
        """End the wait for the next request."""
        self._requests.put_nowait(None)


@functools.cache
def _client_class() -> Any:
    """The class of an episode's client. Defined on first use, since its base class is verifiers'."""
    from verifiers.clients.client import Client
    from verifiers.types import Response, ResponseMessage, ToolCall

    class Policy(Client):  # type: ignore[misc]
        """Answers with the policy's text."""

        def __init__(self, conversation: Conversation, spelling: str) -> None:
            super().__init__(conversation)
            self._spelling = spelling

        def setup_client(self, config: Any) -> Any:
            raise AssertionError("made with its conversation")

        async def to_native_tool(self, tool: Any) -> Any:
            return tool.model_dump(exclude_none=True)

        async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
            return [m.model_dump(exclude_none=True) for m in messages], {}

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any
        ) -> Any:
            text = await self.client.ask(ModelRequest(tuple(prompt), tuple(tools or ())))
            return text, parse_answer(self._spelling, text) if tools else (text, ())

        async def raise_from_native_response(self, response: Any) -> None:
            return None

        async def from_native_response(self, response: Any) -> Any:
            _, (content, calls) = response
            made = [
                ToolCall(id=f"call_{i}", name=c.name, arguments=json.dumps(c.arguments)) for i, c in enumerate(calls)
            ]
            finish = "tool_calls" if made else "stop"
            message = ResponseMessage(
                content=content, tool_calls=made or None, finish_reason=finish, is_truncated=False
            )
            return Response(id="policy", created=0, model="policy", message=message)

        async def close(self) -> None:
            return None

    return Policy


MessageRenderer = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], bool], str]
"""(messages, tools, first) -> text. `messages` are all up to the first answer, later the ones after the last answer."""


def text_of(content: Any) -> str:
    """A message's content; for a list of parts, their texts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))


def _plain(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], first: bool) -> str:
    lines = [text_of(m.get("content")) for m in messages]
    if first and tools:
        lines.insert(0, _tools(tools))
    return "\n".join(line for line in lines if line)


def _chatml(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], first: bool) -> str:
    """ChatML. The policy's own answer ended with `<|im_end|>`, so the continuation begins with the rest of that
    line."""
    shown = [dict(m) for m in messages]
    if first and tools:
        if not shown or shown[0].get("role") != "system":
            shown.insert(0, {"role": "system", "content": ""})
        shown[0]["content"] = f"{text_of(shown[0].get('content'))}\n\n{_tools(tools)}".strip()
    turns = "".join(f"<|im_start|>{m.get('role')}\n{_body(m)}<|im_end|>\n" for m in shown)
    return f"{'' if first else chr(10)}{turns}<|im_start|>assistant\n"


def _body(message: Mapping[str, Any]) -> str:
    text = text_of(message.get("content"))
    if message.get("role") == "tool":
        return f"<tool_response>\n{text}\n</tool_response>"
    for call in message.get("tool_calls") or ():
        function = {"name": call["name"], "arguments": json.loads(call["arguments"])}
        text = f"{text}\n<tool_call>\n{json.dumps(function)}\n</tool_call>".lstrip()
    return text


def _tools(tools: Sequence[Mapping[str, Any]]) -> str:
    listed = "\n".join(json.dumps({k: t[k] for k in ("name", "description", "parameters") if k in t}) for t in tools)
    form = '<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>'
    return f"# Tools\n\n<tools>\n{listed}\n</tools>\n\nTo call a tool:\n{form}"


_KNOWN: Mapping[str, MessageRenderer] = {"plain": _plain, "chatml": _chatml}
