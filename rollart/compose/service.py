"""AsyncFlow's service interface as a program of its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from rollart.adapters.service.desk import Desk
from rollart.adapters.service.server import Service
from rollart.adapters.service.store import Store
from rollart.adapters.service.uploads import Uploads
from rollart.compose.proxy import listening
from rollart.errors import StorageFailed

__all__ = ["offering"]


@contextlib.asynccontextmanager
async def offering(*, host: str, port: int, token: str, data: Path | None = None) -> AsyncIterator[str]:
    """The service's URL while the body runs. With `data` it goes on from what lies there, and keeps it. UsageError: the
    address is taken, or the directory."""
    store = None if data is None else Store(data)
    try:
        desk = None if store is None else Desk.recovered(store)
        uploads = None if data is None else Uploads(data / "weights")
        app = Service(token=token, desk=desk, store=store, uploads=uploads).app()
        async with listening(app, host=host, port=port) as url:
            yield url
    finally:
        if store is not None:
            with contextlib.suppress(StorageFailed):
                await store.flush()
            store.close()
