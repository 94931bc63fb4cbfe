"""A generation as server-sent events, in the format of vLLM's `stream: true`: tokens as they are sampled."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from rollart.engine.jobs import EngineJob, FinishedJob
from rollart.errors import EngineError
from rollart.generation import chunk_body, error_body, usage
from rollart.model import CompletionChunk


async def stream_response(
    request: web.Request, job: EngineJob, serve: Callable[[EngineJob], Awaitable[FinishedJob]]
) -> web.StreamResponse:
    """Stream the answer to `request`. EngineError if nothing was sent yet; later errors are sent as events."""
    name, answer = job.request.request_id, web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    pieces: asyncio.Queue[CompletionChunk | None] = asyncio.Queue()
    job.on_chunk = pieces.put_nowait
    finished: FinishedJob | None = None
    failed: EngineError | None = None

    async def send(event: dict[str, Any] | str) -> None:
        if not answer.prepared:
            await answer.prepare(request)
        await answer.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())

    async def forward() -> None:
        with contextlib.suppress(ConnectionError):  # a disconnect also cancels this handler
            while (piece := await pieces.get()) is not None:
                await send(chunk_body(name, piece))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(forward(), name=f"pieces of {name}")
        try:
            finished = await serve(job)
        except EngineError as error:
            failed = error
        pieces.put_nowait(None)
    if failed is not None:
        if not answer.prepared:
            raise failed
        await send(error_body(failed, 503 if failed.retryable else 400))
    if finished is not None:
        c = finished.completion
        version, stamp = (c.spans[-1].version, c.spans[-1].stamp) if c.spans else (0, None)
        await send(
            chunk_body(name, CompletionChunk(c.token_ids[job.shown :], c.logprobs[job.shown :], version, stamp), c)
        )
        await send({"request_id": name, "choices": [], "usage": usage(c)})
    await send("[DONE]")
    await answer.write_eof()
    return answer
