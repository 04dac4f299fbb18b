"""What stores are to keep: blocks when they are committed or evicted, each with a key that says what it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvist.core.chain import Chain
from kvist.core.extents import Blocks, Extent, Root
from kvist.core.moves import BlockMoves, Move, one_by_one

__all__ = [
    "COMMITTED",
    "EVICTED",
    "Keeper",
    "KeptBlocks",
    "Order",
    "Place",
    "part_lost",
    "repeatable_runs",
    "written_by",
]

COMMITTED, EVICTED = "committed", "evicted"


@dataclass(frozen=True, slots=True, eq=False)
class KeptBlocks:
    """An order to hand blocks of one group to the stores: `keys[i]` is what `sources[i]` of a tier holds, int32 `[n]`.

    `cause` is why now, "committed" or "evicted"; `priority` and `hits` are those of the content, for stores that do not
    take everything. It is an order like a move, to be carried out in its place among them.
    """

    keys: list[bytes]
    sources: NDArray[np.int32]
    group: int
    source_tier: str
    cause: str
    priority: int
    hits: int

    def is_of(self, tag: bytes) -> bool:
        """Say whether these are blocks of the namespace with a tag."""
        return self.keys[0].startswith(tag)


Order = Move | BlockMoves | KeptBlocks
"""What is to be done about bytes, in the order in which it was decided."""


def repeatable_runs(orders: Iterable[Order]) -> list[list[Order]]:
    """Split orders into runs that can be made again from their start, wherever they broke off.

    No run writes what an order before in it has read: made again, that one would read something else.

    >>> down, up, copy = (Move(0, 5, 4, 0, "device", "host"), Move(7, 0, 4, 0, "host", "device"), Move(2, 3, 1))
    >>> [len(run) for run in repeatable_runs([down, up, copy])]
    [1, 2]
    """
    runs: list[list[Order]] = []
    read = _Reads()
    for order in orders:
        if not runs or read.meet(order):
            runs.append([])
            read = _Reads()
        runs[-1].append(order)
        read.add(order)
    return runs


class _Reads:
    """What orders have read: rows of single blocks, and tiers of which they have read many blocks at once."""

    __slots__ = ("_rows", "_tiers", "_whole_tiers")

    def __init__(self) -> None:
        self._rows: dict[tuple[str, int], list[tuple[int, int]]] = {}
        self._tiers: set[str] = set()
        self._whole_tiers: set[str] = set()

    def add(self, order: Order) -> None:
        self._tiers.add(order.source_tier)
        if isinstance(order, Move):
            rows = self._rows.setdefault((order.source_tier, order.source), [])
            rows.append((order.source_offset, order.source_offset + order.num_tokens))
        else:
            self._whole_tiers.add(order.source_tier)

    def meet(self, order: Order) -> bool:
        """Say whether an order may write what was read."""
        if isinstance(order, KeptBlocks) or order.destination_tier not in self._tiers:
            return False
        if isinstance(order, BlockMoves) or order.destination_tier in self._whole_tiers:
            return True
        rows = self._rows.get((order.destination_tier, order.destination), [])
        if not order.destination_offset:  # what follows may hold nothing afterwards, or others' rows
            return bool(rows)
        begin, end = order.destination_offset, order.destination_offset + order.num_tokens
        return any(begin < last and first < end for first, last in rows)


Place = tuple[str, int, int]
"""A block: its tier, group and id."""


def written_by(moves: Iterable[Move]) -> set[Place]:
    """Return the blocks that moves write."""
    return {(move.destination_tier, move.group, move.destination) for move in moves}


def part_lost(orders: Iterable[Order], lost: set[Place]) -> tuple[list[Order], list[Move]]:
    """Part orders into what can still be done, and the moves that would read what is lost.

    What such moves write is lost as well; what others write is not any more.

    >>> copy, other = Move(0, 3, 4), Move(5, 0, 4)
    >>> left, unmade = part_lost([copy, other, copy], {("device", 0, 0)})
    >>> left == [other, copy], unmade == [copy]
    (True, True)
    """
    lost, left, unmade = set(lost), list[Order](), list[Move]()
    for order in orders:
        kept, apart = _parted(order, lost)
        left += kept
        unmade += apart
        lost |= written_by(apart)
        lost -= written_by(one_by_one(kept))
    return left, unmade


def _parted(order: Order, lost: set[Place]) -> tuple[list[Order], list[Move]]:
    """Return what is left of an order that reads nothing lost, and its moves that would."""
    if isinstance(order, Move):
        is_lost = (order.source_tier, order.group, order.source) in lost
        return ([], [order]) if is_lost else ([order], [])
    reads = np.array([(order.source_tier, order.group, source) in lost for source in order.sources.tolist()], bool)
    if not reads.any():
        return [order], []
    left = np.flatnonzero(~reads)
    if isinstance(order, BlockMoves):
        rest: Order = replace(order, sources=order.sources[left], destinations=order.destinations[left])
        apart = [move for move, is_read in zip(order, reads.tolist(), strict=True) if is_read]
    else:
        rest, apart = replace(order, sources=order.sources[left], keys=[order.keys[at] for at in left.tolist()]), []
    return ([rest] if len(left) else []), apart


class Keeper:
    """Orders blocks to be kept, on commit, on eviction, or both."""

    def __init__(self, chain: Chain, order: Callable[[KeptBlocks], None], *, on_commit: bool, on_evict: bool) -> None:
        self.chain = chain
        self._order = order
        self.on_commit = on_commit
        self._on_evict = on_evict

    def committed(self, extent: Extent, first: int, end: int) -> None:
        """Order blocks first .. end-1 of the prefix that ends with an extent of the device, just published."""
        self.chain.forget(extent, first)
        if not self.on_commit or end <= first:
            return
        parts, node = [], extent
        while node.start + node.num_blocks > first:
            parts.append(node.blocks[:, max(first - node.start, 0) : end - node.start])
            assert node.parent is not None
            node = node.parent
        blocks = np.concatenate(parts[::-1], axis=1)
        self._keep(extent, first, blocks, "device", COMMITTED)

    def filled(self, extent: Extent, group: int, columns: NDArray[np.intp]) -> None:
        """Order blocks of one group in columns of an extent of the device, where it had none before."""
        columns = columns[columns < len(extent.tokens) // self.chain.block_bytes]
        if not self.on_commit or not len(columns) or extent.key is None:
            return
        first, end = int(columns[0]), int(columns[-1]) + 1
        blocks = np.full((len(extent.blocks), end - first), -1, np.int32)
        blocks[group, columns - first] = extent.blocks[group, columns]
        self._keep(extent, extent.start + first, blocks, "device", COMMITTED)

    def evicted(self, extent: Extent, keep: int, tier: str) -> None:
        """Order the whole blocks of an extent but the first `keep`, which is about to lose them."""
        num_blocks = len(extent.tokens) // self.chain.block_bytes - keep
        if self._on_evict and num_blocks > 0 and extent.key is not None:
            blocks = extent.blocks[:, keep : keep + num_blocks]
            self._keep(extent, extent.start + keep, blocks, tier, EVICTED)

    def offer_again(self, extent: Extent, refusals: int, offer: Callable[[KeptBlocks], bool]) -> None:
        """Offer what the device has of the prefix that ends with an extent of it, by orders that nobody else is given.

        `offer` returns whether it is done with what an order has. Extents of which it was, when there had been as many
        `refusals`, and that have not changed since, are left out.
        """
        path = [(each, (refusals, int((each.blocks >= 0).sum()))) for each in extent.path()]
        unseen = [(each, seen) for each, seen in path if each.offered != seen]
        if not unseen or not self.on_commit:
            return
        first = unseen[0][0].start
        digests = self.chain.of_path(extent, first, extent.start + extent.num_blocks)
        for each, seen in unseen:
            num_blocks = len(each.tokens) // self.chain.block_bytes if each.key is not None else 0
            named = digests[each.start - first : each.start - first + num_blocks]
            orders = self._orders(each, named, each.blocks[:, :num_blocks], "device", COMMITTED)
            are_done = [offer(order) for order in orders]
            each.offered = seen if all(are_done) else None

    def _keep(self, extent: Extent, first: int, blocks: Blocks, tier: str, cause: str) -> None:
        digests = self.chain.of_path(extent, first, first + blocks.shape[1])
        for order in self._orders(extent, digests, blocks, tier, cause):
            self._order(order)

    def _orders(
        self, extent: Extent, digests: list[bytes], blocks: Blocks, tier: str, cause: str
    ) -> Iterator[KeptBlocks]:
        root = extent
        while root.parent is not None:
            root = root.parent
        assert isinstance(root, Root)
        for group, column in enumerate(blocks):
            present = np.flatnonzero(column >= 0)
            if len(present):
                keys = self.chain.keys(root.namespace, [digests[at] for at in present.tolist()], group)
                yield KeptBlocks(keys, column[present], group, tier, cause, extent.priority, extent.hits)
