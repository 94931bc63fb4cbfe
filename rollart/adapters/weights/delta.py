"""The difference of two buckets of equal size, for weights of which a step changes few elements.

In bfloat16 an update at the learning rates of RL rounds to nothing for most elements: 1–3 % of them change. A bucket is
compared in words of two bytes. A delta has, compressed, the gaps between changed words (a byte each; 255 continues the
gap) and the differences of the words modulo 2^16, their low bytes and then their high bytes.
"""

from __future__ import annotations

import zlib

import numpy as np

LARGEST_SHARE = 0.5
"""Share of the bucket above which a delta is not worth its encoding."""

_SAMPLE = 1 << 14
"""Words that are compared first: a bucket of float32 weights, all of which change, costs no more than that."""

_GAP = 255
_LENGTHS = 8
"""Bytes before the compressed parts: the number of gap bytes, little-endian."""


def encode_delta(old: bytes, new: bytes) -> bytes | None:
    """What makes `new` of `old`; None where it would be larger than `LARGEST_SHARE` of `new`, or sizes differ."""
    if len(old) != len(new) or not new:
        return None
    before, after = _words(old), _words(new)
    step = max(1, len(after) // _SAMPLE)
    if np.mean(before[::step] != after[::step]) > LARGEST_SHARE:
        return None
    changed = np.flatnonzero(before != after)
    if 2 * len(changed) > LARGEST_SHARE * len(new):
        return None
    gap = np.diff(changed, prepend=-1) - 1
    ends = np.cumsum(gap // _GAP + 1) - 1
    gaps = np.full(int(ends[-1]) + 1 if len(ends) else 0, _GAP, np.uint8)
    gaps[ends] = gap % _GAP
    difference = after[changed] - before[changed]
    planes = (gaps, (difference & 0xFF).astype(np.uint8), (difference >> 8).astype(np.uint8))
    delta = len(gaps).to_bytes(_LENGTHS, "little") + zlib.compress(b"".join(p.tobytes() for p in planes), 1)
    return delta if len(delta) <= LARGEST_SHARE * len(new) else None


def apply_delta(old: bytes, delta: bytes) -> bytes:
    """The new bucket. `ValueError` for a delta that is damaged or of another bucket; compare the hash nevertheless."""
    try:
        data = np.frombuffer(zlib.decompress(delta[_LENGTHS:]), np.uint8)
    except zlib.error as error:
        raise ValueError(f"a damaged delta: {error}") from None
    gaps, planes = np.split(data, [int.from_bytes(delta[:_LENGTHS], "little")])
    ends = np.flatnonzero(gaps != _GAP)
    if len(planes) != 2 * len(ends):
        raise ValueError("a delta whose parts do not match")
    changed = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(len(ends))
    words = _words(old).copy()
    if len(changed) and changed[-1] >= len(words):
        raise ValueError("a delta of a larger bucket")
    low, high = planes[: len(ends)].astype(np.uint16), planes[len(ends) :].astype(np.uint16)
    words[changed] += low | (high << 8)
    return words.tobytes()[: len(old)]


def _words(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    return np.frombuffer(data if len(data) % 2 == 0 else data + b"\0", "<u2")
