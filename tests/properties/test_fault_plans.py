"""Under any fault plan a simulated run keeps its promises: it trains all steps or reports the cause."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from rollart.errors import RollartError
from rollart.ledger.reader import LedgerReader
from rollart.policy.schedules import SCHEDULES
from rollart.settings.faults import FaultPlanSpec
from rollart.settings.resolve import Resolved, forecast, read_specs
from rollart.sim.loop import Deadlock
from rollart.testing.laws import find_tiling_errors
from rollart.tools.simulate import simulate
from rollart.tools.simulations import simulation_finding
from tests.tools.test_simulate import CLUSTER, RUN

pytestmark = pytest.mark.slow  # a run of three steps for each example: about 15 s

STEPS, HOSTS = 3, 3

PARTS = st.lists(
    st.sampled_from(["engine-*", "engine-0", "engine-1", "trainer-0", "machine-big-0", "host-*", "host-1", "link-*"]),
    min_size=1,
    max_size=2,
    unique=True,
)
SECONDS = st.floats(0.5, 60.0)
OUTAGES = st.lists(
    st.builds(lambda p, a, s: {"parts": p, "at_s": a, "seconds": s}, PARTS, SECONDS, SECONDS), max_size=3
)
RATES = st.lists(
    st.builds(lambda p, e, s: {"parts": p, "every_s": e, "seconds": s}, PARTS, st.floats(10, 200), st.floats(0.5, 20)),
    max_size=2,
)
RESETS = st.none() | st.builds(
    lambda f, s: {"fail": f, "stall": s, "stall_s": 5.0}, st.floats(0, 0.2), st.floats(0, 0.3)
)
FUNCTIONS = st.lists(
    st.builds(
        lambda t, c, n: {"throttled": t, "crash": c, "concurrency": n},
        st.floats(0, 0.3),
        st.floats(0, 0.2),
        st.integers(1, 20),
    ),
    max_size=1,
)


@functools.cache
def resolved() -> Resolved:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "r.yaml").write_text(RUN)
        (Path(directory) / "c.yaml").write_text(CLUSTER)
        return forecast(read_specs(f"{directory}/r.yaml", f"{directory}/c.yaml", ["faults.max_rate=1"]))


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(SCHEDULES)), OUTAGES, RATES, RESETS, FUNCTIONS, st.integers(0, 3))
def test_a_run_survives_its_faults_or_says_why_not(
    schedule: str, outages: list[object], rates: list[object], resets: object, functions: list[object], fuzz: int
) -> None:
    plan = FaultPlanSpec.model_validate(
        {"hosts": HOSTS, "outages": outages, "rates": rates, "resets": resets, "functions": functions}
    )
    with tempfile.TemporaryDirectory() as directory:
        done = None
        try:
            done = simulate(resolved(), Path(directory), schedule=schedule, steps=STEPS, fuzz=fuzz, faults=plan)
        except* RollartError:
            pass  # a trainer that dies too often, a group that no attempt completes: a proper error
        event("ended with an error" if done is None else "ran to its end")
        if done is None:
            return
        assert [s.trajectories for s in done.steps] == [16] * STEPS
        with LedgerReader(done.directory) as reader:
            assert not find_tiling_errors(reader.intervals()), "every second of every device is in one state"
            assert reader.facts().trained_samples == STEPS * 16, "each once"
        cost = simulation_finding(done).faults
        assert (cost is None) == (plan == FaultPlanSpec(hosts=HOSTS))
        if cost is not None:
            assert all(seconds >= 0 for seconds in cost.observed.down_s.values())
            assert cost.down_device_s <= done.seconds * 16 + 1e-6


def test_a_deadlock_would_be_no_product_error() -> None:
    """The test above would see a wedge: it is not among the errors that it takes for an answer."""
    assert not issubclass(Deadlock, RollartError)
