"""Any environment with Gymnasium's interface as a conversation: observations as text, actions parsed from text.

    environment: rollart.adapters.envs.gymnasium:GymnasiumText
    environment_args: {id: FrozenLake-v1, make_args: {is_slippery: false}, actions: [left, down, right, up]}

`id` is a registered name (`package:Name-v0` imports the package first). Instead, `make` is the import path of a class
or factory, for unregistered environments; these include text environments with GEM's `reset() -> (text, info)` and
`step(text) -> (text, reward, terminated, truncated, info)`.

A renderer is any function of an observation that returns text; a parser is any function of the policy's text that
returns an action, and raises ValueError for a text that is not an action. Calls are synchronous and run off the loop,
on one daemon thread per episode, so that a call that hangs blocks no other episode.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import queue
import random
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from rollart.adapters.envs.lookup import attribute_at
from rollart.adapters.envs.split import held_out_item, held_out_seed
from rollart.errors import did_you_mean
from rollart.model import Observation, Step

ANSI = "ansi"
"""`render: ansi` shows the text that the environment renders itself."""

_COLOUR = re.compile(r"(?:\x1b\[[0-9;]*m)+([^\x1b]*)(?:\x1b\[0?m)+")

_DRAWS = 200
"""Resets in search of an episode on the seed's side of the split: one in eight is held out, so 200 fail by chance once
in 10^11."""


class GymnasiumText:
    """One episode of a Gymnasium environment as text. Implements `rollart.ports.Environment`.

    Discrete actions are words: `actions`, one name per action, or else their numbers. With `restrict` decoding is
    limited to them (each must be one token of the policy's vocabulary), minus any that the environment's own
    `action_mask` forbids. A Text space takes the policy's text; every other space needs `parse`, a function of the text
    that raises ValueError for an invalid action. An invalid action is a lost turn: it pays `invalid_reward`, shows
    `invalid_text` (or else the last observation again) and does not step the environment. `render` is a function of the
    observation, or `ansi` for the environment's own rendering; without it text and small numeric spaces are written
    out.

    The episode ends when the environment terminates or truncates. `success` is True if its rewards sum to at least
    `success_at`; without `success_at` it is the success flag of the environment's info. The last step's metadata has
    `observations`, `env_rewards`, `success`, `truncated`, and `info`. With `held_out: observations` seeds for
    evaluation show first observations that no training seed shows; with `seeds` they are only other seeds of the same
    environment.

    Calls run on a thread of the episode's own, so that a slow step blocks no other episode; `threaded: false` makes
    them on the loop, for environments whose step takes microseconds. Exceptions of the environment propagate to the
    caller.
    """

    def __init__(
        self,
        id: str | None = None,
        *,
        make: str | Callable[..., Any] | None = None,
        make_args: Mapping[str, Any] | None = None,
        actions: Sequence[str] | None = None,
        restrict: bool = True,
        parse: str | ActionParser | None = None,
        render: str | SpaceRenderer | None = None,
        digits: int = 3,
        preamble: str = "",
        invalid_text: str | None = None,
        invalid_reward: float = 0.0,
        success_at: float | None = None,
        held_out: str = "seeds",
        max_tokens: int | None = None,
        threaded: bool = True,
    ) -> None:
        if (id is None) == (make is None):
            raise ValueError("give either `id`, a registered name, or `make`, the import path of a class")
        if held_out not in ("seeds", "observations"):
            raise ValueError(f"held_out is {held_out!r} (rule: seeds or observations)")
        self._name = id or str(make)
        self._make = functools.partial(_make_environment, id, make, dict(make_args or {}), render)
        observed, action_space, self._max_turns = _spaces(self._make)
        self._renderer: SpaceRenderer | None = None
        """None: the environment renders its observations itself."""
        if isinstance(render, str):
            self._renderer = None if render == ANSI else attribute_at(render, "render")
        else:
            self._renderer = render or (str if observed is None else default_renderer(observed, digits=digits))
        discrete = action_space is not None and space_kind(action_space) == "Discrete"
        if actions is not None and not discrete:
            raise ValueError(f"{self._name} has no Discrete actions to name, but {action_space}")
        words = action_words(action_space, actions) if discrete and parse is None else None
        self._legal = words if restrict else None
        parser = attribute_at(parse, "parse") if isinstance(parse, str) else parse
        self._parse: ActionParser = parser or (str if action_space is None else default_parser(action_space, words))
        self._preamble = preamble
        self._invalid_text, self._invalid_reward = invalid_text, float(invalid_reward)
        self._success_at, self._max_tokens = success_at, max_tokens
        self._by_observation = held_out == "observations"
        self._thread = CallThread(f"environment {self._name}") if threaded else None
        self._env: Any = None
        self._last = ""
        self._mask: Any = None
        self._observations: list[str] = []
        self._rewards: list[float] = []

    @property
    def quick(self) -> bool:
        """True without a thread of its own: a call then returns before anything else runs on the loop."""
        return self._thread is None

    async def reset(self, seed: int) -> Observation:
        if self._env is None:
            self._env = await self._call(self._make)
        shown, info = await self._call(self._first_observation, seed)
        self._last = f"{self._preamble}{shown}"
        self._mask = info.get("action_mask")
        self._observations, self._rewards = [self._last], []
        return self._to_observation(self._last)

    async def step(self, action: str) -> Step:
        if self._env is None:
            raise RuntimeError("step before reset")
        try:
            chosen = self._parse(action)
        except ValueError:
            text = self._last if self._invalid_text is None else self._invalid_text
            out_of_turns = self._max_turns is not None and len(self._rewards) + 1 >= self._max_turns
            return self._to_step(text, self._invalid_reward, False, out_of_turns, {})
        answer = await self._call(self._env.step, chosen)
        if not isinstance(answer, tuple) or len(answer) != 5:
            raise TypeError(
                f"{self._name} answered a step with {_shape(answer)} (rule: observation, reward, terminated, "
                "truncated, info)"
            )
        observed, reward, terminated, truncated, info = answer
        self._last = str(await self._call(self._text, observed))
        self._mask = info.get("action_mask")
        return self._to_step(self._last, float(reward), bool(terminated), bool(truncated), info)

    async def close(self) -> None:
        """Does not wait for a call that hangs: the environment is closed when that call returns, if it does."""
        env, self._env = self._env, None
        last = None if env is None else getattr(env, "close", None)
        if self._thread is None:
            if last is not None:
                last()
            return
        if last is not None and not self._thread.busy:
            await self._thread.call(last)
            last = None
        self._thread.end(last)

    def _to_step(self, text: str, reward: float, terminated: bool, truncated: bool, info: Mapping[str, Any]) -> Step:
        self._observations.append(text)
        self._rewards.append(reward)
        if not (terminated or truncated):
            return Step(self._to_observation(text), reward)
        success = self._success(info)
        metadata = {
            "observations": self._observations,
            "env_rewards": self._rewards,
            "success": success,
            "truncated": truncated and not terminated,
            "info": {name: value for name, value in info.items() if isinstance(value, str | int | float | bool)},
        }
        return Step(Observation(text), reward, done=True, success=success, metadata=metadata)

    def _success(self, info: Mapping[str, Any]) -> bool | None:
        if self._success_at is not None:
            return sum(self._rewards) >= self._success_at
        for name in ("success", "is_success"):
            if name in info:
                return bool(info[name])
        return None

    def _to_observation(self, text: str) -> Observation:
        legal = self._legal
        if legal is not None and self._mask is not None and len(self._mask) == len(legal):
            legal = tuple(word for word, allowed in zip(legal, self._mask, strict=True) if allowed) or legal
        return Observation(text, actions=legal, max_tokens=1 if legal is not None else self._max_tokens)

    def _first_observation(self, seed: int) -> tuple[str, Mapping[str, Any]]:
        """The first observation of a seed's episode, as text, and its info."""
        if not self._by_observation:
            return self._reset_environment(seed)
        rng, wanted = random.Random(seed), held_out_seed(seed)
        for _ in range(_DRAWS):
            text, info = self._reset_environment(rng.getrandbits(31))
            if held_out_item(text) is wanted:
                return text, info
        side = "held-out" if wanted else "training"
        raise ValueError(
            f"no {side} first observation of {self._name} in {_DRAWS} resets: they hardly vary (held_out: seeds)"
        )

    def _reset_environment(self, seed: int) -> tuple[str, Mapping[str, Any]]:
        answer = self._env.reset(seed=seed)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise TypeError(f"{self._name} answered a reset with {_shape(answer)} (rule: observation, info)")
        return self._text(answer[0]), answer[1]

    def _text(self, observed: Any) -> str:
        text: object = self._env.render() if self._renderer is None else self._renderer(observed)
        if not isinstance(text, str):
            raise TypeError(f"the rendered observation of {self._name} is {type(text).__name__}, not str")
        return _COLOUR.sub(r"[\1]", text)

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args) if self._thread is None else await self._thread.call(function, *args)


def _make_environment(
    id: str | None, make: str | Callable[..., Any] | None, arguments: Mapping[str, Any], render: Any
) -> Any:
    """A fresh environment. ValueError for an unknown name, ImportError if a package that it needs is missing."""
    if render == ANSI:
        arguments = {"render_mode": ANSI, **arguments}
    if make is not None:
        factory = attribute_at(make, "make") if isinstance(make, str) else make
        return factory(**arguments)
    import gymnasium

    try:
        return gymnasium.make(id, **{"disable_env_checker": True, **arguments})
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        raise ImportError(f"{id}: {error}") from None
    except gymnasium.error.UnregisteredEnv as error:
        near = did_you_mean(str(id), gymnasium.registry)
        raise ValueError(f"Gymnasium has no {id!r}{near or f' ({error})'}") from None
    except gymnasium.error.Error as error:
        raise ValueError(f"{id}: {error}") from None


_SPACES: dict[str, tuple[Any, Any, int | None]] = {}


def _spaces(make: functools.partial[Any]) -> tuple[Any, Any, int | None]:
    """Observation space, action space and the step that truncates, from an environment that is made for this and
    closed; once per process, since a run makes hundreds of the same. None for each that the environment does not
    declare."""
    key = json.dumps(make.args, sort_keys=True, default=repr)
    if key not in _SPACES:
        env = make()
        try:
            turns = getattr(getattr(env, "spec", None), "max_episode_steps", None)
            _SPACES[key] = (getattr(env, "observation_space", None), getattr(env, "action_space", None), turns)
        finally:
            getattr(env, "close", lambda: None)()
    return _SPACES[key]


def _shape(answer: Any) -> str:
    return f"{len(answer)} values" if isinstance(answer, tuple) else type(answer).__name__


SpaceRenderer = Callable[[Any], str]

ActionParser = Callable[[str], Any]

MOST_NUMBERS = 64
"""Maximum entries of an array that is rendered as numbers; an image or a longer vector needs a renderer of its own."""


def space_kind(space: Any) -> str:
    """The space's class by name, e.g. `Discrete`. By name, since Gymnasium is imported only when it is used."""
    names = [c.__name__ for c in type(space).__mro__]
    known = ("Discrete", "MultiDiscrete", "MultiBinary", "Box", "Text", "Tuple", "Dict", "Sequence", "Graph", "OneOf")
    return next((name for name in names if name in known), names[0])


def default_renderer(space: Any, *, digits: int = 3) -> SpaceRenderer:
    """The default renderer of a space: text as it is, numbers separated by spaces, parts of a tuple or a dict by their
    names. ValueError for a space without a readable default."""
    kind = space_kind(space)
    if kind == "Text":
        return str
    if kind == "Discrete":
        return lambda value: str(int(value))
    if kind in ("MultiDiscrete", "MultiBinary", "Box"):
        size = math.prod(space.shape)
        if size > MOST_NUMBERS:
            raise ValueError(
                f"observations are {space}: {size} numbers (rule: at most {MOST_NUMBERS}, or give `render`)"
            )
        return lambda value: _numbers(value, digits)
    if kind == "Tuple":
        parts = [default_renderer(part, digits=digits) for part in space.spaces]
        return lambda value: " ".join(f"{i}:{part(v)}" for i, (part, v) in enumerate(zip(parts, value, strict=True)))
    if kind == "Dict":
        named = {name: default_renderer(part, digits=digits) for name, part in space.spaces.items()}
        return lambda value: " ".join(f"{name}:{part(value[name])}" for name, part in named.items())
    raise ValueError(f"observations are {space} (rule: such a space needs a `render`, package.module:function)")


def action_words(space: Any, names: Sequence[str] | None) -> tuple[str, ...]:
    """One word per action of a Discrete space: the names, or else Gymnasium's own numbers."""
    count = int(space.n)
    if names is None:
        first = int(getattr(space, "start", 0))
        return tuple(str(first + i) for i in range(count))
    if len(names) != count:
        raise ValueError(f"actions has {len(names)} names for {count} actions (rule: one for each, in their order)")
    words = tuple(str(name) for name in names)
    if len(set(words)) < count or not all(word and word == word.strip() for word in words):
        raise ValueError(f"actions is {list(words)} (rule: different words, none empty or padded)")
    return words


def default_parser(space: Any, words: Sequence[str] | None) -> ActionParser:
    """The default parser of a space: one of `words` for a Discrete space, any text for a Text space. ValueError for
    other spaces."""
    kind = space_kind(space)
    if kind == "Discrete":
        assert words is not None
        first = int(getattr(space, "start", 0))
        numbers = {word: first + i for i, word in enumerate(words)}

        def number(text: str) -> int:
            if text.strip() not in numbers:
                raise ValueError(f"{text.strip()!r} is no action")
            return numbers[text.strip()]

        return number
    if kind == "Text":

        def contained(text: str) -> str:
            if not space.contains(text.strip()):
                raise ValueError(f"the text is no element of {space}")
            return text.strip()

        return contained
    raise ValueError(f"actions are {space} (rule: such a space needs a `parse`, package.module:function)")


def _numbers(value: Any, digits: int) -> str:
    import numpy

    array = numpy.asarray(value)
    if array.dtype.kind in "iub":
        return " ".join(str(int(number)) for number in array.ravel().tolist())
    return " ".join(f"{number:.{digits}g}" for number in array.ravel().tolist())


T = TypeVar("T")


class CallThread:
    """Owns one thread, started by the first call, which makes its calls in order. Used by one episode's task.

    A caller waits for its own call; a cancelled caller abandons the call, whose result is then dropped. The thread is a
    daemon and is never joined: a call that never returns costs a thread, and delays neither the loop nor the end of the
    program.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._latest: Future[Any] | None = None

    @property
    def busy(self) -> bool:
        """True if an abandoned call has not returned."""
        return self._latest is not None and not self._latest.done()

    async def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """The return value or exception of the function, called on the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        return await asyncio.wrap_future(self._put(functools.partial(function, *args, **kwargs)))

    def end(self, last: Callable[[], object] | None = None) -> None:
        """Accept no more calls: the thread ends after its pending calls and after `last`, whose exceptions are
        ignored."""
        if self._thread is not None:
            if last is not None:
                self._put(last)
            self._calls.put(None)
            self._thread = None

    def _put(self, function: Callable[[], T]) -> Future[T]:
        answer: Future[T] = Future()
        answer.set_running_or_notify_cancel()  # so that the call is made, also if its caller is cancelled
        self._latest = answer
        self._calls.put((answer, function))
        return answer

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            answer, function = call
            try:
                answer.set_result(function())
            except BaseException as raised:
                error: BaseException = raised
                if not isinstance(raised, Exception) or isinstance(raised, StopIteration):  # a future carries neither
                    error = RuntimeError(f"it raised {type(raised).__name__}: {raised}")
                answer.set_exception(error)
