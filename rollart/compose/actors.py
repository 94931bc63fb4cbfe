"""The actors of a plan: where each part runs, what it is called with, and the clock of each device."""

from __future__ import annotations

import asyncio
from pathlib import Path

from placement.types import Assignment, Role
from rollart.errors import SpecError
from rollart.ledger.clock import ResourceClock
from rollart.ledger.store import Ledger
from rollart.ports import ActorSpec, Node
from rollart.spec.cluster import PoolSpec
from rollart.spec.resolve import Resolved

__all__ = ["engine_actor", "nodes", "part_clock", "torch_device", "trainer_actor", "unused_clock"]


def nodes(resolved: Resolved) -> list[Node]:
    """Every pool of the cluster is a node of this machine; cores and GPUs are resources by name."""
    nodes = []
    for pool in resolved.cluster.pools:
        labels = {"pool": pool.name, "device": pool.device, **pool.labels}
        nodes.append(Node(pool.name, labels, {_resource(pool): float(pool.count)}, {}))
    return nodes


def torch_device(resolved: Resolved, assignment: Assignment) -> str:
    """What a part computes on, in torch's words: the device of the pool that the plan put it in."""
    return "cpu" if _resource(_pool(resolved, assignment)) == "CPU" else "cuda"


def part_clock(resolved: Resolved, ledger: Ledger, assignment: Assignment) -> ResourceClock:
    """The clock of a part, which runs from now on, at the price of its devices."""
    return ResourceClock(
        role=str(assignment.role),
        resource=assignment.name,
        recorder=ledger,
        clock=asyncio.get_running_loop().time,
        units=float(len(assignment.devices)),
        usd_per_unit_hour=resolved.usd_per_device_hour[assignment.pool],
    )


def unused_clock(resolved: Resolved, ledger: Ledger, pool: str, devices: int) -> ResourceClock:
    """The clock of a pool's devices that nothing runs on and that are paid."""
    return ResourceClock(
        role="unused",
        resource=f"unused-{pool}",
        recorder=ledger,
        clock=asyncio.get_running_loop().time,
        units=float(devices),
        usd_per_unit_hour=resolved.usd_per_device_hour[pool],
        state="idle",
        cause="not_in_plan",
    )


def trainer_actor(resolved: Resolved, directory: Path, config: Path) -> ActorSpec:
    assignment = resolved.plan.of(Role.TRAINER)[0]
    return _program(resolved, directory, assignment, "rollart.train", ["--config", str(config)])


def engine_actor(resolved: Resolved, directory: Path, assignment: Assignment) -> ActorSpec:
    arguments = [
        "--max-slots",
        str(resolved.cluster.engines.max_slots),
        "--max-context",
        str(resolved.run.model.context),
        "--threads",
        str(len(assignment.devices)),
        "--device",
        torch_device(resolved, assignment),
    ]
    return _program(resolved, directory, assignment, "rollart.engine", arguments)


def _pool(resolved: Resolved, assignment: Assignment) -> PoolSpec:
    return next(p for p in resolved.cluster.pools if p.name == assignment.pool)


def _resource(pool: PoolSpec) -> str:
    return "CPU" if pool.device == "cpu" else "GPU"


def _program(
    resolved: Resolved, directory: Path, assignment: Assignment, module: str, arguments: list[str]
) -> ActorSpec:
    name, devices = assignment.name, len(assignment.devices)
    pool = _pool(resolved, assignment)
    resource = _resource(pool)
    env = {"OMP_NUM_THREADS": str(devices), "MKL_NUM_THREADS": str(devices)}
    if resource == "GPU":
        if devices > 1:
            raise SpecError(
                f"{name} takes {devices} GPUs of pool '{pool.name}' (rule: one; the embedded engine and trainer have "
                "no tensor parallelism)",
                remedy="give engines.count with threads 1, or keep tensor_parallel and train.devices of placement at 1",
            )
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, assignment.devices))
    return ActorSpec(
        name=name,
        factory="rollart.adapters.clusters.program:Program",
        args=(name, module, arguments, str(directory / "logs" / f"{name}.log")),
        kwargs={"env": env},
        resources={resource: float(devices)},
        labels={"pool": pool.name},
    )
