"""Runs that continue a recorded one: resumes with changed settings, and forks, whose first version has the weights of
another run's version. Which settings may differ, and how they do."""

from __future__ import annotations

import contextlib
import dataclasses
import filecmp
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollart.architecture import SIZES, architecture_of, stamp_of, version_path
from rollart.errors import SpecError, UsageError
from rollart.ledger.reader import LedgerReader
from rollart.model import WeightsRef
from rollart.report.checkpoints import kept_versions, listed
from rollart.settings.cluster import UNLESS_QUICK, ClusterSpec
from rollart.settings.load import abbreviated
from rollart.settings.planning import Specs, initial_config, model_directory, pinned
from rollart.settings.resolve import Resolved
from rollart.settings.rules import RuleViolation
from rollart.settings.run import RunSpec

FIXED_SETTINGS: Mapping[str, str] = {
    "seed": "prompts and random streams are drawn from it",
    "model": "the versions on disk are of that model, and recorded samples have its context",
    "domains.*.group_size": "recorded groups have their members",
    "domains.*.environment": "recorded trajectories are of that environment",
    "fork": "version 0 has its weights",
    "domains.*.chat": "recorded trajectories are rendered so",
    **{f"training.lora.{key}": "the optimizer's state is of those parameters" for key in ("rank", "alpha", "targets")},
    "domains.*.adapter": "the optimizer's state is of those parameters",
    "training.algorithm": "its switches are recorded; set them one by one",
    "training.data_sha256": "the samples of each step follow from that file",
    "training.optimizer": "the optimizer's state is of that kind",
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
    order = {"batch.trajectories": "the samples of each step follow from it"}
    given = order if resolved.run.training.data is not None else {}
    fixed = [(change, why) for change in found if (why := change.why_fixed or given.get(change.key, ""))]
    if fixed:
        raise SpecError(
            "\n".join(f"a resume changes {change} (rule: as recorded; {why})" for change, why in fixed),
            remedy="resume without it, or start a new run with it",
        )
    return found


def forked_version(specs: Specs) -> WeightsRef | None:
    """The version that the run starts from; None for a run that is no fork."""
    fork = specs.run.fork
    if fork is None:
        return None
    path = version_path(Path(specs.base) / fork.run / "weights", fork.version)
    return WeightsRef(fork.version, str(path), stamp=stamp_of(path))


def fork_problems(specs: Specs) -> Iterator[RuleViolation]:
    """The version must be on disk and be of the run's own model, with the same adapters."""
    fork = specs.run.fork
    if fork is None:
        return
    source = Path(specs.base) / fork.run
    try:
        with LedgerReader(source) as reader:
            kept, config = kept_versions(source, reader), reader.config()
    except UsageError:
        yield RuleViolation(("run", "fork", "run"), f"fork.run is '{fork.run}', and {source} is no run with a ledger")
        return
    found = next((one for one in kept if one.version == fork.version), None)
    if found is None:
        there = f"there are {listed(kept)}" if kept else "none is on disk"
        yield RuleViolation(("run", "fork", "version"), f"fork.version is {fork.version}, which was not kept ({there})")
        return
    try:
        specs = pinned(specs)  # as the recorded run
    except SpecError:  # a problem of the model, which is reported as such
        return
    yield from _model_problems(specs, found.path)
    before, after = config.get("run", {}), specs.run.model_dump(mode="json")
    below = ["model.path", "model.revision"] if specs.run.model.init is None else ["model.path", "model.init", "seed"]
    for key in ["training.lora", *(below if specs.run.training.lora is not None else ())]:
        old, new = _value(before, key), _value(after, key)
        if key == "model.path":
            old, new = _located(old, config.get("base", "")), _located(new, specs.base)
        if key == "training.lora":  # a trainer restores versions of either form
            old, new = (one and {k: v for k, v in one.items() if k != "publish"} for one in (old, new))
        if old != new:
            why = f"{key} is {abbreviated(new)}, and {abbreviated(old)} in the run that it forks (rule: the same; "
            why += "a version has adapters apart from the weights below them)"
            yield RuleViolation(("run", *key.split(".")), why)
    old, new = (
        sorted({domain["adapter"] for domain in one if domain.get("adapter") is not None})
        for one in (before.get("domains", []), after["domains"])
    )
    if old != new:
        why = f"the domains' adapters are {abbreviated(new)}, and {abbreviated(old)} in the run that it forks (rule: "
        yield RuleViolation(("run", "domains", 0, "adapter"), f"{why}the same)")
    kind = _value(before, "training.optimizer") or "adamw"  # runs of older releases had no other
    if fork.optimizer and specs.run.training.optimizer != kind:
        why = f"training.optimizer is {specs.run.training.optimizer}, and the state of v{fork.version} is {kind}'s"
        remedy = "leave out fork.optimizer (--optimizer), or take the same optimizer"
        yield RuleViolation(("run", "training", "optimizer"), why, remedy)


def tokenizer_difference(specs: Specs, tokenizer: Path) -> str:
    """The difference of the run's tokenizer (a directory) from that of the version that it forks; '' for none."""
    weights = forked_version(specs)
    theirs = Path(weights.path if weights else "") / "tokenizer.json"
    if weights is None or not theirs.is_file() or filecmp.cmp(theirs, tokenizer / theirs.name, shallow=False):
        return ""
    return (
        f"the tokenizer differs from {theirs}, of the run that it forks (rule: the same, or ids change their meaning)"
    )


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


def _model_problems(specs: Specs, version: Path) -> Iterator[RuleViolation]:
    model, key = specs.run.model, "init" if specs.run.model.path is None else "path"
    theirs = json.loads((version / "config.json").read_text())
    try:
        if model.path is not None:
            ours = json.loads((model_directory(model, specs.base) / "config.json").read_text())
        else:
            ours = initial_config(model.init or {}, specs.base)
    except (OSError, ValueError, SpecError):  # a problem of the model, which is reported as such
        return
    old, new = _shape(theirs), _shape(ours)
    different = [
        f"{name} {abbreviated(new[name])} for {abbreviated(old[name])}" for name in old if old[name] != new[name]
    ]
    if different:
        why = f"model.{key} differs from {version.name} of the run that it forks: {', '.join(different)} (rule: equal)"
        yield RuleViolation(("run", "model", key), why, "fork with the model of that run, or train this model anew")


def _shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that determine a model's computation, by name; sizes alone for a family of vLLM engines."""
    try:
        found = dataclasses.asdict(architecture_of(config, "config.json"))
    except UsageError:
        return {name: config.get(name) for name in ("model_type", *SIZES)}
    del found["eos"]  # a version may have no generation settings
    return found


def _located(path: str | None, base: str) -> str | None:
    """The directory of a `model.path`, if it is one: two runs may name it relative to different directories."""
    directory = Path(base) / (path or "")
    return str(directory.resolve()) if path is not None and directory.is_dir() else path


def _value(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
