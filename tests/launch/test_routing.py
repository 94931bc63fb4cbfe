"""Inputs of a run's router from the plan (placements, prices and predictions), and the planner behind it."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from placement.types import ROLLOUT_ROLES
from rollart.errors import RunFailed
from rollart.fleet import (
    DomainWork,
    EngineKind,
    EnginePlacement,
    EngineRole,
    FleetMoveKind,
    FleetObservation,
    KindLoad,
    Proposal,
    Routes,
)
from rollart.launch.plan import MIN_FINISHED, PlacementPlanner, placement_planner, rebalance_settings
from rollart.launch.routing import PlannedTurnModel, engine_placements, make_router, routes_of
from rollart.policy.routing import PREFILL_RULES
from rollart.settings.resolve import Resolved, resolve_files
from rollart.supervise.rebalance import worth_moving

Resolve = Callable[..., Resolved]

CLUSTER = """\
name: c
pools:
  - {name: big, device: H800, count: 8, devices_per_host: 8}
  - {name: wide, device: H20, count: 8}
  - {name: far, device: H20, count: 8}
links:
  - {a: big, b: wide, gb_per_s: 100, latency_ms: 2}
engines: {prefill: 2, decode: 3, device: H20, threads: 2}
trainer: {device: H800, threads: 4}
"""

RUN = """\
name: r
model:
  context: 4096
  config:
    {model_type: qwen3, vocab_size: 1000, hidden_size: 1024, intermediate_size: 3072, num_hidden_layers: 12,
     num_attention_heads: 16, num_key_value_heads: 8, head_dim: 64, tie_word_embeddings: false}
batch: {trajectories: 64}
domains:
  - name: chat
    environment: tests.envs:Lake
    max_tokens: 512
    profile: {turns: 4, first_tokens: 500, new_tokens: 100, output_tokens: 200}
"""

LOCAL = "name: l\npools: [{name: here, device: cpu, count: 3}]\nengines: {prefill: 1, decode: 1}\n"


@pytest.fixture
def resolve(tmp_path: Path) -> Resolve:
    def resolve(*overrides: str, cluster: str = CLUSTER) -> Resolved:
        (tmp_path / "r.yaml").write_text(RUN)
        (tmp_path / "c.yaml").write_text(cluster)
        return resolve_files(tmp_path / "r.yaml", tmp_path / "c.yaml", overrides)

    return resolve


def test_every_engine_has_a_seat_and_without_a_plan_there_are_no_prices(resolve: Resolve) -> None:
    resolved = resolve("placement.router=remote", "domains.chat.profile=", cluster=LOCAL)
    assert engine_placements(resolved) == {
        "prefill-0": EnginePlacement("here", "cpu", EngineRole.PREFILL, 1),
        "decode-0": EnginePlacement("here", "cpu", EngineRole.DECODE, 1),
    }
    made = make_router(resolved)
    assert (made.routes.prices, made.rule) == (None, PREFILL_RULES["remote"])
    assert placement_planner(resolved) is None
    assert rebalance_settings(resolved).baseline == {}


def test_affinity_is_what_this_cluster_has(resolve: Resolve) -> None:
    for wanted, found in (("wide", "wide"), ("H20", "H20"), ("H100", None)):
        made = make_router(resolve(f"hw_affinity={{default: {wanted}}}", "domains.chat.profile="))
        assert made.affinity.wants("chat") == found


@pytest.mark.slow
class TestPlanned:
    """Slow: each test solves a placement."""

    def test_prices_and_shares_are_the_plans(self, resolve: Resolve) -> None:
        resolved = resolve()
        found, problem = resolved.plan.placement, resolved.problem
        assert found is not None
        assert problem is not None
        routes = routes_of(problem, found)
        assert routes.prices is not None
        for (pool, role, tp), price in found.prices.deployments.items():
            assert routes.prices.engines[EngineKind(pool, EngineRole(role), tp)] == price
        assert sum(routes.shares["chat"].values()) == pytest.approx(1)
        assert set(routes.shares["chat"]) == {flow.pool for flow in found.flows}

    def test_predictions_are_of_the_same_model(self, resolve: Resolve) -> None:
        resolved = resolve()
        found, problem = resolved.plan.placement, resolved.problem
        assert found is not None
        assert problem is not None
        model = PlannedTurnModel.of(problem, found.deployments)
        pool = next(p for p in problem.pools if p.name == "wide")
        instance = problem.performance.instance(pool.device, 2)
        assert not isinstance(instance, str)
        prefill, decode = (EngineKind("wide", role, 2) for role in (EngineRole.PREFILL, EngineRole.DECODE))
        assert model.prefill_s(prefill, 700, 50) == instance.prefill_s(700, 50)
        batch = model.batch(decode)
        whole = model.prefill_s(decode, 700, 50) + model.decode_s(decode, 750, 200)
        assert whole == pytest.approx(instance.turn_s(batch, 700, 50, 200), rel=0.05), "the parts make the whole"
        gb = problem.performance.shape.kv_bytes(1000) / 1e9
        big = EngineKind("big", EngineRole.PREFILL, 2)
        assert model.kv_gb(1000) == gb
        assert model.handoff_s(big, decode, 1000) == pytest.approx(0.002 + gb / 100)
        assert model.handoff_s(big, EngineKind("far", EngineRole.DECODE, 2), 1000) == math.inf
        assert model.batch(EngineKind("wide", EngineRole.ENGINE, 2)) == max(
            b for k, b in model.batches.items() if k.pool == "wide"
        )

    def test_the_planner_follows_what_serves_and_what_is_measured(self, resolve: Resolve) -> None:
        resolved = resolve("placement.in_flight=4096", "cluster.engines.max_slots=512")
        made = placement_planner(resolved)
        assert made is not None
        found = resolved.plan.placement
        assert found is not None
        load = {
            kind: KindLoad(n, n, 0.0, 30.0)
            for kind, n in (
                (EngineKind(d.pool, EngineRole(d.role), d.tp), d.replicas)
                for d in found.deployments
                if d.role in ROLLOUT_ROLES
            )
        }
        observed = FleetObservation(work={}, load=load, rate=1.0, seconds=30.0)

        async def ask(planner: PlacementPlanner) -> None:
            repriced = await planner.reprice(observed)
            assert repriced == routes_of(resolved.problem, found), "at the planned batches, whatever is measured"
            same = await planner.reflow(observed)
            assert set(same.shares["chat"]) <= {"wide", "far"}
            # Four times the turns: the new plan is for that work, and may only change roles.
            work = {"chat": DomainWork(1.0, 16.0, 500, 100, 20, 0.0, MIN_FINISHED)}
            longer = await planner.replan(replace(observed, work=work), "drift")
            if longer is not None:
                assert await planner.reprice(observed) == same, "a proposal is no plan yet"
                planner.adopt(longer)
                assert await planner.reprice(observed) == longer.routes
                assert longer.router_only
                assert longer.rate_after >= longer.rate_now * (1 - 1e-4)
                assert longer.cost == 0
                assert all(move.kind is FleetMoveKind.FLIP for move in longer.moves)
            # A kind that is down takes no flow.
            down = {kind: replace(seen, healthy=0) for kind, seen in load.items() if kind.role is EngineRole.DECODE}
            with pytest.raises(RunFailed, match="no flows"):
                await planner.reflow(replace(observed, load=load | down))

        asyncio.run(ask(made))

    def test_only_an_applied_proposal_is_the_running_plan(
        self, resolve: Resolve, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        resolved = resolve()
        made, found = placement_planner(resolved), resolved.plan.placement
        assert made is not None
        assert found is not None
        other, new = replace(found, rate=2 * found.rate), Routes(shares={"chat": {"far": 1.0}})
        proposal = Proposal((), new, found.rate, other.rate)
        monkeypatch.setattr(made, "compute_plan", lambda observed: (proposal, other, new))
        observed = FleetObservation(work={}, load={}, rate=1.0, seconds=30.0)

        async def ask() -> None:
            before = await made.reprice(observed)
            assert await made.replan(observed, "drift") == proposal
            assert await made.reprice(observed) is before, "proposed, not applied"
            made.adopt(proposal)
            assert await made.reprice(observed) is new
            assert made.found is other
            made.adopt(Proposal((), Routes(), 1.0, 2.0))
            assert await made.reprice(observed) is new, "not one of its own"

        asyncio.run(ask())

    def test_no_plan_at_all_is_an_error(self, resolve: Resolve) -> None:
        made = placement_planner(resolve())
        assert made is not None
        with pytest.raises(RunFailed, match="no plan for this work"):
            asyncio.run(made.replan(FleetObservation(work={}, load={}, rate=0.0, seconds=0.0), "all pools are down"))

    def test_where_plans_are_to_be_cheap_a_proposal_says_what_it_saves(self, resolve: Resolve) -> None:
        prices = CLUSTER.replace("count: 8", "count: 8, price: 2")
        resolved = resolve("placement.objective=min_cost", "placement.rate=0.5", cluster=prices)
        made, found = placement_planner(resolved), resolved.plan.placement
        assert made is not None
        assert found is not None
        planned = [d for d in found.deployments if d.role in ROLLOUT_ROLES]
        load = {
            EngineKind(d.pool, EngineRole(d.role), d.tp): KindLoad(d.replicas, d.replicas, 0.0, 1.0) for d in planned
        }
        load[EngineKind("far", EngineRole.ENGINE, 2)] = KindLoad(2, 2, 0.0, 1.0)  # more than the plan needs
        observed = FleetObservation(work={}, load=load, rate=1.0, seconds=30.0, movable=True)
        cheaper = asyncio.run(made.replan(observed, "price change"))
        assert cheaper is not None
        assert cheaper.usd_per_hour is not None
        now, after = cheaper.usd_per_hour
        assert after < now
        assert any(move.kind is FleetMoveKind.DRAIN for move in cheaper.moves)
        assert worth_moving(cheaper, 36000.0)[0], worth_moving(cheaper, 36000.0)

    def test_a_solve_that_nobody_waits_for_is_not_joined_by_another(
        self, resolve: Resolve, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = placement_planner(resolve())
        assert made is not None
        begun, end = threading.Semaphore(0), threading.Event()

        def slow(observed: FleetObservation) -> None:
            begun.release()
            assert end.wait(60.0)

        monkeypatch.setattr(made, "compute_plan", slow)
        observed = FleetObservation(work={}, load={}, rate=1.0, seconds=30.0)

        async def ask() -> None:
            first = asyncio.ensure_future(made.replan(observed, "drift"))
            await asyncio.to_thread(begun.acquire)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            for asked in (made.replan(observed, "drift"), made.reflow(observed)):
                with pytest.raises(RunFailed, match="still computes"):
                    await asked
            end.set()
            assert made.computing is not None
            await made.computing
            assert await made.replan(observed, "drift") is None

        asyncio.run(ask())

    def test_too_few_trajectories_change_no_profile(self, resolve: Resolve) -> None:
        resolved = resolve()
        made = placement_planner(resolved)
        assert made is not None
        seen = DomainWork(1.0, 16.0, 5, 1, 2, 0.0, MIN_FINISHED - 1)
        observed = FleetObservation(work={"chat": seen}, load={}, rate=0.0, seconds=0.0)
        assert resolved.problem is not None
        assert made.updated_problem(observed).domains == resolved.problem.domains

    def test_rebalancing_may_be_off(self, resolve: Resolve) -> None:
        assert placement_planner(resolve("placement.rebalance={reprice_s: 0, flows_s: 0}")) is None
        settings = rebalance_settings(resolve("placement.rebalance.drift=0.3"))
        assert (settings.spec.drift, settings.baseline["chat"].turns) == (0.3, 4)
