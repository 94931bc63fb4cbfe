"""Membership of broadcasts, and the fallback of engines that do not take part: with scripted parts, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart.adapters.engines.http import HttpEngine
from rollart.errors import EngineError, SpecError, TrainerError
from rollart.launch.broadcasts import JOIN_TIMEOUT_S, WeightBroadcaster, collective_backend
from rollart.launch.preflight import dry_run_lines
from rollart.leases import Leases
from rollart.model import BroadcastResult, EngineId, WeightsRef
from rollart.ports import RunEvent
from rollart.settings.resolve import resolve_files
from rollart.sim.loop import run
from tests.e2e.harness import CLUSTER, tiny

SEND_S = 30.0


class Events:
    def __init__(self) -> None:
        self.seen: list[RunEvent] = []

    def event(self, event: RunEvent) -> None:
        self.seen.append(event)

    def of(self, kind: str) -> list[str]:
        return [e.subject for e in self.seen if e.kind == kind]

    def why(self, kind: str) -> list[Any]:
        return [e.fields["why"] for e in self.seen if e.kind == kind]


class Engine:
    def __init__(self, name: str, workers: int = 1) -> None:
        self.id, self._workers = name, workers
        self.mood = "well"
        self.orders: list[Mapping[str, Any]] = []
        self.has: list[int] = []

    async def members(self) -> int:
        return self._workers

    async def take_part(self, order: Mapping[str, Any]) -> None:
        if self.mood == "hangs":
            await asyncio.Event().wait()
        if self.mood == "gone":
            raise EngineError(f"{self.id} is gone", retryable=True)
        self.orders.append(order)

    def sent_anew(self, version: int) -> None:
        """The client loads its weights at once."""

    def received(self, version: int, stamp: str) -> None:
        assert stamp == self.orders[-1]["stamp"]
        self.has.append(version)


class Trainer:
    """Every member has the version, except those in `fails`."""

    def __init__(self) -> None:
        self.fails: dict[int, str] = {}
        self.error: TrainerError | None = None
        self.hangs = False
        self.orders: list[Mapping[str, Any]] = []

    async def meet(self) -> tuple[str, int]:
        return "there:1", 2

    async def send(self, order: Mapping[str, Any], *, bucket_bytes: int) -> BroadcastResult:
        self.orders.append(order)
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        has = {member: (100, 0.5) for member in range(1, order["size"]) if member not in self.fails}
        return BroadcastResult(200, 0.5, has, self.fails)


class Bench:
    def __init__(self, *engines: Engine) -> None:
        self.events, self.trainer, self.engines = Events(), Trainer(), engines
        self.broadcasts = WeightBroadcaster(
            Leases(self.events),
            self.events,
            backend="gloo",
            bucket_bytes=10,
            send_s=SEND_S,  # type: ignore[arg-type]
        )
        for engine in engines:
            self.broadcasts.join(engine)  # type: ignore[arg-type]

    async def send(self, version: int) -> Mapping[str, Any]:
        await self.broadcasts.send(self.trainer, version)  # type: ignore[arg-type]
        return self.trainer.orders[-1]

    @property
    def versions(self) -> list[list[int]]:
        return [engine.has for engine in self.engines]


def bench(test: Callable[[Bench], Awaitable[None]], *engines: Engine) -> None:
    async def main() -> None:
        await test(Bench(*(engines or (Engine("one"), Engine("two", workers=2)))))

    run(main())


def test_the_groups_stay_as_long_as_the_same_engines_get_everything() -> None:
    async def test(b: Bench) -> None:
        orders = [await b.send(version) for version in (1, 2)]
        assert len({order["group"] for order in orders}) == 1
        assert len({order["stamp"] for order in orders}) == 2
        assert {(order["size"], order["lanes"], order["address"], order["first"]) for order in orders} == {
            (4, 2, "there:1", 0)
        }
        assert [engine.orders[-1]["first"] for engine in b.engines] == [1, 2]
        assert b.versions == [[1, 2], [1, 2]]
        received = [(e.subject, e.fields["bytes"]) for e in b.events.seen if e.kind == "weights_received"]
        assert received == [("one", 100), ("two", 200)] * 2

    bench(test)


@pytest.mark.parametrize("change", ["engine", "trainer"])
def test_others_meet_in_groups_of_their_own(change: str) -> None:
    async def test(b: Bench) -> None:
        before = await b.send(1)
        if change == "engine":  # restarted: another client
            again = Engine("one")
            b.broadcasts.leave(b.engines[0].id)  # type: ignore[arg-type]
            b.broadcasts.join(again)  # type: ignore[arg-type]
        else:
            b.trainer = Trainer()
        after = await b.send(2)
        assert after["group"] != before["group"]
        assert b.engines[1].has == [1, 2]

    bench(test)


@pytest.mark.parametrize(
    ("mood", "why"), [("gone", "one is gone"), ("hangs", f"it has not answered for {JOIN_TIMEOUT_S:g} s")]
)
def test_an_engine_that_does_not_say_it_takes_part_is_left_out(mood: str, why: str) -> None:
    async def test(b: Bench) -> None:
        b.engines[0].mood = mood
        order = await b.send(1)
        assert order["size"] == 3
        assert b.engines[1].orders[-1]["group"] == order["group"]
        assert b.engines[1].orders[-1]["first"] == 1
        assert b.versions == [[], [1]]
        assert b.events.why("weights_not_received") == [why]
        b.engines[0].mood = "well"
        assert (await b.send(2))["size"] == 4
        assert b.versions == [[2], [1, 2]]

    bench(test)


def test_an_engine_has_a_version_when_all_of_its_workers_have() -> None:
    async def test(b: Bench) -> None:
        b.trainer.fails = {3: "no memory"}
        before = await b.send(1)
        assert b.versions == [[1], []]
        assert b.events.why("weights_not_received") == ["no memory"]
        b.trainer.fails = {}
        assert (await b.send(2))["group"] != before["group"], "whoever missed something left the group"

    bench(test)


def test_a_trainer_that_fails_or_hangs_is_an_event_and_no_more() -> None:
    async def test(b: Bench) -> None:
        b.trainer.error = TrainerError("it broke")
        await b.send(1)
        b.trainer.error, b.trainer.hangs = None, True
        began = asyncio.get_running_loop().time()
        await b.send(2)
        assert asyncio.get_running_loop().time() - began == pytest.approx(SEND_S)
        b.trainer.hangs = False
        await b.send(3)
        assert b.versions == [[3], [3]]
        assert b.events.of("weights_not_sent") == ["v1", "v2"]
        assert len({order["group"] for order in b.trainer.orders}) == 3

    bench(test)


class Client(HttpEngine):
    """The real client, of a server that accepts everything."""

    def __init__(self, name: str) -> None:
        super().__init__(EngineId(name), "http://nowhere")
        self.loaded: list[Any] = []
        self.gone = False

    async def control(self, path: str, body: Mapping[str, Any], *, optional: bool = False) -> dict[str, Any]:
        if self.gone:
            raise EngineError("it is gone", retryable=True)
        self.loaded += [body["update_info"]] if "update_info" in body else []
        return {}


@pytest.mark.parametrize("missed", ["on its way", "at its start"])
def test_a_version_that_is_sent_anew_is_never_the_one_of_before(missed: str) -> None:
    """The trainer died before the write: the version trained instead has the same number and other weights."""

    async def test(b: Bench) -> None:
        client = Client("one")
        b.broadcasts.join(client)
        first = await b.send(1)
        await client.update_weights(WeightsRef(1, "there"))
        assert client.loaded == [{"path": "there", "stamp": first["stamp"]}]
        b.trainer.fails, client.gone = {2: "it was damaged"}, missed == "at its start"
        await b.broadcasts.send(b.trainer, 1)  # type: ignore[arg-type]
        client.gone = False
        await client.update_weights(WeightsRef(1, "again"))
        assert client.loaded[1:] == [{"path": "again"}]

    bench(test, Engine("two"))


def test_a_broadcast_that_was_cancelled_leaves_its_group() -> None:
    async def test(b: Bench) -> None:
        b.trainer.hangs = True
        sending = asyncio.ensure_future(b.send(1))
        while not b.trainer.orders:
            await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        b.trainer.hangs = False
        before = b.trainer.orders[-1]
        assert (await b.send(2))["group"] != before["group"]

    bench(test)


def test_without_engines_nothing_is_sent() -> None:
    async def test(b: Bench) -> None:
        for engine in b.engines:
            b.broadcasts.leave(engine.id)  # type: ignore[arg-type]
        assert not b.broadcasts.has_engines
        await b.broadcasts.send(b.trainer, 1)  # type: ignore[arg-type]
        assert b.trainer.orders == []
        assert b.events.seen == []

    bench(test)


MIXED = [{"name": "gpus", "device": "H100", "count": 2, "price": 2.0}, {"name": "here", "device": "cpu", "count": 2}]


@pytest.mark.parametrize(
    ("trainer", "engines", "asked", "backend"),
    [
        ("H100", "H100", "auto", "nccl"),
        ("H100", "cpu", "auto", "gloo"),
        ("cpu", "cpu", "auto", "gloo"),
        ("H100", "H100", "gloo", "gloo"),
        ("H100", "cpu", "nccl", None),
        ("cpu", "cpu", "nccl", None),
    ],
)
def test_nccl_is_for_gpus_on_both_sides(
    tmp_path: Path, trainer: str, engines: str, asked: str, backend: str | None
) -> None:
    cluster = CLUSTER | {"pools": MIXED, "trainer": {"device": trainer}, "engines": {"count": 1, "device": engines}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny(weights={"collective": {"backend": asked}})))
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    made = resolve_files(tmp_path / "run.yaml", tmp_path / "cluster.yaml")
    if backend is None:
        with pytest.raises(
            SpecError, match=r"backend is nccl, and \S+ runs on cores of pool 'here' \(rule: GPUs on both"
        ):
            collective_backend(made)
    else:
        assert collective_backend(made) == backend
        assert f"weights: broadcast over {backend}" in list(dry_run_lines(made))


@pytest.mark.parametrize(
    ("run", "cluster", "why"),
    [
        ({"store": {"kind": "files", "url": "shared"}}, {}, "weights.collective and weights.store are given"),
        ({}, {"trainer": {"external": "127.0.0.1:0"}}, "trainer.external is somebody else's trainer"),
    ],
)
def test_what_does_not_go_with_broadcasts_is_refused(
    tmp_path: Path, run: dict[str, Any], cluster: dict[str, Any], why: str
) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny(weights={"collective": {}, **run})))
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER | cluster))
    with pytest.raises(SpecError, match=why):
        resolve_files(tmp_path / "run.yaml", tmp_path / "cluster.yaml")
