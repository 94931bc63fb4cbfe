"""Rollout beyond the needs of one step: redundant environments, tail batching, resets ahead of need."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollart.settings.base import SpecEntry

MOST = 4.0
"""Largest factor: beyond it three quarters of the rollout are thrown away."""


class RedundancySpec(SpecEntry):
    """Redundant environments: more trajectories start than a step needs; the last to end are cancelled and charged
    apart.

    The first to end are short and easy: `rollart report utilization` compares cancelled with kept trajectories.
    """

    groups: float = Field(default=1.0, ge=1.0, le=MOST)
    """Groups started per domain, as a multiple of the groups that a step needs, rounded down. Whole-batch schedules
    cancel unfinished groups when the batch is full; the others let them go on, in a window wider by them."""
    size: float = Field(default=1.0, ge=1.0, le=MOST)
    """Members started per group, as a multiple of `group_size`, rounded down. The group is complete with the first
    `group_size` members to end; the others are cancelled."""
    health: bool = False
    """Start only as many as the observed share of broken environments calls for; the factors are upper bounds."""


class TailBatchingSpec(SpecEntry):
    """Tail batching: short rounds start more prompts than a step needs and put off the last to end; long rounds run
    the deferred prompts."""

    eta_prompts: float = Field(default=1.25, ge=1.0, le=MOST)
    """Prompts that a short round starts, as a multiple of a step's. At 1.25 a long round follows every four short
    ones."""
    eta_responses: float = Field(default=1.25, ge=1.0, le=MOST)
    """Responses that a short round starts per prompt, as a multiple of `group_size`."""


class FilterSpec(SpecEntry):
    """Dynamic filtering: groups without a learning signal are left out, and further prompts replace them.

    Filtered groups are charged as `filtered`; `rollart report utilization` compares them with kept groups.
    """

    zero_variance: bool = False
    """Leave out groups whose members all have the same reward: their advantage is 0. Needs `advantage.baseline: group`
    in every domain."""
    max_additional_running_prompts: int = Field(default=0, ge=0, le=1_000_000)
    """Prompts that run beyond the needs of a step, over all domains, so that filtered groups are replaced at once.
    Whole-batch schedules cancel unfinished prompts when the batch is full."""
    max_refills: float = Field(default=10.0, ge=0, le=1e6)
    """Groups of a domain that may be filtered between two of its steps, as a multiple of the groups that a step
    needs."""
    exhausted: Literal["fail", "keep"] = "fail"
    """Behaviour beyond `max_refills`. fail: the run stops with an error; keep: further groups are trained unfiltered
    until the next step."""


class ConcurrencySpec(SpecEntry):
    """The limit of concurrent trajectories per engine, found by watching its KV memory: up by a step while there is
    room, down by a factor when prefixes are evicted or requests preempted. A trajectory without room waits, and is
    never aborted for it. Not applied under `schedule: sync`.
    """

    mode: Literal["auto", "on", "off"] = "auto"
    """auto: on where the placer computed the plan, whose engines are then bounded by KV memory, unless `parallelism`
    follows their preemptions instead."""
    start: int = Field(default=32, ge=1, le=1_000_000)
    """First limit of an engine without a better estimate."""
    least: int = Field(default=1, ge=1, le=1_000_000)
    """Lowest limit."""
    most: int = Field(default=1024, ge=1, le=1_000_000)
    """Highest limit."""
    increase: int = Field(default=4, ge=1, le=1_000_000)
    """Increment of a limit when it rises."""
    decrease: float = Field(default=0.75, gt=0, lt=1)
    """Factor of a limit when it falls."""
    low: float = Field(default=0.80, ge=0, le=1)
    """Share of KV memory in use below which a limit rises."""
    high: float = Field(default=0.95, gt=0, le=1)
    """Share from which a limit falls, and above which no trajectory is admitted."""
    interval_s: float = Field(default=5.0, gt=0, le=86_400)
    """Seconds between checks, and between rises."""
    settle_s: float = Field(default=30.0, ge=0, le=86_400)
    """Seconds after a fall before the next change."""


class ParallelismSpec(SpecEntry):
    """Tensor parallelism of rollout engines that follows their preemptions from step to step."""

    sizes: list[Annotated[int, Field(ge=1, le=64)]] | None = Field(default=None, min_length=1)
    """Devices per engine to choose from; by default 1, 2, 4 and 8, where they divide the model and a host. Each change
    doubles or halves an engine's devices."""
    rise: float = Field(default=1.05, ge=1.0, le=1e6)
    """The size doubles when preemptions exceed this multiple of the previous step's."""
    quiet_steps: int = Field(default=4, ge=1, le=10_000)
    """The size halves after this many steps in a row without a preemption."""


class LendingSpec(SpecEntry):
    """Rollout engines whose devices train while a rollout ends: half of the engines, once the remaining work fits on
    the other half."""

    setup_s: float = Field(default=10.0, ge=0, le=86_400)
    """Seconds until lent devices train: the time to bring the trainer's state there."""
    headroom: float = Field(default=1.0, gt=0, le=1)
    """Share of an engine's KV memory into which its projected peak use must fit."""


class FollowSpec(SpecEntry):
    """Domain shares that follow cost and learning: weight × (learning / cost) ** sensitivity, within the domain's
    bounds.

    Cost is engine seconds per trained trajectory, lost ones included; learning is the mean distance of a reward from
    its group's mean.
    """

    sensitivity: float = Field(default=1.0, ge=0, le=10)
    """Exponent; 0 leaves the weights as they are."""
    memory: float = Field(default=10.0, ge=1, le=1e6)
    """Time constant of the exponential averages, in steps."""
    max_step: float = Field(default=0.05, gt=0, le=1)
    """Largest change of a share in one step."""


class FairnessSpec(SpecEntry):
    """Shares of domains over the whole run instead of the same quotas at every step."""

    slack: float = Field(default=0.0, ge=0, le=1)
    """How far a domain may fall behind its share before a batch waits for it, as a share of a batch, rounded down to
    whole groups. A deficit is made good later."""
    follow: FollowSpec | None = None
    """Shares move with measured cost and learning."""


class RolloutSpec(SpecEntry):
    """Work that rollout starts beyond the needs of a step, so as not to wait for stragglers, and its concurrency."""

    redundancy: RedundancySpec = Field(default_factory=RedundancySpec)
    """Redundant environments, by groups and by size."""
    tail_batching: TailBatchingSpec | None = None
    """Long prompts are put off and run together. Under `sync` and `sync_plus`, without `batch.tokens`."""
    replication: bool = True
    """Prompt replication: the members of a group are separate tasks, placed on any engine. false: they stay on one
    engine, are admitted as one where `concurrency` applies, and release it when the last is done."""
    dispatch: Literal["fifo", "skew_aware"] = "fifo"
    """Order in which an engine admits trajectories. fifo: by arrival; skew_aware: the longest first, by lengths learned
    from finished trajectories, with separate engines for long ones. Follows KV memory as `concurrency` does. Not under
    `sync`."""
    concurrency: ConcurrencySpec = Field(default_factory=ConcurrencySpec)
    """The limit of concurrent trajectories per engine."""
    fairness: FairnessSpec | None = None
    """Domains get their shares by weight, floor and cap over the run. On where a domain has a floor or cap."""
    filter: FilterSpec = Field(default_factory=FilterSpec)
    """Groups that are left out of training, and their replacement."""
    handoffs: Literal["auto"] | Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Turns that are prefilled elsewhere for one decode engine ahead of its slots; 0: any number; auto: as many as keep
    the decode engine busy, from the durations of prefills and turns."""
    prefetch: Literal["auto"] | Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Environments per domain that are reset before their trajectories are admitted. auto: as many batches of them as a
    reset outlasts the time between two admissions."""
    parallelism: ParallelismSpec | None = None
    """Engines are drained and restarted with another number of devices according to the pressure on KV memory, where
    that pays within `placement.rebalance.horizon_s`; rebalancing then moves no engine."""
    lending: LendingSpec | None = None
    """Devices of rollout engines help training while a rollout ends. Under `sync_plus` with `training.stream`, in
    simulations: the embedded trainer takes no other devices."""
