"""Weight distribution through a store: versions are pushed once after they are published, and pulled by engine hosts.

The trainer's log-probabilities of a fixed probe are written beside each version, and engines compare theirs after they
load it. An update can go wrong without an error: an output head that keeps its packed copy, stale KV, a missing share
of one rank. Log-probabilities of a few tokens depend on every layer and reveal it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Sequence
from pathlib import Path

from rollart.adapters.engines.vllm import PROBE_FILE, VllmHost
from rollart.adapters.weights.buckets import (
    BucketArrivals,
    BucketPusher,
    PullProgress,
    PushResult,
    first_failure_only,
)
from rollart.adapters.weights.directory import DirectoryWeightStore
from rollart.adapters.weights.hosts import WeightStoreLocation
from rollart.errors import EngineError, LeaseExpired, PartDied, StorageFailed
from rollart.leases import Expiry, Leases
from rollart.model import TrainSample, WeightsRef
from rollart.ports import Handle, Recorder, RunEvent
from rollart.settings.resolve import Resolved

STORE_NAME_FILE = "weight-store"
"""File in the run's directory with the run's unique name in a store that other runs use as well."""


def run_id(directory: Path, file: Path) -> str:
    """The run's id in a shared provider account or store, kept in `file`. The file is written atomically: an empty one
    would be the id of every run that was killed at that moment."""
    found = file.read_text().strip() if file.exists() else ""
    if not found:
        found, temporary = f"{directory.name}-{secrets.token_hex(4)}", file.with_name(f"{file.name}.new")
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(found)
        temporary.replace(file)
    return found


def weight_store_location(resolved: Resolved, directory: Path) -> WeightStoreLocation | None:
    """Location of the run's versions in the store; None if engines read the run's directory."""
    spec = resolved.run.weights.store
    if spec is None:
        return None
    name = run_id(directory, directory / STORE_NAME_FILE)
    url = spec.url if spec.kind == "s3" else str((Path(resolved.base) / spec.url).resolve())
    root = directory / "pulled" if spec.local is None else Path(spec.local) / name
    return WeightStoreLocation(spec.kind, f"{url.rstrip('/')}/{name}", str(root), spec.in_flight)


def weight_store(resolved: Resolved, directory: Path, leases: Leases, recorder: Recorder) -> DirectoryWeightStore:
    """The store that the trainer publishes into, with or without distribution."""
    spec, location, root = resolved.run.weights.store, weight_store_location(resolved, directory), directory / "weights"
    if spec is None or location is None:
        return DirectoryWeightStore(root)
    return SharedWeightStore(
        root,
        location,
        leases,
        recorder,
        bucket_bytes=spec.bucket_mb * 10**6,
        # Attached servers pull by themselves, whole buckets.
        deltas=spec.anchor_every if spec.delta == "auto" and not resolved.cluster.engines.attach else 0,
        ahead=resolved.run.weights.update != "on_divergence",
        pull_s=resolved.run.leases.publish_s / 2,
    )


PULL_STALL_S = 10.0
"""Seconds without a response after which a host counts as hung."""

SLOWEST_BUCKET_FACTOR = 8.0
"""Multiple of the longest bucket time of any host: links differ, and many buckets share one."""


WeightPullProgram = Handle | VllmHost
"""An engine's program on its host, or the stand-in for an attached engine, with the calls `pull`, `arrived` and
`pulling` of `clusters.program.Program`."""


class SharedWeightStore(DirectoryWeightStore):
    """Implements `WeightStore` over the run's directory, which the trainer and resumes read as without a store.

    `push` is called by publishes, one at a time. It returns when the store has the version and, with `ahead`, when
    every engine host has pulled it if it could: bucket by bucket during the push, while the rollout goes on. `local` is
    called by engines; it returns when the version is on the program's host. A hung host is given up (`_watch`).
    Versions are collected only after a call of `prune`.
    """

    def __init__(
        self,
        root: Path,
        location: WeightStoreLocation,
        leases: Leases,
        recorder: Recorder,
        *,
        bucket_bytes: int,
        deltas: int,
        ahead: bool,
        pull_s: float,
    ) -> None:
        super().__init__(root)
        self.location = location
        self._leases, self._recorder = leases, recorder
        self._ahead, self.pull_s = ahead, pull_s
        self._objects = location.objects()
        self.pusher = BucketPusher(
            self._objects, bucket_bytes=bucket_bytes, in_flight=location.in_flight, deltas=deltas
        )
        self._programs: dict[str, WeightPullProgram] = {}
        self.longest_s = 0.0
        """Seconds of the slowest bucket so far, of all hosts."""
        self._keep: tuple[int, ...] = ()
        self.stamps: dict[int, str] = {}

    def prune(self, keep: Sequence[int], checkpoints: Sequence[int] = ()) -> None:
        super().prune(keep, checkpoints)
        self._keep = tuple(keep)
        self.stamps = {v: stamp for v, stamp in self.stamps.items() if v in keep or v > max(keep)}

    def join(self, program: WeightPullProgram) -> None:
        """Add an engine's program: its host receives new versions ahead of the engine."""
        self._programs[program.name] = program

    def leave(self, name: str) -> None:
        self._programs.pop(name, None)

    async def push(self, weights: WeightsRef) -> None:
        """`StorageFailed` if the store does not accept the version, since no engine could load it."""
        arrivals = await self.pusher.prepare(weights.version, weights.path)
        self.stamps[weights.version] = arrivals.manifest.stamp
        pushed: PushResult | StorageFailed
        async with first_failure_only(), asyncio.TaskGroup() as pulls:
            for program in list(self._programs.values()) if self._ahead else ():
                pull = self._pull_ahead(program, weights, arrivals)
                pulls.create_task(pull, name=f"v{weights.version} to {program.name}")
            try:
                pushed = await self.pusher.push(weights.path, arrivals)
            except StorageFailed as error:  # the arrivals report it to hosts, which give up
                pushed = error
        if isinstance(pushed, StorageFailed):
            raise pushed
        self._event(
            "weights_pushed",
            f"v{weights.version}",
            bytes=pushed.bytes,
            sent_bytes=pushed.sent,
            seconds=pushed.seconds,
        )
        if self._keep:
            await self.pusher.collect([*self._keep, weights.version])

    async def local(self, program: WeightPullProgram, weights: WeightsRef, coming: bytes | None = None) -> str:
        """The version's directory on the program's host, once it is there. `coming`: the manifest of a version that is
        being pushed. `EngineError` if the pull fails or takes too long."""
        try:
            async with self._leases.hold(program.name, f"v{weights.version} from the store", self.pull_s, Expiry.RETRY):
                stamp = self.stamps.get(weights.version)
                if stamp is None:
                    raise StorageFailed("it was not pushed, or is collected")
                async with first_failure_only(), asyncio.TaskGroup() as tasks:
                    watching = tasks.create_task(self._watch(program), name=f"the pull of {program.name}")
                    path, pulled = await program.call("pull", self.location, weights.version, stamp, self._keep, coming)
                    watching.cancel()
        except (StorageFailed, PartDied, LeaseExpired) as error:
            raise EngineError(f"{program.name} has no v{weights.version}: {error.message}", retryable=True) from error
        if pulled.bytes:
            self._event(
                "weights_pulled",
                program.name,
                version=weights.version,
                bytes=pulled.bytes,
                received_bytes=pulled.received,
                seconds=pulled.seconds,
            )
        return str(path)

    async def _watch(self, program: WeightPullProgram) -> None:
        """Runs until cancelled. `StorageFailed` for a host that no longer answers, or that has received no requested
        bucket for much longer than buckets take."""
        loop = asyncio.get_running_loop()
        buckets, since = -1, loop.time()
        while True:
            await asyncio.sleep(PULL_STALL_S / 4)
            try:
                async with asyncio.timeout(PULL_STALL_S):
                    progress: PullProgress | None = await program.call("pulling")
            except TimeoutError:
                raise StorageFailed(f"its host has not answered for {PULL_STALL_S:g} s") from None
            if progress is None or progress.buckets != buckets or not progress.open:
                buckets, since = -1 if progress is None else progress.buckets, loop.time()
            self.longest_s = max(self.longest_s, 0.0 if progress is None else progress.longest_s)
            limit = max(PULL_STALL_S, SLOWEST_BUCKET_FACTOR * self.longest_s)
            if self.longest_s and loop.time() - since > limit:
                raise StorageFailed(
                    f"no bucket has come to its host for {limit:.3g} s (the longest took {self.longest_s:.3g} s)"
                )

    async def aclose(self) -> None:
        await self._objects.aclose()

    async def _pull_ahead(self, program: WeightPullProgram, weights: WeightsRef, arrivals: BucketArrivals) -> None:
        """Pull ahead of the engine, bucket by bucket as they are pushed."""
        manifest = arrivals.manifest.encode()
        try:
            async with first_failure_only(), asyncio.TaskGroup() as tasks:
                forwarding = tasks.create_task(
                    self._forward_arrivals(program, manifest, arrivals), name=f"buckets for {program.name}"
                )
                await self.local(program, weights, manifest)
                forwarding.cancel()
        except EngineError as error:  # not fatal: the engine pulls again when it loads
            self._event("weights_not_pulled", program.name, version=weights.version, why=error.message)

    async def _forward_arrivals(self, program: WeightPullProgram, manifest: bytes, arrivals: BucketArrivals) -> None:
        announced: set[str] = set()
        over = False
        while not over:
            await arrivals.more(len(announced))
            fresh, over = arrivals.there.keys() - announced, arrivals.over
            announced |= fresh
            buckets = [" ".join((digest, *arrivals.there[digest])) for digest in sorted(fresh)]
            with contextlib.suppress(PartDied, StorageFailed):  # the pull itself reports it
                await program.call("arrived", self.location, manifest, buckets, over, arrivals.whole)

    def _event(self, kind: str, subject: str, **fields: str | int | float) -> None:
        self._recorder.event(RunEvent(asyncio.get_running_loop().time(), kind, subject, fields))


PROBE_TOKENS = 48
"""Length of the probe: enough for positions to matter, negligible beside a training step."""

PROBE_VOCABULARY = 30
"""Distinct token ids in the probe: few enough for any vocabulary that is worth training."""


def agreement_sample(resolved: Resolved) -> TrainSample | None:
    """The probe; None where engines are not compared. The trainer scores at the run's temperature and vLLM scores
    prompts at 1, so the temperature must be 1."""
    run, engines = resolved.run, resolved.cluster.engines
    if engines.kind != "vllm" or engines.vllm.probe == 0 or not run.domains or run.domains[0].temperature != 1.0:
        return None
    n = min(PROBE_TOKENS, run.model.context - 1)
    first, *others = (1 + 7 * i % PROBE_VOCABULARY for i in range(n))
    return TrainSample.unsampled("agreement", run.domains[0].name, (first,), tuple(others))


def write_agreement(weights: WeightsRef, sample: TrainSample, found: Sequence[float]) -> None:
    """Write the probe's log-probabilities beside the version that the trainer had when it computed them."""
    text = json.dumps({"token_ids": sample.token_ids, "logprobs": found[1:]})
    temporary = Path(weights.path) / f".{PROBE_FILE}"
    temporary.write_text(text)
    temporary.replace(Path(weights.path) / PROBE_FILE)  # engines never see a partial file
