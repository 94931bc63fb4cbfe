"""Nodes of a private Ray cluster that tests kill and add."""

from __future__ import annotations

import json
from pathlib import Path

from rollart.adapters.clusters.ray_cluster import NODES, RAYLETS, node_entry, write_json
from rollart.fleet import Node


def raylet_pid(directory: Path, node: str) -> int:
    """The process id of a node's raylet: killing it is the death of the node."""
    return int(json.loads((directory / RAYLETS).read_text())[node])


def add_node(directory: Path, node: Node) -> None:
    """Add a node to the running cluster; `raylet_pid` knows it once it has joined. One caller at a time."""
    config = json.loads((directory / NODES).read_text())
    config["nodes"].append(node_entry(node))
    write_json(directory / NODES, config)
