"""The use of a path by a trajectory, recomputed from its definition: turn by turn, in plain loops that share only the
performance model with the solver."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from placement.architecture import shape_of
from placement.hardware import device
from placement.paths import MODES, Tableau, tableau
from placement.problem import (
    DomainProfile,
    EnvironmentCost,
    FunctionPrice,
    Problem,
    Quantity,
    RewardCost,
    TrainingConstants,
    TrainingWork,
)
from placement.roofline import Roofline, RooflinePerformance
from placement.solve import solve
from placement.types import Device, KvMode, Link, Placement, Pool, Role
from tests.placement.fakes import FakePerformance, FakeShape
from tests.placement.fleet import QWEN3_8B

Q = Quantity
WITHIN = 0.01
ENDS = (("p0", "p0"), ("p0", "p1"), ("p1", "p1"))


@dataclass(frozen=True)
class Turn:
    """One turn: tokens in the cache before it, computed by its prefill, generated. `share` of the trajectories take
    it, and `followed` of them take another."""

    number: int
    share: float
    followed: float
    cached: float
    new: float
    output: float

    @property
    def prompt(self) -> float:
        return self.cached + self.new

    @property
    def after(self) -> float:
        return self.prompt + self.output


def turns(domain: DomainProfile) -> Iterator[Turn]:
    """A mean of 7.5 turns: half of the trajectories end after 7, half after 8. Without an observation a turn still
    computes one token, the last that was sampled."""
    output, context, left, number = domain.output_tokens.mean, 0.0, domain.turns.mean, 1
    while left > 1e-9:
        observed = domain.prompt.mean if number == 1 else domain.new_tokens.mean
        cached = domain.prompt.mean * domain.shared_prefix if number == 1 else context
        new = max(1.0, context + observed - cached)
        yield Turn(number, min(1.0, left), min(1.0, max(0.0, left - 1)), cached, new, output)
        context, left, number = context + observed + output, left - 1, number + 1


@dataclass
class Cost:
    """Of one trajectory: instance-seconds and GB·s of KV where it decodes, and where it prefills; GB moved; seconds."""

    load: float = 0.0
    kv: float = 0.0
    first_load: float = 0.0
    first_kv: float = 0.0
    moved: float = 0.0
    seconds: float = 0.0


def outside(domain: DomainProfile) -> float:
    """Seconds of a trajectory outside of engines: reset, an environment step after each turn, the score."""
    waits = sum(t.share * domain.environment.wait_s for t in turns(domain))
    return domain.environment.reset_s + waits + (domain.reward.seconds if domain.reward else 0.0)


def aggregated(problem: Problem, domain: DomainProfile, model: Roofline, batch: float, drop: bool) -> Cost:
    """One instance does all, `batch` turns at a time; `drop`: it forgets all but the shared prefix after each turn."""
    cost, prefix = Cost(seconds=outside(domain)), domain.prompt.mean * domain.shared_prefix
    for t in turns(domain):
        cached = prefix if drop else t.cached
        work = model.turn_s(batch, t.prompt - cached, cached, t.output)
        in_turn = work * batch  # `batch` turns share the instance
        cost.load += t.share * work
        cost.seconds += t.share * in_turn
        cost.kv += t.share * in_turn * gigabytes(problem, t.prompt + t.output / 2)
        if not drop:
            cost.kv += t.followed * domain.environment.wait_s * gigabytes(problem, t.after)
    return cost


def divided(
    problem: Problem,
    domain: DomainProfile,
    first: Roofline,
    last: Roofline,
    batch: float,
    link: Link,
    pull: bool,
) -> Cost:
    """`first` prefills, one prompt at a time; `last` decodes `batch` sequences at a time, of which each is at some turn
    and some token of it. `pull`: `first` forgets all but the shared prefix when it has handed over."""
    cost, prefix = Cost(seconds=outside(domain)), domain.prompt.mean * domain.shared_prefix
    steps = sum(t.share * t.output for t in turns(domain))
    context = sum(t.share * t.output * (t.prompt + t.output / 2) for t in turns(domain)) / steps
    step = last.decode_step_s(batch, context)
    for t in turns(domain):
        prefill, decode = first.prefill_s(t.new, t.cached), t.output * step
        sent = gigabytes(problem, t.prompt) - gigabytes(problem, t.cached)
        back, transfers = 0.0, 1
        if t.number > 1:
            known = prefix if pull else t.cached - t.output  # the prefix on `first` from the turn before
            back, transfers = gigabytes(problem, t.cached) - gigabytes(problem, known), 2
        moving = (sent + back) / link.gb_per_s + transfers * link.latency_s
        cost.first_load += t.share * prefill
        cost.load += t.share * decode / batch
        cost.moved += t.share * (sent + back)
        cost.seconds += t.share * (prefill + moving + decode)
        prompt, wait = gigabytes(problem, t.prompt), t.followed * domain.environment.wait_s
        after, middle = gigabytes(problem, t.after), gigabytes(problem, t.prompt + t.output / 2)
        cost.kv += t.share * ((prefill + moving) * prompt + decode * middle) + wait * after
        cost.first_kv += t.share * (prefill + moving) * prompt
        if not pull:  # a turn that is known to be the last leaves nothing behind
            cost.first_kv += (t.followed if domain.last_turn_known else t.share) * decode * prompt + wait * after
    return cost


def gigabytes(problem: Problem, tokens: float) -> float:
    return problem.performance.shape.kv_bytes(tokens) / 1e9


def cost_of(problem: Problem, table: Tableau, k: int) -> Cost:
    paths = table.paths
    domain, mode = problem.domains[paths.domain[k]], MODES[paths.mode[k]]
    last, batch = table.units[paths.unit[k]].model, float(paths.batch[k])
    if paths.first[k] < 0:
        return aggregated(problem, domain, last, batch, mode is KvMode.RECOMPUTE)
    ends = {problem.pools[table.units[u].pool].name for u in (paths.first[k], paths.unit[k])}
    link = next(x for x in problem.links if {x.a, x.b} == ends)
    return divided(problem, domain, table.units[paths.first[k]].model, last, batch, link, mode is KvMode.PULL)


def performance(r: random.Random) -> tuple[RooflinePerformance, list[Device]]:
    """The fake with random devices, or the roofline with those of the catalogue."""
    if r.random() < 0.5:
        shape = FakeShape(kv=r.choice([5e4, 2e5]))
        devices = [Device(f"g{i}", r.uniform(50, 1000), r.choice([80.0, 141.0]), r.uniform(0.3, 5)) for i in range(2)]
        return FakePerformance(shape), devices
    return RooflinePerformance(shape_of(QWEN3_8B)), [device(n) for n in r.sample(["H20", "H800", "A100-80", "B200"], 2)]


def domain(r: random.Random, name: str) -> DomainProfile:
    count = r.choice([1.0, 1.4, 2.0, 4.0, 7.5, 8.5, 20.0, 50.0])
    return DomainProfile(
        name,
        Q(count),
        Q(r.choice([0.0, 40.0, 300.0, 1500.0])),
        Q(r.uniform(20, 4000 / count)),
        r.uniform(0.2, 3),
        first_tokens=Q(r.uniform(100, 3000)),
        shared_prefix=r.choice([0.0, 0.4]),
        environment=EnvironmentCost(r.choice([0.0, 0.5, 30.0]), reset_s=r.choice([0.0, 3.0])),
        reward=r.choice([None, RewardCost(2.0)]),
    )


def problem_of(seed: int) -> Problem:
    r = random.Random(seed)
    model, devices = performance(r)
    pools = tuple(Pool(f"p{i}", d, 4, 1.0 + i, rented=True) for i, d in enumerate(devices))
    links = [Link(a, b, r.choice([0.05, 1.0, 50.0]), r.choice([0, 0.01])) for a, b in ENDS]
    return Problem(
        pools,
        (domain(r, "d0"), domain(r, "d1")),
        model,
        tuple(links),
        tensor_parallel=(1, 2),
        max_batch=256,
        in_flight=r.choice([None, 64, 1000]),
    )


@pytest.mark.parametrize("seed", range(40))
def test_every_path_costs_what_its_turns_cost(seed: int) -> None:
    problem = problem_of(seed)
    table = tableau(problem)
    some = random.Random(seed).sample(range(len(table.paths)), min(40, len(table.paths)))
    assert some, "a problem without paths tests nothing"
    for k in some:
        mine = {name: float(getattr(table.paths, name)[k]) for name in ("load", "kv", "first_load", "first_kv")}
        mine |= {"moved": float(table.paths.link_gb[k]), "seconds": float(table.paths.seconds[k])}
        assert mine == pytest.approx(dataclasses.asdict(cost_of(problem, table, k)), rel=WITHIN), k


def test_the_sample_has_all_modes() -> None:
    seen = set()
    for seed in range(10):
        paths = tableau(problem_of(seed)).paths
        seen |= {(MODES[m], bool(first >= 0)) for m, first in zip(paths.mode, paths.first, strict=True)}
    assert seen == {(KvMode.KEEP, False), (KvMode.RECOMPUTE, False), (KvMode.KEEP, True), (KvMode.PULL, True)}


def test_long_observations_after_a_short_first_prompt() -> None:
    long = DomainProfile("long", Q(10), Q(4000), Q(50), first_tokens=Q(100))
    problem = dataclasses.replace(
        problem_of(1),
        domains=(long,),
        performance=RooflinePerformance(shape_of(QWEN3_8B)),
        pools=(Pool("p0", device("H20"), 1),),
        links=(),
    )
    table = tableau(problem)
    for k in range(len(table.paths)):
        assert float(table.paths.load[k]) == pytest.approx(cost_of(problem, table, k).load, rel=WITHIN)


@dataclass
class Use:
    """The load of a plan's flows on one deployment."""

    load: float = 0.0
    kv: float = 0.0


@pytest.mark.parametrize("seed", range(30))
def test_a_plan_uses_what_its_flows_cost(seed: int) -> None:
    """With one batch size a flow is one path, so that all figures of a plan's parts follow from the turns."""
    # Every third divided throughout, every third short of trajectories in flight.
    roles = frozenset({Role.PREFILL, Role.DECODE}) if seed % 3 == 0 else frozenset(Role)
    asked = problem_of(seed)
    asked = dataclasses.replace(asked, max_batch=1, roles=roles, in_flight=5 if seed % 3 == 1 else asked.in_flight)
    found = solve(asked)
    assert isinstance(found, Placement), found
    uses = {(d.pool, d.role, d.tp): Use() for d in found.deployments}
    domains, pools = {d.name: d for d in asked.domains}, {p.name: p for p in asked.pools}
    moved: dict[tuple[str, str], float] = {}
    for flow in found.flows:
        last, work = asked.performance.instance(pools[flow.pool].device, flow.tp), domains[flow.domain]
        assert not isinstance(last, str)
        if flow.prefill_pool is None or flow.prefill_tp is None:
            cost = aggregated(asked, work, last, 1.0, flow.kv is KvMode.RECOMPUTE)
            use = uses[flow.pool, Role.ENGINE, flow.tp]
        else:
            key = (min(flow.pool, flow.prefill_pool), max(flow.pool, flow.prefill_pool))
            link = next(x for x in asked.links if (x.a, x.b) == key)
            first = asked.performance.instance(pools[flow.prefill_pool].device, flow.prefill_tp)
            assert not isinstance(first, str)
            cost = divided(asked, work, first, last, 1.0, link, flow.kv is KvMode.PULL)
            moved[key] = moved.get(key, 0.0) + flow.rate * cost.moved
            use = uses[flow.pool, Role.DECODE, flow.tp]
            other = uses[flow.prefill_pool, Role.PREFILL, flow.prefill_tp]
            other.load, other.kv = other.load + flow.rate * cost.first_load, other.kv + flow.rate * cost.first_kv
        use.load, use.kv = use.load + flow.rate * cost.load, use.kv + flow.rate * cost.kv
        assert flow.seconds == pytest.approx(cost.seconds, rel=WITHIN)
    for d in found.deployments:
        model, use = asked.performance.instance(pools[d.pool].device, d.tp), uses[d.pool, d.role, d.tp]
        assert not isinstance(model, str)
        assert d.utilisation == pytest.approx(use.load / d.replicas, rel=WITHIN, abs=1e-6)
        assert d.kv_utilisation == pytest.approx(use.kv / d.replicas / (model.kv_capacity_bytes / 1e9), rel=WITHIN)
    for link in asked.links:
        used = moved.get((link.a, link.b), 0.0)
        assert used <= link.gb_per_s * (1 + WITHIN)
        if found.prices.links[link.a, link.b] * link.gb_per_s > 1e-6 * found.rate:
            assert used == pytest.approx(link.gb_per_s, rel=WITHIN)
    under_way = sum(f.rate * f.seconds for f in found.flows)
    assert under_way <= asked.trajectories_in_flight * (1 + WITHIN)
    if found.prices.in_flight:
        assert under_way == pytest.approx(asked.trajectories_in_flight, rel=WITHIN)


@pytest.mark.parametrize(("seconds_per_step", "measured"), [(0.0, None), (30.0, None), (2.0, 3e-5)])
def test_the_trainer_takes_what_it_can_train(seconds_per_step: float, measured: float | None) -> None:
    """The rate of a plan that its trainer bounds is a batch per step, of all tokens of its trajectories."""
    base = problem_of(3)
    train = TrainingWork(
        64,
        epochs=2,
        pool="p0",
        devices=2,
        bytes_per_parameter=2.0,
        recompute=False,
        constants=TrainingConstants(mfu=0.3, overlap=1.0),
        seconds_per_step=seconds_per_step,
        seconds_per_token=measured,
    )
    bound = dataclasses.replace(
        base,
        train=train,
        in_flight=10**6,
        performance=FakePerformance(),
        pools=(
            Pool("p0", Device("slow", 2.0 if measured is None else 400.0, 80.0, 2.0), 4),
            Pool("p1", device("B200"), 64),
        ),
    )
    found = solve(bound)
    assert isinstance(found, Placement), found
    assert found.binds[0] == "the trainer"
    shares = sum(d.weight for d in bound.domains)
    step = seconds_per_step
    for d in bound.domains:
        tokens = list(turns(d))[-1].after if d.turns.mean == int(d.turns.mean) else d.total_tokens
        flops = bound.performance.shape.train_flops(tokens, tokens / 2)
        once = flops / (0.3 * 2.0e12) if measured is None else measured * tokens
        step += 64 * d.weight / shares * 2 * once / 2  # two epochs on two devices
    assert found.rate == pytest.approx(64 / step, rel=WITHIN)


def test_rewards_and_environments_take_cores() -> None:
    """Cores busy: trajectories/s × seconds of scoring, and × turns × seconds of an environment step."""
    work = DomainProfile("d", Q(4), Q(100), Q(200), environment=EnvironmentCost(core_s=0.5), reward=RewardCost(3.0, 2))
    asked = dataclasses.replace(
        problem_of(1),
        domains=(work,),
        performance=FakePerformance(FakeShape(), refuse={"cpu": "no GPU"}),
        links=(),
        pools=(Pool("p0", device("H20"), 2), Pool("cores", Device("cpu"), 4000)),
        tensor_parallel=(1,),
        in_flight=None,
    )
    found = solve(asked)
    assert isinstance(found, Placement), found
    (scoring,), (environments,) = found.of(Role.REWARD), found.of(Role.ENVIRONMENT)
    assert scoring.tp == 2
    assert scoring.utilisation == pytest.approx(found.rate * 3.0 / scoring.replicas)
    assert environments.utilisation == pytest.approx(found.rate * sum(0.5 for _ in turns(work)) / environments.replicas)
    price = FunctionPrice("f", usd_per_gb_s=1e-6, usd_per_core_s=2e-6, usd_per_million_requests=0.4)
    called = solve(dataclasses.replace(asked, pools=asked.pools[:1], functions=price))
    assert isinstance(called, Placement), called
    each = 3.0 * 0.5 * 1e-6 + 3.0 * 2 * 2e-6 + 0.4e-6
    assert called.usd_per_hour == pytest.approx(called.rate * 3600 * each)  # the GPUs are free here


@pytest.mark.parametrize("seed", range(12))
def test_single_turns_reach_the_best_division_of_prefill_and_decode(seed: int) -> None:
    """Every batch size tried in turn, where the prefill side gives its KV up with the hand-over."""
    r = random.Random(seed)
    prompt = r.choice([(16_000, 1000), (30_000, 2000), (4000, 4000), (1000, 8000)])
    work = DomainProfile("d", Q(1), Q(0), Q(float(prompt[1])), first_tokens=Q(float(prompt[0])), max_turns=1)
    link = Link("p", "d", r.choice([5.0, 50.0]))
    pools = (Pool("p", device("H800"), r.randint(1, 6)), Pool("d", device(r.choice(["H20", "H200"])), r.randint(1, 8)))
    asked = Problem(
        pools,
        (work,),
        RooflinePerformance(shape_of(QWEN3_8B)),
        (link,),
        tensor_parallel=(1,),
        max_batch=256,
        roles=frozenset({Role.PREFILL, Role.DECODE}),
    )
    found = solve(asked)
    assert isinstance(found, Placement), found

    def most(first: Pool, last: Pool, batch: int) -> float:
        a, b = asked.performance.instance(first.device, 1), asked.performance.instance(last.device, 1)
        assert not isinstance(a, str)
        assert not isinstance(b, str)
        cost = divided(asked, work, a, b, float(batch), link, pull=True)
        room = [x.kv_capacity_bytes / 1e9 for x in (a, b)]
        if batch * gigabytes(asked, prompt[0] + prompt[1] / 2) > room[1]:
            return 0.0
        return min(
            asked.utilisation * first.count / cost.first_load,
            asked.utilisation * last.count / cost.load,
            room[0] * first.count / cost.first_kv,
            room[1] * last.count / cost.kv,
            link.gb_per_s / cost.moved,
        )

    best = max(most(x, y, 2**i) for x, y in (pools, pools[::-1]) for i in range(9))
    assert found.rate >= best * (1 - 1e-3)


def test_a_last_turn_that_is_not_known_is_kept_for() -> None:
    """Episodes of one turn that might have taken four: only those whose KV is pulled back leave the prefill side."""
    known = DomainProfile("d", Q(1), Q(0), Q(1000), first_tokens=Q(16_000), max_turns=1)
    assert known.last_turn_known
    assert not dataclasses.replace(known, max_turns=4).last_turn_known
    assert dataclasses.replace(known, turns=Q(4), max_turns=4).last_turn_known
    assert not dataclasses.replace(known, turns=Q(3.5), max_turns=4).last_turn_known
    assert not dataclasses.replace(known, turns=Q(4), max_turns=None).last_turn_known
