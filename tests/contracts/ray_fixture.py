"""A fake Ray cluster on this machine, for the tests of a module. It is ended by process id, never by `ray stop`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rollart.adapters.clusters.ray import RayRuntime
from rollart.adapters.clusters.ray_cluster import MODULE, TOKEN, auth, prepare, raylet
from rollart.ports import Node

__all__ = ["RayCluster", "ray_cluster_of"]

HEALTH_S = 10.0
"""A busy machine keeps a raylet from answering for seconds. One that was killed is noticed in a quarter of it."""


class RayCluster:
    def __init__(self, directory: Path, address: str, pid: int = 0) -> None:
        """`pid` of its program."""
        self.directory = directory
        self.address = address
        self.pid = pid

    def runtime(self) -> RayRuntime:
        return RayRuntime(self.address, env=auth(self.directory / TOKEN))

    def kill_node(self, name: str) -> None:
        os.kill(raylet(self.directory, name), signal.SIGKILL)


@contextlib.contextmanager
def ray_cluster_of(nodes: Sequence[Node], directory: Path) -> Iterator[RayCluster]:
    """The first node is the head."""
    temporary = tempfile.mkdtemp(prefix="rollart-ray-")
    env = {**os.environ, **prepare(directory, nodes, health_s=HEALTH_S, temporary=temporary)}
    watched = "rollart.adapters.clusters.pdeathsig"
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", watched, str(os.getpid()), MODULE, str(directory)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    try:
        assert process.stdout is not None
        said = next((line for line in process.stdout if line.startswith(b"ready ")), b"")
        assert said, (directory / "log").read_text()
        yield RayCluster(directory, said.split()[1].decode(), process.pid)
    finally:
        process.terminate()
        process.wait(120)
        shutil.rmtree(temporary, ignore_errors=True)
