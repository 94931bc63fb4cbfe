"""A private Ray cluster on this machine, one raylet per node: `python -m rollart.adapters.clusters.ray_cluster DIR`.

DIR/nodes.json lists the nodes. The program prints `ready ADDRESS` on stdout once all have joined; DIR/raylets.json then
holds the process id of each node's raylet. Nodes that are added to nodes.json later are started too. SIGTERM and the
death of the parent end every process of the cluster. Nothing else on the machine is touched, whereas `ray stop` would
end every Ray process.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rollart.adapters.clusters.program import Program
from rollart.fleet import Node
from rollart.lifeline import die_with_parent

MODULE = "rollart.adapters.clusters.ray_cluster"

NODES, RAYLETS, TOKEN, TEMPORARY = "nodes.json", "raylets.json", "token", "temporary"

STORE_BYTES = 80 * 2**20
"""Object store of a node: a run uses it only for arguments and results of calls."""

_PR_SET_CHILD_SUBREAPER = 36

POLL_INTERVAL_S = 0.25
"""How often the program polls for raylets that ended: a raylet that is not reaped keeps its workers alive."""


def auth_environment(token: Path) -> dict[str, str]:
    """The environment variables that a process needs to connect to a cluster whose token is in this file."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}


def health_settings(health_s: float) -> dict[str, int]:
    """Ray's health checks such that a node is lost after `health_s` seconds of silence. A node whose raylet was killed
    refuses connections at once and is lost after a quarter of that. Ray's defaults take 18 s."""
    ms = health_s * 1000.0
    return {
        "health_check_initial_delay_ms": 1000,
        "health_check_period_ms": max(1, int(ms / 8)),
        "health_check_timeout_ms": max(1, int(ms / 4)),
        "health_check_failure_threshold": 3,
    }


@contextlib.asynccontextmanager
async def private_cluster(
    directory: Path, nodes: Sequence[Node], *, health_s: float, port: int = 0
) -> AsyncIterator[str]:
    """Run a cluster; yields its address. `PartDied` with Ray's message if it does not start. `port` of the head; 0: a
    free one.

    The first of `nodes` is the head: the controller is its driver, and the cluster ends with it. DIRECTORY/token has
    the token that the cluster's processes require. Its sockets are in a temporary directory, since their paths have at
    most 107 characters."""
    leftover = directory / TEMPORARY
    if leftover.exists():  # left by a controller that was killed
        shutil.rmtree(leftover.read_text(), ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="rollart-ray-", ignore_cleanup_errors=True) as temporary:
        env = write_cluster_files(directory, nodes, health_s=health_s, temporary=temporary, port=port)
        program = Program("ray", MODULE, [str(directory)], str(directory / "cluster.log"), env=env)
        try:
            yield await program.start([])
        finally:
            await program.stop()


def write_cluster_files(
    directory: Path, nodes: Sequence[Node], *, health_s: float, temporary: str, port: int = 0
) -> dict[str, str]:
    """Write the program's input and a token; the environment variables for the program. The first node is the head."""
    directory.mkdir(parents=True, exist_ok=True)
    token = directory / TOKEN
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    entries = [node_entry(n) for n in nodes]
    write_json(directory / NODES, {"nodes": entries, "system": health_settings(health_s), "port": port})
    (directory / TEMPORARY).write_text(temporary)
    return {**auth_environment(token), "RAY_TMPDIR": temporary, "RAY_USAGE_STATS_ENABLED": "0"}


def main(directory: Path) -> None:
    """Two processes: if either is killed, the other ends all of Ray's processes, some of which would otherwise
    survive."""
    _adopt_orphans()
    own = os.getpid()
    keeper = os.fork()
    if keeper == 0:
        _adopt_orphans()
        # All of Ray's processes are descendants of this one. Its parent-death signal is SIGTERM, no longer SIGKILL.
        signal.signal(signal.SIGTERM, lambda *_: _end())
        die_with_parent(own, signal.SIGTERM)
        _run_nodes(directory)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.kill(keeper, signal.SIGTERM))
    _, status = os.waitpid(keeper, 0)
    end_descendants()
    os._exit(0 if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0 else 1)


def _run_nodes(directory: Path) -> None:
    """Start the nodes and run them until SIGTERM."""
    from ray.cluster_utils import Cluster

    cluster, raylets = Cluster(), dict[str, Any]()
    modified = _start_new_nodes(cluster, directory, raylets)
    cluster.wait_for_nodes()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _end())  # in place of Ray's handlers, which drain node after node
    print(f"ready {cluster.address}", flush=True)
    while True:
        threading.Event().wait(POLL_INTERVAL_S)
        if (directory / NODES).stat().st_mtime_ns != modified:
            modified = _start_new_nodes(cluster, directory, raylets)
        for process in raylets.values():
            process.poll()


def _end() -> NoReturn:
    end_descendants()
    os._exit(0)  # Ray's own shutdown would look for processes that are gone


def _start_new_nodes(cluster: Any, directory: Path, raylets: dict[str, Any]) -> int:
    """Start the nodes of the file that have not been started; the file's time of modification."""
    changed = (directory / NODES).stat().st_mtime_ns
    config = json.loads((directory / NODES).read_text())
    for node in config["nodes"]:
        if node["name"] not in raylets:
            started = cluster.add_node(**_node_arguments(node, None if raylets else config))
            raylets[node["name"]] = started.all_processes["raylet"][0].process
    write_json(directory / RAYLETS, {name: process.pid for name, process in raylets.items()})
    return changed


def write_json(path: Path, value: Any) -> None:
    """Atomic: a concurrent reader sees the old text or the new one."""
    temporary_path = path.with_suffix(".new")
    temporary_path.write_text(json.dumps(value, indent=2) + "\n")
    temporary_path.rename(path)


def node_entry(node: Node) -> dict[str, Any]:
    return {"name": node.id, "labels": dict(node.labels), "total": dict(node.total)}


def _adopt_orphans() -> None:
    """Descendants whose parents die become children of this process."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants() -> None:
    """Kill every descendant, including processes orphaned by that; returns when all are reaped."""
    _adopt_orphans()
    while found := _descendants(os.getpid()):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        threading.Event().wait(0.02)


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        child_pids = children.get(queue.pop(), [])
        found += child_pids
        queue += child_pids
    return found


def _node_arguments(node: Mapping[str, Any], head: Mapping[str, Any] | None) -> dict[str, Any]:
    total = dict(node["total"])
    arguments: dict[str, Any] = {
        "node_name": node["name"],
        "labels": node["labels"],
        "num_cpus": int(total.pop("CPU", 0)),
        "num_gpus": int(total.pop("GPU", 0)),
        "resources": total,
        "object_store_memory": STORE_BYTES,
        "wait": head is not None,
    }
    if head is not None:
        if head["port"]:
            arguments["gcs_server_port"] = head["port"]
        arguments |= {
            "_system_config": dict(head["system"]),
            "include_dashboard": False,
            "dashboard_agent_listen_port": 0,
        }
    return arguments


if __name__ == "__main__":
    main(Path(sys.argv[1]))
