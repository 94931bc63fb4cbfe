"""The parts of a run spec, in the order in which a run spec names them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from rollart.entry import ImportPath, Name, SpecEntry
from rollart.learning import AdvantageSpec, ImitationSpec, LossWeight
from rollart.spec.profile import ProfileSpec
from serverless.spec import Takes, Trust

__all__ = [
    "BatchSpec",
    "BudgetSpec",
    "DomainSpec",
    "EvaluationSpec",
    "FaultsSpec",
    "FunctionEntry",
    "HarnessSpec",
    "LeasesSpec",
    "ModelSpec",
    "RewardUse",
    "WarmStartSpec",
]


class ModelSpec(SpecEntry):
    """The policy: weights on disk or a configuration to initialise from. For a plan alone its `config` will do."""

    path: str | None = Field(
        default=None, description="Hugging Face directory (config.json, safetensors). Relative to the run file."
    )
    init: dict[str, Any] | ImportPath | None = Field(
        default=None,
        description="Hugging Face model configuration to initialise random weights from (seeded), or "
        "`package.module:function` that returns one.",
    )
    config: str | dict[str, Any] | None = Field(
        default=None,
        description="Hugging Face config.json (file or mapping) that the plan is computed for; that of `path` or "
        "`init` if not given.",
    )
    tokenizer: str | None = Field(
        default=None,
        description="Directory with tokenizer.json, or `package.module:function` that writes one into a directory; the "
        "model's own directory if not given.",
    )
    context: int = Field(
        default=2048, ge=8, le=100_000_000, description="Longest trajectory in tokens, prompt included."
    )


class BatchSpec(SpecEntry):
    """The batch of one training step."""

    trajectories: int = Field(default=128, ge=1, le=10_000_000, description="Trajectories per step, over all domains.")
    tokens: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000_000_000,
        description="Optional bound on the tokens of one batch; groups stay whole. With sampler fifo only under a "
        "schedule with a window of groups.",
    )
    sampler: Literal["fifo", "token_budget", "deadline"] = Field(
        default="fifo",
        description="Selection from the complete groups, oldest version first. fifo: the batch; token_budget: "
        "of the batch exactly `tokens` tokens, drawn sample by sample and cut at the edge; deadline: the batch, or "
        "after `deadline_s` the groups that are complete by then.",
    )
    deadline_s: float | None = Field(
        default=None, gt=0, le=1e6, description="Longest wait for a whole batch, seconds (deadline)."
    )
    least: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of every domain's part of the batch without which no step starts (deadline); default 0.5.",
    )
    age_decay: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Factor of a sample's weight in the loss for every version that it is behind when it is trained "
        "(deadline), scaled to a mean of 1 within its domain; default 1.",
    )


class RewardUse(SpecEntry):
    """A reward function's part in a domain's reward."""

    function: Name = Field(description="Name of an entry of `functions`.")
    weight: float = Field(default=1.0, description="Factor of its value in the sum.")
    pays: Literal["last", "steps"] = Field(
        default="last", description="last: at the last action token; steps: at the positions of its step_rewards."
    )


class HarnessSpec(SpecEntry):
    """An agent program instead of an environment: it talks to the run's capture proxy (docs/proxy.md)."""

    harness: ImportPath = Field(
        description="`package.module:function`, a coroutine function that is called with `base_url`, `session`, `seed` "
        "and the `environment_args`, and returns the episode's reward or a Step."
    )


class DomainSpec(SpecEntry):
    """A task: its environment, sampling and rewards."""

    name: Name = Field(description="Name of the domain.")
    tag: Name | None = Field(default=None, description="Key of the domain in `hw_affinity`; its name if not given.")
    environment: ImportPath | HarnessSpec = Field(
        description="Class or factory of the environment, `package.module:attribute`; or `harness`, an agent program."
    )
    environment_args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the environment.")
    weight: float = Field(
        default=1.0, ge=1e-9, le=1e9, description="Share of the batch, relative to the other domains."
    )
    floor: float = Field(
        default=0.0, ge=0, le=1, description="Least share of every batch, regardless of the weights (whole groups)."
    )
    cap: float = Field(default=1.0, gt=0, le=1, description="Largest share of every batch (whole groups).")
    trajectories: int | None = Field(
        default=None,
        ge=1,
        le=10_000_000,
        description="Trajectories per step, instead of a share by `weight`: all domains or none.",
    )
    group_size: int = Field(
        default=8, ge=1, le=10_000_000, description="Trajectories of one prompt (GRPO); 1 for single ones."
    )
    max_turns: int = Field(default=8, ge=1, le=1_000_000, description="Turns after which an episode ends.")
    max_tokens: int = Field(default=256, ge=1, le=100_000_000, description="Generated tokens per turn.")
    temperature: float = Field(
        default=1.0,
        gt=0,
        description="Sampling temperature while training; the same in every domain, since the trainer has one.",
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus sampling bound.")
    stop: list[str] = Field(default_factory=list, description="Texts that end a turn; each must be one token.")
    advantage: AdvantageSpec = Field(default_factory=AdvantageSpec, description="How rewards become advantages.")
    rewards: list[RewardUse] = Field(default_factory=list, description="Reward functions and their weights.")
    env_reward_weight: float = Field(default=1.0, description="Factor of the rewards that the environment pays.")
    loss_weight: LossWeight = 1.0
    shape: Literal["swe", "frozenlake", "webshop", "gem_math", "gem_game", "math_14b", "production"] | None = Field(
        default=None,
        description="Published shape that `rollart simulate` draws trajectories from; from `profile` if not given.",
    )
    profile: ProfileSpec | None = Field(
        default=None, description="Work of a trajectory, for the placer; measured or assumed from bounds if not given."
    )

    @field_validator("weight", mode="before")
    @classmethod
    def _some_weight(cls, value: object) -> object:
        if isinstance(value, int | float) and value == 0:
            raise ValueError("above 0: every domain has a group of each batch at least; leave the domain out instead")
        return value


class FunctionEntry(SpecEntry):
    """A reward function: stateless, so that it can run in function workers that scale to zero. Settings that are not
    given here come from its `@rollart.reward(...)`, else they have the default named below; `rollart launch --dry-run`
    shows the effective settings under `functions`."""

    name: Name = Field(description="Name that domains refer to: up to 64 letters, digits, '_' and '-'.")
    source: str = Field(min_length=1, description="Python file (relative to the run file) or module of the handler.")
    handler: str = Field(description="Attribute of the source, made with @rollart.reward or a known signature.")
    takes: Takes | None = Field(
        default=None, description="How the handler is called; inferred from its parameters if not given (auto)."
    )
    memory_mb: int | None = Field(default=None, ge=128, le=32_768, description="Memory of one worker (512).")
    cpu: float | None = Field(
        default=None, ge=0, le=64, description="Cores of one worker; 0: as the provider allots with its memory (0)."
    )
    gpu: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9!+:-]{0,32}$",
        description="GPU type of one worker as the provider names it, like L4 or H100:2 (none).",
    )
    trust: Trust | None = Field(
        default=None, description="untrusted: it runs code that the policy wrote, so only in a sandbox (trusted)."
    )
    timeout_s: float | None = Field(default=None, gt=0, le=5400, description="Longest run of one invocation (10).")
    timeout_floor: float | None = Field(
        default=None, description="Reward of a sample that runs out of time, where that is the policy's doing (none)."
    )
    init_timeout_s: float | None = Field(default=None, gt=0, le=600, description="Longest start of a worker (10).")
    concurrency: int | None = Field(default=None, ge=1, le=10_000, description="Largest number of workers (4).")
    queue: int | None = Field(
        default=None, ge=1, le=1_000_000_000, description="Most samples that wait for a worker (10000)."
    )
    warm: int | None = Field(default=None, ge=0, le=10_000, description="Workers that are kept ready (0).")
    batch_items: int | None = Field(
        default=None, ge=1, le=10_000, description="Largest number of samples per invocation (32)."
    )
    batch_wait_ms: float | None = Field(
        default=None, ge=0, le=60_000, description="How long a sample waits for others to join (2)."
    )
    batch_bytes: int | None = Field(
        default=None, ge=1_000, le=1_000_000_000, description="Largest event of one invocation (5000000)."
    )
    keep_alive_s: float | None = Field(
        default=None, ge=0, le=1e6, description="Idle time after which a worker is stopped (60)."
    )
    deterministic: bool | None = Field(
        default=None, description="Same sample, same reward: results may be cached (true)."
    )
    stateless: bool | None = Field(
        default=None, description="Keeps nothing between calls, where the check of its source is not sure (false)."
    )
    needs: list[Literal["environment"]] | None = Field(
        default=None, description="`environment`: it runs beside the environment, never as a function (nothing)."
    )
    requirements: list[str] | None = Field(
        default=None, description="`name`, `name==1.2` or requirements files, relative to the run file (none)."
    )
    artefact: str | list[str] | None = Field(
        default=None,
        description="Files that the handler loads: paths relative to the run file, or one `package.module:producer` "
        "called once before the run (those of its decorator).",
    )
    preload: list[str] | None = Field(default=None, description="Modules that a local worker imports at start (none).")


class WarmStartSpec(ImitationSpec):
    """Cross-entropy on worked examples of some domains, before the first step."""

    domains: list[Name] = Field(min_length=1, description="Domains whose environments give worked examples.")
    examples: int = Field(default=300, ge=1, description="Examples per domain.")
    batches: int = Field(default=60, ge=1, description="Mini-batches of imitation.")


class EvaluationSpec(SpecEntry):
    """Greedy episodes on held-out seeds: their success is shown, they are never trained on."""

    episodes: int = Field(default=0, ge=0, description="Episodes per domain and evaluation; 0 for none.")
    at: tuple[Literal["start", "end"], ...] = Field(
        default=("start", "end"), description="Evaluate before the first and after the last step."
    )


class LeasesSpec(SpecEntry):
    """Longest waits in seconds. Every expiry is recorded as an event and has a bounded action."""

    generate_s: float = Field(default=120.0, gt=0, le=1e6, description="One turn's generation; then another engine.")
    env_step_s: float = Field(default=60.0, gt=0, le=1e6, description="One reset or step of an environment.")
    reward_s: float = Field(default=60.0, gt=0, le=1e6, description="Scoring of one trajectory, retries included.")
    train_s: float = Field(default=600.0, gt=0, le=1e6, description="One training step.")
    pace_s: float = Field(
        default=1800.0,
        gt=0,
        le=1e6,
        description="A batch's wait for groups at their staleness bound, under `paced`; then it goes without them.",
    )
    publish_s: float = Field(
        default=120.0, gt=0, le=1e6, description="Writing a version and loading it into every engine."
    )
    handoff_s: float = Field(
        default=10.0,
        gt=0,
        le=1e6,
        description="Prefill on another engine and the transfer of its KV; then it is prefilled locally.",
    )
    engine_start_s: Literal["auto"] | Annotated[float, Field(gt=0, le=1e6)] = Field(
        default="auto",
        description="Start of an engine or trainer process. `auto`: 120, or 300 for a vLLM server, plus the time to "
        "read 4 bytes per parameter at 0.5 GB/s; a vLLM server that keeps logging progress gets four times that.",
    )


class FaultsSpec(SpecEntry):
    """Tolerance for infrastructure faults, beyond which a run stops with exit code 5."""

    max_rate: float = Field(default=0.05, ge=0, le=1, description="Largest share of trajectories lost to faults.")
    min_count: int = Field(default=10, ge=1, description="Faults before the rate is judged.")
    max_attempts_per_group: int = Field(default=3, ge=1, description="Attempts after which a group is dropped.")


class BudgetSpec(SpecEntry):
    """Bounds at which the run stops by itself (exit code 4 for money)."""

    usd: float | None = Field(
        default=None,
        gt=0,
        description="Largest bill in dollars: devices, and functions of providers that send one; none if not given.",
    )
    wall_s: float | None = Field(
        default=None, gt=0, description="Longest run in seconds, over all of its lives; none if not given."
    )
