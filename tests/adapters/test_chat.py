"""Episodes as conversations in a model's chat template: the tokens of all turns are those of the whole conversation,
and sampled tokens never change."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rollart.adapters.chat import EpisodeChat
from rollart.adapters.proxy.chat import ChatFormat
from rollart.adapters.proxy.messages import Message
from rollart.errors import SpecError
from rollart.sim import loop
from rollart.testing.run import make_simulated_run

QWEN = """
{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- elif message.role != 'system' %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
"""As Qwen 2.5's, which has a default system message."""

LLAMA = """
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""
"""As Llama 3's, which trims contents."""

MISTRAL = """
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'assistant' %}{{- message.content + eos_token }}
{%- else %}{{- raise_exception('Only user and assistant roles are supported!') }}{%- endif %}
{%- endfor %}
"""
"""As Mistral's, which has no other roles and no generation prompt."""

THINKING = QWEN.replace(
    "+ message.content + '<|im_end|>' +",
    "+ (message.content if loop.last else message.content.split('</think>')[-1].lstrip('\n')) + '<|im_end|>' +",
)
"""As Qwen 3's, which leaves thoughts out of earlier answers."""

ENDS = {QWEN: "<|im_end|>", LLAMA: "<|eot_id|>", MISTRAL: "</s>", THINKING: "<|im_end|>"}
WORDS = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""Pre-tokens of Llama 3 and Qwen. GPT-2's split white space by what follows, an answer's first word included."""

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SPECIAL += ["[INST]", "[/INST]"]
CORPUS = ["You are a helpful assistant.\n\n", "user\n\nthe answer is 12, the other\n", "assistant\n\n", "system\n"] * 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


def write_tokenizer(path: Path) -> Path:
    """A byte-level BPE with merges. Its end-of-sequence token is none that a template but Mistral's writes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@functools.cache
def form_of(directory: Path, template: str | None) -> ChatFormat:
    return ChatFormat(directory, template=template)


@functools.cache
def chat_of(directory: Path, template: str | None, system: str | None = None, role: str = "user") -> EpisodeChat:
    return EpisodeChat(form_of(directory, template), system=system, role=role)


TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n"), max_size=20)
ANSWER = st.sampled_from(["12", "the answer", "the other\n\nanswer is 12", "é", "{}"]) | TEXT.map(str.strip).filter(
    bool
)
SETTINGS = [(QWEN, None, "user"), (QWEN, "Be brief.", "tool"), (LLAMA, "Be brief.", "user"), (MISTRAL, None, "user")]


@pytest.mark.parametrize(("template", "system", "role"), [*SETTINGS, (THINKING, None, "user")])
@settings(max_examples=25)
@given(first=TEXT, turns=st.lists(st.tuples(ANSWER, st.booleans(), TEXT), max_size=4))
def test_the_tokens_of_all_turns_are_those_of_the_whole_conversation(
    directory: Path, template: str, system: str | None, role: str, first: str, turns: list[tuple[str, bool, str]]
) -> None:
    """Answers end with the template's stop token, or were cut off before it."""
    form, chat = form_of(directory, template), chat_of(directory, template, system, role)
    stop = form.encode(ENDS[template])
    messages = [*([Message("system", system)] if system else []), Message("user", first)]
    tokens = chat.opening(first)
    for answer, cut, text in turns:
        sampled = (*form.encode(answer), *(() if cut else stop))
        tokens += sampled + chat.following(text, sampled)
        messages += [Message("assistant", answer), Message(role, text)]
    assert tokens == form.encode(form.render(messages, (), prompt=True))


@settings(max_examples=25)
@given(sampled=st.lists(st.integers(0, 300), min_size=1, max_size=6))
def test_whatever_was_sampled_the_next_turn_is_written_alike(directory: Path, sampled: list[int]) -> None:
    """Tokens that no text is encoded to, thoughts that the template leaves out: the answer is not rendered again."""
    form, chat = form_of(directory, THINKING), chat_of(directory, THINKING)
    rest = "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    for answer in (sampled, [*form.encode("<think>no</think>"), *sampled]):
        assert form.text(chat.following("go on", answer)) == "<|im_end|>" + rest
        assert form.text(chat.following("go on", [*answer, *form.encode("<|im_end|>")])) == rest
        assert form.text(chat.following("go on", [*answer, *form.encode("</s>")])) == "<|im_end|>" + rest, "another end"


@pytest.mark.parametrize("template", ENDS)
def test_an_answer_ends_with_the_token_that_the_template_writes(directory: Path, template: str) -> None:
    form, chat = form_of(directory, template), chat_of(directory, template)
    (stop,) = form.encode(ENDS[template])
    assert chat.stop_ids == tuple(dict.fromkeys((stop, *form.encode("</s>"))))
    assert chat.answer("12") == chat.answer("12" + ENDS[template]) == (*form.encode("12"), stop)


def test_a_template_that_leaves_thoughts_out_is_known(directory: Path) -> None:
    assert [chat_of(directory, template).drops_thoughts for template in ENDS] == [False, False, False, True]
    for opened in ("<think>\n", "<think>\n\n</think>\n\n"):
        form = form_of(directory, QWEN.replace("assistant\n' }}", f"assistant\n{opened}' }}}}"))
        chat = EpisodeChat(form)
        assert chat.drops_thoughts
        for tokens in (chat.opening("hi"), chat.following("hi", form.encode("12"))):
            assert form.text(tokens).endswith(f"hi<|im_end|>\n<|im_start|>assistant\n{opened}")


def test_a_conversation_may_end_in_a_way_of_its_own(directory: Path) -> None:
    """As Phi 3's, which closes it with the end-of-sequence token."""
    form = form_of(directory, QWEN.rstrip().removesuffix("{%- endif %}") + "{%- else %}{{- eos_token }}{%- endif %}")
    chat = EpisodeChat(form)
    assert form.render([Message("user", "hi")], (), prompt=False).endswith("</s>")
    assert "</s>" not in form.text(chat.following("hi", form.encode("12")))
    assert chat.answer("12") == form.encode("12<|im_end|>")


@pytest.mark.slow  # needs the extra `harnesses`
@pytest.mark.parametrize(
    ("name", "drops"),
    [
        ("gemma3", False),
        ("llama3", False),
        ("llama3_2", False),
        ("phi3", False),
        ("qwen2_5", False),
        ("qwen3", True),
        ("qwen3_5_nothink", True),
        ("qwen3_5_think", True),
        ("qwen3_instruct_2507", False),
    ],
)
def test_published_templates_are_taken(directory: Path, name: str, drops: bool) -> None:
    trl = importlib.util.find_spec("trl")
    if trl is None or trl.origin is None:
        pytest.skip("trl is not installed")
    template = (Path(trl.origin).parent / "chat_templates" / f"{name}.jinja").read_text()
    chat = chat_of(directory, template)
    assert chat.drops_thoughts is drops
    assert form_of(directory, template).text(chat.following("go on", (65,))).count("go on") == 1


@pytest.mark.parametrize(
    ("template", "system", "role", "message"),
    [
        (None, None, "user", "the model has no chat template (rule: chat_template in tokenizer_config.json"),
        (MISTRAL, "Be brief.", "user", "the chat template refuses these messages: Only user and assistant roles"),
        (MISTRAL, None, "tool", "Only user and assistant roles"),
        (QWEN + "{{ messages | length }}", None, "user", "renders earlier messages in other words once more follow"),
        (QWEN.replace("in messages", "in messages[-2:]"), None, "user", "does not show a question and its answer"),
        (QWEN.replace("assistant\n' }}", "assistant\nAnswer: ' }}"), None, "user", "in other words once more"),
        ("{{ messages[-1].content }}", None, "user", "does not show a question and its answer"),
        ("{% for", None, "user", "the chat template cannot be read"),
    ],
)
def test_a_template_that_cannot_be_continued_is_refused(
    directory: Path, template: str | None, system: str | None, role: str, message: str
) -> None:
    with pytest.raises(SpecError) as refused:
        chat_of(directory, template, system, role)
    assert message in refused.value.message
    assert "\n" not in refused.value.message
    assert refused.value.remedy


def parts(tokens: Sequence[int], mask: Sequence[bool], sampled: bool) -> list[tuple[int, ...]]:
    """The stretches of tokens that were sampled, or those that were shown."""
    found: list[list[int]] = []
    for index, (token, loss) in enumerate(zip(tokens, mask, strict=True)):
        if loss == sampled:
            if not index or mask[index - 1] != loss:
                found.append([])
            found[-1].append(token)
    return [tuple(part) for part in found]


def test_samples_of_a_run_are_conversations(directory: Path) -> None:
    """In the scheduler, with weight updates while trajectories run."""
    form, chat = form_of(directory, QWEN), chat_of(directory, QWEN, "Be brief.")
    run = make_simulated_run(quotas={"a": (4, 2)}, turns=3, tokens=3, alpha=1, steps=3)
    plain = run.domains[0].environment
    run.domains = [replace(domain, chat=chat) for domain in run.domains]
    loop.run(run.run(), seed=1)
    samples = [sample for _, batch in run.trainer.batches for sample in batch]
    assert len(samples) == 12
    first = loop.run(plain().reset(0), seed=1).text
    for sample in samples:
        shown = parts(sample.token_ids, sample.loss_mask, False)
        answers = parts(sample.token_ids, sample.loss_mask, True)
        assert len(shown) == len(answers) == 3
        assert shown[0] == chat.opening(first)
        for text, answer in zip(shown[1:], answers, strict=False):
            assert text in (chat.following(observation, answer) for observation in (first, "go")), form.text(text)


@pytest.mark.slow  # transformers takes seconds to import
@pytest.mark.parametrize(("template", "system", "role"), SETTINGS)
def test_a_conversation_has_the_tokens_of_transformers(
    directory: Path, template: str, system: str | None, role: str
) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(directory)
    chat = chat_of(directory, template, system, role)
    stop = theirs.encode(ENDS[template], add_special_tokens=False)
    messages = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": "2 + 10?"}]
    tokens = chat.opening("2 + 10?")
    for answer in ("the answer is 12", "12\n\n\n12"):
        sampled = [*theirs.encode(answer, add_special_tokens=False), *stop]
        tokens += tuple(sampled) + chat.following(" the other? ", sampled)
        messages += [{"role": "assistant", "content": answer}, {"role": role, "content": " the other? "}]
    whole = theirs.apply_chat_template(messages, chat_template=template, add_generation_prompt=True)
    assert tokens == tuple(whole["input_ids"])
