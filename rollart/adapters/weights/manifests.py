"""The manifest of a version: its files, and the buckets of each."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import PurePosixPath

from rollart.errors import StorageFailed


def bucket_key(digest: str) -> str:
    """The bucket's name in the store."""
    return f"buckets/{digest}"


def version_key(version: int) -> str:
    """The name of the version's manifest in the store."""
    return f"versions/v{version:06d}.json"


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


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of a version."""

    version: int
    files: tuple[FileEntry, ...]
    content: str = ""
    """The stamp of the published version (`architecture.stamp_of`), which the marker of a copy also holds."""

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
            return cls(int(raw["version"]), files, str(raw.get("content", "")))
        except (ValueError, KeyError, TypeError) as error:
            raise StorageFailed(f"a version's list of buckets is damaged: {error}") from error
