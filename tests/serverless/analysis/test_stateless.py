"""Rewards as people write them, of both kinds: state is found with its line, and nothing else is taken for it."""

from __future__ import annotations

import pathlib
import textwrap
from typing import Any

import pytest

from serverless.analysis.sources import collect
from serverless.analysis.stateless import Stateful, Stateless, inspect_source
from serverless.deploy.package import build
from serverless.errors import NotOffloadable
from serverless.spec import FunctionSpec
from tests.serverless.functions.with_state import STATEFUL, UNSURE
from tests.serverless.functions.without_state import STATELESS

Verdict = Stateless | Stateful


def judge(directory: pathlib.Path, text: str, name: str = "reward", **settings: Any) -> Verdict:
    (directory / "mine.py").write_text(textwrap.dedent(text))
    sources = collect("mine.py", directory)
    found = sources.find(name)
    return inspect_source(found, sources, FunctionSpec(name="judged", source="mine.py", **settings))


@pytest.mark.parametrize("text", STATELESS.values(), ids=STATELESS.keys())
def test_a_stateless_reward_may_leave(tmp_path: pathlib.Path, text: str) -> None:
    assert judge(tmp_path, text) == Stateless()


@pytest.mark.parametrize(("text", "expected"), STATEFUL.values(), ids=STATEFUL.keys())
def test_state_is_found_with_its_line(tmp_path: pathlib.Path, text: str, expected: list[tuple[int, str]]) -> None:
    (tmp_path / "counting.py").write_text(
        "TICKS = 0\ndef tick():\n    global TICKS\n    TICKS += 1\n    return TICKS\n"
    )
    verdict = judge(tmp_path, text)
    assert isinstance(verdict, Stateful)
    for line, words in expected:
        assert any(r.line == line and words in r.text for r in verdict.reasons), verdict.reasons
    assert len(verdict.reasons) == len(expected), verdict.reasons


@pytest.mark.parametrize("text", UNSURE.values(), ids=UNSURE.keys())
def test_what_is_unsure_is_refused_until_declared(tmp_path: pathlib.Path, text: str) -> None:
    verdict = judge(tmp_path, text)
    assert isinstance(verdict, Stateful)
    assert not verdict.sure
    assert "stateless=True" in verdict.remedy
    assert isinstance(judge(tmp_path, text, stateless=True), Stateless)


def test_a_declaration_does_not_settle_what_is_sure(tmp_path: pathlib.Path) -> None:
    text = "N = 0\ndef reward(sample):\n    global N\n    N += 1\n    return N\n"
    assert isinstance(judge(tmp_path, text, stateless=True), Stateful)
    verdict = judge(tmp_path, "def reward(sample): return 1.0", needs=("environment",), stateless=True)
    assert isinstance(verdict, Stateful)
    assert "needs 'environment'" in str(verdict.reasons[0])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import random\ndef reward(sample): return random.random()", "random.random() is not seeded"),
        ("import random\nR = random.Random(1)\ndef reward(sample): return R.random()", "R remembers"),
        ("import numpy as np\ndef reward(sample): return np.random.default_rng().random()", "without a seed"),
    ],
)
def test_randomness_is_a_warning_of_a_deterministic_reward(tmp_path: pathlib.Path, text: str, words: str) -> None:
    verdict = judge(tmp_path, text)
    assert isinstance(verdict, Stateless)
    assert [words in str(w) for w in verdict.warnings] == [True]
    assert judge(tmp_path, text, deterministic=False) == Stateless()


def test_seeded_randomness_is_fine(tmp_path: pathlib.Path) -> None:
    text = "import random\ndef reward(sample): return random.Random(sample.id).random()"
    assert judge(tmp_path, text) == Stateless()


def test_building_a_stateful_reward_is_refused_with_the_remedy(tmp_path: pathlib.Path) -> None:
    (tmp_path / "r.py").write_text("SEEN = []\ndef r(sample):\n    SEEN.append(1)\n    return len(SEEN)\n")
    with pytest.raises(NotOffloadable, match=r"r.py:3: a call changes SEEN.*beside the environment") as caught:
        build(FunctionSpec(name="r", source="r.py", handler="r"), base=tmp_path)
    assert caught.value.reasons == ("r.py:3: a call changes SEEN (append)",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "import functools\n@functools.lru_cache\ndef seen(): return []\n"
            "def reward(sample):\n    seen().append(sample)\n    return len(seen())",
            "changes what the cached seen() returns",
        ),
        ("n = 0\ndef reward(sample):\n    globals()['n'] += 1\n    return n", "writes into globals()"),
        (
            "class Reward:\n    def __init__(self): self.n = 0\n    def __call__(self, sample):\n"
            "        setattr(self, 'n', self.n + 1)\n        return self.n\nreward = Reward()",
            "sets an attribute of self by setattr",
        ),
    ],
)
def test_state_that_is_written_without_its_name_is_found(tmp_path: pathlib.Path, text: str, words: str) -> None:
    verdict = judge(tmp_path, text)
    assert isinstance(verdict, Stateful)
    assert any(words in reason.text for reason in verdict.reasons), verdict.reasons


def test_objects_that_a_call_makes_may_change_and_caches_may_be_read(tmp_path: pathlib.Path) -> None:
    text = (
        "import functools\n@functools.lru_cache\ndef words(): return ['a']\n"
        "def reward(sample):\n    own = list(words())\n    own.append(sample)\n    own[0] = 1\n"
        "    class Box: pass\n    box = Box()\n    setattr(box, 'n', 1)\n    return len(own)"
    )
    assert judge(tmp_path, text) == Stateless()
