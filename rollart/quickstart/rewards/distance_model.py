"""Reward model: the progress of each turn towards the goal.

A small network reads an observation's text and predicts the number of moves to the goal; the reward of a turn is
0.2 × (moves left before − moves left after). This is a potential-based shaping reward, which shows the policy early
which moves are good. A hole counts as far away.
Stands alone: numpy and safetensors. The weights are an artefact (`distance_model.safetensors`).
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from safetensors.numpy import load_file

WEIGHTS = "distance_model.safetensors"
SHAPING = 0.2
"""Reward per move closer: a whole path is worth about as much as reaching the goal."""


class DistanceModel:
    """`load` once per worker, then call with a batch of items."""

    def load(self, artefact_dir: str) -> None:
        weights = load_file(os.path.join(artefact_dir, WEIGHTS))
        self._layers = [(weights[f"{i}.weight"], weights[f"{i}.bias"]) for i in range(len(weights) // 2)]

    def __call__(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """`step_rewards` has one number per turn: the shaping of the move from one observation to the next.

        `aggregate_reward_score` is their sum. Reads `metadata.observations`, every observation of the episode
        in order, the final one included.
        """
        if not items:
            return []
        texts: list[list[str]] = [item["metadata"]["observations"] for item in items]
        left = self.distances(np.concatenate([features(episode) for episode in texts]))
        ends = np.cumsum([len(episode) for episode in texts])
        return [_answer(item["id"], moves) for item, moves in zip(items, np.split(left, ends[:-1]), strict=True)]

    def distances(self, x: Any) -> Any:
        """Moves left for rows of `features`, fp32 (n,)."""
        hidden = x
        for weight, bias in self._layers[:-1]:
            hidden = np.maximum(hidden @ weight.T + bias, 0.0)
        weight, bias = self._layers[-1]
        return (hidden @ weight.T + bias)[:, 0]


def features(observations: list[str]) -> Any:
    """One row per observation of an episode: the surroundings of the player, fp32 (n, 2 × (2 × size − 1)²).

    First a mask of closed cells (holes and cells beyond the edge), then one of the goal, both centred on the player.
    """
    words = observations[0].split()
    first = next(i for i, word in enumerate(words) if word.startswith("at:"))
    grid = words[first - int(first**0.5) ** 2 : first]  # the domain's mark stands before the square
    size = round(len(grid) ** 0.5)
    padded = np.ones((3 * size - 2, 3 * size - 2), dtype=np.float32)
    padded[size - 1 : 2 * size - 1, size - 1 : 2 * size - 1] = np.array([c == "H" for c in grid]).reshape(size, size)
    goal = np.zeros_like(padded)
    goal_row, goal_col = divmod(grid.index("G"), size)
    goal[goal_row + size - 1, goal_col + size - 1] = 1.0
    rows = []
    for text in observations:
        at = next(word for word in text.split() if word.startswith("at:"))
        row, col = (int(n) for n in at[3:].split(","))
        window = np.s_[row : row + 2 * size - 1, col : col + 2 * size - 1]
        rows.append(np.concatenate([padded[window].ravel(), goal[window].ravel()]))
    return np.stack(rows)


def _answer(item_id: str, moves: Any) -> dict[str, Any]:
    steps = [float(SHAPING * step) for step in moves[:-1] - moves[1:]]
    value = sum(steps)
    return {
        "id": item_id,
        "aggregate_reward_score": value,
        "metrics_list": [{"name": "moves_left", "value": float(moves[-1]), "type": "Metric"}],
        "step_rewards": steps,
    }
