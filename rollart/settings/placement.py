"""The `placement` section of a run spec, with the objective and constraints of the plan; and the profile of a task
domain, its demands on hardware as the user states them. Both are input of the placer.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue

from rollart.settings.base import SpecEntry


class TrainPlacement(SpecEntry):
    """Where training runs, and the parameters that predict its speed."""

    pool: str | None = None
    """Pool or device type; computed if not given."""
    devices: int | None = Field(default=None, ge=1, le=1_000_000)
    """Devices; computed if not given."""
    mfu: float | None = Field(default=None, le=1, ge=1e-4)
    """Share of the dense peak that the trainer reaches while it computes; the calibration's, or 0.40."""
    bytes_per_parameter: float = Field(default=16.0, ge=0.01, le=1e3)
    """Weights, gradients and optimizer state: bf16, fp32 master and AdamW."""
    frozen_bytes_per_parameter: float = Field(default=4.0, ge=0.01, le=1e3)
    """Weights that `training.lora` freezes: 4 (float32) with the embedded trainer."""
    sequence: int | None = Field(default=None, ge=1, le=100_000_000)
    """Longest sequence, whose activations and logits must fit; `model.context` if not given."""
    recompute: bool | None = None
    """true: activations are recomputed in the backward pass. If not given, the placer decides, unless
    `trainer.activation_checkpointing` asks for it."""
    split: int | None = Field(default=None, ge=1, le=100_000)
    """Devices that share one sequence (tensor or context parallelism); computed if not given."""
    seconds_per_token: float | None = Field(default=None, gt=0, le=1e6)
    """Measured device-seconds per trained token, instead of FLOPs and `mfu`."""
    seconds_per_step: float = Field(default=0.0, ge=0, le=1e6)
    """Measured seconds per step beside the tokens: publish, hand-over."""


class RebalanceSpec(SpecEntry):
    """How the plan is kept up to date during the run. 0 turns a part off."""

    reprice_s: float = Field(default=5.0, ge=0, le=1e9)
    """Seconds between corrections of prices by backlog."""
    flows_s: float = Field(default=30.0, ge=0, le=1e9)
    """Seconds between computations of the flows."""
    drift: float = Field(default=0.15, gt=0, le=1e6)
    """Relative change of the work after which instances are recomputed."""
    horizon_s: float = Field(default=3600.0, gt=0, le=1e9)
    """Time over which a move must pay for itself."""
    restart_s: float = Field(default=120.0, ge=0, le=1e9)
    """Seconds that a moved device earns nothing."""
    moves: bool = True
    """true: engines may be stopped and others started during the run; false: such plans are only recorded. Engines
    never move where `engines` gives their counts."""
    max_changed_devices: int | None = Field(default=None, ge=1, le=1_000_000)
    """Devices that one change may move; any number if not given."""


class PlacementSpec(SpecEntry):
    """Objective and constraints of the plan. By default: the highest rate, without a budget."""

    objective: Literal["max_throughput", "min_cost", "max_throughput_per_dollar"] = "max_throughput"
    """The objective: the rate, the cost of a given `rate`, or their ratio."""
    rate: float | None = Field(default=None, ge=1e-9, le=1e9)
    """Trajectories/s that `min_cost` must reach."""
    budget_usd_per_hour: float | None = Field(default=None, gt=0, le=1e12)
    """Largest bill: pools that are not rented whole, rented ones and functions by use."""
    in_flight: int | None = Field(default=None, ge=1, le=10_000_000)
    """Largest number of live trajectories; (staleness + 1) × batch if not given."""
    tensor_parallel: list[Annotated[int, Field(ge=1, le=100_000)]] | None = Field(default=None, min_length=1)
    """Devices per engine to consider; 1, 2, 4 and 8, where they divide the model, if not given."""
    prefill_decode: Literal["auto", "off", "only"] = "auto"
    """Prefill and decode on different engines: where it pays, never, or always."""
    router: Literal["priced", "dynamo", "vllm_router", "local", "remote"] = "priced"
    """Where a turn prefills. priced: the cheapest path by the plan's prices and the backlog; dynamo, vllm_router: their
    token thresholds; local, remote: always there."""
    utilisation: float = Field(default=0.95, le=1, ge=0.01)
    """Share of an instance's time that the plan may use."""
    rate_tolerance: float = Field(default=0.01, ge=0, lt=1)
    """Share of the best rate that a plan of `max_throughput` may give up to cost less; the plan shows both."""
    arithmetic: Literal["auto", "bf16", "fp8"] = "auto"
    """Planned arithmetic of the engines. auto: fp8 where weights have 1 byte and the device states tflops_fp8, else
    bf16, also with quantized weights (W8A16, W4A16)."""
    weight_bytes: float | None = Field(default=None, ge=0.01, le=100)
    """Bytes per parameter when serving: 2 bf16, 1 fp8, 0.5 int4. 4 for `engines.dtype: float32`, else 2, if not
    given."""
    kv_bytes: float | None = Field(default=None, ge=0.01, le=100)
    """Bytes per element of the KV cache; likewise if not given."""
    profile: str | None = None
    """Directory of a finished run, relative to the run file, from which domains without a `profile` take theirs."""
    train: TrainPlacement = Field(default_factory=TrainPlacement)
    """Training."""
    rebalance: RebalanceSpec = Field(default_factory=RebalanceSpec)
    """Changes of the plan during the run."""


class QuantitySpec(SpecEntry):
    """A figure that varies between trajectories; a plain number is its mean."""

    mean: float = Field(ge=0, le=1e9)
    """Mean."""
    p50: float | None = Field(default=None, ge=0, le=1e9)
    """Median."""
    p90: float | None = Field(default=None, ge=0, le=1e9)
    """90th percentile."""

    @model_validator(mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        """`20` is `{mean: 20}`."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            return {"mean": value}
        if not isinstance(value, dict | BaseModel):
            raise ValueError("a number, or a mapping with `mean` and perhaps `p50` and `p90`")
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Let the schema accept a plain number, so that editors do."""
        return {"anyOf": [{"type": "number", "minimum": 0}, handler.resolve_ref_schema(handler(core))]}


class TurnsSpec(QuantitySpec):
    """Turns of a trajectory; a plain number is their mean."""

    mean: float = Field(ge=1, le=1e6)
    """Mean."""


class EnvironmentCostSpec(SpecEntry):
    """The cost of an environment."""

    wait_s: float = Field(default=0.0, ge=0, le=1e6)
    """Seconds that a turn waits for the environment."""
    core_s: float = Field(default=0.0, ge=0, le=1e6)
    """CPU core-seconds of a turn in the environment."""
    reset_s: float = Field(default=0.0, ge=0, le=1e6)
    """Seconds before the first turn."""


class RewardCostSpec(SpecEntry):
    """The cost of scoring one trajectory."""

    seconds: float = Field(ge=1e-9, le=1e6)
    """Seconds of work for one trajectory."""
    cores: float = Field(default=1.0, ge=1e-6, le=1e6)
    """CPU cores it uses meanwhile."""
    memory_gb: float = Field(default=0.5, ge=1e-6, le=1e6)
    """Memory it needs."""
    on_gpu: bool = False
    """true: seconds of one GPU instead of CPU cores."""
    stateless: bool = True
    """true: it may run as a function."""
    latency_s: float | None = Field(default=None, ge=1e-9, le=1e6)
    """Longest acceptable wait for the score; any if not given."""
    gpu: str | None = Field(default=None, pattern=r"^[A-Za-z0-9!+:-]{0,32}$")
    """GPU type of its function, as the provider names it; that of the domain's reward functions if not given."""
    batch: int = Field(default=1, ge=1, le=10_000)
    """Trajectories that one call scores."""
    batch_s: float | None = Field(default=None, ge=1e-9, le=1e6)
    """Seconds of a call with `batch` of them: from `seconds`, that of a call with one, to `batch` times that, the
    default."""
    cold_start_s: float | None = Field(default=None, ge=0, le=1e6)
    """Seconds in which a new worker starts, with its image and weights; a guess if not given."""

    @model_validator(mode="after")
    def _batched(self) -> RewardCostSpec:
        if self.batch_s is not None and not self.seconds <= self.batch_s <= self.batch * self.seconds:
            raise ValueError(
                f"batch_s is {self.batch_s:g} (rule: from seconds, {self.seconds:g}, to batch × seconds, "
                f"{self.batch * self.seconds:g})"
            )
        return self


class ProfileSpec(SpecEntry):
    """The work of one trajectory of a domain, to be placed. Figures are means, or {mean, p50, p90}."""

    turns: TurnsSpec
    """Turns."""
    new_tokens: QuantitySpec
    """Tokens of observation at every turn after the first."""
    output_tokens: TurnsSpec
    """Tokens generated per turn."""
    first_tokens: QuantitySpec | None = None
    """Tokens of the first prompt; as `new_tokens` if not given."""
    shared_prefix: float = Field(default=0.0, ge=0, lt=1)
    """Share of the first prompt that all trajectories share (a system prompt)."""
    environment: EnvironmentCostSpec = Field(default_factory=EnvironmentCostSpec)
    """Cost of the environment."""
    solved: float | None = Field(default=None, ge=0, le=1)
    """Share of trajectories that earn 1 rather than 0 in `rollart simulate`, where prompts differ in difficulty; all of
    them if not given."""
    reward: RewardCostSpec | None = None
    """Cost of scoring; not planned if not given."""
