"""Which moves may be made at once: batches that, one after the other, give what the moves give one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvist.core.moves import Move

__all__ = ["Copies", "batched"]

_Block = tuple[str, int, int]
"""A block's tier, its pool there, and its id in that."""
_Kind = tuple[int, int | None, str, str]
"""What copies that are made together have in common: group, tokens, tiers."""


@dataclass(slots=True)
class Copies:
    """Copies of one group from a tier to another, or within it, all read before any is written.

    They are of the first `num_tokens` rows of blocks, which are given by id; or, where that is None, of single rows,
    given by slot.
    """

    group: int
    num_tokens: int | None
    source_tier: str = "device"
    destination_tier: str = "device"
    sources: list[int] = field(default_factory=list)
    destinations: list[int] = field(default_factory=list)

    def add(self, move: Move, block_size: int) -> None:
        """Take in a move of this kind."""
        if self.num_tokens is not None:
            self.sources.append(move.source)
            self.destinations.append(move.destination)
            return
        source = move.source * block_size + move.source_offset
        destination = move.destination * block_size + move.destination_offset
        self.sources += range(source, source + move.num_tokens)
        self.destinations += range(destination, destination + move.num_tokens)


class _Batch:
    """Copies that may be made one after the other in any case, and which rows they read and write."""

    def __init__(self, pool_of: Sequence[int] | Mapping[str, Sequence[int]], block_size: int) -> None:
        self.copies: dict[_Kind, Copies] = {}
        self._pool_of = pool_of
        self._block_size = block_size
        self._read: dict[_Block, list[tuple[range, Copies]]] = {}
        self._written: dict[_Block, list[tuple[range, Copies]]] = {}

    def add(self, move: Move) -> bool:
        """Take the move in and return True, unless it has to wait for what is here.

        It has to where it reads or writes rows that are written here, and where it writes rows that are read here,
        other than by the copies that it would be made with: those read first.
        """
        num_tokens = None if move.source_offset or move.destination_offset else move.num_tokens
        kind = move.group, num_tokens, move.source_tier, move.destination_tier
        copies = self.copies.get(kind) or Copies(*kind)
        source = self._block(move.source_tier, move.group, move.source)
        destination = self._block(move.destination_tier, move.group, move.destination)
        reads = range(move.source_offset, move.source_offset + move.num_tokens)
        writes = range(move.destination_offset, move.destination_offset + move.num_tokens)
        if (
            ((written := self._written.get(source)) and _meet(reads, written))
            or ((written := self._written.get(destination)) and _meet(writes, written))
            or ((read := self._read.get(destination)) and _meet(writes, read, but=copies))
        ):
            return False
        copies.add(move, self._block_size)
        self.copies[kind] = copies
        self._read.setdefault(source, []).append((reads, copies))
        self._written.setdefault(destination, []).append((writes, copies))
        return True

    def _block(self, tier: str, group: int, block: int) -> _Block:
        pools = self._pool_of[tier] if isinstance(self._pool_of, Mapping) else self._pool_of
        return tier, pools[group], block


def batched(
    moves: Sequence[Move], pool_of: Sequence[int] | Mapping[str, Sequence[int]], block_size: int
) -> Iterator[Copies]:
    """Yield copies that give, one after the other, what the moves give one by one.

    `pool_of` is by group, or by tier and group where tiers differ in it. Equal ids of two tiers are two blocks.

    Accepted drafts of a tree move forward past each other, and yet they are one batch:

    >>> moves = [Move(7, 7, 1, source_offset=2, destination_offset=1), Move(8, 7, 1, destination_offset=2)]
    >>> [(copies.sources, copies.destinations) for copies in batched(moves, [0], block_size=4)]
    [([30, 32], [29, 30])]
    """
    batch = _Batch(pool_of, block_size)
    for move in moves:
        if not batch.add(move):
            yield from batch.copies.values()
            batch = _Batch(pool_of, block_size)
            batch.add(move)
    yield from batch.copies.values()


def _meet(rows: range, others: Sequence[tuple[range, Copies]], but: Copies | None = None) -> bool:
    return any(rows.start < other.stop and other.start < rows.stop and copies is not but for other, copies in others)
