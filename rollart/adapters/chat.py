"""Episodes of text environments as conversations, in the model's own chat template.

The first observation is the user's message, actions are the assistant's answers, further observations are messages of
the user or of a tool. Tokens are only ever appended: sampled tokens stay as they were sampled, and what the template
writes between an answer and the next one is encoded by itself. That text comes by difference from a rendered example,
so that it depends on no earlier text, and costs one short rendering per turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any

from rollart.adapters.proxy.chat import ChatFormat
from rollart.adapters.proxy.messages import BadRequest, Message
from rollart.adapters.text import CACHED_CHARACTERS, CACHED_TEXTS
from rollart.errors import SpecError

QUESTION, ANSWER = "rollart-example-question", "rollart-example-answer"
"""Texts of the rendered example: words that no template changes."""

THOUGHTS = f"<think>\nrollart-example-thoughts\n</think>\n\n{ANSWER}"

OWN_TEMPLATE = "use a tokenizer whose template keeps earlier messages (model.tokenizer), or a harness (docs/proxy.md)"


class EpisodeChat:
    """Implements `ChatPrompts` with a chat template. SpecError for a model without a template, and for a template that
    refuses the messages or does not keep earlier ones as they were."""

    def __init__(
        self,
        form: ChatFormat,
        *,
        system: str | None = None,
        role: str = "user",
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """`role`: that of observations after the first. `tools`: schemas of the tools that the template shows."""
        if not form.templated:
            raise SpecError(
                "the model has no chat template (rule: chat_template in tokenizer_config.json, or chat_template.jinja)",
                remedy="leave `chat` out, or add the template of the model's family to model.tokenizer",
            )
        self._form, self._role, self._tools = form, role, tools
        self._head = [] if system is None else [Message("system", system)]
        self._example = [*self._head, Message("user", QUESTION), Message("assistant", ANSWER)]
        try:
            following = self._text(QUESTION)
            # Some templates end a whole conversation in a way of its own, so only what both begin with ends an answer.
            at_end = self._around_answer(self._render(self._example, prompt=False))[1]
            alike = takewhile(lambda two: two[0] == two[1], zip(following, at_end, strict=False))
            self.closing = "".join(one for one, _ in alike)
            """What the template writes after any answer."""
            self.thoughts = self._opened_thoughts()
            """Thoughts that the template opens before a new answer alone; '' for none."""
            self._refuse_rewriting(following)
        except BadRequest as error:
            raise SpecError(str(error), remedy="leave out `system`, or use the role that it knows") from None
        self.stop_ids = self._stops()
        self._short = lru_cache(maxsize=CACHED_TEXTS)(self._encoded)

    def opening(self, text: str) -> tuple[int, ...]:
        return self._form.encode(self._render([*self._head, Message("user", text)], prompt=True))

    def following(self, text: str, answer: Sequence[int]) -> tuple[int, ...]:
        last = answer[-1] if answer and answer[-1] in self.stop_ids else None
        return self._short(text, last) if len(text) <= CACHED_CHARACTERS else self._encoded(text, last)

    def answer(self, text: str) -> tuple[int, ...]:
        stops = [stop for stop in self.stop_ids if self._form.text((stop,)) in self.closing][:1]
        token_ids = self._form.encode(text)
        return token_ids if not stops or token_ids[-1:] == tuple(stops) else (*token_ids, *stops)

    def after_answer(self, role: str | None) -> str:
        """What the template writes after an answer: up to the content of a message of `role`, or at the end (None)."""
        message = [] if role is None else [Message(role, QUESTION)]
        after = self._around_answer(self._render([*self._example, *message], prompt=False))[1]
        return after.partition(QUESTION)[0]

    @property
    def drops_thoughts(self) -> bool:
        """True if the template leaves thoughts out of earlier answers, or the `<think>` with which it begins each new
        one."""
        thinking = [*self._head, Message("user", QUESTION), Message("assistant", THOUGHTS), self._observation(QUESTION)]
        return bool(self.thoughts) or THOUGHTS not in self._render(thinking, prompt=True)

    def _render(self, messages: Sequence[Message], *, prompt: bool) -> str:
        return self._form.render(messages, self._tools, prompt=prompt)

    def _observation(self, text: str) -> Message:
        return Message(self._role, text)

    def _text(self, text: str) -> str:
        """What follows an answer until the next one begins."""
        return self._around_answer(self._render([*self._example, self._observation(text)], prompt=True))[1]

    def _encoded(self, text: str, stop: int | None) -> tuple[int, ...]:
        """`stop`: the sampled stop token, which the template writes as well."""
        written = self._text(text)
        if stop is not None and (at := self.closing.find(token := self._form.text((stop,)))) >= 0:
            written = written[at + len(token) :]
        return self._form.encode(written)

    def _around_answer(self, rendered: str) -> tuple[str, str]:
        """The texts before and after the first answer."""
        before, found, after = rendered.partition(ANSWER)
        if not found or QUESTION not in before:
            raise SpecError("the chat template does not show a question and its answer", remedy=OWN_TEMPLATE)
        return before, after

    def _opening_text(self) -> str:
        return self._render([*self._head, Message("user", QUESTION)], prompt=True)

    def _opened_thoughts(self) -> str:
        """The beginning of thoughts, or the empty thoughts, that the template writes before a new answer and leaves out
        of earlier ones; '' if it treats both alike."""
        earlier = self._around_answer(self._render([*self._example, self._observation(QUESTION)], prompt=True))[0]
        opening = self._opening_text()
        more = opening.removeprefix(earlier)
        return more if more != opening and "think" in more else ""

    def _refuse_rewriting(self, following: str) -> None:
        """SpecError unless a conversation of three questions is the same text as its parts, one after the other, but
        for opened thoughts."""
        whole = [*self._example, self._observation(QUESTION), Message("assistant", ANSWER), self._observation(QUESTION)]
        parts = [part.removesuffix(self.thoughts) for part in (self._opening_text(), following, following)]
        if ANSWER.join(parts) != self._render(whole, prompt=True).removesuffix(self.thoughts):
            raise SpecError(
                "the chat template renders earlier messages in other words once more follow (rule: a conversation is "
                "continued token by token)",
                remedy=OWN_TEMPLATE,
            )

    def _stops(self) -> tuple[int, ...]:
        """The model's stop tokens, and the special token with which the template ends an answer."""
        first = self._form.encode(self.closing.lstrip())[:1]
        ends = [token for token in first if self._form.is_special(token)]
        return tuple(dict.fromkeys((*ends, *self._form.stop_ids)))
