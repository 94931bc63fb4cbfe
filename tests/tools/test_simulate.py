"""`rollart simulate`: the product's control plane over a plan's simulated parts, on virtual time."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from rollart.cli.commands import cli
from rollart.errors import FaultRateExceeded, RunFailed, SpecError
from rollart.ledger.reader import LedgerReader
from rollart.policy.schedules import SCHEDULES
from rollart.report.cost import cost_lines
from rollart.report.offload import offload, read_trace
from rollart.report.rows import collect
from rollart.report.simulation import simulation
from rollart.report.utilization import utilization
from rollart.settings.resolve import Resolved, forecast, read_specs
from rollart.sim.workload import LogNormal
from rollart.tools import simulate as simulator
from rollart.tools.simulate import simulate, workload_shape
from rollart.tools.simulations import SimulationTask, simulate_all, simulation_finding
from rollart.tools.window import fresh_group_shares, recommended_staleness

CLUSTER = """\
name: c
pools:
  - {name: big, device: H800, count: 8, devices_per_host: 8}
  - {name: wide, device: H20, count: 8}
links:
  - {a: big, b: wide, gb_per_s: 100}
"""

RUN = """\
name: r
model:
  context: 16384
  config:
    {model_type: qwen3, vocab_size: 1000, hidden_size: 1024, intermediate_size: 3072, num_hidden_layers: 12,
     num_attention_heads: 16, num_key_value_heads: 8, head_dim: 64, tie_word_embeddings: false}
batch: {trajectories: 16}
domains:
  - name: chat
    environment: tests.envs:Lake
    group_size: 4
    max_turns: 8
    max_tokens: 512
    profile:
      turns: {mean: 4, p50: 4, p90: 7}
      first_tokens: 500
      new_tokens: 100
      output_tokens: {mean: 200, p50: 150, p90: 400}
      environment: {wait_s: 1.0, reset_s: 2.0}
      reward: {seconds: 0.5}
"""

Make = Callable[..., Resolved]


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("specs")
    (directory / "r.yaml").write_text(RUN)
    (directory / "c.yaml").write_text(CLUSTER)
    return directory / "r.yaml", directory / "c.yaml"


@pytest.fixture(scope="module")
def made(specs: tuple[Path, Path]) -> Make:
    """Made once per set of overrides: solving the plan takes longer than most simulations of it."""

    @functools.cache
    def made(*overrides: str) -> Resolved:
        return forecast(read_specs(*specs, overrides))

    return made


@pytest.mark.slow
def test_same_spec_and_seed_same_trace(made: Make, tmp_path: Path) -> None:
    one, same, other = (simulate(made(), tmp_path / str(n), seed=seed, steps=2) for n, seed in enumerate((1, 1, 2)))
    assert one.trace == same.trace != other.trace


def test_every_dollar_is_of_one_role_and_all_devices_are_billed(made: Make, tmp_path: Path) -> None:
    resolved = made()
    done = simulate(resolved, tmp_path / "run", steps=3)
    with LedgerReader(done.directory) as reader:
        rows = collect(reader, "run")
    hours = {i.resource: 0.0 for i in rows.intervals}
    for i in rows.intervals:
        hours[i.resource] += i.unit_seconds
    assert sum(hours.values()) == pytest.approx(16 * done.seconds, rel=1e-6), "16 devices, from start to end"
    total = math.fsum(line.usd for line in cost_lines(rows))
    devices = sum(p.count * resolved.usd_per_device_hour[p.name] for p in resolved.cluster.pools) * done.seconds / 3600
    assert total >= devices * (1 - 1e-9)
    assert total == pytest.approx(devices, rel=0.05), "what remains are the functions"
    assert rows.facts.trained_samples == 3 * 16
    assert sum(call.items for call in rows.invocations) >= 3 * 16
    assert {call.provider for call in rows.invocations} == {"local"}, "calls are priced as those of a real run"


@pytest.mark.slow
def test_calls_are_charged_at_the_provider_that_the_cluster_names(made: Make, tmp_path: Path) -> None:
    simulate(made("cluster.functions.price=aws_lambda"), tmp_path, steps=1)
    with LedgerReader(tmp_path) as reader:
        rows = collect(reader, "r")
    assert {call.provider for call in rows.invocations} == {"aws_lambda"}
    assert {line.resource.partition(":")[0] for line in cost_lines(rows) if line.role == "reward"} == {"aws_lambda"}


def test_figures_add_up(made: Make, tmp_path: Path) -> None:
    done = simulate(made(), tmp_path / "run", schedule="one_off", steps=6)
    found = simulation_finding(done)
    parts = found.waited_s + found.train_s + found.publish_s
    assert found.step_s == pytest.approx(parts, rel=1e-9), "a step is its waiting, its training and its publish"
    assert set(found.lags) <= {0, 1}
    assert sum(found.lags.values()) == 6 * 16
    assert 0 < found.engine_busy < 1
    assert 0 < found.wasted < 1


@pytest.mark.slow
def test_a_streamed_step_adds_up_too(made: Make, tmp_path: Path) -> None:
    """Training before the batch is complete counts as waiting, so no publish has a negative duration."""
    done = simulate(made("training.stream=true"), tmp_path / "run", schedule="sync_plus", steps=4)
    assert any(s.train_s > s.trained - s.began for s in done.steps), "some of it was before"
    assert all(s.began <= s.trained <= s.ended for s in done.steps)
    found = simulation_finding(done)
    assert found.step_s == pytest.approx(found.waited_s + found.train_s + found.publish_s, rel=1e-9)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_every_schedule_runs_under_shuffled_ties(made: Make, tmp_path: Path, schedule: str) -> None:
    for fuzz in range(3):
        done = simulate(made(), tmp_path / f"{schedule}-{fuzz}", schedule=schedule, steps=2, fuzz=fuzz)
        assert [s.trajectories for s in done.steps] == [16, 16]


def test_lengths_are_tokens_and_not_pieces(made: Make, tmp_path: Path) -> None:
    done = simulate(made(), tmp_path / "run", steps=2)
    with LedgerReader(done.directory) as reader:
        rows = collect(reader, "run")
    per_turn = sum(c.action_tokens for c in rows.charges) / sum(c.turns for c in rows.charges)
    assert 100 < per_turn < 350, "about 200 tokens an answer"


def test_a_profile_becomes_the_distribution_that_has_its_quantiles(made: Make) -> None:
    problem = made().problem
    assert problem is not None
    shape = workload_shape(problem.domains[0], 16_384)
    assert isinstance(shape.turns, LogNormal)
    assert shape.turns.median == 4
    assert math.exp(1.2816 * shape.turns.sigma) * 4 == pytest.approx(7)
    assert shape.answers.median == 150
    assert math.exp(1.2816 * shape.answers.sigma) * 150 == pytest.approx(400)


@pytest.mark.slow
def test_a_published_shape_may_stand_for_the_profile(made: Make, tmp_path: Path) -> None:
    done = simulate(made("domains.chat.shape=gem_math", "leases.generate_s=3600"), tmp_path / "run", steps=1)
    assert done.steps[0].tokens > 16 * 1_400


@pytest.mark.slow
def test_what_the_spec_forbids_ends_the_simulation_too(made: Make, tmp_path: Path) -> None:
    """A lease that is too short for the work fails here, before a run on the cluster."""
    with pytest.raises(FaultRateExceeded, match=r"waited 0\.2 s"):
        simulate_all([SimulationTask(made("leases.generate_s=0.2", "faults.min_count=5"), "rollart", 0, 2)])


def test_a_cluster_of_unknown_speed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be simulated: no pool can serve frozen_lake"):
        simulate(forecast(read_specs()), tmp_path / "run", steps=1)


@pytest.mark.slow
def test_the_command(specs: tuple[Path, Path], tmp_path: Path) -> None:
    done = CliRunner().invoke(
        cli,
        [
            "simulate",
            str(specs[0]),
            "--cluster",
            str(specs[1]),
            "--policies",
            "sync,rollart",
            "--steps",
            "3",
            "--workers",
            "1",
            "--keep",
            str(tmp_path / "kept"),
            "-o",
            "json",
        ],
    )
    assert done.exit_code == 0, done.output
    tables = json.loads(done.stdout)["tables"]
    figures = {row["what"]: row for row in tables["figures"]}
    assert figures["step"]["sync"] > figures["step"]["rollart"] > 0
    assert figures["mean lag"]["sync"] == 0
    assert sorted(p.name for p in (tmp_path / "kept").iterdir()) == ["rollart-0", "sync-0"]
    report = CliRunner().invoke(cli, ["report", "cost", str(tmp_path / "kept" / "sync-0")])
    assert "per 1,000 trained trajectories" in report.output


@pytest.mark.slow
def test_steps_that_are_asked_for_are_simulated(specs: tuple[Path, Path]) -> None:
    done = CliRunner().invoke(cli, ["simulate", str(specs[0]), "--cluster", str(specs[1]), "--workers", "1", "steps=1"])
    assert done.exit_code == 0, done.output
    assert "seed 0: 1 steps in" in done.stderr


def test_an_unknown_schedule_is_a_usage_error(tmp_path: Path) -> None:
    from rollart.cli.main import run

    assert run(["simulate", "--policies", "sync,laminar"]) == 2


TAIL = "domains.chat.profile.output_tokens={mean: 200, p50: 20, p90: 500}"
LARGE = ("batch.trajectories=16384", "placement.prefill_decode=off", "cluster.engines.device=H800")


@pytest.mark.slow  # some twenty plans: about two seconds
def test_the_recommended_staleness_follows_from_the_tail_and_not_from_the_specs_own(made: Make) -> None:
    short, long = (
        recommended_staleness(made("schedule=paced", *LARGE)),
        recommended_staleness(made("schedule=paced", *LARGE, TAIL)),
    )
    assert short is not None
    assert long is not None
    assert long.staleness > short.staleness > 0
    for stated in ("schedule=rollart", f"staleness={long.staleness}"), ("schedule=paced", "staleness=8"):
        asked = recommended_staleness(made(*stated, *LARGE, TAIL))
        assert asked is not None
        assert asked.staleness == long.staleness
    assert recommended_staleness(made("schedule=sync")) is None


@pytest.mark.slow
def test_a_plan_for_batches_that_wait_leaves_long_groups_their_time(made: Make) -> None:
    (waits,) = fresh_group_shares(made("schedule=paced", "staleness=0", TAIL)).values()
    (aborts,) = fresh_group_shares(made("schedule=rollart", "staleness=0", TAIL)).values()
    assert waits >= 0.99 > aborts
    assert fresh_group_shares(made("schedule=sync")) == {}


@pytest.mark.slow
def test_a_token_budget_is_one_of_tokens(made: Make, tmp_path: Path) -> None:
    """A batch of 20,000 tokens in 160 pieces is cut by a budget in tokens."""
    whole = simulate(made(), tmp_path / "whole", steps=3)
    cut = simulate(made("batch.tokens=12000"), tmp_path / "cut", steps=3)
    assert min(s.tokens for s in whole.steps) > 12_000
    assert max(s.tokens for s in cut.steps) <= 12_000


FILTER = "rollout.filter.zero_variance=true"


@pytest.mark.slow
def test_groups_of_like_rewards_are_filtered_and_charged_apart(made: Make, tmp_path: Path) -> None:
    """With a mean pass rate of one half and different prompts, most groups of 4 are all right or all wrong."""
    resolved = made(FILTER, "rollout.filter.max_additional_running_prompts=4", "domains.chat.profile.solved=0.5")
    done = simulate(resolved, tmp_path / "run", steps=4)
    with LedgerReader(done.directory) as reader:
        rows = collect(reader, "run")
        filtered = reader.events("group_filtered")
    assert rows.facts.trained_samples == 4 * 16
    assert {e.fields["reward"] for e in filtered} == {0.0, 1.0}
    assert sum(c.trajectories for c in rows.charges if c.outcome == "filtered") == 4 * len(filtered) > 0
    assert any(cause == "engine: trajectory filtered" for cause in simulation_finding(done).waste)
    assert {e.subject for e in rows.events_of("filtered_against_kept")} >= {"tokens", "difficulty", "reward"}


@pytest.mark.slow
def test_a_simulation_in_which_all_earn_the_same_says_so(made: Make, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="all 40 groups of domain chat since its last step"):
        simulate_all([SimulationTask(made(FILTER), "rollart", 0, steps=2, keep=tmp_path / "run")], workers=1)


@pytest.mark.slow
def test_a_push_beside_the_next_step_shortens_what_training_and_push_bind(made: Make, tmp_path: Path) -> None:
    """A slow trainer and a slow push: in sequence both make up the step, concurrently only the longer one."""
    base = ("placement.train.seconds_per_step=6.0", "staleness=3")
    wait, beside = (
        simulation_finding(simulate(made(*base, f"weights.overlap={flag}"), tmp_path / flag, steps=10))
        for flag in ("false", "true")
    )
    assert beside.step_s < wait.step_s - 0.5 * wait.publish_s
    assert max(beside.lags) <= 3


@pytest.mark.slow
def test_shares_of_domains_and_their_drift_are_reported(specs: tuple[Path, Path], tmp_path: Path) -> None:
    head, _, entry = RUN.partition("  - name: chat")
    slow = entry.replace("wait_s: 1.0", "wait_s: 20.0").replace("    group_size", "    weight: 2\n    group_size", 1)
    text = f"{head}  - name: chat{entry}  - name: slow{slow}rollout: {{fairness: {{slack: 0.25}}}}\n"
    (tmp_path / "r.yaml").write_text(text)
    resolved = forecast(read_specs(tmp_path / "r.yaml", specs[1], ()))
    found = simulate_all([SimulationTask(resolved, "rollart", 0, steps=12, keep=tmp_path / "run")], workers=1)
    seen = found[0].shares
    assert sum(s.trained for s in seen.values()) == pytest.approx(1.0)
    assert seen["slow"].wanted == pytest.approx(2 / 3)
    for share in seen.values():
        assert abs(share.drift) <= share.worst <= 2 * 2, "the slack is one of four groups"
        assert share.trained == pytest.approx(share.wanted, abs=4 / (12 * 4) + 1e-9)
    (shown,) = [t for t in simulation("r", found).tables if t.name == "shares"]
    assert [row[0] for row in shown.rows] == ["chat", "slow"]
    with LedgerReader(tmp_path / "run") as reader:
        table = next(t for t in utilization(collect(reader, "run")).tables if t.name == "shares")
    assert [(row[0], row[3]) for row in table.rows] == [("chat", seen["chat"].wanted), ("slow", seen["slow"].wanted)]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "seconds"), [("one_off", 30.0), ("rollart", 5.0)])
def test_exposed_seconds_are_what_a_simulation_without_the_reward_saves(
    schedule: str, seconds: float, made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computed from the ledger, against the same run simulated with the reward at 0 s. Slow: two simulations each."""
    resolved = made(f"domains.chat.profile.reward.seconds={seconds}")
    done = simulate(resolved, tmp_path / "with", schedule=schedule, steps=6)
    with LedgerReader(done.directory) as reader:
        report = offload(collect(reader, "r"), read_trace(reader))
    (exposed,) = [dict(zip((c.name for c in t.columns), t.rows[0], strict=True)) for t in report.tables[:1]]
    instant = made("domains.chat.profile.reward.seconds=1e-9")
    monkeypatch.setattr(simulator, "COLD_START_S", 0.0)
    without = simulate(instant, tmp_path / "without", schedule=schedule, steps=6)
    saved = done.seconds - without.seconds
    assert saved > 0.5 * seconds
    assert exposed["exposed_s"] == pytest.approx(saved, abs=0.005 * done.seconds)
    assert exposed["busy_s"] > 5 * exposed["exposed_s"], "most of the reward's seconds are hidden"
