"""Which path a server is told to load: where the version was published, or where its own host has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rollart.adapters.engines.http import HttpEngine
from rollart.adapters.engines.vllm import VllmEngine
from rollart.errors import EngineError
from rollart.model import EngineId, WeightsRef
from rollart.sim.loop import run

WEIGHTS = WeightsRef(3, "/run/weights/v000003")


def told(kind: type[HttpEngine], **options: Any) -> list[tuple[str, Any]]:
    """The calls of one update, in order."""
    calls: list[tuple[str, Any]] = []

    class Told(kind):  # type: ignore[misc, valid-type]
        async def control(self, path: str, body: Mapping[str, Any], **_: Any) -> dict[str, Any]:
            calls.append((path, body))
            return {"success": True}

    async def main() -> None:
        await Told(EngineId("engine-0"), "http://none", **options).update_weights(WEIGHTS)

    try:
        run(main())
    except EngineError as error:
        calls.append(("failed", error.message))
    return calls


@pytest.mark.parametrize("kind", [HttpEngine, VllmEngine])
def test_it_loads_what_its_host_has(kind: type[HttpEngine]) -> None:
    async def local(weights: WeightsRef) -> str:
        return f"/disk/v{weights.version:06d}"

    for options, path in (({}, WEIGHTS.path), ({"local": local}, "/disk/v000003")):
        paths = [body["update_info"]["path"] for call, body in told(kind, **options) if call == "/update_weights"]
        assert paths == [path]


def test_without_the_version_the_server_is_not_asked() -> None:
    async def local(weights: WeightsRef) -> str:
        raise EngineError("the link is down", retryable=True)

    assert told(HttpEngine, local=local) == [("failed", "the link is down")]
