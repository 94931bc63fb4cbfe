"""The base of all settings: models that are frozen and know no other keys, names, import paths and addresses. Pure."""

from __future__ import annotations

import ast
import functools
import inspect
import ipaddress
import itertools
import sys
import typing
import urllib.parse
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints, ValidationInfo, field_validator

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)]
"""Letters, digits, '_', '.', '-': a name becomes a directory, a label and a function name."""

AdapterName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=64)]
"""Letters, digits, '_', '-': a directory, and a part of the names of tensors, which a dot would divide."""

ImportPath = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*(\.\w+)*$")]
"""`package.module:attribute`."""

FIELDS_OF_CHARGES = ("run", "cluster", "month", "day", "service", "provider", "role", "pool", "sku", "price")
"""Fields by which `report fleet` groups dollars, beside tags."""


def _tags(value: dict[str, str]) -> dict[str, str]:
    if value.keys() & set(FIELDS_OF_CHARGES):
        raise ValueError(f"names other than the fields of charges: {', '.join(FIELDS_OF_CHARGES)}")
    return value


Tags = Annotated[dict[Name, Annotated[str, StringConstraints(min_length=1, max_length=256)]], AfterValidator(_tags)]
"""Tags of costs, by name."""

LARGEST = 10**24
"""Largest magnitude of any whole number: fields have their own bounds; this one keeps arithmetic on them finite."""


def http_url(value: str) -> str:
    parts = urllib.parse.urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("an http or https URL")
    return value


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """The docstrings of a model's fields, read from its source: only schemas and docs need them."""
    found = {name: info.description for name, info in model.model_fields.items() if info.description}
    for base in (base for base in reversed(model.__mro__) if issubclass(base, SpecEntry)):
        for field, text in itertools.pairwise(_classes(base.__module__)[base.__name__].body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(str(description))):
                    found[name] = " ".join(description.split())
    return found


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}


def _describe(schema: dict[str, Any], model: type[BaseModel]) -> None:
    for name, description in descriptions(model).items():
        schema["properties"][name]["description"] = description


class SpecEntry(BaseModel):
    """Base of every mapping in a spec: unknown keys are errors, values do not change after validation. The docstring of
    a field is its description in schemas and in docs/spec.md."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=(), json_schema_extra=_describe
    )

    @field_validator("*", mode="before")
    @classmethod
    def _numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject `true` as a number, and numbers too large for a float."""
        field = cls.model_fields.get(info.field_name or "")
        if field is None or not {int, float} & _types_in(field.annotation):
            return value
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, bool) and bool not in _types_in(field.annotation):
                raise ValueError("a number")
            if isinstance(one, int) and abs(one) > LARGEST:
                limits = [rule.le for rule in field.metadata if getattr(rule, "le", None) is not None]
                limit = min(limits, default=LARGEST)
                raise ValueError(f"less than or equal to {limit:.15g}" if one > 0 else f"at least {-LARGEST:.15g}")
        return value


def _types_in(annotation: Any) -> set[Any]:
    """The plain types within an annotation; mappings are not restricted."""
    if typing.get_origin(annotation) is dict:
        return set()
    parts = typing.get_args(annotation)
    return {annotation} if not parts else set().union(*map(_types_in, parts))


def host_and_port(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT; an IPv6 address is in brackets. ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535 or (":" in host and not host.startswith("[")):
        raise ValueError(f"{text!r} (rule: HOST:PORT)")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """True if the address is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
