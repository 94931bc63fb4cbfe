"""The reward for mathematics, with the real library."""

from __future__ import annotations

import asyncio
import importlib
import pathlib
import sys
import threading
from typing import Any

import pytest

from serverless.deploy.package import build
from serverless.errors import ExtraMissing
from serverless.pipeline.offload import Offload
from serverless.rewards.math_verify import MathVerify
from serverless.spec import FunctionSpec
from serverless.types import FaultKind, InfraFault, Item, ModelFault, Outcome, Scored
from serverless.workers.local import LocalBackend
from tests.serverless.support import descendants


def item(completion: str, reference: str | None, **metadata: Any) -> Item:
    return Item("a", ({"role": "assistant", "content": completion},), reference, metadata)


@pytest.fixture(scope="module")
def score() -> MathVerify:
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    one = MathVerify()
    one.load(pathlib.Path())
    return one


@pytest.mark.slow  # loads sympy
@pytest.mark.parametrize(
    ("completion", "reference", "value"),
    [
        ("so it is \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("The answer is $\\frac{2}{4}$.", "\\frac12", 1.0),
        ("\\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        ("\\boxed{\\{1,2,3\\}}", "\\{3,2,1\\}", 1.0),
        ("<answer>2\\sqrt{2}</answer> and not 5", "\\sqrt{8}", 1.0),
        ("the answer is 42", "42", 1.0),
        ("\\boxed{41}", "42", 0.0),
        ("\\boxed{x^2+1}", "x^2+2x+1", 0.0),
        ("I have no idea", "42", 0.0),
    ],
)
def test_equivalent_answers_score(score: MathVerify, completion: str, reference: str, value: float) -> None:
    outcome = score(item(completion, reference))
    assert isinstance(outcome, Scored)
    assert outcome.value == value
    assert outcome.metrics["parsed"] == float("idea" not in completion)


@pytest.mark.slow  # waits for a time limit
def test_what_never_ends_is_cut_and_is_the_policys_fault(score: MathVerify) -> None:
    before = set(descendants())
    outcome = score(item("\\boxed{9^{9^{9^{9}}}}", "3", timeout_s=1.0))
    assert outcome == ModelFault(0.0, "the comparison failed: no result in 1 s")
    assert set(descendants()) <= before
    assert score(item("", "3")) == ModelFault(0.0, "empty completion")


@pytest.mark.slow  # loads sympy
def test_a_reference_that_is_none_is_the_data_sets_fault(score: MathVerify) -> None:
    with pytest.raises(ValueError, match="no reference_answer"):
        score(item("1", None))
    with pytest.raises(ValueError, match="cannot be parsed"):
        score(item("1", "many words, no number"))


@pytest.mark.slow  # loads sympy
def test_it_works_in_threads_where_the_library_alone_does_not(score: MathVerify) -> None:
    outcomes: list[Outcome] = []
    errors: list[str] = []

    def run() -> None:
        try:
            importlib.import_module("math_verify").parse("$1$")
        except ValueError as error:
            errors.append(str(error))
        outcomes.append(score(item("\\boxed{1}", "1")))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 3
    assert [o.value for o in outcomes if isinstance(o, Scored)] == [1.0] * 3


def test_a_machine_without_processes_is_the_platforms_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("os.fork", refuse)
    outcome = MathVerify()(item("1", "1"))
    assert isinstance(outcome, InfraFault)
    assert (outcome.kind, outcome.retryable) == (FaultKind.ENVIRONMENT, True)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ExtraMissing, match=r"pip install 'rollart\[math\]'"):
        MathVerify().load(pathlib.Path())


@pytest.mark.slow  # real processes
def test_it_runs_in_the_workers_of_the_local_backend(score: MathVerify) -> None:
    async def main() -> list[Outcome]:
        one = build(FunctionSpec(name="math", source="serverless.rewards.math_verify:MathVerify"))
        async with LocalBackend() as backend:
            await backend.deploy(one)
            async with Offload([one], backend) as offload, asyncio.TaskGroup() as group:
                asked = [("\\boxed{\\frac{1}{2}}", "0.5"), ("\\boxed{3}", "4"), ("\\boxed{9^{9^{9^{9}}}}", "3")]
                items = [
                    Item(str(n), ({"role": "assistant", "content": c},), r, {"timeout_s": 2.0})
                    for n, (c, r) in enumerate(asked)
                ]
                tasks = [group.create_task(offload.submit("math", i, 60.0)) for i in items]
            return [task.result() for task in tasks]

    before = set(descendants())
    right, wrong, endless = asyncio.run(main())
    assert isinstance(right, Scored)
    assert isinstance(wrong, Scored)
    assert (right.value, wrong.value) == (1.0, 0.0)
    assert isinstance(endless, ModelFault)
    assert set(descendants()) <= before
