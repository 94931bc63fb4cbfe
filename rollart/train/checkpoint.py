"""Published versions on disk: a Hugging Face directory `v%06d` that is there whole or not at all.

    config.json  model.safetensors  tokenizer.json…     what engines read
    trainer/optimizer.safetensors  trainer/state.json   what `restore` reads besides; in a directory of its own, since
                                                        vLLM loads every *.safetensors beside the config as weights
    COMPLETE                                            {"schema": 1, "version": n, "files": {name: sha256}}

Written into a hidden directory, the marker last, then renamed: a reader can see an older version or this one,
never half of one. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollart.errors import TrainerError, UsageError
from rollart.train.learner import Counters, Learner

__all__ = ["MARKER", "Snapshot", "clean", "publish", "restore", "snapshot", "tokenizer_files", "version_path", "write"]

MARKER = "COMPLETE"
MODEL, OPTIMIZER, STATE = "model.safetensors", "trainer/optimizer.safetensors", "trainer/state.json"
TOKENIZER_NAMES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt",
    "chat_template.jinja", "generation_config.json",
)  # fmt: skip
"""What engines look for beside the weights."""


def version_path(root: Path, version: int) -> Path:
    return root / f"v{version:06d}"


def tokenizer_files(source: str | None) -> tuple[Path, ...]:
    """The files to copy into every version. `UsageError` if the configured place has no tokenizer."""
    if source is None:
        return ()
    path = Path(source)
    if path.is_file():
        return (path,)
    found = tuple(path / name for name in TOKENIZER_NAMES if (path / name).is_file())
    if not any(f.name == "tokenizer.json" for f in found):
        raise UsageError(f"tokenizer: there is no tokenizer.json at {source}")
    return found


def clean(root: Path) -> None:
    """Remove what an interrupted publish left behind. `UsageError` if the root cannot be written."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        for leftover in (*root.glob(".tmp-v*"), *root.glob(".old-v*")):
            shutil.rmtree(leftover, ignore_errors=True)
        if not os.access(root, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise UsageError(f"weights_root {root} cannot be written: {error.strerror}") from error


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """A learner's state at one moment: what a version is written from."""

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    config: str
    counters: Counters
    durable: bool


def snapshot(learner: Learner, *, copy: bool) -> Snapshot:
    """The learner's state now. A copy lies in host memory and stays as it is while the learner goes on; without, the
    tensors are the learner's own."""
    model, optimizer = _model_tensors(learner), _optimizer_tensors(learner)
    if copy:
        model, optimizer = _copied(model), _copied(optimizer)
    return Snapshot(
        model, optimizer, _model_config(learner), dataclasses.replace(learner.counters), learner.config.durable
    )


def publish(learner: Learner, root: Path, version: int, tokenizer: tuple[Path, ...]) -> Path:
    """Write the learner's state as `version`."""
    return write(snapshot(learner, copy=False), root, version, tokenizer)


def write(
    state_of: Snapshot,
    root: Path,
    version: int,
    tokenizer: tuple[Path, ...],
    *,
    wanted: Callable[[], bool] = lambda: True,
) -> Path:
    """Write a state as `version`; replaces an earlier write of it. `TrainerError` leaves nothing behind. Each write has
    a directory of its own until it is whole, and then takes the version's place only if it is still `wanted`."""
    final = version_path(root, version)
    durable = state_of.durable
    temporary = root / f".tmp-v{version:06d}"
    try:
        temporary = _own(temporary)
        (temporary / OPTIMIZER).parent.mkdir()
        _write_tensors(temporary / MODEL, state_of.model)
        _write_tensors(temporary / OPTIMIZER, state_of.optimizer)
        _write_text(temporary / "config.json", state_of.config)
        state = {"schema": 1, "version": version, **dataclasses.asdict(state_of.counters)}
        _write_text(temporary / STATE, json.dumps(state))
        for source in tokenizer:
            name = source.name if source.name in TOKENIZER_NAMES else "tokenizer.json"
            shutil.copyfile(source, temporary / name)
        files = sorted(f for f in temporary.rglob("*") if f.is_file())
        digests = {str(file.relative_to(temporary)): _digest(file, durable) for file in files}
        marker = temporary / MARKER
        _write_text(marker, json.dumps({"schema": 1, "version": version, "files": digests}))
        if durable:
            for path in (marker, (temporary / STATE).parent, temporary):
                _fsync(path)
        if not wanted():
            raise TrainerError(f"version {version} was given up while it was written: the trainer was restored")
        _swap(temporary, final)
        if durable:
            _fsync(root)
    except TrainerError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        raise TrainerError(
            f"cannot publish version {version} under {root}: {cause}",
            remedy="free space or fix the directory, then rollart launch --resume",
        ) from error
    return final


def restore(learner: Learner, path: Path, version: int) -> None:
    """Load weights, optimizer and counters. `TrainerError` for a directory that is not a whole, unchanged version;
    everything is read and checked before anything of the learner changes."""
    _verify(path, version)
    try:
        weights = load_file(path / MODEL, device=str(learner.policy.device))
        moments = load_file(path / OPTIMIZER, device=str(learner.policy.device))
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        counters = Counters(**{f.name: int(state[f.name]) for f in dataclasses.fields(Counters)})
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise TrainerError(f"{path} cannot be read as a version: {error}") from error
    own = _model_tensors(learner)
    if {n: t.shape for n, t in own.items()} != {n: t.shape for n, t in weights.items()}:
        raise TrainerError(f"{path} holds a different model than the trainer was configured with")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])
    _load_optimizers(learner, moments)
    learner.counters = counters


def _verify(path: Path, version: int) -> None:
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
        found, files = int(marker["version"]), dict(marker["files"])
    except FileNotFoundError as error:
        message = f"{path} has no {MARKER} marker: it is not a whole version"
        raise TrainerError(message, remedy="choose another") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainerError(f"{path / MARKER} is damaged: {error}") from error
    if found != version:
        raise TrainerError(f"{path} holds version {found}, not {version}")
    for name in (MODEL, OPTIMIZER, STATE):
        if name not in files:
            raise TrainerError(f"{path} cannot be continued from: it has no {name}")
    for name, digest in files.items():
        try:
            if _digest(path / name, False) != digest:
                raise TrainerError(f"{path / name} is damaged: its sha256 is not the one that was published")
        except OSError as error:
            raise TrainerError(f"{path / name} cannot be read: {error.strerror}") from error


def _model_tensors(learner: Learner) -> dict[str, Tensor]:
    """State by Hugging Face name; a tied tensor once, under its first name, as `save_pretrained` does."""
    out: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in learner.policy.model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            out[name] = tensor
    return out


def _optimizer_tensors(learner: Learner) -> dict[str, Tensor]:
    names = {p: n for n, p in learner.policy.model.named_parameters()}
    return {
        f"{which}/{names[parameter]}/{key}": value
        for which, optimizer in learner.optimizers.items()
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def _load_optimizers(learner: Learner, tensors: Mapping[str, Tensor]) -> None:
    parameters: dict[str, Any] = dict(learner.policy.model.named_parameters())
    learner.optimizers.clear()
    for full, tensor in tensors.items():
        which, name, key = full.split("/")
        learner.optimizer(which).state[parameters[name]][key] = tensor


def _model_config(learner: Learner) -> str:
    config = learner.policy.model.config
    config.architectures = [type(learner.policy.model).__name__]
    return str(config.to_json_string())


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    # The metadata is what transformers asks for, and an empty file without any is one that safetensors cannot read.
    save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, path, metadata={"format": "pt"})


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _digest(path: Path, sync: bool) -> str:
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _own(path: Path) -> Path:
    """A new directory that is named after `path`: an earlier write that was given up may still go on in its own."""
    for number in itertools.count():
        with contextlib.suppress(FileExistsError):
            own = path.with_name(f"{path.name}.{number}")
            own.mkdir(parents=True)
            return own
    raise AssertionError("numbers do not end")


def _swap(temporary: Path, final: Path) -> None:
    if final.exists():
        old = final.with_name(f".old-{final.name}")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        temporary.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        temporary.rename(final)
