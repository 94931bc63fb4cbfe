"""From specs to the placement problem, and from its solution to the parts that will run. With `fleet` and `work`, and
`resolve` above them, the only caller of `placement`. Imported only when a plan is solved or predicted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from placement.architecture import DecoderShape, shape_of
from placement.constants import Calibration, TrainingConstants
from placement.problem import InFlightWindow, Problem, Restriction
from placement.publish import PRESETS, Publishing, PublishSpeeds, Transport
from placement.roofline import RooflinePerformance
from placement.types import Demand, Deployment, Infeasible, Objective, Placement, Pool, Role
from placement.workload import DomainProfile
from rollart.errors import SpecError
from rollart.spec.cluster import ClusterSpec
from rollart.spec.fleet import device_name, function_price, links_of, pools_of, store_links_of
from rollart.spec.prices import PriceList
from rollart.spec.rules import quotas
from rollart.spec.run import LAG, RunSpec
from rollart.spec.suggest import did_you_mean, some_of
from rollart.spec.work import ASSUMED, affinity_of, model_config, model_name, profiles_of, train_of

__all__ = [
    "PlanningProblem",
    "solve_placement",
    "demands_of",
    "load_calibrations",
    "problem_of",
    "publishing_of",
    "planning_problem",
    "run_shape",
    "window_of",
]

DEFAULT_TP = (1, 2, 4, 8)

PUBLISH = "publish"
"""Key of a calibration file's entry that holds publish speeds."""

SPLIT = frozenset({Role.PREFILL, Role.DECODE})


@dataclass(frozen=True, slots=True)
class PlanningProblem:
    """A placement problem, and notes on how it was derived from the specs, for readers of the plan."""

    problem: Problem
    notes: tuple[str, ...] = ()


def problem_of(
    run: RunSpec,
    cluster: ClusterSpec,
    prices: PriceList,
    profiles: Sequence[DomainProfile] | None = None,
    *,
    base: str = ".",
    fixed: Sequence[Deployment] | None = None,
) -> Problem:
    """The placement problem. `profiles`: measured ones, for domains whose spec gives none. SpecError names the key."""
    return planning_problem(run, cluster, prices, profiles, base=base, fixed=fixed).problem


def planning_problem(
    run: RunSpec,
    cluster: ClusterSpec,
    prices: PriceList,
    profiles: Sequence[DomainProfile] | None = None,
    *,
    base: str = ".",
    fixed: Sequence[Deployment] | None = None,
) -> PlanningProblem:
    """As `problem_of`, with notes on assumptions. `fixed`: the instances are given; only flows are solved for."""
    spec = run.placement
    shape = run_shape(run, base, cluster.engines.dtype)
    pools = pools_of(cluster, prices)
    performance = _performance(run, cluster, pools, shape)
    degrees = _degrees(run, shape, fixed)
    _check_sizes(run, shape)
    domains = profiles_of(run, quotas(run), profiles or ())
    usable = {p.name: _unservable_reason(performance, p, degrees) for p in pools}
    affinity, fallbacks = affinity_of(run, pools, usable)
    pool, devices = _trainer_placement(run, cluster, pools, fixed)
    windowed = run.schedule not in LAG and spec.in_flight is None
    only = None if cluster.engines.device is None else frozenset({device_name(cluster.engines.device)})
    try:
        problem = Problem(
            pools=pools,
            domains=domains,
            performance=performance,
            links=links_of(cluster),
            train=train_of(run, cluster, shape, pool, devices, load_training(cluster)),
            objective=Objective(spec.objective),
            rate=spec.rate,
            budget_usd_per_hour=spec.budget_usd_per_hour,
            in_flight=spec.in_flight,
            functions=function_price(cluster, prices),
            roles=frozenset(Role) - SPLIT if spec.prefill_decode == "off" else frozenset(Role),
            tensor_parallel=degrees,
            max_batch=cluster.engines.max_slots,
            affinity=affinity,
            fixed=None if fixed is None else tuple(fixed),
            restriction=Restriction.PD_ONLY if spec.prefill_decode == "only" else Restriction.FULL,
            device_types=only,
            utilisation=spec.utilisation,
            rate_tolerance=spec.rate_tolerance,
            window=window_of(run, cluster, shape) if fixed is None and windowed else None,
        )
    except ValueError as error:
        raise SpecError(f"the plan's problem: {error}") from None
    return PlanningProblem(problem, (*_assumptions(run, domains), *fallbacks))


def load_training(cluster: ClusterSpec, base: str = ".") -> TrainingConstants | None:
    """The trainer's constants of the cluster's calibration files; of several the last. None if no file has any."""
    found = None
    for entry in _entries(cluster, base):
        if "training" in entry[1]:
            try:
                found = TrainingConstants.from_dict(entry[1]["training"])
            except ValueError as error:
                raise SpecError(f"calibration '{entry[0]}': {error}", remedy=RECALIBRATE) from None
    return found


def solve_placement(question: PlanningProblem) -> Placement:
    """Solve. SpecError with the conflicting constraints if there is no plan."""
    from placement.solve import solve  # late: imports numpy

    try:
        found = solve(question.problem)
    except ValueError as error:  # found only while solving: no plan costs anything, so no ratio is best
        raise SpecError(f"the plan's problem: {error}") from None
    if isinstance(found, Infeasible):
        raise infeasible(found)
    return found


def infeasible(found: Infeasible) -> SpecError:
    """Why there is no plan, a constraint a line."""
    message = found.message
    lines = [f"no plan: {message}", *(f"binds: {conflict}" for conflict in found.conflicts if conflict not in message)]
    return SpecError("\n".join(lines), remedy="loosen one of these, or see what would do with `rollart plan --what-if`")


def demands_of(placement: Placement) -> list[Demand]:
    """Demands for device assignment: the largest parts of a pool first, so that none of them straddles hosts."""
    parts = sorted(placement.deployments, key=lambda d: (d.role is not Role.TRAINER, -d.tp, d.pool, d.role))
    return [Demand(d.role, d.replicas, d.tp, pool=d.pool) for d in parts if d.replicas]


def run_shape(run: RunSpec, base: str, dtype: str = "auto") -> DecoderShape:
    """The model's shape at the serving precision: the run's, else that of the engines' `dtype`. SpecError for a
    config.json that describes no supported model."""
    spec, width = run.placement, 4.0 if dtype == "float32" else 2.0
    try:
        return shape_of(
            model_config(run, base),
            name=model_name(run),
            weight_bytes_per_parameter=width if spec.weight_bytes is None else spec.weight_bytes,
            kv_bytes_per_element=width if spec.kv_bytes is None else spec.kv_bytes,
        )
    except ValueError as error:
        raise SpecError(f"model: {error}", remedy="give model.config the model's Hugging Face config.json") from None


def load_calibrations(cluster: ClusterSpec, base: str = ".") -> dict[str, Calibration]:
    """The cluster's calibration files by device. A file holds one calibration or a list of them (JSON or YAML)."""
    found: dict[str, Calibration] = {}
    for name, entry in _entries(cluster, base):
        if "training" in entry or PUBLISH in entry:
            continue
        try:
            one = _calibration(entry)
        except ValueError as error:
            raise SpecError(f"calibration '{name}': {' '.join(str(error).split())}", remedy=RECALIBRATE) from None
        found[one.device] = one
    return found


RECALIBRATE = "write it anew with `rollart calibrate`"


def _entries(cluster: ClusterSpec, base: str) -> list[tuple[str, Mapping[str, object]]]:
    """Entries of the calibration files, each with the name of its file."""
    import yaml

    found: list[tuple[str, Mapping[str, object]]] = []
    for name in cluster.calibration:
        path = Path(base) / name
        try:
            text = path.read_text(encoding="utf-8")
            data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        except OSError as error:
            raise SpecError(f"calibration '{name}': {path} cannot be read: {error.strerror}") from None
        except (ValueError, yaml.YAMLError) as error:
            raise SpecError(f"calibration '{name}': {' '.join(str(error).split())}", remedy=RECALIBRATE) from None
        for entry in data if isinstance(data, list) else [data]:
            if not isinstance(entry, Mapping):
                raise SpecError(
                    f"calibration '{name}': it holds no mapping (rule: what `rollart calibrate` writes)",
                    remedy=RECALIBRATE,
                )
            found.append((name, entry))
    return found


def _calibration(entry: Mapping[str, object]) -> Calibration:
    """The calibration of an entry: a calibration, a fit (which has more keys), or a whole machine with an `engine`."""
    engine = entry.get("engine")
    fitted = engine if isinstance(engine, Mapping) else entry
    return Calibration.from_dict({key: value for key, value in fitted.items() if key != "fit"})


def _measured_speeds(name: str, value: object) -> PublishSpeeds:
    try:
        if not isinstance(value, Mapping):
            raise TypeError
        return PublishSpeeds(**{key: float(speed) for key, speed in value.items()})
    except (TypeError, ValueError):
        rule = "rule: speeds in GB/s, as `rollart calibrate --from` writes them"
        raise SpecError(f"calibration '{name}': {PUBLISH} is {value!r} ({rule})", remedy=RECALIBRATE) from None


def window_of(run: RunSpec, cluster: ClusterSpec, shape: DecoderShape) -> InFlightWindow:
    """Parameters of the in-flight window where groups are admitted one by one."""
    return InFlightWindow(
        {d.name: d.group_size for d in run.domains},
        float(run.model.context),
        publish=publishing_of(run, cluster, shape),
        aborts=run.schedule not in ("areal", "paced"),
        waits=run.schedule == "paced",
    )


def publishing_of(run: RunSpec, cluster: ClusterSpec, shape: DecoderShape) -> Publishing:
    """Inputs of the publish time besides pools and links."""
    weights = run.weights
    buckets = weights.store or weights.collective
    transport = Transport.FILES if buckets is None else Transport.COLLECTIVE
    return Publishing(
        shape.weight_bytes / 1e9,
        Transport.STORE if weights.store is not None else transport,
        store_links_of(cluster),
        bucket_gb=1.0 if buckets is None else buckets.bucket_mb / 1000,
        ahead=weights.update != "on_divergence",
        speeds=_speeds(cluster),
    )


def _speeds(cluster: ClusterSpec) -> PublishSpeeds:
    """Publish speeds: the preset's, overridden by the calibration files', overridden by the cluster's `publish`."""
    spec = cluster.publish
    speeds = PublishSpeeds() if spec.preset is None else PRESETS[spec.preset]
    for name, entry in _entries(cluster, "."):
        if PUBLISH in entry:
            speeds = replace(speeds, **_measured_speeds(name, entry[PUBLISH]).stated())
    return replace(speeds, **spec.model_dump(exclude={"preset"}, exclude_none=True))


def _performance(run: RunSpec, cluster: ClusterSpec, pools: Sequence[Pool], shape: DecoderShape) -> RooflinePerformance:
    """An engine on a CPU keeps KV for its slots, however much memory its host has."""
    asked = run.placement.arithmetic
    slots = cluster.engines.max_slots * shape.kv_bytes(float(run.model.context))
    return RooflinePerformance(
        shape,
        load_calibrations(cluster),
        precision="fp8" if asked == "fp8" or (asked == "auto" and shape.weight_bytes_per_parameter == 1) else "bf16",
        weight_only=asked == "auto",
        kv_capacity_bytes={p.device.name: slots for p in pools if p.device.is_cpu and p.device.memory_gb is None},
    )


def _degrees(run: RunSpec, shape: DecoderShape, fixed: Sequence[Deployment] | None) -> tuple[int, ...]:
    """Tensor-parallel degrees to consider. Degrees that the user names must divide the model."""
    if fixed is not None:
        return tuple(sorted({d.tp for d in fixed if d.role not in (Role.TRAINER, Role.REWARD)})) or (1,)
    given = run.placement.tensor_parallel
    if given is None:
        return DEFAULT_TP
    for tp in given:
        reason = shape.allows_tp(tp)
        if reason is not None:
            raise SpecError(f"placement.tensor_parallel has {tp}: {reason}")
    return tuple(sorted(set(given)))


def _check_sizes(run: RunSpec, shape: DecoderShape) -> None:
    """SpecError for a size of `rollout.parallelism` that the model does not have."""
    spec = run.rollout.parallelism
    for size in (spec.sizes if spec is not None else None) or ():
        reason = shape.allows_tp(size)
        if reason is not None:
            raise SpecError(f"rollout.parallelism.sizes has {size}: {reason}")


def _unservable_reason(performance: RooflinePerformance, pool: Pool, degrees: Sequence[int]) -> str | None:
    """The reason why a pool cannot serve the model with any of the degrees; None if it can."""
    reasons = []
    for tp in degrees:
        found = performance.instance(pool.device, tp)
        if not isinstance(found, str) and found.kv_capacity_bytes > 0 and tp <= pool.count:
            return None
        reasons.append(found if isinstance(found, str) else "the model does not fit into its memory")
    return reasons[-1]


def _trainer_placement(
    run: RunSpec, cluster: ClusterSpec, pools: Sequence[Pool], fixed: Sequence[Deployment] | None
) -> tuple[str | None, int | None]:
    """Pool and devices of the trainer, None where not given. Of several pools with the type, the largest."""
    placed = [d for d in fixed or () if d.role is Role.TRAINER]
    if placed:
        return placed[0].pool, placed[0].tp * placed[0].replicas
    spec = run.placement.train
    wanted = spec.pool or cluster.trainer.device
    if wanted is None:
        return None, spec.devices
    named = [p for p in pools if p.name == wanted] or [p for p in pools if p.device.name == device_name(wanted)]
    if not named:
        names = [*(p.name for p in pools), *dict.fromkeys(p.device.name for p in pools)]
        key = "placement.train.pool" if spec.pool else "trainer.device"
        raise SpecError(f"{key} is '{wanted}' (rule: a pool or a device type{did_you_mean(wanted, names)})")
    return max(named, key=lambda p: p.count).name, spec.devices


def _assumptions(run: RunSpec, domains: Sequence[DomainProfile]) -> tuple[str, ...]:
    notes = []
    assumed = [d.name for d in domains if d.source == ASSUMED]
    if assumed:
        notes.append(
            f"assumed: every trajectory of {some_of(assumed)} is as long as max_turns, max_tokens and model.context "
            "allow; give a profile, or placement.profile a finished run"
        )
    notes += [f"profile of {d.name}: {d.source}" for d in domains if d.source not in (ASSUMED, "given")]
    if run.schedule in ("sync", "sync_plus"):
        notes.append(
            f"schedule is {run.schedule}: generation and training take turns, which the rate does not account for"
        )
    return tuple(notes)
