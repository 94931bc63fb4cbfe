"""Calibrate this machine, then predict a run that it has never seen.

That predictions are within 10 % of the rates on a quiet machine is for `benchmarks/local_prediction.py` to show: other
load on the host moves rates by more. What is asserted here of real processes is their CPU time, with room to spare.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.local_prediction import REFERENCES, lake_only, variant
from placement.calibrate import Fit, Row
from placement.problem import DomainProfile, EnvironmentCost, Quantity
from placement.roofline import Calibration, Constants, Roofline
from placement.types import Device
from rollart.errors import UsageError
from rollart.quickstart.spelling import EOS
from rollart.quickstart.tokenizer import write_tokenizer
from rollart.settings.planning import run_shape
from rollart.settings.resolve import Resolved, resolve_files
from rollart.tools.calibrate import (
    Machine,
    SteadyStateMeasurement,
    TrainingMeasurement,
    calibrate,
    fit_machine,
    measure,
)
from rollart.tools.predict import predict, profile_by_play
from tests.e2e.harness import CLUSTER, tiny

CONSTANTS = Constants(
    effective_tflops=0.05, effective_tb_per_s=0.02, step_s=5e-4, layer_s=0.0, row_s=2e-5, request_s=5e-5
)
MODEL = "rollart.quickstart.policy_config:policy_config"
MACHINE = Machine(
    engine=Fit(Calibration(CONSTANTS, "cpu", "cpu", "bf16", MODEL, 0.1), 0.05),
    update_s=4e-3,
    token_s=2.4e-5,
    action_s=5e-6,
    trajectory_s=4e-4,
    turn_s=2e-4,
    said_s=5e-6,
    function_s=7e-5,
    publish_s=0.05,
    queue=0.6,
    reward_latency_s=0.01,
    cores=2,
)

LAKE = DomainProfile("frozen_lake", Quantity(5.0, 5.0, 8.0), Quantity(7.0), Quantity(1.0), first_tokens=Quantity(24.0))
WORDS = DomainProfile(
    "spell_backward", Quantity(1.0, 1.0, 1.0), Quantity(0.0), Quantity(20.0), first_tokens=Quantity(6.5)
)

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture
def quickstart() -> Resolved:
    return resolve_files()


def slow(seconds: float) -> DomainProfile:
    return replace(LAKE, environment=EnvironmentCost(wait_s=seconds))


def test_a_run_that_its_trainer_bounds(quickstart: Resolved) -> None:
    """By hand: 16 games of 24 + 4 × 7 + 5 tokens and 32 words of 26.5, in four epochs."""
    found = predict(quickstart, [LAKE, WORDS], MACHINE)
    tokens, actions = 16 * 57 + 32 * 26.5, 16 * 5 + 32 * 20
    trained = 4 * (4e-3 + 2.4e-5 * tokens + 5e-6 * actions)
    controller = 48 * 4e-4 + (16 * 5 + 32) * 2e-4 + actions * 5e-6
    assert found.step_s == pytest.approx(trained + 0.05 + 0.6 * controller)
    assert found.rate == pytest.approx(48 / found.step_s, rel=2e-3)
    assert "trainer" in found.binds
    assert found.cpu["controller"] == pytest.approx(controller / 48)


@pytest.mark.slow  # solves a dozen plans for each of four runs: about 2 s
def test_a_run_that_waits_for_its_environment(quickstart: Resolved) -> None:
    """Every domain has slots of its own: a slow one sets the pace for all, whatever its share."""
    rates = [predict(quickstart, [slow(s), WORDS], MACHINE) for s in (0.0, 0.5, 1.0, 2.0)]
    assert [r.rate for r in rates] == sorted((r.rate for r in rates), reverse=True)
    # Two batches in flight, one game takes 5 × 2 s and more: no more than 2 × 48 per 10 s, and less for the late ones.
    assert 0.5 * 9.6 < rates[3].rate < 9.6
    assert "in flight" in rates[3].binds
    assert rates[2].rate == pytest.approx(2 * rates[3].rate, rel=0.1)


@pytest.mark.slow  # solves a dozen plans for each of three runs: about 2 s
def test_more_staleness_hides_more_waiting() -> None:
    rates = [
        predict(resolve_files(overrides=[f"staleness={alpha}"]), [slow(1.0), WORDS], MACHINE).rate
        for alpha in (1, 2, 4)
    ]
    assert rates[0] < rates[1] < rates[2]


@pytest.mark.slow
def test_parts_share_the_cores(quickstart: Resolved) -> None:
    """A controller of 4 ms a trajectory leaves no room for more than 250 a second, whatever the trainer could do."""
    busy = replace(MACHINE, trajectory_s=4e-3, turn_s=0.0, said_s=0.0, queue=0.0, token_s=1e-6, update_s=0.0)
    found = predict(quickstart, [LAKE, WORDS], busy)
    assert found.rate <= 250
    assert sum(found.cpu.values()) * found.rate <= 2 + 1e-6


def test_what_was_measured_is_explained(quickstart: Resolved) -> None:
    """From what a machine of known constants would show, the constants come back."""
    shape = run_shape(quickstart)
    engine = Roofline(shape, Device("cpu", generation="cpu"), 1, CONSTANTS, kv_capacity_bytes=1e9)
    grid = [(b, n, c, o) for b in (4, 16, 64, 128) for n, c, o in ((8, 0, 24), (11, 29, 1), (120, 0, 1), (60, 0, 8))]
    rows = [Row("turn", engine.turn_s(b, n, c, o), "cpu", new=n, cached=c, batch=b, output=o) for b, n, c, o in grid]
    steps = [
        TrainingMeasurement(t, a, 2, m, 2 * (m * 4e-3 + t * 2.4e-5 + a * 5e-6))
        for t, a, m in ((3000, 2500, 2), (6000, 500, 2), (9000, 3000, 4), (1000, 100, 1))
    ]
    runs = [_shown(24, 48, 20.0), _shown(128, 64, 20.0), _shown(0, 160, 12.0)]
    found = fit_machine(quickstart, rows, steps, runs)
    for name in ("update_s", "token_s", "action_s", "function_s", "publish_s", "queue", "reward_latency_s"):
        assert getattr(found, name) == pytest.approx(getattr(MACHINE, name), rel=1e-6), name
    assert found.engine.calibration.error < 0.02
    for run in runs:  # the controller's three constants lean on their prior a little
        assert found.controller_s(run.profiles) == pytest.approx(run.cpu["controller"], rel=0.03)


def _shown(games: int, words: int, said: float) -> SteadyStateMeasurement:
    """What `MACHINE` would show of a run whose words are answered with `said` tokens."""
    spell = replace(WORDS, output_tokens=Quantity(said))
    batch = games + words
    mix = [replace(p, weight=float(w)) for p, w in ((LAKE, games), (spell, words)) if w]
    tokens, actions = games * LAKE.total_tokens + words * spell.total_tokens, games * 5.0 + words * said
    controller = MACHINE.controller_s(mix)
    trained = 2 * (2 * MACHINE.update_s + tokens * MACHINE.token_s + actions * MACHINE.action_s)
    return SteadyStateMeasurement(
        rate=1.0,
        batch=batch,
        steps=10,
        seconds=10.0,
        publish_s=MACHINE.publish_s,
        handover_s=MACHINE.queue * batch * controller,
        train=TrainingMeasurement(tokens, actions, 2, 2, trained),
        reward_latency_s=MACHINE.reward_latency_s,
        cpu={"controller": controller, "functions": MACHINE.function_s},
        profiles=tuple(mix),
    )


def test_a_machine_survives_its_file(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(MACHINE.to_dict()))
    assert Machine.from_dict(json.loads(file.read_text())) == MACHINE


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"token_s": -1.0}, "token_s"),
        ({"queue": "fast"}, "queue"),
        ({"schema_version": 9}, "schema_version"),
        ({"extra": 1.0}, "extra"),
        ({"publish_s": float("nan")}, "publish_s"),
    ],
)
def test_a_file_that_no_machine_wrote(changed: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Machine.from_dict({**MACHINE.to_dict(), **changed})


@pytest.mark.slow  # imports two libraries of environments: about 2 s
def test_environments_are_played_without_a_model(quickstart: Resolved, tmp_path: Path) -> None:
    lake, words = asyncio.run(profile_by_play(quickstart, tmp_path, episodes=40))
    assert (lake.name, lake.prompt.mean, lake.new_tokens.mean, lake.output_tokens.mean) == ("frozen_lake", 24, 7, 1)
    assert 1 < lake.turns.mean < 8
    assert words.turns.mean == 1
    assert 3 * 4 <= words.output_tokens.mean <= 24
    assert words.source == "played, n=40"


def test_play_counts_the_tokens_of_messages(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path / "tokenizer").parent
    (directory / "chat_template.jinja").write_text(f"{{% for m in messages %}}{{{{ m.content }}}} {EOS} {{% endfor %}}")
    spec = tiny(model__tokenizer=str(directory), domains__0__environment_args={"turn_s": 0.0})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(spec))
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    for chat, tokens in (("false", (1, 1)), ("true", (2, 3))):  # an observation is a word, and each message has an end
        resolved = resolve_files(tmp_path / "run.yaml", tmp_path / "cluster.yaml", [f"domains.0.chat={chat}"])
        (coin,) = asyncio.run(profile_by_play(resolved, tmp_path, episodes=2))
        assert (coin.prompt.mean, coin.new_tokens.mean) == tokens


def test_references_are_three(quickstart: Resolved) -> None:
    with pytest.raises(UsageError, match="three"):
        calibrate(quickstart, [quickstart] * 2)


@pytest.mark.slow  # starts an engine and a trainer five times: about 70 s
def test_a_machine_is_calibrated_and_a_run_is_predicted(tmp_path: Path) -> None:
    references: Sequence[Resolved] = [variant(edit, tmp_path, steps=10) for edit in REFERENCES]
    machine, _ = calibrate(references[0], references, out=tmp_path / "machine.json", passes=1)
    assert Machine.from_dict(json.loads((tmp_path / "machine.json").read_text())) == machine
    unseen = variant(lake_only, tmp_path, steps=10)
    measured = measure(unseen)
    found = predict(unseen, measured.profiles, machine)
    parts = ("engine", "trainer", "controller")
    assert 0.4 < sum(measured.cpu[p] for p in parts) / sum(found.cpu[p] for p in parts) < 2.5
    assert "trainer" in found.binds
    # The clock of a host whose other load comes and goes between the two says little.
    assert 0.1 < found.rate / measured.rate < 10.0
