"""Replays of recorded runs: a ledger becomes a workload, speeds and a prediction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from rollart.cli.commands import cli
from rollart.cli.main import run
from rollart.errors import UsageError
from rollart.ledger.intervals import ResourceState
from rollart.ledger.reader import LedgerReader
from rollart.ledger.store import FLUSH_SECONDS, Ledger
from rollart.model import Group, GroupId, TrainSample, TrajectoryId
from rollart.ports import Charge, Interval, RunEvent
from rollart.report.rows import collect
from rollart.report.simulation import RunTotals, SimulationCheck, check_report
from rollart.settings.resolve import Resolved, read_specs, resolve_files
from rollart.sim import loop as virtual
from rollart.tools.recording import fit_trainer_speed, read_recording
from rollart.tools.replay import PreparedReplay, check_replay, prepare_from_run, prepare_from_spec
from rollart.tools.simulate import simulate
from serverless.types import Cause, Invocation

RUN = """\
name: small
model:
  context: 4096
  config:
    {model_type: qwen3, vocab_size: 128, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2,
     num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, tie_word_embeddings: false}
batch: {trajectories: 4}
steps: 6
domains:
  - name: chat
    environment: tests.envs:Lake
    group_size: 1
    max_turns: 8
    max_tokens: 64
    advantage: {baseline: domain}
    rewards:
      - {function: exact, weight: 1.0}
functions:
  - {name: exact, source: rollart.quickstart.rewards.exact_match, handler: handler, batch_items: 4, memory_mb: 1024}
"""

GPUS = """\
name: gpus
pools:
  - {name: big, device: H800, count: 2}
  - {name: host, device: cpu, count: 8}
"""

STEPS, BATCH, TURNS = 6, 4, 3
FIRST_S, TRAIN_S, PUBLISH_S, LOAD_S, STARTUP_S, END_S = 1.0, 2.0, 0.3, 0.1, 5.0, 0.5
ENGINE_S = 0.1


async def write(directory: Path, resolved: Resolved, *, starts: int = 1) -> None:
    """A ledger of a run that is bound by its trainer: one batch is waited for, then the steps follow each other. Engine
    and trainer are billed from start to end."""
    with Ledger(directory, clock=lambda: 0.0, config=resolved.to_dict(), inline=True) as ledger:
        usd = resolved.usd_per_device_hour["here"]
        for n in range(starts):
            ledger.event(RunEvent(0.1 * n, "starting", "run", {}))

        def spent(role: str, name: str, t0: float, t1: float, state: str) -> float:
            ledger.interval(Interval(role, name, t0, t1, state, "", 1.0, usd))
            return t1

        spent("engine", "engine-0", 0.0, STARTUP_S, ResourceState.STARTUP)
        spent("trainer", "trainer-0", 0.0, STARTUP_S, ResourceState.STARTUP)
        at = spent("trainer", "trainer-0", STARTUP_S, STARTUP_S + FIRST_S, ResourceState.IDLE)
        engine = spent("engine", "engine-0", STARTUP_S, STARTUP_S + BATCH * ENGINE_S, ResourceState.BUSY)
        for step in range(STEPS):
            trained = spent("trainer", "trainer-0", at, at + TRAIN_S, ResourceState.BUSY)
            ends = spent("trainer", "trainer-0", trained, trained + PUBLISH_S, ResourceState.SYNC)
            engine = spent("engine", "engine-0", engine, ends - LOAD_S, ResourceState.IDLE)
            engine = spent("engine", "engine-0", engine, ends, ResourceState.SYNC)
            ledger.invocation(
                Invocation("exact", "local", "w", at - 0.5, at - 0.38, 0.0, 0.1, 1024, BATCH, "ok", Cause.CALL)
            )
            groups = [await finished(ledger, step, n, at) for n in range(BATCH)]
            await ledger.commit(version=step + 1, step=step + 1, consumed=groups, metrics={})
            fields = {"train_s": ends - at, "waited_s": FIRST_S if step == 0 else 0.0}
            ledger.event(RunEvent(ends, "step", "training", fields))
            at = ends
        spent("engine", "engine-0", engine, at + END_S, ResourceState.IDLE)
        spent("trainer", "trainer-0", at, at + END_S, ResourceState.IDLE)
        await ledger.flush()


async def finished(ledger: Ledger, step: int, n: int, at: float) -> Group:
    """A trajectory of three turns: 10 tokens, then 5 more each turn, and an answer of 8."""
    name = f"g{step}.{n}"
    first, later, said = 10, 5, 8
    tokens = first + (TURNS - 1) * later + TURNS * said
    mask = (False,) * (tokens - TURNS * said) + (True,) * (TURNS * said)
    sample = TrainSample(
        TrajectoryId(name),
        GroupId(name),
        "chat",
        step,
        tuple(range(tokens)),
        mask,
        (0.0,) * tokens,
        (step,) * tokens,
        (0,) * tokens,
        (0.0,) * tokens,
        1.0,
        True,
    )
    await ledger.admit(GroupId(name), "chat", n)
    charge = Charge(
        TrajectoryId(name),
        domain="chat",
        outcome="finished",
        v0=step,
        engine_seconds=ENGINE_S,
        turns=TURNS,
        prompt_tokens=tokens - TURNS * said,
        action_tokens=TURNS * said,
        success=True,
        score=1.0,
        purpose="train",
        t0=at - 0.9,
        t1=at - 0.1,
        first_tokens=first,
        reset_s=0.02,
        env_s=0.06,
    )
    await ledger.finish(sample, charge)
    return Group(GroupId(name), "chat", (sample,))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replay")


@pytest.fixture(scope="module")
def resolved(home: Path) -> Resolved:
    (home / "r.yaml").write_text(RUN)
    return resolve_files(home / "r.yaml")


@pytest.fixture(scope="module")
def recorded(home: Path, resolved: Resolved) -> Path:
    return make(home, resolved)


@pytest.fixture(scope="module")
def prepared(recorded: Path) -> PreparedReplay:
    return prepare_from_run(recorded)


def make(tmp_path: Path, resolved: Resolved, *, starts: int = 1) -> Path:
    directory = tmp_path / "runs" / "small-1"
    directory.mkdir(parents=True)
    (directory / "resolved.yaml").write_text(resolved.to_yaml())
    virtual.run(write(directory, resolved, starts=starts))
    return directory


def test_what_a_ledger_says_of_its_machine(recorded: Path, resolved: Resolved) -> None:
    seen = read_recording(recorded)
    ((script,),) = set(seen.scripts["chat"])
    assert (script.turns, sum(script.shown + script.answers), script.shown[0], sum(script.answers)) == (3, 44, 10, 24)
    assert sum(script.step_s) == pytest.approx(0.06)
    assert seen.timings.trainer.step_s([44] * BATCH) == pytest.approx(TRAIN_S)
    assert seen.timings.publish_s + seen.timings.load_s + FLUSH_SECONDS == pytest.approx(PUBLISH_S)
    assert seen.timings.load_s == pytest.approx(LOAD_S)
    assert seen.timings.engine_s == pytest.approx(ENGINE_S)
    loop_s = FIRST_S + STEPS * (TRAIN_S + PUBLISH_S)
    assert seen.totals.loop_s == pytest.approx(loop_s)
    assert seen.totals.wall_s == pytest.approx(STARTUP_S + loop_s + END_S)
    profile = seen.functions["exact"]
    assert (profile.call_s, profile.overhead_s) == (pytest.approx(0.1), pytest.approx(0.02))
    usd_per_s = 2 * resolved.usd_per_device_hour["here"] / 3600
    assert seen.totals.usd == pytest.approx(usd_per_s * seen.totals.wall_s), "local functions have no bill"
    assert seen.totals.loop_usd == pytest.approx(usd_per_s * loop_s)


def test_a_run_bound_by_its_trainer_is_predicted(prepared: PreparedReplay) -> None:
    found = check_replay(prepared)
    assert (prepared.replay.pace or 0) > 0
    assert found.simulated.train_s == pytest.approx(STEPS * TRAIN_S)
    assert found.simulated.publish_s == pytest.approx(STEPS * PUBLISH_S)
    assert found.simulated.engine_busy_s == pytest.approx(STEPS * BATCH * ENGINE_S, rel=0.02)
    # The engine takes 8 × 0.1 s for the trajectories admitted at once; environments take 0.08 s concurrently.
    assert 0 < found.simulated.waited_s < 2 * FIRST_S
    loop_error = abs(found.simulated.loop_s / found.recorded.loop_s - 1.0)
    assert loop_error < 0.1
    assert abs(found.wall_s / found.recorded.wall_s - 1.0) < loop_error, "what lies around the loop is as recorded"


def test_the_pace_is_that_of_the_recorded_specs(recorded: Path, prepared: PreparedReplay) -> None:
    """A larger batch gives an engine more at a time; that is not compensated by a faster engine."""
    changed = prepare_from_run(recorded, overrides=["batch.trajectories=8"])
    assert changed.resolved.run.batch.trajectories == 8
    assert changed.replay.pace == prepared.replay.pace


def test_calls_of_several_sizes_show_what_an_item_takes(tmp_path: Path, resolved: Resolved) -> None:
    directory = make(tmp_path, resolved)
    with Ledger(directory, clock=lambda: 0.0, config=resolved.to_dict(), inline=True) as ledger:
        for items in (1, 2, 4, 8):
            billed = 0.1 + 0.05 * items
            ledger.invocation(Invocation("graded", "local", "w", 0.0, billed, 0.0, billed, 1024, items, "ok"))
    found = read_recording(directory).functions
    assert (found["graded"].call_s, found["graded"].item_s) == (pytest.approx(0.1), pytest.approx(0.05))
    assert found["exact"].item_s == 0, "its calls have one size"


def test_functions_are_called_as_they_were(prepared: PreparedReplay, tmp_path: Path) -> None:
    done = simulate(prepared.resolved, tmp_path / "run", steps=3, replay=prepared.replay)
    with LedgerReader(done.directory) as reader:
        (calls,) = collect(reader, "run").invocations
    assert (calls.function, calls.status, calls.memory_mb) == ("exact", "ok", 1024)
    assert calls.items == 3 * BATCH
    assert calls.billed_s / calls.calls == pytest.approx(0.1, rel=0.02)


def test_deviations_are_of_the_run_and_of_its_loop() -> None:
    recorded = RunTotals(
        10, wall_s=30.0, loop_s=20.0, usd=3.0, loop_usd=2.0, waited_s=1, train_s=1, publish_s=1, engine_busy_s=1
    )
    simulated = RunTotals(
        10, wall_s=22.0, loop_s=22.0, usd=2.4, loop_usd=2.4, waited_s=1, train_s=1, publish_s=1, engine_busy_s=1
    )
    found = SimulationCheck(recorded, simulated)
    assert (found.wall_s, found.usd) == (pytest.approx(32.0), pytest.approx(3.4))
    (table,) = check_report("run", found).tables
    deviations = {(what, unit): deviation for what, unit, _, _, deviation in table.rows}
    assert deviations["training loop", "s"] == pytest.approx(0.1)
    assert deviations["training loop", "USD"] == pytest.approx(0.2)
    assert (deviations["wall time", "s"], deviations["dollars", "USD"]) == (
        pytest.approx(1 / 15),
        pytest.approx(0.4 / 3),
    )


def test_steps_of_two_sizes_show_what_does_not_depend_on_tokens() -> None:
    found = fit_trainer_speed([100, 200, 100, 200], [0.6, 0.7, 0.6, 0.7])
    assert (found.seconds_per_step, found.seconds_per_token) == (pytest.approx(0.5), pytest.approx(0.001))
    alike = fit_trainer_speed([100, 101, 99], [0.5, 0.7, 0.9])
    assert alike.seconds_per_step == 0, "three batches of a size show no line"
    assert alike.step_s([300]) == pytest.approx(2.1), "the sum is kept"
    falling = fit_trainer_speed([100, 200, 300], [0.9, 0.7, 0.5])
    assert falling.step_s([600]) == pytest.approx(2.1), "more tokens never take less time"


def test_another_policy_at_the_same_speeds(prepared: PreparedReplay, tmp_path: Path) -> None:
    ends = {
        name: simulate(prepared.resolved, tmp_path / name, schedule=name, steps=STEPS, replay=prepared.replay).seconds
        for name in ("sync_plus", "rollart")
    }
    assert ends["sync_plus"] > ends["rollart"], "its trainer waits for every batch"


def test_other_prices_change_dollars_and_nothing_else(recorded: Path) -> None:
    found = {}
    for usd in (1.0, 3.0):
        price = f"cluster.price_list=[{{name: cpu, unit: device-hour, usd: {usd}, source: a test, date: 2026-01-01}}]"
        done = CliRunner().invoke(cli, ["simulate", str(recorded), price, "-o", "json"])
        assert done.exit_code == 0, done.output
        report = json.loads(done.stdout)
        found[usd] = {row["what"]: row["async"] for row in report["tables"]["figures"]}
        assert "at its own speeds" in done.stdout
        assert f"{STEPS} steps" in done.stdout, "as many as were recorded"
    assert found[3.0]["per 1,000 trajectories"] == pytest.approx(3 * found[1.0]["per 1,000 trajectories"], rel=0.01), (
        "all but the functions"
    )
    assert found[3.0]["step"] == found[1.0]["step"]


@pytest.mark.slow
def test_on_other_hardware_the_plan_says_how_fast_it_is(recorded: Path, home: Path, tmp_path: Path) -> None:
    (tmp_path / "g.yaml").write_text(GPUS)
    elsewhere = prepare_from_run(recorded, tmp_path / "g.yaml")
    assert elsewhere.replay.pace is None
    assert "on other devices" in elsewhere.note
    done = simulate(elsewhere.resolved, tmp_path / "out", steps=2, replay=elsewhere.replay)
    assert [s.tokens for s in done.steps] == [BATCH * 44] * 2
    assert done.seconds < FIRST_S, "a model of 0.1 million parameters on H800s"
    of_spec = prepare_from_spec(read_specs(home / "r.yaml", tmp_path / "g.yaml"), recorded)
    assert of_spec.replay.recording.scripts == elsewhere.replay.recording.scripts


def test_trajectories_may_be_drawn(recorded: Path, tmp_path: Path) -> None:
    drawn = prepare_from_run(recorded, resample=True)
    assert drawn.replay.resample
    one, same = (
        simulate(drawn.resolved, tmp_path / str(n), seed=3, steps=2, replay=drawn.replay).trace for n in range(2)
    )
    assert one == same


def test_what_cannot_be_replayed_is_told(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*arguments: str) -> str:
        assert run(["simulate", *arguments]) == 2
        return capsys.readouterr().err

    (tmp_path / "other.yaml").write_text(RUN.replace("name: chat", "name: chats"))
    assert "'chats' has no trajectory in small-1 (rule: a recorded domain; did you mean 'chat'?" in told(
        str(tmp_path / "other.yaml"), "--replay", str(recorded)
    )
    assert "no run" in told(str(tmp_path))
    assert "no run 'ghost'" in told("--replay", "ghost")
    assert "--resample without a recorded run" in told("--resample")
    assert "of a recorded run" in told("--check")
    assert "as it was" in told(str(recorded), "--check", "--steps", "3")
    assert "as it was" in told(str(recorded), "--check", "--seeds", "2")
    assert "as it was" in told(str(recorded), "--check", "--resample")
    assert "one is replayed" in told(str(recorded), "--replay", str(recorded))


def test_runs_without_a_ledger_or_a_step_are_told(tmp_path: Path, resolved: Resolved) -> None:
    with pytest.raises(UsageError, match="no ledger here"):
        read_recording(tmp_path)
    with Ledger(tmp_path / "empty", clock=lambda: 0.0, config=resolved.to_dict(), inline=True):
        pass
    with pytest.raises(UsageError, match="no trajectory has finished"):
        read_recording(tmp_path / "empty")


def test_a_simulation_is_no_recording(prepared: PreparedReplay, tmp_path: Path) -> None:
    simulate(prepared.resolved, tmp_path / "sim", steps=1, replay=prepared.replay)
    with pytest.raises(UsageError, match="ledger of a simulation"):
        read_recording(tmp_path / "sim")


def test_a_resumed_run_is_replayed_and_not_checked(tmp_path: Path, resolved: Resolved) -> None:
    prepared = prepare_from_run(make(tmp_path, resolved, starts=2))
    with pytest.raises(UsageError, match="was started 2 times"):
        check_replay(prepared)


def test_the_check_command(recorded: Path) -> None:
    done = CliRunner().invoke(cli, ["simulate", "small-1", "--runs-dir", str(recorded.parent), "--check", "-o", "json"])
    assert done.exit_code == 0, done.output
    rows = {(row["what"], row["unit"]): row for row in json.loads(done.stdout)["tables"]["check"]}
    assert rows["wall time", "s"]["recorded"] == pytest.approx(STARTUP_S + 14.8 + END_S)
    assert abs(rows["wall time", "s"]["deviation"]) < 0.1
    assert abs(rows["dollars", "USD"]["deviation"]) < 0.1


def test_exposed_seconds_are_compared_with_a_simulation(recorded: Path) -> None:
    """The run is bound by its trainer after the first batch, so that its reward exposes next to nothing."""
    given = ["report", "offload", "small-1", "--runs-dir", str(recorded.parent), "-o", "json"]
    done = CliRunner().invoke(cli, [*given, "--check"])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.stdout)["tables"]["exposed"]
    assert row["busy_s"] == pytest.approx(0.6)
    assert 0.0 <= row["exposed_s"] <= 0.13
    assert row["exposed_s"] == pytest.approx(row["simulated_s"], abs=0.13)
    without = CliRunner().invoke(cli, given)
    assert "simulated_s" not in json.loads(without.stdout)["tables"]["exposed"][0]
