"""The unit of deployment: the function's source, the handler file, its artefacts and a manifest, with a version.

    rollart_handler.py      the one handler (`serverless.deploy.handler`), `rollart_handler.handler`
    rollart_manifest.json   the file and attribute to adapt, the calling convention, and the lock
    requirements.txt        the lock for pip, if there is one
    serverless/             the parts of this package that the handler needs: standard library only
    shims/rollart/          the `rollart` module that a reward imports: the decorator and the values
    function/...            the user's source, unchanged: a file and its imports beside it, or a package
    artefacts/...           the declared files and directories
    image/...               the user's Dockerfile and the files that it copies, if the function names one

It runs with only Python 3.11 and the lock. No code travels as a pickle. The version is a content digest, which excludes
local paths, times and settings that only scale the function.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import io
import json
import pathlib
import re
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from serverless import keys
from serverless.analysis.sources import SourceDefinition, SourceFiles, collect, files_below, is_skipped, tree
from serverless.analysis.stateless import Stateful, inspect_source
from serverless.declare import declarations
from serverless.deploy.dockerfile import dockerfile_files
from serverless.deploy.requirements import lock
from serverless.errors import NotOffloadable, PackageError, SpecInvalid
from serverless.signatures import ACCEPTED, Unknown, definition, of_source, recognise
from serverless.spec import VARIABLE_RULE, FunctionImageSpec, FunctionSpec

MANIFEST = "rollart_manifest.json"

HANDLER = "rollart_handler.handler"
"""The name of the handler for Lambda, in every package."""

RECORD = "rollart_package.json"
"""The file beside a deployed package with the settings that its digest leaves out, and the list of its own files."""

_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip can hold: archives of equal content are equal bytes."""

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

_OURS = pathlib.Path(__file__).parents[1]

_VENDORED = (
    "__init__.py",
    "calling.py",
    "declare.py",
    "errors.py",
    "output.py",
    "signatures.py",
    "types.py",
    "usage.py",
)
"""The modules of `serverless` that the handler and `import rollart` in a reward need."""

_SECRETS = "secret_runtime.py"
"""The module that functions with secrets need in addition."""

_SHIM = '''"""What a reward function needs of rollart. Where rollart is installed, its modules are found below this."""

import os
import sys

from serverless.declare import reward
from serverless.errors import PolicyFault
from serverless.types import InfraFault, Item, ModelFault, Scored, TokenUsage
from serverless.usage import record_tokens

Sample = Item

__all__ = [
    "InfraFault", "Item", "ModelFault", "PolicyFault", "Sample", "Scored", "TokenUsage", "record_tokens", "reward",
]

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
    deployment: tuple[str, str] = ("", "")
    """The provider that the package was read back from, and its number of the version. A backend of that provider calls
    this version as it is."""
    variables: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Environment variables of the worker that a launcher starts, secrets included. Empty in every other package."""

    def check_pinned(self) -> None:
        """Raise `PackageError` unless every requirement is an exact version of an index: otherwise two installations
        would differ."""
        unpinned = json.loads(self.files["rollart_manifest.json"]).get("unpinned", [])
        local = [one for one in unpinned if "+" in one]
        if local:
            raise PackageError(
                f"function {self.spec.name}: {', '.join(local)}: a build of this machine, which no index has",
                remedy="pin a published version with ==, or pack its source beside the function",
            )
        if unpinned:
            raise PackageError(
                f"function {self.spec.name}: not pinned: {', '.join(unpinned)}",
                remedy="write name==version, or install it here: its version is then the pin",
            )

    def write(self, directory: pathlib.Path) -> None:
        """Write the files under `directory`, which is created if missing."""
        for path, data in self.files.items():
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)

    def install_record(self, directory: pathlib.Path) -> None:
        """Write the files with their record, from which `restore` makes the package again, in place of others."""
        shutil.rmtree(directory, ignore_errors=True)
        replace(self, files=with_record(self)).install(directory)

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
    _check_arguments(merged, found)
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
        **({"secrets": list(merged.secrets)} if merged.secrets else {}),
    }
    if merged.arguments:
        manifest["arguments"] = merged.arguments
    vendored = (*_VENDORED, *_ready_made(sources), *((_SECRETS,) if merged.secrets else ()))
    files = {
        "rollart_handler.py": (_OURS / "deploy/handler.py").read_bytes(),
        MANIFEST: keys.canonical(manifest),
        "shims/rollart/__init__.py": _SHIM.encode(),
        **{f"serverless/{name}": (_OURS / name).read_bytes() for name in vendored},
        **{f"function/{name}": path.read_bytes() for name, path in sources.files.items()},
    }
    if locked.all:
        files["requirements.txt"] = "".join(f"{line}\n" for line in locked.all).encode()
    if merged.image is not None and merged.image.dockerfile:
        files |= dockerfile_files(pathlib.Path(merged.image.dockerfile), spec.name)
    for artefact in merged.artefacts:
        for relative, data in _artefact(pathlib.Path(artefact), spec.name).items():
            if relative in files:
                raise PackageError(f"function {spec.name}: two artefacts are called {relative}", remedy="rename one")
            files[relative] = data
    return Package(merged, keys.content_digest(merged.identity(), files), files, warnings)


def _ready_made(sources: SourceFiles) -> list[str]:
    """The modules of `serverless.rewards` that a source imports, and those that they import, below `serverless/`."""
    found: set[str] = set()
    pending = [module for _, module in sources.modules()]
    while pending:
        for node in ast.walk(pending.pop()):
            if not isinstance(node, ast.ImportFrom | ast.Import):
                continue
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom) and node.module == "serverless.rewards":
                named = [f"serverless.rewards.{alias.name}" for alias in node.names]
            for dotted in named:
                relative = f"{dotted.replace('.', '/')}.py".removeprefix("serverless/")
                if dotted.startswith("serverless.rewards.") and relative not in found and (_OURS / relative).is_file():
                    found.add(relative)
                    pending.append(tree(_OURS / relative))
    return sorted({*found, "rewards/__init__.py"}) if found else []


def with_record(package: Package) -> dict[str, bytes]:
    """The files of a package and its record, from which `restore` makes the package again. Paths of this machine are
    left out."""
    spec = package.spec.model_dump(mode="json", exclude_unset=True, exclude={"source", "handler", "artefacts"})
    return {**package.files, RECORD: keys.canonical({"spec": spec, "files": sorted(package.files)})}


def restore(name: str, version: str, files: Mapping[str, bytes]) -> Package:
    """The package with this digest from its deployed files, of which there may be more. Raises `PackageError` if they
    have no record (earlier releases wrote none) or differ from the digest."""
    if RECORD not in files:
        raise PackageError(
            f"{name} {version[:12]} was deployed without a record of its package", remedy="deploy it again"
        )
    try:
        record = json.loads(files[RECORD])
        own = {path: files[path] for path in record["files"]}
        spec = FunctionSpec.model_validate(
            {**record["spec"], "source": json.loads(own[MANIFEST])["file"] or "function"}
        )
    except (ValueError, KeyError, TypeError) as error:
        raise PackageError(
            f"the record of {name} {version[:12]} is damaged: {error}", remedy="deploy it again"
        ) from None
    return check_digest(Package(spec, version, own))


def archive_name(package: Package) -> str:
    """The file name of an archive, which has the version: `read_archive` checks its content against it."""
    return f"{package.spec.name}-{package.version}.zip"


def read_archive(path: pathlib.Path) -> Package:
    """The package in a file with the name of `archive_name`. Raises `PackageError`."""
    name, _, version = path.stem.rpartition("-")
    if not re.fullmatch(r"[0-9a-f]{64}", version):
        raise PackageError(
            f"{path.name} is not named NAME-VERSION.zip", remedy="take the archive as `rollart infra render` wrote it"
        )
    try:
        return restore_archive(name, version, path.read_bytes())
    except OSError as error:
        raise PackageError(f"{path}: {error.strerror}", remedy="give the path of a package's archive") from None


def restore_archive(name: str, version: str, archive: bytes) -> Package:
    """`restore` from a zip."""
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as file:
            files = {path: file.read(path) for path in file.namelist() if not path.endswith("/")}
    except zipfile.BadZipFile as error:
        raise PackageError(f"the archive of {name} {version[:12]} is damaged: {error}") from None
    return restore(name, version, files)


def check_digest(package: Package) -> Package:
    """The package. Raises `PackageError` if its files or settings differ from its digest."""
    if keys.content_digest(package.spec.identity(), package.files) != package.version:
        raise PackageError(
            f"the files of {package.spec.name} {package.version[:12]} were changed after it was deployed",
            remedy="deploy it again",
        )
    return package


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
    """Merge settings: given ones override declared ones, which override defaults; `batch` and `env` key by key."""
    decorated = {k: v for k, v in declared.items() if k != "name"}
    chosen = {k: getattr(spec, k) for k in spec.model_fields_set}
    origin = root if "artefacts" in chosen else beside
    if "batch" in chosen and isinstance(decorated.get("batch"), Mapping):
        chosen["batch"] = {**decorated["batch"], **spec.batch.model_dump(exclude_unset=True)}
    if "env" in chosen and isinstance(decorated.get("env"), Mapping):
        chosen["env"] = {**decorated["env"], **spec.env}
    values = {**decorated, **chosen}
    try:
        if isinstance(values.get("artefacts"), str):
            raise TypeError("a text (rule: a list of paths)")
        values["artefacts"] = tuple(str(origin / a) for a in values.get("artefacts", ()))
        merged = FunctionSpec.model_validate(values)
        if merged.image is None or not merged.image.dockerfile:
            return merged
        dockerfile = (root if "image" in chosen else beside) / merged.image.dockerfile
        return merged.model_copy(update={"image": FunctionImageSpec(dockerfile=str(dockerfile))})
    except ValidationError as error:
        raise _setting_refused(spec.name, error.errors()[0]) from None
    except TypeError as error:  # artefacts that are not a list of strings
        raise SpecInvalid(f"function {spec.name}: artefacts: {error}") from None


def _setting_refused(function: str, error: Any) -> SpecInvalid:
    """The refusal of a setting that pydantic found invalid. Entries of `secrets` and `index_urls` are not shown: they
    may hold values."""
    text, loc = error["msg"].removeprefix("Value error, "), error["loc"]
    if not loc:
        return SpecInvalid(f"function {function}: {text}")
    hidden = loc[0] in ("index_urls", "secrets")
    if loc[0] in ("env", "secrets") and error["type"] == "string_pattern_mismatch":
        entry = f"entry {loc[1]} of secrets" if hidden else f"{error['input']!r:.60} in env"
        remedy = "name the variable alone: its value comes from the environment, .env or the provider" if hidden else ""
        return SpecInvalid(f"function {function}: {entry} is no name (rule: {VARIABLE_RULE})", remedy=remedy)
    if error["type"] == "tuple_type":
        problem = f"{loc[0]} is of type {type(error['input']).__name__} (rule: a list)"
        return SpecInvalid(f"function {function}: {problem}", remedy=f"write {loc[0]}=[...]")
    got = "" if hidden else f" (got {error['input']!r:.60})"
    return SpecInvalid(f"function {function}: {'.'.join(map(str, loc))}: {text}{got}")


def _takes(spec: FunctionSpec, found: SourceDefinition) -> str:
    if spec.takes != "auto":
        return spec.takes
    shape = of_source(found.body, found.name)
    if shape is not None and not isinstance(definition(found.body, found.name), ast.ClassDef):
        shape = shape.without(spec.arguments)
    if shape is None:
        raise SpecInvalid(
            f"function {spec.name}: {found.name} in {found.path.name}: its definition is not in the source",
            remedy="name one that the file defines; set `takes` if it is imported or inherited",
        )
    convention = recognise(shape)
    if isinstance(convention, Unknown):
        shown = f"{found.name}{shape}"
        raise SpecInvalid(
            f"function {spec.name}: {shown} in {found.path.name}: {convention.reason}",
            remedy=f"write it as one of these, or set `takes`: {'; '.join(ACCEPTED)}",
        )
    return str(convention)


def _check_arguments(spec: FunctionSpec, found: SourceDefinition) -> None:
    """Refuse names in `arguments` that the class's constructor or the function does not take, and required parameters
    of the constructor that are missing, and values that a ready-made reward refuses, or that name a variable which the
    function does not get. A constructor that is inherited from another file is not checked."""
    node = definition(found.body, found.name)
    is_class = isinstance(node, ast.ClassDef)
    shape = of_source(node.body, "__init__") if isinstance(node, ast.ClassDef) else of_source(found.body, found.name)
    if shape is None:
        return
    names = [p.name for p in shape.parameters[is_class:]]
    unknown = [name for name in spec.arguments if name not in names]
    if unknown and not shape.any_keyword:
        close = difflib.get_close_matches(unknown[0], names, n=1)
        remedy = f"did you mean '{close[0]}'?" if close else f"it takes {', '.join(names) or 'none'}"
        raise SpecInvalid(f"function {spec.name}: {found.name} has no argument '{unknown[0]}'", remedy=remedy)
    missing = [p.name for p in shape.parameters[is_class:] if p.required and p.name not in spec.arguments]
    if is_class and missing:
        raise SpecInvalid(
            f"function {spec.name}: {found.name} needs the argument '{missing[0]}'",
            remedy=f"give it under `arguments`: {missing[0]}: ...",
        )
    if is_class and found.path.parent == _OURS / "rewards":  # ours: its constructor checks the values, and is all
        try:
            made = getattr(importlib.import_module(f"serverless.rewards.{found.path.stem}"), found.name)(
                **spec.arguments
            )
        except SpecInvalid as error:
            raise SpecInvalid(f"function {spec.name}: {error.message}", remedy=error.remedy) from None
        needed: Mapping[str, str] = getattr(made, "needed_variables", {})
        for argument, variable in needed.items():
            if variable not in (*spec.secrets, *spec.env):
                raise SpecInvalid(
                    f"function {spec.name}: {argument} is {variable!r}, which is not among its secrets "
                    f"({', '.join(spec.secrets) or 'none'})",
                    remedy=f'set `secrets: [{variable}]`, or `{argument}: ""` under `arguments` if none is needed',
                )


def _artefact(path: pathlib.Path, name: str) -> dict[str, bytes]:
    if is_skipped(path.name):
        raise PackageError(
            f"artefact of function {name}: {path.name} is never packed",
            remedy="declare secrets in place of a file of environment variables",
        )
    if path.is_dir():
        return {f"artefacts/{relative}": file.read_bytes() for relative, file in files_below(path).items()}
    try:
        return {f"artefacts/{path.name}": path.read_bytes()}
    except OSError as error:
        raise PackageError(
            f"artefact of function {name}: {path}: {error.strerror}", remedy="check the path in the spec"
        ) from None
