"""Options of a run: the one factory that makes rollout strategies, their settings from the specs, and the longest waits
that follow from them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from placement.roofline import RooflinePerformance
from placement.types import ROLLOUT_ROLES, Pool
from rollart.control.admission import PromptAdmission
from rollart.control.control_plane import RolloutContext, RolloutOptions
from rollart.control.strategy import RolloutStrategy
from rollart.errors import SpecError
from rollart.fleet import EngineKind
from rollart.launch.plan import rebalance_settings
from rollart.launch.start_limits import engine_start_limits
from rollart.ledger.intervals import ResourceState
from rollart.policy.schedules import Admission
from rollart.settings.resolve import Resolved
from rollart.settings.rollout import FairnessSpec, FilterSpec, ParallelismSpec, RedundancySpec, TailBatchingSpec
from rollart.settings.run import RunSpec
from rollart.strategies.fairness import DomainShareTracker, FairAdmission, FairnessSettings
from rollart.strategies.filtering import GroupFilter, additional_prompts
from rollart.strategies.lending import DeviceLender, LendingSettings
from rollart.strategies.prefetch import Prefetcher
from rollart.strategies.redundancy import RedundancyController, SelectionBiasReport
from rollart.strategies.rolling_update import Delayed, OnDivergence, Staggered, UpdatePolicy, VersionProbe
from rollart.strategies.tail_batching import TailBatchAdmission
from rollart.strategies.tp_change import Resharder, ReshardSettings, TensorParallelRule

DEFAULT_SIZES = (1, 2, 4, 8)

STALL_S = 600.0
"""Seconds without progress after which a run fails loudly, unless one of its leases may take longer."""

DELAYED_UPDATE_S = 120.0
"""Default limit of a turn's generation: most iterations end before it."""


@dataclass(frozen=True, slots=True)
class StrategySettings:
    """The options of a run's rollout; with the defaults there are none. A call makes them for one run."""

    redundancy: RedundancySpec = field(default_factory=RedundancySpec)
    tail: TailBatchingSpec | None = None
    """Tail batching, under a schedule of one batch at a time."""
    filter: FilterSpec = field(default_factory=FilterSpec)
    fairness: FairnessSettings | None = None
    """Shares of domains instead of quotas."""
    prefetch: int | Literal["auto"] = 0
    """Environments to reset ahead per domain; auto: computed from measured durations."""
    lending: LendingSettings | None = None
    """Engines lend their devices to training while a rollout ends, if the trainer can borrow devices."""
    reshard: ReshardSettings | None = None
    """Tensor parallelism follows preemption, if a fleet can start engines."""

    def __call__(self, run: RolloutContext) -> RolloutOptions:
        rules, waits = run.schedule.rules, run.waits
        shares = prefetcher = resharder = None
        if self.fairness is not None:
            shares = DomainShareTracker(
                run.domains,
                self.fairness,
                run.recorder,
                steps=run.schedule.steps,
                window=rules.alpha + 1 if rules.windowed else 1,
                apart=rules.admission is Admission.NEXT_BATCH,
            )
        if self.prefetch != 0:
            reset_s, close_s = waits.env_reset_s, waits.env_close_s
            prefetcher = Prefetcher(
                run.domains, run.leases, run.recorder, depth=self.prefetch, reset_s=reset_s, close_s=close_s
            )
        if self.reshard is not None:
            resharder = Resharder(
                run.gateway, run.leases, run.recorder, run.meter(), settings=self.reshard, round_=run.round
            )
        admission: Callable[..., PromptAdmission] = PromptAdmission
        if self.tail is not None:
            admission = partial(TailBatchAdmission, tail=self.tail)
        elif shares is not None:
            admission = partial(FairAdmission, shares=shares)
        strategies = [shares, *self._speculation(run), prefetcher, resharder, self._lender(run)]
        return RolloutOptions([s for s in strategies if s is not None], admission, shares, prefetcher)

    def _speculation(self, run: RolloutContext) -> Iterator[RolloutStrategy]:
        """Redundancy and filtering, and the report on the trajectories that are lost by them or by tail batching."""
        additional = self.filter.max_additional_running_prompts
        redundant = self.redundancy.groups > 1 or self.redundancy.size > 1
        if redundant or additional:
            yield RedundancyController(run.domains, self.redundancy, additional_prompts(run.domains, additional))
        if redundant or self.tail is not None or self.filter.zero_variance:
            yield SelectionBiasReport(run.recorder)
        if self.filter.zero_variance:
            yield GroupFilter(run.domains, self.filter, run.recorder)

    def _lender(self, run: RolloutContext) -> DeviceLender | None:
        if self.lending is None or run.borrow is None:
            return None
        lender = DeviceLender(
            run.gateway,
            run.recorder,
            run.borrow,
            settings=self.lending,
            behind=lambda: run.trainer.state == ResourceState.BUSY,
        )
        run.gateway.on_lost = lender.lost
        return lender


def strategy_settings(resolved: Resolved, reshard: ReshardSettings | None) -> StrategySettings:
    """The options that the run spec asks for; `reshard` depends on the kind of engines."""
    rollout = resolved.run.rollout
    return StrategySettings(
        redundancy=rollout.redundancy,
        tail=rollout.tail_batching,
        filter=rollout.filter,
        fairness=fairness_settings(resolved.run),
        prefetch=rollout.prefetch,
        lending=lending_settings(resolved),
        reshard=reshard,
    )


def fairness_settings(run: RunSpec) -> FairnessSettings | None:
    """Domain shares, if the run asks for them."""
    if not run.fair:
        return None
    spec = run.rollout.fairness or FairnessSpec()
    units = run.batch.trajectories // run.domains[0].group_size
    return FairnessSettings(run.shares, int(spec.slack * units + 1e-9), spec.follow)


def update_policy(resolved: Resolved) -> UpdatePolicy | None:
    """None if all engines update at once."""
    weights = resolved.run.weights
    match weights.update:
        case "delayed":
            return Delayed(DELAYED_UPDATE_S if weights.longest_s is None else weights.longest_s)
        case "staggered":
            return Staggered() if weights.fraction is None else Staggered(weights.fraction)
        case "on_divergence":
            assert weights.threshold is not None, "a rule of the spec"
            return OnDivergence(VersionProbe(-1, {}), weights.threshold)
        case "all":
            return None


def engines_are_elastic(resolved: Resolved) -> bool:
    """True if engines may come and go during the run."""
    return resolved.run.rollout.parallelism is not None or resolved.cluster.runtime.elastic is not None


def reshard_settings(resolved: Resolved) -> ReshardSettings | None:
    """None if the run does not ask for it. A pool's sizes are permitted by the model, around the sizes of the plan, and
    each doubles the previous one. A pool with a single size has no rule."""
    spec, problem = resolved.run.rollout.parallelism, resolved.problem
    if spec is None or problem is None:
        return None
    rules = {}
    for pool in problem.pools:
        engines = [a for a in resolved.plan.assignments if a.role in ROLLOUT_ROLES and a.pool == pool.name]
        sizes = _sizes(spec, problem.performance, pool, sorted(len(a.devices) for a in engines))
        if len(sizes) > 1:
            host = min(pool.device.devices_per_host or pool.count, pool.count)
            rules[pool.name] = TensorParallelRule(
                sizes,
                devices=host - host % sizes[-1],
                rise=spec.rise,
                quiet_steps=spec.quiet_steps,
                most_quiet_steps=max(64, spec.quiet_steps),
            )

    def speed(kind: EngineKind, context: float) -> float:
        device = next(p.device for p in problem.pools if p.name == kind.pool)
        model = problem.performance.instance(device, kind.tp)
        assert not isinstance(model, str), "only sizes that fit are in a rule"
        room = model.kv_capacity_bytes / problem.performance.shape.kv_bytes(context)
        batch = max(1.0, min(float(resolved.cluster.engines.max_slots), room))
        return batch / model.decode_step_s(batch, context) / kind.tp

    settings, rebalance = rebalance_settings(resolved), resolved.run.placement.rebalance
    return ReshardSettings(
        rules,
        horizon_s=rebalance.horizon_s,
        restart_s=rebalance.restart_s,
        move_s=settings.move_s + rebalance.restart_s,
        refuses=lambda kind: "the cluster spec gives the engines" if resolved.cluster.engines.fixed else "",
        speed=speed,
    )


def launch_reshard_settings(resolved: Resolved) -> ReshardSettings | None:
    """The same for real engines: vLLM engines take several GPUs each, embedded engines one."""
    settings = reshard_settings(resolved)
    if settings is None or resolved.cluster.engines.kind == "vllm":
        return settings

    def refuses(kind: EngineKind) -> str:
        if kind.tp > 1:
            return f"{kind.role} with tp {kind.tp} on {kind.pool}: the embedded engine has no tensor parallelism"
        return settings.refuses(kind)

    return replace(settings, refuses=refuses)


def lending_settings(resolved: Resolved) -> LendingSettings | None:
    """Settings of device lending, for trainers that can borrow devices; None if the run does not ask for it."""
    run = resolved.run
    if (spec := run.rollout.lending) is None:
        return None
    size = 1.0 if resolved.problem is None else resolved.problem.performance.shape.kv_bytes(1.0)
    return LendingSettings(
        setup_s=spec.setup_s,
        headroom=spec.headroom,
        move_s=run.leases.publish_s,
        context_tokens=run.model.context,
        bytes_per_token=size,
    )


def refuse_lending(resolved: Resolved) -> None:
    """SpecError for a run whose trainer cannot use borrowed devices."""
    if resolved.run.rollout.lending is not None:
        raise SpecError(
            "rollout.lending is given, and the embedded trainer takes no other devices (rule: in simulations)",
            remedy="leave rollout.lending out, or see its gain with `rollart simulate`",
        )


def engine_wait_s(resolved: Resolved) -> float:
    """Additional seconds that a turn may wait for an engine, beyond a restart and an update."""
    policy = update_policy(resolved)
    return (policy.longest_s if isinstance(policy, Delayed) else 0.0) + node_wait_s(resolved)


def node_wait_s(resolved: Resolved) -> float:
    """Seconds that the run waits for a node when no engine is left."""
    elastic = resolved.cluster.runtime.elastic
    return 0.0 if elastic is None else elastic.wait_s


def stall_limit_s(resolved: Resolved) -> float:
    """Longer than any wait that ends by itself: no lease expires later."""
    leases, hosts = resolved.run.leases, resolved.cluster.environments
    longest = max(
        hosts.start_s if hosts.workers else 0.0,
        hosts.pull_s if hosts.workers and hosts.images is not None else 0.0,
        leases.generate_s,
        engine_start_limits(resolved).most_s + leases.publish_s,
        leases.env_step_s,
        1.5 * leases.reward_s,
        leases.train_s,
    )
    return max(STALL_S, 2.0 * longest)


def _sizes(
    spec: ParallelismSpec, performance: RooflinePerformance, pool: Pool, planned: Sequence[int]
) -> tuple[int, ...]:
    """The longest chain of doublings that contains the plan's smallest size."""
    if not planned:
        return ()
    host = min(pool.device.devices_per_host or pool.count, pool.count)

    def fits(tp: int) -> bool:
        found = performance.instance(pool.device, tp)
        return tp <= host and not isinstance(found, str) and found.kv_capacity_bytes > 0

    allowed = {tp for tp in (spec.sizes or DEFAULT_SIZES) if fits(tp)} | {planned[0]}
    halves = (planned[0] // 2**n for n in range(1, 8) if planned[0] % 2**n == 0)
    down = list(itertools.takewhile(allowed.__contains__, halves))
    up = list(itertools.takewhile(allowed.__contains__, (planned[0] * 2**n for n in range(8))))
    return (*reversed(down), *up)
