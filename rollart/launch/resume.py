"""Resumes with changed settings: the differences, and the settings that must not change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollart.errors import SpecError, UsageError
from rollart.ledger.reader import LedgerReader
from rollart.settings.cluster import UNLESS_QUICK, ClusterSpec
from rollart.settings.load import abbreviated
from rollart.settings.resolve import Resolved
from rollart.settings.run import RunSpec

FIXED_SETTINGS: Mapping[str, str] = {
    "seed": "prompts and random streams are drawn from it",
    "model": "the versions on disk are of that model, and recorded samples have its context",
    "domains.*.group_size": "recorded groups have their members",
    "domains.*.environment": "recorded trajectories are of that environment",
    "training.lora": "the optimizer's state is of those parameters",
}
"""Settings that recorded samples, groups or versions depend on, with the reason."""


WORKERS_KEY = "cluster.environments.workers"


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A key of the run or the cluster (`cluster.…`) with its recorded and its current value."""

    key: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.key}: {abbreviated(self.before)} -> {abbreviated(self.after)}"

    @property
    def why_fixed(self) -> str:
        """The reason why the key must not change; '' if it may."""
        parts = self.key.split(".")
        for pattern, why in FIXED_SETTINGS.items():
            wanted = pattern.split(".")
            if len(parts) >= len(wanted) and all(w in ("*", p) for w, p in zip(wanted, parts, strict=False)):
                return why
        return ""


def refuse_changed(resolved: Resolved, directory: Path) -> list[SettingChange]:
    """The settings that differ from the run's last life. `SpecError` for differences that its recorded samples, groups
    and versions do not permit. Empty for a run without a ledger."""
    try:
        with LedgerReader(directory) as reader:
            before = reader.config()
    except UsageError:
        return []
    if not before:
        return []
    old, new = _keys(before), _keys(resolved.to_dict())
    if new.get(WORKERS_KEY) == UNLESS_QUICK:  # a run records its decision
        new[WORKERS_KEY] = old.get(WORKERS_KEY, UNLESS_QUICK)
    found = [
        SettingChange(key, old.get(key), new.get(key))
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
    ]
    fixed = [change for change in found if change.why_fixed]
    if fixed:
        raise SpecError(
            "\n".join(f"a resume changes {change} (rule: as recorded; {change.why_fixed})" for change in fixed),
            remedy="resume without it, or start a new run with it",
        )
    return found


def _keys(config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part, model, at in (("run", RunSpec, ()), ("cluster", ClusterSpec, ("cluster",))):
        values = config.get(part, {})
        with contextlib.suppress(ValidationError):  # older versions used other spellings and lacked some keys
            values = model.model_validate(values).model_dump(mode="json")
        found.update(_flat(values, at))
    return found


def _flat(value: Any, at: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Dotted keys and values. List entries with a name are keyed by it."""
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from _flat(below, (*at, str(key)))
    elif isinstance(value, list) and value and all(isinstance(one, Mapping) and "name" in one for one in value):
        for one in value:
            yield from _flat(one, (*at, str(one["name"])))
    else:
        yield ".".join(at), value
