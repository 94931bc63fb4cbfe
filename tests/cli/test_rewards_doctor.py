"""`rollart rewards doctor`: injected faults never become numbers, unless the reward makes them one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serverless.fault_rehearsal import InjectedFault

pytestmark = pytest.mark.slow  # function workers are processes

CASES = [{"id": key, "completion": key, "reference_answer": "a"} for key in ("a", "b")]

SOUND = """from rollart import reward

@reward(memory_mb=128, deterministic=True, timeout_floor=-1.0)
def f(sample):
    return float(sample.completion == sample.reference_answer)
"""

CATCHING = """import urllib.request
from rollart import reward

@reward(memory_mb=128, deterministic=True, batch={"max_items": 1})
def f(sample):
    try:
        page = bytearray(8 << 20)
        urllib.request.urlopen("http://127.0.0.1:9/", timeout=1)
        return 1.0
    except OSError:
        return float(len(page) > 0)
    except Exception:
        return 0.25
"""

Outcomes = dict[tuple[str, bool], dict[str, Any]]


def doctor(rollart: Callable[..., Any], source: str) -> tuple[Any, Outcomes]:
    Path("f.py").write_text(source)
    Path("cases.jsonl").write_text("".join(json.dumps(one) + "\n" for one in CASES))
    done = rollart("rewards", "doctor", "f.py", "-o", "json")
    (found,) = json.loads(done.out)["rewards"]
    return done, {(one["fault"], one["always"]): one for one in found["results"]}


def test_faults_of_the_platform_are_masked_or_retried(rollart: Callable[..., Any]) -> None:
    done, results = doctor(rollart, SOUND)
    assert done.code == 0, done.err
    assert {fault for fault, _ in results} == set(InjectedFault)
    masked = {
        "quota": "throttled",
        "rate": "throttled",
        "lost": "unavailable",
        "empty": "bad_answer",
        "malformed": "bad_answer",
        "crash": "crash",
        "out_of_memory": "out_of_memory",
        "slow": "declared",
    }
    for fault, kind in masked.items():
        assert results[fault, True]["outcomes"] == {kind: 2}
    for fault in ("quota", "rate", "slow", "crash", "out_of_memory"):
        assert results[fault, False]["outcomes"] == {"scored": 2}, "the second call answers"
    assert not any(one["numbers"] for one in results.values())
    assert not results["network", True]["reached"]
    assert results["crash", True]["retries"] > 0
    assert results["slow", True]["usd_per_million"] > results["empty", True]["usd_per_million"] > 0.0
    assert all(one["seconds"] < 30.0 for one in results.values())


def test_a_reward_that_scores_no_case_shows_nothing(rollart: Callable[..., Any]) -> None:
    done, results = doctor(rollart, SOUND.replace("return float(", "raise KeyError("))
    assert done.code == 1
    assert "nothing can be seen of f: none of the cases is scored without a fault" in done.err
    assert "rollart rewards test f.py" in done.err
    assert results["crash", True]["outcomes"] == {"crash": 2}, "the rows are shown all the same"


def test_a_reward_that_scores_what_it_catches_is_named(rollart: Callable[..., Any]) -> None:
    done, results = doctor(rollart, CATCHING)
    assert done.code == 1
    assert "faults that became numbers: f: 4" in done.err
    assert results["network", True]["numbers"] == {"a": 1.0, "b": 1.0}
    assert results["memory", True]["numbers"] == {"a": 0.25, "b": 0.25}
    assert {key for key, one in results.items() if one["numbers"]} == {("network", True), ("memory", True)}
