"""The trainer over HTTP: msgpack bodies in and out, torch in one worker thread, each command executed by all ranks.

    POST /train {samples, version}  /imitate {samples, batches}  -> {trained_tokens, seconds, metrics}
    POST /begin {version} -> {}     /accumulate {samples} -> {tokens}     /finish {} -> as /train
    POST /logprobs {samples}        -> {logprobs: float32[T] as bytes}
    POST /reference, /advantages {samples} -> {column: float64[T] as bytes}
    POST /stage {version, send?} -> {}     /publish {version} -> {version, path}
    POST /meet {} -> {address, ranks}  where engines meet this trainer for broadcasts
    POST /send {order, bucket} -> {bytes, seconds, has: {member: [bytes, seconds]}, errors: {member: line}}
    POST /restore {version, path, optimizer?}   -> {}     optimizer false: weights alone
    POST /lost {reason} -> {}       a rank on another host is gone, as its watcher reports
    GET  /health  -> JSON {status, version, queued, stream}, 503 if a rank is lost    GET /metrics -> Prometheus text

`samples` is the wire form of `batch.py`. An error is {"error": one line, "remedy": one line}: 400 for an invalid
request, 422 for a version that is not as it was published, 500 for a failure of the trainer.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgpack
import numpy as np
import torch
from aiohttp import web

from rollart.collective import BroadcastOrder
from rollart.errors import RollartError, TrainerError, VersionDamaged
from rollart.lora import ADAPTER_MODEL
from rollart.model import TrainReport
from rollart.settings.training import TrainerConfig
from rollart.train.batch import InvalidSamples, TrainingBatch, decode_batch
from rollart.train.checkpoint import (
    LearnerSnapshot,
    remove_partial_writes,
    restore_version,
    take_snapshot,
    tokenizer_files,
    write_version,
)
from rollart.train.learner import Learner
from rollart.train.ranks import SINGLE_RANK, RankChannel, Ranks
from rollart.train.sending import BroadcastSender, OutgoingVersion, outgoing_version
from rollart.train.teacher import TeacherEndpoint

CommandMessage: TypeAlias = dict[str, Any]

CommandHandler: TypeAlias = Callable[[CommandMessage], CommandMessage]

VERSION_DAMAGED_STATUS = 422
"""HTTP status of a restore from a version that is not as it was published."""

MEMORY_REMEDY = (
    "lower training.max_tokens_per_microbatch, set trainer.activation_checkpointing, or give the trainer more GPUs"
)

MAX_BODY = 1 << 32
"""Maximum bytes of a request, and of a column in msgpack: a token takes 29 bytes, and those of its experts, of which a
large model has some hundreds (384 in Qwen3-30B-A3B). 256 samples of 40 k tokens fit in any case."""

WATCH_INTERVAL_S = 5.0
"""Longest wait for the name of a lost rank. Its process is reaped within milliseconds, unless it is on another host,
where this process cannot watch it."""


class TrainerService:
    """Owns the learner and the one thread that uses it. Requests queue for that thread in order of arrival; `/health`
    and `/metrics` are answered from the loop and never wait for torch. A second thread writes versions, so that a
    staged version does not wait for the next step, nor that step for the disk. A third thread fills columns of samples
    during the rollout, from immutable state. A fourth broadcasts staged versions to engines.

    Rank 0's service listens; on other ranks `follow` runs. After a rank is lost, or has failed where other ranks may
    wait for it, every request fails at once with the reason, and the caller restarts the trainer.
    """

    def __init__(self, config: TrainerConfig, ranks: Ranks | None = None, *, host: str = "127.0.0.1") -> None:
        """`host`: the address at which engines reach rank 0."""
        self._config = config
        self._ranks = ranks or Ranks()
        self._tokenizer = tokenizer_files(config.tokenizer)
        self._root = Path(config.weights_root).absolute()
        if self._ranks.rank == 0:
            remove_partial_writes(self._root)
        self.learner = Learner(config, self._ranks)
        if isinstance(self.learner.reference, TeacherEndpoint) and self._ranks.rank == 0:
            self.learner.reference.check()
        enter = self._ranks.enter
        self.torch_pool = ThreadPoolExecutor(1, "torch", initializer=enter, initargs=(config.threads,))
        self.disk_pool = ThreadPoolExecutor(1, "disk", initializer=enter, initargs=(1,))
        self.column_pool = ThreadPoolExecutor(1, "columns", initializer=enter, initargs=(config.threads,))
        self.wire_pool = ThreadPoolExecutor(1, "wire", initializer=enter, initargs=(1,))
        learning = ("train", "begin", "accumulate", "finish", "imitate", "logprobs", "stage", "restore")
        self._commands = (
            (self._ranks.torch, self.torch_pool, learning),
            (self._ranks.disk, self.disk_pool, ("publish",)),
            (self._ranks.wire, self.wire_pool, ("send",)),
            (SINGLE_RANK, self.wire_pool, ("meet",)),
            (SINGLE_RANK, self.column_pool, ("reference", "advantages")),
        )
        """Channel, thread and names of the commands; rank 0 alone executes those of `SINGLE_RANK`."""
        self._sender = BroadcastSender(torch.device(config.device), rank=self._ranks.rank, host=host)
        self._outgoing: dict[int, OutgoingVersion] = {}
        self._staged: dict[int, LearnerSnapshot] = {}
        self._restores = 0
        self._waiting = 0
        self._version: int | None = None
        self._totals = {"steps": 0.0, "tokens": 0.0, "seconds": 0.0, "published": 0.0}
        self._last: dict[str, float] = {}
        self._broken: str | None = None
        self._broken_event = asyncio.Event()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY)
        for channel, pool, names in self._commands:
            for name in names:
                app.router.add_post(f"/{name}", self._post(name, channel, pool))
        app.router.add_post("/lost", self.report_lost)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        return app

    def follow(self) -> None:
        """On every rank but 0: execute commands until rank 0 is gone."""
        works = {
            channel: {name: getattr(self, name) for name in names}
            for channel, _, names in self._commands
            if channel is not SINGLE_RANK
        }
        follow_rank_zero(works, enter=lambda: self._ranks.enter(self._config.threads))

    def lost(self, reason: str) -> None:
        """Mark the trainer as broken because a rank is gone. Call it in the loop's thread."""
        self._broken = self._broken or reason
        self._broken_event.set()

    def train(self, body: CommandMessage) -> CommandMessage:
        return self._report(self.learner.train(self._batch(body), int(body["version"])))

    def begin(self, body: CommandMessage) -> CommandMessage:
        self.learner.begin(int(body["version"]))
        return {}

    def accumulate(self, body: CommandMessage) -> CommandMessage:
        return {"tokens": self.learner.accumulate(self._batch(body))}

    def finish(self, body: CommandMessage) -> CommandMessage:
        return self._report(self.learner.finish())

    def imitate(self, body: CommandMessage) -> CommandMessage:
        return self._report(self.learner.imitate(self._batch(body), int(body["batches"])))

    def logprobs(self, body: CommandMessage) -> CommandMessage:
        return {"logprobs": self.learner.logprobs(self._batch(body)).astype("<f4").tobytes()}

    def reference(self, body: CommandMessage) -> CommandMessage:
        return {"column": self.learner.reference.logprobs(self._batch(body)).astype("<f8").tobytes()}

    def advantages(self, body: CommandMessage) -> CommandMessage:
        return {"column": self.learner.advantages(self._batch(body)).astype("<f8").tobytes()}

    def stage(self, body: CommandMessage) -> CommandMessage:
        version = int(body["version"])
        snapshot = self._snapshot(version)
        self._staged = {version: snapshot}
        self._outgoing = {version: outgoing_version(snapshot)} if body.get("send") else {}
        return {}

    def meet(self, body: CommandMessage) -> CommandMessage:
        return {"address": self._sender.address(), "ranks": self._ranks.size}

    def send(self, body: CommandMessage) -> CommandMessage:
        """Broadcast the version that was staged for sending, and release it."""
        order = BroadcastOrder(**body["order"])
        staged = self._outgoing.pop(order.version, None)
        error = TrainerError(f"version {order.version} was not staged to be sent, or the trainer was restored")
        self._ranks.wire.agree(error if staged is None else None)
        assert staged is not None, "else all ranks agreed that it is gone"
        sent = self._sender.send(order, staged, bucket=int(body["bucket"]))
        every = self._ranks.wire.exchange((sent.bytes, sent.errors.get(0, "")))
        errors = {str(member): error for member, error in sent.errors.items()}
        if failed := [f"rank {rank}: {error}" for rank, (_, error) in enumerate(every) if error]:
            errors["0"] = failed[0]
        has = {str(member): list(one) for member, one in sent.has.items()}
        return {"bytes": sum(n for n, _ in every), "seconds": sent.seconds, "has": has, "errors": errors}

    def publish(self, body: CommandMessage) -> CommandMessage:
        """Write a version in the disk's thread, from a copy. A version that was not staged is copied in the learner's
        thread first. A caller that gave up and restored does not find an unexpected version."""
        version, restores = int(body["version"]), self._restores
        staged = self._staged.pop(version, None)
        if staged is None and self._ranks.size == 1:
            staged = self.torch_pool.submit(self._snapshot, version).result()
        problem = TrainerError(f"version {version} was given up before it was written: the trainer was restored")
        self._ranks.disk.agree(problem if staged is None else None)
        assert staged is not None, "else all ranks agreed that it is gone"
        path = write_version(
            staged,
            self._root,
            version,
            self._tokenizer,
            ranks=self._ranks.disk,
            wanted=lambda: restores == self._restores,
        )
        self._version = version
        self._totals["published"] += 1
        files = (*path.glob("*model*.safetensors"), *path.glob(f"*/{ADAPTER_MODEL}"))
        read = sum(file.stat().st_size for file in files)
        return {"version": version, "path": str(path), "bytes": read}

    def restore(self, body: CommandMessage) -> CommandMessage:
        version = int(body["version"])
        self._restores += 1
        self._staged.clear()
        self._outgoing.clear()
        self.learner.abort()
        optimizer = bool(body.get("optimizer", True))
        restore_version(self.learner, Path(str(body["path"])), version, optimizer=optimizer)
        self._version = version
        return {}

    async def report_lost(self, request: web.Request) -> web.Response:
        message = msgpack.unpackb(await request.read())
        self.lost(str(message["reason"]))
        return _response(CommandOutcome(200, msgpack.packb({})))

    async def health(self, request: web.Request) -> web.Response:
        about = {"status": self._broken or "ok", "version": self._version, "queued": self._waiting}
        about |= {"stream": self.learner.config.stream}
        return web.json_response(about, status=503 if self._broken else 200)

    async def metrics(self, request: web.Request) -> web.Response:
        lines = [f"rollart_trainer_{name}_total {value}" for name, value in self._totals.items()]
        lines.append(f"rollart_trainer_queued {self._waiting}")
        lines += [f'rollart_trainer_last{{metric="{name}"}} {value}' for name, value in sorted(self._last.items())]
        return web.Response(text="\n".join(lines) + "\n")

    def _snapshot(self, version: int) -> LearnerSnapshot:
        if self.learner.accumulating:
            raise TrainerError(f"version {version} cannot be published: a step was begun and is not finished")
        return take_snapshot(self.learner)

    def _batch(self, body: CommandMessage) -> TrainingBatch:
        policy = self.learner.policy
        return decode_batch(body["samples"], policy.vocab_size, policy.experts)

    def _report(self, report: TrainReport) -> CommandMessage:
        self._totals["steps"] += 1
        self._totals["tokens"] += report.trained_tokens
        self._totals["seconds"] += report.seconds
        self._last = {k: float(np.float64(v)) for k, v in report.metrics.items()}
        return {"trained_tokens": report.trained_tokens, "seconds": report.seconds, "metrics": self._last}

    def _post(self, name: str, channel: RankChannel, pool: ThreadPoolExecutor) -> Callable[[web.Request], Any]:
        work = getattr(self, name)

        async def handler(request: web.Request) -> web.Response:
            body = await request.read()
            self._waiting += 1
            try:
                if name == "publish" and self._ranks.size > 1 and not self._has_staged(body):
                    # Staging is a collective operation of the ranks, so it runs in the learner's thread.
                    staged = await self._answer("stage", self._ranks.torch, self.stage, body, self.torch_pool)
                    if staged.status != 200:
                        return _response(staged)
                return _response(await self._answer(name, channel, work, body, pool))
            finally:
                self._waiting -= 1

        return handler

    async def _answer(
        self, name: str, channel: RankChannel, work: CommandHandler, body: bytes, pool: ThreadPoolExecutor
    ) -> CommandOutcome:
        if self._broken is None:
            loop = asyncio.get_running_loop()
            working = loop.run_in_executor(pool, run_on_all_ranks, channel, name, work, body)
            breaking = asyncio.ensure_future(self._broken_event.wait())
            try:
                await asyncio.wait((working, breaking), return_when=asyncio.FIRST_COMPLETED)
            finally:
                breaking.cancel()
            if working.done():
                outcome = working.result()
                if outcome.sound or self._ranks.size == 1:
                    return outcome
                try:  # it may have been caused by the loss of another rank, whose watcher reports it in a moment
                    async with asyncio.timeout(WATCH_INTERVAL_S):
                        await self._broken_event.wait()
                except TimeoutError:
                    self.lost(outcome.error)
        return CommandOutcome.failed(500, self._broken or "", "it is restarted and restored", sound=False)

    def _has_staged(self, body: bytes) -> bool:
        try:
            return int(msgpack.unpackb(body)["version"]) in self._staged
        except (ValueError, TypeError, KeyError, msgpack.UnpackException):
            return True  # the next reader refuses it


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """HTTP status and msgpack body of a response. `sound`: every rank left its work at the same point, so the next
    command may follow; otherwise a rank may still wait for another."""

    status: int
    body: bytes
    error: str = ""
    remedy: str = ""
    sound: bool = True

    @classmethod
    def failed(
        cls, status: int, error: str, remedy: str = "", *, sound: bool = True, samples: tuple[str, ...] = ()
    ) -> CommandOutcome:
        line = error.splitlines()[0] if error else "unknown"
        return cls(status, msgpack.packb({"error": line, "remedy": remedy, "samples": samples}), line, remedy, sound)


def run_command(work: CommandHandler, body: bytes) -> CommandOutcome:
    """Unpack, run and pack a command in the worker thread; every exception becomes one line."""
    try:
        message = msgpack.unpackb(body)
        if not isinstance(message, dict):
            raise ValueError("the body is not a msgpack map")
        return CommandOutcome(200, msgpack.packb(work(message)))
    except VersionDamaged as error:
        return CommandOutcome.failed(VERSION_DAMAGED_STATUS, error.message, error.remedy)
    except RollartError as error:
        return CommandOutcome.failed(500, error.message, error.remedy)
    except KeyError as error:
        return CommandOutcome.failed(400, f"the request lacks {error}")
    except InvalidSamples as error:
        return CommandOutcome.failed(400, str(error), samples=error.samples)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        return CommandOutcome.failed(400, str(error) or type(error).__name__)
    except torch.OutOfMemoryError as error:
        print(f"rollart.train: {str(error).splitlines()[0]}", file=sys.stderr)
        return CommandOutcome.failed(500, f"no memory is left on the GPU: {error}", MEMORY_REMEDY, sound=False)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return CommandOutcome.failed(500, f"{type(error).__name__}: {error}", sound=False)


def run_on_all_ranks(channel: RankChannel, name: str, work: CommandHandler, body: bytes) -> CommandOutcome:
    """Run a command on every rank, in the channel's thread. The outcome of this rank, or the first failure of
    another."""
    try:
        channel.send_command(name, body)
        mine = run_command(work, body)
        if not mine.sound:
            return mine
        outcomes = channel.exchange((mine.status, mine.error, mine.remedy))
    except TrainerError as error:
        return CommandOutcome.failed(500, error.message, error.remedy, sound=False)
    if mine.status == 200:
        for rank, (status, line, remedy) in enumerate(outcomes):
            if status != 200:
                return CommandOutcome.failed(500, f"rank {rank}: {line}", remedy)
    return mine


def follow_rank_zero(
    channels: Mapping[RankChannel, Mapping[str, CommandHandler]], *, enter: Callable[[], None] = lambda: None
) -> None:
    """Execute rank 0's commands until it is gone; each channel has a thread, which starts with `enter`. Then ends the
    process. An unexpected error ends it at once as well: the other ranks wait for this one in the middle of a command,
    and notice its exit."""

    def listen(channel: RankChannel, works: Mapping[str, CommandHandler]) -> None:
        try:
            enter()
            while True:
                name, body = channel.receive_command()
                mine = run_command(works[name], body)
                if not mine.sound:
                    break
                channel.exchange((mine.status, mine.error, mine.remedy))
        except TrainerError:
            exit_process(0)
        except BaseException:
            traceback.print_exc(file=sys.stderr)
        exit_process(1)

    threads = [threading.Thread(target=listen, args=pair, daemon=True) for pair in channels.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _response(outcome: CommandOutcome) -> web.Response:
    return web.Response(body=outcome.body, status=outcome.status, content_type="application/msgpack")


def exit_process(status: int) -> None:
    sys.stderr.flush()
    os._exit(status)
