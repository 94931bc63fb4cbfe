"""Conversations of a file as samples: loss on the assistant's tokens, with and without marks in the template, as
transformers finds them; and what is refused, by line and key."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.adapters.conversations import read_samples
from rollart.adapters.proxy.chat import ChatFormat
from rollart.errors import SpecError
from tests.adapters.test_chat import ANSWER, LLAMA, MISTRAL, QWEN, TEXT, directory

__all__ = ["directory"]

MARKED = QWEN.replace(
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}",
    """{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}
    {%- generation %}
        {{- message.content + '<|im_end|>' }}
    {%- endgeneration %}
{%- else %}
    {{- message.content + '<|im_end|>' }}
{%- endif %}
{{- '\n' }}""",
)
CONTEXT = 4096
Turns = Sequence[tuple[str, str]]


def model(directory: Path, to: Path, template: str | None) -> Path:
    """The tokenizer with a chat template."""
    to.mkdir(exist_ok=True)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (to / "tokenizer.json").write_text((directory / "tokenizer.json").read_text())
    (to / "tokenizer_config.json").write_text(json.dumps(config | ({"chat_template": template} if template else {})))
    return to


def samples(tokenizer: Path, *lines: object, context: int = CONTEXT) -> Sequence[tuple[Sequence[int], bytes]]:
    path = tokenizer / "train.jsonl"
    text = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines)
    path.write_bytes(text.encode(errors="surrogateescape"))
    return read_samples(path, text, tokenizer, context)


def conversation(turns: Turns) -> list[dict[str, str]]:
    return [{"role": r, "content": text} for turn in turns for r, text in zip(("user", "assistant"), turn, strict=True)]


def trained(form: ChatFormat, sample: tuple[Sequence[int], bytes]) -> str:
    """The text of the tokens with loss, `|` where others are between."""
    pieces = [list[int]()]
    for token, loss in zip(*sample, strict=True):
        if loss:
            pieces[-1].append(token)
        elif pieces[-1]:
            pieces.append([])
    return "|".join(form.text(one) for one in pieces if one)


TURNS = st.lists(st.tuples(TEXT, ANSWER), min_size=1, max_size=4)


@settings(max_examples=2)  # templates are compiled for each
@given(several=st.lists(TURNS, min_size=6, max_size=12))
def test_answers_are_the_same_with_marks_and_without(
    directory: Path, tmp_path_factory: pytest.TempPathFactory, several: list[Turns]
) -> None:
    root, lines = tmp_path_factory.getbasetemp(), [{"messages": conversation(turns)} for turns in several]
    plain = samples(model(directory, root / "plain", QWEN), *lines)
    assert plain == samples(model(directory, root / "marked", MARKED), *lines)
    form = ChatFormat(root / "plain")
    assert [trained(form, one) for one in plain] == [
        "|".join(f"{answer}<|im_end|>" for _, answer in turns) for turns in several
    ]


@pytest.mark.parametrize(("template", "end"), [(LLAMA, "<|eot_id|>"), (MISTRAL, "</s>")])
def test_other_families_end_answers_in_their_own_way(directory: Path, tmp_path: Path, template: str, end: str) -> None:
    tokenizer = model(directory, tmp_path / "model", template)
    (sample,) = samples(tokenizer, {"messages": conversation([("the", "answer"), ("is", "12")])})
    assert trained(ChatFormat(tokenizer), sample) == f"answer{end}|12{end}"


def test_tool_calls_are_trained_and_their_results_are_not(directory: Path, tmp_path: Path) -> None:
    role = "message.role + '\n' + message.content"
    calls = QWEN.replace(role, f"{role} + (message.tool_calls | tojson if message.tool_calls else '')")
    calls = calls.replace("{%- for message", "{{- tools | tojson if tools else '' }}\n{%- for message", 1)
    tokenizer = model(directory, tmp_path / "model", calls)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "2"},
    ]
    (sample,) = samples(tokenizer, {"messages": messages, "tools": [{"type": "function"}]})
    text = trained(ChatFormat(tokenizer), sample)
    assert '"arguments": {"a": 1}' in text
    assert text.endswith("<|im_end|>|2<|im_end|>")
    assert text.count("|im_end|") == 2


def test_a_completion_ends_with_the_end_of_sequence_and_long_ones_are_cut(directory: Path, tmp_path: Path) -> None:
    tokenizer = model(directory, tmp_path / "model", None)
    lines = {"prompt": "the other", "completion": " answer"}, {"prompt": "", "completion": "is</s>"}
    first, second = samples(tokenizer, lines[0], "", lines[1])
    form = ChatFormat(tokenizer)
    assert (trained(form, first), trained(form, second)) == (" answer</s>", "</s>")  # nothing precedes "is"
    (cut, _) = samples(tokenizer, *lines, context=len(first[0]) - 1)
    assert cut == (first[0][:-1], first[1][:-1])


MESSAGES: Any = conversation([("the", "answer")])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2: no JSON object"),
        ([], "line 2: no JSON object"),
        ("\udcff", "line 2 is not UTF-8: invalid start byte"),
        ({"text": "x"}, "line 2, prompt: is missing (rule: messages, or the texts prompt and completion)"),
        ({"prompt": "x", "completion": 3}, "line 2, completion: is no text"),
        ({"messages": []}, "line 2, messages: is no list with an entry"),
        ({"messages": MESSAGES[:1]}, "line 2, messages: has no message of role assistant"),
        ({"messages": [*MESSAGES, {"content": "x"}]}, "line 2, messages[2]: has no role"),
        ({"messages": [*MESSAGES, {"role": "user"}]}, "line 2, messages[2].content: is no text"),
        (
            {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "line 2, messages[2].tool_calls[0]: has no function.name",
        ),
        (
            {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            "line 2, messages[2].tool_calls[0].function.arguments: is no JSON object",
        ),
        ({"messages": MESSAGES, "tools": "add"}, "line 2, tools: is no list of objects"),
        ({"messages": [{"role": "system", "content": "x"}, *MESSAGES]}, "line 2, messages: the chat template refuses"),
        ({"prompt": "x" * 99, "completion": "y"}, "line 2: none of its first 40 tokens (model.context) is an answer's"),
    ],
)
def test_a_bad_line_is_named_with_its_key(directory: Path, tmp_path: Path, line: object, problem: str) -> None:
    tokenizer = model(directory, tmp_path / "model", MISTRAL)
    with pytest.raises(SpecError) as error:
        samples(tokenizer, {"messages": MESSAGES}, line, context=40)
    assert f"train.jsonl {problem}" in error.value.message


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (None, "the model has no chat template"),
        ("{% for m in messages[-1:] %}{{ m.content }}{% endfor %}", "does not show a question and its answer; mark"),
    ],
)
def test_a_template_that_shows_no_answers_is_refused(
    directory: Path, tmp_path: Path, template: str | None, problem: str
) -> None:
    with pytest.raises(SpecError, match=problem):
        samples(model(directory, tmp_path / "model", template), {"messages": MESSAGES})


@pytest.mark.slow  # transformers takes two seconds to import
def test_marks_are_found_as_transformers_finds_them(directory: Path, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = model(directory, tmp_path / "model", MARKED)
    theirs = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    for turns in ([("the", "answer")], [("\n", " 12\n"), ("é", "ünï"), ("x", "y z")]):
        found: Any = theirs.apply_chat_template(
            conversation(turns), return_dict=True, return_assistant_tokens_mask=True, tokenize=True
        )
        (sample,) = samples(tokenizer, {"messages": conversation(turns)})
        assert (list(sample[0]), list(sample[1])) == (found["input_ids"], found["assistant_masks"])
