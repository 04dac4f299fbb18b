"""How long blocks wait until they are used again: reuse distances, in a few classes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvist.lab.curves import References
from kvist.lab.curves.distances import num_at_distance

__all__ = ["ReuseClass", "reuse_classes"]


@dataclass(frozen=True, slots=True)
class ReuseClass:
    """References whose block was used before, `above` to `up_to` other blocks ago; None for a block's first use.

    `share` is of all references.
    """

    above: int
    up_to: int | None
    num_references: int
    share: float


def reuse_classes(references: References) -> list[ReuseClass]:
    """Count references by reuse distance, in powers of two; the last class is that of first uses.

    The distance is the least number of blocks with which LRU has the block (see `stack_distances`), so classes up to a
    size add up to the hit rate of that size. Of a sample, distances and counts are estimates for the whole trace.

    >>> asked = References(np.array([0, 1, 0, 2, 0, 1]), np.array([0, 2, 4, 6]), block_size=16)
    >>> [(each.up_to, each.num_references) for each in reuse_classes(asked)]
    [(1, 2), (2, 0), (4, 1), (None, 3)]
    """
    at_distance = num_at_distance(references)
    distances = np.flatnonzero(at_distance)
    estimated = distances / references.rate
    largest = max(int(np.ceil(np.log2(estimated.max(initial=1.0)))), 0)
    bounds = 2 ** np.arange(largest + 1, dtype=np.int64)
    places = np.searchsorted(bounds, estimated, side="left")
    counts = np.bincount(places, weights=at_distance[distances], minlength=len(bounds))
    num_first = references.num_references - int(at_distance.sum())
    scaled = [round(float(count) / references.rate) for count in (*counts, num_first)]
    total = max(sum(scaled), 1)
    edges = [0, *bounds.tolist()]
    classes = [
        ReuseClass(above, up_to, count, count / total)
        for above, up_to, count in zip(edges, edges[1:], scaled, strict=False)
    ]
    return [*classes, ReuseClass(edges[-1], None, scaled[-1], scaled[-1] / total)]
