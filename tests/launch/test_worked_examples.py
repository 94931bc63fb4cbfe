"""Worked examples come from the environment, on hosts or in the controller; their absence is an error before a
start."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import yaml

from rollart.adapters.envs.worked import WorkedExamples
from rollart.adapters.text import HubTokenizer
from rollart.errors import SpecError
from rollart.launch.preflight import environment_problems, refuse_files
from rollart.launch.prepare import domain_chats, warm_start_samples
from rollart.leases import Leases
from rollart.model import TrainSample
from rollart.quickstart import code_agent
from rollart.quickstart.spelling import EOS
from rollart.quickstart.tokenizer import EOS_ID, write_tokenizer
from rollart.settings.load import SpecSources, builtin
from rollart.settings.resolve import read_specs, resolve_files
from rollart.sim import loop as virtual
from rollart.testing.ledger import MemoryRecorder
from tests.contracts.host_fixture import hosts_of
from tests.e2e.harness import ROOT, tiny

QUICKSTART = builtin("runs/quickstart.yaml")
HOSTS = ["cluster.environments={workers: 2, warm: 2}", "warm_start.examples=40"]

LIMIT_S = 120.0
"""Only a failure waits this long."""


class Sums:
    """Gives worked examples; counts the closed instances."""

    closed = 0

    def worked_example(self, seed: int) -> tuple[str, str]:
        if seed == 13:
            raise KeyError("no such sum")
        return f"{seed} + 1", f"{seed + 1}"

    async def close(self) -> None:
        Sums.closed += 1


def test_an_example_is_an_episode() -> None:
    async def main() -> None:
        one = WorkedExamples(f"{__name__}:Sums", {})
        assert not one.blocking
        for seed in (1, 2):
            assert (await one.reset(seed)).text == f"{seed} + 1"
            step = await one.step("")
            assert (step.observation.text, step.done) == (f"{seed + 1}", True)
        with pytest.raises(KeyError):
            await one.reset(13)
        closed = Sums.closed
        await one.close()
        await one.close()
        assert Sums.closed == closed + 1

    virtual.run(main())


class Dialogue(Sums):
    """An example of two turns."""

    def worked_example(self, seed: int) -> tuple[str, ...]:  # type: ignore[override]
        return ("1", "2", "3", "4") if seed else ("1", "2", "3")


def test_an_example_may_have_several_turns() -> None:
    async def main() -> None:
        one = WorkedExamples(f"{__name__}:Dialogue", {})
        texts = [(await one.reset(1)).text]
        steps = [await one.step("") for _ in range(3)]
        assert texts + [step.observation.text for step in steps] == ["1", "2", "3", "4"]
        assert [step.done for step in steps] == [False, False, True]
        with pytest.raises(ValueError, match="a worked example is"):
            await one.reset(0)

    virtual.run(main())


def test_the_loss_of_an_example_is_on_its_answers() -> None:
    sample = TrainSample.unsampled("a", "code", (1, 2), (3,), (4,), (5, 6), score=1.0)
    assert sample.token_ids == (1, 2, 3, 4, 5, 6)
    assert sample.loss_mask == (False, False, True, False, True, True)
    assert sample.turn == (-1, -1, 0, -1, 1, 1)
    assert sample.versions == (-1, -1, 0, -1, 0, 0)


def test_an_environment_without_examples_is_told_by_its_line() -> None:
    specs = read_specs(QUICKSTART, None, ["warm_start.domains=[spell_backward, frozen_lake]"])
    with pytest.raises(
        SpecError, match=r"FrozenLakeText' gives no worked examples \(rule: worked_example\(seed\)"
    ) as told:
        refuse_files(specs, SpecSources.files(QUICKSTART, None, ["warm_start.domains=[spell_backward, frozen_lake]"]))
    assert told.value.where.startswith("override 'warm_start.domains=")
    (problem,) = environment_problems(specs)
    assert problem.loc == ("run", "warm_start", "domains", 1)


def test_examples_of_a_chat_are_a_question_and_an_answer_with_its_end(tmp_path: Path) -> None:
    domain = {**tiny()["domains"][0], "environment": f"{__name__}:Sums", "max_turns": 1}
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump(tiny(domains=[domain], warm_start={"domains": ["coin"], "examples": 3})))
    directory = write_tokenizer(tmp_path / "tokenizer").parent
    template = f"{{% for m in messages %}}{{{{ m.role }}}} {{{{ m.content }}}} {EOS} {{% endfor %}}"
    prompt = "{% if add_generation_prompt %}assistant {% endif %}"
    (directory / "chat_template.jinja").write_text(template + prompt)

    def samples(*changes: str) -> list[TrainSample]:
        specs = read_specs(run, None, [f"model.tokenizer={directory}", *changes])
        chats = {"coin": domain_chats(specs, directory)[0]}
        tokenizer, leases = HubTokenizer(directory), Leases(MemoryRecorder())
        return virtual.run(warm_start_samples(specs, tokenizer, None, leases, chats))

    encode, end = HubTokenizer(directory).encode, (EOS_ID,)
    plain, chat = samples(), samples("domains.0.chat=true")
    assert len(plain) == len(chat) == 3
    for one, other in zip(plain, chat, strict=True):
        question, answer = one.token_ids[:3], one.token_ids[3:]  # `7 + 1`, `8`
        assert other.token_ids == (*encode("user"), *question, *end, *encode("assistant"), *answer, *end)
        assert other.loss_mask == (*[False] * (len(question) + 3), *[True] * (len(answer) + 1))

    turns = samples("domains.0.chat={observations: tool}", f"domains.0.environment={__name__}:Dialogue")[0]
    whole = "user 1 <eos> assistant 2 <eos> tool 3 <eos> assistant 4 <eos>"
    assert turns.token_ids == encode(whole)
    assert [token for token, mask in zip(whole.split(), turns.loss_mask, strict=True) if mask] == ["2", EOS, "4", EOS]


@pytest.mark.slow
def test_hosts_give_the_same_examples_as_the_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations of two turns."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    resolved = resolve_files(builtin("runs/code-agent.yaml"), None, HOSTS)
    tokenizer = HubTokenizer(code_agent.write_tokenizer(tmp_path / "tokenizer").parent)
    leases = Leases(MemoryRecorder())

    async def main() -> None:
        async with asyncio.timeout(LIMIT_S), hosts_of(resolved, tmp_path) as hosts:
            chats = {"code": domain_chats(resolved, tokenizer.directory)[0]}
            here = await warm_start_samples(resolved, tokenizer, None, leases, chats)
            there = await warm_start_samples(resolved, tokenizer, hosts.fleet, leases, chats)
            assert there == here
            assert len(there) == 40
            assert {turn for sample in there for turn in sample.turn} == {-1, 0, 1}
            assert set(hosts.fleet.faults().values()) == {0}

    asyncio.run(main())
