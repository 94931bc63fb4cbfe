"""Columnar encoding of numbers, at rest and on the wire: a token id takes 4 bytes, not the 36 of a list's entry or the
6 or 7 of JSON. Standard library alone: `rollart.service` needs nothing else of rollart.

On the wire (`KIND`) a body is the length of its head (4 bytes, little-endian), the head in JSON, and the bytes of all
packed columns. Where JSON has an object of columns, the head has the unpacked columns in `columns`, and the packed ones
as `{name: [code, begin, end]}` in `packed`, with codes as in `array`, little-endian.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

KIND = "application/vnd.rollart.columns"

LEAST = 32
"""Minimum length of a packed list: for a shorter one the overhead exceeds the gain."""

_WHOLE = (("b", 2**7), ("h", 2**15), ("i", 2**31), ("q", 2**63))
CODES = "bhiqfd"
"""Integers of 1, 2, 4 and 8 bytes, floats of 4 and 8."""


class PackedColumn(NamedTuple):
    """A list of numbers of one type. `code`: as in `array`; `data`: little-endian."""

    code: str
    data: bytes

    def array(self) -> array[Any]:
        found = array(self.code, self.data)
        if sys.byteorder == "big":
            found.byteswap()
        return found

    def tolist(self) -> list[Any]:
        return self.array().tolist()


def pack(value: Any) -> Any:
    """A long list of integers, or of floats, in the smallest type that holds all of it exactly. An `array`, and any
    value with a `tolist` method (NumPy, torch), counts as such a list. Other values are returned unchanged."""
    if isinstance(value, PackedColumn):
        return value
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, list) or len(values) < LEAST:
        return values
    kinds = set(map(type, values))
    if kinds == {int}:
        low, high = min(values), max(values)
        code = next((code for code, bound in _WHOLE if -bound <= low and high < bound), None)
        return values if code is None else _packed(array(code, values))
    if kinds == {float}:
        exact, short = array("d", values), array("f", values)
        return _packed(short if array("d", short).tobytes() == exact.tobytes() else exact)
    return values


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, PackedColumn) else value


def encoded(body: Mapping[str, Any], rows: Sequence[dict[str, Any]]) -> bytes:
    """A body on the wire. `rows` are objects in it with `columns`; their packed columns are moved to `packed`."""
    blobs: list[bytes] = []
    end = 0
    for row in rows:
        packed: dict[str, Any] = {}
        for name, value in row["columns"].items():
            if isinstance(value, PackedColumn):
                blobs.append(value.data)
                packed[name] = [value.code, end, end + len(value.data)]
                end += len(value.data)
        if packed:
            row["packed"] = packed
            row["columns"] = {name: value for name, value in row["columns"].items() if name not in packed}
    head = json.dumps(body).encode()
    return b"".join((len(head).to_bytes(4, "little"), head, *blobs))


def decoded(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """The head, and the bytes of the packed columns. ValueError for an invalid body."""
    size = 4 + int.from_bytes(raw[:4], "little")
    if len(raw) < size:
        raise ValueError("its head is cut off")
    head = json.loads(raw[4:size])
    if not isinstance(head, dict):
        raise ValueError("its head is no object")
    return head, raw[size:]


def columns(row: Mapping[str, Any], blob: bytes) -> dict[str, Any]:
    """All columns of a row of a head. ValueError for invalid packed columns."""
    found = dict(row.get("columns") or {})
    for name, span in (row.get("packed") or {}).items():
        if not (isinstance(span, list) and len(span) == 3 and span[0] in tuple(CODES)):
            raise ValueError(f"column {name} is packed as {span!r} (rule: [code, begin, end])")
        code, begin, end = span
        if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= len(blob):
            raise ValueError(f"column {name} lies outside of the body")
        if (end - begin) % array(code).itemsize:
            raise ValueError(f"column {name} ends amid a number")
        found[name] = PackedColumn(code, blob[begin:end])
    return found


def _packed(values: array[Any]) -> PackedColumn:
    if sys.byteorder == "big":
        values.byteswap()
    return PackedColumn(values.typecode, values.tobytes())
