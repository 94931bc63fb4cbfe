"""What every process of a rendered Ray cluster has in its environment."""

from __future__ import annotations

from rollart.adapters.clusters.ray_cluster import health_settings

__all__ = ["PORT", "TOKEN", "health_environment"]

PORT = 6379
"""Of the head's control store, Ray's own."""

HEALTH_S = 3.0
"""A node is lost after so much silence. Ray's own settings take 18 s, in which every trajectory there stands."""

TOKEN = {"RAY_AUTH_MODE": "token"}
"""Nobody without the token can talk to the cluster: whoever can, can run code on it."""


def health_environment() -> dict[str, str]:
    """Ray reads each of its settings from a variable of its own; these matter to the head."""
    return {f"RAY_{name}": str(value) for name, value in health_settings(HEALTH_S).items()}
