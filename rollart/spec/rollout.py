"""What is rolled out beyond what a step needs: redundant environments, tail batching, resets ahead of need."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollart.entry import SpecEntry

__all__ = [
    "MOST",
    "ConcurrencySpec",
    "FairnessSpec",
    "FilterSpec",
    "FollowSpec",
    "RedundancySpec",
    "RolloutSpec",
    "TailBatchingSpec",
]

MOST = 4.0
"""Largest factor: beyond it three quarters of the rollout are thrown away."""


class RedundancySpec(SpecEntry):
    """Redundant environments: more are started than are needed, and what ends last is cancelled and charged apart.

    What ends first is short and easy: `rollart report utilization` shows the cancelled against the kept.
    """

    groups: float = Field(
        default=1.0,
        ge=1.0,
        le=MOST,
        description="Groups started per domain, as a multiple of those that a step needs, rounded down. Whole-batch "
        "schedules cancel what is unfinished when the batch is full; the others let it go on, in a window wider by it.",
    )
    size: float = Field(
        default=1.0,
        ge=1.0,
        le=MOST,
        description="Members started per group, as a multiple of `group_size`, rounded down. The group is complete "
        "with those that end first; the others are cancelled.",
    )
    health: bool = Field(
        default=False,
        description="Start only what the observed share of broken environments calls for; the factors are the most.",
    )


class TailBatchingSpec(SpecEntry):
    """Tail batching: short rounds start more than a step needs and put off what ends last; long rounds run that."""

    eta_prompts: float = Field(
        default=1.25,
        ge=1.0,
        le=MOST,
        description="Prompts that a short round starts, as a multiple of a step's. At 1.25 a long round follows every "
        "four short ones.",
    )
    eta_responses: float = Field(
        default=1.25,
        ge=1.0,
        le=MOST,
        description="Responses that a short round starts per prompt, as a multiple of `group_size`.",
    )


class FilterSpec(SpecEntry):
    """Dynamic filtering: groups that nothing can be learnt from are left out, and further prompts take their place.

    What is filtered is charged as `filtered`, and shown against what was kept by `rollart report utilization`.
    """

    zero_variance: bool = Field(
        default=False,
        description="Leave out groups whose members all have the same reward: their advantage is 0. Needs "
        "`advantage.baseline: group` in every domain.",
    )
    max_additional_running_prompts: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="Prompts that run beyond those that a step needs, over all domains, so that what is filtered is "
        "replaced at once. Whole-batch schedules cancel what is unfinished when the batch is full.",
    )
    max_refills: float = Field(
        default=10.0,
        ge=0,
        le=1e6,
        description="Groups of a domain that may be filtered between two of its steps, as a multiple of those that a "
        "step needs.",
    )
    exhausted: Literal["fail", "keep"] = Field(
        default="fail",
        description="What happens beyond `max_refills`. fail: the run stops and says so; keep: further groups are "
        "trained as they are until the next step.",
    )


class ConcurrencySpec(SpecEntry):
    """How many trajectories live on one engine at a time, found by watching its KV memory: up by a step while there is
    room, down by a factor when prefixes are evicted or requests preempted. Who finds no room waits, and is never
    aborted for it. Not followed under `schedule: sync`.
    """

    mode: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="auto: on where the placer computed the plan, whose engines then live by KV memory, and "
        "`parallelism` does not follow their preemptions instead.",
    )
    start: int = Field(
        default=32, ge=1, le=1_000_000, description="First limit of an engine of which nothing better is known."
    )
    least: int = Field(default=1, ge=1, le=1_000_000, description="Lowest limit.")
    most: int = Field(default=1024, ge=1, le=1_000_000, description="Highest limit.")
    increase: int = Field(default=4, ge=1, le=1_000_000, description="What a limit rises by.")
    decrease: float = Field(default=0.75, gt=0, lt=1, description="What a limit is multiplied by when it falls.")
    low: float = Field(default=0.80, ge=0, le=1, description="Share of KV memory in use below which a limit rises.")
    high: float = Field(
        default=0.95, gt=0, le=1, description="Share from which it falls, and beyond which nobody is let in."
    )
    interval_s: float = Field(default=5.0, gt=0, le=86_400, description="Seconds between looks, and between rises.")
    settle_s: float = Field(default=30.0, ge=0, le=86_400, description="Seconds after a fall before the next change.")


class ParallelismSpec(SpecEntry):
    """Tensor parallelism of rollout engines that follows their preemptions from step to step."""

    sizes: list[Annotated[int, Field(ge=1, le=64)]] | None = Field(
        default=None,
        min_length=1,
        description="Devices per engine to choose from; 1, 2, 4 and 8, where they divide the model and a host, if not "
        "given. From one of the plan's the next is twice or half of it.",
    )
    rise: float = Field(
        default=1.05, ge=1.0, le=1e6, description="More preemptions than so many times the step before's double it."
    )
    quiet_steps: int = Field(
        default=4, ge=1, le=10_000, description="Steps in a row without a preemption after which it is halved."
    )


class LendingSpec(SpecEntry):
    """Rollout engines whose devices train while a rollout ends: half of them, once what is left fits on the others."""

    setup_s: float = Field(
        default=10.0,
        ge=0,
        le=86_400,
        description="Seconds until lent devices train: the trainer's state comes there.",
    )
    headroom: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of an engine's KV memory into which the projected peak of what it will hold must fit.",
    )


class FollowSpec(SpecEntry):
    """Shares that follow what domains cost and teach: weight × (learning / cost) ** sensitivity, within their bounds.

    Cost is engine seconds per trained trajectory, lost ones included; learning the mean distance of a reward from its
    group's mean.
    """

    sensitivity: float = Field(default=1.0, ge=0, le=10, description="Exponent; 0 leaves the weights as they are.")
    memory: float = Field(default=10.0, ge=1, le=1e6, description="Steps that the averages look back on.")
    max_step: float = Field(default=0.05, gt=0, le=1, description="Most that a share moves in one step.")


class FairnessSpec(SpecEntry):
    """Shares of domains over the whole run instead of the same quotas at every step."""

    slack: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="How far a domain may fall behind its share before a batch waits for it, as a share of a batch, "
        "rounded down to whole groups. What it misses is made good later.",
    )
    follow: FollowSpec | None = Field(default=None, description="Shares move with measured cost and learning.")


class RolloutSpec(SpecEntry):
    """What rollout starts beyond what a step needs, to wait for no straggler, and how much of it runs at a time."""

    redundancy: RedundancySpec = Field(
        default_factory=RedundancySpec, description="Redundant environments, by groups and by size."
    )
    tail_batching: TailBatchingSpec | None = Field(
        default=None,
        description="Long prompts are put off and run together. Under `sync` and `sync_plus`, without `batch.tokens`.",
    )
    replication: bool = Field(
        default=True,
        description="Prompt replication: members of a group are tasks of their own, placed anywhere. false: they stay "
        "together on one engine, let in as one where `concurrency` is followed, and out when the last is done.",
    )
    dispatch: Literal["fifo", "skew_aware"] = Field(
        default="fifo",
        description="Whom an engine takes in next. fifo: as they came; skew_aware: the longest first, by lengths "
        "learned from what finished, with engines of their own. Follows KV memory as `concurrency` does. Not under "
        "`sync`.",
    )
    concurrency: ConcurrencySpec = Field(
        default_factory=ConcurrencySpec, description="How many trajectories live on one engine at a time."
    )
    fairness: FairnessSpec | None = Field(
        default=None,
        description="Domains get their shares by weight, floor and cap over the run. On where a domain has a floor or "
        "cap.",
    )
    filter: FilterSpec = Field(
        default_factory=FilterSpec, description="Groups that are left out of training, and what replaces them."
    )
    handoffs: Literal["auto"] | Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        default=0,
        description="Turns that are prefilled elsewhere for one decode engine ahead of its slots; 0: any number; auto: "
        "as many as keep it busy, by what prefills and turns take.",
    )
    prefetch: Literal["auto"] | Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        default=0,
        description="Environments per domain that are reset before their trajectories are admitted. auto: as many "
        "batches of them as a reset outlasts the time between two admissions.",
    )
    parallelism: ParallelismSpec | None = Field(
        default=None,
        description="Engines are drained and started with other numbers of devices as KV memory is short or not, where "
        "that pays within `placement.rebalance.horizon_s`; rebalancing then moves none.",
    )
    lending: LendingSpec | None = Field(
        default=None,
        description="Devices of rollout engines help training while a rollout ends. Under `sync_plus` with "
        "`training.stream`, in simulations: the embedded trainer takes no other devices.",
    )
