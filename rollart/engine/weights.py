"""New weights for an engine, from a published directory or from the trainer's broadcast, staged before they are loaded.

Requests are unaffected until the server loads the staged weights. A directory is a Hugging Face checkpoint, read by
engines only once it was published completely; `rollart.architecture` reads its architecture.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from rollart.architecture import (
    MARKER,
    TEXT_PREFIX,
    architecture_of,
    expert_parts,
    read_architecture,
    stamp_of,
    weight_files,
)
from rollart.collective import BroadcastOrder, ReceivedWeights, WeightReceiver
from rollart.engine.network import Network
from rollart.errors import EngineError, UsageError
from rollart.lora import ADAPTER_KEY, ADAPTERS_KEY, Adapter, read_adapter, read_adapters


class StagedWeights(NamedTuple):
    """A version as `Network.load` takes it: the directory that names it, its tensors, the stamp of their content, and
    the adapters of a version with several. Their tensors are those of the checkpoint below, if the network has another
    one."""

    path: str
    tensors: Mapping[str, Tensor]
    stamp: str
    adapters: Mapping[str, Adapter] | None = None


class WeightStaging:
    """The weight staging of one engine. Broadcasts are received in separate threads, concurrently with the steps. A
    broadcast of an adapter alone is merged into the weights below it, which stay memory-mapped. Several adapters stay
    apart, and the network keeps the weights below them."""

    def __init__(self, network: Network, directory: str) -> None:
        """`directory`: the checkpoint that the engine started with."""
        self._network = network
        self._base: tuple[str, Mapping[str, Tensor]] | None = None
        """Revision and tensors of the checkpoint below the last adapter that was read from files."""
        adapter = read_adapter(directory) if network.adapters is None else None
        if adapter is not None:
            self._base = adapter.revision, read_checkpoint(directory)
        self.receiver = WeightReceiver(network.device, check=self._loadable)

    def take_part(self, info: object) -> bool:
        """Take part in the broadcast that vLLM's `init_info` orders; False if it holds no order."""
        if not isinstance(info, dict) or not info:
            return False
        try:
            self.receiver.take_part(BroadcastOrder(**info))
        except (TypeError, ValueError) as error:
            raise EngineError(f"init_info: {error}", retryable=False) from None
        return True

    async def stage(self, info: object) -> StagedWeights:
        """The version that was broadcast under `update_info`'s `stamp`, else that of the directory named there."""
        path, stamp = (info.get("path"), info.get("stamp")) if isinstance(info, dict) else (None, None)
        if not isinstance(path, str):
            raise EngineError("update_info.path must name a published directory", retryable=False)
        received = self.receiver.take(stamp) if isinstance(stamp, str) else None
        loop = asyncio.get_running_loop()
        work = (self._read, path) if received is None else (self._merged, path, received)
        return await loop.run_in_executor(None, *work)

    def _read(self, path: str) -> StagedWeights:
        """The version in a directory; it must be complete and of the engine's architecture."""
        try:
            require_complete(path)
            stamp = stamp_of(path)
            if read_architecture(path) != self._network.architecture:
                raise UsageError(f"{path} is another architecture than the engine's")
            if (stack := self._network.adapters) is not None:
                adapters = _read_several(path)
                stack.check(adapters)
                tensors = {} if stack.holds_base(adapters) else read_checkpoint(path)
                if tensors:
                    self._network.check(tensors)
                return StagedWeights(path, self._network.staged(tensors), stamp, adapters)
            tensors, adapter = read_version(path)
            self._network.check(tensors)
        except UsageError as error:
            raise EngineError(str(error), retryable=False) from error
        if adapter is not None:
            self._base = adapter.revision, tensors
        return StagedWeights(path, self._network.staged(_with_adapter(tensors, adapter)), stamp)

    def _merged(self, path: str, received: ReceivedWeights) -> StagedWeights:
        adapters = _broadcast_adapters(received)
        if adapters:
            return StagedWeights(path, {}, received.stamp, adapters)
        return StagedWeights(path, self._with_base(received), received.stamp)

    def _with_base(self, received: ReceivedWeights) -> dict[str, Tensor]:
        adapter = _broadcast_adapter(received)
        if adapter is None:
            return dict(received.tensors)
        assert self._base is not None, "else it was refused on receipt"
        return self._network.staged(_with_adapter(self._base[1], adapter))

    def _loadable(self, received: ReceivedWeights) -> None:
        try:
            config: dict[str, Any] = json.loads(received.config)
            if architecture_of(config, Path("a broadcast")) != self._network.architecture:
                raise UsageError("it is another architecture than the engine's")
            adapter, adapters = _broadcast_adapter(received), _broadcast_adapters(received)
            if (stack := self._network.adapters) is not None:
                stack.check(adapters)
                if not stack.holds_base(adapters):
                    raise ValueError("the engine lacks the weights below the adapters")
            elif adapter is None:
                self._network.check(received.tensors)
            elif self._base is None or self._base[0] != adapter.revision:
                raise ValueError("the engine lacks the weights below the adapter")
            else:
                adapter.check({name: tensor.shape for name, tensor in self._base[1].items()})
        except UsageError as error:
            raise ValueError(str(error)) from None


def published_version(directory: str | Path) -> int:
    """The version in a directory's marker; 0 for a checkpoint that was not published by a trainer."""
    try:
        return int(json.loads((Path(directory) / MARKER).read_text())["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def read_tensors(directory: str | Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, or of a version with its adapter merged, by name, on the CPU."""
    return _with_adapter(*read_version(directory))


def read_stacked(network: Network, directory: str | Path) -> StagedWeights:
    """A directory's version for a network without requests yet, which stacks its adapters if it has several. UsageError
    if they do not fit it."""
    adapters = _read_several(directory)
    if not adapters:
        return StagedWeights(str(directory), read_tensors(directory), stamp_of(directory))
    network.stack_adapters(adapters)
    return StagedWeights(str(directory), read_checkpoint(directory), stamp_of(directory), adapters)


def read_version(directory: str | Path) -> tuple[dict[str, Tensor], Adapter | None]:
    """The tensors of a checkpoint, or of the one below a version's adapter, and the adapter, which fits them."""
    tensors = read_checkpoint(directory)
    try:
        adapter = read_adapter(directory)
        if adapter is not None:
            adapter.check({name: tensor.shape for name, tensor in tensors.items()})
    except ValueError as error:
        raise UsageError(str(error)) from None
    return tensors, adapter


def read_checkpoint(directory: str | Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, without the adapter of a version with one, by name, on the CPU, memory-mapped. One
    file or a sharded index. Those of a multimodal checkpoint's text part have the names that they have in a checkpoint
    of its own."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for path in weight_files(directory):
        try:
            loaded = load_file(path)
        except Exception as error:  # the library raises its own types for truncated and foreign files
            raise UsageError(f"{path}: not a readable safetensors file ({error})") from error
        for name, tensor in loaded.items():
            plain = f"model.{name.removeprefix(TEXT_PREFIX)}" if name.startswith(TEXT_PREFIX) else name
            tensors.update(expert_parts(plain, tensor))
    return tensors


def require_complete(directory: str | Path) -> None:
    """Refuse an incomplete directory."""
    path = Path(directory)
    if not path.is_dir():
        raise UsageError(f"weights directory {path} does not exist")
    if not (path / MARKER).exists():
        raise UsageError(f"weights directory {path} has no {MARKER} marker", remedy="wait until it was published whole")


def _with_adapter(tensors: Mapping[str, Tensor], adapter: Adapter | None) -> dict[str, Tensor]:
    if adapter is None:
        return dict(tensors)
    return {name: adapter.merged(name, base) for name, base in tensors.items()}


def _read_several(directory: str | Path) -> dict[str, Adapter]:
    try:
        return read_adapters(directory)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _broadcast_adapters(received: ReceivedWeights) -> dict[str, Adapter]:
    """The adapters of a broadcast of several; none of any other. ValueError if one is damaged."""
    found = {}
    for name, config in json.loads(received.config).get(ADAPTERS_KEY, {}).items():
        own = {key.removeprefix(f"{name}/"): t for key, t in received.tensors.items() if key.startswith(f"{name}/")}
        found[name] = Adapter.parse(config, own)
    return found


def _broadcast_adapter(received: ReceivedWeights) -> Adapter | None:
    """The adapter, if the broadcast has nothing else. ValueError if it is damaged."""
    config = json.loads(received.config).get(ADAPTER_KEY)
    return None if config is None else Adapter.parse(config, received.tensors)
