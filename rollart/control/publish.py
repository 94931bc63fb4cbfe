"""Publish: the trainer's weights become the current version, durably first and then on every engine.

Where engines update by divergence, the distance of a version from earlier ones is measured before: mean KL, grouped by
the version that sampled the tokens.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollart.errors import LeaseExpired, StorageFailed
from rollart.leases import Expiry, Leases
from rollart.model import Group, TrainSample
from rollart.policy.checkpoints import MIN_KEPT, REWARD, SUCCESS, CheckpointPolicy, metric_value
from rollart.ports import Journal, Recorder, RunEvent, Trainer, WeightStore
from rollart.serving.gateway import Gateway

LARGEST = 20.0
"""Log-ratios are clipped to this magnitude, in nats: one token that the new policy all but forbids is far enough."""


def mean_kl(tokens: Iterable[tuple[int, float, float]]) -> dict[int, float]:
    """KL(version ‖ now) in nats per token, by sampling version, from (version, log-probability then, log-probability
    now). The estimator is e^r − 1 − r with r = now − then, over tokens drawn then: unbiased and never negative
    (Schulman 2020, "Approximating KL divergence")."""
    total: dict[int, float] = {}
    count: dict[int, int] = {}
    for version, then, now in tokens:
        r = min(max(now - then, -LARGEST), LARGEST)
        total[version] = total.get(version, 0.0) + math.expm1(r) - r
        count[version] = count.get(version, 0) + 1
    return {version: total[version] / count[version] for version in total}


PROBE_SAMPLES = 32
"""Approximate number of samples of a probe: a forward pass over so few is cheap compared with a training step."""


class Publisher:
    """Called by training alone, one publish at a time. A staged version is published during the next step.

    The order makes kill -9 safe: write the whole version, commit it and the samples it consumed in one transaction,
    then move the engines. A crash before the commit leaves the old version and all its samples. A crash after it leaves
    the new version, which engines load when they start.
    """

    def __init__(
        self,
        trainer: Trainer,
        gateway: Gateway,
        journal: Journal,
        leases: Leases,
        *,
        publish_s: float,
        on_version: Callable[[int, Sequence[Group]], None],
        prune: Callable[[int, Sequence[Group]], None],
        drained: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._trainer = trainer
        self._gateway = gateway
        self._journal = journal
        self._leases = leases
        self._publish_s = publish_s
        self._on_version = on_version
        self._prune = prune
        self._drained = drained

    async def probe(self, version: int, samples: Callable[[], Sequence[TrainSample]]) -> None:
        """Measure the divergence of `version` from earlier versions with the trainer, on samples of the batch, if the
        update policy of the engines needs it."""
        updates = self._gateway.updates
        if not updates.probes:
            return
        every = samples()
        some = every[:: max(1, len(every) // PROBE_SAMPLES)]
        async with self._leases.hold("publish", f"a probe of v{version}", self._publish_s, Expiry.RESTART_PART):
            found = await self._trainer.logprobs(some)
        updates.measured(
            version,
            mean_kl(
                (v, then, now)
                for sample, current in zip(some, found, strict=True)
                for v, then, now, acts in zip(sample.versions, sample.logprobs, current, sample.loss_mask, strict=True)
                if acts
            ),
        )

    async def stage(self, version: int) -> None:
        """Copy the weights that will be published as `version`; returns when the trainer may continue."""
        async with self._leases.hold("publish", f"a copy of v{version}", self._publish_s, Expiry.RESTART_PART):
            await self._trainer.stage(version)

    async def publish(self, version: int, step: int, consumed: Sequence[Group], metrics: Mapping[str, float]) -> None:
        """Returns when every healthy engine serves `version` and stale trajectories are aborted (I2)."""
        async with self._leases.hold("publish", f"weights of v{version}", self._publish_s, Expiry.RESTART_PART):
            weights = await self._trainer.publish(version)
        try:
            async with self._leases.hold("publish", "the journal's commit", self._publish_s, Expiry.FAIL_RUN):
                await self._journal.commit(
                    version=version, step=step, consumed=consumed, metrics=metrics, stamp=weights.stamp
                )
        except LeaseExpired as error:
            raise StorageFailed(str(error), remedy="look at the disk of the run directory, then --resume") from None
        if self._drained is not None:
            with self._leases.note("publish", f"trajectories to end before v{version}"):
                await self._drained()
        await self._gateway.update(weights, lambda v: self._on_version(v, consumed))
        self._prune(version, consumed)


@dataclass(eq=False)
class CheckpointKeeper:
    """Removes versions from the store that need not stay. Called by training and by evaluations, one at a time.

    `metric`: that of the best version, None for none. `in_use`: versions that must stay for other reasons. With the
    default policy nothing is recorded; otherwise the ledger has every new best version and every change on disk.
    """

    store: WeightStore
    recorder: Recorder
    policy: CheckpointPolicy
    metric: str | None
    in_use: Callable[[], Iterable[int]]

    def evaluated(self, version: int, success: Mapping[str, float | None]) -> None:
        """Success on held-out episodes, by domain."""
        self._scored(version, SUCCESS, success)

    def published(self, version: int, consumed: Sequence[Group]) -> None:
        """`version` is current: remove what need not stay. The batch that was trained into it was rolled out while the
        version before it was current, and is that version's reward."""
        if self.metric is not None:
            self._scored(version - 1, REWARD, mean_rewards(consumed))
        last, in_use, kept = [version - 1, version], [*self.in_use()], self.policy.kept(version)
        if self.policy.keep == MIN_KEPT and self.policy.every is None and self.metric is None:
            self.store.prune([*last, *in_use])
            return
        before = self.store.versions()
        self.store.prune([*last, *in_use], kept)
        after = self.store.versions()
        removed = sorted({*before} - {*after})
        names = {"kept": _names(after), "removed": _names(removed)}
        self.recorder.event(RunEvent(asyncio.get_running_loop().time(), "checkpoints", f"v{version}", names))

    def _scored(self, version: int, of: str, by_domain: Mapping[str, float | None]) -> None:
        score = None if self.metric is None else metric_value(self.metric, of, by_domain)
        if score is not None and self.policy.scored(version, score):
            fields = {"version": version, "metric": self.metric, "score": score}
            self.recorder.event(RunEvent(asyncio.get_running_loop().time(), "best_version", f"v{version}", fields))


def mean_rewards(groups: Sequence[Group]) -> dict[str, float]:
    """Mean reward of the samples, by domain."""
    scores: dict[str, list[float]] = {}
    for sample in (s for group in groups for s in group.samples):
        scores.setdefault(sample.domain, []).append(sample.score)
    return {domain: sum(found) / len(found) for domain, found in scores.items()}


def _names(versions: Sequence[int]) -> str:
    return " ".join(f"v{version}" for version in versions)
