"""Any reasoning-gym dataset as a one-turn environment: its questions, its own `score_answer`.

A `WorkedFormat` defines how a question is posed and how an answer is read: the plain one shows the dataset's question
and takes the whole answer; a format with worked steps also gives the derivation that process rewards compare with.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from rollart.adapters.envs.split import held_out_item, held_out_seed
from rollart.errors import did_you_mean
from rollart.model import Observation, Step
from rollart.ports import EVAL_SEEDS_FROM

Entry = Mapping[str, Any]
"""A reasoning-gym item: `question`, `answer`, `metadata`."""

_ITEMS = 1 << 31
"""Virtual size of a dataset: items are generated from their index, so a large size costs nothing."""

_DRAWS = 10_000

_REGISTERED = re.compile(r'(?:^DATASET_NAME = |register_dataset\(\s*)"(\w+)"', re.MULTILINE)
"""The name of a dataset in a module of reasoning_gym."""


class WorkedFormat(Protocol):
    """How a dataset's item is posed to the policy and how its answer is read."""

    def accepts(self, entry: Entry) -> bool:
        """True if this format can express the item."""

    def prompt(self, entry: Entry) -> str:
        """The text that the policy reads."""

    def derivation(self, entry: Entry) -> tuple[str, ...]:
        """The tokens of the worked answer up to and including the stop token, or () without worked steps."""

    def answer(self, action: str) -> str:
        """The final answer in the policy's text."""


class PlainFormat:
    """The dataset's question as it stands; the whole action is the answer."""

    def accepts(self, entry: Entry) -> bool:
        return True

    def prompt(self, entry: Entry) -> str:
        return str(entry["question"])

    def derivation(self, entry: Entry) -> tuple[str, ...]:
        return ()

    def answer(self, action: str) -> str:
        return action.strip()


class ReasoningGymEnv:
    """One question, one answer, scored by the dataset itself. Implements `rollart.ports.Environment`.

    `dataset` is a reasoning-gym name, `config` its options, `worked_format` a `WorkedFormat` or the import path
    `package.module:Class` of one. The step pays `score_answer` (0 to 1, partial credit if the dataset has it);
    `success` is a full score. Its metadata has `reference_answer`, `derivation`, `entry` and `success`. Seeds from
    `rollart.ports.EVAL_SEEDS_FROM` on draw prompts that no training seed ever shows. The first instance in a process
    imports reasoning_gym (2 s) and makes the dataset, which later ones share.
    """

    quick = True

    def __init__(
        self,
        dataset: str,
        *,
        config: Mapping[str, object] | None = None,
        worked_format: WorkedFormat | str | None = None,
        max_tokens: int | None = None,
    ) -> None:
        known = _names()  # read without the seconds that an import of reasoning_gym takes
        if known and dataset not in known:
            raise ValueError(f"reasoning_gym has no data set '{dataset}'{did_you_mean(dataset, known)}")
        self._dataset_key = (dataset, json.dumps(dict(config or {}), sort_keys=True))
        if isinstance(worked_format, str):
            module, _, name = worked_format.partition(":")
            if not name:
                raise ValueError(f"worked_format must be 'package.module:Class', got {worked_format!r}")
            worked_format = cast(WorkedFormat, getattr(importlib.import_module(module), name)())
        self._format = PlainFormat() if worked_format is None else worked_format
        self._max_tokens = max_tokens
        self._entry: Entry | None = None
        load_dataset(*self._dataset_key)  # here and not in a reset, which would block other episodes

    async def reset(self, seed: int) -> Observation:
        self._entry = self.draw(seed)
        return Observation(self._format.prompt(self._entry), max_tokens=self._max_tokens)

    async def step(self, action: str) -> Step:
        entry = self._entry
        if entry is None:
            raise RuntimeError("step before reset")
        score = float(load_dataset(*self._dataset_key).score_answer(self._format.answer(action), dict(entry)))
        success = score >= 1.0
        metadata = {
            "reference_answer": str(entry["answer"]),
            "derivation": list(self._format.derivation(entry)),
            "entry": dict(entry),
            "success": success,
        }
        return Step(Observation(""), score, done=True, success=success, metadata=metadata)

    async def close(self) -> None:
        self._entry = None

    def worked_example(self, seed: int) -> tuple[str, str]:
        """The prompt of a seed and its worked answer, for a warm start: never a held-out item.

        ValueError for a format without steps.
        """
        entry = self.draw(seed % EVAL_SEEDS_FROM)
        steps = self._format.derivation(entry)
        if not steps:
            raise ValueError(f"{self._dataset_key[0]}: its format has no worked steps")
        return self._format.prompt(entry), " ".join(steps)

    def draw(self, seed: int) -> Entry:
        """The item of a seed: the same in every process."""
        dataset = load_dataset(*self._dataset_key)
        rng = random.Random(seed)
        wanted = held_out_seed(seed)
        for _ in range(_DRAWS):
            entry = cast(Entry, dataset[rng.randrange(_ITEMS)])
            if self._format.accepts(entry) and held_out_item(self._format.prompt(entry)) is wanted:
                return entry
        name, config = self._dataset_key
        raise ValueError(f"no item of {name} {config} fits its format in {_DRAWS} draws: widen the dataset's config")


@functools.cache
def _names() -> frozenset[str]:
    """Datasets that the installed package registers, read from its source; none if it is not installed."""
    found = importlib.util.find_spec("reasoning_gym")
    names: set[str] = set()
    for root in () if found is None else found.submodule_search_locations or ():
        for file in Path(root).rglob("*.py"):
            names.update(_REGISTERED.findall(file.read_text(encoding="utf-8", errors="replace")))
    return frozenset(names)


@functools.cache
def load_dataset(name: str, config: str) -> Any:
    """The dataset with this name and these options, as JSON."""
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=0, size=_ITEMS, **json.loads(config))
