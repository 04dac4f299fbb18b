"""LRU curves of traces that are too big, from a sample of their blocks, with what they may be off by."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvist.lab.curves.curve import Curve, as_sizes, sizes_for
from kvist.lab.curves.distances import num_at_distance
from kvist.lab.curves.keys import mixed
from kvist.lab.curves.references import References

__all__ = ["curve_of_sample", "sampled_curve"]

NUM_PARTS = 8
T_95 = 2.365
"""Student's t for 95 %, two-sided, with 7 degrees of freedom."""


def sampled_curve(references: References, rate: float, seed: int = 0, sizes: ArrayLike | None = None) -> Curve:
    """Estimate the hit rate of LRU from about `rate` of the blocks; for what that means, see `curve_of_sample`.

    A trace too big for memory is sampled while it is read: `curve_of_sample(references_of(trace, rate=0.01))`.

    Raises ArgumentError for a rate outside 0 .. 1.
    """
    return curve_of_sample(references.sampled(rate, seed), sizes)


def curve_of_sample(sample: References, sizes: ArrayLike | None = None) -> Curve:
    """Estimate the hit rate of LRU in a trace from a sample of its blocks, by SHARDS (Waldspurger et al., FAST 2015).

    A block is in the sample, with all its references, if its hash says so; the hash is of the block's identity, which
    includes all blocks before it. A prefix is not drawn as a whole: where all prompts share a root that would be all or
    nothing. It need not be, since under LRU a block that is there can be hit (see `lru_curve`), so each block tells its
    own distance: `rate` of the blocks touched since its last use are in the sample, and a distance found there is
    divided by `rate`. How far the number of references in the sample is from `rate` of all, for a few blocks are in
    every prompt, is put down to hits at the least distance (SHARDS_adj there).

    `error` is half the width of a 95 % interval, from the spread of 8 estimates of an eighth of the sample each. Sizes
    below 1 / rate say little.
    """
    wanted = sizes_for(sample) if sizes is None else as_sizes(sizes)
    parts = mixed(sample.ids.astype(np.uint64) + np.uint64(1)) % np.uint64(NUM_PARTS)
    each = [_hit_rate(sample.only(parts == part, sample.rate / NUM_PARTS), wanted) for part in range(NUM_PARTS)]
    error = T_95 * np.std(each, axis=0, ddof=1) / np.sqrt(NUM_PARTS)
    return Curve("lru, sampled", wanted, _hit_rate(sample, wanted), error)


def _hit_rate(sample: References, sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the hit rate estimated at each size, `[n]`."""
    expected = sample.num_in_trace * sample.rate
    if not expected:
        return np.zeros(len(sizes))
    hits = np.cumsum(num_at_distance(sample))
    num_hits = hits[np.minimum((sizes * sample.rate).astype(np.int64), len(hits) - 1)]
    estimate: NDArray[np.float64] = np.clip((num_hits + expected - sample.num_references) / expected, 0.0, 1.0)
    return estimate
