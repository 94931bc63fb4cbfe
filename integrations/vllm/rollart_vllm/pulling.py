"""Pulls versions of the weights from a store to a server that shares no directory with the run.

The controller sends the buckets of a version and the source of each: a path or a signed URL. This module neither knows
the store nor needs its credentials. Threads pull while the engine serves. A version appears complete, with the sha256
of every bucket verified, or not at all. Standard library alone.
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

MARKER, MANIFEST, LOCK = "COMPLETE", "buckets.json", ".lock"
"""In a pulled version: the mark of a complete version, and its buckets; in their directory: the lock of the puller."""

CHUNK = 2**20
"""Bytes per read: a bucket is never in memory as a whole."""

IN_FLIGHT = 8
"""Buckets fetched concurrently by default."""

SILENT_S = 30.0
"""Timeout for a silent store, seconds."""

TRIES, BACKOFF_S = 3, 0.25
"""Attempts and first pause for a bucket whose connection broke. The controller gives up a host that takes too long."""

ABANDONED_S = 60.0
"""A pull that waits for the rest of a push, and had no call for so many seconds, has lost its controller. It would hold
the directory's lock for ever."""

Targets = list[tuple[Path, int, int]]
"""Files with the offset and number of bytes of a bucket's contents in them."""


class Pull:
    """One version that is being pulled. Its thread owns the files; any thread may call `update`, `stop` and `progress`.

    Invariant: `path` is set once the version is complete there, and nothing remains of an incomplete version.
    """

    def __init__(self, order: Mapping[str, Any]) -> None:
        """`order`: root, manifest (a text), keep, in_flight (0: the default), sources, over, whole."""
        self.stamp = hashlib.sha256(order["manifest"].encode()).hexdigest()
        self._text: str = order["manifest"]
        listed = json.loads(self._text)
        self._version, self._content = int(listed["version"]), str(listed.get("content", ""))
        self._files: list[tuple[str, int, int, list[str]]] = [tuple(file) for file in listed["files"]]
        self._root, self._keep = Path(order["root"]), [int(v) for v in order["keep"]]
        self._in_flight = int(order["in_flight"]) or IN_FLIGHT
        self._sources: dict[str, str] = {}
        self._changed = threading.Condition()
        self._over = self._whole = self._stopped = False
        self._buckets = self._open = self._received = 0
        self._longest_s = self._accumulated_s = 0.0
        self._began = time.monotonic()
        self._seconds = 0.0
        self._path = self._error = self._failed = ""
        self.update(order)
        self._thread = threading.Thread(target=self._run, name=f"pull v{self._version}", daemon=True)
        self._thread.start()

    def update(self, order: Mapping[str, Any]) -> None:
        """Add sources of buckets. `whole`: all buckets have been pushed; `over`: no more will be pushed."""
        with self._changed:
            self._sources |= order["sources"]
            self._heard = time.monotonic()
            self._over, self._whole = self._over or order["over"], self._whole or order["whole"]
            self._changed.notify_all()

    def stop(self) -> None:
        """Give the pull up."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @property
    def ended(self) -> bool:
        return bool(self._path or self._error)

    def progress(self) -> dict[str, Any]:
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
            error = _error_text(failed)
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
                shutil.rmtree(leftover, ignore_errors=True)  # their writers are dead: this process holds the lock
            aside = self._root / f".pull-{final.name}.{os.getpid()}.{next(_numbers)}"
            try:
                self._fill(aside)
                with self._changed:  # a version counts only once it is complete in the store
                    self._await(lambda: self._over)
                    self._check(self._whole, f"v{self._version} was not pushed whole")
                _write(aside / MANIFEST, self._text)
                _write(aside / MARKER, json.dumps({"schema": 1, "version": self._version, "stamp": self._content}))
                if final.exists():  # left by a publish that failed
                    _remove(final)
                aside.rename(final)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
            self._prune()
        return final

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the directory's lock: workers and servers of the host share its copy of a version."""
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
        """Fetch every bucket as soon as it has a source. The first failure ends the pull."""
        targets: dict[str, Targets] = {}
        for name, size, bucket, digests in self._files:
            file = aside / name
            if not file.resolve().is_relative_to(aside.resolve()):
                raise ValueError(f"{name} is no name of a file of a version")
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as handle:
                handle.truncate(size)
            for i, digest in enumerate(digests):
                targets.setdefault(digest, []).append((file, i * bucket, min(bucket, size - i * bucket)))
        local, left = self._local_buckets(), [len(targets)]
        work = queue.SimpleQueue[str | None]()

        def fetch_buckets() -> None:
            """Runs in a daemon thread. With an executor, the process would wait for threads that a dead file system
            blocks."""
            while (digest := work.get()) is not None and not self._stopped:
                failed = ""
                try:
                    self._bucket(digest, targets[digest], local.get(digest))
                except Exception as error:  # any failure ends the pull
                    failed = _error_text(error)
                with self._changed:
                    left[0] -= 1
                    self._failed = self._failed or failed
                    self._stopped = self._stopped or bool(failed)  # the other buckets are no longer needed
                    self._changed.notify_all()

        for number in range(min(self._in_flight, len(targets))):
            threading.Thread(target=fetch_buckets, name=f"v{self._version} {number}", daemon=True).start()
        waiting = set(targets)
        try:
            while left[0]:
                with self._changed:
                    ready = [d for d in targets if d in waiting and (d in local or d in self._sources)]
                    for digest in ready:
                        work.put(digest)
                    waiting -= set(ready)
                    self._check(not waiting or not self._over, f"v{self._version} was not pushed whole")
                    if not ready and left[0]:
                        self._changed.wait(1.0)
                        self._check(not self._abandoned(), "nobody waits for it any more")
        finally:
            for _ in range(self._in_flight):
                work.put(None)

    def _bucket(self, digest: str, targets: Targets, local: tuple[Path, int, int] | None) -> None:
        with contextlib.suppress(OSError, ValueError):  # pruned meanwhile, or damaged: fetch it from the store
            if local is not None:
                file, offset, _ = local
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
                    raise ValueError(f"bucket {digest[:12]} cannot be read: {_error_text(error)}") from None
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped, timeout=BACKOFF_S * 2**attempt)

    def _copy(self, opened: Callable[[], Any], offset: int, digest: str, targets: Targets) -> None:
        """ValueError for contents of another digest, which the targets then hold too; OSError for a broken stream."""
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

    def _local_buckets(self) -> dict[str, tuple[Path, int, int]]:
        """File, offset and size of each bucket of the earlier versions on this host."""
        found: dict[str, tuple[Path, int, int]] = {}
        for version in sorted(_versions(self._root).values(), reverse=True):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                for name, _, bucket, digests in json.loads((version / MANIFEST).read_text())["files"]:
                    for i, digest in enumerate(digests):
                        found.setdefault(digest, (version / name, i * bucket, bucket))
        return found

    def _prune(self) -> None:
        """Remove versions that no engine needs any more. Open files stay readable."""
        newest = max(self._keep, default=0)
        for number, directory in _versions(self._root).items():
            if number < newest and number != self._version and number not in self._keep:
                with contextlib.suppress(OSError):
                    _remove(directory)

    def _await(self, arrived: Callable[[], bool]) -> None:
        """Wait for an update of the controller. The caller holds the lock."""
        while not arrived():
            self._check(not self._abandoned(), "nobody waits for it any more")
            self._changed.wait(1.0)

    def _abandoned(self) -> bool:
        return not self._over and time.monotonic() - self._heard > ABANDONED_S

    def _check(self, valid: bool, reason: str) -> None:
        if self._stopped:
            raise ValueError(self._failed or "it was stopped")
        if not valid:
            raise ValueError(reason)


_numbers = itertools.count()

pulls: dict[str, Pull] = {}
"""The latest pulls of this process, by stamp."""

REMEMBERED = 4
"""Maximum of `pulls`: the one that an engine loads, the next one, and those with late updates."""


def call_pull(call: str, order: Mapping[str, Any]) -> dict[str, Any]:
    """Serve a call about a version: `pull` it, `tell` more sources, `look` at its progress, or `stop` it. Returns its
    progress."""
    pull = pulls.get(order["stamp"])
    if call == "pull":
        if pull is None or pull.ended:
            pulls.pop(order["stamp"], None)
            pull = pulls[order["stamp"]] = Pull(order)
            for stamp in list(pulls)[:-REMEMBERED]:
                pulls.pop(stamp).stop()
        else:
            pull.update(order)
    elif pull is not None and call == "tell":
        pull.update(order)
    elif pull is not None and call == "stop":
        pull.stop()
    return {"error": "", "path": "", "unknown": True} if pull is None else pull.progress()


CALLS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
"""Methods of vLLM's worker. They raise."""


def weights_of(worker: object, call: str, order: str) -> dict[str, Any]:
    """A method of vLLM's workers, for `/collective_rpc`: one of `CALLS`, or a call about a pull, which returns at once,
    between two steps of the engine. It never raises: when several workers raise, vLLM (0.32) reads the first one's
    answer, and takes the answers of the others for those to later calls."""
    try:
        if call in CALLS:
            getattr(worker, call)(**json.loads(order))
            return {"error": ""}
        return call_pull(call, json.loads(order))
    except Exception as error:
        if call not in CALLS:
            return {"path": "", "error": f"not understood: {_error_text(error)}"}
        logging.getLogger("vllm.rollart").exception("%s failed", call)
        return {"error": _error_text(error)}


def _opened(source: str) -> Any:
    """`source` is a URL or a path. Error texts never contain the URL: its possession permits reading."""
    if source.startswith(("http://", "https://")):
        return urllib.request.urlopen(source, timeout=SILENT_S)
    return open(source, "rb")


def _error_text(error: BaseException) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the store answered {error.code}"
    if isinstance(error, http.client.HTTPException):
        return f"the store's answer is none ({type(error).__name__})"
    if isinstance(error, OSError):
        reason = getattr(error, "reason", None) or error.strerror or error
        return f"{error.filename}: {reason}" if error.filename else str(reason)
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
    """Remove a version. No reader finds a part of it."""
    aside = directory.with_name(f".pruned-{directory.name}")
    shutil.rmtree(aside, ignore_errors=True)
    directory.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _write(file: Path, text: str) -> None:
    file.write_text(text)
