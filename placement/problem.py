"""The input of the solver, as one frozen value: the same problem always has the same solution.

It consists of the hardware, a performance model, the workload (one trajectory of each task domain, and training), the
prices of functions, and constraints. Units as in `placement.types`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from placement.publish import Publishing
from placement.roofline import RooflinePerformance
from placement.types import Deployment, Link, Objective, Pool, Role, finite_number, require_at_least, require_positive

Z90 = 1.2816
"""Standard deviations from the median of a normal distribution to its 90th percentile."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A figure that varies between trajectories: its mean and, where known, its median and 90th percentile."""

    mean: float
    p50: float | None = None
    p90: float | None = None

    def __post_init__(self) -> None:
        for name in ("mean", "p50", "p90"):
            require_at_least(name, getattr(self, name))


def log_normal(quantity: Quantity) -> tuple[float, float]:
    """A quantity as a log-normal: median and sigma. Of mean and 90th percentile alone: the smaller sigma that has both;
    none if there is none."""
    mean, p50, p90 = quantity.mean, quantity.p50, quantity.p90
    if p50 is not None and p50 > 0:
        if p90 is not None and p90 > p50:
            return p50, math.log(p90 / p50) / Z90
        return p50, math.sqrt(max(0.0, 2.0 * math.log(mean / p50))) if mean > 0 else 0.0
    if p90 is not None and p90 > mean > 0:
        spread = Z90**2 - 2.0 * math.log(p90 / mean)
        sigma = Z90 - math.sqrt(spread) if spread > 0 else Z90
        return mean * math.exp(-(sigma**2) / 2.0), sigma
    return mean, 0.0


def kept_for_next_turn(turn: int, max_turns: int) -> bool:
    """Whether an engine that prefilled a turn (the first is 1) keeps its KV once it has been handed over: until the
    next turn, unless none can follow. Plans count it by this rule, and runs keep to it."""
    return turn < max_turns


@dataclass(frozen=True, slots=True)
class RewardCost:
    """The cost of scoring one trajectory: seconds of `cores` CPU cores and `memory_gb`, or seconds of one GPU that
    reads `memory_gb` of weights (`on_gpu`). Stateless rewards may run in functions at `FunctionPrice`, those on GPUs in
    containers with `gpus` of type `gpu`. In calls of `batch` trajectories `seconds` is the share of one."""

    seconds: float
    cores: float = 1.0
    memory_gb: float = 0.5
    on_gpu: bool = False
    stateless: bool = True
    latency_s: float | None = None
    """Longest acceptable wait for the score; None if any will do."""
    gpu: str = ""
    gpus: int = 1
    provided: bool = False
    """True if only a provider of functions runs it: no device of a pool can be planned for it."""
    batch: int = 1
    single_s: float | None = None
    """Seconds of a call with one trajectory; None: `seconds`."""
    cold_start_s: float | None = None
    """Seconds from a call to the start of its work in a new container, image and weights included; None: not known."""
    keep_alive_s: float = 60.0
    """Idle time after which a container stops."""
    warm: int = 0
    """Containers that never stop."""
    worker_memory_gb: float | None = None
    """Memory that a provider bills a container for; None: `memory_gb`."""
    functions: tuple[str, ...] = ()
    """Names of the functions that do the work. Domains with the same ones share their containers."""
    additional: tuple[RewardCost, ...] = ()
    """Costs of the domain's other functions, which score the same trajectory at the same provider."""

    @property
    def parts(self) -> tuple[RewardCost, ...]:
        """This cost and the additional ones."""
        return (self, *self.additional)

    @property
    def call_s(self) -> float:
        """Seconds of a call with a full batch."""
        return self.seconds * self.batch


@dataclass(frozen=True, slots=True)
class EnvironmentCost:
    """`wait_s` a turn takes in the environment; `core_s` of CPU it burns there; `reset_s` before the first turn."""

    wait_s: float = 0.0
    core_s: float = 0.0
    reset_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DomainProfile:
    """The work of one trajectory of a task domain.

    `first_tokens` of prompt at the first turn, of which the share `shared_prefix` is cached already (a system prompt
    that trajectories share); `new_tokens` of observation at every later turn; `output_tokens` generated per turn.
    `weight` is the domain's share of the trajectories, relative to the other domains.
    """

    name: str
    turns: Quantity
    new_tokens: Quantity
    output_tokens: Quantity
    weight: float = 1.0
    first_tokens: Quantity | None = None
    """None: as `new_tokens`."""
    shared_prefix: float = 0.0
    environment: EnvironmentCost = field(default_factory=EnvironmentCost)
    reward: RewardCost | None = None
    max_turns: int | None = None
    """Turns after which an episode ends in any case; None: not known, unless it has one turn."""
    source: str = "given"
    """The origin of the profile: `given`, `assumed` (bounds of the spec), or the run it was measured in."""

    def __post_init__(self) -> None:
        if not self.turns.mean >= 1:
            raise ValueError(f"domain {self.name}: turns is {self.turns.mean} (rule: at least 1)")
        if not self.output_tokens.mean >= 1:
            raise ValueError(f"domain {self.name}: output_tokens is {self.output_tokens.mean} (rule: at least 1)")
        if self.prompt.mean <= 0:
            raise ValueError(f"domain {self.name}: first_tokens is {self.prompt.mean} (rule: above 0)")
        require_at_least(f"domain {self.name}: weight", self.weight)
        if not 0 <= self.shared_prefix < 1:
            raise ValueError(f"domain {self.name}: shared_prefix is {self.shared_prefix} (rule: in [0, 1))")

    @property
    def prompt(self) -> Quantity:
        """Tokens of the first prompt."""
        return self.new_tokens if self.first_tokens is None else self.first_tokens

    @property
    def last_turn_known(self) -> bool:
        """Whether every episode ends with its largest number of turns, so that its last turn is known beforehand."""
        if self.max_turns is None:
            return self.turns.mean == 1
        return not kept_for_next_turn(math.floor(self.turns.mean), self.max_turns)

    @property
    def total_tokens(self) -> float:
        """Mean length of a finished trajectory, tokens."""
        return (
            self.prompt.mean + (self.turns.mean - 1) * self.new_tokens.mean + self.turns.mean * self.output_tokens.mean
        )


@dataclass(frozen=True, slots=True)
class TrainingConstants:
    """Properties of training that no datasheet states. `rollart calibrate --from RUN` fits `mfu`, and `activations`
    from the peak memory of the trainer's GPUs."""

    mfu: float = 0.40
    """Share of the dense bf16 peak while a device computes. Source: 38 to 43 % on H100 (Llama 3, arXiv 2407.21783,
    table 4)."""
    overlap: float = 0.7
    """Share of the shorter of arithmetic and communication that runs at the same time as the longer. A guess: FSDP
    gathers one block ahead, but neither the first gather nor the last reduction is hidden."""
    activations: float = 1.0
    """Factor of the activations and logits that the architecture asks for. A guess until it is calibrated."""
    logit_copies: float = 2.0
    """Copies in float32 of the logits of a micro-batch: log-probabilities kept for the backward pass, and their
    gradient. A guess: fused losses hold one or less, others more for a moment."""
    reserve: float = 0.10
    """Share of the memory for the CUDA context, NCCL's buffers, gathered blocks and fragmentation. A guess, the same
    as vLLM's default for engines (`gpu_memory_utilization`, 0.9)."""
    pcie_gb_per_s: float = 32.0
    """Of a device without NVLink, in one direction. Source: PCI Express 4.0 x16, as the data sheets of L40S, L4 and A10
    state it (64 GB/s both ways)."""
    pcie_share: float = 0.5
    """Of that rate where all devices of a host communicate at a time. A guess: two devices share a root port."""
    host_gb_per_s: float = 50.0
    """Network of a host, one direction, where neither the device nor a link of the pool with itself states it. A guess:
    400 Gb/s, as in RollArt's cluster."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value != 0 or f.name not in ("overlap", "reserve"):
                require_positive(f"training constants: {f.name}", value)
            if value > 1 and f.name in ("mfu", "overlap", "pcie_share", "reserve"):
                raise ValueError(f"training constants: {f.name} is {value} (rule: a share, at most 1)")

    @staticmethod
    def from_dict(data: object) -> TrainingConstants:
        """ValueError for names that are not constants and for values that are not numbers."""
        known = [f.name for f in fields(TrainingConstants)]
        if not isinstance(data, Mapping) or set(data) - set(known):
            raise ValueError(f"training constants are {data!r} (rule: a table of {', '.join(known)})")
        return TrainingConstants(**{name: finite_number(f"training constants: {name}", v) for name, v in data.items()})


@dataclass(frozen=True, slots=True)
class TrainingWork:
    """The work of training. `batch` trajectories per step, `staleness` α: (α+1) × batch are in flight at most (I4).

    Fixed to `devices` devices of pool `pool` where these are given; else the solver chooses.
    """

    batch: int
    staleness: int = 1
    epochs: int = 1
    pool: str | None = None
    devices: int | None = None
    bytes_per_parameter: float = 16.0
    """Weights, gradients and optimizer state: bf16 + fp32 master + AdamW in mixed precision."""
    trained_parameters: float | None = None
    """Parameters of low-rank adapters, where only they are trained; None: all of the model's."""
    frozen_bytes_per_parameter: float = 4.0
    """Weights that are not trained: float32, as the embedded trainer keeps them."""
    sequence: int = 0
    """Longest sequence, tokens: activations and logits of it must fit. 0: they are not counted."""
    microbatch_tokens: int = 16_384
    """Tokens of a micro-batch of shorter sequences."""
    minibatches: int = 1
    """Optimizer steps per pass over the batch."""
    recompute: bool | None = None
    """Whether activations are computed again in the backward pass; None: where it takes fewer device-seconds in all."""
    split: int | None = None
    """Devices that share a sequence; None: as many as the memory asks for."""
    constants: TrainingConstants = field(default_factory=TrainingConstants)
    seconds_per_token: float | None = None
    """Measured device-seconds per trained token, instead of FLOPs and `mfu`."""
    seconds_per_step: float = 0.0
    """Measured seconds per step that do not depend on the tokens: publish, optimizer, hand-over."""

    @property
    def in_flight(self) -> int:
        return (self.staleness + 1) * self.batch


@dataclass(frozen=True, slots=True)
class FunctionPrice:
    """The prices of a serverless provider: per GB-second, core-second, GPU-second by type, and million requests."""

    provider: str
    usd_per_gb_s: float = 0.0
    usd_per_core_s: float = 0.0
    usd_per_million_requests: float = 0.0
    usd_per_gpu_s: Mapping[str, float] = field(default_factory=dict)
    """By type; empty: it has no GPUs."""
    charges_idle: bool = False
    """True if a container that waits costs as much as a busy one."""
    overhead_s: float = 0.05
    """Latency that a call adds to the work itself, warm."""

    def usd_per_s(self, reward: RewardCost) -> float | None:
        """Dollars per second of a worker for a reward; None if the provider does not have its GPU."""
        memory_gb = reward.memory_gb if reward.worker_memory_gb is None else reward.worker_memory_gb
        worker = memory_gb * self.usd_per_gb_s + reward.cores * self.usd_per_core_s
        if not reward.on_gpu:
            return worker
        gpu = self.usd_per_gpu_s.get(reward.gpu)
        return None if gpu is None else worker + gpu * reward.gpus

    def usd_per_trajectory(self, reward: RewardCost) -> float | None:
        """Dollars to score one trajectory with all of its functions; None if the provider lacks one of their GPUs."""
        usd = 0.0
        for part in reward.parts:
            per_second = self.usd_per_s(part)
            if per_second is None:
                return None
            usd += part.seconds * per_second + self.usd_per_million_requests / 1e6 / part.batch
        return usd


class Restriction(enum.StrEnum):
    """The set of allowed plans. Every restriction but FULL is a baseline whose plans are a subset of FULL's."""

    FULL = "full"
    AGGREGATED = "domain LP"
    """No prefill/decode split; each domain's trajectories may be divided over pools."""
    STRICT = "strict domain→pool"
    """Aggregated; every domain on one pool."""
    NO_AFFINITY = "no affinity"
    """Aggregated; every pool gets the same mix of domains."""
    PD_ONLY = "P/D only"
    """Every trajectory prefills and decodes on different instances."""


@dataclass(frozen=True, slots=True)
class RunningPlan:
    """The current plan and the cost of changing it: a moved device earns nothing for `restart_s` seconds.

    At most `max_changed_devices` devices change (None: any number). The gain is counted over `horizon_s`.
    """

    deployments: tuple[Deployment, ...]
    restart_s: float = 120.0
    horizon_s: float = 3600.0
    max_changed_devices: int | None = None


@dataclass(frozen=True, slots=True)
class InFlightWindow:
    """The holding time of a slot among the trajectories in flight. A slot is held from admission until the publish of
    the version that the trajectory was trained into: as long as the longest member of its group, a training step and
    the publish take.

    `groups`: members per group, by domain (default: 1). `context`: most tokens of a trajectory.
    """

    groups: Mapping[str, int]
    context: float
    publish: Publishing | None = None
    """None: publishing takes no time."""
    aborts: bool = True
    """True if stale trajectories are aborted, so that new ones take their slots."""
    waits: bool = False
    """True if a batch waits for the groups that would be too stale for the next batch, so that none is aborted."""

    def __post_init__(self) -> None:
        if not self.context > 0 or any(members < 1 for members in self.groups.values()):
            raise ValueError(f"window: context {self.context}, groups {dict(self.groups)} (rule: above 0, at least 1)")


@dataclass(frozen=True, slots=True)
class Problem:
    """Hardware, model, workload and constraints. ValueError, naming the field, for invalid values.

    `affinity` maps a domain to the pools that may decode it (a domain without an entry may use any). `fixed` gives the
    instances, so that only flows remain to be chosen. Domains of weight 0 are left out. `in_flight` bounds the
    trajectories in flight (default: `train.in_flight`; no bound if neither is given). `device_types` restricts rollout
    to some types (a baseline).
    """

    pools: tuple[Pool, ...]
    domains: tuple[DomainProfile, ...]
    performance: RooflinePerformance
    links: tuple[Link, ...] = ()
    train: TrainingWork | None = None
    objective: Objective = Objective.MAX_THROUGHPUT
    rate: float | None = None
    """Trajectories/s that MIN_COST must reach."""
    budget_usd_per_hour: float | None = None
    in_flight: int | None = None
    functions: FunctionPrice | None = None
    roles: frozenset[Role] = frozenset(Role)
    tensor_parallel: tuple[int, ...] = (1, 2, 4, 8)
    max_batch: int = 512
    """Sequences that one engine generates for at a time, at most."""
    affinity: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fixed: tuple[Deployment, ...] | None = None
    running: RunningPlan | None = None
    restriction: Restriction = Restriction.FULL
    device_types: frozenset[str] | None = None
    utilisation: float = 0.95
    """Share of an instance's time that a plan may use. The rest absorbs variance and weight updates."""
    window: InFlightWindow | None = None
    """None: a trajectory leaves the bound on trajectories in flight when it is generated and scored."""
    gap: float = 1e-4
    """Relative gap at which the solver may stop."""
    rate_tolerance: float = 0.0
    """Share of the best rate that a plan of MAX_THROUGHPUT may give up to cost less."""

    def __post_init__(self) -> None:
        if not self.pools:
            raise ValueError("pools is empty (rule: at least one pool)")
        if not self.domains:
            raise ValueError("domains is empty (rule: at least one domain)")
        for what, names in (("pools", [p.name for p in self.pools]), ("domains", [d.name for d in self.domains])):
            twice = sorted({n for n in names if names.count(n) > 1})
            if twice:
                raise ValueError(f"{what}: the name '{twice[0]}' occurs twice (rule: names are unique)")
        self._references()
        if not any(d.weight for d in self.domains):
            raise ValueError("every domain has weight 0 (rule: at least one has a share)")
        object.__setattr__(self, "domains", tuple(d for d in self.domains if d.weight))
        kept = {d.name for d in self.domains}
        object.__setattr__(self, "affinity", {d: pools for d, pools in self.affinity.items() if d in kept})
        if self.objective is Objective.MIN_COST and self.rate is None:
            raise ValueError("objective min_cost needs a rate (trajectories/s to reach)")
        for name in ("rate", "budget_usd_per_hour", "in_flight"):
            require_positive(name, getattr(self, name))
        if not 0 <= self.rate_tolerance < 1:
            raise ValueError(f"rate_tolerance is {self.rate_tolerance} (rule: in [0, 1))")
        if not 0 < self.utilisation <= 1:
            raise ValueError(f"utilisation is {self.utilisation} (rule: in (0, 1])")
        if not self.tensor_parallel or min(self.tensor_parallel) < 1 or self.max_batch < 1:
            raise ValueError(f"tensor_parallel {self.tensor_parallel}, max_batch {self.max_batch} (rule: at least 1)")

    @property
    def trajectories_in_flight(self) -> float:
        """The bound on trajectories in flight; infinite if there is none."""
        if self.in_flight is not None:
            return float(self.in_flight)
        return math.inf if self.train is None else float(self.train.in_flight)

    def kv_channels(self) -> dict[tuple[str, str], Link]:
        """The connections that KV may take, by names in sorted order. Between two pools these are the problem's links;
        within a pool also its devices' figures: NVLink if the pool is one host, else the hosts' network, of which half
        the devices send while the other half receive."""
        found: dict[tuple[str, str], Link] = {}
        for link in self.links:
            found.setdefault(link.pools, link)
        for pool in self.pools:
            device, key = pool.device, (pool.name, pool.name)
            one_host = device.devices_per_host is not None and pool.count <= device.devices_per_host
            speed = device.link_gb_per_s
            if one_host and device.nvlink_gb_per_s is not None:
                speed = device.nvlink_gb_per_s / 2
            if key not in found and speed is not None and pool.count > 1:
                found[key] = Link(*key, speed * pool.count / 2)
        return dict(sorted(found.items()))

    def publish_s(self, trainer: str, serving: Iterable[str]) -> float:
        """Seconds of a publish from the trainer's pool to engines on these; 0 without a window or a publish."""
        publish = None if self.window is None else self.window.publish
        return 0.0 if publish is None else publish.slowest(self.pools, self.links, trainer, serving).seconds

    def _references(self) -> None:
        names = {p.name for p in self.pools}
        for a, b, end in ((link.a, link.b, end) for link in self.links for end in (link.a, link.b)):
            if end not in names:
                raise ValueError(f"link {a}–{b} names pool '{end}' (rule: one of {', '.join(sorted(names))})")
        for domain, pools in self.affinity.items():
            if domain not in {d.name for d in self.domains}:
                raise ValueError(f"affinity names domain '{domain}' (rule: one of the problem's domains)")
            if not pools or set(pools) - names:
                raise ValueError(f"affinity of '{domain}' is {list(pools)} (rule: pools of the problem, at least one)")
