"""The specification of a function: its source, resources and calling convention."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

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


VARIABLE = r"^[A-Za-z][A-Za-z0-9_]{1,127}$"
"""Names of environment variables that every provider accepts: Lambda's rule, a letter first and two characters."""

VARIABLE_RULE = "the name of an environment variable: a letter, then one or more letters, digits or '_'"

Variable = Annotated[str, Field(pattern=VARIABLE)]

RESERVED_VARIABLE = re.compile(
    r"(AWS_(REGION|DEFAULT_REGION|EXECUTION_ENV|LAMBDA_\w+|ACCESS_KEY|ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN)"
    r"|(LAMBDA|MODAL|LD|ROLLART)_\w+|PYTHON\w*|PATH|HOME|TMPDIR)$"
)
"""Names that a provider's runtime, the loader or a worker sets itself."""


def gpu_type(gpu: str) -> tuple[str, int]:
    """The type and number of a provider's GPU text: "H100!:2" (no automatic upgrade) is ("H100", 2). Modal's "A100" is
    the 40 GB one, and its "A10G" an A10."""
    if not gpu:
        return "", 0
    name, _, count = gpu.upper().partition(":")
    name = name.rstrip("!+")
    return {"A100": "A100-40GB", "A10G": "A10"}.get(name, name), int(count) if count.isdigit() else 1


class Settings(BaseModel):
    """Settings are immutable and refuse unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FunctionBatchSpec(Settings):
    """The items of one call. A batch is sent when it is full or its oldest item has waited `max_wait_ms`."""

    max_items: int = Field(default=32, ge=1, le=10_000)
    max_wait_ms: float = Field(default=2.0, ge=0.0, le=60_000.0)
    max_bytes: int = Field(default=5_000_000, ge=1_000)
    """Lambda's synchronous payload limit is 6 MB."""


class FunctionImageSpec(Settings):
    """The container image of a function: a base image or the user's Dockerfile, then the requirements and the package.
    Modal always runs an image; Lambda runs a zip archive unless the function has this."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    base: str = Field(default="", pattern=r"^([A-Za-z0-9][A-Za-z0-9._/:@-]{0,254})?$")
    """Base image with Python, pip and glibc; empty: Debian with the provider's Python version."""
    system: tuple[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9+.-]*(=[A-Za-z0-9+.:~-]+)?$")], ...] = ()
    """Debian packages to install with apt, `name` or `name=version`."""
    dockerfile: str = ""
    """Path of a Dockerfile in place of `base` and `system`. Its directory is the build context."""

    @model_validator(mode="after")
    def _one_origin(self) -> FunctionImageSpec:
        if self.dockerfile and (self.base or self.system):
            raise ValueError("dockerfile replaces base and system: write them into it")
        return self


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
    timeout_s: float = Field(default=10.0, gt=0.0, le=86_400.0)
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
    cache: bool | None = None
    """True if an earlier answer may stand for an equal item's: the result cache keeps it, and equal items in flight are
    one call. None: as `deterministic`. For functions whose answers vary and cost money, such as a judge."""
    hedge: bool = True
    """Late calls may be made a second time. Off for functions whose calls are expensive."""
    stateless: bool = False
    """Declares that the function keeps no state between calls, for sources where the check is inconclusive."""
    needs: tuple[Literal["environment"], ...] = ()
    """Dependencies beyond the item: "environment" keeps the function with the environment instead of offloading it."""
    requirements: tuple[str, ...] = ()
    """`name`, `name>=1` (pinned at packing, with its dependencies, to the installed versions), `name==1.2`, or the path
    of a requirements file. In a package: the lock, exact pins."""
    index_urls: tuple[str, ...] = ()
    """Package indexes beside PyPI for the requirements, of which the highest version counts, as for pip. Empty: PyPI
    alone, and PyTorch's index of CPU builds for torch where there is no GPU."""
    image: FunctionImageSpec | None = None
    """The container image; None: Lambda runs a zip archive, Modal its Debian image."""
    artefacts: tuple[str, ...] = ()
    """Files and directories packed with the function, under `artefacts/<basename>`."""
    arguments: dict[str, JsonValue] = {}
    """Arguments of a class's constructor, or keyword arguments of a function beside its items. Part of the version."""
    preload: tuple[str, ...] = ()
    """Modules that the local backend imports once, before it forks workers."""
    env: dict[Variable, str] = {}
    """Environment variables with plain values, which are part of the version."""
    secrets: tuple[Variable, ...] = ()
    """Environment variables with secret values. The names are part of the version; the values come from the provider
    (`serverless.secrets`) and are stored nowhere."""

    @field_validator("env", "secrets")
    @classmethod
    def _settable(cls, names: Any) -> Any:
        refused = sorted(name for name in names if RESERVED_VARIABLE.match(name))
        if refused:
            raise ValueError(f"{refused[0]} is set by the provider's runtime: choose another name")
        return names if isinstance(names, Mapping) else tuple(sorted(set(names)))

    @property
    def reusable(self) -> bool:
        """True if an answer may stand for later equal items."""
        return self.deterministic if self.cache is None else self.cache

    @field_validator("index_urls")
    @classmethod
    def _without_credentials(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            parts = urlsplit(url)
            if parts.username is not None:
                raise ValueError("a URL has credentials: keep them in ~/.netrc or a keyring")
            if parts.scheme not in ("https", "http", "file"):
                raise ValueError(f"{url} is not the URL of a package index")
        return urls

    @model_validator(mode="after")
    def _consistent(self) -> FunctionSpec:
        if self.warm > self.concurrency:
            raise ValueError(f"warm={self.warm} is more than concurrency={self.concurrency}")
        if self.handler and ":" in self.source:
            raise ValueError(f"handler={self.handler!r} and source={self.source!r} both name the attribute: drop one")
        if both := sorted(self.env.keys() & set(self.secrets)):
            raise ValueError(f"{both[0]} is in env and in secrets: drop one")
        return self

    @property
    def gpus(self) -> tuple[str, int]:
        """The GPU type and number of a worker, as price lists name them; ("", 0) without a GPU."""
        return gpu_type(self.gpu)

    def identity(self) -> dict[str, object]:
        """The settings that define a version: those of the running code, not those of scaling or the source path.
        Settings that are newer than published versions are left out where they have their default value."""
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
        added = {key for key in ("arguments", "env", "index_urls", "secrets") if getattr(self, key)}
        found = self.model_dump(mode="json", include=chosen | added)
        if self.image is not None:  # the Dockerfile counts by its content, which is a file of the package
            found["image"] = self.image.model_dump(mode="json", exclude={"dockerfile"}, exclude_defaults=True)
        return found
