"""The journal's rules, on all of its implementations, and its state after a crash or a full disk."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sqlite3
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.errors import LeaseExpired, RollartError, RunFailed, StorageFailed, UsageError
from rollart.leases import Expiry, Leases
from rollart.ledger.database import FILE, Database
from rollart.ledger.intervals import ResourceClock, ResourceState
from rollart.ledger.payloads import PayloadFiles, decode_sample, encode_sample
from rollart.ledger.reader import LedgerReader
from rollart.ledger.store import Ledger
from rollart.model import Group, GroupId, TrainSample, TrajectoryId
from rollart.ports import Charge, Interval, RunEvent
from rollart.settings.load import builtin, load_prices
from rollart.testing.laws import find_tiling_errors, sum_intervals
from rollart.testing.ledger import MemoryRecorder
from serverless.meter import Saving, WorkerSpan, WorkerState
from serverless.types import Cause, Invocation

MakeSample = Callable[..., TrainSample]
MakeGroup = Callable[..., Group]


def zero() -> float:
    return 0.0


@pytest.fixture(params=["thread", "inline", "memory"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "memory":
        yield MemoryRecorder()
        return
    with Ledger(tmp_path / "run", clock=zero, inline=request.param == "inline") as ledger:
        yield ledger


def charge(id_: str, *, outcome: str = "finished", t1: float = 2.0, **more: Any) -> Charge:
    fields: dict[str, Any] = {
        "domain": "lake",
        "outcome": outcome,
        "v0": 0,
        "engine_seconds": 0.5,
        "turns": 2,
        "prompt_tokens": 10,
        "action_tokens": 5,
        "success": True,
        "score": 1.0,
        "purpose": "train",
        "t0": 1.0,
        "t1": t1,
    }
    return Charge(TrajectoryId(id_), **(fields | more))


async def finish(journal: Any, sample: TrainSample) -> None:
    await journal.finish(sample, charge(sample.id))


class TestContract:
    def test_nothing_is_recovered_before_a_version(self, journal: Any) -> None:
        async def main() -> None:
            await journal.admit("g", "lake", 7)
            assert await journal.recover() is None

        asyncio.run(main())

    def test_what_is_left_after_a_commit(self, journal: Any, sample: MakeSample, group: MakeGroup) -> None:
        a, b, c, d = (sample(f"{g}.0", g) for g in "abcd")

        async def main() -> None:
            await journal.commit(version=0, step=0, consumed=[], metrics={})
            for seed, name in enumerate("abcd"):
                await journal.admit(name, "lake" if name < "c" else "pond", seed)
            for one in (a, b, c):
                await finish(journal, one)
            await journal.drop("b", "stale")
            await finish(journal, d)
            await journal.commit(version=1, step=1, consumed=[group("a", a)], metrics={"loss": 0.5})
            found = await journal.recover()
            assert (found.version, found.step, found.samples) == (1, 1, (c, d))
            assert found.pending == (("c", "pond", 2), ("d", "pond", 3))
            assert found.seeds_drawn == {"lake": 2, "pond": 2}

        asyncio.run(main())

    def test_no_sample_is_trained_twice(self, journal: Any, sample: MakeSample, group: MakeGroup) -> None:
        a, b = sample("a.0", "a"), sample("b.0", "b")

        async def main() -> None:
            for one in (a, b):
                await journal.admit(one.group, "lake", 0)
                await finish(journal, one)
            with pytest.raises(RunFailed, match="twice"):
                await journal.commit(version=1, step=1, consumed=[group("a", a), group("a", a)], metrics={})
            await journal.commit(version=1, step=1, consumed=[group("a", a)], metrics={})
            with pytest.raises(RunFailed, match=r"sample a\.0 is to be trained"):
                await journal.commit(version=2, step=2, consumed=[group("b", b), group("a", a)], metrics={})
            with pytest.raises(RunFailed, match="finished after"):
                await finish(journal, a)
            with pytest.raises(RunFailed, match="after version 1"):
                await journal.commit(version=1, step=2, consumed=[], metrics={})
            found = await journal.recover()
            assert (found.version, found.samples) == (1, (b,)), "a refused commit leaves no trace"

        asyncio.run(main())

    def test_groups_are_consumed_or_dropped_once(self, journal: Any, sample: MakeSample, group: MakeGroup) -> None:
        a = sample("a.0", "a")

        async def main() -> None:
            await journal.admit("a", "lake", 0)
            await journal.admit("a", "lake", 0)
            with pytest.raises(RunFailed, match="used once"):
                await journal.admit("a", "lake", 1)
            await finish(journal, a)
            with pytest.raises(RunFailed, match="never admitted"):
                await journal.drop("x", "stale")
            await journal.drop("a", "stale")
            await journal.drop("a", "again")
            with pytest.raises(RunFailed, match="dropped"):
                await journal.commit(version=1, step=1, consumed=[group("a", a)], metrics={})
            late = sample("a.1", "a")
            await finish(journal, late)
            await journal.admit("b", "lake", 0)
            b = sample("b.0", "b")
            await finish(journal, b)
            await journal.commit(version=1, step=1, consumed=[group("b", b)], metrics={})
            with pytest.raises(RunFailed, match="after it was trained"):
                await journal.drop("b", "stale")
            assert (await journal.recover()).samples == ()

        asyncio.run(main())

    def test_a_live_sample_may_be_replaced(self, journal: Any, sample: MakeSample) -> None:
        async def main() -> None:
            await journal.commit(version=0, step=0, consumed=[], metrics={})
            await journal.admit("a", "lake", 0)
            await finish(journal, sample("a.0", "a", v0=0))
            await finish(journal, sample("a.0", "a", v0=3))
            assert [s.v0 for s in (await journal.recover()).samples] == [3]

        asyncio.run(main())


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["admit", "finish", "drop", "commit", "reopen"]), st.integers(0, 4), st.integers(0, 1)),
    max_size=30,
)


@settings(deadline=None, max_examples=15)
@given(OPERATIONS)
def test_the_file_and_the_model_agree_and_no_sample_is_trained_twice(operations: list[tuple[str, int, int]]) -> None:

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(_agree(Path(directory), operations))


async def _agree(directory: Path, operations: list[tuple[str, int, int]]) -> None:
    model, ledger, trained, version = MemoryRecorder(), Ledger(directory, clock=zero, inline=True), [], 0
    for what, g, member in operations:
        name = f"g{g}"
        group = Group(GroupId(name), "lake", tuple(_tiny(f"{name}.{m}", name) for m in range(member + 1)))
        if what == "reopen":
            ledger.close()
            ledger = Ledger(directory, clock=zero, inline=True)
            continue
        version += 1
        refused = []
        for journal in (model, ledger):
            try:
                match what:
                    case "admit":
                        await journal.admit(name, "lake", g)
                    case "finish":
                        await finish(journal, group.samples[-1])
                    case "drop":
                        await journal.drop(name, "stale")
                    case _:
                        await journal.commit(version=version, step=version, consumed=[group], metrics={})
                refused.append(False)
            except RunFailed:
                refused.append(True)
        assert refused[0] == refused[1], (what, g, member)
        if what == "commit" and not refused[0]:
            trained += [s.id for s in group.samples]
        mine, its = await model.recover(), await ledger.recover()
        assert (mine is None) == (its is None)
        if mine is not None and its is not None:
            assert (mine.version, mine.pending, mine.seeds_drawn) == (its.version, its.pending, its.seeds_drawn)
            assert {s.id for s in mine.samples} == {s.id for s in its.samples}
    ledger.close()
    assert len(trained) == len(set(trained))


def _tiny(id_: str, group: str) -> TrainSample:
    return TrainSample(
        TrajectoryId(id_), GroupId(group), "lake", 0, (1,), (True,), (-0.5,), (0,), (0,), (1.0,), 1.0, None
    )


def test_samples_come_back_bit_by_bit(sample: MakeSample) -> None:
    one = sample("a.0", "a", tokens=50)
    restricted = TrainSample(
        **{f: getattr(one, f) for f in one.__slots__ if f != "allowed"}, allowed=(None,) * 49 + ((1, 2),)
    )
    for each in (one, restricted, dataclasses.replace(one, truncated=True)):
        assert decode_sample(encode_sample(each)) == each
    with pytest.raises(ValueError, match="not a sample"):
        decode_sample(b"\x01junk")


@pytest.mark.parametrize("inline", [True, False])
def test_large_samples_go_to_segments_and_come_back(
    tmp_path: Path, sample: MakeSample, group: MakeGroup, inline: bool
) -> None:
    big = sample("a.0", "a", tokens=5000)

    async def main() -> None:
        with Ledger(tmp_path, clock=zero, inline=inline) as ledger:
            await ledger.commit(version=0, step=0, consumed=[], metrics={})
            await ledger.admit("a", "lake", 0)
            await finish(ledger, big)
        with Ledger(tmp_path, clock=zero, inline=inline) as ledger:
            assert (await ledger.recover()).samples == (big,)  # type: ignore[union-attr]
            await ledger.commit(version=1, step=1, consumed=[group("a", big)], metrics={})
        assert [p.name for p in (tmp_path / "segments").iterdir()] == ["000001.seg"]

    asyncio.run(main())


def test_a_damaged_payload_is_found(tmp_path: Path) -> None:
    segments = PayloadFiles(tmp_path)
    place = segments.append(b"x" * 1000)
    segments.close()
    assert PayloadFiles(tmp_path).read(*place) == b"x" * 1000
    path = tmp_path / "000001.seg"
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)
    with pytest.raises(StorageFailed, match="damaged"):
        PayloadFiles(tmp_path).read(*place)
    path.write_bytes(data[:100])
    with pytest.raises(StorageFailed, match="damaged"):
        PayloadFiles(tmp_path).read(*place)
    later = PayloadFiles(tmp_path)
    assert later.append(b"y")[0] == 2, "a torn file is never appended to"
    later.keep({2})
    assert not path.exists()
    later.close()


@pytest.mark.parametrize("tokens", [40, 40_000], ids=["in the database", "beside it"])
def test_a_damaged_payload_costs_its_group_alone(tmp_path: Path, sample: MakeSample, tokens: int) -> None:
    a, b, whole = (dataclasses.replace(sample(name, name[0])) for name in ("a.0", "a.1", "b.0"))
    fields = ("token_ids", "loss_mask", "logprobs", "versions", "turn", "rewards")
    a = dataclasses.replace(a, **{f: (getattr(a, f) * tokens)[:tokens] for f in fields}, allowed=())  # type: ignore[arg-type]

    async def begin() -> None:
        with Ledger(tmp_path, clock=zero) as ledger:
            await ledger.commit(version=0, step=0, consumed=[], metrics={})
            await ledger.admit("a", "lake", 1)
            await ledger.admit("b", "lake", 2)
            for one in (a, b, whole):
                await finish(ledger, one)

    async def resume() -> None:
        with Ledger(tmp_path, clock=zero) as ledger:
            found = await ledger.recover()
            assert found is not None
            assert [s.id for s in found.samples] == ["b.0"]
            assert [g for g, *_ in found.pending] == ["b"]
            assert list(found.damaged) == ["a"]
        with Ledger(tmp_path, clock=zero) as ledger:
            again = await ledger.recover()
            assert again is not None
            assert (again.damaged, again.seeds_drawn) == ({}, {"lake": 2})

    asyncio.run(begin())
    if tokens > 1000:
        path = tmp_path / "segments" / "000001.seg"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    else:
        with contextlib.closing(sqlite3.connect(tmp_path / FILE)) as db, db:
            (payload,) = db.execute("SELECT payload FROM samples WHERE id = 'a.0'").fetchone()
            assert decode_sample(payload) == decode_sample(payload[5:]) == a, "older ledgers have no checksum there"
            at = payload.index(struct.pack("<d", a.logprobs[-1]))
            changed = payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :]
            assert decode_sample(changed[5:]).logprobs != a.logprobs, "a bit of a number, which nothing else sees"
            db.execute("UPDATE samples SET payload = ? WHERE id = 'a.0'", (changed,))
    asyncio.run(resume())


def test_a_payload_that_cannot_be_read_costs_nothing(tmp_path: Path, sample: MakeSample) -> None:
    """The disk is at fault, or a limit of open files: the resume ends with the cause, and the next one has it all."""
    fields = ("token_ids", "loss_mask", "logprobs", "versions", "turn", "rewards")
    large = sample("a.0", "a")
    large = dataclasses.replace(large, **{f: (getattr(large, f) * 40_000)[:40_000] for f in fields}, allowed=())
    path = tmp_path / "segments" / "000001.seg"

    async def begin() -> None:
        with Ledger(tmp_path, clock=zero) as ledger:
            await ledger.commit(version=0, step=0, consumed=[], metrics={})
            await ledger.admit("a", "lake", 1)
            await finish(ledger, large)

    async def resume() -> None:
        aside = path.rename(tmp_path / "aside")
        path.symlink_to(path.name)
        unreadable = pytest.raises(StorageFailed, match="cannot be read: Too many levels of symbolic links")
        with Ledger(tmp_path, clock=zero) as ledger, unreadable:
            await ledger.recover()
        path.unlink()
        aside.rename(path)
        with Ledger(tmp_path, clock=zero) as ledger:
            found = await ledger.recover()
        assert found is not None
        assert ([s.id for s in found.samples], found.damaged) == (["a.0"], {})

    asyncio.run(begin())
    asyncio.run(resume())


def test_a_write_ahead_log_that_is_lost_costs_what_came_after_the_last_version(
    tmp_path: Path, sample: MakeSample, group: MakeGroup
) -> None:
    kept, lost, run = sample("a.0", "a"), sample("b.0", "b"), tmp_path / "run"

    async def main() -> None:
        with Ledger(run, clock=zero) as ledger:
            await ledger.commit(version=0, step=0, consumed=[], metrics={})
            await ledger.admit("a", "lake", 1)
            await finish(ledger, kept)
            await ledger.commit(version=1, step=1, consumed=[group("a", kept)], metrics={})
            await ledger.flush()
            await ledger.admit("b", "lake", 2)
            await finish(ledger, lost)
            (tmp_path / "copy").mkdir()
            (tmp_path / "copy" / FILE).write_bytes((run / FILE).read_bytes())
        with Ledger(tmp_path / "copy", clock=zero) as ledger:
            found = await ledger.recover()
            assert found is not None
            assert (found.version, found.step, found.samples) == (1, 1, ())

    asyncio.run(main())


@pytest.mark.parametrize("inline", [True, False])
def test_everything_recorded_reaches_the_file(
    tmp_path: Path, inline: bool, sample: MakeSample, group: MakeGroup
) -> None:
    recorded = [Interval("engine", f"e{i % 3}", i, i + 1.5, "busy", "", 2, 3.0) for i in range(500)]

    async def main() -> None:
        with Ledger(tmp_path, clock=zero, config={"name": "x"}, inline=inline) as ledger:
            for one in recorded:
                ledger.interval(one)
            ledger.event(RunEvent(3.0, "publish", "v1", {"seconds": 0.5}))
            ledger.invocation(Invocation("exact", "aws_lambda", "w0", 0, 1, 0.1, 0.02, 512, 16, "ok"))
            ledger.invocation(Invocation("exact", "aws_lambda", "w0", 1, 2, 0, 0.03, 512, 4, "ok", Cause.HEDGE, "r-1"))
            for items in (3, 4):
                ledger.saving(Saving("exact", "cache", 2.0, items, 0.01, 512))
            ledger.charge(charge("d.0", outcome="stale"))
            for name in "abc":
                await ledger.admit(name, "lake", 0)
                await finish(ledger, sample(f"{name}.0", name))
            await ledger.commit(version=1, step=1, consumed=[group("a", sample("a.0", "a"))], metrics={"loss": 1})
            await ledger.drop("b", "infra_fault")
            await ledger.flush()
            with LedgerReader(tmp_path) as live:
                assert len(live.intervals()) == 500

    asyncio.run(main())
    with LedgerReader(tmp_path) as reader:
        assert reader.config() == {"name": "x"}
        assert reader.intervals() == recorded
        usd, expected = (sum(i.usd for i in sums) for sums in (reader.interval_sums(), sum_intervals(recorded)))
        assert usd == pytest.approx(expected)
        assert {c.outcome: c.trajectories for c in reader.charge_sums()} == {
            "trained": 1,
            "infra_fault": 1,
            "waiting": 1,
            "stale": 1,
        }
        assert reader.events("publish")[0].fields == {"seconds": 0.5}
        assert [(i.cause, i.items) for i in reader.invocation_sums()] == [("call", 16), ("hedge", 4)]
        assert [(i.estimated, i.estimated_s == i.billed_s) for i in reader.invocation_sums()] == [(1, True), (0, False)]
        assert reader.saving_sums() == [Saving("exact", "cache", 2.0, 7, pytest.approx(0.02), 512)]
        assert (reader.versions()[0].tokens, reader.versions()[0].metrics) == (2, {"loss": 1})
        assert (reader.facts().live_groups, reader.facts().dropped_groups, reader.facts().live_samples) == (1, 1, 1)


def test_a_trajectory_that_was_finished_is_stale_once_that_is_known(tmp_path: Path, sample: MakeSample) -> None:
    async def main() -> None:
        with Ledger(tmp_path, clock=zero) as ledger:
            for name in "ab":
                await ledger.admit(name, "lake", 0)
                await finish(ledger, sample(f"{name}.0", name))
            await ledger.outdate(TrajectoryId("a.0"))
            await finish(ledger, sample("b.0", "b", v0=3))  # as a resume does

    asyncio.run(main())
    with LedgerReader(tmp_path) as reader:
        assert {c.outcome: c.trajectories for c in reader.charge_sums()} == {"stale": 2, "waiting": 1}


def test_a_run_goes_back_to_an_older_version(tmp_path: Path, sample: MakeSample, group: MakeGroup) -> None:
    """Samples trained into later versions, or with tokens of them, are lost; the rest is unchanged."""
    of = {name: sample(f"{name}.0", name) for name in "abcd"}
    of["d"] = dataclasses.replace(of["d"], versions=(0,) * (len(of["d"].versions) - 1) + (2,))

    async def main() -> None:
        with Ledger(tmp_path, clock=zero) as ledger:
            await ledger.commit(version=0, step=0, consumed=[], metrics={})
            for name, one in of.items():
                await ledger.admit(name, "lake", 0)
                await finish(ledger, one)
            await ledger.commit(version=1, step=1, consumed=[group("a", of["a"])], metrics={}, stamp="one")
            await ledger.commit(version=2, step=2, consumed=[group("b", of["b"])], metrics={}, stamp="two")
            with pytest.raises(RunFailed, match="version 7 was never committed"):
                await ledger.roll_back(7)
            assert await ledger.roll_back(1) == 2
            found = await ledger.recover()
            assert found is not None
            assert (found.version, found.step, found.samples) == (1, 1, (of["c"],))
            assert found.stamps == {1: "one"}
            assert (found.pending, found.consumed) == ((("c", "lake", 0),), {"lake": 1})
            await ledger.commit(version=2, step=2, consumed=[group("c", of["c"])], metrics={})

    asyncio.run(main())
    with LedgerReader(tmp_path) as reader:
        assert {c.outcome: c.trajectories for c in reader.charge_sums()} == {"trained": 2, "infra_fault": 2}


def test_a_ledger_that_is_not_whole_is_none(tmp_path: Path) -> None:
    """Killed while it is made, a run begins again."""
    with pytest.raises(TypeError):
        Ledger(tmp_path, clock=zero, config={"seed": object()})
    assert not (tmp_path / FILE).exists()
    with Ledger(tmp_path, clock=zero, config={"seed": 1}):
        pass
    with LedgerReader(tmp_path) as reader:
        assert reader.config() == {"seed": 1}


def test_a_resumed_run_goes_on_in_time_and_books_the_crash(tmp_path: Path) -> None:
    now = [1000.0]

    def resource(ledger: Ledger, name: str) -> ResourceClock:
        return ResourceClock(
            role="engine", resource=name, recorder=ledger, clock=lambda: now[0], usd_per_unit_hour=36.0
        )

    async def main() -> None:
        ledger = Ledger(tmp_path, clock=lambda: now[0], inline=True)
        a, b, c = (resource(ledger, name) for name in "abc")
        now[0] += 4
        a.enter(ResourceState.BUSY)
        c.close()
        now[0] += 6
        b.enter(ResourceState.BUSY)
        await ledger.flush()
        ledger.close()  # a and b were not closed: as after kill -9
        now[0] = 5.0  # another process, another loop
        ledger = Ledger(tmp_path, clock=lambda: now[0], inline=True)
        a = resource(ledger, "a")
        now[0] += 2
        a.close()
        ledger.close()

    asyncio.run(main())
    with LedgerReader(tmp_path) as reader:
        assert find_tiling_errors(reader.intervals()) == []
        assert [(i.resource, i.state, i.cause, i.t0, i.t1) for i in reader.intervals()] == [
            ("a", "startup", "", 0, 4),
            ("c", "startup", "", 0, 4),
            ("b", "startup", "", 0, 10),
            ("a", "down", "crash", 4, 10),
            ("a", "startup", "", 10, 12),
        ]
        assert reader.facts().seconds == 12


def test_a_life_is_paid_from_its_process_to_its_ledger(tmp_path: Path) -> None:
    """Resources held from the start, resources closed while the run stops, and resources in between."""
    now = [0.0]

    def at(second: float) -> float:
        now[0] = second
        return second

    def opened(name: str) -> ResourceClock:
        return ResourceClock(role="engine", resource=name, recorder=ledger, clock=lambda: now[0])

    for _ in range(2):
        at(102.0)
        with Ledger(tmp_path, clock=lambda: now[0], inline=True, began=100.0, held={"a", "b"}) as ledger:
            a = opened("a")
            at(103.0)
            b, c = opened("b"), opened("c")
            at(104.0)
            c.close()
            ledger.stopping()
            a.close()
            at(105.0)
            b.close()
            at(109.0)
            seconds = ledger.seconds
    assert seconds == 18.0
    with LedgerReader(tmp_path) as reader:
        found = reader.intervals()
    assert find_tiling_errors([i for i in found if i.resource != "c"], start=0.0, end=18.0) == []
    assert [(i.t0, i.t1) for i in found if i.resource == "c"] == [(3.0, 4.0), (12.0, 13.0)]
    assert {i.resource for i in found if i.cause == "stopping"} == {"a", "b"}


def test_no_event_reaches_the_ledger_unseen(tmp_path: Path) -> None:
    """Of leases, clocks and parts alike: a terminal chooses from all events."""
    seen: list[RunEvent] = []

    async def main() -> None:
        now = asyncio.get_running_loop().time
        with Ledger(tmp_path, clock=now, inline=True, on_event=seen.append) as ledger:
            ResourceClock(role="engine", resource="e", recorder=ledger, clock=now).close()
            hold = Leases(ledger).hold("lake-1", "a step of its environment", 0.001, Expiry.GAP_FILL)
            with pytest.raises(LeaseExpired), hold:
                await asyncio.Event().wait()

    asyncio.run(main())
    with LedgerReader(tmp_path) as reader:
        held = [event.kind for event in reader.events()]
    assert held == [event.kind for event in seen] == ["resource_opened", "resource_closed", "lease_expired"]


def test_the_gpus_of_functions_are_spent_in_every_life(tmp_path: Path) -> None:
    """An hour on an L4 with 1 GiB, and half an hour of waiting; the budget of a resumed run knows both."""
    prices, config = load_prices(builtin("prices.yaml")), {"functions": {"f": {"gpu": "L4"}, "g": {"gpu": ""}}}
    hour = 3600 * (0.0000131 + 0.00000222)
    calls = [Invocation(name, "modal", "w", 0, 1, 0, 3600.0, 1024, 1, "ok") for name in ("f", "g")]
    waited = WorkerSpan("f", "modal", "w", 0, 1800, WorkerState.IDLE, 1024)

    async def main() -> None:
        for life in (1, 2):
            with Ledger(tmp_path, clock=zero, prices=prices, inline=True, config=config) as ledger:
                for call in calls:
                    ledger.invocation(call)
                ledger.worker(waited)
                await ledger.flush()
                assert ledger.functions_usd == pytest.approx(life * (2.5 * hour + 5400 * 0.000222))

    asyncio.run(main())


@pytest.mark.parametrize("inline", [True, False])
def test_what_was_spent_is_known_and_survives(tmp_path: Path, inline: bool) -> None:
    prices = load_prices(builtin("prices.yaml"))
    call = Invocation("f", "aws_lambda", "w", 0, 1, 0, 3600.0, 1024, 1, "ok")
    unbilled = Invocation("f", "local", "w", 0, 1, 0, 3600.0, 1024, 1, "ok")
    hour = Interval("engine", "e", 0, 3600, "busy", "", 2, 1.5)

    async def main() -> None:
        for life in (1, 2):
            with Ledger(tmp_path, clock=zero, prices=prices, inline=inline) as ledger:
                ledger.interval(hour)
                ledger.invocation(call)
                ledger.invocation(unbilled)
                await ledger.flush()
                assert ledger.spent_usd == pytest.approx(life * (3.0 + 0.06000032))
                assert ledger.functions_usd == pytest.approx(life * 0.06000032)

    asyncio.run(main())


class TestFailure:
    def test_a_directory_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(StorageFailed, match="cannot be written") as caught:
            Ledger(tmp_path / "file" / "run", clock=zero)
        assert "--runs-dir" in caught.value.remedy

    def test_a_second_writer(self, tmp_path: Path) -> None:
        with Ledger(tmp_path, clock=zero), pytest.raises(UsageError, match="another process"):
            Ledger(tmp_path, clock=zero)
        Ledger(tmp_path, clock=zero).close()

    def test_a_file_that_is_no_ledger(self, tmp_path: Path) -> None:
        (tmp_path / FILE).write_text("not a database, but long enough to look at " * 20)
        with pytest.raises(StorageFailed, match="not a database") as caught:
            Ledger(tmp_path, clock=zero)
        assert "backup" in caught.value.remedy
        with pytest.raises(StorageFailed):
            LedgerReader(tmp_path)
        with pytest.raises(UsageError, match="no ledger here"):
            LedgerReader(tmp_path / "none")

    def test_another_schema(self, tmp_path: Path) -> None:
        Ledger(tmp_path, clock=zero).close()
        with contextlib.closing(sqlite3.connect(tmp_path / FILE)) as connection, connection:
            connection.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
        with pytest.raises(StorageFailed, match="schema version 99"):
            Ledger(tmp_path, clock=zero)

    @pytest.mark.parametrize("inline", [True, False])
    def test_a_full_disk_reaches_everyone(self, tmp_path: Path, inline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        connect = sqlite3.connect

        def on_a_small_disk(*arguments: Any, **options: Any) -> sqlite3.Connection:
            connection = connect(*arguments, **options)
            connection.execute("PRAGMA max_page_count = 40")
            return connection

        monkeypatch.setattr(sqlite3, "connect", on_a_small_disk)

        async def main() -> None:
            ledger = Ledger(tmp_path, clock=zero, inline=inline)
            await ledger.commit(version=0, step=0, consumed=[], metrics={})

            async def fill() -> None:
                while True:
                    for i in range(2000):
                        ledger.interval(Interval("engine", "e", i, i + 1, "busy"))
                    await ledger.flush()

            outcomes = await asyncio.gather(*([] if inline else [ledger.watch()]), fill(), return_exceptions=True)
            assert all(isinstance(o, StorageFailed) and "full" in o.message for o in outcomes), outcomes
            assert "free some disk space" in outcomes[0].remedy
            with pytest.raises(StorageFailed):
                ledger.event(RunEvent(0, "x", "y"))
            for call in (ledger.admit("g", "d", 0), ledger.watch()):
                with pytest.raises(StorageFailed):
                    await call
            with contextlib.suppress(StorageFailed):
                ledger.close()

        asyncio.run(main())
        monkeypatch.undo()
        with Ledger(tmp_path, clock=zero) as again:
            assert asyncio.run(again.recover()).version == 0  # type: ignore[union-attr]

    def test_a_disk_that_fails_at_the_checkpoint_is_named_too(self, tmp_path: Path) -> None:
        class Failing:
            """A connection whose checkpoints meet a broken disk."""

            def __init__(self, connection: sqlite3.Connection) -> None:
                self.connection = connection

            def __getattr__(self, name: str) -> Any:
                return getattr(self.connection, name)

            def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
                if "checkpoint" in statement:
                    raise sqlite3.OperationalError("disk I/O error")
                return self.connection.execute(statement, *values)

        with contextlib.closing(Database(tmp_path, now=0.0)) as database:
            database.connection = Failing(database.connection)  # type: ignore[assignment]
            database.published = True
            with pytest.raises(StorageFailed, match=f"{FILE}: disk I/O error"):
                database.write([], [])

    def test_a_closed_ledger_says_so(self, tmp_path: Path) -> None:
        async def main() -> None:
            for inline in (True, False):
                ledger = Ledger(tmp_path, clock=zero, inline=inline)
                ledger.close()
                ledger.close()
                with pytest.raises(StorageFailed, match="closed"):
                    ledger.event(RunEvent(0, "x", "y"))
                with pytest.raises(StorageFailed, match="closed"):
                    await ledger.flush()

        asyncio.run(main())

    def test_a_cancelled_caller_does_not_hurt(self, tmp_path: Path) -> None:
        async def main() -> None:
            with Ledger(tmp_path, clock=zero) as ledger:
                task = asyncio.ensure_future(ledger.admit("g", "lake", 0))
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await asyncio.gather(*(ledger.admit(f"h{i}", "lake", i) for i in range(100)))
                await ledger.commit(version=0, step=0, consumed=[], metrics={})
                assert len((await ledger.recover()).pending) == 101  # type: ignore[union-attr]

        asyncio.run(main())

    def test_errors_of_the_tree_only(self) -> None:
        assert issubclass(StorageFailed, RollartError)


def test_segment_files_go_once_their_samples_are_trained(
    tmp_path: Path, sample: MakeSample, group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live run does not accumulate trained payloads: a closed file without live samples is deleted."""
    monkeypatch.setattr("rollart.ledger.payloads.ROLL_BYTES", 100_000)

    async def main() -> None:
        with Ledger(tmp_path, clock=zero, inline=True) as ledger:
            for version in range(1, 9):
                name = f"g{version}"
                one = sample(f"{name}.0", name, tokens=5000)
                await ledger.admit(name, "lake", version)
                await finish(ledger, one)
                await ledger.commit(version=version, step=version, consumed=[group(name, one)], metrics={})
            assert len(list((tmp_path / "segments").iterdir())) <= 2

    asyncio.run(main())


@pytest.mark.parametrize("inline", [True, False])
def test_a_value_that_cannot_be_written_is_refused_and_the_ledger_lives(
    tmp_path: Path, sample: MakeSample, inline: bool
) -> None:
    async def main() -> None:
        with Ledger(tmp_path, clock=zero, inline=inline) as ledger:
            await ledger.admit("a", "lake", 0)
            with pytest.raises(RunFailed, match="cannot hold a record"):
                await finish(ledger, dataclasses.replace(sample("a.0", "a"), success=object()))  # type: ignore[arg-type]
            await finish(ledger, sample("a.1", "a"))

    asyncio.run(main())


def test_attempts_that_were_generated_again_are_dropped_with_their_group(
    tmp_path: Path, sample: MakeSample, group: MakeGroup
) -> None:
    async def main() -> None:
        with Ledger(tmp_path, clock=zero, inline=True) as ledger:
            await ledger.admit("a", "lake", 0)
            await finish(ledger, sample("a.0", "a"))
            again = sample("a.0r2", "a")
            await finish(ledger, again)
            await ledger.commit(version=1, step=1, consumed=[group("a", again)], metrics={})
            assert (await ledger.recover()).samples == ()  # type: ignore[union-attr]
        with sqlite3.connect(tmp_path / "ledger.sqlite") as database:
            rows = database.execute("SELECT id, payload FROM samples WHERE payload IS NOT NULL").fetchall()
        database.close()
        assert rows == []

    asyncio.run(main())
