"""AsyncFlow's service interface as a program of its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from rollart.adapters.service.server import Service
from rollart.compose.proxy import listening

__all__ = ["offering"]


@contextlib.asynccontextmanager
async def offering(*, host: str, port: int, token: str) -> AsyncIterator[str]:
    """The service's URL while the body runs. UsageError: the address is taken."""
    async with listening(Service(token=token).app(), host=host, port=port) as url:
        yield url
