"""Trains the reward model of the lake: a small network from an observation to the number of moves to the goal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rollart.adapters.envs.frozen_lake import Lake, distances, draw_lake
from rollart.quickstart.rewards.distance_model import WEIGHTS, features

FAR = 8.0
"""Label of a cell without a path to the goal, holes included: the length of an episode."""

_LAKES = 3000
_HIDDEN = 128
_EPOCHS = 12
_BATCH = 512


def train(out_dir: str, seed: int) -> str:
    """Write `distance_model.safetensors` for 4x4 lakes and return its path. About 4 CPU seconds, one thread.

    Learns from training lakes only. Meant for a process of its own: it imports torch.
    """
    import torch
    from safetensors.torch import save

    torch.manual_seed(seed)
    data = [rows for i in range(_LAKES) for rows in examples(draw_lake(i))]
    x = torch.tensor(np.stack([row for row, _ in data]))
    y = torch.tensor([label for _, label in data])
    net = torch.nn.Sequential(
        torch.nn.Linear(x.shape[1], _HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(_HIDDEN, _HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(_HIDDEN, 1),
    )
    steps = _EPOCHS * (len(y) // _BATCH)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=steps)
    for _ in range(_EPOCHS):
        order = torch.randperm(len(y))
        for start in range(0, len(y) - _BATCH + 1, _BATCH):
            rows = order[start : start + _BATCH]
            loss = torch.nn.functional.mse_loss(net(x[rows])[:, 0], y[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    path = Path(out_dir) / WEIGHTS
    path.parent.mkdir(parents=True, exist_ok=True)
    linear = [layer for layer in net if isinstance(layer, torch.nn.Linear)]
    named = {f"{i}.weight": layer.weight.detach() for i, layer in enumerate(linear)}
    named |= {f"{i}.bias": layer.bias.detach() for i, layer in enumerate(linear)}
    path.write_bytes(save(named))
    return str(path)


def examples(lake: Lake) -> Iterator[tuple[np.ndarray, float]]:
    """Every cell of a lake as (row of features, moves left)."""
    grid = " ".join("".join(lake.rows))
    places = [divmod(cell, lake.size) for cell in range(lake.size**2)]
    rows = features([f"{grid} at:{row},{col}" for row, col in places])
    for row, moves in zip(rows, distances(lake), strict=True):
        yield row, FAR if moves is None else float(moves)
