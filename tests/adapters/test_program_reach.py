"""The address of a program is checked as soon as the program returns it."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any

import pytest

from rollart.adapters.clusters.program import check_reachable
from rollart.errors import PartDied, ProviderError


async def check(address: str, *, reached: bool = False) -> None:
    await check_reachable("engine-0", "n1", address, reached=reached)


def test_an_address_that_refuses_is_a_dead_part() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"http://127.0.0.1:{server.getsockname()[1]}"
            await check(address)
        with pytest.raises(PartDied, match=r"127.0.0.1:\d+ on node n1 refuses connections.*open the nodes' ports"):
            await check(address)
        await check("there")

    asyncio.run(main())


def test_an_unreachable_program_ends_the_run_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unreachable(*_: Any) -> Any:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    async def main() -> None:
        monkeypatch.setattr(asyncio, "open_connection", unreachable)
        with pytest.raises(ProviderError, match=r"engine-0 serves at http://.* does not reach: No route.*launch where"):
            await check("http://10.9.9.9:1")
        with pytest.raises(PartDied, match=r"nothing answers at .*No route"):
            await check("http://10.9.9.9:1", reached=True)

    asyncio.run(main())
