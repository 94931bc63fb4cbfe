"""Parsing of tool calls while they are written: independent of how the text is split, and without loss of text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollart.adapters.proxy.messages import (
    ArgumentsDelta,
    OutputEvent,
    OutputPart,
    TextDelta,
    ToolCall,
    ToolCallStart,
)
from rollart.adapters.proxy.tool_calls import PartialJsonScanner, ToolCallParser, merge_events, parse_answer

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(st.text(max_size=4), json_values, max_size=4)


@st.composite
def written(draw: st.DrawFn) -> str:
    """A JSON object as a policy might write it: with any spacing, truncated, or with odd characters."""
    value = draw(arguments)
    text = json.dumps(value, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1])))
    if draw(st.integers(0, 3)) == 0:
        text = text[: draw(st.integers(1, len(text)))]
    if draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(1, len(text)))
        odd = [
            "}",
            "{",
            '"',
            "\\",
            "\\ud83d",
            "\\ude00",
            "\\u12",
            "1e999",
            "NaN",
            "tru",
            "x",
            ",",
            "\n",
            "</tool_call>",
            "<tool_call>",
            "-",
            "01",
            "[",
            ":",
        ]
        text = text[:at] + draw(st.sampled_from(odd)) + text[at:]
    return text


@st.composite
def answers(draw: st.DrawFn) -> str:
    def piece() -> str:
        body, name = draw(written()), draw(st.sampled_from(["f", "weather", "\\u00e9", "a\\nb"]))
        forms = [
            f'<tool_call>\n{{"name": "{name}", "arguments": {body}}}\n</tool_call>',
            f'<tool_call>{{"name":"{name}","parameters":{body}}}</tool_call>',
            f'<tool_call>{{"arguments": {body}, "name": "{name}"}}</tool_call>',
            f'<tool_call>{{"name": "{name}", "arguments": {body}, "id": 3}}</tool_call>',
            f'<tool_call>{{"name": "{name}", "arguments": {body}',
            f'{{"name": "{name}", "parameters": {body}}}',
            "<tool_call>",
            "</tool_call>",
            "<tool",
            " ",
            "\n",
            "Hello.",
            "é",
            '{"name": 3}',
        ]
        return draw(st.sampled_from(forms))

    return "".join(piece() for _ in range(draw(st.integers(0, 4))))


def read(spelling: str, text: str, cuts: Sequence[int]) -> tuple[list[OutputEvent], ToolCallParser]:
    reader, said, at = ToolCallParser(spelling), list[OutputEvent](), 0
    for cut in cuts:
        said += reader.feed(text[at : at + cut])
        at += cut
        assert reader.settled <= at
    return said + reader.feed(text[at:]) + reader.end(), reader


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(text=answers(), cuts=st.lists(st.integers(1, 9), max_size=60), spelling=st.sampled_from(["hermes", "json"]))
@example(text='<tool_call>{"name":"f","arguments":{"a":"</tool_call>"}}</tool_call>', cuts=[1] * 60, spelling="hermes")
def test_however_it_is_cut_it_says_the_same(text: str, cuts: list[int], spelling: str) -> None:
    whole, reader = read(spelling, text, [])
    cut, _ = read(spelling, text, cuts)
    assert merge_events(cut) == merge_events(whole)
    assert [c.written for c in _calls(cut)] == [c.written for c in _calls(whole)]
    for said in (whole, cut):
        _well_formed(said)
    assert _nothing_lost(text, merge_events(whole), reader)
    content, calls = parse_answer(spelling, text)
    if all(call.whole for call in _calls(whole)):
        assert (content, calls) == ("".join(p for p in merge_events(whole) if isinstance(p, str)), tuple(_calls(whole)))


def _calls(said: Sequence[OutputEvent]) -> list[ToolCall]:
    return [one for one in said if isinstance(one, ToolCall)]


def _well_formed(said: Sequence[OutputEvent]) -> None:
    """Calls do not overlap, and their pieces are their arguments; a complete call's pieces are the JSON of its
    arguments."""
    begun, pieces = None, ""
    for one in said:
        match one:
            case TextDelta(text):
                assert begun is None
                assert text
            case ToolCallStart():
                assert begun is None
                begun, pieces = one, ""
            case ArgumentsDelta(index, text):
                assert begun is not None
                assert (index, bool(text)) == (begun.index, True)
                pieces += text
            case ToolCall():
                assert begun is not None
                assert (one.name, one.written) == (begun.name, pieces)
                if one.whole:
                    assert json.loads(pieces) == one.arguments
                begun = None
    assert begun is None


def _nothing_lost(text: str, parts: Sequence[OutputPart], reader: ToolCallParser) -> bool:
    """The emitted pieces are the text, except for white space and the syntax of calls."""

    def squashed(some: str) -> str:
        return re.sub(r"\s", "", some)

    left, spans = squashed(text), iter(reader.spans)
    for part in parts:
        if isinstance(part, str):
            said = squashed(part)
        elif part.whole:
            start, end, _ = next(spans)
            said = squashed(text[start:end])
        else:
            head = re.match(r'(<tool_call>)?\{"name":"(?:[^"\\]|\\.)*","(?:arguments|parameters)":', left)
            assert head is not None
            said = head.group() + squashed(part.written)
        assert left.startswith(said), (left, said)
        left = left[len(said) :]
    return left == ""


def test_arguments_leave_as_they_are_drawn() -> None:
    reader = ToolCallParser("hermes")
    seen = [
        reader.feed(piece)
        for piece in (
            "Well.\n",
            '<tool_call>\n{"na',
            'me": "f", "arguments": {"ci',
            'ty": "Os',
            "lo\\",
            'n", "n": 1',
            "2",
            "}",
            "}\n</tool_",
            "call>",
        )
    ]
    call = ToolCall("f", {"city": "Oslo\n", "n": 12})
    assert seen == [
        [TextDelta("Well.")],
        [],
        [ToolCallStart(0, "f"), ArgumentsDelta(0, '{"ci')],
        [ArgumentsDelta(0, 'ty": "Os')],
        [ArgumentsDelta(0, "lo")],
        [ArgumentsDelta(0, '\\n", "n": ')],
        [],
        [ArgumentsDelta(0, "12}")],
        [],
        [call],
    ]


@pytest.mark.parametrize(
    ("said", "content", "arguments", "rest"),
    [
        ('{"a": 12', "", {}, "12"),
        ('{"a": "Os', "", {}, ""),
        ('{"a": [1, {"b": tru', "", {"a": [1, {}]}, "tru"),
        ('{"a": 1, "b": nope}}</tool_call>', "", {"a": 1}, "nope}}</tool_call>"),
        ('{"a": 1}, "x</tool_call>', "", {"a": 1}, ', "x</tool_call>'),
    ],
)
def test_a_call_that_breaks_off_keeps_what_was_given_out(said: str, content: str, arguments: Any, rest: str) -> None:
    text = '<tool_call>{"name": "f", "arguments": ' + said
    parts = merge_events(read("hermes", text, [3] * 40)[0])
    assert [p for p in parts if isinstance(p, str)] == ([rest] if rest else [])
    (call,) = [p for p in parts if isinstance(p, ToolCall)]
    assert (call.arguments, call.whole) == (arguments, False)
    assert parse_answer("hermes", text) == (text, ()), "it is captured as the text that it is"


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(text=written())
def test_a_scan_is_what_a_parser_says(text: str) -> None:
    scan = PartialJsonScanner()
    taken = scan.push(text)
    if scan.done:
        value = json.loads(text[:taken], parse_constant=lambda _: pytest.fail("no JSON"))
        assert scan.value() == value
        assert json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    else:
        try:
            value = json.loads(text)
        except ValueError:
            pass
        else:  # Python accepts it; other parsers need not
            with pytest.raises((ValueError, UnicodeError)):
                json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    jiter = pytest.importorskip("jiter")
    assert jiter.from_json(text[: scan.sure].encode(), partial_mode=True) == scan.value()
