"""Redundancy and tail batching in real runs: by how much they shorten the rollout, against order statistics.

    python -m benchmarks.rollout_real [--scale 0.5] [--steps 10] [--only NAME] [--json]

Each run is `rollart launch` with the quickstart's model in the embedded engine's own process, under sync_plus, with
environments that sleep once: log-normal with a part of the prompt's (a long task stays long) and one of the
trajectory's. The rollout of a step is read from the ledger, from the first begin to the last end of the trajectories
that the step trained. The prediction knows the exact draws and nothing of the runtime: the last of a batch, of the
first n, of a round. The compared figure is the shortening: the rollout without a policy over the rollout with it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from rollart.control.domain import training_seed
from rollart.model import Observation, Step

ROOT = Path(__file__).parents[1]

PROMPT_SIGMA, OWN_SIGMA, LONGEST = 0.8, 0.5, 12.0
"""The log-normal sleep in units of its median: sigma of the shared part, sigma of the member's own part, and
cut-off."""

WANTED = 0.15
"""Largest deviation of a shortening from its prediction."""

GROUPS, SIZE = 8, 4

POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "size 1.5": {"redundancy": {"size": 1.5}},
    "groups 1.25": {"redundancy": {"groups": 1.25}},
    "tail batching": {"tail_batching": {"eta_prompts": 1.25, "eta_responses": 1.25}},
}


def sleep_s(seed: int, member: int, scale: float) -> float:
    """Seconds that the `member`-th trajectory of a prompt sleeps."""
    shared = random.Random(seed).lognormvariate(0.0, PROMPT_SIGMA)
    own = random.Random(f"{seed}:{member}").lognormvariate(0.0, OWN_SIGMA)
    return scale * min(shared * own, LONGEST)


class Sleeper:
    """One turn: shows a prompt, sleeps, and pays a coin's throw. Members are counted in the order they are reset in."""

    members: ClassVar[Counter[int]] = Counter()

    def __init__(self, *, scale: float) -> None:
        self._scale = scale
        self._seconds = self._pay = 0.0

    async def reset(self, seed: int) -> Observation:
        member = Sleeper.members[seed]
        Sleeper.members[seed] += 1
        self._seconds = sleep_s(seed, member, self._scale)
        self._pay = float(random.Random(f"{seed}:{member}:pay").random() < 0.5)
        return Observation("move?", ("left", "down"), 1)

    async def step(self, action: str) -> Step:
        await asyncio.sleep(self._seconds)
        return Step(Observation("done"), self._pay, True, bool(self._pay))

    async def close(self) -> None:
        return None


def spec(rollout: Mapping[str, Any], *, steps: int, scale: float, seed: int = 0) -> dict[str, Any]:
    """The run: the quickstart's policy and tokenizer, `GROUPS` groups of `SIZE` a step."""
    return {
        "name": "sleepers",
        "seed": seed,
        "steps": steps,
        "schedule": "sync_plus",
        "staleness": 0,
        "model": {
            "init": "rollart.quickstart.policy_config:policy_config",
            "tokenizer": "rollart.quickstart.tokenizer:write_tokenizer",
            "context": 256,
        },
        "batch": {"trajectories": GROUPS * SIZE},
        "domains": [
            {
                "name": "sleeper",
                "environment": "benchmarks.rollout_real:Sleeper",
                "environment_args": {"scale": scale},
                "group_size": SIZE,
                "max_turns": 1,
                "max_tokens": 1,
            }
        ],
        "rollout": dict(rollout),
        "training": {"lr": 1e-4},
    }


CLUSTER: dict[str, Any] = {
    "name": "two-cores",
    "pools": [{"name": "here", "device": "cpu", "count": 2}],
    "engines": {"count": 1, "threads": 1, "max_slots": 64},
    "trainer": {"threads": 1},
    "functions": {"backend": "local"},
    "environments": {"workers": 0},
}


@dataclass
class Prompts:
    """The run's prompts in order, and how often each was begun."""

    scale: float
    seed: int = 0

    def __post_init__(self) -> None:
        self._begun: Counter[int] = Counter()

    def draws(self, index: int, count: int) -> list[float]:
        """Sleeps of the next `count` members of a prompt, ascending."""
        first = self._begun[index]
        self._begun[index] += count
        seed = training_seed(self.seed, "sleeper", index)
        return sorted(sleep_s(seed, m, self.scale) for m in range(first, first + count))


def predicted(rollout: Mapping[str, Any], *, steps: int, scale: float, seed: int = 0) -> list[float]:
    """Seconds of each step's rollout by order statistics of the draws."""
    prompts = Prompts(scale, seed)
    if (tail := rollout.get("tail_batching")) is not None:
        return _rounds(prompts, steps, tail["eta_prompts"], tail["eta_responses"])
    more = rollout.get("redundancy", {})
    launched, members = math.floor(GROUPS * more.get("groups", 1.0)), math.floor(SIZE * more.get("size", 1.0))
    found = []
    for step in range(steps):
        ends = sorted(prompts.draws(i, members)[SIZE - 1] for i in range(step * launched, (step + 1) * launched))
        found.append(ends[GROUPS - 1])
    return found


def _rounds(prompts: Prompts, steps: int, eta_prompts: float, eta_responses: float) -> list[float]:
    """Tail batching (RollPacker §3.1): the first `GROUPS` of a short round; all of a long one."""
    launched, members = math.floor(GROUPS * eta_prompts), math.floor(SIZE * eta_responses)
    deferred: list[int] = []
    found, drawn = [], 0
    for _ in range(steps):
        if len(deferred) >= GROUPS:
            long, deferred = deferred[:GROUPS], deferred[GROUPS:]
            found.append(max(prompts.draws(i, SIZE)[-1] for i in long))
            continue
        ends = sorted((prompts.draws(i, members)[SIZE - 1], i) for i in range(drawn, drawn + launched))
        drawn += launched
        deferred += [i for _, i in ends[GROUPS:]]
        found.append(ends[GROUPS - 1][0])
    return found


def measured(directory: Path) -> list[float]:
    """Seconds of each step's rollout, from a run's ledger."""
    with _ledger(directory) as db:
        rows = db.execute(
            "SELECT s.version, max(t.t1) - min(t.t0) FROM trajectories t JOIN samples s ON s.id = t.id "
            "WHERE s.state = 1 GROUP BY s.version ORDER BY s.version"
        ).fetchall()
    return [seconds for _, seconds in rows]


def lost(directory: Path, steps: int) -> list[str]:
    """Violations of conservation: prompts that were neither trained once nor dropped with a reason of the policy."""
    with _ledger(directory) as db:
        groups = db.execute("SELECT id, state, reason FROM groups").fetchall()
        samples = db.execute("SELECT grp, count(*) FROM samples WHERE state = 1 GROUP BY grp").fetchall()
    wrong = [f"group {g} trained {n} samples" for g, n in samples if n != SIZE]
    trained = Counter(g.partition("~")[0] for g, state, _ in groups if state == 1)
    wrong += [f"prompt {g} trained {n} times" for g, n in trained.items() if n != 1]
    if sum(trained.values()) != steps * GROUPS:
        wrong.append(f"{sum(trained.values())} prompts trained, not {steps * GROUPS}")
    for group, state, reason in groups:
        put_off = reason == "deferred" and group.partition("~")[0] in trained
        if state == 0 or (state == 2 and reason != "redundant" and not put_off):
            wrong.append(f"group {group} is {'live' if state == 0 else reason}")
    return wrong


def play(home: Path, rollout: Mapping[str, Any], *, steps: int, scale: float) -> Path:
    """Start `rollart launch` in separate processes and return the run's directory. RuntimeError with its output if it
    fails."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "run.yaml").write_text(yaml.safe_dump(spec(rollout, steps=steps, scale=scale)))
    (home / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    done = subprocess.run(
        [sys.executable, "-m", "rollart.cli.main", "launch", "run.yaml", "--cluster", "cluster.yaml"],
        cwd=home,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"the run ended with {done.returncode}:\n{done.stderr}")
    return home / "runs" / "sleepers-1"


@dataclass(frozen=True, slots=True)
class Row:
    """One policy: mean seconds of a step's rollout, and by how much it is shorter than without."""

    policy: str
    predicted_s: float
    measured_s: float
    predicted_gain: float
    measured_gain: float
    lost: Sequence[str]

    @property
    def deviation(self) -> float:
        return self.measured_gain / self.predicted_gain - 1.0


def compare(
    home: Path, names: Sequence[str], *, steps: int, scale: float, say: Callable[[str], None] = lambda _: None
) -> list[Row]:
    """Play the policies, `none` first."""
    rows: list[Row] = []
    for name in ["none", *(n for n in names if n != "none")]:
        directory = play(home / name.replace(" ", "-"), POLICIES[name], steps=steps, scale=scale)
        theory, real = sum(predicted(POLICIES[name], steps=steps, scale=scale)), sum(measured(directory))
        without = rows[0] if rows else None
        row = Row(
            name,
            theory / steps,
            real / steps,
            without.predicted_s * steps / theory if without else 1.0,
            without.measured_s * steps / real if without else 1.0,
            lost(directory, steps),
        )
        rows.append(row)
        say(
            f"{row.policy:14} rollout {row.predicted_s:6.2f} s predicted, {row.measured_s:6.2f} s measured; shorter "
            f"{row.predicted_gain:5.2f}x predicted, {row.measured_gain:5.2f}x measured: {row.deviation:+7.1%}"
            f"{'' if abs(row.deviation) <= WANTED else '  MISS'}"
            f"{'' if not row.lost else '  NOT CONSERVED: ' + '; '.join(row.lost[:3])}"
        )
    return rows


@contextlib.contextmanager
def _ledger(directory: Path) -> Any:
    with contextlib.closing(sqlite3.connect(f"file:{directory / 'ledger.sqlite'}?mode=ro", uri=True)) as connection:
        yield connection


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=0.5, help="median sleep in seconds")
    parser.add_argument("--steps", type=int, default=10, help="a multiple of 5: four short rounds, one long")
    parser.add_argument("--only", choices=list(POLICIES), action="append")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    say: Callable[[str], None] = (lambda _: None) if arguments.json else print
    say(f"load average {os.getloadavg()[0]:.1f}; {arguments.steps} steps of {GROUPS} x {SIZE}")
    with tempfile.TemporaryDirectory() as home:
        rows = compare(
            Path(home), arguments.only or list(POLICIES), steps=arguments.steps, scale=arguments.scale, say=say
        )
    if arguments.json:
        print(json.dumps([{**{k: getattr(r, k) for k in Row.__slots__}, "deviation": r.deviation} for r in rows]))
    return 1 if any(row.lost for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
