"""LRU at every size in one pass: how deep in the stack of recently used blocks each reference finds its block."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvist.lab.curves.curve import Curve, as_sizes
from kvist.lab.curves.references import References

__all__ = ["NEVER", "lru_curve", "previous_touches", "stack_distances"]

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
    distances = np.sort(stack_distances(references))
    distances = distances[np.searchsorted(distances, 1) :]
    wanted = np.unique(distances) if sizes is None else as_sizes(sizes)
    num_hits = np.searchsorted(distances, wanted, side="right")
    return Curve("lru", wanted, num_hits / max(references.num_references, 1))


def stack_distances(references: References) -> NDArray[np.int64]:
    """Return the least number of blocks with which LRU has each block when it is looked up, int64 `[num_references]`.

    0 for a block's first reference. It is the block's place in the stack of recently used ones (Mattson, Gecsei, Slutz
    and Traiger, IBM Systems Journal 1970) when its request arrives: the different blocks touched since its own last
    touch, itself included. Those are the touches since then, less those that touch again what was touched since then;
    the latter are counted for all references together (see `num_greater_before`), in O(n log n).

    >>> stack_distances(References(np.array([0, 1, 0, 2, 0, 1]), np.array([0, 2, 4, 6]), block_size=16)).tolist()
    [0, 0, 1, 0, 1, 3]
    """
    previous, places, arrivals = previous_touches(references)
    again = np.flatnonzero(previous >= 0)
    last = previous[again]
    is_last = np.zeros(references.num_references + 1, np.int64)
    is_last[last] = 1
    num_repeated = num_greater_before((np.cumsum(is_last) - 1)[last])
    distances = np.full(references.num_references, NEVER, np.int64)
    distances[again] = arrivals[again] - last - num_repeated
    return distances[places]


def previous_touches(
    references: References,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Put touches in their order, each request's deepest block first, and find the one before of the same block.

    Returns, by touch, the touch before (-1 for a first one); by reference, its touch; by touch, the number of touches
    before its request.
    """
    counts = np.diff(references.starts)
    arrivals = np.repeat(references.starts[:-1], counts)
    places = arrivals + np.repeat(references.starts[1:], counts) - 1 - np.arange(references.num_references)
    touched = references.ids[places]  # reversing a request twice gives it back, so this is its own inverse
    order = np.argsort(touched, kind="stable")
    is_same = touched[order[1:]] == touched[order[:-1]]
    previous = np.full(references.num_references, -1, np.int64)
    previous[order[1:][is_same]] = order[:-1][is_same]
    return previous, places, arrivals


def num_greater_before(ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count, for each number of a permutation of 0 .. n-1, the greater ones before it.

    The numbers are sorted by their bits from the highest down, each time keeping the order of those that agree. When
    one with a 0 and an earlier one with a 1 part, the latter is greater; each pair parts once.

    >>> num_greater_before(np.array([2, 0, 3, 1])).tolist()
    [0, 1, 0, 2]
    """
    values, indices = ranks.copy(), np.arange(len(ranks))
    counts = np.zeros(len(ranks), np.int64)
    for bit in reversed(range(max(len(ranks) - 1, 0).bit_length())):
        ones = (values >> bit) & 1
        firsts = values >> (bit + 1) << (bit + 1)  # where those that agree so far begin: all smaller ones come before
        num_ones = np.cumsum(ones) - ones
        num_ones -= num_ones[firsts]
        is_zero = ones == 0
        counts += np.where(is_zero, num_ones, 0)
        places = np.where(is_zero, indices - num_ones, firsts + (1 << bit) + num_ones)
        values, counts = _scattered(values, places), _scattered(counts, places)
    return counts[ranks]


def _scattered(values: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    moved = np.empty_like(values)
    moved[places] = values
    return moved
