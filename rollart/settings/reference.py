"""`docs/spec.md` from the spec models: `python -m rollart.settings.reference > docs/spec.md`."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rollart.settings.base import descriptions
from rollart.settings.load import KINDS

HEAD = """# Specs

Every key of the YAML files that `rollart` reads, generated from the models by
`python -m rollart.settings.reference` (a test keeps this page current). Unknown keys are errors. Any key of a
run can be set on the command line as `key=value` (`batch.trajectories=64`, `domains.lake.max_turns=5`), any key of
the cluster as `cluster.key=value`.
"""


def reference() -> str:
    """The page as Markdown."""
    lines = [HEAD]
    for kind, model in KINDS.items():
        lines += [f"## {kind}", "", *_section(model)]
        for part in nested_models(model, set()):
            lines += [f"### {kind}: {part.__name__}", "", *_section(part)]
    return "\n".join(lines).rstrip() + "\n"


def _section(model: type[BaseModel]) -> Iterator[str]:
    yield (model.__doc__ or "").strip().split("\n\n")[0].replace("\n    ", " ")
    yield ""
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    texts = descriptions(model)
    for name, info in model.model_fields.items():
        text = texts.get(name, "").replace("|", "\\|")
        yield f"| `{name}` | {_type(info)} | {_default(info)} | {text} |"
    yield ""


def nested_models(model: type[BaseModel], seen: set[type[BaseModel]]) -> Iterator[type[BaseModel]]:
    """Models inside a model, each once, in the order of their keys."""
    for info in model.model_fields.values():
        for part in _models_in(info.annotation):
            if part not in seen:
                seen.add(part)
                yield part
                yield from nested_models(part, seen)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)


def _type(info: FieldInfo) -> str:
    limits = [
        f"{sign} {getattr(rule, field)}"
        for rule in info.metadata
        for field, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if getattr(rule, field, None) is not None
    ]
    return ", ".join([_name(info.annotation), *limits])


def _name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin is typing.Literal:
        return " \\| ".join(f"`{a}`" for a in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_name(a) for a in arguments if a is not type(None))
    if origin is typing.Annotated:
        return _name(arguments[0])
    if origin in (list, tuple):
        inner = [a for a in arguments if a is not Ellipsis]
        return f"list of {_name(inner[0])}"
    if origin is dict:
        return "mapping"
    names: dict[Any, str] = {str: "text", int: "integer", float: "number", bool: "true \\| false"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return "none"
    if isinstance(value, BaseModel):
        return "its defaults"
    return f"`{json.dumps(value)}`"


if __name__ == "__main__":
    print(reference(), end="")
