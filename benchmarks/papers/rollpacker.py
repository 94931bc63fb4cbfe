"""Rows of RollPacker: one rollout after another on modelled engines, ordered by the product's tail batching.

The rounds are played below the control plane, straight from the policy's own state machine.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.papers.models import shape, steps
from benchmarks.papers.row import Claim, Figure, Found, Row
from benchmarks.papers.tuned import TRAIN_FIXED_S, TRAIN_MFU
from placement.hardware import device
from rollart.model import GenerateRequest, PauseMode, Sampling
from rollart.policy.tailbatch import Response, Round, RoundKind, TailBatching, TailDomain
from rollart.sim import loop as virtual
from rollart.sim.engines import ModelledEngine
from rollart.sim.trainers import TrainerSpeed
from rollart.sim.workload import PRESETS, Generated, capped

__all__ = ["ROWS"]

PROMPTS, RESPONSES = 128, 8
CAP = 16_384
TP = {"7B": 1, "14B": 2, "32B": 4}
REWARD_S = {"math": 2.0, "code": 30.0}
"""The limits of one reward (RollPacker §3.3): some response of a batch reaches it."""


@dataclass
class _Steps:
    """Seconds of each step by the kind of its round, and of the rollout in them."""

    seconds: dict[RoundKind, list[float]] = field(default_factory=lambda: {k: [] for k in RoundKind})
    rollout: list[float] = field(default_factory=list)
    train: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return statistics.fmean(x for found in self.seconds.values() for x in found)


def _played(model: str, gpus: int, *, eta: float, rounds: int, seed: int, responses_eta: float | None = None) -> _Steps:
    """Tail batching at eta; 1 is no batching at all: every round is a batch that runs to its end."""
    return virtual.run(_run(model, gpus, eta, eta if responses_eta is None else responses_eta, rounds, seed))


async def _run(model: str, gpus: int, eta: float, responses_eta: float, rounds: int, seed: int) -> _Steps:
    loop, tp, name = asyncio.get_running_loop(), TP[model], f"Qwen2.5-{model}"
    engines = [ModelledEngine(f"e{i}", steps("H800", tp, name)) for i in range(gpus // tp)]
    drawn = Generated(capped(PRESETS["math_14b"], CAP), seed, name="math")
    trainer = TrainerSpeed(shape(name), device("H800"), gpus, mfu=TRAIN_MFU, seconds_per_step=TRAIN_FIXED_S)
    policy = TailBatching([TailDomain("math", PROMPTS, RESPONSES)], eta_prompts=eta, eta_responses=responses_eta)
    out, prompts = _Steps(), iter(range(10**6))
    for _ in range(rounds):
        fresh = [str(next(prompts)) for _ in range(policy.demand()["math"])]
        round_ = policy.next_round({"math": fresh})
        assert round_ is not None
        began = loop.time()
        lengths = await _rollout(engines, drawn, round_, policy)
        took, train = loop.time() - began, trainer.step_s(lengths)
        kind = round_.kind if eta > 1 else RoundKind.LONG
        out.seconds[kind].append(took + REWARD_S["math"] + train)
        out.rollout.append(took)
        out.train.append(train)
    return out


async def _rollout(engines: list[ModelledEngine], drawn: Generated, round_: Round, policy: TailBatching) -> list[int]:
    """Until the round is over; returns tokens of each sequence that is trained."""
    load = dict.fromkeys(range(len(engines)), 0)
    tasks: dict[Response, asyncio.Task[None]] = {}
    tokens: dict[Response, int] = {}
    trained: list[int] = []

    async def respond(response: Response, home: int) -> None:
        script = drawn.script(int(response.prompt), 100 * response.launch + response.index)
        tokens[response] = script.shown[0] + script.answers[0]
        request = GenerateRequest(
            f"{response.prompt}/{response.launch}/{response.index}", f"{response}", (script.shown[0],),
            Sampling(max_tokens=script.answers[0]),
        )  # fmt: skip
        try:
            await engines[home].generate(request)
        finally:
            load[home] -= 1
        effect = policy.finished(response)
        if effect.completed is not None:
            trained.extend(tokens[r] for r in effect.completed.responses)
        for other in effect.abort:
            tasks[other].cancel()

    async with asyncio.TaskGroup() as group:
        for response in round_.launch:
            home = min(load, key=lambda i: (load[i], i))
            load[home] += 1
            tasks[response] = group.create_task(respond(response, home))
    for engine in engines:
        await engine.pause(PauseMode.ABORT)
        await engine.resume()
    return trained


def _shares(seeds: int) -> Found:
    runs = [_played("14B", 32, eta=1.0, rounds=3, seed=s) for s in range(seeds)]
    rollout = statistics.fmean(x for r in runs for x in r.rollout)
    train = statistics.fmean(x for r in runs for x in r.train)
    figures: list[Figure] = []
    for kind, (a, b, c) in {"math": (72, 5, 23), "code": (66, 13, 21)}.items():
        whole = rollout + REWARD_S[kind] + train
        figures += [
            Figure(f"{kind} rollout %", a, 100 * rollout / whole),
            Figure(f"{kind} reward %", b, 100 * REWARD_S[kind] / whole),
            Figure(f"{kind} training %", c, 100 * train / whole, tuned=kind == "math"),
        ]
    ordered = rollout > train > REWARD_S["math"]
    return Found(tuple(figures), (Claim("rollout > training > reward", ordered),),
                 f"rollout {rollout:.0f} s, training {train:.0f} s")  # fmt: skip


def _kinds(seeds: int) -> Found:
    figures: list[Figure] = []
    claims: list[Claim] = []
    published = {"7B": (106, 302), "14B": (129, 261), "32B": (134, 771)}
    for model, (short, long) in published.items():
        runs = [_played(model, 32, eta=1.25, rounds=5, seed=s) for s in range(seeds)]
        seen = {k: statistics.fmean(x for r in runs for x in r.seconds[k]) for k in RoundKind}
        figures += [Figure(f"{model} short s", short, seen[RoundKind.SHORT]),
                    Figure(f"{model} long s", long, seen[RoundKind.LONG])]  # fmt: skip
        claims.append(
            Claim(f"{model}: long rounds at least twice the short", seen[RoundKind.LONG] > 2 * seen[RoundKind.SHORT])
        )
        counts = [(len(r.seconds[RoundKind.SHORT]), len(r.seconds[RoundKind.LONG])) for r in runs]
        claims.append(Claim(f"{model}: four short rounds to one long", set(counts) == {(4, 1)}))
    return Found(tuple(figures), tuple(claims))


def _tail(seeds: int) -> Found:
    published = {"7B": 1.30, "14B": 1.48, "32B": 2.21}
    gain: dict[str, float] = {}
    for model in published:
        plain = statistics.fmean(_played(model, 32, eta=1.0, rounds=5, seed=s).mean for s in range(seeds))
        ours = statistics.fmean(_played(model, 32, eta=1.25, rounds=5, seed=s).mean for s in range(seeds))
        gain[model] = plain / ours
    figures = tuple(Figure(f"tail batching {m}", p, gain[m]) for m, p in published.items())
    claims = (
        Claim("tail batching is faster", min(gain.values()) > 1),
        Claim("it gains more the larger the model", gain["7B"] < gain["14B"] < gain["32B"]),
    )
    return Found(figures, claims)


def _scaling(seeds: int) -> Found:
    def rate(gpus: int, eta: float) -> float:
        return 1 / statistics.fmean(_played("14B", gpus, eta=eta, rounds=5, seed=s).mean for s in range(seeds))

    sizes = (32, 64, 128)
    plain: Mapping[int, float] = {n: rate(n, 1.0) for n in sizes}
    ours: Mapping[int, float] = {n: rate(n, 1.25) for n in sizes}
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
    return Found(
        tuple(figures), claims, "tail batching over veRL: " + ", ".join(f"{ours[n] / plain[n]:.2f}" for n in sizes)
    )


ROWS = (
    Row("RP-2", "what a step of veRL is made of", "Qwen2.5-14B/16k, 32 H800, 128 prompts x 8", _shares,
        "the reward stage of math is taken at the limit of one reward, 2 s; the published 5 % is of whole "
        "batches on shared CPUs"),
    Row("RP-3", "tail batching alone over veRL", "as RP-2, eta 1.25, 7B / 14B / 32B", _tail,
        "every model is given the lengths of 14B, so all run away alike and the gain is that of lengths, "
        "where the published gain grows with the model, whose larger ones run away more often; and what a "
        "round costs besides its longest answer is too little here (RP-6)"),
    Row("RP-6", "seconds of short and long steps", "as RP-3", _kinds,
        "published short rounds take longer than their lengths explain (third quartile 971 tokens at 15 ms a "
        "token is 15 s): veRL's engines, weights moved between phases and code rewards are not modelled"),
    Row("RP-10", "scaling", "as RP-2, 32 / 64 / 128 H800", _scaling,
        "a rollout here waits for its longest answer, which no GPU shortens, and the fixed part of training "
        "does not shrink; the published one was bound by throughput"),
)  # fmt: skip
