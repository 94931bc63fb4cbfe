"""Client of `rollart service`, for external trainers, engines and rewards. Standard library alone, so that it can be
copied to their machines.

The calls are AsyncFlow's (arXiv:2507.01663, §6): prompts in, experience in and out by columns, weights announced.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import ssl
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

try:
    from rollart.adapters.service import packed as packing
except ImportError:  # this file was copied alone: numbers are sent as JSON then
    packing = None  # type: ignore[assignment]


T = TypeVar("T")

BLOCK = 2**20
"""Bytes of weights that are sent or read at a time."""

LONG_S = 600.0
"""Timeout for the response to a file, in addition to `SLACK_S`."""

SLACK_S = 30.0
"""Timeout of a call beyond the wait that it requests."""


class ServiceError(Exception):
    """The service refused a call (`status`), or does not answer (status 0)."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Experience:
    """A row as it was taken. `version`: the weights it was sampled with, if known."""

    id: str
    group: str
    version: int | None
    columns: Mapping[str, Any]
    lease: str = ""
    """The lease of the row, if it was lent."""

    def __getitem__(self, column: str) -> Any:
        return self.columns[column]


class Service:
    """Calls block; a client may be used by any number of threads."""

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        patience_s: float = 0.0,
        tls: ssl.SSLContext | None = None,
        arrays: bool = False,
    ) -> None:
        """`patience_s`: how long failed calls are retried while the service does not respond; all calls are retried but
        `put_prompts` without a `key` and `get_experience` without a `key` and a `lease_s`. `tls`: the certificates to
        trust behind https://; by default the system's. `arrays`: long columns of numbers are returned as `array.array`
        (`torch.frombuffer`, `numpy.frombuffer`), not as lists."""
        self._url = url.rstrip("/")
        self._token = token
        self._patience_s = patience_s
        self._tls = tls
        self._arrays = arrays
        self._packs = False
        """The service accepts packed columns."""

    def init(
        self,
        columns: Sequence[str],
        tasks: Mapping[str, Sequence[str]],
        *,
        whole_groups: Sequence[str] = (),
        capacity: int = 4096,
        staleness: int | None = None,
    ) -> None:
        """Declare the columns and the columns that each task reads; all clients must declare the same. Tasks in
        `whole_groups` take groups whole. At most `capacity` rows are held. A sample that lived through more than
        `staleness` publishes is dropped with its group."""
        asked = {n: {"columns": list(c), "whole_groups": n in whole_groups} for n, c in tasks.items()}
        body = {"columns": list(columns), "tasks": asked, "capacity": capacity, "staleness": staleness}
        self._call("PUT", "/v1/setup", body)

    def put_prompts(
        self, prompts: Sequence[Mapping[str, Any]], *, group_size: int = 1, timeout_s: float = 30.0, key: str = ""
    ) -> list[str]:
        """Add a group of rows per prompt, with the prompt's columns; returns their ids. Waits until they fit;
        ServiceError (503) after `timeout_s`. With a `key`, a repeated call (its response was lost) returns the result
        of the first."""
        packs = self._packs
        rows = [{"columns": _packed(p) if packs else _plain(p)} for p in prompts]
        body = {
            "prompts": rows if packs else [row["columns"] for row in rows],
            "group_size": group_size,
            "timeout_s": timeout_s,
            "key": key,
        }
        got = self._call("POST", "/v1/prompts", body, timeout_s, again=bool(key), packed=rows if packs else None)
        return list(got["ids"])

    def put_experience(self, row: str, *, version: int | None = None, **columns: Any) -> bool:
        """Write columns of a row, and the version of the weights it was sampled with. False: the row was dropped
        meanwhile."""
        return self.put_many([(row, version, columns)])[row]

    def put_many(self, rows: Sequence[tuple[str, int | None, Mapping[str, Any]]]) -> dict[str, bool]:
        """As `put_experience`, for several rows (id, version, columns) in one call, which is durable as a whole."""
        packs = self._packs
        entries: list[dict[str, Any]] = [
            {"id": row, "columns": _packed(columns) if packs else _plain(columns), "version": version}
            for row, version, columns in rows
        ]
        return dict(self._call("POST", "/v1/experience", {"rows": entries}, packed=entries if packs else None)["kept"])

    def get_experience(
        self,
        task: str,
        count: int = 1,
        *,
        at_least: int | None = None,
        columns: Sequence[str] | None = None,
        timeout_s: float = 30.0,
        lease_s: float | None = None,
        key: str = "",
    ) -> list[Experience]:
        """`count` rows (groups, for a task that takes them whole) whose columns are complete; no other call for this
        task gets them. None of them after `timeout_s`; with `at_least`, fewer suffice.

        With `lease_s` the rows are lent: without `done` within that time they go to the next caller. With a `key` too,
        a repeated call gets the same rows while they are lent.
        """
        body = {
            "task": task,
            "count": count,
            "at_least": at_least,
            "columns": columns and list(columns),
            "timeout_s": timeout_s,
            "lease_s": lease_s,
            "key": key,
        }
        got = self._call("POST", "/v1/experience/take", body, timeout_s, again=bool(key) and lease_s is not None)
        return [
            Experience(r["id"], r["group"], r["version"], self._columns(r, got.get("", b"")), got["lease"])
            for batch in got["batches"]
            for r in batch
        ]

    def done(self, rows: Sequence[Experience]) -> bool:
        """The rows of one lease are processed: no caller gets them for this task again. False: the lease expired, and
        other callers may have them. Idempotent."""
        return self._lease(rows, "done")

    def renew(self, rows: Sequence[Experience], lease_s: float) -> bool:
        """Extend the lease to `lease_s` from now on. False: it has expired."""
        return self._lease(rows, "renew", lease_s=lease_s)

    def give_back(self, rows: Sequence[Experience]) -> bool:
        """Return the rows, which other callers may take at once. False: the lease has expired."""
        return self._lease(rows, "return")

    def stream(self, task: str, count: int = 1, *, timeout_s: float = 30.0) -> Iterator[list[Experience]]:
        """Batches as they become ready, until none does for `timeout_s`."""
        while batch := self.get_experience(task, count, timeout_s=timeout_s):
            yield batch

    def drop(self, group: str, reason: str = "given up") -> list[str]:
        """Give a group up for all tasks; returns its rows that were held."""
        return list(self._call("POST", f"/v1/groups/{urllib.parse.quote(group)}/drop", {"reason": reason})["rows"])

    def weight_sync_notify(self, version: int, path: str, *, batch: Sequence[Experience] = ()) -> None:
        """Announce new weights at `path`, which the service can read. `batch`: the rows they were trained on; a run
        refuses (409) weights from a batch that it gave up meanwhile."""
        self._call("POST", "/v1/weights", {"version": version, "path": path, "group": _group(batch)})

    def upload_weights(self, version: int, directory: str | Path, *, batch: Sequence[Experience] = ()) -> None:
        """As `weight_sync_notify`, for a directory that the service cannot read: its *.json and *.safetensors are sent,
        and become a version once all have arrived with correct checksums."""
        self._call("POST", f"/v1/weights/{version}/begin", {"group": _group(batch)})  # a refusal precedes the body
        group, files = urllib.parse.quote(_group(batch)), {}
        for file in _files(Path(directory)):
            path = f"/v1/weights/{version}/files/{urllib.parse.quote(file.name)}?group={group}"
            files[file.name] = self._patient(path, partial(self._send, path, file))
        self._call("POST", "/v1/weights", {"version": version, "files": files, "group": _group(batch)})

    def download_weights(self, directory: str | Path) -> int:
        """Download the current version's files into a directory, which is created; returns the version."""
        version, _ = self.weights()
        files, target = self._call("GET", f"/v1/weights/{version}/files", None, LONG_S)["files"], Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        for name, entry in files.items():
            if Path(name).name != name:
                raise ServiceError(f"{name!r} is no file of a version")
            path = f"/v1/weights/{version}/files/{urllib.parse.quote(name)}"
            self._patient(path, partial(self._fetch, path, target / name, entry["sha256"]))
        return version

    def weights(self, *, after: int = -1, timeout_s: float = 0.0) -> tuple[int, str]:
        """The current version and its path; waits up to `timeout_s` for one beyond `after`."""
        got = self._call("GET", f"/v1/weights?after={after}&timeout_s={timeout_s}", None, timeout_s)
        return int(got["version"]), str(got["path"])

    def status(self) -> dict[str, Any]:
        """Rows held, ready by task, room, the version, and counts of the other rows."""
        return self._call("GET", "/v1/status", None)

    def _lease(self, rows: Sequence[Experience], action: str, **body: float) -> bool:
        leases = {row.lease for row in rows}
        if leases == {""} or len(leases) != 1:
            raise ValueError(f"rows of {len(leases)} leases (rule: those of one call with lease_s)")
        return bool(self._call("POST", f"/v1/leases/{leases.pop()}/{action}", body)["kept"])

    def _call(
        self,
        method: str,
        path: str,
        body: Any,
        wait_s: float = 0.0,
        *,
        again: bool = True,
        packed: list[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """`packed`: rows of the body whose columns are sent packed. The bytes of packed columns in the response are at
        the key ""."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if packing is not None:
            headers["Accept"] += f", {packing.KIND}"
        data = None if body is None or packed is not None else json.dumps(body).encode()
        if packing is not None and packed is not None:
            headers["Content-Type"], data = packing.KIND, packing.encoded(body, packed)

        def once() -> dict[str, Any]:
            with self._answer(method, path, data, headers, wait_s) as answer:
                self._packs = packing is not None and (self._packs or "X-Rollart-Columns" in answer.headers)
                raw = answer.read()
                if packing is not None and answer.headers.get_content_type() == packing.KIND:
                    head, blob = packing.decoded(raw)
                    return {**head, "": blob}
                value: dict[str, Any] = json.loads(raw)
                return value

        return self._patient(path, once, self._patience_s if again else 0.0)

    def _columns(self, row: Mapping[str, Any], blob: bytes) -> dict[str, Any]:
        if packing is None or not row.get("packed"):
            return dict(row["columns"])
        found = packing.columns(row, blob)
        for name in row["packed"]:
            found[name] = found[name].array() if self._arrays else found[name].tolist()
        return found

    def _send(self, path: str, file: Path) -> dict[str, Any]:
        digest, size = hashlib.sha256(), file.stat().st_size

        def blocks() -> Iterator[bytes]:
            with file.open("rb") as read:
                while block := read.read(BLOCK):
                    digest.update(block)
                    yield block

        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        with self._answer("PUT", path, blocks(), headers, LONG_S) as answer:
            value: dict[str, Any] = json.loads(answer.read())
        if value != {"bytes": size, "sha256": digest.hexdigest()}:
            raise ConnectionError(f"{file} arrived as {value}")
        return value

    def _fetch(self, path: str, target: Path, sha256: str) -> None:
        digest, part = hashlib.sha256(), target.with_name(f"{target.name}.part")
        with self._answer("GET", path, None, {}, LONG_S) as answer, part.open("wb") as file:
            while block := answer.read(BLOCK):
                digest.update(block)
                file.write(block)
        if digest.hexdigest() != sha256:
            raise ConnectionError(f"{target.name} arrived damaged")
        part.replace(target)

    def _answer(self, method: str, path: str, data: Any, headers: Mapping[str, str], wait_s: float) -> Any:
        key = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        request = urllib.request.Request(self._url + path, data, {**headers, **key}, method=method)
        return urllib.request.urlopen(request, timeout=wait_s + SLACK_S, context=self._tls)

    def _patient(self, path: str, once: Callable[[], T], patience_s: float | None = None) -> T:
        """Retry with growing pauses while the service does not respond."""
        waited, pause = 0.0, 0.5
        while True:
            try:
                return once()
            except urllib.error.HTTPError as error:
                raise ServiceError(_reason(error), error.code) from None
            except (OSError, http.client.HTTPException, ValueError) as error:  # includes a truncated response
                if waited >= (self._patience_s if patience_s is None else patience_s):
                    raise ServiceError(f"{self._url}{path} does not answer: {error}") from None
            threading.Event().wait(pause)
            waited, pause = waited + pause, min(2 * pause, 10.0)


def _packed(columns: Mapping[str, Any]) -> dict[str, Any]:
    return dict(columns) if packing is None else {name: packing.pack(value) for name, value in columns.items()}


def _plain(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in columns.items()}


def _group(batch: Sequence[Experience]) -> str:
    return batch[0].group if batch else ""


def _files(directory: Path) -> list[Path]:
    found = [f for f in sorted(directory.iterdir()) if f.suffix in (".json", ".safetensors") and f.is_file()]
    if not any(f.suffix == ".safetensors" for f in found) or not (directory / "config.json").is_file():
        raise ValueError(f"{directory} holds no version (rule: config.json and *.safetensors)")
    return found


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"])
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"
