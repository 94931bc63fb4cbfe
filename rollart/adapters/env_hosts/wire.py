"""The protocol between the controller and an environment host: length-prefixed JSON frames of plain values.

Values keep their types: tuples, bytes, sets and mappings with keys other than text are tagged; NumPy's scalars and
arrays become numbers and lists. Reading a frame executes nothing, so the data of an environment cannot run code on the
controller.
"""

from __future__ import annotations

import asyncio
import base64
import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollart.model import Observation, Step
from serverless import frames

LARGEST = 64 * 2**20
"""Maximum bytes of a frame. An observation of this size would exceed any context; a greater length means a broken
frame."""

_MARK = "$"
"""The key that tags a mapping as the encoding of a value which JSON lacks."""


class HostOperation(enum.StrEnum):
    """Operations of a host."""

    HELLO = "hello"
    RESET = "reset"
    STEP = "step"
    CLOSE = "close"
    CANCEL = "cancel"
    HEALTH = "health"
    IMAGES = "images"
    PULL = "pull"


class CallStatus(enum.StrEnum):
    """How a call ended: with a result; with an exception of the environment; with an invalid result; refused before it
    began."""

    OK = "ok"
    RAISED = "raised"
    LIED = "lied"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class HostRequest:
    """A request. `episode` is '' if it concerns the host itself."""

    id: int
    op: HostOperation
    episode: str = ""
    value: Any = None

    def answer(self, status: CallStatus, value: Any = None, env_s: float = 0.0) -> HostResponse:
        return HostResponse(self.id, self.episode, status, value, env_s)

    def to_json(self) -> list[Any]:
        return [self.id, str(self.op), self.episode, pack(self.value)]

    @classmethod
    def from_json(cls, frame: Any) -> HostRequest:
        """ValueError for a frame that is not a request."""
        match frame:
            case [int(number), str(op), str(episode), value]:
                return cls(number, HostOperation(op), episode, unpack(value))
        raise ValueError("a frame that is no request")


@dataclass(frozen=True, slots=True)
class HostResponse:
    """The response to the request of this `id`. `value` is the result, or the error as text; `env_s` is the seconds
    spent in the environment's own code."""

    id: int
    episode: str
    status: CallStatus
    value: Any = None
    env_s: float = 0.0

    def to_json(self) -> list[Any]:
        return [self.id, self.episode, str(self.status), pack(self.value), self.env_s]

    @classmethod
    def from_json(cls, frame: Any) -> HostResponse:
        """ValueError for a frame that is not a response."""
        match frame:
            case [int(number), str(episode), str(status), value, int() | float() as env_s]:
                return cls(number, episode, CallStatus(status), unpack(value), float(env_s))
        raise ValueError("a frame that is no answer")


def packed_observation(observation: Observation) -> list[Any]:
    actions = None if observation.actions is None else list(observation.actions)
    return [observation.text, actions, observation.max_tokens]


def observation_of(value: Any) -> Observation:
    """ValueError for a value that is not an encoded observation."""
    match value:
        case [str(text), None | list() as actions, None | int() as most]:
            return Observation(text, None if actions is None else tuple(actions), most)
    raise ValueError("an answer that is no observation")


def packed_step(step: Step) -> list[Any]:
    """TypeError for metadata that cannot be encoded."""
    return [packed_observation(step.observation), step.reward, step.done, step.success, dict(step.metadata)]


def step_of(value: Any) -> Step:
    """ValueError for a value that is not an encoded step."""
    match value:
        case [list(shown), float() | int() as reward, bool(done), None | bool() as success, dict(metadata)]:
            return Step(observation_of(shown), float(reward), done, success, metadata)
    raise ValueError("an answer that is no step")


def pack(value: Any) -> Any:
    """The value in JSON's types. TypeError for an instance of any other class."""
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
    """The value that was packed. ValueError for an unknown tag."""
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
    """The next frame. `IncompleteReadError` at the end of the stream; ValueError for a malformed frame."""
    body = await frames.read_frame(reader, largest=largest)
    try:
        return json.loads(body)
    except RecursionError:
        raise ValueError("a frame nested too deeply") from None


def encode_frame(frame: Any) -> bytes:
    """ValueError if the frame is too large."""
    return frames.encode_frame(json.dumps(frame, separators=(",", ":")).encode(), largest=LARGEST)
