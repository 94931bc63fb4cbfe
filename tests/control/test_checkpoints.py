"""Versions on disk: the last ones, every n-th and the best one stay, those in use too, and the others go."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.adapters.weights.directory import DirectoryWeightStore
from rollart.control.publish import CheckpointKeeper
from rollart.model import Group, GroupId, TrainSample
from rollart.policy.checkpoints import CheckpointPolicy, metric_value, references
from rollart.report.checkpoints import best_version
from rollart.sim import loop
from rollart.sim.run import MemoryWeights
from rollart.testing.ledger import MemoryRecorder
from rollart.testing.run import make_simulated_run
from tests.tools.test_export import record, write_files


class Versions(MemoryWeights):
    """A store of numbers."""

    def __init__(self) -> None:
        self.held: set[int] = set()

    def versions(self) -> list[int]:
        return sorted(self.held)

    def prune(self, keep: Sequence[int], checkpoints: Sequence[int] = ()) -> None:
        self.held &= {*keep, *checkpoints}


def group(*rewards: float, domain: str = "a") -> Group:
    samples = [TrainSample.unsampled(str(n), domain, (1,), (2,), score=score) for n, score in enumerate(rewards)]
    return Group(GroupId("g"), domain, tuple(samples))


@given(
    scores=st.lists(st.one_of(st.none(), st.integers(0, 3)), min_size=1, max_size=40),
    reads=st.lists(st.integers(0, 39), max_size=40),
    keep=st.integers(2, 5),
    every=st.one_of(st.none(), st.integers(1, 9)),
)
@settings(max_examples=60)
def test_the_versions_on_disk_are_those_of_the_policy(
    scores: list[int | None], reads: list[int], keep: int, every: int | None
) -> None:
    """At each publish; `reads` are versions that an engine reads at the publish of the same index."""

    async def run() -> None:
        store, in_use, evaluated = Versions(), set[int](), dict[int, int]()
        policy = CheckpointPolicy(keep, every)
        keeper = CheckpointKeeper(store, MemoryRecorder(), policy, "success", lambda: in_use)
        for version, score in enumerate(scores):
            in_use.clear()
            in_use.update({reads[version]} & store.held if version < len(reads) else ())
            store.held.add(version)
            before = set(store.held)
            keeper.published(version, ())
            best = max(((s, v) for v, s in evaluated.items()), default=(0, -1))[1]
            wanted = {v for v in before if v > version - keep or v == best or (every and v % every == 0)}
            assert store.held == wanted | in_use
            assert len(store.held - in_use) <= keep + (math.ceil((version + 1) / every) if every else 0) + 1
            if score is not None:
                evaluated[version] = score
                keeper.evaluated(version, {"a": float(score)})

    loop.run(run(), seed=None)


@pytest.mark.parametrize("reset", [0, 3])
def test_both_versions_that_a_run_may_go_on_from_have_their_reference(
    reset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the newest version is damaged, a resume trains the one before it again, with the reference of that one."""
    kept: list[set[int]] = []
    monkeypatch.setattr(MemoryWeights, "prune", lambda self, keep, checkpoints=(): kept.append({*keep}))
    world = make_simulated_run(steps=7)
    settings = dataclasses.replace(world.settings(), reference=reset)
    monkeypatch.setattr(world, "settings", lambda: settings)
    loop.run(world.run(), seed=1)
    first = [(v, v - v % reset if reset else 0) for v in range(8)]
    assert kept == [{*first[version - 1], *first[version]} for version in range(1, 8)]


def test_by_default_the_last_two_stay_and_nothing_is_recorded() -> None:
    async def run() -> None:
        store, recorder = Versions(), MemoryRecorder()
        keeper = CheckpointKeeper(store, recorder, CheckpointPolicy(), None, lambda: (0,))
        for version in range(5):
            store.held.add(version)
            keeper.evaluated(version, {"a": 1.0})
            keeper.published(version, [group(1.0)])
        assert store.held == {0, 3, 4}
        assert recorder.events == []

    loop.run(run(), seed=None)


def test_the_ledger_has_the_changes_and_the_reward_belongs_to_the_version_before(tmp_path: Path) -> None:
    async def run() -> None:
        store, recorder = DirectoryWeightStore(tmp_path), MemoryRecorder()
        keeper = CheckpointKeeper(store, recorder, CheckpointPolicy(), "reward.a", tuple)
        for version, reward in ((1, 0.5), (2, 0.9), (3, 0.1), (4, 0.2)):
            Path(store.path(version)).mkdir()
            (Path(store.path(version)) / "COMPLETE").touch()
            keeper.published(version, [group(reward, reward), group(100.0, domain="b")])
        assert store.versions() == [1, 3, 4]
        best = [(e.subject, e.fields["score"]) for e in recorder.events if e.kind == "best_version"]
        assert best == [("v0", 0.5), ("v1", 0.9)]
        changes = [e.fields for e in recorder.events if e.kind == "checkpoints"]
        assert changes[-2:] == [{"kept": "v1 v2 v3", "removed": ""}, {"kept": "v1 v3 v4", "removed": "v2"}]

    loop.run(run(), seed=None)


def test_a_metric_is_a_mean_over_the_domains_or_of_one() -> None:
    values = {"a": 0.5, "b": 1.0, "c": None}
    assert metric_value("success", "success", values) == 0.75
    assert metric_value("success.b", "success", values) == 1.0
    assert metric_value("success.c", "success", values) is None
    assert metric_value("reward", "success", values) is None
    assert metric_value("success", "success", {"c": None}) is None


@given(reset=st.integers(0, 9), newest=st.integers(0, 40))
def test_a_resume_from_either_of_the_last_two_versions_has_its_reference(reset: int, newest: int) -> None:
    """At each publish all but the last two versions and the references go."""
    held = set[int]()
    for version in range(newest + 1):
        held.add(version)
        held &= {version - 1, version} | references(version, reset)
    assert len(held) <= 4
    for version in {max(0, newest - 1), newest}:
        assert (version - version % reset if reset else 0) in held


def test_the_best_version_is_none_that_a_resume_gave_up(tmp_path: Path) -> None:
    """The event of the rollback may not be in the ledger yet when the scores are read."""
    record(tmp_path, 6, {2: 0.5, 5: 0.9})
    for version in (2, 4, 5):
        write_files(tmp_path, version)
    assert best_version(tmp_path, "success", 5) == (0.9, 5)
    assert best_version(tmp_path, "success", 4) == (0.5, 2)
