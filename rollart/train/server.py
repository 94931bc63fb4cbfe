"""The trainer over HTTP: msgpack bodies in and out, torch in one worker thread.

    POST /train {samples, version}  /imitate {samples, batches}  -> {trained_tokens, seconds, metrics}
    POST /begin {version} -> {}     /accumulate {samples} -> {tokens}     /finish {} -> what /train answers
    POST /logprobs {samples}        -> {logprobs: float32[T] as bytes}
    POST /stage {version} -> {}     /publish {version} -> {version, path}
    POST /restore {version, path}   -> {}
    GET  /health  -> JSON {status, version, queued, stream}           GET /metrics -> Prometheus text

`samples` is the wire form of `batch.py`. An error is {"error": one line, "remedy": one line}: 400 for what the caller
sent, 500 for what went wrong here.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import msgpack
import numpy as np
import torch
from aiohttp import web

from rollart.errors import RollartError, TrainerError
from rollart.model import TrainReport
from rollart.train import checkpoint
from rollart.train.batch import Batch, decode
from rollart.train.config import TrainerConfig
from rollart.train.learner import Learner

__all__ = ["MAX_BODY", "TrainerService", "make_app"]

MAX_BODY = 1 << 30
"""Bytes of one request: a token is 29 bytes, so 256 samples of 128 k tokens fit."""

Answer: TypeAlias = dict[str, Any]


class TrainerService:
    """Owns the learner and the one thread that touches it. Requests queue there in order of arrival; `/health` and
    `/metrics` are answered from the loop and never wait for torch. Versions are written by a second thread, so that one
    which was staged does not wait for the step that follows it, nor the step for the disk."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._tokenizer = checkpoint.tokenizer_files(config.tokenizer)
        self._root = Path(config.weights_root).absolute()
        checkpoint.clean(self._root)
        self._learner = Learner(config)
        self._pool = ThreadPoolExecutor(1, "torch", initializer=torch.set_num_threads, initargs=(config.threads,))
        self._disk = ThreadPoolExecutor(1, "disk", initializer=torch.set_num_threads, initargs=(1,))
        self._staged: dict[int, checkpoint.Snapshot] = {}
        self._restores = 0
        self._waiting = 0
        self._version: int | None = None
        self._totals = {"steps": 0.0, "tokens": 0.0, "seconds": 0.0, "published": 0.0}
        self._last: dict[str, float] = {}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY)
        for name in ("train", "begin", "accumulate", "finish", "imitate", "logprobs", "stage", "restore"):
            app.router.add_post(f"/{name}", self._post(getattr(self, name), self._pool))
        app.router.add_post("/publish", self._post(self.publish, self._disk))
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        return app

    def train(self, body: Answer) -> Answer:
        report = self._learner.train(self._batch(body), int(body["version"]))
        return self._report(report)

    def begin(self, body: Answer) -> Answer:
        self._learner.begin(int(body["version"]))
        return {}

    def accumulate(self, body: Answer) -> Answer:
        return {"tokens": self._learner.accumulate(self._batch(body))}

    def finish(self, body: Answer) -> Answer:
        return self._report(self._learner.finish())

    def imitate(self, body: Answer) -> Answer:
        return self._report(self._learner.imitate(self._batch(body), int(body["batches"])))

    def logprobs(self, body: Answer) -> Answer:
        return {"logprobs": self._learner.logprobs(self._batch(body)).astype("<f4").tobytes()}

    def stage(self, body: Answer) -> Answer:
        version = int(body["version"])
        self._staged = {version: self._snapshot(version)}
        return {}

    def publish(self, body: Answer) -> Answer:
        """In the disk's thread, from a copy: what was not staged is copied in the learner's. A caller that gave up and
        restored does not find a version there which it never heard of."""
        version, restores = int(body["version"]), self._restores
        staged = self._staged.pop(version, None)
        if staged is None:
            staged = self._pool.submit(self._snapshot, version).result()
        path = checkpoint.write(staged, self._root, version, self._tokenizer, wanted=lambda: restores == self._restores)
        self._version = version
        self._totals["published"] += 1
        return {"version": version, "path": str(path)}

    def restore(self, body: Answer) -> Answer:
        version = int(body["version"])
        self._restores += 1
        self._staged.clear()
        self._learner.abort()
        checkpoint.restore(self._learner, Path(str(body["path"])), version)
        self._version = version
        return {}

    async def health(self, request: web.Request) -> web.Response:
        about = {"status": "ok", "version": self._version, "queued": self._waiting}
        return web.json_response(about | {"stream": self._learner.config.stream})

    async def metrics(self, request: web.Request) -> web.Response:
        lines = [f"rollart_trainer_{name}_total {value}" for name, value in self._totals.items()]
        lines.append(f"rollart_trainer_queued {self._waiting}")
        lines += [f'rollart_trainer_last{{metric="{name}"}} {value}' for name, value in sorted(self._last.items())]
        return web.Response(text="\n".join(lines) + "\n")

    def _snapshot(self, version: int) -> checkpoint.Snapshot:
        if self._learner.accumulating:
            raise TrainerError(f"version {version} cannot be published: a step was begun and is not finished")
        return checkpoint.snapshot(self._learner, copy=True)

    def _batch(self, body: Answer) -> Batch:
        return decode(body["samples"], self._learner.policy.vocab_size)

    def _report(self, report: TrainReport) -> Answer:
        self._totals["steps"] += 1
        self._totals["tokens"] += report.trained_tokens
        self._totals["seconds"] += report.seconds
        self._last = {k: float(np.float64(v)) for k, v in report.metrics.items()}
        return {"trained_tokens": report.trained_tokens, "seconds": report.seconds, "metrics": self._last}

    def _post(self, work: Callable[[Answer], Answer], pool: ThreadPoolExecutor) -> Callable[[web.Request], Any]:
        async def handler(request: web.Request) -> web.Response:
            body = await request.read()
            self._waiting += 1
            try:
                status, answer = await asyncio.get_running_loop().run_in_executor(pool, _call, work, body)
            finally:
                self._waiting -= 1
            return web.Response(body=answer, status=status, content_type="application/msgpack")

        return handler


def make_app(config: TrainerConfig) -> web.Application:
    """Load everything (seconds) and return the application. `UsageError` for what the config gets wrong."""
    return TrainerService(config).app()


def _call(work: Callable[[Answer], Answer], body: bytes) -> tuple[int, bytes]:
    """Runs in the worker thread: unpack, work, pack; every exception becomes one line."""
    remedy = ""
    try:
        message = msgpack.unpackb(body)
        if not isinstance(message, dict):
            raise ValueError("the body is not a msgpack map")
        return 200, msgpack.packb(work(message))
    except RollartError as error:
        status, line, remedy = 500, error.message, error.remedy
    except KeyError as error:
        status, line = 400, f"the request lacks {error}"
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        status, line = 400, str(error) or type(error).__name__
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        status, line = 500, f"{type(error).__name__}: {error}"
    return status, msgpack.packb({"error": line.splitlines()[0] if line else "unknown", "remedy": remedy})
