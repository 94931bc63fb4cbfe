"""The trainer's memory and time: the state of its devices, their compute time, and the useful number of devices.

The model assumes fully sharded data parallelism (FSDP, ZeRO-3): weights, gradients and optimizer state are cut over all
devices, a micro-batch belongs to one device, or to a group of `split` devices that share its sequences. Every device
gathers the weights for the forward and the backward pass of each micro-batch, and reduces the gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from placement.architecture import DecoderShape
from placement.problem import Problem, TrainingConstants, TrainingWork
from placement.roofline import ACTIVATION_BYTES, RING_SHARE
from placement.types import Pool

LARGEST_SHARE = 0.25
"""Of a pool that the smallest trainer may take where a layout that computes less needs more devices. A guess; RollArt
trains on 32 of 128 GPUs."""


@dataclass(frozen=True, slots=True)
class TrainingLayout:
    """How a pool trains: `split` devices share a sequence, activations are recomputed in the backward pass or kept.

    `least` devices hold everything. Of more than `most`, some have less than a full micro-batch in an optimizer step:
    they shorten it little. `work`: device-seconds of one trajectory of the mix. `state_gb` (weights, gradients and
    optimizer state) is divided over the devices; the other figures are of each device.
    """

    split: int
    recompute: bool
    least: int
    most: int
    work: float
    state_gb: float
    activations_gb: float
    logits_gb: float
    reserve_gb: float


def training_layout(problem: Problem, pool: Pool, train: TrainingWork) -> TrainingLayout | str:
    """The training layout of this pool: the least arithmetic among the layouts whose smallest trainer is a modest part
    of the pool, or that fit the given number of devices. A string gives the reason that the pool cannot train."""
    if train.pool is not None and train.pool != pool.name:
        return f"training is fixed to {train.pool}"
    device = pool.device
    if train.seconds_per_token is None and device.tflops_bf16 is None:
        return f"tflops_bf16 of {device.name} is not stated: nothing is trained on {pool.name}"
    if device.is_cpu:
        return _cpu_layout(problem, pool, train)
    if device.memory_gb is None:
        return f"memory of {device.name} is not stated: nothing is trained on {pool.name}"
    # Powers of two within a host. Devices without a host size are taken one by one.
    powers = tuple(2**i for i in range((device.devices_per_host or 1).bit_length()))
    splits = powers if train.split is None else (train.split,)
    options = (train.recompute,) if train.recompute is not None else (False, True)
    found = [_gpu_layout(problem, pool, train, split, again) for split in splits for again in options]
    fit = [one for one in found if not isinstance(one, str)]
    if not fit:
        return str(found[-1])
    smallest = min(one.least for one in fit)
    room = max(smallest, train.devices or LARGEST_SHARE * pool.count)
    return min((one for one in fit if one.least <= room), key=lambda one: (one.work, one.least))


def mfu(problem: Problem, pool: Pool, train: TrainingWork) -> float:
    """The share of the dense peak that a step reaches on this pool, communication and recomputation included."""
    found = training_layout(problem, pool, train)
    if isinstance(found, str) or pool.device.tflops_bf16 is None:
        return train.constants.mfu
    return _flops(problem) * train.epochs / (found.work * pool.device.tflops_bf16 * 1e12)


def fit_training_constants(
    problem: Problem,
    pool: Pool,
    train: TrainingWork,
    *,
    seconds_per_token: float,
    peak: tuple[float, float] | None = None,
) -> TrainingConstants:
    """The constants under which a pool's trainer takes the measured device-seconds per token of a batch and, given the
    `peak` (GB that a device reached, tokens of its largest micro-batch), needs that memory."""
    constants = train.constants
    if isinstance(training_layout(problem, pool, train), TrainingLayout):
        low, high = 1e-3, 1.0
        for _ in range(40):
            constants = replace(constants, mfu=math.sqrt(low * high))
            found = training_layout(problem, pool, replace(train, constants=constants))
            assert isinstance(found, TrainingLayout), "the memory does not depend on the speed"
            slow = found.work / _tokens(problem) > seconds_per_token
            low, high = (constants.mfu, high) if slow else (low, constants.mfu)
    if peak is not None and train.devices is not None:
        gb, tokens = peak
        asked = replace(train, sequence=math.ceil(tokens), microbatch_tokens=0)
        # The embedded trainer computes again only where it is asked to, and cuts no sequence.
        expected = sum(_sequence_gb(problem, asked, recompute=bool(train.recompute))) / train.constants.activations
        left = gb - _state_gb(problem, train) / train.devices
        if expected > 0 and left > 0:
            constants = replace(constants, activations=left / expected)
    return constants


def adapter_parameters(shape: DecoderShape, rank: int, targets: tuple[str, ...]) -> float:
    """Parameters of low-rank adapters of the named linear modules (`all-linear`: all but the output layer)."""
    chosen = (shape.linears[name] for name in shape.linears if "all-linear" in targets or name in targets)
    return float(sum(rank * (a + b) * count for a, b, count in chosen))


def _cpu_layout(problem: Problem, pool: Pool, train: TrainingWork) -> TrainingLayout | str:
    state = _state_gb(problem, train)
    activations, logits = _sequence_gb(problem, train, recompute=bool(train.recompute))
    need = state + activations + logits
    if pool.memory_gb is not None and need > pool.memory_gb:
        return f"training needs {need:.4g} GB, and {pool.name} has {pool.memory_gb:g} GB"
    compute = _compute_s(problem, pool, train, recompute=bool(train.recompute))
    return TrainingLayout(1, bool(train.recompute), 1, pool.count, compute, state, activations, logits, 0.0)


def _gpu_layout(problem: Problem, pool: Pool, train: TrainingWork, split: int, recompute: bool) -> TrainingLayout | str:
    constants, memory = train.constants, pool.device.memory_gb or 0.0
    state = _state_gb(problem, train)
    activations, logits = (gb / split for gb in _sequence_gb(problem, train, recompute=recompute))
    reserve = memory * constants.reserve
    left = memory - reserve - activations - logits
    if left <= 0:
        return (
            f"training does not fit on {pool.name} with any number of devices: a sequence of {train.sequence:,} tokens "
            f"needs {activations:.3g} GB of activations and {logits:.3g} GB of logits on each of {split} devices that "
            f"share it, beside {reserve:.3g} GB of reserve, of {memory:g} GB; lower placement.train.sequence or "
            "model.context"
        )
    least = split * math.ceil(max(1, math.ceil(state / left)) / split)
    compute = _compute_s(problem, pool, train, recompute=recompute)
    work = compute
    if train.seconds_per_token is None:
        moved = _communication_s(problem, pool, train, split, recompute, alone=(train.devices or pool.count) == 1)
        longer, shorter = max(compute, moved), min(compute, moved)
        work = longer + (1 - constants.overlap) * shorter
    most = max(least, int(train.batch * _tokens(problem) / train.minibatches / _microbatch_tokens(problem, train)))
    return TrainingLayout(split, recompute, least, most, work, state, activations, logits, reserve)


def _state_gb(problem: Problem, train: TrainingWork) -> float:
    total = problem.performance.shape.parameters
    trained = total if train.trained_parameters is None else train.trained_parameters
    frozen = 0.0 if train.trained_parameters is None else total * train.frozen_bytes_per_parameter
    return (train.bytes_per_parameter * trained + frozen) / 1e9


def _sequence_gb(problem: Problem, train: TrainingWork, *, recompute: bool) -> tuple[float, float]:
    """Activations and logits of the largest micro-batch. A sequence is never cut over micro-batches."""
    shape, constants = problem.performance.shape, train.constants
    tokens = float(max(train.sequence, train.microbatch_tokens if train.sequence else 0))
    activations = shape.activation_bytes(tokens, recompute=recompute)
    return constants.activations * activations / 1e9, (
        constants.activations * constants.logit_copies * shape.logit_bytes(tokens) / 1e9
    )


def _tokens(problem: Problem) -> float:
    """Mean tokens of a trajectory of the mix."""
    return sum(d.weight * d.total_tokens for d in problem.domains) / sum(d.weight for d in problem.domains)


def _microbatch_tokens(problem: Problem, train: TrainingWork) -> float:
    """Tokens of a full micro-batch."""
    return max(_tokens(problem), train.microbatch_tokens, 1.0)


def _flops(problem: Problem) -> float:
    """Model FLOPs to train on one trajectory of the mix once."""
    shape, total = problem.performance.shape, sum(d.weight for d in problem.domains)
    return sum(d.weight / total * shape.train_flops(d.total_tokens, d.total_tokens / 2) for d in problem.domains)


def _compute_s(problem: Problem, pool: Pool, train: TrainingWork, *, recompute: bool) -> float:
    """Device-seconds of arithmetic for a trajectory. A forward pass is a third of the FLOPs; frozen weights have no
    gradient, which is another; recomputation is a second forward pass."""
    if train.seconds_per_token is not None:
        return train.seconds_per_token * _tokens(problem) * train.epochs
    share = (2 / 3 if train.trained_parameters is not None else 1.0) + (1 / 3 if recompute else 0.0)
    peak = (pool.device.tflops_bf16 or 0.0) * 1e12 * train.constants.mfu
    return _flops(problem) * share * train.epochs / peak


def _communication_s(
    problem: Problem, pool: Pool, train: TrainingWork, split: int, recompute: bool, *, alone: bool
) -> float:
    """Device-seconds of communication for a trajectory: weights and gradients per micro-batch, and activations between
    the devices that share a sequence (per layer four gathers and four reductions, half as many more to recompute:
    Korthikanti et al., arXiv 2205.05198, section 4.2)."""
    if alone:
        return 0.0
    shape, device, constants = problem.performance.shape, pool.device, train.constants
    nvlink = device.nvlink_gb_per_s
    inside = constants.pcie_gb_per_s * constants.pcie_share if nvlink is None else nvlink / 2 * RING_SHARE
    passes = 2 if train.trained_parameters is not None else 3
    weights = passes * ACTIVATION_BYTES * shape.parameters / 1e9
    gathered = weights / inside
    per_host = device.devices_per_host or 1
    if pool.count > per_host:
        between_hosts = constants.host_gb_per_s  # of one host, in one direction
        own = next((link for link in problem.links if link.a == link.b == pool.name), None)
        if own is not None:  # the bandwidth of the whole pool, which one half can send to the other
            between_hosts = own.gb_per_s / max(1.0, pool.count / per_host / 2)
        elif device.link_gb_per_s is not None:
            between_hosts = device.link_gb_per_s * per_host
        gathered = max(gathered, weights / between_hosts)
    tokens = _microbatch_tokens(problem, train)
    between = 12 if recompute else 8
    shared = between * ACTIVATION_BYTES * shape.layers * shape.hidden * tokens / 1e9 * (split - 1) / split / inside
    return (gathered + shared) * split * _tokens(problem) / tokens * train.epochs
