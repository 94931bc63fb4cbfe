"""The chat format of a model directory: chat template, special tokens, stop tokens; and the decoding of responses while
they are generated."""

from __future__ import annotations

import datetime as dt
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollart.adapters.proxy.messages import BadRequest, Message, OutputDelta, OutputEvent, OutputPart
from rollart.adapters.proxy.tool_calls import (
    ToolCallParser,
    merge_events,
    parser_name_for,
    partial_match_length,
)
from rollart.errors import SpecError
from rollart.model import CompletionChunk

PLAIN_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
"""For a tokenizer without a chat template, like the quickstart's: one content per line, without roles."""

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Begins a response, which it marks for loss masks."""

MARKS = "\ufdd0\ufdd1"
"""Begin and end of a marked response in a template's output: noncharacters, which no text has."""

REPLACEMENT_CHARACTER = "\ufffd"
"""The last character of a decoded text whose final character is still incomplete."""

MAX_CHARACTER_TOKENS = 64
"""Maximum tokens of one character. Tokens that still decode to no text after that many are emitted at the end."""


class ChatFormat:
    """Renders with sandboxed Jinja, as transformers does, and encodes with `tokenizer.json`; needs no torch.

    `template` replaces the directory's template; `tools` names one of `SPELLINGS`, by default the template's format.
    SpecError for a directory without a tokenizer, or an invalid template.
    """

    def __init__(self, directory: str | Path, *, template: str | None = None, tools: str | None = None) -> None:
        from tokenizers import Tokenizer as Backend

        folder = Path(directory)
        if not (folder / "tokenizer.json").is_file():
            raise SpecError(f"no tokenizer.json in {folder}", remedy="name a Hugging Face model directory")
        try:
            self._backend = Backend.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises nothing narrower
            raise SpecError(f"{folder / 'tokenizer.json'} is no tokenizer: {error}") from None
        config = _object(folder / "tokenizer_config.json")
        source = template if template is not None else _own_template(folder, config)
        self.templated = source is not None
        """False if the tokenizer has no chat template, and `PLAIN_TEMPLATE` stands in."""
        self._template = _compiled(PLAIN_TEMPLATE if source is None else source)
        self.marks_answers = source is not None and _GENERATION_TAG.search(source) is not None
        """True if the template marks what a policy generates, with `{% generation %}`."""
        self._special = {
            name: _text(config[name])
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if config.get(name)
        }
        self.spelling = tools or parser_name_for(source or "")
        self.stop_ids = self._stop_ids(folder, config)
        self.stops = {i: self.text((i,)) for i in self.stop_ids}
        """Texts of the stop tokens, by id."""

    def render(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        prompt: bool,
        marked: bool = False,
    ) -> str:
        """The conversation as text; with `prompt`, it ends with the generation prompt; `marked`, with `MARKS` around
        responses, if the template marks them. BadRequest if the template refuses the messages."""
        from jinja2 import TemplateError

        try:
            text = str(
                self._template.render(
                    messages=[m.for_template() if isinstance(m, Message) else dict(m) for m in messages],
                    tools=[dict(t) for t in tools] or None,
                    add_generation_prompt=prompt,
                    **self._special,
                )
            )
        except (TemplateError, TypeError) as error:
            raise BadRequest(f"the chat template refuses these messages: {error}", field="messages") from None
        return text if marked or not self.marks_answers else text.replace(MARKS[0], "").replace(MARKS[1], "")

    def encode_marked(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], bytes]:
        """Ids as `encode` gives them, and a 1 for each token with a character in one of the `spans`, ascending ranges
        of characters; else 0."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        starts, ends = zip(*encoding.offsets, strict=True) if encoding.ids else ((), ())
        mask = bytearray(len(starts))
        for begin, end in spans:
            first, last = bisect_right(ends, begin), bisect_left(starts, end)
            mask[first:last] = b"\1" * (last - first)
        return tuple(encoding.ids), bytes(mask)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text, in which special tokens may be spelled out. No special tokens are added."""
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=False))

    def token(self, token_id: int) -> str:
        return str(self._backend.id_to_token(token_id))

    def is_special(self, token_id: int) -> bool:
        """True for a token that the tokenizer marks as special: text never contains it by chance."""
        added = self._backend.get_added_tokens_decoder().get(token_id)
        return added is not None and bool(added.special)

    def _stop_ids(self, folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
        """Every end-of-sequence id of the model, its generation settings or its tokenizer."""
        found: dict[int, None] = {}
        for source in (_object(folder / "generation_config.json"), _object(folder / "config.json")):
            ends = source.get("eos_token_id")
            found.update(dict.fromkeys(i for i in (ends if isinstance(ends, list) else [ends]) if isinstance(i, int)))
        if config.get("eos_token"):
            token = self._backend.token_to_id(_text(config["eos_token"]))
            if token is not None:
                found[token] = None
        return tuple(found)


class IncrementalDecoder:
    """Decodes one response: `push` its tokens, then `finish` it. Invariant: whatever tokens follow, `text[: emitted]`
    is a prefix of the response's text, and the emitted events represent exactly that prefix.

    Incomplete characters, a possible start of a stop text or tool call, and the final stop token are held back;
    `finish` emits the rest."""

    def __init__(
        self, form: ChatFormat, *, stops: Sequence[str], tools: bool, call_id: Callable[[int], str] = lambda number: ""
    ) -> None:
        self._form, self._stops = form, [s for s in stops if s]
        self._reader = ToolCallParser(form.spelling if tools else "none", call_id)
        self._events: list[OutputEvent] = []
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._edges: list[tuple[int, int]] = []
        """(characters, tokens) at each boundary between tokens that is also a boundary between characters and was not
        emitted yet."""
        self._window = (0, 0)
        """The range of tokens decoded last. The next tokens are decoded together with them, since a token's text may
        depend on its predecessors."""
        self._ended = False
        self.text = ""
        self.emitted = self.shown = 0

    def push(self, piece: CompletionChunk) -> OutputDelta | None:
        """The output that can be emitted now; None if there is none."""
        for token, logprob in zip(piece.token_ids, piece.logprobs, strict=True):
            if not self._ended:
                self._read(token, logprob)
        # Characters that are content whatever follows.
        found = [at for at in (self.text.find(stop, self.emitted) for stop in self._stops) if at >= 0]
        if found:
            self._ended = True
        partial_stops = [partial_match_length(self.text[self.emitted :], stop) for stop in self._stops]
        limit = min([*found, len(self.text) - max(partial_stops, default=0)])
        ready = max((characters for characters, _ in self._edges if characters <= limit), default=0)
        if ready <= self.emitted:
            return None
        events = tuple(self._reader.feed(self.text[self.emitted : ready]))
        self.emitted = ready
        if not events:
            return None
        self._events += events
        settled = [tokens for characters, tokens in self._edges if characters <= self._reader.settled]
        self._edges = self._edges[len(settled) :]
        at = slice(self.shown, max(settled, default=self.shown))
        self.shown = at.stop
        ids = tuple(self._ids[at])
        return OutputDelta(events, ids, tuple(self._logprobs[at]), tuple(map(self._form.token, ids)))

    def finish(self, text: str) -> tuple[str, tuple[OutputPart, ...], tuple[OutputEvent, ...]]:
        """The content and all parts of the response with this final text, and the events not emitted yet. Some decoders
        change earlier text as more tokens follow; emitted text stays as it is."""
        rest = (*self._reader.feed(text[self.emitted :]), *self._reader.end())
        return self._reader.content, merge_events((*self._events, *rest)), rest

    def _read(self, token: int, logprob: float) -> None:
        if token in self._form.stops:
            self._ended = True
            return
        self._ids.append(token)
        self._logprobs.append(logprob)
        begin, end = self._window
        before, now = self._form.text(self._ids[begin:end]), self._form.text(self._ids[begin:])
        if now.endswith(REPLACEMENT_CHARACTER) and len(self._ids) - end < MAX_CHARACTER_TOKENS:
            return
        if now.endswith(REPLACEMENT_CHARACTER) or not now.startswith(before):
            self._ended = True
            return
        self.text += now[len(before) :]
        self._window = end, len(self._ids)
        self._edges.append((len(self.text), len(self._ids)))


def _own_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
    return source if isinstance(source, str) else None


def _compiled(source: str) -> Any:
    """Compile in the same environment as transformers: sandboxed, blocks trimmed, JSON not escaped for HTML."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    class Generation(Extension):
        """Puts `MARKS` around the output of `{% generation %}` blocks."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja reads it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

        def marked(self, caller: Callable[[], str]) -> str:
            return MARKS[0] + caller() + MARKS[1]

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: dt.datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise SpecError(
            f"the chat template cannot be read: {error}", remedy="mend it, or give --chat-template"
        ) from None


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _text(token: object) -> str:
    """A special token's text: a string, or an object with a `content` field."""
    return str(token.get("content", "")) if isinstance(token, Mapping) else str(token)
