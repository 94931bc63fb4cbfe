"""A recorded run of the quickstart that ships in the package, for `rollart demo-data`: reports, simulations and lists
of trajectories have something to show right after the install.

    python -m rollart.tools.demo_data    records it anew (`make demo-data`)

The archive is the run's directory without weights, functions and process files. Its absolute paths are those of `HOME`,
where it is recorded, and of the shipped specs; `unpack` puts the reader's own in their place.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rollart.errors import StorageFailed
from rollart.settings.load import builtin

NAME = "demo-data"
ARCHIVE = builtin("demo-data.tar.xz")
CHANGES = ("steps=60", "telemetry.turns=0.05", "checkpoints.every=20")
"""What the recorded run changes of the quickstart: shorter, and with single turns of a share of the prompts."""
HOME = "/recorded"
"""Stands in the archive for the directory that holds the run."""
SPECS = "/specs"
"""Stands in the archive for the directory of the shipped run specs."""
KEPT = ("ledger.sqlite", "rewards.sqlite", "resolved.yaml", "trainer.json", "tokenizer", "trajectories")
"""What belongs to the run's reports, and nothing of the machine or of its processes."""


def unpack(runs: Path) -> Path:
    """Write the recorded run into a directory of runs, and return its path. One that is there already stays.

    StorageFailed if it cannot be written.
    """
    directory = runs / NAME
    if directory.exists():
        return directory
    try:
        runs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=runs) as made:
            with tarfile.open(ARCHIVE) as tar:
                tar.extractall(made, filter="data")
            _rename(Path(made, NAME), {HOME: str(runs.resolve()), SPECS: str(builtin("runs").resolve())})
            Path(made, NAME).rename(directory)
    except OSError as error:
        raise StorageFailed(
            f"{error.filename or directory}: {error.strerror or error}", remedy="give another --runs-dir"
        ) from None
    return directory


def record(archive: Path, changes: Sequence[str] = CHANGES) -> None:
    """Launch the quickstart with changes, and pack its directory."""
    with tempfile.TemporaryDirectory() as made:
        runs = Path(made).resolve()
        where = ["--runs-dir", str(runs), "--name", NAME]
        subprocess.run([sys.executable, "-m", "rollart.cli.main", "launch", *changes, *where], check=True)
        pack(runs / NAME, archive)


def pack(directory: Path, archive: Path) -> None:
    """Write the archive of a finished run."""
    with tempfile.TemporaryDirectory() as made:
        copy = Path(made, NAME)
        copy.mkdir()
        for name in KEPT:
            source = directory / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)
        _rename(copy, {str(directory.parent.resolve()): HOME, str(builtin("runs").resolve()): SPECS})
        with tarfile.open(archive, "w:xz", preset=9) as tar:
            for path in sorted(copy.rglob("*")):
                tar.add(path, str(path.relative_to(made)), recursive=False, filter=_anonymous)


def _rename(directory: Path, paths: dict[str, str]) -> None:
    """Replace paths in the run's specs and in the events of its ledger."""
    for file in (directory / "resolved.yaml", directory / "trainer.json"):
        text = file.read_text()
        for before, after in paths.items():
            text = text.replace(before, after)
        file.write_text(text)
    with contextlib.closing(sqlite3.connect(directory / "ledger.sqlite")) as db:
        for change in paths.items():
            db.execute("UPDATE events SET fields = replace(fields, ?, ?)", change)
        db.commit()
        db.execute("VACUUM")


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    record(ARCHIVE)
