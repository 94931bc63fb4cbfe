"""The address of a program is checked as soon as the program returns it."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any

import pytest

from rollart.adapters.clusters.program import ReachabilityCheckedHandle
from rollart.errors import PartDied, ProviderError


class Says:
    """A handle of a program that serves there."""

    name, node = "engine-0", "n1"

    def __init__(self, address: str) -> None:
        self.address = address

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.address

    async def kill(self) -> None:
        self.address = ""


def test_an_address_that_answers_is_handed_on() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"http://127.0.0.1:{server.getsockname()[1]}"
            handle = ReachabilityCheckedHandle(Says(address))
            assert await handle.call("start", []) == address
            assert (handle.name, handle.node) == ("engine-0", "n1")
        with pytest.raises(PartDied, match=r"127.0.0.1:\d+ on node n1 refuses connections.*open the nodes' ports"):
            await handle.call("ready")
        assert await handle.call("wait") == address, "no address that it serves at"
        assert await ReachabilityCheckedHandle(Says("there")).call("start") == "there"

    asyncio.run(main())


def test_an_unreachable_program_ends_the_run_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unreachable(*_: Any) -> Any:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            known = ReachabilityCheckedHandle(Says(f"http://127.0.0.1:{server.getsockname()[1]}"))
            await known.call("start")
        monkeypatch.setattr(asyncio, "open_connection", unreachable)
        with pytest.raises(ProviderError, match=r"engine-0 serves at http://.* does not reach: No route.*launch where"):
            await ReachabilityCheckedHandle(Says("http://10.9.9.9:1")).call("start")
        with pytest.raises(PartDied, match=r"nothing answers at .*No route"):
            await known.call("start")

    asyncio.run(main())
