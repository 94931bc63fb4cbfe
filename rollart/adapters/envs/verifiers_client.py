"""The policy as verifiers' model: a client whose answers come from the player of the episode."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollart.adapters.proxy.tools import AnswerParser

__all__ = ["Conversation", "ModelRequest", "policy_client"]


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
        self._requests.put_nowait(None)


def policy_client(conversation: Conversation, parse: AnswerParser) -> Any:
    """A verifiers client for one episode."""
    return _client_class()(conversation, parse)


@functools.cache
def _client_class() -> Any:
    """Defined on first use, since its base class is verifiers'."""
    from verifiers.clients.client import Client
    from verifiers.types import Response, ResponseMessage, ToolCall

    class Policy(Client):  # type: ignore[misc]
        """Answers with the policy's text."""

        def __init__(self, conversation: Conversation, parse: AnswerParser) -> None:
            super().__init__(conversation)
            self._parse = parse

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
            return text, self._parse(text) if tools else (text, ())

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
