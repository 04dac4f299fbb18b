"""The copies that decisions of the core need; whoever holds the bytes performs them, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["BlockMoves", "Move", "one_by_one"]


@dataclass(frozen=True, slots=True)
class Move:
    """Copy `num_tokens` token rows of block `source` into block `destination`, in all layers of `group`.

    The rows copied are those from `source_offset` on, and they go to `destination_offset` on; both are 0 but where
    single tokens change places. A block of a "state" group is one state, copied whole: `num_tokens` is the block size.
    Moves are performed in the order given, before anything that the next forward pass reads or writes.
    """

    source: int
    destination: int
    num_tokens: int
    group: int = 0
    source_tier: str = "device"
    destination_tier: str = "device"
    source_offset: int = 0
    destination_offset: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class BlockMoves:
    """Copy whole blocks of one group from a tier to another: `sources[i]` into `destinations[i]`, int32 `[n]`.

    Stands for n moves of `num_tokens` each, which have all sources and destinations apart.
    """

    sources: NDArray[np.int32]
    destinations: NDArray[np.int32]
    num_tokens: int
    group: int
    source_tier: str
    destination_tier: str

    def __iter__(self) -> Iterator[Move]:
        for source, destination in zip(self.sources.tolist(), self.destinations.tolist(), strict=True):
            yield Move(source, destination, self.num_tokens, self.group, self.source_tier, self.destination_tier)


def one_by_one(orders: Iterable[object]) -> list[Move]:
    """List the single moves among orders, and those that some stand for.

    >>> both = BlockMoves(np.array([1, 2], np.int32), np.array([0, 5], np.int32), 16, 0, "device", "host")
    >>> [(move.source, move.destination) for move in one_by_one([Move(3, 4, 7), both])]
    [(3, 4), (1, 0), (2, 5)]
    """
    moves: list[Move] = []
    for order in orders:
        if isinstance(order, Move):
            moves.append(order)
        elif isinstance(order, BlockMoves):
            moves += order
    return moves
