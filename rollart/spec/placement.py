"""The `placement` section of a run spec: objective and constraints of the plan."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollart.entry import SpecEntry

__all__ = ["PlacementSpec", "RebalanceSpec", "TrainPlacement"]


class TrainPlacement(SpecEntry):
    """Where training runs, and the parameters that predict its speed."""

    pool: str | None = Field(default=None, description="Pool or device type; computed if not given.")
    devices: int | None = Field(default=None, ge=1, le=1_000_000, description="Devices; computed if not given.")
    mfu: float | None = Field(
        default=None,
        le=1,
        ge=1e-4,
        description="Share of the dense peak that the trainer reaches while it computes; the calibration's, or 0.40.",
    )
    bytes_per_parameter: float = Field(
        default=16.0,
        ge=0.01,
        le=1e3,
        description="Weights, gradients and optimizer state: bf16, fp32 master and AdamW.",
    )
    frozen_bytes_per_parameter: float = Field(
        default=4.0,
        ge=0.01,
        le=1e3,
        description="Weights that `training.lora` freezes: 4 (float32) with the embedded trainer.",
    )
    sequence: int | None = Field(
        default=None,
        ge=1,
        le=100_000_000,
        description="Longest sequence, whose activations and logits must fit; `model.context` if not given.",
    )
    recompute: bool | None = Field(
        default=None,
        description="true: activations are recomputed in the backward pass. If not given, the placer decides, unless "
        "`trainer.activation_checkpointing` asks for it.",
    )
    split: int | None = Field(
        default=None,
        ge=1,
        le=100_000,
        description="Devices that share one sequence (tensor or context parallelism); computed if not given.",
    )
    seconds_per_token: float | None = Field(
        default=None, gt=0, le=1e6, description="Measured device-seconds per trained token, instead of FLOPs and `mfu`."
    )
    seconds_per_step: float = Field(
        default=0.0, ge=0, le=1e6, description="Measured seconds per step beside the tokens: publish, hand-over."
    )


class RebalanceSpec(SpecEntry):
    """How the plan is kept up to date during the run. 0 turns a part off."""

    reprice_s: float = Field(default=5.0, ge=0, le=1e9, description="Seconds between corrections of prices by backlog.")
    flows_s: float = Field(default=30.0, ge=0, le=1e9, description="Seconds between computations of the flows.")
    drift: float = Field(
        default=0.15, gt=0, le=1e6, description="Relative change of the work after which instances are recomputed."
    )
    horizon_s: float = Field(default=3600.0, gt=0, le=1e9, description="Time over which a move must pay for itself.")
    restart_s: float = Field(default=120.0, ge=0, le=1e9, description="Seconds that a moved device earns nothing.")
    moves: bool = Field(
        default=True,
        description="true: engines may be stopped and others started during the run; false: such plans are only "
        "recorded. Engines never move where `engines` gives their counts.",
    )
    max_changed_devices: int | None = Field(
        default=None, ge=1, le=1_000_000, description="Devices that one change may move; any number if not given."
    )


class PlacementSpec(SpecEntry):
    """Objective and constraints of the plan. By default: the highest rate, without a budget."""

    objective: Literal["max_throughput", "min_cost", "max_throughput_per_dollar"] = Field(
        default="max_throughput", description="The objective: the rate, the cost of a given `rate`, or their ratio."
    )
    rate: float | None = Field(default=None, ge=1e-9, le=1e9, description="Trajectories/s that `min_cost` must reach.")
    budget_usd_per_hour: float | None = Field(
        default=None,
        gt=0,
        le=1e12,
        description="Largest bill: pools that are not rented whole, rented ones and functions by use.",
    )
    in_flight: int | None = Field(
        default=None,
        ge=1,
        le=10_000_000,
        description="Largest number of live trajectories; (staleness + 1) × batch if not given.",
    )
    tensor_parallel: list[Annotated[int, Field(ge=1, le=100_000)]] | None = Field(
        default=None,
        min_length=1,
        description="Devices per engine to consider; 1, 2, 4 and 8, where they divide the model, if not given.",
    )
    prefill_decode: Literal["auto", "off", "only"] = Field(
        default="auto", description="Prefill and decode on different engines: where it pays, never, or always."
    )
    router: Literal["priced", "dynamo", "vllm_router", "local", "remote"] = Field(
        default="priced",
        description="Where a turn prefills. priced: the cheapest path by the plan's prices and the backlog; dynamo, "
        "vllm_router: their token thresholds; local, remote: always there.",
    )
    utilisation: float = Field(
        default=0.95, le=1, ge=0.01, description="Share of an instance's time that the plan may use."
    )
    rate_tolerance: float = Field(
        default=0.01,
        ge=0,
        lt=1,
        description="Share of the best rate that a plan of `max_throughput` may give up to cost less; the "
        "plan shows both.",
    )
    arithmetic: Literal["auto", "bf16", "fp8"] = Field(
        default="auto",
        description="Planned arithmetic of the engines. auto: fp8 where weights have 1 byte and the device states "
        "tflops_fp8, else bf16, also with quantized weights (W8A16, W4A16).",
    )
    weight_bytes: float | None = Field(
        default=None,
        ge=0.01,
        le=100,
        description="Bytes per parameter when serving: 2 bf16, 1 fp8, 0.5 int4. 4 for `engines.dtype: float32`, else "
        "2, if not given.",
    )
    kv_bytes: float | None = Field(
        default=None, ge=0.01, le=100, description="Bytes per element of the KV cache; likewise if not given."
    )
    profile: str | None = Field(
        default=None,
        description="Directory of a finished run, relative to the run file, from which domains without a `profile` "
        "take theirs.",
    )
    train: TrainPlacement = Field(default_factory=TrainPlacement, description="Training.")
    rebalance: RebalanceSpec = Field(default_factory=RebalanceSpec, description="Changes of the plan during the run.")
