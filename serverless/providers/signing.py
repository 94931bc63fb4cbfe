"""Request signatures for plain HTTP hosts: authenticity, integrity and freshness. Pure.

    Authorization: ROLLART-HMAC-SHA256 Credential=<key id>, Timestamp=<Unix seconds>, Signature=<hex>

The signature is HMAC-SHA256, under the key's secret, of four lines: method, path with query, timestamp, and the SHA-256
of the body in hex. A request older or newer than `SKEW_S` is refused. Within that time a request can be replayed, which
is harmless for a stateless function; use TLS for confidentiality. An Idempotency-Key is not signed: an attacker who
changes it could have a call refused, or executed twice.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping

SKEW_S = 300.0
"""Maximum clock difference in seconds, as in AWS's signature version 4."""

_SCHEME = "ROLLART-HMAC-SHA256"
_HEADER = re.compile(_SCHEME + r" Credential=([^,\s]+), Timestamp=(\d+), Signature=([0-9a-f]{64})")


def sign(key: str, secret: str, *, method: str, path: str, body: bytes, now: float) -> str:
    """The Authorization header. `path` starts with '/' and has the query; `now` is Unix seconds."""
    timestamp = str(int(now))
    return f"{_SCHEME} Credential={key}, Timestamp={timestamp}, Signature={_hex(secret, method, path, timestamp, body)}"


def verify(header: str, secrets: Mapping[str, str], *, method: str, path: str, body: bytes, now: float) -> str | None:
    """The error of a request's Authorization header, or None. `secrets` is by key id."""
    found = _HEADER.fullmatch(header.strip())
    if found is None:
        return f"no {_SCHEME} authorization"
    key, timestamp, signature = found.groups()
    # An unknown key takes the same work as a known one, so that timing does not reveal which keys exist.
    expected = _hex(secrets.get(key, ""), method, path, timestamp, body)
    if not hmac.compare_digest(expected, signature) or key not in secrets:
        return "the signature does not match"
    if abs(now - int(timestamp)) > SKEW_S:
        return f"the request is more than {SKEW_S:g} s from now"
    return None


def _hex(secret: str, method: str, path: str, timestamp: str, body: bytes) -> str:
    lines = "\n".join((method, path, timestamp, hashlib.sha256(body).hexdigest()))
    return hmac.new(secret.encode(), lines.encode(), hashlib.sha256).hexdigest()
