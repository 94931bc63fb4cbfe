"""The specification of a function: its source, resources and calling convention."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Takes = Literal[
    "auto",
    "item",
    "samples",
    "items",
    "event",
    "verl",
    "verl_batch",
    "trl",
    "trl_chat",
    "slime",
    "slime_batch",
    "openrlhf",
    "areal",
    "verifiers",
    "verifiers_text",
]
"""The calling convention of the user's callable (`serverless.signatures`). "auto": detected from its parameters when it
is packed."""

Trust = Literal["trusted", "untrusted"]
""""untrusted": the function executes code that the policy wrote, and therefore only runs inside a sandbox."""


class Settings(BaseModel):
    """Settings are immutable and refuse unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FunctionBatchSpec(Settings):
    """The items of one call. A batch is sent when it is full or its oldest item has waited `max_wait_ms`."""

    max_items: int = Field(default=32, ge=1, le=10_000)
    max_wait_ms: float = Field(default=2.0, ge=0.0, le=60_000.0)
    max_bytes: int = Field(default=5_000_000, ge=1_000)
    """Lambda's synchronous payload limit is 6 MB."""


class FunctionSpec(Settings):
    """A stateless function. Defaults are Lambda's where Lambda has one."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    source: str = Field(min_length=1)
    """`path/to/file.py`, `path/to/package` (a directory with `__init__.py`) or `package.module`, each with an optional
    `:attribute`. Relative imports and imports of files beside it are packed along."""
    handler: str = Field(default="", pattern=r"^[A-Za-z_]?\w*$")
    """The attribute of the source to call; empty: the one after ':', else the one with `@reward`, else `handler`."""
    takes: Takes = "auto"
    memory_mb: int = Field(default=512, ge=128, le=32_768)
    cpu: float = Field(default=0.0, ge=0.0, le=64.0)
    """Cores of a worker; 0: the provider's share for the memory (Lambda: one per 1,769 MB)."""
    gpu: str = Field(default="", pattern=r"^[A-Za-z0-9!+:-]{0,32}$")
    """A GPU type, as the provider names it ("L4", "H100:2"); empty: none. Providers without GPUs refuse it."""
    trust: Trust = "trusted"
    timeout_s: float = Field(default=10.0, gt=0.0, le=5_400.0)
    """Time limit of one call (of a whole batch). Its expiry is an InfraFault, or a ModelFault with `timeout_floor`."""
    timeout_floor: float | None = Field(default=None, allow_inf_nan=False)
    """Declares that a timeout is the policy's fault (it wrote the code that loops), with this value."""
    init_timeout_s: float = Field(default=10.0, gt=0.0, le=600.0)
    concurrency: int = Field(default=4, ge=1, le=10_000)
    """Maximum number of workers; also of calls in flight."""
    queue: int = Field(default=10_000, ge=1)
    """Maximum number of items that wait for a worker; further items are THROTTLED."""
    batch: FunctionBatchSpec = FunctionBatchSpec()
    keep_alive_s: float = Field(default=60.0, ge=0.0)
    """Seconds that an idle worker is kept before the function scales down towards `warm`."""
    warm: int = Field(default=0, ge=0)
    """Workers that are started at deployment and kept running."""
    deterministic: bool = True
    """True if equal items get equal answers: an invalid answer is then not retried, and results may be cached."""
    stateless: bool = False
    """Declares that the function keeps no state between calls, for sources where the check is inconclusive."""
    needs: tuple[Literal["environment"], ...] = ()
    """Dependencies beyond the item: "environment" keeps the function with the environment instead of offloading it."""
    requirements: tuple[str, ...] = ()
    """`name`, `name>=1` (pinned at packing, with its dependencies, to the installed versions), `name==1.2`, or the path
    of a requirements file. In a package: the lock, exact pins."""
    artefacts: tuple[str, ...] = ()
    """Files and directories packed with the function, under `artefacts/<basename>`."""
    preload: tuple[str, ...] = ()
    """Modules that the local backend imports once, before it forks workers."""

    @model_validator(mode="after")
    def _consistent(self) -> FunctionSpec:
        if self.warm > self.concurrency:
            raise ValueError(f"warm={self.warm} is more than concurrency={self.concurrency}")
        if self.handler and ":" in self.source:
            raise ValueError(f"handler={self.handler!r} and source={self.source!r} both name the attribute: drop one")
        return self

    def identity(self) -> dict[str, object]:
        """The settings that define a version: those of the running code, not those of scaling or the source path."""
        chosen = {
            "name",
            "takes",
            "memory_mb",
            "cpu",
            "gpu",
            "trust",
            "timeout_s",
            "timeout_floor",
            "deterministic",
            "requirements",
        }
        return self.model_dump(mode="json", include=chosen)
