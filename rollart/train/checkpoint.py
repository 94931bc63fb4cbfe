"""Published versions on disk: Hugging Face directories `v%06d`, written atomically.

    config.json  model.safetensors  tokenizer.json…     read by engines
    trainer/optimizer.safetensors  trainer/state.json   read by `restore_version`; in a separate directory, since
                                                        vLLM loads every *.safetensors beside the config as weights
    COMPLETE                                            {"schema": 1, "version": n, "files": {name: sha256}}

With several ranks, each writes its own share and no host holds the whole model: `model-00001-of-00004.safetensors` …
with `model.safetensors.index.json` (each tensor whole in one file, as transformers and vLLM read them), and
`trainer/optimizer-00001-of-00002.safetensors` … (each rank's rows; metadata `rows` = {name: [first row, rows of the
whole tensor]} as JSON). Adapters and a critic's weights are stored beside the optimizer's state. Tensors are read by
rows, so that any number of ranks can restore a version that another number of ranks wrote, and no rank reads a whole
model to keep a part of it.

A version is written from a snapshot, a rank's share of the learner's state at one moment. It is written into a hidden
directory, the marker last, and then renamed: a reader sees the older version or the new one, never a partial one.
Nothing is pickled. Weights that are published in bfloat16 (`published_dtype`) are kept as they are trained beside the
optimizer's state.

A version with an adapter (`lora.publish`) has `adapter_config.json`, `adapter_model.safetensors` and `base/` in place
of the weights, and one with several a directory for each (`rollart.lora`). The files of `base/` are written once,
beside the versions, which have links to them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rollart.architecture import MARKER, TOKENIZER_FILES, expert_parts, version_path
from rollart.errors import TrainerError, UsageError, VersionDamaged
from rollart.lora import ADAPTER_CONFIG, ADAPTER_MODEL, BASE, PREFIX, adapter_file
from rollart.settings.training import LoraSpec
from rollart.shares import balanced_portions
from rollart.train.learner import Learner, LearnerCounters
from rollart.train.policy import AdaptedTensor, adapter_tensors, local_rows, published_tensors
from rollart.train.ranks import SINGLE_RANK, RankChannel

MODEL, OPTIMIZER = "model.safetensors", "trainer/optimizer.safetensors"

ADAPTER = "adapter"
"""Stands in for the optimizer's name in tensor names of `trainer/`, for adapters, which belong to no optimizer."""

CRITIC = "critic"
"""The critic's optimizer, and its weights in tensor names of `trainer/`."""

TRAINED = "trained"
"""The same for the weights as they are trained, where they are published in another type."""

STATE, INDEX = "trainer/state.json", "model.safetensors.index.json"

T = TypeVar("T")

_Weights = list[tuple[Tensor, Tensor]]

_Moments = list[tuple[str, str, str, Tensor]]


def tokenizer_files(source: str | None) -> tuple[Path, ...]:
    """The files to copy into every version. `UsageError` if the configured path has no tokenizer."""
    if source is None:
        return ()
    path = Path(source)
    if path.is_file():
        return (path,)
    found = tuple(path / name for name in TOKENIZER_FILES if (path / name).is_file())
    if not any(f.name == "tokenizer.json" for f in found):
        raise UsageError(f"tokenizer: there is no tokenizer.json at {source}")
    return found


def remove_partial_writes(root: Path) -> None:
    """Remove leftovers of interrupted publishes. `UsageError` if the root cannot be written."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        for leftover in (*root.glob(".tmp-*"), *root.glob(".old-*")):
            shutil.rmtree(leftover, ignore_errors=True)
        if not os.access(root, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise UsageError(f"weights_root {root} cannot be written: {error.strerror}") from error


@dataclasses.dataclass(frozen=True, slots=True)
class LearnerSnapshot:
    """A learner's state at one moment. `files`: the files that this rank writes; `rows`: of each tensor that is a part
    of a whole one, its first row and the rows of the whole; `index`: the file of each tensor, if there are several
    files."""

    files: Mapping[str, Mapping[str, Tensor]]
    rows: Mapping[str, tuple[int, int]]
    index: str | None
    config: str
    counters: LearnerCounters
    durable: bool
    adapter: str | None = None
    """The adapter_config.json of a version with adapters, of which all have the same."""
    names: tuple[str, ...] = ("",)
    """The names of its adapters."""
    base: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The digests of the checkpoint below it, by file."""


def take_snapshot(learner: Learner) -> LearnerSnapshot:
    """The learner's current state. All ranks must call it. The copy is in host memory and remains unchanged while the
    learner continues."""
    _reshard(learner)
    state, rows = _state_tensors(learner)
    names = learner.config.adapters or ("",)
    models = {name: published_tensors(learner.policy.model, name) for name in names}
    rank, size, lora = learner.ranks.rank, learner.ranks.size, learner.config.lora
    base: Mapping[str, str] = {}
    adapter, index = None, None
    if lora is not None and lora.publish == "adapter":
        base = write_base(learner)
        adapter = json.dumps(_adapter_config(learner, lora, models[names[0]], base), indent=2)
        files = {file: one for name, model in models.items() for file, one in _adapter_files(learner, name, model)}
    else:
        files, index = _weight_files(learner, models[names[0]])
    shard = "" if size == 1 else f"-{rank + 1:05d}-of-{size:05d}"
    files[f"trainer/optimizer{shard}.safetensors"] = _copied(state)
    counters = dataclasses.replace(learner.counters)
    return LearnerSnapshot(
        files, rows, index, _config_text(learner), counters, learner.config.durable, adapter, names, base
    )


def write_base(learner: Learner) -> Mapping[str, str]:
    """The digests of the checkpoint below the learner's adapters, by file. It is written if the run's versions have
    none, or another model's. All ranks must call it. `TrainerError`, on every rank, leaves no files behind."""
    if learner.base_digests is None:
        root, ranks = Path(learner.config.weights_root).absolute(), learner.ranks.torch
        own = {name: AdaptedTensor(m.base) for name, m in _published_tensors(learner).items()}
        found = ranks.exchange(_base_on_disk(learner, own, root / BASE))
        if not all(found):
            files, index = _weight_files(learner, own, lossless=True)

            def seal(temporary: Path, digests: Mapping[str, str]) -> None:
                texts = {"config.json": _config_text(learner)} | ({} if index is None else {INDEX: index})
                _write_texts(temporary, texts, digests, {"schema": 1}, learner.config.durable)

            cannot = f"cannot write the weights below the adapters under {root}"
            _write_directory(files, {}, root / BASE, cannot, seal, durable=learner.config.durable, ranks=ranks)
            found = ranks.exchange(_digests(root / BASE))
        learner.base_digests = found[0]
    return learner.base_digests


def write_version(
    state_of: LearnerSnapshot,
    root: Path,
    version: int,
    tokenizer: tuple[Path, ...],
    *,
    ranks: RankChannel = SINGLE_RANK,
    wanted: Callable[[], bool] = lambda: True,
) -> Path:
    """Write a state as `version`, replacing an earlier write. `TrainerError`, on every rank, leaves no files behind.
    Each write uses a separate directory until it is complete, which then becomes the version's only if rank 0 still
    wants it."""
    final = version_path(root, version)

    def seal(temporary: Path, digests: Mapping[str, str]) -> None:
        _write_rest(state_of, root, temporary, version, tokenizer, digests)
        if not wanted():
            raise TrainerError(f"version {version} was given up while it was written: the trainer was restored")

    cannot = f"cannot publish version {version} under {root}"
    _write_directory(state_of.files, state_of.rows, final, cannot, seal, durable=state_of.durable, ranks=ranks)
    return final


def restore_version(learner: Learner, path: Path, version: int, *, optimizer: bool = True) -> None:
    """Load weights, optimizer and counters, or the weights alone. All ranks must call it. `TrainerError`, on every
    rank, for a directory that is not a complete, unchanged version; everything is read and checked before any state
    changes."""
    problem: TrainerError | None = None
    critic = learner.critic
    _reshard(learner)
    try:
        files = _verify(path, version, rank=learner.ranks.rank, size=learner.ranks.size)
        weights, values, moments, counters = _read(learner, path, files)
    except TrainerError as error:
        problem = error
    learner.ranks.torch.agree(problem)
    with torch.no_grad():
        for parameter, rows in (*weights, *(values if optimizer else ())):
            local_rows(parameter).copy_(rows)
    if critic is not None:
        critic.started = optimizer and bool(values)
    learner.optimizers.clear()
    if not optimizer:
        learner.counters = LearnerCounters()
        return
    for which, name, key, value in moments:
        parameter = _parameters(learner, which)[name]
        learner.optimizer(which).state[parameter][key] = restored_moment(parameter, value)
    learner.counters = counters


def save_tensors(path: Path, tensors: Mapping[str, Tensor], rows: Mapping[str, tuple[int, int]]) -> None:
    """Write one file, with the umask's mode for new files. Raises `OSError` and `SafetensorError`."""
    rows = {name: rows[name] for name in tensors if name in rows}
    # transformers requires `format`, and safetensors cannot read an empty file without metadata.
    metadata = {"format": "pt"} | ({"rows": json.dumps(rows)} if rows else {})
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path, metadata=metadata)
    path.chmod(mode)  # safetensors puts a temporary file of mode 0600 in its place


class TensorFiles:
    """The tensors of some files, by name. Tensors that were read remain valid when the files are closed with it."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._pieces: dict[str, list[tuple[int, int, Any]]] = {}
        """Of each tensor: first row, end and file of its pieces."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in files:
            file: Any = safe_open(str(path), framework="pt")
            rows = json.loads((file.metadata() or {}).get("rows", "{}"))
            for name in file.keys():  # noqa: SIM118 - not a mapping
                shape = tuple(file.get_slice(name).get_shape())
                count = shape[0] if shape else 0
                start, of = rows.get(name) or (0, count)
                self._pieces.setdefault(name, []).append((start, start + count, file))
                self.shapes[name] = (of, *shape[1:]) if shape else ()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) of a tensor in host memory, by default all. `ValueError` if some rows are in no file."""
        shape, pieces = self.shapes[name], sorted(self._pieces[name], key=lambda p: p[:2])
        if not shape:
            scalar: Tensor = pieces[0][2].get_tensor(name)
            return scalar
        stop = shape[0] if stop is None else stop
        parts, at = [], start
        for first, last, file in pieces:
            if first <= at < min(last, stop):
                end = min(last, stop)
                parts.append(file.get_slice(name)[at - first : end - first])
                at = end
        if at < stop:
            raise ValueError(f"{name}: rows {at} to {stop} are in no file")
        if not parts:
            parts.append(pieces[0][2].get_slice(name)[0:0])
        whole: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole


@dataclass(frozen=True, slots=True)
class FileBucket:
    """Tensors that one rank writes into one file."""

    owner: int
    names: tuple[str, ...]


def file_buckets(sizes: Mapping[str, int], *, ranks: int, limit: int) -> list[FileBucket]:
    """Files for tensors of given sizes in bytes, each of at most `limit` bytes (a larger tensor alone), with nearly
    equal totals per rank. In order of rank; a rank without tensors has no file."""
    names = list(sizes)
    out = []
    for owner, share in enumerate(balanced_portions([sizes[name] for name in names], ranks)):
        current: list[str] = []
        filled = 0
        for name in (names[i] for i in share):
            if current and filled + sizes[name] > limit:
                out.append(FileBucket(owner, tuple(current)))
                current, filled = [], 0
            current.append(name)
            filled += sizes[name]
        if current:
            out.append(FileBucket(owner, tuple(current)))
    return out


def row_range(rows: int, *, rank: int, ranks: int) -> tuple[int, int]:
    """The rows [start, stop) of a parameter on a rank: equal chunks, the last ones shorter or empty, as `torch.chunk`
    and FSDP2 split the first dimension."""
    chunk = -(-rows // ranks)
    return min(rank * chunk, rows), min((rank + 1) * chunk, rows)


def _state_tensors(learner: Learner) -> tuple[dict[str, Tensor], dict[str, tuple[int, int]]]:
    """State for `restore_version` besides the published weights: this rank's rows of the optimizers' state, of adapters
    and of weights that are published in another type, and which rows they are."""
    names = {p: n for n, p in learner.policy.model.named_parameters()}
    critic = {} if learner.critic is None or not learner.critic.started else _parameters(learner, CRITIC)
    owners = names | {p: n for n, p in critic.items()}
    whole = {
        f"{which}/{owners[parameter]}/{key}": value
        for which, optimizer in learner.optimizers.items()
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }
    whole |= {f"{CRITIC}/{name}/weight": p for name, p in critic.items()}
    whole |= {f"{ADAPTER}/{name}/weight": p for name, p in adapter_tensors(learner.policy.model).items()}
    if learner.config.published_dtype is not None and learner.config.lora is None:
        whole |= {f"{TRAINED}/{name}/weight": p for p, name in names.items()}
    rank, size = learner.ranks.rank, learner.ranks.size
    if size == 1:
        return {name: local_rows(tensor) for name, tensor in whole.items()}, {}
    tensors: dict[str, Tensor] = {}
    rows: dict[str, tuple[int, int]] = {}
    for name, tensor in whole.items():
        if not tensor.ndim:
            if rank == 0:
                tensors[name] = tensor
            continue
        start, stop = row_range(tensor.shape[0], rank=rank, ranks=size)
        if stop > start:
            tensors[name], rows[name] = local_rows(tensor), (start, tensor.shape[0])
    return tensors, rows


def _config_text(learner: Learner) -> str:
    config = learner.policy.model.config
    config.architectures = [type(learner.policy.model).__name__]
    text = str(config.to_json_string())
    if learner.config.published_dtype is not None:
        text = json.dumps(json.loads(text) | {"dtype": learner.config.published_dtype}, indent=2)
    return text


def _adapter_config(
    learner: Learner, lora: LoraSpec, model: Mapping[str, AdaptedTensor], base: Mapping[str, str]
) -> dict[str, object]:
    """peft's description of the adapters."""
    modules = sorted({name.split(".")[-2] for name, m in model.items() if m.a is not None})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": learner.config.model.path,
        "revision": hashlib.sha256(json.dumps(sorted(base.items())).encode()).hexdigest(),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules if lora.targets == ["all-linear"] else lora.targets,
        "inference_mode": True,
    }


def _published_tensors(learner: Learner) -> dict[str, AdaptedTensor]:
    """Those of the weights below its adapters, with the first of these."""
    return published_tensors(learner.policy.model, *learner.config.adapters[:1])


def _adapter_files(
    learner: Learner, adapter: str, model: Mapping[str, AdaptedTensor]
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The file of an adapter, on rank 0."""
    tensors = {}
    for name, m in model.items():
        for which, factor in zip("AB", m.parts[1:], strict=False):
            whole = learner.ranks.assemble(local_rows(factor), of=factor.shape[0], owner=0)
            if whole is not None:
                tensors[f"{PREFIX}{name.removesuffix('.weight')}.lora_{which}.weight"] = whole
    if learner.ranks.rank == 0:
        yield adapter_file(adapter, ADAPTER_MODEL), tensors


def _base_on_disk(learner: Learner, own: Mapping[str, AdaptedTensor], directory: Path) -> Mapping[str, str] | None:
    """The digests of the checkpoint in `directory`, if this rank's part of it is that of the model."""
    try:
        digests = _digests(directory)
        pieces = TensorFiles(directory / name for name in _files_of(MODEL, list(digests)))
        if dict(_file_shapes(learner, own)) != pieces.shapes:
            return None
        pairs = (pair for name, m in own.items() for pair in _weights(learner, pieces, name, m.base))
        same = all(torch.equal(local_rows(p).detach().cpu(), rows.to(p.dtype)) for p, rows in pairs)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return None
    return digests if same else None


def _digests(directory: Path) -> dict[str, str]:
    return dict(json.loads((directory / MARKER).read_text(encoding="utf-8"))["files"])


def _weight_files(
    learner: Learner, model: Mapping[str, AdaptedTensor], *, lossless: bool = False
) -> tuple[dict[str, dict[str, Tensor]], str | None]:
    """This rank's files of the model's tensors, and the index if there are several. `lossless`: in the type in which
    they are trained where the published type cannot hold them."""
    if learner.ranks.size > 1:
        return _sharded_files(learner, model, lossless=lossless)
    with torch.no_grad():
        whole = {
            part: tensor
            for name, m in model.items()
            for part, tensor in _in_files(learner, name, m.merge([local_rows(one) for one in m.parts], m.scale))
        }
    return {MODEL: _copied(_published(whole, learner, lossless))}, None


def _parameters(learner: Learner, which: str) -> dict[str, Any]:
    """The parameters of an optimizer by their names; none of the critic's in a trainer without one."""
    model = learner.policy.model if which != CRITIC else None if learner.critic is None else learner.critic.model
    return {} if model is None else dict(model.named_parameters())


def _reshard(learner: Learner) -> None:
    learner.policy.reshard()
    if learner.critic is not None:
        learner.critic.reshard()


def _published(tensors: Mapping[str, Tensor], learner: Learner, lossless: bool) -> dict[str, Tensor]:
    """Tensors in the type in which they are published."""
    if learner.config.published_dtype is None:
        return dict(tensors)
    dtype = getattr(torch, learner.config.published_dtype)
    found = {name: t.to(dtype) for name, t in tensors.items()}
    return {n: t if lossless and not torch.equal(found[n].to(t.dtype), t) else found[n] for n, t in tensors.items()}


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _sharded_files(
    learner: Learner, model: Mapping[str, AdaptedTensor], *, lossless: bool
) -> tuple[dict[str, dict[str, Tensor]], str]:
    """This rank's files of whole tensors, and the index of all files. Tensors are assembled one at a time, on the rank
    that writes them: no rank holds more than its share, and every byte crosses the network once."""
    ranks = learner.ranks
    dtype = learner.config.published_dtype
    width = None if dtype is None else getattr(torch, dtype).itemsize
    sizes = {name: m.base.numel() * (width or m.base.element_size()) for name, m in model.items()}
    planned = file_buckets(sizes, ranks=ranks.size, limit=learner.config.parallel.bucket_mb * 10**6)
    files: dict[str, dict[str, Tensor]] = {}
    place = {}
    for number, bucket in enumerate(planned, start=1):
        file = f"model-{number:05d}-of-{len(planned):05d}.safetensors"
        mine: dict[str, Tensor] = {}
        for name in bucket.names:
            place[name] = file
            parts = [ranks.assemble(local_rows(p), of=p.shape[0], owner=bucket.owner) for p in model[name].parts]
            if bucket.owner == ranks.rank:
                merged = AdaptedTensor.merge([p for p in parts if p is not None], model[name].scale)
                mine.update(_in_files(learner, name, merged.detach()))
        if mine:
            files[file] = _published(mine, learner, lossless)
    names = {part: place[name] for name, m in model.items() for part, _ in _shapes(learner, name, m.base.shape)}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": names}
    return files, json.dumps(index)


def _in_files(learner: Learner, name: str, tensor: Tensor, first: int = 0) -> Iterator[tuple[str, Tensor]]:
    """A tensor of the model by its names in a version's files: experts have their own there. Families whose experts the
    embedded engine does not compute keep the form that transformers has in memory."""
    return iter([(name, tensor)]) if learner.policy.experts is None else expert_parts(name, tensor, first)


def _file_shapes(learner: Learner, model: Mapping[str, AdaptedTensor]) -> Iterator[tuple[str, tuple[int, ...]]]:
    return (one for name, m in model.items() for one in _shapes(learner, name, m.base.shape))


def _shapes(learner: Learner, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for part, tensor in _in_files(learner, name, torch.empty(shape, device="meta")):
        yield part, tuple(tensor.shape)


def _write_directory(
    files: Mapping[str, Mapping[str, Tensor]],
    rows: Mapping[str, tuple[int, int]],
    final: Path,
    cannot: str,
    seal: Callable[[Path, Mapping[str, str]], None],
    *,
    durable: bool,
    ranks: RankChannel,
) -> None:
    """Write a directory whole or not at all: the files of every rank, and on rank 0 the rest by `seal`, which gets the
    digests. `TrainerError`, on every rank, begins with `cannot` and leaves no files behind."""
    temporary: Path | None = None

    def begin() -> str:
        nonlocal temporary
        temporary = _temporary_directory(final.with_name(f".tmp-{final.name}"))
        return str(temporary)

    def share(temporary: Path) -> dict[str, str]:
        for name, tensors in files.items():
            (temporary / name).parent.mkdir(exist_ok=True)
            save_tensors(temporary / name, tensors, rows)
        return {name: _digest(temporary / name, durable) for name in files}

    def end(temporary: Path, digests: Mapping[str, str]) -> None:
        seal(temporary, digests)
        _swap(temporary, final)
        if durable:
            _fsync(final.parent)

    try:
        own = _all_or_none(ranks, begin if ranks.leads else None, cannot)
        where = Path(next(name for name in ranks.exchange(own) if name))
        mine = _all_or_none(ranks, lambda: share(where), cannot)
        digests = {name: digest for one in ranks.exchange(mine) for name, digest in one.items()}
        _all_or_none(ranks, (lambda: end(where, digests)) if ranks.leads else None, cannot)
    except BaseException:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _temporary_directory(path: Path) -> Path:
    """A new directory named after `path`: an abandoned earlier write may still continue in another one."""
    for number in itertools.count():
        with contextlib.suppress(FileExistsError):
            own = path.with_name(f"{path.name}.{number}")
            own.mkdir(parents=True)
            return own
    raise AssertionError("numbers do not end")


def _digest(path: Path, sync: bool) -> str:
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_rest(
    state_of: LearnerSnapshot,
    root: Path,
    temporary: Path,
    version: int,
    tokenizer: tuple[Path, ...],
    digests: Mapping[str, str],
) -> None:
    """The part that only rank 0 writes: the small files, the links, and the marker with the digests of all ranks."""
    texts = {
        "config.json": state_of.config,
        STATE: json.dumps({"schema": 1, "version": version, **dataclasses.asdict(state_of.counters)}),
    }
    if state_of.index is not None:
        texts[INDEX] = state_of.index
    if state_of.adapter is not None:
        texts |= {adapter_file(name, ADAPTER_CONFIG): state_of.adapter for name in state_of.names}
        _link(root / BASE, temporary / BASE, state_of.base)
        digests = {**digests, **{f"{BASE}/{name}": digest for name, digest in state_of.base.items()}}
    for source in tokenizer:
        name = source.name if source.name in TOKENIZER_FILES else "tokenizer.json"
        shutil.copyfile(source, temporary / name)
    _write_texts(temporary, texts, digests, {"schema": 1, "version": version}, state_of.durable)


def _write_texts(
    temporary: Path, texts: Mapping[str, str], digests: Mapping[str, str], facts: Mapping[str, int], durable: bool
) -> None:
    """The texts, then the marker with `facts` and the digest of every file; `digests` are known already."""
    for name, text in texts.items():
        (temporary / name).write_text(text, encoding="utf-8")
    names = {str(file.relative_to(temporary)): file for file in sorted(temporary.rglob("*")) if file.is_file()}
    every = {name: digests[name] if name in digests else _digest(file, durable) for name, file in names.items()}
    if missing := sorted(digests.keys() - names.keys()):
        raise OSError(2, f"{missing[0]} of another rank is not there: the ranks must share the directory")
    marker = temporary / MARKER
    marker.write_text(json.dumps({**facts, "files": every}), encoding="utf-8")
    if durable:
        for path in (marker, *dict.fromkeys(file.parent for file in names.values()), temporary):
            _fsync(path)


def _link(source: Path, target: Path, names: Iterable[str]) -> None:
    """Make files of one directory those of another one as well. `OSError` if they are gone."""
    target.mkdir()
    for name in names:
        try:
            os.link(source / name, target / name)
        except OSError:  # a file system without links
            shutil.copyfile(source / name, target / name)


def _swap(temporary: Path, final: Path) -> None:
    old = final.with_name(f".old-{final.name}")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    temporary.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _all_or_none(ranks: RankChannel, work: Callable[[], T] | None, cannot: str) -> T | None:
    """The result of one rank's work, after all ranks did theirs. `TrainerError` on all ranks if one failed."""
    problem, result = None, None
    try:
        result = work() if work is not None else None
    except TrainerError as error:
        problem = error
    except (OSError, SafetensorError) as error:
        cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        remedy = "free space or fix the directory, then rollart launch --resume"
        problem = TrainerError(f"{cannot}: {cause}", remedy=remedy)
        problem.__cause__ = error
    ranks.agree(problem)
    return result


def _verify(path: Path, version: int, *, rank: int, size: int) -> list[str]:
    """The files of a version. Each rank verifies its share of them."""
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
        found, files = int(marker["version"]), dict(marker["files"])
    except FileNotFoundError as error:
        message = f"{path} has no {MARKER} marker: it is not a whole version"
        raise VersionDamaged(message, remedy="choose another") from error
    except OSError as error:
        raise _unreadable(path / MARKER, error) from error
    except (ValueError, KeyError, TypeError) as error:
        raise VersionDamaged(f"{path / MARKER} is damaged: {error}") from error
    if found != version:
        raise VersionDamaged(f"{path} holds version {found}, not {version}")
    for name, there in ((MODEL, _model_files(files)), *((n, _files_of(n, files)) for n in (OPTIMIZER, STATE))):
        if not there:
            raise VersionDamaged(f"{path} cannot be continued from: it has no {name}")
    for number, (name, digest) in enumerate(sorted(files.items())):
        if number % size != rank:
            continue
        try:
            if _digest(path / name, False) != digest:
                raise VersionDamaged(f"{path / name} is damaged: its sha256 differs from the published one")
        except FileNotFoundError as error:
            raise VersionDamaged(f"{path / name} is not there") from error
        except OSError as error:
            raise _unreadable(path / name, error) from error
    return list(files)


def _read(learner: Learner, path: Path, files: list[str]) -> tuple[_Weights, _Weights, _Moments, LearnerCounters]:
    """The data of this rank: (parameter, its new rows) of the policy and of the critic (none, if it had not started or
    there was none), (optimizer, parameter's name, key, rows), counters."""
    own, adapters = _published_tensors(learner), adapter_tensors(learner.policy.model)
    another = TrainerError(f"{path} holds a different model than the trainer was configured with")
    try:
        model = TensorFiles(path / name for name in _model_files(files))
        state = TensorFiles(path / name for name in _files_of(OPTIMIZER, files))
        counts = json.loads((path / STATE).read_text(encoding="utf-8"))
        counters = LearnerCounters(
            *(int(counts[name]) for name in ("train_calls", "imitate_calls", "updates")),
            *(float(counts.get(name, 0.0)) for name in ("kl", "entropy", "last_entropy")),  # not in older versions
        )
        wanted = {f"{ADAPTER}/{name}/weight": p for name, p in adapters.items()}
        if dict(_file_shapes(learner, own)) != model.shapes:
            raise another
        if {n for n in state.shapes if n.startswith(f"{ADAPTER}/")} != wanted.keys():
            raise another
        parameters = dict(learner.policy.model.named_parameters())
        exact = {name: f"{TRAINED}/{name}/weight" for name in parameters}
        # With adapters the base weights are frozen, and equal to those of the trainer's initial model.
        if adapters:
            pairs = [(p, _rows(learner, state, name, p)) for name, p in wanted.items()]
        elif any(name.startswith(f"{TRAINED}/") for name in state.shapes):
            pairs = [(p, _rows(learner, state, exact[name], p)) for name, p in parameters.items()]
        else:
            pairs = [pair for n, m in own.items() for pair in _weights(learner, model, n, m.base)]
        critic, values = _parameters(learner, CRITIC), []
        found = any(name.startswith(f"{CRITIC}/") for name in state.shapes)
        if critic and found:
            values = [(p, _rows(learner, state, f"{CRITIC}/{name}/weight", p)) for name, p in critic.items()]
        moments = []
        for full in sorted(state.shapes.keys() - wanted.keys() - set(exact.values())):
            which, name, key = full.split("/")
            if which == CRITIC and (not critic or key == "weight"):
                continue
            if name not in (of := critic if which == CRITIC else parameters):
                raise another
            moments.append((which, name, key, _rows(learner, state, full, of[name])))
    except OSError as error:
        raise _unreadable(path, error) from error
    except (SafetensorError, ValueError, KeyError) as error:
        raise VersionDamaged(f"{path} cannot be read as a version: {error}") from error
    return pairs, values, moments, counters


def restored_moment(parameter: Tensor, value: Tensor) -> Tensor:
    """An optimizer state tensor on the device of `parameter`, sharded like it. The update count, a scalar, is there
    too, since fused kernels read it."""
    state = torch.zeros_like(parameter) if value.ndim else torch.zeros_like(value, device=parameter.device)
    local_rows(state).copy_(value)
    return state


def _unreadable(path: Path, error: OSError) -> TrainerError:
    """The error for a failing disk or process: the file itself may be intact."""
    remedy = "look at the disk and at the limit of open files, then rollart launch --resume"
    return TrainerError(f"{path} cannot be read: {error.strerror or error}", remedy=remedy)


def _files_of(name: str, files: Mapping[str, str] | list[str]) -> list[str]:
    """The files named `name`, or its shards (`model-00001-of-00004.safetensors` of `model.safetensors`)."""
    stem, _, ending = name.rpartition(".")
    return sorted(f for f in files if f == name or (f.startswith(f"{stem}-") and f.endswith(f".{ending}")))


def _model_files(files: Mapping[str, str] | list[str]) -> list[str]:
    """The files of the model's weights, or of those below its adapter."""
    return _files_of(MODEL, files) or _files_of(f"{BASE}/{MODEL}", files)


def _weights(learner: Learner, pieces: TensorFiles, name: str, parameter: Tensor) -> _Weights:
    """This rank's part of a parameter, with its rows in the files, where each expert has tensors of its own."""
    if name in pieces.shapes:
        return [(parameter, _rows(learner, pieces, name, parameter))]
    own, first = local_rows(parameter).detach(), 0
    if local_rows(parameter) is not parameter:
        first, _ = row_range(parameter.shape[0], rank=learner.ranks.rank, ranks=learner.ranks.size)
    return [(part, pieces.read(one)) for one, part in _in_files(learner, name, own, first)]


def _rows(learner: Learner, pieces: TensorFiles, name: str, parameter: Tensor) -> Tensor:
    """This rank's rows of a tensor that is sharded like `parameter`; a scalar unchanged."""
    if not pieces.shapes[name]:
        return pieces.read(name)
    if pieces.shapes[name] != tuple(parameter.shape):
        raise ValueError(f"{name} has the shape {pieces.shapes[name]}, not {tuple(parameter.shape)}")
    if local_rows(parameter) is parameter:
        return pieces.read(name)
    start, stop = row_range(parameter.shape[0], rank=learner.ranks.rank, ranks=learner.ranks.size)
    return pieces.read(name, start, stop)
