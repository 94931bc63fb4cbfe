"""Every turn names the adapter of its domain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollart.model import Completion, EngineId, GenerateRequest
from rollart.sim import loop
from rollart.testing.parts import SimulatedEngine
from rollart.testing.run import make_simulated_run
from tests.control.test_harness import Programs


class Asked(SimulatedEngine):
    """Keeps the adapters of its requests."""

    adapters: set[str | None]

    async def generate(self, request: GenerateRequest) -> Completion:
        self.adapters.add(request.adapter)
        return await super().generate(request)


@pytest.mark.parametrize("adapter", [None, "games"])
@pytest.mark.parametrize("program", [False, True])
def test_every_turn_names_the_adapter_of_its_domain(adapter: str | None, program: bool) -> None:
    run = make_simulated_run(turns=3, tokens=3, steps=2)
    engines = [Asked(EngineId(e.id), version=0, tokens=3) for e in run.engines]
    for engine in engines:
        engine.adapters = set()
    run.engines = list(engines)
    run.domains = [replace(d, adapter=adapter, harness=Programs(asks=3) if program else None) for d in run.domains]
    loop.run(run.run(), seed=0)
    assert set.union(*(engine.adapters for engine in engines)) == {adapter}
