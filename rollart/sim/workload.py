"""The work of simulated trajectories: turns, tokens, seconds of environments, bytes of reward payloads.

A `WorkloadShape` describes a task domain; `PRESETS` has the published ones. `GeneratedWorkload` draws trajectories from
a shape; `ReplayedWorkload` repeats those of a recorded run. Both give a `Script`: all of a trajectory, drawn when it is
reset, a pure function of (seed, prompt, member). Every entity has its own generator, made from a 64-bit hash of the
run's seed and the entity's id, so that other entities and their order change nothing.

Lengths of answers are log-normal, the logarithm split between prompt and member, so that answers to one prompt resemble
each other. A run-away prompt has answers of 25 to 32 times the median, up to the cap, which is the cause of long
rollout tails (RollPacker §2, RA-25).

Token mass: in the simulated world a token id is the number of real tokens that it stands for. The memory and time per
turn of a simulated trajectory are then independent of its token counts: an observation of 512 tokens is the text "512"
and one id, an answer of 8,000 tokens is one id too. The context of a request is the sum of its ids. Counts that engines
report (prompt and cached tokens) are real tokens; counts that the product makes itself (`len(token_ids)`) are pieces.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import NamedTuple, Protocol

from rollart.ledger.reader import FinishedRow
from rollart.model import TrainSample


class Script(NamedTuple):
    """One trajectory from beginning to end. Of each turn: tokens shown, tokens answered, seconds of the step."""

    shown: tuple[int, ...]
    answers: tuple[int, ...]
    reset_s: float
    step_s: tuple[float, ...]
    payload_bytes: int = 0
    """Size of the reward's payload."""
    reward: float = 1.0
    """Its reward, unless the simulated domain draws rewards."""

    @property
    def turns(self) -> int:
        return len(self.answers)


class Workload(Protocol):
    """Where an environment's script comes from. `member` counts the resets of one prompt."""

    def script(self, prompt: int, member: int) -> Script: ...


class Distribution(Protocol):
    """A number at least 0. `draw` uses the generator alone."""

    def draw(self, rng: Random) -> float: ...


def entity_generator(*parts: str | int) -> Random:
    """The generator of an entity."""
    text = ":".join(map(str, parts)).encode()
    return Random(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big"))


@dataclass(frozen=True, slots=True)
class Constant:
    value: float

    def draw(self, rng: Random) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class Normal:
    """Normal, clipped at 0, as RollArt's experiment with N(10, σ) seconds of environment needs (RA-12)."""

    mean: float
    sigma: float

    def draw(self, rng: Random) -> float:
        return max(0.0, rng.gauss(self.mean, self.sigma))


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal by its median and the standard deviation of its logarithm, clipped to [low, high]."""

    median: float
    sigma: float
    low: float = 0.0
    high: float = math.inf

    def draw(self, rng: Random) -> float:
        drawn = self.median * math.exp(self.sigma * rng.gauss(0.0, 1.0))
        if drawn < self.low:
            return self.low
        return drawn if drawn < self.high else self.high


@dataclass(frozen=True, slots=True)
class ParetoTailed:
    """A body, and with probability `share` a Pareto tail from `start` with exponent `alpha`, cut at `high` (RA-5)."""

    body: Distribution
    share: float
    start: float
    alpha: float
    high: float = math.inf

    def draw(self, rng: Random) -> float:
        if rng.random() >= self.share:
            return self.body.draw(rng)
        return min(self.high, self.start * math.pow(1.0 - rng.random(), -1.0 / self.alpha))


_NONE = Constant(0.0)


@dataclass(frozen=True, slots=True)
class AnswerLengths:
    """Tokens of one answer: median, sigma of the logarithm, the share of its variance that is the prompt's, and
    `runaways`: the share of prompts whose answers run away, each with `likely` probability."""

    median: float
    sigma: float
    cap: int
    prompt_share: float = 0.5
    runaways: float = 0.0
    likely: float = 0.75
    farthest: tuple[float, float] = (25.0, 32.0)


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """A task domain. `context` ends a trajectory that would grow beyond it, in tokens."""

    turns: Distribution
    first: Distribution
    observation: Distribution
    answers: AnswerLengths
    reset_s: Distribution = _NONE
    step_s: Distribution = _NONE
    payload_bytes: Distribution = _NONE
    context: int = 32_768
    most_turns: int = 1_000


MAX_REMEMBERED_PROMPTS = 4096
"""Prompts whose draws are kept: a generator costs 10 us, and the members of a group are reset close to each other."""


class GeneratedWorkload:
    """Trajectories of a shape (implements `Workload`)."""

    def __init__(self, shape: WorkloadShape, seed: int, *, name: str = "") -> None:
        self.shape = shape
        self._seed, self._name = seed, name
        self._prompt = lru_cache(MAX_REMEMBERED_PROMPTS)(self._draw_prompt)

    def script(self, prompt: int, member: int) -> Script:
        shape, a = self.shape, self.shape.answers
        prompt_level, runs_away, first = self._prompt(prompt)
        rng = entity_generator(self._seed, self._name, prompt, member)
        member_share = math.sqrt(1.0 - a.prompt_share)
        count = min(max(1, round(shape.turns.draw(rng))), shape.most_turns)
        shown: list[int] = []
        answers: list[int] = []
        total = 0
        for turn in range(count):
            shown_tokens = max(1, round(shape.observation.draw(rng))) if turn else min(first, shape.context - 1)
            if runs_away and rng.random() < a.likely:
                answer = a.median * rng.uniform(*a.farthest)
            else:
                answer = a.median * math.exp(a.sigma * (prompt_level + member_share * rng.gauss(0.0, 1.0)))
            room = shape.context - total - shown_tokens
            if room < 1:
                break
            shown.append(shown_tokens)
            answers.append(max(1, min(round(answer), a.cap, room)))
            total += shown_tokens + answers[-1]
        steps = tuple(shape.step_s.draw(rng) for _ in answers)
        payload = round(shape.payload_bytes.draw(rng))
        return Script(tuple(shown), tuple(answers), shape.reset_s.draw(rng), steps, payload)

    def _draw_prompt(self, prompt: int) -> tuple[float, bool, int]:
        """The draws that a prompt's trajectories share: the level of answer lengths, whether they run away, and the
        tokens of the prompt."""
        shape, a = self.shape, self.shape.answers
        rng = entity_generator(self._seed, self._name, prompt)
        prompt_level = math.sqrt(a.prompt_share) * rng.gauss(0.0, 1.0)
        return prompt_level, rng.random() < a.runaways, max(1, round(shape.first.draw(rng)))


class ReplayedWorkload:
    """Trajectories of a recorded run (implements `Workload`). Their sums are exact; within one, turns are alike.

    `groups` are the trajectories to one prompt each. They are given out to prompts in their order, over and over, or,
    with `resample`, drawn by (seed, prompt). A prompt of which more members are asked for than its group has is given
    another group as well.
    """

    def __init__(self, groups: Sequence[Sequence[Script]], *, seed: int = 0, resample: bool = False) -> None:
        if not groups or not all(groups):
            raise ValueError("no trajectory to replay (rule: at least one that finished)")
        self.groups = tuple(map(tuple, groups))
        self._seed, self._resample = seed, resample
        self._next = 0
        self._given: dict[int, list[Script]] = {}

    def script(self, prompt: int, member: int) -> Script:
        given = self._given.setdefault(prompt, [])
        while len(given) <= member:
            if self._resample:
                given += self.groups[entity_generator(self._seed, prompt, len(given)).randrange(len(self.groups))]
            else:
                given += self.groups[self._next % len(self.groups)]
                self._next += 1
        return given[member]


def scripts_by_group(rows: Iterable[FinishedRow]) -> dict[str, tuple[tuple[Script, ...], ...]]:
    """Scripts of each group, by domain, in the order of their first rows; a row without a group is one of its own. The
    sums of a trajectory are spread evenly over its turns."""
    found: dict[str, dict[str, list[Script]]] = {}
    for n, row in enumerate(rows):
        turns = max(row.turns, 1)
        shown = (max(row.first_tokens, 1), *_parts(row.tokens - row.action_tokens - row.first_tokens, turns - 1))
        answers, step_s = _parts(row.action_tokens, turns), (row.env_s / turns,) * turns
        script = Script(shown, answers, row.reset_s, step_s, reward=1.0 if row.score is None else row.score)
        found.setdefault(row.domain, {}).setdefault(row.group or f"row {n}", []).append(script)
    return {domain: tuple(map(tuple, groups.values())) for domain, groups in sorted(found.items())}


def _parts(total: int, count: int) -> tuple[int, ...]:
    """`total` in `count` whole parts as equal as can be, none below 1."""
    if not count:
        return ()
    base, more = divmod(max(total, count), count)
    return (base + 1,) * more + (base,) * (count - more)


_RESET = ParetoTailed(LogNormal(10.0, 0.8), share=0.02, start=60.0, alpha=1.1, high=900.0)
"""Containers: seconds as a rule, hundreds in the tail (RA-5). The body's median and the tail's share are ours."""


PRESETS: Mapping[str, WorkloadShape] = {
    "swe": WorkloadShape(
        turns=Normal(40, 6),
        first=LogNormal(2_000, 0.5, high=12_000),
        observation=LogNormal(400, 0.7, high=8_000),
        answers=AnswerLengths(220, 0.8, cap=4_096, prompt_share=0.3),
        reset_s=_RESET,
        step_s=LogNormal(1.0, 1.0, high=60.0),
        payload_bytes=LogNormal(10_000, 1.5, high=5_200_000),
        most_turns=50,
    ),
    "frozenlake": WorkloadShape(
        turns=LogNormal(36, 0.25, low=10, high=100),
        first=Constant(800),
        observation=Normal(800, 60),
        answers=AnswerLengths(18, 0.3, cap=512),
        step_s=Constant(0.02),
        most_turns=100,
    ),
    "webshop": WorkloadShape(
        turns=LogNormal(40, 0.35, low=3, high=100),
        first=LogNormal(800, 0.3),
        observation=LogNormal(700, 0.6),
        answers=AnswerLengths(60, 0.6, cap=1_024),
        reset_s=LogNormal(2.0, 0.5),
        step_s=LogNormal(0.3, 0.6),
        most_turns=100,
    ),
    "gem_math": WorkloadShape(
        turns=LogNormal(3, 0.3, low=1, high=5),
        first=LogNormal(500, 0.3),
        observation=LogNormal(500, 0.3),
        answers=AnswerLengths(1_400, 0.85, cap=16_384, runaways=0.01),
        step_s=LogNormal(0.3, 0.8),
    ),
    "gem_game": WorkloadShape(
        turns=LogNormal(4, 0.3, low=1, high=5),
        first=LogNormal(300, 0.3),
        observation=LogNormal(120, 0.4),
        answers=AnswerLengths(700, 0.8, cap=8_192, runaways=0.01),
        step_s=Constant(0.01),
    ),
    "math_14b": WorkloadShape(
        turns=Constant(1),
        first=LogNormal(150, 0.4, high=2_000),
        observation=Constant(1),
        answers=AnswerLengths(544, 0.859, cap=16_384, runaways=0.02),
        payload_bytes=LogNormal(3_000, 1.0, high=5_200_000),
    ),
    "production": WorkloadShape(
        turns=ParetoTailed(LogNormal(6, 1.0, low=1, high=48), share=0.005, start=60, alpha=1.3, high=480),
        first=LogNormal(3_000, 0.8, high=12_000),
        observation=LogNormal(300, 0.9, high=8_000),
        answers=AnswerLengths(600, 0.9, cap=46_000, runaways=0.005),
        reset_s=_RESET,
        step_s=LogNormal(1.0, 1.2, high=600.0),
        payload_bytes=LogNormal(10_000, 1.5, high=5_200_000),
        context=131_072,
        most_turns=480,
    ),
}
"""Published shapes (RollArt Table 1 and §8, RA-5, RA-25; RollPacker RP-1) by name.

Published: turns (SWE 30–50, FrozenLake and WebShop 30–100, GEM at most 5, production 1–48 with more than 40 times the
mean), context, caps, prompts up to 12k and answers up to 46k tokens in production, payloads, and of `math_14b` the
median 544 and third quartile 971 (sigma 0.859) with a longest of 25 to 32 medians. FrozenLake's tokens are chosen so
that RA-3's 0.53 comes out within its 32k of context, and GEM-Math's 500 and 2,000 (mean) are the placer's for RA-3.
Their other figures (tokens of other domains, seconds of steps, the share of run-away prompts) are not published and
therefore assumed.
"""


class MassTokenizer:
    """Implements `ports.Tokenizer`: decimal numbers separated by spaces are masses. ValueError for any other text, and
    for a mass below 1: a piece without tokens is invalid."""

    def encode(self, text: str) -> tuple[int, ...]:
        masses = tuple(map(int, text.split()))
        if masses and min(masses) < 1:
            raise ValueError(f"mass {min(masses)} in {text!r} (rule: at least 1 token)")
        return masses

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def token(self, token_id: int) -> str:
        return str(token_id)

    def token_id(self, text: str) -> int:
        masses = self.encode(text)
        if len(masses) != 1:
            raise ValueError(f"{text!r} is {len(masses)} pieces (rule: exactly one)")
        return masses[0]


def mass_of(token_ids: Iterable[int]) -> int:
    """Real tokens that the ids stand for."""
    return sum(token_ids)


def sampled_mass(sample: TrainSample) -> int:
    """Real tokens with loss in a sample."""
    return sum(m for m, trained in zip(sample.token_ids, sample.loss_mask, strict=True) if trained)
