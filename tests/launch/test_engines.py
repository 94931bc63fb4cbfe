"""Device assignment of engines, and the initial plan of a resumed run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from placement.types import Device, Pool, Role
from rollart.adapters.clusters.local import LocalRuntime
from rollart.errors import RollartError
from rollart.fleet import EngineKind, EngineRole
from rollart.launch.engines import ClusterEngineSite
from rollart.launch.layout import free_devices, part_clock, pool_nodes
from rollart.launch.plan import RunStart, resolve_start
from rollart.launch.routing import engine_placements
from rollart.ledger.reader import LedgerReader
from rollart.ledger.store import Ledger
from rollart.model import EngineId
from rollart.ports import RunEvent
from rollart.settings.resolve import Resolved, resolve_files
from rollart.sim import loop
from rollart.testing.laws import find_tiling_errors
from tests.e2e.test_moves import POOLS, drifting


def pool(count: int, per_host: int | None) -> Pool:
    return Pool("x", Device("H200", devices_per_host=per_host), count, 1.0)


@pytest.mark.parametrize(
    ("devices", "taken", "count", "wanted"),
    [
        (pool(8, None), {0, 1, 3}, 2, (2, 4)),
        (pool(16, 8), {0, 1, 2}, 4, (3, 4, 5, 6)),
        (pool(16, 8), {0, 9, 10, 11, 12, 13}, 2, (8, 14)),
        (pool(16, 8), {0, 8}, 8, None),
        (pool(16, 8), {1, 8}, 10, (0, 2, 3, 4, 5, 6, 7, 9, 10, 11)),
        (pool(10, 8), {0, 1}, 2, (8, 9)),
        (pool(2, 8), {0}, 1, (1,)),
        (pool(2, 8), {0}, 2, None),
    ],
)
def test_free_devices_of_one_host(devices: Pool, taken: set[int], count: int, wanted: tuple[int, ...] | None) -> None:
    assert free_devices(devices, taken, count) == wanted


def resolved(path: Path, *overrides: str, cluster: Mapping[str, Any] = POOLS) -> Resolved:
    (path / "run.yaml").write_text(yaml.safe_dump(drifting()))
    (path / "cluster.yaml").write_text(yaml.safe_dump(dict(cluster)))
    return resolve_files(path / "run.yaml", path / "cluster.yaml", overrides)


WORK = {
    "long": {"turns": 2.0, "wait_s": 0.15},
    "short": {"turns": 6.0, "wait_s": 0.15},
}


def adopt(path: Path, run: Resolved, engines: list[tuple[str, str, str, int]]) -> None:
    """Write an adopted plan, as a run's rebalancer does."""
    rest = {"share": 0.5, "first_tokens": 1.0, "new_tokens": 1.0, "output_tokens": 1.0, "finished": 60}
    fields = {
        "engines": json.dumps(engines),
        "work": json.dumps({domain: {**rest, **work} for domain, work in WORK.items()}),
    }
    with Ledger(path, clock=lambda: 0.0, config=run.to_dict(), inline=True) as ledger:
        for name in ("engine-0", "engine-1", "engine-2", "engine-7", "trainer-0"):
            ledger.event(RunEvent(0.0, "resource_opened", name, {}))
        ledger.event(RunEvent(0.0, "plan_adopted", "fleet", fields))


MOVED = [("engine-1", "left", "engine", 1), ("engine-2", "right", "engine", 1), ("engine-7", "right", "decode", 1)]


def test_devices_are_paid_by_who_holds_them(tmp_path: Path) -> None:
    """On virtual time. No engine is started, so there are no processes."""
    run = resolved(tmp_path)

    async def main() -> tuple[list[float], list[str]]:
        now = asyncio.get_running_loop().time
        with Ledger(tmp_path, clock=now, inline=True) as ledger:
            runtime = LocalRuntime(pool_nodes(run))
            site = ClusterEngineSite(run, tmp_path, ledger, runtime, names=["engine-9", "trainer-0"])
            await site.open()
            trainer = part_clock(run, ledger, run.plan.of(Role.TRAINER)[0])
            assert dict(site.free()) == {"train": 0, "left": 0, "right": 1}
            spent = []
            for move in ("drain", "start", "full", "end"):
                await asyncio.sleep(3600.0)
                spent.append(site.spent_usd())
                if move == "drain":
                    await site.clear(EngineId("engine-0"))
                    await site.clear(EngineId("engine-0"))
                    assert site.free()["left"] == 1
                elif move == "start":
                    placed = await site.place(EngineKind("right", EngineRole.ENGINE, 1))
                    assert (placed.part.id, placed.seat.pool) == ("engine-10", "right")
                elif move == "full":
                    with pytest.raises(RollartError, match="pool 'right' has 0 free devices"):
                        await site.place(EngineKind("right", EngineRole.ENGINE, 1))
            await site.close()
            trainer.close()
            await runtime.close()
        return spent, [a.name for a in run.plan.of(Role.ENGINE) if a.pool == "left"]

    spent, left = loop.run(main())
    assert "engine-0" in left
    assert spent == pytest.approx([5.0, 9.0, 13.0, 17.0]), "two rented, later one; two and the trainer's always"
    with LedgerReader(tmp_path) as reader:
        intervals = reader.intervals()
    assert sum(interval.usd for interval in intervals) == pytest.approx(17.0)
    assert find_tiling_errors(intervals, tolerance=1e-6) == []
    hours = {i.resource: 0.0 for i in intervals}
    for interval in intervals:
        hours[interval.resource] += interval.seconds * interval.units / 3600
    assert hours["unused-right"] == pytest.approx(2.0)
    assert hours["engine-0"] == pytest.approx(1.0)
    assert hours["engine-10"] == pytest.approx(2.0)


def test_a_resume_starts_the_engines_that_ran_under_their_names(tmp_path: Path) -> None:
    run = resolved(tmp_path)
    adopt(tmp_path, run, [*MOVED[:2], ("engine-7", "right", "engine", 1)])
    start = resolve_start(run, tmp_path)
    assert start.moved, start.why_not
    plan = start.resolved.plan
    placed = {a.name: (a.pool, a.devices) for a in plan.assignments if a.role is Role.ENGINE}
    assert placed == {"engine-1": ("left", (0,)), "engine-2": ("right", (0,)), "engine-7": ("right", (1,))}
    assert plan.idle == {"train": 0, "left": 1, "right": 0}
    assert plan.usd_per_hour == 4.0, "one on left, which is rented, and all of the others"
    assert plan.placement is not None
    assert {d.pool: d.replicas for d in plan.placement.deployments} == {"left": 1, "right": 2, "train": 1}
    assert start.resolved.problem is not None
    assert {d.name: d.turns.mean for d in start.resolved.problem.domains} == {"long": 2.0, "short": 6.0}
    assert start.names >= {"engine-0", "engine-7"}


def test_roles_that_engines_were_given_are_kept(tmp_path: Path) -> None:
    """An engine keeps its name when its role changes."""
    cluster = {**POOLS, "links": [{"a": "right", "b": "right", "gb_per_s": 1.0}]}
    run = resolved(tmp_path, "placement.prefill_decode=auto", "placement.rate=10", cluster=cluster)
    adopt(tmp_path, run, [MOVED[0], ("engine-2", "right", "prefill", 1), MOVED[2]])
    start = resolve_start(run, tmp_path)
    assert start.moved, start.why_not
    roles = {name: seat.role for name, seat in engine_placements(start.resolved, start.roles).items()}
    assert roles == {"engine-1": EngineRole.ENGINE, "engine-2": EngineRole.PREFILL, "engine-7": EngineRole.DECODE}


def test_a_resume_that_asks_for_something_else_starts_from_its_specs(tmp_path: Path) -> None:
    run = resolved(tmp_path)
    adopt(tmp_path, run, MOVED)
    other = resolved(tmp_path, "placement.utilisation=0.9")
    start = resolve_start(other, tmp_path)
    assert (start.moved, start.resolved) == (False, other)
    assert start.why_not == "placement changed since it was adopted"
    assert start.names


def test_engines_that_do_not_fit_any_more_are_told(tmp_path: Path) -> None:
    run = resolved(tmp_path)
    adopt(tmp_path, run, [("engine-1", "left", "engine", 1), ("engine-2", "gone", "engine", 1)])
    assert resolve_start(run, tmp_path).why_not == "engine-2 does not fit into pool 'gone'"


def test_a_run_that_never_moved_starts_as_it_did(tmp_path: Path) -> None:
    run = resolved(tmp_path)
    assert resolve_start(run, tmp_path) == RunStart(run), "no ledger yet"
    Ledger(tmp_path, clock=lambda: 0.0, config=run.to_dict(), inline=True).close()
    assert resolve_start(run, tmp_path) == RunStart(run)
