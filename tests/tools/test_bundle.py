"""`rollart bundle` and `rollart replay` without a trainer: what a bundle holds, and which steps can be bundled."""

from __future__ import annotations

import math
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rollart.architecture import MARKER, version_path
from rollart.errors import UsageError
from rollart.ledger.events import STEP_FAILED
from rollart.ledger.kept import KeptScore
from rollart.ledger.reader import LedgerReader
from rollart.ledger.store import Ledger
from rollart.model import Group, GroupId, Scored
from rollart.ports import RunEvent
from rollart.report.rescore import RescoredItem
from rollart.settings.run import RunSpec
from rollart.settings.training import TrainerConfig
from rollart.sim import loop
from rollart.tools.bundle import read_bundle, recorded_outcome, rewarded_batch, write_bundle
from rollart.tools.replay_step import ReplayedMetric, StepReplay, compare_metrics, replay_report
from tests.kept import charge, kept

RUN = {
    "name": "mine",
    "model": {
        "init": {"model_type": "qwen3", "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2},
        "tokenizer": "rollart.quickstart.tokenizer:write_tokenizer",
        "context": 128,
    },
    "batch": {"trajectories": 4},
    "domains": [
        {
            "name": "lake",
            "environment": "tests.contracts.worlds:Tale",
            "group_size": 2,
            "max_tokens": 4,
            "env_reward_weight": 0.5,
            "rewards": [{"function": "exact", "weight": 0.1}],
        }
    ],
    "functions": [{"name": "exact", "source": "pay.py", "handler": "exact", "env": {"JUDGE_KEY": "s3cret-of-mine"}}],
}

PAY = """\
from rollart import Sample, reward

@reward()
def exact(sample: Sample) -> float:
    return float(sample.completion == sample.reference_answer)
"""

SPEC = RunSpec.model_validate(RUN)

METRICS = {"loss": math.nan, "advantage_abs": 0.5, "grad_norm": 1.0, "cpu_seconds": 0.1}


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A run of three steps of two groups, whose fourth failed; it has versions 1 to 3, and all trajectories but one of
    step 2."""
    directory = tmp_path / "mine"
    directory.mkdir()
    (tmp_path / "pay.py").write_text(PAY)
    prices = {"prices": [{"name": "cpu", "unit": "device-hour", "usd": 0.1, "source": "u:p", "date": "2026-01-01"}]}
    cluster = {"name": "c", "pools": [{"name": "p", "device": "cpu", "count": 2}]}
    specs = {"run": RUN, "cluster": cluster, "prices": prices, "base": str(tmp_path), "at": "https://me:pw@host/x"}
    (directory / "resolved.yaml").write_text(yaml.safe_dump(specs))
    config = TrainerConfig.model_validate(
        {"model": {"init": {}}, "weights_root": str(directory / "weights"), "domains": {"lake": {}}}
    )
    (directory / "trainer.json").write_text(config.model_dump_json())
    loop.run(record(directory))
    for version in (1, 2, 3):
        at = version_path(directory / "weights", version)
        (at / "trainer").mkdir(parents=True)
        for name in (MARKER, "model.safetensors", "trainer/optimizer.safetensors"):
            (at / name).write_bytes(b"of version %d" % version)
    return directory


async def record(directory: Path) -> None:
    ledger = Ledger(directory, clock=lambda: 0.0, inline=True, kept_mb=1)
    await ledger.commit(version=0, step=0, consumed=[], metrics={})
    for step in (1, 2, 3, 4):
        groups = [await rolled_out(ledger, step, group) for group in (f"lake-{step}a", f"lake-{step}b")]
        if step < 4:
            await ledger.commit(version=step, step=step, consumed=groups, metrics=METRICS)
    ids = " ".join(sample.id for group in groups for sample in group.samples)
    ledger.event(RunEvent(9.0, STEP_FAILED, "training", {"step": 4, "version": 3, "why": "not finite", "samples": ids}))
    ledger.close()


async def rolled_out(ledger: Ledger, step: int, name: str) -> Group:
    await ledger.admit(name, "lake", 0)
    samples = []
    for member in range(2):
        score = KeptScore("exact", "d1", 0.1, Scored(member / 3))
        one = kept(f"{name}.{member}", "an answer", score)
        one.t = step + member / 10
        batch = rewarded_batch(SPEC, step, [one], recorded_outcome)
        assert not isinstance(batch, str)
        if one.id != "lake-2a.1":
            ledger.keep(one)
        await ledger.finish(batch[0], charge(one.id, t1=one.t, score=batch[0].score))
        samples += batch
    return Group(GroupId(name), "lake", tuple(samples))


def test_a_bundle_has_the_batch_as_it_was_trained(recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "b.zip"
    written = write_bundle(recorded, 3, out)
    assert (written.step, written.version, written.samples, written.trajectories) == (3, 2, 4, 4)
    with LedgerReader(recorded) as reader:
        paid = {row.id: row.score for row in reader.trajectories()}
    bundle = read_bundle(out, tmp_path / "unpacked")
    assert bundle.manifest.model_dump_json() == written.model_dump_json()
    assert math.isnan((bundle.manifest.metrics or {})["loss"])
    assert [s.id for s in bundle.samples] == ["lake-3a.0", "lake-3a.1", "lake-3b.0", "lake-3b.1"]
    assert {s.id: s.score for s in bundle.samples}.items() <= paid.items()
    assert bundle.samples[1].rewards[-1] == 0.1 * (1 / 3) + 0.5 * 0.25
    assert {one.id for one in bundle.kept} == {s.id for s in bundle.samples}
    weights = version_path(bundle.directory / bundle.trainer.weights_root, 2)
    assert (weights / "trainer/optimizer.safetensors").read_bytes() == b"of version 2"


def test_a_step_that_ended_the_run_is_bundled_from_what_waits(recorded: Path, tmp_path: Path) -> None:
    """Without a word it is the one that the user wants, and its samples are those that the trainer was given."""
    written = write_bundle(recorded, None, tmp_path / "b.zip")
    assert (written.step, written.version, written.metrics, written.failure) == (4, 3, None, "not finite")
    bundle = read_bundle(tmp_path / "b.zip", tmp_path / "unpacked")
    with LedgerReader(recorded) as reader:
        waiting = reader.waiting_samples([s.id for s in bundle.samples])
    assert sorted(waiting, key=lambda s: s.id) == list(bundle.samples)
    assert len(bundle.kept) == len(bundle.samples) == 4


def test_no_variable_and_no_password_goes_into_a_bundle(recorded: Path, tmp_path: Path) -> None:
    write_bundle(recorded, 3, tmp_path / "b.zip")
    with zipfile.ZipFile(tmp_path / "b.zip") as archive:
        content = b"".join(archive.read(name) for name in archive.namelist())
        assert not any(name.startswith("functions/") for name in archive.namelist())
    assert b"JUDGE_KEY" in content
    assert b"s3cret-of-mine" not in content
    assert b"me:pw" not in content
    why = read_bundle(tmp_path / "b.zip", tmp_path / "unpacked").manifest.functions["exact"].why
    assert "source has changed" in why, "and its package, which has its variables, is not that of the run"


@pytest.mark.parametrize(
    ("step", "weights", "words"),
    [
        (1, True, ["v0, which it started from, is not on disk", "checkpoints.every", "steps that can be: 3"]),
        (2, True, ["1 of its 4 trajectories are not kept (`keep` of the run is 'all'", "steps that can be: 3"]),
        (2, False, ["1 of its 4 trajectories are not kept", "steps that can be: 1, 3"]),
        (7, True, ["has no step 7 (it has 1 to 4)"]),
    ],
)
def test_a_step_that_cannot_be_bundled_names_those_that_can(
    recorded: Path, tmp_path: Path, step: int, weights: bool, words: list[str]
) -> None:
    with pytest.raises(UsageError) as refused:
        write_bundle(recorded, step, tmp_path / "b.zip", weights=weights)
    assert not [word for word in words if word not in str(refused.value)], refused.value
    assert not list(tmp_path.glob("*b.zip*"))
    assert write_bundle(recorded, 1, tmp_path / "b.zip", weights=False).weights is False


def damaged(data: bytes) -> list[bytes]:
    at = data.index(b"of version 2")
    return [data[: len(data) // 2], data[:at] + b"X" + data[at + 1 :], b"", b"no zip at all"]


def test_a_damaged_bundle_is_refused_in_one_line(recorded: Path, tmp_path: Path) -> None:
    write_bundle(recorded, 3, tmp_path / "b.zip")
    for number, data in enumerate(damaged((tmp_path / "b.zip").read_bytes())):
        (tmp_path / "d.zip").write_bytes(data)
        with pytest.raises(UsageError) as refused:
            read_bundle(tmp_path / "d.zip", tmp_path / f"unpacked{number}")
        assert (refused.value.exit_code, "\n" in refused.value.message) == (2, False)
        assert "is no whole bundle" in refused.value.message
    with pytest.raises(UsageError, match="no such file"):
        read_bundle(tmp_path / "missing.zip", tmp_path / "unpacked")


NUMBERS = st.floats(-1e3, 1e3)


@given(loss=NUMBERS, advantage=st.floats(0.0, 10.0), off=st.floats(-1e-5, 1e-5), other=NUMBERS)
def test_metrics_agree_bit_for_bit_or_within_the_tolerance(
    loss: float, advantage: float, off: float, other: float
) -> None:
    recorded = {"advantage_abs": advantage, "loss": loss, "entropy": other, "cpu_seconds": 1.0}
    replayed = {"advantage_abs": advantage, "loss": loss + off, "entropy": other + off, "cpu_seconds": 2.0}
    bits, near = ({m.name: m.differs for m in compare_metrics(recorded, replayed, most)} for most in (0.0, 1e-6))
    assert bits == {"advantage_abs": False, "loss": loss + off != loss, "entropy": False}
    bound = 1e-6 * max(abs(loss), abs(loss + off), advantage)
    assert near == {"advantage_abs": False, "loss": abs(loss + off - loss) > bound, "entropy": False}
    assert not any(m.differs for m in compare_metrics({"loss": math.nan}, {"loss": math.nan}, 0.0))
    assert all(m.differs for m in compare_metrics({"loss": loss}, {"loss": math.nan}, 1e-6))


def replayed(recorded: Path, out: Path, **changes: Any) -> StepReplay:
    """A replay of the step that ended the run, whose trainer failed as it did."""
    manifest = write_bundle(recorded, None, out)
    found = StepReplay(manifest, (), {}, (), frozenset(), (), 0.0, "", failure="not finite")
    return replace(found, **changes)


def test_the_first_difference_is_that_of_the_first_thing_that_a_step_computes(recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "b.zip"
    assert replayed(recorded, out).first_difference == ""
    assert replayed(recorded, out, failure="").first_difference == (
        "the trainer trained the step, recorded: it failed: not finite"
    )
    metrics = (ReplayedMetric("advantage_abs", 0.5, 0.5, False), ReplayedMetric("loss", 0.25, None, True))
    assert replayed(recorded, out, metrics=metrics).first_difference == "loss is missing, recorded 0.25"
    score = KeptScore("exact", "d1", 1.0, Scored(1.0))
    near, off = (RescoredItem(kept("g.0", "a", score), score, (Scored(value),)) for value in (1.0 + 1e-9, 0.5))
    assert replayed(recorded, out, items={"exact": (near, off)}, metrics=metrics).first_difference == (
        "reward 'exact' of g.0 is 0.5, recorded 1.0"
    )
    alone = {"items": {"exact": (near,)}, "alone": frozenset({"exact"})}
    assert replayed(recorded, out, **alone).first_difference.endswith("is 1.000000001, recorded 1.0")
    report = replay_report(replayed(recorded, out, items={"exact": (near, off)}))
    assert report.notes[-1].startswith("first difference: reward 'exact'")


async def another_life(directory: Path, t: float, lr: float, *events: RunEvent, drops: str | None = None) -> None:
    ledger = Ledger(directory, clock=lambda: t, config={"run": {"training": {"lr": lr}}}, inline=True)
    for event in (RunEvent(t, "starting", "run"), *events):
        ledger.event(event)
    if drops is not None:
        await ledger.drop(drops, "stale")
    ledger.close()


def test_a_bundle_shows_that_a_resume_changed_its_run(recorded: Path, tmp_path: Path) -> None:
    """Steps before it may have had other settings, and a step that had failed may have lost its samples."""
    loop.run(another_life(recorded, 10.0, 1.0, RunEvent(11.0, "step", "training", {"step": 3})))
    loop.run(another_life(recorded, 20.0, 1.0))
    assert write_bundle(recorded, 3, tmp_path / "b.zip").notes == []
    loop.run(another_life(recorded, 30.0, 2.0, drops="lake-4a"))
    (note,) = write_bundle(recorded, 3, tmp_path / "b.zip").notes
    assert "was resumed after step 3, with other settings" in note
    with pytest.raises(UsageError, match=r"2 of its 4 samples are gone.*steps that can be: 3"):
        write_bundle(recorded, None, tmp_path / "b.zip")
