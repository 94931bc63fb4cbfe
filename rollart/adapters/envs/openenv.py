"""Environments behind an OpenEnv server, by its wire protocol: this side does not need the package `openenv`.

    environment: rollart.adapters.envs.openenv:OpenEnv
    environment_args: {url: "http://127.0.0.1:8000", action: guess}

One WebSocket per episode: the server makes an environment for a connection and drops it with the connection (`openenv`
0.10.0, `core/env_server/http_server.py`). Frames are JSON: `{"type": "reset", "data": {"seed", "episode_id", ...}}`,
`{"type": "step", "data": ACTION}`, `{"type": "close"}`; responses are `observation` (with `observation`, `reward`,
`done`) or `error` with a code. Every failure names the host. Observations and
actions are mappings, which have text forms here.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from rollart.adapters.envs.lookup import attribute_at
from rollart.adapters.envs.split import held_out_seed
from rollart.errors import EnvironmentFault, one_line
from rollart.model import Observation, Step
from serverless.retries import OPENENV_SESSION

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
        action: str | Callable[[str], Any] | None = None,
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
        self._field, self._encode = action_encoder(action)
        if isinstance(text, str):
            field = text
            text = attribute_at(text, "text") if ":" in text else lambda observation: str(observation[field])
        self._show: ObservationRenderer = text or _plain
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
        if self._field is None and self._encode is None:
            self._field = sole_text_field(await self._session.schema(self._connect_s), self._session.host)
        if answer.done:
            raise EnvironmentFault(self._session.host, "the episode was over before its first step")
        self._last = self._to_observation(answer.observation)
        self._observations, self._rewards = [self._last.text], []
        return self._last

    async def step(self, action: str) -> Step:
        if self._session is None or self._last is None:
            raise RuntimeError("step before reset")
        try:
            data: Any = {self._field: action.strip()} if self._encode is None else self._encode(action)
            if not isinstance(data, Mapping):
                raise ValueError(f"an action is a mapping, not {type(data).__name__}")
            answer = await self._session.request("step", data, self._step_s, field=self._encode is None)
        except ValueError:  # also raised for an action that the server refused
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

        async def attempt() -> tuple[OpenEnvSession, OpenEnvObservation]:
            last_error: SessionNotStarted | None = None
            for url in sorted(self._urls, key=lambda u: (_SESSIONS_BY_SERVER[u], self._urls.index(u))):
                _SESSIONS_BY_SERVER[url] += 1
                session: OpenEnvSession | None = None
                try:
                    session = await OpenEnvSession.open(url, headers=self._headers, connect_s=self._connect_s)
                    return session, await session.request("reset", data, self._reset_s)
                except BaseException as error:
                    _SESSIONS_BY_SERVER[url] -= 1
                    if session is not None:
                        await session.close()
                    if not isinstance(error, SessionNotStarted):
                        raise
                    last_error = error
            assert last_error is not None
            raise last_error

        try:
            return await OPENENV_SESSION.run(attempt, SessionNotStarted, within_s=self._capacity_s, rng=rng)
        except SessionNotStarted as error:
            raise EnvironmentFault(
                error.host,
                f"no episode was begun within {self._capacity_s:g} s on {len(self._urls)} servers; {error.what}",
            ) from None

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


LARGEST = 64 * 2**20
"""Maximum bytes of a frame: a longer observation exceeds any context."""

CLOSE_S = 2.0
"""Seconds for the closing handshake: less than a trajectory waits for the close of its environment."""

FULL = "CAPACITY_REACHED"


class SessionNotStarted(EnvironmentFault):
    """No episode started: the server was full, unreachable, or gone before its first response. Another server may be
    tried, since a server keeps an environment no longer than its connection."""


@dataclass(frozen=True, slots=True)
class OpenEnvObservation:
    """An observation frame."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool
    metadata: Mapping[str, Any]


def endpoints(urls: Sequence[str]) -> tuple[str, ...]:
    """The servers' base addresses with http or https. ValueError for an invalid one."""
    found = []
    for url in urls:
        parts = urlsplit(url)
        scheme = {"http": "http", "https": "https", "ws": "http", "wss": "https"}.get(parts.scheme)
        if scheme is None or not parts.netloc:
            raise ValueError(f"url is {url!r} (rule: http, https, ws or wss with a host)")
        found.append(f"{scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/ws')}")
    if not found:
        raise ValueError("url is empty (rule: at least one server)")
    return tuple(found)


class OpenEnvSession:
    """A WebSocket to one server. Used by one episode's task at a time; ended by its first failure."""

    def __init__(self, url: str, client: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.url = url
        self.host = urlsplit(url).netloc
        self._client, self._socket = client, socket
        self._started = False

    @classmethod
    async def open(cls, url: str, *, headers: Mapping[str, str], connect_s: float) -> OpenEnvSession:
        """Connect. `SessionNotStarted` if that takes longer than `connect_s`."""
        client = aiohttp.ClientSession(headers=headers)
        host = urlsplit(url).netloc
        try:
            async with asyncio.timeout(connect_s):
                socket = await client.ws_connect(f"{url}/ws", max_msg_size=LARGEST, heartbeat=20.0)
                return cls(url, client, socket)
        except BaseException as error:
            await client.close()
            if isinstance(error, TimeoutError):
                raise SessionNotStarted(host, f"no connection within {connect_s:g} s") from None
            if isinstance(error, aiohttp.ClientError | OSError):
                raise SessionNotStarted(host, f"no connection ({one_line(error, 200)})") from None
            raise

    async def request(
        self, operation: str, data: Mapping[str, Any], seconds: float, *, field: bool = False
    ) -> OpenEnvObservation:
        """The response to a reset or a step. ValueError for an action that violates the server's types, unless by
        the name of its `field`, which the spec chose and not the policy."""
        await self._send(operation, data)
        frame = await self._frame(seconds, operation, field)
        if frame.get("type") != "observation":
            raise await self._end(f"answered a {operation} with a frame of type {frame.get('type')!r}")
        self._started = True
        try:
            data = frame["data"]
            observation, reward, done = data["observation"], data.get("reward"), data.get("done", False)
            if not isinstance(observation, dict) or not isinstance(done, bool):
                raise TypeError(f"observation is {type(observation).__name__}, done is {type(done).__name__}")
            reward = None if reward is None else float(reward)
            if reward is not None and not math.isfinite(reward):
                raise ValueError(f"reward is {reward}")
            metadata = data.get("metadata") or observation.get("metadata") or {}
            return OpenEnvObservation(observation, reward, done, metadata if isinstance(metadata, dict) else {})
        except (KeyError, TypeError, ValueError) as error:
            message = f"answered a {operation} with an invalid observation ({one_line(error, 200)})"
            raise await self._end(message) from None

    async def schema(self, seconds: float) -> Mapping[str, Any]:
        """The JSON schema of actions, by HTTP."""
        try:
            async with asyncio.timeout(seconds), self._client.get(f"{self.url}/schema") as answer:
                return dict((await answer.json())["action"])
        except (TimeoutError, aiohttp.ClientError, ValueError, KeyError, TypeError) as error:
            raise EnvironmentFault(self.host, f"no schema of its actions ({one_line(error, 200)})") from None

    async def close(self) -> None:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CLOSE_S):
                if not self._socket.closed:
                    await self._socket.send_str(json.dumps({"type": "close"}))
                    await self._socket.close()
        await self._client.close()

    async def _send(self, operation: str, data: Mapping[str, Any]) -> None:
        try:
            await self._socket.send_str(json.dumps({"type": operation, "data": data}))
        except (aiohttp.ClientError, OSError) as error:
            if not self._started:
                return  # a full server sends an error frame before it closes: read that
            raise await self._end(f"the session was gone at its {operation} ({one_line(error, 200)})") from None

    async def _frame(self, seconds: float, operation: str, field: bool) -> Any:
        """The next frame as a mapping. An error frame raises `EnvironmentFault` or ValueError."""
        try:
            async with asyncio.timeout(seconds):
                message = await self._socket.receive()
        except TimeoutError:
            raise await self._end(f"no answer to a {operation} within {seconds:g} s") from None
        if message.type is not aiohttp.WSMsgType.TEXT:
            code = self._socket.close_code
            raise await self._end(
                f"the session was closed at its {operation} (code {code}, {message.type.name.lower()})",
                started=self._started,
            )
        try:
            frame = json.loads(message.data)
        except ValueError:
            frame = None
        if not isinstance(frame, dict):
            raise await self._end(f"answered a {operation} with a malformed frame")
        if frame.get("type") == "error":
            await self._raise_error(operation, frame.get("data"), field)
        return frame

    async def _raise_error(self, operation: str, data: Any, field: bool) -> None:
        error = data if isinstance(data, dict) else {}
        code, errors = str(error.get("code", "?")), error.get("errors")
        if operation == "step" and code == "VALIDATION_ERROR":
            listed = [e for e in errors if isinstance(e, dict)] if isinstance(errors, list) else []
            # Wrong names of fields that the spec gave: no text of the policy could mend that.
            misnamed = any(
                e.get("type") in ("missing", "extra_forbidden") and len(e.get("loc") or ()) == 1 for e in listed
            )
            if not field or not misnamed:
                raise ValueError(str(errors))
            error = {"message": f"its actions have other fields: {errors}"}
        detail = " ".join(str(error.get("message", data)).split())[:300]
        raise await self._end(f"{code} at its {operation}: {detail}", started=code != FULL)

    async def _end(self, message: str, *, started: bool = True) -> EnvironmentFault:
        """End the session; the error to raise."""
        await self.close()
        return EnvironmentFault(self.host, message) if started else SessionNotStarted(self.host, message)


ObservationRenderer = Callable[[Mapping[str, Any]], str]

JSON = "json"
"""`action: json`: the policy writes the whole action."""


def action_encoder(action: str | Callable[[str], Any] | None) -> tuple[str | None, Callable[[str], Any] | None]:
    """The field of an action that takes the policy's text, or the function from the text to the whole action, which
    raises ValueError for a text that is not an action; neither if the server's schema must be read first."""
    if not isinstance(action, str):
        return None, action
    if action == JSON:
        return None, json.loads
    return (None, attribute_at(action, "action")) if ":" in action else (action, None)


def sole_text_field(schema: Mapping[str, Any], host: str) -> str:
    """The field of an action that takes the policy's text: the only one but `metadata`, or the only required one."""
    named = [name for name in schema.get("properties", {}) if name != "metadata"]
    needed = [name for name in schema.get("required", ()) if name in named]
    for names in (named, needed):
        if len(names) == 1:
            return str(names[0])
    raise EnvironmentFault(host, f"actions have the fields {named}, and the spec names none (`action`)")


def _plain(observation: Mapping[str, Any]) -> str:
    fields = {name: value for name, value in observation.items() if name != "metadata"}
    values = list(fields.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False)
