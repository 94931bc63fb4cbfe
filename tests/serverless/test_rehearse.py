"""A rehearsal reports a function's results, resources and cost; the template of `init` passes its own cases."""

from __future__ import annotations

import asyncio
import json
import pathlib
from typing import Any

import pytest

from serverless.deploy import template
from serverless.deploy.package import Package, build
from serverless.errors import PackageError, SpecInvalid
from serverless.providers.simulated import Profile, SimulatedBackend
from serverless.rehearse import ExpectedOutcome, Rehearsal, RehearsalCase, cost, read_cases, rehearse
from serverless.spec import FunctionSpec
from serverless.types import FaultKind, InfraFault, Item, ModelFault, Scored, TokenUsage
from serverless.usage import record_tokens
from serverless.workers.local import LocalBackend
from tests.serverless.support import Simulated, package

LAMBDA = {"GB-second": 0.0000166667, "million-requests": 0.20}
MODAL = {"core-second": 0.0000131, "GiB-second": 0.00000222}


def spec(**settings: Any) -> FunctionSpec:
    return FunctionSpec(name="f", source="f.py", **settings)


@pytest.mark.parametrize(
    ("settings", "prices", "call_s", "items", "usd"),
    [
        ({"memory_mb": 1769}, LAMBDA, 0.050, 1, 1.64),
        ({"memory_mb": 1769}, LAMBDA, 0.050 * 16, 16, 1.45),
        ({"memory_mb": 1769}, {**LAMBDA, "GB-second": 0.0000133334}, 0.050 * 16, 16, 1.16),
        ({"memory_mb": 256}, LAMBDA, 0.002, 1, 0.21),
        ({"memory_mb": 256}, LAMBDA, 0.002 * 64, 64, 0.0115),
        ({"memory_mb": 1024, "cpu": 1}, MODAL, 0.050, 1, 0.77),
        ({"memory_mb": 1024}, MODAL, 1.0, 1, 0.125 * 13.1 + 2.22),
        ({"gpu": "L4"}, LAMBDA, 1.0, 1, None),
        ({"gpu": "L4"}, MODAL, 1.0, 1, None),
        ({"gpu": "L4", "memory_mb": 1024}, {**MODAL, "gpu-second:L4": 0.000222}, 1.0, 1, 222 + 0.125 * 13.1 + 2.22),
        ({}, {"device-hour": 1.0}, 1.0, 1, None),
    ],
)
def test_a_million_items_cost_what_the_providers_rates_say(
    settings: dict[str, Any], prices: dict[str, float], call_s: float, items: int, usd: float | None
) -> None:
    got = cost(spec(**settings), prices, call_s, items)
    assert got == (None if usd is None else pytest.approx(usd, abs=0.005))


@pytest.mark.parametrize(
    ("expected", "outcome", "problem"),
    [
        ({"score": 1.0}, Scored(1.0), ""),
        ({"score": 1.0}, Scored(0.5), "0.5, expected 1"),
        ({"min": 0.2, "max": 0.8}, Scored(0.8), ""),
        ({"min": 0.2}, Scored(0.1), "0.1, expected at least 0.2"),
        ({"max": 0.2}, Scored(0.3), "0.3, expected at most 0.2"),
        ({"fault": "model"}, ModelFault(0.0, "x"), ""),
        ({"fault": "model", "score": -1}, ModelFault(0.0, "x"), "0, expected -1"),
        ({"fault": "model"}, Scored(0.0), "scored 0, expected a fault (model)"),
        ({"score": 0.0}, ModelFault(0.0, "no answer"), "model fault: no answer"),
        ({"fault": "timeout"}, InfraFault(FaultKind.TIMEOUT, True, "slow"), ""),
        ({"fault": "any"}, InfraFault(FaultKind.CRASH, False, "boom"), ""),
        ({"fault": "timeout"}, InfraFault(FaultKind.CRASH, False, "boom"), "crash: boom"),
        ({"score": 0.0}, InfraFault(FaultKind.CRASH, False, "boom"), "crash: boom"),
    ],
)
def test_a_fault_of_the_platform_never_passes_for_a_score(
    expected: dict[str, Any], outcome: Scored | ModelFault | InfraFault, problem: str
) -> None:
    assert ExpectedOutcome(**expected).mismatch(outcome) == problem


def test_cases_are_read_in_both_forms(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "cases.jsonl"
    long = {"id": "b", "messages": [{"role": "assistant", "content": "4"}], "metadata": {"k": 1}}
    short = {"prompt": "2+2?", "completion": "4", "reference_answer": "4", "expected": {"score": 1}}
    path.write_text(json.dumps(long) + "\n\n" + json.dumps(short) + "\n")
    one, two = read_cases(path)
    assert one == RehearsalCase(Item("b", ({"role": "assistant", "content": "4"},), None, {"k": 1}))
    assert (two.item.id, two.item.completion, two.item.messages[0]["content"]) == ("3", "4", "2+2?")
    assert two.expected == ExpectedOutcome(score=1)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "no item in it"),
        ('{"completion": "x"}\n{"completion"', "cases.jsonl:2: Invalid JSON"),
        ('{"completion": "x", "expect": 1}', "cases.jsonl:1: unknown key 'expect'"),
        ('{"completion": "x", "expected": {"fault": "sad"}}', "cases.jsonl:1: expected.fault: "),
        ('{"id": "x"}', "either messages, or completion"),
    ],
)
def test_a_wrong_case_is_placed(tmp_path: pathlib.Path, text: str, error: str) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text(text)
    with pytest.raises(SpecInvalid, match=error):
        read_cases(path)
    with pytest.raises(SpecInvalid, match="No such file"):
        read_cases(tmp_path / "none.jsonl")


def modelled(one: Package, cases: list[RehearsalCase], function: Any, **profile: Any) -> Rehearsal:
    async def main() -> Rehearsal:
        async with SimulatedBackend({one.spec.name: function}, profiles={one.spec.name: Profile(**profile)}) as backend:
            return await rehearse(one, cases, backend=backend, prices={"aws_lambda": LAMBDA, "modal": MODAL})

    return Simulated().run(main())


def case(key: str, text: str = "x", **expected: Any) -> RehearsalCase:
    return RehearsalCase(
        Item(key, ({"role": "assistant", "content": text},)), ExpectedOutcome(**expected) if expected else None
    )


def test_times_and_costs_are_of_warm_calls() -> None:
    one = package("behave", memory_mb=1024, batch={"max_items": 10})
    got = modelled(one, [case("a", score=1), case("b")], lambda s: 1.0, cold_start_s=0.5, call_s=0.004, item_s=0.001)
    assert got.passed
    assert [r.outcome for r in got.results] == [Scored(1.0), Scored(1.0)]
    assert [r.seconds for r in got.results] == [pytest.approx(0.005), pytest.approx(0.005)], "the first one is cold"
    assert got.results[0].cold_start_s == pytest.approx(0.5)
    assert got.single_s == pytest.approx(0.005)
    assert (got.batch, got.batched_item_s) == (10, pytest.approx(0.0014))
    assert got.cold_start_s == pytest.approx(0.5)
    aws, modal = got.costs
    assert aws.usd_single == pytest.approx(5 * 0.0166667 + 0.2)
    assert aws.usd_batched == pytest.approx(1.4 * 0.0166667 + 0.02)
    assert modal.usd_single == pytest.approx(5000 * (0.125 * 0.0000131 + 0.00000222))
    assert (modal.idle_s, modal.usd_idle) == (60.0, pytest.approx(60 * (0.125 * 0.0000131 + 0.00000222)))
    assert (aws.idle_s, aws.usd_idle) == (0.0, 0.0)
    assert (got.memory_mb, got.warnings) == (None, ())
    shown = json.loads(json.dumps(got.to_json()))
    assert (shown["schema_version"], shown["passed"], shown["cases"][0]["value"]) == (1, True, 1.0)
    assert [c["expected"] for c in shown["cases"]] == [{"score": 1.0}, None]


def test_tokens_are_those_of_all_its_calls() -> None:
    """By hand: two cases twice, and a full batch of ten; each asks once."""

    def asks(sample: Item) -> float:
        record_tokens(TokenUsage("e", "m", 1, 100, 0, 0, 7))
        return 1.0

    got = modelled(package("behave", batch={"max_items": 10}), [case("a"), case("b")], asks)
    assert (got.token_items, got.tokens) == (14, (TokenUsage("e", "m", 14, 1400, 0, 0, 98),))
    assert json.loads(json.dumps(got.to_json()))["tokens"][0]["input_tokens"] == 1400


def judge(reachable: Any) -> Any:
    """Takes a second if its endpoint can be reached; an empty completion is not judged."""

    async def judged(sample: Item) -> Any:
        if not sample.completion:
            return ModelFault(0.0, "empty completion")
        record_tokens(TokenUsage("e", "m", 1, 100, 0, 0, 7))
        if not reachable(sample):
            return InfraFault(FaultKind.UNAVAILABLE, True, "no endpoint")
        return 1.0

    return judged


def test_times_and_costs_come_from_scored_items_alone() -> None:
    one, cases = (
        package("behave", deterministic=False, batch={"max_items": 4}),
        [case("none", ""), case("a"), case("b")],
    )
    dead = modelled(one, cases, judge(lambda sample: False))
    assert (dead.single_s, dead.batched_item_s, dead.tokens, dead.token_items) == (None, None, (), 0)
    assert [(c.usd_single, c.usd_batched, c.note) for c in dead.costs] == [(None, None, "no case was scored")] * 2
    assert dead.warnings == ("no case was scored: there are no times and no costs of an item",)
    assert json.loads(json.dumps(dead.to_json()))["single_s"] is None

    half = modelled(one, cases, judge(lambda sample: sample.id != "b"))
    assert half.single_s is not None
    assert (half.batched_item_s is not None, half.warnings) == (True, ())
    assert (half.token_items, half.tokens[0].requests) == (6, 8), (
        "the failed requests are part of the scored items' cost"
    )

    calls = iter(range(100))
    late = modelled(one, cases, judge(lambda sample: next(calls) < 6))
    assert late.single_s is not None
    assert (late.batched_item_s, late.costs[0].usd_batched) == (None, None)
    assert late.warnings == ("a call of 4 items did not score all of them: there is no time and no cost of a batch",)


def test_a_function_that_is_not_what_it_declares_is_told() -> None:
    seen: list[str] = []

    def counts(sample: Item) -> float:
        seen.append(sample.id)
        return float(len(seen))

    [warning] = modelled(package("behave"), [case("a"), case("b")], counts).warnings
    assert "declared deterministic, but its answers depend on earlier calls" in warning
    assert "item a: 1 as call 1 of 4, 4 as call 4, in the reverse order (1 other items differ too)" in warning
    assert modelled(package("behave", deterministic=False), [case("a")], counts).warnings == ()

    def relative(samples: list[Item]) -> list[float]:
        return [len(s.completion) / max(len(o.completion) for o in samples) for s in samples]

    got = modelled(package("behave", takes="samples"), [case("short", "x"), case("long", "xxxx")], relative)
    assert got.warnings == ("the answer depends on what else is in the call: short",)


def test_failed_cases_fail_the_rehearsal_and_stay_out_of_the_batch() -> None:
    def picky(sample: Item) -> float:
        if sample.completion == "bad":
            raise ValueError("bad")
        return 0.25

    cases = [case("ok", score=0.25), case("low", min=0.5), case("bad", "bad"), case("meant", "bad", fault="crash")]
    got = modelled(package("behave", batch={"max_items": 3}), cases, picky)
    assert [r.problem for r in got.results] == ["", "0.25, expected at least 0.5", "crash: ValueError: bad", ""]
    assert not got.passed
    assert got.batched_item_s is not None


def test_the_template_is_written_once_and_can_be_packed(tmp_path: pathlib.Path) -> None:
    paths = template.write(tmp_path / "new", "my_rule")
    assert [p.name for p in paths] == ["my_rule.py", "cases.jsonl", "README.md"]
    with pytest.raises(PackageError, match=r"my_rule.py exists"):
        template.write(tmp_path / "new", "my_rule")
    with pytest.raises(PackageError, match="cannot name a reward"):
        template.files("My Rule")
    one = build(FunctionSpec(name="my_rule", source="my_rule.py"), base=tmp_path / "new")
    assert (one.spec.memory_mb, one.spec.takes) == (128, "item")


@pytest.mark.slow  # real workers
def test_the_template_passes_its_own_test(tmp_path: pathlib.Path) -> None:
    template.write(tmp_path)
    one = build(FunctionSpec(name="my_reward", source="my_reward.py"), base=tmp_path)

    async def main() -> Rehearsal:
        cases = read_cases(tmp_path / "cases.jsonl")
        async with LocalBackend() as backend:
            return await rehearse(one, cases, backend=backend, prices={"aws_lambda": LAMBDA})

    got = asyncio.run(main())
    assert got.passed, got
    assert [type(r.outcome).__name__ for r in got.results] == ["Scored", "Scored", "Scored", "ModelFault"]
    assert got.warnings == ()
    assert got.memory_mb is not None
    assert 1.0 < got.memory_mb < got.memory_limit_mb
    assert got.cold_start_s > 0.0
    assert got.costs[0].usd_batched is not None
    assert got.costs[0].usd_single is not None
    assert got.costs[0].usd_batched < got.costs[0].usd_single
