"""The core values of rollart: the parts of a trajectory, and the values that cross the ports.

Everything here is a frozen value, some of them to type checkers alone (`_value`). Token in, token out: the trainer
receives exactly the ids that an engine sampled; text exists only for environments, rewards and people (design,
"Trajectory").
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NewType

from serverless.types import InfraFault as InfraFault
from serverless.types import Item as Item
from serverless.types import ModelFault as ModelFault
from serverless.types import Outcome as Outcome
from serverless.types import Scored as Scored

if TYPE_CHECKING:
    from dataclasses import dataclass as _value
else:

    def _value(**_):
        """Frozen to type checkers, and plain at run time: several values are made in every turn of every trajectory,
        and `frozen` triples their cost. Values that users construct are truly frozen."""
        return dataclass(slots=True, unsafe_hash=True)


TrajectoryId = NewType("TrajectoryId", str)
GroupId = NewType("GroupId", str)
EngineId = NewType("EngineId", str)
BatchId = NewType("BatchId", int)

Sample = Item
"""The input of a reward function; `rollart.Sample` is the public name of `serverless.types.Item`."""


class SegmentKind(enum.StrEnum):
    """The author of a segment's tokens."""

    PROMPT = "prompt"
    ACTION = "action"
    OBSERVATION = "observation"


class Purpose(enum.StrEnum):
    """Why a trajectory runs. Evaluation is judged by its environment's success, and never trained on."""

    TRAIN = "train"
    EVAL = "eval"


class FinishReason(enum.StrEnum):
    """Why an engine stopped generating."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class PauseMode(enum.StrEnum):
    """A paused engine's treatment of requests in flight (vLLM's names)."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


class AbortReason(enum.StrEnum):
    """Why a trajectory ended without a sample. Each is a cause of waste in the ledger."""

    STALE = "stale"
    INFRA_FAULT = "infra_fault"
    GROUP_DROPPED = "group_dropped"
    SHUTDOWN = "shutdown"
    REFUSED = "refused"
    REDUNDANT = "redundant"
    """Enough others ended first: a member beyond its group's size, or a group beyond its batch's quota."""
    DEFERRED = "deferred"
    """Its prompt is deferred to a later round, and generated again then."""
    FILTERED = "filtered"
    """Its group's rewards are all equal, so it has no training signal."""


@_value(frozen=True, slots=True)
class Segment:
    """A run of tokens with one author and one policy version.

    An action that was sampled across a weight update is several segments, one per version (I1).
    `logprobs` has the length of `token_ids` for actions and is empty otherwise; they are natural logarithms
    under the distribution after temperature and legal-action mask, before any top-p cut, fp32.
    `allowed` are the legal token ids that an action was restricted to, None where all of the vocabulary was legal.
    """

    kind: SegmentKind
    turn: int
    token_ids: tuple[int, ...]
    policy_version: int | None = None
    logprobs: tuple[float, ...] = ()
    allowed: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind is SegmentKind.ACTION:
            if self.policy_version is None or len(self.logprobs) != len(self.token_ids):
                raise ValueError(
                    f"an action segment needs a policy version and one log-probability per token, got "
                    f"version={self.policy_version}, {len(self.logprobs)} for {len(self.token_ids)} tokens"
                )
        elif self.logprobs or self.policy_version is not None:
            raise ValueError(f"a segment of kind {self.kind} was not sampled: it has no version or logprobs")

    @property
    def loss_mask(self) -> tuple[bool, ...]:
        """One flag per token: only sampled tokens carry loss."""
        return (self.kind is SegmentKind.ACTION,) * len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Observation:
    """The observation that an environment shows the policy.

    `actions`, if given, are the legal answers: decoding is restricted to them (each must be one token of the policy's
    vocabulary). `max_tokens` bounds the answer; the domain's limit applies if it is None.
    """

    text: str
    actions: tuple[str, ...] | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """An environment's response to an action: the next observation, its own reward, and whether the episode is over.

    `success` is for people and curves (True, False, or None while unknown), never for the loss. `metadata` of the last
    step reaches the reward functions.
    """

    observation: Observation
    reward: float = 0.0
    done: bool = False
    success: bool | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)


@_value(frozen=True, slots=True)
class Turn:
    """One exchange as text: the observation, the policy's action, and the environment's reward."""

    index: int
    observation: str
    action: str
    action_tokens: tuple[str, ...]
    env_reward: float


@_value(frozen=True, slots=True)
class Trajectory:
    """A finished episode before scoring. `v0` is the policy version of its first generated token."""

    id: TrajectoryId
    group: GroupId
    domain: str
    seed: int
    purpose: Purpose
    v0: int
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    success: bool | None
    final_observation: str
    metadata: Mapping[str, object]
    engine_seconds: float = 0.0
    """Engine time charged to it, in seconds of one engine (processor sharing)."""
    truncated: bool = False
    """True if its last answer ended at the domain's `max_tokens` or at the context, or if none had room any more."""
    experts: tuple[bytes, ...] = ()
    """The experts that its tokens ran through in the engine, from its first token on; the trainer's routers choose
    those of the others."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(t for s in self.segments for t in s.token_ids)

    @property
    def action_token_count(self) -> int:
        return sum(len(s.token_ids) for s in self.segments if s.kind is SegmentKind.ACTION)


def item_of(trajectory: Trajectory) -> Item:
    """The functions' view of a trajectory: the conversation, the reference, and the course of the episode."""
    messages: list[Mapping[str, str]] = []
    for turn in trajectory.turns:
        messages.append({"role": "user", "content": turn.observation})
        messages.append({"role": "assistant", "content": turn.action})
    reference = trajectory.metadata.get("reference_answer")
    metadata = dict(trajectory.metadata) | {
        "observations": [turn.observation for turn in trajectory.turns] + [trajectory.final_observation],
        "env_rewards": [turn.env_reward for turn in trajectory.turns],
        "action_tokens": [token for turn in trajectory.turns for token in turn.action_tokens],
        "success": trajectory.success,
    }
    return Item(trajectory.id, tuple(messages), None if reference is None else str(reference), metadata)


@_value(frozen=True, slots=True)
class TrainSample:
    """The trainer's view of one scored trajectory. All per-token tuples have the length of `token_ids`.

    `logprobs` are the behaviour log-probabilities (0.0 where `loss_mask` is False), `versions` the policy version that
    sampled each token (-1 elsewhere), `turn` the turn index (-1 for tokens that were not sampled), `rewards` the reward
    paid at that token. A turn's reward is paid at its last action token. `allowed` gives, for each sampled token, the
    legal token ids that its log-probability was normalised over, or None where all of the vocabulary was legal; if the
    whole tuple is empty, no token was restricted. `reference` (log-probabilities under the reference policy) and
    `advantage` (before scaling by the batch's spread) are columns that may be filled while the rest of the batch is
    rolled out, 0.0 where `loss_mask` is False; if empty, the trainer computes them in its step. `weight` is a factor of
    its tokens in the loss, with a mean of 1 over its domain's samples. `truncated` is that of the trajectory. `experts`
    are those that each token ran through in the engine (`architecture.ExpertLayers`); if empty, the trainer's routers
    choose.
    """

    id: TrajectoryId
    group: GroupId
    domain: str
    v0: int
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    turn: tuple[int, ...]
    rewards: tuple[float, ...]
    score: float
    success: bool | None
    allowed: tuple[tuple[int, ...] | None, ...] = ()
    reference: tuple[float, ...] = ()
    advantage: tuple[float, ...] = ()
    weight: float = 1.0
    truncated: bool = False
    experts: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        lengths = {len(self.loss_mask), len(self.logprobs), len(self.versions), len(self.turn), len(self.rewards)}
        optional = {len(self.allowed), len(self.reference), len(self.advantage), len(self.experts)}
        if lengths != {n} or not optional <= {0, n}:
            raise ValueError(f"sample {self.id}: per-token fields of lengths {sorted(lengths)} for {n} tokens")

    @classmethod
    def unsampled(cls, name: str, domain: str, *turns: tuple[int, ...], score: float = 0.0) -> TrainSample:
        """Turns that no policy has sampled, alone in their group, with loss on the answers. `turns`: the tokens of an
        observation and of its answer, in turn."""
        answers = [(ids, index // 2 if index % 2 else -1) for index, ids in enumerate(turns)]
        turn = tuple(at for ids, at in answers for _ in ids)
        return cls.given(name, domain, tuple(token for ids in turns for token in ids), turn, score)

    @classmethod
    def given(
        cls, name: str, domain: str, tokens: tuple[int, ...], turn: tuple[int, ...], score: float = 0.0
    ) -> TrainSample:
        """Tokens that no policy has sampled, alone in their group, with loss on those that have a `turn` (else -1)."""
        n = len(tokens)
        return cls(
            id=TrajectoryId(name),
            group=GroupId(name),
            domain=domain,
            v0=0,
            token_ids=tokens,
            loss_mask=tuple(at >= 0 for at in turn),
            logprobs=(0.0,) * n,
            versions=tuple(min(at, 0) for at in turn),
            turn=turn,
            rewards=(0.0,) * n,
            score=score,
            success=True if score > 0 else None,
        )


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one prompt (GRPO): consumed whole, exactly once, or dropped whole with a reason (I6)."""

    id: GroupId
    domain: str
    samples: tuple[TrainSample, ...]

    @property
    def v0(self) -> int:
        """The oldest version in the group, which determines its staleness."""
        return min(s.v0 for s in self.samples)


@_value(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of the next tokens. `temperature` 0 is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None


@_value(frozen=True, slots=True)
class CompletionChunk:
    """New tokens of a completion that is still being generated, all sampled under `version`. None: the engine reports
    versions only at the completion's end, and weights may have changed meanwhile."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int | None
    stamp: str | None = field(default=None, compare=False)


@_value(frozen=True, slots=True)
class GenerateRequest:
    """One turn's generation. `session` is the trajectory: its engine keeps the prefix KV between turns.

    `on_chunk` is called with tokens as they are sampled, by engines that support it; its chunks are the
    beginning of the completion. `experts_from`: the answer is to have the experts that the model chose for the tokens
    from this one on, of prompt and answer; None: those of no token. `adapter` names one of the engine's; None for an
    engine without.
    """

    request_id: str
    session: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    cache_salt: str | None = None
    kv_transfer: Mapping[str, object] | None = None
    on_chunk: Callable[[CompletionChunk], None] | None = field(default=None, compare=False, repr=False)
    experts_from: int | None = None
    adapter: str | None = None


@_value(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of a completion were sampled under `version`, for which the engine reports the content's
    `stamp`; None: it reports none."""

    version: int
    start: int
    end: int
    stamp: str | None = field(default=None, compare=False)


@_value(frozen=True, slots=True)
class Completion:
    """An engine's answer: sampled ids, their fp32 log-probabilities, and the version that sampled each token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish: FinishReason
    prompt_tokens: int = 0
    cached_tokens: int = 0
    kv_transfer: Mapping[str, object] | None = None
    output_tokens: int | None = None
    """Number of tokens that the ids represent, if it differs from the number of ids."""
    experts: tuple[bytes, ...] = ()
    """For each token from the request's `experts_from` on, but for the answer's last, which no token has followed: the
    numbers of its experts, as `architecture.ExpertLayers.token_bytes` describes. Empty for a model without experts, or
    an engine that reports none."""

    @property
    def sampled(self) -> int:
        """Tokens of the answer."""
        return len(self.token_ids) if self.output_tokens is None else self.output_tokens


@dataclass(frozen=True, slots=True)
class WeightsRef:
    """The location of a published version: a Hugging Face directory (config.json, safetensors) with a completion
    marker. `bytes` is the size that an engine reads, where known (else 0). `stamp` identifies its content, as
    `architecture.stamp_of` reads it once it is published; '': unknown, and compared with nothing."""

    version: int
    path: str
    bytes: int = field(default=0, compare=False)
    stamp: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine started; seconds are of the engine's own compute.

    `running` and `waiting` requests, and `kv_used`, the share of the KV memory that they hold, are current values. KV
    of idle sessions does not count, because it is evicted on demand (vLLM's kv_cache_usage_perc).
    """

    running: int
    waiting: int
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    prefill_seconds: float
    decode_seconds: float
    kv_used: float = 0.0
    preemptions: int = 0
    """Requests that gave up their KV while running, to be computed again."""
    kv_tokens: int | None = None
    """KV capacity in tokens, including idle sessions; None where the engine does not report it."""
    kv_sessions: int | None = None
    """Capacity in sessions of any length, for an engine with a slot per session; None: limited by tokens alone."""
    external_tokens: int = 0
    """The part of the cached tokens whose KV came from another engine."""
    ended: int = 0
    """Requests that were answered, completely or not."""
    steps: int = 0
    latencies: int = 0
    """How often a request waited for its next token, those `latency_seconds` in sum; 0: it does not say."""
    latency_seconds: float = 0.0
    """Sum and number (`latencies`) of the waits of requests for their next token; number 0: not reported."""


@dataclass(frozen=True, slots=True)
class TrainReport:
    """The result of one training step: tokens with loss, seconds of compute, and the metrics by name."""

    trained_tokens: int
    seconds: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class BroadcastResult:
    """The result of a broadcast of weights. `has`: bytes and seconds of the members that have the complete version, by
    number; `errors` of the others; member 0 is the trainer."""

    bytes: int
    seconds: float
    has: Mapping[int, tuple[int, float]]
    errors: Mapping[int, str]
