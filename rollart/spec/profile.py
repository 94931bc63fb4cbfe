"""The hardware demands of a task domain as the user states them: input of the placer."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue

from rollart.entry import SpecEntry

__all__ = ["EnvironmentCostSpec", "ProfileSpec", "QuantitySpec", "RewardCostSpec", "TurnsSpec"]


class QuantitySpec(SpecEntry):
    """A figure that varies between trajectories; a plain number is its mean."""

    mean: float = Field(ge=0, le=1e9, description="Mean.")
    p50: float | None = Field(default=None, ge=0, le=1e9, description="Median.")
    p90: float | None = Field(default=None, ge=0, le=1e9, description="90th percentile.")

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

    mean: float = Field(ge=1, le=1e6, description="Mean.")


class EnvironmentCostSpec(SpecEntry):
    """The cost of an environment."""

    wait_s: float = Field(default=0.0, ge=0, le=1e6, description="Seconds that a turn waits for the environment.")
    core_s: float = Field(default=0.0, ge=0, le=1e6, description="CPU core-seconds of a turn in the environment.")
    reset_s: float = Field(default=0.0, ge=0, le=1e6, description="Seconds before the first turn.")


class RewardCostSpec(SpecEntry):
    """The cost of scoring one trajectory."""

    seconds: float = Field(ge=1e-9, le=1e6, description="Seconds of work for one trajectory.")
    cores: float = Field(default=1.0, ge=1e-6, le=1e6, description="CPU cores it uses meanwhile.")
    memory_gb: float = Field(default=0.5, ge=1e-6, le=1e6, description="Memory it needs.")
    on_gpu: bool = Field(default=False, description="true: seconds of one GPU instead of CPU cores.")
    stateless: bool = Field(default=True, description="true: it may run as a function.")
    latency_s: float | None = Field(
        default=None, ge=1e-9, le=1e6, description="Longest acceptable wait for the score; any if not given."
    )


class ProfileSpec(SpecEntry):
    """The work of one trajectory of a domain, to be placed. Figures are means, or {mean, p50, p90}."""

    turns: TurnsSpec = Field(description="Turns.")
    new_tokens: QuantitySpec = Field(description="Tokens of observation at every turn after the first.")
    output_tokens: TurnsSpec = Field(description="Tokens generated per turn.")
    first_tokens: QuantitySpec | None = Field(
        default=None, description="Tokens of the first prompt; as `new_tokens` if not given."
    )
    shared_prefix: float = Field(
        default=0.0, ge=0, lt=1, description="Share of the first prompt that all trajectories share (a system prompt)."
    )
    environment: EnvironmentCostSpec = Field(
        default_factory=EnvironmentCostSpec, description="Cost of the environment."
    )
    solved: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Share of trajectories that earn 1 rather than 0 in `rollart simulate`, where prompts differ in "
        "difficulty; all of them if not given.",
    )
    reward: RewardCostSpec | None = Field(default=None, description="Cost of scoring; not planned if not given.")
