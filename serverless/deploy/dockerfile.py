"""The user's Dockerfile and the files that it copies, as files of a package, so that the version covers them."""

from __future__ import annotations

import pathlib
import shlex
from collections.abc import Iterator

from serverless.analysis.sources import files_below, is_skipped
from serverless.errors import PackageError

IMAGE = "image/"
"""The part of a package that only the build of a container image reads: `Dockerfile` and `context/`."""


def dockerfile_files(path: pathlib.Path, function: str) -> dict[str, bytes]:
    """The user's Dockerfile and the files that it copies, by their paths in a package. Raises `PackageError` for files
    that are missing, for copies from outside its directory, and for a last stage that does not end as root."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise PackageError(
            f"Dockerfile of function {function}: {path}: {reason}", remedy="check `image.dockerfile`"
        ) from None
    found, user, stages = {f"{IMAGE}Dockerfile": text.rstrip().encode() + b"\n"}, "root", 0
    for instruction, arguments in _instructions(text):
        if instruction == "FROM":
            user, stages = "root", stages + 1
        elif instruction == "USER":
            user = arguments.strip().partition(":")[0]
        elif instruction in ("COPY", "ADD"):
            for source in _copied(arguments, function):
                found |= _context_files(path.parent, source, function)
    if not stages:
        raise PackageError(f"Dockerfile of function {function}: {path} has no FROM", remedy="name a base image")
    if user not in ("root", "0"):
        raise PackageError(
            f"Dockerfile of function {function}: it ends as user {user}, and the requirements are installed after it",
            remedy="end it with USER root; providers run the function as a user of their choice",
        )
    return found


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """The instructions of a Dockerfile with their arguments; continued lines joined, comments left out."""
    joined = ""
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            continue
        joined += line.rstrip()
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
        elif joined.strip():
            word, _, arguments = joined.strip().partition(" ")
            yield word.upper(), arguments
            joined = ""


def _copied(arguments: str, function: str) -> list[str]:
    """The sources of COPY or ADD in the build context."""
    if "<<" in arguments:
        raise PackageError(
            f"Dockerfile of function {function}: COPY has a here-document", remedy="copy a file in its place"
        )
    words = shlex.split(arguments.replace("[", " ").replace("]", " ").replace('",', '" '))
    if any(word.startswith("--from=") for word in words):
        return []
    sources = [word for word in words if not word.startswith("--")][:-1]
    return [source for source in sources if "://" not in source]


def _context_files(root: pathlib.Path, source: str, function: str) -> dict[str, bytes]:
    """The files of one source of a copy, which may have wildcards."""
    pattern = source.strip("/") or "."
    if ".." in pathlib.PurePath(pattern).parts:
        raise PackageError(
            f"Dockerfile of function {function}: it copies {source} from outside its directory",
            remedy="copy from the Dockerfile's directory",
        )
    matches = [root] if pattern in (".", "./") else sorted(root.glob(pattern))
    found: dict[str, bytes] = {}
    for match in matches:
        if match.is_dir():
            files = list(files_below(match).values())
        else:
            files = [] if is_skipped(match.name) else [match]
        found |= {f"{IMAGE}context/{file.relative_to(root).as_posix()}": file.read_bytes() for file in files}
    if not found:
        reason = "which is never packed" if matches else f"and there is no such file in {root}"
        raise PackageError(
            f"Dockerfile of function {function}: it copies {source}, {reason}",
            remedy="mend the COPY, or add the file; secrets are declared (`secrets`) and not copied",
        )
    return found
