"""FrozenLake as a conversation: Gymnasium's environment as text, one legal action word per turn.

Every observation names the direction of the goal and the cells next to the player; the whole grid is shown on the first
turn only, so a trajectory is many prompt tokens and one action token per turn (prefill-heavy).
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Any

from rollart.adapters.envs.split import held_out_item, held_out_seed
from rollart.model import Observation, Step

ACTIONS = ("left", "down", "right", "up")
"""Action words in the order of Gymnasium's action numbers 0 to 3."""

_MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
_TERRAIN = {"F": "ice", "S": "ice", "H": "hole", "G": "goal"}
_DOMAIN = "<lake>"
_QUESTION = "move?"


@dataclass(frozen=True, slots=True)
class Lake:
    """A square map: cells are numbered row by row from 0."""

    size: int
    holes: frozenset[int]
    start: int
    goal: int

    @property
    def rows(self) -> list[str]:
        """The map as Gymnasium's `desc`: S start, G goal, H hole, F frozen."""
        cells = ["F"] * (self.size * self.size)
        for hole in self.holes:
            cells[hole] = "H"
        cells[self.start], cells[self.goal] = "S", "G"
        return ["".join(cells[r : r + self.size]) for r in range(0, len(cells), self.size)]


class FrozenLakeText:
    """One player on a non-slippery lake; pays 1 on reaching the goal, ends in a hole or after `max_turns`.

    Implements `rollart.ports.Environment`. `reset(seed)` draws a lake of its own per seed; seeds from
    `rollart.ports.EVAL_SEEDS_FROM` on draw lakes that no training seed ever shows. An invalid action word is a lost
    turn, not an error: the policy's text is the policy's responsibility. The last step's metadata has `observations`
    (every text, the final one included), `env_rewards` and `success`, which the reward functions read.
    """

    quick = True

    def __init__(self, *, size: int = 4, holes: int = 3, max_turns: int = 8, min_distance: int = 2) -> None:
        if not 2 <= size <= 9:
            raise ValueError(f"size must be 2 to 9 cells, got {size}")
        if not 0 <= holes <= size * size - 2:
            raise ValueError(f"holes must leave room for start and goal on {size}x{size} cells, got {holes}")
        if not 1 <= min_distance <= min(max_turns, 2 * (size - 1)):
            raise ValueError(
                f"min_distance must be within 1 and {min(max_turns, 2 * (size - 1))} (turns, map), got {min_distance}"
            )
        from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

        self._make = FrozenLakeEnv
        self._size = size
        self._holes = holes
        self._max_turns = max_turns
        self._min_distance = min_distance
        self._env: Any = None
        self._rows: list[str] = []
        self._goal = 0
        self._observations: list[str] = []
        self._rewards: list[float] = []

    async def reset(self, seed: int) -> Observation:
        lake = draw_lake(
            seed, size=self._size, holes=self._holes, min_distance=self._min_distance, max_distance=self._max_turns
        )
        self._rows = lake.rows
        self._goal = lake.goal
        # The class itself, not gymnasium.make: its wrappers cost more than the step.
        self._env = self._make(desc=self._rows, is_slippery=False)
        state, _ = self._env.reset(seed=seed)
        grid = " ".join("".join(self._rows))
        text = f"{_DOMAIN} {grid} {self._describe(int(state))}"
        self._observations, self._rewards = [text], []
        return Observation(text, actions=ACTIONS, max_tokens=1)

    async def step(self, action: str) -> Step:
        if self._env is None:
            raise RuntimeError("step before reset")
        word = action.strip()
        state, reward, terminated = int(self._env.s), 0.0, False
        if word in ACTIONS:
            state, reward, terminated, _, _ = self._env.step(ACTIONS.index(word))
        text = self._describe(int(state))
        self._observations.append(text)
        self._rewards.append(float(reward))
        done = bool(terminated) or len(self._rewards) >= self._max_turns
        observation = Observation(text, actions=None if done else ACTIONS, max_tokens=1)
        if not done:
            return Step(observation, float(reward))
        success = reward > 0
        metadata = {"observations": self._observations, "env_rewards": self._rewards, "success": success}
        return Step(observation, float(reward), done=True, success=success, metadata=metadata)

    async def close(self) -> None:
        self._env = None

    def _describe(self, state: int) -> str:
        size, (row, col) = self._size, divmod(state, self._size)
        here = _TERRAIN[self._rows[row][col]]
        if here != "ice":
            return f"at:{row},{col} on:{here}"
        goal_row, goal_col = divmod(self._goal, size)
        vertical = "down" if goal_row > row else "up" if goal_row < row else "level"
        horizontal = "right" if goal_col > col else "left" if goal_col < col else "level"
        words = [f"at:{row},{col}", f"goal:{vertical},{horizontal}"]
        for name, (down, right) in zip(ACTIONS, _MOVES, strict=True):
            r, c = row + down, col + right
            inside = 0 <= r < size and 0 <= c < size
            words.append(f"{name}:{_TERRAIN[self._rows[r][c]] if inside else 'edge'}")
        return " ".join([*words, _QUESTION])


def draw_lake(seed: int, *, size: int = 4, holes: int = 3, min_distance: int = 2, max_distance: int = 8) -> Lake:
    """The lake of a seed: solvable within `max_distance` moves, start and goal at least `min_distance` moves apart.

    Pure: the same seed and options give the same lake in every process.
    """
    rng = random.Random(seed)
    wanted = held_out_seed(seed)
    for _ in range(10_000):
        start, goal, *hole_cells = rng.sample(range(size * size), holes + 2)
        lake = Lake(size, frozenset(hole_cells), start, goal)
        if held_out_item("".join(lake.rows)) is not wanted:
            continue
        distance = distances(lake)[start]
        if distance is not None and min_distance <= distance <= max_distance:
            return lake
    raise ValueError(
        f"no lake of {size}x{size} cells with {holes} holes has start and goal {min_distance} to {max_distance} moves "
        f"apart in 10,000 draws: ask for fewer holes or a shorter distance"
    )


def distances(lake: Lake) -> list[int | None]:
    """Moves from each cell to the goal without touching a hole; None if there is no such path (holes included)."""
    found: list[int | None] = [None] * (lake.size * lake.size)
    found[lake.goal] = 0
    queue = deque([lake.goal])
    while queue:
        cell = queue.popleft()
        row, col = divmod(cell, lake.size)
        here = found[cell]
        assert here is not None
        for down, right in _MOVES:
            r, c = row + down, col + right
            neighbour = r * lake.size + c
            inside = 0 <= r < lake.size and 0 <= c < lake.size
            if inside and neighbour not in lake.holes and found[neighbour] is None:
                found[neighbour] = here + 1
                queue.append(neighbour)
    return found


def lake_words(size: int = 4) -> tuple[str, ...]:
    """Every word that an observation or an action may contain, for a word-level tokenizer."""
    positions = [f"at:{r},{c}" for r in range(size) for c in range(size)]
    goals = [f"goal:{v},{h}" for v in ("up", "down", "level") for h in ("left", "right", "level")]
    neighbours = [f"{name}:{cell}" for name in ACTIONS for cell in ("ice", "hole", "goal", "edge")]
    return (_DOMAIN, _QUESTION, *ACTIONS, *"SFHG", *positions, *goals, *neighbours, "on:hole", "on:goal")
