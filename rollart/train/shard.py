"""Prepares a model for several devices: compilation, activation checkpointing, and sharded parameters (FSDP2).

Parameters keep their Hugging Face names, since no module is wrapped: a block's `forward` is replaced, and `fully_shard`
changes parameters in place.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rollart.learning import ParallelConfig
from rollart.train.ranks import Ranks


def prepare_model(
    scorer: nn.Module,
    blocks: Sequence[nn.Module],
    config: ParallelConfig,
    ranks: Ranks,
    dtype: torch.dtype | None = None,
) -> None:
    """Sharded parameters are converted to `dtype`, if given. `blocks`: the modules of `scorer` that are gathered, run
    and released one after the other; parameters outside all blocks (embeddings, head, norms) stay gathered during a
    step."""
    for block in blocks:
        if config.compile:
            block.forward = torch.compile(block.forward, dynamic=True)
        if config.activation_checkpointing:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    if ranks.mesh is not None:
        _shard(scorer, blocks, config, ranks, dtype)


def release_gathered(scorer: nn.Module) -> None:
    """Release gathered parameters."""
    from torch.distributed.fsdp import FSDPModule

    for part in scorer.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def full(tensor: Tensor) -> Tensor:
    """A scalar that the ranks share, as a plain tensor."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_rows(tensor: Tensor) -> Tensor:
    """The rows of a parameter on this rank; all rows if it is not sharded."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard(
    scorer: nn.Module, blocks: Sequence[nn.Module], config: ParallelConfig, ranks: Ranks, dtype: torch.dtype | None
) -> None:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if config.dtype == "bfloat16":
        # Gradients are summed over the ranks in full precision: a sum of 64 terms in bf16 loses its last bits.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in (*blocks, scorer):  # one at a time, which limits the peak memory of the conversion
        if dtype is not None:
            _convert(block, dtype)
        fully_shard(block, mesh=ranks.mesh, mp_policy=policy)
    for part in (*blocks, scorer):
        assert isinstance(part, FSDPModule)
        # The loss is a share of the whole mini-batch's (`losses.py`), so gradients are summed, not averaged.
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)


def _convert(block: nn.Module, dtype: torch.dtype) -> None:
    for parameter in block.parameters():
        if local_rows(parameter) is parameter:  # not sharded yet
            parameter.data = parameter.data.to(dtype)
