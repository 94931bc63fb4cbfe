"""The conformance suite on the backend of another distribution (tests/fixtures/nebula), used as its author would."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from rollart.testing.backend_suite import *  # noqa: F403
from rollart.testing.backends import Provider
from serverless.deploy.package import Package
from serverless.meter import MeterSink
from serverless.providers.base import Backend
from serverless.providers.plugin import ProviderContext, ProviderPlugin

pytestmark = pytest.mark.slow  # its workers are processes


NEBULA = Path(__file__).parents[1] / "fixtures" / "nebula"


class Nebula(Provider):
    name = "nebula"

    def __init__(self, plugin: ProviderPlugin, root: Path) -> None:
        self._plugin = plugin
        self._settings = self._plugin.settings(root=root)

    @contextlib.asynccontextmanager
    async def open(self, packages: Sequence[Package], meter: MeterSink | None = None) -> AsyncIterator[Backend]:
        async with self._plugin.backend(self._settings, ProviderContext(meter)) as backend:
            for package in packages:
                await backend.deploy(package)
            yield backend


@pytest.fixture
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Provider:
    monkeypatch.syspath_prepend(NEBULA)
    return Nebula(importlib.import_module("rollart_nebula").PLUGIN, tmp_path)
