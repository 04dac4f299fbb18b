"""Moves of one kind that can be made at once, as arrays of ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvist.core.moves import BlockMoves, Move
from kvist.errors import ArgumentError
from kvist.memory.copies import Copies, batched
from kvist.memory.layout import BlockLayout
from kvist.memory.transfers.devices import DEMOTE, LOCAL, PROMOTE
from kvist.memory.transfers.jobs import Ids

__all__ = ["STREAMS", "Order", "Places"]

STREAMS = {("host", "device"): PROMOTE, ("device", "host"): DEMOTE, ("device", "device"): LOCAL}
"""The stream that copies go to, by the tiers between which they are."""


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Blocks of one group to be copied from a tier to another, all read before any is written.

    The first `num_tokens` of each block are copied; or, where that is None, one token from `offsets[0][i]` to
    `offsets[1][i]` of the blocks.
    """

    group: int
    num_tokens: int | None
    source_tier: str
    destination_tier: str
    sources: Ids
    destinations: Ids
    offsets: tuple[Ids, Ids] | None = None

    def part(self, chosen: NDArray[np.bool_]) -> Order:
        """Return those that are chosen, bool `[n]`."""
        offsets = None if self.offsets is None else (self.offsets[0][chosen], self.offsets[1][chosen])
        return replace(self, sources=self.sources[chosen], destinations=self.destinations[chosen], offsets=offsets)

    @property
    def emptied(self) -> Ids:
        """Blocks that hold nothing if this fails: not those inside which tokens change places, as they still may."""
        if self.offsets is None:
            return self.destinations
        emptied: Ids = self.destinations[self.sources != self.destinations]
        return emptied

    @property
    def overlaps(self) -> bool:
        """Whether some block is both read and written."""
        return self.source_tier == self.destination_tier and bool(np.isin(self.sources, self.destinations).any())

    @property
    def moves(self) -> list[Move]:
        """List what is copied as single moves."""
        num_tokens = 1 if self.num_tokens is None else self.num_tokens
        kind: tuple[int, int, str, str] = (num_tokens, self.group, self.source_tier, self.destination_tier)
        blocks = zip(self.sources.tolist(), self.destinations.tolist(), strict=True)
        if self.offsets is None:
            return [Move(source, destination, *kind) for source, destination in blocks]
        offsets = zip(self.offsets[0].tolist(), self.offsets[1].tolist(), strict=True)
        return [Move(s, d, *kind, *places) for (s, d), places in zip(blocks, offsets, strict=True)]


class Places:
    """Which blocks there are, by tier and group, and what moves between them come to.

    `planes` and `pool_of` are those of `TransferManager`.
    """

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        planes: Mapping[str, Sequence[Sequence[Tensor]]],
        pool_of: Mapping[str, Sequence[int]],
    ) -> None:
        self.block_size = layouts[0].block_size
        self.pool_of = {tier: list(pool_of[tier]) for tier in planes}
        self._moves_whole = [layout.moves_whole for layout in layouts]
        self._has_states = [any(plane.name.startswith("state") for plane in layout.planes) for layout in layouts]
        self._num_blocks = {tier: [len(group[0]) if group else 0 for group in planes[tier]] for tier in planes}

    def pool_num_blocks(self) -> dict[str, list[int]]:
        """Return how many blocks each pool has, by tier."""
        return {
            tier: [
                max((count for count, own in zip(self._num_blocks[tier], pools, strict=True) if own == pool), default=0)
                for pool in range(max(pools) + 1)
            ]
            for tier, pools in self.pool_of.items()
        }

    def orders(self, moves: Sequence[Move | BlockMoves]) -> list[Order]:
        """Return orders that give, one after the other, what the moves give one by one.

        What only moves whole does so. Raises `ArgumentError` for a move of what is not there.
        """
        for move in moves:
            self._check(move)
        return [
            order
            for kind, run in groupby(map(self._widened, moves), type)
            for order in self._orders_of_kind(list(run))
            if len(order.sources) and order.num_tokens != 0
        ]

    def _orders_of_kind(self, run: Sequence[Move | BlockMoves]) -> Iterator[Order]:
        yield from (_of_blocks(move) for move in run if isinstance(move, BlockMoves))
        single = [move for move in run if isinstance(move, Move)]
        yield from (_of_copies(copies, self.block_size) for copies in batched(single, self.pool_of, self.block_size))

    def _widened(self, move: Move | BlockMoves) -> Move | BlockMoves:
        """Return the move of the whole block where no part of one is moved; single tokens still change places."""
        is_part = move.num_tokens and not any(_offsets(move))
        return replace(move, num_tokens=self.block_size) if is_part and self._moves_whole[move.group] else move

    def _check(self, move: Move | BlockMoves) -> None:
        tiers = move.source_tier, move.destination_tier
        if tiers not in STREAMS or not all(tier in self._num_blocks for tier in tiers):
            raise ArgumentError(f"{move} goes from {tiers[0]} to {tiers[1]}; tiers here are {list(self._num_blocks)}")
        if not 0 <= move.group < len(self._moves_whole):
            raise ArgumentError(f"{move} names group {move.group}, but there are {len(self._moves_whole)} groups")
        blocks = ([move.source], [move.destination]) if isinstance(move, Move) else (move.sources, move.destinations)
        for tier, named in zip(tiers, blocks, strict=True):
            ids = np.asarray(named)
            num_blocks = self._num_blocks[tier][move.group]
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < num_blocks:
                raise ArgumentError(
                    f"{move} names block {ids.min() if ids.min() < 0 else ids.max()} of {tier}, "
                    f"where group {move.group} has blocks 0 to {num_blocks - 1}"
                )
        self._check_tokens(move)

    def _check_tokens(self, move: Move | BlockMoves) -> None:
        offsets = _offsets(move)
        if min(*offsets, move.num_tokens) < 0 or max(offsets) + move.num_tokens > self.block_size:
            raise ArgumentError(
                f"{move} copies {move.num_tokens} tokens from {offsets[0]} to {offsets[1]}, "
                f"but blocks are of {self.block_size}"
            )
        if any(offsets) and self._has_states[move.group]:
            raise ArgumentError(f"{move} copies single tokens, but group {move.group} keeps states, which have none")


def _offsets(move: Move | BlockMoves) -> tuple[int, int]:
    return (move.source_offset, move.destination_offset) if isinstance(move, Move) else (0, 0)


def _of_blocks(several: BlockMoves) -> Order:
    sources, destinations = several.sources.astype(np.int64), several.destinations.astype(np.int64)
    tiers = several.source_tier, several.destination_tier
    return Order(several.group, several.num_tokens, *tiers, sources, destinations)


def _of_copies(copies: Copies, block_size: int) -> Order:
    ids = np.array([copies.sources, copies.destinations], np.int64)
    tiers = copies.source_tier, copies.destination_tier
    if copies.num_tokens is not None:
        return Order(copies.group, copies.num_tokens, *tiers, ids[0], ids[1])
    blocks, offsets = ids // block_size, ids % block_size
    return Order(copies.group, None, *tiers, blocks[0], blocks[1], (offsets[0], offsets[1]))
