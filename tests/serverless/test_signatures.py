"""Every convention is recognised from the source and from the object alike, and is called as its framework calls it."""

from __future__ import annotations

import asyncio
import pathlib
from typing import Any

import pytest

from serverless import wire
from serverless.analysis.sources import tree
from serverless.declare import reward
from serverless.deploy.handler import adapt, convention_of
from serverless.deploy.package import build
from serverless.errors import PolicyFault, SpecInvalid
from serverless.inline import inline
from serverless.pipeline.offload import Offload
from serverless.signatures import Convention, Unknown, of_object, of_source, recognise
from serverless.spec import FunctionSpec
from serverless.types import FaultKind, InfraFault, Item, ModelFault, Outcome, Scored
from serverless.workers.local import LocalBackend
from tests.serverless.functions import conventions
from tests.serverless.support import FUNCTIONS, Simulated, package

SOURCE = tree(FUNCTIONS / "conventions.py").body

EXPECTED: dict[str, tuple[str, Outcome]] = {
    "compute_score": ("verl", Scored(1.0, {"acc": 1.0})),
    "compute_score_async": ("verl", Scored(1.0)),
    "compute_score_batch": ("verl_batch", Scored(1.0, {"acc": 1.0})),
    "trl_plain": ("trl", Scored(0.5)),
    "trl_chat": ("trl_chat", Scored(1.0)),
    "custom_rm": ("slime", Scored(1.0, {"length": 0.0})),
    "batched_rm": ("slime_batch", Scored(1.0)),
    "openrlhf": ("openrlhf", Scored(1.0, {"length": 22.0, "scores": 1.0})),
    "gsm8k_reward_fn": ("areal", Scored(1.0)),
    "areal_by_position": ("areal", Scored(1.0)),
    "rubric": ("verifiers", Scored(1.0)),
    "rubric_async": ("verifiers", Scored(1.0)),
    "rubric_text": ("verifiers_text", Scored(1.0)),
    "nova": ("event", Scored(1.0)),
    "plain": ("item", Scored(1.0)),
    "several": ("samples", Scored(1.0)),
    "Judge": ("verifiers", Scored(1.0)),
    "from_factory": ("item", Scored(9.0)),
    "short": ("item", Scored(1.0)),
    "other_name": ("item", Scored(1.0)),
}


def item(key: str = "a", **metadata: Any) -> Item:
    messages = ({"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "<answer>4</answer>"})
    given = {"data_source": "gsm8k", "index": 7, "difficulty": "easy", "completion_ids": [1, 2], **metadata}
    return Item(key, messages, "4", given)


def call(target: Any, *items: Item, **settings: Any) -> list[Outcome]:
    event = [wire.encode(i) for i in items]
    return wire.outcomes(adapt(target, **settings)(event, None), event, deterministic=True)


@pytest.mark.parametrize(("name", "convention"), [(n, c) for n, (c, _) in EXPECTED.items()])
def test_source_and_object_show_the_same_convention(name: str, convention: str) -> None:
    shape = of_source(SOURCE, name)
    assert shape is not None
    assert recognise(shape) == convention_of(getattr(conventions, name)) == Convention(convention)


@pytest.mark.parametrize(("name", "outcome"), [(n, o) for n, (_, o) in EXPECTED.items()])
@pytest.mark.parametrize("count", [1, 3])
def test_a_reward_is_called_as_its_framework_calls_it(name: str, outcome: Outcome, count: int) -> None:
    assert call(getattr(conventions, name), *(item(str(n)) for n in range(count))) == [outcome] * count


@pytest.mark.parametrize("name", EXPECTED)
def test_every_convention_works_inside_a_running_loop(name: str) -> None:
    """As the simulated backend and `inline` call it."""

    async def main() -> Outcome:
        return await inline(getattr(conventions, name)).score(item())

    assert Simulated().run(main()) == EXPECTED[name][1]


@pytest.mark.slow  # real workers
def test_every_convention_runs_packed_in_a_worker() -> None:
    packages = [package(f"conventions:{name}", memory_mb=256) for name in EXPECTED]
    assert [p.spec.takes for p in packages] == [convention for convention, _ in EXPECTED.values()]

    async def main() -> list[Outcome]:
        async with LocalBackend() as backend, Offload(packages, backend) as offload:
            return [await offload.submit(p.spec.name, item(), 30.0) for p in packages]

    assert asyncio.run(main()) == [outcome for _, outcome in EXPECTED.values()]


@pytest.mark.slow  # imports torch
def test_a_tensor_is_a_list_of_scores() -> None:
    pytest.importorskip("torch")
    assert call(conventions.openrlhf_tensor, item("a"), item("b")) == [Scored(1.0), Scored(1.0)]


def test_none_of_trl_counts_nothing_and_is_marked() -> None:
    none = Scored(0.0, {"not_applicable": 1.0})
    assert call(conventions.trl_plain, item("a", difficulty="skip"), item("b")) == [none, Scored(0.5)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def f(a, b): ...", "needs 2 arguments, of no known names"),
        ("def f(): ...", "needs 0 arguments"),
        ("def f(text: str): ...", "takes a str, not an Item"),
        (
            "def f(solution_str, ground_truth, reward_router_address): ...",
            "verl, which gives no 'reward_router_address'",
        ),
        ("def f(completion, ground_truth): ...", "verifiers, which gives no 'ground_truth'"),
        ("def f(judge, completion): ...", "verifiers, which gives no 'judge'"),
        ("def f(queries, prompts, labels, tokenizer): ...", "openrlhf, which gives no 'tokenizer'"),
        ("async def f(args, sample, evaluation): ...", "slime, which gives no 'evaluation'"),
        ("def f(sample, *, threshold): ...", "keyword arguments that no convention gives"),
        ("def f(completions, states): ...", "scores a whole group"),
    ],
)
def test_an_unknown_signature_is_refused_when_it_is_packed(tmp_path: pathlib.Path, text: str, reason: str) -> None:
    (tmp_path / "f.py").write_text(f"raise SystemExit('not run')\n{text}\n")
    with pytest.raises(SpecInvalid, match=reason) as caught:
        build(FunctionSpec(name="f", source="f.py", handler="f"), base=tmp_path)
    for known in ("verl compute_score", "TRL reward_func", "slime", "OpenRLHF", "AReaL", "verifiers", "Nova", "Item"):
        assert known in caught.value.remedy
    scope: dict[str, Any] = {}
    exec(text, scope)
    assert isinstance(recognise(of_object(scope["f"])), Unknown)
    with pytest.raises(SpecInvalid, match=reason):
        adapt(scope["f"])


@pytest.mark.parametrize(
    ("text", "convention"),
    [
        ("def f(sample=None): ...", "item"),
        ("def f(item: Item, weight=1.0): ...", "item"),
        ("def f(_, *args): ...", "item"),
        ("def f(xs: list['Item']): ...", "samples"),
        ("def f(event): ...", "items"),
        ("def f(payload, context): ...", "event"),
        ("def f(completions, **kwargs): return [c[0]['content'] for c in completions]", "trl_chat"),
        ("def f(completions, prompts, answer): ...", "trl"),
        ("def f(state): ...", "verifiers"),
        ("def f(prompt, completion, prompt_ids, completion_ids, answer, **kwargs): ...", "areal"),
        ("def f(solution_str, ground_truth, method='strict', format_score=0.0, score=1.0): ...", "verl"),
        (
            "def cap(n):\n  def punish(completion_ids: list[list[int]], **kwargs):\n"
            "    return [-1.0 if len(c) > n else 0.0 for c in completion_ids]\n  return punish\nf = cap(9)",
            "trl",
        ),
        ("class f:\n  def __call__(self, sample): ...", "item"),
        ("class f:\n  async def __call__(self, args, samples, **kw): ...", "slime_batch"),
        ("try:\n  import fast\nexcept ImportError:\n  def f(solution_str, ground_truth): ...", "verl"),
    ],
)
def test_variants_of_the_accepted_ones(tmp_path: pathlib.Path, text: str, convention: str) -> None:
    (tmp_path / "f.py").write_text(text)
    assert build(FunctionSpec(name="f", source="f.py", handler="f"), base=tmp_path).spec.takes == convention


def test_takes_names_the_convention_where_the_source_cannot_show_it(tmp_path: pathlib.Path) -> None:
    (tmp_path / "f.py").write_text("import makers\nf = makers.make()")
    with pytest.raises(SpecInvalid, match="its definition is not in the source"):
        build(FunctionSpec(name="f", source="f.py", handler="f"), base=tmp_path)
    packed = build(FunctionSpec(name="f", source="f.py", handler="f", takes="verl"), base=tmp_path)
    assert packed.spec.takes == "verl"
    assert b'"takes":"verl"' in packed.files["rollart_manifest.json"]


def test_an_error_in_a_batch_is_the_calls_and_in_a_single_item_its_own() -> None:
    def picky(samples: list[Item]) -> list[float]:
        if any(s.id == "bad" for s in samples):
            raise PolicyFault("not JSON", floor=-1.0)
        return [1.0] * len(samples)

    assert call(picky, item("bad")) == [ModelFault(-1.0, "not JSON")]
    with pytest.raises(PolicyFault):
        call(picky, item("a"), item("bad"))


def test_too_few_results_are_an_error_and_none_is_made_up() -> None:
    def short(samples: list[Item]) -> list[float]:
        return [1.0]

    with pytest.raises(ValueError, match="gave 1 results for 2 items"):
        call(short, item("a"), item("b"))


def test_what_is_missing_is_named() -> None:
    def needs(completions: Any, rubric_text: Any) -> Any: ...

    [fault] = call(needs, item())
    assert isinstance(fault, InfraFault)
    assert "column 'rubric_text', which is not in the items' metadata" in fault.detail
    [fault] = call(conventions.rm_with_options, item())
    assert isinstance(fault, InfraFault)
    assert "args.rm_url: slime's options are not here" in fault.detail


def test_a_multi_turn_trajectory_is_split_at_the_policys_first_message() -> None:
    messages = (
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "call"},
        {"role": "tool", "content": "result"},
        {"role": "assistant", "content": "done"},
    )
    seen: dict[str, Any] = {}

    def rubric(prompt: Any, completion: Any, state: Any) -> float:
        seen.update(prompt=prompt, completion=completion, turn=state["turn"])
        return 1.0

    call(rubric, Item("a", messages))
    assert ([m["role"] for m in seen["prompt"]], seen["turn"]) == (["system", "user"], 2)
    assert [m["content"] for m in seen["completion"]] == ["call", "result", "done"]
    call(rubric, Item("a", messages, metadata={"prompt": [{}, {}, {}]}))
    assert [m["content"] for m in seen["completion"]] == ["result", "done"]


def test_bedrocks_other_names_are_understood() -> None:
    event = [{"id": "a", "modelResponse": "so 4", "referenceAnswer": "4"}]
    answers = adapt(conventions.plain)(event, None)
    assert wire.outcomes(answers, event, deterministic=True) == [Scored(1.0)]


class Counter:
    """Keeps state, and an environment: it cannot be offloaded."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, sample: Item, env: Any) -> float:
        before = self.calls
        await asyncio.sleep(sample.metadata.get("seconds", 0.0))
        if sample.id == "exit":
            raise SystemExit(3)
        self.calls = before + 1
        return self.calls + env["bonus"]


def test_a_stateful_reward_runs_inline_one_call_at_a_time() -> None:
    async def main() -> list[Outcome]:
        scorer = inline(Counter, environment={"bonus": 0.5})
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(scorer.score(item(str(n), seconds=1.0 - 0.1 * n))) for n in range(4)]
        return [t.result() for t in tasks]

    assert Simulated().run(main()) == [Scored(1.5), Scored(2.5), Scored(3.5), Scored(4.5)]


def test_an_untrusted_reward_never_runs_inline() -> None:
    with pytest.raises(SpecInvalid, match="runs_code is untrusted"):

        @inline
        @reward(trust="untrusted")
        def runs_code(sample: Item) -> float:
            return 1.0


def test_inline_faults_are_the_same_values() -> None:
    async def main() -> list[Outcome]:
        scorer = inline(Counter, environment={"bonus": 0.0}, timeout_s=0.5)
        slow = await scorer.score(item("slow", seconds=9.0))
        left = await scorer.score(item("exit"))
        bad = await inline(lambda sample: float("nan")).score(item())
        own = await inline(conventions.rm_with_options).score(item())
        return [slow, left, bad, own, await scorer.score(item())]

    slow, left, bad, own, good = Simulated().run(main())
    assert slow == InfraFault(FaultKind.TIMEOUT, False, "no answer in 0.5 s (timeout_s)")
    assert left == InfraFault(FaultKind.CRASH, False, "SystemExit: 3")
    assert isinstance(bad, InfraFault)
    assert isinstance(own, InfraFault)
    assert (bad.kind, own.kind) == (FaultKind.BAD_ANSWER, FaultKind.CRASH)
    assert good == Scored(1.0)
