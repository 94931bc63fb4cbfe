"""The composition root: from a resolved spec to a running control plane. Only here are concrete adapters named."""

from rollart.compose.launch import launch

__all__ = ["launch"]
