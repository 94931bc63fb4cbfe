"""Fault plans as files: what they may say, and how they say what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.errors import SpecError
from rollart.settings.faults import FaultPlanSpec, matching_names
from rollart.settings.load import json_schema, load_faults, load_file

PARTS = ["engine-0", "engine-1", "trainer-0", "machine-big-0", "link-weights"]


def problems(tmp_path: Path, text: str, parts: list[str] | None = None) -> str:
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(SpecError) as caught:
        load_faults(tmp_path / "f.yaml", parts, ["reward-chat"])
    return str(caught.value).replace(str(tmp_path), "")


def test_a_plan_is_read_and_told_from_other_specs(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(
        "hosts: 2\noutages:\n  - {parts: [engine-1, host-1], at_s: 5}\n"
        "rates:\n  - {parts: ['link-*'], every_s: 60, seconds: 5, left: 0.5}\nfunctions:\n  - {crash: 0.1}\n"
    )
    plan = load_faults(tmp_path / "f.yaml", PARTS, ["reward-chat"])
    assert plan.outages[0].seconds is None
    assert plan.functions[0].functions == ["*"]
    assert load_file(tmp_path / "f.yaml") == plan
    assert isinstance(plan, FaultPlanSpec)
    assert json_schema("faults")["properties"]["hosts"]["minimum"] == 1


def test_names_that_are_not_there_are_told_with_their_place(tmp_path: Path) -> None:
    text = "outages:\n  - {parts: [engin-1], at_s: 5}\n  - parts:\n      - zebra\n    at_s: 1\n"
    told = problems(tmp_path, text, PARTS)
    assert "/f.yaml:2:14: outages.0.parts names 'engin-1' (rule: a part of this run; did you mean 'engine-1'?)" in told
    assert "/f.yaml:4:9: outages.1.parts names 'zebra'" in told
    assert load_faults(tmp_path / "f.yaml").outages[1].parts == ["zebra"], "no run is known: nothing to compare with"


def test_many_parts_are_told_by_their_families(tmp_path: Path) -> None:
    told = problems(tmp_path, "outages: [{parts: [zzz], at_s: 1}]", [f"engine-{n}" for n in range(64)])
    assert "engine-0…engine-63, host-0)" in told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("outages: [{parts: [engine-0], at_s: 1, left: 0.5}]", "left is 0.5 for 'engine-0' (rule: links alone)"),
        ("outages: [{parts: [], at_s: 1}]", "outages.0.parts is []"),
        ("rates: [{parts: [engine-0], every_s: 0, seconds: 1}]", "rates.0.every_s is 0"),
        ("rates: [{parts: [engine-0], evry_s: 1, seconds: 1}]", "did you mean 'every_s'?"),
        ("functions: [{crash: 0.6, timeout: 0.6}]", "functions.0 fails 1.2 of its calls (rule: at most 1)"),
        ("functions: [{functions: [reward-chta]}]", "names 'reward-chta' (rule: a function of this run; did you mean"),
        ("resets: {fail: 2}", "resets.fail is 2"),
        ("hosts: 0", "hosts is 0"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, text: str, words: str) -> None:
    assert words in problems(tmp_path, text, PARTS)


@given(st.lists(st.sampled_from(["engine", "trainer", "host"]), min_size=1), st.integers(0, 9))
def test_a_name_means_itself_and_a_star_its_family(kinds: list[str], n: int) -> None:
    names = [f"{kind}-{i}" for i, kind in enumerate(kinds)]
    assert matching_names(names[0], names) == [names[0]]
    assert matching_names("engine-*", names) == [name for name in names if name.startswith("engine-")]
    assert matching_names("*", names) == names
    assert matching_names(f"ghost-{n}", names) == []
