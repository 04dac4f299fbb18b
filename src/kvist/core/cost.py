"""The policy `cost`: what would be dear to compute again, and is likely to be used again, stays longest."""

from __future__ import annotations

from bisect import bisect_left

from kvist.core.eviction import TICK_BITS, Candidates, EvictionQueue
from kvist.core.extents import Extent, Twins

__all__ = ["AgingCost", "CostQueue", "recompute_cost"]

LINEAR_TOKENS = 24_576
"""The position at which attending to what came before costs a token as much as all the rest of a layer.

With d the width of a model, a layer has about 12 d^2 weights (4 d^2 in the projections of attention, 8 d^2 in the
feed-forward part), so a token takes 24 d^2 FLOPs; attending to t tokens takes it 4 d t (a product and a sum each for
scores and values). These are equal at t = 6 d: 24,576 for d = 4,096. Only the order of victims depends on it.
"""
MAX_MARKS = 256
"""Points of the past of the clock that are kept."""


def recompute_cost(extent: Extent) -> int:
    """Return what the last token of an extent costs to compute, in units of attending to one token.

    Blocks of a group have equal bytes and go from the tail, so this is the cost per byte of what would go first: 32,768
    tokens from the start of a prefix it is 2.3 times that at the start.
    """
    before = extent.parent
    num_tokens_before = extent.start * (before.num_tokens // before.num_blocks) if extent.start and before else 0
    return LINEAR_TOKENS + num_tokens_before + extent.num_tokens


class AgingCost:
    """Recompute cost times likelihood of use, on top of a clock that rises with what is evicted.

    This is GreedyDual-Size with frequency (Cherkasova, 1998), H = L + uses * cost / size, where L is the H of what was
    evicted last: H tells how much worth of others the cache gives up before it gives up this, unless it is used again.
    Two things differ. The uses count by their logarithm, 1 + floor(log2(1 + hits)), since every turn of a conversation
    hits all that came before it, and the tenth says less about the next than the first. And L is that of the last use,
    not of the offer, since what is offered because its last child went has not been used. Of the past of L at most
    `MAX_MARKS` points are kept, the distant ones farther apart; between them it counts as less than it was.
    """

    __slots__ = ("_clocks", "_newest_use", "_ticks")

    def __init__(self) -> None:
        self._newest_use = 0
        self._ticks: list[int] = []
        self._clocks: list[int] = []

    def __call__(self, extent: Extent) -> int:
        """Return H above the tick of the last use, so that among equals the least recently used goes first."""
        last_use = extent.last_use
        self._newest_use = max(self._newest_use, last_use)
        index = bisect_left(self._ticks, last_use)
        clock = self._clocks[index - 1] if index else 0
        uses = (extent.hits + 1).bit_length()
        return ((clock + uses * recompute_cost(extent)) << TICK_BITS) + last_use

    def copy_from(self, other: AgingCost) -> None:
        """Have the same past."""
        self._newest_use = other._newest_use
        self._ticks, self._clocks = list(other._ticks), list(other._clocks)

    @property
    def num_marks(self) -> int:
        """How many points of the clock's past are kept."""
        return len(self._ticks)

    def advance(self, key: int) -> None:
        """Let the clock be no less than the H of a victim's key, from now on."""
        clock = key >> TICK_BITS
        if self._clocks and clock <= self._clocks[-1]:
            return
        if self._ticks and self._ticks[-1] == self._newest_use:
            self._clocks[-1] = clock
            return
        self._ticks.append(self._newest_use)
        self._clocks.append(clock)
        if len(self._ticks) > MAX_MARKS:
            del self._ticks[1 : MAX_MARKS // 2 : 2]
            del self._clocks[1 : MAX_MARKS // 2 : 2]


class CostQueue(EvictionQueue):
    """Candidates by `AgingCost`."""

    __slots__ = ("_cost",)

    def __init__(self) -> None:
        self._cost = AgingCost()
        super().__init__(self._cost)

    @property
    def num_entries(self) -> int:
        """Everything kept in memory: candidates, stale entries, and the past of the clock."""
        return super().num_entries + self._cost.num_marks

    def copy_from(self, other: Candidates, twins: Twins) -> None:
        """Have the copies of extents in the order in which another queue of this policy has the originals."""
        assert isinstance(other, CostQueue)
        super().copy_from(other, twins)
        self._cost.copy_from(other._cost)

    def first(self) -> Extent:
        """Return the candidate that goes first; there must be one."""
        key, _, extent = self._first_entry()
        self._cost.advance(key)
        return extent
