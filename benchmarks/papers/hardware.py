"""Rows about links and engines, below the control plane."""

from __future__ import annotations

import asyncio

from benchmarks.papers.models import steps
from benchmarks.papers.row import Claim, Figure, Found, Row
from benchmarks.papers.workloads import PUSH, alone_s
from rollart.model import GenerateRequest, Sampling, WeightsRef
from rollart.sim import loop as virtual
from rollart.sim.engine import ModelledEngine
from rollart.sim.links import RDMA, TCP, SharedLink
from rollart.sim.weights import WeightTransfer
from rollart.sim.workload import PRESETS, GeneratedWorkload

__all__ = ["ROWS"]

SIZES = {"8B": (15.26, 1), "14B": (27.51, 2), "32B": (61.02, 4)}
"""GB of weights and tensor-parallel ranks of a rollout engine (RollArt Table 3, §7.1)."""


def _links(seeds: int) -> Found:
    tcp = {n: alone_s(TCP, gb, tp) for n, (gb, tp) in SIZES.items()}
    rdma = {n: alone_s(RDMA, gb, tp) for n, (gb, tp) in SIZES.items()}
    ratio = {n: tcp[n] / rdma[n] for n in SIZES}
    figures = (
        Figure("TCP 32B s", 29.649, tcp["32B"], tuned=True),
        Figure("RDMA 32B s", 9.442, rdma["32B"], tuned=True),
        Figure("TCP/RDMA 8B", 1.264, ratio["8B"], tuned=True),
        Figure("TCP/RDMA 14B", 2.482, ratio["14B"]),
        Figure("TCP/RDMA 32B", 3.140, ratio["32B"], tuned=True),
    )
    grows = ratio["8B"] < ratio["14B"] < ratio["32B"]
    return Found(figures, (Claim("the ratio grows with the model", grows),))


def _weights(seeds: int) -> Found:
    """One push, one engine that pulls meanwhile; it stands still once the push is over."""
    published = {"8B": (32.4, 6.2, 1.4), "14B": (67.8, 16.3, 5.1), "32B": (127.3, 29.7, 9.6)}
    figures: list[Figure] = []
    ordered = True
    before = (0.0, 0.0, 0.0)
    for name, (gb, tp) in SIZES.items():

        async def once(gb: float = gb, tp: int = tp) -> WeightTransfer:
            way = SharedLink(TCP)
            transfer = WeightTransfer(gb, push=SharedLink(PUSH), pull=lambda _: way, streams=tp)
            transfer.subscribe("e")
            await transfer.push(1)
            await transfer.load("e", WeightsRef(1, "v1"))
            return transfer

        moved = virtual.run(once()).moved[1]
        seen = (moved.push_s, moved.pull_s["e"], moved.exposed_s["e"])
        figures += [
            Figure(f"{what} {name} s", p, s, tuned=(what, name) in {("push", "32B"), ("pull", "32B")})
            for what, p, s in zip(("push", "pull", "exposed"), published[name], seen, strict=True)
        ]
        figures.append(Figure(f"exposed/pull {name}", 0.0, seen[2] / seen[1], most=0.33))
        ordered &= seen[0] > seen[1] > seen[2] and all(a > b for a, b in zip(seen, before, strict=True))
        before = seen
    return Found(tuple(figures), (Claim("push > pull > exposed, each growing with the model", ordered),))


async def _rate(kind: str, count: int, domain: str, in_flight: int) -> float:
    """Trajectories per second of so many Qwen3-8B engines."""
    loop = asyncio.get_running_loop()
    engines = [ModelledEngine(f"{kind}-{i}", steps(kind, 1, "Qwen3-8B")) for i in range(count)]
    homes = dict.fromkeys(range(count), 0)
    drawn, prompts = GeneratedWorkload(PRESETS[domain], 0, name=domain), iter(range(3 * in_flight))

    async def slot() -> None:
        for prompt in prompts:
            home = min(homes, key=lambda i: homes[i])
            homes[home] += 1
            script, context = drawn.script(prompt, 0), 0
            for t in range(script.turns):
                context += script.shown[t]
                sampling = Sampling(max_tokens=script.answers[t])
                await engines[home].generate(GenerateRequest(f"{prompt}-{t}", str(prompt), (context,), sampling))
                context += script.answers[t]
                await asyncio.sleep(script.step_s[t])
            await engines[home].release(str(prompt))
            homes[home] -= 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(in_flight):
            tasks.create_task(slot())
    return 3 * in_flight / loop.time()


def _affine(seeds: int) -> Found:
    def ratio(domain: str, n: int) -> float:
        """Time on 2 H800 over time on 6 H20."""
        return virtual.run(_rate("H20", 6, domain, n)) / virtual.run(_rate("H800", 2, domain, n))

    lake = [ratio("frozenlake", n) for n in (8, 16)]
    math = [1 / ratio("gem_math", n) for n in (16, 24, 48)]
    figures = (
        Figure("H800/H20 time, FrozenLake", 0.53, sum(lake) / len(lake), tuned=True),
        *(
            Figure(f"H20/H800 time, GEM-Math, {n} in flight", 0.49, m, most=0.79)
            for n, m in zip((16, 24, 48), math, strict=True)
        ),
    )
    claims = (
        Claim("prefill-heavy wants H800, above the roofline's 0.45", all(0.45 < x < 1 for x in lake)),
        Claim("decode-heavy wants H20, above the roofline's 0.28", all(0.28 < x < 1 for x in math)),
    )
    return Found(figures, claims)


ROWS = (
    Row(
        "RA-7",
        "weights over 200 GbE and over 400 Gb InfiniBand",
        "15.26 / 27.51 / 61.02 GB, TP 1 / 2 / 4, Mooncake",
        _links,
    ),
    Row(
        "RA-16",
        "push, pull and exposed seconds of a weight update",
        "8 / 14 / 32B, buckets of 1 GB",
        _weights,
        "the exposed part of 8B: published 1.4 s is 10.9 GB/s, faster than Mooncake's own RDMA figure of RA-7",
    ),
    Row("RA-3", "equal money in H800 and in H20", "Qwen3-8B, 2 H800 against 6 H20, prefix cache", _affine),
)
