"""Versions of the weights by way of a store, pulled by a server that shares no directory with the run.

The controller says of which buckets a version is made, and where each can be read: at a path, or at a URL that is
signed for it. Nothing here knows the store or needs credentials of it. Threads pull while the engine serves; a version
is there whole, with every bucket's sha256 checked, or not at all. Standard library alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import itertools
import json
import logging
import os
import queue
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["Pull", "asked", "weights_of"]

MARKER, MANIFEST, LOCK = "COMPLETE", "buckets.json", ".lock"
"""In a pulled version: that it is whole, and of which buckets; in the directory of all: who pulls holds it."""

CHUNK = 2**20
"""Bytes that are read at a time: a bucket is never in memory whole."""

IN_FLIGHT = 8
"""Buckets on their way at a time, unless a number is given."""

SILENT_S = 30.0
"""A store that says nothing for so long has broken off, seconds."""

TRIES, BACKOFF_S = 3, 0.25
"""For a bucket whose connection broke; the controller gives a host up that takes too long."""

DESERTED_S = 60.0
"""A pull that waits for the rest of a push, and that nobody has looked at for so many seconds, has lost its
controller: it would keep the directory's lock from the next one's for ever."""

Targets = list[tuple[Path, int, int]]
"""Files, offsets and bytes that a bucket is the contents of."""


class Pull:
    """A version on its way to this host. Its thread owns the files; `tell`, `stop` and `look` may be called by any.

    Invariant: `path` is set once the version is whole at it, and nothing is left of a version that is not.
    """

    def __init__(self, told: Mapping[str, Any]) -> None:
        """`told`: root, manifest (a text), keep, in_flight (0: ours), sources, over, whole."""
        self.stamp = hashlib.sha256(told["manifest"].encode()).hexdigest()
        self._text: str = told["manifest"]
        listed = json.loads(self._text)
        self._version, self._content = int(listed["version"]), str(listed.get("content", ""))
        self._files: list[tuple[str, int, int, list[str]]] = [tuple(file) for file in listed["files"]]
        self._root, self._keep = Path(told["root"]), [int(v) for v in told["keep"]]
        self._in_flight = int(told["in_flight"]) or IN_FLIGHT
        self._sources: dict[str, str] = {}
        self._changed = threading.Condition()
        self._over = self._whole = self._stopped = False
        self._buckets = self._open = self._received = 0
        self._longest_s = self._accumulated_s = 0.0
        self._began = time.monotonic()
        self._seconds = 0.0
        self._path = self._error = self._failed = ""
        self.tell(told)
        self._thread = threading.Thread(target=self._run, name=f"pull v{self._version}", daemon=True)
        self._thread.start()

    def tell(self, told: Mapping[str, Any]) -> None:
        """Where more of its buckets are; whether all are there by now (`whole`), or no more will come (`over`)."""
        with self._changed:
            self._sources |= told["sources"]
            self._heard = time.monotonic()
            self._over, self._whole = self._over or told["over"], self._whole or told["whole"]
            self._changed.notify_all()

    def stop(self) -> None:
        """Nobody waits for it any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @property
    def ended(self) -> bool:
        return bool(self._path or self._error)

    def look(self) -> dict[str, Any]:
        """How far it is."""
        with self._changed:
            self._heard = time.monotonic()
            return {
                "path": self._path,
                "error": self._error,
                "buckets": self._buckets,
                "open": self._open,
                "longest_s": self._longest_s,
                "received": self._received,
                "accumulated_s": self._accumulated_s,
                "bytes": sum(size for _, size, _, _ in self._files),
                "seconds": self._seconds,
            }

    def join(self, seconds: float | None = None) -> None:
        self._thread.join(seconds)

    def _run(self) -> None:
        path = error = ""
        try:
            path = str(self._pulled())
        except (OSError, ValueError, KeyError, TypeError) as failed:
            error = _said(failed)
        except BaseException as failed:
            error = repr(failed)
            raise
        finally:
            with self._changed:
                self._path, self._error = path, error if path else error or "it was stopped"
                self._seconds = time.monotonic() - self._began

    def _pulled(self) -> Path:
        final = self._root / f"v{self._version:06d}"
        with self._locked():
            if _stamp(final) == self.stamp:
                return final
            for leftover in (*self._root.glob(".pull-v*"), *self._root.glob(".pruned-v*")):
                shutil.rmtree(leftover, ignore_errors=True)  # whoever began it is dead: the lock is ours
            aside = self._root / f".pull-{final.name}.{os.getpid()}.{next(_numbers)}"
            try:
                self._fill(aside)
                with self._changed:  # nothing is a version before it is whole in the store
                    self._await(lambda: self._over)
                    self._check(self._whole, f"v{self._version} was not pushed whole")
                _write(aside / MANIFEST, self._text)
                _write(aside / MARKER, json.dumps({"schema": 1, "version": self._version, "stamp": self._content}))
                if final.exists():  # of a publish that came to nothing
                    _remove(final)
                aside.rename(final)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
            self._prune()
        return final

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone among all who pull into the directory: workers and servers of the host share its copy."""
        self._root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                with self._changed:
                    self._changed.wait(0.05)
                    self._check(True, "")
            yield
        finally:
            os.close(descriptor)

    def _fill(self, aside: Path) -> None:
        """Every bucket as soon as it can be read; the first that fails ends all."""
        places: dict[str, Targets] = {}
        for name, size, bucket, digests in self._files:
            file = aside / name
            if not file.resolve().is_relative_to(aside.resolve()):
                raise ValueError(f"{name} is no name of a file of a version")
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as handle:
                handle.truncate(size)
            for i, digest in enumerate(digests):
                places.setdefault(digest, []).append((file, i * bucket, min(bucket, size - i * bucket)))
        have, left = self._here(), [len(places)]
        work = queue.SimpleQueue[str | None]()

        def works() -> None:
            """Not of an executor: the process would wait for a thread that a dead file system holds."""
            while (digest := work.get()) is not None and not self._stopped:
                failed = ""
                try:
                    self._bucket(digest, places[digest], have.get(digest))
                except Exception as error:  # whatever it is, the pull ends with it
                    failed = _said(error)
                with self._changed:
                    left[0] -= 1
                    self._failed = self._failed or failed
                    self._stopped = self._stopped or bool(failed)  # the others would be for nothing
                    self._changed.notify_all()

        for number in range(min(self._in_flight, len(places))):
            threading.Thread(target=works, name=f"v{self._version} {number}", daemon=True).start()
        waiting = set(places)
        try:
            while left[0]:
                with self._changed:
                    come = [d for d in places if d in waiting and (d in have or d in self._sources)]
                    for digest in come:
                        work.put(digest)
                    waiting -= set(come)
                    self._check(not waiting or not self._over, f"v{self._version} was not pushed whole")
                    if not come and left[0]:
                        self._changed.wait(1.0)
                        self._check(not self._deserted(), "nobody waits for it any more")
        finally:
            for _ in range(self._in_flight):
                work.put(None)

    def _bucket(self, digest: str, targets: Targets, here: tuple[Path, int, int] | None) -> None:
        with contextlib.suppress(OSError, ValueError):  # pruned since, or damaged: the store has it
            if here is not None:
                file, offset, _ = here
                self._copy(lambda: file.open("rb"), offset, digest, targets)
                return
        with self._changed:
            self._await(lambda: self._over or digest in self._sources)
            self._check(digest in self._sources, f"v{self._version} was not pushed whole")
            source = self._sources[digest]
            self._open += 1
        began = time.monotonic()
        try:
            self._fetch(source, digest, targets)
        finally:
            with self._changed:
                self._open -= 1
        with self._changed:
            took = time.monotonic() - began
            self._buckets += 1
            self._received += targets[0][2]
            self._longest_s = max(self._longest_s, took)
            self._accumulated_s += took

    def _fetch(self, source: str, digest: str, targets: Targets) -> None:
        for attempt in itertools.count(1):
            try:
                return self._copy(lambda: _opened(source), 0, digest, targets)
            except (OSError, http.client.HTTPException) as error:
                refused = isinstance(error, urllib.error.HTTPError) and error.code < 500
                if refused or isinstance(error, FileNotFoundError) or attempt == TRIES:
                    raise ValueError(f"bucket {digest[:12]} cannot be read: {_said(error)}") from None
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped, timeout=BACKOFF_S * 2**attempt)

    def _copy(self, opened: Callable[[], Any], offset: int, digest: str, targets: Targets) -> None:
        """`ValueError`: what was there is something else, and so is what was written. `OSError`: it broke off."""
        found, count = hashlib.sha256(), targets[0][2]
        with contextlib.ExitStack() as stack:
            source = stack.enter_context(opened())
            if offset:
                source.seek(offset)
            files = [(stack.enter_context(file.open("r+b")), at) for file, at, _ in targets]
            for file, at in files:
                file.seek(at)
            left = count
            while left and (data := source.read(min(CHUNK, left))):
                self._check(True, "")
                found.update(data)
                left -= len(data)
                for file, _ in files:
                    file.write(data)
        if left and isinstance(source, http.client.HTTPResponse):
            raise ConnectionError(f"it ended {left} bytes early")
        if found.hexdigest() != digest:
            raise ValueError(f"bucket {digest[:12]} of v{self._version} came damaged")

    def _here(self) -> dict[str, tuple[Path, int, int]]:
        """Where buckets of earlier versions lie on this host."""
        have: dict[str, tuple[Path, int, int]] = {}
        for version in sorted(_versions(self._root).values(), reverse=True):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                for name, _, bucket, digests in json.loads((version / MANIFEST).read_text())["files"]:
                    for i, digest in enumerate(digests):
                        have.setdefault(digest, (version / name, i * bucket, bucket))
        return have

    def _prune(self) -> None:
        """What is older than what engines may still need. Files that somebody has open stay readable."""
        newest = max(self._keep, default=0)
        for number, directory in _versions(self._root).items():
            if number < newest and number != self._version and number not in self._keep:
                with contextlib.suppress(OSError):
                    _remove(directory)

    def _await(self, there: Callable[[], bool]) -> None:
        """Of what the controller tells. The lock is held."""
        while not there():
            self._check(not self._deserted(), "nobody waits for it any more")
            self._changed.wait(1.0)

    def _deserted(self) -> bool:
        return not self._over and time.monotonic() - self._heard > DESERTED_S

    def _check(self, well: bool, why: str) -> None:
        if self._stopped:
            raise ValueError(self._failed or "it was stopped")
        if not well:
            raise ValueError(why)


_numbers = itertools.count()

_pulls: dict[str, Pull] = {}
"""By stamp, the last ones of this process."""

REMEMBERED = 4
"""Pulls that are: one that an engine loads, one ahead of it, and what is told of them late."""


def asked(call: str, told: Mapping[str, Any]) -> dict[str, Any]:
    """`pull` a version that is not here yet, `tell` more of its buckets, `look` at how far it is, `stop` it."""
    pull = _pulls.get(told["stamp"])
    if call == "pull":
        if pull is None or pull.ended:
            _pulls.pop(told["stamp"], None)
            pull = _pulls[told["stamp"]] = Pull(told)
            for stamp in list(_pulls)[:-REMEMBERED]:
                _pulls.pop(stamp).stop()
        else:
            pull.tell(told)
    elif pull is not None and call == "tell":
        pull.tell(told)
    elif pull is not None and call == "stop":
        pull.stop()
    return {"error": "", "path": "", "unknown": True} if pull is None else pull.look()


CALLS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
"""Methods of vLLM's worker, that raise."""


def weights_of(worker: object, call: str, told: str) -> dict[str, Any]:
    """A method of vLLM's workers, for `/collective_rpc`: one of `CALLS`, or of a pull, which returns at once, between
    two steps of the engine. It does not raise: where several workers do, vLLM (0.32) reads the first one's answer, and
    takes those of the others for answers to later calls."""
    try:
        if call in CALLS:
            getattr(worker, call)(**json.loads(told))
            return {"error": ""}
        return asked(call, json.loads(told))
    except Exception as error:
        if call not in CALLS:
            return {"path": "", "error": f"not understood: {_said(error)}"}
        logging.getLogger("vllm.rollart").exception("%s failed", call)
        return {"error": _said(error)}


def _opened(source: str) -> Any:
    """A URL or a path. What is said of a URL never names it: whoever has it can read."""
    if source.startswith(("http://", "https://")):
        return urllib.request.urlopen(source, timeout=SILENT_S)
    return open(source, "rb")


def _said(error: BaseException) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the store answered {error.code}"
    if isinstance(error, http.client.HTTPException):
        return f"the store's answer is none ({type(error).__name__})"
    if isinstance(error, OSError):
        why = getattr(error, "reason", None) or error.strerror or error
        return f"{error.filename}: {why}" if error.filename else str(why)
    return str(error) or type(error).__name__


def _stamp(version: Path) -> str | None:
    try:
        return hashlib.sha256((version / MANIFEST).read_bytes()).hexdigest() if (version / MARKER).exists() else None
    except OSError:
        return None


def _versions(root: Path) -> dict[int, Path]:
    named = {entry: entry.name.removeprefix("v") for entry in root.glob("v[0-9]*")}
    return {int(n): entry for entry, n in named.items() if n.isdecimal() and (entry / MARKER).is_file()}


def _remove(directory: Path) -> None:
    """It disappears whole."""
    aside = directory.with_name(f".pruned-{directory.name}")
    shutil.rmtree(aside, ignore_errors=True)
    directory.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _write(file: Path, text: str) -> None:
    file.write_text(text)
