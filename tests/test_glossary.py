"""The words of docstrings, comments, spec descriptions, error texts and names: `words.toml` bounds their rates."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import PRODUCT, ROOT, nodes, source

WORDS = tomllib.loads((ROOT / "tests" / "words.toml").read_text())

SHOWN = 10


def texts(path: Path) -> Iterator[str]:
    """Docstrings of all kinds (also those of constants), comments, and the texts of spec keys, options and errors."""
    for node in nodes(path):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text
            case ast.keyword(arg="description" | "help" | "remedy", value=value):
                yield from constants(value)
            case ast.Raise(exc=ast.Call(args=arguments)):
                for argument in arguments:
                    yield from constants(argument)
    for token in tokenize.generate_tokens(io.StringIO(source(path)).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def constants(value: ast.expr) -> Iterator[str]:
    """The text of an expression without its values."""
    for node in ast.walk(value):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.fixture(scope="module")
def words() -> dict[Path, str]:
    return {path.relative_to(ROOT): " ".join(texts(path)) for path in PRODUCT}


@pytest.mark.parametrize(("family", "most"), WORDS["per_thousand"].items())
def test_private_words_are_rare(words: dict[Path, str], family: str, most: float) -> None:
    found = Counter({path: len(re.findall(rf"\b({family})\b", text, re.IGNORECASE)) for path, text in words.items()})
    rate = 1000 * found.total() / sum(len(text.split()) for text in words.values())
    worst = "\n".join(f"{count:4} {path}" for path, count in found.most_common(SHOWN))
    assert rate <= most, f"{rate:.2f} per 1,000 words of: {family}\n{worst}"


def test_names_are_terms_of_the_field() -> None:
    banned = {name.lower() for name in WORDS["names"]["not_for"]}
    found = set()
    for path in PRODUCT:
        classes = (n.name for n in nodes(path) if isinstance(n, ast.ClassDef))
        found |= {str(path.relative_to(ROOT)) + ":" + name for name in classes if name.strip("_").lower() in banned}
        if path.stem in banned:
            found.add(str(path.relative_to(ROOT)))
    assert found == set()
