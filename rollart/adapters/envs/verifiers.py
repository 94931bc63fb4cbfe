"""Environments written for verifiers' v0 API (`SingleTurnEnv`, `MultiTurnEnv`, `ToolEnv`; package 0.3 and before).

    environment: rollart.adapters.envs.verifiers:VerifiersText
    environment_args: {env: my-environment, env_args: {level: 2}, render: chatml}

The environment's own rollout runs, unchanged, with a client that asks the policy. Or it runs as an agent program
against the run's capture proxy, with the model's own chat template and tool parser:

    environment: {harness: "rollart.adapters.envs.verifiers:episode"}
    environment_args: {env: my-environment}

Version 0.4 has another API only (v1), whose environments are programs that call an endpoint: start those against
`rollart proxy`. This module imports verifiers only when an environment is made.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

from rollart.adapters.envs.split import held_out_seed
from rollart.adapters.envs.verifiers_client import Conversation, policy_client
from rollart.adapters.envs.verifiers_load import VerifiersEnvironment, load_verifiers_environment
from rollart.adapters.envs.verifiers_words import MessageRenderer, renderer
from rollart.adapters.proxy.tools import PARSERS
from rollart.model import Observation, Step

__all__ = ["VerifiersText", "episode"]


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
        self._render = renderer(render)
        if tools not in PARSERS:
            raise ValueError(f"tools is {tools!r} (rule: one of {', '.join(PARSERS)})")
        self._parse = PARSERS[tools]
        self._success_at, self._max_tokens = success_at, max_tokens
        self._row: Mapping[str, Any] = {}
        self._conversation: Conversation | None = None
        self._task: asyncio.Task[Any] | None = None
        self._shown: Sequence[Mapping[str, Any]] = ()

    async def reset(self, seed: int) -> Observation:
        await self.close()
        self._row = self._loaded.row(random.Random(seed), held_out=held_out_seed(seed))
        self._conversation = Conversation()
        rollout = self._loaded.env.rollout(self._row, policy_client(self._conversation, self._parse), "policy", {})
        # The environment's own program: it runs from this reset until close, across the caller's calls.
        self._task = asyncio.get_running_loop().create_task(
            _run_rollout(rollout, self._conversation), name="verifiers rollout"
        )
        request = await self._conversation.next_request()
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
            return await self._final_step()
        new = _new_messages(self._shown, request.messages, self._loaded.name)
        self._shown = request.messages
        return Step(Observation(self._render(new, request.tools, False), max_tokens=self._max_tokens))

    async def close(self) -> None:
        task, self._task, self._conversation = self._task, None, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _final_step(self) -> Step:
        state = await self._state()
        reward = await self._loaded.score(state)
        return self._loaded.step(state, self._row, reward, success_at=self._success_at)

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
    return environment.step(state, row, await environment.score(state), success_at=success_at)


async def _run_rollout(rollout: Any, conversation: Conversation) -> Any:
    """The rollout's state. Its end also ends the wait for its next request."""
    try:
        return await rollout
    finally:
        conversation.end()


def _new_messages(
    shown: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]], name: str
) -> Sequence[Mapping[str, Any]]:
    """Messages after the policy's last answer."""
    known = len(shown)
    goes_on = list(messages[:known]) == list(shown) and len(messages) > known + 1
    if not goes_on or messages[known].get("role") != "assistant":
        raise RuntimeError(
            f"{name} rewrites its conversation, which text that goes on cannot show: play it as "
            "environment: {harness: rollart.adapters.envs.verifiers:episode}"
        )
    return messages[known + 1 :]
