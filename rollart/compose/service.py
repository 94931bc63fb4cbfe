"""AsyncFlow's service interface as a stand-alone program."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from rollart.adapters.service.desk import ServiceState
from rollart.adapters.service.server import ServiceServer
from rollart.adapters.service.store import ServiceStore
from rollart.adapters.service.uploads import WeightUploads
from rollart.compose.proxy import serve_app
from rollart.errors import StorageFailed

__all__ = ["serve_service"]


@contextlib.asynccontextmanager
async def serve_service(*, host: str, port: int, token: str, data: Path | None = None) -> AsyncIterator[str]:
    """Serve while the body runs; yields the URL. `data`: directory of the state, recovered at the start. UsageError if
    the address or the directory is taken."""
    store = None if data is None else ServiceStore(data)
    try:
        state = None if store is None else ServiceState.recovered(store)
        uploads = None if data is None else WeightUploads(data / "weights")
        app = ServiceServer(token=token, state=state, store=store, uploads=uploads).app()
        async with serve_app(app, host=host, port=port) as url:
            yield url
    finally:
        if store is not None:
            with contextlib.suppress(StorageFailed):
                await store.flush()
            store.close()
