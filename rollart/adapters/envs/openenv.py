"""Environments behind an OpenEnv server, by its wire protocol: this side does not need the package `openenv`.

    environment: rollart.adapters.envs.openenv:OpenEnv
    environment_args: {url: "http://127.0.0.1:8000", action: guess}

One WebSocket per episode: the server makes an environment for a connection and drops it with the connection (`openenv`
0.10.0, `core/env_server/http_server.py`). Frames are JSON: `{"type": "reset", "data": {"seed", "episode_id", ...}}`,
`{"type": "step", "data": ACTION}`, `{"type": "state"}`, `{"type": "close"}`; responses are `observation` (with
`observation`, `reward`, `done`), `state`, or `error` with a code.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rollart.adapters.envs.openenv_wire import (
    InvalidAction,
    OpenEnvObservation,
    OpenEnvSession,
    SessionNotStarted,
    endpoints,
)
from rollart.adapters.envs.openenv_words import (
    ActionEncoder,
    ObservationRenderer,
    action_encoder,
    observation_renderer,
    sole_text_field,
)
from rollart.adapters.envs.split import held_out_seed
from rollart.errors import EnvironmentFault
from rollart.model import Observation, Step

__all__ = ["OpenEnv"]

_SESSIONS_BY_SERVER: Counter[str] = Counter()
"""Open sessions of this process by server: the next one goes to the server with the fewest."""

_NUMBERS = itertools.count()


class OpenEnv:
    """One episode on an OpenEnv server. Implements `rollart.ports.Environment`.

    `url` is a server, or several equivalent ones; an episode starts on the one with the fewest sessions of this
    process. A server that is full, unreachable or gone before its first response is skipped; if all are, the reset
    retries with growing pauses for `capacity_s`. A session is never resumed: the server drops its state, and so the
    episode, with its connection.

    The policy reads the observation's only text field, else the field that `text` names, or a `module:function` of the
    observation as a mapping; without either the observation is shown as JSON. `action` names the field that takes the
    policy's text (read from the server's schema if it has only one); `json` takes the text as the whole action; or a
    `module:function` from text to a mapping. An action that the server's own types refuse is a lost turn: it shows the
    last observation again and pays `invalid_reward`. `actions` are legal answers, if they are always the same;
    `actions_from` names the field of an observation that lists them.

    `reset_args` go with every reset, `held_out_args` also with those of held-out episodes (`{split: test}`). The token
    in the variable `token_env` is sent as a bearer token. Every failure of the server is an `EnvironmentFault` that
    names its host: an error, a closed socket, a malformed frame, or none within `reset_s` and `step_s`, which should be
    shorter than the run's leases.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        action: str | ActionEncoder | None = None,
        text: str | ObservationRenderer | None = None,
        actions: Sequence[str] | None = None,
        actions_from: str | None = None,
        invalid_reward: float = 0.0,
        success_at: float | None = None,
        reset_args: Mapping[str, Any] | None = None,
        held_out_args: Mapping[str, Any] | None = None,
        token_env: str | None = None,
        connect_s: float = 10.0,
        capacity_s: float = 30.0,
        reset_s: float = 55.0,
        step_s: float = 25.0,
        max_tokens: int | None = None,
        reuse: bool = False,
    ) -> None:
        self._urls = endpoints([url] if isinstance(url, str) else url)
        self._encode, self._show = action_encoder(action), observation_renderer(text)
        self._actions = None if actions is None else tuple(actions)
        self._actions_from, self._max_tokens = actions_from, max_tokens
        self._invalid_reward, self._success_at = float(invalid_reward), success_at
        self._reset_args, self._held_out_args = dict(reset_args or {}), dict(held_out_args or {})
        if token_env is not None and not os.environ.get(token_env):
            raise ValueError(f"token_env is {token_env!r}, and no variable of that name is set")
        self._headers = {} if token_env is None else {"Authorization": f"Bearer {os.environ[token_env]}"}
        self._connect_s, self._capacity_s, self._reset_s, self._step_s = connect_s, capacity_s, reset_s, step_s
        self.reusable = reuse
        """True if the session may be reset for another episode."""
        self._session: OpenEnvSession | None = None
        self._last: Observation | None = None
        self._observations: list[str] = []
        self._rewards: list[float] = []

    async def reset(self, seed: int) -> Observation:
        more = self._held_out_args if held_out_seed(seed) else {}
        name = f"{seed}-{os.getpid()}-{next(_NUMBERS)}"
        data = {"seed": seed, "episode_id": name, **self._reset_args, **more}
        if self._session is None:
            self._session, answer = await self._start_session(data, random.Random(seed))
        else:
            answer = await self._session.request("reset", data, self._reset_s)
        if self._encode is None:
            self._encode = action_encoder(
                sole_text_field(await self._session.schema(self._connect_s), self._session.host)
            )
        if answer.done:
            raise EnvironmentFault(self._session.host, "the episode was over before its first step")
        self._last = self._to_observation(answer.observation)
        self._observations, self._rewards = [self._last.text], []
        return self._last

    async def step(self, action: str) -> Step:
        if self._session is None or self._encode is None or self._last is None:
            raise RuntimeError("step before reset")
        try:
            data = self._encode(action)
            answer = await self._session.request("step", data, self._step_s, fields=self._encode.fields)
        except (ValueError, InvalidAction):
            self._observations.append(self._last.text)
            self._rewards.append(self._invalid_reward)
            return Step(self._last, self._invalid_reward)
        reward = 0.0 if answer.reward is None else float(answer.reward)
        self._last = self._to_observation(answer.observation)
        self._observations.append(self._last.text)
        self._rewards.append(reward)
        if not answer.done:
            return Step(self._last, reward)
        success = self._success(answer.observation, answer.metadata)
        metadata = {
            "observations": self._observations,
            "env_rewards": self._rewards,
            "success": success,
            "observation": answer.observation,
            "metadata": answer.metadata,
        }
        return Step(Observation(self._last.text), reward, done=True, success=success, metadata=metadata)

    async def state(self) -> Mapping[str, Any]:
        """The server's state of the episode: `episode_id`, `step_count`, and the fields that the environment adds."""
        if self._session is None:
            raise RuntimeError("state before reset")
        return await self._session.state(self._step_s)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            _SESSIONS_BY_SERVER[session.url] -= 1
            await session.close()

    async def _start_session(
        self, data: Mapping[str, Any], rng: random.Random
    ) -> tuple[OpenEnvSession, OpenEnvObservation]:
        """A session on a server with capacity, and its first response. `EnvironmentFault` if none starts within
        `capacity_s`."""
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + self._capacity_s, 0.05
        while True:
            last_error: SessionNotStarted | None = None
            for url in sorted(self._urls, key=lambda u: (_SESSIONS_BY_SERVER[u], self._urls.index(u))):
                try:
                    return await self._try_server(url, data)
                except SessionNotStarted as error:
                    last_error = error
            assert last_error is not None
            if loop.time() + pause >= until:
                raise EnvironmentFault(
                    last_error.host,
                    f"no episode was begun within {self._capacity_s:g} s on {len(self._urls)} servers; "
                    f"{last_error.detail}",
                )
            await asyncio.sleep(pause * rng.uniform(0.5, 1.0))
            pause = min(2.0, pause * 2)

    async def _try_server(self, url: str, data: Mapping[str, Any]) -> tuple[OpenEnvSession, OpenEnvObservation]:
        _SESSIONS_BY_SERVER[url] += 1
        session: OpenEnvSession | None = None
        try:
            session = await OpenEnvSession.open(url, headers=self._headers, connect_s=self._connect_s)
            return session, await session.request("reset", data, self._reset_s)
        except BaseException:
            _SESSIONS_BY_SERVER[url] -= 1
            if session is not None:
                await session.close()
            raise

    def _to_observation(self, observation: Mapping[str, Any]) -> Observation:
        assert self._session is not None
        try:
            text = self._show(observation)
            legal = self._actions if self._actions_from is None else tuple(map(str, observation[self._actions_from]))
        except (KeyError, TypeError) as error:
            raise EnvironmentFault(
                self._session.host, f"an observation without the field that it is read by ({error!r})"
            ) from None
        return Observation(text, actions=legal, max_tokens=self._max_tokens)

    def _success(self, *places: Mapping[str, Any]) -> bool | None:
        if self._success_at is not None:
            return sum(self._rewards) >= self._success_at
        for place in places:
            if isinstance(place.get("success"), bool):
                return bool(place["success"])
        return None
