"""The layout of a plan: which part runs where, its arguments, and the billing clock of each device.

Also the devices of a pool for a single engine beside the parts that run there (`placement.assign` places whole plans),
and the start of the bridge to an external trainer.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from placement.types import ROLLOUT_ROLES, Assignment, Pool, Role
from rollart.adapters.engines.vllm_options import VllmOptions
from rollart.errors import SpecError
from rollart.fleet import ActorSpec, Node
from rollart.launch.vllm import CONNECTOR, VllmCommand, vllm_command, vllm_python
from rollart.launch.weight_store import weight_store_location
from rollart.ledger.intervals import ResourceClock
from rollart.ports import Recorder
from rollart.settings.cluster import PoolSpec
from rollart.settings.planning import Specs, pool_labels
from rollart.settings.resolve import Resolved, engine_dtype, probe_tolerance, vllm_dtype


def free_devices(pool: Pool, taken: Collection[int], count: int) -> tuple[int, ...] | None:
    """The lowest free devices for one engine, on one host: the fullest host with enough free devices, the first among
    equals. An engine larger than a host may span hosts. None if the devices do not suffice."""
    size = min(pool.device.devices_per_host or pool.count, pool.count)
    starts = range(0, pool.count, size)
    hosts = [[i for i in range(s, min(s + size, pool.count)) if i not in taken] for s in starts]
    if count > size:
        hosts = [[i for host in hosts for i in host]]
    fitting = [host for host in hosts if len(host) >= count]
    return tuple(min(fitting, key=len)[:count]) if fitting else None


TOKEN_FILE = "service.token"
"""File of the token in the run's directory, mode 600."""


def external_token(specs: Specs) -> dict[str, str]:
    """The environment variable with the external trainer's token, if it belongs into one. SpecError if it is not
    set."""
    variable = (specs.cluster.trainer.external_token or "").partition("env:")[2]
    if specs.cluster.trainer.external is None or not variable:
        return {}
    token = os.environ.get(variable, "")
    if not token:
        raise SpecError(
            f"trainer.external_token: the environment variable {variable} is not set", remedy=f"export {variable}=…"
        )
    return {variable: token}


VLLM_MODEL_ALIAS = "vllm-model"
"""Engines hand KV only to engines that were started on the same model path, and every version has a path of its own:
this alias is common to all."""

PROGRAM_CALLS = 7
"""Concurrent calls of a program: the start, the log poll during it, the wait for its exit, a stop, the process id, and
two pulls of a version (by the loading engine, and ahead of it)."""


def pool_nodes(resolved: Resolved) -> list[Node]:
    """Nodes of the local machine: one per pool of the cluster. Cores and GPUs are resources by name."""
    return [
        Node(pool.name, pool_labels(pool), {resource_kind(resolved, pool): float(pool.count)})
        for pool in resolved.cluster.pools
    ]


def host_nodes(resolved: Resolved) -> list[Node]:
    """One node per host that a pool starts with; a pool without `devices_per_host` is a single host. Pools of plain CPU
    cores come first."""
    found = []
    for pool in sorted(resolved.cluster.pools, key=lambda pool: pool.device != "cpu"):
        size = min(pool.devices_per_host or pool.count, pool.count)
        first = pool.count if pool.min is None else pool.min
        for number, start in enumerate(range(0, first, size)):
            total = {resource_kind(resolved, pool): float(min(size, pool.count - start))}
            found.append(Node(f"{pool.name}-{number}", pool_labels(pool), total))
    return found


def node_selector(resolved: Resolved, pool: PoolSpec) -> dict[str, str]:
    """Node labels that a pool's parts require: the pool's own labels on a shared cluster, else the pool's name."""
    if resolved.cluster.runtime.backend == "local" or not pool.labels:
        return {"pool": pool.name}
    return dict(pool.labels)


def resource_kind(resolved: Resolved, pool: PoolSpec) -> str:
    """The resource that counts the pool's devices, "CPU" or "GPU". User-defined device types of generation `cpu` are
    CPUs."""
    cores = {"cpu", *(device.name for device in resolved.cluster.devices if device.generation == "cpu")}
    return "CPU" if pool.device in cores else "GPU"


def cpu_pool(resolved: Resolved, wanted: str | None) -> PoolSpec:
    """The pool that runs parts without a device: the wanted one, else the first CPU pool. Plain `cpu` pools come before
    CPU pools of a user-defined device type."""
    pools = resolved.cluster.pools
    if wanted is not None:
        return next(pool for pool in pools if pool.name == wanted)
    cores = [pool for pool in pools if resource_kind(resolved, pool) == "CPU"]
    return next((pool for pool in cores if pool.device == "cpu"), (cores or pools)[0])


def part_resources(resolved: Resolved, assignment: Assignment) -> tuple[dict[str, float], dict[str, str]]:
    """Resources that a part reserves on a node, and the labels that the node must have."""
    pool = _pool(resolved, assignment)
    return {resource_kind(resolved, pool): float(len(assignment.devices))}, node_selector(resolved, pool)


def torch_device(resolved: Resolved, assignment: Assignment) -> str:
    """The torch device of a part: that of its pool."""
    return "cpu" if resource_kind(resolved, _pool(resolved, assignment)) == "CPU" else "cuda"


def device_clock(
    resolved: Resolved, recorder: Recorder, role: str, resource: str, pool: str, devices: int, **state: str
) -> ResourceClock:
    """A clock that bills a number of the pool's devices from now on. `state`: its first state and cause."""
    return ResourceClock(
        role=role,
        resource=resource,
        recorder=recorder,
        clock=asyncio.get_running_loop().time,
        units=float(devices),
        usd_per_unit_hour=resolved.usd_per_device_hour[pool],
        **state,
    )


def part_clock(resolved: Resolved, recorder: Recorder, part: Assignment) -> ResourceClock:
    """A clock that bills the part's devices from now on."""
    return device_clock(resolved, recorder, str(part.role), part.name, part.pool, len(part.devices))


@dataclass(frozen=True, slots=True)
class TrainerHostPart:
    """The part of the trainer on one host: `ranks` ranks, starting with rank `first`."""

    name: str
    devices: tuple[int, ...]
    first: int
    ranks: int


def trainer_ranks(resolved: Resolved) -> int:
    """Number of processes of the embedded trainer: `trainer.ranks` of the cluster spec, else one per GPU, or one per
    host on CPU cores. SpecError if the plan's devices do not allow that number."""
    assignment, given = resolved.plan.of(Role.TRAINER)[0], resolved.cluster.trainer.ranks
    devices, gpus = len(assignment.devices), resource_kind(resolved, _pool(resolved, assignment)) == "GPU"
    over = len(_devices_by_host(resolved, assignment))
    ranks = given or (devices if gpus else over)
    if not over <= ranks <= devices or (gpus and ranks != devices):
        rule = "the number of its GPUs" if gpus else "at most its cores"
        if ranks < over:
            rule = f"at least one on each of the {over} hosts that it takes"
        raise SpecError(
            f"trainer.ranks is {ranks}, and the plan gives the trainer {devices} devices of pool '{assignment.pool}' "
            f"(rule: {rule})",
            remedy="set trainer.ranks, or trainer.threads or placement.train.devices, so that they agree",
        )
    if ranks > 1 and resolved.run.training.stream:
        raise SpecError(
            f"training.stream is true, and the trainer has {ranks} ranks (rule: one)",
            remedy="set training.stream to false, or give the trainer one device",
        )
    return ranks


def trainer_host_parts(resolved: Resolved) -> list[TrainerHostPart]:
    """The trainer's parts by host, rank 0's host first. A single part on one machine, or where one host has enough
    devices."""
    assignment, ranks = resolved.plan.of(Role.TRAINER)[0], trainer_ranks(resolved)
    parts = _devices_by_host(resolved, assignment)
    # One rank per device, or equal numbers on all hosts; a last host with fewer devices takes no more ranks than that.
    capacities = [len(part) for part in parts]
    ranks_by_host = [ranks * (n + 1) // len(parts) - ranks * n // len(parts) for n in range(len(parts))]
    ranks_by_host = capacities if sum(capacities) == ranks else ranks_by_host
    if any(have > room for have, room in zip(ranks_by_host, capacities, strict=True)):
        raise SpecError(
            f"trainer.ranks is {ranks}, and the trainer's hosts have {', '.join(map(str, capacities))} devices (rule: "
            "equal numbers of ranks, at most one per device)",
            remedy="set trainer.ranks, or trainer.threads to a multiple of the pool's devices_per_host",
        )
    names = [assignment.name, *(f"{assignment.name}-host-{number}" for number in range(1, len(parts)))]
    firsts = [sum(ranks_by_host[:n]) for n in range(len(parts))]
    return [TrainerHostPart(*one) for one in zip(names, parts, firsts, ranks_by_host, strict=True)]


def trainer_actors(resolved: Resolved, directory: Path, config: Path) -> list[ActorSpec]:
    """One program per host of the trainer; a single one, the bridge, for an external trainer. SpecError for a missing
    token."""
    assignment, external = resolved.plan.of(Role.TRAINER)[0], resolved.cluster.trainer.external
    if external is not None:
        arguments, env = ["--config", str(config), "--listen", external], external_token(resolved)
        if env:
            arguments += ["--token-env", *env]
        elif resolved.cluster.trainer.external_token is not None:
            arguments += ["--token-file", str(directory / TOKEN_FILE)]
        return [_program(resolved, directory, assignment, "rollart.adapters.service.bridge", arguments, env=env)]
    shares, actors = trainer_host_parts(resolved), []
    for share in shares:
        arguments = ["--config", str(config)]
        if len(shares) > 1:
            arguments += ["--rank", str(share.first), "--here", str(share.ranks)]
        part = replace(assignment, devices=share.devices)
        actors.append(
            _program(resolved, directory, part, "rollart.train", arguments, processes=share.ranks, called=share.name)
        )
    return actors


def engine_actor(resolved: Resolved, directory: Path, assignment: Assignment) -> ActorSpec:
    if resolved.cluster.engines.kind == "vllm":
        return _vllm_actor(resolved, directory, assignment)
    arguments = [
        "--max-slots",
        str(resolved.cluster.engines.max_slots),
        "--max-context",
        str(resolved.run.model.context),
        "--threads",
        str(len(assignment.devices)),
        "--device",
        torch_device(resolved, assignment),
        "--dtype",
        engine_dtype(resolved, torch_device(resolved, assignment)),
    ]
    if resolved.run.deterministic:
        arguments.append("--deterministic")
    return _program(resolved, directory, assignment, "rollart.engine", arguments)


def engine_command(resolved: Resolved, assignment: Assignment) -> VllmCommand:
    """The vLLM command of a planned engine."""
    return vllm_command(
        resolved.cluster.engines.vllm.model_copy(update={"dtype": vllm_dtype(resolved)}),
        role=assignment.role,
        devices=len(assignment.devices),
        cpu=torch_device(resolved, assignment) == "cpu",
        context=resolved.run.model.context,
        slots=resolved.cluster.engines.max_slots,
    )


def required_vllm_options(resolved: Resolved, assignment: Assignment) -> VllmOptions:
    """Options that an attached server must have been started with to serve as the planned engine."""
    spec = resolved.cluster.engines.vllm
    return VllmOptions(
        context=resolved.run.model.context,
        slots=resolved.cluster.engines.max_slots,
        tp=0 if torch_device(resolved, assignment) == "cpu" else len(assignment.devices),
        dtype=vllm_dtype(resolved),
        block_size=spec.block_size,
        connector=CONNECTOR if assignment.role in (Role.PREFILL, Role.DECODE) else "",
    )


def engine_tolerance(resolved: Resolved) -> float:
    """Largest accepted difference between log-probabilities of vLLM engines and of the trainer."""
    return probe_tolerance(resolved, torch_device(resolved, resolved.plan.of(Role.TRAINER)[0]))


def attached_urls(resolved: Resolved) -> dict[str, str]:
    """URLs of attached servers, by engine name."""
    names = [a.name for a in resolved.plan.of(*ROLLOUT_ROLES)]
    return dict(zip(names, resolved.cluster.engines.attach, strict=False))


def _vllm_actor(resolved: Resolved, directory: Path, assignment: Assignment) -> ActorSpec:
    command = engine_command(resolved, assignment)
    arguments = [
        "--python",
        vllm_python(resolved),
        "--log",
        str(directory / "logs" / f"{assignment.name}.log"),
        "--args",
        json.dumps(command.args),
    ]
    if assignment.role in (Role.PREFILL, Role.DECODE):
        location = weight_store_location(resolved, directory)
        arguments += [
            "--alias",
            str((directory / "weights" if location is None else Path(location.root)) / VLLM_MODEL_ALIAS),
        ]
    module = "rollart.adapters.engines.vllm_server"
    return _program(resolved, directory, assignment, module, arguments, env=command.env, multi_gpu=True)


def _visible_devices(resolved: Resolved, pool: PoolSpec, devices: Sequence[int]) -> str:
    """The GPUs of this machine behind a pool's `devices`, as CUDA_VISIBLE_DEVICES: pools take GPUs in order, out of the
    GPUs visible to this process (given by a job queue, for example). SpecError if too few are visible."""
    before = itertools.takewhile(lambda other: other.name != pool.name, resolved.cluster.pools)
    first = sum(other.count for other in before if resource_kind(resolved, other) == "GPU")
    numbers, given = [first + number for number in devices], os.environ.get("CUDA_VISIBLE_DEVICES")
    if not given:
        return ",".join(map(str, numbers))
    names = given.split(",")
    if max(numbers) >= len(names):
        raise SpecError(
            f"pool '{pool.name}' takes GPU {max(numbers)} of this machine, and CUDA_VISIBLE_DEVICES is {given!r} "
            "(rule: it names the GPUs of all pools, counted from 0)",
            remedy="make more GPUs visible, or lower the pools' counts",
        )
    return ",".join(names[number] for number in numbers)


def _devices_by_host(resolved: Resolved, assignment: Assignment) -> list[tuple[int, ...]]:
    """The trainer's devices, split by host if no single host of the pool has enough."""
    size, devices = _pool(resolved, assignment).devices_per_host, assignment.devices
    spread = resolved.cluster.runtime.backend != "local" and resolved.cluster.trainer.external is None
    if not spread or size is None or len(devices) <= size:
        return [devices]
    return [devices[start : start + size] for start in range(0, len(devices), size)]


def _pool(resolved: Resolved, assignment: Assignment) -> PoolSpec:
    return next(p for p in resolved.cluster.pools if p.name == assignment.pool)


def _program(
    resolved: Resolved,
    directory: Path,
    assignment: Assignment,
    module: str,
    arguments: list[str],
    *,
    env: Mapping[str, str] = MappingProxyType({}),
    multi_gpu: bool = False,
    processes: int = 1,
    called: str = "",
) -> ActorSpec:
    """`multi_gpu`: the program can use several GPUs. `called`: the actor's name, if it is not the assignment's."""
    name, devices = called or assignment.name, len(assignment.devices)
    pool, threads = _pool(resolved, assignment), str(max(1, devices // processes))
    env = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **env}
    if resource_kind(resolved, pool) == "GPU":
        if devices > 1 and not (multi_gpu or assignment.role is Role.TRAINER):
            raise SpecError(
                f"{name} takes {devices} GPUs of pool '{pool.name}' (rule: one; the embedded engine has no tensor "
                "parallelism)",
                remedy="give engines.count with threads 1, or keep placement.tensor_parallel at 1",
            )
        if resolved.cluster.runtime.backend != "ray":  # Ray sets the variable to the devices that it grants
            env["CUDA_VISIBLE_DEVICES"] = _visible_devices(resolved, pool, assignment.devices)
    where = part_resources(resolved, assignment)
    return program_actor(resolved, directory, name, module, arguments, where, PROGRAM_CALLS, env=env)


def program_actor(
    resolved: Resolved,
    directory: Path,
    name: str,
    module: str,
    arguments: list[str],
    where: tuple[dict[str, float], dict[str, str]],
    calls: int,
    **options: Any,
) -> ActorSpec:
    """The actor of a program with the resources and on a node with the labels of `where`. `calls`: its concurrent
    calls; `options`: keyword arguments of `Program`."""
    on_ray, clusters = resolved.cluster.runtime.backend == "ray", "rollart.adapters.clusters"
    return ActorSpec(
        name=name,
        factory=f"{clusters}.ray_host:NodeProgram" if on_ray else f"{clusters}.program:Program",
        args=(name, module, arguments, str(directory / "logs" / f"{name}.log")),
        kwargs=options,
        resources=where[0],
        labels=where[1],
        max_concurrency=calls if on_ray else 1000,
    )
