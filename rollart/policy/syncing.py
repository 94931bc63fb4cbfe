"""The order of a weight update: which engines need the version, and that all of them stand still meanwhile.

suspend -> update -> resume. In-flight requests survive (pause mode KEEP) and their KV is recomputed by the engine
(I5). Engines that are down are skipped: they load the current version when they come back.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["engines_to_update"]


def engines_to_update(versions: Mapping[str, int], healthy: Mapping[str, bool], target: int) -> tuple[str, ...]:
    """Healthy engines below `target`, in id order. ValueError if one is already past it: versions never go back."""
    ahead = [e for e, v in versions.items() if v > target]
    if ahead:
        raise ValueError(f"engines {sorted(ahead)} are past version {target}")
    return tuple(sorted(e for e, v in versions.items() if v < target and healthy.get(e, False)))
