"""Files in shared memory: taken once, read by this user only, never left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollart.engine.shm import SharedKvFiles, lock_file


def parts(*texts: bytes) -> list[memoryview]:
    return [memoryview(t) for t in texts]


def test_a_file_is_taken_once_and_stays_readable(tmp_path: Path) -> None:
    a, b = SharedKvFiles(str(tmp_path)), SharedKvFiles(str(tmp_path))
    place = a.write(parts(b"keys", b"", b"values"))
    assert a.holds(place)
    mapped = b.take(place)
    assert mapped is not None
    assert mapped[:] == b"keysvalues"
    assert not a.holds(place)
    assert a.take(place) is None
    assert b.take(place) is None
    a.close()
    b.close()
    assert [p.name for p in a.root.iterdir()] == ["lock"]


def test_only_this_user_may_read_it(tmp_path: Path) -> None:
    files = SharedKvFiles(str(tmp_path))
    place = files.write(parts(b"x"))
    assert (files.root / place).stat().st_mode & 0o777 == 0o600
    assert (files.root / place).parent.stat().st_mode & 0o777 == 0o700
    assert files.root.stat().st_mode & 0o777 == 0o700
    files.close()


@pytest.mark.parametrize("place", ["", "x", "../x", "/etc/passwd", "a/../../x", "a/b/c", "0a/lock", "."])
def test_no_place_leads_out_of_the_root(tmp_path: Path, place: str) -> None:
    files = SharedKvFiles(str(tmp_path))
    (tmp_path / "x").write_bytes(b"secret")
    assert files.take(place) is None
    files.remove(place)
    assert (tmp_path / "x").exists()
    files.close()


def test_links_and_empty_files_are_not_taken(tmp_path: Path) -> None:
    files = SharedKvFiles(str(tmp_path))
    (tmp_path / "secret").write_bytes(b"secret")
    own = (files.root / files.write(parts(b"x"))).parent
    (own / "aa").symlink_to(tmp_path / "secret")
    (own / "bb").touch()
    assert files.take(f"{own.name}/aa") is None
    assert files.take(f"{own.name}/bb") is None
    files.close()


def test_another_users_directory_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4_242)
    early = SharedKvFiles(str(tmp_path))
    (tmp_path / "rollart-kv-4242").mkdir()
    with pytest.raises(PermissionError, match="not a directory of this user"):
        early.write(parts(b"x"))
    (tmp_path / "rollart-kv-4242" / "aa").mkdir()
    (tmp_path / "rollart-kv-4242" / "aa" / "bb").write_bytes(b"x")
    for base in (tmp_path, tmp_path / "nowhere", ""):
        files = SharedKvFiles(str(base))
        assert files.take("aa/bb") is None
        assert not files.holds("aa/bb")
        files.remove("aa/bb")
        with pytest.raises(OSError):
            files.write(parts(b"x"))
        files.sweep()
        files.close()
    assert (tmp_path / "rollart-kv-4242" / "aa" / "bb").exists()


def test_a_full_memory_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = SharedKvFiles(str(tmp_path))
    own = (files.root / files.write(parts())).parent
    before = sorted(own.iterdir())

    class Full:
        def __init__(self, handle: int, *_: object, **__: object) -> None:
            self._handle = handle

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            os.close(self._handle)

        def write(self, part: memoryview) -> int:
            if len(part) == 1:
                raise OSError(28, "No space left on device")
            return len(part) - 1

    monkeypatch.setattr(os, "fdopen", Full)
    with pytest.raises(OSError, match="No space"):
        files.write(parts(b"xyz"))
    assert sorted(own.iterdir()) == before
    files.close()


def test_nothing_is_created_before_it_is_needed(tmp_path: Path) -> None:
    files = SharedKvFiles(str(tmp_path))
    assert files.take("0a/0b") is None
    files.sweep()
    files.close()
    assert list(tmp_path.iterdir()) == []


def test_a_neighbour_that_sweeps_holds_nobody_up(tmp_path: Path) -> None:
    """Even a sweep that was stopped half-way."""
    files, other = SharedKvFiles(str(tmp_path)), SharedKvFiles(str(tmp_path))
    other.write(parts(b"x"))
    stopped = lock_file(files.root / "lock")
    files.sweep()
    with pytest.raises(BlockingIOError):
        files.write(parts(b"x"))
    os.close(stopped)
    assert files.holds(files.write(parts(b"x")))
    files.close()
    other.close()


def test_the_living_are_left_alone(tmp_path: Path) -> None:
    a = SharedKvFiles(str(tmp_path))
    place = a.write(parts(b"x"))
    b = SharedKvFiles(str(tmp_path))
    b.sweep()
    assert a.holds(place)
    a.close()
    b.close()


@pytest.mark.slow
def test_what_a_killed_engine_left_goes_with_the_next_start(tmp_path: Path) -> None:
    """Slow: a process."""
    script = (
        "import os, signal, sys\n"
        "from rollart.engine.shm import SharedKvFiles\n"
        f"files = SharedKvFiles({str(tmp_path)!r})\n"
        "print(files.write([memoryview(b'x')]), flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as dead:
        assert dead.stdout is not None
        place = dead.stdout.readline().strip()
        mine = SharedKvFiles(str(tmp_path))
        assert mine.holds(place)
        dead.kill()
        dead.wait()
    mine.sweep()
    assert not mine.holds(place)
    assert not (mine.root / place).parent.exists()
    mine.close()
