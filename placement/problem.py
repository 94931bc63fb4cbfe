"""The input of the solver, as one frozen value: the same problem always has the same solution."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from placement.performance import Performance
from placement.publish import Publishing, PublishPath
from placement.types import Deployment, Link, Objective, Pool, Role
from placement.workload import DomainProfile, FunctionPrice, TrainingWork

__all__ = ["Problem", "Restriction", "RunningPlan", "InFlightWindow"]


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
    performance: Performance
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
    min_replicas: Mapping[Role, int] = field(default_factory=dict)
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
        self._unique("pools", [p.name for p in self.pools])
        self._unique("domains", [d.name for d in self.domains])
        self._references()
        if not any(d.weight for d in self.domains):
            raise ValueError("every domain has weight 0 (rule: at least one has a share)")
        object.__setattr__(self, "domains", tuple(d for d in self.domains if d.weight))
        names = {d.name for d in self.domains}
        object.__setattr__(self, "affinity", {d: pools for d, pools in self.affinity.items() if d in names})
        if self.objective is Objective.MIN_COST and self.rate is None:
            raise ValueError("objective min_cost needs a rate (trajectories/s to reach)")
        for name in ("rate", "budget_usd_per_hour", "in_flight"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value} (rule: a finite number above 0)")
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

    def publish_path(self, trainer: str, serving: Iterable[str]) -> PublishPath | None:
        """The path of a version from the trainer's pool to the slowest pool with engines; None without a window or a
        publish."""
        publish = None if self.window is None else self.window.publish
        return None if publish is None else publish.slowest(self.pools, self.links, trainer, serving)

    def publish_s(self, trainer: str, serving: Iterable[str]) -> float:
        """Seconds of a publish to engines on these pools."""
        path = self.publish_path(trainer, serving)
        return 0.0 if path is None else path.seconds

    def _references(self) -> None:
        names = {p.name for p in self.pools}
        for link in self.links:
            for end in (link.a, link.b):
                if end not in names:
                    raise ValueError(
                        f"link {link.a}–{link.b} names pool '{end}' (rule: one of {', '.join(sorted(names))})"
                    )
        for domain, pools in self.affinity.items():
            if domain not in {d.name for d in self.domains}:
                raise ValueError(f"affinity names domain '{domain}' (rule: one of the problem's domains)")
            if not pools or set(pools) - names:
                raise ValueError(f"affinity of '{domain}' is {list(pools)} (rule: pools of the problem, at least one)")

    @staticmethod
    def _unique(what: str, names: list[str]) -> None:
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"{what}: the name '{twice[0]}' occurs twice (rule: names are unique)")
