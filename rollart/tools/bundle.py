"""A training step as one file: all that its trainer and its reward functions were given, and what came of it.

    manifest.json           the step, what the ledger recorded of it, versions of libraries, the machine
    spec.yaml               the run's specs, without the values of variables
    trainer.json            the trainer's settings; paths are relative to the bundle
    samples.msgpack         the batch as it went to the trainer, [encode_sample]
    trajectories.msgpack    the content and the reward outcomes of its trajectories, [[second, encode_kept]]
    functions/NAME.zip      packages of reward functions, by the digests that scored the batch
    weights/vNNNNNN/        the version that the step started from, with its optimizer; the reference policy's version
    model/, reference/      a checkpoint below adapters that are published merged; a reference policy's checkpoint

A zip, whose members have checksums; nothing is pickled. Which steps can be written depends on what the run kept: the
version before the step (`checkpoints`), and its trajectories (`keep`). Of a step whose failure ended the run both are
there, since nothing of it was committed.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import platform
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import yaml
from pydantic import BaseModel, ConfigDict

from rollart.adapters.rewards.offload import combine
from rollart.adapters.weights.directory import DirectoryWeightStore
from rollart.architecture import MARKER, version_path
from rollart.control.rewarding import train_sample
from rollart.errors import RollartError, UsageError, first_line
from rollart.launch.functions import translated_errors
from rollart.launch.prepare import produce_artefacts
from rollart.launch.rewards import recorded_packages
from rollart.launch.wiring import batch_samples
from rollart.ledger.events import STEP_FAILED
from rollart.ledger.kept import KeptTrajectory, decode_kept, encode_kept
from rollart.ledger.payloads import decode_sample, encode_sample
from rollart.ledger.reader import LedgerReader, TrajectorySpan, VersionRow
from rollart.lora import BASE, adapter_names
from rollart.model import Group, InfraFault, Outcome, TrainSample, TrajectoryId
from rollart.settings.load import saved_specs
from rollart.settings.planning import Specs
from rollart.settings.prices import PriceList
from rollart.settings.resolve import recorded_specs
from rollart.settings.run import RunSpec
from rollart.settings.training import TeacherSpec, TrainerConfig
from rollart.tools.replay import RESOLVED_FILE
from serverless.deploy.package import Package, restore_archive, with_record, zip_archive

SCHEMA = 1

MANIFEST, SPEC, TRAINER = "manifest.json", "spec.yaml", "trainer.json"

SAMPLES, TRAJECTORIES = "samples.msgpack", "trajectories.msgpack"

FUNCTIONS, WEIGHTS, MODEL, REFERENCE = "functions", "weights", "model", "reference"

LIBRARIES = ("rollart", "torch", "transformers", "peft", "numpy")

SAME_BITS = ("machine", "processor", "torch", "transformers")
"""Facts of a machine on which a step on a CPU repeats bit for bit."""

SUGGESTED = 3
"""Steps that an error names in place of one that cannot be bundled."""


class BundledFunction(BaseModel):
    """A reward function of the batch. `version`: digest of the package that scored it; `why`: the reason why a replay
    takes its recorded outcomes, '' if it is called again."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: str
    why: str = ""


class BundleManifest(BaseModel):
    """Facts about a bundle. `step` is counted from 1, and starts from `version`, whose weights are there if `weights`;
    `metrics` are those that the ledger recorded, None for a step that failed with the error `failure`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int
    run: str
    step: int
    version: int
    samples: int
    trajectories: int
    metrics: dict[str, float] | None
    failure: str
    weights: bool
    functions: dict[str, BundledFunction]
    machine: dict[str, str]
    notes: list[str]


@dataclass(frozen=True, slots=True)
class StepBundle:
    """An unpacked bundle. `kept` are the trajectories of `samples`; of a failed step of a run that keeps few, some of
    them."""

    directory: Path
    manifest: BundleManifest
    run: RunSpec
    prices: PriceList
    trainer: TrainerConfig
    samples: tuple[TrainSample, ...]
    kept: tuple[KeptTrajectory, ...]
    packages: Mapping[str, Package]


@dataclass(frozen=True, slots=True)
class _RecordedStep:
    """A step in the ledger; `row` is None for one that failed."""

    step: int
    version: int
    row: VersionRow | None
    failure: str = ""
    ids: tuple[str, ...] = ()


def write_bundle(directory: Path, step: int | None, out: Path, *, weights: bool = True) -> BundleManifest:
    """Write a step of the run in `directory`: by default the one whose failure ended it, else the last one. Without
    `weights` its rewards alone can be repeated. UsageError, with steps that can be bundled, for one that cannot."""
    directory = directory.resolve()  # artefacts are otherwise relative to the run file
    specs, store = recorded_specs(directory / RESOLVED_FILE), DirectoryWeightStore(directory / WEIGHTS)
    with LedgerReader(directory) as reader:
        chosen = _choose(reader, step, directory.name)
        config = _trainer_config(directory)
        _refuse_unrecorded(specs, config, weights)
        found = _content(reader, chosen, store, specs, weights)
        if isinstance(found, str):
            raise _cannot(chosen.step, directory.name, found, _others(reader, chosen, store, specs, weights))
        samples, kept = found
        notes = _notes(reader, chosen)
    config, files = _with_weights(directory, config, chosen.version) if weights else (config, {})
    config = config.model_copy(update={"weights_root": WEIGHTS, "tokenizer": None})
    artefacts = asyncio.run(produce_artefacts(specs, directory))
    packages, functions = _functions(kept, recorded_packages(specs, artefacts, directory))
    manifest = BundleManifest(
        schema_version=SCHEMA,
        run=directory.name,
        step=chosen.step,
        version=chosen.version,
        samples=len(samples),
        trajectories=len(kept),
        metrics=None if chosen.row is None else dict(chosen.row.metrics),
        failure=chosen.failure,
        weights=weights,
        functions=functions,
        machine=this_machine(),
        notes=notes,
    )
    content: dict[str, bytes] = {
        MANIFEST: json.dumps(manifest.model_dump(), indent=1).encode(),  # with NaN, which pydantic would write as null
        SPEC: yaml.safe_dump(_without_values(_read_yaml(directory / RESOLVED_FILE)), sort_keys=False).encode(),
        TRAINER: config.model_dump_json(indent=1).encode(),
        SAMPLES: msgpack.packb([encode_sample(sample) for sample in samples]),
        TRAJECTORIES: msgpack.packb([(one.t, encode_kept(one)) for one in kept]),
        **{f"{FUNCTIONS}/{p.spec.name}.zip": zip_archive(with_record(p), deflated=True) for p in packages},
    }
    _write(out, content, files)
    return manifest


def read_bundle(path: Path, into: Path) -> StepBundle:
    """Unpack a bundle into an empty directory. UsageError, one line, for a file that is none, or is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(into)  # checks the checksums, and leaves no file elsewhere
        manifest = _manifest((into / MANIFEST).read_text(encoding="utf-8"))
        samples = [decode_sample(one) for one in msgpack.unpackb((into / SAMPLES).read_bytes())]
        kept = [decode_kept(one, t) for t, one in msgpack.unpackb((into / TRAJECTORIES).read_bytes())]
        trainer = TrainerConfig.model_validate_json((into / TRAINER).read_text(encoding="utf-8"))
        archives = {file.stem: file.read_bytes() for file in sorted((into / FUNCTIONS).glob("*.zip"))}
        with translated_errors():
            packages = {n: restore_archive(n, manifest.functions[n].version, data) for n, data in archives.items()}
        run, _, prices, _ = saved_specs(into / SPEC, {})
    except FileNotFoundError as error:
        if not path.exists():
            raise UsageError(f"{path}: no such file", remedy="write one with `rollart bundle`") from None
        raise _unreadable(path, f"it has no {Path(str(error.filename)).name}") from None
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError) as error:
        raise _unreadable(path, first_line(error)) from None
    except (ValueError, TypeError, KeyError, RollartError, msgpack.UnpackException) as error:
        raise _unreadable(path, first_line(error, 200)) from None
    return StepBundle(into, manifest, run, prices, trainer, tuple(samples), tuple(kept), packages)


def rewarded_batch(
    run: RunSpec, step: int, kept: Sequence[KeptTrajectory], outcome: Callable[[KeptTrajectory, str], Outcome | None]
) -> list[TrainSample] | str:
    """The batch of a step whose functions answered `outcome` (of a trajectory, of a function), as the trainer gets it,
    or the reason why a trajectory has no reward."""
    domains, samples, ended = {domain.name: domain for domain in run.domains}, [], dict[str, float]()
    for one in kept:
        if (domain := domains.get(one.domain)) is None:
            return f"{one.id}: the run has no domain '{one.domain}' any more"
        answers = {use.function: outcome(one, use.function) for use in domain.rewards}
        outcomes = [answer for answer in answers.values() if answer is not None]
        if len(outcomes) < len(answers):
            missing = next(name for name, answer in answers.items() if answer is None)
            return f"{one.id} was not scored by '{missing}', which its domain names now"
        combined = combine(one.trajectory, domain, outcomes)
        if isinstance(combined, InfraFault):
            return f"{one.id}: {combined.kind}: {combined.detail}"
        samples.append(train_sample(one.trajectory, combined, domain.success_at))
        ended[one.group] = max(ended.get(one.group, 0.0), one.t)
    return _batch(run, step, sorted(samples, key=lambda sample: ended[sample.group]))


def _batch(run: RunSpec, step: int, samples: Sequence[TrainSample]) -> list[TrainSample]:
    """The samples that the step trains of those of its groups, in the order in which the groups ended."""
    groups: dict[str, list[TrainSample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group].append(sample)
    return batch_samples(run.batch)([Group(of[0].group, of[0].domain, tuple(of)) for of in groups.values()], step - 1)


def recorded_outcome(kept: KeptTrajectory, function: str) -> Outcome | None:
    score = kept.outcome(function)
    return None if score is None else score.outcome


def this_machine() -> dict[str, str]:
    """Versions of libraries ('' for a missing one), and the processor."""
    found = {"python": platform.python_version(), "machine": platform.machine(), "processor": _processor()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return model[1].strip() if model else platform.processor()


def _trainer_config(directory: Path) -> TrainerConfig:
    path = directory / TRAINER
    if not path.is_file():
        raise UsageError(
            f"{directory} has no {TRAINER}: no trainer ran in it (a simulation?)", remedy="name a real run"
        )
    return TrainerConfig.model_validate_json(path.read_text(encoding="utf-8"))


def _refuse_unrecorded(specs: Specs, config: TrainerConfig, weights: bool) -> None:
    """UsageError for runs whose batches or, with `weights`, whose losses do not follow from their directory."""
    run, why = specs.run, ""
    if run.training.data is not None:
        raise UsageError(
            f"steps of run '{run.name}' cannot be bundled: its samples are given (training.data), not rolled out"
        )
    if specs.cluster.trainer.external is not None:
        why = "its trainer is a program of yours"
    elif run.batch.age_decay not in (None, 1.0):
        why = "batch.age_decay weighs samples by their age when they are taken, which is not recorded"
    elif config.loss.kl and isinstance(config.loss.reference, TeacherSpec):
        why = f"its reference policy is behind {config.loss.reference.url}"
    if why and weights:
        remedy = "--no-weights bundles its rewards alone"
        raise UsageError(f"the loss of a step of run '{run.name}' cannot be repeated: {why}", remedy=remedy)


def _choose(reader: LedgerReader, step: int | None, run: str) -> _RecordedStep:
    rows = {row.step: row for row in reader.versions() if row.version > 0}
    failures = [event.fields for event in reader.events(STEP_FAILED)]
    failed = {int(one["step"] or 0): one for one in failures if int(one["step"] or 0) > max(rows, default=0)}
    if step is None:
        step = max(failed or rows, default=None)
        if step is None:
            raise UsageError(f"run '{run}' has trained no step yet", remedy="name another run")
    if step in rows:
        return _RecordedStep(step, rows[step].version - 1, rows[step])
    if step in failed:
        one = failed[step]
        ids = tuple(str(one["samples"]).split())
        return _RecordedStep(step, int(one["version"] or 0), None, str(one["why"]), ids)
    raise UsageError(f"run '{run}' has no step {step} (it has {_range(sorted({*rows, *failed}))})")


def _range(steps: Sequence[int]) -> str:
    return "none" if not steps else str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"


def _content(
    reader: LedgerReader, chosen: _RecordedStep, store: DirectoryWeightStore, specs: Specs, weights: bool
) -> tuple[list[TrainSample], list[KeptTrajectory]] | str:
    """The batch and its trajectories, or the reason why they, or the weights, are not there."""
    if weights and not store.complete(chosen.version):
        return (
            f"v{chosen.version}, which it started from, is not on disk (`checkpoints.every: 1`, or a larger "
            "`checkpoints.keep`, keeps it)"
        )
    if chosen.row is None:
        return _failed_content(reader, chosen, specs.run)
    metrics = chosen.row.metrics
    if weights and "replayed_share" in metrics:
        return (
            "its samples name the experts that the engine chose for each token, which trained samples do not keep "
            "(--no-weights bundles its rewards alone)"
        )
    spans = [span for span in reader.trajectory_spans(chosen.version + 1) if span.outcome == "trained"]
    kept = _kept(reader, spans)
    if gone := len(spans) - len(kept):
        return (
            f"{gone} of its {len(spans)} trajectories are not kept (`keep` of the run is '{specs.run.keep.items}', "
            f"with at most {specs.run.keep.max_mb:,} MB)"
        )
    batch = rewarded_batch(specs.run, chosen.step, kept, recorded_outcome)
    if isinstance(batch, str):
        return f"a reward is missing: {batch}"
    scores = {span.trajectory: span.score for span in spans}
    wrong = next((sample for sample in batch if sample.score != scores[sample.id]), None)
    if wrong is not None:
        return (
            f"{wrong.id} was paid {scores[wrong.id]!r}, and {wrong.score!r} by the run's present settings: it was "
            "resumed with other rewards"
        )
    return batch, kept


def _failed_content(
    reader: LedgerReader, failed: _RecordedStep, run: RunSpec
) -> tuple[list[TrainSample], list[KeptTrajectory]] | str:
    waiting = {sample.id: sample for sample in reader.waiting_samples(failed.ids)}
    if gone := len(failed.ids) - len(waiting):
        return f"{gone} of its {len(failed.ids)} samples are gone: the run was resumed after it had failed"
    spans = [span for span in reader.trajectory_spans() if span.trajectory in waiting and span.outcome == "waiting"]
    samples = [waiting[TrajectoryId(id_)] for id_ in failed.ids]
    return _batch(run, failed.step, samples), _kept(reader, spans)


def _kept(reader: LedgerReader, spans: Sequence[TrajectorySpan]) -> list[KeptTrajectory]:
    wanted = {(span.trajectory, span.t1) for span in spans}
    return [one for one in reader.kept({id_ for id_, _ in wanted}) if (one.id, one.t) in wanted]


def _others(
    reader: LedgerReader, chosen: _RecordedStep, store: DirectoryWeightStore, specs: Specs, weights: bool
) -> Iterator[int]:
    """The nearest steps that can be bundled."""
    rows = [row for row in reader.versions() if row.version > 0 and row.step != chosen.step]
    if weights:
        rows = [row for row in rows if store.complete(row.version - 1)]
    for row in sorted(rows, key=lambda row: abs(row.step - chosen.step)):
        other = _RecordedStep(row.step, row.version - 1, row)
        if not isinstance(_content(reader, other, store, specs, weights), str):
            yield row.step


def _cannot(step: int, run: str, why: str, others: Iterator[int]) -> UsageError:
    near = sorted(other for other, _ in zip(others, range(SUGGESTED), strict=False))
    remedy = f"steps that can be: {', '.join(map(str, near))}" if near else "no other step of it can be either"
    return UsageError(f"step {step} of run '{run}' cannot be bundled: {why}", remedy=remedy)


def _notes(reader: LedgerReader, chosen: _RecordedStep) -> list[str]:
    """A note if the step may have had other settings than those that the run's directory has."""
    starts = [event.t for event in reader.events("starting")]
    done = [event.t for event in reader.events("step") if event.fields["step"] == chosen.step]
    if len(starts) < 2 or chosen.row is None or not done or done[-1] > starts[-1]:
        return []
    parts = [_trained_with(config) for config in (reader.config(), *reader.earlier_configs())]
    if all(part == parts[0] for part in parts):
        return []
    return [f"the run was resumed after step {chosen.step}, with other settings: the bundle has those of its last life"]


def _trained_with(config: Mapping[str, Any]) -> tuple[Any, ...]:
    run, cluster = config.get("run", {}), config.get("cluster", {})
    return run.get("training"), run.get("domains"), run.get("batch"), run.get("steps"), cluster.get("trainer")


def _functions(
    kept: Sequence[KeptTrajectory], packed: Mapping[str, Package | str]
) -> tuple[list[Package], dict[str, BundledFunction]]:
    """The packages of the functions that scored the trajectories, and why some are not called again."""
    versions: dict[str, set[str]] = defaultdict(set)
    for one in kept:
        for score in one.scores:
            versions[score.function].add(score.version)
    packages, functions = [], {}
    for name, scored in sorted(versions.items()):
        package, version = packed.get(name, "the run has no such function any more"), max(scored)
        if not version:
            why = "it ran in the run's process, since it keeps state"
        elif len(scored) > 1:
            why = f"{len(scored)} of its versions scored the batch"
        elif isinstance(package, str):
            why = f"it cannot be packed: {package}"
        elif package.version != version:
            why = f"its source has changed since: it is {package.version[:12]} now"
        elif variables := sorted({*package.spec.env, *package.spec.secrets}):
            why = f"it needs {', '.join(variables)}, whose values are in no bundle"
        else:
            packages.append(package)
            why = "" if package.spec.deterministic else "it is not deterministic"
        functions[name] = BundledFunction(version=version, why=why)
    return packages, functions


def _with_weights(directory: Path, config: TrainerConfig, version: int) -> tuple[TrainerConfig, dict[str, Path]]:
    """The trainer's settings with paths within the bundle, and the files of weights by such paths."""
    root, start = directory / WEIGHTS, version_path(WEIGHTS, version)
    files = dict(_below(version_path(root, version), str(start)))
    model, loss = config.model, config.loss
    if config.lora is not None and adapter_names(version_path(root, version)):
        model = model.model_copy(update={"path": str(start / BASE), "init": None})
    elif config.lora is not None and model.path is not None:
        files |= _below(Path(model.path), MODEL)
        model = model.model_copy(update={"path": MODEL})
    elif model.path is not None:  # all its weights are those of the version
        model = model.model_copy(update={"path": str(start)})
    if loss.kl and isinstance(loss.reference, str):
        files |= _below(Path(loss.reference), REFERENCE)
        loss = loss.model_copy(update={"reference": REFERENCE})
    elif loss.kl:
        number = version - version % loss.reference_reset if loss.reference_reset else 0
        files |= _below(version_path(root, number), str(version_path(WEIGHTS, number)))
    return config.model_copy(update={"model": model, "loss": loss}), files


def _below(source: Path, name: str) -> Iterator[tuple[str, Path]]:
    """The files of a model's directory, by their paths in the bundle."""
    found = [path for path in sorted(source.rglob("*")) if path.is_file()]
    if not found:
        raise UsageError(f"there is no model at {source}, which the step needs", remedy="restore it, or --no-weights")
    for path in found:
        if path.suffix in (".safetensors", ".json") or path.name == MARKER:
            yield f"{name}/{path.relative_to(source).as_posix()}", path


def _read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _without_values(value: Any) -> Any:
    """A spec without the values of environment variables, and without users and passwords in URLs."""
    match value:
        case dict():
            return {
                k: dict.fromkeys(v, "") if k == "env" and isinstance(v, dict) else _without_values(v)
                for k, v in value.items()
            }
        case list():
            return [_without_values(one) for one in value]
        case str():
            return re.sub(r"(?<=://)[^/@\s]+@", "", value)
    return value


def _write(out: Path, content: Mapping[str, bytes], files: Mapping[str, Path]) -> None:
    """The archive, whole or not at all. UsageError if it cannot be written."""
    partial = out.with_name(f".{out.name}.partial")
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in content.items():
                archive.writestr(name, data)
            for name, path in files.items():
                archive.write(path, name, zipfile.ZIP_STORED if path.suffix == ".safetensors" else None)
        partial.replace(out)
    except OSError as error:
        partial.unlink(missing_ok=True)
        where = str(error.filename or out)
        if where in map(str, files.values()):
            raise UsageError(
                f"{where}: {error.strerror}, which the step needs: a live run deletes old versions",
                remedy="bundle a later step, or keep more with checkpoints.keep",
            ) from None
        raise UsageError(f"{where}: {error.strerror or error}", remedy="name another file with -o") from None


def _manifest(text: str) -> BundleManifest:
    """ValueError for another schema."""
    values = json.loads(text)
    if values["schema_version"] != SCHEMA:
        by = values.get("machine", {}).get("rollart", "another version")
        raise ValueError(f"it was written by rollart {by} (schema_version {values['schema_version']}, rule: {SCHEMA})")
    return BundleManifest.model_validate(values)


def _unreadable(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is no whole bundle: {why}", remedy="copy it again, or write it anew: `rollart bundle`")
