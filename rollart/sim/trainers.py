"""A trainer on virtual time: seconds from the tokens it is given and the devices it has.

Arithmetic as in the placer's training (`placement.problem.TrainingWork`): forward and backward FLOPs of the
architecture at a share of the devices' peak, and a part of every step that does not depend on the tokens.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from placement.architecture import DecoderShape
from placement.types import Device
from rollart.errors import TrainerError
from rollart.model import TrainReport, TrainSample, WeightsRef
from rollart.sim.weights import WeightTransfer
from rollart.sim.workload import mass_of, sampled_mass

LOGPROB_DRIFT = 0.001
"""KL between a version and the next, nats per token, over n of them n times that: of the order that clipped losses keep
to. Assumed, not fitted."""

FORWARD_SHARE = 1 / 3
"""Of a training pass: the backward pass takes twice the forward one."""


class TrainingSpeed:
    """Seconds of training for sequences of these lengths in tokens. A step is its passes and a part that does not
    depend on the tokens."""

    __slots__ = ()
    epochs: int
    seconds_per_step: float

    def pass_s(self, lengths: Sequence[int]) -> float:
        """Forward and backward of sequences of these lengths, once."""
        raise NotImplementedError

    def step_s(self, lengths: Sequence[int]) -> float:
        return self.seconds_per_step + self.epochs * self.pass_s(lengths)


@dataclass(frozen=True, slots=True)
class MeasuredSpeed(TrainingSpeed):
    """A trainer whose steps were measured: seconds per token of a batch, all its epochs together, and per step."""

    seconds_per_token: float
    seconds_per_step: float = 0.0
    epochs: int = field(default=1, init=False)

    def pass_s(self, lengths: Sequence[int]) -> float:
        return self.seconds_per_token * sum(lengths)


@dataclass(frozen=True, slots=True)
class TrainerSpeed(TrainingSpeed):
    """`devices` of a type at `mfu` of their dense bf16 peak, `epochs` over each batch, `seconds_per_step` besides."""

    shape: DecoderShape
    device: Device
    devices: int
    mfu: float = 0.40
    epochs: int = 1
    seconds_per_step: float = 0.0

    def __post_init__(self) -> None:
        if self.device.tflops_bf16 is None or self.devices < 1 or not 0 < self.mfu <= 1:
            raise ValueError(
                f"trainer on {self.devices} {self.device.name} at {self.mfu} of {self.device.tflops_bf16} TFLOP/s "
                "(rule: at least one device with a peak, a share in (0, 1])"
            )

    def pass_s(self, lengths: Sequence[int]) -> float:
        flops = sum(self.shape.train_flops(n, n / 2) for n in lengths if n)
        return flops / (self.devices * (self.device.tflops_bf16 or 0.0) * 1e12 * self.mfu)


def group_mean_advantages(samples: Sequence[TrainSample]) -> list[tuple[float, ...]]:
    """Each sample's score above the mean of its group, at its sampled tokens."""
    scores: dict[str, list[float]] = {}
    for sample in samples:
        scores.setdefault(sample.group, []).append(sample.score)
    mean = {group: math.fsum(mine) / len(mine) for group, mine in scores.items()}
    return [tuple(s.score - mean[s.group] if m else 0.0 for m in s.loss_mask) for s in samples]


@dataclass(eq=False)
class ModelledTrainer:
    """Implements `ports.Trainer`; a sample's tokens are masses. Concurrent calls take turns on the devices. With
    `streams` a step may come in pieces. A publish takes `publish_s` and, with a `transfer`, its push; a staged version
    has taken `publish_s` before, and is pushed beside the next step. `fail` breaks the running call (a push at its next
    bucket) and all later ones, with `TrainerError`, until `restore`, which waits for devices that `leave`.
    """

    speed: TrainingSpeed
    transfer: WeightTransfer | None = None
    publish_s: float = 0.0
    streams: bool = False
    penalised: bool = False
    """A step needs reference log-probabilities, and computes the ones that its samples lack."""
    help: float = field(default=0.0, init=False)
    _dead: bool = field(default=False, init=False)
    _gone: asyncio.Future[None] | None = field(default=None, init=False)
    _open: list[TrainSample] | None = field(default=None, init=False)
    _staged: set[int] = field(default_factory=set, init=False)
    _version: int = field(default=0, init=False)
    _under_way: asyncio.Future[None] | None = field(default=None, init=False)
    _devices: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _passing: _PacedWork | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.streams and self.speed.epochs > 1:
            raise ValueError(f"{self.speed.epochs} epochs cannot be streamed (rule: one pass over the batch)")

    async def train(self, samples: Sequence[TrainSample], version: int) -> TrainReport:
        seconds = self.speed.step_s([mass_of(s.token_ids) for s in samples]) + self._references_s(samples)
        await self._work(seconds)
        self._version = version
        return self._stepped(samples, seconds)

    async def begin(self, version: int) -> None:
        self._open = []
        self._version = version

    async def accumulate(self, samples: Sequence[TrainSample]) -> None:
        """The pass over these; the step's own time is `finish`'s."""
        held = self._begun()
        seconds = self.speed.pass_s([mass_of(s.token_ids) for s in samples]) + self._references_s(samples)
        await self._work(seconds, shared=True)
        held.extend(samples)

    async def finish(self) -> TrainReport:
        samples = self._begun()
        await self._work(self.speed.seconds_per_step)
        self._open = None
        return self._stepped(samples, self.speed.step_s([mass_of(s.token_ids) for s in samples]))

    async def imitate(self, samples: Sequence[TrainSample], batches: int) -> TrainReport:
        seconds = batches * self.speed.step_s([mass_of(s.token_ids) for s in samples])
        await self._work(seconds)
        return TrainReport(batches * sum(map(sampled_mass, samples)), seconds, {})

    async def logprobs(self, samples: Sequence[TrainSample]) -> list[tuple[float, ...]]:
        await self._work(FORWARD_SHARE * self.speed.pass_s([mass_of(s.token_ids) for s in samples]))
        now = self._version
        return self._drifted(samples, lambda version: now - version)

    async def reference(self, samples: Sequence[TrainSample]) -> list[tuple[float, ...]]:
        """A forward pass on the trainer's own devices, between whatever else they do."""
        await self._work(FORWARD_SHARE * self.speed.pass_s([mass_of(s.token_ids) for s in samples]))
        return self._drifted(samples, lambda version: version)

    async def advantages(self, samples: Sequence[TrainSample]) -> list[tuple[float, ...]]:
        """Takes no time beside the rest."""
        return group_mean_advantages(samples)

    async def stage(self, version: int) -> None:
        await self._work(self.publish_s)
        self._staged.add(version)

    async def publish(self, version: int) -> WeightsRef:
        staged = version in self._staged
        if not staged:
            await self._work(self.publish_s)
        if self.transfer is not None:
            await self.transfer.push(version, lost=lambda: self._dead or (staged and version not in self._staged))
        self._staged.discard(version)
        moved = 0.0 if self.transfer is None else self.transfer.gb
        return WeightsRef(version, f"v{version:06d}", round(moved * 1e9))

    def leave(self) -> None:
        """Its devices are gone: it dies, and comes back no sooner than they do."""
        self._gone = asyncio.get_running_loop().create_future()
        self.fail = True

    def come_back(self) -> None:
        """The devices are there again; the process has to be restored."""
        if self._gone is not None:
            self._gone.set_result(None)
            self._gone = None

    async def restore(self, weights: WeightsRef, *, optimizer: bool = True) -> None:
        while self._gone is not None:
            await asyncio.shield(self._gone)
        self._dead = False
        self._open = None
        self._staged.clear()

    @property
    def fail(self) -> bool:
        return self._dead

    @fail.setter
    def fail(self, dead: bool) -> None:
        self._dead = dead
        if dead:
            self._open = None
            self._staged.clear()
        if dead and self._under_way is not None and not self._under_way.done():
            self._under_way.set_exception(TrainerError("the trainer died"))

    def _references_s(self, samples: Sequence[TrainSample]) -> float:
        lacking = [mass_of(s.token_ids) for s in samples if not s.reference] if self.penalised else []
        return FORWARD_SHARE * self.speed.pass_s(lacking) if lacking else 0.0

    def _stepped(self, samples: Sequence[TrainSample], seconds: float) -> TrainReport:
        """Count a step from the current version."""
        self._version += 1
        return TrainReport(sum(map(sampled_mass, samples)), seconds, {})

    def _drifted(self, samples: Sequence[TrainSample], distance: Callable[[int], int]) -> list[tuple[float, ...]]:
        """Log-probabilities under a policy that is `distance` versions from the one that sampled a token."""
        return [
            tuple(
                p - math.sqrt(2.0 * LOGPROB_DRIFT * max(distance(v), 0)) if v >= 0 else p
                for p, v in zip(s.logprobs, s.versions, strict=True)
            )
            for s in samples
        ]

    def _begun(self) -> list[TrainSample]:
        if self._open is None:
            raise TrainerError("no step was begun")
        return self._open

    def borrow(self, share: float) -> None:
        """From now on other devices compute passes too, `share` times as fast as its own; 0: they went back."""
        if self._passing is not None:
            self._passing.repaced(1.0 + share)
        self.help = share

    async def _work(self, seconds: float, *, shared: bool = False) -> None:
        """`shared`: lent devices have a part in it."""
        loop = asyncio.get_running_loop()
        async with self._devices:
            if self._dead:
                raise TrainerError("the trainer is down")
            over = self._under_way = loop.create_future()
            work = _PacedWork(over, seconds, 1.0 + self.help if shared else 1.0)
            self._passing = work if shared else None
            try:
                await over
            finally:
                work.stop()
                self._passing = None


class _PacedWork:
    """Seconds of work at pace 1, done at a pace that may change."""

    def __init__(self, over: asyncio.Future[None], seconds: float, pace: float) -> None:
        self._over, self._left = over, seconds
        self._start(pace)

    def _start(self, pace: float) -> None:
        loop, over = self._over.get_loop(), self._over
        self._since, self._pace = loop.time(), pace
        self._timer = loop.call_later(self._left / pace, lambda: None if over.done() else over.set_result(None))

    def repaced(self, pace: float) -> None:
        self.stop()
        self._left = max(self._left - (self._over.get_loop().time() - self._since) * self._pace, 0.0)
        self._start(pace)

    def stop(self) -> None:
        self._timer.cancel()
