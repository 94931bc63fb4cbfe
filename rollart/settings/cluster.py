"""The cluster spec: devices with their prices and links, and how the parts of a run are laid out on them: engines, the
trainer, environments, functions, and the runtime that launches them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    JsonValue,
    ModelWrapValidatorHandler,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails

from rollart.settings.base import ImportPath, Name, SpecEntry, Tags, host_and_port, http_url, is_loopback
from rollart.settings.prices import PriceEntry, PriceKind
from rollart.settings.providers import ALIASES, BUILT_IN, PLUGIN_NAME, installed_plugins, provider_names
from serverless.secrets import private_url

UNLESS_QUICK: Literal["unless_quick"] = "unless_quick"

ADDRESSES = ("local", "start", "auto")
"""Values of `address` besides those with a port."""

Dtype = Literal["auto", "bfloat16", "float16", "float32"]


def function_provider(value: str) -> str:
    if value not in BUILT_IN and value not in installed_plugins():
        hint = f"; did you mean '{ALIASES[value]}'?" if value in ALIASES else ""
        raise ValueError(f"one of {', '.join(provider_names())}{hint}")
    return value


FunctionProvider = Annotated[
    str,
    AfterValidator(function_provider),
    WithJsonSchema(
        {"anyOf": [{"type": "string", "enum": list(BUILT_IN)}, {"type": "string", "pattern": f"^{PLUGIN_NAME}$"}]}
    ),
]


class DeviceSpec(SpecEntry):
    """A device type that the catalogue lacks, or figures that replace the catalogue's. Omitted figures keep the
    catalogue's value, or stay unknown."""

    name: Name
    """Name that pools use. A name of the catalogue: its figures are the base."""
    base: str | None = None
    """Device type of the catalogue whose figures are the base."""
    source: str = Field(min_length=1)
    """Source of these figures."""
    tflops_bf16: float | None = Field(default=None, ge=1e-6, le=1e6)
    """Dense bf16 TFLOP/s."""
    tflops_fp8: float | None = Field(default=None, ge=1e-6, le=1e6)
    """Dense fp8 TFLOP/s."""
    memory_gb: float | None = Field(default=None, ge=1e-6, le=1e6)
    """Memory of one device, GB of 1e9 bytes."""
    memory_tb_per_s: float | None = Field(default=None, ge=1e-6, le=1e6)
    """Memory bandwidth, TB/s."""
    nvlink_gb_per_s: float | None = Field(default=None, ge=1e-6, le=1e6)
    """Between the devices of a host, GB/s of one device, all directions together."""
    link_gb_per_s: float | None = Field(default=None, ge=1e-6, le=1e6)
    """One device's share of its host's network, GB/s in one direction."""
    watts: float | None = Field(default=None, gt=0, le=1e6)
    """Board power."""
    devices_per_host: int | None = Field(default=None, ge=1, le=1_000_000)
    """Devices of one host."""
    generation: str | None = Field(default=None, min_length=1)
    """Devices of one generation share calibrated constants (`hopper`)."""


class PoolSpec(SpecEntry):
    """Devices of one type at one site."""

    name: Name
    """Name of the pool."""
    device: str = Field(default="cpu", min_length=1)
    """`cpu` (a device is a core) or a GPU type like H800."""
    count: int = Field(ge=1, le=1_000_000)
    """Devices in the pool: cores for `cpu`, GPUs otherwise."""
    min: int | None = Field(default=None, ge=0, le=1_000_000)
    """With `runtime.elastic`: devices that must be present for the run to begin, instead of all that its plan uses.
    `count` is the upper bound."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the pool."""
    memory_gb: float | None = Field(default=None, ge=1e-6, le=1e9)
    """Host memory of the pool (cpu), or memory of one device instead of the catalogue's."""
    devices_per_host: int | None = Field(default=None, ge=1, le=1_000_000)
    """Devices of one host, instead of the catalogue's: TP stays within a host."""
    price: float | None = Field(default=None, ge=0, le=1e6)
    """Dollars per device-hour, instead of the price list's."""
    rented: bool = False
    """true: only devices that the plan uses are paid; false: all of them, used or not."""
    spot: bool = False
    """true: `rollart infra render` asks for interruptible capacity (spot instances). Only for `rented` pools; `price`
    is then the spot price, and without one the list's `spot` price counts, or its price on demand."""
    commitment: Literal["reserved", "committed"] | None = None
    """Devices that are paid for a term, used or not: at the list's price of this kind, or at `price`. Not with
    `rented`."""
    tags: Tags = Field(default_factory=dict)
    """Tags of the pool's costs, before those of the run (`owner: infra`)."""

    @model_validator(mode="after")
    def _within(self) -> PoolSpec:
        if self.min is not None and self.min > self.count:
            raise ValueError(f"min {self.min} is more than count {self.count}")
        if self.spot and not self.rented:
            raise ValueError("spot is true and rented is false (rule: spot capacity is rented). Add `rented: true`")
        if self.commitment is not None and self.rented:
            raise ValueError(f"commitment is {self.commitment} and rented is true (rule: it is paid, used or not)")
        return self

    @property
    def price_kind(self) -> PriceKind:
        """The kind of price that the pool pays."""
        return self.commitment or ("spot" if self.spot else "on_demand")


class LinkSpec(SpecEntry):
    """The connection of two pools, of a pool with itself, or of a pool with `store`: the location of the weight
    versions (the run's directory, or `weights.store`)."""

    a: Name
    """Name of a pool, or `store`."""
    b: Name
    """Name of a pool, or `store`; the same as `a` for a pool's own network."""
    gb_per_s: float = Field(ge=1e-6, le=1e9)
    """GB/s in one direction, over all of the connection."""
    latency_ms: float = Field(default=0.0, ge=0, le=1e6)
    """Milliseconds one way."""


class PublishSpec(SpecEntry):
    """Measured speeds of publishing weights. Without them plans and simulations assume the bandwidth of the links."""

    preset: Literal["rollart"] | None = None
    """Published speeds of a system: `rollart` (arXiv 2512.22560) pushed 0.45 GB/s, pulled 2.6 GB/s and loaded 6.5 GB/s.
    The other keys replace them one by one."""
    push_gb_per_s: float | None = Field(default=None, ge=1e-6, le=1e6)
    """GB/s at which the trainer pushes or writes a version, at most."""
    pull_gb_per_s: float | None = Field(default=None, ge=1e-6, le=1e6)
    """GB/s at which one host pulls or reads a version, at most."""
    load_gb_per_s: float | None = Field(default=None, ge=1e-6, le=1e6)
    """GB/s at which an engine loads a version that its host has; 6.5 if not given."""
    broadcast_gb_per_s: float | None = Field(default=None, ge=1e-6, le=1e6)
    """GB/s of a broadcast (`weights.collective`), at most."""


PYTHON_VARIABLE = "ROLLART_VLLM_PYTHON"
"""Environment variable with the interpreter of vLLM's environment, if the cluster spec names none."""


class VllmSpec(SpecEntry):
    """vLLM servers. Tensor parallelism, context, concurrent requests and roles come from the plan and the run."""

    python: str | None = Field(default=None, min_length=1)
    """Interpreter of the environment that vLLM and integrations/vllm are installed in; ROLLART_VLLM_PYTHON if not
    given."""
    dtype: Dtype = "auto"
    """Precision of weights and computation; `auto`: `engines.dtype`, and if that is `auto`, vLLM's choice."""
    memory: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that vLLM takes, weights and KV together."""
    kv_gb: float = Field(default=1.0, ge=0.001, le=1e6)
    """KV memory of an engine on CPU cores, GB of 1e9 bytes."""
    block_size: int | None = Field(default=None, ge=1, le=4096)
    """Tokens of a KV block, the unit of prefix caching; by default vLLM's."""
    probe: float | None = Field(default=None, ge=0, le=100)
    """After each start and update: how far log-probabilities of a fixed prompt may be from the trainer's, on average
    (0.05 is usual in bfloat16, 0.0001 in float32). An engine that is further off is restarted. Default: 0.01 where
    engines and trainer compute in float32, else 0.2. 0, or a temperature other than 1: not checked."""
    args: list[str] = Field(default_factory=list)
    """More arguments of `vllm serve`; they win."""
    env: dict[str, str] = Field(default_factory=dict)
    """More environment variables of it; they win."""


class EnginesSpec(SpecEntry):
    """Inference engines. Without `count`, `prefill` and `decode` the placer computes their number, kinds and pools."""

    count: int | None = Field(default=None, ge=1, le=100_000)
    """Number of engines that prefill and decode; computed if no number is given."""
    prefill: int | None = Field(default=None, ge=1, le=100_000)
    """Number of engines that only prefill."""
    decode: int | None = Field(default=None, ge=1, le=100_000)
    """Number of engines that only decode."""
    device: str | None = None
    """Device type they need; any if not given."""
    threads: int = Field(default=1, ge=1, le=100_000)
    """Devices of one engine (cores, or GPUs: tensor parallelism)."""
    max_slots: int = Field(default=64, ge=1, le=2**31 - 1)
    """Requests that one engine decodes at a time."""
    dtype: Dtype = "auto"
    """Precision of the engines' arithmetic, weights and KV; `auto`: bfloat16 on GPUs, float32 on cores. For vLLM,
    `vllm.dtype` where that is not `auto`."""
    kind: Literal["embedded", "vllm"] = "embedded"
    """The inference engine: the embedded one, or vLLM in a separate environment."""
    attach: list[str] = Field(default_factory=list)
    """URLs of vLLM servers that run already, one per engine, which are used and never started or stopped. They read the
    run's directory, or pull versions from weights.store."""
    vllm: VllmSpec = Field(default_factory=VllmSpec)
    """How vLLM is started."""

    @field_validator("attach")
    @classmethod
    def _urls(cls, value: list[str]) -> list[str]:
        urls = [http_url(one) for one in value]
        if len({url.rstrip("/") for url in urls}) < len(urls):
            raise ValueError("a server is named twice (rule: each is one engine)")
        return urls

    @model_validator(mode="after")
    def _one_dtype(self) -> EnginesSpec:
        both = {self.dtype, self.vllm.dtype} - {"auto"}
        if self.kind == "vllm" and len(both) > 1:
            raise ValueError(f"dtype {self.dtype} and vllm.dtype {self.vllm.dtype} (rule: one of them, or both alike)")
        return self

    @property
    def fixed(self) -> bool:
        """True if the user gave the engine counts, so that no plan is computed."""
        return not (self.count is None and self.prefill is None and self.decode is None)


class TrainerSpec(SpecEntry):
    """The trainer."""

    device: str | None = None
    """Device type it needs; any if not given."""
    threads: int = Field(default=1, ge=1, le=1_000_000)
    """Devices of the trainer (cores or GPUs) beside a given number of engines."""
    ranks: int | None = Field(default=None, ge=1, le=100_000)
    """Processes that the embedded trainer is sharded over (FSDP2). If no number is given, one per GPU, or one for all
    cores; given for GPUs, it is their number."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of forward and backward passes; weights and optimizer stay in float32. `auto`: bfloat16 on GPUs, but
    float32 on cores and for `training.stream`."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    compile: bool = False
    """Compile the model's blocks; the first step pays for it."""
    bucket_mb: int = Field(default=1000, ge=1, le=1_000_000)
    """Largest file of a version that several ranks write, MB of 1e6 bytes; a larger tensor is alone."""

    external: str | None = None
    """HOST:PORT where a trainer of your own takes the run's batches and announces versions, instead of the embedded one
    (docs/service.md)."""
    external_token: str | None = Field(default=None, pattern=r"^(file|env:[A-Za-z_][A-Za-z0-9_]*)$")
    """The token that `external` then needs: `env:VAR`, the one in this variable; `file`, one that the run writes to
    service.token (mode 600) in its directory. Needed where others than this machine can call."""

    @field_validator("external")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        try:
            host_and_port(value or "127.0.0.1:0")
        except ValueError:
            raise ValueError("HOST:PORT") from None
        return value

    @model_validator(mode="after")
    def _guarded(self) -> TrainerSpec:
        if self.external is not None and not self.external_token and not is_loopback(host_and_port(self.external)[0]):
            raise ValueError(
                f"external_token, file or env:VAR, with external {self.external!r}, which is reachable from elsewhere"
            )
        return self

    @property
    def sharded(self) -> bool:
        """True if the spec itself asks for FSDP2."""
        return (self.ranks or 1) > 1 or self.dtype == "bfloat16"


class EnvironmentsSpec(SpecEntry):
    """Where environments live: in the controller's process, or on separate hosts. See docs/environments.md."""

    workers: Literal["auto", "unless_quick"] | Annotated[int, Field(ge=0, le=100_000)] = UNLESS_QUICK
    """Environment hosts: processes that hold many environments each. 0: environments live in the controller's process;
    auto: as many as the plan gives them cores, or as the profiles require (`core_s`), with slots for all concurrent
    episodes: redundant, prefetched and held-out ones too; unless_quick: 0 where every environment of the run declares
    `quick = True` (it answers at once, without waiting), else auto. Plans and simulations know no classes, and take
    unless_quick for 0."""
    pool: Name | None = None
    """Pool whose machines they run on, beside the parts that the plan put there; by default the first pool of cores.
    Cores that the plan gave to environments go to hosts first, whatever their pool."""
    per_worker: int = Field(default=512, ge=1, le=1_000_000)
    """Concurrent environments of one host; further ones wait for a slot, which does not count as a fault."""
    python: str | None = Field(default=None, min_length=1)
    """Python interpreter with the environments' packages, and rollart, installed, relative to the cluster file; by
    default the controller's."""
    warm: int = Field(default=0, ge=0, le=10_000)
    """Environments of each domain that a host makes before they are needed, or keeps for reuse."""
    reuse: int = Field(default=1, ge=1, le=1_000_000)
    """Episodes that one environment plays, reset in between, if it declares itself `reusable`; 1: a new environment for
    each episode. No more than `warm` are kept."""
    images: ImportPath | None = None
    """`package.module:Class` that lists and pulls container images on a host, for environments that name theirs by
    `images(seed)`."""
    images_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of that class."""
    images_gb: float | None = Field(default=None, gt=0, le=1e6)
    """Images that a host keeps, 10^9 bytes; evicted by least recent use."""
    pull_s: float = Field(default=600.0, gt=0, le=86400)
    """Longest wait for an episode's images, which is no part of its reset."""
    memory_gb: Literal["auto"] | Annotated[float, Field(ge=0.1, le=1e6)] = "auto"
    """Resident memory of one host, 10^9 bytes, with the programs that its environments start: a host above it gets no
    more episodes, and is restarted when it holds none, or at once above 1.25 times of it. auto: an equal share of 70 %
    of its machine's memory (its container's, if that is limited) for each host there, but 1 at least. With `workers` 0
    the controller reports when it has grown by this much."""
    health_s: float = Field(default=15.0, ge=0.5, le=3600)
    """A host that is silent, or whose environments are all blocked by one call, for this long is restarted."""
    start_s: float = Field(default=60.0, ge=1, le=86400)
    """Longest start of a host, its environments' imports included."""


class LocalFunctions(SpecEntry):
    """The run's own function workers: on the controller's machine, or on hosts that the runtime starts; they can also
    rehearse a provider's behaviour without paying for it."""

    hosts: Literal["auto"] | Annotated[int, Field(ge=0, le=100_000)] = "auto"
    """Hosts of function workers: programs that hold many workers each, on Ray an actor each. auto: on Ray as many as
    the plan gives rewards cores, else one for each machine of `pool`; with `runtime.backend: local` none. 0: workers
    are on the controller's machine."""
    pool: Name | None = None
    """Pool whose machines hosts run on, beside the parts that the plan put there; by default the first pool of cores.
    Cores that the plan gave to rewards go to hosts first, whatever their pool."""
    health_s: float = Field(default=15.0, ge=0.5, le=3600)
    """A host that is silent for this long is restarted."""
    start_s: float = Field(default=60.0, ge=1, le=86400)
    """Longest start of a host, the functions' `preload` included."""
    runtime: Literal["rollart", "awslambdaric"] = "rollart"
    """The loop that runs the handler in a worker: rollart's, or AWS's runtime client (extra `providers`)."""
    rehearse: Literal["aws_lambda", "modal"] | None = None
    """Behave as this provider: its cold starts, overhead of a call, and throttles, drawn from the figures and sources
    in serverless/providers/rehearsal.py. Bills stay those of `local`."""
    seed: int = Field(default=0, ge=0)
    """Seed of a rehearsal's random draws."""
    root: str = ".rollart/functions"
    """Directory of functions deployed on this machine, for those that a run names: `--root` of `rollart rewards`."""

    @field_validator("rehearse", mode="before")
    @classmethod
    def _also_called(cls, value: object) -> object:
        return "aws_lambda" if value in ("lambda", "aws") else value


class HttpFunction(SpecEntry):
    """A function at a URL. Secrets are named, never written down. A text alone is the URL."""

    url: Annotated[str, AfterValidator(http_url)]
    """http or https URL that takes and gives the list form."""
    token_env: str | None = Field(default=None, min_length=1)
    """Variable that holds a bearer token."""
    secret_env: str | None = Field(default=None, min_length=1)
    """Variable that holds a signing secret."""
    key: str = Field(default="rollart", min_length=1)
    """Key id of the signing secret."""
    send_secrets: bool = False
    """Send the function's secrets with each call, in the header X-Rollart-Secrets. The URL is then https, or of this
    machine. By default the host has them."""
    idempotent: bool | None = None
    """true: the host executes calls with the same Idempotency-Key once, so that a lost call may be sent again; by
    default, as the host declares."""

    @model_validator(mode="after")
    def _one_way(self) -> HttpFunction:
        if self.token_env is not None and self.secret_env is not None:
            raise ValueError("token_env or secret_env, not both")
        if self.send_secrets and not private_url(self.url):
            raise ValueError("send_secrets takes an https URL, or one of this machine")
        return self


class ClusterFunctions(SpecEntry):
    """Where reward functions run. Settings of a provider that another package registers are under its name."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, dict[str, JsonValue]] = Field(init=False)

    backend: FunctionProvider | list[FunctionProvider] = "local"
    """local: the run's own warm worker processes; `aws_lambda`; `modal`; `http`: hosts that have the functions; or a
    provider that another package registers. A list is a fallback order: a call goes to the first backend that works."""
    price: str | None = None
    """Provider of the price list that the plan prices functions with (`aws_lambda`, `modal`); by default the (first)
    backend's."""
    quota: int | None = Field(default=None, ge=1)
    """Concurrent calls of the run at each provider, over all of its functions, so that runs that share an account leave
    each other room. By default none but the functions' own `concurrency`."""
    allow_unsafe: bool = False
    """Let `local` run functions declared untrusted that never use the sandbox. Nothing then isolates this machine from
    code that the policy wrote."""
    order_check: bool = True
    """Call functions that are declared deterministic twice, in two orders, on their cases (cases.jsonl beside the file)
    or else on the first 8 samples of the run, and end the run if answers depend on earlier calls."""
    aws_lambda: dict[str, JsonValue] = Field(default_factory=dict)
    """`region`, `role_arn`, `prefix`, `bucket`, `architecture`, ...: see docs/functions.md. Credentials are the
    environment's."""
    modal: dict[str, JsonValue] = Field(default_factory=dict)
    """`prefix`, `environment`, `python`, `keep`: see docs/functions.md."""
    http: dict[str, HttpFunction] = Field(default_factory=dict)
    """By function its URL, or a mapping with it."""
    secrets: dict[str, JsonValue] = Field(default_factory=dict)
    """By variable the source of a secret's value, if it is not the provider's entry of the same name: `env`,
    `aws_secret`, `ssm`, `lambda_env`, `modal`: see docs/functions.md. Never a value."""
    local: LocalFunctions = Field(default_factory=LocalFunctions)
    """The run's own workers."""
    pipeline: dict[str, JsonValue] = Field(default_factory=dict)
    """Stages between a reward and its call, each with its constants and `enabled`: `dedupe`, `cache`, `admission`,
    `batching`, `hedge`, `retry`, `breaker`, ...: see docs/functions.md."""
    scaling: dict[str, JsonValue] = Field(default_factory=dict)
    """How workers are kept ready while a run goes on: `enabled`, `tick_s`, `forecast`, `reactive`, `keep_alive`,
    `provisioned`, ...: see docs/functions.md."""

    @model_validator(mode="wrap")
    @classmethod
    def _only_providers(cls, values: Any, validate: ModelWrapValidatorHandler[ClusterFunctions]) -> ClusterFunctions:
        """Other keys are names of installed providers."""
        other = [key for key in values if key not in cls.model_fields] if isinstance(values, dict) else []
        unknown = [
            InitErrorDetails(type="extra_forbidden", loc=(key,), input=values[key])
            for key in other
            if key not in installed_plugins()
        ]
        problems: list[Any] = []
        try:
            spec = validate(values)
        except ValidationError as error:
            if not unknown:
                raise
            problems = [*error.errors(include_url=False)]
        if unknown:
            raise ValidationError.from_exception_data(cls.__name__, [*problems, *unknown])
        return spec

    @field_validator("http", mode="before")
    @classmethod
    def _urls(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        return {name: {"url": one} if isinstance(one, str) else one for name, one in value.items()}

    @property
    def plugins(self) -> Mapping[str, Mapping[str, JsonValue]]:
        """Settings of providers that other packages register, by name."""
        return self.model_extra or {}

    @property
    def chain(self) -> tuple[str, ...]:
        """Providers in their order."""
        return tuple(self.backend) if isinstance(self.backend, list) else (self.backend,)


class ElasticSpec(SpecEntry):
    """Nodes may join and leave: the plan is recomputed for the present nodes. `true` alone: with the defaults. The
    gain that a move must have, and its horizon, are settings of `placement.rebalance`."""

    settle_s: float = Field(default=30.0, gt=0, le=86400)
    """Seconds that a node must stay before the plan uses it (doubled for every short-lived node of its pool just
    before), and seconds after a loss before the plan changes."""
    wait_s: float = Field(default=3600.0, ge=0, le=604800)
    """Longest wait for a node when the last engine, the last environment host or the last function host is lost, and no
    present node could hold one; then the run ends."""


class RuntimeSpec(SpecEntry):
    """The launcher of engines and the trainer: this process, or a Ray cluster. See docs/fleet.md."""

    backend: Literal["local", "ray"] = "local"
    """`local`: processes of this machine; `ray`: actors on the nodes of a Ray cluster."""
    address: str = Field(default="local", min_length=1)
    """Address of the Ray cluster. `local`: a private cluster on this machine during the run, with a node per host of
    each pool; `start`: a head on this machine during the run, which hosts join by the printed commands; `auto`:
    RAY_ADDRESS, else a cluster on this machine; `host:port`, from one of its nodes; `ray://host:port`: its client
    server, from a machine outside the cluster that reaches the nodes' addresses."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the head of `address: start`; 0: a free port."""
    token: str | None = Field(default=None, min_length=1)
    """File with the cluster's token, relative to the cluster file; if not given, Ray's own rules."""
    wait_s: float = Field(default=60.0, ge=0, le=86400)
    """Longest wait for nodes that the plan needs."""
    elastic: ElasticSpec | None = None
    """The plan follows nodes that join or leave: engines are started on new nodes, and drained on nodes that will
    leave. Pools then have between `min` and `count` devices."""
    health_s: float = Field(default=10.0, ge=0.5, le=600)
    """Seconds of silence after which a node counts as lost; a quarter of it after its process was killed. For clusters
    that rollart makes: `address: local`, and those of `rollart infra render`; other clusters have their own
    settings."""

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


class ClusterSpec(SpecEntry):
    """A fleet. Only `name` and `pools` have no default."""

    name: Name
    """Name of the cluster."""
    devices: list[DeviceSpec] = Field(default_factory=list)
    """Device types that add to or replace those of the catalogue."""
    pools: list[PoolSpec] = Field(min_length=1)
    """Devices by type and site."""
    links: list[LinkSpec] = Field(default_factory=list)
    """Connections between pools, and of a pool with itself."""
    publish: PublishSpec = Field(default_factory=PublishSpec)
    """How fast new weights move, as measured."""
    engines: EnginesSpec = Field(default_factory=EnginesSpec)
    """Inference engines."""
    trainer: TrainerSpec = Field(default_factory=TrainerSpec)
    """The trainer."""
    environments: EnvironmentsSpec = Field(default_factory=EnvironmentsSpec)
    """Where environments live."""
    functions: ClusterFunctions = Field(default_factory=ClusterFunctions)
    """Where reward functions run."""
    runtime: RuntimeSpec = Field(default_factory=RuntimeSpec)
    """The runtime that starts the parts."""
    calibration: list[str] = Field(default_factory=list)
    """Files that `rollart calibrate` wrote, relative to the cluster file: measured constants."""
    prices: str | None = None
    """Price list file, relative to the cluster file; the shipped one if not given."""
    price_list: list[PriceEntry] = Field(default_factory=list)
    """Prices that add to or replace those of the list, by `name`."""

    @model_validator(mode="after")
    def _elastic(self) -> ClusterSpec:
        bounded = [pool.name for pool in self.pools if pool.min is not None]
        if bounded and self.runtime.elastic is None:
            raise ValueError(f"pool '{bounded[0]}' has min, which is for runtime.elastic")
        if self.engines.attach and self.runtime.elastic is not None:
            raise ValueError("engines.attach names servers, which no node brings: leave out runtime.elastic")
        return self
