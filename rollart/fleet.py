"""The nouns of a fleet: nodes and what runs on them, where an engine sits, what routes cost, how a fleet may change.

Plain frozen values that the ports carry between the router, the rebalancer and whoever plans. Units: seconds, tokens,
GB = 1e9 bytes; a rate is in trajectories/s and a price in trajectories/s per unit per second, as a plan's dual prices.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from rollart.model import EngineId

__all__ = [
    "ActorSpec",
    "Bundle",
    "BundleGroup",
    "DomainWork",
    "EngineKind",
    "EngineRole",
    "KindLoad",
    "FleetMove",
    "FleetMoveKind",
    "Node",
    "FleetObservation",
    "Proposal",
    "RoutePrices",
    "Routes",
    "RuntimeEvent",
    "EnginePlacement",
    "Strategy",
    "TurnModel",
]

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
"""How a group's bundles lie: on few nodes, on many, all on one, each on its own; the first two as far as they can."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Room on one node: amounts by resource, on a node with these labels (Ray's grammar). `about` is for errors."""

    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    about: str = ""

    def __str__(self) -> str:
        about = f" ({self.about})" if self.about else ""
        return f"{self.name}{about}: {dict(self.resources)} on a node with {dict(self.labels)}"


@dataclass(frozen=True, slots=True)
class BundleGroup:
    """Bundles that are held and given back together. Names of groups and of bundles are unique in a runtime."""

    name: str
    bundles: tuple[Bundle, ...]
    strategy: Strategy = "PACK"


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """What a runtime starts: a class, where it may run, and how often it comes back.

    `labels` use Ray's grammar (`v`, `!v`, `in(a,b)`); `resources` are amounts by name ("CPU", "GPU", ...).
    `isolation` "inline" runs it on the caller's loop, "process" in a process of its own. Arguments and results
    are values: they are copied even inline. `max_restarts` -1 = for ever.
    """

    name: str
    factory: str
    """Import path `package.module:Class`."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    max_task_retries: int = 0
    max_concurrency: int = 1000
    isolation: Literal["inline", "process"] = "inline"
    bundle: str = ""
    """A reserved bundle to run in, by its labels; without one wherever there is room."""


@dataclass(frozen=True, slots=True)
class Node:
    """A place for actors: labels and what is free of its resources."""

    id: str
    labels: Mapping[str, str]
    total: Mapping[str, float]
    free: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RuntimeEvent:
    kind: Literal["node_up", "node_leaving", "node_down", "actor_started", "actor_died", "actor_restarted"]
    subject: str
    detail: str = ""


class EngineRole(enum.StrEnum):
    """What the router uses an engine for. Every engine can do all three: a change of role is the router's alone."""

    ENGINE = "engine"
    PREFILL = "prefill"
    DECODE = "decode"


class EngineKind(NamedTuple):
    """Engines that are the same to a plan."""

    pool: str
    role: EngineRole
    tp: int


@dataclass(frozen=True, slots=True)
class EnginePlacement:
    """Where an engine sits and what it is used for: `tp` devices of type `device` in `pool`."""

    pool: str = ""
    device: str = ""
    role: EngineRole = EngineRole.ENGINE
    tp: int = 1

    @property
    def kind(self) -> EngineKind:
        return EngineKind(self.pool, self.role, self.tp)


class TurnModel(Protocol):
    """Predicted cost of one turn, by kind of engine. All answers are at least 0, and finite but for `handoff_s`."""

    def prefill_s(self, kind: EngineKind, new: float, cached: float) -> float:
        """Engine seconds to compute `new` tokens after `cached` ones."""

    def decode_s(self, kind: EngineKind, context: float, output: float) -> float:
        """Engine seconds that generating `output` tokens after `context` takes at the plan's batch: its share."""

    def batch(self, kind: EngineKind) -> float:
        """Turns that an engine of the kind generates for at a time in the plan; at least 1."""

    def handoff_s(self, source: EngineKind, target: EngineKind, tokens: float) -> float:
        """Seconds until the KV of `tokens` tokens is with the other engine; infinite if nothing connects them."""

    def kv_gb(self, tokens: float) -> float:
        """Size of that KV."""


@dataclass(frozen=True, slots=True)
class RoutePrices:
    """Dual prices of the plan. `engines` per engine-second/s; `kv` per token of KV capacity; `links` per GB/s by (a, b)
    in sorted order; `in_flight` per trajectory. What is absent is free.

    `target_s` is the work waiting at an engine, in seconds, at which its price has doubled.
    """

    engines: Mapping[EngineKind, float] = field(default_factory=dict)
    kv: Mapping[EngineKind, float] = field(default_factory=dict)
    links: Mapping[tuple[str, str], float] = field(default_factory=dict)
    in_flight: float = 0.0
    target_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Routes:
    """What the router follows: prices and the model to apply them with (both or none), and the planned share of each
    domain's trajectories by pool of their decode engine."""

    prices: RoutePrices | None = None
    model: TurnModel | None = None
    shares: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DomainWork:
    """Measured means of one domain's finished trajectories, recent ones weighing most. `share` of all trajectories;
    tokens per turn, of which `first_tokens` at the first; `wait_s` in the environment per turn."""

    share: float
    turns: float
    first_tokens: float
    new_tokens: float
    output_tokens: float
    wait_s: float
    finished: int


@dataclass(frozen=True, slots=True)
class KindLoad:
    """Engines of one kind: how many there are, how many serve, mean seconds of work waiting and mean turns running at
    one that serves."""

    engines: int
    healthy: int
    backlog_s: float
    running: float


@dataclass(frozen=True, slots=True)
class FleetObservation:
    """What a planner is told: work by domain, load by kind, the measured rate of finished trajectories over `seconds`
    (0 while nothing is known), and whether instances can be drained and started. `devices` that are there by pool,
    where nodes come and go; None: all that the pools are said to have."""

    work: Mapping[str, DomainWork]
    load: Mapping[EngineKind, KindLoad]
    rate: float
    seconds: float
    movable: bool = False
    devices: Mapping[str, int] | None = None


class FleetMoveKind(enum.StrEnum):
    FLIP = "flip"
    DRAIN = "drain"
    START = "start"


@dataclass(frozen=True, slots=True)
class FleetMove:
    """`replicas` engines of `tp` devices in `pool` go from role `before` (None: they are started) to `after` (None:
    they are drained and stopped). A flip is the router's alone and free. `engine`: a drain of this one."""

    kind: FleetMoveKind
    pool: str
    tp: int
    replicas: int
    before: EngineRole | None = None
    after: EngineRole | None = None
    engine: EngineId | None = None

    def __str__(self) -> str:
        roles = " → ".join(str(r) for r in (self.before, self.after) if r is not None)
        return f"{self.kind} {self.replicas} × tp {self.tp} on {self.pool}: {self.engine or roles}"


@dataclass(frozen=True, slots=True)
class Proposal:
    """A better plan: its moves in order, the routes once they are done, and what it is predicted to do.

    `rate_now` and `rate_after` are of the same model at the same work; `cost` is what moving takes, in trajectories
    that are not made meanwhile. `usd_per_hour` now and after, where the plan is to be cheap and not only fast.
    """

    moves: tuple[FleetMove, ...]
    routes: Routes
    rate_now: float
    rate_after: float
    cost: float = 0.0
    usd_per_hour: tuple[float, float] | None = None

    @property
    def router_only(self) -> bool:
        return all(m.kind is FleetMoveKind.FLIP for m in self.moves)
