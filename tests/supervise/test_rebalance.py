"""When the plan is looked at again, what is applied, and what is written down. A scripted planner, virtual time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

import pytest

from rollart.errors import RunFailed
from rollart.fleet import (
    EnginePlacement,
    EngineRole,
    FleetMove,
    FleetMoveKind,
    FleetObservation,
    Proposal,
    RoutePrices,
    Routes,
)
from rollart.leases import Leases
from rollart.ledger.intervals import EngineShares, ResourceClock
from rollart.model import EngineId, WeightsRef
from rollart.policy.workload import MIN_FINISHED, WorkloadMeter
from rollart.serving.engine_registry import GatewayLimits
from rollart.serving.gateway import Gateway
from rollart.settings.placement import RebalanceSpec
from rollart.sim import loop
from rollart.supervise.rebalance import Rebalancer, RebalanceSettings, worth_moving
from rollart.testing.handoff import HandoffEngine, HandoffFabric
from rollart.testing.ledger import MemoryRecorder
from tests.policy.models import LinearModel

FLIP = FleetMove(FleetMoveKind.FLIP, "x", 1, 1, EngineRole.ENGINE, EngineRole.PREFILL)
BACK = FleetMove(FleetMoveKind.FLIP, "x", 1, 1, EngineRole.PREFILL, EngineRole.ENGINE)
START = FleetMove(FleetMoveKind.START, "y", 1, 1, None, EngineRole.ENGINE)


class Script:
    """Answers as it is told, and remembers what it was asked and when."""

    def __init__(self) -> None:
        self.proposals: list[Proposal | None] = []
        self.routes = Routes()
        self.asked: list[tuple[float, str]] = []
        self.seen: list[FleetObservation] = []
        self.fails = False
        self.adopted: list[Proposal] = []

    async def reprice(self, observed: FleetObservation) -> Routes:
        return self._note("reprice", observed)

    async def reflow(self, observed: FleetObservation) -> Routes:
        return self._note("reflow", observed)

    async def replan(self, observed: FleetObservation, reason: str) -> Proposal | None:
        self._note(f"replan: {reason}", observed)
        return self.proposals.pop(0) if self.proposals else None

    def adopt(self, proposal: Proposal) -> None:
        self.adopted.append(proposal)

    def _note(self, what: str, observed: FleetObservation) -> Routes:
        self.asked.append((asyncio.get_running_loop().time(), what))
        self.seen.append(observed)
        if self.fails:
            raise ArithmeticError("the solver gave up")
        return self.routes

    def times(self, what: str) -> list[float]:
        return [t for t, asked in self.asked if asked.startswith(what)]


class Fleet:
    def __init__(self) -> None:
        self.moves: list[tuple[float, FleetMove]] = []
        self.fails = False

    async def apply(self, move: FleetMove) -> None:
        if self.fails:
            raise RunFailed("no such device")
        await asyncio.sleep(10.0)
        self.moves.append((asyncio.get_running_loop().time(), move))

    def free(self) -> Mapping[str, int]:
        return {"y": 1}


class Bench:
    def __init__(self, *, fleet: Fleet | None = None, **settings: Any) -> None:
        self.recorder = MemoryRecorder()
        self.leases = Leases(self.recorder)
        self.planner = Script()
        self.meter = WorkloadMeter()
        fabric = HandoffFabric()
        self.gateway = Gateway(
            self.leases,
            limits=GatewayLimits(),
            version=0,
            on_suspect=lambda _: None,
            recorder=self.recorder,
            seats={f"e{i}": EnginePlacement("x") for i in range(3)} | {"f0": EnginePlacement("y")},
        )
        self.engines = {n: HandoffEngine(n, fabric) for n in ("e0", "e1", "e2", "f0")}
        now = asyncio.get_running_loop().time
        for name, engine in self.engines.items():
            clock = ResourceClock(role="engine", resource=name, recorder=self.recorder, clock=now)
            self.gateway.join(engine, version=0, shares=EngineShares(clock, clock=now))
        spec = RebalanceSpec(**{key: settings.pop(key) for key in RebalanceSpec.model_fields if key in settings})
        given = {"measure_s": 60.0, "settle_s": 10.0} | settings
        self.rebalancer = Rebalancer(
            self.gateway,
            self.planner,
            self.leases,
            self.recorder,
            self.meter,
            settings=RebalanceSettings(spec, **given),
            fleet=fleet,
        )

    def finish(self, count: int = MIN_FINISHED, *, turns: int = 4, output: int = 100, domain: str = "a") -> None:
        for _ in range(count):
            self.meter.add(
                domain, turns=turns, first_tokens=100, new_tokens=(turns - 1) * 50, output_tokens=output, wait_s=1.0
            )

    def events(self, kind: str) -> list[tuple[str, dict[str, object]]]:
        return [(e.subject, dict(e.fields)) for e in self.recorder.events if e.kind == kind]

    def roles(self) -> dict[str, str]:
        seats = {n: self.gateway.registry.seat_of(EngineId(n)) for n in self.engines}
        return {n: str(s.role) for n, s in seats.items() if s is not None}


def running(body: Callable[[Bench], Coroutine[Any, Any, None]], **more: Any) -> Bench:
    """The body beside a running rebalancer."""
    made: list[Bench] = []

    async def main() -> None:
        bench = Bench(**more)
        made.append(bench)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(bench.rebalancer.run())
            await body(bench)
            task.cancel()

    loop.run(main())
    return made[0]


def better(*moves: FleetMove, now: float = 1.0, after: float = 1.2, cost: float = 0.0) -> Proposal:
    routes = Routes(RoutePrices(in_flight=after), LinearModel(), {"a": {"x": 1.0}})
    return Proposal(moves, routes, now, after, cost)


def test_prices_every_few_seconds_flows_twice_a_minute_no_plan_without_a_reason() -> None:
    async def body(bench: Bench) -> None:
        bench.finish()
        await asyncio.sleep(100.0)

    bench = running(body)
    assert bench.planner.times("reflow") == [30.0, 60.0, 90.0]
    assert len(bench.planner.times("reprice")) == 16
    assert bench.planner.times("replan") == []
    seen = bench.planner.seen[-1]
    assert seen.work["a"].turns == pytest.approx(4)
    assert seen.work["a"].output_tokens == pytest.approx(25)
    assert seen.work["a"].new_tokens == pytest.approx(50.0)
    assert {(k.pool, load.healthy) for k, load in seen.load.items()} == {("x", 3), ("y", 1)}


def test_0_turns_a_tempo_off() -> None:
    async def body(bench: Bench) -> None:
        await asyncio.sleep(100.0)

    bench = running(body, reprice_s=0.0)
    assert {what for _, what in bench.planner.asked} == {"reflow"}
    bench = running(body, reprice_s=0.0, flows_s=0.0)
    assert bench.planner.asked == []


def test_drift_past_the_threshold_asks_for_a_plan_once() -> None:
    async def body(bench: Bench) -> None:
        bench.finish(output=100)
        await asyncio.sleep(20.0)
        bench.finish(400, output=110)
        await asyncio.sleep(60.0)
        assert bench.planner.times("replan") == [], "9 % is no drift"
        bench.finish(1000, output=200)
        await asyncio.sleep(200.0)

    bench = running(body)
    (asked,) = [what for _, what in bench.planner.asked if what.startswith("replan")]
    assert "output tokens of a" in asked
    assert bench.events("rebalance_rejected")[0][1]["why"] == "the plan that runs is the best one"


def test_a_gain_that_pays_flips_roles_and_routes_and_is_measured_later() -> None:
    async def body(bench: Bench) -> None:
        async with asyncio.TaskGroup() as tasks:
            work = tasks.create_task(finishing(bench))
            await asyncio.sleep(100.0)
            bench.planner.proposals = [better(FLIP)]
            bench.planner.routes = better().routes
            bench.rebalancer.notify("price change")
            await asyncio.sleep(1.0)
            assert bench.roles()["e0"] == "prefill"
            assert bench.gateway.turns.router.routes == better().routes
            bench.rate = 2.0  # type: ignore[attr-defined]
            assert bench.events("rebalance_measured") == []
            await asyncio.sleep(100.0)
            work.cancel()

    async def finishing(bench: Bench) -> None:
        bench.rate = 1.0  # type: ignore[attr-defined]
        while True:
            await asyncio.sleep(1.0 / bench.rate)  # type: ignore[attr-defined]
            bench.finish(1)

    bench = running(body)
    ((subject, fields),) = bench.events("rebalanced")
    assert subject == "price change"
    assert fields["rate_now"] == 1.0
    assert fields["rate_after"] == 1.2
    assert fields["moves"] == "flip 1 × tp 1 on x: engine → prefill"
    ((_, measured),) = bench.events("rebalance_measured")
    assert measured["predicted_gain"] == pytest.approx(0.2)
    assert measured["rate_before"] == pytest.approx(1.0, rel=0.1)
    assert measured["rate_after"] == pytest.approx(2.0, rel=0.1)
    assert measured["measured_gain"] == pytest.approx(1.0, rel=0.2)


@pytest.mark.parametrize(
    ("proposal", "why"),
    [
        (better(FLIP, after=1.2, cost=800.0), "do not pay for 800 lost"),
        (better(FLIP, after=1.01), "is no gain of 2%"),
        (better(FLIP, after=0.9), "is no gain of 2%"),
        (better(FLIP, FLIP, FLIP, FLIP), "the fleet changed: flip 1 × tp 1 on x: engine → prefill, but there are 3"),
    ],
)
def test_what_does_not_pay_is_rejected_and_changes_nothing(proposal: Proposal, why: str) -> None:
    async def body(bench: Bench) -> None:
        bench.planner.proposals = [proposal]
        bench.rebalancer.notify("price change")
        await asyncio.sleep(1.0)

    bench = running(body)
    ((_, fields),) = bench.events("rebalance_rejected")
    assert why in str(fields["why"])
    assert set(bench.roles().values()) == {"engine"}
    assert bench.events("rebalanced") == []
    assert bench.planner.adopted == []


def test_a_plan_does_not_go_back_and_forth_with_the_work() -> None:
    """The mix swings to and fro every 40 s, and the planner has a plan for each side that is always 20 % better."""

    async def body(bench: Bench) -> None:
        bench.planner.proposals = [better(FLIP), better(BACK)] * 50
        for swing in range(40):
            bench.finish(1000, output=100 if swing % 2 else 200)
            await asyncio.sleep(40.0)

    bench = running(body, measure_s=300.0, settle_s=60.0)
    # 1,600 s and a change is measured 360 s after it: no other is made before.
    assert 1 <= len(bench.events("rebalanced")) <= 5
    times = [e.t for e in bench.recorder.events if e.kind == "rebalanced"]
    assert all(b - a >= 360.0 for a, b in itertools.pairwise(times))


def test_noise_below_the_drift_never_asks() -> None:
    async def body(bench: Bench) -> None:
        for swing in range(100):
            bench.finish(100, output=100 if swing % 2 else 110)
            await asyncio.sleep(20.0)

    assert running(body).planner.times("replan") == []


def test_nothing_is_touched_during_a_weight_update() -> None:
    async def body(bench: Bench) -> None:
        bench.planner.proposals = [better(FLIP)]
        slow = bench.engines["f0"].update_weights

        async def load(weights: WeightsRef) -> None:
            await asyncio.sleep(20.0)
            await slow(weights)

        bench.engines["f0"].update_weights = load  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(bench.gateway.update(WeightsRef(1, "v1"), lambda _: None))
            await asyncio.sleep(1.0)
            bench.rebalancer.notify("price change")
            await asyncio.sleep(18.0)
            assert bench.planner.times("replan") == [1.0], "it thinks meanwhile"
            assert set(bench.roles().values()) == {"engine"}
            assert bench.gateway.turns.router.routes == Routes()
            await asyncio.sleep(2.0)
        assert bench.roles()["e0"] == "prefill"

    bench = running(body)
    (event,) = [e for e in bench.recorder.events if e.kind == "rebalanced"]
    assert event.t == pytest.approx(20.0)


def test_moves_that_nobody_can_make_are_proposals() -> None:
    async def body(bench: Bench) -> None:
        bench.planner.proposals = [better(FLIP, START)]
        bench.rebalancer.notify("price change")
        await asyncio.sleep(1.0)

    bench = running(body)
    ((_, fields),) = bench.events("rebalance_proposed")
    assert fields["moves"] == "flip 1 × tp 1 on x: engine → prefill; start 1 × tp 1 on y: engine"
    assert set(bench.roles().values()) == {"engine"}, "what it predicts holds for all of it"


def test_a_fleet_makes_the_moves_and_then_the_routes_change() -> None:
    fleet = Fleet()

    async def body(bench: Bench) -> None:
        bench.planner.proposals = [better(FLIP, START)]
        bench.rebalancer.notify("price change")
        await asyncio.sleep(5.0)
        assert bench.roles()["e0"] == "prefill"
        assert bench.gateway.turns.router.routes == better().routes, "the new engine has a price before it serves"
        await bench.gateway.update(WeightsRef(1, "v1"), lambda _: None)
        assert asyncio.get_running_loop().time() == pytest.approx(5.0), "a start holds no update up"
        await asyncio.sleep(4.0)
        assert bench.planner.adopted == []
        await asyncio.sleep(2.0)

    bench = running(body, fleet=fleet)
    assert [m for _, m in fleet.moves] == [START]
    assert bench.planner.adopted == [better(FLIP, START)], "the planner prices the new plan from here on"
    assert bench.planner.seen[0].movable
    assert len(bench.events("rebalanced")) == 1
    broken = Fleet()
    broken.fails = True
    bench = running(lambda b: _fleet_fails(b), fleet=broken)
    assert bench.events("rebalanced") == []
    assert bench.planner.adopted == []
    assert bench.events("rebalance_failed")[0][1]["cause"] == "no such device"


async def _fleet_fails(bench: Bench) -> None:
    bench.planner.proposals = [better(START)]
    bench.rebalancer.notify("price change")
    await asyncio.sleep(1.0)


def test_a_pool_that_stays_down_asks_for_a_plan_and_so_does_its_return() -> None:
    async def body(bench: Bench) -> None:
        await asyncio.sleep(10.0)
        bench.gateway.lose(EngineId("f0"))
        await asyncio.sleep(40.0)
        assert bench.planner.times("replan") == [], "a restart takes less than a minute"
        await asyncio.sleep(60.0)
        shares = bench.gateway.registry.members["f0"].shares
        bench.gateway.join(bench.engines["f0"], version=0, shares=shares)
        await asyncio.sleep(60.0)

    bench = running(body)
    asked = [what for _, what in bench.planner.asked if what.startswith("replan")]
    assert asked == ["replan: pool y is down", "replan: pool y is back"]


def test_engines_that_the_flows_do_not_know_get_flows_at_the_next_look() -> None:
    async def body(bench: Bench) -> None:
        await asyncio.sleep(10.0)
        bench.gateway.lose(EngineId("f0"))
        await asyncio.sleep(31.0)
        shares = bench.gateway.registry.members["f0"].shares
        bench.gateway.join(bench.engines["f0"], version=0, shares=shares)
        await asyncio.sleep(45.0)

    assert running(body).planner.times("reflow") == [30.0, 45.0, 75.0]


def test_a_planner_that_fails_or_hangs_leaves_the_routes_as_they_are() -> None:
    async def body(bench: Bench) -> None:
        bench.planner.fails = True
        await asyncio.sleep(11.0)
        bench.planner.fails = False

        async def hang(observed: FleetObservation) -> Routes:
            await asyncio.sleep(1e6)
            return Routes()

        bench.planner.reprice = hang  # type: ignore[method-assign]
        await asyncio.sleep(100.0)

    bench = running(body)
    causes = [str(fields["cause"]) for _, fields in bench.events("rebalance_failed")]
    assert causes[0] == "ArithmeticError: the solver gave up"
    assert causes.count("ArithmeticError: the solver gave up") == 1, "once per cause, not at every look"
    assert any("waited 60.0 s for the planner: prices" in cause for cause in causes)
    assert bench.gateway.turns.router.routes == Routes()


def test_a_cause_is_told_again_once_the_planner_answered_in_between() -> None:
    async def body(bench: Bench) -> None:
        for fails in (True, False, True):
            bench.planner.fails = fails
            await asyncio.sleep(60.0)

    told = [subject for subject, _ in running(body).events("rebalance_failed")]
    assert sorted(told) == ["flows", "flows", "prices", "prices"]


def test_a_planner_that_cannot_say_is_not_a_planner_that_has_nothing_better() -> None:
    async def body(bench: Bench) -> None:
        async def none(observed: FleetObservation, reason: str) -> Proposal | None:
            raise RunFailed("no plan for this work on these engines: too much of it")

        bench.planner.replan = none  # type: ignore[method-assign]
        bench.rebalancer.notify("price change")
        await asyncio.sleep(1.0)

    bench = running(body)
    assert bench.events("rebalance_rejected") == []
    (failed,) = bench.events("rebalance_failed")
    assert failed == ("a plan", {"cause": "no plan for this work on these engines: too much of it"})


def test_a_cheaper_plan_at_the_same_rate_is_worth_its_dollars() -> None:
    cheap = replace(better(FLIP, now=1.0, after=1.0), usd_per_hour=(100.0, 80.0))
    assert worth_moving(cheap, 3600.0) == (
        True,
        "22.22 USD per 1,000 trajectories after 27.78: 20 USD saved in 3600 s for 0 USD lost",
    )
    assert worth_moving(replace(cheap, cost=700.0), 3600.0)[0], "700 trajectories at 100 USD per 3,600: 19.44 USD"
    assert worth_moving(replace(cheap, cost=730.0), 3600.0) == (
        False,
        "20 USD saved in 3600 s do not pay for 20.28 USD lost",
    )
    assert not worth_moving(replace(cheap, usd_per_hour=(100.0, 99.0)), 3600.0)[0], "noise"
    assert not worth_moving(replace(cheap, rate_after=0.5), 3600.0)[0], "cheap per hour, dear per trajectory"
    assert not worth_moving(replace(cheap, usd_per_hour=None), 3600.0)[0], "where only the rate counts"
    applied = running(lambda bench: _proposed(bench, cheap)).events("rebalanced")
    assert applied[0][1]["usd_per_hour_after"] == 80.0


async def _proposed(bench: Bench, proposal: Proposal) -> None:
    bench.planner.proposals = [proposal]
    bench.rebalancer.notify("price change")
    await asyncio.sleep(1.0)


def test_only_a_change_worth_telling_is_told() -> None:
    async def body(bench: Bench) -> None:
        for share in (0.50, 0.52, 0.53, 0.80):
            bench.planner.routes = Routes(shares={"a": {"x": share, "y": 1 - share}})
            await asyncio.sleep(30.0)

    told = [fields["change"] for _, fields in running(body).events("repriced")]
    assert told == ["a on x: 0% → 50%", "a on x: 53% → 80%"]
