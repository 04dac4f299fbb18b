"""The bound that no eviction policy can beat, since none knows the future."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
from numpy.typing import ArrayLike

from kvist.lab.curves.curve import Curve, as_sizes
from kvist.lab.curves.references import References
from kvist.lab.curves.reuse import reuse_of

__all__ = ["optimal_curve"]


def optimal_curve(references: References, sizes: ArrayLike) -> Curve:
    """Return the most hits that a cache of each size could have, every block counting alike.

    After each request the cache keeps, of what it had and of the request's own blocks, those that are used again
    soonest (Belady, IBM Systems Journal 1966); it need not take a block in. Of blocks that are next used by the same
    request, the deepest goes first: so what is kept are whole prefixes, since a prefix is used whenever what follows it
    is. That is the most that can be had: to keep a block from one use to the next takes a place for that time, and of
    such intervals the greedy choice keeps most (Carlisle and Lloyd, Discrete Applied Mathematics 1995).

    Blocks 1 and 2 take turns under block 0. Two blocks can keep 0 and one of the two, LRU hits only 0:

    >>> asked = References(np.array([0, 1, 0, 2, 0, 1, 0, 2]), np.array([0, 2, 4, 6, 8]), block_size=16)
    >>> optimal_curve(asked, [1, 2, 3]).hit_rate.tolist()
    [0.375, 0.5, 0.625]
    """
    wanted = as_sizes(sizes)
    reuse = reuse_of(references)
    order = np.argsort(reuse.previous, kind="stable")
    spans = list(zip(*(each[order].tolist() for each in (reuse.previous, reuse.requests, reuse.counts)), strict=True))
    hits = [_num_kept(spans, references.num_requests, size) for size in wanted.tolist()]
    return Curve("optimal", wanted, np.array(hits, np.float64) / max(references.num_references, 1))


def _num_kept(spans: list[tuple[int, int, int]], num_requests: int, num_blocks: int) -> int:
    """Count the blocks that reach their next use, with room for `num_blocks` between any two requests.

    `spans` are (a request, the next one, how many blocks go from one to the other), by the first.
    """
    kept = [0] * num_requests  # by the request that uses them next
    latest: list[int] = []  # these requests, the last first
    num_held = num_hits = now = 0
    for first, second, count in spans:
        while now < first:
            now += 1
            num_hits += kept[now]
            num_held -= kept[now]
            kept[now] = 0
        if not kept[second]:
            heappush(latest, -second)
        kept[second] += count
        num_held += count
        while num_held > num_blocks:
            last = -latest[0]
            num_going = min(kept[last], num_held - num_blocks)
            kept[last] -= num_going
            num_held -= num_going
            if not kept[last]:
                heappop(latest)
    return num_hits + sum(kept)
