"""The cluster spec's `runtime`: what starts the parts of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from rollart.addresses import host_and_port
from rollart.entry import SpecEntry

__all__ = ["ElasticSpec", "RuntimeSpec"]

ADDRESSES = ("local", "start", "auto")
"""Of a Ray cluster, beside those with a port."""


class ElasticSpec(SpecEntry):
    """Nodes may come and go: the plan is computed again for those that are there. `true` alone: with the defaults. What
    a move must gain, and over which time, is `placement.rebalance`'s."""

    settle_s: float = Field(
        default=30.0,
        gt=0,
        le=86400,
        description="Seconds that a node must stay before the plan counts on it (twice as long for every short life of "
        "one of its pool just before), and that pass after a loss before the plan follows it.",
    )
    wait_s: float = Field(
        default=3600.0,
        ge=0,
        le=604800,
        description="Longest wait for a node when no engine is left, or no environment host or host of function "
        "workers, and none that is there could hold one; then the run ends.",
    )


class RuntimeSpec(SpecEntry):
    """What starts engines and the trainer: this process, or a Ray cluster. See docs/fleet.md."""

    backend: Literal["local", "ray"] = Field(
        default="local", description="`local`: processes of this machine; `ray`: actors on the nodes of a Ray cluster."
    )
    address: str = Field(
        default="local",
        min_length=1,
        description="Of the Ray cluster: `local`: a private one on this machine while the run runs, with a node per "
        "host of each pool; `start`: a head on this machine while the run runs, which hosts join by the commands that "
        "are printed; `auto`: the one that RAY_ADDRESS names, else one of this machine; `host:port`, from one of its "
        "nodes; `ray://host:port`: its client server, from a machine that is no node of it and reaches the "
        "nodes' addresses.",
    )
    port: int = Field(default=0, ge=0, le=65535, description="Of the head of `address: start`; 0: a free one.")
    token: str | None = Field(
        default=None,
        min_length=1,
        description="File with the cluster's token, relative to the cluster file; if not given, Ray's own rules.",
    )
    wait_s: float = Field(
        default=60.0, ge=0, le=86400, description="Longest wait for nodes that the plan needs and that are not there."
    )
    elastic: ElasticSpec | None = Field(
        default=None,
        description="Whether the plan follows nodes that join or leave: engines are started on those that come, and "
        "drained on those that are to go. Pools then have between `min` and `count` devices.",
    )
    health_s: float = Field(
        default=10.0,
        ge=0.5,
        le=600,
        description="Seconds of silence after which a node counts as lost; a quarter of it after its process was "
        "killed. For clusters that rollart makes: `address: local`, and those of `rollart infra render`; others were "
        "started with settings of their own.",
    )

    @field_validator("address")
    @classmethod
    def _of_a_cluster(cls, value: str) -> str:
        """Ray itself looks for minutes for what is no address."""
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
