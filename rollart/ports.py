"""The ports of rollart: the control plane's interfaces to engines, environments, agent programs, rewards, trainers,
weights, recorders and the runtime that starts processes. Adapters implement them; `launch` chooses the implementations.

Every port has one contract suite under `tests/contracts/` that fakes and real adapters both pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollart.fleet import ActorSpec, Bundle, FleetMove, FleetObservation, Node, Proposal, Routes, RuntimeEvent
from rollart.model import (
    Completion,
    CompletionChunk,
    EngineId,
    EngineStats,
    GenerateRequest,
    Group,
    Observation,
    Outcome,
    PauseMode,
    Segment,
    Step,
    TrainReport,
    TrainSample,
    Trajectory,
    TrajectoryId,
    WeightsRef,
)

Clock = Callable[[], float]
"""Seconds of the loop: `asyncio.get_running_loop().time`. The only clock in rollart."""


class Engine(Protocol):
    """An inference server: token ids in, token ids with log-probabilities and weight versions out.

    Errors: `EngineError` (with `retryable`); cancellation of `generate` aborts the request on the server.
    """

    @property
    def id(self) -> EngineId: ...

    async def generate(self, request: GenerateRequest) -> Completion: ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now; their `generate` returns with finish ABORT and the tokens so far."""

    async def release(self, session: str) -> None:
        """The trajectory is over: its prefix KV may be evicted."""

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def update_weights(self, weights: WeightsRef) -> None:
        """Load a published version. Requests in flight continue, with their KV recomputed under the new weights (I5).
        Call between `pause` and `resume`."""

    async def stats(self) -> EngineStats: ...

    async def healthy(self) -> bool: ...


EVAL_SEEDS_FROM = 1 << 30
"""Seeds from here on are held-out episodes: an environment should, if it can, show them nothing that it trains on."""


class Environment(Protocol):
    """One episode's environment. Three async methods, nothing to inherit. An exception is an InfraFault."""

    async def reset(self, seed: int) -> Observation: ...

    async def step(self, action: str) -> Step: ...

    async def close(self) -> None: ...


EnvironmentFactory = Callable[[], Environment]


@dataclass(frozen=True, slots=True)
class HarnessRequest:
    """A harness's request: a completion of these tokens. Its sampling is the domain's, which also limits its length."""

    token_ids: tuple[int, ...]
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    on_chunk: Callable[[CompletionChunk], None] | None = field(default=None, compare=False)
    """Called with tokens as they are drawn."""
    gone: asyncio.Future[None] | None = field(default=None, compare=False)
    """Done when the harness no longer waits for the completion."""


class HarnessEpisode(Protocol):
    """An agent program at work on one episode: it requests completions instead of being asked for steps. Used by one
    task.

    An exception is an InfraFault, as an environment's is.
    """

    async def wanted(self) -> HarnessRequest | None:
        """The next request, after the last one was answered; None: the episode is over."""

    def answer(self, completion: Completion) -> None:
        """Supply the completion of the last request."""

    def exhaust(self) -> None:
        """The episode had all of its turns: further requests are refused."""

    def segments(self) -> tuple[Segment, ...]:
        """The branch of the conversation to be trained, by turn; other branches did not contribute to its context."""

    def ending(self) -> Step:
        """The episode's own reward and success, once it is over."""

    async def close(self) -> None: ...


HarnessFactory = Callable[[str, int], HarnessEpisode]
"""Starts an episode from a session's name and a seed."""


class Tokenizer(Protocol):
    """Conversion between text and tokens: observations are encoded once, actions decoded for environments and
    people."""

    def encode(self, text: str) -> tuple[int, ...]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def token(self, token_id: int) -> str:
        """The text of one token."""

    def token_id(self, text: str) -> int:
        """The id of a text that is exactly one token; ValueError otherwise."""


class ChatPrompts(Protocol):
    """Observations as messages of a conversation whose earlier tokens never change."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""

    def opening(self, text: str) -> tuple[int, ...]:
        """The tokens of the first observation, up to the beginning of the answer."""

    def following(self, text: str, answer: Sequence[int]) -> tuple[int, ...]:
        """The tokens between the sampled tokens of an answer and the beginning of the next one: the end of the answer,
        unless its last token is one, and the observation `text`."""

    def answer(self, text: str) -> tuple[int, ...]:
        """The tokens of an answer with its end, as a policy would sample them."""


class Rewarder(Protocol):
    """Scores a finished trajectory. Never raises for a failed function: a failure is an InfraFault value."""

    async def score(self, trajectory: Trajectory, deadline_s: float) -> Outcome: ...


class Trainer(Protocol):
    """Owns the optimizer. One step at a time; the caller counts the policy version.

    Errors: `TrainerError`, `TrainerRefused` for samples that it refuses.
    """

    async def train(self, samples: Sequence[TrainSample], version: int) -> TrainReport:
        """One optimizer step (all epochs and mini-batches) on the samples, starting from `version`."""

    @property
    def streams(self) -> bool:
        """True if a step may be taken in pieces: `begin`, `accumulate` as groups finish, `finish`.

        It then equals `train` on the same samples, in any order. An unfinished step leaves the weights unchanged;
        `restore`, `begin` and the trainer's death drop it.
        """

    async def begin(self, version: int) -> None:
        """Start a step from `version`; the gradient of an unfinished step is dropped."""

    async def accumulate(self, samples: Sequence[TrainSample]) -> None:
        """Add the gradient of whole groups. After `TrainerRefused` the step continues without these groups; after any
        other error the step is lost."""

    async def finish(self) -> TrainReport:
        """One optimizer step with the accumulated gradient."""

    async def imitate(self, samples: Sequence[TrainSample], batches: int) -> TrainReport:
        """Warm start: cross-entropy on the masked tokens for a number of mini-batches."""

    async def logprobs(self, samples: Sequence[TrainSample]) -> list[tuple[float, ...]]:
        """Log-probabilities of each sample's tokens under the current weights (0.0 where masked)."""

    async def reference(self, samples: Sequence[TrainSample]) -> list[tuple[float, ...]]:
        """Log-probabilities of each sample's tokens under the reference policy, the run's first version (0.0 where
        masked). Each depends on its own sample alone. Runs concurrently with a step, if the trainer supports it."""

    async def advantages(self, samples: Sequence[TrainSample]) -> list[tuple[float, ...]]:
        """Advantages of whole groups, before the scaling that needs the whole batch (0.0 where masked)."""

    async def stage(self, version: int) -> None:
        """Copy the current weights and the optimizer's state aside: the `publish` of this version writes the copy, and
        may run concurrently with the next step. `restore` and the trainer's death drop it."""

    async def publish(self, version: int) -> WeightsRef:
        """Write the staged copy as `version`, or else the current weights and the optimizer's state; completely or not
        at all."""

    async def restore(self, weights: WeightsRef, *, optimizer: bool = True) -> None:
        """Continue from a published version, optimizer state included; without it as a new run with its weights."""


class WeightStore(Protocol):
    """Published versions for engines."""

    def path(self, version: int) -> str: ...

    def complete(self, version: int) -> bool:
        """True if the version was written completely (its marker exists)."""

    def versions(self) -> list[int]:
        """Complete versions, ascending."""

    def prune(self, keep: Sequence[int], checkpoints: Sequence[int] = ()) -> None:
        """Remove versions, except those that engines may still read (`keep`) and `checkpoints`, which stay with the
        trainer alone."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A stretch of one resource in one state. Seconds of the run's clock; `units` of the resource (cores, GPUs).

    `cause` names the waste when the time was wasted ('' otherwise). `usd` = (t1 - t0) × units × price.
    """

    role: str
    resource: str
    t0: float
    t1: float
    state: str
    cause: str = ""
    units: float = 1.0
    price_usd_per_unit_hour: float = 0.0

    @property
    def seconds(self) -> float:
        return self.t1 - self.t0

    @property
    def usd(self) -> float:
        return (self.t1 - self.t0) * self.units * self.price_usd_per_unit_hour / 3600.0


@dataclass(frozen=True, slots=True)
class RunEvent:
    """An event of the run with its subject: lease expiry, fault, restart, publish, abort, drop."""

    t: float
    kind: str
    subject: str
    fields: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)


FINISHED = "finished"
"""Outcome of a trajectory that was scored; the journal holds the state of its sample."""

RELAUNCH_MARK = "~"
"""Marks a repeated launch: prompt `lake-7` is group `lake-7` at first and `lake-7~2` when it is generated again. The
journal counts repeated groups under the domain `lake~`, so that its count of a domain is the count of its prompts."""


@dataclass(frozen=True, slots=True)
class Charge:
    """The row of a trajectory that ended: its outcome and its costs.

    `first_tokens` is the length of its first prompt; `reset_s` the duration of its environment's reset, prefetched or
    not; `env_s` the time that it waited for the steps of its environment, `reward_s` for its reward (None if it asked
    for none).
    """

    trajectory: TrajectoryId
    domain: str
    outcome: str
    v0: int
    engine_seconds: float
    turns: int
    prompt_tokens: int
    action_tokens: int
    success: bool | None
    score: float | None
    purpose: str
    t0: float
    t1: float
    first_tokens: int = 0
    reset_s: float = 0.0
    env_s: float = 0.0
    reward_s: float | None = None


class Recorder(Protocol):
    """The sink for records of adapters and the runtime. Synchronous, cheap, never waits for a disk."""

    def interval(self, interval: Interval) -> None: ...

    def event(self, event: RunEvent) -> None: ...

    def charge(self, charge: Charge) -> None:
        """The row of a trajectory that left no sample. For one with a sample, `Journal.finish` takes the row."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """The state that a resume starts from: the last committed version and the finished samples that it did not consume.

    `seeds_drawn` counts the groups ever admitted, so that a resumed run draws new prompts; `pending` are the groups
    that were admitted and neither consumed nor dropped, as (group, domain, seed).
    """

    version: int
    step: int
    samples: tuple[TrainSample, ...]
    pending: tuple[tuple[str, str, int], ...]
    seeds_drawn: Mapping[str, int]
    clock: float
    consumed: Mapping[str, int] = field(default_factory=dict)
    """Groups trained so far, by domain."""
    stamps: Mapping[int, str] = field(default_factory=dict)
    """Content stamps of committed versions, as published."""
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Groups that were dropped because a finished sample of theirs cannot be read, with the cause."""


class Journal(Protocol):
    """The run's durable state. Once a call returns, its effect survives kill -9."""

    async def admit(self, group: str, domain: str, seed: int) -> None: ...

    async def finish(self, sample: TrainSample, charge: Charge) -> None:
        """Keep a finished, scored sample and its trajectory's row: a crash leaves both or neither."""

    async def outdate(self, trajectory: TrajectoryId) -> None:
        """A finished trajectory became stale before its sample counted: its row becomes `stale`."""

    async def drop(self, group: str, reason: str) -> None: ...

    async def commit(
        self, *, version: int, step: int, consumed: Sequence[Group], metrics: Mapping[str, float], stamp: str = ""
    ) -> None:
        """The batch was trained into `version`, which is published: consume its samples in one transaction. `stamp` of
        its content: see `WeightsRef`."""

    async def recover(self) -> Recovered | None:
        """None for a run that never committed a version."""


class Planner(Protocol):
    """Computes routes and plans from measurements, outside the loop: a solver takes a second, and the loop must not
    block.

    May raise; the caller then keeps its current routes and plan.
    """

    async def reprice(self, observed: FleetObservation) -> Routes:
        """The running flows at the current prices. Called every few seconds: no solver."""

    async def reflow(self, observed: FleetObservation) -> Routes:
        """The best flows, and their prices, with the existing instances. Called about twice a minute."""

    async def replan(self, observed: FleetObservation, reason: str) -> Proposal | None:
        """A better plan, or None if the running one is the best; raises when none is found. Moves other than flips only
        help a caller that can make them (`observed.movable`)."""

    def adopt(self, proposal: Proposal) -> None:
        """The last proposal was applied: it is the running plan from now on."""


class Fleet(Protocol):
    """Drains and starts engines: one at a time, and none during a weight update."""

    async def apply(self, move: FleetMove) -> None:
        """Start or drain one engine (`move.replicas` is 1). Returns when a started engine serves the current version,
        or when a drained engine is gone, including its process and devices.

        Raises `RollartError` for an impossible move, without any effect.
        """

    def free(self) -> Mapping[str, int]:
        """Devices by pool that are free for an engine."""

    async def resize(self, devices: Mapping[str, int]) -> None:
        """Set the number of devices of each pool. Engines that no longer serve, and whose devices are gone, are given
        up as long as another engine serves."""


class Handle(Protocol):
    """A running actor. `PartDied` if it is gone and may not come back."""

    @property
    def name(self) -> str: ...

    @property
    def node(self) -> str: ...

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any: ...

    async def kill(self) -> None: ...


class Runtime(Protocol):
    """Starts, places, watches and kills actors. Local (asyncio), local on virtual time, Ray."""

    async def start(self) -> None: ...

    async def spawn(self, spec: ActorSpec) -> Handle:
        """Start an actor. `UsageError` at once when no node could ever hold it."""

    async def reserve(self, gang: Sequence[Bundle], *, wait_s: float) -> None:
        """Reserve room for all of these bundles, or for none; `ActorSpec.bundle` names one. `UsageError` at once when
        the nodes could never hold it, or after `wait_s`, naming the missing resources. When a node dies, its bundles
        are reserved elsewhere."""

    async def release(self, bundle: str) -> None:
        """Release a bundle's reservation, once no actor is in it. An unknown name is fine."""

    def reserved(self, bundle: str) -> bool: ...

    def nodes(self) -> Sequence[Node]: ...

    def events(self) -> AsyncIterator[RuntimeEvent]: ...

    async def close(self) -> None:
        """Stop every actor and process that this runtime started; bounded."""
