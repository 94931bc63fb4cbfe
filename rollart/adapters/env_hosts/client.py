"""The client of an environment host: concurrent calls over one connection."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

from rollart.adapters.env_hosts.wire import (
    CallStatus,
    HostOperation,
    HostRequest,
    HostResponse,
    encode_frame,
    observation_of,
    read_frame,
    step_of,
)
from rollart.errors import EnvironmentFault
from rollart.hosted import EnvironmentOrigin, EpisodeImages, HostHealth
from rollart.model import Observation, Step
from rollart.user_code import checked_observation, checked_step
from serverless.hosts import HostChannel, host_and_port


class HostConnection(HostChannel):
    """Implements `EnvironmentHost` over a socket: after its end, calls raise `EnvironmentFault`."""

    _lives = itertools.count()
    """Numbers the lives of hosts. Process ids are unique on one machine only: in containers, all hosts may have the
    same one."""

    def __init__(self, name: str, node: str) -> None:
        super().__init__(name)
        self.id = name
        self.life = f"{name} of life {next(self._lives)}"
        self.node = node
        self.pid = 0
        self.problems: Mapping[str, str] = {}
        """Domains that the host can make no environment of, with the reasons."""
        self.image_domains: frozenset[str] = frozenset()

    @classmethod
    async def open(cls, name: str, address: str, token: str = "") -> HostConnection:
        """Connect to `tcp://host:port`. `EnvironmentFault` if no host there accepts the token."""
        host, port = host_and_port(address)
        try:
            reader, writer = await asyncio.open_connection(host, port)
        except OSError as error:
            raise EnvironmentFault(name, f"nothing listens at {address} ({error.strerror or error})") from None
        connection = cls(name, host)
        connection.listen(reader, writer)
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

    async def reset(self, episode: str, domain: str, seed: int) -> tuple[tuple[Observation, EnvironmentOrigin], float]:
        response = await self._request(HostOperation.RESET, episode, [domain, seed])
        try:
            match response.value:
                case [list(observation), str(how), int() | float() as make_s]:
                    made = EnvironmentOrigin(how, float(make_s))
                    return (checked_observation(observation_of(observation)), made), response.env_s
            raise ValueError("an answer that is no observation")
        except (TypeError, ValueError) as error:
            raise EnvironmentFault(self.name, str(error)) from None

    async def images(self, episode: str, domain: str, seed: int, *, pull: bool) -> tuple[EpisodeImages, float]:
        response = await self._request(HostOperation.PULL if pull else HostOperation.IMAGES, episode, [domain, seed])
        match response.value:
            case [list(wanted), list(there), int(pulled)]:
                return EpisodeImages(tuple(map(str, wanted)), frozenset(map(str, there)), pulled), response.env_s
        raise EnvironmentFault(self.name, "its list of images is malformed")

    async def step(self, episode: str, action: str) -> tuple[Step, float]:
        response = await self._request(HostOperation.STEP, episode, action)
        try:
            return checked_step(step_of(response.value)), response.env_s
        except (TypeError, ValueError) as error:
            raise EnvironmentFault(self.name, str(error)) from None

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
        raise EnvironmentFault(self.name, "its answer to a health check is malformed")

    async def _request(self, op: HostOperation, episode: str, value: Any) -> HostResponse:
        """Send a request; its response, whose status is OK."""
        try:
            response: HostResponse = await self.ask(
                lambda number: encode_frame(HostRequest(number, op, episode, value).to_json()), subject=episode
            )
        except (TypeError, ValueError) as error:
            raise EnvironmentFault(self.name, f"the request cannot be sent ({error})") from None
        if response.status is CallStatus.OK:
            return response
        raise EnvironmentFault(
            self.name, f"raised {response.value}" if response.status is CallStatus.RAISED else str(response.value)
        )

    def abandon(self, number: int, subject: str) -> None:
        assert self._writer is not None
        cancel = HostRequest(next(self._numbers), HostOperation.CANCEL, subject, number)
        self._writer.write(encode_frame(cancel.to_json()))

    def failure(self) -> EnvironmentFault:
        return EnvironmentFault(self.name, self.cause, incident=self.life)

    async def receive(self, reader: asyncio.StreamReader) -> tuple[int, str, HostResponse]:
        response = HostResponse.from_json(await read_frame(reader))
        return response.id, response.episode, response
