"""Every spec key and command is still there that was when the code was regrouped: `fixtures/surface.txt`, one per line.

A line that is missing breaks a user's spec or script. New keys and commands need no line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from rollart.cli.commands import cli
from rollart.settings.load import KINDS, json_schema

SURFACE = Path(__file__).parent / "fixtures" / "surface.txt"


def surface() -> list[str]:
    """Each key of a spec with its type and default, and each command with its options and arguments, as lines."""
    keys = {line for kind in KINDS for line in spec_keys(kind, json_schema(kind))}
    return [*sorted(keys), *sorted(commands(cli, "rollart"))]


def spec_keys(path: str, schema: Mapping[str, Any]) -> Iterator[str]:
    definitions = schema.get("$defs", {})

    def walk(path: str, node: Mapping[str, Any], inside: tuple[str, ...]) -> Iterator[str]:
        if "$ref" in node:
            name = node["$ref"].rpartition("/")[2]
            if name not in inside:
                yield from walk(path, definitions[name], (*inside, name))
            return
        if (kind := node.get("const", node.get("enum", node.get("type")))) is not None:
            yield f"{path}: {json.dumps(kind)}"
        for key, value in node.get("properties", {}).items():
            default = f" = {json.dumps(value['default'])}" if "default" in value else ""
            required = " required" if key in node.get("required", ()) else ""
            yield f"{path}.{key}{required}{default}"
            yield from walk(f"{path}.{key}", value, inside)
        for part in ("anyOf", "oneOf", "allOf"):
            for value in node.get(part, ()):
                yield from walk(path, value, inside)
        for part, mark in (("items", "[]"), ("additionalProperties", "{}")):
            if isinstance(value := node.get(part), Mapping):
                yield from walk(path + mark, value, inside)

    yield from walk(path, schema, ())


def commands(command: click.Command, name: str) -> Iterator[str]:
    yield name
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            yield f"{name} {'/'.join(sorted([*parameter.opts, *parameter.secondary_opts]))}"
        else:
            yield f"{name} {parameter.human_readable_name} ({parameter.nargs})"
    if isinstance(command, click.Group):
        context = click.Context(command)
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            assert found is not None
            yield from commands(found, f"{name} {child}")


def test_no_key_and_no_command_is_gone() -> None:
    assert set(SURFACE.read_text().splitlines()) - set(surface()) == set()
