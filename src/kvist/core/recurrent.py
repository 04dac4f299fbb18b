"""Recurrent states: one that a sequence works in, and copies of it at block boundaries to be found again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvist.core.moves import Move
from kvist.core.sequences import Sequence
from kvist.core.spanned import SpannedGroup

if TYPE_CHECKING:
    from kvist.core.state import CacheState

__all__ = [
    "abandon_copies",
    "checkpoint",
    "chunk_limit",
    "give_row_a_state",
    "give_states",
    "keep_last_state",
    "order_state_move",
]


def checkpoint(state: CacheState, rows: NDArray[np.int64]) -> None:
    """Order copies of the states of rows that were computed up to a boundary where a state is to be kept.

    Where there is no block for one, it is not kept: that costs a later hit, and nothing else.
    """
    group = state.recurrent
    assert group is not None
    computed = state.rows.num_computed[rows]
    at_boundary = (computed % state.block_size == 0) & (computed > 0)
    for row in rows[at_boundary].tolist():
        sequence = state.rows.sequence_at(row)
        column = state.rows.computed_of[row] // state.block_size - 1
        if not _is_wanted(state, group, sequence, column):
            continue
        if _has_room(state, group):
            block = int(state.take(group.index, 1)[0])
        elif sequence._checkpoints:
            block = sequence._checkpoints.pop(0)[1]
        else:
            continue
        sequence._checkpoints.append((column, block))
        working = state.rows.block_table.item(group.index, row, 0)
        state.order_move(working, block, state.block_size, group.index)


def abandon_copies(state: CacheState) -> None:
    """Give up the copies of states that could not be made: later the states would be others."""
    group = state.recurrent
    if group is None:
        return
    for sequence in state.rows.running():
        for column, block in list(sequence._checkpoints):
            waiting = [each for each in state.moves if isinstance(each, Move) and _fills(each, group.index, block)]
            if waiting:
                sequence._checkpoints.remove((column, block))
                group.pool.give(np.array([block], np.int32))
                state.moves = [move for move in state.moves if move not in waiting]


def _is_wanted(state: CacheState, group: SpannedGroup, sequence: Sequence, column: int) -> bool:
    if column < state.rows.published_of[sequence.row] or any(column == each for each, _ in sequence._checkpoints):
        return False
    num_tokens = (column + 1) * state.block_size
    return (column + 1) % max(group.span.checkpoint_blocks, 1) == 0 or num_tokens in _boundaries(state, sequence)


def _boundaries(state: CacheState, sequence: Sequence) -> tuple[int, int]:
    """Return where states are worth keeping besides the regular boundaries: where others may go on from."""
    return sequence.num_shared_tokens, sequence.prompt_boundary * state.block_size


def _has_room(state: CacheState, group: SpannedGroup) -> bool:
    if not group.pool.num_free and state.tree.evictable_in(group.pool):
        state.tree.evict(group.pool, 1)
    return group.pool.num_free > 0


def chunk_limit(state: CacheState, sequence: Sequence, num_tokens: int) -> int:
    """Return how many of the next tokens to compute now, so as to stop at the next boundary where a state is kept."""
    group = state.recurrent
    start = state.rows.computed_of[sequence.row]
    if state.max_chunk_tokens:
        ends = [state.rows.ends_of[sliding.index][sequence.row] * state.block_size for sliding in state.sliding]
        num_tokens = max(min(num_tokens, state.max_chunk_tokens, *(end - start for end in ends)), 0)
    end = start + num_tokens
    if group is None:
        return num_tokens
    stops = [stop for stop in _boundaries(state, sequence) if start < stop < end]
    interval = group.span.checkpoint_blocks * state.block_size
    if group.span.checkpoint_blocks:
        regular = (start // interval + 1) * interval
        stops += [regular] if regular < min(end, sequence.num_prompt_tokens) else []
    return min(stops, default=end) - start


def keep_last_state(state: CacheState, sequence: Sequence) -> None:
    """Let the tree have the state of a sequence that ends at a block boundary, instead of a copy of it."""
    group, rows, row = state.recurrent, state.rows, sequence.row
    assert group is not None
    num_columns, rest = divmod(rows.computed_of[row], state.block_size)
    if rest or not num_columns or not rows.ends_of[group.index][row]:
        return
    column, working = num_columns - 1, rows.block_table.item(group.index, row, 0)
    if column >= rows.published_of[row]:
        if any(column == each for each, _ in sequence._checkpoints):
            return
        sequence._checkpoints.append((column, working))
    else:
        extent = sequence._extent
        if extent.parent is None or extent.start + extent.num_blocks != num_columns:
            return
        last = extent.blocks[group.index]
        if last.item(len(last) - 1) >= 0:
            return
        last[-1] = working
        group.num_evictable += 1
        state.note_filled(extent, group.index, np.array([len(last) - 1]))
    rows.ends_of[group.index][row] = 0
    rows.block_table[group.index, row, 0] = 0


def give_row_a_state(state: CacheState, row: int) -> None:
    """Give a row a block for its state; there must be one."""
    group = state.recurrent
    assert group is not None
    if not group.pool.num_free:
        state.tree.evict(group.pool, 1)
    state.rows.block_table[group.index, row, :1] = state.take(group.index, 1)
    state.rows.ends_of[group.index][row] = 1


def order_state_move(state: CacheState, source: int, row: int) -> None:
    """Order a copy of a state into the block that a row works in."""
    group = state.recurrent
    assert group is not None
    working = state.rows.block_table.item(group.index, row, 0)
    state.order_move(source, working, state.block_size, group.index)


def give_states(state: CacheState, sequence: Sequence) -> None:
    """Give back the state that a sequence works in, and the copies that the tree has not got."""
    group, rows, row = state.recurrent, state.rows, sequence.row
    assert group is not None
    if rows.ends_of[group.index][row]:
        group.pool.give(rows.block_table[group.index, row, :1])
        rows.ends_of[group.index][row] = 0
    if sequence._checkpoints:
        group.pool.give(np.array([block for _, block in sequence._checkpoints], np.int32))
        sequence._checkpoints.clear()


def _fills(move: Move, group: int, block: int) -> bool:
    return move.group == group and move.destination == block
