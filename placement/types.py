"""Values of the placer: hardware, what parts ask for, and the plan that answers."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Assignment", "Demand", "Device", "Link", "Plan", "Pool", "Role", "Shortage"]


class Role(enum.StrEnum):
    """What a part does."""

    ENGINE = "engine"
    PREFILL = "prefill"
    DECODE = "decode"
    TRAINER = "trainer"


@dataclass(frozen=True, slots=True)
class Device:
    """A type of compute: a CPU core or a GPU. Peak rates are None where nobody stated them.

    Units: BF16 TFLOP/s (dense), GB of its own memory, TB/s of memory bandwidth.
    """

    name: str
    tflops_bf16: float | None = None
    memory_gb: float | None = None
    memory_tb_per_s: float | None = None
    source: str = ""

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between two pools (or within one): GB/s in one direction, seconds of latency."""

    a: str
    b: str
    gb_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pool:
    """`count` devices of one type in one place, and what an hour of one costs."""

    name: str
    device: Device
    count: int
    usd_per_device_hour: float = 0.0
    memory_gb: float | None = None
    """Host memory of a CPU pool, in all; None if not stated."""
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.count < 1 or self.usd_per_device_hour < 0:
            raise ValueError(
                f"pool {self.name}: count {self.count} and price {self.usd_per_device_hour} (rule: at least 1 and 0)"
            )


@dataclass(frozen=True, slots=True)
class Demand:
    """`replicas` parts of a role, each on `devices` devices of one pool; of a device type and labels if given."""

    role: Role
    replicas: int
    devices: int
    device: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    memory_gb: float = 0.0
    """Memory of one replica, over its devices (GPU) or of the host (CPU)."""

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.devices < 1:
            raise ValueError(f"demand {self.role}: {self.replicas} × {self.devices} devices (rule: at least 1 × 1)")


@dataclass(frozen=True, slots=True)
class Assignment:
    """One part's place: indices of devices in the pool (cores for a CPU pool). No two parts share one."""

    role: Role
    replica: int
    pool: str
    devices: tuple[int, ...]

    @property
    def name(self) -> str:
        """`engine-0`: how reports and processes call this part."""
        return f"{self.role}-{self.replica}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Which part runs where. `rates` are predicted units per second by role, None where nothing predicts them.

    `usd_per_hour` is of all pools: a device that nothing runs on is paid too (`idle`, devices by pool).
    `binds` says in words which resource is used up first.
    """

    assignments: tuple[Assignment, ...]
    idle: Mapping[str, int]
    usd_per_hour: float
    binds: str
    rates: Mapping[str, float] | None = None

    def of(self, role: Role) -> tuple[Assignment, ...]:
        """The parts of a role, by replica."""
        return tuple(a for a in self.assignments if a.role is role)


@dataclass(frozen=True, slots=True)
class Shortage:
    """There is no plan: what was asked for, what there is, in words with the numbers."""

    demand: Demand
    message: str
