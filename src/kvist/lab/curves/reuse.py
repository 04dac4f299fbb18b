"""Which requests use again what earlier ones used: all that caches with some order of eviction can hit."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvist.lab.curves.references import References

__all__ = ["Reuse", "reuse_of"]


@dataclass(frozen=True, slots=True)
class Reuse:
    """Runs of blocks of a request that the same earlier request was the last to use; int64 `[n]` each.

    Run i has `counts[i]` blocks, which `previous[i]` used last and `requests[i]` uses again, from reference
    `places[i]` on. Runs come by request; of one request, those of the earliest previous one, which are the deepest,
    come first. There are a few to a request, however many blocks it has: who uses a block uses all before it.
    """

    previous: NDArray[np.int64]
    requests: NDArray[np.int64]
    counts: NDArray[np.int64]
    places: NDArray[np.int64]


def reuse_of(references: References) -> Reuse:
    """Find the runs of blocks that requests use again.

    >>> found = reuse_of(References(np.array([0, 1, 2, 0, 3, 0, 1, 2]), np.array([0, 3, 5, 8]), block_size=16))
    >>> list(zip(found.previous.tolist(), found.requests.tolist(), found.counts.tolist()))
    [(0, 1, 1), (0, 2, 2), (1, 2, 1)]
    """
    before, starts = _last_users(references), references.starts
    is_first = np.ones(len(before), bool)
    is_first[1:] = before[1:] != before[:-1]
    is_first[starts[:-1][starts[:-1] < len(before)]] = True
    places = np.flatnonzero(is_first)
    counts = np.diff(places, append=len(before))
    again = before[places] >= 0
    places, counts = places[again], counts[again]
    previous, requests = before[places].astype(np.int64), np.searchsorted(starts, places, side="right") - 1
    order = np.lexsort((previous, requests))
    return Reuse(previous[order], requests[order], counts[order], places[order])


def _last_users(references: References) -> NDArray[np.int32]:
    """Return the request that used each reference's block last, -1 for none, int32 `[num_references]`."""
    last = np.full(references.num_unique, -1, np.int32)
    before = np.empty(references.num_references, np.int32)
    ids = references.ids
    for request, (start, end) in enumerate(pairwise(references.starts.tolist())):
        own = ids[start:end]
        before[start:end] = last[own]
        last[own] = request
    return before
