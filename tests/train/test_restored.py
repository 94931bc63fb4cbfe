"""Device placement of a restored optimizer's state, for a device that this machine need not have."""

from __future__ import annotations

import pytest
import torch

from rollart.train.checkpoint import restored_moment
from rollart.train.server import CommandMessage, run_command


def test_all_of_a_parameters_state_lies_beside_it_the_count_of_updates_too() -> None:
    """Fused kernels on a GPU read the count there: in host memory it would be an illegal address."""
    parameter = torch.empty((3, 4), device="meta")
    count = restored_moment(parameter, torch.tensor(7.0))
    assert (count.device.type, count.shape, count.dtype) == ("meta", (), torch.float32)
    assert restored_moment(parameter, torch.ones(3, 4)).device.type == "meta"
    assert restored_moment(torch.empty(2), torch.tensor(7.0)).item() == 7.0


def test_a_step_without_memory_says_what_to_lower(capsys: pytest.CaptureFixture[str]) -> None:
    def work(_: CommandMessage) -> CommandMessage:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation")

    outcome = run_command(work, b"\x80")
    assert outcome.error == "no memory is left on the GPU: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert "max_tokens_per_microbatch" in outcome.remedy
    assert not outcome.sound
    assert capsys.readouterr().err == "rollart.train: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
