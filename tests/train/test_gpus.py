"""Each rank has its own GPU, or the ranks are refused; no test needs a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import TCPStore

from rollart.errors import UsageError
from rollart.train.ranks import refuse_shared, select_gpu


def gpu(patch: pytest.MonkeyPatch, local: int, here: int, visible: int, variable: str | None) -> int:
    patch.setattr("torch.cuda.is_available", lambda: True)
    patch.setattr("torch.cuda.device_count", lambda: visible)
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        patch.setenv("CUDA_VISIBLE_DEVICES", variable)
    return select_gpu(local, here)


def test_the_ranks_of_a_host_take_the_visible_gpus_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [gpu(monkeypatch, local, 4, 4, "4,5,6,7") for local in range(4)] == [0, 1, 2, 3]
    assert gpu(monkeypatch, 2, 1, 3, None) == 2, "started by hand, told its number"


@pytest.mark.parametrize(("local", "here", "visible"), [(0, 2, 1), (1, 2, 1), (1, 1, 1), (7, 8, 4)])
def test_more_ranks_than_gpus_are_refused_before_anything_is_loaded(
    local: int, here: int, visible: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=rf"{max(here, local + 1)} ranks on this host .* torch sees {visible} "):
        gpu(monkeypatch, local, here, visible, "0")


def test_the_refusal_says_what_makes_gpus_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"\(CUDA_VISIBLE_DEVICES is '3'\) \(lower parallel.ranks"):
        gpu(monkeypatch, 0, 2, 1, "3")
    with pytest.raises(UsageError, match=r"CUDA_VISIBLE_DEVICES is not set"):
        gpu(monkeypatch, 0, 2, 1, None)


def test_without_a_gpu_there_is_none_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UsageError, match="torch sees no CUDA device"):
        select_gpu(0, 1)


@pytest.mark.parametrize(("gpus", "refused"), [(("x", "y", "x", "y"), True), (("x", "y", "z"), False)])
def test_every_rank_learns_that_two_share_a_gpu(gpus: tuple[str, ...], refused: bool) -> None:
    """Each rank has its own connection, like a process."""
    size = len(gpus)
    stores = [TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)]
    stores += [TCPStore("127.0.0.1", stores[0].port, size, is_master=False) for _ in gpus[1:]]

    def meet(rank: int) -> str:
        try:
            refuse_shared(stores[rank], gpus[rank], rank=rank, size=size)
        except UsageError as error:
            return error.message
        return ""

    with ThreadPoolExecutor(size) as pool:
        said = list(pool.map(meet, range(size)))
    assert said == [f"ranks 0 and 2 share the GPU {gpus[0]} (rule: one each)" if refused else ""] * size
