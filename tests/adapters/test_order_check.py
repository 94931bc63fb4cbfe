"""The check of a run's functions on its first items: held until it has ended, refused with the difference."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import pytest

from rollart.adapters.rewards.order_check import GATHER_S, ITEMS, OrderCheckedOffload
from rollart.errors import SpecError
from rollart.model import Outcome, Scored
from rollart.sim import loop as virtual
from rollart.testing.functions import Meter
from serverless.deploy.package import Package
from serverless.errors import BackendFailed
from serverless.history import OrderedCall
from serverless.pipeline.offload import Offload
from serverless.providers.simulated import Profile, SimulatedBackend
from serverless.types import Cause, InfraFault, Item
from tests.serverless.support import item, package


def different(n: int) -> list[Item]:
    return [Item(f"t{k}", ({"role": "assistant", "content": f"answer {k}"},)) for k in range(n)]


def run_with(
    function: Callable[[Item], Any],
    items: Sequence[Item],
    *,
    cases: Mapping[str, Sequence[Item]] | None = None,
    refuses: bool = False,
    why: list[str] | None = None,
    **settings: Any,
) -> tuple[list[Outcome | SpecError], list[str], Meter, float]:
    """Score all items at once. The outcomes or errors, the kinds of events, the bills, and the seconds."""
    notes: list[str] = []
    meter = Meter()
    one = package("behave", **settings)

    async def main() -> tuple[list[Any], float]:
        loop = asyncio.get_running_loop()
        profiles = {"behave": Profile()}
        async with SimulatedBackend({"behave": function}, meter=meter, profiles=profiles) as backend:

            @contextlib.asynccontextmanager
            async def worker(package: Package) -> AsyncIterator[OrderedCall]:
                if refuses:
                    raise BackendFailed("not here", remedy="elsewhere")
                async with backend.one_worker(package, Cause.CHECK) as call:
                    yield call

            async with Offload([one], backend) as offload:

                def note(kind: str, function: str, values: Mapping[str, Any]) -> None:
                    notes.append(kind)
                    if why is not None:
                        why.append(values["why"])

                checked = OrderCheckedOffload(offload, [one], worker, note=note, cases=cases)
                async with checked:
                    began = loop.time()
                    tasks = [asyncio.ensure_future(checked.submit("behave", each, 60.0)) for each in items]
                    found = await asyncio.gather(*tasks, return_exceptions=True)
                    return found, loop.time() - began

    found, seconds = virtual.run(main())
    return found, notes, meter, seconds


def test_a_function_of_its_item_passes_and_its_calls_have_their_own_cause() -> None:
    found, notes, meter, seconds = run_with(lambda each: len(each.completion), different(2 * ITEMS))
    assert all(isinstance(one, Scored) for one in found)
    assert notes == ["order_checked"]
    assert seconds < GATHER_S, "it waits for no more items than it needs"
    assert meter.usage["behave"].items == 2 * ITEMS + 2 * ITEMS


def test_a_function_that_counts_is_refused_before_any_score_is_returned() -> None:
    count = itertools.count()
    found, notes, _, _ = run_with(lambda each: next(count), different(2 * ITEMS))
    assert all(isinstance(one, SpecError) for one in found)
    assert "behave is declared deterministic, but its answers depend on earlier calls" in str(found[0])
    assert notes == []


def test_few_items_are_checked_after_a_second() -> None:
    found, notes, _, seconds = run_with(lambda each: 1.0, different(2))
    assert [isinstance(one, Scored) for one in found] == [True, True]
    assert (notes, GATHER_S <= seconds < GATHER_S + 1.0) == (["order_checked"], True)


def test_cases_are_checked_at_the_start() -> None:
    count = itertools.count()
    with pytest.raises(SpecError, match="item case: 0 as call 1"):
        run_with(lambda each: next(count), [], cases={"behave": [item("case")]})
    found, notes, meter, _ = run_with(lambda each: 1.0, different(3), cases={"behave": [item("case")]})
    assert (notes, len(found)) == (["order_checked"], 3)
    assert meter.usage["behave"].items == 2 + 3


def test_cases_that_are_not_the_functions_own_prove_nothing() -> None:
    """The run's own items are used then."""

    def function(each: Item) -> float:
        if each.id == "case":
            raise KeyError("tests")
        return 1.0

    found, notes, _, _ = run_with(function, different(ITEMS), cases={"behave": [item("case")]})
    assert notes == ["order_checked"]
    assert not any(isinstance(one, InfraFault | SpecError) for one in found)


def test_a_function_that_cannot_run_here_passes_with_an_event() -> None:
    found, notes, _, _ = run_with(lambda each: 1.0, different(2), refuses=True)
    assert (notes, all(isinstance(one, Scored) for one in found)) == (["order_not_checked"], True)


def test_the_reason_is_the_first_fault() -> None:
    """Also after faults on cases: that of the run's own items is what keeps it from being checked."""
    count = itertools.count()

    def raises(each: Item) -> float:
        raise OSError(f"no data {next(count)}" if each.id == "t0" else "no case")

    why: list[str] = []
    found, notes, _, _ = run_with(raises, different(1), cases={"behave": [item("case")]}, why=why)
    assert notes == ["order_not_checked"]
    assert isinstance(found[0], InfraFault)
    assert [one.partition("no data")[0] for one in why] == ["crash: OSError: "]


def test_other_functions_are_exempt() -> None:
    count = itertools.count()
    found, notes, meter, seconds = run_with(lambda each: next(count), different(3), deterministic=False)
    assert all(isinstance(one, Scored) for one in found)
    assert (notes, meter.usage["behave"].items, seconds < GATHER_S) == ([], 3, True)
