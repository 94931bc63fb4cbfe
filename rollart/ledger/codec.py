"""Training samples as bytes, exactly: numbers per token as packed arrays inside msgpack."""

from __future__ import annotations

from array import array
from typing import Any

import msgpack

from rollart.model import GroupId, TrainSample, TrajectoryId

__all__ = ["decode_sample", "encode_sample"]

FORMAT = 1


def encode_sample(sample: TrainSample) -> bytes:
    """Everything in a sample; floats keep all their bits."""
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
    return packed


def decode_sample(data: bytes) -> TrainSample:
    """The sample again. ValueError for bytes that are none."""
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
