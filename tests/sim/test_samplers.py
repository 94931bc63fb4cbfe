"""Samplers over modelled engines: their effect on steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollart.tools.simulate import simulate
from tests.tools.test_simulate import Make, made, specs  # noqa: F401


@pytest.mark.slow
def test_a_deadline_trains_what_is_there(made: Make, tmp_path: Path) -> None:  # noqa: F811
    resolved = made("batch.sampler=deadline", "batch.deadline_s=0.5", "batch.least=0.25")
    done = simulate(resolved, tmp_path / "run", steps=4)
    assert all(4 <= s.trajectories <= 16 for s in done.steps)
    assert min(s.trajectories for s in done.steps) < 16


@pytest.mark.slow
def test_a_token_budget_evens_steps_out(made: Make, tmp_path: Path) -> None:  # noqa: F811
    def spread(name: str, *overrides: str) -> float:
        seconds = [s.train_s for s in simulate(made(*overrides), tmp_path / name, steps=4).steps]
        return max(seconds) / min(seconds)

    whole, cut = spread("whole"), spread("cut", "batch.sampler=token_budget", "batch.tokens=9000")
    assert cut - 1 < 0.5 * (whole - 1), "what remains is attention, which grows with lengths"


@pytest.mark.slow
def test_references_hide_behind_the_rollout(made: Make, tmp_path: Path) -> None:  # noqa: F811
    """Modelled: a third of a training pass, in the step or before it, on the same devices."""

    def trained(name: str, *overrides: str) -> list[float]:
        run = made("schedule=sync_plus", *overrides)
        return [s.train_s for s in simulate(run, tmp_path / name, steps=3).steps]

    plain, step = trained("plain"), trained("step", "training.loss.kl=0.1")
    filled = trained("filled", "training.loss.kl=0.1", "training.columns=[ref_logprobs]")
    assert step == pytest.approx([seconds * 4 / 3 for seconds in plain], rel=1e-3)
    assert filled == pytest.approx(plain)
