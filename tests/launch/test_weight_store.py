"""Weight distribution through a store, with actors as in the local runtime, on virtual time."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rollart.adapters.clusters.local import LocalRuntime
from rollart.adapters.weights.buckets import BucketPusher, PullProgress
from rollart.adapters.weights.hosts import WeightStoreLocation
from rollart.adapters.weights.objects import FileObjectStore
from rollart.architecture import stamp_of
from rollart.errors import EngineError, StorageFailed
from rollart.fleet import ActorSpec, Node
from rollart.launch.weight_store import PULL_STALL_S, SharedWeightStore
from rollart.leases import Leases
from rollart.model import WeightsRef
from rollart.ports import Handle, RunEvent
from rollart.sim.loop import run

BUCKET = 1000


class Events:
    def __init__(self) -> None:
        self.seen: list[RunEvent] = []

    def event(self, event: RunEvent) -> None:
        self.seen.append(event)

    def of(self, kind: str, field: str) -> list[Any]:
        return [(e.subject, e.fields[field]) for e in self.seen if e.kind == kind]


class Bench:
    """Programs of two engines on one host, and the trainer's publishes."""

    def __init__(self, root: Path, *, ahead: bool = True) -> None:
        self.root = root
        self.place = WeightStoreLocation("files", str(root / "store"), str(root / "host"))
        self.events = Events()
        self.stored = SharedWeightStore(
            root / "weights",
            self.place,
            Leases(self.events),
            self.events,  # type: ignore[arg-type]
            bucket_bytes=BUCKET,
            deltas=3,
            ahead=ahead,
            pull_s=60.0,
        )
        self.runtime = LocalRuntime([Node("here", {}, {})])

    async def program(self, name: str) -> Handle:
        factory = "rollart.adapters.clusters.program:Program"
        handle = await self.runtime.spawn(ActorSpec(name, factory, (name, "none", [], str(self.root / name))))
        self.stored.join(handle)
        return handle

    def publish(self, version: int) -> WeightsRef:
        path = Path(self.stored.path(version))
        (path / "trainer").mkdir(parents=True)
        (path / "model.safetensors").write_bytes(bytes([version]) * BUCKET + bytes(range(250)) * 10)
        (path / "trainer" / "optimizer").write_bytes(b"x" * 99)
        (path / "COMPLETE").write_text(
            json.dumps({"version": version, "files": {"model.safetensors": f"hash {version}"}})
        )
        return WeightsRef(version, str(path))

    def on_host(self) -> list[str]:
        return sorted(p.name for p in (self.root / "host").iterdir() if not p.name.startswith("."))

    def in_store(self) -> list[str]:
        return sorted(p.name for p in (self.root / "store" / "versions").iterdir())


def bench(root: Path, test: Callable[[Bench, Handle, Handle], Awaitable[None]], *, ahead: bool = True) -> None:
    async def main() -> None:
        made = Bench(root, ahead=ahead)
        await made.runtime.start()
        try:
            async with asyncio.timeout(3600):
                await test(made, await made.program("engine-0"), await made.program("engine-1"))
        finally:
            await made.runtime.close()
            await made.stored.aclose()

    run(main())


def test_a_version_is_pushed_once_and_the_engines_of_a_host_share_one_copy(tmp_path: Path) -> None:
    async def test(b: Bench, one: Handle, other: Handle) -> None:
        weights = b.publish(0)
        await b.stored.push(weights)
        assert b.on_host() == ["v000000"], "before any engine asked"
        for program in (one, other):
            path = await b.stored.local(program, weights)
            assert path == str(tmp_path / "host" / "v000000")
        pulled = Path(path)
        assert (pulled / "model.safetensors").read_bytes() == (Path(weights.path) / "model.safetensors").read_bytes()
        assert not (pulled / "trainer").exists(), "the optimizer is the trainer's"
        assert stamp_of(pulled) == stamp_of(weights.path) != "", "engines report it"
        assert b.events.of("weights_pushed", "sent_bytes") == [("v0", 2500)], "two of its four buckets are the same"
        assert [n for _, n in b.events.of("weights_pulled", "received_bytes")] == [2500]
        await b.stored.push(b.publish(1))
        assert b.events.of("weights_pushed", "sent_bytes")[1:] == [("v1", BUCKET)]

    bench(tmp_path, test)


def test_old_versions_go_from_the_store_and_from_hosts_once_nobody_needs_them(tmp_path: Path) -> None:
    async def test(b: Bench, one: Handle, other: Handle) -> None:
        for version in range(4):
            weights = b.publish(version)
            await b.stored.push(weights)
            b.stored.prune([v for v in (0, version - 1, version) if v >= 0])  # a reader still has version 0
        assert b.stored.versions() == [0, 2, 3]
        assert b.in_store() == ["v000000.json", "v000001.json", "v000002.json", "v000003.json"]
        await b.stored.push(b.publish(4))
        assert b.in_store() == [f"v00000{v}.json" for v in (0, 2, 3, 4)]
        assert b.on_host() == ["v000000", "v000002", "v000003", "v000004"]

    bench(tmp_path, test)


def test_a_number_that_was_given_twice_is_the_last_ones(tmp_path: Path) -> None:
    """A version was pulled ahead and never committed: the trainer died, and made another one of the same number."""

    async def test(b: Bench, one: Handle, other: Handle) -> None:
        await b.stored.push(b.publish(7))
        made = Path(b.stored.path(7)) / "model.safetensors"
        made.write_bytes(b"another")
        weights = WeightsRef(7, b.stored.path(7))
        await b.stored.push(weights)
        for program in (one, other):
            path = Path(await b.stored.local(program, weights))
            assert (path / "model.safetensors").read_bytes() == b"another"
        made.write_bytes(b"the third")
        b.stored.stamps[7] = "what nobody pushed"
        with pytest.raises(EngineError, match="not what was published under that number"):
            await b.stored.local(one, weights)

    bench(tmp_path, test)


def test_a_host_that_cannot_pull_is_an_engines_error_and_no_end_of_a_publish(tmp_path: Path) -> None:
    async def test(b: Bench, one: Handle, other: Handle) -> None:
        (tmp_path / "host").write_text("in the way")
        weights = b.publish(0)
        await b.stored.push(weights)
        assert {name for name, _ in b.events.of("weights_not_pulled", "why")} == {"engine-0", "engine-1"}
        with pytest.raises(EngineError, match="engine-0 has no v0: cannot write") as caught:
            await b.stored.local(one, weights)
        assert caught.value.retryable
        (tmp_path / "host").unlink()
        await b.stored.local(one, weights)
        await other.kill()
        later = b.publish(1)
        shutil.rmtree(tmp_path / "host")
        await b.stored.push(later)
        assert b.on_host() == ["v000001"]
        with pytest.raises(EngineError, match="engine-1 has no v1"):
            await b.stored.local(other, later)

    bench(tmp_path, test)


def test_without_ahead_nothing_is_pulled_before_an_engine_loads_and_nothing_by_those_who_left(tmp_path: Path) -> None:
    async def test(b: Bench, one: Handle, other: Handle) -> None:
        weights = b.publish(0)
        await b.stored.push(weights)
        assert not (tmp_path / "host").exists()
        await b.stored.local(one, weights)
        assert b.on_host() == ["v000000"]

    bench(tmp_path, test, ahead=False)

    async def gone(b: Bench, one: Handle, other: Handle) -> None:
        b.stored.leave("engine-0")
        b.stored.leave("engine-1")
        await b.stored.push(b.publish(0))
        assert not (tmp_path / "second" / "host").exists()

    bench(tmp_path / "second", gone)


class Gate(FileObjectStore):
    """Accepts buckets after the first only once it is opened, and none once it is broken."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.let, self.first, self.broken = asyncio.Event(), asyncio.Event(), False

    async def put(self, key: str, data: bytes) -> None:
        if self.first.is_set():
            await self.let.wait()
            if self.broken:
                raise StorageFailed("the link is down")
        await super().put(key, data)
        self.first.set()


def gated(b: Bench) -> Gate:
    gate = Gate(Path(b.place.url))
    b.stored.pusher = BucketPusher(gate, bucket_bytes=BUCKET, in_flight=1)
    return gate


async def first_pulled(program: Handle) -> None:
    while (seen := await program.call("pulling")) is None or not seen.buckets:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("broken", [False, True])
def test_hosts_pull_while_the_push_goes_on_and_see_it_whole_or_not_at_all(tmp_path: Path, broken: bool) -> None:
    async def test(b: Bench, one: Handle, other: Handle) -> None:
        b.stored.leave(other.name)
        gate, weights = gated(b), b.publish(3)
        async with asyncio.TaskGroup() as tasks:
            pushing = tasks.create_task(_outcome(b.stored.push(weights)))
            await gate.first.wait()
            await first_pulled(one)  # the second bucket is not in the store before
            assert b.on_host() == []
            gate.broken = broken
            gate.let.set()
        assert b.on_host() == ([] if broken else ["v000003"])
        if broken:
            assert "the link is down" in str(pushing.result())
            ((name, why),) = b.events.of("weights_not_pulled", "why")
            assert (name, "was not pushed whole" in str(why)) == ("engine-0", True)
            gate.broken = False
            await b.stored.push(weights)
        path = Path(await b.stored.local(one, weights))
        assert (path / "model.safetensors").read_bytes() == (Path(weights.path) / "model.safetensors").read_bytes()
        assert b.on_host() == ["v000003"]

    bench(tmp_path, test)


async def _outcome(call: Awaitable[None]) -> StorageFailed | None:
    try:
        await call
    except StorageFailed as error:
        return error
    return None


class Hung:
    """A host that begins a pull and makes no progress; if `silent`, it does not respond either."""

    node = "there"

    def __init__(self, name: str, *, silent: bool) -> None:
        self.name, self.silent = name, silent

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "arrived":
            return None
        if method == "pulling" and not self.silent:
            return PullProgress(0, 0.0, 1)
        return await asyncio.Event().wait()


@pytest.mark.parametrize(("silent", "why"), [(True, "has not answered for 10 s"), (False, "no bucket has come")])
def test_a_host_that_hangs_is_named_soon_and_holds_nobody_up_for_long(tmp_path: Path, silent: bool, why: str) -> None:
    async def test(b: Bench, one: Handle, other: Handle) -> None:
        b.stored.pull_s = 3000.0
        hung: Any = Hung("engine-9", silent=silent)
        b.stored.join(hung)
        b.stored.longest_s = 0.5  # of the buckets of versions before
        weights, began = b.publish(0), asyncio.get_running_loop().time()
        await b.stored.push(weights)
        assert b.on_host() == ["v000000"]
        ((name, said),) = b.events.of("weights_not_pulled", "why")
        assert (name, why in str(said)) == ("engine-9", True)
        with pytest.raises(EngineError, match=why):
            await b.stored.local(hung, weights)
        assert asyncio.get_running_loop().time() - began < 4 * PULL_STALL_S

    bench(tmp_path, test)
