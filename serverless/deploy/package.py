"""What a backend deploys: the function's source, the handler file, its artefacts and a manifest, with a version.

    rollart_handler.py      the one handler (`serverless.deploy.handler`), `rollart_handler.handler`
    rollart_manifest.json   which file and attribute it adapts
    function/<file>.py      the user's source, as it is
    artefacts/...           the declared files and directories

The version is a content digest: no path of this machine and no time enters it, nor what only scales the function.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import pathlib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from serverless import keys
from serverless.declare import declarations
from serverless.deploy import handler as handler_file
from serverless.errors import PackageError, SpecInvalid
from serverless.spec import FunctionSpec

__all__ = ["HANDLER", "Package", "build"]

HANDLER = "rollart_handler.handler"
"""Lambda's name of the handler in every package."""

_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip can hold: archives of equal content are equal bytes."""

_SKIPPED = frozenset({"__pycache__", ".git", ".DS_Store"})


@dataclass(frozen=True, slots=True)
class Package:
    """A function ready to deploy. `spec` has the decorator's settings merged in, `files` is path -> content."""

    spec: FunctionSpec
    version: str
    files: Mapping[str, bytes]

    def write(self, directory: pathlib.Path) -> None:
        """Lay the files out under `directory`, which may not exist yet."""
        for path, data in self.files.items():
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)

    def zip(self) -> bytes:
        """The archive, stored not deflated: compressed bytes differ between zlib builds."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
            for path in sorted(self.files):
                entry = zipfile.ZipInfo(path, _EPOCH)
                entry.external_attr = 0o644 << 16
                archive.writestr(entry, self.files[path])
        return buffer.getvalue()


def build(spec: FunctionSpec, *, base: pathlib.Path | None = None) -> Package:
    """Pack a function. Relative paths are of `base`, or of the working directory.

    The user's source is read, never run. Settings given in the spec win over those of `@reward`, which win over
    defaults; a decorator's artefacts are relative to its source file.
    Errors: `PackageError` for a missing file or a relative import, `SpecInvalid` for a setting out of its range.
    """
    root = base or pathlib.Path.cwd()
    path, named = _locate(spec.source, root)
    text = _read(path, f"source of function {spec.name}")
    declared = declarations(text.decode(errors="replace"), filename=str(path))
    _refuse_relative_imports(text, path)
    attribute = spec.handler or named or _only(declared, spec.name)
    merged = _merge(spec, declared.get(attribute, {}), root, path.parent)
    manifest: dict[str, object] = {"file": path.name, "attribute": attribute, "takes": merged.takes}
    files = {
        "rollart_handler.py": pathlib.Path(handler_file.__file__).read_bytes(),
        "rollart_manifest.json": keys.canonical(manifest),
        f"function/{path.name}": text,
    }
    for artefact in merged.artefacts:
        for relative, data in _artefact(pathlib.Path(artefact), spec.name).items():
            if relative in files:
                raise PackageError(f"function {spec.name}: two artefacts are called {relative}", remedy="rename one")
            files[relative] = data
    return Package(merged, keys.content_digest(merged.identity(), files), files)


def _locate(source: str, root: pathlib.Path) -> tuple[pathlib.Path, str]:
    """The source file and the attribute after ':' ('' if none)."""
    head, _, attribute = source.partition(":")
    if head.endswith(".py") or "/" in head:
        return root / head, attribute
    try:
        found = importlib.util.find_spec(head)
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        raise PackageError(f"no module {head!r} to pack", remedy="give the path of a .py file, or install the module")
    return pathlib.Path(found.origin), attribute


def _read(path: pathlib.Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PackageError(f"{what}: {path}: {error.strerror}", remedy="check the path in the spec") from None


def _only(declared: Mapping[str, object], name: str) -> str:
    if name in declared:
        return name
    if len(declared) > 1:
        raise PackageError(
            f"function {name}: its source has several rewards: {', '.join(declared)}", remedy="name one as `handler`"
        )
    return next(iter(declared), "handler")


def _merge(spec: FunctionSpec, declared: dict[str, Any], root: pathlib.Path, beside: pathlib.Path) -> FunctionSpec:
    settings = {k: v for k, v in declared.items() if k != "name" and k not in spec.model_fields_set}
    chosen = {k: getattr(spec, k) for k in spec.model_fields_set}
    origin = root if "artefacts" in spec.model_fields_set else beside
    artefacts = chosen.get("artefacts", settings.get("artefacts", ()))
    try:
        return FunctionSpec.model_validate(
            {**settings, **chosen, "artefacts": tuple(str(origin / a) for a in artefacts)}
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "settings"
        raise SpecInvalid(f"function {spec.name}: {where}: {first['msg']} (got {first['input']!r:.60})") from None


def _refuse_relative_imports(text: bytes, path: pathlib.Path) -> None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            raise PackageError(
                f"{path}:{node.lineno}: a function's source is one file and cannot import relatively",
                remedy="put helpers into artefacts (they are importable) or requirements",
            )


def _artefact(path: pathlib.Path, name: str) -> dict[str, bytes]:
    if not path.is_dir():
        return {f"artefacts/{path.name}": _read(path, f"artefact of function {name}")}
    return {
        f"artefacts/{path.name}/{file.relative_to(path).as_posix()}": file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and not _SKIPPED.intersection(file.relative_to(path).parts)
    }
