"""No batch holds a sample older than the staleness bound, whatever the spec asks for (I3)."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from rollart.errors import RollartError
from rollart.ledger.reader import LedgerReader
from rollart.policy.schedules import FIXED_LAG, SCHEDULES
from rollart.settings.faults import FaultPlanSpec
from rollart.settings.load import load_run
from rollart.settings.resolve import Resolved
from rollart.tools.simulate import simulate
from tests.tools.test_simulate import Make, made, specs  # noqa: F401

pytestmark = pytest.mark.slow  # 100 simulations of four steps: about 20 s

STEPS = 4

FAULTS = st.fixed_dictionaries(
    {"hosts": st.just(3)},
    optional={
        "resets": st.fixed_dictionaries(
            {"fail": st.floats(0, 0.2), "stall": st.floats(0, 0.2), "stall_s": st.just(30)}
        ),
        "rates": st.just([{"parts": ["engine-*"], "every_s": 60, "seconds": 5}]),
        "outages": st.just([{"parts": ["trainer-0"], "at_s": 20, "seconds": 10}]),
    },
)


@st.composite
def overrides(draw: st.DrawFn) -> list[str]:
    """Keys of a spec that `validate` accepts: schedule, staleness, token budget, redundancy, filter."""
    schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    found = [f"schedule={schedule}"]
    if schedule in FIXED_LAG:
        found.append(f"staleness={FIXED_LAG[schedule]}")
    else:
        found.append(f"staleness={draw(st.integers(0, 3))}")
    tokens = draw(st.none() | st.integers(3_000, 25_000))
    if tokens is not None:
        sampler = draw(st.sampled_from(["token_budget"] if schedule in FIXED_LAG else ["fifo", "token_budget"]))
        found += [f"batch.tokens={tokens}", f"batch.sampler={sampler}"]
    elif draw(st.booleans()):
        found.append("training.stream=true")
    if draw(st.booleans()):
        found += [f"rollout.redundancy.groups={draw(st.sampled_from([1.25, 1.5]))}"]
    if draw(st.booleans()):
        found += ["rollout.redundancy.size=1.25"]
    if draw(st.booleans()):
        found += [
            "rollout.filter.zero_variance=true",
            "rollout.filter.exhausted=keep",
            "domains.chat.profile.solved=0.5",
        ]
    return [*found, "faults.max_rate=1"]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(overrides(), FAULTS, st.integers(0, 3))
def test_no_batch_holds_a_sample_past_its_bound(
    made: Make,  # noqa: F811
    specs: tuple[Path, Path],  # noqa: F811
    keys: list[str],
    faults: dict[str, object],
    fuzz: int,
) -> None:
    run = load_run(specs[0], keys)
    resolved: Resolved = replace(made(), run=run)
    with tempfile.TemporaryDirectory() as directory:
        done, failed = None, ""
        try:
            done = simulate(
                resolved, Path(directory), steps=STEPS, fuzz=fuzz, faults=FaultPlanSpec.model_validate(faults)
            )
        except* RollartError as errors:
            failed = str(errors.exceptions)
        assert "begun under" not in failed, "no selection leaves it to the check at the exit"
        event(f"{run.schedule} {'ended with an error' if done is None else 'ran to its end'}")
        if done is None:
            return
        late = [lag for step in done.steps for lag in step.lags.elements() if lag > run.staleness]
        assert len(done.steps) == STEPS
        assert run.schedule == "areal" or not late
        with LedgerReader(done.directory) as reader:
            reported = sum(int(e.fields["samples"] or 0) for e in reader.events("batch_over_staleness"))
        assert reported == len(late), "AReaL's excess is reported, batch by batch"
