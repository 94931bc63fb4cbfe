"""Priced routing against fixed thresholds, on the product's gateway over queueing engines.

2 prefill engines (compute-rich) and 4 decode engines (bandwidth-rich) with the speeds of a 32B dense model at TP 4:
14,000 and 2,200 prefilled tokens/s. Trajectories of two kinds are always in flight: agentic ones (a prompt, then turns
of new tokens and 150 generated) and math ones (8,000 generated). The value of a turn follows from the mix; the prices
are the dual prices of the linear program of that mix, solved here.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from scipy.optimize import linprog

from rollart.fleet import EngineKind, EnginePlacement, EngineRole, RoutePrices, Routes
from rollart.leases import Leases
from rollart.ledger.intervals import EngineShares, ResourceClock
from rollart.model import EngineId, Sampling
from rollart.policy.routing import PREFILL_RULES, RoutingPolicy
from rollart.serving.engine_registry import GatewayLimits, SessionKv
from rollart.serving.gateway import Gateway
from rollart.sim import loop
from rollart.testing.ledger import MemoryRecorder
from rollart.testing.queueing import QueueEngine, QueueEngineSpeed, QueueTurnModel

PREFILLS, DECODES = 2, 4
SPEEDS = {"h800": QueueEngineSpeed(1 / 14_000), "h20": QueueEngineSpeed(1 / 2_200)}
TURNS, OUTPUT, MATH = 20, 150, 8_000
WARM_S, END_S = 60.0, 240.0


@dataclass(frozen=True)
class Workload:
    """`new` tokens per agentic turn; trajectories in flight of each kind; seconds in the environment; the value of a
    math token in agentic turns; the link."""

    new: int
    agentic: int
    math: int
    wait_s: float = 2.0
    token_worth: float = 1 / 2000
    latency_s: float = 0.02
    token_s: float = 2e-6


WORKLOADS = {
    "prefill engines are enough": Workload(new=1500, agentic=200, math=50),
    "prefill engines saturate": Workload(new=6000, agentic=200, math=20, token_worth=1 / 20_000),
    "nothing is scarce, the link is slow": Workload(new=400, agentic=12, math=4, latency_s=0.5, wait_s=0.2),
}


def planned(w: Workload) -> Routes:
    """Dual prices: max turns + worth × math tokens, over engine time and the trajectories there are."""
    sequences = (w.agentic + w.math) / DECODES
    context = 300 + TURNS / 2 * (w.new + OUTPUT)
    model = QueueTurnModel(SPEEDS, {"h20": sequences}, context, w.latency_s, w.token_s)
    step = SPEEDS["h20"].step(sequences, context)
    share, p, d = step / sequences, w.new / 14_000, w.new / 2_200
    # local turn, remote turn, math token: decode seconds, prefill seconds, agentic and math residence
    time = [[d + OUTPUT * share, OUTPUT * share, share], [0, p, 0]]
    stay = [[w.wait_s + d + OUTPUT * step, w.wait_s + p + w.latency_s + OUTPUT * step, 0], [0, 0, step]]
    bounds = [DECODES, PREFILLS, w.agentic, w.math]
    answer = linprog([-1, -1, -w.token_worth], A_ub=time + stay, b_ub=bounds, method="highs")
    decode, prefill, in_flight, _ = (-float(m) for m in answer.ineqlin.marginals)
    kinds = EngineKind("h20", EngineRole.DECODE, 4), EngineKind("h800", EngineRole.PREFILL, 4)
    prices = RoutePrices(dict(zip(kinds, (decode, prefill), strict=True)), in_flight=in_flight, target_s=2.0)
    return Routes(prices, model)


async def simulate(w: Workload, rule: str) -> tuple[float, float]:
    """Agentic turns/s and math tokens/s in the steady state."""
    recorder, now = MemoryRecorder(), asyncio.get_running_loop().time
    leases = Leases(recorder)
    seats = {f"p{i}": EnginePlacement("h800", "H800", EngineRole.PREFILL, 4) for i in range(PREFILLS)}
    seats |= {f"d{i}": EnginePlacement("h20", "H20", EngineRole.DECODE, 4) for i in range(DECODES)}
    gateway = Gateway(
        leases,
        limits=GatewayLimits(generate_s=1e5, handoff_s=1e5),
        version=0,
        on_suspect=lambda _: None,
        recorder=recorder,
        router=RoutingPolicy(planned(w), rule=PREFILL_RULES[rule]),
        seats=seats,
    )
    turns = tokens = 0

    def warm(session: str, index: int, tokens: int) -> None:
        """A trajectory in flight when the clock starts: its KV is on its sticky engine."""
        sticky = f"d{index % DECODES}"
        engines[sticky].kv[session] = tokens
        gateway.turns.sessions[session] = SessionKv(
            0, sticky=sticky, cached={sticky: tokens}, held=(sticky,), returned={"tokens": tokens}
        )
        gateway.registry.members[sticky].sessions.add(session)

    async def agentic(index: int) -> None:
        nonlocal turns
        for episode in range(10_000):
            session, length, start = f"a{index}.{episode}", 300, 0
            if episode == 0 and (start := index % TURNS):
                warm(session, index, 300 + start * (w.new + OUTPUT) - OUTPUT)
            for turn in range(start, TURNS):
                length = 300 + turn * (w.new + OUTPUT)
                await asyncio.sleep(w.wait_s * (0.5 + (index * 7 + turn * 13) % 11 / 10))
                await gateway.generate(
                    session,
                    range(length + w.new),
                    Sampling(OUTPUT),
                    spend=lambda _: None,
                    domain="agentic",  # type: ignore[arg-type]
                )
                turns += WARM_S <= now() < END_S
            await gateway.forget(session)

    async def math(index: int) -> None:
        nonlocal tokens
        for episode in range(10_000):
            session, start = f"m{index}.{episode}", 0
            if episode == 0 and (start := index % 16):
                warm(session, index, 500 + start * MATH // 16)
            # In pieces, so that tokens count when they are generated.
            for piece in range(start, 16):
                await gateway.generate(
                    session,
                    range(500 + piece * MATH // 16),
                    Sampling(MATH // 16),
                    spend=lambda _: None,
                    domain="math",  # type: ignore[arg-type]
                )
                tokens += (MATH // 16) * (WARM_S <= now() < END_S)
            await gateway.forget(session)

    async with asyncio.TaskGroup() as tasks:
        running = []
        engines: dict[str, QueueEngine] = {}
        for name, seat in seats.items():
            engine = engines[name] = QueueEngine(EngineId(name), SPEEDS[seat.pool], w.latency_s, w.token_s)
            clock = ResourceClock(role="engine", resource=name, recorder=recorder, clock=now)
            gateway.join(engine, version=0, shares=EngineShares(clock, clock=now))
            running.append(tasks.create_task(engine.run()))
        running += [tasks.create_task(agentic(i)) for i in range(w.agentic)]
        running += [tasks.create_task(math(i)) for i in range(w.math)]
        await asyncio.sleep(END_S)
        for task in running:
            task.cancel()
    return turns / (END_S - WARM_S), tokens / (END_S - WARM_S)


@pytest.mark.slow  # 15 runs of four simulated minutes: ten seconds of CPU
def test_priced_is_never_behind_the_best_rule_and_ahead_of_each_somewhere() -> None:
    worth: dict[str, dict[str, float]] = {}
    for name, w in WORKLOADS.items():
        worth[name] = {}
        for rule in PREFILL_RULES:
            turns, tokens = loop.run(simulate(w, rule))
            worth[name][rule] = turns + w.token_worth * tokens
            print(f"{name:38} {rule:12} {turns:6.2f} turns/s {tokens:8.0f} math tok/s  worth {worth[name][rule]:6.2f}")
    for name, by_rule in worth.items():
        best = max(value for rule, value in by_rule.items() if rule != "priced")
        assert by_rule["priced"] >= 0.96 * best, name
    for rule in PREFILL_RULES:
        if rule != "priced":
            assert any(by["priced"] > 1.05 * by[rule] for by in worth.values()), rule
