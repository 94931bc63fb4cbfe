"""Wheels and package indexes of tests: directories with PEP 503 pages."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence

from tests.serverless.aws.provider import archive


def write_wheel(
    index: pathlib.Path,
    name: str,
    version: str,
    text: str,
    *,
    tag: str = "py3-none-any",
    requires: Sequence[str] = (),
) -> None:
    """A wheel of one module in an index directory."""
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {one}\n" for one in requires)
    files = {
        f"{name}.py": text,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    directory = index / re.sub(r"[-_.]+", "-", name)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}-{version}-{tag}.whl").write_bytes(archive({k: v.encode() for k, v in files.items()}))
    wheels = sorted(path.name for path in directory.glob("*.whl"))
    (directory / "index.html").write_text("".join(f'<a href="{one}">{one}</a>\n' for one in wheels))
    names = sorted(path.name for path in index.iterdir() if path.is_dir())
    (index / "index.html").write_text("".join(f'<a href="{one}/">{one}</a>\n' for one in names))
