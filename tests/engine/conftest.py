from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollart.engine.network import BlockedLinear
from tests.engine import models


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Also initializes oneDNN once (0.4 s), outside the first test that multiplies with it."""
    torch.set_num_threads(1)
    matrix = BlockedLinear(torch.zeros(256, 256))
    matrix.pack()
    matrix(torch.zeros(2, 256))


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 checkpoint of two layers, weights of seed 0."""
    return models.publish(tmp_path_factory.mktemp("qwen"), 0)


@pytest.fixture(scope="session")
def qwen_next(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return models.publish(tmp_path_factory.mktemp("qwen_next"), 1)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama checkpoint of one layer: untied, llama3 rope scaling, transformers-4 layout."""
    return models.publish(tmp_path_factory.mktemp("llama"), 2, models.LLAMA)


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen 3.5 checkpoint of three layers, two of which have linear attention."""
    return models.publish(tmp_path_factory.mktemp("hybrid"), 3, models.HYBRID)


@pytest.fixture(params=["shm", "socket"])
def shm(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Directory of the engines' shared memory for KV hand-off; empty for sockets."""
    return str(tmp_path) if request.param == "shm" else ""
