"""Label selectors in Ray's grammar: `v`, `!v`, `in(a,b)`, `!in(a,b)`."""

from __future__ import annotations

from collections.abc import Mapping


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """True if a node with `labels` satisfies every key of `selector`. A missing label satisfies only negations."""
    return all(_matches_one(wanted, labels.get(key)) for key, wanted in selector.items())


def _matches_one(wanted: str, actual: str | None) -> bool:
    wanted = wanted.strip()
    if wanted.startswith("!"):
        return not _matches_one(wanted[1:], actual)
    if wanted.startswith("in(") and wanted.endswith(")"):
        return actual in [v.strip() for v in wanted[3:-1].split(",")]
    return actual == wanted
