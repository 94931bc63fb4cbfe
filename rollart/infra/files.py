"""Rendered files: values dumped as text, the same bytes for the same values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart.errors import SpecError, UsageError
from serverless.spec import FunctionSpec


@dataclass(frozen=True, slots=True)
class RenderedFiles:
    """Files by relative path, and the next steps for the user: a command or two."""

    files: Mapping[str, bytes]
    steps: tuple[str, ...] = ()


def refuse_image(spec: FunctionSpec) -> None:
    """Raise SpecError for a function with a container image of its own: templates describe archives and Modal's image
    of Debian."""
    if spec.image is not None:
        raise SpecError(
            f"function '{spec.name}' has a container image, which no template describes",
            remedy="deploy it with `rollart rewards deploy`, which builds and pushes the image",
        )


def header(target: str, cluster: str) -> str:
    """The first comment of a rendered file."""
    return f"Rendered by `rollart infra render --target {target}` for cluster {cluster}: change the spec, not this."


def yaml_text(*documents: Mapping[str, Any], about: str) -> bytes:
    """YAML documents, with the comment `about` on the first line."""
    import yaml

    class Plain(yaml.SafeDumper):
        """Repeats equal values instead of using anchors, which are hard to read."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def literal(dumper: Any, text: str) -> Any:
        """Multi-line text as a literal block."""
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Plain.add_representer(str, literal)
    text = yaml.dump_all(documents, Dumper=Plain, sort_keys=False, allow_unicode=True, width=110)
    return f"# {about}\n{text}".encode()


def json_text(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def script_text(lines: Sequence[str], about: str) -> bytes:
    return "\n".join(["#!/bin/sh", f"# {about}", "set -eu", *lines, ""]).encode()


def write(rendered: RenderedFiles, directory: Path) -> list[Path]:
    """Write the files, replacing existing ones of the same names. `UsageError` if that fails."""
    written = []
    for name in sorted(rendered.files):
        path = directory / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(rendered.files[name])
            if path.suffix == ".sh":
                path.chmod(0o755)
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}", remedy="choose another --output") from None
        written.append(path)
    return written
