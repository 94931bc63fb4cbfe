"""Weights across clusters, the same on every store: whole or not at all, checked, one copy over the slow link."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollart.adapters.weights.buckets import MANIFEST, BucketPusher, BucketWeightStore
from rollart.adapters.weights.objects import FileObjectStore, ObjectStore
from rollart.errors import StorageFailed
from rollart.ports import WeightStore
from rollart.testing.objects import MemoryObjectStore

KINDS = ["memory", "files", pytest.param("s3", marks=pytest.mark.slow)]  # moto's server takes seconds to import

BUCKET = 1000


@pytest.fixture(scope="module")
def s3_url() -> Iterable[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@pytest_asyncio.fixture(params=KINDS)
async def objects(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ObjectStore]:
    if request.param == "s3":
        import boto3

        from rollart.adapters.weights.objects import S3ObjectStore

        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        url = request.getfixturevalue("s3_url")
        bucket = f"weights-{abs(hash(tmp_path)) % 10**9}"
        boto3.client("s3", region_name="us-east-1", endpoint_url=url).create_bucket(Bucket=bucket)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        made: ObjectStore = S3ObjectStore(bucket, prefix="/run-1/")
    else:
        made = MemoryObjectStore() if request.param == "memory" else FileObjectStore(tmp_path / "store")
    yield made
    await made.aclose()


class Counted:
    """A store that counts the bytes written and read."""

    def __init__(self, objects: ObjectStore) -> None:
        self.objects = objects
        self.put_bytes = self.got_bytes = 0

    async def put(self, key: str, data: bytes) -> None:
        self.put_bytes += len(data) * key.startswith(("buckets/", "deltas/"))
        await self.objects.put(key, data)

    async def get(self, key: str) -> bytes:
        data = await self.objects.get(key)
        self.got_bytes += len(data) * key.startswith(("buckets/", "deltas/"))
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self.objects, name)


def version(root: Path, number: int, *, changed: Iterable[int] = (), size: int = 5300) -> Path:
    """A published directory; of its ten buckets only `changed` differ from version 0's."""
    rng = random.Random(0)
    directory = root / f"trainer-v{number}"
    (directory / "trainer").mkdir(parents=True)
    for part in range(2):
        data = bytearray(rng.randbytes(size))
        for bucket in changed:
            if bucket // 6 == part:
                data[bucket % 6 * BUCKET] ^= number + 1
        (directory / f"model-{part}.safetensors").write_bytes(bytes(data))
    (directory / "config.json").write_text("{}")
    (directory / "trainer" / "optimizer.safetensors").write_bytes(rng.randbytes(999))
    (directory / "COMPLETE").write_text(json.dumps({"version": number}))
    return directory


async def push(objects: ObjectStore, path: Path, number: int) -> Any:
    pusher = BucketPusher(objects, bucket_bytes=BUCKET)
    return await pusher.push(str(path), await pusher.prepare(number, str(path)))


def served(path: str | Path) -> dict[str, bytes]:
    files = [f for f in Path(path).rglob("*") if f.is_file()]
    return {str(f.relative_to(path)): f.read_bytes() for f in files if f.name not in ("COMPLETE", MANIFEST)}


def of_engines(path: Path) -> dict[str, bytes]:
    return {name: data for name, data in served(path).items() if not name.startswith("trainer/")}


@pytest.mark.asyncio
async def test_blobs(objects: ObjectStore) -> None:
    await objects.put("a/1", b"one")
    await objects.put("a/2", b"")
    await objects.put("b/1", b"three")
    await objects.put("a/1", b"one")
    assert await objects.get("a/1") == b"one"
    assert await objects.get("a/2") == b""
    assert await objects.keys("a/") == {"a/1", "a/2"}
    await objects.delete(["a/1", "a/9"])
    assert await objects.keys("") == {"a/2", "b/1"}
    with pytest.raises(StorageFailed, match="has no a/1"):
        await objects.get("a/1")


@pytest.mark.slow  # moto's server
@pytest.mark.asyncio
async def test_first_calls_that_come_together_open_one_client(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3
    from aiobotocore.session import AioSession

    from rollart.adapters.weights.objects import S3ObjectStore

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    boto3.client("s3", region_name="us-east-1", endpoint_url=s3_url).create_bucket(Bucket="together")
    opened: list[str] = []
    create = AioSession.create_client

    def counted(self: Any, service: str, *args: Any, **more: Any) -> Any:
        opened.append(service)
        return create(self, service, *args, **more)

    monkeypatch.setattr(AioSession, "create_client", counted)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_url)
    store = S3ObjectStore("together")
    await asyncio.gather(*(store.put(f"{n}", b"x") for n in range(8)))
    assert await store.keys("") == set("01234567")
    await store.aclose()
    assert opened == ["s3"]


@pytest.mark.asyncio
async def test_a_pull_yields_the_published_version_and_engines_of_a_host_share_a_copy(
    objects: ObjectStore, tmp_path: Path
) -> None:
    source = version(tmp_path, 3)
    counted = Counted(objects)
    pushed = await push(counted, source, 3)
    assert pushed.sent == pushed.bytes == counted.put_bytes == 2 * 5300 + 2
    hosts = [BucketWeightStore(counted, tmp_path / f"host-{i}") for i in range(3)]
    store: WeightStore = hosts[0]
    assert store.versions() == []
    await asyncio.gather(*(host.pull(3) for host in hosts for _ in range(4)))
    assert counted.put_bytes == pushed.bytes, "one copy over the slow link"
    assert counted.got_bytes == 3 * pushed.bytes, "one copy for each host"
    for host in hosts:
        assert host.versions() == [3]
        expected = served(source)
        del expected["trainer/optimizer.safetensors"]
        assert served(host.path(3)) == expected
    assert [p.name for p in (tmp_path / "host-0").iterdir()] == ["v000003"]


@pytest.mark.asyncio
async def test_only_changed_buckets_cross_the_link_and_reach_the_hosts(objects: ObjectStore, tmp_path: Path) -> None:
    host = BucketWeightStore(objects, tmp_path / "host")
    await push(objects, version(tmp_path, 0), 0)
    await host.pull(0)
    source = version(tmp_path, 1, changed=[2, 7])
    assert (await push(objects, source, 1)).sent == 2 * BUCKET
    pulled = await host.pull(1)
    assert (pulled.received, pulled.bytes) == (2 * BUCKET, 2 * 5300 + 2)
    assert served(host.path(1)).items() <= served(source).items()
    links = {f.name for f in Path(host.path(1)).iterdir() if f.stat().st_nlink == 2}
    assert links == {"config.json"}, "of a file that did not change, the host has one copy"
    damaged = Path(host.path(1)) / "model-0.safetensors"
    damaged.write_bytes(b"x" + damaged.read_bytes()[1:])
    assert (await push(objects, version(tmp_path, 2), 2)).sent == 0
    host.prune([1])
    assert (await host.pull(2)).received == 3 * BUCKET, "damaged buckets are pulled again"
    assert served(host.path(2)).items() <= served(tmp_path / "trainer-v0").items()


@pytest.mark.asyncio
async def test_a_version_that_goes_while_another_takes_from_it_is_not_missed(tmp_path: Path) -> None:
    objects = MemoryObjectStore()
    paths = [version(tmp_path, 0), version(tmp_path, 1, changed=[2, 7])]
    for number, path in enumerate(paths):
        await push(objects, path, number)

    class Pruned(BucketWeightStore):
        """Its versions disappear once their manifests have been read."""

        def _prepare(self, *args: Any) -> Any:
            have = super()._prepare(*args)
            self.prune([])
            return have

    host = Pruned(objects, tmp_path / "host")
    await host.pull(0)
    pulled = await host.pull(1)
    assert pulled.received == pulled.bytes - len("{}"), "the link to config.json remains"
    assert served(host.path(1)) == {n: d for n, d in served(paths[1]).items() if not n.startswith("trainer/")}


@pytest.mark.asyncio
async def test_pulling_begins_with_the_first_bucket(objects: ObjectStore, tmp_path: Path) -> None:
    """The last buckets wait until a host has the first: a pull that waited for the whole push would wait for ever."""
    first_pulled = asyncio.Event()

    class Link(Counted):
        async def put(self, key: str, data: bytes) -> None:
            if key.startswith("buckets/") and self.put_bytes >= 3 * BUCKET:
                await first_pulled.wait()
            await super().put(key, data)

        async def get(self, key: str) -> bytes:
            data = await super().get(key)
            first_pulled.set()
            return data

    link, source = Link(objects), version(tmp_path, 4)
    pusher = BucketPusher(link, bucket_bytes=BUCKET, in_flight=1)
    arrivals = await pusher.prepare(4, str(source))
    host = BucketWeightStore(link, tmp_path / "host")
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        pulling = group.create_task(host.pull(4, arrivals))
        group.create_task(pusher.push(str(source), arrivals))
    assert pulling.result().received == 2 * 5300 + 2
    assert served(host.path(4)).items() <= served(source).items()


@pytest.mark.asyncio
async def test_a_push_that_ends_early_leaves_no_version_to_anybody(objects: ObjectStore, tmp_path: Path) -> None:
    class Cut(Counted):
        async def put(self, key: str, data: bytes) -> None:
            if self.put_bytes >= 4 * BUCKET:
                raise StorageFailed("the link is down")
            await super().put(key, data)

    cut, source = Cut(objects), version(tmp_path, 5)
    pusher = BucketPusher(cut, bucket_bytes=BUCKET, in_flight=2)
    host = BucketWeightStore(cut, tmp_path / "host")
    arrivals = await pusher.prepare(5, str(source))
    results = await asyncio.gather(pusher.push(str(source), arrivals), host.pull(5, arrivals), return_exceptions=True)
    assert [str(r) for r in results] == ["the link is down", "version 5 was not pushed whole"]
    assert host.versions() == []
    assert list((tmp_path / "host").iterdir()) == []
    with pytest.raises(StorageFailed, match=r"has no versions/v000005\.json"):
        await host.pull(5)
    assert (await push(objects, source, 5)).sent < 2 * 5300, "buckets that had arrived are not sent again"
    await host.pull(5)


@pytest.mark.asyncio
async def test_no_engine_reads_a_damaged_bucket(objects: ObjectStore, tmp_path: Path) -> None:
    await push(objects, version(tmp_path, 6), 6)
    key = sorted(await objects.keys("buckets/"))[0]
    data = await objects.get(key)
    await objects.put(key, b"\0" + data[1:] + b"\0")
    host = BucketWeightStore(objects, tmp_path / "host")
    with pytest.raises(StorageFailed, match=r"bucket [0-9a-f]{12} of version 6 came damaged"):
        await host.pull(6)
    assert list((tmp_path / "host").iterdir()) == []
    await objects.put("versions/v000006.json", b"{")
    with pytest.raises(StorageFailed, match="list of buckets is damaged"):
        await host.pull(6)


@pytest.mark.asyncio
async def test_old_versions_are_collected_with_the_buckets_that_no_other_has(
    objects: ObjectStore, tmp_path: Path
) -> None:
    for number, changed in ((0, ()), (1, (2, 7)), (2, (2,))):
        await push(objects, version(tmp_path, number, changed=changed), number)
    pusher = BucketPusher(objects, bucket_bytes=BUCKET)
    before = await objects.keys("buckets/")
    assert await pusher.collect([1, 2, 9]) == 1, "the bucket 2 of version 0; its 7 is version 2's as well"
    assert await objects.keys("versions/") == {"versions/v000001.json", "versions/v000002.json"}
    assert len(await objects.keys("buckets/")) == len(before) - 1
    host = BucketWeightStore(objects, tmp_path / "host")
    for number in (1, 2):
        await host.pull(number)
    with pytest.raises(StorageFailed):
        await host.pull(0)
    assert await pusher.collect([]) == len(before) - 1
    assert await objects.keys("") == set()


@pytest.mark.asyncio
async def test_versions_travel_as_deltas_in_which_little_changed(objects: ObjectStore, tmp_path: Path) -> None:
    """A host that follows, one that joins late, one without the base, and one that pulls while the push goes on."""
    counted = Counted(objects)
    pusher = BucketPusher(counted, bucket_bytes=BUCKET, deltas=2)
    follower, ahead = (BucketWeightStore(counted, tmp_path / name) for name in ("follower", "ahead"))
    sent, pulled = [], []
    for number in range(5):
        source = version(tmp_path, number, changed=range(12))
        arrivals = await pusher.prepare(number, str(source))
        _, pushed = await asyncio.gather(ahead.pull(number, arrivals), pusher.push(str(source), arrivals))
        sent.append(pushed.sent)
        pulled.append((await follower.pull(number)).received)
        late = BucketWeightStore(counted, tmp_path / f"late-{number}")
        await late.pull(number)
        for host in (follower, ahead, late):
            assert served(host.path(number)) == of_engines(source)
            assert host.stamp(number) == arrivals.manifest.stamp
    whole, delta = sent[0], sent[1]
    assert whole == pulled[0] == pushed.bytes
    assert delta < whole / 10
    assert sent == pytest.approx([whole, delta, delta, whole, delta], rel=0.05), "after two deltas it is sent whole"
    assert pulled == sent, "the base is on the follower's disk"
    follower.prune([])
    received = (await follower.pull(2)).received
    assert received == whole + sent[1] + sent[2], "of version 2 no base is left"
    assert await pusher.collect([2]) > 0
    late = BucketWeightStore(objects, tmp_path / "last")
    await late.pull(2)
    assert served(late.path(2)) == of_engines(tmp_path / "trainer-v2"), "its anchor and both deltas are kept"
    assert await pusher.collect([]) > 0
    assert await objects.keys("") == set()
    after = version(tmp_path, 5, changed=range(12))
    await pusher.push(str(after), await pusher.prepare(5, str(after)))
    await late.pull(5)
    assert served(late.path(5)) == of_engines(after), "nothing is based on what the store no longer has"


@pytest.mark.asyncio
async def test_a_delta_that_came_damaged_is_no_version(objects: ObjectStore, tmp_path: Path) -> None:
    pusher, host = BucketPusher(objects, bucket_bytes=BUCKET, deltas=2), BucketWeightStore(objects, tmp_path / "host")
    for number in (0, 1):
        source = version(tmp_path, number, changed=range(12))
        await pusher.push(str(source), await pusher.prepare(number, str(source)))
        if number == 0:
            await host.pull(0)
    first, *_ = sorted(await objects.keys("deltas/"))
    await objects.put(first, (await objects.get(first))[:-1])
    with pytest.raises(StorageFailed, match="of version 1 came damaged"):
        await host.pull(1)
    assert host.versions() == [0]


@pytest.mark.asyncio
async def test_only_whole_versions_are_pushed(objects: ObjectStore, tmp_path: Path) -> None:
    source = version(tmp_path, 7)
    pusher = BucketPusher(objects, bucket_bytes=BUCKET)
    arrivals = await pusher.prepare(7, str(source))
    (source / "model-0.safetensors").write_bytes(b"other" * 2000)
    with pytest.raises(StorageFailed, match="changed while it was pushed"):
        await pusher.push(str(source), arrivals)
    (source / "COMPLETE").unlink()
    with pytest.raises(StorageFailed, match="has no COMPLETE marker"):
        await pusher.prepare(7, str(source))
    assert await objects.keys("versions/") == set()
