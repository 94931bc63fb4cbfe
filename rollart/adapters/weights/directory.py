"""Versions of the weights in one directory that trainer and engines share (a disk, or tmpfs)."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from rollart.architecture import MARKER, version_path
from rollart.errors import StorageFailed

_NAME = re.compile(r"v(\d{6,})")


class DirectoryWeightStore:
    """Implements `WeightStore` over `root/v000003/` directories. Synchronous: a few system calls each."""

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root)

    def path(self, version: int) -> str:
        return str(version_path(self._root, version))

    def complete(self, version: int) -> bool:
        return (Path(self.path(version)) / MARKER).is_file()

    def versions(self) -> list[int]:
        try:
            names = [_NAME.fullmatch(entry.name) for entry in self._root.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageFailed(f"cannot list {self._root}: {error.strerror}") from error
        return sorted(version for version in (int(m[1]) for m in names if m) if self.complete(version))

    def prune(self, keep: Sequence[int], checkpoints: Sequence[int] = ()) -> None:
        """Remove complete versions that are neither in `keep` nor in `checkpoints`. Each disappears at once: it is
        renamed before it is deleted.

        Engines that still have a version's files open keep reading them. Incomplete directories are left to the
        trainer.
        """
        wanted = {*keep, *checkpoints}
        for leftover in self._root.glob(".pruned-v*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for version in self.versions():
            if version in wanted:
                continue
            source = Path(self.path(version))
            target = source.with_name(f".pruned-{source.name}")
            try:
                source.rename(target)
                shutil.rmtree(target)
            except OSError as error:
                raise StorageFailed(
                    f"cannot remove {source}: {error.strerror}",
                    remedy="look at the disk and at the limit of open files, then rollart launch --resume",
                ) from error
