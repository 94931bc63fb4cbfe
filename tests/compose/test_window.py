"""The window that plans keep to moves weights as simulations do, and replans keep how varied lengths are."""

from __future__ import annotations

import pytest

from placement.window import PULLED_GB_PER_S, PUSHED_GB_PER_S
from placement.workload import DomainProfile, Quantity
from rollart.compose.planner import measured
from rollart.fleet import DomainWork
from rollart.sim.links import PUSH, RDMA


def test_weights_take_what_they_take_in_simulations() -> None:
    assert PUSH.seconds(100.0) == pytest.approx(100.0 / PUSHED_GB_PER_S)
    assert RDMA.seconds(100.0) == pytest.approx(100.0 / PULLED_GB_PER_S)


def test_what_was_measured_is_as_varied_as_the_profile() -> None:
    domain = DomainProfile("d", Quantity(2.0), Quantity(0.0), Quantity(1000.0, 700.0, 2000.0),
                           first_tokens=Quantity(10.0))  # fmt: skip
    work = DomainWork(share=1.0, turns=3.0, first_tokens=10, new_tokens=0, output_tokens=500, wait_s=0.0, finished=99)
    (found,) = measured([domain], {"d": work})
    assert found.output_tokens == Quantity(500.0, 350.0, 1000.0)
    assert found.turns == Quantity(3.0)
