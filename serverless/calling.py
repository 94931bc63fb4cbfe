"""Calls a reward function with items in its own convention and reads its result. Packed with every function.

`CALLS` has one `ConventionAdapter` per convention of `serverless.signatures`, which has the table of parameters. A call
is of one item or of all; errors of the function propagate. Only the standard library is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from serverless.signatures import CallableSignature, Convention
from serverless.types import Item

__all__ = ["CALLS", "ConventionAdapter"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_LABELS = ("answer", "ground_truth", "solution", "label", "target", "reference_answer")
"""Columns that default to the reference answer if the metadata has none of that name."""


@dataclass(frozen=True, slots=True)
class ConventionAdapter:
    """The adapter of one convention.

    `arguments(items, shape)` makes the arguments of one call. `results(given, count)` makes one result per item from
    the function's return value: a number, a dict with "score" and "metrics", or a value of `serverless.types`. With
    `batch` all items go in one call, otherwise each in its own.
    """

    arguments: Callable[[Sequence[Item], CallableSignature], Arguments]
    results: Callable[[Any, int], list[Any]]
    batch: bool


def _single(given: Any, count: int) -> list[Any]:
    return [given]


def _several(given: Any, count: int) -> list[Any]:
    """One result per item, from a list, a tuple, an array or a tensor of shape (n,) or (n, 1)."""
    listed = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(listed, list | tuple):
        listed = [listed]
    if len(listed) != count:
        raise ValueError(f"the reward gave {len(listed)} results for {count} items")
    return [entry[0] if isinstance(entry, list) and len(entry) == 1 else entry for entry in listed]


def _accepted(values: dict[str, Any], shape: CallableSignature) -> dict[str, Any]:
    """The values that the function accepts."""
    return values if shape.any_keyword else {k: v for k, v in values.items() if k in shape.names}


def _label(item: Item, *names: str) -> Any:
    for name in names:
        if name in item.metadata:
            return item.metadata[name]
    return item.reference_answer


def _split(item: Item) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The messages of the prompt, and those of the policy with the replies to them."""
    messages = [dict(m) for m in item.messages]
    prompt = item.metadata.get("prompt")
    if isinstance(prompt, list):
        return messages[: len(prompt)], messages[len(prompt) :]
    first = next((n for n, m in enumerate(messages) if m.get("role") == "assistant"), len(messages))
    return messages[:first], messages[first:]


def _prompt(item: Item) -> str:
    prompt = item.metadata.get("prompt")
    return prompt if isinstance(prompt, str) else "\n".join(str(m.get("content", "")) for m in _split(item)[0])


def _dict_result(result: Any, *keys: str) -> Any:
    """Convert a framework's dict: its score, and its other numbers as metrics."""
    if not isinstance(result, Mapping):
        return result
    key = next((k for k in keys if k in result), None)
    if key is None or "aggregate_reward_score" in result or "model_fault" in result:
        return dict(result)
    metrics = {str(k): float(v) for k, v in result.items() if k != key and _is_number(v)}
    if isinstance(result.get("metrics"), Mapping):
        metrics.update(result["metrics"])
    ours = {"score": result[key], "metrics": metrics}
    return {**ours, "steps": result["steps"]} if "steps" in result else ours


def _is_number(value: Any) -> bool:
    """True for a single number; a vector has `__float__` too."""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return False
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


# verl: compute_score(data_source=, solution_str=, ground_truth=, extra_info=), by keyword
# (verl/workers/reward_manager/naive.py); its default scorer takes the first of a sequence.
def _verl_values(item: Item) -> dict[str, Any]:
    return {
        "data_source": item.metadata.get("data_source", ""),
        "solution_str": item.completion,
        "ground_truth": _label(item, "ground_truth"),
        "extra_info": item.metadata.get("extra_info", dict(item.metadata)),
    }


def _verl(items: Sequence[Item], shape: CallableSignature) -> Arguments:
    return (), _accepted(_verl_values(items[0]), shape)


def _verl_result(given: Any, count: int) -> list[Any]:
    first = given[0] if isinstance(given, list | tuple) and given else given
    return [_dict_result(first, "score")]


# verl/workers/reward_manager/batch.py: the same names in the plural.
def _verl_batch(items: Sequence[Item], shape: CallableSignature) -> Arguments:
    rows = [_verl_values(item) for item in items]
    columns = {
        "data_sources": [r["data_source"] for r in rows],
        "solution_strs": [r["solution_str"] for r in rows],
        "ground_truths": [r["ground_truth"] for r in rows],
        "extra_infos": [r["extra_info"] for r in rows],
    }
    return (), _accepted(columns, shape)


def _verl_batch_results(given: Any, count: int) -> list[Any]:
    return [_dict_result(entry, "score") for entry in _several(given, count)]


# TRL: reward_func(prompts=, completions=, completion_ids=, **reward_kwargs), by keyword; columns are lists; None
# means that the function does not apply (trl/trainer/grpo_trainer.py, _calculate_rewards).
def _trl(items: Sequence[Item], shape: CallableSignature) -> Arguments:
    return (), _trl_values(items, shape, [_prompt(i) for i in items], [i.completion for i in items])


def _trl_chat(items: Sequence[Item], shape: CallableSignature) -> Arguments:
    parts = [_split(item) for item in items]
    return (), _trl_values(items, shape, [p for p, _ in parts], [c for _, c in parts])


def _trl_values(items: Sequence[Item], shape: CallableSignature, prompts: Any, completions: Any) -> dict[str, Any]:
    names = {name for item in items for name in item.metadata} | {n for n in _LABELS if n in shape.names}
    values = {name: [_column(item, name) for item in items] for name in sorted(names)}
    own = {
        "prompts": prompts,
        "completions": completions,
        "completion_ids": [item.metadata.get("completion_ids", []) for item in items],
        "trainer_state": None,
    }
    values.update(own)
    absent = [name for name in shape.required if name not in values]
    if absent:
        raise ValueError(f"the reward takes column {absent[0]!r}, which is not in the items' metadata")
    return _accepted(values, shape)


def _column(item: Item, name: str) -> Any:
    return _label(item, name) if name in _LABELS else item.metadata.get(name)


def _trl_results(given: Any, count: int) -> list[Any]:
    none = {"score": 0.0, "metrics": {"not_applicable": 1.0}}
    return [none if entry is None else entry for entry in _several(given, count)]


class _SlimeArguments(SimpleNamespace):
    """Stands in for slime's command line, which is absent here: a function that reads it gets an explanatory error."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"args.{name}: slime's options are not here; put what the reward needs into its source")


# slime: await custom_rm(args, sample, **kwargs), args an argparse namespace (slime/rollout/rm_hub/__init__.py,
# slime/utils/types.py).
def _slime(items: Sequence[Item], shape: CallableSignature) -> Arguments:
    return (_SlimeArguments(), _slime_sample(items[0])), {}


def _slime_batch(items: Sequence[Item], shape: CallableSignature) -> Arguments:
    return (_SlimeArguments(), [_slime_sample(item) for item in items]), {}


def _slime_sample(item: Item) -> SimpleNamespace:
    tokens = item.metadata.get("tokens", [])
    return SimpleNamespace(
        index=item.metadata.get("index"),
        group_index=item.metadata.get("group_index"),
        prompt=_prompt(item),
        response=item.completion,
        label=_label(item, "label"),
        tokens=tokens,
        response_length=item.metadata.get("response_length", 0),
        metadata=dict(item.metadata),
        reward=None,
        status=item.metadata.get("status", "completed"),
        id=item.id,
    )


def _slime_result(given: Any, count: int) -> list[Any]:
    return [_dict_result(given, "score", "reward")]


def _slime_results(given: Any, count: int) -> list[Any]:
    return [_dict_result(entry, "score", "reward") for entry in _several(given, count)]


# OpenRLHF: reward_func(queries, prompts, labels), positional (openrlhf/utils/remote_rm_utils.py; README: queries
# are prompts + responses).
def _openrlhf(items: Sequence[Item], shape: CallableSignature) -> Arguments:
    prompts = [_prompt(item) for item in items]
    queries = [item.metadata.get("query", p + item.completion) for item, p in zip(items, prompts, strict=True)]
    values = {"queries": queries, "prompts": prompts, "labels": [_label(item, "label") for item in items]}
    return (), {name: value for name, value in values.items() if name in shape.names}


def _openrlhf_results(given: Any, count: int) -> list[Any]:
    if not isinstance(given, Mapping):
        return _several(given, count)
    key = "rewards" if "rewards" in given else "scores"
    scores = _several(given[key], count)
    logs = dict(given.get("extra_logs", {}))
    if key == "rewards" and "scores" in given:
        logs["scores"] = given["scores"]
    metrics: list[dict[str, float]] = [{} for _ in range(count)]
    for name, values in logs.items():
        if hasattr(values, "__len__") and len(values) == count:  # the others belong to the whole batch
            for metric, value in zip(metrics, _several(values, count), strict=True):
                if _is_number(value):
                    metric[str(name)] = float(value)
    return [{"score": s, "metrics": m} for s, m in zip(scores, metrics, strict=True)]


# AReaL: reward_fn(prompt_str, completions_str, prompt_ids, completion_ids, **data), the first four positional
# (areal/workflow/rlvr.py, areal/reward/gsm8k.py).
def _areal(items: Sequence[Item], shape: CallableSignature) -> Arguments:
    item = items[0]
    four = {
        "prompt": _prompt(item),
        "completions": item.completion,
        "prompt_ids": item.metadata.get("prompt_ids", []),
        "completion_ids": item.metadata.get("completion_ids", []),
    }
    labels = {name: _label(item, name) for name in _LABELS if name in shape.names or name == "answer"}
    columns = _accepted({**labels, **item.metadata}, shape)
    first = [p.name for p in shape.parameters if not p.keyword_only][:4]
    if first[2:3] != ["prompt_ids"]:
        return (), {**columns, **_accepted(four, shape)}
    return tuple(four.values())[: len(first)], {k: v for k, v in columns.items() if k not in (*first, *four)}


class _Parser:
    """verifiers' default `Parser`: the answer is the text of the last assistant message."""

    def parse(self, text: str) -> str:
        return text

    def parse_answer(self, completion: Any) -> Any:
        if isinstance(completion, str):
            return self.parse(completion)
        texts = [m.get("content", "") for m in completion if m.get("role") == "assistant"]
        return self.parse(texts[-1]) if texts else None

    def get_assistant_messages(self, completion: Any) -> list[Any]:
        return [m for m in completion if m.get("role") == "assistant"]


# verifiers: by name subset, all of them for **kwargs (verifiers/rubrics/rubric.py, call_reward_func).
def _verifiers(items: Sequence[Item], shape: CallableSignature) -> Arguments:
    prompt, completion = _split(items[0])
    return (), _accepted(_verifiers_values(items[0], prompt, completion), shape)


def _verifiers_text(items: Sequence[Item], shape: CallableSignature) -> Arguments:
    return (), _accepted(_verifiers_values(items[0], _prompt(items[0]), items[0].completion), shape)


def _verifiers_values(item: Item, prompt: Any, completion: Any) -> dict[str, Any]:
    info = item.metadata.get("info", dict(item.metadata))
    answer = _label(item, "answer")
    given = {
        "prompt": prompt,
        "completion": completion,
        "answer": "" if answer is None else answer,
        "task": item.metadata.get("task", "default"),
        "info": info,
    }
    own = item.metadata.get("state")
    turns = sum(1 for m in item.messages if m.get("role") == "assistant")
    state = {"id": item.id, "turn": turns, **given, **(own if isinstance(own, dict) else {})}
    return {**given, "state": state, "parser": _Parser()}


CALLS: Mapping[Convention, ConventionAdapter] = {
    Convention.ITEM: ConventionAdapter(lambda items, shape: ((items[0],), {}), _single, batch=False),
    Convention.SAMPLES: ConventionAdapter(lambda items, shape: ((list(items),), {}), _several, batch=True),
    Convention.VERL: ConventionAdapter(_verl, _verl_result, batch=False),
    Convention.VERL_BATCH: ConventionAdapter(_verl_batch, _verl_batch_results, batch=True),
    Convention.TRL: ConventionAdapter(_trl, _trl_results, batch=True),
    Convention.TRL_CHAT: ConventionAdapter(_trl_chat, _trl_results, batch=True),
    Convention.SLIME: ConventionAdapter(_slime, _slime_result, batch=False),
    Convention.SLIME_BATCH: ConventionAdapter(_slime_batch, _slime_results, batch=True),
    Convention.OPENRLHF: ConventionAdapter(_openrlhf, _openrlhf_results, batch=True),
    Convention.AREAL: ConventionAdapter(_areal, _single, batch=False),
    Convention.VERIFIERS: ConventionAdapter(_verifiers, _single, batch=False),
    Convention.VERIFIERS_TEXT: ConventionAdapter(_verifiers_text, _single, batch=False),
}
"""ITEMS and EVENT have none: they use the wire form directly."""
