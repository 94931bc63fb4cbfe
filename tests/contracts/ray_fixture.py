"""A fake Ray cluster on this machine, for the tests of a module. It is ended by process id, never by `ray stop`."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rollart.adapters.clusters.ray import RayRuntime
from rollart.adapters.clusters.ray_cluster import MODULE, TOKEN, auth_environment, write_cluster_files
from rollart.fleet import Node
from rollart.testing.clusters import raylet_pid

__all__ = ["IMPORTS", "RayCluster", "client_server_of", "ray_cluster_of"]

IMPORTS = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parents[2]), *sys.path])}
"""For actors of the tests' own modules behind a client server: nodes import from that server's paths, which do not
include its client's directories."""

HEALTH_S = 10.0
"""A busy machine keeps a raylet from answering for seconds. One that was killed is noticed in a quarter of it."""


class RayCluster:
    def __init__(self, directory: Path, address: str, pid: int = 0) -> None:
        """`pid` of its program."""
        self.directory = directory
        self.address = address
        self.pid = pid

    def runtime(self) -> RayRuntime:
        return RayRuntime(self.address, env=auth_environment(self.directory / TOKEN))

    def kill_node(self, name: str) -> None:
        os.kill(raylet_pid(self.directory, name), signal.SIGKILL)


@contextlib.contextmanager
def ray_cluster_of(nodes: Sequence[Node], directory: Path, env: Mapping[str, str] = {}) -> Iterator[RayCluster]:
    """The first node is the head; `env`: of the nodes' processes beside this one's."""
    temporary = tempfile.mkdtemp(prefix="rollart-ray-")
    env = {**os.environ, **env, **write_cluster_files(directory, nodes, health_s=HEALTH_S, temporary=temporary)}
    watched = "rollart.lifeline"
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
        ready = next((line for line in process.stdout if line.startswith(b"ready ")), b"")
        assert ready, (directory / "log").read_text()
        yield RayCluster(directory, ready.split()[1].decode(), process.pid)
    finally:
        process.terminate()
        process.wait(120)
        shutil.rmtree(temporary, ignore_errors=True)


CLIENT_SERVER = """
import sys
from ray.util.client.server import proxier, server
proxier.MIN_SPECIFIC_SERVER_PORT, proxier.MAX_SPECIFIC_SERVER_PORT = int(sys.argv[1]), int(sys.argv[1]) + 100
server.main()
"""
"""Ray's own, as `ray start --ray-client-server-port` runs it. It gives each client a server at one of a thousand fixed
ports, after a look whether that is free: two clusters on a machine would now and then take the same."""


@contextlib.contextmanager
def client_server_of(cluster: RayCluster) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A Ray client server of the cluster: its address (`ray://...`), and its process, whose servers of clients end with
    it."""
    port, first = _free_port(), random.randrange(12_000, 30_000, 100)
    options = [f"--address={cluster.address}", "--host=127.0.0.1", f"--port={port}", "--mode=proxy"]
    with (cluster.directory / "client-server.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", CLIENT_SERVER, str(first), *options],
            # Of its forks for clients some end at once in gRPC's handlers otherwise (5 of 16 on a busy machine).
            env={**os.environ, **auth_environment(cluster.directory / TOKEN), "GRPC_ENABLE_FORK_SUPPORT": "0"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        while True:  # it listens, or it has ended
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=60):
                break
            assert process.poll() is None, (cluster.directory / "client-server.log").read_text()
            time.sleep(0.05)
        yield f"ray://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait(60)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
