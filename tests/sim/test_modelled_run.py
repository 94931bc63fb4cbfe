"""The product's own control plane over the modelled world: one short run of every modelled part together."""

from __future__ import annotations

import asyncio
import dataclasses

from benchmarks.papers.workloads import PUSH
from placement.hardware import device
from rollart.control.trajectory import WaitLimits
from rollart.model import TrainReport, WeightsRef
from rollart.serving.engine_registry import GatewayLimits
from rollart.settings.faults import ResetTroubleSpec
from rollart.sim.engine import ModelledEngine
from rollart.sim.environments import SimulatedDomain
from rollart.sim.links import TCP, SharedLink
from rollart.sim.loop import run
from rollart.sim.trainers import ModelledTrainer, TrainerSpeed
from rollart.sim.weights import WeightTransfer
from rollart.sim.workload import PRESETS, GeneratedWorkload, MassTokenizer
from rollart.testing.ledger import MemoryRecorder
from rollart.testing.run import SimulatedRun, make_simulated_run
from tests.sim.models import shape, steps


def modelled(
    domain: str, *, quota: int, engines: int, faults: ResetTroubleSpec | None = None
) -> tuple[SimulatedRun, SimulatedDomain]:
    """Qwen3-8B on H20s, trained on 32 H800s; weights pushed once and pulled by every engine."""
    world = SimulatedDomain(GeneratedWorkload(PRESETS[domain], 0, name=domain), name=domain, faults=faults)
    ways = {f"e{i}": SharedLink(TCP) for i in range(engines)}
    transfer = WeightTransfer(15.26, push=SharedLink(PUSH), pull=ways.__getitem__)

    def loader(name: str) -> ModelledEngine:
        async def load(weights: WeightsRef) -> None:
            await transfer.load(name, weights)

        transfer.subscribe(name)
        return ModelledEngine(name, steps("H20"), load=load)

    made = make_simulated_run(quotas={domain: (quota, 4)}, steps=3, alpha=1)
    made.engines = [loader(name) for name in ways]  # type: ignore[misc]
    made.trainer = ModelledTrainer(TrainerSpeed(shape(), device("H800"), 32), transfer=transfer)  # type: ignore[assignment]
    made.tokenizer = MassTokenizer()
    made.waits = WaitLimits(env_reset_s=3600.0, env_step_s=3600.0, context_tokens=1 << 40)
    made.limits = GatewayLimits(generate_s=36_000.0, engine_s=36_000.0, sync_s=3600.0)
    of = made.domains[0]
    made.domains = [dataclasses.replace(of, environment=world.make, max_turns=1000, max_tokens=1 << 30)]
    return made, world


async def played(made: SimulatedRun) -> float:
    await made.run()
    return asyncio.get_running_loop().time()


def test_the_product_runs_on_modelled_parts() -> None:
    made, world = modelled("gem_math", quota=16, engines=2)
    reports: list[TrainReport] = []
    made.on_step = lambda done: reports.append(done.report)
    seconds = run(played(made))
    engines = made.engines
    assert (len(reports), made.published) == (3, [1, 2, 3])
    assert (
        0
        < sum(r.trained_tokens for r in reports)
        <= sum(e.generated_tokens for e in engines if isinstance(e, ModelledEngine))
    )
    for e in engines:
        assert isinstance(e, ModelledEngine)
        assert e.version == 3
        assert e.prefill_s + e.decode_s <= seconds
        assert e.recomputed_tokens > 0, "updates find requests in flight"
    assert world.hosts[0].active == 0
    again, _ = modelled("gem_math", quota=16, engines=2)
    assert run(played(again)) == seconds


def test_resets_that_fail_cost_time_and_no_step() -> None:
    made, _ = modelled("gem_math", quota=16, engines=2, faults=ResetTroubleSpec(fail=0.1))
    run(played(made))
    assert isinstance(made.recorder, MemoryRecorder)
    assert [e for e in made.recorder.events if e.kind == "infra_fault"]
    assert made.published == [1, 2, 3]
