"""Which kept items are scored again, and against which function."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.errors import UsageError
from rollart.tools.rescore import KeptIndex, draw, old_function


def index(group: str, member: int, *functions: str) -> KeptIndex:
    return KeptIndex(f"{group}.{member}", 0.0, group, functions or ("exact",))


@given(st.lists(st.integers(1, 8), min_size=1, max_size=30), st.integers(1, 60))
def test_a_sample_has_whole_groups(sizes: list[int], most: int) -> None:
    items = [index(f"g{g}", n) for g, size in enumerate(sizes) for n in range(size)]
    chosen = draw(items, most)
    assert len(chosen) <= most
    assert chosen == [item for item in items if item in set(chosen)], "in their order, each once"
    assert chosen == draw(items, most), "the same each time"
    if len(items) <= most:
        assert chosen == items
    whole = [g for g, size in enumerate(sizes) if sum(c.group == f"g{g}" for c in chosen) == size]
    if min(sizes) <= most:
        assert sum(sizes[g] for g in whole) == len(chosen)
    else:
        assert len(chosen) == most


def test_no_bound_takes_all() -> None:
    items = [index("g", n) for n in range(5)]
    assert draw(items, None) == items


def test_the_function_to_compare_with() -> None:
    both = [index("g", 0, "exact", "judge"), index("h", 0, "judge")]
    assert old_function([index("g", 0)], None, "other") == "exact"
    assert old_function(both, None, "judge") == "judge"
    assert old_function(both, "exact", "judge") == "exact"


@pytest.mark.parametrize(
    ("named", "message"), [(None, "has 2 functions, and none is named 'other'"), ("jugde", "did you mean 'judge'")]
)
def test_an_unclear_function_is_refused(named: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        old_function([index("g", 0, "exact", "judge")], named, "other")
    assert "exact" in refused.value.remedy
