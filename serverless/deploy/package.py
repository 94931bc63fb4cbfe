"""The unit of deployment: the function's source, the handler file, its artefacts and a manifest, with a version.

    rollart_handler.py      the one handler (`serverless.deploy.handler`), `rollart_handler.handler`
    rollart_manifest.json   the file and attribute to adapt, the calling convention, and the lock
    requirements.txt        the lock for pip, if there is one
    serverless/             the parts of this package that the handler needs: standard library only
    shims/rollart/          the `rollart` module that a reward imports: the decorator and the values
    function/...            the user's source, unchanged: a file and its imports beside it, or a package
    artefacts/...           the declared files and directories

It runs with only Python 3.11 and the lock. No code travels as a pickle. The version is a content digest, which excludes
local paths, times and settings that only scale the function.
"""

from __future__ import annotations

import ast
import io
import pathlib
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from serverless import keys
from serverless.analysis.sources import SourceDefinition, SourceFiles, collect, files_below, tree
from serverless.analysis.stateless import Stateful, inspect_source
from serverless.declare import declarations
from serverless.deploy.requirements import lock
from serverless.errors import NotOffloadable, PackageError, SpecInvalid
from serverless.signatures import ACCEPTED, Unknown, definition, of_source, recognise
from serverless.spec import FunctionSpec

HANDLER = "rollart_handler.handler"
"""The name of the handler for Lambda, in every package."""

_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip can hold: archives of equal content are equal bytes."""

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

_OURS = pathlib.Path(__file__).parents[1]

_VENDORED = ("__init__.py", "calling.py", "declare.py", "errors.py", "signatures.py", "types.py")
"""The modules of `serverless` that the handler and `import rollart` in a reward need."""

_SHIM = '''"""What a reward function needs of rollart. Where rollart is installed, its modules are found below this."""

import os
import sys

from serverless.declare import reward
from serverless.errors import PolicyFault
from serverless.types import InfraFault, Item, ModelFault, Scored

Sample = Item

__all__ = ["InfraFault", "Item", "ModelFault", "PolicyFault", "Sample", "Scored", "reward"]

__path__ += [p for p in (os.path.join(e, "rollart") for e in sys.path) if p not in __path__ and os.path.isdir(p)]


def __getattr__(name):
    if name in ("Observation", "Step"):
        from rollart import model

        return getattr(model, name)
    raise AttributeError(f"a packed function has no rollart.{name}: it has {', '.join(__all__)}")
'''
"""A light shim: the worker's cold start does not import the orchestrator, and every host runs the same code."""


@dataclass(frozen=True, slots=True)
class Package:
    """A function ready to deploy. `spec` includes the decorator's settings; `files` maps paths to contents."""

    spec: FunctionSpec
    version: str
    files: Mapping[str, bytes]
    warnings: tuple[str, ...] = ()
    """Warnings for the user: randomness without a seed, requirements without a pin."""

    def write(self, directory: pathlib.Path) -> None:
        """Write the files under `directory`, which is created if missing."""
        for path, data in self.files.items():
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)

    def install(self, directory: pathlib.Path) -> bool:
        """Write the files to a new `directory`, all or none. False if it exists."""
        if directory.exists():
            return False
        partial = directory.with_name(f"{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        self.write(partial)
        partial.rename(directory)
        return True


def build(spec: FunctionSpec, *, base: pathlib.Path | None = None) -> Package:
    """Pack a function. Relative paths are resolved against `base`, or the working directory.

    The user's source is read, never executed. Settings of the spec override those of `@reward`, which override the
    defaults. A decorator's artefacts and requirements files are relative to its source file. In the package's spec,
    `requirements` is the lock and `takes` the detected convention. Raises `PackageError` for files that are missing or
    cannot be packed, `NotOffloadable` (a subclass) for a reward that keeps state, and `SpecInvalid` for a setting out
    of range and for parameters of no known convention.
    """
    root = base or pathlib.Path.cwd()
    sources, attribute, found, merged = _read_source(spec, root)
    locked = lock(merged.requirements, root if "requirements" in spec.model_fields_set else found.path.parent)
    verdict = inspect_source(found, sources, merged)
    if isinstance(verdict, Stateful):
        raise NotOffloadable(spec.name, tuple(map(str, verdict.reasons)), remedy=verdict.remedy)
    warnings = tuple(map(str, verdict.warnings))
    warnings += tuple(f"{one} is not installed here, so it is not pinned" for one in locked.unpinned)
    merged = merged.model_copy(update={"requirements": locked.all, "takes": _takes(merged, found)})
    manifest = {
        "schema_version": 1,
        "file": sources.file,
        "module": sources.module,
        "package": sources.package,
        "attribute": attribute,
        "takes": str(merged.takes),
        "requirements": list(locked.pins),
        "unpinned": list(locked.unpinned),
    }
    files = {
        "rollart_handler.py": (_OURS / "deploy/handler.py").read_bytes(),
        "rollart_manifest.json": keys.canonical(manifest),
        "shims/rollart/__init__.py": _SHIM.encode(),
        **{f"serverless/{name}": (_OURS / name).read_bytes() for name in _VENDORED},
        **{f"function/{name}": path.read_bytes() for name, path in sources.files.items()},
    }
    if locked.all:
        files["requirements.txt"] = "".join(f"{line}\n" for line in locked.all).encode()
    for artefact in merged.artefacts:
        for relative, data in _artefact(pathlib.Path(artefact), spec.name).items():
            if relative in files:
                raise PackageError(f"function {spec.name}: two artefacts are called {relative}", remedy="rename one")
            files[relative] = data
    return Package(merged, keys.content_digest(merged.identity(), files), files, warnings)


def zip_archive(files: Mapping[str, bytes], *, deflated: bool = False) -> bytes:
    """A zip of files, the same bytes for the same content. Without `deflated` also on every machine: compressed bytes
    differ between zlib builds."""
    buffer = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED
    with zipfile.ZipFile(buffer, "w", method) as file:
        for path in sorted(files):
            entry = zipfile.ZipInfo(path, _EPOCH)
            entry.create_system = 3  # otherwise the value depends on the platform
            entry.external_attr = (0o755 if path.endswith(".so") or ".so." in path else 0o644) << 16
            entry.compress_type = method
            file.writestr(entry, files[path])
    return buffer.getvalue()


def settings(spec: FunctionSpec, *, base: pathlib.Path | None = None) -> FunctionSpec:
    """The effective settings of a function, without packing it: the spec's own, then those of `@reward`, then defaults.
    Artefacts are paths as `build` would read them; requirements are not locked. Raises as `build` does."""
    return _read_source(spec, base or pathlib.Path.cwd())[3]


def _read_source(spec: FunctionSpec, root: pathlib.Path) -> tuple[SourceFiles, str, SourceDefinition, FunctionSpec]:
    """The source, the attribute of the reward, its definition, and the effective settings."""
    sources = collect(spec.source, root, function=spec.name)
    declared = _declarations(sources.entry)
    if not declared and sources.package:  # the decorated rewards that the entry imports from its own package
        imports = [node for node in tree(sources.entry).body if isinstance(node, ast.ImportFrom)]
        for name in (alias.asname or alias.name for node in imports for alias in node.names):
            there = sources.find(name)
            if (settings := _declarations(there.path).get(there.name)) is not None:
                declared[name] = settings
    attribute = spec.handler or sources.attribute or _single_reward(declared, spec.name, sources)
    found = sources.find(attribute)
    decorated = declared.get(attribute) or _declarations(found.path).get(found.name)
    return sources, attribute, found, _merge(spec, decorated or {}, root, found.path.parent)


def _declarations(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    return declarations(path.read_bytes().decode(errors="replace"), filename=str(path))


def _single_reward(declared: Mapping[str, object], name: str, sources: SourceFiles) -> str:
    """The reward of a source without an explicit attribute: the decorated one, else the function's name, else
    `handler`, else the only public function."""
    if name in declared:
        return name
    if len(declared) > 1:
        raise PackageError(
            f"function {name}: its source has several rewards: {', '.join(declared)}", remedy="name one as `handler`"
        )
    if declared:
        return next(iter(declared))
    found = sources.find(name)
    if definition(found.body, found.name) is not None:
        return name
    public = [n.name for n in tree(sources.entry).body if isinstance(n, _DEFINITIONS) and not n.name.startswith("_")]
    return public[0] if len(public) == 1 else "handler"


def _merge(spec: FunctionSpec, declared: Mapping[str, Any], root: pathlib.Path, beside: pathlib.Path) -> FunctionSpec:
    """Merge settings: given ones override declared ones, which override defaults; `batch` key by key."""
    decorated = {k: v for k, v in declared.items() if k != "name"}
    chosen = {k: getattr(spec, k) for k in spec.model_fields_set}
    origin = root if "artefacts" in chosen else beside
    if "batch" in chosen and isinstance(decorated.get("batch"), Mapping):
        chosen["batch"] = {**decorated["batch"], **spec.batch.model_dump(exclude_unset=True)}
    values = {**decorated, **chosen}
    try:
        if isinstance(values.get("artefacts"), str):
            raise TypeError("a text (rule: a list of paths)")
        values["artefacts"] = tuple(str(origin / a) for a in values.get("artefacts", ()))
        return FunctionSpec.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        text = first["msg"].removeprefix("Value error, ")
        if first["loc"]:
            text = f"{'.'.join(map(str, first['loc']))}: {text} (got {first['input']!r:.60})"
        raise SpecInvalid(f"function {spec.name}: {text}") from None
    except TypeError as error:  # artefacts that are not a list of strings
        raise SpecInvalid(f"function {spec.name}: artefacts: {error}") from None


def _takes(spec: FunctionSpec, found: SourceDefinition) -> str:
    if spec.takes != "auto":
        return spec.takes
    shape = of_source(found.body, found.name)
    convention = recognise(shape) if shape is not None else Unknown("its definition is not in the source")
    if isinstance(convention, Unknown):
        shown = f"{found.name}{shape}" if shape is not None else found.name
        raise SpecInvalid(
            f"function {spec.name}: {shown} in {found.path.name}: {convention.reason}",
            remedy=f"write it as one of these, or set `takes`: {'; '.join(ACCEPTED)}",
        )
    return str(convention)


def _artefact(path: pathlib.Path, name: str) -> dict[str, bytes]:
    if path.is_dir():
        return {f"artefacts/{relative}": file.read_bytes() for relative, file in files_below(path).items()}
    try:
        return {f"artefacts/{path.name}": path.read_bytes()}
    except OSError as error:
        raise PackageError(
            f"artefact of function {name}: {path}: {error.strerror}", remedy="check the path in the spec"
        ) from None
