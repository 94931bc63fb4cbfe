"""What is kept of trajectories: every attempt of the chosen prompts, with its content and the routes of its turns."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.control.keeping import TrajectoryKeeper, in_share
from rollart.ledger.kept import KeptTrajectory
from rollart.model import SegmentKind
from rollart.settings.run import EvaluationSpec, KeepSpec
from rollart.sim import loop
from rollart.testing.run import SimulatedRun, make_simulated_run


def kept_by(keep: str, **more: object) -> tuple[SimulatedRun, list[KeptTrajectory]]:
    found: list[KeptTrajectory] = []
    run = make_simulated_run(
        quotas={"a": (4, 2)},
        engines=2,
        turns=3,
        engine_s=lambda r: 0.1 + r.random(),
        env_s=lambda r: r.random(),
        **more,  # type: ignore[arg-type]
    )
    run.evaluation = EvaluationSpec(episodes=2, at=("end",))
    run.trace = TrajectoryKeeper(KeepSpec(items=keep), found.append)
    loop.run(run.run())
    return run, found


def test_every_attempt_is_kept_as_it_was() -> None:
    """Finished ones with the tokens that were trained, aborted ones up to their end, evaluations too."""
    run, found = kept_by("all", env_faults=0.2)
    charges = {charge.trajectory: charge for charge in run.recorder.charges}  # type: ignore[attr-defined]
    assert sorted(one.id for one in found) == sorted(charges), "each once"
    trained = {sample.id: sample for _, batch in run.trainer.batches for sample in batch}
    assert {charge.outcome for charge in charges.values()} >= {"finished", "infra_fault"}
    assert {charge.purpose for charge in charges.values()} == {"train", "eval"}
    for one in found:
        charge, trajectory = charges[one.trajectory.id], one.trajectory
        assert (trajectory.purpose, trajectory.domain) == (charge.purpose, charge.domain)
        sampled = [s for s in trajectory.segments if s.kind is SegmentKind.ACTION]
        assert sum(len(s.token_ids) for s in sampled) == charge.action_tokens
        assert {turn.index for turn in trajectory.turns} == {s.turn for s in trajectory.segments}, (
            "no turn without text"
        )
        if (sample := trained.get(trajectory.id)) is not None:
            assert trajectory.token_ids == sample.token_ids
            assert tuple(m for s in trajectory.segments for m in s.loss_mask) == sample.loss_mask


def test_the_routes_of_turns_add_up() -> None:
    run, found = kept_by("all")
    charges = {charge.trajectory: charge for charge in run.recorder.charges}  # type: ignore[attr-defined]
    for one in found:
        charge = charges[one.trajectory.id]
        assert abs(sum(route.engine_s for route in one.routes) - charge.engine_seconds) < 1e-9
        assert sum(route.prefilled for route in one.routes) == charge.prompt_tokens
        assert all(0.0 <= route.asked <= route.routed <= charge.t1 - charge.t0 for route in one.routes)
    whys = {route.why for one in found for route in one.routes}
    assert whys == {"least loaded", "its KV is there"}
    assert {route.engine for one in found for route in one.routes} == {"e0", "e1"}


def test_a_sample_has_all_attempts_of_its_prompts() -> None:
    run, found = kept_by("sample 0.5", env_faults=0.2)
    ids = {charge.trajectory for charge in run.recorder.charges}  # type: ignore[attr-defined]
    assert {one.trajectory.id for one in found} == {id_ for id_ in ids if in_share(id_.rpartition(".")[0], 0.5)}
    assert 0 < len(found) < len(ids)


@given(st.floats(0, 1))
@settings(max_examples=20)
def test_a_share_of_the_prompts(share: float) -> None:
    chosen = [in_share(f"lake-{n}", share) for n in range(2000)]
    assert abs(sum(chosen) / 2000 - share) < 0.05
