"""Content keys: the same function has the same version on every machine, at any time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

_JSON = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
"""Made once: `json.dumps` with settings makes an encoder per call."""


def canonical(value: object) -> bytes:
    """Canonical JSON: sorted keys, no white space, UTF-8, no NaN. Raises `TypeError` or `ValueError` for other
    values."""
    return _JSON.encode(value).encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def content_digest(settings: Mapping[str, object], files: Mapping[str, bytes]) -> str:
    """The version of a function: SHA-256 over its settings and the digests of its files by relative path."""
    return sha256(canonical({"settings": settings, "files": {path: sha256(data) for path, data in files.items()}}))
