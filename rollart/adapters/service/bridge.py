"""Bridge to an external trainer: `python -m rollart.adapters.service.bridge --config FILE --listen HOST:PORT`.

To the run, the bridge is its trainer (the protocol of `rollart.train.server`). It offers each batch of the run over the
service interface, as one group, and the versions that the external trainer announces there become the run's versions.
So the run's rules hold: which samples form a batch, how stale they may be, and that a batch is trained once.

Prints `ready http://host:port` for the run, and maintains `service.json` beside the config: the service's address and
the state of the batch on offer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime as dt
import itertools
import json
import os
import secrets
import shutil
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
from aiohttp import web

from rollart.adapters.service.packed import pack, plain
from rollart.adapters.service.server import ServiceServer
from rollart.adapters.service.state import ExperienceRow, RequestRefused, ServiceSetup, ServiceState, ServiceTask
from rollart.adapters.service.uploads import WeightUploads
from rollart.errors import TrainerError, TrainerRefused, UsageError
from rollart.settings.base import host_and_port, is_loopback

TASK = "train"
COLUMNS = ("token_ids", "loss_mask", "logprobs", "versions", "score", "group", "domain", "batch")
"""One value per token, except `score`, `group`, `domain` and `batch`, which have one per row. `group` and `domain` are
the run's; `batch` is the version that training on the batch produces."""

CAPACITY_ROWS = 2**20
MAX_BODY = 2**30
"""Longest request body, bytes; as the embedded trainer's."""

POLL_TIMEOUT_S = 60.0

REQUIRED_FILE = "config.json"
"""Engines cannot load a directory without this file."""


class Bridge:
    """Connects one run with any number of external processes, on one loop. The run makes one call at a time; `train`
    waits until its batch's version is announced, for as long as the run's lease allows."""

    def __init__(self, root: Path) -> None:
        """`root`: the directory of the run's versions."""
        self._root = root
        self.state = BridgeState(ServiceSetup(COLUMNS, {TASK: ServiceTask(COLUMNS, whole_groups=True)}, CAPACITY_ROWS))
        self.state.version = -1
        self.uploads = WeightUploads(root / "outside", readable=(root,))
        self._groups: list[str] = []
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="weights")
        """Copies one version at a time: a copy whose caller was cancelled finishes before the next one starts."""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY)
        for name in ("train", "stage", "publish", "restore"):
            app.router.add_post(f"/{name}", _msgpack_handler(getattr(self, name)))
        for name in ("imitate", "logprobs", "reference", "advantages", "begin", "accumulate", "finish"):
            app.router.add_post(f"/{name}", _msgpack_handler(partial(self.refuse, name)))
        app.router.add_get("/health", self._health)
        return app

    async def train(self, body: Mapping[str, Any]) -> dict[str, Any]:
        version, rows = int(body["version"]), list(_rows(body["samples"]))
        began = asyncio.get_running_loop().time()
        await self._drop_offers()
        ids = await self.state.put_prompts([{}], len(rows))
        self._groups.append(ids[0].rpartition(".")[0])
        self.state.offer(self._groups[-1], version + 1)
        try:
            # Each row with the oldest version among its sampled tokens.
            oldest = [min((v for v in plain(row["versions"]) if v >= 0), default=None) for row in rows]
            offered = [{**row, "batch": version + 1} for row in rows]
            await self.state.put_all(list(zip(ids, offered, oldest, strict=True)))
            await self._announced(version + 1)
        finally:
            self.state.offer("", None)
        seconds = asyncio.get_running_loop().time() - began
        return {"trained_tokens": sum(sum(plain(r["loss_mask"])) for r in rows), "seconds": seconds, "metrics": {}}

    async def stage(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {}  # announced versions are never replaced

    async def publish(self, body: Mapping[str, Any]) -> dict[str, Any]:
        version = int(body["version"])
        announced = Path(await self._announced(version))
        # Uploaded files are never modified, so a hard link suffices.
        copier = _link_or_copy if announced.is_relative_to(self.uploads.root) else shutil.copy2
        path = await asyncio.get_running_loop().run_in_executor(
            self._copying, adopt_version, announced, self._root / f"v{version:06d}", version, copier
        )
        read = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        return {"version": version, "path": str(path), "bytes": read}

    async def restore(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Go back to a version; the external trainer loads it when it sees the number decrease."""
        await self._drop_offers()
        await self.state.reset(int(body["version"]), str(body["path"]))
        return {}

    async def _announced(self, version: int) -> str:
        while self.state.version < version:
            await self.state.weights(version - 1, POLL_TIMEOUT_S)
        if self.state.version != version:
            raise TrainerError(
                f"the outside trainer announced v{self.state.version} where v{version} was due",
                remedy="announce a version per batch, each one more than the last",
            )
        return self.state.path

    async def _drop_offers(self) -> None:
        groups, self._groups = self._groups, []
        for group in groups:
            await self.state.drop(group, "over")

    async def refuse(self, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a command that an external trainer does not support."""
        raise TrainerRefused(
            f"an outside trainer (trainer.external) does no {name}",
            remedy="leave out warm_start, streamed training, columns and probes",
        )

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "version": self.state.version, "queued": 0, "stream": False})


class BridgeState(ServiceState):
    """As `ServiceState`, but a version may be announced only if it is the one due for the offered batch, and only after
    the batch was taken. A slow trainer that took an earlier batch gets an error, and a batch that no trainer took never
    counts as trained."""

    def __init__(self, setup: ServiceSetup) -> None:
        super().__init__(setup)
        self.offered = ""
        """The group of the offered batch; '' if there is none."""
        self.due: int | None = None
        """The version that training on the offered batch produces."""
        self.taken = False
        self.changed: Callable[[], None] = lambda: None
        """Called when a batch is offered, taken or withdrawn, and when a version is announced."""

    def offer(self, group: str, version: int | None) -> None:
        """Offer the batch of a group, or ("" and None) withdraw it."""
        self.offered, self.due, self.taken = group, version, False
        self.changed()

    def permit(self, version: int, group: str) -> None:
        if version <= self.version or (version == 0 and self.version < 0):
            return
        if self.due is None or version != self.due:
            reason = "no batch is on offer" if self.due is None else f"the batch on offer makes v{self.due}"
            raise RequestRefused(
                f"v{version} is not due: {reason} (rule: take a batch, step, announce its version)", 409
            )
        if not self.taken or (group and group != self.offered):
            raise RequestRefused(
                f"v{version} was not made of the batch on offer: the run gave up the one before (rule: take it again)",
                409,
            )

    async def notify(self, version: int, path: str, group: str = "") -> None:
        await super().notify(version, path, group)
        self.changed()

    def _experience_row(self, row: str, columns: Sequence[str]) -> ExperienceRow:
        experience = super()._experience_row(row, columns)
        if experience.group == self.offered and not self.taken:
            self.taken = True
            self.changed()
        return experience


def _rows(samples: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """The rows of a batch in the wire format of `rollart.train.batch`."""
    lengths, score = array("i", samples["lengths"]), array("d", samples["score"])
    group, domain = array("i", samples["group"]), array("i", samples["domain"])
    tokens, versions = array("i", samples["tokens"]), array("i", samples["versions"])
    mask, logprobs = samples["mask"], array("f", samples["logprobs"])
    ends = itertools.accumulate(lengths)
    return [
        {
            "token_ids": pack(tokens[end - length : end]),
            "loss_mask": pack(array("B", mask[end - length : end])),
            "logprobs": pack(logprobs[end - length : end]),
            "versions": pack(versions[end - length : end]),
            "score": score[i],
            "group": group[i],
            "domain": samples["domains"][domain[i]],
        }
        for i, (length, end) in enumerate(zip(lengths, ends, strict=True))
    ]


def _link_or_copy(source: str, path: str) -> None:
    try:
        os.link(source, path)
    except OSError:  # a file system without hard links
        shutil.copy2(source, path)


def adopt_version(announced: Path, path: Path, version: int, copier: Callable[[str, str], object]) -> Path:
    """Turn an announced directory into a complete version of the run. TrainerError if it holds no weights."""
    if not (announced / REQUIRED_FILE).is_file() or not any(announced.glob("*.safetensors")):
        raise TrainerError(
            f"the outside trainer announced {announced} for v{version}: no {REQUIRED_FILE} with *.safetensors is there",
            remedy="save_pretrained there before weight_sync_notify",
        )
    aside = path.with_name(f".outside-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        shutil.copytree(announced, aside, ignore=shutil.ignore_patterns("COMPLETE"), copy_function=copier)
        marker = {"schema": 1, "version": version, "files": {}, "stamp": secrets.token_hex(32)}
        (aside / "COMPLETE").write_text(json.dumps(marker))
        shutil.rmtree(path, ignore_errors=True)  # only now: `path` may be the announced directory
        aside.rename(path)
    except OSError as error:
        raise TrainerError(f"cannot copy {announced} to {path}: {error}") from None
    return path


def _msgpack_handler(
    work: Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handler(request: web.Request) -> web.Response:
        try:
            status, answer = 200, await work(msgpack.unpackb(await request.read()))
        except TrainerError as error:
            status = 400 if isinstance(error, TrainerRefused) else 500
            answer = {"error": error.message, "remedy": error.remedy}
        except RequestRefused as error:
            status, answer = error.status, {"error": str(error), "remedy": ""}
        except (msgpack.UnpackException, ValueError, TypeError, LookupError) as error:
            status, answer = 400, {"error": f"the request cannot be read: {error!r}", "remedy": ""}
        return web.Response(body=msgpack.packb(answer), status=status, content_type="application/msgpack")

    return handler


def _write_status(path: Path, state: BridgeState, url: str, listen: str) -> None:
    """Replace `service.json` atomically."""
    if state.due is not None:
        text = f"batch {state.due} {'is being trained' if state.taken else 'waits to be taken'}"
    else:
        text = "waits for version 0" if state.version < 0 else "no batch on offer"
    now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    about = {"schema_version": 1, "url": url, "listen": listen}
    aside = path.with_name(f"{path.name}.part")
    with contextlib.suppress(OSError):  # a full disk must not fail the caller's request
        aside.write_text(json.dumps({**about, "version": state.version, "state": text, "since": now}))
        aside.rename(path)


def external_trainer_token(variable: str, file: Path | None) -> str:
    """The access token of the external trainer; "" for none. A missing file is created. UsageError, one line."""
    if variable:
        token = os.environ.get(variable, "")
        if not token:
            raise UsageError(f"the variable {variable} is empty (rule: it holds the outside trainer's token)")
        return token
    if file is None:
        return ""
    try:
        try:
            made = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            if file.stat().st_mode & 0o077:
                raise UsageError(f"{file} can be read by others (rule: mode 600)", remedy=f"chmod 600 {file}") from None
            token = file.read_text().strip()
        else:
            token = secrets.token_urlsafe(32)
            with os.fdopen(made, "w") as out:
                out.write(token)
    except OSError as error:
        raise UsageError(f"cannot use {file}: {error.strerror}") from None
    if not token:
        raise UsageError(f"{file} is empty (rule: it holds the outside trainer's token)", remedy="delete it")
    return token


async def _serve(config: Path, listen: str, token: str, host: str, port: int) -> None:
    bridge = Bridge(Path(json.loads(config.read_text())["weights_root"]))
    outside_host, outside_port = host_and_port(listen)
    ours = await _start_site(bridge.app(), host, port)
    service = ServiceServer(state=bridge.state, token=token, uploads=bridge.uploads)
    theirs = await _start_site(service.app(), outside_host, outside_port)
    bridge.state.changed = partial(_write_status, config.with_name("service.json"), bridge.state, theirs, listen)
    bridge.state.changed()
    print(f"ready {ours}", flush=True)
    await asyncio.Event().wait()


async def _start_site(app: web.Application, host: str, port: int) -> str:
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    bound = runner.addresses[0]
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound[0], bound[0])
    return f"http://{f'[{name}]' if ':' in name else name}:{bound[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Bridge to an external trainer.")
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="where the outside trainer calls")
    parser.add_argument("--token-env", metavar="VAR", default="", help="environment variable with the access token")
    parser.add_argument("--token-file", type=Path, help="file of mode 600 with the token; created if missing")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    try:
        token = external_trainer_token(arguments.token_env, arguments.token_file)
        if not token and not is_loopback(host_and_port(arguments.listen)[0]):
            raise UsageError(f"--listen {arguments.listen} is reachable from elsewhere (rule: with a token)")
    except (UsageError, ValueError) as error:
        parser.exit(2, f"rollart: {error}\n")
    try:
        asyncio.run(_serve(arguments.config, arguments.listen, token, arguments.host, arguments.port))
    except OSError as error:
        parser.exit(2, f"rollart: cannot listen on {arguments.listen}: {error.strerror or error}\n")


if __name__ == "__main__":
    main()
