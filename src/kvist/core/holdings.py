"""What rows hold in the groups that need a part of the past: taking, sharing, letting slide and giving back.

One row of a sliding group with a sink block, and of a ring that has wrapped (the first of a ring's columns behind the
sinks that is still shared is `first`, the number of leading columns that the tree had when it wrapped is `frozen`):

    column     0      1    2    3      4    5      6    7
    sliding    sink   hole hole first  ...  published   end
               tree's           tree's      own
    ring       sink   own  own  first  ...  frozen      end
               tree's           tree's      own

The tree's blocks are shared: the row has a reference to each. Its own are nobody else's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvist.core.extents import Blocks, Extent
from kvist.core.rows import RUNNING, RowState
from kvist.core.sequences import Sequence
from kvist.core.spanned import SpannedGroup

if TYPE_CHECKING:
    from kvist.core.state import CacheState

__all__ = [
    "add_columns",
    "adopt",
    "as_tree_blocks",
    "give_all_own",
    "give_own",
    "give_past",
    "has_holes",
    "held_blocks",
    "hold_past",
    "hold_shared",
    "merge",
    "own_columns",
    "missing_columns",
    "prepare_chunks",
    "published_part",
    "release_past",
    "release_shared",
    "share",
    "slide",
]

NO_BLOCKS = np.empty(0, np.int32)


# -- what is a row's own, and what it shares --------------------------------------------------------------------------


def _without_holes(table: NDArray[np.int32], start: int, end: int, first: int, num_sinks: int) -> NDArray[np.int32]:
    """Return the blocks in columns start .. end-1, of which those from the sinks to `first` are holes."""
    if first <= num_sinks or first <= start:
        return table[start:end]
    if start >= num_sinks:
        return table[first:end]
    return np.concatenate((table[start : min(num_sinks, end)], table[first:end]))


def _tree_columns(group: SpannedGroup, end: int, first: int, num_shared: int) -> NDArray[np.bool_]:
    """Say of each of a ring's columns whether it shows a block of the tree, bool `[end]`."""
    columns = np.arange(end)
    in_tree: NDArray[np.bool_] = (columns < group.span.num_sink_blocks) | (columns >= first)
    in_tree &= columns < num_shared
    return in_tree


def _parts(
    group: SpannedGroup, table: NDArray[np.int32], first: int, end: int, published: int, frozen: int | None
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the blocks in a table of one group that are the tree's, and those that are the row's own."""
    num_sinks = group.span.num_sink_blocks
    if group.span.ring is not None:
        in_tree = _tree_columns(group, end, first, published if frozen is None else frozen)
        return table[:end][in_tree], table[:end][~in_tree]
    shared = _without_holes(table, 0, published, first, num_sinks)
    return shared, _without_holes(table, published, end, first, num_sinks)


def held_blocks(state: CacheState, group: SpannedGroup, row: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the blocks that a row has in span in one group: the tree's, and its own."""
    rows, index = state.rows, group.index
    frozen = rows.frozen.item(index, row) if rows.wrapped[row] else None
    first, end, published = rows.firsts_of[index][row], rows.ends_of[index][row], rows.published_of[row]
    return _parts(group, rows.block_table[index, row], first, end, published, frozen)


def own_columns(state: CacheState, group: SpannedGroup, row: int, end: int) -> NDArray[np.intp]:
    """Return the columns of a ring, up to `end`, that are or are to be a row's own."""
    rows, index = state.rows, group.index
    num_shared = rows.frozen.item(index, row) if rows.wrapped[row] else rows.published_of[row]
    return np.flatnonzero(~_tree_columns(group, end, rows.firsts_of[index][row], num_shared))


def _shared(state: CacheState, group: SpannedGroup, row: int) -> NDArray[np.int32]:
    """Return the tree's blocks that a row has in span in one group."""
    rows, index, span = state.rows, group.index, group.span
    if span.ring is not None:
        return held_blocks(state, group, row)[0]
    published, first = rows.published_of[row], rows.firsts_of[index][row]
    if not span.num_sink_blocks:
        return rows.columns_of[row][index, first:published]
    return _without_holes(rows.block_table[index, row], 0, published, first, span.num_sink_blocks)


def num_growing_from(state: CacheState, row: int, column: int) -> list[int]:
    """Count a row's blocks by pool from a column on, in the groups that grow without bound.

    Windows may have fewer columns than the row while a prompt is computed in chunks.
    """
    counts = [0] * len(state.pools)
    if state.has_full:
        counts[0] = max(state.rows.blocks_of[row] - column, 0)
    for group in state.sliding:
        counts[state.pool_of[group.index]] += max(state.rows.ends_of[group.index][row] - column, 0)
    return counts


def give_own(state: CacheState, row: int, keep: int) -> None:
    """Give back a row's own blocks from column `keep` on, in all groups whose tables grow but the full one.

    A ring that has wrapped keeps all.
    """
    rows = state.rows
    for group in state.linear:
        index = group.index
        table, end = rows.block_table[index, row], rows.ends_of[index][row]
        if end > keep and not (rows.wrapped[row] and group.span.ring):
            group.pool.give(_without_holes(table, keep, end, rows.firsts_of[index][row], group.span.num_sink_blocks))
            table[keep:end] = 0
            rows.ends_of[index][row] = keep
            rows.firsts_of[index][row] = min(keep, rows.firsts_of[index][row])


def give_all_own(state: CacheState, row: int) -> None:
    """Give back all of a row's own blocks, in all groups whose tables grow but the full one."""
    rows = state.rows
    for group in state.linear:
        if group.span.ring is not None or rows.ends_of[group.index][row] > rows.published_of[row]:
            group.pool.give(held_blocks(state, group, row)[1])


def hold_shared(state: CacheState, row: int) -> None:
    """Hold the tree's blocks that a row's table shows in span."""
    for group in state.linear:
        shared = _shared(state, group, row)
        if len(shared):
            group.retain(shared)


def _is_only_holder(extent: Extent, first: int) -> bool:
    """Say whether an extent and those above it down to column `first` have one holder, and so what is in them."""
    node = extent
    while node.references == 1:
        if node.start <= first:
            return True
        assert node.parent is not None
        node = node.parent
    return False


def release_shared(state: CacheState, sequence: Sequence) -> None:
    """End a row's hold of the tree's blocks in span; the extents must still be held."""
    row, extent, rows = sequence.row, sequence._extent, state.rows
    for group in state.linear:
        shared = _shared(state, group, row)
        if len(shared):
            first = rows.firsts_of[group.index][row]
            if _is_only_holder(extent, 0 if group.span.num_sink_blocks else first):
                group.relinquish_all(shared)
            else:
                group.relinquish(shared)
            if not extent.spare & group.bit or extent.start > first:
                group.offer(extent, first)


# -- rows as they were ------------------------------------------------------------------------------------------------


def _parts_of_past(group: SpannedGroup, past: RowState) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    index = group.index
    frozen = past.frozen.item(index) if past.wrapped else None
    first, end = past.firsts.item(index), past.ends.item(index)
    return _parts(group, past.blocks[index], first, end, past.num_published, frozen)


def hold_past(state: CacheState, past: RowState) -> None:
    """Hold once more the tree's blocks that a row had in span."""
    for group in state.linear:
        group.retain(_parts_of_past(group, past)[0])


def release_past(state: CacheState, past: RowState) -> None:
    """End a hold of the tree's blocks that a row had in span; the extents must still be held."""
    for group in state.linear:
        group.relinquish(_parts_of_past(group, past)[0])
        group.offer(past.extent, past.firsts.item(group.index))


def give_past(state: CacheState, past: RowState) -> None:
    """Give back the blocks that were a row's own."""
    if state.has_full:
        state.pools[0].give(past.blocks[0, past.num_published : past.num_blocks])
    for group in state.linear:
        group.pool.give(_parts_of_past(group, past)[1])
    if state.recurrent is not None:
        index = state.recurrent.index
        state.recurrent.pool.give(past.blocks[index, : past.ends.item(index)])


def published_part(state: CacheState, past: RowState) -> RowState:
    """Return what of a row others can share: what is published, and the encoder's blocks."""
    if state.is_plain:
        return replace(past, blocks=past.blocks[:, : past.num_published], num_blocks=past.num_published)
    blocks, ends, firsts = past.blocks.copy(), past.ends.copy(), past.firsts.copy()
    for group in state.rings:
        end = ends.item(group.index)
        frozen = past.frozen.item(group.index) if past.wrapped else past.num_published
        in_tree = _tree_columns(group, end, firsts.item(group.index), frozen)
        blocks[group.index, :end][~in_tree] = 0
        if not past.wrapped:
            ends[group.index] = min(end, past.num_published)
    for index, span in enumerate(state.spans):
        if span.kind not in ("cross", "ring"):
            ends[index] = 0 if span.kind == "state" else past.num_published
            firsts[index] = min(firsts[index], ends[index])
            blocks[index, ends[index] :] = 0
    return replace(past, blocks=blocks, ends=ends, firsts=firsts, num_blocks=past.num_published)


# -- admission --------------------------------------------------------------------------------------------------------


def share(state: CacheState, row: int, extent: Extent, num_columns: int) -> None:
    """Write the tree's blocks that are in span after so many columns into a new row's table, and hold them.

    The extent must be held already.
    """
    rows, start, num_tokens = state.rows, extent.start, num_columns * state.block_size
    for group in state.linear:
        index, num_sinks = group.index, group.span.num_sink_blocks
        first = min(group.span.first_block(num_tokens), num_columns)
        rows.firsts_of[index][row], rows.ends_of[index][row] = first, num_columns
        if num_sinks or start > first:
            table = rows.block_table[index, row]
            _show(table, index, extent, first, num_sinks)
            shared = _without_holes(table, 0, num_columns, first, num_sinks)
        else:
            shared = extent.blocks[index, first - start :]
            rows.table_of[index][row][first:num_columns] = shared
        if _is_only_holder(extent, 0 if num_sinks else first):
            group.retain_unheld(shared)
        else:
            group.retain(shared)


def _show(table: NDArray[np.int32], index: int, extent: Extent, first: int, num_sinks: int) -> None:
    """Write one group's blocks on the path to an extent into a table: the sinks, and those from `first` on."""
    node = extent
    while node.parent is not None and (node.start + node.blocks.shape[1] > first or num_sinks):
        start, end = node.start, node.start + node.blocks.shape[1]
        low = max(first, start)
        if low < end:
            table[low:end] = node.blocks[index, low - start :]
        if start < num_sinks:
            stop = min(num_sinks, end)
            table[start:stop] = node.blocks[index, : stop - start]
        node = node.parent


# -- prompts in chunks ------------------------------------------------------------------------------------------------


def missing_columns(state: CacheState, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the columns that rows lack for their next chunk, by sliding group and row, `[num_groups, num_rows]`."""
    num_columns, computed = state.rows.num_blocks[rows], state.rows.num_computed[rows]
    assert state.max_chunk_tokens is not None
    wanted = np.minimum(-(-(computed + state.max_chunk_tokens) // state.block_size), num_columns)
    ends = state.rows.ends[[group.index for group in state.sliding]][:, rows]
    missing: NDArray[np.int64] = np.maximum(wanted - ends, 0)
    return missing


def add_columns(state: CacheState, row: int, group: SpannedGroup, num_columns: int) -> None:
    """Give a row the next blocks of a sliding group; there must be as many."""
    end = state.rows.ends_of[group.index][row]
    needs = [0] * len(state.pools)
    needs[state.pool_of[group.index]] = num_columns
    state.make_room(needs)
    state.rows.block_table[group.index, row, end : end + num_columns] = state.take(group.index, num_columns)
    state.rows.ends_of[group.index][row] = end + num_columns


def prepare_chunks(state: CacheState, rows: NDArray[np.int64]) -> None:
    """Give rows the blocks of sliding groups that their next chunks need, as far as there are any."""
    missing = missing_columns(state, rows)
    if not missing.any():
        return
    for row in rows.tolist():
        state.publish(state.rows.sequence_at(row))
    state.slide()
    for at, row in enumerate(rows.tolist()):
        for group, wanted in zip(state.sliding, missing[:, at].tolist(), strict=True):
            can = min(wanted, group.pool.num_free + state.tree.evictable_in(group.pool))
            if can:
                add_columns(state, row, group, can)
    if state.rows.num_waiting:
        _show_waiting(state)


# -- falling out of span ----------------------------------------------------------------------------------------------


def slide(state: CacheState) -> None:
    """Let every running row give up the blocks that its next token does not need, all rows at once."""
    rows = state.rows
    running = np.flatnonzero(rows.state == RUNNING)
    computed = rows.num_computed[running]
    for group in state.sliding:
        index = group.index
        first = np.minimum(group.span.first_blocks(computed), rows.ends[index, running])
        due = first > rows.firsts[index, running]
        if due.any():
            _slide_group(state, group, running[due], first[due])
    if rows.num_waiting:
        _show_waiting(state)


def _slide_group(state: CacheState, group: SpannedGroup, due: NDArray[np.int64], first: NDArray[np.int64]) -> None:
    rows, index = state.rows, group.index
    start = np.maximum(rows.firsts[index, due], group.span.num_sink_blocks)
    published = rows.num_published[due]
    rows.firsts[index, due] = first
    own = _take_from_table(state, index, due, np.maximum(start, published), first)
    if len(own):
        group.pool.give(own)
    stop = np.minimum(first, published)
    shared = _take_from_table(state, index, due, start, stop)
    if len(shared):
        group.relinquish_each(shared)
        for row, low in zip(due[start < stop].tolist(), start[start < stop].tolist(), strict=True):
            group.offer(rows.sequence_at(row)._extent, low)


def _take_from_table(
    state: CacheState, index: int, due: NDArray[np.int64], start: NDArray[np.int64], stop: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Take the blocks in columns start .. stop-1 of each row out of a group's table."""
    counts = np.maximum(stop - start, 0)
    total = int(counts.sum())
    if not total:
        return NO_BLOCKS
    at_rows = np.repeat(due, counts)
    columns = np.repeat(start - np.cumsum(counts) + counts, counts) + np.arange(total)
    table = state.rows.block_table[index]
    blocks: NDArray[np.int32] = table[at_rows, columns]
    table[at_rows, columns] = 0
    state.rows.version[due[counts > 0]] += 1
    return blocks


def _show_waiting(state: CacheState) -> None:
    """Show in the rows of waiting beams what their leaders have let go."""
    for beam in state.rows.running():
        if beam.leader is not None:
            state.show_leaders_blocks(beam)


# -- publishing -------------------------------------------------------------------------------------------------------


def as_tree_blocks(state: CacheState, sequence: Sequence, start: int, stop: int) -> Blocks:
    """Return a row's blocks start .. stop-1 as the tree takes them, `[num_groups, stop - start]`: -1 where it has none.

    Of a state group these are its checkpoints.
    """
    rows, row = state.rows, sequence.row
    blocks: Blocks = rows.block_table[:, row, start:stop].copy()
    for group in state.rings:
        if rows.wrapped[row]:
            blocks[group.index] = -1
        else:
            blocks[group.index, max(rows.ends_of[group.index][row] - start, 0) :] = -1
    for group in state.sliding:
        first = rows.firsts_of[group.index][row]
        if first > start:
            blocks[group.index, max(group.span.num_sink_blocks - start, 0) : first - start] = -1
    if state.recurrent is not None:
        blocks[state.recurrent.index] = -1
        for column, checkpoint in sequence._checkpoints:
            if start <= column < stop:
                blocks[state.recurrent.index, column - start] = checkpoint
    if state.cross is not None:
        blocks[state.cross] = -1
    return blocks


def has_holes(state: CacheState, sequence: Sequence, start: int) -> bool:
    """Say whether some group may lack blocks of a row's from column `start` on."""
    rows, row = state.rows, sequence.row
    if state.recurrent is not None or state.cross is not None or (state.rings and rows.wrapped[row]):
        return True
    for group in state.sliding:  # noqa: SIM110  # a generator costs twice as much for so few
        if rows.firsts_of[group.index][row] > start:
            return True
    return False


def adopt(state: CacheState, extent: Extent, blocks: Blocks, *, held: bool) -> None:
    """Count blocks that an extent has just taken: held by the row that they come from, or by nobody."""
    if not held and not extent.has_holes:
        num_blocks = blocks.shape[1]
        for group in state.spanned:
            group.num_evictable += num_blocks
        return
    for group in state.spanned:
        present = blocks[group.index]
        if extent.has_holes:
            present = present[present >= 0]
        if held and group.span.kind != "state":
            group.references[present] = 1
        else:
            group.num_evictable += len(present)


def merge(state: CacheState, sequence: Sequence, start: int, existing: int, own: Blocks, *, held: bool) -> None:
    """Settle a row's blocks for content that the tree had already: they fill the tree's holes, the others go back.

    `own` are the blocks of columns start .. start+existing-1. With `held`, the row goes on with the tree's blocks.
    """
    node, end = sequence._extent, start + existing
    left = own[:, :existing].copy()
    while node.parent is not None and node.start + node.blocks.shape[1] > start:
        low, high = max(node.start, start), min(node.start + node.blocks.shape[1], end)
        if low < high:
            theirs = node.blocks[:, low - node.start : high - node.start]
            was_hole = theirs < 0 if state.tree.has_listeners else None
            _merge_columns(state, sequence, theirs, left[:, low - start : high - start], low, held=held)
            if was_hole is not None:
                for index, filled in enumerate(was_hole & (theirs >= 0)):
                    state.note_filled(node, index, low - node.start + np.flatnonzero(filled))
        node = node.parent
    if state.has_full:
        state.group_pools[0].give(left[0])
    for group in state.spanned:
        unused = left[group.index]
        group.pool.give(unused[unused >= 0])


def _merge_columns(
    state: CacheState, sequence: Sequence, theirs: Blocks, ours: Blocks, column: int, *, held: bool
) -> None:
    """Exchange the blocks of some columns with an extent's; what is left of `ours` is not needed by anyone."""
    row, table = sequence.row, state.rows.block_table
    if state.has_full and held:
        table[0, row, column : column + ours.shape[1]] = theirs[0]
    for group in state.spanned:
        there, here = theirs[group.index], ours[group.index]
        given = (there < 0) & (here >= 0)
        is_held = held and group.span.kind != "state"
        if given.any():
            there[given] = here[given]
            if is_held:
                group.references[here[given]] = 1
            else:
                group.num_evictable += int(given.sum())
        doubled = (here >= 0) & ~given
        if is_held and doubled.any():
            group.retain(there[doubled])
            table[group.index, row, column + np.flatnonzero(doubled)] = there[doubled]
        here[given] = -1
