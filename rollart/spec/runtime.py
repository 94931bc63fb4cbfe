"""The cluster spec's `runtime`: the launcher of a run's parts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from rollart.addresses import host_and_port
from rollart.entry import SpecEntry

__all__ = ["ElasticSpec", "RuntimeSpec"]

ADDRESSES = ("local", "start", "auto")
"""Values of `address` besides those with a port."""


class ElasticSpec(SpecEntry):
    """Nodes may join and leave: the plan is recomputed for the present nodes. `true` alone: with the defaults. The
    gain that a move must have, and its horizon, are settings of `placement.rebalance`."""

    settle_s: float = Field(
        default=30.0,
        gt=0,
        le=86400,
        description="Seconds that a node must stay before the plan uses it (doubled for every short-lived node of its "
        "pool just before), and seconds after a loss before the plan changes.",
    )
    wait_s: float = Field(
        default=3600.0,
        ge=0,
        le=604800,
        description="Longest wait for a node when the last engine, the last environment host or the last function "
        "host is lost, and no present node could hold one; then the run ends.",
    )


class RuntimeSpec(SpecEntry):
    """The launcher of engines and the trainer: this process, or a Ray cluster. See docs/fleet.md."""

    backend: Literal["local", "ray"] = Field(
        default="local", description="`local`: processes of this machine; `ray`: actors on the nodes of a Ray cluster."
    )
    address: str = Field(
        default="local",
        min_length=1,
        description="Address of the Ray cluster. `local`: a private cluster on this machine during the run, with a "
        "node per host of each pool; `start`: a head on this machine during the run, which hosts join by the printed "
        "commands; `auto`: RAY_ADDRESS, else a cluster on this machine; `host:port`, from one of its nodes; "
        "`ray://host:port`: its client server, from a machine outside the cluster that reaches the nodes' addresses.",
    )
    port: int = Field(default=0, ge=0, le=65535, description="Port of the head of `address: start`; 0: a free port.")
    token: str | None = Field(
        default=None,
        min_length=1,
        description="File with the cluster's token, relative to the cluster file; if not given, Ray's own rules.",
    )
    wait_s: float = Field(default=60.0, ge=0, le=86400, description="Longest wait for nodes that the plan needs.")
    elastic: ElasticSpec | None = Field(
        default=None,
        description="The plan follows nodes that join or leave: engines are started on new nodes, and drained on nodes "
        "that will leave. Pools then have between `min` and `count` devices.",
    )
    health_s: float = Field(
        default=10.0,
        ge=0.5,
        le=600,
        description="Seconds of silence after which a node counts as lost; a quarter of it after its process was "
        "killed. For clusters that rollart makes: `address: local`, and those of `rollart infra render`; other "
        "clusters have their own settings.",
    )

    @field_validator("address")
    @classmethod
    def _of_a_cluster(cls, value: str) -> str:
        """Reject malformed addresses: Ray itself would retry them for minutes."""
        try:
            host = "" if value in ADDRESSES else host_and_port(value.removeprefix("ray://").partition("?")[0])[0]
        except ValueError:
            host = "/"
        if "/" in host:
            raise ValueError(f"{', '.join(ADDRESSES)}, HOST:PORT or ray://HOST:PORT")
        return value

    @field_validator("elastic", mode="before")
    @classmethod
    def _switch(cls, value: object) -> object:
        if isinstance(value, str | int | float | list) and not isinstance(value, bool):
            raise ValueError("true, false, or a mapping of keys to values")
        return {True: {}, False: None}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _only_ray_has_an_address(self) -> RuntimeSpec:
        if self.backend == "local" and (self.address != "local" or self.token is not None):
            raise ValueError("address and token are for backend: ray")
        if self.port and self.address != "start":
            raise ValueError("port is for address: start")
        return self
