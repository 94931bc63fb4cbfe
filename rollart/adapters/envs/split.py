"""A split of seeds into train and evaluation episodes that share no item.

A seed alone does not separate them: two seeds may draw the same word or the same lake. So the split is by the content
of an episode: environments draw from their seed until the item falls on the seed's side of the split.
"""

from __future__ import annotations

import zlib

from rollart.ports import EVAL_SEEDS_FROM

HELD_OUT_ONE_IN = 8
"""One item in eight is held out: enough for 256 distinct evaluation episodes of each quickstart domain."""


def held_out_seed(seed: int) -> bool:
    """True if an episode of this seed is for evaluation."""
    return seed >= EVAL_SEEDS_FROM


def held_out_item(item: str) -> bool:
    """True if an item, written as text, belongs to evaluation. Stable across processes, machines and versions."""
    return zlib.crc32(item.encode()) % HELD_OUT_ONE_IN == 0
