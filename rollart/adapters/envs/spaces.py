"""Text forms of Gymnasium's spaces: observations rendered as text, actions parsed from text.

A renderer is any function of an observation that returns text; a parser is any function of the policy's text that
returns an action, and raises ValueError for a text that is not an action.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["ActionParser", "SpaceRenderer", "action_words", "default_parser", "default_renderer", "space_kind"]

SpaceRenderer = Callable[[Any], str]
ActionParser = Callable[[str], Any]

MOST_NUMBERS = 64
"""Maximum entries of an array that is rendered as numbers; an image or a longer vector needs a renderer of its own."""


def space_kind(space: Any) -> str:
    """The space's class by name, e.g. `Discrete`. By name, since Gymnasium is imported only when it is used."""
    names = [c.__name__ for c in type(space).__mro__]
    known = ("Discrete", "MultiDiscrete", "MultiBinary", "Box", "Text", "Tuple", "Dict", "Sequence", "Graph", "OneOf")
    return next((name for name in names if name in known), names[0])


def default_renderer(space: Any, *, digits: int = 3) -> SpaceRenderer:
    """The default renderer of a space: text as it is, numbers separated by spaces, parts of a tuple or a dict by their
    names. ValueError for a space without a readable default."""
    kind = space_kind(space)
    if kind == "Text":
        return str
    if kind == "Discrete":
        return lambda value: str(int(value))
    if kind in ("MultiDiscrete", "MultiBinary", "Box"):
        size = 1
        for length in space.shape:
            size *= length
        if size > MOST_NUMBERS:
            raise ValueError(
                f"observations are {space}: {size} numbers (rule: at most {MOST_NUMBERS}, or give `render`)"
            )
        return lambda value: _numbers(value, digits)
    if kind == "Tuple":
        parts = [default_renderer(part, digits=digits) for part in space.spaces]
        return lambda value: " ".join(f"{i}:{part(v)}" for i, (part, v) in enumerate(zip(parts, value, strict=True)))
    if kind == "Dict":
        named = {name: default_renderer(part, digits=digits) for name, part in space.spaces.items()}
        return lambda value: " ".join(f"{name}:{part(value[name])}" for name, part in named.items())
    raise ValueError(f"observations are {space} (rule: such a space needs a `render`, package.module:function)")


def action_words(space: Any, names: Sequence[str] | None) -> tuple[str, ...]:
    """One word per action of a Discrete space: the names, or else Gymnasium's own numbers."""
    count = int(space.n)
    if names is None:
        first = int(getattr(space, "start", 0))
        return tuple(str(first + i) for i in range(count))
    if len(names) != count:
        raise ValueError(f"actions has {len(names)} names for {count} actions (rule: one for each, in their order)")
    words = tuple(str(name) for name in names)
    if len(set(words)) < count or not all(word and word == word.strip() for word in words):
        raise ValueError(f"actions is {list(words)} (rule: different words, none empty or padded)")
    return words


def default_parser(space: Any, words: Sequence[str] | None) -> ActionParser:
    """The default parser of a space: one of `words` for a Discrete space, any text for a Text space. ValueError for
    other spaces."""
    kind = space_kind(space)
    if kind == "Discrete":
        assert words is not None
        first = int(getattr(space, "start", 0))
        numbers = {word: first + i for i, word in enumerate(words)}
        return lambda text: _looked_up(numbers, text.strip())
    if kind == "Text":
        return lambda text: _contained(space, text.strip())
    raise ValueError(f"actions are {space} (rule: such a space needs a `parse`, package.module:function)")


def _numbers(value: Any, digits: int) -> str:
    import numpy

    array = numpy.asarray(value)
    if array.dtype.kind in "iub":
        return " ".join(str(int(number)) for number in array.ravel().tolist())
    return " ".join(f"{number:.{digits}g}" for number in array.ravel().tolist())


def _looked_up(numbers: dict[str, int], word: str) -> int:
    if word not in numbers:
        raise ValueError(f"{word!r} is no action")
    return numbers[word]


def _contained(space: Any, text: str) -> str:
    if not space.contains(text):
        raise ValueError(f"the text is no element of {space}")
    return text
