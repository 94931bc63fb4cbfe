"""Weight broadcasts: each version goes from the trainer's memory into that of every engine, while engines keep
generating."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from placement.types import ROLLOUT_ROLES, Role
from rollart.adapters.engines.http import HttpEngine
from rollart.adapters.trainers.http import HttpTrainer
from rollart.errors import EngineError, LeaseExpired, SpecError, TrainerError
from rollart.launch.layout import torch_device
from rollart.leases import Expiry, Leases
from rollart.model import BroadcastResult, EngineId
from rollart.ports import Recorder, RunEvent
from rollart.settings.resolve import Resolved

JOIN_TIMEOUT_S = 10.0
"""Engines confirm at once that they take part; an engine that has not within this many seconds is left out."""


def weight_broadcaster(resolved: Resolved, leases: Leases, recorder: Recorder) -> WeightBroadcaster | None:
    """The run's broadcaster; None if engines read version files."""
    spec = resolved.run.weights.collective
    if spec is None:
        return None
    return WeightBroadcaster(
        leases,
        recorder,
        backend=collective_backend(resolved),
        bucket_bytes=spec.bucket_mb * 10**6,
        send_s=resolved.run.leases.publish_s / 2,
    )


def collective_backend(resolved: Resolved) -> str:
    """NCCL between GPUs, gloo where any part computes on CPU cores. SpecError for NCCL without GPUs."""
    spec, plan = resolved.run.weights.collective, resolved.plan
    assert spec is not None, "asked of runs that broadcast"
    cores = [a for a in plan.of(Role.TRAINER, *ROLLOUT_ROLES) if torch_device(resolved, a) == "cpu"]
    if spec.backend == "nccl" and cores:
        raise SpecError(
            f"weights.collective.backend is nccl, and {cores[0].name} runs on cores of pool '{cores[0].pool}' (rule: "
            "GPUs on both sides)",
            remedy="leave the backend out, or give trainer and engines GPUs",
        )
    if spec.backend == "auto":
        return "gloo" if cores else "nccl"
    return spec.backend


@dataclass(frozen=True, slots=True)
class _BroadcastGroup:
    """The members of a broadcast. A new group is formed when the members change, and after a broadcast that a member
    missed."""

    name: str
    trainer: HttpTrainer
    address: str
    lanes: int
    members: tuple[tuple[HttpEngine, int, int], ...]
    """Each engine with the number of its first worker and its number of workers."""


class WeightBroadcaster:
    """Broadcasts versions to the engines that take part. Engine parts call `join` and `leave`; the trainer's part calls
    `send`, once at a time, while the same version is written to disk. An engine that does not take part, dies, hangs or
    receives damaged data loads the version from files instead, and the broadcast after it includes only live engines.

    `send` waits until each member has the version or is given up, by the trainer's rank 0 or when the lease expires.
    """

    def __init__(self, leases: Leases, recorder: Recorder, *, backend: str, bucket_bytes: int, send_s: float) -> None:
        self._leases, self._recorder = leases, recorder
        self._backend, self._bucket_bytes, self._send_s = backend, bucket_bytes, send_s
        self._engines: dict[EngineId, HttpEngine] = {}
        self._group: _BroadcastGroup | None = None

    @property
    def has_engines(self) -> bool:
        """True if there is an engine to send to."""
        return bool(self._engines)

    def join(self, engine: HttpEngine) -> None:
        """Add a running engine."""
        self._engines[engine.id] = engine

    def leave(self, engine: EngineId) -> None:
        self._engines.pop(engine, None)

    async def send(self, trainer: HttpTrainer, version: int) -> None:
        """Send the staged version. Raises nothing: a missed version is recorded as an event."""
        if not self._engines:
            return
        for engine in self._engines.values():
            engine.sent_anew(version)
        began = asyncio.get_running_loop().time()
        try:
            waiting_for = f"a broadcast of v{version} to {len(self._engines)} engines"
            async with self._leases.hold("trainer", waiting_for, self._send_s, Expiry.RETRY):
                stamp = f"v{version}-{secrets.token_hex(4)}"
                group = await self._gather_group(trainer, version, stamp)
                if group is None:
                    return
                sent = await trainer.send(self._order_fields(group, version, stamp, 0), bucket_bytes=self._bucket_bytes)
        except (TrainerError, LeaseExpired) as error:
            self._group = None
            self._event("weights_not_sent", f"v{version}", why=error.message)
            return
        except asyncio.CancelledError:  # the trainer goes on sending, and its result is lost
            self._group = None
            raise
        if not self._record_results(group, version, stamp, sent):
            self._group = None
        seconds = asyncio.get_running_loop().time() - began
        if 0 in sent.errors:
            self._event("weights_not_sent", f"v{version}", why=sent.errors[0], seconds=seconds)
        else:
            self._event("weights_sent", f"v{version}", bytes=sent.bytes, engines=len(group.members), seconds=seconds)

    async def _gather_group(self, trainer: HttpTrainer, version: int, stamp: str) -> _BroadcastGroup | None:
        """A group whose members have all confirmed that they take part; engines that do not confirm are left out. None
        without engines."""
        engines = list(self._engines.values())
        while engines:
            group, missing = self._group, dict[HttpEngine, str]()
            known = None if group is None else (group.trainer, [engine for engine, *_ in group.members])
            if group is None or known != (trainer, engines):
                group, missing = await self._form_group(trainer, engines)
            if not missing:
                missing = await _call_all(
                    {e: e.take_part(self._order_fields(group, version, stamp, first)) for e, first, _ in group.members}
                )
            if not missing:
                self._group = group
                return group
            self._group = None
            for engine, why in missing.items():
                self._event("weights_not_received", engine.id, version=version, why=why)
                engines.remove(engine)
        return None

    async def _form_group(
        self, trainer: HttpTrainer, engines: Sequence[HttpEngine]
    ) -> tuple[_BroadcastGroup, dict[HttpEngine, str]]:
        address, lanes = await trainer.meet()
        workers: dict[HttpEngine, int] = {}

        async def count(engine: HttpEngine) -> None:
            workers[engine] = await engine.members()

        missing = await _call_all({engine: count(engine) for engine in engines})
        members, first = [], 1
        for engine in engines:
            members.append((engine, first, workers.get(engine, 0)))
            first += workers.get(engine, 0)
        return _BroadcastGroup(secrets.token_hex(4), trainer, address, lanes, tuple(members)), missing

    def _order_fields(self, group: _BroadcastGroup, version: int, stamp: str, first: int) -> dict[str, object]:
        """The fields of `rollart.collective.BroadcastOrder`, which is not imported here because it loads torch."""
        return {
            "address": group.address,
            "group": group.name,
            "backend": self._backend,
            "size": 1 + sum(workers for *_, workers in group.members),
            "lanes": group.lanes,
            "stamp": stamp,
            "version": version,
            "limit_s": self._send_s,
            "first": first,
        }

    def _record_results(self, group: _BroadcastGroup, version: int, stamp: str, sent: BroadcastResult) -> bool:
        """Record the result of each engine; True if all workers of all engines have the version."""
        whole = 0 not in sent.errors
        for engine, first, workers in group.members:
            numbers = range(first, first + workers)
            if all(number in sent.has for number in numbers):
                engine.received(version, stamp)
                self._event(
                    "weights_received",
                    engine.id,
                    version=version,
                    bytes=sum(sent.has[number][0] for number in numbers),
                    seconds=max(sent.has[number][1] for number in numbers),
                )
            else:
                whole = False
                why = next((sent.errors[n] for n in numbers if n in sent.errors), "it did not answer")
                self._event("weights_not_received", engine.id, version=version, why=why)
        return whole

    def _event(self, kind: str, subject: str, **fields: str | int | float) -> None:
        self._recorder.event(RunEvent(asyncio.get_running_loop().time(), kind, subject, fields))


async def _call_all(calls: Mapping[HttpEngine, Coroutine[Any, Any, None]]) -> dict[HttpEngine, str]:
    """Run all calls at once; the engines that failed or did not answer in time, with the reasons."""
    missing: dict[HttpEngine, str] = {}

    async def run(engine: HttpEngine, call: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                await call
        except EngineError as error:
            missing[engine] = error.message
        except TimeoutError:
            missing[engine] = f"it has not answered for {JOIN_TIMEOUT_S:g} s"

    async with asyncio.TaskGroup() as tasks:
        for engine, call in calls.items():
            tasks.create_task(run(engine, call), name=f"a broadcast and {engine.id}")
    return missing
