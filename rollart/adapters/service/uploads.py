"""Upload and download of weights: a version is stored completely or not at all."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from rollart.adapters.service.state import RequestRefused
from rollart.errors import StorageFailed

T = TypeVar("T")

BLOCK_BYTES = 4 * 2**20
"""Bytes per write and read."""

FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.(?:json|safetensors)")
"""Valid names of a version's files; none of them leads out of the directory."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Size and hexadecimal SHA-256 of a version's file."""

    bytes: int
    sha256: str


class WeightUploads:
    """Stores uploaded versions in one directory, from one process. A version's files arrive in any order and may be
    sent again. `commit` makes them a version once all have arrived with the sender's checksums. It keeps this version
    and the one before it, and deletes later ones, which belong to a run that went back.

    Files are written and read in threads. A partial upload leaves no file, even if the process was killed."""

    def __init__(self, root: Path, readable: Sequence[Path] = ()) -> None:
        """`readable`: further directories from which versions may be downloaded."""
        self.root = root
        self._readable = [path.resolve() for path in (root, *readable)]
        self._received: dict[tuple[int, str], StoredFile] = {}
        self._read: tuple[tuple[int, Path], dict[str, StoredFile]] | None = None
        self._number = itertools.count()
        self._one = asyncio.Lock()
        """Serializes `commit`: a repeated commit of the same version waits for the first."""
        for leftover in root.glob("part-*"):  # their checksums were lost with the previous process
            shutil.rmtree(leftover, ignore_errors=True)

    async def receive(self, version: int, name: str, chunks: AsyncIterable[bytes]) -> StoredFile:
        """Receive one file of a future version. A stream that ends early raises the transport's error."""
        _check_file_name(name)
        aside = self._part(version)
        part = aside / f"{name}.{next(self._number)}.part"
        digest, size = hashlib.sha256(), 0

        def create() -> BinaryIO:
            aside.mkdir(parents=True, exist_ok=True)
            return part.open("xb")

        def write(chunk: bytes) -> None:
            digest.update(chunk)
            file.write(chunk)
            file.flush()

        try:
            file = await _in_thread(create)
            try:
                async for chunk in chunks:
                    await _in_thread(write, chunk)
                    size += len(chunk)
                await _in_thread(os.fsync, file.fileno())
            finally:
                file.close()
            await _in_thread(part.rename, aside / name)
        finally:
            part.unlink(missing_ok=True)
        stored = self._received[version, name] = StoredFile(size, digest.hexdigest())
        return stored

    async def commit(self, version: int, files: Mapping[str, StoredFile]) -> Path:
        """Make a version of the received files; returns its directory. RequestRefused (409) if a file is missing or
        differs from the sender's checksum. Idempotent."""
        async with self._one:
            path = self._path(version)
            if await self.holds(version, files):
                shutil.rmtree(self._part(version), ignore_errors=True)  # uploaded again because the answer was lost
                return path
            if "config.json" not in files or not any(name.endswith(".safetensors") for name in files):
                raise RequestRefused("a version needs config.json and *.safetensors")
            for name, stored in files.items():
                _check_file_name(name)
                received = self._received.get((version, name))
                if received is None:
                    raise RequestRefused(f"{name} of v{version} did not arrive (rule: upload it again)", 409)
                if received != stored or not (self._part(version) / name).is_file():
                    found_text = f"arrived as {received.bytes} bytes, {received.sha256[:12]}"
                    raise RequestRefused(f"{name} of v{version} {found_text} (rule: upload it again)", 409)
            await _in_thread(self.make, version, files)
            self._received = {(v, name): s for (v, name), s in self._received.items() if v != version}
            self._read = None
            return path

    async def holds(self, version: int, files: Mapping[str, StoredFile]) -> bool:
        """True if the stored version consists of exactly these files."""
        path, sums_file = self._path(version), self._path(version).with_suffix(".sums")
        present = path.is_dir() and sums_file.is_file()
        return present and await _in_thread(sums_file.read_text) == _encode_checksums(files)

    async def listed(self, path: str, version: int) -> dict[str, StoredFile]:
        """The files of a version in a readable directory; RequestRefused (404) for other directories. Checksums are
        computed once per version."""
        directory = Path(path).resolve()
        if not path or not any(directory.is_relative_to(root) for root in self._readable) or not directory.is_dir():
            raise RequestRefused("the current version's files are not here to be read", 404)
        asked = version, directory
        if self._read is None or self._read[0] != asked:
            self._read = asked, await _in_thread(_checksums, directory)
        return self._read[1]

    def _path(self, version: int) -> Path:
        return self.root / f"v{version:06d}"

    def _part(self, version: int) -> Path:
        return self.root / f"part-{version:06d}"

    def make(self, version: int, files: Mapping[str, StoredFile]) -> None:
        """Make a version of its received files, and delete all others except its latest predecessor."""
        aside, path = self._part(version), self._path(version)
        for file in aside.iterdir():
            if file.name not in files:
                file.unlink()
        shutil.rmtree(path, ignore_errors=True)
        path.with_suffix(".sums").write_text(_encode_checksums(files))
        aside.rename(path)
        others = [v for v in self.root.glob("v*") if v.suffix != ".sums" and v != path]
        before = max((v for v in others if _number(v) < version), key=_number, default=None)
        for old in others:
            if old != before:
                old.with_suffix(".sums").unlink(missing_ok=True)
                shutil.rmtree(old, ignore_errors=True)
        for leftover in self.root.glob("part-*"):
            if _number(leftover) < version:
                shutil.rmtree(leftover, ignore_errors=True)


def _number(path: Path) -> int:
    """The version number of a version's directory."""
    return int(re.sub(r"\D", "", path.name) or 0)


def _encode_checksums(files: Mapping[str, StoredFile]) -> str:
    return json.dumps({name: asdict(stored) for name, stored in sorted(files.items())})


def _check_file_name(name: str) -> None:
    if not FILE_NAME.fullmatch(name):
        raise RequestRefused(f"{name!r} is no file of a version (rule: *.json and *.safetensors, without directories)")


def _checksums(directory: Path) -> dict[str, StoredFile]:
    found = {}
    for file in sorted(directory.iterdir()):
        if FILE_NAME.fullmatch(file.name) and file.is_file():
            with file.open("rb") as read:
                found[file.name] = StoredFile(file.stat().st_size, hashlib.file_digest(read, "sha256").hexdigest())
    return found


async def _in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Run `work` in a thread. StorageFailed for a disk error. A cancelled caller still waits until the thread has
    finished with the file."""
    done = asyncio.get_running_loop().run_in_executor(None, work, *arguments)
    try:
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            await asyncio.gather(done, return_exceptions=True)
            raise
    except OSError as error:
        raise StorageFailed(f"weights cannot be written: {error}", remedy="look at the disk") from None
