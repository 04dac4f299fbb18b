"""LRU at every size in one pass: how deep in the stack of recently used blocks each reference finds its block."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvist.lab.curves.curve import Curve, as_sizes
from kvist.lab.curves.references import References
from kvist.lab.curves.reuse import Reuse, reuse_of

__all__ = ["NEVER", "lru_curve", "num_at_distance", "stack_distances"]

NEVER = 0
"""The distance of a block that was not referred to before: no size would have it."""


def lru_curve(references: References, sizes: ArrayLike | None = None) -> Curve:
    """Return the exact hit rate of LRU, at some sizes or, without, at every size where it changes.

    A request's blocks are looked up all at once, before any is touched; then they are touched from the deepest to the
    root. So a block is always used later than what follows it in a prompt, what LRU keeps are whole prefixes, and a
    block that is there can be hit. A request longer than the cache leaves its leading blocks there.

    Two prompts share the block 0. With one block in the cache only that hits, with three all but those never seen:

    >>> asked = References(np.array([0, 1, 0, 2, 0, 1]), np.array([0, 2, 4, 6]), block_size=16)
    >>> lru_curve(asked, [1, 2, 3]).hit_rate.round(2).tolist()
    [0.33, 0.33, 0.5]
    """
    counts = num_at_distance(references)
    wanted = np.flatnonzero(counts) if sizes is None else as_sizes(sizes)
    num_hits = np.cumsum(counts)[np.minimum(wanted, len(counts) - 1)]
    return Curve("lru", wanted, num_hits / max(references.num_references, 1))


def stack_distances(references: References) -> NDArray[np.int64]:
    """Return the least number of blocks with which LRU has each block when it is looked up, int64 `[num_references]`.

    0 for a block's first reference. It is the block's place in the stack of recently used ones (Mattson, Gecsei, Slutz
    and Traiger, IBM Systems Journal 1970) when its request arrives.

    >>> stack_distances(References(np.array([0, 1, 0, 2, 0, 1]), np.array([0, 2, 4, 6]), block_size=16)).tolist()
    [0, 0, 1, 0, 1, 3]
    """
    reuse = reuse_of(references)
    distances = np.full(references.num_references, NEVER, np.int64)
    within = np.arange(int(reuse.counts.sum())) - np.repeat(np.cumsum(reuse.counts) - reuse.counts, reuse.counts)
    firsts = np.repeat(_first_distances(references, reuse), reuse.counts)
    distances[np.repeat(reuse.places, reuse.counts) + within] = firsts + within
    return distances


def num_at_distance(references: References) -> NDArray[np.int64]:
    """Return how many references have each distance, 0 and those never seen before left out, `[largest + 1]`."""
    reuse = reuse_of(references)
    firsts = _first_distances(references, reuse)
    size = int((firsts + reuse.counts).max(initial=0)) + 1
    begins, ends = np.bincount(firsts, minlength=size), np.bincount(firsts + reuse.counts, minlength=size)
    return np.cumsum(begins - ends)


def _first_distances(references: References, reuse: Reuse) -> NDArray[np.int64]:
    """Return the distance of the first block of each run, `[n]`; the next ones follow it in the stack, too.

    In the stack before it is what was used since: all blocks of the requests between, less those of runs that go from
    one of these requests to another, which were counted twice.
    """
    ranks = np.empty(len(reuse.previous), np.int64)
    ranks[np.argsort(reuse.previous, kind="stable")] = np.arange(len(reuse.previous))
    between = references.starts[reuse.requests] - references.starts[reuse.previous + 1]
    first: NDArray[np.int64] = between - weight_of_greater_before(ranks, reuse.counts) + 1
    return first


def weight_of_greater_before(ranks: NDArray[np.int64], weights: NDArray[np.int64]) -> NDArray[np.int64]:
    """Add up, for each number of a permutation of 0 .. n-1, the weights of the greater ones before it.

    The numbers are sorted by their bits from the highest down, each time keeping the order of those that agree. When
    one with a 0 and an earlier one with a 1 part, the latter is greater; each pair parts once. So it takes n log n.

    >>> weight_of_greater_before(np.array([2, 0, 3, 1]), np.array([5, 6, 7, 8])).tolist()
    [0, 5, 0, 12]
    """
    values, indices = ranks, np.arange(len(ranks))
    totals = np.zeros(len(ranks), np.int64)
    for bit in reversed(range(max(len(ranks) - 1, 0).bit_length())):
        ones = (values >> bit) & 1
        firsts = values >> (bit + 1) << (bit + 1)  # where those that agree so far begin: all smaller ones come before
        num_ones, heavier = _before(ones, firsts), _before(ones * weights, firsts)
        is_zero = ones == 0
        totals += np.where(is_zero, heavier, 0)
        places = np.where(is_zero, indices - num_ones, firsts + (1 << bit) + num_ones)
        values, weights, totals = (_scattered(each, places) for each in (values, weights, totals))
    return totals[ranks]


def _before(values: NDArray[np.int64], firsts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Add up the values before each one, from where its own begin."""
    sums = np.cumsum(values) - values
    since: NDArray[np.int64] = sums - sums[firsts]
    return since


def _scattered(values: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    moved = np.empty_like(values)
    moved[places] = values
    return moved
