"""What every process of a rendered Ray cluster has in its environment."""

from __future__ import annotations

from rollart.adapters.clusters.ray_cluster import health_settings

__all__ = ["PORT", "TOKEN", "health_environment"]

PORT = 6379
"""Of the head's control store, Ray's own."""

TOKEN = {"RAY_AUTH_MODE": "token"}
"""Nobody without the token can talk to the cluster: whoever can, can run code on it."""


def health_environment(health_s: float) -> dict[str, str]:
    """Ray reads each of its settings from a variable of its own; these matter to the head. A node is lost after
    `health_s` of silence, with Ray's own settings after 18 s."""
    return {f"RAY_{name}": str(value) for name, value in health_settings(health_s).items()}
