"""The captured turn that a request continues, and the resulting tokens: on text alone, without an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.adapters.proxy.capture import CapturedTurn, SessionCapture, TurnRelation
from rollart.adapters.proxy.chat import ChatFormat
from rollart.adapters.proxy.messages import BadRequest, Message, PromptInput, ToolCall
from rollart.adapters.proxy.sessions import truncate_at_stops
from rollart.adapters.proxy.tool_calls import parse_answer
from rollart.model import Completion, FinishReason, SegmentKind, VersionSpan
from rollart.quickstart.tokenizer import write_tokenizer
from tests.proxy.scripted import CALL, END, TEMPLATE, spelling

TOOLS = ({"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spelling")
    spelling(path)
    return path


@pytest.fixture(scope="module")
def form(directory: Path) -> ChatFormat:
    return ChatFormat(directory)


def user(text: str) -> Message:
    return Message("user", text)


def letters(form: ChatFormat, text: str, *, end: bool = True) -> Completion:
    """Text as the policy samples it: letter by letter, never merged."""
    ids = tuple(i for letter in text for i in form.encode(letter)) + (form.stop_ids if end else ())
    spans = (VersionSpan(3, 0, 1), VersionSpan(4, 1, len(ids))) if len(ids) > 1 else (VersionSpan(3, 0, len(ids)),)
    finish = FinishReason.STOP if end else FinishReason.LENGTH
    return Completion(ids, tuple(-0.5 * i for i in range(len(ids))), spans if ids else (), finish)


def say(capture: SessionCapture, form: ChatFormat, prompt: PromptInput, text: str, *, end: bool = True) -> CapturedTurn:
    completion = letters(form, text, end=end)
    content, calls = parse_answer(form.spelling, text) if prompt.tools else (text, ())
    return capture.keep(capture.plan(prompt), completion, Message("assistant", content, calls))


def test_the_tokens_that_were_sampled_are_sent_again_as_they_are(form: ChatFormat) -> None:
    capture = SessionCapture(form)
    first = say(capture, form, PromptInput((user("hi"),)), "world")
    assert first.planned.relation is TurnRelation.START
    second = capture.plan(PromptInput((user("hi"), Message("assistant", "world"), user("world"))))
    assert (second.relation, second.after) == (TurnRelation.EXTENDS, 0)
    assert second.token_ids[: len(first.token_ids)] == first.token_ids
    assert second.token_ids != form.encode(second.text), "encoded again they would be others: world is one token"
    assert form.text(second.token_ids) == second.text
    assert second.shown == form.encode("<|user|>world<|end|><|answer|>")
    turn = capture.keep(second, letters(form, "world"), Message("assistant", "world"))
    (branch,) = capture.branches()
    assert [s.kind for s in branch.segments] == [
        SegmentKind.PROMPT,
        *2 * [SegmentKind.ACTION],
        SegmentKind.OBSERVATION,
        *2 * [SegmentKind.ACTION],
    ]
    assert [s.policy_version for s in branch.segments] == [None, 3, 4, None, 3, 4]
    assert sum((s.token_ids for s in branch.segments), ()) == turn.token_ids


def test_white_space_around_an_answer_and_ids_of_calls_may_change(form: ChatFormat) -> None:
    capture = SessionCapture(form)
    say(capture, form, PromptInput((user("hi"),), TOOLS), f"well {CALL}")
    told = Message("assistant", "well\n", (ToolCall("weather", {"city": "Oslo"}, "another-id"),))
    planned = capture.plan(PromptInput((user("hi"), told, Message("tool", "sun", call_id="another-id")), TOOLS))
    assert planned.relation is TurnRelation.EXTENDS
    assert planned.shown == form.encode("<|tool|>sun<|end|><|answer|>")


def test_an_answer_that_was_cut_off_is_ended_by_tokens_that_are_shown(form: ChatFormat) -> None:
    capture = SessionCapture(form)
    turn = say(capture, form, PromptInput((user("hi"),)), "wor", end=False)
    planned = capture.plan(PromptInput((user("hi"), Message("assistant", "wor"), user("go on"))))
    assert planned.relation is TurnRelation.EXTENDS
    assert planned.shown[0] == form.stop_ids[0]
    assert planned.token_ids == turn.token_ids + planned.shown


@pytest.mark.parametrize(
    "messages",
    [
        (user("hello"), Message("assistant", "world"), user("x")),
        (user("hi"), Message("assistant", "word"), user("x")),
        (Message("system", "be brief"), user("hi"), Message("assistant", "world"), user("x")),
        (user("x"),),
    ],
)
def test_what_goes_on_from_nothing_is_a_branch_of_its_own(form: ChatFormat, messages: tuple[Message, ...]) -> None:
    capture = SessionCapture(form)
    say(capture, form, PromptInput((user("hi"),)), "world")
    planned = capture.plan(PromptInput(messages))
    assert (planned.relation, planned.after) == (TurnRelation.DIVERGED, None)
    assert "no captured turn" in planned.reason
    assert planned.token_ids == planned.shown == form.encode(planned.text)


def test_other_tools_are_another_conversation(form: ChatFormat) -> None:
    capture = SessionCapture(form)
    say(capture, form, PromptInput((user("hi"),)), "world")
    planned = capture.plan(PromptInput((user("hi"), Message("assistant", "world"), user("x")), TOOLS))
    assert (planned.relation, planned.after) == (TurnRelation.DIVERGED, None)
    assert "the earlier prompt differently" in planned.reason


def test_a_template_that_drops_earlier_thoughts_starts_a_branch_and_says_so(directory: Path) -> None:
    dropping = TEMPLATE.replace(
        "{{- m.content }}", "{{- m.content if loop.last else m.content.split('</think>')[-1] }}"
    )
    form = ChatFormat(directory, template=dropping)
    capture = SessionCapture(form)
    thought = Message("assistant", "<think>hm</think>world")
    say(capture, form, PromptInput((user("hi"),)), thought.content)
    planned = capture.plan(PromptInput((user("hi"), thought, user("x"))))
    assert (planned.relation, planned.after) == (TurnRelation.DIVERGED, None)
    assert "once more messages follow" in planned.reason
    always = ChatFormat(directory, template=TEMPLATE.replace("m.content", "m.content.split('</think>')[-1]"))
    capture = SessionCapture(always)
    say(capture, always, PromptInput((user("hi"),)), thought.content)
    planned = capture.plan(PromptInput((user("hi"), thought, user("x"))))
    assert (planned.relation, planned.after) == (TurnRelation.DIVERGED, None)
    assert "than it was sampled" in planned.reason


def test_two_that_go_on_from_one_turn_share_its_tokens(form: ChatFormat) -> None:
    capture = SessionCapture(form)
    first = say(capture, form, PromptInput((user("hi"),)), "world")
    history = (user("hi"), Message("assistant", "world"))
    left, right = capture.plan(PromptInput((*history, user("a")))), capture.plan(PromptInput((*history, user("b"))))
    kept = [capture.keep(p, letters(form, "world"), Message("assistant", "world")) for p in (left, right)]
    assert [t.planned.relation for t in kept] == [TurnRelation.EXTENDS, TurnRelation.FORK]
    one, other = capture.branches()
    assert (one.shared, other.shared) == (0, len(first.token_ids))
    assert [t.number for t in one.turns] == [0, 1]
    assert [t.number for t in other.turns] == [0, 2]


def test_first_turns_under_way_at_once_are_branches(form: ChatFormat) -> None:
    capture = SessionCapture(form)
    plans = [capture.plan(PromptInput((user("hi"),))) for _ in range(2)]
    kept = [capture.keep(p, letters(form, "world"), Message("assistant", "world")) for p in plans]
    assert [t.planned.relation for t in kept] == [TurnRelation.START, TurnRelation.DIVERGED]


def test_bare_text_and_ids_go_on_by_their_beginning(form: ChatFormat) -> None:
    capture = SessionCapture(form)
    first = say(capture, form, PromptInput(text="hi "), "world")
    planned = capture.plan(PromptInput(text="hi world, hello"))
    assert (planned.relation, planned.after, planned.shown) == (TurnRelation.EXTENDS, 0, form.encode(", hello"))
    assert capture.plan(PromptInput(text="hi wor")).relation is TurnRelation.DIVERGED
    assert capture.plan(PromptInput(token_ids=first.token_ids)).relation is TurnRelation.DIVERGED, "ids go on from ids"
    ids = say(capture, form, PromptInput(token_ids=(1, 2, 3)), "world")
    planned = capture.plan(PromptInput(token_ids=(*ids.token_ids, 7)))
    assert (planned.relation, planned.after, planned.shown) == (TurnRelation.EXTENDS, 1, (7,))


def test_a_tokenizer_without_template_shows_contents(tmp_path: Path) -> None:
    form = ChatFormat(write_tokenizer(tmp_path).parent)
    lake = "You are on the ice ."
    planned = SessionCapture(form).plan(PromptInput((user(lake),)))
    assert planned.token_ids == form.encode(lake)
    capture = SessionCapture(form)
    done = Completion((*form.encode("You"), *form.stop_ids), (0.0, 0.0), (VersionSpan(0, 0, 2),), FinishReason.STOP)
    turn = capture.keep(planned, done, Message("assistant", "You"))
    onwards = capture.plan(PromptInput((user(lake), Message("assistant", "You"), user("are on"))))
    assert onwards.relation is TurnRelation.EXTENDS
    assert onwards.token_ids == turn.token_ids + form.encode("are on")


def test_a_text_that_ends_an_answer_is_cut_with_the_tokens_it_begins_in(form: ChatFormat) -> None:
    whole = letters(form, "worldly")
    cut = truncate_at_stops(whole, ("nothing", "ld"), form.text)
    assert form.text(cut.token_ids) == "wor"
    assert (len(cut.logprobs), cut.finish) == (3, FinishReason.STOP)
    assert cut.spans == (VersionSpan(3, 0, 1), VersionSpan(4, 1, 3))
    assert truncate_at_stops(whole, ("nothing",), form.text) is whole
    assert truncate_at_stops(whole, ("w",), form.text).spans == ()


def test_a_template_refuses_in_words(directory: Path) -> None:
    form = ChatFormat(directory, template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadRequest, match="roles must alternate"):
        SessionCapture(form).plan(PromptInput((user("a"), user("b"))))


WORDS = st.sampled_from(["world", "hi", "w", "", "two words"])


@settings(max_examples=25)
@given(data=st.data(), steps=st.lists(st.tuples(WORDS, WORDS, st.booleans()), min_size=1, max_size=8))
def test_every_sampled_token_is_kept_once_and_never_changed(
    form: ChatFormat, data: st.DataObject, steps: list[tuple[str, str, bool]]
) -> None:
    """Any harness: it continues any earlier conversation, or starts a new one, and may rewrite earlier answers."""
    capture = SessionCapture(form)
    conversations: list[tuple[Message, ...]] = [()]
    said: list[tuple[int, ...]] = []
    for asked, answer, end in steps:
        history = data.draw(st.sampled_from(conversations))
        if history and data.draw(st.booleans(), label="rewrites"):
            history = (dataclasses.replace(history[0], content=history[0].content + "!"), *history[1:])
        prompt = PromptInput((*history, user(asked)))
        turn = say(capture, form, prompt, answer, end=end)
        said.append(letters(form, answer, end=end).token_ids)
        conversations.append((*prompt.messages, turn.answer))
        assert form.text(turn.planned.token_ids) == form.render(prompt.messages, (), prompt=True)
    for turn, tokens in zip(capture.turns, said, strict=True):
        assert sum((s.token_ids for s in turn.segments if s.kind is SegmentKind.ACTION), ()) == tokens
    branches = capture.branches()
    counted = [t.number for b in branches for t in b.turns if len(t.token_ids) > b.shared]
    assert sorted(counted) == list(range(len(steps))), "every turn is in one branch beyond what branches share"
    for branch in branches:
        assert sum((s.token_ids for s in branch.segments), ()) == branch.turns[-1].token_ids
        assert list(_depths(branch.turns)) == list(range(len(branch.turns)))


def _depths(turns: tuple[CapturedTurn, ...]) -> Iterator[int]:
    for turn in turns:
        assert turn.planned.token_ids + turn.token_ids[len(turn.planned.token_ids) :] == turn.token_ids
        yield turn.depth


@pytest.mark.slow  # transformers takes seconds to import
def test_it_renders_as_transformers_does(directory: Path, form: ChatFormat) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(directory)
    call = Message("assistant", "", (ToolCall("weather", {"city": "Ås"}, "1"),))
    messages = (Message("system", "<b>"), user("hi"), call, Message("tool", "sun", call_id="1"))
    for tools in ((), TOOLS):
        for prompt in (True, False):
            rendered = theirs.apply_chat_template(
                [m.for_template() for m in messages],
                tools=list(tools) or None,
                add_generation_prompt=prompt,
                tokenize=False,
            )
            assert form.render(messages, tools, prompt=prompt) == rendered
    assert form.encode(rendered) == tuple(theirs(rendered, add_special_tokens=False)["input_ids"])
    assert form.stops == {theirs.convert_tokens_to_ids(END): END}


@pytest.mark.parametrize("odd", ['"\\ud83d"', "NaN", "1e999", "[" * 3000, "[" * 3000 + "]" * 3000])
def test_what_only_python_takes_for_json_is_said_and_no_call(odd: str) -> None:
    said = f'{{"name": "f", "arguments": {{"x": {odd}}}}}'
    assert parse_answer("json", said) == (said, ())
    called = f"<tool_call>{said}</tool_call>"
    assert parse_answer("hermes", called) == (called, ())
