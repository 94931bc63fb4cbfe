"""Conversations of a JSON Lines file as training samples, with loss on the assistant's tokens alone.

A line is an object with `messages` in OpenAI's form (`role`, `content`, `tool_calls`; other keys reach the template)
and optionally `tools`, or with the texts `prompt` and `completion`. The answers of a conversation are what the chat
template marks with `{% generation %}` (transformers' `return_assistant_tokens_mask`, which TRL's `assistant_only_loss`
takes). Of a template without marks, an answer is what the rendered conversation has between the generation prompt and
the next message, up to the token that ends the answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from rollart.adapters.chat import EpisodeChat
from rollart.adapters.proxy.chat import MARKS, ChatFormat
from rollart.adapters.proxy.messages import BadRequest, read_json
from rollart.errors import SpecError

NEXT = "rollart-next-message"
"""Stands in for the content of a message after an answer: a word that no template changes."""

MARK_ANSWERS = "mark answers with {% generation %} in the template of model.tokenizer, or give prompt and completion"


@lru_cache(maxsize=1)  # the check before a launch has read the file already
def read_samples(path: Path, digest: str, tokenizer: Path, context: int) -> Sequence[tuple[array[int], bytes]]:
    """Tokens and their flags (1: loss) of each line that is not empty, cut to `context` tokens. `digest` is that of the
    file. SpecError names the line and the key of the first bad one."""
    form = ChatFormat(tokenizer)
    reader = _Reader(form)
    found = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                ids, mask = reader.sample(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                raise SpecError(f"{path.name} line {number} is not UTF-8: {error.reason}") from None
            except BadRequest as error:
                where = f", {error.field}" if error.field else ""
                raise SpecError(f"{path.name} line {number}{where}: {error}") from None
            ids, mask = ids[:context], mask[:context]
            if 1 not in mask[1:]:
                raise SpecError(
                    f"{path.name} line {number}: none of its first {context} tokens (model.context) is an answer's",
                    remedy="shorten or remove it, or raise model.context",
                )
            found.append((array("i", ids), b"\0" + mask[1:]))  # nothing precedes the first token
    if not found:
        raise SpecError(f"{path.name} has no lines (rule: a conversation per line)")
    return found


class _Reader:
    """Raises BadRequest with the key of what is wrong."""

    def __init__(self, form: ChatFormat) -> None:
        self._form = form
        self._chat: EpisodeChat | None = None
        self._after: dict[str | None, str] = {}
        """`EpisodeChat.after_answer`, by role."""

    def sample(self, line: str) -> tuple[tuple[int, ...], bytes]:
        entry = read_json(line)
        if not isinstance(entry, dict):
            raise BadRequest("no JSON object")
        if "messages" in entry:
            text, spans = self._conversation(_messages(entry["messages"]), _tools(entry.get("tools")))
        else:
            text, spans = _completion(entry)
        ids, mask = self._form.encode_marked(text, spans)
        if "messages" not in entry and self._form.stop_ids and ids[-1:] != self._form.stop_ids[:1]:
            ids, mask = (*ids, self._form.stop_ids[0]), mask + b"\1"
        return ids, mask

    def _conversation(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[tuple[int, int]]]:
        """The rendered text, and the ranges of its answers."""
        if not self._form.templated:
            raise BadRequest(
                "the model has no chat template (rule: chat_template in tokenizer_config.json, or chat_template.jinja; "
                "or prompt and completion in place of messages)",
                field="messages",
            )
        if self._form.marks_answers:
            return _unmarked(self._form.render(messages, tools, prompt=False, marked=True))
        text = self._form.render(messages, tools, prompt=False)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        return text, [self._answer(text, messages, tools, i) for i in answers]

    def _answer(
        self, text: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], i: int
    ) -> tuple[int, int]:
        """The range of message `i` in the rendered `text`."""
        chat = self._episode_chat()
        before = self._form.render(messages[:i], tools, prompt=True).removesuffix(chat.thoughts)
        following = None if i + 1 == len(messages) else str(messages[i + 1]["role"])
        if following not in self._after:
            self._after[following] = chat.after_answer(following)
        after = self._after[following]
        whole = text
        if following is not None:
            stub = {"role": following, "content": NEXT}
            whole = self._form.render([*messages[: i + 1], stub], tools, prompt=False).partition(NEXT)[0]
        if not text.startswith(before) or not text.startswith(whole) or not whole.endswith(after):
            raise BadRequest(
                f"the chat template renders this message in other words than alone; {MARK_ANSWERS}",
                field=f"messages[{i}]",
            )
        return len(before), len(whole) - len(after) + len(chat.closing.rstrip())

    def _episode_chat(self) -> EpisodeChat:
        if self._chat is None:
            try:
                self._chat = EpisodeChat(self._form)
            except SpecError as error:
                raise BadRequest(f"{error.message}; {MARK_ANSWERS}", field="messages") from None
        return self._chat


def _unmarked(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without marks, and the ranges that they enclosed."""
    parts, at, edges = [], 0, []
    for part in text.replace(MARKS[1], MARKS[0]).split(MARKS[0]):
        parts.append(part)
        at += len(part)
        edges.append(at)
    return "".join(parts), list(pairwise(edges))[::2]


def _messages(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise BadRequest("is no list with an entry (rule: the messages of a conversation)", field="messages")
    found = list(_checked(given))
    if not any(message["role"] == "assistant" for message in found):
        raise BadRequest("has no message of role assistant (rule: at least one, which is imitated)", field="messages")
    return found


def _checked(given: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Messages as templates expect them: the arguments of tool calls are objects."""
    for i, message in enumerate(given):
        at = f"messages[{i}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest("has no role (rule: an object with role and content)", field=at)
        content, calls = message.get("content"), message.get("tool_calls")
        if not isinstance(content, str | list) and not (content is None and calls):
            raise BadRequest("is no text (rule: a text, or tool_calls)", field=f"{at}.content")
        found = message | {"content": "" if content is None else content}
        if calls:
            if not isinstance(calls, list):
                raise BadRequest("is no list", field=f"{at}.tool_calls")
            found["tool_calls"] = [_call(call, f"{at}.tool_calls[{j}]") for j, call in enumerate(calls)]
        yield found


def _call(call: Any, at: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest("has no function.name (rule: OpenAI's form)", field=at)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = read_json(arguments)
    if not isinstance(arguments, dict):
        raise BadRequest("is no JSON object", field=f"{at}.function.arguments")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _tools(given: Any) -> list[dict[str, Any]]:
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise BadRequest("is no list of objects (rule: JSON schemas of functions)", field="tools")
    return given


def _completion(entry: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    for key in ("prompt", "completion"):
        if not isinstance(entry.get(key), str):
            why = "is no text" if key in entry else "is missing"
            raise BadRequest(f"{why} (rule: messages, or the texts prompt and completion)", field=key)
    text = entry["prompt"] + entry["completion"]
    return text, [(len(entry["prompt"]), len(text))]
