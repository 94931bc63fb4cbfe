"""The scratch directory of jobs: its size, and its removal in any state. Standard library only."""

from __future__ import annotations

import contextlib
import os

MOST_ENTRIES = 2000


class Dirty(Exception):
    """More entries are left than can be removed quickly."""


def empty(directory: str, *, most: int) -> None:
    """Remove all entries. Raises `Dirty` after `most` entries. Inner directories are moved up, so that any depth
    works."""
    done = 0
    while True:
        with os.scandir(directory) as entries:
            names = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
        if not names:
            return
        for path, is_directory in names:
            if not is_directory:
                os.unlink(path)
                done += 1
                continue
            os.chmod(path, 0o700)
            with os.scandir(path) as entries:
                for entry in entries:
                    done += 1
                    if done > most:
                        raise Dirty
                    if entry.is_dir(follow_symlinks=False):
                        # Its own permissions count too, since its '..' changes.
                        os.chmod(entry.path, 0o700)
                        os.rename(entry.path, f"{directory}/.up-{os.getpid()}-{done}")
                    else:
                        os.unlink(entry.path)
            os.rmdir(path)


def size(directory: str) -> int:
    """Bytes on disk below the directory; a value above any limit for more than `MOST_ENTRIES` entries."""
    total, seen, left = 0, 0, [directory]
    while left:
        with contextlib.suppress(OSError), os.scandir(left.pop()) as entries:
            for entry in entries:
                seen += 1
                if seen > MOST_ENTRIES:
                    return 1 << 62
                total += entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)
    return total
