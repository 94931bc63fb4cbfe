"""The words of docstrings, comments, spec descriptions and names: rates per 1,000 words, and one class per name.

Such words replace a noun or a subject that the reader needs. `RATES` allows them where they are the plainest; a further
word gets a line of its own.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRODUCT = [
    path for package in ("rollart", "serverless", "placement") for path in sorted((ROOT / package).rglob("*.py"))
]

RATES = {
    r"what": 2.0,
    r"told|tells|said|says": 0.3,
    r"whoever|nobody|somebody": 0.3,
    r"that which|the one that|those that|ones that|one that": 0.5,
}
"""Most occurrences per 1,000 words of each family of words."""

SHOWN = 10


def texts(path: Path) -> Iterator[str]:
    """Docstrings of all kinds (also those of constants), comments, and the texts that a spec key or option is given."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text
            case ast.keyword(arg="description" | "help", value=ast.Constant(value=str(text))):
                yield text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


@pytest.fixture(scope="module")
def words() -> dict[Path, str]:
    return {path.relative_to(ROOT): " ".join(texts(path)) for path in PRODUCT}


@pytest.mark.parametrize(("family", "most"), RATES.items())
def test_private_words_are_rare(words: dict[Path, str], family: str, most: float) -> None:
    found = Counter({path: len(re.findall(rf"\b({family})\b", text, re.IGNORECASE)) for path, text in words.items()})
    rate = 1000 * found.total() / sum(len(text.split()) for text in words.values())
    worst = "\n".join(f"{count:4} {path}" for path, count in found.most_common(SHOWN))
    assert rate <= most, f"{rate:.2f} per 1,000 words of: {family}\n{worst}"


def test_a_public_class_name_stands_once() -> None:
    defined = defaultdict(list)
    for path in PRODUCT:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined[node.name].append(str(path.relative_to(ROOT)))
    assert {name: places for name, places in defined.items() if len(places) > 1} == {}
