"""The client of an environment host: concurrent calls over one connection."""

from __future__ import annotations

import asyncio
import itertools
import urllib.parse
from collections.abc import Mapping
from typing import Any

from rollart.adapters.env_hosts.wire import (
    CallStatus,
    HostOperation,
    HostRequest,
    HostResponse,
    observation_of,
    read_frame,
    step_of,
    write_frame,
)
from rollart.errors import EnvironmentFault
from rollart.hosted import EnvironmentOrigin, EpisodeImages, HostHealth
from rollart.model import Observation, Step
from rollart.user_code import checked_observation, checked_step


class HostConnection:
    """Implements `EnvironmentHost` over a socket. Owns the connection and the task that reads it.

    Each call waits for its response; the end of the connection fails all of them with `EnvironmentFault`. A malformed
    response, or a response without a request, ends the connection, with that as the cause. Invariant: a response
    reaches the call of its id and its episode, or no call.
    """

    _lives = itertools.count()
    """Numbers the lives of hosts. Process ids are unique on one machine only: in containers, all hosts may have the
    same one."""

    def __init__(
        self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, node: str = ""
    ) -> None:
        self._name, self.life = name, f"{name} of life {next(self._lives)}"
        self._reader, self._writer = reader, writer
        self.node = node
        self._ids = itertools.count(1)
        self._pending: dict[int, tuple[str, asyncio.Future[HostResponse]]] = {}
        self._cancelled: set[int] = set()
        """Cancelled calls whose responses may still come."""
        self._cause: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.pid = 0
        self.problems: Mapping[str, str] = {}
        """Domains that the host can make no environment of, with the reasons."""
        self.image_domains: frozenset[str] = frozenset()
        # The task outlives the call that opened the connection; `aclose` ends both.
        self._reader_task = asyncio.get_running_loop().create_task(self._read(), name=f"answers of {name}")

    @classmethod
    async def open(cls, name: str, address: str, token: str = "") -> HostConnection:
        """Connect to `tcp://host:port`. `EnvironmentFault` if no host there accepts the token."""
        url = urllib.parse.urlsplit(address)
        try:
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
        except OSError as error:
            raise EnvironmentFault(name, f"nothing listens at {address} ({error.strerror or error})") from None
        connection = cls(name, reader, writer, node=url.hostname or "")
        try:
            response = await connection._request(HostOperation.HELLO, "", token)
            match response.value:
                case [int(pid), dict(problems), list(image_domains)]:
                    connection.pid, connection.problems = pid, problems
                    connection.image_domains = frozenset(map(str, image_domains))
                case _:
                    raise EnvironmentFault(name, "its answer to the greeting is malformed")
        except BaseException:
            await connection.aclose()
            raise
        return connection

    @property
    def id(self) -> str:
        return self._name

    @property
    def alive(self) -> bool:
        return not self._cause.done()

    async def reset(self, episode: str, domain: str, seed: int) -> tuple[tuple[Observation, EnvironmentOrigin], float]:
        response = await self._request(HostOperation.RESET, episode, [domain, seed])
        try:
            match response.value:
                case [list(observation), str(how), int() | float() as make_s]:
                    made = EnvironmentOrigin(how, float(make_s))
                    return (checked_observation(observation_of(observation)), made), response.env_s
            raise ValueError("an answer that is no observation")
        except (TypeError, ValueError) as error:
            raise EnvironmentFault(self._name, str(error)) from None

    async def images(self, episode: str, domain: str, seed: int, *, pull: bool) -> tuple[EpisodeImages, float]:
        response = await self._request(HostOperation.PULL if pull else HostOperation.IMAGES, episode, [domain, seed])
        match response.value:
            case [list(wanted), list(there), int(pulled)]:
                return EpisodeImages(tuple(map(str, wanted)), frozenset(map(str, there)), pulled), response.env_s
        raise EnvironmentFault(self._name, "its list of images is malformed")

    async def step(self, episode: str, action: str) -> tuple[Step, float]:
        response = await self._request(HostOperation.STEP, episode, action)
        try:
            return checked_step(step_of(response.value)), response.env_s
        except (TypeError, ValueError) as error:
            raise EnvironmentFault(self._name, str(error)) from None

    async def close(self, episode: str) -> None:
        await self._request(HostOperation.CLOSE, episode, None)

    async def health(self) -> HostHealth:
        response = await self._request(HostOperation.HEALTH, "", None)
        match response.value:
            case {
                "live": int(live),
                "stuck_s": int() | float() as stuck_s,
                "stuck_in": str(where),
                "left": list(left),
                "memory": int(memory),
                "machine": int(machine),
            }:
                return HostHealth(live, float(stuck_s), where, tuple(map(str, left)), memory, machine)
        raise EnvironmentFault(self._name, "its answer to a health check is malformed")

    async def lost(self) -> str:
        return await asyncio.shield(self._cause)

    async def aclose(self) -> None:
        self._end("its connection was closed")
        self._reader_task.cancel()
        await asyncio.gather(self._reader_task, return_exceptions=True)

    async def _request(self, op: HostOperation, episode: str, value: Any) -> HostResponse:
        """Send a request; its response, whose status is OK."""
        if self._cause.done():
            raise self._connection_fault()
        number = next(self._ids)
        pending: asyncio.Future[HostResponse] = asyncio.get_running_loop().create_future()
        self._pending[number] = episode, pending
        try:
            write_frame(self._writer, HostRequest(number, op, episode, value).to_json())
            response = await pending
        except asyncio.CancelledError:
            if self._pending.pop(number, None) is not None and not self._cause.done():
                self._cancelled.add(number)
                write_frame(self._writer, HostRequest(next(self._ids), HostOperation.CANCEL, episode, number).to_json())
            raise
        except (TypeError, ValueError) as error:
            raise EnvironmentFault(self._name, f"the request cannot be sent ({error})") from None
        finally:
            self._pending.pop(number, None)
        if response.status is CallStatus.OK:
            return response
        raise EnvironmentFault(
            self._name, f"raised {response.value}" if response.status is CallStatus.RAISED else str(response.value)
        )

    async def _read(self) -> None:
        cause = "its connection broke"
        try:
            while True:
                self._deliver(HostResponse.from_json(await read_frame(self._reader)))
        except ValueError as error:
            cause = f"it sent {error}"
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._end(cause)

    def _deliver(self, response: HostResponse) -> None:
        """Hand a response to its call. ValueError if it matches no request."""
        if response.id in self._cancelled:
            self._cancelled.discard(response.id)
            return
        episode, pending = self._pending.get(response.id, ("", None))
        if pending is None:
            raise ValueError(f"an answer to a request that was never made ({response.id})")
        if response.episode != episode:
            raise ValueError(f"an answer of episode '{response.episode}' to a request of '{episode}'")
        if not pending.done():
            pending.set_result(response)

    def _connection_fault(self) -> EnvironmentFault:
        return EnvironmentFault(self._name, self._cause.result(), incident=self.life)

    def _end(self, cause: str) -> None:
        if self._cause.done():
            return
        self._cause.set_result(cause)
        for _, pending in self._pending.values():
            if not pending.done():
                pending.set_exception(self._connection_fault())
                pending.exception()  # retrieved here, since a caller that is cancelled now never does
        self._writer.close()
