"""Snapshots: the state of a learner at one moment, this rank's share of it, from which a version is written."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

import torch
from torch import Tensor

from rollart.train.learner import Learner, LearnerCounters
from rollart.train.lora import AdaptedTensor, adapter_tensors, published_tensors
from rollart.train.pieces import TensorRows, file_buckets, row_range
from rollart.train.shard import local_rows

MODEL, OPTIMIZER = "model.safetensors", "trainer/optimizer.safetensors"

ADAPTER = "adapter"
"""Stands in for the optimizer's name in tensor names of `trainer/`, for adapters, which belong to no optimizer."""


@dataclasses.dataclass(frozen=True, slots=True)
class LearnerSnapshot:
    """A learner's state at one moment. `files`: the files that this rank writes; `index`: the file of each tensor, if
    there are several files."""

    files: Mapping[str, Mapping[str, Tensor | TensorRows]]
    index: str | None
    config: str
    counters: LearnerCounters
    durable: bool


def take_snapshot(learner: Learner, *, copy: bool) -> LearnerSnapshot:
    """The learner's current state. All ranks must call it. A copy is in host memory and remains unchanged while the
    learner continues; without `copy`, the tensors are the learner's own. Several ranks always copy."""
    learner.policy.reshard()
    state, model = _state_tensors(learner), published_tensors(learner.policy.model)
    if learner.ranks.size == 1:
        index: str | None = None
        files = {MODEL: _whole_tensors(model), OPTIMIZER: state}
        files = {name: _copied(tensors) for name, tensors in files.items()} if copy else files
    else:
        files, index = _sharded_files(learner, model)
        rank, size = learner.ranks.rank, learner.ranks.size
        files[f"trainer/optimizer-{rank + 1:05d}-of-{size:05d}.safetensors"] = _copied(state)
    counters = dataclasses.replace(learner.counters)
    return LearnerSnapshot(files, index, _model_config(learner), counters, learner.config.durable)


def _whole_tensors(model: Mapping[str, AdaptedTensor]) -> dict[str, Tensor | TensorRows]:
    """In a single process: every tensor with its adapter merged."""
    with torch.no_grad():
        return {name: m.merge([local_rows(part) for part in m.parts], m.scale) for name, m in model.items()}


def _sharded_files(
    learner: Learner, model: Mapping[str, AdaptedTensor]
) -> tuple[dict[str, dict[str, Tensor | TensorRows]], str]:
    """This rank's files of whole tensors, and the index of all files. Tensors are assembled one at a time, on the rank
    that writes them: no rank holds more than its share, and every byte crosses the network once."""
    ranks = learner.ranks
    sizes = {name: m.base.numel() * m.base.element_size() for name, m in model.items()}
    planned = file_buckets(sizes, ranks=ranks.size, limit=learner.config.parallel.bucket_mb * 10**6)
    files: dict[str, dict[str, Tensor | TensorRows]] = {}
    place = {}
    for number, bucket in enumerate(planned, start=1):
        file = f"model-{number:05d}-of-{len(planned):05d}.safetensors"
        mine: dict[str, Tensor | TensorRows] = {}
        for name in bucket.names:
            place[name] = file
            parts = [ranks.assemble(local_rows(p), of=p.shape[0], owner=bucket.owner) for p in model[name].parts]
            if bucket.owner == ranks.rank:
                mine[name] = AdaptedTensor.merge([p for p in parts if p is not None], model[name].scale)
        if mine:
            files[file] = mine
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": {n: place[n] for n in model}}
    return files, json.dumps(index)


def _state_tensors(learner: Learner) -> dict[str, Tensor | TensorRows]:
    """State for `restore_version` besides the weights: this rank's rows of the optimizers' state and of adapters."""
    names = {p: n for n, p in learner.policy.model.named_parameters()}
    whole = {
        f"{which}/{names[parameter]}/{key}": value
        for which, optimizer in learner.optimizers.items()
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }
    whole |= {f"{ADAPTER}/{name}/weight": p for name, p in adapter_tensors(learner.policy.model).items()}
    rank, size = learner.ranks.rank, learner.ranks.size
    if size == 1:
        return {name: local_rows(tensor) for name, tensor in whole.items()}
    out: dict[str, Tensor | TensorRows] = {}
    for name, tensor in whole.items():
        if not tensor.ndim:
            if rank == 0:
                out[name] = tensor
            continue
        start, stop = row_range(tensor.shape[0], rank=rank, ranks=size)
        if stop > start:
            out[name] = TensorRows(local_rows(tensor), start, tensor.shape[0])
    return out


def _model_config(learner: Learner) -> str:
    config = learner.policy.model.config
    config.architectures = [type(learner.policy.model).__name__]
    return str(config.to_json_string())


def _copied(tensors: Mapping[str, Tensor | TensorRows]) -> dict[str, Tensor | TensorRows]:
    return {
        name: TensorRows(_copied_tensor(t.tensor), t.start, t.of) if isinstance(t, TensorRows) else _copied_tensor(t)
        for name, t in tensors.items()
    }


def _copied_tensor(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
