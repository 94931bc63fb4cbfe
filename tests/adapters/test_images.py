"""A host's images: brought once for all who wait, held while they are used, the ones used longest ago removed."""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollart.adapters.env_hosts.host import DomainFactory, EnvironmentHostServer
from rollart.adapters.env_hosts.wire import HostOperation, HostRequest
from rollart.adapters.envs.images import ImageCache, PullFailed, TarImages


class Shelf:
    """A hook whose pulls wait until they are let go."""

    def __init__(self) -> None:
        self.pulled: list[str] = []
        self.removed: list[str] = []
        self.go = asyncio.Event()
        self.under_way = asyncio.Event()

    async def images(self) -> Sequence[str]:
        return ("old",)

    async def ensure(self, image: str) -> int:
        self.pulled.append(image)
        self.under_way.set()
        await self.go.wait()
        if image == "none":
            raise OSError("no such image")
        return 10

    async def remove(self, image: str) -> None:
        self.removed.append(image)


def test_pulls_of_the_same_image_are_one_and_survive_who_asked_first() -> None:
    async def play() -> None:
        shelf = Shelf()
        async with asyncio.TaskGroup() as tasks:
            cache = ImageCache(shelf, tasks)
            first = tasks.create_task(cache.ensure(["base", "a"]))
            await shelf.under_way.wait()
            second = tasks.create_task(cache.ensure(["base", "b"]))
            while len(cache.pulling) < 3:
                await asyncio.sleep(0)
            first.cancel()
            shelf.go.set()
            assert await second == 2
            assert await cache.ensure(["base"]) == 0
        assert sorted(shelf.pulled) == ["a", "b", "base"]
        assert cache.pinned == {"base": 2, "b": 1}

    asyncio.run(play())


def test_present_images_are_not_pulled_and_failed_pulls_are_named_and_retried() -> None:
    async def play() -> None:
        shelf = Shelf()
        shelf.go.set()
        async with asyncio.TaskGroup() as tasks:
            cache = ImageCache(shelf, tasks)
            await cache.refresh()
            assert await cache.ensure(["old"]) == 0
            for _ in range(2):
                with pytest.raises(PullFailed, match="image 'none' could not be brought: OSError: no such image"):
                    await cache.ensure(["base", "none"])
        assert shelf.pulled == ["base", "none", "none"]
        assert cache.pinned == {"old": 1}

    asyncio.run(play())


def test_the_bound_evicts_the_least_recently_used_and_no_pinned_image() -> None:
    async def play() -> None:
        shelf = Shelf()
        shelf.go.set()
        async with asyncio.TaskGroup() as tasks:
            cache = ImageCache(shelf, tasks, max_bytes=20)
            for image in ("a", "b", "c"):
                await cache.ensure([image])
            assert shelf.removed == []
            await cache.release(["b"])
            assert shelf.removed == ["b"]
            await cache.ensure(["d"])
            await cache.release(["c"])
            await cache.release(["a"])
            assert shelf.removed == ["b", "c"]
            assert list(cache.present) == ["a", "d"]

    asyncio.run(play())


def test_a_failed_removal_is_no_fault_and_is_retried() -> None:
    async def play() -> None:
        shelf = Shelf()
        shelf.go.set()
        remove, used = shelf.remove, {"a"}

        async def kept(image: str) -> None:
            if image in used:
                raise OSError("a container of somebody else uses it")
            await remove(image)

        shelf.remove = kept  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as tasks:
            cache = ImageCache(shelf, tasks, max_bytes=0)
            await cache.ensure(["a"])
            await cache.release(["a"])
            assert cache.present == {"a": 10}
            used.clear()
            await cache.ensure(["b"])
            await cache.release(["b"])
        assert sorted(shelf.removed) == ["a", "b"]
        assert not cache.present

    asyncio.run(play())


def test_an_image_that_is_being_removed_is_brought_once_it_is_gone() -> None:
    async def play() -> None:
        shelf = Shelf()
        shelf.go.set()
        begun, gone = asyncio.Event(), asyncio.Event()

        async def slow(image: str) -> None:
            begun.set()
            await gone.wait()
            shelf.removed.append(image)

        shelf.remove = slow  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as tasks:
            cache = ImageCache(shelf, tasks, max_bytes=0)
            await cache.ensure(["old"])
            removing = tasks.create_task(cache.release(["old"]))
            await begun.wait()
            await cache.refresh()  # it is listed still
            assert "old" not in cache.present
            again = tasks.create_task(cache.ensure(["old"]))
            while not cache.pulling:
                await asyncio.sleep(0)
            for _ in range(5):
                await asyncio.sleep(0)
            assert shelf.pulled == ["old"]
            gone.set()
            await removing
            assert await again == 1
        assert shelf.pulled == ["old", "old"]
        assert cache.present == {"old": 10}

    asyncio.run(play())


def test_a_host_holds_no_images_for_an_episode_that_gave_up_waiting_for_them() -> None:
    async def play() -> None:
        shelf = Shelf()
        front = EnvironmentHostServer(
            {"tale": DomainFactory(None, images=lambda seed: ["a"])}, asyncio.get_running_loop(), hook=shelf
        )
        async with asyncio.TaskGroup() as tasks:
            front.images = ImageCache(shelf, tasks)
            pull = tasks.create_task(front.handle(HostRequest(1, HostOperation.PULL, "tale-0", ["tale", 0])))
            await shelf.under_way.wait()
            await front.handle(HostRequest(2, HostOperation.CANCEL, "tale-0", 1))
            await front.handle(HostRequest(3, HostOperation.CLOSE, "tale-0", None))
            shelf.go.set()
            await asyncio.gather(pull, return_exceptions=True)
            assert (front.pinned, front.calls) == ({}, {})
            assert front.images.pinned == {}

    asyncio.run(play())


def test_tarballs_are_unpacked_whole_or_not_at_all(tmp_path: Path) -> None:
    store, cache = tmp_path / "store", tmp_path / "cache"
    store.mkdir()
    (tmp_path / "hello").write_text("hello")
    with tarfile.open(store / "greeting.tar", "w") as tar:
        tar.add(tmp_path / "hello", "hello")
    (store / "broken.tar").write_text("no tarball")

    async def play() -> None:
        images = TarImages(str(store), str(cache))
        assert list(await images.images()) == []
        assert await images.ensure("greeting") == 5
        assert (cache / "greeting" / "hello").read_text() == "hello"
        for name in ("broken", "absent"):
            with pytest.raises((tarfile.TarError, OSError)):
                await images.ensure(name)
        assert list(await images.images()) == ["greeting"]
        await images.remove("greeting")
        assert list(await images.images()) == []

    asyncio.run(play())
