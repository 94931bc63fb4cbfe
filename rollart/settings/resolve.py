"""From written specs to a runnable configuration: specs, prices and the placement plan in one frozen value, and what
follows from it alone: concurrent episodes, and the number format of each part where the specs leave it open.

Nothing is started here. Without engine counts the plan is computed; with them, parts are only assigned to devices.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from placement.assign import assign
from placement.hardware import device_name
from placement.problem import DomainProfile, Problem
from placement.types import Demand, Deployment, Flow, Placement, Plan, Pool, RewardChoice, Role
from rollart.errors import SpecError
from rollart.settings.cluster import ClusterSpec
from rollart.settings.functions import effective_spec, saved_releases
from rollart.settings.load import builtin, load_cluster, load_prices, load_run, saved_specs, split_overrides
from rollart.settings.planning import (
    Specs,
    demands_of,
    planning_problem,
    pools_of,
    solve_placement,
    trainer_placement,
)
from rollart.settings.prices import PriceList, merged_prices
from rollart.settings.providers import with_plugin_prices
from rollart.settings.rules import quotas
from rollart.settings.run import TRAINER_METRICS, RunSpec
from serverless.spec import FunctionSpec

MAX_CONCURRENT_EVALUATIONS = 128
"""Largest number of concurrent held-out episodes (`control.evaluation`)."""

ROUNDING_TOLERANCE = 1e-9
"""A product this close below a whole number counts as that number."""

FLOAT32_TOLERANCE = 0.01
"""Mean difference of log-probabilities from which two float32 sides are taken to have different weights: 0.0001 is
usual, and another summation order does not make it ten times that."""

HALF_TOLERANCE = 0.2
"""The same tolerance where one side computes in bfloat16 or float16: 0.05 is usual."""

NO_PREDICTION = "no prediction: "
"""Prefix of the note that explains why a plan of given engines has no rate."""

ProfileReader = Callable[[Path], Sequence[DomainProfile]]
"""Reads the work of each domain from the directory of a finished run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved(Specs):
    """A run that can start.

    `quotas` are the trajectories of each domain per step; `usd_per_device_hour` the price by pool; `notes` are for
    readers of the plan; `problem` is the problem that `plan.placement` solves, if any; `functions` are the effective
    settings of each reward function, its decorator's included (`run` keeps the spec as written).
    """

    plan: Plan
    quotas: Mapping[str, int]
    usd_per_device_hour: Mapping[str, float]
    notes: tuple[str, ...] = ()
    problem: Problem | None = field(default=None, compare=False)
    functions: Mapping[str, FunctionSpec] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, in reading order."""
        plan = self.plan
        released = {name: release.model_dump(mode="json") for name, release in self.releases.items()}
        return {
            "run": self.run.model_dump(mode="json"),
            "cluster": self.cluster.model_dump(mode="json"),
            "functions": {
                # without the keys that the entry has already, and without paths of this machine
                name: spec.model_dump(mode="json", exclude={"name", "source", "handler", "artefacts"})
                for name, spec in self.functions.items()
            },
            **({"releases": released} if released else {}),
            "quotas": dict(self.quotas),
            "plan": {
                "assignments": [
                    {"part": a.name, "role": str(a.role), "pool": a.pool, "devices": list(a.devices)}
                    for a in plan.assignments
                ],
                "idle": dict(plan.idle),
                "usd_per_hour": plan.usd_per_hour,
                "binds": plan.binds,
                "rates": None if plan.rates is None else dict(plan.rates),
                "placement": None if plan.placement is None else placement_dict(plan.placement),
            },
            "usd_per_device_hour": dict(self.usd_per_device_hour),
            "prices": self.prices.model_dump(mode="json"),
            "base": self.base,
            "notes": list(self.notes),
        }

    def to_yaml(self) -> str:
        """The text that `--dry-run` prints."""
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=110)


def read_specs(
    run: str | Path | None = None,
    cluster: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    measure: ProfileReader | None = None,
) -> Specs:
    """Load. Without a run the built-in quickstart, without a cluster this machine."""
    run_path = Path(run) if run is not None else builtin("runs/quickstart.yaml")
    for_run, for_cluster = split_overrides(overrides)
    run_spec = load_run(run_path, for_run)
    cluster_spec, prices = _read_cluster(cluster, for_cluster)
    base = str(run_path.resolve().parent)
    return Specs(run_spec, cluster_spec, prices, base, _measured_profiles(run_spec, base, measure))


def recorded_specs(
    path: str | Path,
    cluster: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    measured: Sequence[DomainProfile] = (),
) -> Specs:
    """The specs of a recorded run from the file that `to_yaml` filled, on another cluster if one is given. `measured`:
    the domain profiles measured in that run."""
    for_run, for_cluster = split_overrides(overrides)
    run, saved, prices, base = saved_specs(path, {"run": for_run, "cluster": [] if cluster else for_cluster})
    if cluster is not None:
        saved, prices = _read_cluster(cluster, for_cluster)
    return Specs(run, saved, prices, base, tuple(measured), saved_releases(path))


def resolve_files(
    run: str | Path | None = None,
    cluster: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    measure: ProfileReader | None = None,
) -> Resolved:
    """Load, then resolve. Without a run the built-in quickstart, without a cluster this machine."""
    return resolve_specs(read_specs(run, cluster, overrides, measure=measure))


def resolve_saved(path: str | Path, overrides: Sequence[str] = (), *, measure: ProfileReader | None = None) -> Resolved:
    """Back from the file that `to_yaml` filled, for a resume: validated and placed again, with overrides."""
    for_run, for_cluster = split_overrides(overrides)
    run, cluster, prices, base = saved_specs(path, {"run": for_run, "cluster": for_cluster})
    measured = _measured_profiles(run, base, measure)
    return resolve_specs(Specs(run, cluster, prices, base, measured, saved_releases(path)))


def resolve_specs(specs: Specs) -> Resolved:
    """Price the pools and place the parts. SpecError when a pool has no price, a part does not fit or no plan exists.

    Where the engines are given and every domain's work is known, the plan's rate is predicted as well.
    """
    specs = replace(specs, run=_with_steps_of_data(specs.run, specs.base))
    run, cluster, base = specs.run, specs.cluster, specs.base
    _check_engine_support(run, cluster)
    listed = merged_prices(specs.prices, cluster.price_list)
    specs = replace(specs, prices=listed)
    pools = pools_of(cluster, listed)
    hourly = {pool.name: pool.usd_per_device_hour for pool in pools}
    if not run.domains:
        plan, problem, notes = _trainer_plan(specs, pools)
    else:
        plan, problem, notes = _fixed_plan(specs, pools) if cluster.engines.fixed else _computed_plan(specs, pools)
    functions = {entry.name: effective_spec(entry, base, specs.releases.get(entry.name)) for entry in run.functions}
    notes += _plan_independent_notes(run, cluster, functions)
    if run.training.stream and cluster.trainer.sharded:
        raise SpecError(
            "training.stream is true, and the trainer has several ranks or bfloat16 (rule: one rank in float32)",
            remedy="set training.stream to false, or trainer.ranks to 1 and trainer.dtype to float32",
        )
    if run.training.optimizer == "muon" and cluster.trainer.sharded:
        raise SpecError(
            "training.optimizer is muon, and the trainer has several ranks or bfloat16 (rule: one rank in float32, "
            "which has whole matrices)",
            remedy="set training.optimizer to adamw, or trainer.ranks to 1 and trainer.dtype to float32",
        )
    return Resolved(
        run,
        cluster,
        listed,
        base,
        releases=specs.releases,
        plan=plan,
        quotas=quotas(run),
        usd_per_device_hour=hourly,
        notes=notes,
        problem=problem,
        functions=functions,
    )


def refuse_given_data(run: RunSpec, action: str) -> None:
    """SpecError for a run that trains on `training.data`, where `action` needs roll-outs."""
    if run.training.data is not None:
        raise SpecError(
            f"run '{run.name}' has training.data, and rolls nothing out (rule: {action} is for runs that do)",
            remedy="name a run without training.data",
        )


def forecast(specs: Specs) -> Resolved:
    """Resolve, and predict the rate of given engines even where the work has to be assumed."""
    resolved = resolve_specs(specs)
    played = _plan_independent_notes(specs.run, specs.cluster, resolved.functions)
    if resolved.plan.placement is not None or resolved.notes != played or not specs.cluster.engines.fixed:
        return resolved
    plan, problem, notes = _predicted_plan(resolved.plan, replace(specs, prices=resolved.prices))
    return replace(resolved, plan=plan, problem=problem, notes=(*notes, *played))


def deployments_of(plan: Plan) -> tuple[Deployment, ...]:
    """The instances of a plan, counted."""
    counts = Counter((a.pool, a.role, len(a.devices)) for a in plan.assignments)
    return tuple(Deployment(pool, role, tp, n) for (pool, role, tp), n in counts.items())


def placement_dict(found: Placement) -> dict[str, Any]:
    """A placement as plain values, without its dual prices: those are for the router."""
    dollars = "usd_per_hour", "usd_per_hour_all"
    loads = "batch", "utilisation", "kv_utilisation"
    path = "domain", "pool", "tp", "prefill_pool", "prefill_tp", "rate", "seconds", "kv"
    choice = "domain", "where", "rate", "usd_per_thousand", "break_even_utilisation", "note"
    return {
        **_plain(found, "objective", "rate", "band", "bound", "gap", *dollars),
        "deployments": [_plain(d, "pool", "role", "tp", "replicas", *loads) for d in found.deployments],
        "flows": [_plain(flow, *path) for flow in found.flows],
        "rewards": [_plain(reward, *choice) for reward in found.rewards],
        "binds": list(found.binds),
        "notes": list(found.notes),
    }


def _plain(of: Deployment | Flow | Placement | RewardChoice, *names: str) -> dict[str, Any]:
    """Attributes as plain values: the solver's floats are numpy's, and names are enums."""
    found = {}
    for name in names:
        value = getattr(of, name)
        found[name] = float(value) if isinstance(value, float) else str(value) if isinstance(value, str) else value
    return found


@dataclass(frozen=True, slots=True)
class ConcurrentEpisodes:
    """Upper bounds: running trajectories (redundant ones too), prefetched environments beside them, and held-out
    episodes, which run before and after them, or `beside` them (`evaluation.every`). `prefetch: auto` counts as one
    batch: its initial value, which it gives up where other episodes wait."""

    running: int
    ahead: int
    held_out: int
    beside: bool = False

    @property
    def most(self) -> int:
        if self.beside:
            return self.running + self.ahead + self.held_out
        return max(self.running + self.ahead, self.held_out)


def concurrent_episodes(run: RunSpec) -> ConcurrentEpisodes:
    """The largest numbers of concurrent episodes. SpecError where domains cannot fill the batch."""
    rollout, running = run.rollout, 0
    more, members, extra = rollout.redundancy.groups, rollout.redundancy.size, 0
    if rollout.tail_batching is not None:
        more, members = rollout.tail_batching.eta_prompts, rollout.tail_batching.eta_responses
    for name, quota in quotas(run).items():
        size = run.domain(name).group_size
        groups = quota // size
        started = groups * run.staleness + math.floor(groups * more + ROUNDING_TOLERANCE)
        running += started * math.floor(size * members + ROUNDING_TOLERANCE)
        extra = max(extra, math.floor(size * members + ROUNDING_TOLERANCE))
    running += rollout.filter.max_additional_running_prompts * extra
    ahead = run.batch.trajectories if rollout.prefetch == "auto" else rollout.prefetch * len(run.domains)
    held_out = run.evaluation
    episodes = held_out.episodes * len(run.domains) * (1 + len(held_out.temperatures) * held_out.samples)
    return ConcurrentEpisodes(
        running, ahead, min(MAX_CONCURRENT_EVALUATIONS, episodes), beside=held_out.every is not None
    )


def engine_dtype(resolved: Resolved, device: str) -> str:
    """The format of an embedded engine on `device` ("cpu", "cuda"). Half the bytes of float32 double a GPU's decoding
    speed, and its matrix units do not compute float32. Cores multiply bfloat16 more slowly, if at all."""
    dtype = resolved.cluster.engines.dtype
    if dtype != "auto":
        return dtype
    return "float32" if device == "cpu" else "bfloat16"


def vllm_dtype(resolved: Resolved) -> str:
    """The format that vLLM is started with; its own `auto` by default."""
    engines = resolved.cluster.engines
    return engines.dtype if engines.vllm.dtype == "auto" else engines.vllm.dtype


def trainer_dtype(resolved: Resolved, device: str) -> Literal["float32", "bfloat16"]:
    """The format of the trainer's forward and backward passes. A streamed step sums gradients exactly, in float32; Muon
    needs whole matrices, which are sharded otherwise."""
    dtype = resolved.cluster.trainer.dtype
    if dtype != "auto":
        return dtype
    training = resolved.run.training
    return "float32" if device == "cpu" or training.stream or training.optimizer == "muon" else "bfloat16"


def probe_tolerance(resolved: Resolved, trainer_device: str) -> float:
    """Largest accepted difference between vLLM engines and the trainer on a probe: the coarser format decides."""
    given = resolved.cluster.engines.vllm.probe
    if given is not None:
        return given
    both = {vllm_dtype(resolved), trainer_dtype(resolved, trainer_device)}
    return FLOAT32_TOLERANCE if both == {"float32"} else HALF_TOLERANCE


def _read_cluster(cluster: str | Path | None, overrides: Sequence[str]) -> tuple[ClusterSpec, PriceList]:
    cluster_path = Path(cluster) if cluster is not None else builtin("clusters/local.yaml")
    cluster_spec = load_cluster(cluster_path, overrides)
    prices = load_prices(
        cluster_path.parent / cluster_spec.prices if cluster_spec.prices is not None else builtin("prices.yaml")
    )
    # A run's directory keeps the specs, where relative paths would resolve differently.
    measured = [str((cluster_path.parent / name).resolve()) for name in cluster_spec.calibration]
    runtime = cluster_spec.runtime
    if runtime.token is not None:
        runtime = runtime.model_copy(update={"token": str((cluster_path.parent / runtime.token).resolve())})
    environments = cluster_spec.environments
    if environments.python is not None and os.sep in environments.python:  # keep symlinks: they make a virtual env
        python = os.path.abspath(cluster_path.parent / environments.python)
        environments = environments.model_copy(update={"python": python})
    changed = {"calibration": measured, "runtime": runtime, "environments": environments}
    return cluster_spec.model_copy(update=changed), with_plugin_prices(prices, cluster_spec.functions.chain)


def _measured_profiles(run: RunSpec, base: str, measure: ProfileReader | None) -> tuple[DomainProfile, ...]:
    if run.placement.profile is None or measure is None:
        return ()
    return tuple(measure(Path(base) / run.placement.profile))


def _check_engine_support(run: RunSpec, cluster: ClusterSpec) -> None:
    """SpecError for settings that the engines do not support."""
    if cluster.trainer.external is not None and run.training.data is not None:
        raise SpecError(
            "training.data is given, and trainer.external is another program's trainer (rule: one of them)",
            remedy="leave out trainer.external",
        )
    cut = [d.name for d in run.domains if d.top_p < 1.0]
    if cluster.engines.kind == "vllm" and cut:
        raise SpecError(
            f"domain '{cut[0]}' has top_p below 1 (rule: 1 with engines of kind vllm, whose log-probabilities are "
            "after the cut; those that losses take are before it)",
            remedy="leave top_p out, or use embedded engines",
        )
    if cluster.runtime.elastic is not None and run.rollout.parallelism is not None:
        raise SpecError(
            "rollout.parallelism and runtime.elastic are given (rule: one of them starts and stops engines)",
            remedy="leave one of them out",
        )
    store = run.weights.store
    if cluster.engines.attach and store is not None and store.local is None:
        raise SpecError(
            "weights.store has no local, and engines.attach names servers that run already (rule: a directory of their "
            "hosts, which have the run's directory nowhere)",
            remedy="set weights.store.local to a directory that each server's host can write",
        )
    unreported = [one.metric for one in run.stop_when if one.metric in TRAINER_METRICS]
    if cluster.trainer.external is not None and unreported:
        raise SpecError(
            f"stop_when has {unreported[0]}, which trainer.external does not report (rule: with the embedded trainer)",
            remedy="leave it out, or take a metric of the batch: zero_variance, length_drift, success",
        )
    if cluster.trainer.external is not None and run.fork is not None:
        raise SpecError(
            "fork is given, and trainer.external is another program's trainer (rule: one of them; the embedded trainer "
            "reads the version)",
            remedy="leave out fork, and let that program load the weights",
        )
    if cluster.trainer.external is not None and run.weights.collective is not None:
        raise SpecError(
            "weights.collective is given, and trainer.external is somebody else's trainer (rule: one of them; the "
            "embedded trainer's ranks broadcast)",
            remedy="leave out weights.collective",
        )


PlanningResult = tuple[Plan, Problem | None, tuple[str, ...]]
"""A plan, the problem that its placement solves, and notes."""


def _with_steps_of_data(run: RunSpec, base: str) -> RunSpec:
    """The run with as many steps as its `epochs` over `training.data` take, if it gives no number. SpecError for a file
    that cannot be read."""
    if run.training.data is None or "steps" in run.model_fields_set:
        return run
    try:
        with (Path(base) / run.training.data).open("rb") as lines:
            count = sum(1 for line in lines if line.strip())
    except OSError as error:
        why = f"training.data is '{run.training.data}', which cannot be read: {error.strerror}"
        raise SpecError(why, remedy="give a JSON Lines file, relative to the run file") from None
    steps = run.training.epochs * math.ceil(count / run.batch.trajectories)
    return run.model_copy(update={"steps": steps})


def _trainer_plan(specs: Specs, pools: Sequence[Pool]) -> PlanningResult:
    """The trainer alone, for a run without roll-outs and evaluations. On a cluster whose engines are not counted it has
    `placement.train.devices`, or the whole pool."""
    cluster, run, note = specs.cluster, specs.run, "no engines: training.data is trained without roll-outs"
    pool, devices = trainer_placement(run, cluster, pools, None)
    if cluster.engines.fixed:
        threads = cluster.trainer.threads
    else:
        chosen = max(pools, key=lambda p: p.count) if pool is None else next(p for p in pools if p.name == pool)
        pool, threads = chosen.name, devices or chosen.count
    return _assigned_plan(cluster, pools, [Demand(Role.TRAINER, 1, threads, pool=pool)]), None, (note,)


def _fixed_plan(specs: Specs, pools: Sequence[Pool]) -> PlanningResult:
    """The parts that the cluster spec counts, on the devices that are free."""
    engines, trainer = specs.cluster.engines, specs.cluster.trainer
    wanted = [(Role.ENGINE, engines.count), (Role.PREFILL, engines.prefill), (Role.DECODE, engines.decode)]
    device = None if engines.device is None else device_name(engines.device)
    demands = [Demand(role, count, engines.threads, device=device) for role, count in wanted if count is not None]
    for_training = None if trainer.device is None else device_name(trainer.device)
    demands.append(Demand(Role.TRAINER, 1, trainer.threads, device=for_training))
    plan = _assigned_plan(specs.cluster, pools, demands)
    measured = {profile.name for profile in specs.measured}
    if not all(d.profile is not None or d.name in measured for d in specs.run.domains):
        return plan, None, ()
    return _predicted_plan(plan, specs)


def _predicted_plan(plan: Plan, specs: Specs) -> PlanningResult:
    """A plan of given engines with its predicted rate, or with a note on why there is no prediction."""
    try:
        question = planning_problem(specs, deployments_of(plan))
        found = solve_placement(question)
    except SpecError as error:
        return plan, None, (f"{NO_PREDICTION}{error.message.splitlines()[0]}",)
    return replace(_with_placement(plan, found), binds=plan.binds), question.problem, question.notes


def _computed_plan(specs: Specs, pools: Sequence[Pool]) -> PlanningResult:
    question = planning_problem(specs)
    found = solve_placement(question)
    plan = _assigned_plan(specs.cluster, pools, demands_of(found))
    cluster, instead = specs.cluster, {"engines": "placement.tensor_parallel", "trainer": "placement.train.devices"}
    ignored = [
        f"{part}.threads is {threads}: ignored, since the plan is computed; {instead[part]} says it there"
        for part, threads in (("engines", cluster.engines.threads), ("trainer", cluster.trainer.threads))
        if threads != 1
    ]
    return _with_placement(plan, found), question.problem, (*question.notes, *ignored)


def _with_placement(plan: Plan, found: Placement) -> Plan:
    """The plan with the placer's figures."""
    return replace(
        plan, placement=found, rates={"trajectories": float(found.rate)}, binds="; ".join(found.binds) or plan.binds
    )


def _assigned_plan(cluster: ClusterSpec, pools: Sequence[Pool], demands: Sequence[Demand]) -> Plan:
    plan = assign(pools, demands)
    if isinstance(plan, str):
        raise SpecError(
            f"cluster '{cluster.name}' cannot hold the run: {plan}",
            remedy="add devices to the pool, or lower engines.count, engines.threads or trainer.threads",
        )
    return plan


def _plan_independent_notes(
    run: RunSpec, cluster: ClusterSpec, functions: Mapping[str, FunctionSpec]
) -> tuple[str, ...]:
    """Notes that do not depend on the plan: some episodes wait for slots of others, functions are rehearsed, or may run
    longer than rewards are waited for."""
    spec, most, notes = cluster.environments, concurrent_episodes(run), list[str]()
    if isinstance(spec.workers, int) and 0 < spec.workers * spec.per_worker < most.most:
        ahead = f", {most.ahead} ahead of need" if most.ahead else ""
        notes.append(
            f"environments: {spec.workers} x {spec.per_worker} places (workers x per_worker) for up to {most.most} "
            f"episodes at a time ({most.running} trajectories{ahead}): the others wait for a place"
        )
    played = cluster.functions.local.rehearse
    if played is not None and "local" in cluster.functions.chain:
        notes.append(
            f"a rehearsal: functions run here with the cold starts, overheads and throttles modelled for {played}"
        )
    notes += [
        f"functions.{name} may run {spec.timeout_s:g} s, but rewards end after leases.reward_s = "
        f"{run.leases.reward_s:g} s, retries included: raise leases.reward_s"
        for name, spec in functions.items()
        if spec.timeout_s > run.leases.reward_s
    ]
    return tuple(notes)
