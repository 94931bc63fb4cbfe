"""Lossless encoding of training samples: per-token numbers as packed arrays inside msgpack, behind a checksum."""

from __future__ import annotations

import struct
import zlib
from array import array
from typing import Any

import msgpack

from rollart.model import GroupId, TrainSample, TrajectoryId

__all__ = ["decode_sample", "encode_sample"]

FORMAT = 1

_HEAD = struct.Struct("<cI")
_CHECKED = b"\xc1"
"""First byte of data with a checksum, which no msgpack value begins with; older ledgers hold samples without one."""


def encode_sample(sample: TrainSample) -> bytes:
    """All fields of a sample; floats keep all their bits."""
    packed: bytes = msgpack.packb(
        (
            FORMAT,
            sample.id,
            sample.group,
            sample.domain,
            sample.v0,
            array("q", sample.token_ids).tobytes(),
            bytes(sample.loss_mask),
            array("d", sample.logprobs).tobytes(),
            array("q", sample.versions).tobytes(),
            array("q", sample.turn).tobytes(),
            array("d", sample.rewards).tobytes(),
            sample.score,
            sample.success,
            sample.allowed,
        )
    )
    return _HEAD.pack(_CHECKED, zlib.crc32(packed)) + packed


def decode_sample(data: bytes) -> TrainSample:
    """The decoded sample. ValueError for invalid bytes, or bytes that changed since they were encoded."""
    if data.startswith(_CHECKED):
        head, data = data[: _HEAD.size], data[_HEAD.size :]
        if head != _HEAD.pack(_CHECKED, zlib.crc32(data)):
            raise ValueError("a sample is damaged: its checksum is not the one that was written")
    try:
        form, id_, group, domain, v0, tokens, mask, logprobs, versions, turn, rewards, score, success, allowed = (
            msgpack.unpackb(data, use_list=False)
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"not a sample: {error}") from None
    if form != FORMAT:
        raise ValueError(f"sample format {form} (rule: {FORMAT})")
    return TrainSample(
        id=TrajectoryId(id_),
        group=GroupId(group),
        domain=domain,
        v0=v0,
        token_ids=_unpack("q", tokens),
        loss_mask=tuple(map(bool, mask)),
        logprobs=_unpack("d", logprobs),
        versions=_unpack("q", versions),
        turn=_unpack("q", turn),
        rewards=_unpack("d", rewards),
        score=score,
        success=success,
        allowed=allowed,
    )


def _unpack(code: str, data: bytes) -> tuple[Any, ...]:
    values: array[Any] = array(code)
    values.frombytes(data)
    return tuple(values)
