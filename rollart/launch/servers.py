"""HTTP servers of this process: the stand-alone proxy in front of running engines, the run's own proxy for agent
programs, and AsyncFlow's service interface as a stand-alone program."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from aiohttp import web

from rollart.adapters.engines.http import HttpEngine
from rollart.adapters.engines.vllm import KEEPALIVE_S
from rollart.adapters.proxy.harness import HarnessRunner
from rollart.adapters.proxy.pool import EnginePool
from rollart.adapters.proxy.record import SessionRecorder
from rollart.adapters.proxy.server import Proxy
from rollart.adapters.proxy.sessions import SessionLimits
from rollart.adapters.service.server import ServiceServer
from rollart.adapters.service.state import ServiceState
from rollart.adapters.service.storage import ServiceStore, VolatileStore
from rollart.adapters.service.uploads import WeightUploads
from rollart.architecture import vocab_of
from rollart.errors import StorageFailed, UsageError
from rollart.launch.prepare import chat_format
from rollart.model import EngineId
from rollart.settings.resolve import Resolved

SHUTDOWN_S = 2.0
"""Seconds for active responses after the proxy is asked to stop."""


@contextlib.asynccontextmanager
async def serve_proxy(
    engines: Sequence[str],
    tokenizer: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    template: Path | None = None,
    tools: str | None = None,
    record: Path | None = None,
    token: str = "",
    model: str = "policy",
    limits: SessionLimits | None = None,
) -> AsyncIterator[str]:
    """Serve while the body runs; yields the proxy's URL. EngineError for an engine that does not answer."""
    for engine in engines:
        if not engine.startswith(("http://", "https://")):
            raise UsageError(f"--engine {engine} (rule: a URL)", remedy="for example http://127.0.0.1:8000")
    form = chat_format(tokenizer, template=template, tools=tools)
    pool = EnginePool(
        [
            HttpEngine(EngineId(f"engine-{i}"), url, keepalive_s=KEEPALIVE_S)  # the engine may be vLLM
            for i, url in enumerate(engines)
        ],
        vocab=vocab_of(tokenizer),
    )
    recording = SessionRecorder(record)
    proxy = Proxy(
        form,
        policy=pool.session,
        paused=pool.paused,
        recording=recording,
        token=token,
        model=model,
        limits=limits,
    )
    try:
        await pool.open()
        async with serve_app(proxy.app(), host=host, port=port) as url:
            yield url
    finally:
        await pool.close()
        recording.close()


async def open_harnesses(stack: contextlib.AsyncExitStack, resolved: Resolved, tokenizer: Path) -> HarnessRunner | None:
    """The runner of the run's agent programs, with a proxy for their requests that listens on this machine only; None
    for a run without agent programs."""
    if all(isinstance(d.environment, str) for d in resolved.run.domains):
        return None
    proxy = Proxy(chat_format(tokenizer), model=resolved.run.name)
    url = await stack.enter_async_context(serve_app(proxy.app(), host="127.0.0.1", port=0))
    return await stack.enter_async_context(HarnessRunner(proxy, url, context=resolved.run.model.context))


@contextlib.asynccontextmanager
async def serve_app(app: web.Application, *, host: str, port: int) -> AsyncIterator[str]:
    """Serve while the body runs; yields the URL. A client that disconnects cancels its request. UsageError if the
    address is taken."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise UsageError(
                f"cannot listen on {host}:{port}: {error.strerror or error}", remedy="choose another address"
            ) from None
        bound = runner.addresses[0]
        yield f"http://{f'[{bound[0]}]' if ':' in bound[0] else bound[0]}:{bound[1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def serve_service(*, host: str, port: int, token: str, data: Path | None = None) -> AsyncIterator[str]:
    """Serve while the body runs; yields the URL. `data`: directory of the state, recovered at the start. UsageError if
    the address or the directory is taken."""
    store = VolatileStore() if data is None else ServiceStore(data)
    try:
        state = ServiceState.recovered(store)
        uploads = None if data is None else WeightUploads(data / "weights")
        app = ServiceServer(token=token, state=state, store=store, uploads=uploads).app()
        async with serve_app(app, host=host, port=port) as url:
            yield url
    finally:
        with contextlib.suppress(StorageFailed):
            await store.flush()
        store.close()
