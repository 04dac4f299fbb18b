"""Which copies a new one has to wait for, by the blocks that it reads and writes; and which blocks hold nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvist.memory.transfers.jobs import Ids

__all__ = ["Blocks", "Hazards"]

_NOBODY = 0
"""No ticket has this number."""


class Blocks:
    """The blocks of one pool of a tier: who last wrote and read them, as numbers of tickets that grow.

    Two tiers may have equal ids, and so may two pools: each has its own. `lost` are blocks whose last write failed or
    was cancelled.
    """

    def __init__(self, num_blocks: int, num_streams: int) -> None:
        self.written: Ids = np.zeros(num_blocks, np.int64)
        self.read: Ids = np.zeros((num_streams, num_blocks), np.int64)
        self.lost: NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)


class Hazards:
    """Who reads and writes which blocks of the pools of all tiers; `num_blocks` by tier and pool.

    A copy waits for the last write of what it reads, and for the last write and all later reads of what it writes. On
    each stream copies follow one another anyhow.
    """

    def __init__(self, num_blocks: Mapping[str, Sequence[int]], streams: Sequence[str]) -> None:
        self._number_of = {stream: number for number, stream in enumerate(streams)}
        self._blocks = {
            (tier, pool): Blocks(count, len(streams))
            for tier, counts in num_blocks.items()
            for pool, count in enumerate(counts)
        }

    def of(self, tier: str, pool: int) -> Blocks:
        """Return the books of one pool."""
        return self._blocks[tier, pool]

    def before(self, source: Blocks, sources: Ids, destination: Blocks, destinations: Ids) -> list[int]:
        """Return the tickets that a copy has to wait for, done or not, in order."""
        tickets = [source.written[sources], destination.written[destinations]]
        tickets += [reads[destinations] for reads in destination.read]
        return _tickets(tickets)

    def writers(self, source: Blocks, sources: Ids) -> list[int]:
        """Return the tickets of the last writes of blocks."""
        return _tickets([source.written[sources]])

    def users(self, blocks: Blocks, ids: Ids) -> list[int]:
        """Return the tickets of the last writes and reads of blocks."""
        return _tickets([blocks.written[ids], *(reads[ids] for reads in blocks.read)])

    def note(
        self, ticket: int, stream: str, source: Blocks, sources: Ids, destination: Blocks, destinations: Ids
    ) -> None:
        """Write down that a ticket reads and writes blocks from now on."""
        source.read[self._number_of[stream], sources] = ticket
        destination.written[destinations] = ticket
        destination.lost[destinations] = False


def _tickets(found: list[Ids]) -> list[int]:
    tickets = np.unique(np.concatenate(found))
    return [int(ticket) for ticket in tickets if ticket != _NOBODY]
