"""What crosses the socket between the controller and an environment host: length-prefixed JSON frames of plain values.

Values arrive as they were: tuples, bytes, sets and keys that are no text are marked, NumPy's scalars and arrays become
numbers and lists. Nothing is executed to read a frame, so that what an environment says can harm nobody.
"""

from __future__ import annotations

import asyncio
import base64
import enum
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollart.model import Observation, Step

__all__ = [
    "HostResponse",
    "HostRequest",
    "HostOperation",
    "CallStatus",
    "observation_of",
    "pack",
    "packed_observation",
    "packed_step",
    "read_frame",
    "step_of",
    "unpack",
    "write_frame",
]

LARGEST = 64 * 2**20
"""Bytes of a frame. An observation of so many would fill any context; a length beyond it is a broken frame."""

_HEADER = struct.Struct("!I")
_MARK = "$"
"""The key of a mapping that stands for a value which JSON lacks."""


class HostOperation(enum.StrEnum):
    """What a host can be asked."""

    HELLO = "hello"
    RESET = "reset"
    STEP = "step"
    CLOSE = "close"
    CANCEL = "cancel"
    HEALTH = "health"
    IMAGES = "images"
    PULL = "pull"


class CallStatus(enum.StrEnum):
    """How a call ended: with a result; by an exception of the environment; with an answer that is none; not begun."""

    OK = "ok"
    RAISED = "raised"
    LIED = "lied"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class HostRequest:
    """A request. `episode` is '' where it is about the host itself."""

    id: int
    op: HostOperation
    episode: str = ""
    value: Any = None

    def to_json(self) -> list[Any]:
        return [self.id, str(self.op), self.episode, pack(self.value)]

    @classmethod
    def from_json(cls, frame: Any) -> HostRequest:
        """ValueError for anything that is no request."""
        match frame:
            case [int(number), str(op), str(episode), value]:
                return cls(number, HostOperation(op), episode, unpack(value))
        raise ValueError("a frame that is no request")


@dataclass(frozen=True, slots=True)
class HostResponse:
    """To the request of this `id`. `value` is the result, or what went wrong in words; the environment's own code took
    `env_s` seconds of it."""

    id: int
    episode: str
    told: CallStatus
    value: Any = None
    env_s: float = 0.0

    def to_json(self) -> list[Any]:
        return [self.id, self.episode, str(self.told), pack(self.value), self.env_s]

    @classmethod
    def from_json(cls, frame: Any) -> HostResponse:
        """ValueError for anything that is no answer."""
        match frame:
            case [int(number), str(episode), str(told), value, int() | float() as env_s]:
                return cls(number, episode, CallStatus(told), unpack(value), float(env_s))
        raise ValueError("a frame that is no answer")


def packed_observation(observation: Observation) -> list[Any]:
    actions = None if observation.actions is None else list(observation.actions)
    return [observation.text, actions, observation.max_tokens]


def observation_of(value: Any) -> Observation:
    """ValueError for anything that is no observation."""
    match value:
        case [str(text), None | list() as actions, None | int() as most]:
            return Observation(text, None if actions is None else tuple(actions), most)
    raise ValueError("an answer that is no observation")


def packed_step(step: Step) -> list[Any]:
    """TypeError for metadata that cannot cross."""
    return [packed_observation(step.observation), step.reward, step.done, step.success, dict(step.metadata)]


def step_of(value: Any) -> Step:
    """ValueError for anything that is no step."""
    match value:
        case [list(shown), float() | int() as reward, bool(done), None | bool() as success, dict(metadata)]:
            return Step(observation_of(shown), float(reward), done, success, metadata)
    raise ValueError("an answer that is no step")


def pack(value: Any) -> Any:
    """The value in what JSON has. TypeError for an object of a class of its own."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [pack(one) for one in value]
    if isinstance(value, Mapping):
        if _MARK not in value and all(type(key) is str for key in value):
            return {key: pack(one) for key, one in value.items()}
        return {_MARK: "map", "of": [[pack(key), pack(one)] for key, one in value.items()]}
    if isinstance(value, tuple):
        return {_MARK: "tuple", "of": [pack(one) for one in value]}
    if isinstance(value, bytes):
        return {_MARK: "bytes", "of": base64.b64encode(value).decode()}
    if isinstance(value, set | frozenset):
        return {_MARK: "set", "of": [pack(one) for one in value]}
    plain = getattr(value, "tolist", None)  # NumPy's and torch's
    if plain is not None:
        return pack(plain())
    kind = type(value)
    raise TypeError(f"a {kind.__module__}.{kind.__qualname__} cannot leave its host (rule: plain values)")


def unpack(value: Any) -> Any:
    """What was packed. ValueError for an unknown mark."""
    if isinstance(value, list):
        return [unpack(one) for one in value]
    if not isinstance(value, dict):
        return value
    if _MARK not in value:
        return {key: unpack(one) for key, one in value.items()}
    of: Any = value.get("of", ())
    try:
        match str(value[_MARK]):
            case "map":
                return {unpack(key): unpack(one) for key, one in of}
            case "tuple":
                return tuple(unpack(one) for one in of)
            case "bytes":
                return base64.b64decode(of)
            case "set":
                return {unpack(one) for one in of}
    except (TypeError, AttributeError) as error:
        raise ValueError(f"a marked value that is broken: {error}") from None
    raise ValueError(f"an unknown mark {value[_MARK]!r}")


async def read_frame(reader: asyncio.StreamReader, *, largest: int = LARGEST) -> Any:
    """The next frame. `IncompleteReadError` at the end; ValueError for what is no frame."""
    (length,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    if length > largest:
        raise ValueError(f"a frame of {length} bytes (rule: at most {largest})")
    data = await reader.readexactly(length)
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("a frame nested too deeply") from None


def write_frame(writer: asyncio.StreamWriter, frame: Any) -> None:
    """ValueError if it is too large."""
    data = json.dumps(frame, separators=(",", ":")).encode()
    if len(data) > LARGEST:
        raise ValueError(f"a frame of {len(data)} bytes (rule: at most {LARGEST})")
    writer.write(_HEADER.pack(len(data)) + data)
