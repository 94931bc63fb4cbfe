"""One session with an OpenEnv server: it sends frames and checks responses; every failure names the host."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from rollart.errors import EnvironmentFault, one_line

__all__ = ["InvalidAction", "OpenEnvObservation", "OpenEnvSession", "SessionNotStarted", "endpoints"]

LARGEST = 64 * 2**20
"""Maximum bytes of a frame: a longer observation exceeds any context."""

CLOSE_S = 2.0
"""Seconds for the closing handshake: less than a trajectory waits for the close of its environment."""

FULL = "CAPACITY_REACHED"


class SessionNotStarted(EnvironmentFault):
    """No episode started: the server was full, unreachable, or gone before its first response. Another server may be
    tried, since a server keeps an environment no longer than its connection."""

    def __init__(self, host: str, message: str) -> None:
        super().__init__(host, message)
        self.detail = message


class InvalidAction(Exception):
    """The server refused a step, because the policy's text is not a valid action."""


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
        except TimeoutError:
            await client.close()
            raise SessionNotStarted(host, f"no connection within {connect_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            await client.close()
            raise SessionNotStarted(host, f"no connection ({one_line(error, 200)})") from None
        except BaseException:
            await client.close()
            raise

    async def request(
        self, operation: str, data: Mapping[str, Any], seconds: float, *, fields: frozenset[str] | None = None
    ) -> OpenEnvObservation:
        """The response to a reset or a step. `InvalidAction` for an action that violates the server's types, unless by
        the names of its `fields`, which the spec chose and not the policy."""
        await self._send(operation, data)
        frame = await self._frame(seconds, operation, fields)
        if frame.get("type") != "observation":
            raise await self._end(f"answered a {operation} with a frame of type {frame.get('type')!r}")
        self._started = True
        try:
            return _decode_observation(frame["data"])
        except (KeyError, TypeError, ValueError) as error:
            raise await self._end(
                f"answered a {operation} with an invalid observation ({one_line(error, 200)})"
            ) from None

    async def state(self, seconds: float) -> Mapping[str, Any]:
        await self._send("state", None)
        frame = await self._frame(seconds, "state")
        if frame.get("type") != "state" or not isinstance(frame.get("data"), dict):
            raise await self._end(f"answered for its state with a frame of type {frame.get('type')!r}")
        return dict(frame["data"])

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

    async def _send(self, operation: str, data: Mapping[str, Any] | None) -> None:
        try:
            await self._socket.send_str(
                json.dumps({"type": operation} if data is None else {"type": operation, "data": data})
            )
        except (aiohttp.ClientError, OSError) as error:
            if not self._started:
                return  # a full server sends an error frame before it closes: read that
            raise await self._end(f"the session was gone at its {operation} ({one_line(error, 200)})") from None

    async def _frame(self, seconds: float, operation: str, fields: frozenset[str] | None = None) -> Any:
        """The next frame as a mapping. An error frame raises `EnvironmentFault` or `InvalidAction`."""
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
            await self._raise_error(operation, frame.get("data"), fields)
        return frame

    async def _raise_error(self, operation: str, data: Any, fields: frozenset[str] | None) -> None:
        error = data if isinstance(data, dict) else {}
        code, errors = str(error.get("code", "?")), error.get("errors")
        if operation == "step" and code == "VALIDATION_ERROR":
            if not _has_wrong_field_names(errors, fields):
                raise InvalidAction(str(errors))
            error = {"message": f"its actions have other fields: {errors}"}
        detail = " ".join(str(error.get("message", data)).split())[:300]
        raise await self._end(f"{code} at its {operation}: {detail}", started=code != FULL)

    async def _end(self, message: str, *, started: bool = True) -> EnvironmentFault:
        """End the session; the error to raise."""
        await self.close()
        return EnvironmentFault(self.host, message) if started else SessionNotStarted(self.host, message)


def _decode_observation(data: Any) -> OpenEnvObservation:
    observation, reward, done = data["observation"], data.get("reward"), data.get("done", False)
    if not isinstance(observation, dict) or not isinstance(done, bool):
        raise TypeError(f"observation is {type(observation).__name__}, done is {type(done).__name__}")
    if reward is not None:
        reward = float(reward)
        if not math.isfinite(reward):
            raise ValueError(f"reward is {reward}")
    metadata = data.get("metadata") or observation.get("metadata") or {}
    return OpenEnvObservation(observation, reward, done, metadata if isinstance(metadata, dict) else {})


def _has_wrong_field_names(errors: Any, fields: frozenset[str] | None) -> bool:
    """True if the server rejects the names of fields that the spec gave: no text of the policy could fix that."""
    if fields is None or not isinstance(errors, list):
        return False
    kinds = [(e.get("type"), e.get("loc")) for e in errors if isinstance(e, dict)]
    return any(kind in ("missing", "extra_forbidden") and len(loc or ()) == 1 for kind, loc in kinds)
