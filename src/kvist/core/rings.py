"""Rings: windows that are written in place, round and round, once a sequence is longer than they are.

Until then a ring's blocks are as good as any: what is committed is published, and shared. A sequence that wraps is
published no more, and before it writes to a block that the tree has, it gets one of its own in its place.

    window of 8 tokens, blocks of 4     blocks    tokens
    8 tokens, the first 4 shared        a b       0 1 2 3   4 5 6 7
    token 8 is to overwrite token 0     c b       8 1 2 3   4 5 6 7     c has been a copy of a
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvist.core import holdings
from kvist.core.groups import RingGeometry
from kvist.core.sequences import NEVER, RowState, Sequence
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
    "set_limits",
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


def growth_of(
    state: CacheState, rows: NDArray[np.int64], num_columns: NDArray[np.int64], num_tokens: NDArray[np.int64]
) -> list[RingGrowth]:
    """Say what the rings of rows must get before these have so many columns and tokens; publishes those that wrap."""
    grown = []
    for row, columns, tokens in zip(rows.tolist(), num_columns.tolist(), num_tokens.tolist(), strict=True):
        if wraps(state, tokens) and not state.rows.wrapped[row]:
            _refuse_waiting(state.rows.sequence_at(row))
            state.publish(state.rows.sequence_at(row))
        for group in state.rings:
            end = min(columns, geometry(group).num_blocks)
            private_end = min(_last_written(geometry(group), tokens) + 1, _num_shared(state, group, row))
            each = RingGrowth(group, row, end, private_end)
            if end > state.rows.ends_of[group.index][row] or _num_private(state, each):
                grown.append(each)
    return grown


def _refuse_waiting(sequence: Sequence) -> None:
    if waiting := sequence._waiting_beams():
        raise SequenceError(
            f"{len(waiting)} beams wait for the prompt of {sequence!r}, which would overwrite it: commit that first"
        )


def _last_written(ring: RingGeometry, num_tokens: int) -> int:
    """Return the last column that a sequence of that many tokens has overwritten, -1 if none."""
    if num_tokens <= ring.num_tokens:
        return -1
    if num_tokens - ring.num_tokens >= ring.num_ring_tokens:
        return ring.num_blocks - 1
    return ring.position(num_tokens - 1) // ring.block_size


def _num_shared(state: CacheState, group: SpannedGroup, row: int) -> int:
    """Count the leading columns that the tree has, or had before they became the row's own."""
    rows = state.rows
    num_shared: int = rows.frozen.item(group.index, row) if rows.wrapped[row] else rows.published_of[row]
    return min(num_shared, geometry(group).num_blocks)


def _first_shared(state: CacheState, group: SpannedGroup, row: int) -> int:
    """Return the first of the ring's columns that has not become the row's own."""
    first: int = state.rows.firsts_of[group.index][row]
    return max(first, group.span.num_sink_blocks)


def _num_private(state: CacheState, growth: RingGrowth) -> int:
    return max(growth.private_end - _first_shared(state, growth.group, growth.row), 0)


def num_needed(state: CacheState, grown: list[RingGrowth]) -> list[int]:
    """Count the blocks by pool that rings must get."""
    needs = [0] * len(state.pools)
    for each in grown:
        new = max(each.end - state.rows.ends_of[each.group.index][each.row], 0)
        needs[state.pool_of[each.group.index]] += new + _num_private(state, each)
    return needs


def perform(state: CacheState, grown: list[RingGrowth], rows: NDArray[np.int64], num_tokens: NDArray[np.int64]) -> None:
    """Give rings what they must get, and note which rows have wrapped; there must be as many blocks."""
    for row, tokens in zip(rows.tolist(), num_tokens.tolist(), strict=True):
        if wraps(state, tokens) and not state.rows.wrapped[row]:
            wrap(state, row)
    for each in grown:
        index, table = each.group.index, state.rows.block_table[each.group.index, each.row]
        end = state.rows.ends_of[index][each.row]
        if each.end > end:
            table[end : each.end] = state.take(index, each.end - end)
            state.rows.ends_of[index][each.row] = each.end
        first, private_end = _first_shared(state, each.group, each.row), each.private_end
        if private_end > first:
            _make_private(state, each.group, each.row, first, private_end)


def wrap(state: CacheState, row: int) -> None:
    """Note that a row overwrites tokens from now on, and so is published no more."""
    rows = state.rows
    rows.wrapped[row] = True
    for group in state.rings:
        rows.frozen[group.index, row] = min(rows.published_of[row], geometry(group).num_blocks)
    rows.sequence_at(row).publishes = False
    rows.due_of[row] = NEVER


def _make_private(state: CacheState, group: SpannedGroup, row: int, first: int, end: int) -> None:
    """Give a row blocks of its own for shared columns, with copies of what is still in its window."""
    index = group.index
    table = state.rows.block_table[index, row]
    shared = table[first:end].copy()
    own = state.take(group.index, end - first).copy()
    table[first:end] = own
    state.rows.firsts_of[index][row] = end
    state.rows.version[row] += 1
    if not geometry(group).has_extra_block:  # with one more, a block has left the window when it is overwritten
        for source, destination in zip(shared.tolist(), own.tolist(), strict=True):
            state.order_move(source, destination, state.block_size, index)
    group.relinquish(shared)
    group.offer(state.rows.sequence_at(row)._extent)


# -- forks ------------------------------------------------------------------------------------------------------------


def num_own(state: CacheState, group: SpannedGroup, row: int, num_columns: int) -> int:
    """Count the blocks of a ring that a copy of a row must have for itself, once the row is published."""
    rows, end = state.rows, min(num_columns, geometry(group).num_blocks)
    if not rows.wrapped[row]:
        return max(end - rows.computed_of[row] // state.block_size, 0)
    num_sinks = group.span.num_sink_blocks
    num_shared = _num_shared(state, group, row)
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


# -- limits -----------------------------------------------------------------------------------------------------------


def set_limits(state: CacheState, rows: NDArray[np.int64]) -> None:
    """Lower the limits of rows to where appending would overwrite a shared block of a ring."""
    for row in rows.tolist():
        for group in state.rings:
            state.rows.limit_of[row] = min(state.rows.limit_of[row], _next_shared(state, group, row))


def _next_shared(state: CacheState, group: SpannedGroup, row: int) -> int:
    """Return up to which number of tokens a row can grow without writing to a shared block, or wrapping."""
    ring, num_tokens = geometry(group), state.rows.tokens_of[row]
    if not state.rows.wrapped[row]:
        return ring.num_tokens
    first = _first_shared(state, group, row)
    if first >= _num_shared(state, group, row):
        return NEVER
    # The token that is the first to be written to column `first`, at the earliest the next one.
    turn = ring.num_tokens + max(first * ring.block_size - ring.num_sink_positions, 0)
    return max(turn, num_tokens)
