"""A Hugging Face Hub on this machine: the endpoints that `huggingface_hub` asks for a model's commit and files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest


def commit_of(files: dict[str, bytes]) -> str:
    """A commit hash of the files."""
    digests = sorted((name, hashlib.sha1(data).hexdigest()) for name, data in files.items())
    return hashlib.sha1(repr(digests).encode()).hexdigest()


@dataclass
class HubServer:
    """One model, by branch or commit. Everything that was asked for is counted."""

    model: str
    branches: dict[str, dict[str, bytes]]
    gated: bool = False
    token: str = ""
    breaks: dict[str, int] = field(default_factory=dict)
    """Bytes after which the connection breaks off, once, by file."""
    down: bool = False
    sends: threading.Event = field(default_factory=threading.Event)
    """While it is cleared, safetensors are announced and not sent."""
    announces: threading.Event = field(default_factory=threading.Event)
    """While it is cleared, safetensors are not even announced."""
    held: threading.Event = field(default_factory=threading.Event)
    """An announcement was held up."""
    url: str = ""
    asked: Counter[str] = field(default_factory=Counter)
    """Requests of file contents by name, and of everything else as `api`."""
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes of file contents, by name."""

    def __post_init__(self) -> None:
        self.sends.set()
        self.announces.set()

    def files(self, revision: str) -> dict[str, bytes] | None:
        known = {**self.branches, **{commit_of(files): files for files in self.branches.values()}}
        return known.get(revision)


class HubRequest(BaseHTTPRequestHandler):
    """Answers one request. `hub` is set by the subclass of each server."""

    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *values: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        api = path.startswith("api/models/")
        owner, name, kind, revision, file = [*path.removeprefix("api/models/").split("/", 4), *[""] * 4][:5]
        files = self.hub.files(revision)
        if self.hub.down:
            self.answer(503, b"")
        elif f"{owner}/{name}" != self.hub.model:
            self.answer(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif self.hub.gated and not api and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
        elif files is None:
            self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif api:
            self.hub.asked["api"] += 1
            self.answer(200, json.dumps(described(self.hub, files) if kind == "revision" else listed(files)).encode())
        elif file in files:
            self.content(file, files[file], commit_of(files))
        else:
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})

    def content(self, file: str, data: bytes, commit: str) -> None:
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        start = int((self.headers.get("Range") or "bytes=0-")[len("bytes=") :].partition("-")[0])
        if file.endswith(".safetensors"):
            if not self.hub.announces.is_set():
                self.hub.held.set()
            self.hub.announces.wait()
        if self.command == "GET":
            self.hub.asked[file] += 1
            self.hub.sent[file] += len(data) - start
            if (limit := self.hub.breaks.pop(file, None)) is not None:
                self.send(200, len(data), headers)
                self.wfile.write(data[:limit])
                self.hub.sent[file] += limit - len(data)
                self.close_connection = True
                return
            if file.endswith(".safetensors"):
                self.hub.sends.wait()
        self.answer(206 if start else 200, data[start:], headers)

    def send(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(key, value)
        self.end_headers()

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send(status, len(body), {"Content-Type": "application/json", **(headers or {})})
        if self.command == "GET":
            self.wfile.write(body)


def described(hub: HubServer, files: dict[str, bytes]) -> dict[str, Any]:
    return {"id": hub.model, "sha": commit_of(files), "siblings": [{"rfilename": one} for one in files]}


def listed(files: dict[str, bytes]) -> list[dict[str, Any]]:
    return [
        {"type": "file", "path": one, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        for one, data in files.items()
    ]


@contextlib.contextmanager
def serving(hub: HubServer) -> Iterator[HubServer]:
    """Serve the model at a free port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (HubRequest,), {"hub": hub})) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield hub
        server.shutdown()


def use(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path, *, offline: bool = False) -> None:
    """This process asks the Hub at `url`. The library reads its variables when it is imported, so that the values read
    are set as well."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setenv("HF_TOKEN", "")
