"""Chance from a seed: the same numbers in any process, and with any version of NumPy.

Only `random.Random.random` is drawn from, whose numbers Python promises to keep; distributions are their quantiles.
"""

from __future__ import annotations

from bisect import bisect
from functools import lru_cache
from itertools import accumulate
from math import exp, floor, log, log1p
from random import Random
from statistics import NormalDist

__all__ = ["Draw"]

NORMAL = NormalDist()


class Draw:
    """Numbers of one name: equal names give equal numbers.

    >>> Draw(7, "chat", 3).exponential(2.0) == Draw(7, "chat", 3).exponential(2.0)
    True
    """

    def __init__(self, *name: str | int) -> None:
        self._random = Random("/".join(map(str, name)))

    def uniform(self) -> float:
        """Draw from 0 to 1, without 0 and 1."""
        return (floor(self._random.random() * 2**52) + 0.5) / 2**52

    def exponential(self, mean: float) -> float:
        """Draw a time between events that know nothing of each other."""
        return -mean * log1p(-self.uniform())

    def geometric(self, mean: float) -> int:
        """Draw how often something is tried until it is the last time, 1 or more, on average `mean`."""
        return 1 if mean <= 1 else 1 + floor(log1p(-self.uniform()) / log1p(-1 / mean))

    def length(self, mean: float, spread: float) -> int:
        """Draw a number of tokens, 1 or more, log-normal with this mean; `spread` is the deviation of its logarithm."""
        return max(1, round(exp(log(mean) - spread**2 / 2 + spread * NORMAL.inv_cdf(self.uniform()))))

    def zipf(self, num_items: int, exponent: float) -> int:
        """Draw one of 0 .. num_items-1; item k has weight 1 / (k + 1) ** exponent."""
        weights = _cumulative(num_items, exponent)
        return min(bisect(weights, self.uniform() * weights[-1]), num_items - 1)

    def choice(self, weights: tuple[float, ...]) -> int:
        """Draw an index, with these weights."""
        sums = list(accumulate(weights))
        return min(bisect(sums, self.uniform() * sums[-1]), len(weights) - 1)

    def identity(self) -> int:
        """Draw a number of 52 bits that nothing else has."""
        return floor(self.uniform() * 2**52)


@lru_cache(16)
def _cumulative(num_items: int, exponent: float) -> list[float]:
    return list(accumulate((each + 1) ** -exponent for each in range(num_items)))
