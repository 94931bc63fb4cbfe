"""The run spec: the model, its task domains and rewards, the schedule, the bounds of training, and how new weights
reach the engines. Its parts come first, in the order in which a run spec names them.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, JsonValue, field_validator, model_validator

from rollart.settings.algorithms import with_advantage_defaults
from rollart.settings.base import AdapterName, ImportPath, Name, SpecEntry, Tags, http_url
from rollart.settings.placement import PlacementSpec, ProfileSpec
from rollart.settings.rollout import RolloutSpec
from rollart.settings.telemetry import TelemetrySpec
from rollart.settings.training import AdvantageSpec, ImitationSpec, LossWeight, TrainingSpec
from rollart.shares import DomainShare
from serverless.spec import FunctionImageSpec, Takes, Trust, Variable

LAG = {"sync": 0, "sync_plus": 0, "one_off": 1}
"""Staleness of the schedules whose stages follow each other (those of `policy.schedules`)."""

MAX_STALENESS = 8
"""Largest staleness bound: at 8 versions every loss has degraded on a small task (docs/training.md)."""


class ModelSpec(SpecEntry):
    """The policy: weights on disk or of the Hugging Face Hub, or a configuration to initialise from. For a plan alone
    its `config` will do."""

    path: str | None = None
    """Hugging Face directory (config.json, safetensors), relative to the run file; or where there is no such directory,
    a model of the Hugging Face Hub: `OWNER/NAME`."""
    revision: str | None = Field(default=None, min_length=1)
    """Branch, tag or commit of a model of the Hub; `main` if not given. A run keeps the commit that it began with."""
    init: dict[str, Any] | ImportPath | None = None
    """Hugging Face model configuration to initialise random weights from (seeded), or `package.module:function` that
    returns one."""
    config: str | dict[str, Any] | None = None
    """Hugging Face config.json (file or mapping) that the plan is computed for; that of `path` or `init` if not
    given."""
    tokenizer: str | None = None
    """Directory with tokenizer.json, or `package.module:function` that writes one into a directory; the model's own
    directory if not given."""
    context: int = Field(default=2048, ge=8, le=100_000_000)
    """Longest trajectory in tokens, prompt included."""


class BatchSpec(SpecEntry):
    """The batch of one training step."""

    trajectories: int = Field(default=128, ge=1, le=10_000_000)
    """Trajectories per step, over all domains; with `training.data` conversations per step."""
    tokens: int | None = Field(default=None, ge=1, le=1_000_000_000_000)
    """Optional bound on the tokens of one batch; groups stay whole. With sampler fifo only under a schedule with a
    window of groups."""
    sampler: Literal["fifo", "token_budget", "deadline"] = "fifo"
    """Selection from the complete groups, oldest version first. fifo: the batch; token_budget: of the batch exactly
    `tokens` tokens, drawn sample by sample and cut at the edge; deadline: the batch, or after `deadline_s` the groups
    that are complete by then."""
    deadline_s: float | None = Field(default=None, gt=0, le=1e6)
    """Longest wait for a whole batch, seconds (deadline)."""
    least: float | None = Field(default=None, gt=0, le=1)
    """Share of every domain's part of the batch without which no step starts (deadline); default 0.5."""
    age_decay: float | None = Field(default=None, gt=0, le=1)
    """Factor of a sample's weight in the loss for every version that it is behind when it is trained (deadline), scaled
    to a mean of 1 within its domain; default 1."""


def _or_true(schema: dict[str, Any]) -> None:
    schema["anyOf"] = [*schema["anyOf"], {"type": "boolean"}]


class RewardUse(SpecEntry):
    """A reward function's part in a domain's reward."""

    function: Name
    """Name of an entry of `functions`."""
    weight: float = 1.0
    """Factor of its value in the sum."""
    pays: Literal["last", "steps"] = "last"
    """last: at the last action token; steps: at the positions of its step_rewards."""


class HarnessSpec(SpecEntry):
    """An agent program instead of an environment: it talks to the run's capture proxy (docs/proxy.md)."""

    harness: ImportPath
    """`package.module:function`, a coroutine function that is called with `base_url`, `session`, `seed` and the
    `environment_args`, and returns the episode's reward or a Step."""


class ChatSpec(SpecEntry):
    """Episodes as conversations in the model's chat template: actions are the assistant's answers."""

    system: str | None = Field(default=None, min_length=1)
    """System message before the first observation; the template's own default, if it has one, if not given."""
    observations: Literal["user", "tool"] = "user"
    """Role of the observations after the first, which is always the user's."""
    tools: ImportPath | None = None
    """`package.module:attribute`, a list of the tools' schemas (`{type: function, function: {name, ...}}`), which the
    template shows."""


class DomainSpec(SpecEntry):
    """A task: its environment, sampling and rewards."""

    name: Name
    """Name of the domain."""
    tag: Name | None = None
    """Key of the domain in `hw_affinity`; its name if not given."""
    environment: ImportPath | HarnessSpec
    """Class or factory of the environment, `package.module:attribute`; or `harness`, an agent program."""
    environment_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    chat: ChatSpec | None = Field(default=None, json_schema_extra=_or_true)
    """true, or a mapping: observations and actions are messages in the model's chat template (docs/environments.md);
    without it, the text of an observation is the prompt."""
    weight: float = Field(default=1.0, ge=1e-9, le=1e9)
    """Share of the batch, relative to the other domains."""
    floor: float = Field(default=0.0, ge=0, le=1)
    """Least share of every batch, regardless of the weights (whole groups)."""
    cap: float = Field(default=1.0, gt=0, le=1)
    """Largest share of every batch (whole groups)."""
    trajectories: int | None = Field(default=None, ge=1, le=10_000_000)
    """Trajectories per step, instead of a share by `weight`: all domains or none."""
    group_size: int = Field(default=8, ge=1, le=10_000_000)
    """Trajectories of one prompt (GRPO); 1 for single ones."""
    max_turns: int = Field(default=8, ge=1, le=1_000_000)
    """Turns after which an episode ends."""
    max_tokens: int = Field(default=256, ge=1, le=100_000_000)
    """Generated tokens per turn."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature while training; the same in every domain, since the trainer has one."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling bound."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end a turn; each must be one token."""
    advantage: AdvantageSpec = Field(default_factory=AdvantageSpec)
    """How rewards become advantages."""
    rewards: list[RewardUse] = Field(default_factory=list)
    """Reward functions and their weights."""
    env_reward_weight: float = 1.0
    """Factor of the rewards that the environment pays."""
    success_at: float | None = None
    """Reward from which an episode is a success, where the environment leaves that open (a `success` of None): held-out
    episodes are then scored too. The environment alone decides if not given."""
    loss_weight: LossWeight = 1.0
    adapter: AdapterName | None = None
    """Low-rank adapter that the domain trains and samples with (training.lora); domains may share one. All domains name
    one or none, and then all share a single one."""
    shape: Literal["swe", "frozenlake", "webshop", "gem_math", "gem_game", "math_14b", "production"] | None = None
    """Published shape that `rollart simulate` draws trajectories from; from `profile` if not given."""
    profile: ProfileSpec | None = None
    """Work of a trajectory, for the placer; measured or assumed from bounds if not given."""

    @field_validator("chat", mode="before")
    @classmethod
    def _chat_switch(cls, chat: object) -> object:
        return ({} if chat else None) if isinstance(chat, bool) else chat

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

    name: Name
    """Name that domains refer to: up to 64 letters, digits, '_' and '-'."""
    source: str = ""
    """Python file (relative to the run file) or module of the handler."""
    handler: str = ""
    """Attribute of the source, made with @rollart.reward or a known signature."""
    function: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_-]{1,64}(@[A-Za-z0-9._-]+)?$")
    """In place of `source` and `handler`, a function deployed to the first provider that keeps versions, as
    `rollart rewards` names it: NAME, NAME@live, NAME@VERSION. Where `live` has a canary, a run draws its version by
    the weights at its start, and keeps it. Its settings are the deployed ones; those of scaling and batches may be
    given."""
    takes: Takes | None = None
    """How the handler is called; inferred from its parameters if not given (auto)."""
    memory_mb: int | None = Field(default=None, ge=128, le=32_768)
    """Memory of one worker (512)."""
    cpu: float | None = Field(default=None, ge=0, le=64)
    """Cores of one worker; 0: as the provider allots with its memory (0)."""
    gpu: str | None = Field(default=None, pattern=r"^[A-Za-z0-9!+:-]{0,32}$")
    """GPU type of one worker as the provider names it, like L4 or H100:2 (none)."""
    trust: Trust | None = None
    """untrusted: it runs code that the policy wrote, so only in a sandbox (trusted)."""
    timeout_s: float | None = Field(default=None, gt=0, le=86_400)
    """Longest run of one invocation (10)."""
    timeout_floor: float | None = None
    """Reward of a sample that runs out of time, where that is the policy's doing (none)."""
    init_timeout_s: float | None = Field(default=None, gt=0, le=600)
    """Longest start of a worker (10)."""
    concurrency: int | None = Field(default=None, ge=1, le=10_000)
    """Largest number of workers (4)."""
    queue: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """Most samples that wait for a worker (10000)."""
    warm: int | None = Field(default=None, ge=0, le=10_000)
    """Workers that are kept ready (0)."""
    batch_items: int | None = Field(default=None, ge=1, le=10_000)
    """Largest number of samples per invocation (32)."""
    batch_wait_ms: float | None = Field(default=None, ge=0, le=60_000)
    """How long a sample waits for others to join (2)."""
    batch_bytes: int | None = Field(default=None, ge=1_000, le=1_000_000_000)
    """Largest event of one invocation (5000000)."""
    keep_alive_s: float | None = Field(default=None, ge=0, le=1e6)
    """Idle time after which a worker is stopped (60)."""
    deterministic: bool | None = None
    """Same sample, same reward: results may be cached (true)."""
    arguments: dict[str, JsonValue] | None = None
    """Arguments of the handler's class, or keyword arguments of the handler beside its samples (none)."""
    cache: bool | None = None
    """An earlier reward may stand for an equal sample's (as `deterministic`)."""
    hedge: bool | None = None
    """Late calls may be made a second time (true)."""
    stateless: bool | None = None
    """Keeps nothing between calls, where the check of its source is not sure (false)."""
    needs: list[Literal["environment"]] | None = None
    """`environment`: it runs beside the environment, never as a function (nothing)."""
    requirements: list[str] | None = None
    """`name`, `name==1.2` or requirements files, relative to the run file (none)."""
    index_urls: list[str] | None = None
    """Package indexes beside PyPI; PyTorch's index of CPU builds for torch where there is no GPU (none)."""
    image: FunctionImageSpec | None = None
    """Container image: `base`, `system` (Debian packages), or `dockerfile`, relative to the run file; Lambda runs a zip
    archive without it (none)."""
    artefact: str | list[str] | None = None
    """Files that the handler loads: paths relative to the run file, or one `package.module:producer` called once before
    the run (those of its decorator)."""
    preload: list[str] | None = None
    """Modules that a local worker imports at start (none)."""
    env: dict[Variable, str] | None = None
    """Environment variables with plain values, over those of its decorator (none)."""
    secrets: list[Variable] | None = None
    """Names of environment variables with secret values; `functions.secrets` of the cluster says where the values come
    from (none)."""


class WarmStartSpec(ImitationSpec):
    """Cross-entropy on worked examples of some domains, before the first step."""

    domains: list[Name] = Field(min_length=1)
    """Domains whose environments give worked examples."""
    examples: int = Field(default=300, ge=1)
    """Examples per domain."""
    batches: int = Field(default=60, ge=1)
    """Mini-batches of imitation."""


class ForkSpec(SpecEntry):
    """The version of another run whose weights version 0 has, in place of a warm start (`rollart launch --from`)."""

    run: str = Field(min_length=1)
    """Directory of the other run. Relative to the run file."""
    version: int = Field(ge=0)
    """Number of its version, which must be on disk when the run starts."""
    optimizer: bool = False
    """Also take over the optimizer's state, with its numbers of updates and calls: `warmup` is not repeated."""


class EvaluationSpec(SpecEntry):
    """Episodes on held-out seeds: their success is shown, they are never trained on."""

    episodes: int = Field(default=0, ge=0)
    """Greedy episodes per domain and evaluation, each of a different prompt; 0 for no evaluation."""
    at: tuple[Literal["start", "end"], ...] = ("start", "end")
    """Evaluate before the first and after the last step."""
    every: int | None = Field(default=None, ge=1)
    """Also evaluate after every n-th step. Training waits for it, rollout does not."""
    temperatures: list[Annotated[float, Field(gt=0, le=10)]] = Field(default_factory=list)
    """Also sample the prompts of every evaluation at these temperatures, with the domain's top_p."""
    samples: int = Field(default=8, ge=1, le=10_000)
    """Episodes per prompt at each temperature: their mean success is avg@k with k = `samples`."""
    pass_at: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    """Values of k for pass@k, the chance that one of k samples succeeds; `samples` if empty."""

    @model_validator(mode="after")
    def _estimable(self) -> EvaluationSpec:
        if any(k > self.samples for k in self.pass_at):
            raise ValueError(f"pass_at has {max(self.pass_at)} (rule: at most `samples`, {self.samples})")
        return self

    @property
    def passes(self) -> tuple[int, ...]:
        """The values of k, ascending."""
        return tuple(sorted({*(self.pass_at or [self.samples])}))


class CheckpointsSpec(SpecEntry):
    """Versions that stay in the run's directory, each with the optimizer's state: at most `keep` + steps / `every` + 2,
    beside those that an engine is reading."""

    keep: int = Field(default=2, ge=2, le=100_000)
    """Keep the last ones."""
    every: int | None = Field(default=None, ge=1)
    """Also keep every n-th one, from version 0 on."""
    best_by: str | None = Field(default=None, pattern=r"^(success|reward)(\..+)?$")
    """Also keep the best one by this metric. `success`: mean over the domains of the success on held-out episodes;
    `reward`: mean over the domains of the mean reward of the batch that it was current for; with `.DOMAIN`, of that
    domain alone."""


TRAINER_METRICS = (
    "approx_kl",
    "reference_kl",
    "behaviour_gap",
    "effective_share",
    "entropy",
    "clip_fraction",
    "grad_norm",
)
"""Metrics of `stop_when` that the embedded trainer reports of a step."""

_STOP_METRICS = "|".join((*TRAINER_METRICS, "zero_variance", "length_drift", r"(success|held_out_success)(\..+)?"))


class StopSpec(SpecEntry):
    """A condition that ends the run before its last step, with exit code 6. The last version is published, and
    evaluated if `evaluation.at` has `end`."""

    metric: str = Field(pattern=rf"^({_STOP_METRICS})$")
    """zero_variance: share of groups whose samples have equal rewards; length_drift: relative change of the mean number
    of sampled tokens since the first 5 steps; approx_kl, reference_kl (with `loss.kl`), behaviour_gap, effective_share,
    entropy, clip_fraction, grad_norm: of the trainer (docs/training.md); success: mean over the domains of the batch's
    success; held_out_success: of evaluations (`evaluation.every`); both also with `.DOMAIN`."""
    above: float | None = None
    """The condition holds above this value, or `below` that one: one of them."""
    below: float | None = None
    """See `above`."""
    for_steps: int = Field(default=1, ge=1)
    """Steps in a row (evaluations for held_out_success) in which it must hold."""

    @model_validator(mode="after")
    def _one_side(self) -> StopSpec:
        if (self.above is None) == (self.below is None):
            raise ValueError(f"a condition on {self.metric} has a threshold `above` or `below` (rule: exactly one)")
        return self


class LeasesSpec(SpecEntry):
    """Longest waits in seconds. Every expiry is recorded as an event and has a bounded action."""

    generate_s: float = Field(default=120.0, gt=0, le=1e6)
    """One turn's generation; then another engine."""
    env_step_s: float = Field(default=60.0, gt=0, le=1e6)
    """One reset or step of an environment."""
    reward_s: float = Field(default=60.0, gt=0, le=1e6)
    """Scoring of one trajectory, retries included."""
    train_s: float = Field(default=600.0, gt=0, le=1e6)
    """One training step."""
    pace_s: float = Field(default=1800.0, gt=0, le=1e6)
    """A batch's wait for groups at their staleness bound, under `paced`; then it goes without them."""
    publish_s: float = Field(default=120.0, gt=0, le=1e6)
    """Writing a version and loading it into every engine."""
    handoff_s: float = Field(default=10.0, gt=0, le=1e6)
    """Prefill on another engine and the transfer of its KV; then it is prefilled locally."""
    engine_start_s: Literal["auto"] | Annotated[float, Field(gt=0, le=1e6)] = "auto"
    """Start of an engine or trainer process. `auto`: 120, or 300 for a vLLM server, plus the time to read 4 bytes per
    parameter at 0.5 GB/s; a vLLM server that keeps logging progress gets four times that."""


class FaultsSpec(SpecEntry):
    """Tolerance for infrastructure faults, beyond which a run stops with exit code 5."""

    max_rate: float = Field(default=0.05, ge=0, le=1)
    """Largest share of trajectories lost to faults."""
    min_count: int = Field(default=10, ge=1)
    """Faults before the rate is judged."""
    max_attempts_per_group: int = Field(default=3, ge=1)
    """Attempts after which a group is dropped."""


def _webhook(value: str) -> str:
    return value if re.fullmatch(r"[A-Za-z_]\w*", value) else http_url(value)


class BudgetSpec(SpecEntry):
    """Bounds at which the run stops by itself (exit code 4 for money), and the warnings before that."""

    usd: float | None = Field(default=None, gt=0)
    """Largest bill in dollars: devices, and functions of providers that send one; none if not given."""
    warn_at: float = Field(default=0.8, gt=0, le=1)
    """Share of `usd` from which the run warns. It also warns, once it has trained five steps, when the forecast to its
    last step is above `usd` with its whole 95 % interval."""
    notify: Annotated[str, AfterValidator(_webhook)] | None = None
    """Webhook that gets these warnings and the end at the budget, as a POST of `{"text": ...}` (Slack's format): its
    URL, or the name of an environment variable that holds it, since a run's directory keeps its spec."""
    wall_s: float | None = Field(default=None, gt=0)
    """Longest run in seconds, over all of its lives; none if not given."""

    @model_validator(mode="after")
    def _about_dollars(self) -> BudgetSpec:
        if self.notify is not None and self.usd is None:
            raise ValueError("notify is given and usd is not (rule: notices are about a budget in dollars)")
        return self


class WeightStoreSpec(SpecEntry):
    """A store between the trainer and the engines' hosts: a version is pushed once, in buckets, and pulled by each
    host."""

    kind: Literal["files", "s3"]
    """`files`: a directory that the controller and the engines' hosts share; `s3`: an S3 bucket or anything that speaks
    its protocol (extra `aws`; credentials, region and AWS_ENDPOINT_URL from each host's environment; attached servers
    need none, they get signed URLs)."""
    url: str = Field(min_length=1)
    """The directory (relative to the run file), or `s3://BUCKET/PREFIX`. Each run adds its own name."""
    in_flight: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    """Buckets in flight, at a push and at each host's pull; `auto`: as many as the look-ahead rule derives from their
    transfer times, within 4 GiB."""
    bucket_mb: int = Field(default=256, ge=1, le=4096)
    """Size of a bucket, MB. One that did not change is not sent again."""
    delta: Literal["auto", "off"] = "auto"
    """auto: a bucket travels as its difference from the version before where that is at most half as large, as of
    bfloat16 weights (`weights.dtype`); whole buckets alone for attached servers."""
    anchor_every: int = Field(default=8, ge=1, le=1000)
    """Deltas in a row, after which a bucket is sent whole: a host without the version before reads all of them."""
    local: str | None = Field(default=None, min_length=1)
    """Absolute directory of each engine's host that keeps pulled versions, at least two of them; `pulled` in the run's
    directory if not given. Attached servers need it."""


class CollectiveSpec(SpecEntry):
    """A broadcast from the trainer's ranks to all engines, concurrent with the write of the version and the rollout. An
    engine that misses it loads the version's files."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """`nccl` between GPUs, `gloo` by way of host memory; `auto`: nccl where the trainer and all engines have GPUs."""
    bucket_mb: int = Field(default=64, ge=1, le=4096)
    """Size of a bucket, MB."""


class WeightsSpec(SpecEntry):
    """Transfer of a weight version from the trainer to the engines."""

    overlap: bool = False
    """Write a version, and push it to the engines' store, during the next training step; it is current once it is
    complete and committed. Without effect under `sync` and `sync_plus`."""
    dtype: Literal["trained", "bfloat16"] = "trained"
    """Type of published weights. trained: that of training (float32); bfloat16: half the bytes, and the same weights
    for engines that compute in bfloat16. The trainer goes on, and resumes, with its own in any case."""
    store: WeightStoreSpec | None = None
    """Engines load versions that their hosts pulled from here; without it from the run's directory."""
    collective: CollectiveSpec | None = None
    """Broadcast versions into the engines' memory; without it, or with `store`, engines load files."""
    update: Literal["all", "delayed", "staggered", "on_divergence"] = "all"
    """all: every engine pauses, loads and resumes; delayed: each engine first finishes its live trajectories;
    staggered: some load while others serve; on_divergence: an engine loads once the policy has moved by more than
    `threshold` from its version, or `staleness` requires it. Values other than `all` need a schedule with a window of
    groups and `staleness` of at least 1, on_divergence of at least 2."""
    longest_s: float | None = Field(default=None, ge=0, le=1e6)
    """Longest delay of an engine's update, seconds; only with `delayed`, where it is 120."""
    fraction: float | None = Field(default=None, gt=0, le=1)
    """Largest share of the engines that load at a time; only with `staggered`, where it is 0.25."""
    threshold: float | None = Field(default=None, ge=0, le=100)
    """KL from an engine's weights to the current ones, nats per token, beyond which it loads them; with
    `on_divergence`, which needs it. The trainer measures it on samples of each batch."""


_KEEP = r"all|failed|none|sample (0|1|0?\.\d+|1\.0+)"


def _or_items(schema: dict[str, Any]) -> None:
    schema["anyOf"] = [{"$ref": schema.pop("$ref")}, {"type": "string", "pattern": f"^({_KEEP})$"}]


class KeepSpec(SpecEntry):
    """Trajectories whose content stays in the ledger (docs/trajectories.md)."""

    items: str = "all"
    """all; `sample 0.02`: this share of the prompts, each with all its trajectories; failed: those with a fault of a
    reward function, of the policy or of infrastructure; none."""
    max_mb: int = Field(default=256, ge=1, le=1_000_000)
    """Most megabytes on disk, beyond which the oldest eighth is deleted. A trajectory above an eighth of it is not
    kept."""

    @field_validator("items")
    @classmethod
    def _known(cls, items: str) -> str:
        if not re.fullmatch(_KEEP, items):
            raise ValueError("all, failed, none, or `sample 0.02` with a share of the prompts from 0 to 1")
        return items

    @property
    def share(self) -> float:
        """The share of the prompts."""
        return float(self.items.removeprefix("sample ")) if self.items.startswith("sample") else 1.0


class RunSpec(SpecEntry):
    """A training run. Only `name` and `model` have no default, and `domains` has at least one entry in a run that rolls
    out."""

    name: Name
    """Name of the run; its directory under the runs directory is called after it."""
    seed: int = Field(default=0, ge=0)
    """Seed of every random stream, each derived by (seed, id)."""
    deterministic: bool = False
    """Two runs of this spec, on parts of one kind, end with the same weights, bit for bit: engines compute each
    sequence alone, and functions score each item alone. For schedules whose stages follow each other; costs speed
    (docs/training.md)."""
    model: ModelSpec
    """The policy."""
    # Not `paced`: on the quickstart `sync_plus` reaches the same success in 20 s, `paced` in 29 s as `rollart` does
    # (means of five seeds, docs/schedules.md).
    schedule: Literal["sync", "sync_plus", "one_off", "areal", "rollart", "paced", "roll_flash", "async"] = "async"
    """How rollout, training and weight updates overlap, and how stale trajectories are treated (docs/schedules.md).
    async: rollart."""
    staleness: int = Field(default=1, ge=0, le=MAX_STALENESS)
    """Largest number of versions between a trajectory's first token and the step that trains on it (α). 0 under `sync`
    and `sync_plus`, 1 under `one_off`."""
    rollout: RolloutSpec = Field(default_factory=RolloutSpec)
    """Redundant environments and tail batching (docs/schedules.md)."""
    steps: int = Field(default=100, ge=0)
    """Training steps; each publishes one policy version. With `training.data` by default as many as its `epochs`
    take."""
    batch: BatchSpec = Field(default_factory=BatchSpec)
    """The batch of one training step."""
    domains: list[DomainSpec] = Field(default_factory=list)
    """Tasks, each with its environment and rewards. At least one, unless `training.data` replaces the roll-outs: then
    those of evaluations."""
    functions: list[FunctionEntry] = Field(default_factory=list)
    """Reward functions."""
    hw_affinity: dict[str, str] = Field(default_factory=dict)
    """Pool or device type that decodes a domain, by the domain's `tag`; `default` is for the others. Left out, the
    placer decides."""
    placement: PlacementSpec = Field(default_factory=PlacementSpec)
    """Objective and constraints of the plan."""
    training: TrainingSpec = Field(default_factory=TrainingSpec)
    """Optimizer and loss."""
    weights: WeightsSpec = Field(default_factory=WeightsSpec)
    """How new weights reach the engines (docs/schedules.md)."""
    warm_start: WarmStartSpec | None = None
    """Imitation of worked examples before the first step."""
    fork: ForkSpec | None = None
    """Start from another run's weights."""
    evaluation: EvaluationSpec = Field(default_factory=EvaluationSpec)
    """Episodes that are never trained on."""
    checkpoints: CheckpointsSpec = Field(default_factory=CheckpointsSpec)
    """Versions that stay on disk."""
    stop_when: list[StopSpec] = Field(default_factory=list)
    """Conditions on metrics, any of which ends the run early."""
    leases: LeasesSpec = Field(default_factory=LeasesSpec)
    """Deadlines of all waits."""
    faults: FaultsSpec = Field(default_factory=FaultsSpec)
    """Tolerance for infrastructure faults."""
    budget: BudgetSpec = Field(default_factory=BudgetSpec)
    """Bounds at which the run stops by itself."""
    # Not `none`: in a quickstart `all` costs 330 bytes and 0.058 ms per trajectory, 3.5 % of the controller's CPU.
    keep: KeepSpec = Field(default_factory=KeepSpec, json_schema_extra=_or_items)
    """Trajectories whose content stays in the ledger, for `rollart trajectory` and `rollart rewards rescore`: `all`,
    `sample 0.02`, `failed` or `none`, or a mapping with a bound (docs/trajectories.md)."""

    tags: Tags = Field(default_factory=dict)
    """Tags of the run's costs (`team: agents`, `project: search`, `owner: ada`), for `report cost`, `report fleet` and
    FOCUS."""
    telemetry: TelemetrySpec = Field(default_factory=TelemetrySpec)
    """Traces, metrics and trackers that other tools read (docs/observability.md)."""

    @field_validator("keep", mode="before")
    @classmethod
    def _kept(cls, keep: object) -> object:
        return {"items": keep} if isinstance(keep, str) else keep

    @model_validator(mode="before")
    @classmethod
    def _lag_of_schedule(cls, data: Any) -> Any:
        """Without `staleness`, a run has the staleness of its schedule."""
        schedule = data.get("schedule") if isinstance(data, dict) else None
        if isinstance(schedule, str) and schedule in LAG and "staleness" not in data:
            return {**data, "staleness": LAG[schedule]}
        return data

    @model_validator(mode="before")
    @classmethod
    def _items_alone(cls, data: Any) -> Any:
        """With `deterministic`, since a function's arithmetic may depend on the batch that an item is in."""
        if not isinstance(data, dict) or not data.get("deterministic") or not isinstance(data.get("functions"), list):
            return data
        alone = [{**entry, "batch_items": 1} if isinstance(entry, dict) else entry for entry in data["functions"]]
        return {**data, "functions": alone}

    @model_validator(mode="before")
    @classmethod
    def _advantages_of_algorithm(cls, data: Any) -> Any:
        """Domains have the advantage of `training.algorithm` where they give none."""
        if not isinstance(data, dict) or not isinstance(data.get("domains"), list):
            return data
        training = data.get("training")
        return {**data, "domains": [with_advantage_defaults(training, one) for one in data["domains"]]}

    @property
    def fair(self) -> bool:
        """True if domains have shares of the whole run instead of quotas per step."""
        return self.rollout.fairness is not None or any(d.floor > 0 or d.cap < 1 for d in self.domains)

    @property
    def shares(self) -> tuple[DomainShare, ...]:
        """The domains' weights, floors and caps."""
        return tuple(DomainShare(d.name, d.weight, d.floor, d.cap) for d in self.domains)

    def domain(self, name: str) -> DomainSpec:
        """The domain of that name; KeyError if there is none."""
        return {domain.name: domain for domain in self.domains}[name]
