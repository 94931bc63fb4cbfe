"""`make demo` ends with the last measured comparison of asynchronous and synchronous training."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_demo_shows_the_sentence_of_the_docs() -> None:
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").split("\ndemo:")[1].split("\n\n")[0]
    (begin,) = re.findall(r"grep -m1 '\^(.+)' docs/training\.md", recipe)
    shown = [line for line in (ROOT / "docs/training.md").read_text(encoding="utf-8").splitlines() if begin in line]
    assert len(shown) == 1
    assert shown[0].startswith(begin)
    assert re.search(r"\d{4}-\d{2}-\d{2}.*median", shown[0]), "when, and of what"
