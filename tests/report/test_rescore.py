"""The comparison of a reward with recorded outcomes, against values that are computed by hand or by scipy."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.ledger.kept import KeptScore
from rollart.model import InfraFault, ModelFault, Outcome, Scored
from rollart.report.render import render
from rollart.report.rescore import RescoredItem, Rescoring, correlation, kappa, order_changes, ranks, rescore_report
from rollart.settings.load import builtin, load_prices
from serverless.meter import TokenBill
from serverless.types import Cause, FaultKind, Invocation, TokenUsage
from tests.kept import kept

CRASH = InfraFault(FaultKind.CRASH, retryable=False, detail="KeyError: 'x'")
PRICES = load_prices(builtin("prices.yaml"))


def one(
    name: str, old: float | Outcome, *new: float | Outcome, value: float | None = None, **more: Any
) -> RescoredItem:
    """An item `group.member` of a domain; its trajectory's reward is that of the old function alone unless given."""
    before, *after = (Scored(o) if isinstance(o, int | float) else o for o in (old, *new))
    score = KeptScore("old", "v1", more.get("weight", 1.0), before)
    if value is None and isinstance(before, Scored):
        value = score.weight * before.value
    return RescoredItem(kept(name, "?", score, domain=more.get("domain", "lake"), value=value), score, tuple(after))


def tables(*items: RescoredItem, **more: Any) -> dict[str, list[dict[str, Any]]]:
    calls = (Invocation("new", "aws_lambda", "w", 0.0, 1.0, 0.0, 2.0, 1024, 3, "ok"),)
    given: dict[str, Any] = {"calls": calls, "tokens": (), "tolerance": 0.1, "seconds": 1.0}
    found = Rescoring("r", "old", "new", "v2", "aws_lambda", items, available=9, prices=PRICES, **(given | more))
    read: dict[str, Any] = json.loads(render(rescore_report(found), "json"))
    assert read["schema_version"]
    tables: dict[str, list[dict[str, Any]]] = read["tables"]
    return tables


def test_agreement_and_drift() -> None:
    found = tables(one("a.0", 1, 1), one("a.1", 0, 0.1), one("b.0", 0, 1), one("b.1", CRASH, 1), one("b.2", 1, CRASH))
    (row,) = found["agreement"]
    assert (row["compared"], row["equal"], row["within"]) == (3, pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert row["correlation"] == pytest.approx(0.5)
    (drift,) = found["drift"]
    # Means over the prompts a and b.
    assert (drift["prompts"], drift["old"]) == (2, pytest.approx(0.25))
    assert (drift["new"], drift["difference"]) == (pytest.approx(0.775), pytest.approx(0.525))
    assert drift["interval"] == pytest.approx(12.7062 * 0.475, rel=1e-4)
    assert [(f["function"], f["fault_of"], f["kind"]) for f in found["faults"]] == [
        ("old", "platform", "crash"),
        ("new", "platform", "crash"),
    ]


def test_domains_have_rows_of_their_own() -> None:
    found = tables(one("a.0", 1, 1), one("b.0", 0, 1, domain="spell"))
    assert [(row["domain"], row["equal"]) for row in found["agreement"]] == [
        ("all", 0.5),
        ("lake", 1.0),
        ("spell", 0.0),
    ]


def test_a_floor_is_a_score_and_a_platform_fault_is_none() -> None:
    found = tables(one("a.0", ModelFault(-1.0, "cut off"), -1), one("a.1", 0.5, CRASH))
    assert (found["agreement"][0]["compared"], found["agreement"][0]["equal"]) == (1, 1.0)
    assert found["items"][1]["fault"] == "crash: KeyError: 'x'"


def test_binary_scores_have_a_confusion_table() -> None:
    pairs = [(1, 5)] * 4 + [(1, 3)] + [(0, 5)] * 2 + [(0, 3)] * 3
    (row,) = tables(*(one(f"g{n}.0", old, new) for n, (old, new) in enumerate(pairs)))["thresholds"]
    assert (row["old_at_least"], row["new_at_least"]) == (0.5, 4.0)
    assert (row["both"], row["only_old"], row["only_new"], row["neither"]) == (4, 1, 2, 3)
    assert (row["agreement"], row["kappa"]) == (0.7, pytest.approx(0.4))


def test_a_continuous_score_is_tried_at_several_thresholds() -> None:
    found = tables(*(one(f"g{n}.0", n >= 14, n / 20) for n in range(20)))["thresholds"]
    best = max(found, key=lambda row: row["kappa"])
    assert (best["new_at_least"], best["kappa"]) == (pytest.approx(0.7), 1.0)
    assert len(found) == 9
    assert "thresholds" not in [
        name for name, rows in tables(one("a.0", 0.1, 1), one("b.0", 0.2, 1), one("c.0", 0.3, 1)).items() if rows
    ]


def test_effect_on_groups_uses_the_rewards_of_trajectories() -> None:
    """The old function is half of the reward; the rest, which the environment pays, stays."""
    same = [one("a.0", 1, 0, value=4.0, weight=2.0), one("a.1", 0, 0, value=1.0, weight=2.0)]  # 4, 1 -> 2, 1
    turned = [one("b.0", 1, 0, value=2.0, weight=2.0), one("b.1", 0, 1, value=0.5, weight=2.0)]  # 2, 0.5 -> 0, 2.5
    flat = [one("c.0", 1, 0, value=2.0, weight=2.0), one("c.1", 0, 0, value=0.0, weight=2.0)]  # 2, 0 -> 0, 0
    (row,) = tables(*same, *turned, *flat, one("d.0", 1, 0))["advantages"]
    assert row["groups"] == 3
    assert row["order_changed"] == pytest.approx(2 / 3)
    assert (row["no_signal_old"], row["no_signal_new"]) == (0.0, pytest.approx(1 / 3))
    assert row["signal_changed"] == pytest.approx(1 / 3)
    assert row["sign_changed"] == pytest.approx(4 / 6)


def test_a_judges_variance_within_and_between_items() -> None:
    (row,) = tables(one("a.0", 0, 1, 3), one("b.0", 0, 6, 6), one("c.0", 0, 2, CRASH))["variance"]
    assert (row["items"], row["changed"]) == (2, 0.5)
    assert row["within_item_sd"] == pytest.approx(1.0)
    # Means 2 and 6 have the variance 8, of which half of the variance within items is noise.
    assert row["between_items_sd"] == pytest.approx(7.5**0.5)
    assert row["reliability"] == pytest.approx(7.5 / 8.5)


def test_cost_of_calls_and_tokens() -> None:
    usage = TokenUsage("api.example", "some-model", 2, input_tokens=100, output_tokens=10)
    bill = TokenBill("new", "aws_lambda", 0.0, Cause.CALL, usage)
    calls, tokens = tables(one("a.0", 1, 1, 1), tokens=(bill,))["cost"]
    assert calls["usd"] == pytest.approx(PRICES.function_usd("aws_lambda", billed_s=2.0, memory_mb=1024))
    assert calls["usd_per_million"] == pytest.approx(calls["usd"] / 2 * 1e6)
    assert (tokens["calls"], tokens["usd"], tokens["cost"]) == (2, None, "no price")


def test_an_empty_comparison_has_no_figures() -> None:
    found = tables(one("a.0", CRASH, CRASH))
    assert found["agreement"][0]["compared"] == 0
    assert found["agreement"][0]["equal"] is None


values = st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=20)


@given(values)
def test_rank_correlation_is_spearmans(pairs: list[tuple[int, int]]) -> None:
    from scipy.stats import rankdata

    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    assert ranks(a) == list(rankdata(a))
    found = correlation(ranks(a), ranks(b))
    assert found is None or -1.0 <= found <= 1.0
    assert (found is None) == (len(set(a)) == 1 or len(set(b)) == 1)


@given(values)
def test_a_monotone_score_changes_no_order(pairs: list[tuple[int, int]]) -> None:
    assert not order_changes([(x, 2.0 * x + 1.0) for x, _ in pairs])
    assert order_changes([(x, -x) for x, _ in pairs]) == (len({x for x, _ in pairs}) > 1)


def test_kappa_of_chance_is_zero() -> None:
    assert kappa(Counter({(True, True): 1, (True, False): 1, (False, True): 1, (False, False): 1})) == 0.0
    assert kappa(Counter({(True, True): 5})) is None
