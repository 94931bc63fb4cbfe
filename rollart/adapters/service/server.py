"""AsyncFlow's service interface (arXiv:2507.01663, §6) over HTTP: prompts in, experience in and out by columns, and
announcements of weights. External engines and trainers connect here."""

from __future__ import annotations

import hmac
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from rollart.adapters.service.packed import KIND, columns, decoded, encoded, plain
from rollart.adapters.service.state import (
    ExperienceRequest,
    ExperienceRow,
    RequestRefused,
    ServiceSetup,
    ServiceState,
    ServiceTask,
)
from rollart.adapters.service.storage import ServiceStore
from rollart.adapters.service.uploads import BLOCK_BYTES, StoredFile, WeightUploads
from rollart.errors import StorageFailed

MAX_BODY = 256 * 2**20
"""Longest request body, bytes."""

MAX_INTEGER = 2**63 - 1
"""Largest integer that SQLite can store."""

MAX_WAIT_S = 60.0
"""Longest wait of one call, seconds; clients repeat the call."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class ServiceServer:
    """The routes. The first setup creates the state; later ones are accepted if equal and refused otherwise."""

    token: str
    state: ServiceState | None
    """The state recovered from `store`, if there was one; a state created by a later setup uses the same store."""
    store: ServiceStore | None = None
    uploads: WeightUploads | None = None
    """Receives weights from senders without a shared disk."""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._guard])
        app.add_routes(
            [
                web.put("/v1/setup", self._set_up),
                web.post("/v1/prompts", self._put_prompts),
                web.post("/v1/experience", self._put),
                web.post("/v1/experience/take", self._get),
                web.post("/v1/groups/{group}/drop", self._drop),
                web.post("/v1/leases/{lease}/{action}", self._lease),
                web.post("/v1/weights", self._notify),
                web.get("/v1/weights", self._weights),
                web.post("/v1/weights/{version}/begin", self._begin),
                web.put("/v1/weights/{version}/files/{name}", self._receive),
                web.get("/v1/weights/{version}/files", self._files),
                web.get("/v1/weights/{version}/files/{name}", self._send),
                web.get("/v1/status", self._status),
                web.get("/health", self._health),
            ]
        )
        return app

    async def _set_up(self, request: web.Request) -> web.Response:
        body = await _body(request)
        tasks = {}
        for name, value in _object(body.get("tasks"), "tasks").items():
            task = _object(value, f"task {name}")
            columns = tuple(map(_name, _list(task, "columns")))
            tasks[_name(name)] = ServiceTask(columns, bool(task.get("whole_groups", False)))
        if not tasks:
            raise RequestRefused("tasks is empty (rule: at least one, since only tasks free rows)")
        staleness = None if body.get("staleness") is None else _whole(body, "staleness", 0)
        columns = tuple(map(_name, _list(body, "columns")))
        setup = ServiceSetup(columns, tasks, _whole(body, "capacity", 4096), staleness)
        if self.state is None:
            self.state = ServiceState(setup, self.store)
            await self.state.begin()
        elif self.state.setup != setup:
            raise RequestRefused("the service is set up otherwise (rule: one setup for all who share it)", 409)
        return _json(self.state.status())

    async def _put_prompts(self, request: web.Request) -> web.Response:
        (body, blob), state = await _packed_body(request), self._current_state()
        prompts = [_object(p, "prompts") for p in _list(body, "prompts")]
        if blob is not None:
            prompts = [_columns(p, blob) for p in prompts]
        size = _whole(body, "group_size", 1)
        key = _name(body.get("key") or "")
        if key not in state.answered:
            await state.room(size * len(prompts), _seconds(body))
        return _json({"ids": await state.put_prompts(prompts, size, tokens=_whole(body, "tokens", 0), key=key)})

    async def _put(self, request: web.Request) -> web.Response:
        (body, blob), state = await _packed_body(request), self._current_state()
        rows = []
        for entry in (_object(r, "rows") for r in _list(body, "rows")):
            version = entry.get("version")
            if version is not None and (type(version) is not int or abs(version) > MAX_INTEGER):
                raise RequestRefused(f"version is {version!r} (rule: a whole number of 63 bits)")
            values = _object(entry.get("columns"), "columns") if blob is None else _columns(entry, blob)
            rows.append((str(entry.get("id")), values, version))
        return _json({"kept": await state.put_all(rows)})

    async def _get(self, request: web.Request) -> web.Response:
        body, state = await _body(request), self._current_state()
        columns = None if body.get("columns") is None else tuple(map(str, _list(body, "columns")))
        least = None if body.get("at_least") is None else _whole(body, "at_least", 1)
        wanted = ExperienceRequest(
            str(body.get("task")), _whole(body, "count", 1), least, _whole(body, "consumers", 1), columns
        )
        lease = ""
        if body.get("lease_s") is None:
            batches = await state.get(wanted, _seconds(body))
        else:
            lease, batches = await state.lease_rows(
                wanted, _seconds(body), lease_s=_number(body["lease_s"]), key=_name(body.get("key") or "")
            )
        packs = KIND in request.headers.get("Accept", "")

        def row_body(row: ExperienceRow) -> dict[str, Any]:
            values = row.values if packs else {name: plain(value) for name, value in row.values.items()}
            return {"id": row.id, "group": row.group, "version": row.version, "columns": values}

        rows = [[row_body(row) for row in batch] for batch in batches]
        answer = {"batches": rows, "version": state.version, "lease": lease}
        if packs:
            return web.Response(body=encoded(answer, [r for batch in rows for r in batch]), content_type=KIND)
        return _json(answer)

    async def _lease(self, request: web.Request) -> web.Response:
        body, state, lease = await _body(request), self._current_state(), request.match_info["lease"]
        match request.match_info["action"]:
            case "done":
                kept = await state.done(lease)
            case "renew":
                kept = await state.renew(lease, _number(body.get("lease_s")))
            case "return":
                kept = await state.return_lease(lease)
            case other:
                raise RequestRefused(f"a lease has no {other!r} (rule: done, renew, return)", 404)
        return _json({"kept": kept})

    async def _drop(self, request: web.Request) -> web.Response:
        body = await _body(request)
        rows = await self._current_state().drop(request.match_info["group"], str(body.get("reason") or "given up"))
        return _json({"rows": rows})

    async def _notify(self, request: web.Request) -> web.Response:
        body, state = await _body(request), self._current_state()
        version, path, group = _whole(body, "version", 0), str(body.get("path") or ""), str(body.get("group") or "")
        if body.get("files") is not None:
            self._check_version(state, version, group)
            files = _files(body["files"])
            if version == state.version and state.path and not await self._disk().holds(version, files):
                raise RequestRefused(f"another v{version} is announced already", 409)
            path = str(await self._disk().commit(version, files))
        await state.notify(version, path, group)
        return _json({"version": state.version, "path": state.path})

    async def _begin(self, request: web.Request) -> web.Response:
        """Check if files of a version would be accepted, before they are sent."""
        body = await _body(request)
        self._check_version(self._current_state(), _version(request), str(body.get("group") or ""))
        self._disk()
        return _json({})

    async def _receive(self, request: web.Request) -> web.Response:
        """Receive one file of a future version; the body is the file."""
        version = _version(request)
        self._check_version(self._current_state(), version, request.query.get("group", ""))
        try:
            stored = await self._disk().receive(
                version, request.match_info["name"], request.content.iter_chunked(BLOCK_BYTES)
            )
        except (aiohttp.ClientPayloadError, ConnectionError) as error:
            raise RequestRefused(f"the file was cut off: {error}") from None
        return _json(asdict(stored))

    def _check_version(self, state: ServiceState, version: int, group: str) -> None:
        """Refuse a version early, before its files are uploaded in vain."""
        if version < state.version:
            raise RequestRefused(f"version {version} after {state.version} (rule: versions grow)", 409)
        state.permit(version, group)

    async def _files(self, request: web.Request) -> web.Response:
        files = await self._current(request)
        return _json({"files": {name: asdict(stored) for name, stored in files.items()}})

    async def _send(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in await self._current(request):
            raise RequestRefused(f"no file {name!r}", 404)
        return web.FileResponse(Path(self._current_state().path) / name, chunk_size=BLOCK_BYTES)

    async def _current(self, request: web.Request) -> Mapping[str, StoredFile]:
        state, version = self._current_state(), _version(request)
        if version != state.version:
            raise RequestRefused(f"the current version is v{state.version}, not v{version}", 409)
        return await self._disk().listed(state.path, version)

    def _disk(self) -> WeightUploads:
        if self.uploads is None:
            raise RequestRefused("this service has no directory for weights (rule: start it with --data)", 409)
        return self.uploads

    async def _weights(self, request: web.Request) -> web.Response:
        after, wait = (_number(request.query.get(name, "-1")) for name in ("after", "timeout_s"))
        version, path = await self._current_state().weights(int(after), min(wait, MAX_WAIT_S))
        return _json({"version": version, "path": path})

    async def _status(self, request: web.Request) -> web.Response:
        return _json({"schema_version": 1, **self._current_state().status()})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    def _current_state(self) -> ServiceState:
        if self.state is None:
            raise RequestRefused("the service is not set up (rule: PUT /v1/setup first)", 409)
        return self.state

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if (
            self.token
            and request.path != "/health"
            and not hmac.compare_digest(given.encode(errors="replace"), self.token.encode())
        ):
            return _json({"error": "the token is not this service's"}, status=401)
        try:
            return await handler(request)
        except RequestRefused as error:
            headers = {"Retry-After": "1"} if error.status == 503 else {}
            return _json({"error": str(error)}, status=error.status, headers=headers)
        except StorageFailed as error:
            return _json({"error": str(error)}, status=500)
        except web.HTTPException as error:
            return _json({"error": error.reason}, status=error.status)


def _version(request: web.Request) -> int:
    version = request.match_info["version"]
    if not version.isdecimal() or len(version) > len(str(MAX_INTEGER)) or int(version) > MAX_INTEGER:
        raise RequestRefused(f"version {version!r} (rule: a whole number)")
    return int(version)


def _files(value: object) -> dict[str, StoredFile]:
    found = {}
    for name, entry in _object(value, "files").items():
        one = _object(entry, f"file {name}")
        found[name] = StoredFile(_whole(one, "bytes", 0), str(one.get("sha256")))
    return found


async def _body(request: web.Request) -> Mapping[str, Any]:
    return (await _packed_body(request))[0]


async def _packed_body(request: web.Request) -> tuple[Mapping[str, Any], bytes | None]:
    """The body, and the bytes of its packed columns; None: the body is JSON."""
    raw, packed = await request.read(), request.content_type == KIND
    try:
        value, blob = decoded(raw) if packed else (json.loads(raw or b"{}"), None)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"the body is not {'packed columns' if packed else 'JSON'}: {error}") from None
    return _object(value, "the body"), blob


def _columns(row: Mapping[str, Any], blob: bytes) -> dict[str, Any]:
    try:
        return columns(row, blob)
    except (ValueError, TypeError, AttributeError) as error:
        raise RequestRefused(f"a row cannot be read: {error}") from None


def _object(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestRefused(f"{what} must be a JSON object")
    return value


def _list(body: Mapping[str, Any], name: str) -> list[Any]:
    value = body.get(name)
    if not isinstance(value, list):
        raise RequestRefused(f"{name} must be a list")
    return value


def _whole(body: Mapping[str, Any], name: str, default: int) -> int:
    value = body.get(name, default)
    if type(value) is not int or not 0 <= value <= MAX_INTEGER:
        raise RequestRefused(f"{name} is {value!r} (rule: a whole number, at least 0, of 63 bits)")
    return value


def _name(value: object) -> str:
    """A string value. RequestRefused for lone surrogates, which are neither valid text nor storable."""
    name = str(value)
    try:
        name.encode()
    except UnicodeEncodeError:
        raise RequestRefused(f"{name!r} is no text") from None
    return name


def _seconds(body: Mapping[str, Any]) -> float:
    return min(_number(body.get("timeout_s", 0)), MAX_WAIT_S)


def _number(value: object) -> float:
    try:
        found = float(str(value))
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise RequestRefused(f"{value!r} is no number")
    return found


def _json(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    all_headers = {**(headers or {}), "X-Rollart-Columns": KIND}
    return web.Response(
        body=json.dumps(value).encode(), status=status, headers=all_headers, content_type="application/json"
    )
