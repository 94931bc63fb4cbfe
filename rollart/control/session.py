"""Execution of a run from its first evaluation to its last; `launch` has created and wired the parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from rollart.control.evaluation import Evaluation, EvaluationResult
from rollart.control.scheduler import Scheduler
from rollart.control.training import Training
from rollart.ports import Recovered
from rollart.serving.gateway import Gateway
from rollart.settings.run import EvaluationSpec
from rollart.supervise.engines import EnginePart, EngineSupervisor
from rollart.supervise.rebalance import Rebalancer


class RunSession:
    """Runs the control plane's tasks in one TaskGroup: scheduling and training to their end, supervision
    meanwhile.

    The first task that fails ends all of them, and its error propagates to the caller.
    """

    def __init__(
        self,
        gateway: Gateway,
        scheduler: Scheduler,
        training: Training,
        evaluation: Evaluation,
        *,
        supervisor: EngineSupervisor | None,
        parts: Sequence[EnginePart],
        plan: EvaluationSpec,
        on_evaluation: Callable[[str, Mapping[str, EvaluationResult]], None],
        rebalancer: Rebalancer | None = None,
        beside: Mapping[str, Callable[[], Coroutine[Any, Any, None]]] | None = None,
    ) -> None:
        """`beside`: further background tasks by name, which are cancelled when training and evaluations are done."""
        self._beside = beside or {}
        self._gateway = gateway
        self._scheduler = scheduler
        self._training = training
        self._evaluation = evaluation
        self._supervisor = supervisor
        self._parts = parts
        self._plan = plan
        self._on_evaluation = on_evaluation
        self._rebalancer = rebalancer

    async def run(self, *, step: int, steps: int, recovered: Recovered | None = None) -> None:
        """Run steps `step` .. `steps` - 1, starting from the gateway's version."""
        background: list[asyncio.Task[None]] = []
        async with asyncio.TaskGroup() as tasks:
            if self._supervisor is not None:
                background.append(tasks.create_task(self._supervisor.run(self._parts), name="supervision"))
            background.append(tasks.create_task(self._gateway.updates.run(), name="updates"))
            if self._rebalancer is not None:
                background.append(tasks.create_task(self._rebalancer.run(), name="rebalance"))
            if self._gateway.admission is not None:
                background.append(tasks.create_task(self._gateway.admission.run(), name="concurrency"))
            background += [tasks.create_task(run(), name=name) for name, run in self._beside.items()]
            await self._body(step, steps, recovered)
            for task in background:
                task.cancel()

    async def _body(self, step: int, steps: int, recovered: Recovered | None) -> None:
        if "start" in self._plan.at and step == 0:
            await self._evaluate("start")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._train(step, steps), name="training")
            tasks.create_task(self._scheduler.run(lambda: self._gateway.version, recovered), name="scheduler")
        if "end" in self._plan.at:
            await self._evaluate("end")

    async def _train(self, step: int, steps: int) -> None:
        await self._training.run(first_step=step, version=self._gateway.version, steps=steps)
        self._scheduler.close()

    async def _evaluate(self, label: str) -> None:
        if self._plan.episodes:
            await self._gateway.settle()
            results = await self._evaluation.run(label, self._gateway.version, self._plan.episodes)
            self._on_evaluation(label, results)
