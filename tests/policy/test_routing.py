"""Which path a turn takes: prices, rules, affinity, shares, ties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.types import ROLLOUT_ROLES
from rollart.fleet import EngineKind, EnginePlacement, EngineRole, RoutePrices, Routes
from rollart.policy.routing import (
    DYNAMO_TOKENS,
    MARGIN,
    PREFILL_RULES,
    UNCACHED_TOKENS,
    EngineLoad,
    EngineView,
    HardwareAffinity,
    PathPricing,
    PrefillChoice,
    RoutingPolicy,
    TurnView,
    choose_engine,
    route,
)
from tests.policy.models import LinearModel

P = EnginePlacement("fast", "H800", EngineRole.PREFILL)
D = EnginePlacement("wide", "H20", EngineRole.DECODE)


def view(name: str, seat: EnginePlacement = D, **more: object) -> EngineView:
    figures: dict[str, object] = {"running": 0, "sessions": 0, "healthy": True, "version": 0} | more
    return EngineView(name, seat=seat, **figures)  # type: ignore[arg-type]


def priced(
    d: float = 1.0, p: float = 1.0, *, in_flight: float = 0.0, link: float = 0.0, **model: float
) -> RoutingPolicy:
    prices = RoutePrices({D.kind: d, P.kind: p}, links={("fast", "wide"): link}, in_flight=in_flight, target_s=5.0)
    return RoutingPolicy(Routes(prices, LinearModel(**model)))


names = st.sampled_from([f"e{i}" for i in range(5)])
seats = st.builds(
    EnginePlacement,
    pool=st.sampled_from(["a", "b"]),
    role=st.sampled_from(list(EngineRole)),
    tp=st.sampled_from([1, 2]),
)
views = st.lists(
    st.builds(
        EngineView,
        id=names,
        running=st.integers(0, 5),
        sessions=st.integers(0, 5),
        healthy=st.booleans(),
        version=st.integers(0, 1),
        seat=seats,
        backlog_s=st.floats(0, 50),
        cached=st.integers(0, 3000),
        fill=st.sampled_from([0.0, 0.25, 0.5]),
    ),
    max_size=5,
    unique_by=lambda v: v.id,
)
turns = st.builds(
    TurnView,
    tokens=st.integers(1, 5000),
    output=st.floats(1, 500),
    domain=st.sampled_from(["x", "y"]),
    was_remote=st.none() | st.booleans(),
    returns=st.booleans(),
    no_handoff=st.booleans(),
)
kinds = [EngineKind(p, r, t) for p in "ab" for r in ROLLOUT_ROLES for t in (1, 2)]
routes_ = st.just(Routes()) | st.builds(
    lambda prices, in_flight, shares: Routes(
        RoutePrices(dict(zip(kinds, prices, strict=True)), in_flight=in_flight), LinearModel(), shares
    ),
    st.lists(st.floats(0, 10), min_size=len(kinds), max_size=len(kinds)),
    st.floats(0, 1),
    st.just({}) | st.just({"x": {"a": 0.3, "b": 0.7}}),
)
routers = st.builds(
    RoutingPolicy,
    routes_,
    st.just(HardwareAffinity()) | st.just(HardwareAffinity({"x": "a"})),
    st.sampled_from(list(PREFILL_RULES.values())),
)


@given(views, turns, routers, st.none() | names, st.integers(0, 1))
def test_every_path_is_fenced_sticky_and_found(
    engines: list[EngineView], turn: TurnView, router: RoutingPolicy, sticky: str | None, version: int
) -> None:
    """Whatever the load, rule, prices and roles: a path exists when any engine could serve, both of its engines are
    healthy and of the version, home stays home, and the order of the engines means nothing."""
    path = route(engines, turn, router, sticky=sticky, version=version)
    eligible = {e.id: e for e in engines if e.healthy and e.version == version}
    serving = {i: e for i, e in eligible.items() if e.seat.role is not EngineRole.PREFILL} or eligible
    assert path == route(list(reversed(engines)), turn, router, sticky=sticky, version=version)
    if path is None:
        assert not eligible
        return
    assert path.decode in serving
    if sticky in serving:
        assert path.decode == sticky
    elif router.affinity.wants(turn.domain) in {e.seat.pool for e in serving.values()}:
        assert serving[path.decode].seat.pool == router.affinity.wants(turn.domain)
    if path.prefill is not None:
        assert not turn.no_handoff
        assert eligible[path.prefill].seat.role is EngineRole.PREFILL
        assert path.prefill != path.decode


@given(views, st.integers(0, 1), st.sampled_from(list(PREFILL_RULES.values())))
def test_without_prices_roles_or_wishes_it_is_the_least_loaded_engine(
    engines: list[EngineView], version: int, chosen: object
) -> None:
    plain = [e._replace(seat=EnginePlacement(e.seat.pool, tp=e.seat.tp), backlog_s=0.0) for e in engines]
    path = route(plain, TurnView(100), RoutingPolicy(rule=chosen), sticky=None, version=version)  # type: ignore[arg-type]
    assert (None if path is None else path.decode) == choose_engine(plain, version=version)
    assert path is None or path.prefill is None


def test_the_cheaper_path_is_taken_and_backlog_makes_a_path_dear() -> None:
    """1,000 tokens cost 1 s of engine wherever; 100 of link. λ of decode twice that of prefill: remote."""
    router = priced(d=2.0, p=1.0)
    turn = TurnView(1000, output=10)
    path = route([view("d"), view("p", P)], turn, router, sticky="d", version=0)
    assert path is not None
    assert (path.prefill, path.why) == ("p", "remote")
    # λ·(1 + backlog/5 s): at 5 s both cost the same (local, one engine less), beyond it local is cheaper.
    for backlog, expected in ((4.9, "p"), (5.0, None), (20.0, None)):
        path = route([view("d"), view("p", P, backlog_s=backlog)], turn, router, sticky="d", version=0)
        assert path is not None
        assert path.prefill == expected, backlog


def test_a_slack_engine_is_free_until_it_has_a_backlog() -> None:
    tariff = priced(d=2.0, p=0.0).routes
    assert tariff.prices is not None
    assert tariff.model is not None
    both = PathPricing(tariff.prices, tariff.model)
    assert both.second(EngineLoad(P.kind)) == 0.0
    assert both.second(EngineLoad(P.kind, backlog_s=5.0)) == pytest.approx(0.05 * 2.0)
    assert both.second(EngineLoad(D.kind, backlog_s=5.0)) == pytest.approx(4.0)


def test_nothing_scarce_means_that_time_decides() -> None:
    router = priced(d=0.0, p=0.0)
    engines = [view("d", backlog_s=0.0), view("p", P)]
    path = route(engines, TurnView(1000), router, sticky="d", version=0)
    assert path is not None
    assert path.prefill is None, "the same seconds plus a hand-off"
    assert router.tariff is not None
    assert not router.tariff.scarce


def test_an_expensive_link_keeps_a_turn_home() -> None:
    turn, engines = TurnView(1000, output=1), [view("d"), view("p", P)]
    cheap = route(engines, turn, priced(d=2.0, link=0.0), sticky="d", version=0)
    dear = route(engines, turn, priced(d=2.0, link=2000.0), sticky="d", version=0)
    assert cheap is not None
    assert dear is not None
    assert (cheap.prefill, dear.prefill) == ("p", None)


def test_hysteresis_changes_sides_only_for_more_than_the_margin() -> None:
    near, far = 1.0 - MARGIN / 2, 1.0 - 2 * MARGIN
    decide = PREFILL_RULES["priced"]
    assert decide(PrefillChoice(1000, 1000, local=1.0, remote=near))
    assert not decide(PrefillChoice(1000, 1000, local=1.0, remote=near, was_remote=False))
    assert decide(PrefillChoice(1000, 1000, local=1.0, remote=far, was_remote=False))
    assert decide(PrefillChoice(1000, 1000, local=near, remote=1.0, was_remote=True))
    assert not decide(PrefillChoice(1000, 1000, local=far, remote=1.0, was_remote=True))
    assert not decide(PrefillChoice(1000, 1000, local=1.0, remote=1.0)), "equal: local"


@given(st.lists(st.floats(0.95, 1.05), min_size=2, max_size=50))
def test_noise_within_the_margin_never_flips_a_trajectory(noise: list[float]) -> None:
    side: bool | None = None
    seen = []
    for factor in noise:
        side = PREFILL_RULES["priced"](PrefillChoice(1000, 1000, local=1.0, remote=factor, was_remote=side))
        seen.append(side)
    assert len(set(seen)) == 1


def test_the_fixed_thresholds_are_those_of_their_routers() -> None:
    dynamo, vllm = PREFILL_RULES["dynamo"], PREFILL_RULES["vllm_router"]
    assert dynamo(PrefillChoice(tokens=1500, uncached=1500)), "a first turn: all of it is uncached"
    assert not dynamo(PrefillChoice(tokens=8000, uncached=DYNAMO_TOKENS - 1))
    assert dynamo(PrefillChoice(tokens=8000, uncached=DYNAMO_TOKENS))
    assert not vllm(PrefillChoice(tokens=8000, uncached=UNCACHED_TOKENS))
    assert vllm(PrefillChoice(tokens=8000, uncached=UNCACHED_TOKENS + 1))
    assert PREFILL_RULES["remote"](PrefillChoice(1, 0))
    assert not PREFILL_RULES["local"](PrefillChoice(9000, 9000))


def test_the_prefill_engine_is_chosen_by_prefix_then_backlog_then_id() -> None:
    router = RoutingPolicy(rule=PREFILL_RULES["remote"])
    turn = TurnView(1000)

    def chosen(*prefills: EngineView) -> str | None:
        path = route([view("d"), *prefills], turn, router, sticky="d", version=0)
        assert path is not None
        return path.prefill

    assert chosen(view("p", P, backlog_s=9.0, cached=800), view("q", P)) == "p"
    assert chosen(view("p", P, backlog_s=9.0), view("q", P)) == "q"
    assert chosen(view("q", P), view("p", P)) == "p"
    # With prices a long queue outweighs the prefix: 800 cached tokens save 0.8 s, 60 s of backlog cost more.
    path = route(
        [view("d", cached=0), view("p", P, backlog_s=60.0, cached=800), view("q", P)],
        turn,
        priced(d=4.0),
        sticky="d",
        version=0,
    )
    assert path is not None
    assert path.prefill == "q"


def test_tied_homes_are_given_out_by_the_planned_shares() -> None:
    """Two pools at the same price: the shares decide; at a price apart by more than the margin, the price does."""
    a, b = EnginePlacement("a"), EnginePlacement("b")
    shares = {"x": {"a": 0.25, "b": 0.75}}

    def given_out(price_b: float) -> dict[str, int]:
        prices = RoutePrices({a.kind: 1.0, b.kind: price_b})
        router = RoutingPolicy(Routes(prices, LinearModel(), shares))
        assignments: dict[str, int] = {}
        for _ in range(100):
            path = route(
                [view("e0", a), view("e1", b)],
                TurnView(100, domain="x"),
                router,
                sticky=None,
                version=0,
                assignments=assignments,
            )
            assert path is not None
            pool = "a" if path.decode == "e0" else "b"
            assignments[pool] = assignments.get(pool, 0) + 1
        return assignments

    assert given_out(1.0) == {"a": 25, "b": 75}
    assert given_out(1.0 + MARGIN / 2) == {"a": 25, "b": 75}
    assert given_out(2.0) == {"a": 100}


@given(
    st.dictionaries(st.sampled_from("abcd"), st.floats(0.02, 1.0), min_size=2, max_size=4),
    st.sets(st.sampled_from("abcd"), min_size=1, max_size=3),
)
def test_what_a_pool_that_is_down_would_take_goes_to_the_others_by_their_shares(
    weights: dict[str, float], up: set[str]
) -> None:
    """However large its share was. Pools that the plan does not use get equal parts where no other is up. A bound of
    the rule: with n pools each is within n of its part at any time."""
    whole = sum(weights.values())
    shares = {pool: weight / whole for pool, weight in weights.items()}
    router = RoutingPolicy(Routes(shares={"x": shares}))
    engines = [view(f"e-{pool}", EnginePlacement(pool), healthy=pool in up) for pool in "abcd"]
    assignments = {pool: 1000 for pool in "abcd" if pool not in up}
    rounds = 60
    for _ in range(rounds):
        path = route(engines, TurnView(100, domain="x"), router, sticky=None, version=0, assignments=assignments)
        assert path is not None
        assignments[path.decode[2:]] = assignments.get(path.decode[2:], 0) + 1
    there = sum(shares.get(pool, 0.0) for pool in up)
    for pool in up:
        expected = rounds * (shares.get(pool, 0.0) / there if there else 1 / len(up))
        assert abs(assignments.get(pool, 0) - expected) <= len(up), (pool, assignments)


def test_without_prices_shares_alone_place_homes() -> None:
    router = RoutingPolicy(Routes(shares={"x": {"a": 0.5, "b": 0.5}}))
    assignments = {"a": 3}
    engines = [view("e0", EnginePlacement("a")), view("e1", EnginePlacement("b"), running=4)]
    path = route(engines, TurnView(10, domain="x"), router, sticky=None, version=0, assignments=assignments)
    assert path is not None
    assert path.decode == "e1"


def test_affinity_ranks_the_wish_then_the_order_then_the_rest() -> None:
    affinity = HardwareAffinity({"lake": "H800"}, default="h20", order=("l40",))
    seats = {
        name: EnginePlacement(pool, device)
        for name, pool, device in (
            ("a", "big", "H800"),
            ("b", "h20", "H20"),
            ("c", "l40", "L40S"),
            ("d", "rest", "A100"),
        )
    }
    assert [affinity.rank("lake", seats[n]) for n in "abcd"] == [0, 2, 1, 2]
    assert [affinity.rank("math", seats[n]) for n in "abcd"] == [2, 0, 1, 2]
    assert HardwareAffinity({"lake": "H800"}).wants("math") is None
    assert HardwareAffinity({"default": "H800"}).wants("math") is None, "a domain may have that name"
    assert not HardwareAffinity()


def test_a_role_that_the_plan_lacks_costs_what_its_devices_do() -> None:
    """An engine was flipped: a kind without a price must not attract every turn as if it were free."""
    tariff = PathPricing(RoutePrices({D.kind: 2.0, P.kind: 3.0}), LinearModel())
    assert tariff.second(EngineLoad(D.kind._replace(role=EngineRole.ENGINE))) == 2.0
    assert tariff.second(EngineLoad(EngineKind("elsewhere", EngineRole.ENGINE, 1))) == 0.0, "the plan does not need it"


@pytest.mark.parametrize("name", sorted(PREFILL_RULES))
@pytest.mark.parametrize("price", [0.0, 1.0])
def test_nothing_is_handed_over_where_nothing_connects(name: str, price: float) -> None:
    class Apart(LinearModel):
        def handoff_s(self, source: EngineKind, target: EngineKind, tokens: float) -> float:
            return float("inf")

    router = RoutingPolicy(Routes(RoutePrices({D.kind: price}), Apart()), rule=PREFILL_RULES[name])
    for sticky in ("d", None):
        path = route([view("d"), view("p", P)], TurnView(5000), router, sticky=sticky, version=0)
        assert path is not None
        assert path.prefill is None


def test_one_kind_of_engine_needs_no_prices() -> None:
    assert priced().plain(1)
    assert not priced().plain(2)
    assert RoutingPolicy().plain(3)
    assert not RoutingPolicy(affinity=HardwareAffinity({"x": "a"})).plain(1)


def test_trajectories_spread_over_prefill_engines_that_stand_idle_in_between() -> None:
    first, second, router = (
        view("p0", P, sessions=7),
        view("p1", P, sessions=6),
        RoutingPolicy(rule=PREFILL_RULES["remote"]),
    )
    found = route([view("d"), first, second], TurnView(100), router, sticky=None, version=0)
    assert found is not None
    assert found.prefill == "p1"
    warm = route([view("d"), first._replace(cached=50), second], TurnView(100), router, sticky="d", version=0)
    assert warm is not None
    assert warm.prefill == "p0", "its KV lies there"
