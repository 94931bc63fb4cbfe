"""From specs to the placement problem, and from its solution to the parts that will run: pools with devices and
prices, links, domain profiles, training and hardware affinity as values of `placement`. With `resolve` above it, the
only caller of `placement`. Solving imports numpy, and does so late.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from placement.architecture import DecoderShape, shape_of
from placement.hardware import catalogue, device_name, override
from placement.problem import (
    DomainProfile,
    EnvironmentCost,
    FunctionPrice,
    InFlightWindow,
    Problem,
    Quantity,
    Restriction,
    RewardCost,
    TrainingConstants,
    TrainingWork,
)
from placement.publish import PRESETS, STORE, Publishing, PublishSpeeds, Transport
from placement.roofline import Calibration, RooflinePerformance
from placement.training import adapter_parameters
from placement.types import Demand, Deployment, Device, Infeasible, Link, Objective, Placement, Pool, Role
from rollart.errors import SpecError, did_you_mean, one_line, some_of
from rollart.hub import HubModel, is_commit, is_hub_id
from rollart.settings.cluster import ClusterSpec, DeviceSpec, PoolSpec
from rollart.settings.functions import FunctionRelease, effective_spec
from rollart.settings.placement import ProfileSpec, RewardCostSpec
from rollart.settings.prices import PriceList
from rollart.settings.rules import quotas
from rollart.settings.run import LAG, DomainSpec, ModelSpec, RunSpec
from rollart.user_code import UserCodeGuard, guard, importable
from serverless.spec import FunctionSpec, gpu_type

ASSUMED = "assumed"
"""Source of a profile that is assumed, not given: every trajectory is as long as the spec allows."""

DEFAULT_TP = (1, 2, 4, 8)

PUBLISH = "publish"
"""Key of a calibration file's entry that holds publish speeds."""

SPLIT = frozenset({Role.PREFILL, Role.DECODE})

GIB_IN_GB = 1.073741824

MIB_IN_GB = 2**20 / 1e9

RECALIBRATE = "write it anew with `rollart calibrate`"


@dataclass(frozen=True, slots=True)
class Specs:
    """Specs as written. `base` is the directory that relative paths of the run spec start from; `measured` the domain
    profiles that `placement.profile` names, for domains whose spec gives none; empty if they were not requested."""

    run: RunSpec
    cluster: ClusterSpec
    prices: PriceList
    base: str = "."
    measured: tuple[DomainProfile, ...] = ()
    releases: Mapping[str, FunctionRelease] = field(default_factory=dict)
    """The versions of deployed functions that the run has drawn, by function."""


AnySpecs = TypeVar("AnySpecs", bound=Specs)


@dataclass(frozen=True, slots=True)
class PlanningProblem:
    """A placement problem, and notes on how it was derived from the specs, for readers of the plan."""

    problem: Problem
    notes: tuple[str, ...] = ()


def planning_problem(specs: Specs, fixed: Sequence[Deployment] | None = None) -> PlanningProblem:
    """The placement problem. `fixed`: the instances are given; only flows are solved for. SpecError names the key."""
    run, cluster, prices = specs.run, specs.cluster, specs.prices
    spec, shape = run.placement, run_shape(specs)
    pools = pools_of(cluster, prices)
    asked = spec.arithmetic
    # An engine on a CPU keeps KV for its slots, however much memory its host has.
    slots = cluster.engines.max_slots * shape.kv_bytes(float(run.model.context))
    performance = RooflinePerformance(
        shape,
        load_calibrations(cluster),
        precision="fp8" if asked == "fp8" or (asked == "auto" and shape.weight_bytes_per_parameter == 1) else "bf16",
        weight_only=asked == "auto",
        kv_capacity_bytes={p.device.name: slots for p in pools if p.device.is_cpu and p.device.memory_gb is None},
    )
    degrees = _degrees(run, shape, fixed)
    domains = profiles_of(run, quotas(run), specs.measured, specs.base, specs.releases)
    usable = {p.name: _unservable_reason(performance, p, degrees) for p in pools}
    affinity, fallbacks = affinity_of(run, pools, usable)
    pool, devices = trainer_placement(run, cluster, pools, fixed)
    windowed = run.schedule not in LAG and spec.in_flight is None
    only = None if cluster.engines.device is None else frozenset({device_name(cluster.engines.device)})
    try:
        problem = Problem(
            pools=pools,
            domains=domains,
            performance=performance,
            links=_links(cluster, to_store=False),
            train=_training_work(run, cluster, shape, pool, devices),
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
    return PlanningProblem(problem, (*_assumptions(run, domains, specs.releases), *fallbacks))


def solve_placement(question: PlanningProblem) -> Placement:
    """Solve. SpecError with the conflicting constraints, one per line, if there is no plan."""
    from placement.solve import solve  # late: imports numpy

    try:
        found = solve(question.problem)
    except ValueError as error:  # found only while solving: no plan costs anything, so no ratio is best
        raise SpecError(f"the plan's problem: {error}") from None
    if isinstance(found, Infeasible):
        text = found.message
        lines = [f"no plan: {text}", *(f"binds: {conflict}" for conflict in found.conflicts if conflict not in text)]
        remedy = "loosen one of these, or see what would do with `rollart plan --what-if`"
        raise SpecError("\n".join(lines), remedy=remedy)
    return found


def demands_of(placement: Placement) -> list[Demand]:
    """Demands for device assignment: the largest parts of a pool first, so that none of them straddles hosts."""
    parts = sorted(placement.deployments, key=lambda d: (d.role is not Role.TRAINER, -d.tp, d.pool, d.role))
    return [Demand(d.role, d.replicas, d.tp, pool=d.pool) for d in parts if d.replicas]


def pools_of(cluster: ClusterSpec, prices: PriceList) -> tuple[Pool, ...]:
    """Every pool. SpecError for a pool without a price, or with figures that no device has."""
    own = {device.name: device for device in cluster.devices}
    return tuple(_pool(pool, own.get(pool.device), prices) for pool in cluster.pools)


def pool_labels(pool: PoolSpec) -> dict[str, str]:
    """Labels of every node of a pool: parts choose their nodes by `pool`."""
    return {"pool": pool.name, "device": pool.device, **pool.labels}


def function_price(cluster: ClusterSpec, prices: PriceList) -> FunctionPrice | None:
    """Prices of functions; None where the list has none for the backend. SpecError for an unknown provider."""
    provider = cluster.functions.price or cluster.functions.chain[0]
    units = {p.unit: p.usd for p in prices.prices if p.name == provider and p.unit != "device-hour"}
    if not units:
        if cluster.functions.price is None:
            return None
        known = sorted({p.name for p in prices.prices if p.unit != "device-hour"})
        raise SpecError(
            f"functions.price is '{provider}' (rule: a provider of the price list{did_you_mean(provider, known)})",
            remedy="add its prices to price_list",
        )
    return FunctionPrice(
        provider=provider,
        usd_per_gb_s=units.get("GB-second", 0.0) + units.get("GiB-second", 0.0) / GIB_IN_GB,
        usd_per_core_s=units.get("core-second", 0.0),
        usd_per_million_requests=units.get("million-requests", 0.0),
        usd_per_gpu_s={kind: entry.usd for kind, entry in prices.gpu_prices(provider).items()},
        charges_idle="idle-core-second" in units and prices.billed(provider),
    )


def profiles_of(
    run: RunSpec,
    quotas: Mapping[str, int],
    measured: Sequence[DomainProfile] = (),
    base: str = ".",
    releases: Mapping[str, FunctionRelease] = MappingProxyType({}),
) -> tuple[DomainProfile, ...]:
    """The work of each domain: as given, else as measured, else as long as its bounds allow (`source` assumed).
    `releases`: the drawn versions of deployed functions.

    A domain's weight is its quota in the batch, whatever the mix of the run in which it was measured.
    """
    known = {profile.name: profile for profile in measured}
    profiles = []
    for domain in run.domains:
        weight = float(quotas[domain.name])
        try:
            if domain.profile is not None:
                scored = domain.profile.reward is not None
                functions = _scoring_functions(run, domain, base, releases) if scored else ()
                profiles.append(_given(domain, domain.profile, weight, functions))
            elif domain.name in known:
                profiles.append(replace(known[domain.name], weight=weight, max_turns=domain.max_turns))
            else:
                profiles.append(_assumed(domain, run.model.context, weight))
        except ValueError as error:
            raise SpecError(str(error), remedy=f"mend the profile of domain '{domain.name}'") from None
    return tuple(profiles)


def _scoring_functions(
    run: RunSpec, domain: DomainSpec, base: str, releases: Mapping[str, FunctionRelease]
) -> tuple[FunctionSpec, ...]:
    """The effective settings of a domain's reward functions."""
    used = {reward.function for reward in domain.rewards}
    return tuple(effective_spec(entry, base, releases.get(entry.name)) for entry in run.functions if entry.name in used)


def _training_work(
    run: RunSpec, cluster: ClusterSpec, shape: DecoderShape, pool: str | None, devices: int | None
) -> TrainingWork:
    """Training as the placer sees it, fixed to `pool` and `devices` where given."""
    spec, training = run.placement.train, run.training
    constants = _calibrated_training(cluster)
    checkpointing = cluster.trainer.activation_checkpointing
    return TrainingWork(
        batch=run.batch.trajectories,
        staleness=run.staleness,
        epochs=training.passes,
        pool=pool,
        devices=devices,
        bytes_per_parameter=spec.bytes_per_parameter * (1 if training.critic is None else 2),
        trained_parameters=_trained_parameters(run, shape),
        frozen_bytes_per_parameter=spec.frozen_bytes_per_parameter,
        sequence=spec.sequence or run.model.context,
        microbatch_tokens=training.max_tokens_per_microbatch,
        minibatches=training.minibatches,
        recompute=True if spec.recompute is None and checkpointing else spec.recompute,
        split=spec.split,
        constants=constants if spec.mfu is None else replace(constants, mfu=spec.mfu),
        seconds_per_token=spec.seconds_per_token,
        seconds_per_step=spec.seconds_per_step,
    )


def affinity_of(
    run: RunSpec, pools: Sequence[Pool], usable: Mapping[str, str | None]
) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """`hw_affinity` as pools by domain, and a note for each domain that had to fall back.

    A name is a pool's or a device type's. A device type that this cluster lacks, or whose pools cannot serve the model
    (`usable`: the reason by pool, None if it can), leaves the domain to any pool, as RollArt does (§4.1). SpecError for
    a name that is neither, since that is a typing error.
    """
    found: dict[str, tuple[str, ...]] = {}
    notes = []
    for domain in run.domains:
        tag = domain.tag or domain.name
        wanted = run.hw_affinity.get(tag, run.hw_affinity.get("default"))
        if wanted is None:
            continue
        named = [p.name for p in pools if p.name == wanted]
        named = named or [p.name for p in pools if p.device.name == device_name(wanted)]
        if not named and device_name(wanted) not in catalogue():
            names = [*(p.name for p in pools), *dict.fromkeys(p.device.name for p in pools), *catalogue()]
            raise SpecError(
                f"hw_affinity: '{tag}' prefers '{wanted}' (rule: a pool or a device type{did_you_mean(wanted, names)})"
            )
        able = tuple(name for name in named if usable[name] is None)
        if able:
            found[domain.name] = able
            continue
        reason = usable[named[0]] if named else "the cluster has none"
        notes.append(f"hw_affinity: {domain.name} prefers {wanted}, but {reason}: any pool may take it")
    return found, tuple(notes)


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
    adapters, whole = adapter_bytes(run, shape), shape.weight_bytes / 1e9
    transport = Transport.FILES if buckets is None else Transport.COLLECTIVE
    return Publishing(
        whole if adapters is None else adapters / 1e9,
        Transport.STORE if weights.store is not None else transport,
        _links(cluster, to_store=True),
        bucket_gb=1.0 if buckets is None else buckets.bucket_mb / 1000,
        ahead=weights.update != "on_divergence",
        speeds=_speeds(cluster),
        # An adapter is merged into the whole model; several are copied beside it.
        load_gb=None if adapters is None or run.domains[0].adapter is not None else whole,
    )


def adapter_bytes(run: RunSpec, shape: DecoderShape) -> float | None:
    """Bytes of a version's adapters, in float32; None if versions have whole weights."""
    lora, parameters = run.training.lora, _trained_parameters(run, shape)
    return None if parameters is None or (lora is not None and lora.publish == "merged") else 4 * parameters


def adapter_count(run: RunSpec) -> int:
    """The number of the run's adapters."""
    return 0 if run.training.lora is None else max(1, len({domain.adapter for domain in run.domains}))


def _trained_parameters(run: RunSpec, shape: DecoderShape) -> float | None:
    """Parameters of the run's adapters; None if it trains the model itself."""
    lora = run.training.lora
    if lora is None:
        return None
    return adapter_count(run) * adapter_parameters(shape, lora.rank, tuple(lora.targets))


def run_shape(specs: Specs) -> DecoderShape:
    """The model's shape at the serving precision: the run's, else that of the engines' `dtype`. SpecError for a
    config.json that describes no supported model."""
    run, spec = specs.run, specs.run.placement
    width = 4.0 if specs.cluster.engines.dtype == "float32" else 2.0
    try:
        return shape_of(
            model_config(run, specs.base),
            name=model_name(run),
            weight_bytes_per_parameter=width if spec.weight_bytes is None else spec.weight_bytes,
            kv_bytes_per_element=width if spec.kv_bytes is None else spec.kv_bytes,
        )
    except ValueError as error:
        raise SpecError(f"model: {error}", remedy="give model.config the model's Hugging Face config.json") from None


def model_config(run: RunSpec, base: str) -> Mapping[str, object]:
    """The `config.json` that the plan is computed for. SpecError, naming the key, if it cannot be read."""
    model = run.model
    if isinstance(model.config, str):
        return _config_file(Path(base) / model.config, "model.config")
    if model.config is not None:
        return model.config
    if model.path is not None:
        return _config_file(model_directory(model, base), "model.path")
    assert model.init is not None, "the rules of the run spec want one of them"
    return initial_config(model.init, base)


def hub_model(model: ModelSpec, base: str) -> HubModel | None:
    """The model of the Hub that `model.path` names; None if it names a directory, or nothing that could be an id."""
    if model.path is None or not is_hub_id(model.path) or (directory := Path(base) / model.path).is_dir():
        return None
    return HubModel(model.path, model.revision, directory)


def model_directory(model: ModelSpec, base: str) -> Path:
    """The directory of `model.path`, which exists or not; of a model of the Hub its snapshot, which may lack weights.
    Errors as of `HubModel`."""
    assert model.path is not None
    hub = hub_model(model, base)
    return Path(base) / model.path if hub is None else hub.snapshot()


def data_digest(specs: Specs) -> str:
    """SHA-256 of the file of `training.data`, in hexadecimal. SpecError if it cannot be read."""
    data = specs.run.training.data
    assert data is not None, "the run trains on a file"
    path = Path(specs.base) / data
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SpecError(
            f"training.data is '{data}', and {path} cannot be read: {error.strerror}",
            remedy="give a JSON Lines file, relative to the run file",
        ) from None


def pinned(specs: AnySpecs) -> AnySpecs:
    """The specs with the commit of a model of the Hub as their `model.revision`, and the digest of `training.data`:
    from then on every part, on any node and after any resume, uses the same files. The same object if there is nothing
    to pin."""
    training = specs.run.training
    if training.data is not None and training.data_sha256 is None:
        training = training.model_copy(update={"data_sha256": data_digest(specs)})
        specs = replace(specs, run=specs.run.model_copy(update={"training": training}))
    hub = hub_model(specs.run.model, specs.base)
    if hub is None or is_commit(hub.revision):
        return specs
    model = specs.run.model.model_copy(update={"revision": hub.snapshot().name})
    return replace(specs, run=specs.run.model_copy(update={"model": model}))


def model_name(run: RunSpec) -> str:
    """The model's name in calibrations and reports: the directory of its config.json, or the source of the config."""
    model = run.model
    path = model.config if isinstance(model.config, str) else model.path
    if path is not None and not isinstance(model.config, dict):
        return Path(path).parent.name or run.name if Path(path).suffix == ".json" else Path(path).name
    given = model.config if isinstance(model.config, dict) else model.init
    if isinstance(given, str):
        return given
    return str((given or {}).get("_name_or_path") or run.name)


@guard
def initial_config(init: Mapping[str, Any] | str, base: str) -> dict[str, Any]:
    """`model.init`: the configuration, or the return value of `package.module:function`; the run file's directory is
    importable meanwhile, as in a run. SpecError if there is no configuration."""
    if not isinstance(init, str):
        return dict(init)
    module, _, name = init.partition(":")
    try:
        with importable(base), UserCodeGuard():
            found: Any = getattr(importlib.import_module(module), name)()
    except Exception as error:  # a user's module may raise any exception
        raise SpecError(f"model.init '{init}' gives no configuration: {one_line(error, 500)}") from None
    if not isinstance(found, dict):
        raise SpecError(f"model.init '{init}' returned {type(found).__name__} (rule: a mapping, as in config.json)")
    return found


def _calibrated_training(cluster: ClusterSpec) -> TrainingConstants:
    """The trainer's constants of the cluster's calibration files; of several the last."""
    found = TrainingConstants()
    for name, entry in _entries(cluster):
        if "training" in entry:
            try:
                found = TrainingConstants.from_dict(entry["training"])
            except ValueError as error:
                raise SpecError(f"calibration '{name}': {error}", remedy=RECALIBRATE) from None
    return found


def load_calibrations(cluster: ClusterSpec) -> dict[str, Calibration]:
    """The cluster's calibration files by device. A file holds one calibration or a list of them (JSON or YAML)."""
    found: dict[str, Calibration] = {}
    for name, entry in _entries(cluster):
        if "training" in entry or PUBLISH in entry:
            continue
        engine = entry.get("engine")  # of a whole machine
        fitted = engine if isinstance(engine, Mapping) else entry
        try:
            one = Calibration.from_dict({key: value for key, value in fitted.items() if key != "fit"})
        except ValueError as error:
            raise SpecError(f"calibration '{name}': {' '.join(str(error).split())}", remedy=RECALIBRATE) from None
        found[one.device] = one
    return found


def _degrees(run: RunSpec, shape: DecoderShape, fixed: Sequence[Deployment] | None) -> tuple[int, ...]:
    """Tensor-parallel degrees to consider. SpecError for a degree that the user names and the model does not have."""
    given, parallelism = run.placement.tensor_parallel, run.rollout.parallelism
    sizes = None if parallelism is None else parallelism.sizes
    for key, degrees in (
        ("placement.tensor_parallel", given if fixed is None else None),
        ("rollout.parallelism.sizes", sizes),
    ):
        for tp in degrees or ():
            reason = shape.allows_tp(tp)
            if reason is not None:
                raise SpecError(f"{key} has {tp}: {reason}")
    if fixed is not None:
        return tuple(sorted({d.tp for d in fixed if d.role not in (Role.TRAINER, Role.REWARD)})) or (1,)
    return DEFAULT_TP if given is None else tuple(sorted(set(given)))


def _unservable_reason(performance: RooflinePerformance, pool: Pool, degrees: Sequence[int]) -> str | None:
    """The reason why a pool cannot serve the model with any of the degrees; None if it can."""
    reasons = []
    for tp in degrees:
        found = performance.instance(pool.device, tp)
        if not isinstance(found, str) and found.kv_capacity_bytes > 0 and tp <= pool.count:
            return None
        reasons.append(found if isinstance(found, str) else "the model does not fit into its memory")
    return reasons[-1]


def trainer_placement(
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


def _assumptions(
    run: RunSpec, domains: Sequence[DomainProfile], releases: Mapping[str, FunctionRelease]
) -> Iterator[str]:
    assumed = [d.name for d in domains if d.source == ASSUMED]
    if assumed:
        yield (
            f"assumed: every trajectory of {some_of(assumed)} is as long as max_turns, max_tokens and model.context "
            "allow; give a profile, or placement.profile a finished run"
        )
    yield from (f"profile of {d.name}: {d.source}" for d in domains if d.source not in (ASSUMED, "given"))
    yield from _undrawn_functions(run, releases)
    if run.schedule in ("sync", "sync_plus"):
        yield f"schedule is {run.schedule}: generation and training take turns, which the rate does not account for"


def _undrawn_functions(run: RunSpec, releases: Mapping[str, FunctionRelease]) -> Iterator[str]:
    """A note for each deployed function whose settings a given profile depends on, before a run has drawn its
    version."""
    for entry in run.functions:
        scored = [
            domain.name
            for domain in run.domains
            if any(reward.function == entry.name for reward in domain.rewards)
            and (profile := domain.profile) is not None
            and profile.reward is not None
            and profile.reward.gpu is None
        ]
        if scored and entry.function is not None and entry.name not in releases:
            yield (
                f"function '{entry.name}' ({entry.function}) is not drawn before a run starts: its GPU and memory are "
                f"unknown, and the reward of {some_of(scored)} is planned without a GPU of it; give profile.reward.gpu"
            )


def _pool(pool: PoolSpec, own: DeviceSpec | None, prices: PriceList) -> Pool:
    """The type's figures: the cluster's, else the catalogue's, else none; the pool's own figures replace them."""
    try:
        if own is not None:
            figures = own.model_dump(exclude_none=True, exclude={"name", "base", "source"})
            device = override(own.name, base=own.base, source=own.source, **figures)
        else:
            device = catalogue().get(device_name(pool.device), Device(pool.device))
    except ValueError as error:
        raise SpecError(f"pool '{pool.name}': {error}") from None
    if pool.memory_gb is not None and not device.is_cpu:
        device = replace(device, memory_gb=pool.memory_gb)
    if pool.devices_per_host is not None:
        device = replace(device, devices_per_host=pool.devices_per_host)
    return Pool(
        name=pool.name,
        device=device,
        count=pool.count,
        usd_per_device_hour=_hourly(pool, prices),
        memory_gb=pool.memory_gb if device.is_cpu else None,
        labels=pool.labels,
        rented=pool.rented,
    )


def _hourly(pool: PoolSpec, prices: PriceList) -> float:
    if pool.price is not None:
        return pool.price
    kind = pool.price_kind
    price = prices.device_price(pool.device, kind)
    if price is None and kind == "spot":
        price = prices.device_price(pool.device)
    if price is None:
        listed = [p.name for p in prices.prices if p.unit == "device-hour"]
        named = f"{kind} price" if pool.commitment else f"price{did_you_mean(pool.device, listed)}"
        raise SpecError(
            f"pool '{pool.name}': device '{pool.device}' has no {named}",
            remedy="give the pool a price (dollars per device-hour) or add one to price_list",
        )
    return price.usd


def _links(cluster: ClusterSpec, *, to_store: bool) -> tuple[Link, ...]:
    """Links between pools, which KV crosses, or those to the store of weight versions, which only weights cross. A pool
    of the store's name takes precedence."""
    stored = STORE not in {pool.name for pool in cluster.pools}
    return tuple(
        Link(link.a, link.b, link.gb_per_s, link.latency_ms / 1000.0)
        for link in cluster.links
        if (stored and STORE in (link.a, link.b)) is to_store
    )


def reward_cost(spec: RewardCostSpec, functions: Sequence[FunctionSpec]) -> RewardCost:
    """The cost of a profile's reward, on the GPU of the domain's reward `functions` if the profile names none. A run
    calls a function with a GPU at its provider, so no pool is planned for it, and the provider bills the function's
    memory, whatever its weights take."""
    gpu_function = next((function for function in functions if function.gpu), None)
    gpu, gpus = gpu_type((gpu_function.gpu if gpu_function is not None else "") if spec.gpu is None else spec.gpu)
    workers = functions if gpu_function is None else (gpu_function,)
    batch_s = spec.batch * spec.seconds if spec.batch_s is None else spec.batch_s
    given = spec.model_dump(exclude={"seconds", "on_gpu", "gpu", "batch_s"})
    return RewardCost(
        seconds=batch_s / spec.batch,
        single_s=spec.seconds,
        on_gpu=spec.on_gpu or bool(gpu),
        gpu=gpu,
        gpus=max(1, gpus),
        provided=gpu_function is not None or (bool(gpu) and bool(functions)),
        keep_alive_s=max((function.keep_alive_s for function in workers), default=60.0),
        warm=sum(function.warm for function in workers),
        worker_memory_gb=None if gpu_function is None else gpu_function.memory_mb * MIB_IN_GB,
        functions=tuple(sorted(function.name for function in workers)),
        **given,
    )


def _given(
    domain: DomainSpec, spec: ProfileSpec, weight: float, functions: Sequence[FunctionSpec] = ()
) -> DomainProfile:
    return DomainProfile(
        name=domain.name,
        turns=Quantity(**spec.turns.model_dump()),
        new_tokens=Quantity(**spec.new_tokens.model_dump()),
        output_tokens=Quantity(**spec.output_tokens.model_dump()),
        weight=weight,
        first_tokens=None if spec.first_tokens is None else Quantity(**spec.first_tokens.model_dump()),
        shared_prefix=spec.shared_prefix,
        environment=EnvironmentCost(**spec.environment.model_dump()),
        reward=None if spec.reward is None else reward_cost(spec.reward, functions),
        max_turns=domain.max_turns,
        source="given",
    )


def _assumed(domain: DomainSpec, context: int, weight: float) -> DomainProfile:
    """Every turn generates `max_tokens`, and observations fill the context: an upper bound of real trajectories."""
    output = domain.max_tokens
    turns = max(1, min(domain.max_turns, context // (output + 1)))
    new = max(1.0, context / turns - output)
    return DomainProfile(
        name=domain.name,
        turns=Quantity(float(turns)),
        new_tokens=Quantity(new),
        output_tokens=Quantity(float(output)),
        weight=weight,
        max_turns=domain.max_turns,
        source=ASSUMED,
    )


def _config_file(path: Path, key: str) -> Mapping[str, object]:
    file = path if path.suffix == ".json" else path / "config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(
            f"{key}: {file} cannot be read: {error.strerror}",
            remedy="give model.config a config.json, as a file or a mapping, to plan without the weights",
        ) from None
    except ValueError as error:
        raise SpecError(f"{key}: {file} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise SpecError(f"{key}: {file} holds no mapping (rule: a Hugging Face config.json)")
    return found


def _entries(cluster: ClusterSpec) -> list[tuple[str, Mapping[str, object]]]:
    """Entries of the calibration files, each with the name of its file."""
    import yaml

    found: list[tuple[str, Mapping[str, object]]] = []
    for name in cluster.calibration:
        path = Path(name)
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


def _speeds(cluster: ClusterSpec) -> PublishSpeeds:
    """Publish speeds: the preset's, overridden by the calibration files', overridden by the cluster's `publish`."""
    spec = cluster.publish
    speeds = PublishSpeeds() if spec.preset is None else PRESETS[spec.preset]
    for name, entry in _entries(cluster):
        if PUBLISH in entry:
            value = entry[PUBLISH]
            try:
                if not isinstance(value, Mapping):
                    raise TypeError
                measured = PublishSpeeds(**{key: float(speed) for key, speed in value.items()})
            except (TypeError, ValueError):
                rule = "rule: speeds in GB/s, as `rollart calibrate --from` writes them"
                raise SpecError(f"calibration '{name}': {PUBLISH} is {value!r} ({rule})", remedy=RECALIBRATE) from None
            speeds = replace(speeds, **measured.stated())
    return replace(speeds, **spec.model_dump(exclude={"preset"}, exclude_none=True))
