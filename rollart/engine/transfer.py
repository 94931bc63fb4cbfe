"""The wire format of KV between engines, and the `kv_transfer_params` with its location.

vLLM's pull protocol (NIXL): an engine keeps the KV of a request under its id and answers with `kv_transfer_params`,
which the router passes on verbatim to the engine that needs the KV. In addition to vLLM's keys, the params hold
`weight_version`, the `remote_token` required to pull, `remote_start` (KV of earlier tokens stays with the session and
is handed out on request), and the path of the file for engines on the same host.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rollart.engine.cache import KvBlock
from rollart.errors import EngineError, HandoffFailed

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

PREFIX = struct.Struct("<QQ")

ALIGN = 64
"""The payload starts at a multiple of this, so that tensors can be read in place."""


@dataclass(frozen=True, slots=True)
class KvSource:
    """The location of exported KV according to `kv_transfer_params`: `tokens` is the length of the sequence, `start`
    the first copied token, `version` that of the weights (None: not given). `file` is a path in the shared memory of
    the host `boot_id`, '' if there is none.
    """

    host: str
    port: int
    request_id: str
    token: str
    tokens: int
    start: int
    version: int | None
    boot_id: str
    file: str
    timeout_s: float

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/rollart/kv"

    def params(self) -> dict[str, object]:
        """The `kv_transfer_params` for this location."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": f"{self.host}:{self.port}",
            "remote_request_id": self.request_id,
            "remote_block_ids": [],
            "remote_host": self.host,
            "remote_port": self.port,
            "remote_num_tokens": self.tokens,
            "transfer_mode": "pull",
            "weight_version": self.version,
            "remote_start": self.start,
            "remote_token": self.token,
            "remote_boot_id": self.boot_id,
            "remote_file": self.file,
        }


def parse_kv_source(params: Mapping[str, object] | None, *, timeout_s: float) -> KvSource | None:
    """The location to pull from; None if the request imports no KV. EngineError, not retryable, for invalid values.
    `timeout_s` bounds the pull unless the params set a bound."""
    if not params or not (params.get("do_remote_prefill") or params.get("remote_request_id")):
        return None
    try:
        version = params.get("weight_version")
        source = KvSource(
            host=str(params["remote_host"]),
            port=int(str(params["remote_port"])),
            request_id=str(params["remote_request_id"]),
            token=str(params.get("remote_token", "")),
            tokens=int(str(params["remote_num_tokens"])),
            start=int(str(params.get("remote_start", 0))),
            version=None if version is None else int(str(version)),
            boot_id=str(params.get("remote_boot_id", "")),
            file=str(params.get("remote_file", "")),
            timeout_s=float(str(params.get("timeout_s") or timeout_s)),
        )
    except (KeyError, ValueError) as error:
        raise EngineError(f"kv_transfer_params lack a valid {error}", retryable=False) from None
    if not (math.isfinite(source.timeout_s) and source.timeout_s > 0.0):
        raise EngineError(f"kv_transfer_params.timeout_s is {source.timeout_s}, it must be above 0", retryable=False)
    return source


def encode_block(block: KvBlock, token: str = "") -> list[memoryview]:
    """Encode as: length of the header and CRC-32 of everything that follows (8 bytes each, little endian), JSON header,
    then keys, values and logits, which are not copied. The header holds the token required to pull the block.
    """
    payload = [_bytes(t) for t in (block.keys, block.values, block.logits) if t is not None]
    header = json.dumps(
        {
            "token": token,
            "token_ids": block.token_ids,
            "start": block.start,
            "version": block.version,
            "shape": list(block.keys.shape),
            "dtype": str(block.keys.dtype).removeprefix("torch."),
            "vocab": 0 if block.logits is None else len(block.logits),
        }
    ).encode()
    header += b" " * (-(PREFIX.size + len(header)) % ALIGN)
    crc = zlib.crc32(header)
    for part in payload:
        crc = zlib.crc32(part, crc)
    return [memoryview(PREFIX.pack(len(header), crc) + header), *payload]


def decode_block(data: bytes | bytearray | mmap.mmap, token: str = "") -> KvBlock:
    """Inverse of `encode_block`; the tensors share the memory of `data` unless that is immutable. HandoffFailed if the
    bytes are no such block, were corrupted, or belong to another token."""
    buffer = bytearray(data) if isinstance(data, bytes) else data
    try:
        size, crc = PREFIX.unpack_from(buffer)
        with memoryview(buffer) as view, view[PREFIX.size :] as rest:
            if zlib.crc32(rest) != crc:
                raise ValueError("its checksum is wrong")
        begin = PREFIX.size + size
        header = json.loads(buffer[PREFIX.size : begin])
        if header["token"] != token:
            raise ValueError("it was exported for another request")
        shape, dtype, vocab = tuple(header["shape"]), DTYPES[header["dtype"]], int(header["vocab"])
        count = math.prod(shape)
        logits_at = begin + 2 * count * dtype.itemsize
        if len(buffer) != logits_at + 4 * vocab:
            raise ValueError(f"it has {len(buffer)} bytes, its header says {logits_at + 4 * vocab}")
        return KvBlock(
            token_ids=tuple(header["token_ids"]),
            version=int(header["version"]),
            keys=_tensor(buffer, dtype, shape, begin),
            values=_tensor(buffer, dtype, shape, begin + count * dtype.itemsize),
            start=int(header["start"]),
            logits=_tensor(buffer, torch.float32, (vocab,), logits_at) if vocab else None,
        )
    except (struct.error, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise HandoffFailed(f"the pull brought no valid KV: {error}", remedy="prefill again") from error


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def _tensor(buffer: bytearray | mmap.mmap, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Tensor:
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).view(shape)
