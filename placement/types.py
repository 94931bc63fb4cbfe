"""Value types of the placer: hardware, demands, and the resulting plans.

Units, everywhere: seconds, GB = 1e9 bytes, TB/s = 1e12 bytes/s, TFLOP/s = 1e12 FLOP/s (dense), dollars. A rate is in
trajectories per second unless stated otherwise. None means that no source states the figure: a missing figure is never
guessed.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields


class Role(enum.StrEnum):
    """The role of a part. ENGINE prefills and decodes (aggregated); PREFILL and DECODE do one of the two."""

    ENGINE = "engine"
    PREFILL = "prefill"
    DECODE = "decode"
    TRAINER = "trainer"
    REWARD = "reward"
    ENVIRONMENT = "environment"


ROLLOUT_ROLES = (Role.ENGINE, Role.PREFILL, Role.DECODE)
"""Roles of one and the same engine process: the router alone decides which of them an instance has."""


class KvMode(enum.StrEnum):
    """The treatment of a trajectory's KV between its turns. KEEP: the KV stays where the next turn's prefill runs.
    RECOMPUTE (aggregated): the KV is dropped and prefilled again. PULL (prefill/decode): the prefill engine fetches the
    whole context back from the decode engine every turn instead of holding it."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    PULL = "pull"


class Objective(enum.StrEnum):
    MAX_THROUGHPUT = "max_throughput"
    MIN_COST = "min_cost"
    MAX_THROUGHPUT_PER_DOLLAR = "max_throughput_per_dollar"


def objective_value(objective: Objective, rate: float, usd_per_hour: float) -> float:
    """The value of a plan under an objective, higher being better: trajectories/s, hours per dollar, or their
    product."""
    if objective is Objective.MAX_THROUGHPUT:
        return rate
    return (1.0 if objective is Objective.MIN_COST else rate) / usd_per_hour if usd_per_hour > 0 else math.inf


def require_positive(what: str, value: float | None, *, optional: bool = False) -> None:
    """ValueError unless the value is a finite number above 0; None is no value."""
    if value is not None and not (math.isfinite(value) and value > 0):
        rule = "a finite number above 0, or left out" if optional else "a finite number above 0"
        raise ValueError(f"{what} is {value} (rule: {rule})")


def require_at_least(what: str, value: float | None, least: int = 0) -> None:
    """ValueError unless the value is a finite number that is large enough; None is no value."""
    if value is not None and not (math.isfinite(value) and value >= least):
        raise ValueError(f"{what} is {value} (rule: a finite number, at least {least})")


def finite_number(what: str, value: object) -> float:
    """`value` as a finite float, or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{what} is {value!r} (rule: a finite number)")
    return float(value)


@dataclass(frozen=True, slots=True)
class Device:
    """A type of compute: a CPU core or a GPU. `name` is only a key and decides nothing.

    `tflops_*` are dense. `nvlink_gb_per_s` is the rate of one device in all directions together, as vendors state it;
    `link_gb_per_s` one device's share of its host's network, in one direction. `generation` groups devices whose
    constants carry over ("hopper"). `source` names the origin of the figures (the catalogue keeps source and date by
    figure).
    """

    name: str
    tflops_bf16: float | None = None
    memory_gb: float | None = None
    memory_tb_per_s: float | None = None
    source: str = ""
    tflops_fp8: float | None = None
    nvlink_gb_per_s: float | None = None
    link_gb_per_s: float | None = None
    watts: float | None = None
    devices_per_host: int | None = None
    generation: str = ""

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu" or self.generation == "cpu"

    def __post_init__(self) -> None:
        for figure in FIGURES:
            require_positive(f"device {self.name}: {figure}", getattr(self, figure), optional=True)


FIGURES = tuple(f.name for f in fields(Device) if f.name not in ("name", "source", "generation"))
"""The figures that a device may state, besides its generation."""


@dataclass(frozen=True, slots=True)
class Link:
    """The connection between two pools, or of a pool with itself: GB/s in one direction, over all of it; seconds."""

    a: str
    b: str
    gb_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        require_positive(f"link {self.a}–{self.b}: gb_per_s", self.gb_per_s)
        require_at_least(f"link {self.a}–{self.b}: latency_s", self.latency_s)

    @property
    def pools(self) -> tuple[str, str]:
        """The names in sorted order."""
        return min(self.a, self.b), max(self.a, self.b)


@dataclass(frozen=True, slots=True)
class Pool:
    """`count` devices of one type in one location, with their hourly price.

    `rented`: only the devices that the plan uses are paid; otherwise the whole pool is paid, used or not.
    """

    name: str
    device: Device
    count: int
    usd_per_device_hour: float = 0.0
    memory_gb: float | None = None
    """Host memory of a CPU pool, in all; None if not stated."""
    labels: Mapping[str, str] = field(default_factory=dict)
    rented: bool = False

    def __post_init__(self) -> None:
        price = self.usd_per_device_hour
        if self.count < 1 or not (math.isfinite(price) and price >= 0):
            raise ValueError(f"pool {self.name}: count {self.count} and price {price} (rule: at least 1 and 0)")


@dataclass(frozen=True, slots=True)
class Demand:
    """`replicas` parts of a role, each on `devices` devices of one pool, restricted to a pool and device type where
    these are given."""

    role: Role
    replicas: int
    devices: int
    device: str | None = None
    pool: str | None = None

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.devices < 1:
            raise ValueError(f"demand {self.role}: {self.replicas} × {self.devices} devices (rule: at least 1 × 1)")


@dataclass(frozen=True, slots=True)
class Assignment:
    """The location of one part: indices of devices in the pool (cores for a CPU pool). No two parts share a device."""

    role: Role
    replica: int
    pool: str
    devices: tuple[int, ...]

    @property
    def name(self) -> str:
        """The part's name in reports and processes, such as `engine-0`."""
        return f"{self.role}-{self.replica}"


@dataclass(frozen=True, slots=True)
class Deployment:
    """`replicas` instances of a role on `tp` devices each in one pool, and their predicted load.

    `batch` is the mean number of trajectories that one replica generates for at a time (1 without batching);
    `utilisation` and `kv_utilisation` are the shares of its time and of its KV memory in use, in [0, 1].
    """

    pool: str
    role: Role
    tp: int
    replicas: int
    batch: float = 1.0
    utilisation: float = 0.0
    kv_utilisation: float = 0.0

    @property
    def devices(self) -> int:
        return self.tp * self.replicas


@dataclass(frozen=True, slots=True)
class Flow:
    """`rate` trajectories/s of a domain on a path: decode (or all of it) on `pool`, prefill on `prefill_pool` if the
    two are disaggregated. `seconds` is the time in flight of one trajectory on the path, environment included."""

    domain: str
    pool: str
    tp: int
    rate: float
    seconds: float
    kv: KvMode = KvMode.KEEP
    prefill_pool: str | None = None
    prefill_tp: int | None = None


@dataclass(frozen=True, slots=True)
class RewardChoice:
    """The scoring location of a domain's trajectories, its cost, and the break-even with the alternative.

    `where` is "functions" or a pool's name. `break_even_utilisation`: a dedicated device costs less than functions if
    it would be busy for more than this share of the time (above 1: never); None without an alternative.
    """

    domain: str
    where: str
    rate: float
    usd_per_thousand: float
    break_even_utilisation: float | None = None
    dedicated_utilisation: float | None = None
    """Share of the time for which this rate would keep a dedicated device busy."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class DualPrices:
    """Dual prices of the flow problem at the plan's instances: the increase of the rate, in trajectories/s, per
    additional unit of a resource. The router prices paths with them.

    `deployments`: per instance-second/s, by (pool, role, tp). `kv`: per token of KV capacity. `links`: per GB/s, by (a,
    b) in sorted order. `in_flight`: per second of a trajectory in flight; `places`: per additional trajectory that may
    be in flight. `pools`: per device (of the relaxed problem, in which instances may be fractions).
    """

    deployments: Mapping[tuple[str, Role, int], float] = field(default_factory=dict)
    kv: Mapping[tuple[str, Role, int], float] = field(default_factory=dict)
    links: Mapping[tuple[str, str], float] = field(default_factory=dict)
    in_flight: float = 0.0
    places: float = 0.0
    pools: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FirstStage:
    """The plan of the best rate, from which the returned plan was derived as the cheapest at no less than a share of
    that rate."""

    rate: float
    usd_per_hour: float


@dataclass(frozen=True, slots=True)
class Placement:
    """The solver's result: the number of instances by pool, role and TP, and the flows through them.

    `bound` is the best rate (or, for the cost objectives, the best objective value) that any plan could reach; `gap` is
    the relative distance to it. `usd_per_hour` is the cost of the resources in use, functions included;
    `usd_per_hour_all` adds unused devices of pools that are paid in full. `binds` names the constraints that limit the
    rate, most important first.
    """

    objective: Objective
    rate: float
    bound: float
    gap: float
    usd_per_hour: float
    usd_per_hour_all: float
    deployments: tuple[Deployment, ...]
    flows: tuple[Flow, ...]
    rewards: tuple[RewardChoice, ...]
    prices: DualPrices
    binds: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """Caveats for the reader: extrapolations, assumptions and missing figures."""
    band: float = 0.0
    """Relative error band of the rate, from the performance model: rate × (1 ± band)."""
    first: FirstStage | None = None
    """None for objectives other than MAX_THROUGHPUT."""

    @property
    def best_rate(self) -> float:
        """The rate for comparisons of plans, before any of it was given up to save dollars."""
        return self.rate if self.first is None else self.first.rate

    @property
    def worth(self) -> float:
        """The value for comparisons of plans with the same objective."""
        return objective_value(self.objective, self.best_rate, self.usd_per_hour)

    @property
    def usd_per_thousand(self) -> float:
        """Dollars of the used devices per 1,000 trajectories."""
        return 1000.0 * self.usd_per_hour / 3600.0 / self.rate if self.rate > 0 else math.inf

    @property
    def usd_per_thousand_all(self) -> float:
        """Dollars per 1,000 trajectories, including unused devices that are paid."""
        return 1000.0 * self.usd_per_hour_all / 3600.0 / self.rate if self.rate > 0 else math.inf

    def of(self, role: Role) -> tuple[Deployment, ...]:
        return tuple(d for d in self.deployments if d.role is role)


@dataclass(frozen=True, slots=True)
class Infeasible:
    """No plan exists. `message` is one line; `conflicts` describe the constraints that cannot hold together."""

    message: str
    conflicts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """The assignment of parts to devices. `rates` are predicted units per second by role, or None.

    `usd_per_hour` is the cost of all pools: an idle device (`idle`, devices by pool) is paid too, unless rented.
    `binds` names the resource that is exhausted first. `placement` is the computed placement that the plan was derived
    from, if any.
    """

    assignments: tuple[Assignment, ...]
    idle: Mapping[str, int]
    usd_per_hour: float
    binds: str
    rates: Mapping[str, float] | None = None
    placement: Placement | None = None

    def of(self, *roles: Role) -> tuple[Assignment, ...]:
        """The parts of the roles, by role and replica."""
        return tuple(a for role in roles for a in self.assignments if a.role is role)
