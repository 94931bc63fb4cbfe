"""Versions that attached servers pull themselves: the plugin's own code behind an HTTP server, without a vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollart.adapters.engines.vllm import VllmHost
from rollart.adapters.weights.buckets import BucketPusher
from rollart.adapters.weights.hosts import WeightStoreLocation
from rollart.adapters.weights.objects import FileObjectStore
from rollart.errors import EngineError, StorageFailed
from rollart.launch.weight_store import SharedWeightStore
from rollart.leases import Leases
from rollart.model import EngineId, WeightsRef
from tests.e2e.harness import ROOT
from tests.launch.test_weight_store import BUCKET, Events, Gate

pytestmark = pytest.mark.asyncio

BYTES = bytes(range(256)) * 40

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BYTES) + BYTES
CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(BYTES) + BYTES
"""The two kinds of store that serve a bucket."""


def plugin() -> ModuleType:
    """The plugin's state in one worker's process."""
    spec = importlib.util.spec_from_file_location("pulling", ROOT / "integrations/vllm/rollart_vllm/pulling.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Site:
    """A server of two workers on one host, and a run that shares only the store with it."""

    def __init__(self, root: Path, url: str, *, ahead: bool = True) -> None:
        self.root = root
        self.events = Events()
        self.place = WeightStoreLocation("files", str(root / "store"), str(root / "host"))
        self.stored = SharedWeightStore(
            root / "weights",
            self.place,
            Leases(self.events),
            self.events,  # type: ignore[arg-type]
            bucket_bytes=BUCKET,
            deltas=0,
            ahead=ahead,
            pull_s=60.0,
        )
        self.host = VllmHost(EngineId("engine-0"), url, self.place)
        self.stored.join(self.host)
        self.workers = [plugin(), plugin()]

    def publish(self, version: int) -> WeightsRef:
        path = Path(self.stored.path(version))
        (path / "trainer").mkdir(parents=True)
        (path / "model.safetensors").write_bytes(bytes([version]) * BUCKET + bytes(range(250)) * 10)
        (path / "config.json").write_text("{}")
        (path / "trainer" / "optimizer").write_bytes(b"x" * 99)
        (path / "COMPLETE").write_text(json.dumps({"version": version}))
        return WeightsRef(version, str(path))

    def on_host(self) -> list[str]:
        """All files, hidden ones included, except the lock."""
        root = self.root / "host"
        return sorted(p.name for p in root.iterdir() if p.name != ".lock") if root.exists() else []

    def settle(self) -> None:
        """When one worker's pull has failed, the other may still be pulling or cleaning up."""
        for worker in self.workers:
            for pull in worker.pulls.values():
                pull.join(60)
                assert pull.ended

    async def answer(self, request: web.Request) -> web.Response:
        asked = await request.json()
        assert asked["method"] == "rollart_weights"
        return web.json_response({"results": [w.weights_of(object(), *asked["args"]) for w in self.workers]})


@contextlib.asynccontextmanager
async def site(root: Path, *, ahead: bool = True) -> AsyncIterator[Site]:
    made: list[Site] = []

    async def answer(request: web.Request) -> web.Response:
        return await made[0].answer(request)

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/collective_rpc", answer)
    async with TestServer(app) as server, asyncio.timeout(60):
        made.append(Site(root, str(server.make_url("")).rstrip("/"), ahead=ahead))
        try:
            yield made[0]
        finally:
            await made[0].host.close()
            await made[0].stored.aclose()


async def test_workers_of_a_host_pull_one_copy_and_only_what_changed(tmp_path: Path) -> None:
    async with site(tmp_path) as s:
        for version in range(3):
            weights = s.publish(version)
            await s.stored.push(weights)
            s.stored.prune([v for v in (version - 1, version) if v >= 0])
            path = Path(await s.stored.local(s.host, weights))
            assert path == tmp_path / "host" / f"v{version:06d}"
            for name in ("model.safetensors", "config.json"):
                assert (path / name).read_bytes() == (Path(weights.path) / name).read_bytes()
            assert not (path / "trainer").exists(), "the optimizer is the trainer's"
        received = [n for _, n in s.events.of("weights_pulled", "received_bytes")]
        assert received == [2502, BUCKET, BUCKET]
        assert s.on_host() == ["v000000", "v000001", "v000002"], "what nobody needs goes with the next pull"
        assert json.loads((path / "COMPLETE").read_text())["version"] == 2
        assert s.events.of("weights_not_pulled", "why") == []


async def test_it_pulls_what_a_program_of_ours_pulled_before(tmp_path: Path) -> None:
    """Both leave the same directories: a host that was given back, and its replacement."""
    from rollart.adapters.weights.hosts import HostWeightCopy

    async with site(tmp_path, ahead=False) as s:
        for version in (0, 1):
            await s.stored.push(s.publish(version))
        ours = HostWeightCopy(s.place)
        await ours.pull_stamped(0, s.stored.stamps[0], ())
        await s.stored.local(s.host, WeightsRef(1, s.stored.path(1)))
        assert s.events.of("weights_pulled", "received_bytes") == [("engine-0", BUCKET)]
        assert (await ours.pull_stamped(1, s.stored.stamps[1], ()))[1].bytes == 0, "and it finds theirs"
        await ours.aclose()


@pytest.mark.parametrize("broken", [False, True])
async def test_it_pulls_while_the_push_goes_on_and_has_all_or_nothing(tmp_path: Path, broken: bool) -> None:
    async with site(tmp_path) as s:
        gate, weights = Gate(Path(s.place.url)), s.publish(3)
        s.stored.pusher = BucketPusher(gate, bucket_bytes=BUCKET, in_flight=1)
        pushing = asyncio.ensure_future(s.stored.push(weights))
        while (seen := await s.host.call("pulling")) is None or not seen.buckets:
            await asyncio.sleep(0)
        assert [name for name in s.on_host() if name.startswith("v")] == []
        gate.broken = broken
        gate.let.set()
        with pytest.raises(StorageFailed, match="the link is down") if broken else contextlib.nullcontext():
            await pushing
        s.settle()
        assert s.on_host() == ([] if broken else ["v000003"])
        if broken:
            ((name, why),) = s.events.of("weights_not_pulled", "why")
            assert (name, "was not pushed whole" in str(why)) == ("engine-0", True)
            gate.broken = False
            await s.stored.push(weights)
        path = Path(await s.stored.local(s.host, weights))
        assert (path / "model.safetensors").read_bytes() == (Path(weights.path) / "model.safetensors").read_bytes()


async def test_a_damaged_bucket_is_named_and_nothing_of_its_version_is_left(tmp_path: Path) -> None:
    async with site(tmp_path, ahead=False) as s:
        weights = s.publish(0)
        await s.stored.push(weights)
        bucket = next(p for p in (tmp_path / "store" / "buckets").iterdir() if p.stat().st_size == BUCKET)
        whole = bucket.read_bytes()
        for damaged, said in ((b"y" * BUCKET, "came damaged"), (whole[:9], "came damaged"), (None, "cannot be read")):
            bucket.unlink(missing_ok=True)
            if damaged is not None:
                bucket.write_bytes(damaged)
            with pytest.raises(EngineError, match=f"engine-0 has no v0: http://.*{bucket.name[:12]}.*{said}"):
                await s.stored.local(s.host, weights)
            s.settle()
            assert s.on_host() == []
        bucket.write_bytes(whole)
        assert Path(await s.stored.local(s.host, weights)).name == "v000000"


async def test_a_number_that_was_given_twice_is_the_last_ones(tmp_path: Path) -> None:
    async with site(tmp_path) as s:
        weights = s.publish(7)
        await s.stored.push(weights)
        (Path(weights.path) / "model.safetensors").write_bytes(b"another")
        await s.stored.push(weights)
        path = Path(await s.stored.local(s.host, weights))
        assert (path / "model.safetensors").read_bytes() == b"another"
        s.stored.stamps[7] = "what nobody pushed"
        with pytest.raises(EngineError, match="not what was published under that number"):
            await s.stored.local(s.host, weights)


async def test_a_store_that_hangs_holds_no_later_version_up(tmp_path: Path) -> None:
    """A bucket that is a pipe without a writer, so that opening it blocks. The pull is stopped and releases the
    lock."""
    async with site(tmp_path, ahead=False) as s:
        weights = s.publish(0)
        await s.stored.push(weights)
        bucket = next(p for p in (tmp_path / "store" / "buckets").iterdir() if p.stat().st_size == BUCKET)
        whole = bucket.read_bytes()
        bucket.unlink()
        os.mkfifo(bucket)
        hangs = asyncio.ensure_future(s.stored.local(s.host, weights))
        while (seen := await s.host.call("pulling")) is None or not seen.open:
            await asyncio.sleep(0)
        hangs.cancel()
        await asyncio.gather(hangs, return_exceptions=True)
        later = s.publish(1)
        (Path(later.path) / "model.safetensors").write_bytes(b"other buckets")
        await s.stored.push(later)
        assert Path(await s.stored.local(s.host, later)).name == "v000001"
        for _ in s.workers:  # unblocks the waiting threads
            with contextlib.suppress(OSError):
                os.close(os.open(bucket, os.O_WRONLY | os.O_NONBLOCK))
        bucket.unlink()
        bucket.write_bytes(whole)
        assert Path(await s.stored.local(s.host, weights)).name == "v000000"


async def test_what_one_worker_cannot_pull_the_others_give_up(tmp_path: Path) -> None:
    """The push continues without them: a worker that waits for it would hold the lock of its host."""
    async with site(tmp_path) as s:
        gate, weights = Gate(Path(s.place.url)), s.publish(3)
        s.stored.pusher = BucketPusher(gate, bucket_bytes=BUCKET, in_flight=1)
        pushing = asyncio.ensure_future(s.stored.push(weights))
        while (seen := await s.host.call("pulling")) is None or not seen.buckets:
            await asyncio.sleep(0)
        (first,) = s.workers[0].pulls.values()
        first.stop()
        while not s.events.of("weights_not_pulled", "why"):
            await asyncio.sleep(0.001)
        s.settle()
        gate.let.set()
        await pushing
        assert Path(await s.stored.local(s.host, weights)).name == "v000003"


async def test_a_pull_whose_controller_died_lets_the_next_one_pull(tmp_path: Path) -> None:
    worker = plugin()
    worker.ABANDONED_S = 0.0
    manifest = json.dumps({"schema": 1, "version": 1, "files": [["one", 3, 3, ["0" * 64]]]})
    told = {
        "root": str(tmp_path / "host"),
        "manifest": manifest,
        "keep": [],
        "in_flight": 0,
        "sources": {},
        "over": False,
        "whole": False,
    }
    pull = worker.Pull(told)
    pull.join(60)
    assert pull.progress()["error"] == "nobody waits for it any more"
    assert [p.name for p in (tmp_path / "host").iterdir()] == [".lock"]


async def test_a_server_that_was_started_anew_meanwhile_says_so(tmp_path: Path) -> None:
    async with site(tmp_path) as s:
        gate, weights = Gate(Path(s.place.url)), s.publish(3)
        s.stored.pusher = BucketPusher(gate, bucket_bytes=BUCKET, in_flight=1)
        pushing = asyncio.ensure_future(s.stored.push(weights))
        while (seen := await s.host.call("pulling")) is None or not seen.buckets:
            await asyncio.sleep(0)
        for dead in s.workers:
            for pull in dead.pulls.values():
                pull.stop()
                pull.join(60)
        s.workers = [plugin(), plugin()]
        while not s.events.of("weights_not_pulled", "why"):
            await asyncio.sleep(0.001)
        gate.let.set()
        await pushing
        ((_, why),) = s.events.of("weights_not_pulled", "why")
        assert "was restarted" in str(why)
        assert Path(await s.stored.local(s.host, weights)).name == "v000003"


async def test_a_server_without_the_plugin_or_without_room_is_named_with_the_remedy(tmp_path: Path) -> None:
    async with site(tmp_path, ahead=False) as s:
        weights = s.publish(0)
        await s.stored.push(weights)
        (tmp_path / "host").write_text("in the way")
        with pytest.raises(EngineError, match=r"engine-0 has no v0: http://.*: .*host: File exists"):
            await s.stored.local(s.host, weights)

    for said in (
        "Call to collective_rpc method failed: Method 'rollart_weights' is not implemented.",
        "Worker failed with error ''CPUWorker' object has no attribute 'rollart_weights'', please check the stack",
    ):
        app = web.Application()
        app.router.add_post("/collective_rpc", functools.partial(failing, said))
        async with TestServer(app) as server:
            host = VllmHost(EngineId("engine-1"), str(server.make_url("")), s.place)
            with pytest.raises(EngineError, match="older than this rollart"):
                await s.stored.local(host, weights)
            await host.close()


async def failing(said: str, request: web.Request) -> web.Response:
    return web.json_response({"error": {"message": said}}, status=500)


async def test_a_name_that_leads_out_of_the_version_is_refused(tmp_path: Path) -> None:
    worker = plugin()
    manifest = json.dumps({"schema": 1, "version": 1, "files": [["../../out", 0, 1, []]]})
    pull = worker.Pull(
        {
            "root": str(tmp_path / "host"),
            "manifest": manifest,
            "keep": [],
            "in_flight": 0,
            "sources": {},
            "over": True,
            "whole": True,
        }
    )
    pull.join(60)
    assert "no name of a file" in pull.progress()["error"]
    assert not (tmp_path / "out").exists()
    shutil.rmtree(tmp_path / "host")


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([b"nonsense\r\n\r\n", WHOLE], ""),
        ([WHOLE[:-9], WHOLE], ""),
        ([CHUNKS[:-9], WHOLE], ""),
        ([b"nonsense\r\n\r\n"], "BadStatusLine"),
        ([b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"], "the store answered 403"),
    ],
)
async def test_a_store_that_breaks_off_is_asked_again_and_a_pull_always_ends(
    tmp_path: Path, answers: list[bytes], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(left.pop(0) if len(left) > 1 else left[0])
        await writer.drain()
        writer.close()

    worker = plugin()
    monkeypatch.setattr(worker, "BACKOFF_S", 0.001)
    digest = hashlib.sha256(BYTES).hexdigest()
    manifest = json.dumps({"schema": 1, "version": 1, "files": [["model", len(BYTES), len(BYTES), [digest]]]})
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = "http://127.0.0.1:{1}/bucket?Signature=secret".format(*server.sockets[0].getsockname())
        pull = worker.Pull(
            {
                "root": str(tmp_path / "host"),
                "manifest": manifest,
                "keep": [],
                "in_flight": 0,
                "sources": {digest: url},
                "over": True,
                "whole": True,
            }
        )
        await asyncio.to_thread(pull.join, 60)
    seen = pull.progress()
    assert pull.ended
    assert "secret" not in seen["error"]
    if said:
        assert said in seen["error"]
    else:
        assert (Path(seen["path"]) / "model").read_bytes() == BYTES


async def test_what_a_worker_refuses_is_an_answer() -> None:
    class Worker:
        def __init__(self) -> None:
            self.asked: list[object] = []

        def update_weights(self, update_info: object) -> None:
            self.asked.append(update_info)
            raise RuntimeError("no room")

        def start_weight_update(self) -> None:
            self.asked.append("start")

    made = plugin()
    worker = Worker()
    assert made.weights_of(worker, "start_weight_update", "{}") == {"error": ""}
    assert made.weights_of(worker, "update_weights", '{"update_info": {"path": "p"}}') == {"error": "no room"}
    assert worker.asked == ["start", {"path": "p"}]
    assert "no attribute" in made.weights_of(worker, "finish_weight_update", "{}")["error"]
    assert "not understood" in made.weights_of(worker, "look", "{}")["error"]


async def test_what_a_store_has_is_linked_to(tmp_path: Path) -> None:
    store = FileObjectStore(tmp_path)
    await store.put("buckets/one", b"1")
    assert Path(await store.link("buckets/one")).read_bytes() == b"1"
