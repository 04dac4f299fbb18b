"""A hit rate over cache sizes, and what can be read off it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvist.errors import ArgumentError
from kvist.lab.curves.references import References

__all__ = ["Curve", "Knee", "as_sizes", "knee", "regret", "sizes_for"]


@dataclass(frozen=True, slots=True)
class Curve:
    """The share of block references that hit, 0 to 1, by the number of blocks in the cache.

    `num_blocks`, int64 `[n]`, rises; `hit_rate`, float64 `[n]`, never falls for "lru" and "optimal". `error`, `[n]`, of
    a sampled curve is half the width of a 95 % interval.
    """

    name: str
    num_blocks: NDArray[np.int64]
    hit_rate: NDArray[np.float64]
    error: NDArray[np.float64] | None = None

    def at(self, num_blocks: ArrayLike) -> NDArray[np.float64]:
        """Return the hit rate at sizes: that of the largest size of the curve which is no larger, 0 below the first.

        That is exact for a curve which has every size where it changes, as `lru_curve` without sizes.

        >>> Curve("lru", np.array([2, 5]), np.array([0.25, 0.5])).at([1, 2, 4, 5, 100]).tolist()
        [0.0, 0.25, 0.25, 0.5, 0.5]
        """
        places = np.searchsorted(self.num_blocks, np.asarray(num_blocks), side="right")
        rates: NDArray[np.float64] = np.concatenate([np.zeros(1), self.hit_rate])[places]
        return rates

    def thinned(self, max_points: int = 256) -> Curve:
        """Return the curve at no more than so many of its sizes, about evenly spaced on a logarithmic axis."""
        n = len(self.num_blocks)
        if n <= max_points:
            return self
        targets = np.geomspace(max(int(self.num_blocks[0]), 1), int(self.num_blocks[-1]), max_points)
        kept = np.unique(np.append(np.searchsorted(self.num_blocks, targets[:-1]), n - 1))
        error = None if self.error is None else self.error[kept]
        return Curve(self.name, self.num_blocks[kept], self.hit_rate[kept], error)


@dataclass(frozen=True, slots=True)
class Knee:
    """The size beyond which more blocks bring less than the average so far, and the hit rate there."""

    num_blocks: int
    hit_rate: float


def knee(curve: Curve) -> Knee | None:
    """Find the knee of a curve: where it is farthest above the line from nothing to the least size with all it reaches.

    This is Kneedle's definition for a whole, noiseless curve (Satopaa, Albrecht, Irwin and Raghavan, "Finding a
    'Kneedle' in a Haystack", ICDCS Workshops 2011): size and hit rate are scaled to 0 .. 1, and rate - size is largest.
    None for a curve that never hits.

    >>> knee(Curve("lru", np.array([1, 2, 4, 10]), np.array([0.1, 0.4, 0.45, 0.5])))
    Knee(num_blocks=2, hit_rate=0.4)
    """
    top = float(curve.hit_rate.max(initial=0.0))
    if not top:
        return None
    full = float(curve.num_blocks[int(np.argmax(curve.hit_rate >= top))])
    at = int(np.argmax(curve.hit_rate / top - curve.num_blocks / full))
    return Knee(int(curve.num_blocks[at]), float(curve.hit_rate[at]))


def regret(curve: Curve, optimal: Curve) -> NDArray[np.float64]:
    """Return how far a curve stays below the optimal one at its sizes, as a share of all references, `[n]`.

    Raises ArgumentError unless the optimal curve has all these sizes: between them it is not known.
    """
    places = np.searchsorted(optimal.num_blocks, curve.num_blocks)
    there = places < len(optimal.num_blocks)
    there[there] = optimal.num_blocks[places[there]] == curve.num_blocks[there]
    if not there.all():
        lacking = curve.num_blocks[~there]
        raise ArgumentError(f"regret: the optimal curve is not known at {lacking[:5].tolist()} blocks; ask for these")
    difference: NDArray[np.float64] = optimal.hit_rate[places] - curve.hit_rate
    return difference


def sizes_for(references: References, num_sizes: int = 64) -> NDArray[np.int64]:
    """Return about so many sizes to look at, evenly spaced on a logarithmic axis, up to where every block fits.

    Of a sample, that is estimated from the blocks that were drawn.
    """
    largest = max(round(references.num_unique / references.rate), 1)
    return np.unique(np.geomspace(1, largest, num_sizes).round().astype(np.int64))


def as_sizes(sizes: ArrayLike) -> NDArray[np.int64]:
    """Return sizes in rising order, each once; raises ArgumentError for what are no positive ints."""
    given = np.asarray(sizes)
    if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer) or (given < 1).any():
        raise ArgumentError(f"sizes is {sizes!r}, must be positive ints")
    return np.unique(given.astype(np.int64))
