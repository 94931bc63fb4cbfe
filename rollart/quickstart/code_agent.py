"""A small agent that calls tools: its tasks, its tokenizer with a chat template, and its policy, made on the spot.

A task is in a file of the sandbox, `largest, times 4, plus 3`; the policy shows the file by `run_python` and submits
`def f(x):\\n    return max(x) * 4 + 3`.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

from rollart.adapters.envs.code_tools import RUN, SUBMIT, TOOLS, CodeTask, show_file
from rollart.adapters.envs.split import held_out_item, held_out_seed
from rollart.quickstart.policy_config import small_qwen3

ITEMS: dict[str, tuple[str, Callable[[list[int]], int]]] = {
    "largest": ("max(x)", max),
    "smallest": ("min(x)", min),
    "sum": ("sum(x)", sum),
    "length": ("len(x)", len),
    "first": ("x[0]", lambda x: x[0]),
    "last": ("x[-1]", lambda x: x[-1]),
}
OPERATIONS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    ", plus ": (" + ", lambda a, b: a + b),
    ", minus ": (" - ", lambda a, b: a - b),
    ", times ": (" * ", lambda a, b: a * b),
}
PLUS, MINUS, TIMES = OPERATIONS
TESTS = 4

CARELESS = 0.75
"""Share of worked examples that forget the parentheses of `(max(x) + 3) * 4`. They teach how tools are called, and how
some tasks are solved; tests teach the rest."""

HEAD, TAIL = "def f(x):\n    return ", ".txt').read())"


def task(seed: int) -> CodeTask:
    """The task of a seed: an item of a list, then two operations, in half of all tasks a sum and its multiple.
    Held-out seeds draw instructions that no others draw."""
    rng = random.Random(seed)
    while True:
        item = rng.choice([*ITEMS])
        names = rng.choice((PLUS, PLUS, MINUS, MINUS, TIMES)), rng.choice((PLUS, MINUS, TIMES, TIMES, TIMES, TIMES))
        steps = [(name, rng.randint(2, 9)) for name in names]
        instructions = item + "".join(f"{name}{number}" for name, number in steps)
        if held_out_item(instructions) == held_out_seed(seed):
            break
    code, value = ITEMS[item]
    careless = rng.random() < CARELESS
    for position, (name, number) in enumerate(steps):
        if name == TIMES and position and steps[0][0] != TIMES and not careless:
            code = f"({code})"
        code += f"{OPERATIONS[name][0]}{number}"
    tests = []
    for _ in range(TESTS):
        x = [rng.randint(0, 20) for _ in range(rng.randint(2, 6))]
        wanted = value(x)
        for name, number in steps:
            wanted = OPERATIONS[name][1](wanted, number)
        tests.append({"call": f"f({x})", "returns": wanted})
    file = f"{rng.choice('abcdefgh')}{rng.randint(0, 9)}.txt"
    solution = ((RUN, show_file(file)), (SUBMIT, HEAD + code))
    return CodeTask(f"Write f(x) as {file} says.", tests, {file: instructions}, solution)


SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
UNKNOWN = "<unk>"

PIECES = (
    *("system\n", "user\n", "assistant\n", "<tools>\n", "\n</tools>", *map(json.dumps, TOOLS)),
    *("<tool_call>\n", "\n</tool_call>", "<tool_response>\n", "\n</tool_response>"),
    *('{"name": "', RUN, SUBMIT, '", "arguments": {"code": "', '"}}', "print(open('", TAIL, json.dumps(HEAD)[1:-1]),
    *("Write f(x) as ", ".txt says.", *ITEMS, *OPERATIONS),
    *(code for code, _ in (*ITEMS.values(), *OPERATIONS.values())),
)
"""What is often written is one token, as in a vocabulary that was learned from conversations; all else is spelled out
in characters of ASCII."""


def vocabulary() -> dict[str, int]:
    words = dict.fromkeys((*SPECIAL, UNKNOWN, *PIECES, "\n", *map(chr, range(32, 127))))
    return {word: index for index, word in enumerate(words)}


TEMPLATE = """
{%- if tools %}{{- '<|im_start|>system\n<tools>\n' }}
{%- for tool in tools %}{{- tool | tojson }}{%- if not loop.last %}{{- '\n' }}{%- endif %}{%- endfor %}
{{- '\n</tools><|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{- '<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
"""As Qwen's, without its words of explanation."""


def write_tokenizer(directory: Path) -> Path:
    """Write `tokenizer.json` and `tokenizer_config.json`. Encoding takes the longest piece at each position; decoding
    joins the pieces."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    longest = sorted((piece for piece in vocabulary() if piece not in SPECIAL), key=len, reverse=True)
    tokenizer = Tokenizer(models.WordLevel(vocabulary(), unk_token=UNKNOWN))
    pieces = Regex("|".join([*map(re.escape, longest), r"[^\x00-\x7f]", r"."]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pieces, "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "tokenizer.json"
    tokenizer.save(str(path))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL[0],
        "eos_token": SPECIAL[2],
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return path


def policy_config() -> dict[str, object]:
    """`config.json` of a Qwen3ForCausalLM of 0.3 M parameters."""
    return small_qwen3(vocabulary=len(vocabulary()), pad=0, eos=2)
