"""Versions across clusters: pushed once over the slow link into a store near the engines, pulled from there by many
(RollArt §3: weights in buckets through a store, so that the slow link carries each of them once).

A version's files are cut into *buckets* of equal size, named by the hash of their bytes:

    buckets/<sha256>          a bucket; unchanged buckets of an earlier version are already there
    deltas/<sha256>-<base>    the same bucket as its difference from the bucket `base` (`delta.py`)
    versions/v000003.json     the manifest, with the buckets of each file: written last, so a version is visible whole
                              or not at all

No bucket is overwritten, so a reader can never see two versions mixed: it requests buckets by their hash, verifies it,
and makes the version visible on its own disk (`COMPLETE`, then a rename) when it has all of them. A reader that is
still pulling a version while it is collected fails, and has no version. A pull may begin before the push has ended: it
waits for the arrival of each bucket. `policy.pipeline` decides how many buckets a push or pull moves concurrently.

A *chain* names what a bucket is made of where the store has it only as a delta: the base, the base of that, and so on
down to a bucket that the store has whole, its anchor. It is empty for a bucket that is there whole. A reader that has
the base applies one delta; another reads the anchor and applies all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from rollart.adapters.weights.delta import apply_delta, encode_delta
from rollart.adapters.weights.directory import DirectoryWeightStore
from rollart.adapters.weights.objects import ObjectStore, storage_failures
from rollart.architecture import MARKER, stamp_of
from rollart.errors import StorageFailed
from rollart.policy.pipeline import BucketDepth, InFlight

BUCKET_BYTES = 256 * 2**20
"""RollArt uses 1 GB; smaller buckets overlap better if a version is smaller than 10 GB."""

MANIFEST = "buckets.json"
"""In a pulled directory: the buckets that it was made of, so that the next version copies unchanged ones from it."""


Chain: TypeAlias = tuple[str, ...]
"""Hashes of the buckets that a delta is based on, the anchor last; empty for a bucket that is in the store whole."""


class BucketPusher:
    """The trainer's side. One push or collection at a time; others wait for it. `in_flight` is the number of buckets in
    transfer at a time: with `auto` as many as keep the link busy while others are read (`policy.pipeline`). `deltas` is
    the length of the longest chain, 0 for none: a bucket travels as a delta from the last pushed version where that is
    at most half as large."""

    def __init__(
        self,
        objects: ObjectStore,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        in_flight: InFlight = "auto",
        deltas: int = 0,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"buckets of {bucket_bytes} bytes (rule: at least 1)")
        self._objects = objects
        self._bucket = bucket_bytes
        self._deltas = deltas
        self._last: tuple[Path, Manifest] | None = None  # the version that deltas are based on
        self._depth = BucketDepth(in_flight)
        self._lock = asyncio.Lock()

    async def prepare(self, version: int, path: str) -> BucketArrivals:
        """Read a published directory and hash it. Returns the arrivals that pullers wait for meanwhile; pass them to
        `push`."""
        return BucketArrivals(await asyncio.to_thread(_manifest, version, Path(path), self._bucket))

    async def push(self, path: str, arrivals: BucketArrivals) -> PushResult:
        """Send the buckets that the store lacks, then the manifest. `StorageFailed`: the version is not in the store,
        and a later collection removes the buckets that were sent."""
        loop, manifest = asyncio.get_running_loop(), arrivals.manifest
        async with self._lock:
            began = loop.time()
            try:
                stored = await self._objects.keys("")
                last = self._last[1].chains if self._last else {}
                here: dict[str, Chain] = {}
                for digest in manifest.digests:
                    for chain in ((), last.get(digest, ())):
                        if bucket_parts(digest, chain) <= stored:
                            here.setdefault(digest, chain)
                sources: dict[str, tuple[Path, str, int, int]] = {}
                for file in manifest.files:
                    for digest, offset, count in file.spans():
                        if digest not in here:
                            sources.setdefault(digest, (Path(path) / file.name, digest, offset, count))
                # Full buckets first, so that the first one measures the time of a bucket.
                missing = sorted(sources.values(), key=lambda source: -source[3])
                await arrivals.add(here)
                window = TransferWindow(self._depth, max((count for *_, count in missing), default=1))
                async with first_failure_only(), asyncio.TaskGroup() as group:
                    bases = self._bases(Path(path), stored)
                    tasks = [group.create_task(self._send(*source, bases, arrivals, window)) for source in missing]
                manifest = replace(manifest, chains={d: chain for d, chain in arrivals.there.items() if chain})
                await self._objects.put(version_key(manifest.version), manifest.stored())
                self._last = (Path(path), manifest) if self._deltas else None
                await arrivals.end(whole=True)
            finally:
                await arrivals.end()
            return PushResult(manifest.size, sum(task.result() for task in tasks), loop.time() - began)

    async def collect(self, keep: Sequence[int]) -> int:
        """Remove versions that are not in `keep`, and then the buckets that no version uses; the number of those. A
        version is removed before its buckets, so that a partial collection leaves no incomplete version visible."""
        async with self._lock:
            stored = await self._objects.keys("")
            names = {name for name in stored if name.startswith("versions/")}
            kept = {version_key(version) for version in keep} & names
            await self._objects.delete(names - kept)
            used = set[str]()
            for name in sorted(kept):
                used |= Manifest.decode(await self._objects.get(name)).parts()
            unused = {name for name in stored if name.startswith(("buckets/", "deltas/"))} - used
            await self._objects.delete(unused)
            return len(unused)

    async def _send(
        self,
        file: Path,
        digest: str,
        offset: int,
        count: int,
        bases: dict[tuple[Path, int], tuple[Path, str, Chain]],
        arrivals: BucketArrivals,
        window: TransferWindow,
    ) -> int:
        """Send a bucket whole or as a delta. The bytes that were sent."""
        chain: Chain = ()
        async with window.bucket(count) as (moving, applying):
            with applying:
                data = await asyncio.to_thread(_read_checked, file, offset, count, digest)
                if data is None:
                    raise StorageFailed(f"{file} changed while it was pushed")
                if (base := bases.get((file, offset))) is not None:
                    old, its, below = base
                    delta = await asyncio.to_thread(_delta, data, old, offset, count, its)
                    if delta is not None:
                        data, chain = delta, (its, *below)
            with moving:
                await self._objects.put(delta_key(digest, chain[0]) if chain else bucket_key(digest), data)
        await arrivals.add({digest: chain})
        return len(data)

    def _bases(self, path: Path, stored: set[str]) -> dict[tuple[Path, int], tuple[Path, str, Chain]]:
        """Of each file and offset in the version at `path`, the bucket of the last version there, if a delta from it
        is allowed and the store has it: its file, hash and chain."""
        if self._last is None:
            return {}
        directory, manifest = self._last
        found = {}
        for file in manifest.files:
            for digest, offset, _ in file.spans():
                chain = manifest.chains.get(digest, ())
                if len(chain) < self._deltas and bucket_parts(digest, chain) <= stored:
                    found[path / file.name, offset] = (directory / file.name, digest, chain)
        return found


class BucketWeightStore(DirectoryWeightStore):
    """One host's copies. Implements `WeightStore` over its own directory; `pull` brings a version there. Pulls of the
    same version wait for one another: engines of a host share one copy. `in_flight` is the number of buckets in
    transfer at a time: with `auto` as many as keep the host's disk busy (`policy.pipeline`)."""

    def __init__(self, objects: ObjectStore, root: str | Path, *, in_flight: InFlight = "auto") -> None:
        super().__init__(root)
        self._objects = objects
        self._depth = BucketDepth(in_flight)
        self._pulling: dict[int, asyncio.Lock] = {}
        self.progress = PullProgress(0, 0.0, 0)
        """Progress of the current or last pull."""
        self._numbers = itertools.count()

    def stamp(self, version: int) -> str | None:
        """The stamp of the complete version here (`Manifest.stamp`); None if it is missing or was not pulled."""
        try:
            return hashlib.sha256((Path(self.path(version)) / MANIFEST).read_bytes()).hexdigest()
        except OSError:
            return None

    def prune(self, keep: Sequence[int], checkpoints: Sequence[int] = ()) -> None:
        """Remove versions from this directory; the store is pruned by the pusher (`collect`). Unfinished pulls of
        processes that are gone are removed too."""
        for leftover in self._root.glob(".pull-v*"):
            owner = leftover.name.split(".")[2]
            if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
                shutil.rmtree(leftover, ignore_errors=True)
        super().prune(keep, checkpoints)

    async def pull(self, version: int, arrivals: BucketArrivals | None = None) -> PullResult:
        """Returns when the version is complete here. With `arrivals` it may still be on its way into the store.
        `StorageFailed`: the version is not here, and no part of it is left."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with self._pulling.setdefault(version, asyncio.Lock()):
            if self.complete(version):
                return PullResult(0, 0, 0.0, loop.time() - began)
            manifest = arrivals.manifest if arrivals else Manifest.decode(await self._objects.get(version_key(version)))
            staging = self._root / f".pull-v{version:06d}.{os.getpid()}.{next(self._numbers)}"
            self.progress = PullProgress(0, 0.0, 0)
            try:
                received, spent = await self._fill(staging, manifest, arrivals)
                if arrivals is not None:
                    await arrivals.ended()
                await asyncio.to_thread(_publish_locally, staging, Path(self.path(version)), manifest)
            finally:
                await asyncio.to_thread(shutil.rmtree, staging, True)
        return PullResult(manifest.size, received, spent, loop.time() - began)

    async def _fill(self, staging: Path, manifest: Manifest, arrivals: BucketArrivals | None) -> tuple[int, float]:
        """Bytes received from the store, and the seconds of each of its buckets, summed."""
        loop = asyncio.get_running_loop()
        files, local = await asyncio.to_thread(self._prepare, staging, manifest)
        window = TransferWindow(self._depth, max((c for f in manifest.files for *_, c in f.spans()), default=1))
        moved = [0, 0.0]

        async def fetch(digest: str, targets: list[tuple[Path, int, int]]) -> None:
            if digest in local:
                local_data = None
                with contextlib.suppress(StorageFailed):  # pruned meanwhile: the store has it
                    local_data = await asyncio.to_thread(_read_checked, *local[digest], digest)
                if local_data is not None:
                    await asyncio.to_thread(_write, targets, local_data)
                    return
            chain = manifest.chains.get(digest, ()) if arrivals is None else await arrivals.wait(digest)
            async with window.bucket(targets[0][2]) as (moving, applying):
                began = loop.time()
                self.progress = replace(self.progress, open=self.progress.open + 1)
                with moving:
                    data, deltas, received = await self._parts(digest, chain, local)
                with applying:
                    whole = await asyncio.to_thread(_write_checked, targets, data, deltas, digest)
                if not whole:
                    raise StorageFailed(f"bucket {digest[:12]} of version {manifest.version} came damaged")
                moved[0] += received
                moved[1] += (took := loop.time() - began)
                p = self.progress
                self.progress = PullProgress(p.buckets + 1, max(p.longest_s, took), p.open - 1)

        targets_by_digest: dict[str, list[tuple[Path, int, int]]] = {}
        for file in files:
            for digest, offset, count in file.spans():
                targets_by_digest.setdefault(digest, []).append((staging / file.name, offset, count))
        async with first_failure_only(), asyncio.TaskGroup() as group:
            for digest, targets in sorted(targets_by_digest.items(), key=lambda item: -item[1][0][2]):
                group.create_task(fetch(digest, targets))
        return int(moved[0]), moved[1]

    async def _parts(
        self, digest: str, chain: Chain, local: dict[str, tuple[Path, int, int]]
    ) -> tuple[bytes, list[bytes], int]:
        """A bucket as its nearest base on this disk, or else its anchor, with the deltas to apply to it, in their
        order, and the bytes that came from the store."""
        names = (digest, *chain)
        for depth, base in enumerate(names):
            if base in local and depth:
                with contextlib.suppress(StorageFailed):  # pruned meanwhile
                    if (data := await asyncio.to_thread(_read_checked, *local[base], base)) is not None:
                        received = 0
                        break
        else:
            data = await self._objects.get(bucket_key(names[-1]))
            received = len(data)
        deltas = [await self._objects.get(delta_key(names[i], names[i + 1])) for i in reversed(range(depth))]
        return data, deltas, received + sum(map(len, deltas))

    def _prepare(self, staging: Path, manifest: Manifest) -> tuple[list[FileEntry], dict[str, tuple[Path, int, int]]]:
        """Create the files: links to those of another version here with the same content, as of the weights below an
        adapter, and empty ones of the right sizes. The latter, and the location of each bucket that is on this disk."""
        local: dict[str, tuple[Path, int, int]] = {}
        same: dict[FileEntry, Path] = {}
        for version in reversed(self.versions()):
            directory = Path(self.path(version))
            with contextlib.suppress(OSError, StorageFailed):
                for file in Manifest.decode((directory / MANIFEST).read_bytes()).files:
                    same.setdefault(file, directory / file.name)
                    for digest, offset, count in file.spans():
                        local.setdefault(digest, (directory / file.name, offset, count))
        empty = []
        with storage_failures(f"write {staging}"):
            for file in manifest.files:
                path = staging / file.name
                path.parent.mkdir(parents=True, exist_ok=True)
                if file in same and _linked(same[file], path, file):
                    continue
                empty.append(file)
                with path.open("wb") as handle:
                    handle.truncate(file.size)
        return empty, local


class BucketArrivals:
    """The buckets of a version in the store while it is being pushed. A puller waits for each bucket, so pulling starts
    with the first. The pusher unblocks it, by the end of the push at the latest."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.there: dict[str, Chain] = {}
        """The buckets in the store by hash, with their chains."""
        self.over = self.whole = False
        """`over`: the push has ended. `whole`: it ended with the complete version in the store."""
        self._changed = asyncio.Condition()

    async def wait(self, digest: str) -> Chain:
        """The bucket's chain, once it is in the store. `StorageFailed` if the push ended without the bucket."""
        async with self._changed:
            await self._changed.wait_for(lambda: digest in self.there or self.over)
        if digest not in self.there:
            raise self._incomplete()
        return self.there[digest]

    async def ended(self) -> None:
        """Returns once the version is in the store. `StorageFailed` if the push ended before."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.over)
        if not self.whole:
            raise self._incomplete()

    async def more(self, than: int) -> None:
        """Returns once more than this number of buckets have arrived, or the push has ended."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.there) > than or self.over)

    async def add(self, buckets: Mapping[str, Chain]) -> None:
        async with self._changed:
            self.there |= buckets
            self._changed.notify_all()

    async def end(self, *, whole: bool = False) -> None:
        async with self._changed:
            self.over, self.whole = True, self.whole or whole
            self._changed.notify_all()

    def _incomplete(self) -> StorageFailed:
        return StorageFailed(f"version {self.manifest.version} was not pushed whole")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of a version."""

    version: int
    files: tuple[FileEntry, ...]
    content: str = ""
    """The stamp of the published version (`architecture.stamp_of`), which the marker of a copy also holds."""
    chains: Mapping[str, Chain] = field(default_factory=dict)
    """Of buckets that the store has as deltas. Known once they are pushed: no part of `encode` and of the stamp."""

    @property
    def digests(self) -> set[str]:
        return {digest for file in self.files for digest in file.digests}

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def stamp(self) -> str:
        """Identifies the contents: a number may be given to two versions, one of which was never committed."""
        return hashlib.sha256(self.encode()).hexdigest()

    def encode(self) -> bytes:
        files = [[f.name, f.size, f.bucket, list(f.digests)] for f in self.files]
        raw = {"schema": 1, "version": self.version, "files": files}
        return json.dumps({**raw, "content": self.content} if self.content else raw).encode()

    def stored(self) -> bytes:
        """As it is in the store: with the chains."""
        raw = json.loads(self.encode())
        return json.dumps({**raw, "chains": self.chains} if self.chains else raw).encode()

    def parts(self) -> set[str]:
        """The names in the store of everything that the version is made of."""
        return {part for digest in self.digests for part in bucket_parts(digest, self.chains.get(digest, ()))}

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """`StorageFailed` for malformed bytes, or a file name outside the version: other programs may write to the
        store."""
        try:
            raw = json.loads(data)
            files = tuple(FileEntry(str(n), int(s), int(b), tuple(map(str, d))) for n, s, b, d in raw["files"])
            for file in files:
                name = PurePosixPath(file.name)
                if name.is_absolute() or ".." in name.parts or not name.parts:
                    raise ValueError(f"{file.name!r} is no name of a file of a version")
            chains = {str(d): tuple(map(str, chain)) for d, chain in raw.get("chains", {}).items()}
            return cls(int(raw["version"]), files, str(raw.get("content", "")), chains)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StorageFailed(f"a version's list of buckets is damaged: {error}") from error


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a version: the hashes of its buckets in order, all of `bucket` bytes except the last."""

    name: str
    size: int
    bucket: int
    digests: tuple[str, ...]

    def spans(self) -> list[tuple[str, int, int]]:
        """(hash, offset, bytes) of each bucket."""
        return [(d, i * self.bucket, min(self.bucket, self.size - i * self.bucket)) for i, d in enumerate(self.digests)]


def bucket_key(digest: str) -> str:
    """The bucket's name in the store."""
    return f"buckets/{digest}"


def delta_key(digest: str, base: str) -> str:
    """The name in the store of the bucket's difference from another one."""
    return f"deltas/{digest}-{base}"


def bucket_parts(digest: str, chain: Chain) -> set[str]:
    """The names in the store of what a bucket is made of."""
    names = (digest, *chain)
    return {bucket_key(names[-1]), *map(delta_key, names, chain)}


def version_key(version: int) -> str:
    """The name of the version's manifest in the store."""
    return f"versions/v{version:06d}.json"


TimedContext: TypeAlias = AbstractContextManager[None]


class TransferWindow:
    """Limits concurrent transfers to the depth; the end of each admits others. Owned by one push or pull, which fails
    with the first bucket that fails."""

    def __init__(self, depth: BucketDepth, bucket_bytes: int) -> None:
        """`bucket_bytes`: of the largest bucket."""
        self._depth, self._bytes = depth, bucket_bytes
        self._inside = self._moved = 0
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def bucket(self, count: int) -> AsyncIterator[tuple[TimedContext, TimedContext]]:
        """Wait until a bucket of `count` bytes may be transferred. Yields the contexts of its transfer between this end
        and the store, and of this end's own work on it (reading and hashing it, or verifying and writing it). They
        report their times to `BucketDepth`, except for small buckets at the ends of files."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._inside < self._depth.depth(self._moved, self._bytes))
            self._inside += 1
        whole = count == self._bytes
        alone = whole and self._moved == 0 and self._inside == 1
        depth = self._depth
        yield _timed(depth.alone_s.append if alone else None), _timed(depth.applied_s.append if whole else None)
        async with self._changed:
            self._inside -= 1
            self._moved += 1
            self._changed.notify_all()


@contextlib.contextmanager
def _timed(report: Callable[[float], None] | None) -> Iterator[None]:
    """Report the seconds of the body if it succeeds."""
    began = asyncio.get_running_loop().time()
    yield
    if report is not None:
        report(asyncio.get_running_loop().time() - began)


@dataclass(frozen=True, slots=True)
class PushResult:
    """Bytes of one push. `sent` bytes crossed the link; the rest was already in the store."""

    bytes: int
    sent: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PullResult:
    """Bytes and times of one pull. `accumulated_s` is the sum over its buckets (RA-16), `seconds` the duration of the
    pull."""

    bytes: int
    received: int
    accumulated_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class PullProgress:
    """Progress of a pull: buckets received, seconds of the slowest of them, and buckets in transfer."""

    buckets: int
    longest_s: float
    open: int


@contextlib.asynccontextmanager
async def first_failure_only() -> AsyncIterator[None]:
    """Raise only the first failure of a task group: the others follow from it."""
    try:
        yield
    except BaseExceptionGroup as failures:
        first: BaseException = failures
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None


def _manifest(version: int, path: Path, bucket: int) -> Manifest:
    with storage_failures(f"read {path}"):
        if not (path / MARKER).is_file():
            raise StorageFailed(f"{path} has no {MARKER} marker: only whole versions are pushed")
        names = sorted(str(f.relative_to(path)) for f in path.rglob("*") if f.is_file())
        # Engines need neither the optimizer's state nor the marker, which each reader writes anew.
        served = [name for name in names if not name.startswith("trainer/") and name not in (MARKER, MANIFEST)]
        return Manifest(version, tuple(_entry(path, name, bucket) for name in served), stamp_of(path))


def _read_checked(file: Path, offset: int, count: int, digest: str) -> bytes | None:
    """The bytes; None if they have another hash."""
    with storage_failures(f"read {file}"), file.open("rb") as handle:
        handle.seek(offset)
        data = handle.read(count)
    return data if hashlib.sha256(data).hexdigest() == digest else None


def _linked(source: Path, target: Path, file: FileEntry) -> bool:
    """Make `target` a link to `source`, if that has the buckets of `file`. False on file systems without links."""
    with contextlib.suppress(OSError, StorageFailed):
        if all(_read_checked(source, offset, count, digest) is not None for digest, offset, count in file.spans()):
            os.link(source, target)
            return True
    return False


def _publish_locally(staging: Path, final: Path, manifest: Manifest) -> None:
    """Makes the version visible atomically."""
    with storage_failures(f"make {final} visible"):
        (staging / MANIFEST).write_bytes(manifest.encode())
        (staging / MARKER).write_text(json.dumps({"schema": 1, "version": manifest.version, "stamp": manifest.content}))
        staging.rename(final)


def _write(targets: list[tuple[Path, int, int]], data: bytes) -> None:
    for file, offset, count in targets:
        with storage_failures(f"write {file}"), file.open("r+b") as handle:
            handle.seek(offset)
            handle.write(data[:count])


def _delta(new: bytes, file: Path, offset: int, count: int, digest: str) -> bytes | None:
    """The delta of a bucket from the one in `file`; None if it would not pay, or if that one is gone."""
    with contextlib.suppress(StorageFailed):
        old = _read_checked(file, offset, count, digest)
        return None if old is None else encode_delta(old, new)
    return None


def _write_checked(targets: list[tuple[Path, int, int]], data: bytes, deltas: Sequence[bytes], digest: str) -> bool:
    """Write the bytes after these deltas; False, and nothing is written, if they have another hash."""
    try:
        for delta in deltas:
            data = apply_delta(data, delta)
    except ValueError:
        return False
    if hashlib.sha256(data).hexdigest() != digest:
        return False
    _write(targets, data)
    return True


def _entry(path: Path, name: str, bucket: int) -> FileEntry:
    digests = []
    with (path / name).open("rb") as file:
        while data := file.read(bucket):
            digests.append(hashlib.sha256(data).hexdigest())
    return FileEntry(name, (path / name).stat().st_size, bucket, tuple(digests))
