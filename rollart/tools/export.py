"""`rollart export`: a version of a run as a Hugging Face directory, with a model card of the run.

The directory has the files that transformers loads: configuration, weights, tokenizer with its chat template, and
generation settings. The optimizer's state stays in the run. Every file is compared with its published digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rollart import __version__
from rollart.architecture import MARKER
from rollart.errors import StorageFailed, UsageError
from rollart.ledger.reader import LedgerReader
from rollart.lora import ADAPTER_CONFIG, ADAPTER_MODEL, BASE, adapter_names, write_merged
from rollart.money import dollars
from rollart.report.checkpoints import KeptVersion, choose_version, kept_versions
from rollart.report.cost import cost_lines
from rollart.report.rows import collect

CARD, GENERATION, TOKENIZER = "README.md", "generation_config.json", "tokenizer_config.json"

TRAINER = "trainer"
"""Directory of a version with the optimizer's state and the counters."""


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """An exported version: its directory, its files and their bytes."""

    kept: KeptVersion
    directory: Path
    files: tuple[str, ...]
    bytes: int


def export_version(run: Path, version: str, target: Path, *, force: bool, adapter: str | None = None) -> ExportedModel:
    """Export a version of the run in directory `run`: `best`, `latest` or `v40`. Files of the same names are replaced
    in a directory that is not empty, with `force` alone; its other files stay, except weights. `adapter`: the one to
    merge, of a version with several.

    `UsageError` for a version or an adapter that does not exist and for a target that is in use, `StorageFailed` for a
    damaged version; the target is unchanged then."""
    with LedgerReader(run) as reader:
        kept = choose_version(kept_versions(run, reader), version, run.name)
        _refuse_adapter(kept, adapter)
        _refuse_target(target, force)
        card = model_card(run.resolve().name, reader, kept, adapter)
        config = reader.config()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as made:
            staging = Path(made)
            _copy(kept, staging)
            _merge(kept, staging, adapter or "")
            _complete(config, staging)
            (staging / CARD).write_text(card, encoding="utf-8")
            files = sorted(path.relative_to(staging) for path in staging.rglob("*") if path.is_file())
            size = sum((staging / file).stat().st_size for file in files)
            target.mkdir(exist_ok=True)
            for stale in target.glob("*.safetensors*"):
                stale.unlink()
            for file in files:
                (target / file).parent.mkdir(exist_ok=True)
                os.replace(staging / file, target / file)
    except OSError as error:
        raise StorageFailed(
            f"{error.filename or target}: {error.strerror or error}", remedy="name a directory that you may write"
        ) from None
    return ExportedModel(kept, target, tuple(map(str, files)), size)


def model_card(run: str, reader: LedgerReader, kept: KeptVersion, adapter: str | None = None) -> str:
    """The model card: YAML for the Hub, and the facts of the run for people."""
    config, rows = reader.config(), collect(reader, run)
    spec = config.get("run", {})
    model, training = spec.get("model", {}), spec.get("training", {})
    given = training.get("data") is not None
    base, fork = _base_model(model), spec.get("fork")
    head: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rollart", "sft" if given else "reinforcement-learning"],
    }
    if base.hub is not None:
        head["base_model"] = base.hub
    usd = sum(line.usd for line in cost_lines(rows))
    facts = [
        ("Base model", base.text),
        *([("Started from", f"v{fork['version']} of run `{Path(fork['run']).name}`")] if fork else []),
        ("Version", f"v{kept.version} of run `{run}`"),
        *([] if adapter is None else [("Adapter", f"`{adapter}`, merged")]),
        ("Training steps", f"{kept.step:,} of {spec.get('steps', 0):,}"),
        ("Trained samples", f"{sum(v.samples for v in rows.versions if v.version <= kept.version):,}"),
        ("Trained tokens", f"{sum(v.tokens for v in rows.versions if v.version <= kept.version):,}"),
        *([] if given else [("Schedule", f"{spec.get('schedule')}, staleness {spec.get('staleness')}")]),
        ("Hours of the whole run", f"{rows.facts.seconds / 3600:.3g}"),
        ("Cost of the whole run", dollars(usd)),
        ("Trained with", f"rollart {__version__}"),
    ]
    domains = spec.get("domains", [])
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---",
        f"# {run} v{kept.version}",
        f"Trained by {'supervised fine-tuning' if given else 'reinforcement learning'} with "
        "[rollart](https://pypi.org/project/rollart).",
        _table(("", ""), facts),
        "## Held-out success",
        _table(
            ("domain", "success", "episodes"),
            [(name, f"{one.rate:.1%}", f"{one.episodes:,}") for name, one in sorted(kept.success.items())],
        )
        if kept.success
        else f"v{kept.version} was not evaluated on held-out episodes.",
        "## Domains",
        _table(
            ("domain", "environment", "group size", "advantage"),
            [(d["name"], _environment(d), d["group_size"], _settings(d.get("advantage", {}))) for d in domains],
        ),
        "## Training",
        _table(("setting", "value"), [(f"`{key}`", f"`{value}`") for key, value in _flat(training)]),
    ]
    return "\n\n".join(parts) + "\n"


@dataclass(frozen=True, slots=True)
class _BaseModel:
    text: str
    hub: str | None = None


def _base_model(model: Mapping[str, Any]) -> _BaseModel:
    """`hub`: the id on the Hugging Face Hub, if the model is one of the Hub: a run records its commit."""
    path = model.get("path")
    if path is None:
        init = model.get("init")
        family = init.get("model_type", "") if isinstance(init, dict) else init
        return _BaseModel(f"none: random weights ({family})")
    if (commit := model.get("revision")) is not None:
        return _BaseModel(f"{path} at {commit}", hub=path)
    return _BaseModel(f"`{path}`")


def _environment(domain: Mapping[str, Any]) -> str:
    given = domain["environment"]
    return f"`{given['harness'] if isinstance(given, dict) else given}`"


def _settings(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values, without those that are not set."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None and value != []:
            yield f"{prefix}{key}", value


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _refuse_target(target: Path, force: bool) -> None:
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file", remedy="name a directory")
    if not force and target.is_dir() and any(target.iterdir()):
        raise UsageError(f"{target} is not empty", remedy="name another directory, or replace its files with --force")


def _refuse_adapter(kept: KeptVersion, adapter: str | None) -> None:
    names = [name for name in adapter_names(kept.path) if name]
    if adapter is None and names:
        problem = f"v{kept.version} has the adapters {', '.join(names)}, of which one can be merged"
        raise UsageError(problem, remedy=f"name it, as with --adapter {names[0]}")
    if adapter is not None and adapter not in names:
        has = f"the adapters {', '.join(names)}" if names else "no adapters of domains"
        remedy = "name one of them" if names else "leave out --adapter"
        raise UsageError(f"v{kept.version} has no adapter '{adapter}': it has {has}", remedy=remedy)


def _copy(kept: KeptVersion, staging: Path) -> None:
    """Copy the files of a version, all that were published, except the trainer's. A version that a running run removes
    meanwhile is a `UsageError`."""
    try:
        text = (kept.path / MARKER).read_text(encoding="utf-8")
        digests = json.loads(text)["files"] if text else {}  # an outside trainer's marker may be empty
        there = {path.relative_to(kept.path) for path in kept.path.rglob("*") if not path.is_dir()}
        for name in sorted({*there, *map(Path, digests)}):
            source = kept.path / name
            if name.parts[0] in (TRAINER, MARKER):
                continue
            (staging / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source, staging / name)
            with (staging / name).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digests.get(str(name), digest) != digest:
                raise StorageFailed(f"{source} is damaged: its sha256 differs from the published one")
    except FileNotFoundError as error:
        if kept.path.exists():
            raise StorageFailed(f"v{kept.version} is damaged: {error.filename} is not there") from None
        raise UsageError(
            f"v{kept.version} was removed by its run while it was copied",
            remedy="export `latest`, or keep more versions",
        ) from None


def _merge(kept: KeptVersion, staging: Path, adapter: str) -> None:
    """Put the merged weights in the place of the adapters and the weights below them."""
    names = adapter_names(staging)
    if not names:
        return
    try:
        write_merged(staging, staging, adapter)
    except ImportError as error:
        raise UsageError(
            f"v{kept.version} has an adapter, and merging it needs {error.name}",
            remedy="pip install 'rollart[local]', or set training.lora.publish to merged",
        ) from None
    except ValueError as error:
        raise StorageFailed(f"v{kept.version} is damaged: {error}") from None
    shutil.rmtree(staging / BASE)
    for name in names:
        for file in (ADAPTER_CONFIG, ADAPTER_MODEL):
            (staging / name / file).unlink()
        if name:
            (staging / name).rmdir()


def _complete(config: Mapping[str, Any], staging: Path) -> None:
    """Add the base model's generation settings and the tokenizer's class, if the version has none. Without the class
    transformers takes that of the model type, which may cut text otherwise than tokenizer.json."""
    if not (staging / TOKENIZER).exists():
        (staging / TOKENIZER).write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    path = config.get("run", {}).get("model", {}).get("path")
    if path is not None and not (staging / GENERATION).exists():
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(Path(config.get("base", "")) / path / GENERATION, staging / GENERATION)
