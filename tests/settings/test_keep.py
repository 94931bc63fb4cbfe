"""`keep`: its short and its long form, and values that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollart.errors import SpecError
from rollart.settings.load import builtin, load_run
from rollart.settings.run import KeepSpec

QUICKSTART = Path(builtin("runs/quickstart.yaml"))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("none", KeepSpec(items="none")),
        ("failed", KeepSpec(items="failed", max_mb=256)),
        ("sample 0.02", KeepSpec(items="sample 0.02")),
        ("{items: all, max_mb: 5}", KeepSpec(items="all", max_mb=5)),
        ("{max_mb: 5}", KeepSpec(max_mb=5)),
    ],
)
def test_both_forms(written: str, read: KeepSpec) -> None:
    assert load_run(QUICKSTART, [f"keep={written}"]).keep == read


@pytest.mark.parametrize("wrong", ["some", "sample", "sample 2", "sample -1", "3", "{items: all, max_mb: 0}"])
def test_other_values_are_refused_with_the_rule(wrong: str) -> None:
    with pytest.raises(SpecError, match=r"keep.* is .*rule: "):
        load_run(QUICKSTART, [f"keep={wrong}"])


def test_a_share_of_the_prompts() -> None:
    assert [KeepSpec(items=items).share for items in ("all", "sample 0.25", "sample 0", "sample 1")] == [1, 0.25, 0, 1]
