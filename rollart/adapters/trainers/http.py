"""A trainer behind HTTP (`python -m rollart.train`): the `Trainer` port over msgpack.

Samples travel as packed arrays, not as objects: `encode_samples` costs the controller about 20 µs a sample and the
trainer nothing per token. `rollart/train/batch.py` specifies the format.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import aiohttp
import msgpack

from rollart.architecture import stamp_of
from rollart.errors import TrainerError, TrainerRefused, VersionDamaged
from rollart.model import BroadcastResult, TrainReport, TrainSample, WeightsRef


class HttpTrainer:
    """Implements `Trainer`. Any number of callers. The trainer handles one request at a time, in order of arrival, and
    writes a staged version meanwhile. `streams` is the trainer's response to the greeting.

    No call is retried and none has a deadline of its own: a training step is not idempotent, and the caller's lease
    decides how long to wait. A caller that gives up on `train` must `restore`, since the step continues without it.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self.streams = False

    async def greet(self) -> None:
        """Ask once for the trainer's capabilities. `TrainerError` if it does not answer."""
        try:
            async with self._open().get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=60)) as response:
                self.streams = bool((await response.json()).get("stream", False))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise TrainerError(f"trainer at {self.url}: no greeting: {str(error) or type(error).__name__}") from error

    async def train(self, samples: Sequence[TrainSample], version: int) -> TrainReport:
        return _report(await self._post("train", {"samples": encode_samples(samples), "version": version}))

    async def begin(self, version: int) -> None:
        await self._post("begin", {"version": version})

    async def accumulate(self, samples: Sequence[TrainSample]) -> None:
        await self._post("accumulate", {"samples": encode_samples(samples)})

    async def finish(self) -> TrainReport:
        return _report(await self._post("finish", {}))

    async def imitate(self, samples: Sequence[TrainSample], batches: int) -> TrainReport:
        return _report(await self._post("imitate", {"samples": encode_samples(samples), "batches": batches}))

    async def logprobs(self, samples: Sequence[TrainSample]) -> list[tuple[float, ...]]:
        return await self._column("logprobs", samples, key="logprobs", code="f")

    async def reference(self, samples: Sequence[TrainSample]) -> list[tuple[float, ...]]:
        return await self._column("reference", samples)

    async def advantages(self, samples: Sequence[TrainSample]) -> list[tuple[float, ...]]:
        return await self._column("advantages", samples)

    async def stage(self, version: int, *, send: bool = False) -> None:
        """`send`: keep the staged version for a broadcast as well."""
        await self._post("stage", {"version": version} | ({"send": True} if send else {}))

    async def meet(self) -> tuple[str, int]:
        """`host:port` of the rendezvous of engines for broadcasts, and the trainer's number of ranks."""
        answer = await self._post("meet", {})
        return str(answer["address"]), int(answer["ranks"])

    async def send(self, order: Mapping[str, object], *, bucket_bytes: int) -> BroadcastResult:
        """Broadcast the version that was staged with `send`; returns when every member has it or no longer answers."""
        answer = await self._post("send", {"order": dict(order), "bucket": bucket_bytes})
        has = {int(member): (int(n), float(s)) for member, (n, s) in answer["has"].items()}
        errors = {int(member): str(error) for member, error in answer["errors"].items()}
        return BroadcastResult(int(answer["bytes"]), float(answer["seconds"]), has, errors)

    async def publish(self, version: int) -> WeightsRef:
        answer = await self._post("publish", {"version": version})
        path = str(answer["path"])
        return WeightsRef(int(answer["version"]), path, int(answer.get("bytes", 0)), stamp_of(path))

    async def restore(self, weights: WeightsRef, *, optimizer: bool = True) -> None:
        await self._post("restore", {"version": weights.version, "path": weights.path, "optimizer": optimizer})

    async def lost(self, reason: str) -> None:
        """Report the loss of a rank that the trainer does not watch: requests that wait for it fail with `reason`."""
        await self._post("lost", {"reason": reason})

    async def healthy(self) -> bool:
        """True if the process answers; it does so while a step runs."""
        try:
            async with self._open().get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=5)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _column(
        self, route: str, samples: Sequence[TrainSample], *, key: str = "column", code: str = "d"
    ) -> list[tuple[float, ...]]:
        """The values of each sample's tokens, which the answer has in `key`, packed as `code`."""
        answer = await self._post(route, {"samples": encode_samples(samples)})
        values = iter(array(code, answer[key]))
        return [tuple(islice(values, len(sample.token_ids))) for sample in samples]

    async def _post(self, route: str, message: Mapping[str, object]) -> dict[str, Any]:
        body: bytes = msgpack.packb(message)
        try:
            async with self._open().post(f"{self.url}/{route}", data=body) as response:
                payload = await response.read()
                status = response.status
        except (aiohttp.ClientError, OSError) as error:
            cause = str(error) or type(error).__name__
            raise TrainerError(f"trainer at {self.url}: {route} failed: {cause}") from error
        try:
            answer = msgpack.unpackb(payload)
        except (ValueError, msgpack.UnpackException) as error:
            raise TrainerError(
                f"trainer at {self.url}: {route}: unreadable answer, status {status}",
                remedy="its log has the cause (`rollart logs --role trainer`), unless another program answers there",
            ) from error
        if status != 200 or not isinstance(answer, dict):
            detail = answer if isinstance(answer, dict) else {}
            cause = detail.get("error", f"status {status}")
            remedy = str(detail.get("remedy", ""))
            if status == 400:
                samples = tuple(map(str, detail.get("samples", ())))
                raise TrainerRefused(f"{route}: {cause}", remedy=remedy, samples=samples)
            raise (VersionDamaged if status == 422 else TrainerError)(f"{route}: {cause}", remedy=remedy)
        return answer

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
                headers={"Content-Type": "application/msgpack"},
                # A pooled connection that the trainer closed meanwhile would fail a step that cannot be retried.
                connector=aiohttp.TCPConnector(force_close=True),
            )
        return self._session


def encode_samples(samples: Sequence[TrainSample]) -> dict[str, object]:
    """The wire form of samples (`rollart/train/batch.py`)."""
    domains: dict[str, int] = {}
    groups: dict[str, int] = {}
    legal_sets: dict[tuple[int, ...], int] = {}
    # The trainer computes an optional column that any sample lacks.
    width = max((len(s.experts[0]) for s in samples if s.experts), default=0)
    complete = [n for n in ("reference", "advantage") if all(getattr(s, n) or not s.token_ids for s in samples)]
    return {
        "ids": [s.id for s in samples],
        "domain": _pack("i", [domains.setdefault(s.domain, len(domains)) for s in samples]),
        "group": _pack("i", [groups.setdefault(s.group, len(groups)) for s in samples]),
        "domains": list(domains),
        "lengths": _pack("i", [len(s.token_ids) for s in samples]),
        "score": _pack("d", [s.score for s in samples]),
        "tokens": _pack("i", _flat(s.token_ids for s in samples)),
        "mask": b"".join(bytes(s.loss_mask) for s in samples),
        "logprobs": _pack("f", _flat(s.logprobs for s in samples)),
        "versions": _pack("i", _flat(s.versions for s in samples)),
        "turn": _pack("i", _flat(s.turn for s in samples)),
        "rewards": _pack("d", _flat(s.rewards for s in samples)),
        "legal": b"".join(_legal(s, legal_sets) for s in samples),
        "sets": [list(members) for members in legal_sets],
        **({"weight": _pack("d", [s.weight for s in samples])} if any(s.weight != 1.0 for s in samples) else {}),
        **({"truncated": bytes(s.truncated for s in samples)} if any(s.truncated for s in samples) else {}),
        **{name: _pack("d", _flat(getattr(s, name) for s in samples)) for name in complete},
        **({"experts": b"".join(_experts(s, width) for s in samples)} if width else {}),
    }


def _legal(sample: TrainSample, known: dict[tuple[int, ...], int]) -> bytes:
    """1 + index of each token's legal set, 0 where unrestricted."""
    if not sample.allowed:
        return bytes(4 * len(sample.token_ids))
    return _pack("i", [0 if a is None else known.setdefault(a, len(known)) + 1 for a in sample.allowed])


def _experts(sample: TrainSample, width: int) -> bytes:
    """All bits are set for unknown experts."""
    return b"".join(sample.experts) or b"\xff" * (width * len(sample.token_ids))


def _flat(parts: Iterable[tuple[Any, ...]]) -> list[Any]:
    return list(chain.from_iterable(parts))


def _pack(code: str, values: list[Any]) -> bytes:
    return array(code, values).tobytes()


def _report(answer: Mapping[str, Any]) -> TrainReport:
    return TrainReport(
        trained_tokens=int(answer["trained_tokens"]),
        seconds=float(answer["seconds"]),
        metrics={str(k): float(v) for k, v in answer["metrics"].items()},
    )
