"""`rollart plan` on a computed plan: what it shows, what-if, and how it fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollart.cli.commands import spread_changes
from rollart.errors import SpecError, UsageError

Call = Callable[..., Any]

CLUSTER = """\
name: c
pools:
  - {name: big, device: H800, count: 8, devices_per_host: 8}
  - {name: wide, device: H20, count: 8}
  - {name: cores, device: cpu, count: 64}
links:
  - {a: big, b: wide, gb_per_s: 100}
functions: {price: aws_lambda}
"""

RUN = """\
name: r
model:
  context: 4096
  config:
    {model_type: qwen3, vocab_size: 1000, hidden_size: 1024, intermediate_size: 3072, num_hidden_layers: 12,
     num_attention_heads: 16, num_key_value_heads: 8, head_dim: 64, tie_word_embeddings: false}
batch: {trajectories: 64}
domains:
  - name: chat
    environment: tests.envs:Lake
    max_tokens: 512
    profile: {turns: 4, first_tokens: 500, new_tokens: 100, output_tokens: 200, reward: {seconds: 1}}
"""


@pytest.fixture
def plan(rollart: Call) -> Call:
    Path("r.yaml").write_text(RUN)
    Path("c.yaml").write_text(CLUSTER)
    return lambda *arguments: rollart("plan", "r.yaml", "--cluster", "c.yaml", *arguments)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["r.yaml", "--what-if", "a=1", "b=2"], ["r.yaml", "--what-if", "a=1", "--what-if", "b=2"]),
        (["--what-if", "a=1 b=2", "r.yaml"], ["--what-if", "a=1", "--what-if", "b=2", "r.yaml"]),
        (["--what-if=a=1", "-o", "json", "x=3"], ["--what-if", "a=1", "-o", "json", "x=3"]),
        (["steps=3", "--what-if", "a=1", "--what-if", "b=2"], ["steps=3", "--what-if", "a=1", "--what-if", "b=2"]),
    ],
)
def test_all_that_follows_what_if_is_a_change(given: list[str], expected: list[str]) -> None:
    assert spread_changes(given) == expected


@pytest.mark.parametrize("given", [["--what-if"], ["--what-if="], ["--what-if", "-o", "json"], ["--what-if", "h20"]])
def test_what_if_of_nothing_is_a_usage_error(given: list[str], plan: Call) -> None:
    with pytest.raises(UsageError, match="names no change"):
        spread_changes(given)
    done = plan(*given)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("rollart: --what-if names no change")


def test_a_run_of_a_bare_config_is_for_plans(tmp_path: Path) -> None:
    from rollart.launch.prepare import prepare_tokenizer
    from rollart.settings.resolve import resolve_files

    (tmp_path / "r.yaml").write_text(RUN)
    (tmp_path / "c.yaml").write_text("name: c\npools: [{name: p, count: 2}]\nengines: {count: 1}\n")
    resolved = resolve_files(tmp_path / "r.yaml", tmp_path / "c.yaml", ["domains.chat.profile="])
    with pytest.raises(SpecError, match="neither 'path' nor 'init'"):
        prepare_tokenizer(resolved, tmp_path)


@pytest.mark.slow
class TestComputed:
    """Slow: each solves mixed-integer programs."""

    @pytest.mark.usefixtures("plan")
    def test_json_has_everything_and_is_all_that_is_printed(self) -> None:
        """In a process of its own: HiGHS prints past Python, and a pipe into jq must not see it."""
        command = [sys.executable, "-m", "rollart.cli.main", "plan", "r.yaml", "--cluster", "c.yaml", "-o", "json"]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": _ROOT})
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert (found["schema_version"], found["report"], found["run"]) == (2, "plan", "r")
        tables = found["tables"]
        assert {
            "totals",
            "pools",
            "deployments",
            "flows",
            "baselines",
            "marginals",
            "rewards",
            "batch",
        } <= tables.keys()
        (totals,) = tables["totals"]
        assert totals["from"] < totals["trajectories_per_s"] < totals["to"]
        (forecast,) = tables["forecast"]
        assert forecast["to_step"] == 100
        assert forecast["usd"] == pytest.approx(totals["usd_per_1k_all"] * 64 * 100 / 1000)
        assert 0 < forecast["±"] < forecast["usd"]
        assert totals["trajectories_per_s"] <= totals["bound"] * (1 + 1e-9)
        used = {row["pool"]: row["used"] for row in tables["pools"]}
        for pool, devices in used.items():
            assert devices == sum(d["devices"] for d in tables["deployments"] if d["pool"] == pool)
        assert sum(flow["share"] for flow in tables["flows"]) == pytest.approx(1)
        names = [row["plan"] for row in tables["baselines"]]
        assert names[:3] == ["this plan", "only H20", "only H800"]
        for row in tables["baselines"][1:]:
            if row["trajectories_per_s"] is not None:
                assert row["ratio"] >= 0.99, "no simple plan is better"

    def test_a_table_for_people(self, plan: Call) -> None:
        done = plan("--fast")
        assert done.out.startswith("plan of r\n")
        assert "Beside simpler plans" not in done.out
        assert re.search(r"^binds: \S", done.out, re.MULTILINE)
        assert "not calibrated" in done.out

    def test_the_bound_has_the_unit_of_the_objective(self, plan: Call) -> None:
        def totals(*arguments: str) -> dict[str, float]:
            (found,) = json.loads(plan("--fast", "-o", "json", *arguments).out)["tables"]["totals"]
            return dict(found)

        frugal = totals("placement.objective=min_cost", "placement.rate=1")
        assert "bound" not in frugal
        assert 0 < frugal["bound_usd_per_hour"] <= frugal["usd_per_hour_used"] * (1 + 1e-6)
        ratio = totals("placement.objective=max_throughput_per_dollar")
        per_usd = 1000 / ratio["usd_per_1k"]
        assert ratio["bound_trajectories_per_usd"] == pytest.approx(per_usd / (1 - ratio["gap"]), rel=0.02)
        assert ratio["bound_trajectories_per_usd"] >= per_usd * (1 - 1e-6)

    def test_beside_a_plan_that_yields_nothing_there_is_no_ratio(self, plan: Call) -> None:
        """JSON has no infinity."""
        done = plan("-o", "json", "placement.train.seconds_per_step=1e6")
        assert done.code == 0, done.err

        def refuse(constant: str) -> float:
            raise AssertionError(f"{constant} is no JSON")

        rows = json.loads(done.out, parse_constant=refuse)["tables"]["baselines"]
        assert len(rows) > 1

    def test_what_more_buys_is_said_by_the_instance_and_not_clipped(self, plan: Call) -> None:
        done = plan("placement.tensor_parallel=[4]")
        rows = json.loads(plan("placement.tensor_parallel=[4]", "-o", "json").out)["tables"]["marginals"]
        assert {row["what"]: row["amount"] for row in rows if row["what"] in ("big", "wide")} == {"big": 4, "wide": 4}
        for row in rows:
            assert all(word in done.out for word in row["in_words"].split()), "every word is on the screen"
            if row["what"] in ("big", "wide", "in flight"):
                amount = f"{row['amount']:.0f} more " if row["amount"] > 1 else ("one more ", "1 more ")
                assert row["in_words"].startswith(amount)
        assert "dedicated would be busy" not in done.out

    def test_what_if_shows_both_plans(self, plan: Call) -> None:
        done = plan("-o", "json", "--what-if", "h20=+8", "price.h800=1")
        assert done.code == 0, done.err
        tables = json.loads(done.out)["tables"]
        figures = {row["figure"]: row for row in tables["totals"]}
        assert figures["trajectories/s"]["what_if"] > figures["trajectories/s"]["now"]
        assert {row["what"] for row in tables["pools"]} >= {"big", "wide"}
        assert {row["move"] for row in tables["moves"]} <= {"flip", "drain", "start"}

    @pytest.mark.parametrize(
        "arguments",
        [
            ["placement.objective=min_cost", "placement.rate=100000"],
            ["--what-if", "rate=100000", "objective=min_cost"],
            ["model.context=100000000", "domains.chat.profile="],
            ["placement.budget_usd_per_hour=0.01"],
        ],
    )
    def test_no_plan_is_exit_2_with_a_reason(self, plan: Call, arguments: list[str]) -> None:
        done = plan(*arguments)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith("rollart: no plan: ")
        assert "Traceback" not in done.err


_ROOT = str(Path(__file__).parents[2])


QWEN3_32B = """\
name: adapters
model:
  context: 16384
  config:
    {model_type: qwen3, vocab_size: 151936, hidden_size: 5120, intermediate_size: 25600, num_hidden_layers: 64,
     num_attention_heads: 64, num_key_value_heads: 8, head_dim: 128, tie_word_embeddings: false}
batch: {trajectories: 128}
domains:
  - name: math
    environment: tests.envs:Lake
    max_tokens: 8192
    profile: {turns: 1, first_tokens: 500, new_tokens: 0, output_tokens: 4000}
"""

H100 = "name: h\npools: [{name: h100, device: H100, count: 8, devices_per_host: 8}]\n"


@pytest.mark.slow
class TestTraining:
    """Slow: each solves mixed-integer programs."""

    def planned(self, rollart: Call, cluster: str, *arguments: str) -> Any:
        Path("r.yaml").write_text(QWEN3_32B)
        Path("c.yaml").write_text(cluster)
        done = rollart("plan", "r.yaml", "--cluster", "c.yaml", "--fast", "-o", "json", *arguments)
        assert done.code == 0, done.err
        return json.loads(done.out)

    def test_adapters_leave_devices_to_the_engines(self, rollart: Call) -> None:
        adapters = self.planned(rollart, H100, "training.lora={rank: 32}")["tables"]
        assert adapters["totals"][0]["trajectories_per_s"] > 0.385
        assert adapters["training"][0]["least"] <= 4
        whole = rollart("plan", "r.yaml", "--cluster", "c.yaml", "--fast")
        assert whole.code == 2
        assert "devices of h100, which has 8" in whole.err

    def test_the_logits_of_a_long_context_are_seen(self, rollart: Call) -> None:
        found = self.planned(
            rollart,
            H100.replace("H100, count: 8", "H200, count: 64"),
            "model.context=40960",
            "placement.train.split=1",
            "placement.train.recompute=true",
        )
        (row,) = found["tables"]["training"]
        assert row["logits_gb"] == pytest.approx(2 * 40_960 * 151_936 * 4 / 1e9), "two copies"
        assert sum(row[part] for part in ("state_gb", "activations_gb", "logits_gb", "reserve_gb")) <= 141
        assert any("trainer.activation_checkpointing" in note for note in found["notes"])

    def test_a_trainer_is_no_larger_than_is_useful(self, rollart: Call) -> None:
        small = (
            "model.config.hidden_size=4096",
            "model.config.intermediate_size=12288",
            "model.config.num_hidden_layers=36",
            "model.config.num_attention_heads=32",
        )
        found = self.planned(rollart, H100.replace("count: 8", "count: 256"), *small)["tables"]
        (row,) = found["training"]
        assert row["devices"] <= row["most_useful"] == 128 * 4500 // 16_384


@pytest.mark.slow
class TestWarnings:
    """Slow: each solves mixed-integer programs."""

    def test_a_plan_far_from_its_bound_says_so(self, rollart: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        Path("r.yaml").write_text(RUN)
        Path("c.yaml").write_text(CLUSTER)
        monkeypatch.setattr("placement.result.WIDE_GAP", -1.0)
        done = rollart("plan", "r.yaml", "--cluster", "c.yaml", "--fast")
        assert "warning: the search ended 0% short of the bound" in " ".join(done.out.split())
        monkeypatch.undo()
        assert "warning" not in rollart("plan", "r.yaml", "--cluster", "c.yaml", "--fast").out

    @pytest.mark.parametrize("size", ["0.5", "1"])
    def test_quantized_weights_run_where_there_is_no_fp8(self, rollart: Call, size: str) -> None:
        Path("r.yaml").write_text(RUN)
        Path("c.yaml").write_text("name: a\npools: [{name: a, device: A100, count: 8, devices_per_host: 8}]\n")
        done = rollart("plan", "r.yaml", "--cluster", "c.yaml", "--fast", f"placement.weight_bytes={size}")
        assert done.code == 0, done.err
        assert ("no fp8 arithmetic" in done.out) == (size == "1")
        fp8 = rollart(
            "plan",
            "r.yaml",
            "--cluster",
            "c.yaml",
            "--fast",
            f"placement.weight_bytes={size}",
            "placement.arithmetic=fp8",
        )
        assert fp8.code == 2
        assert "no fp8 figure for A100" in fp8.err

    def test_a_budget_far_too_small_is_named(self, rollart: Call) -> None:
        Path("r.yaml").write_text(RUN)
        Path("c.yaml").write_text(CLUSTER.replace("H800, count: 8", "H800, count: 96"))
        done = rollart("plan", "r.yaml", "--cluster", "c.yaml", "--fast", "placement.budget_usd_per_hour=0.01")
        assert done.code == 2
        assert "/h, the budget is $0.01/h" in done.err


def test_a_domain_without_weight_is_refused_for_a_reason(rollart: Call) -> None:
    Path("r.yaml").write_text(RUN)
    Path("c.yaml").write_text(CLUSTER)
    done = rollart("plan", "r.yaml", "--cluster", "c.yaml", "domains.chat.weight=0")
    assert done.code == 2
    assert "every domain has a group of each batch at least; leave the domain out" in done.err
