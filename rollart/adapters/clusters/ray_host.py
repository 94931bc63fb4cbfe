"""Ray's side: an actor that wraps one of our objects, and the program actor of a node.

Arguments and results are pickled here and cross Ray as bytes: they are values, and tensors are refused.
"""

from __future__ import annotations

import asyncio
import io
import pickle
from typing import Any

from rollart import __version__
from rollart.adapters.clusters.program import Program
from rollart.adapters.clusters.runtime import InlineActor
from rollart.errors import RunFailed, UsageError


class RayActorHost:
    """A Ray actor that wraps one object. Calls run concurrently on its loop; the caller limits their number."""

    def __init__(self) -> None:
        self._actor: Any = None

    async def boot(self, factory: str, init: bytes, version: str) -> tuple[bool, bytes, str]:
        """Make the object. Returns True or False for success, the error, and the id of this node. UsageError for a
        controller of another `version`: both sides exchange pickled values."""
        import ray

        node = str(ray.get_runtime_context().get_node_id())
        try:
            if version != __version__:
                raise UsageError(
                    f"node {node[:12]} has rollart {__version__} and the controller {version} (rule: the same version, "
                    "as they exchange pickled values)",
                    remedy=f"install rollart {version} on every node, or run them all from one image",
                )
            args, kwargs = pickle.loads(init)
            self._actor = InlineActor(factory, args, kwargs)
        except Exception as error:
            return False, _packed_error(error), node
        return True, b"", node

    async def live(self) -> None:
        """Never returns: it fails with the death of this actor."""
        await asyncio.Event().wait()

    async def call(self, method: str, payload: bytes) -> tuple[bool, bytes]:
        """True and the result, or False and the error."""
        try:
            args, kwargs = pickle.loads(payload)
            return True, pack(await self._actor.call(method, args, kwargs))
        except Exception as error:
            return False, _packed_error(error)

    async def stop(self) -> None:
        if self._actor is not None:
            await self._actor.kill()


class NodeProgram(Program):
    """A `Program` that serves at its node's address, for clients on other nodes."""

    async def _launch(self, extra: list[str]) -> None:
        import ray.util

        await super()._launch([*extra, "--host", str(ray.util.get_node_ip_address())])


def pack(value: Any) -> bytes:
    """Pickled. `UsageError` for a tensor anywhere in the value: it would take seconds through Ray's object store."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value).__module__.partition(".")[0] == "torch" and type(value).__name__ in ("Tensor", "Parameter"):
            raise UsageError(
                f"a tensor of {tuple(value.shape)} is an argument or a result of an actor",
                remedy="weights go through the weight store; small arrays as numpy or lists",
            )
        return NotImplemented


def _packed_error(error: Exception) -> bytes:
    try:
        payload = pack(error)
        pickle.loads(payload)  # an error whose constructor needs more than its args fails only here
        return payload
    except Exception:
        return pack(RunFailed(f"{type(error).__name__}: {error}"))
