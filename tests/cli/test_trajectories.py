"""`rollart trajectories`, `trajectory`, `why` and `verify`, on a ledger with trajectories of every outcome."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollart.ledger.kept import KeptScore, RoutedTurn
from rollart.ledger.store import Ledger
from rollart.model import AbortReason, Group, GroupId, Scored, TrainSample, TrajectoryId
from rollart.ports import Interval, RunEvent
from rollart.settings.load import builtin, load_prices
from rollart.sim import loop
from serverless.types import Invocation
from tests.kept import charge, kept

Call = Callable[..., Any]

SCORE = KeptScore("exact", "digest", 1.0, Scored(1.0, {"steps": 2.0}))
ROUTES = (
    RoutedTurn(0.125, 0.375, 0.25, "engine-1", "", "least loaded", 3, 12),
    RoutedTurn(0.125, 0.625, 0.25, "engine-0", "engine-1", "remote", 1, 4),
)
CONFIG = {
    "run": {
        "schedule": "async",
        "staleness": 1,
        "keep": {"items": "all"},
        "domains": [{"name": "lake", "trajectories": 2, "group_size": 2}],
    },
    "prices": load_prices(builtin("prices.yaml")).model_dump(mode="json"),
}


def sample(id_: str, score: float) -> TrainSample:
    group = id_.rpartition(".")[0]
    one = (0,)
    return TrainSample(
        TrajectoryId(id_), GroupId(group), "lake", 1, one, (True,), (0.0,), one, one, (0.0,), score, True
    )


@pytest.fixture
def run(rollart: Call) -> Path:
    """Groups of two: one trained, one filtered, one with a stale and a faulty attempt; and an evaluation."""
    directory = Path("runs/mine")

    async def finish(ledger: Ledger, id_: str, score: float, t1: float) -> TrainSample:
        done = sample(id_, score)
        ledger.keep(kept(id_, f"answer of {id_}", routes=ROUTES))
        ledger.scored(id_, score, (SCORE,))
        await ledger.finish(done, charge(id_, score=score, t0=t1 - 1.0, t1=t1, reward_s=0.25, reset_s=0.05, env_s=0.1))
        return done

    async def main() -> None:
        with Ledger(directory, clock=lambda: 0.0, inline=True, config=CONFIG, kept_mb=1) as ledger:
            await ledger.commit(version=0, step=0, consumed=[], metrics={})
            ledger.event(RunEvent(0.0, "step", "training", {"version": 1, "step": 1}))
            await ledger.commit(version=1, step=1, consumed=[], metrics={})
            for n in range(3):
                await ledger.admit(f"lake-{n}", "lake", n)
            trained = [await finish(ledger, f"lake-0.{n}", n + 1.0, 1.5 + n) for n in range(2)]
            for n in range(2):
                await finish(ledger, f"lake-1.{n}", 0.5, 3.0)
            await ledger.drop("lake-1", AbortReason.FILTERED)
            ledger.keep(kept("lake-2.0", value=None))
            ledger.charge(charge("lake-2.0", "stale", score=None, success=None, t1=9.0, v0=1))
            ledger.event(RunEvent(8.5, "infra_fault", "lake-2.1", {"detail": "the environment broke", "attempt": 1}))
            ledger.charge(charge("lake-2.1", "infra_fault", score=None, success=None, t1=8.5, action_tokens=9))
            ledger.charge(charge("eval-end-lake-7.1", purpose="eval", score=None, t1=9.5, engine_seconds=1.0))
            group = Group(GroupId("lake-0"), "lake", tuple(trained))
            ledger.event(RunEvent(4.0, "step", "training", {"version": 2, "step": 2}))
            await ledger.commit(version=2, step=2, consumed=[group], metrics={})
            ledger.event(RunEvent(6.0, "step", "training", {"version": 3, "step": 3}))
            ledger.event(RunEvent(0.0, "resource_opened", "engine-0", {}))
            ledger.interval(Interval("engine", "engine-0", 0.0, 8.0, "busy", "", 1, 3600.0))
            ledger.record(Invocation("exact", "aws_lambda", "w", 1.3, 1.4, 0.0, 0.1, 128, 1, "ok", provider_id="r-1"))

    loop.run(main())
    (directory / "resolved.yaml").write_text("")
    return directory


def rows(rollart: Call, *arguments: str) -> list[dict[str, Any]]:
    done = rollart("trajectories", *arguments, "--json")
    assert done.code == 0, done.err
    found: list[dict[str, Any]] = json.loads(done.out)["tables"]["trajectories"]
    return found


def test_trajectories_are_listed_by_outcome_and_order(rollart: Call, run: Path) -> None:
    every = rows(rollart)
    assert [row["trajectory"] for row in every[:3]] == ["eval-end-lake-7.1", "lake-2.0", "lake-2.1"], (
        "the last ends first"
    )
    assert {row["trajectory"]: row["outcome"] for row in every} == {
        **dict.fromkeys(("lake-0.0", "lake-0.1"), "trained"),
        **dict.fromkeys(("lake-1.0", "lake-1.1"), "filtered"),
        "lake-2.0": "stale",
        "lake-2.1": "fault",
        "eval-end-lake-7.1": "eval",
    }
    for outcome in ("trained", "filtered", "stale", "fault", "eval", "waiting"):
        assert rows(rollart, "--outcome", outcome) == [row for row in every if row["outcome"] == outcome]
    assert rows(rollart, "--domain", "ice") == []
    assert [row["reward"] for row in rows(rollart, "--sort", "reward", "-n", "2")] == [2.0, 1.0]
    assert rows(rollart, "--sort", "tokens", "-n", "1")[0]["trajectory"] == "lake-2.1"
    assert rows(rollart, "--sort", "usd", "-n", "1")[0]["trajectory"] == "eval-end-lake-7.1"
    assert "1 of 7 trajectories (-n 0 shows all)" in rollart("trajectories", "-n", "1").out


def test_dollars_add_up_to_what_was_busy(rollart: Call, run: Path) -> None:
    """4 of 8 busy engine seconds are charged: half of $8 at $3600/h, and the call of the function."""
    (call,) = [
        r for r in json.loads(rollart("report", "cost", "--json").out)["tables"]["by_role"] if r["role"] == "reward"
    ]
    assert sum(row["usd"] for row in rows(rollart, "-n", "0")) == pytest.approx(4.0 + call["usd"])


def test_a_trajectory_is_shown_with_its_content(rollart: Call, run: Path) -> None:
    found = json.loads(rollart("trajectory", "lake-0.0", "--json").out)["tables"]
    summary = {row["what"]: row["value"] for row in found["summary"]}
    assert (summary["outcome"], summary["trained in step"], summary["into version"], summary["seed"]) == (
        "trained",
        2,
        2,
        "5",
    )
    shown, said = found["messages"]
    assert (shown["text"], said["text"], said["versions"]) == ("6 x 7?", "answer of lake-0.0", "v1 × 2, v2 × 1")
    assert [(t["token_id"], t["logprob"], t["version"], t["loss_mask"]) for t in found["tokens"]] == [
        (7, None, None, 0),
        (8, None, None, 0),
        (1, -0.5, 1, 1),
        (2, -0.25, 1, 1),
        (3, -1.5, 2, 1),
    ]
    (reward,) = found["rewards"]
    assert (reward["function"], reward["version"], reward["score"], reward["calls"]) == ("exact", "digest", 1.0, "r-1")
    phases = {row["phase"]: row["seconds"] for row in found["phases"]}
    assert (phases["engines"], phases["environment"], phases["reward"], phases["whole"]) == (0.5, 0.1, 0.25, 1.0)
    text = rollart("trajectory", "lake-0.0").out
    assert "answer of lake-0.0" in text
    page = rollart("trajectory", "lake-0.0", "-o", "html").out
    assert page.count("answer of lake-0.0") == 1
    assert "<script" not in page


def test_an_unknown_trajectory_names_the_members_of_its_group(rollart: Call, run: Path) -> None:
    done = rollart("trajectory", "lake-0")
    assert done.code == 2
    assert "it is a group, of lake-0.0, lake-0.1" in done.err


def test_a_trajectory_without_content_says_so(rollart: Call, run: Path) -> None:
    done = rollart("trajectory", "lake-2.1")
    assert (done.code, "was not kept" in done.out) == (0, True)


def decisions(rollart: Call, id_: str) -> list[tuple[float, str, str]]:
    done = rollart("why", id_, "--json")
    assert done.code == 0, done.err
    return [tuple(row.values()) for row in json.loads(done.out)["tables"]["decisions"]]


def test_each_decision_has_its_figure(rollart: Call, run: Path) -> None:
    found = decisions(rollart, "lake-0.1")
    assert [decision for _, decision, _ in found] == [
        "its group was admitted",
        "began",
        "turn to engine-1",
        "turn again to engine-0, prefilled on engine-1",
        "asked for its reward",
        "scored by exact",
        "finished",
        "trained in step 2, into v2",
    ]
    because = {decision: text for _, decision, text in found}
    assert (
        "2 of 4 samples waited, ran or trained (staleness 1, schedule rollart: 2 batches)"
        in (because["its group was admitted"])
    )
    assert because["turn to engine-1"].startswith(
        "least loaded; waited 0.250 s, 3 turns ran there; 0.2500 engine seconds"
    )
    assert because["trained in step 2, into v2"] == "staleness 0 (bound 1)"
    assert [t for t, _, _ in found] == sorted(t for t, _, _ in found)


@pytest.mark.parametrize(
    ("id_", "decision", "text"),
    [
        ("lake-1.0", "filtered", "the rewards of its group are alike: 0.5, 0.5"),
        ("lake-2.0", "dropped as stale", "staleness 2 (bound 1): begun under v1, while v3 was current"),
        ("lake-2.1", "infra fault", "detail the environment broke, attempt 1"),
        ("eval-end-lake-7.1", "evaluated", "success 1"),
    ],
)
def test_each_end_has_its_figure(rollart: Call, run: Path, id_: str, decision: str, text: str) -> None:
    assert (decision, text) in [(what, because) for _, what, because in decisions(rollart, id_)]


def test_lines_have_what_viewers_of_rollouts_read(rollart: Call, run: Path) -> None:
    done = rollart("trajectories", "--export", "out.jsonl", "--outcome", "trained")
    assert (done.code, done.out.startswith("2 kept trajectories in out.jsonl")) == (0, True)
    one, _ = map(json.loads, Path("out.jsonl").read_text().splitlines())
    question, answer = {"role": "user", "content": "6 x 7?"}, {"role": "assistant", "content": "answer of lake-0.0"}
    assert (one["prompt"], one["completion"], one["messages"]) == ([question], [answer], [question, answer])
    assert (one["input"], one["output"], one["gts"]) == ("6 x 7?", "answer of lake-0.0", "42")
    assert (one["reward"], one["score"], one["step"], one["exact"], one["metrics"]) == (
        1.0,
        1.0,
        2,
        1.0,
        {"exact": 1.0},
    )
    assert (one["token_ids"], one["loss_mask"]) == ([7, 8, 1, 2, 3], [0, 0, 1, 1, 1])
    assert (one["logprobs"], one["versions"]) == ([0.0, 0.0, -0.5, -0.25, -1.5], [-1, -1, 1, 1, 2])


def test_other_kinds_of_files_are_refused(rollart: Call, run: Path) -> None:
    done = rollart("trajectories", "--export", "out.csv")
    assert (done.code, ".jsonl or .parquet" in done.err, Path("out.csv").exists()) == (2, True, False)


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_parquet_needs_pyarrow(rollart: Call, run: Path) -> None:
    done = rollart("trajectories", "--export", "out.parquet")
    assert (done.code, "pip install pyarrow" in done.err) == (2, True)


@pytest.mark.slow  # pyarrow is in the environment of the slow tests
def test_parquet_has_the_same_rows(rollart: Call, run: Path) -> None:
    import pyarrow.parquet as pq

    for name in ("out.jsonl", "out.parquet"):
        assert rollart("trajectories", "--export", name).code == 0
    lines = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    found = pq.read_table("out.parquet").to_pylist()
    assert [one | {"metrics": json.loads(one["metrics"])} for one in found] == [
        {"exact": None} | line for line in lines
    ]


def test_a_damaged_ledger_fails_the_audit(rollart: Call, run: Path) -> None:
    sound = rollart("verify")
    assert (sound.code, "sound; 1 incarnation" in sound.out) == (0, True), sound.out
    with sqlite3.connect(run / "ledger.sqlite") as connection:
        connection.execute("UPDATE groups SET reason = '' WHERE id = 'lake-1'")
    broken = rollart("verify")
    assert broken.code == 1
    assert "lake-1: dropped without a reason" in broken.err
    assert "lake-1" in broken.out
