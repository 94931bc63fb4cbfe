"""Environment variables of every process in a rendered Ray cluster."""

from __future__ import annotations

from rollart.adapters.clusters.ray_cluster import health_settings

__all__ = ["PORT", "TOKEN", "health_environment"]

PORT = 6379
"""Port of the head's control store (Ray's default)."""

TOKEN = {"RAY_AUTH_MODE": "token"}
"""Only processes with the token can connect to the cluster, since any connection can run code on it."""


def health_environment(health_s: float) -> dict[str, str]:
    """Ray reads each of its settings from its own variable; these affect the head. A node is lost after `health_s` of
    silence; with Ray's defaults after 18 s."""
    return {f"RAY_{name}": str(value) for name, value in health_settings(health_s).items()}
