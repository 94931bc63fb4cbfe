"""Values that describe a fleet: nodes and actors, engine placements, route prices, changes of a fleet.

Plain frozen values that the ports carry between the router, the rebalancer and the planner. Units: seconds, tokens, GB
= 1e9 bytes; a rate is in trajectories/s and a price in trajectories/s per unit per second, as a plan's dual prices.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from placement.types import Role
from rollart.model import EngineId


@dataclass(frozen=True, slots=True)
class Bundle:
    """Resources on one node that are reserved and released together: amounts by resource, on a node with these labels
    (Ray's grammar). The name is unique in a runtime; `about` is for errors."""

    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    about: str = ""

    def __str__(self) -> str:
        about = f" ({self.about})" if self.about else ""
        return f"{self.name}{about}: {dict(self.resources)} on a node with {dict(self.labels)}"


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """An actor to start: its class and its placement constraints.

    `labels` use Ray's grammar (`v`, `!v`, `in(a,b)`); `resources` are amounts by name ("CPU", "GPU", ...). Arguments
    and results are values: they are copied even in one process.
    """

    name: str
    factory: str
    """Import path `package.module:Class`."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    max_concurrency: int = 1000
    bundle: str = ""
    """A reserved bundle to run in, which holds the resources; without one, a node that nothing is reserved on."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine for actors: its labels and its resources."""

    id: str
    labels: Mapping[str, str]
    total: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RuntimeEvent:
    kind: Literal["node_up", "node_leaving", "node_down", "actor_started", "actor_died", "actor_restarted"]
    subject: str
    detail: str = ""


EngineRole = Role
"""The router's use of an engine: one of `ROLLOUT_ROLES`, all of which every engine supports. Only the router changes
it."""


class EngineKind(NamedTuple):
    """Engines that are equivalent to a plan."""

    pool: str
    role: EngineRole
    tp: int


@dataclass(frozen=True, slots=True)
class EnginePlacement:
    """The location and the role of an engine: `tp` devices of type `device` in `pool`."""

    pool: str = ""
    device: str = ""
    role: EngineRole = EngineRole.ENGINE
    tp: int = 1

    @property
    def kind(self) -> EngineKind:
        return EngineKind(self.pool, self.role, self.tp)


class TurnModel(Protocol):
    """Predicted cost of one turn, by kind of engine. All results are at least 0, and finite but for `handoff_s`."""

    def prefill_s(self, kind: EngineKind, new: float, cached: float) -> float:
        """Engine seconds to compute `new` tokens after `cached` ones."""

    def decode_s(self, kind: EngineKind, context: float, output: float) -> float:
        """Engine seconds to generate `output` tokens after `context` at the plan's batch: the turn's share."""

    def batch(self, kind: EngineKind) -> float:
        """Turns that an engine of the kind generates concurrently in the plan; at least 1."""

    def handoff_s(self, source: EngineKind, target: EngineKind, tokens: float) -> float:
        """Seconds to transfer the KV of `tokens` tokens to the other engine; infinite without a connection."""

    def kv_gb(self, tokens: float) -> float:
        """Size of the KV of `tokens` tokens."""


@dataclass(frozen=True, slots=True)
class RoutePrices:
    """Dual prices of the plan. `engines` per engine-second/s; `kv` per token of KV capacity; `links` per GB/s by (a, b)
    in sorted order; `in_flight` per trajectory. Absent entries are free.

    `target_s` is the backlog of an engine, in seconds, at which its price has doubled.
    """

    engines: Mapping[EngineKind, float] = field(default_factory=dict)
    kv: Mapping[EngineKind, float] = field(default_factory=dict)
    links: Mapping[tuple[str, str], float] = field(default_factory=dict)
    in_flight: float = 0.0
    target_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Routes:
    """Inputs of the router: prices and the model to apply them with (both or none), and the planned share of each
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
    """Engines of one kind: their number, how many serve, and the mean backlog in seconds and mean running turns of a
    serving one."""

    engines: int
    healthy: int
    backlog_s: float
    running: float


@dataclass(frozen=True, slots=True)
class FleetObservation:
    """The input of a planner: work by domain, load by kind, the measured rate of finished trajectories over `seconds`
    (0 while unknown), and whether instances can be drained and started. `devices` are the present ones by pool, where
    nodes come and go; None: all devices of the pools."""

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
    """`replicas` engines of `tp` devices in `pool` change from role `before` (None: they are started) to `after` (None:
    they are drained and stopped). A flip only affects the router and is free. `engine`: drain this engine."""

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
    """A better plan: its moves in order, the routes afterwards, and its predicted effect.

    `rate_now` and `rate_after` come from the same model at the same work; `cost` is the number of trajectories lost
    while moving. `usd_per_hour` now and after, where the plan minimises cost and not only time.
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
