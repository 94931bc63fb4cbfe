"""A proxy of its own, in front of engines that run already."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from rollart.adapters.engines.http import HttpEngine
from rollart.adapters.engines.vllm import KEEPALIVE_S
from rollart.adapters.proxy.chat import ChatFormat
from rollart.adapters.proxy.harness import HarnessRunner
from rollart.adapters.proxy.pool import EnginePool
from rollart.adapters.proxy.record import SessionRecorder
from rollart.adapters.proxy.server import Proxy
from rollart.adapters.proxy.shelf import SessionLimits
from rollart.architecture import vocab_of
from rollart.errors import SpecError, UsageError
from rollart.model import EngineId
from rollart.spec.resolve import Resolved

__all__ = ["SessionLimits", "ProxySettings", "open_harnesses", "serve_app", "serve_proxy"]

SHUTDOWN_S = 2.0
"""How long answers under way may take once the proxy is told to stop, seconds."""


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """What `rollart proxy` is told."""

    engines: Sequence[str]
    tokenizer: Path
    host: str = "127.0.0.1"
    port: int = 0
    template: Path | None = None
    tools: str | None = None
    record: Path | None = None
    token: str = ""
    model: str = "policy"
    limits: SessionLimits = field(default_factory=SessionLimits)


@contextlib.asynccontextmanager
async def serve_proxy(settings: ProxySettings) -> AsyncIterator[str]:
    """The proxy's URL while the body runs. EngineError for an engine that does not answer."""
    for engine in settings.engines:
        if not engine.startswith(("http://", "https://")):
            raise UsageError(f"--engine {engine} (rule: a URL)", remedy="for example http://127.0.0.1:8000")
    form = chat_format(settings.tokenizer, template=settings.template, tools=settings.tools)
    pool = EnginePool(
        [
            HttpEngine(EngineId(f"engine-{i}"), url, keepalive_s=KEEPALIVE_S)  # which may be vLLM
            for i, url in enumerate(settings.engines)
        ],
        vocab=vocab_of(settings.tokenizer),
    )
    recording = SessionRecorder(settings.record)
    proxy = Proxy(
        form,
        policy=pool.session,
        paused=pool.paused,
        recording=recording,
        token=settings.token,
        model=settings.model,
        limits=settings.limits,
    )
    try:
        await pool.open()
        async with serve_app(proxy.app(), host=settings.host, port=settings.port) as url:
            yield url
    finally:
        await pool.close()
        recording.close()


async def open_harnesses(stack: contextlib.AsyncExitStack, resolved: Resolved, tokenizer: Path) -> HarnessRunner | None:
    """Where the run's agent programs ask; None if it has none. It listens for this machine alone."""
    if all(isinstance(d.environment, str) for d in resolved.run.domains):
        return None
    proxy = Proxy(chat_format(tokenizer), model=resolved.run.name)
    url = await stack.enter_async_context(serve_app(proxy.app(), host="127.0.0.1", port=0))
    return await stack.enter_async_context(HarnessRunner(proxy, url, context=resolved.run.model.context))


@contextlib.asynccontextmanager
async def serve_app(app: web.Application, *, host: str, port: int) -> AsyncIterator[str]:
    """Serve until the body ends. A client that goes away cancels its request. UsageError: the address is taken."""
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


def chat_format(directory: Path, *, template: Path | None = None, tools: str | None = None) -> ChatFormat:
    """SpecError for a directory or a template that cannot be read, or where Jinja is not installed."""
    try:
        source = None if template is None else template.read_text()
    except OSError as error:
        raise SpecError(f"cannot read {template}: {error.strerror}") from None
    try:
        return ChatFormat(directory, template=source, tools=tools)
    except ImportError as error:
        raise SpecError(f"chat templates need Jinja: {error}", remedy="pip install 'rollart[proxy]'") from None
