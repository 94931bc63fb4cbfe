"""The files of `rollart rewards init`: a working reward, cases that it passes, and the next steps."""

from __future__ import annotations

import json
import keyword
import pathlib
import re

from serverless.errors import PackageError

_REWARD = '''"""{name}: 1.0 if the answer that the completion marks is the reference answer, else 0.0.

The reward gets a `Sample`: `sample.completion` is the text of the last assistant message, `sample.messages` the whole
conversation, `sample.reference_answer` and `sample.metadata` what the data set gives. It returns a number, or
  Scored(value, metrics)     with numbers to plot beside it
  ModelFault(floor, reason)  when the policy's own output cannot be scored
Any exception is a fault of the reward, never a score: the sample is masked. What is computed may depend on the sample
only, since any worker may get any sample.
"""

import re

from rollart import ModelFault, Sample, Scored, reward

MARKED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@reward(memory_mb=128, timeout_s=5, deterministic=True)
def {name}(sample: Sample):
    marks = MARKED.findall(sample.completion)
    if not marks:
        return ModelFault(floor=0.0, reason="no <answer>")
    right = marks[-1].strip() == sample.reference_answer
    return Scored(float(right), {{"marks": len(marks)}})
'''

_README = """# {name}

- `{name}.py` is the reward; `cases.jsonl` are items, one a line, with what is expected of them.
- `rollart rewards test {name}.py` runs it as a function on this machine: scores, time, memory, and what a million
  items would cost on each provider.
- `rollart rewards deploy {name}.py --provider aws` (or `modal`) says what would change with `--dry-run`.
- In a run's spec: `functions: [{{name: {name}, source: {name}.py, handler: {name}}}]`.

`expected` of a case is `{{"score": 1.0}}`, `{{"min": 0.2, "max": 0.8}}`, or `{{"fault": "model"}}` for a completion
that the policy is to blame for; without it a case shows what it gets.
"""


def _case(key: str, completion: str, expected: dict[str, object]) -> dict[str, object]:
    return {
        "id": key,
        "prompt": "What is 6 times 7? Put the answer into <answer>.",
        "completion": completion,
        "reference_answer": "42",
        "expected": expected,
    }


def files(name: str = "my_reward") -> dict[str, str]:
    """Texts by file name. Raises `PackageError` if `name` cannot name a function."""
    if keyword.iskeyword(name) or not re.fullmatch(r"[a-z_][a-z0-9_]{0,63}", name):
        raise PackageError(f"{name!r} cannot name a reward", remedy="use small letters, digits and underscores")
    cases = [
        _case("right", "6 * 7 = 42, so <answer>42</answer>", {"score": 1.0}),
        _case("wrong", "<answer>54</answer>", {"score": 0.0}),
        _case("the last mark counts", "<answer>54</answer> no: <answer> 42 </answer>", {"score": 1.0}),
        _case("no answer", "I would rather not say.", {"fault": "model", "score": 0.0}),
    ]
    return {
        f"{name}.py": _REWARD.format(name=name),
        "cases.jsonl": "".join(json.dumps(case) + "\n" for case in cases),
        "README.md": _README.format(name=name),
    }


def write(directory: pathlib.Path, name: str = "my_reward") -> list[pathlib.Path]:
    """Write the files and return their paths. Raises `PackageError`, without writing, if one of them exists."""
    texts = files(name)
    taken = [file for file in texts if (directory / file).exists()]
    if taken:
        raise PackageError(f"{directory / taken[0]} exists", remedy="choose another directory or name")
    directory.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        (directory / file).write_text(text)
    return [directory / file for file in texts]
