"""The client's end of an engine's stream: what cannot be sent is its own request's matter."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import pytest

from rollart.adapters.engines.http import EngineStream
from rollart.errors import EngineError
from rollart.model import GenerateRequest, Sampling


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.frames: list[Any] = []

    def write(self, data: Any) -> None:
        assert int.from_bytes(data[:4], "little") == len(data) - 4
        self.frames.append(msgpack.unpackb(data[4:]))


def request(name: str, token: int) -> GenerateRequest:
    return GenerateRequest(name, "s", (1, token), Sampling(max_tokens=1))


def test_a_request_that_has_no_place_on_the_wire_fails_alone() -> None:
    async def main() -> None:
        stream, wire = EngineStream("engine-0"), Wire()
        stream.connection_made(wire)
        async with asyncio.TaskGroup() as tasks:
            whole = [tasks.create_task(stream.generate(request(f"r{n}", n))) for n in range(2)]
            with pytest.raises(EngineError, match="engine-0 cannot be sent this") as found:
                await stream.generate(request("huge", 2**64))
            assert not found.value.retryable
            assert [[m[2] for m in frame] for frame in wire.frames] == [["r0", "r1"]]
            stream.send(("r", "s"))
            await asyncio.sleep(0)
            assert wire.frames[-1] == [["r", "s"]]
            for task in whole:
                task.cancel()

    asyncio.run(main())
