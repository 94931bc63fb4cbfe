"""Reward models on GPUs of a provider: planned, priced, batched and scaled to zero like every other function."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from placement.problem import DomainProfile, RewardCost
from placement.result import idle_containers
from placement.types import Role
from rollart.errors import SpecError
from rollart.ledger.reader import LedgerReader
from rollart.report.functions import lines
from rollart.report.profile import profiles_of
from rollart.report.rows import collect
from rollart.settings.functions import FunctionRelease
from rollart.settings.planning import Specs
from rollart.settings.resolve import Resolved, forecast, read_specs
from rollart.tools.simulate import function_behaviours, simulate
from tests.tools.test_simulate import CLUSTER, RUN

JUDGE = """\
from rollart import Sample, reward


@reward(gpu="L4", keep_alive_s=20, concurrency=3, batch={"max_items": 16, "max_wait_ms": 50}, memory_mb=8192)
def judge(sample: Sample) -> float:
    return 1.0
"""

REWARD = "{seconds: 0.4, memory_gb: 8, batch: 8, batch_s: 1.2, cold_start_s: 40}"

L4, CORE, GIB = 0.000222, 0.0000131, 0.00000222

Make = Callable[..., Resolved]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    directory = tmp_path_factory.mktemp("gpu")
    (directory / "judge.py").write_text(JUDGE)
    (directory / "c.yaml").write_text(CLUSTER + "functions: {backend: modal}\n")
    text = RUN.replace("reward: {seconds: 0.5}", f"reward: {REWARD}")
    text += "    rewards: [{function: judge}]\nfunctions: [{name: judge, source: judge.py, handler: judge}]\n"
    (directory / "r.yaml").write_text(text)

    @functools.cache
    def make(*overrides: str) -> Resolved:
        return forecast(read_specs(directory / "r.yaml", directory / "c.yaml", overrides))

    return make


def test_a_plan_prices_a_reward_on_the_gpu_of_its_function(made: Make) -> None:
    """By hand: a full call of 8 takes 1.2 s, so one item 0.15 s of an L4, a core and 8 GiB."""
    placement = made().plan.placement
    assert placement is not None
    (choice,) = placement.rewards
    assert choice.where == "functions"
    assert choice.usd_per_thousand == pytest.approx(150 * (L4 + CORE + 8 * GIB))
    assert "containers that wait" in choice.note
    assert "a start takes 40 s" in choice.note


def test_a_gpu_that_the_provider_does_not_have_is_noted(made: Make) -> None:
    for overrides in (("cluster.functions.price=aws_lambda",), ("domains.chat.profile.reward.gpu=TPU",)):
        placement = made(*overrides).plan.placement
        assert placement is not None
        assert placement.rewards == ()
        assert any("no GPU on offer" in note for note in placement.notes)


def test_a_batch_that_takes_longer_than_its_items_alone_is_refused(made: Make) -> None:
    with pytest.raises(SpecError, match="batch_s is 9 "):
        made("domains.chat.profile.reward.batch_s=9")


def test_one_container_waits_at_most_its_keep_alive() -> None:
    """Rare calls: each leaves a container waiting for the whole of `keep_alive_s`. Frequent ones: at most 1 + √a."""
    rare = RewardCost(1.0, keep_alive_s=60.0)
    assert idle_containers([(rare, 1e-5)]) == pytest.approx(60e-5, rel=0.01)
    for rate in (0.1, 1.0, 10.0, 100.0):
        assert 0 <= idle_containers([(rare, rate)]) <= 1 + math.sqrt(rate)
        assert idle_containers([(rare, rate / 4), (rare, rate * 3 / 4)]) == pytest.approx(
            idle_containers([(rare, rate)])
        ), "domains that share a function share its containers"
    assert idle_containers([(RewardCost(1.0, keep_alive_s=0.0), 5.0)]) == 0


def test_warm_containers_wait_whatever_their_keep_alive() -> None:
    warm = RewardCost(0.5, keep_alive_s=0.0, warm=3)
    assert idle_containers([(warm, 1e-5)]) == pytest.approx(3.0, rel=0.01)
    assert idle_containers([(warm, 4.0), (warm, 4.0)]) == 0, "a load of 4 keeps 3 busy"


def test_a_simulation_has_the_functions_own_limits_and_the_profiles_times(made: Make) -> None:
    (found,) = function_behaviours(made(), None)
    spec, profile = found.spec, found.profile
    assert (spec.gpus, spec.concurrency, spec.keep_alive_s) == (("L4", 1), 3, 20)
    assert (spec.batch.max_items, spec.batch.max_wait_ms) == (8, 50)
    assert profile.cold_start_s == 40
    assert profile.call_s + profile.item_s == pytest.approx(0.4)
    assert profile.call_s + 8 * profile.item_s == pytest.approx(1.2)


def test_simulated_containers_batch_scale_to_zero_and_are_billed_busy_and_idle(made: Make, tmp_path: Path) -> None:
    done = simulate(made(), tmp_path / "run", steps=2)
    with LedgerReader(done.directory) as reader:
        rows = collect(reader, "run")
        calls = reader.calls("modal")
    assert {call.provider for call in rows.invocations} == {"modal"}
    assert sum(call.items for call in calls) >= 2 * 16
    assert 1 < max(call.items for call in calls) <= 8
    workers = {call.worker for call in calls}
    assert 1 <= len(workers) <= 3
    assert [call.cold_start_s for call in calls if call.cold_start_s] == [40.0] * len(workers)
    states = {worker.state: worker.seconds for worker in rows.workers}
    second = L4 + CORE + calls[0].memory_mb / 1024 * GIB
    own = list(lines(rows))
    idle = math.fsum(line.usd for line in own if line.state == "idle")
    assert idle == pytest.approx(states["idle"] * second)
    assert states["idle"] >= 20 * len(workers), "each container waits its keep-alive before it scales to zero"
    billed = math.fsum(call.billed_s for call in calls)
    assert math.fsum(line.usd for line in own) == pytest.approx((billed + states["idle"]) * second)
    assert all(line.billed for line in own)


TALK = """\
  - name: talk
    environment: tests.envs:Lake
    group_size: 4
    max_turns: 8
    max_tokens: 512
    rewards: [{function: judge}]
    profile: {turns: 2, new_tokens: 100, output_tokens: 100, reward: {seconds: 0.8, memory_gb: 8, cold_start_s: 40}}
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Resolved:
    """Two domains, scored by one function on an L4 with a container that is always warm."""
    directory = tmp_path_factory.mktemp("shared")
    (directory / "judge.py").write_text(JUDGE.replace("memory_mb=8192", "memory_mb=16384, warm=1"))
    (directory / "c.yaml").write_text(CLUSTER + "functions: {backend: modal}\n")
    text = RUN.replace("reward: {seconds: 0.5}", f"reward: {REWARD}") + "    rewards: [{function: judge}]\n"
    text += TALK + "functions: [{name: judge, source: judge.py, handler: judge}]\n"
    (directory / "r.yaml").write_text(text)
    return forecast(read_specs(directory / "r.yaml", directory / "c.yaml"))


def test_domains_that_share_a_function_share_its_containers(shared: Resolved) -> None:
    """By hand: both domains have half of the trajectories, so that a call takes the mean of their times."""
    (found,) = function_behaviours(shared, None)
    assert found.domains == ("chat", "talk")
    spec, profile = found.spec, found.profile
    assert (spec.name, spec.warm, spec.concurrency, spec.memory_mb) == ("judge", 1, 3, 16_384)
    assert profile.call_s + profile.item_s == pytest.approx((0.4 + 0.8) / 2)
    assert spec.batch.max_items == 8


def test_a_plan_notes_the_waiting_containers_of_a_shared_function_once(shared: Resolved) -> None:
    placement = shared.plan.placement
    assert placement is not None
    chat, talk = placement.rewards
    load = chat.rate * 0.15 + talk.rate * 0.8
    assert "containers that wait, shared with talk; a start takes 40 s" in chat.note
    assert talk.note == ""
    assert talk.usd_per_thousand == pytest.approx(800 * (L4 + CORE + 16 * GIB)), "the memory of the function is billed"
    assert shared.problem is not None
    costs = [(domain.reward, choice.rate) for domain, choice in zip(shared.problem.domains, (chat, talk), strict=True)]
    waiting = idle_containers([(cost, rate) for cost, rate in costs if cost is not None])
    assert f"for {waiting:.1f} containers" in chat.note
    assert waiting >= 1 - load


def test_the_idle_seconds_of_a_shared_function_are_billed_once(shared: Resolved, tmp_path: Path) -> None:
    done = simulate(shared, tmp_path / "run", steps=1)
    with LedgerReader(done.directory) as reader:
        rows = collect(reader, "run")
        calls = reader.calls("modal")
    assert {call.function for call in calls} == {"judge"}
    assert {call.memory_mb for call in calls} == {16_384}
    assert len({call.worker for call in calls}) <= 3
    seconds = {worker.state: worker.seconds for worker in rows.workers}
    assert math.fsum(seconds.values()) <= 3 * done.seconds + 1e-6, "of at most three containers"
    assert rows.gpus == {"judge": "L4:1"}


def measured(made: Make, profiles: tuple[DomainProfile, ...]) -> Resolved:
    """The run without a profile of its own."""
    base = Path(made().base)
    specs = read_specs(base / "r.yaml", base / "c.yaml", ["domains.chat.profile="])
    return forecast(replace(specs, measured=profiles))


@pytest.fixture(scope="module")
def again(made: Make, tmp_path_factory: pytest.TempPathFactory) -> Resolved:
    """The run, planned with the profile of an earlier one."""
    done = simulate(made(), tmp_path_factory.mktemp("earlier") / "run", steps=1)
    return measured(made, profiles_of(done.directory))


def test_a_measured_profile_of_a_gpu_reward_is_planned_at_its_provider(again: Resolved, tmp_path: Path) -> None:
    placement = again.plan.placement
    assert placement is not None
    assert not [d for d in placement.deployments if d.role is Role.REWARD], "no GPU of a pool is reserved"
    assert [(choice.domain, choice.where) for choice in placement.rewards] == [("chat", "functions")]
    (found,) = function_behaviours(again, None)
    assert (found.spec.gpus, found.spec.concurrency, found.profile.cold_start_s) == (("L4", 1), 3, 40)
    done = simulate(again, tmp_path / "again", steps=1)
    with LedgerReader(done.directory) as reader:
        assert math.fsum(line.usd for line in lines(collect(reader, "again"))) > 0, "it is billed"


@pytest.fixture(scope="module")
def mixed(made: Make) -> Resolved:
    """A domain with 2 s of a GPU and 8 GB, and 3 s of a core and 1 GB."""
    checks = RewardCost(3.0, memory_gb=1.0, functions=("checks",))
    judge = RewardCost(
        2.0, memory_gb=8.0, on_gpu=True, gpu="L4", provided=True, functions=("judge",), additional=(checks,)
    )
    problem = made().problem
    assert problem is not None
    return measured(made, tuple(replace(known, reward=judge, source="measured") for known in problem.domains))


def test_functions_on_cores_are_priced_and_simulated_beside_one_on_a_gpu(mixed: Resolved, tmp_path: Path) -> None:
    placement = mixed.plan.placement
    assert placement is not None
    (choice,) = placement.rewards
    gb = GIB / 1.073741824
    assert choice.usd_per_thousand == pytest.approx(1000 * (2 * (L4 + CORE + 8 * gb) + 3 * (CORE + gb)))
    behaviours = {found.spec.name: found for found in function_behaviours(mixed, None)}
    assert behaviours.keys() == {"judge", "reward-chat"}
    assert (behaviours["reward-chat"].spec.gpu, behaviours["reward-chat"].profile.call_s) == ("", 3.0)
    done = simulate(mixed, tmp_path / "run", steps=1)
    with LedgerReader(done.directory) as reader:
        assert {call.function for call in reader.calls("modal")} == {"judge", "reward-chat"}


def deployed(made: Make, *overrides: str) -> Specs:
    """The run with a deployed function in place of its source."""
    base = Path(made().base)
    text = (base / "r.yaml").read_text()
    source = "{name: judge, source: judge.py, handler: judge}"
    (base / "deployed.yaml").write_text(text.replace(source, "{name: judge, function: judge@live}"))
    return read_specs(base / "deployed.yaml", base / "c.yaml", overrides)


def test_a_deployed_function_that_is_not_drawn_is_noted(made: Make) -> None:
    resolved = forecast(deployed(made))
    (note,) = (note for note in resolved.notes if "judge@live" in note)
    assert "its GPU and memory are unknown" in note
    assert "give profile.reward.gpu" in note


def test_a_deployed_function_is_planned_and_simulated_as_drawn(made: Make) -> None:
    settings = {"gpu": "L4", "memory_mb": 16_384, "keep_alive_s": 20.0, "concurrency": 3}
    release = FunctionRelease(
        reference="judge@live", provider="modal", version="0" * 64, number="3", weights={"3": 1.0}, settings=settings
    )
    resolved = forecast(replace(deployed(made), releases={"judge": release}))
    assert resolved.plan.placement is not None
    (choice,) = resolved.plan.placement.rewards
    assert choice.usd_per_thousand == pytest.approx(150 * (L4 + CORE + 16 * GIB))
    assert not any("judge@live" in note for note in resolved.notes)
    (found,) = function_behaviours(resolved, None)
    assert (found.spec.gpus, found.spec.memory_mb, found.spec.concurrency) == (("L4", 1), 16_384, 3)


def test_the_gpu_of_a_profile_stands_for_that_of_a_function_that_is_not_drawn(made: Make) -> None:
    resolved = forecast(deployed(made, "domains.chat.profile.reward.gpu=L4"))
    assert not any("judge@live" in note for note in resolved.notes)
    assert resolved.plan.placement is not None
    assert [choice.where for choice in resolved.plan.placement.rewards] == ["functions"]
    (found,) = function_behaviours(resolved, None)
    assert (found.spec.name, found.spec.gpus) == ("judge", ("L4", 1))
