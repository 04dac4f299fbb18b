"""Recurrent states: one that a sequence works in, and copies of it at block boundaries to be found again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvist.core.extents import Extent
from kvist.core.keeping import part_lost
from kvist.core.lower import DEVICE
from kvist.core.moves import Move
from kvist.core.recording import NOT_FILLED
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
    "lose_checkpoints",
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
    """Give up the copies of states that could not be made: later the states would be others.

    What of them has been published already is found no more, nor copied to host memory or stored.
    """
    group = state.recurrent
    if group is None:
        return
    working = {state.rows.block_table.item(group.index, sequence.row, 0) for sequence in state.rows.running()}
    waiting = {each.destination for each in state.moves if isinstance(each, Move) and each.group == group.index}
    blocks = {block for block in waiting - working if block >= 0}
    if not blocks:
        return
    lose_checkpoints(state, blocks)
    for extent in state.all_extents():
        columns = np.flatnonzero(np.isin(extent.blocks[group.index], list(blocks)))
        if len(columns):
            _lose_states(state, extent, columns)
    into = [each for each in state.moves if not (isinstance(each, Move) and _fills(each, group.index, blocks))]
    state.moves = part_lost(into, {(DEVICE, group.index, block) for block in blocks})[0]


def lose_checkpoints(state: CacheState, blocks: set[int]) -> None:
    """Give back copies of states that sequences keep for themselves, in blocks that hold nothing."""
    group = state.recurrent
    assert group is not None
    for sequence in state.rows.running():
        lost = [block for _, block in sequence._checkpoints if block in blocks]
        sequence._checkpoints = [each for each in sequence._checkpoints if each[1] not in blocks]
        group.pool.give(np.array(lost, np.int32))


def _lose_states(state: CacheState, extent: Extent, columns: NDArray[np.intp]) -> None:
    """Take states that hold nothing from columns of an extent that a sequence has just published, and holds."""
    group = state.recurrent
    assert group is not None
    group.empty(extent, columns)
    if state.recorder is not None:
        state.recorder.removed_in(extent, group.index, columns, DEVICE, NOT_FILLED)
    if state.copies is not None:
        state.copies.drop_in(extent, group.index, columns, NOT_FILLED)


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


def _fills(move: Move, group: int, blocks: set[int]) -> bool:
    return move.group == group and move.destination in blocks
