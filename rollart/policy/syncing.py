"""A synchronous weight update: which engines need the version, while all of them are suspended.

suspend -> update -> resume. In-flight requests survive (pause mode KEEP) and the engine recomputes their KV (I5).
Engines that are down are skipped: they load the current version when they come back.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["engines_to_update"]


def engines_to_update(versions: Mapping[str, int], healthy: Mapping[str, bool], target: int) -> tuple[str, ...]:
    """Healthy engines below `target`, in id order. ValueError if an engine is past it already: versions never
    decrease."""
    ahead = [e for e, v in versions.items() if v > target]
    if ahead:
        raise ValueError(f"engines {sorted(ahead)} are past version {target}")
    return tuple(sorted(e for e, v in versions.items() if v < target and healthy.get(e, False)))
