"""What is done about copies that could not be made: the content that they were to bring is forgotten, not read."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from kvist.core import recurrent, resuming
from kvist.core.extents import Blocks, Extent
from kvist.core.keeping import Order, Place, written_by
from kvist.core.lower import DEVICE, HOST, LowerTier
from kvist.core.moves import Move, one_by_one
from kvist.core.recording import NOT_FILLED
from kvist.core.sequences import Sequence
from kvist.core.state import CacheState

__all__ = ["forget_unmade", "sort_unmade", "without_fills"]

Lost = dict[str, list[NDArray[np.int32]]]
"""Ids of blocks that hold nothing, by tier and group."""


def sort_unmade(unmade: list[Move], run: Iterable[Order]) -> tuple[list[Move], list[Move]]:
    """Sort copies that were not made into those to be made again, in order, and those that nobody can make any more.

    Only a copy within a tier that is of the run just made can be: what it reads is still there, unless that was to come
    from another that cannot. What the run has written into its block afterwards is made again, too. A memory may name
    parts of what was ordered.
    """
    ordered = one_by_one(run)
    ways: dict[Hashable, list[Move]] = {}
    for move in ordered:
        if move.source_tier == move.destination_tier:
            ways.setdefault(_way(move), []).append(move)
    left: dict[Hashable, list[Move]] = {}
    lost, again = list[Move](), list[Move]()
    for move in unmade:
        if any(_is_part(move, whole) for whole in ways.get(_way(move), ())):
            left.setdefault(_way(move), []).append(move)
        else:
            lost.append(move)
    places, filled = written_by(lost), set[Place]()
    for move in ordered:
        parts = left.pop(_way(move), []) if _way(move) in ways else []
        if parts and (move.source_tier, move.group, move.source) in places:
            lost += parts
            places |= written_by(parts)
        elif parts or written_by([move]) <= filled:
            again += parts or [move]
            filled |= written_by([move])
    return again, lost


def _way(move: Move) -> Hashable:
    """Return from where to where a move goes, whatever it copies of that."""
    shift = move.destination_offset - move.source_offset
    return move.source_tier, move.source, move.destination_tier, move.destination, move.group, shift


def _is_part(move: Move, whole: Move) -> bool:
    """Say whether all rows that a move copies are among those of another one that goes the same way."""
    end, whole_end = move.source_offset + move.num_tokens, whole.source_offset + whole.num_tokens
    return whole.source_offset <= move.source_offset and end <= whole_end


def forget_unmade(state: CacheState, moves: list[Move]) -> list[Sequence]:
    """Forget what copies that were not made, and cannot be made again, were to bring, with all that comes after it.

    Running sequences that hold any of it, or have it for their own, are suspended, and returned: when they are resumed,
    they begin from what is still there.
    """
    lost = _lost(state, moves)
    if state.lower is not None:
        _lose_in_host(state.lower, lost[HOST])
    holders = _disown(state, lost[DEVICE])
    if state.recurrent is not None:
        recurrent.lose_checkpoints(state, set(lost[DEVICE][state.recurrent.index].tolist()))
    sequences = []
    while (sequence := _next_affected(state, holders, lost[DEVICE])) is not None:
        own = state.own_blocks(sequence)
        state.moves = without_fills(state.moves, own)
        resuming.suspend(state, sequence, publish=False)
        sequences.append(sequence)
    return sequences


def _lost(state: CacheState, moves: list[Move]) -> Lost:
    lost: dict[str, list[list[int]]] = {tier: [[] for _ in state.spans] for tier in (DEVICE, HOST)}
    for move in moves:
        lost[move.destination_tier][move.group].append(move.destination)
    return {tier: [np.array(ids, np.int32) for ids in groups] for tier, groups in lost.items()}


def _lose_in_host(lower: LowerTier, lost: list[NDArray[np.int32]]) -> None:
    for extent in lower.extents():
        column = _first(extent.blocks, lost)
        if column is not None and extent.parent is not None:
            lower.lose(extent, column)
    for extent in lower.copies.extents():
        column = _first(lower.copies.of(extent), lost)
        if column is not None:
            lower.copies.drop(extent, column, NOT_FILLED)


def _first(blocks: Blocks, lost: list[NDArray[np.int32]]) -> int | None:
    """Return the first column of blocks `[num_groups, n]` in which one is lost."""
    columns = [np.flatnonzero(np.isin(own, ids)) for own, ids in zip(blocks, lost, strict=True) if len(ids)]
    return min((int(found[0]) for found in columns if len(found)), default=None)


def _disown(state: CacheState, lost: list[NDArray[np.int32]]) -> set[Extent]:
    """Take what is lost on the device out of the tree; returns the extents that have some of it, held ones too."""
    found: set[Extent] = set()
    if not any(map(len, lost)):
        return found
    for extent in state.all_extents():
        column = _first(extent.blocks, lost)
        if column is None:
            continue
        if extent.key is not None:
            if column:
                state.tree.split(extent, column)
            state.tree.disown(extent)
        found.add(extent)
    return found


def _next_affected(state: CacheState, holders: set[Extent], lost: list[NDArray[np.int32]]) -> Sequence | None:
    """Find a running sequence that holds one of some extents, or has a block that is lost for its own."""
    for sequence in state.rows.running():
        if sequence.leader is not None:
            continue
        node: Extent = sequence._extent
        while node.parent is not None:
            if node in holders:
                return sequence
            node = node.parent
        own = state.own_blocks(sequence)
        if any(own[group].intersection(ids.tolist()) for group, ids in enumerate(lost)):
            return sequence
    return None


def without_fills(orders: list[Order], own: list[set[int]]) -> list[Order]:
    """Leave out moves into blocks of the device, `own` by group, but those that a later order still reads.

    Where copies have failed before, a block may have been filled for another, who has since been sent down.
    """
    left: list[Order] = []
    read: set[tuple[int, int]] = set()
    for order in reversed(orders):
        if _fills(order, own) and (order.group, order.destination) not in read:
            continue
        left.append(order)
        if order.source_tier == DEVICE:
            sources = [order.source] if isinstance(order, Move) else order.sources.tolist()
            read.update((order.group, source) for source in sources)
    return left[::-1]


def _fills(order: Order, own: list[set[int]]) -> TypeGuard[Move]:
    return isinstance(order, Move) and order.destination_tier == DEVICE and order.destination in own[order.group]
