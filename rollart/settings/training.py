"""The configuration of learning: the one schema behind a run file's `training` and `advantage`, and behind
`trainer.json`.

The run spec and the trainer's process are validated by these models, so a key, its default and its bounds exist on both
sides or on neither. The formulas are in `rollart/train/advantages.py` and `rollart/train/losses.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from rollart.settings.algorithms import PRESETS, Algorithm, with_advantage_defaults, with_training_defaults
from rollart.settings.base import AdapterName, SpecEntry, http_url

Level = Literal["token", "geometric", "product"]
"""Whose probability ratio: a token's, the geometric mean of the sample's tokens, or their product."""


class AdvantageSpec(SpecEntry):
    """How rewards become advantages. docs/training.md names the published algorithm of each combination."""

    level: Literal["token", "turn", "trajectory"] = "trajectory"
    """The unit of a reward-to-go: a token, a turn, or the trajectory."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per turn (or token, at that level)."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """λ of generalized advantage estimation, with `baseline: critic`. 1: the return less the value; 0: one step of
    temporal difference."""
    baseline: Literal["domain", "group", "leave_one_out", "critic", "none"] = "group"
    """Mean that is subtracted: of the domain's batch, of the group, of the group's other trajectories (RLOO), or
    nothing. At level turn or token it is the mean of the other trajectories. critic: the value at the unit's first
    token, of a model that learns it (`training.critic`)."""
    normalize: Literal["group", "batch", "whiten", "none"] = "batch"
    """Sample standard deviation that the centred values are divided by: of the group (GRPO; with `baseline: group`), of
    the domain's batch (REINFORCE++-baseline), or none (Dr. GRPO). whiten: the batch's mean is subtracted first
    (REINFORCE++)."""
    overlong: float = Field(default=0.0, ge=0, le=1)
    """Soft punishment of long trajectories (DAPO): the reward falls linearly by 1 over this last share of the most
    tokens that a trajectory may generate, `max_turns` × `max_tokens`."""

    @field_validator("normalize", mode="before")
    @classmethod
    def _normalize_of_older_specs(cls, value: Any) -> Any:
        """Older specs have `true` for the batch's deviation and `false` for none."""
        return {True: "batch", False: "none"}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _deviation_of_the_centred_set(self) -> AdvantageSpec:
        if self.normalize == "group" and self.baseline != "group":
            raise ValueError(
                f"normalize 'group' with baseline 'group' alone, not '{self.baseline}': a group's deviation is taken "
                "around the group's mean; use normalize 'batch' or 'none'"
            )
        return self


class TeacherSpec(SpecEntry):
    """A reference policy behind a server with the OpenAI completions API, such as vLLM's. A URL alone is its `url`."""

    url: Annotated[str, AfterValidator(http_url)]
    """Base of the API, as `http://host:8000/v1`."""
    model: str | None = Field(default=None, min_length=1)
    """Name of the model there; without it the server chooses."""
    token_env: str | None = Field(default=None, min_length=1)
    """Variable of the trainer's process that holds a bearer token (API key)."""
    concurrency: int = Field(default=16, ge=1, le=1024)
    """Maximum requests at a time, of one sample each."""


class LossSpec(SpecEntry):
    """The policy loss. For its parts under staleness see docs/training.md."""

    kind: Literal["pg", "ppo", "decoupled", "tis", "topr", "kimi", "dpo", "nll"] = "decoupled"
    """pg: plain policy gradient; ppo: clipped on behaviour log-probabilities; decoupled: proximal and behaviour
    policies apart; tis: truncated importance sampling, with cap 5 CISPO; topr: the same for negative advantages alone;
    kimi: plain, with a squared log-ratio of the sample; dpo: pairs of the best and the worst sample of each group; nll:
    negative log-likelihood of given answers (`training.data`)."""
    ratio: Level = "token"
    """Ratio that ppo and decoupled clip: of a token, or of the sample (geometric: GSPO; product: RLOO)."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """Ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """Ratio is clipped above 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Largest ratio with a gradient for negative advantages (ppo, decoupled); above 1 + clip_high."""
    correction: Literal["truncate", "mask"] = "truncate"
    """truncate: the importance weight of decoupled, tis and topr is cut to [floor, cap]; mask: tokens or samples whose
    ratio of trainer to engine is outside of [floor, cap] have no policy loss; not with kimi and dpo (MIS, IcePop)."""
    correction_level: Level = "token"
    """Ratio that `correction` compares."""
    cap: float = Field(default=2.0, gt=0)
    """Largest importance weight (decoupled, tis, topr, mask)."""
    floor: float = Field(default=0.0, ge=0)
    """Least importance weight (decoupled, tis, topr, mask)."""
    tau: float = Field(default=1.0, gt=0)
    """Factor of half the squared log-ratio (kimi)."""
    aggregation: Literal["token", "sample", "constant"] = "token"
    """Mean of a mini-batch: over its tokens (DAPO), over the samples' means (GRPO), or over samples of the sum of their
    tokens divided by `length` (Dr. GRPO)."""
    length: int | None = Field(default=None, ge=1)
    """Divisor of `aggregation: constant`; by default the most tokens that a trajectory of any domain may generate,
    `max_turns` × `max_tokens`."""
    mask_truncated: bool = False
    """Leave samples out of the loss whose last answer ended at `max_tokens` or at the model's context."""
    entropy: float = Field(default=0.0, ge=0)
    """Factor of the entropy bonus."""
    entropy_target: float | None = Field(default=None, gt=0)
    """Entropy, nats per token, above which there is no bonus; the factor moves by `entropy_step` per step."""
    entropy_step: float = Field(default=0.001, gt=0)
    """Change of the entropy factor per step, up while the entropy is at most `entropy_target`, else down."""
    kl: float = Field(default=0.0, ge=0)
    """Factor of the KL penalty towards the reference policy; with kind dpo its β."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of a token's KL, with d = log-probability under the policy minus that under the reference: d, d²/2, or
    exp(-d) - 1 + d."""
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: the penalty has a gradient; reward: it is subtracted from the reward of each token."""
    reward_factor: float = Field(default=1.0, ge=0)
    """Factor of the task's rewards beside a penalty in the reward; 0: on-policy distillation from the reference."""
    kl_target: float | None = Field(default=None, gt=0)
    """KL, nats per token, that the factor is adapted to: by up to 2 % per step."""
    reference: str | TeacherSpec | None = None
    """Reference policy: a model's directory, or a model behind an endpoint (its URL, or a mapping); by default the
    run's first version (after a warm start)."""
    reference_reset: int | None = Field(default=None, ge=1)
    """The reference is the run's latest version whose number is a multiple of this."""

    @field_validator("reference", mode="before")
    @classmethod
    def _endpoint(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) and value.startswith(("http://", "https://")) else value

    @model_validator(mode="after")
    def _switches_that_fit(self) -> LossSpec:
        """Refuse a switch without effect on the kind, and pairs that exclude each other."""
        clips = self.kind in ("ppo", "decoupled")
        weighs = self.kind in ("decoupled", "tis", "topr")
        for bad, text in (
            (
                self.ratio != "token" and not clips,
                f"ratio '{self.ratio}' with kind '{self.kind}', which clips no ratio: use ppo or decoupled, or set "
                "correction_level for the importance weight of tis and topr",
            ),
            (self.dual_clip and not clips, f"dual_clip with kind '{self.kind}', which clips no ratio: remove it"),
            (
                self.dual_clip and self.dual_clip <= 1 + self.clip_high,
                f"dual_clip {self.dual_clip} with clip_high {self.clip_high:g}: give more than 1 + clip_high",
            ),
            (
                self.correction_level != "token" and not weighs and self.correction != "mask",
                f"correction_level '{self.correction_level}' with kind '{self.kind}', whose loss has no importance "
                "weight: use correction mask, or kind decoupled, tis or topr",
            ),
            (
                self.correction == "mask" and self.kind == "kimi",
                "correction 'mask' with kind 'kimi', whose square bounds the ratio: use truncate",
            ),
            (
                self.kind == "dpo" and not (self.kl and self.kl_in == "loss"),
                f"kind 'dpo' with kl {self.kl:g} in the {self.kl_in}, which is its β: give kl above 0 and kl_in loss",
            ),
            (
                self.kind == "dpo" and self.correction == "mask",
                "correction 'mask' with kind 'dpo', whose pairs are of whole samples: use truncate",
            ),
            (
                self.kind == "nll"
                and (
                    self.kl or self.entropy or self.entropy_target or self.mask_truncated or self.correction == "mask"
                ),
                "kl, entropy, entropy_target, mask_truncated or correction 'mask' with kind 'nll', the log-likelihood "
                "alone: remove it",
            ),
            (
                self.kind == "nll" and self.aggregation == "constant",
                "aggregation 'constant' with kind 'nll', a mean over answers of any length: use token or sample",
            ),
            (self.floor > self.cap, f"floor {self.floor:g} above cap {self.cap:g}: give at most cap"),
            (
                self.length and self.aggregation != "constant",
                f"length with aggregation '{self.aggregation}', which does not divide by it: use constant",
            ),
            (
                self.kl and self.kl_in == "loss" and self.kl_estimator == "k1",
                "kl_estimator 'k1' in the loss, where its gradient is 0 in expectation: use k2 or k3, or kl_in reward",
            ),
            (
                self.reward_factor != 1 and not (self.kl and self.kl_in == "reward"),
                f"reward_factor {self.reward_factor:g} without a penalty in the reward: give kl above 0 and kl_in "
                "reward",
            ),
            (
                not self.kl and (self.kl_target or self.reference or self.reference_reset),
                "kl_target, reference or reference_reset without a penalty: give kl above 0",
            ),
            (
                self.reference and self.reference_reset,
                "reference and reference_reset: give one, since a reset replaces the reference",
            ),
        ):
            if bad:
                raise ValueError(text)
        return self


class LoraSpec(SpecEntry):
    """Low-rank adapters (extra `lora`)."""

    rank: int = Field(default=16, ge=1, le=65536)
    """Rank of an adapter."""
    alpha: float = Field(default=32.0, gt=0, le=1e6)
    """An adapter adds alpha / rank times its product."""
    targets: list[str] = Field(default_factory=lambda: ["all-linear"], min_length=1)
    """Names of the linear modules with an adapter (`q_proj`); `all-linear`: all but the output head."""
    publish: Literal["adapter", "merged"] = "adapter"
    """What a version holds. adapter: the adapters, which engines merge into weights that they get once; merged: all
    weights, as without adapters."""


class CriticSpec(SpecEntry):
    """The critic: a second model, of the policy's architecture and with its weights at the first step, which learns the
    value of each action token (docs/training.md)."""

    lr: float | None = Field(default=None, gt=0)
    """Learning rate of AdamW; three times `training.lr` if not given. `lr_schedule` applies, `warmup` does not."""
    epochs: int | None = Field(default=None, ge=1, le=1000)
    """Passes over a batch; `training.epochs` if not given."""
    value_clip: float | None = Field(default=None, gt=0)
    """A value that has moved by more than this in the step, in units of the reward, has no further gradient in that
    direction."""
    warmup_steps: int = Field(default=0, ge=0, le=1_000_000)
    """First steps, in which the critic alone is trained."""


class TrainingSpec(SpecEntry):
    """Optimizer, loss and how a batch is cut."""

    algorithm: Algorithm | None = None
    """Published algorithm: sets those switches of `loss` and of the domains' `advantage` that are not given
    (docs/training.md)."""
    lr: float = Field(default=1e-5, gt=0)
    """Learning rate."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the matrices of the blocks, and AdamW for embeddings, output head, norms and biases; with one
    trainer rank in float32. `warm_start` uses AdamW."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """linear, cosine: falls to a tenth of `lr` by the last step, in a line or along half a cosine wave."""
    warmup: int = Field(default=0, ge=0, le=1_000_000)
    """Optimizer updates over which the learning rate rises linearly."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    eps: float = Field(default=1e-8, gt=0, le=1)
    """AdamW's term in the denominator."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    grad_clip: float = Field(default=1.0, ge=0)
    """Largest norm of the gradient; 0: not clipped."""
    loss: LossSpec = Field(default_factory=LossSpec)
    """The policy loss."""
    data: str | None = Field(default=None, min_length=1)
    """JSON Lines file of conversations to imitate (sft), relative to the run file: an object with `messages`, or with
    `prompt` and `completion`, per line (docs/training.md)."""
    data_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """Digest of that file, without which another one is refused. A run records it."""
    epochs: int = Field(default=1, ge=1, le=1000)
    """Passes over a batch; with `data` passes over the file, unless the run gives `steps`."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per pass."""
    max_tokens_per_microbatch: int = Field(default=16_384, ge=1)
    """Padded tokens per forward pass."""
    stream: bool = False
    """Accumulate the gradient of finished groups while the rest of the batch is rolled out. Needs `epochs` and
    `minibatches` 1, no advantage with `baseline: domain`, and one trainer rank in float32."""
    critic: CriticSpec | None = None
    """The model behind `advantage.baseline: critic`."""
    lora: LoraSpec | None = None
    """Train low-rank adapters and leave the model's own weights as they are."""
    routing_replay: bool | None = None
    """Train each token of a mixture of experts on the experts that its engine chose. Unless false, embedded engines
    report them; those of kind vllm report none here."""
    columns: list[Literal["ref_logprobs", "advantage"]] = Field(default_factory=list)
    """Columns that are computed as samples and groups end, while the rest of the batch is rolled out, instead of in the
    step; the step is the same. ref_logprobs: of the KL penalty; advantage: without `baseline: domain`."""
    domain_balance: Literal["tokens", "domains"] = "tokens"
    """tokens: every token has the same weight, or every sample (see `loss.aggregation`); domains: every domain has the
    same total weight."""

    @property
    def passes(self) -> int:
        """Forward and backward passes over a batch, those of a critic included, which is as large as the policy."""
        critic = 0 if self.critic is None else self.critic.epochs or self.epochs
        return self.epochs + critic

    @model_validator(mode="before")
    @classmethod
    def _loss_of_algorithm(cls, data: Any) -> Any:
        return with_training_defaults(data)

    @model_validator(mode="after")
    def _inputs_of_the_step(self) -> TrainingSpec:
        """A column is filled before the step, from what does not change until then. An algorithm has its kind of loss,
        and distillation a teacher."""
        wanted = self.loss.kind if self.algorithm is None else PRESETS[self.algorithm].loss["kind"]
        if self.loss.kind != wanted and (self.loss.kind, wanted) != ("decoupled", "ppo"):
            raise ValueError(
                f"algorithm '{self.algorithm}' with loss.kind '{self.loss.kind}', another loss: give kind {wanted} or "
                "none, or remove the algorithm"
            )
        if (self.loss.kind == "nll") != (self.data is not None):
            raise ValueError(
                "loss.kind 'nll' (algorithm sft) without data: give data, a JSON Lines file of conversations"
                if self.data is None
                else f"data with loss.kind '{self.loss.kind}', which trains on roll-outs: give algorithm sft"
            )
        if self.data_sha256 is not None and self.data is None:
            raise ValueError("data_sha256 without data: give both or neither")
        if self.data is not None and (self.stream or self.columns):
            raise ValueError("stream or columns with data, where nothing is rolled out meanwhile: remove them")
        if self.algorithm == "opd" and self.loss.reference is None:
            raise ValueError(
                "algorithm 'opd' without a teacher: give loss.reference, a model with the policy's vocabulary: its "
                "directory, or the URL of a server"
            )
        if "advantage" in self.columns and self.loss.kl and self.loss.kl_in == "reward":
            raise ValueError(
                "columns has advantage with loss.kl_in 'reward', which changes rewards in the step: remove the column, "
                "or set loss.kl_in to loss"
            )
        for value, name, why, remedy in (
            (self.stream, "stream", "values are of the whole batch's step", "set stream to false"),
            (
                self.lora,
                "lora",
                "it is trained in full, beside frozen weights",
                "remove lora, or take another baseline",
            ),
            (self.loss.kind == "dpo", "loss.kind 'dpo'", "pairs have no advantage", "remove critic"),
        ):
            if self.critic is not None and value:
                raise ValueError(f"critic with {name}: {why}; {remedy}")
        if "ref_logprobs" in self.columns and self.loss.reference_reset:
            raise ValueError(
                "columns has ref_logprobs with loss.reference_reset: the reference may change before the step; remove "
                "one of them"
            )
        return self


class ImitationSpec(SpecEntry):
    """Cross-entropy on worked examples."""

    lr: float = Field(default=1e-3, gt=0)
    """Learning rate of the imitation."""
    batch: int = Field(default=32, ge=1)
    """Examples per mini-batch."""
    stop_loss: float | None = Field(default=None, gt=0)
    """Stop early, once the mean loss of the last 5 mini-batches is below it."""


LossWeight = Annotated[float, Field(ge=1e-9, le=1e9, description="Weight of its mean in the loss, see domain_balance.")]


class CreditSpec(SpecEntry):
    """One domain's credit assignment, its weight in the loss and its adapter, in the trainer's form."""

    advantage: AdvantageSpec = Field(default_factory=AdvantageSpec)
    loss_weight: LossWeight = 1.0
    max_length: int | None = Field(default=None, ge=1)
    adapter: AdapterName | None = None

    @model_validator(mode="after")
    def _length_of_overlong(self) -> CreditSpec:
        if self.advantage.overlong and self.max_length is None:
            raise ValueError("advantage.overlong is a share of max_length: give max_length")
        return self


class PolicyConfig(SpecEntry):
    """The policy: a Hugging Face directory (`path`), or a fresh one made from a config dict (`init`) and `seed`.

    `dtype` of its weights and of everything that is computed with them; engines read versions of either."""

    path: str | None = None
    init: dict[str, Any] | None = None
    seed: int = 0
    attention: Literal["sdpa", "eager"] = "sdpa"
    dtype: Literal["float32", "float64"] = "float32"

    @model_validator(mode="after")
    def _one_source(self) -> PolicyConfig:
        if (self.path is None) == (self.init is None):
            raise ValueError("give exactly one of 'path' (a Hugging Face directory) and 'init' (a model config)")
        return self


class ParallelConfig(SpecEntry):
    """The number of the trainer's processes (FSDP2), and its trade-offs between memory and speed.

    `dtype` is that of the computation; weights, accumulated gradients and the optimizer keep the model's. Versions of
    more than one rank are written in files of at most `bucket_mb` (1e6 bytes), or of one larger tensor.
    """

    ranks: int = Field(default=1, ge=1)
    dtype: Literal["float32", "bfloat16"] = "float32"
    activation_checkpointing: bool = False
    compile: bool = False
    bucket_mb: int = Field(default=1000, ge=1)

    @property
    def sharded(self) -> bool:
        """True if FSDP2 holds the parameters: with one rank only for its mixed precision."""
        return self.ranks > 1 or self.dtype != "float32"


def critic_problem(training: TrainingSpec, domains: Iterable[Any]) -> str | None:
    """Why the critic does not fit the advantages of the domains; None if it does."""
    wanted = any(one.advantage.baseline == "critic" for one in domains)
    if wanted == (training.critic is not None):
        return None
    if wanted:
        return (
            "a domain has advantage.baseline 'critic', and training.critic is not given: give it ({} for its defaults)"
        )
    return (
        "training.critic is given, and no domain has advantage.baseline 'critic': give it to those that the critic is "
        "for, or remove training.critic"
    )


RESERVED_ADAPTERS = ("base", "trainer")
"""Directories of a version, beside those of adapters."""


def adapter_problem(training: TrainingSpec, domains: Mapping[str, Any]) -> str | None:
    """Why the adapters of the domains cannot be trained; None if they can, or if no domain names one."""
    named = {name: one.adapter for name, one in domains.items() if one.adapter is not None}
    if not named:
        return None
    domain, adapter = next(iter(named.items()))
    without = [name for name in domains if name not in named]
    taken = [name for name, one in named.items() if one in RESERVED_ADAPTERS]
    if without:
        return f"domain '{domain}' has the adapter '{adapter}', and '{without[0]}' none (rule: all domains or none)"
    if training.lora is None:
        return f"domain '{domain}' has the adapter '{adapter}' without training.lora: give lora ({{}} for its defaults)"
    if training.lora.publish == "merged":
        return (
            f"domain '{domain}' has the adapter '{adapter}' with training.lora.publish 'merged': weights can be merged "
            "with one adapter alone; remove publish"
        )
    if training.data is not None:
        return f"domain '{domain}' has the adapter '{adapter}' with training.data, which is of no domain: remove either"
    if taken:
        return (
            f"domain '{taken[0]}' has the adapter '{named[taken[0]]}', a directory of every version: take another name"
        )
    return None


class TrainerConfig(TrainingSpec):
    """`trainer.json`: the run's `training`, and the rest of the run that the trainer's process needs.

    `tokenizer` is a `tokenizer.json` or a directory with one; it is copied into every published version. `steps` is the
    run's length, for `lr_schedule` (0: it stays constant). `max_tokens_per_microbatch` counts padded tokens: on
    a CPU 1,000 to 4,000 cost the same, 8,000 at once cost 20–50 % more (caches, page faults); a GPU wants as many as
    its memory holds. `stream` takes a step's gradient group by group (`stream.py`), in `train` as well. `durable`
    fsyncs a published version before it becomes visible. `published_dtype`: the type of published weights; None: that
    in which they are trained. `deterministic`: torch takes algorithms that sum in a fixed order.
    """

    model: PolicyConfig
    weights_root: str
    tokenizer: str | None = None
    seed: int = 0
    steps: int = Field(default=0, ge=0)
    domains: dict[str, CreditSpec] = Field(default_factory=dict)
    imitation: ImitationSpec = Field(default_factory=ImitationSpec)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    temperature: float = Field(default=1.0, gt=0)
    threads: int = Field(default=1, ge=1)
    device: str = "cpu"
    durable: bool = True
    deterministic: bool = False
    published_dtype: Literal["bfloat16"] | None = None

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters, sorted: '' of the only one, which all domains share. None without `lora`."""
        return () if self.lora is None else tuple(sorted({one.adapter or "" for one in self.domains.values()} or {""}))

    @model_validator(mode="before")
    @classmethod
    def _advantages_of_algorithm(cls, data: Any) -> Any:
        domains = data.get("domains") if isinstance(data, Mapping) else None
        if not isinstance(domains, Mapping):
            return data
        return {**data, "domains": {name: with_advantage_defaults(data, one) for name, one in domains.items()}}

    @model_validator(mode="after")
    def _known_length(self) -> TrainerConfig:
        if self.loss.aggregation == "constant" and self.loss.length is None:
            raise ValueError("loss.aggregation 'constant' divides by loss.length: give it")
        return self

    @model_validator(mode="after")
    def _critic_of_domains(self) -> TrainerConfig:
        if (problem := critic_problem(self, self.domains.values())) is not None:
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _adapters_of_domains(self) -> TrainerConfig:
        if (problem := adapter_problem(self, self.domains)) is not None:
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _whole_matrices(self) -> TrainerConfig:
        """Muon needs whole matrices: a rank has rows of them alone."""
        if self.optimizer == "muon" and self.parallel.sharded:
            raise ValueError(
                "optimizer muon orthogonalizes whole matrices, which FSDP2 cuts by rows: set parallel.ranks to 1 and "
                "parallel.dtype to float32, or optimizer to adamw"
            )
        return self

    @model_validator(mode="after")
    def _streamed(self) -> TrainerConfig:
        """A streamed step makes one update of one pass, in one process, and never sees its batch as a whole."""
        if not self.stream:
            return self
        if self.parallel.sharded:
            raise ValueError(
                "stream sums gradients in one process in full precision: set parallel.ranks to 1 and parallel.dtype to "
                "float32, or stream to false"
            )
        if self.epochs > 1 or self.minibatches > 1:
            raise ValueError(
                f"stream makes one update of one pass, got epochs {self.epochs} and minibatches {self.minibatches}: "
                "set both to 1, or stream to false"
            )
        if self.loss.kind == "dpo":
            raise ValueError(
                "stream: loss.kind 'dpo' weighs a pair by the log-probabilities of both samples, which need a pass of "
                "their own: set stream to false"
            )
        for name, domain in self.domains.items():
            if domain.advantage.baseline == "domain":
                raise ValueError(
                    f"stream: domain {name!r} has the advantage baseline 'domain', a mean that is known only with the "
                    "whole batch: use 'group' or 'none', or set stream to false"
                )
            if domain.advantage.normalize == "whiten":
                raise ValueError(
                    f"stream: domain {name!r} has advantage.normalize 'whiten', whose mean is known only with the "
                    "whole batch: use 'batch' or 'none', or set stream to false"
                )
        return self
