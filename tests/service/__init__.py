"""The service: its state, storage, uploads, and the bridge to an external trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollart.adapters.service.state import ServiceState


async def put(state: ServiceState, row: str, values: Mapping[str, Any], version: int | None) -> bool:
    """Write columns of one row; False if it is gone."""
    return (await state.put_all([(row, values, version)]))[row]
