"""Reward models on GPUs of a provider: planned, priced, batched and scaled to zero like every other function."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from placement.problem import RewardCost
from placement.result import idle_containers
from rollart.errors import SpecError
from rollart.ledger.reader import LedgerReader
from rollart.report.functions import lines
from rollart.report.rows import collect
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
    """By hand: a full call of 8 takes 1.2 s, so one item 0.15 s of an L4, a core and 8 GB."""
    placement = made().plan.placement
    assert placement is not None
    (choice,) = placement.rewards
    assert choice.where == "functions"
    assert choice.usd_per_thousand == pytest.approx(150 * (L4 + CORE + 8 * GIB / 1.073741824))
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
    assert idle_containers(rare, 1e-5) == pytest.approx(60e-5, rel=0.01)
    for rate in (0.1, 1.0, 10.0, 100.0):
        assert 0 <= idle_containers(rare, rate) <= 1 + math.sqrt(rate)
    assert idle_containers(RewardCost(1.0, keep_alive_s=0.0), 5.0) == 0


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
