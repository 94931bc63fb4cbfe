"""One trajectory: an episode of turns between the policy and an environment, as a straight sequence of awaits.

The episode of an agent program (its requests, and its turns as text) takes the same form. Under lockstep turns,
the batch-level schedule, every live trajectory waits for the slowest environment of the turn. `TrajectoryAborted` ends
a trajectory without a sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple, Protocol

from placement.problem import kept_for_next_turn
from rollart.control.domain import Domain, derive_seed
from rollart.errors import EnvironmentFault, LeaseExpired, RollartError, one_line
from rollart.leases import Expiry, Leases
from rollart.model import (
    AbortReason,
    Completion,
    CompletionChunk,
    EngineId,
    FinishReason,
    GroupId,
    Observation,
    Purpose,
    Sampling,
    Segment,
    SegmentKind,
    Step,
    Trajectory,
    TrajectoryId,
    Turn,
)
from rollart.policy.host_slots import PlacementRequest
from rollart.policy.workload import WorkloadMeter
from rollart.ports import ChatPrompts, Environment, HarnessEpisode, HarnessFactory, HarnessRequest, Tokenizer
from rollart.serving.gateway import Gateway
from rollart.supervise.environment_hosts import host_of, prepare_environment
from rollart.user_code import UserCodeGuard, checked_observation, checked_step, require_awaitable


class TrajectoryAborted(Exception):
    """A trajectory ends without a sample, for a reason that the ledger records. Data, not a crash.

    `host`: the environment host at fault, if any; `incident`: the host failure that ended it, which several
    trajectories may share."""

    def __init__(self, reason: AbortReason, detail: str = "", *, host: str = "", incident: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail
        self.host = host
        self.incident = incident


def environment_fault(what: str, error: Exception, environment: Environment | None) -> TrajectoryAborted:
    """An environment's error as an abort whose detail names the host and the command that shows its log."""
    own = host_of(environment)
    host, incident = own, ""
    if isinstance(error, LeaseExpired):
        detail = f"{error.cause} on {own}" if own else error.cause
    elif isinstance(error, EnvironmentFault):
        host, incident = error.host, error.incident
        detail = f"environment {what} on {host}: {error.what}"
    else:
        detail = f"environment {what} raised {one_line(error, 500)}"
    remedy = f" (rollart logs --role {own})" if own else ""
    return TrajectoryAborted(AbortReason.INFRA_FAULT, detail + remedy, host=host, incident=incident)


def harness_sampling(domain: Domain, wanted: HarnessRequest, seed: int, room: int, *, greedy: bool) -> Sampling:
    """The domain's sampling. The temperature that the program requests is ignored, since the trainer assumes the
    domain's. `room`: tokens left in the context; values below 1 count as 1."""
    most = min(domain.max_tokens, wanted.max_tokens or domain.max_tokens, max(room, 1))
    sampling = domain.sampling(seed=seed, max_tokens=most, allowed=None, greedy=greedy)
    stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *wanted.stop_token_ids)))
    return dataclasses.replace(sampling, stop_token_ids=stops)


def ended_at_limit(completion: Completion, sampling: Sampling, wanted: int | None) -> bool:
    """True if the answer was cut at the domain's `max_tokens` or at the context, rather than at a limit that the
    environment or the program gave it (`wanted`)."""
    return completion.finish is FinishReason.LENGTH and (wanted is None or sampling.max_tokens < wanted)


def harness_turns(
    segments: Sequence[Segment], tokenizer: Tokenizer, stops: Sequence[int], reward: float
) -> tuple[Turn, ...]:
    """The turns as text, for rewards and for people. The last turn has the program's own reward."""
    shown: dict[int, list[int]] = {}
    said: dict[int, list[int]] = {}
    for segment in segments:
        (said if segment.kind is SegmentKind.ACTION else shown).setdefault(segment.turn, []).extend(segment.token_ids)
    turns = []
    for index, ids in shown.items():
        answer = said.get(index, [])
        text = tokenizer.decode(answer[:-1] if answer and answer[-1] in stops else answer)
        tokens = tuple(map(tokenizer.token, answer))
        turns.append(Turn(index, tokenizer.decode(ids), text, tokens, 0.0))
    if turns:
        turns[-1] = dataclasses.replace(turns[-1], env_reward=reward)
    return tuple(turns)


@contextlib.contextmanager
def _harness_faults() -> Iterator[None]:
    """Errors of an agent program as aborts of its trajectory."""
    try:
        yield
    except Exception as error:
        detail = error.cause if isinstance(error, LeaseExpired) else f"harness raised {one_line(error, 500)}"
        raise TrajectoryAborted(AbortReason.INFRA_FAULT, detail) from None


async def await_unless_disconnected(
    gone: asyncio.Future[None] | None, answer: Coroutine[Any, Any, Completion]
) -> Completion | None:
    """Await the completion. If the client disconnects before (`gone`), cancel the generation and return None. A
    `TrajectoryAborted` of the generation is raised."""
    if gone is None:
        return await answer
    found: list[Completion | TrajectoryAborted] = []

    async def wait() -> None:
        try:
            found.append(await answer)
        except TrajectoryAborted as error:
            found.append(error)

    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(wait(), name="an answer")
        gone.add_done_callback(lambda _: waiting.cancel())
    if found and isinstance(found[0], TrajectoryAborted):
        raise found[0]
    return found[0] if found else None  # type: ignore[return-value]


class FreeRunning:
    """Trajectory-level rollout: no trajectory waits for another."""

    def join(self) -> None:
        return None

    def leave(self) -> None:
        return None

    async def turn(self) -> None:
        return None


class TurnBarrier(FreeRunning):
    """Owns one generation of waiters. `turn` waits until every member that joined has arrived or left; the last to
    arrive, or a leaver, unblocks them. Invariant: 0 <= arrived <= members.
    """

    def __init__(self) -> None:
        self._members = 0
        self._arrived = 0
        self._gate = asyncio.Event()

    def join(self) -> None:
        self._members += 1

    def leave(self) -> None:
        self._members -= 1
        self._open_if_all()

    async def turn(self) -> None:
        self._arrived += 1
        gate = self._gate
        self._open_if_all()
        try:
            await gate.wait()
        except asyncio.CancelledError:
            if not gate.is_set():
                self._arrived -= 1
            raise

    def _open_if_all(self) -> None:
        if self._arrived and self._arrived >= self._members:
            self._gate.set()
            self._gate = asyncio.Event()
            self._arrived = 0


CHARACTERS_PER_TOKEN_LIMIT = 16
"""An observation with more characters than this times the context length is cut before it is encoded: a token has about
4 characters. The output of a tool may have many MB, and encoding it takes half a second of the controller's loop."""


class AttemptTrace:
    """Follows one attempt of a trajectory, on the loop. This one notes nothing, for runs that keep no trajectories."""

    __slots__ = ()

    def asked(self) -> None:
        """The trajectory asks for its next turn."""

    def routed(self, why: str, engine: EngineId, prefill: EngineId | None, running: int) -> None:
        """An attempt of the turn goes to `engine`, first to `prefill` if that is given; `running` turns run there."""

    def finished(self, trajectory: Trajectory) -> None:
        """The episode ended by itself."""

    def closed(self, tokenizer: Tokenizer) -> None:
        """The attempt ended, with any outcome. Called once, before its ledger row is written."""


UNTRACED = AttemptTrace()

_PROMPT, _ACTION, _OBSERVATION = SegmentKind.PROMPT, SegmentKind.ACTION, SegmentKind.OBSERVATION
_TRAIN = Purpose.TRAIN


@dataclass(frozen=True, slots=True)
class WaitLimits:
    """Longest waits of a trajectory for its environment and its reward, in seconds, and its longest context in tokens.

    `env_close_s` also bounds a shutdown, in which every live trajectory closes its environment.
    """

    env_reset_s: float = 60.0
    env_step_s: float = 30.0
    env_close_s: float = 5.0
    reward_s: float = 60.0
    context_tokens: int = 4096


class ExpertHistory:
    """The experts that a trajectory's tokens ran through, from the first token of each context on: one context, or
    those of an agent program's branches. A token keeps the experts of its first computation."""

    def __init__(self) -> None:
        self._contexts: list[tuple[tuple[int, ...], tuple[bytes, ...]]] = []

    def known(self, token_ids: tuple[int, ...]) -> tuple[bytes, ...]:
        """The experts of the first tokens of a context, as far as they are known."""
        return max((experts[: _common(ids, token_ids)] for ids, experts in self._contexts), key=len, default=())

    def add(self, token_ids: tuple[int, ...], experts: tuple[bytes, ...]) -> None:
        """The experts of the first tokens of a context."""
        ids = token_ids[: len(experts)]
        self._contexts = [one for one in self._contexts if _common(one[0], ids) < len(one[0])]
        self._contexts.append((ids, experts))


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Length of the common prefix."""
    if other[: len(one)] == one:
        return len(one)
    return next(i for i, (a, b) in enumerate(zip(one, (*other, None), strict=False)) if a != b)


@dataclass(slots=True)
class TrajectoryState:
    """The state of a running trajectory, for the staleness check and the ledger."""

    id: TrajectoryId
    group: GroupId
    domain: Domain
    seed: int
    purpose: Purpose
    run_seed: int
    started: float
    sampled: bool = False
    """True for an evaluation at the domain's temperature; it is greedy otherwise."""
    slot_request: PlacementRequest = field(default_factory=PlacementRequest)
    """For a slot on an environment host."""
    joined: bool = False
    """True once it takes part in lockstep turns."""
    v0: int | None = None
    sent: int | None = None
    """Policy version under which its first turn was sent to an engine with a free slot. It stands in for `v0` until
    the completion reports its own version."""
    tokens: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    engine_seconds: float = 0.0
    reset_seconds: float = 0.0
    env_seconds: float = 0.0
    reward_seconds: float | None = None
    prompt_tokens: int = 0
    action_tokens: int = 0
    first_tokens: int = 0
    length: int = 0
    """Tokens of its whole context until now."""
    abort: AbortReason | None = None
    truncated: bool = False
    experts: ExpertHistory | None = None
    """None: the trainer's routers choose, or the model has none."""
    trace: AttemptTrace = UNTRACED

    @property
    def greedy(self) -> bool:
        return self.purpose is Purpose.EVAL and not self.sampled

    @property
    def begun(self) -> int | None:
        """The policy version that its staleness is measured from; None as long as no token can have been sampled."""
        return self.sent if self.v0 is None else self.v0

    def note_sent(self, version: int) -> None:
        """Record the version of a turn sent to an engine that generates it at once. It replaces the version of a failed
        attempt, which left no token."""
        self.sent = version

    def spend(self, seconds: float) -> None:
        """Add engine time."""
        self.engine_seconds += seconds


@dataclass(slots=True)
class PrefetchedEnvironment:
    """An environment whose reset began for a trajectory that does not run yet. Its task owns it until `take`."""

    over: asyncio.Future[Observation]
    """The first observation, or the error of the reset."""
    environment: Environment | None = None
    """The environment; None until the task has created it."""
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the reset itself began, or a step before it failed."""
    task: asyncio.Task[None] | None = None
    seconds: float = 0.0
    """Duration of the reset, once `observed` has returned."""

    async def observed(self) -> Observation:
        """The first observation, for the trajectory that took the environment. Raises the error of the reset; a
        cancellation ends the reset first, so that the environment is idle when it is closed."""
        try:
            return await asyncio.shield(self.over)
        except asyncio.CancelledError:
            await self._end()
            raise

    async def prepared(self) -> None:
        """Wait until the host is ready for the reset or failed to be; bounded by the lease of the reset's task."""
        try:
            await self.ready.wait()
        except asyncio.CancelledError:
            await self._end()
            raise

    async def _end(self) -> None:
        assert self.task is not None
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


class EnvironmentSource(Protocol):
    """Resets environments before their trajectories start. Synchronous."""

    def take(self, domain: str, trajectory: TrajectoryId) -> PrefetchedEnvironment | None:
        """The trajectory's environment, which the caller now owns and closes; None if there is none."""
        ...

    def reset(self, domain: str, seconds: float) -> None:
        """Record the duration of a reset."""


class _Prompt(NamedTuple):
    """An encoded observation. `length`: the tokens that its ids stand for."""

    observation: Observation
    token_ids: tuple[int, ...]
    length: int


@dataclass(eq=False)
class TrajectoryRunner:
    """Runs episodes. Any number of tasks may call `run` at once; each owns its `TrajectoryState` and its environment.

    A run waits for the environment, for the gateway and, in the batch schedule, for the turn barrier. Every wait is
    under a lease. `stale` is called at every turn boundary (I2). `measure`: number of tokens that a sequence of ids
    stands for: its length, except in a simulated world, where one id may stand for many tokens. `prefetch`:
    environments that are reset before their trajectories start. `experts`: trajectories bring the experts that their
    engine chose. `trace`: makes the trace of an attempt that begins.
    """

    gateway: Gateway
    tokenizer: Tokenizer
    leases: Leases
    _: KW_ONLY
    limits: WaitLimits
    stale: Callable[[int | None], bool]
    barrier: FreeRunning
    meter: WorkloadMeter | None = None
    """Collects the workload of finished training trajectories; None if no planner needs it."""
    measure: Callable[[Sequence[int]], int] = len
    prefetch: EnvironmentSource | None = None
    experts: bool = False
    trace: Callable[[TrajectoryState], AttemptTrace] = lambda _: UNTRACED

    async def run(self, state: TrajectoryState) -> Trajectory:
        """Run the episode. Raises `TrajectoryAborted`; a failed or stalled environment is an infrastructure fault."""
        if self.experts and state.purpose is _TRAIN:
            state.experts = ExpertHistory()
        state.trace = self.trace(state)
        if state.domain.harness is not None:
            return await self._harnessed(state, state.domain.harness)
        ahead = None if self.prefetch is None else self.prefetch.take(state.domain.name, state.id)
        environment = (ahead and ahead.environment) or _make_environment(state)
        try:
            prompt = self._prompt(state, await self._reset(state, environment, ahead))
            for turn in range(state.domain.max_turns):
                completion = await self._act(state, prompt, turn)
                self._abort_if_stale(state)
                step = await self._step(state, environment, prompt, completion, turn)
                if step.done:
                    break
                prompt = self._prompt(state, step.observation, completion.token_ids)
                if state.length + prompt.length >= self.limits.context_tokens:  # no room to answer
                    state.truncated = True
                    break
                await self.barrier.turn()
                self._abort_if_stale(state)
            return self._finished(state, step)
        finally:
            if state.joined:
                self.barrier.leave()
            await self._close(state, environment)

    def _prompt(self, state: TrajectoryState, observation: Observation, answer: Sequence[int] = ()) -> _Prompt:
        """Encode an observation that follows the tokens of `answer`. Of a text far longer than the context only a
        prefix is encoded, provided that the prefix already fills the context."""
        text, most = observation.text, CHARACTERS_PER_TOKEN_LIMIT * self.limits.context_tokens
        if len(text) > most:
            token_ids = self._encode(state.domain.chat, text[:most], answer)
            if (length := self.measure(token_ids)) >= self.limits.context_tokens:
                return _Prompt(observation, token_ids, length)
        token_ids = self._encode(state.domain.chat, text, answer)
        return _Prompt(observation, token_ids, self.measure(token_ids))

    def _encode(self, chat: ChatPrompts | None, text: str, answer: Sequence[int]) -> tuple[int, ...]:
        if chat is None:
            return self.tokenizer.encode(text)
        try:
            return chat.following(text, answer) if answer else chat.opening(text)
        except Exception as error:  # a template's own: it refuses a message
            raise TrajectoryAborted(AbortReason.INFRA_FAULT, f"the chat template raised {one_line(error)}") from None

    async def _act(self, state: TrajectoryState, prompt: _Prompt, turn: int) -> Completion:
        """Append the prompt to the context and generate the action."""
        observation = prompt.observation
        state.segments.append(Segment(_OBSERVATION if turn else _PROMPT, turn, prompt.token_ids))
        state.tokens.extend(prompt.token_ids)
        state.length += prompt.length
        if turn == 0:
            state.first_tokens = state.length
        room = self.limits.context_tokens - state.length
        if room < 1:
            raise TrajectoryAborted(
                AbortReason.INFRA_FAULT,
                f"the prompt of {state.length} tokens fills the context of {self.limits.context_tokens} "
                "(model.context)",
            )
        allowed = None if observation.actions is None else self._legal(observation.actions)
        sampling = state.domain.sampling(
            seed=derive_seed(state.run_seed, state.id, turn),
            max_tokens=min(observation.max_tokens or state.domain.max_tokens, room),
            allowed=allowed,
            greedy=state.greedy,
        )
        last = not kept_for_next_turn(turn + 1, state.domain.max_turns)
        completion = await self._generate(state, tuple(state.tokens), sampling, state.length, last=last)
        for span in completion.spans:
            at = slice(span.start, span.end)
            state.segments.append(
                Segment(_ACTION, turn, completion.token_ids[at], span.version, completion.logprobs[at], allowed)
            )
        state.truncated = allowed is None and ended_at_limit(completion, sampling, observation.max_tokens)
        state.tokens.extend(completion.token_ids)
        state.action_tokens += completion.sampled
        state.length += completion.sampled
        return completion

    async def _generate(
        self,
        state: TrajectoryState,
        token_ids: tuple[int, ...],
        sampling: Sampling,
        length: int | None,
        *,
        last: bool,
        on_chunk: Callable[[CompletionChunk], None] | None = None,
    ) -> Completion:
        known = None if state.experts is None else state.experts.known(token_ids)
        state.trace.asked()
        try:
            completion = await self.gateway.generate(
                state.id,
                token_ids,
                sampling,
                spend=state.spend,
                sent=state.note_sent,
                routed=state.trace.routed,
                domain=state.domain.name,
                length=length,
                prompt=str(state.seed),
                last=last,
                on_chunk=on_chunk,
                experts_from=None if known is None else len(known),
                adapter=state.domain.adapter,
            )
        except LeaseExpired as error:
            raise TrajectoryAborted(AbortReason.INFRA_FAULT, error.cause) from None
        except RollartError as error:
            raise TrajectoryAborted(AbortReason.INFRA_FAULT, str(error)) from None
        state.prompt_tokens += completion.prompt_tokens - completion.cached_tokens
        if completion.finish is FinishReason.ABORT or not completion.token_ids:
            raise TrajectoryAborted(state.abort or AbortReason.INFRA_FAULT, "the engine ended the generation")
        if state.v0 is None:
            state.v0 = completion.spans[0].version
        if state.experts is not None and known is not None:
            state.experts.add(token_ids + completion.token_ids, known + completion.experts)
        return completion

    async def _harnessed(self, state: TrajectoryState, begin: HarnessFactory) -> Trajectory:
        """Run an agent program's episode: serve its requests until it ends or its turns are used up. The effect of a
        completion inside the program is unknown, so staleness is checked before each completion is handed to it."""
        self.barrier.join()
        episode: HarnessEpisode | None = None
        try:
            with _harness_faults():
                episode = begin(state.id, state.seed)
            asked = 0
            while (wanted := await self._wanted(state, episode)) is not None:
                self._abort_if_stale(state)
                room = self.limits.context_tokens - len(wanted.token_ids)
                sampling = harness_sampling(
                    state.domain,
                    wanted,
                    derive_seed(state.run_seed, state.id, asked),
                    room,
                    greedy=state.greedy,
                )
                last = not kept_for_next_turn(asked + 1, state.domain.max_turns)
                answer = self._generate(state, wanted.token_ids, sampling, None, last=last, on_chunk=wanted.on_chunk)
                completion = await await_unless_disconnected(wanted.gone, answer)
                self._abort_if_stale(state)
                asked += 1
                if asked == state.domain.max_turns:
                    episode.exhaust()
                if completion is not None:
                    state.truncated = ended_at_limit(completion, sampling, wanted.max_tokens)
                    episode.answer(completion)
                await self.barrier.turn()
            with _harness_faults():
                step = checked_step(episode.ending())
            self._take_over(state, episode.segments(), step)
            return self._finished(state, step)
        finally:
            self.barrier.leave()
            await self._close(state, episode)

    async def _wanted(self, state: TrajectoryState, episode: HarnessEpisode) -> HarnessRequest | None:
        what = "a request of its harness"
        with _harness_faults(), self.leases.hold(state.id, what, self.limits.env_step_s, Expiry.GAP_FILL) as lease:
            wanted = await episode.wanted()
        state.env_seconds += asyncio.get_running_loop().time() - lease.granted
        return wanted

    def _take_over(self, state: TrajectoryState, segments: Sequence[Segment], step: Step) -> None:
        """Make the segments of the trained branch those of the trajectory."""
        state.segments[:] = segments
        state.turns[:] = harness_turns(segments, self.tokenizer, state.domain.stop_token_ids, step.reward)
        state.length = sum(len(s.token_ids) for s in segments)
        state.first_tokens = len(segments[0].token_ids) if segments else 0
        state.action_tokens = sum(len(s.token_ids) for s in segments if s.kind is _ACTION)
        if not state.action_tokens:
            raise TrajectoryAborted(AbortReason.INFRA_FAULT, "its harness ended without an answer of the policy")

    def _legal(self, actions: Sequence[str]) -> tuple[int, ...]:
        try:
            return tuple(self.tokenizer.token_id(action) for action in actions)
        except (TypeError, ValueError) as error:
            raise TrajectoryAborted(AbortReason.INFRA_FAULT, f"environment's legal actions: {error}") from None

    def _abort_if_stale(self, state: TrajectoryState) -> None:
        """Enforce I2 between two turns, and before a completion takes effect."""
        if state.purpose is _TRAIN and self.stale(state.v0):
            raise TrajectoryAborted(AbortReason.STALE)

    def _finished(self, state: TrajectoryState, step: Step) -> Trajectory:
        assert state.v0 is not None, "a finished trajectory has sampled at least one token"
        self.gateway.turns.finished(state.id)
        if self.meter is not None and state.purpose is Purpose.TRAIN:
            self.meter.add(
                state.domain.name,
                turns=len(state.turns),
                first_tokens=state.first_tokens,
                new_tokens=state.length - state.first_tokens - state.action_tokens,
                output_tokens=state.action_tokens,
                wait_s=state.env_seconds,
            )
        trajectory = Trajectory(
            id=state.id,
            group=state.group,
            domain=state.domain.name,
            seed=state.seed,
            purpose=state.purpose,
            v0=state.v0,
            segments=tuple(state.segments),
            turns=tuple(state.turns),
            success=step.success,
            final_observation=step.observation.text,
            metadata=step.metadata,
            engine_seconds=state.engine_seconds,
            truncated=state.truncated,
            experts=()
            if state.experts is None
            else state.experts.known(tuple(t for s in state.segments for t in s.token_ids)),
        )
        state.trace.finished(trajectory)
        return trajectory

    async def _reset(
        self, state: TrajectoryState, environment: Environment, ahead: PrefetchedEnvironment | None
    ) -> Observation:
        """The first observation, from a reset made here or from a prefetched environment."""
        try:
            await (
                prepare_environment(environment, state.seed, state.id, state.slot_request)
                if ahead is None
                else ahead.prepared()
            )
            self.barrier.join()  # not before: waiting for a host slot must not delay running trajectories
            state.joined = True
            with (
                self.leases.hold(
                    state.id, "the reset of its environment", self.limits.env_reset_s, Expiry.GAP_FILL
                ) as lease,
                UserCodeGuard(),
            ):
                if ahead is not None:
                    observation = await ahead.observed()
                    state.reset_seconds = ahead.seconds
                    return observation
                observation = checked_observation(await require_awaitable(environment.reset(state.seed), "reset"))
        except Exception as error:
            raise environment_fault("reset", error, environment) from None
        state.reset_seconds = asyncio.get_running_loop().time() - lease.granted
        if self.prefetch is not None and state.purpose is Purpose.TRAIN:
            self.prefetch.reset(state.domain.name, state.reset_seconds)
        return observation

    async def _step(
        self, state: TrajectoryState, environment: Environment, prompt: _Prompt, completion: Completion, turn: int
    ) -> Step:
        """Give the action to the environment."""
        action = completion.token_ids
        if completion.finish is FinishReason.STOP and action[-1] in state.domain.stop_token_ids:
            action = action[:-1]
        text = self.tokenizer.decode(action)
        try:
            with (
                self.leases.hold(
                    state.id, "a step of its environment", self.limits.env_step_s, Expiry.GAP_FILL
                ) as lease,
                UserCodeGuard(),
            ):
                step = checked_step(await require_awaitable(environment.step(text), "step"))
        except Exception as error:
            raise environment_fault("step", error, environment) from None
        state.env_seconds += asyncio.get_running_loop().time() - lease.granted
        tokens = tuple(map(self.tokenizer.token, completion.token_ids))
        state.turns.append(Turn(turn, prompt.observation.text, text, tokens, step.reward))
        return step

    async def _close(self, state: TrajectoryState, environment: Environment | HarnessEpisode | None) -> None:
        """Release the prefix KV and the environment of the episode. A close that stalls is recorded by its lease; a
        close that fails is ignored."""
        limit = self.limits.env_close_s
        state.trace.closed(self.tokenizer)
        try:
            with (
                contextlib.suppress(Exception),
                self.leases.hold(state.id, "the release of its prefix KV", limit, Expiry.GAP_FILL),
            ):
                await self.gateway.forget(state.id)
        finally:
            with (
                contextlib.suppress(Exception),
                self.leases.hold(state.id, "the close of its environment", limit, Expiry.GAP_FILL),
                UserCodeGuard(),
            ):
                if environment is not None:
                    await environment.close()


def _make_environment(state: TrajectoryState) -> Environment:
    try:
        with UserCodeGuard():
            return state.domain.environment()
    except Exception as error:
        raise environment_fault("factory", error, None) from None
