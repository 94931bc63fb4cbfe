"""Handing a prompt's KV from the engine that prefilled it to the one that decodes it.

vLLM's pull protocol (NIXL): the prefill engine keeps the KV under the request's id and answers with
`kv_transfer_params`; the router passes them on verbatim; the decode engine pulls, once, over HTTP. KV that nobody
pulls goes when its lease ends.
"""

from __future__ import annotations

import json
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping

import aiohttp
import torch
from torch import Tensor

from rollart.engine.cache import KvBlock
from rollart.errors import EngineError

__all__ = ["LEASE_S", "Exports", "decode_block", "encode_block", "pull"]

LEASE_S = 30.0
"""How long KV waits to be pulled, seconds: vLLM's `kv_lease_duration`."""

PULL_TIMEOUT_S = 20.0
"""Below the lease: a pull that takes longer finds nothing anyway."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Exports:
    """KV waiting to be pulled, by request id. Owned by the server's loop; `now` is that loop's clock."""

    def __init__(self, now: Callable[[], float], lease_s: float = LEASE_S) -> None:
        self._now, self._lease_s = now, lease_s
        self._blocks: OrderedDict[str, tuple[float, KvBlock]] = OrderedDict()
        self.expired = 0

    def put(self, request_id: str, block: KvBlock) -> None:
        self.sweep()
        self._blocks[request_id] = (self._now() + self._lease_s, block)

    def take(self, request_id: str) -> KvBlock | None:
        """The block, once; None if it was taken, expired, or never there."""
        self.sweep()
        entry = self._blocks.pop(request_id, None)
        return None if entry is None else entry[1]

    def sweep(self) -> None:
        """Forget what nobody pulled in time."""
        while self._blocks and next(iter(self._blocks.values()))[0] <= self._now():
            self._blocks.popitem(last=False)
            self.expired += 1

    def __len__(self) -> int:
        return len(self._blocks)


async def pull(http: aiohttp.ClientSession, params: Mapping[str, object]) -> KvBlock:
    """Fetch the KV that `kv_transfer_params` of a prefill engine point at. EngineError, retryable: prefill again."""
    try:
        url = f"http://{params['remote_host']}:{int(str(params['remote_port']))}/rollart/kv"
        name = str(params["remote_request_id"])
    except (KeyError, ValueError) as error:
        raise EngineError(f"kv_transfer_params lack a valid {error}", retryable=False) from None
    try:
        timeout = aiohttp.ClientTimeout(total=PULL_TIMEOUT_S)
        async with http.get(url, params={"request_id": name}, timeout=timeout) as answer:
            body = await answer.read()
            if answer.status != 200:
                raise EngineError(
                    f"KV pull refused: {url} answered {answer.status} for {name!r}",
                    retryable=True,
                    remedy="prefill again: KV can be pulled once, within its lease",
                )
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineError(f"KV pull from {url} failed: {error!r}", retryable=True, remedy="prefill again") from error
    return decode_block(body)


def encode_block(block: KvBlock) -> bytes:
    """Length of the header (8 bytes, little endian), JSON header, keys, values."""
    header = json.dumps(
        {
            "token_ids": block.token_ids,
            "version": block.version,
            "shape": list(block.keys.shape),
            "dtype": str(block.keys.dtype).removeprefix("torch."),
        }
    ).encode()
    return b"".join((struct.pack("<Q", len(header)), header, _bytes(block.keys), _bytes(block.values)))


def decode_block(data: bytes) -> KvBlock:
    """Inverse of `encode_block`. EngineError if the bytes are not such a block."""
    try:
        (size,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + size])
        both = torch.frombuffer(bytearray(data[8 + size :]), dtype=DTYPES[header["dtype"]])
        keys, values = both.view(2, *header["shape"])
        return KvBlock(tuple(header["token_ids"]), int(header["version"]), keys, values)
    except (struct.error, ValueError, KeyError, RuntimeError) as error:
        raise EngineError(f"KV pull brought no valid block: {error!r}", retryable=True) from error


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
