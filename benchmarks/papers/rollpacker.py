"""Rows of RollPacker: one batch after another under the product's control plane, rounds by its own tail batching.

Conditions. RollPacker's artefact (github.com/Farrrrland/RollPacker) states of its evaluation: Qwen2.5-7B with answers
of 8k, "the minimal model size", on 16 H800, the minimal scale; batches of 128 prompts x 8; a third each of math, math
with a judge, and code (0.34375, 0.34375, 0.3125); a limit of 30 s per code reward. RP-2 has 14B with 16k on 32 H800.
That 32B has 32k and 64 GPUs continues the series and is not stated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from benchmarks.papers.row import Claim, Figure, Found, Row
from benchmarks.papers.workloads import cap_answers
from benchmarks.papers.world import Bed, Serving, Task, mean, play
from rollart.model import Trajectory
from rollart.sim.workload import PRESETS, entity_generator
from rollart.strategies.tp_change import TensorParallelRule, TensorParallelState, next_tensor_parallelism

__all__ = ["ROWS"]

RESPONSES = 8
SIZES = {"7B": (8_192, 16, 1), "14B": (16_384, 32, 2), "32B": (32_768, 64, 4)}
"""Most tokens of an answer, GPUs in all, and GPUs of a rollout engine."""
MIX = {"math": 44, "judge": 44, "code": 40}
"""Prompts of a step by domain."""
REWARD_S = {"math": 2.0, "code": 30.0}
"""The limits of one reward (RollPacker §3.3): some response of a batch reaches it. A stage of its own lasts so long."""
CODE_HANGS = 0.05
"""Share of code prompts whose tests run into the limit (RollPacker §3.3)."""


@dataclass(frozen=True, slots=True)
class _Steps:
    """Mean seconds of a step, of the rollout and the training in it, and by the kind of its round."""

    mean: float
    rollout: float
    train: float
    kinds: Mapping[str, float]
    counts: Mapping[str, int]


@cache
def _played(model: str, gpus: int, eta: float | None, seed: int, stage_s: float, *, overlapped: bool = False) -> _Steps:
    """Five steps under tail batching at eta, or two of veRL. `overlapped`: rewards are computed as responses end."""
    cap, _, tp = SIZES[model]
    answers = cap_answers(PRESETS["math_14b"], cap)
    bed = Bed(
        f"Qwen2.5-{model}",
        tuple(Task(name, answers, prompts * RESPONSES, RESPONSES) for name, prompts in MIX.items()),
        (Serving("H800", gpus // tp, tp, slots=2048),),
        ("H800", gpus),
        steps=2 if eta is None else 5,
        tail=eta,
        stage_s=0.0 if overlapped else stage_s,
        reward=_reward_s if overlapped else None,
        seed=seed,
    )
    done = play(bed)
    took = dict[str, list[float]]()
    for kind, seconds in zip(done.kinds, done.steps_s(), strict=False):
        took.setdefault(kind, []).append(seconds)
    train = done.train_s() - bed.stage_s
    kinds = {k: mean(v) for k, v in took.items()}
    return _Steps(done.step_s(), done.rollout_s(), train, kinds, {k: len(v) for k, v in took.items()})


def _reward_s(trajectory: Trajectory) -> float:
    """Of one reward: the tests of one code prompt in twenty hang until the limit; all else is quick."""
    if trajectory.domain != "code":
        return 0.0
    hangs = entity_generator("tests", trajectory.domain, trajectory.seed).random() < CODE_HANGS
    return REWARD_S["code"] if hangs else 0.0


def _steps(model: str, eta: float | None, seed: int, *, overlapped: bool = False) -> _Steps:
    return _played(model, SIZES[model][1], eta, seed, REWARD_S["code"], overlapped=overlapped)


def _shares(seeds: int) -> Found:
    runs = [_steps("14B", None, s) for s in range(seeds)]
    rollout, train = mean([r.rollout for r in runs]), mean([r.train for r in runs])
    figures: list[Figure] = []
    for kind, (a, b, c) in {"math": (72, 5, 23), "code": (66, 13, 21)}.items():
        whole = rollout + REWARD_S[kind] + train
        figures += [
            Figure(f"{kind} rollout %", a, 100 * rollout / whole),
            Figure(f"{kind} reward %", b, 100 * REWARD_S[kind] / whole),
            Figure(f"{kind} training %", c, 100 * train / whole, tuned=kind == "math"),
        ]
    ordered = rollout > train > REWARD_S["math"]
    return Found(
        tuple(figures),
        (Claim("rollout > training > reward", ordered),),
        f"rollout {rollout:.0f} s, training {train:.0f} s",
    )


def _kinds(seeds: int) -> Found:
    figures: list[Figure] = []
    claims: list[Claim] = []
    published = {"7B": (106, 302), "14B": (129, 261), "32B": (134, 771)}
    for model, (short, long) in published.items():
        runs = [_steps(model, 1.25, s) for s in range(seeds)]
        seen = {k: mean([r.kinds[k] for r in runs]) for k in ("short", "long")}
        figures += [Figure(f"{model} short s", short, seen["short"]), Figure(f"{model} long s", long, seen["long"])]
        claims.append(Claim(f"{model}: long rounds take longer", seen["long"] > 1.5 * seen["short"]))
        counts = all(dict(r.counts) == {"short": 4, "long": 1} for r in runs)
        claims.append(Claim(f"{model}: four short rounds to one long", counts))
    return Found(tuple(figures), tuple(claims))


def _gain(model: str, seeds: int, *, overlapped: bool = False) -> float:
    """Seconds of a step of veRL over those with tail batching."""
    plain = mean([_steps(model, None, s).mean for s in range(seeds)])
    return plain / mean([_steps(model, 1.25, s, overlapped=overlapped).mean for s in range(seeds)])


def _tail(seeds: int) -> Found:
    published = {"7B": (1.30, 2.01), "14B": (1.48, 1.99), "32B": (2.21, 2.48)}
    alone = {m: _gain(m, seeds) for m in published}
    both = {m: _gain(m, seeds, overlapped=True) for m in published}
    figures = (
        *(Figure(f"tail batching, {m}", p, alone[m]) for m, (p, _) in published.items()),
        *(Figure(f"and rewards as responses end, {m}", p, both[m]) for m, (_, p) in published.items()),
    )
    claims = (
        Claim("tail batching is faster", min(alone.values()) > 1),
        Claim("it gains more the larger the model", alone["7B"] < alone["14B"] < alone["32B"]),
        Claim("overlapped rewards add to it", all(both[m] > alone[m] for m in published)),
    )
    return Found(figures, claims)


def _rewards(seeds: int) -> Found:
    published = {"7B": 1.48, "14B": 1.35, "32B": 1.18}
    gain = {m: _gain(m, seeds, overlapped=True) / _gain(m, seeds) for m in published}
    figures = tuple(Figure(f"rewards as responses end, {m}", p, gain[m]) for m, p in published.items())
    claims = (
        Claim("faster than a stage of their own", min(gain.values()) > 1),
        Claim("less so the longer the rollout", gain["7B"] > gain["14B"] > gain["32B"]),
    )
    return Found(figures, claims)


RAMP = (8_192, 16_384, 32_768)
"""Most tokens of an answer while training goes on (RP-7)."""
TP_RULE = TensorParallelRule(sizes=(1, 2, 4, 8), devices=8)


@dataclass(frozen=True, slots=True)
class _Rollouts:
    """Mean seconds of rollouts by kind of round, and preemptions of all."""

    short_s: float
    long_s: float
    preemptions: int

    @property
    def mean(self) -> float:
        return (4 * self.short_s + self.long_s) / 5


def _ramped(cap: int, tp: int, eta: float | None) -> Bed:
    task = Task("math", cap_answers(PRESETS["math_14b"], cap), 128 * RESPONSES, RESPONSES)
    fleet = (Serving("H800", 32 // tp, tp, slots=2048),)
    return Bed("Qwen2.5-14B", (task,), fleet, ("H800", 32), steps=1 if eta is None else 5, tail=eta)


@cache
def _cycle(cap: int, tp: int) -> _Rollouts:
    """Four short rounds and a long one."""
    done = play(_ramped(cap, tp, 1.25))
    took = done.rollouts_s()
    return _Rollouts(mean(took[:4]), took[4], sum(e.preemptions for e in done.engines))


def _throughput(tp: int) -> float:
    """Tokens/s of a batch without tail batching, at the length that training begins with: the offline profile."""
    done = play(_ramped(RAMP[0], tp, None))
    return done.passed[0].tokens / done.rollout_s()


def _fastest(throughput: Mapping[int, float]) -> int:
    """The initial TP size from a profile; ties go to the smallest."""
    return min(throughput, key=lambda tp: (-throughput[tp], tp))


def _planner(seeds: int) -> Found:
    """A separate size for each kind of round, as the product's policy chooses after every round."""
    first = _fastest({tp: _throughput(tp) for tp in TP_RULE.sizes})
    states = {"short": TensorParallelState(first), "long": TensorParallelState(first)}
    gain: list[float] = []
    short: list[float] = []
    sizes: list[str] = []
    preempted = 0
    for cap in RAMP:
        at = {kind: _cycle(cap, state.tp) for kind, state in states.items()}
        alone = _cycle(cap, 1)
        ours = _Rollouts(at["short"].short_s, at["long"].long_s, 0)
        gain.append(alone.mean / ours.mean)
        short.append(alone.short_s / ours.short_s)
        sizes.append("/".join(str(s.tp) for s in states.values()))
        preempted += alone.preemptions
        for kind, rounds in (("short", 4), ("long", 1)):
            for _ in range(rounds):
                states[kind], _why = next_tensor_parallelism(TP_RULE, states[kind], at[kind].preemptions // rounds)
    figures = (
        Figure("rollouts, planner over TP 1", 1.9, mean(gain)),
        Figure("short rounds, planner over TP 1", 1.11, mean(short), most=1.28),
    )
    claims = (
        Claim("the planner is faster than TP 1 at every length", min(gain) > 1),
        Claim("long rounds gain more than short ones", mean(gain) > mean(short)),
    )
    note = f"TP of short/long rounds at 8k, 16k, 32k: {', '.join(sizes)}; {preempted} preemptions with TP 1"
    return Found(figures, claims, note)


def _scaling(seeds: int) -> Found:
    sizes = (32, 64, 128)

    def rate(gpus: int, eta: float | None) -> float:
        return 1 / mean([_played("14B", gpus, eta, s, REWARD_S["code"]).mean for s in range(seeds)])

    plain, ours = ({n: rate(n, eta) for n in sizes} for eta in (None, 1.25))
    published = {32: (1.0, 2.22), 64: (1.42, 3.37), 128: (2.18, 4.81)}
    figures = [Figure(f"veRL, {n} GPUs", published[n][0], plain[n] / plain[32]) for n in sizes[1:]]
    figures += [
        Figure(f"RollPacker's scaling, {n} GPUs", published[n][1] / 2.22, ours[n] / ours[32]) for n in sizes[1:]
    ]
    sublinear = plain[32] < plain[64] < plain[128] < 4 * plain[32]
    claims = (
        Claim("more GPUs are faster, less than proportionally", sublinear),
        Claim("tail batching is faster at every size", all(ours[n] > plain[n] for n in sizes)),
    )
    note = "tail batching over veRL: " + ", ".join(f"{ours[n] / plain[n]:.2f}" for n in sizes)
    return Found(tuple(figures), claims, note)


ROWS = (
    Row(
        "RP-2",
        "what a step of veRL is made of",
        "Qwen2.5-14B/16k, 32 H800, 128 prompts x 8",
        _shares,
        "the reward stage of math is taken at the limit of one reward, 2 s; the published 5 % is of whole "
        "batches on shared CPUs",
    ),
    Row(
        "RP-3",
        "over veRL: tail batching, then overlapped rewards",
        "7B/8k, 14B/16k, 32B/32k on 16, 32, 64 H800; eta 1.25; math, judge, code",
        _tail,
        "all models are given the lengths of 14B",
    ),
    Row(
        "RP-6",
        "seconds of short and long steps",
        "as RP-3",
        _kinds,
        "lengths are 14B's whatever the model, and nobody published what share of answers runs away: it decides how "
        "long a long round trains",
    ),
    Row(
        "RP-7",
        "tensor parallelism by the planner over TP 1",
        "14B on 32 H800, tail batching, answers up to 8k, 16k, 32k",
        _planner,
        "KV of 1,600 answers with a median of 544 tokens fits 32 H800, so nothing is preempted and the gain is "
        "latency; published preemptions (-13.8 %) are of longer answers, whose lengths are not stated",
    ),
    Row(
        "RP-8",
        "rewards as responses end over a reward stage",
        "as RP-3, under tail batching; limits, judge sharing and layer streaming are not simulated",
        _rewards,
        "the judge's part of the stage is not modelled: it lasts as long as the code's limit, 30 s",
    ),
    Row(
        "RP-10",
        "scaling",
        "14B/16k on 32, 64, 128 H800",
        _scaling,
        "a rollout here waits for its longest answer, which no GPU shortens, and the fixed part of training "
        "does not shrink; the published one was bound by throughput",
    ),
)
