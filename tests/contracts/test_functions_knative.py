"""The conformance suite on the pods that `infra render --target knative` describes: each function's package as its
ConfigMap has it, served by the container's command in a process of its own. There is no cluster: Knative's queue and
scaling are not executed, and one process stands for all pods of a function.

Left out:
- `deploying_again_replaces_...`: a new version is a new Revision, with pods of its own;
- `a_full_queue_throttles`, and those about idle and warm workers: queue and scaling are Knative's;
- `handlers_as_people_have_them`: the handler file is that of the other providers, and each process takes a second.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollart.infra.knative import PACKAGE_AT, TOKEN, knative
from rollart.testing.backend_suite import *  # noqa: F403
from rollart.testing.backends import Provider
from serverless.deploy.package import Package
from serverless.meter import MeterSink
from serverless.providers.base import Backend
from serverless.providers.http import Bearer, Endpoint, HttpBackend

pytestmark = pytest.mark.slow  # a process with rollart's imports for each function

for left_out in (
    "test_deploying_again_replaces_and_a_call_in_flight_ends_on_the_old_version",
    "test_a_full_queue_throttles",
    "test_an_idle_function_scales_to_zero_and_back",
    "test_warm_workers_serve_without_a_cold_start_and_stay",
    "test_handlers_as_people_have_them",
):
    del globals()[left_out]


class Knative(Provider):
    name = "knative"
    spans = False

    def __init__(self, root: Path) -> None:
        self._root = root

    @contextlib.asynccontextmanager
    async def open(self, packages: Sequence[Package], meter: MeterSink | None = None) -> AsyncIterator[Backend]:
        rendered = knative("tests", packages, images={"": "rollart:test"}).files["functions.yaml"]
        documents = list(yaml.safe_load_all(rendered))
        endpoints = {}
        async with contextlib.AsyncExitStack() as stack:
            for package, config, service in zip(packages, documents[::2], documents[1::2], strict=True):
                url = await stack.enter_async_context(self._pod(config, service))
                endpoints[package.spec.name] = Endpoint(f"{url}/functions/{package.spec.name}", Bearer("the token"))
            backend = await stack.enter_async_context(HttpBackend(endpoints, meter=meter))
            for package in packages:
                await backend.deploy(package)
            yield backend

    @contextlib.asynccontextmanager
    async def _pod(self, config: dict[str, Any], service: dict[str, Any]) -> AsyncIterator[str]:
        """The container's process, with its volume in a directory here, and a free port."""
        for name, data in config["binaryData"].items():
            (self._root / name).write_bytes(base64.b64decode(data))
        (container,) = service["spec"]["template"]["spec"]["containers"]
        assert container["command"][0] == "rollart"
        words = [word.replace(PACKAGE_AT, str(self._root)) for word in (*container["command"][1:], *container["args"])]
        words[words.index("--port") + 1] = "0"
        words[words.index("--host") + 1] = "127.0.0.1"
        secrets = {one["name"]: "the token" for one in container["env"] if "valueFrom" in one}
        assert TOKEN in secrets
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollart.cli.main", *words),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, **secrets},
        )
        assert process.stdout is not None
        try:
            yield json.loads(await process.stdout.readline())["url"]
        finally:
            process.terminate()  # as Kubernetes ends a pod
            await asyncio.wait_for(process.communicate(), 10.0)
            assert process.returncode is not None

    def workers(self, backend: Backend, function: str) -> int | None:
        return None


@pytest.fixture
def provider(tmp_path: Path) -> Provider:
    return Knative(tmp_path)
