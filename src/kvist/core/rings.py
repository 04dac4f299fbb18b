"""Rings: windows that are written in place, round and round, once a sequence is longer than they are.

Until then a ring's blocks are as good as any: what is committed is published, and shared. A sequence that wraps is
published no more, and before it writes to a block that the tree has, it gets one of its own in its place. Where there
is no room for that, it takes over a block that nobody else holds, and the tree has it no more.

    window of 8 tokens, blocks of 4     blocks    tokens
    8 tokens, the first 4 shared        a b       0 1 2 3   4 5 6 7
    token 8 is to overwrite token 0     c b       8 1 2 3   4 5 6 7     c has been a copy of a
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvist.core import holdings
from kvist.core.extents import Extent
from kvist.core.groups import RingGeometry
from kvist.core.lower import DEVICE
from kvist.core.recording import TAKEN_OVER
from kvist.core.rows import NEVER, RowState
from kvist.core.spanned import SpannedGroup
from kvist.errors import SequenceError

if TYPE_CHECKING:
    from kvist.core.state import CacheState

__all__ = [
    "copy_own",
    "fill_own",
    "geometry",
    "growth_of",
    "num_needed",
    "num_own",
    "perform",
    "refuse_overwriting",
    "wrap",
    "wraps",
]


class RingGrowth(NamedTuple):
    """What a row's ring gets: new columns up to `end`, and blocks of its own for shared columns up to `private_end`."""

    group: SpannedGroup
    row: int
    end: int
    private_end: int


def geometry(group: SpannedGroup) -> RingGeometry:
    """Return the geometry of a ring group."""
    assert group.span.ring is not None
    return group.span.ring


def wraps(state: CacheState, num_tokens: int) -> bool:
    """Say whether a sequence of that many tokens overwrites some of its own in some ring."""
    return any(num_tokens > geometry(group).num_tokens for group in state.rings)


def refuse_overwriting(state: CacheState, rows: NDArray[np.int64], num_tokens: NDArray[np.int64]) -> None:
    """Raise SequenceError where beams wait for a prompt that its leader would overwrite with so many tokens."""
    for row, tokens in zip(rows.tolist(), num_tokens.tolist(), strict=True):
        sequence = state.rows.sequence_at(row)
        waiting = sequence._waiting_beams() if wraps(state, tokens) else []
        if waiting and tokens > state.rows.tokens_of[row]:
            raise SequenceError(
                f"{len(waiting)} beams wait for the prompt of {sequence!r}, which would overwrite it: commit that first"
            )


def growth_of(
    state: CacheState, rows: NDArray[np.int64], num_columns: NDArray[np.int64], num_tokens: NDArray[np.int64]
) -> list[RingGrowth]:
    """Say what the rings of rows must get before these have so many columns and tokens."""
    grown = []
    for row, columns, tokens in zip(rows.tolist(), num_columns.tolist(), num_tokens.tolist(), strict=True):
        for group in state.rings:
            end = min(columns, geometry(group).num_blocks)
            private_end = min(_last_written(geometry(group), tokens) + 1, _num_to_share(state, group, row))
            each = RingGrowth(group, row, end, private_end)
            if end > state.rows.ends_of[group.index][row] or private_end > _first_shared(state, group, row):
                grown.append(each)
    return grown


def _last_written(ring: RingGeometry, num_tokens: int) -> int:
    """Return the last column that a sequence of that many tokens has overwritten, -1 if none."""
    if num_tokens <= ring.num_tokens:
        return -1
    if num_tokens - ring.num_tokens >= ring.num_ring_tokens:
        return ring.num_blocks - 1
    return ring.position(num_tokens - 1) // ring.block_size


def _num_to_share(state: CacheState, group: SpannedGroup, row: int) -> int:
    """Count the leading columns that the tree has, once the row is published as it is when it wraps."""
    num_shared = state.rows.num_shared_of(group.index, row)
    if not state.rows.wrapped[row] and state.rows.sequence_at(row).publishes:
        num_shared = state.rows.computed_of[row] // state.block_size
    return min(num_shared, geometry(group).num_blocks)


def _first_shared(state: CacheState, group: SpannedGroup, row: int) -> int:
    """Return the first of the ring's columns that has not become the row's own."""
    first: int = state.rows.firsts_of[group.index][row]
    return max(first, group.span.num_sink_blocks)


def num_needed(state: CacheState, grown: list[RingGrowth], *, taking_over: bool) -> list[int]:
    """Count the blocks by pool that rings must get; with `taking_over`, none for what nobody else holds."""
    needs = [0] * len(state.pools)
    for each in grown:
        needs[state.pool_of[each.group.index]] += max(each.end - state.rows.ends_of[each.group.index][each.row], 0)
        for column in range(_first_shared(state, each.group, each.row), each.private_end):
            if not _takes_over(state, each.group, each.row, column, taking_over=taking_over):
                needs[state.pool_of[each.group.index]] += 1
    return needs


def _takes_over(state: CacheState, group: SpannedGroup, row: int, column: int, *, taking_over: bool) -> bool:
    """Say whether a row makes a shared block its own as it is: nobody else holds it, and nobody else needs find it."""
    if column >= state.rows.published_of[row]:
        return taking_over  # its own until now; it is published before the row wraps, if there is room for another
    block = state.rows.block_table.item(group.index, row, column)
    if group.references.item(block) != 1:
        return False
    return taking_over or _extent_of(state, row, column).key is None


def _extent_of(state: CacheState, row: int, column: int) -> Extent:
    """Return the extent on a row's path that has a column."""
    node: Extent = state.rows.sequence_at(row)._extent
    while node.start > column:
        assert node.parent is not None
        node = node.parent
    return node


def perform(
    state: CacheState,
    grown: list[RingGrowth],
    rows: NDArray[np.int64],
    num_tokens: NDArray[np.int64],
    *,
    taking_over: bool,
) -> None:
    """Give rings what they must get, and note which rows have wrapped; there must be as many blocks."""
    for row, tokens in zip(rows.tolist(), num_tokens.tolist(), strict=True):
        if wraps(state, tokens):
            wrap(state, row)
            state.rows.most_tokens[row] = max(state.rows.most_tokens[row], tokens)
    for each in grown:
        index, table = each.group.index, state.rows.block_table[each.group.index, each.row]
        end = state.rows.ends_of[index][each.row]
        if each.end > end:
            table[end : each.end] = state.take(index, each.end - end)
            state.rows.ends_of[index][each.row] = each.end
        num_shared = min(each.private_end, state.rows.num_shared_of(index, each.row))
        for column in range(_first_shared(state, each.group, each.row), num_shared):
            _make_private(state, each.group, each.row, column, taking_over=taking_over)


def wrap(state: CacheState, row: int) -> None:
    """Note that a row overwrites tokens from now on, and so is published no more."""
    rows = state.rows
    if rows.wrapped[row]:
        return
    rows.wrapped[row] = True
    for group in state.rings:
        rows.frozen[group.index, row] = min(rows.published_of[row], geometry(group).num_blocks)
    rows.sequence_at(row).publishes = False
    rows.due_of[row] = NEVER


def _make_private(state: CacheState, group: SpannedGroup, row: int, column: int, *, taking_over: bool) -> None:
    """Give a row a block of its own for a shared column, and a copy: a rewind may bring it back into the window."""
    index, rows = group.index, state.rows
    shared = rows.block_table[index, row, column : column + 1].copy()
    if _takes_over(state, group, row, column, taking_over=taking_over):
        group.relinquish(shared)
        group.num_evictable -= 1
        extent = _extent_of(state, row, column)
        extent.blocks[index, column - extent.start] = -1
        extent.has_holes = True
        if state.recorder is not None:
            state.recorder.removed_in(extent, index, np.array([column - extent.start]), DEVICE, TAKEN_OVER)
        if state.copies is not None:
            state.copies.drop_in(extent, index, np.array([column - extent.start]), TAKEN_OVER)
    else:
        rows.block_table[index, row, column] = state.take(index, 1)[0]
        own = rows.block_table.item(index, row, column)
        state.order_move(int(shared[0]), own, state.block_size, index)
        group.relinquish(shared)
        group.offer(rows.sequence_at(row)._extent)
        rows.version[row] += 1
    rows.firsts_of[index][row] = column + 1


# -- forks ------------------------------------------------------------------------------------------------------------


def num_own(state: CacheState, group: SpannedGroup, row: int, num_columns: int) -> int:
    """Count the blocks of a ring that a copy of a row must have for itself, once the row is published."""
    rows, end = state.rows, min(num_columns, geometry(group).num_blocks)
    if not rows.wrapped[row]:
        return max(end - rows.computed_of[row] // state.block_size, 0)
    num_sinks = group.span.num_sink_blocks
    num_shared = min(rows.num_shared_of(group.index, row), geometry(group).num_blocks)
    first = _first_shared(state, group, row)
    return end - min(num_sinks, num_shared) - max(num_shared - first, 0)


def fill_own(state: CacheState, row: int, num_columns: int) -> None:
    """Give a row whose rings show only what is shared blocks for their other columns; there must be as many."""
    for group in state.rings:
        index, end = group.index, min(num_columns, geometry(group).num_blocks)
        own = holdings.own_columns(state, group, row, end)
        needs = [0] * len(state.pools)
        needs[state.pool_of[index]] = len(own)
        state.make_room(needs)
        state.rows.block_table[index, row, own] = state.take(group.index, len(own))
        state.rows.ends_of[index][row] = end


def copy_own(state: CacheState, row: int, past: RowState) -> None:
    """Order copies of what another row has in its own blocks of rings into the same columns of this one."""
    for group in state.rings:
        index, ring = group.index, geometry(group)
        for column in holdings.own_columns(state, group, row, state.rows.ends_of[index][row]).tolist():
            written = past.num_computed + (ring.num_bubble_tokens if past.num_computed > ring.sink_tokens else 0)
            n = state.block_size if past.wrapped else min(written - column * state.block_size, state.block_size)
            if n > 0 and column < past.ends.item(index):
                source, destination = past.blocks.item(index, column), state.rows.block_table.item(index, row, column)
                state.order_move(source, destination, n, index)
