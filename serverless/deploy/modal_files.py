"""The program of a Modal container that gives a deployed package back. It loads no code of the package.

Deployed beside `modal_entry`, as a function of its own: reading a package starts no worker of the reward, nor its GPU.
"""

from __future__ import annotations

import io
import json
import pathlib
import zipfile

RECORD = "rollart_package.json"
"""As in `serverless.deploy.package`, which is not in the container."""

_ROOT = pathlib.Path(__file__).parents[2]


def package() -> bytes:
    """A zip of the package's files and its record."""
    files = json.loads((_ROOT / RECORD).read_text())["files"]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for path in (*files, RECORD):
            file.writestr(path, (_ROOT / path).read_bytes())
    return buffer.getvalue()
