"""How a sequence takes tokens back: inside what is its own, inside what it has published, or to begin again."""

from __future__ import annotations

import numpy as np

from kvist.core import holdings, rings
from kvist.core.extents import Extent
from kvist.core.sequences import Sequence
from kvist.core.state import CacheState
from kvist.core.tokens import TOKEN_BYTES
from kvist.errors import OutOfBlocks, SequenceError

__all__ = [
    "can_step_back",
    "extent_ending_at",
    "refuse_open_media",
    "rewind_own",
    "rewind_published",
    "rewind_to_nothing",
]


def can_step_back(state: CacheState, sequence: Sequence, left: int) -> bool:
    """Say whether a row still has all that it needs to go on after its first `left` tokens."""
    rows, row = state.rows, sequence.row
    if state.recurrent is not None and left < rows.computed_of[row]:
        return False
    computed = min(left, rows.computed_of[row])
    if rows.bubble and left // state.block_size < rows.published_of[row]:
        return False
    if rows.wrapped[row] and not _ring_steps_back(state, row, left):
        return False
    return all(group.span.first_block(computed) >= rows.firsts_of[group.index][row] for group in state.sliding)


def _ring_steps_back(state: CacheState, row: int, left: int) -> bool:
    """Say whether no token that the next one sees has been overwritten in a ring, nor its block exchanged."""
    rows = state.rows
    for group in state.rings:
        ring = rings.geometry(group)
        oldest_seen = left + 1 - (ring.window - ring.sink_tokens)
        most_tokens = max(rows.most_tokens.item(row), rows.tokens_of[row])
        if most_tokens > ring.num_tokens and oldest_seen < most_tokens - ring.num_ring_tokens:
            return False
    return left // state.block_size >= rows.published_of[row]


def rewind_to_nothing(state: CacheState, sequence: Sequence) -> None:
    """Take all tokens back in several groups: the row keeps its state's block and its encoder's, and nothing else."""
    rows, row = state.rows, sequence.row
    holdings.release_shared(state, sequence)
    holdings.give_all_own(state, row)
    if state.has_full:
        state.pools[0].give(rows.block_table[0, row, rows.published_of[row] : rows.blocks_of[row]])
    if state.recurrent is not None:
        state.recurrent.pool.give(np.array([block for _, block in sequence._checkpoints], np.int32))
        sequence._checkpoints.clear()
    old, root = sequence._extent, state.tree.root(sequence.namespace)
    state.tree.hold(root)
    sequence._extent = root
    state.tree.release(old)
    rows.cut(row, 0)
    rows.wrapped[row], rows.frozen[:, row], rows.most_tokens[row] = False, 0, 0
    rows.set_earlier(sequence, 0, b"")
    rows.set_published(sequence, 0)
    rows.version[row] += 1


def rewind_own(state: CacheState, sequence: Sequence, left: int) -> None:
    """Drop the tokens after the first `left`, none of them published, and the blocks past the last token."""
    rows, row = state.rows, sequence.row
    if left < rows.tail_start(row):
        kept = sequence._earlier[: (left - sequence._earlier_start) * TOKEN_BYTES]
        rows.set_earlier(sequence, sequence._earlier_start, kept)
    rows.num_tokens[row] = left
    needed = rows.columns_for(left)
    rows.version[row] += int(rows.num_blocks[row] > needed)
    state.give_row(row, needed)


def rewind_published(state: CacheState, sequence: Sequence, left: int) -> None:
    """Step back to the extent that ends where the sequence goes on, with a private copy of a block it stops inside."""
    rows, row = state.rows, sequence.row
    boundary, inside = divmod(left, state.block_size)
    num_computed = rows.computed_of[row]
    rows.computed_of[row] = min(num_computed, left)  # first, or what it goes on from slides out while room is made
    if inside and sequence._extent.references > 1:
        own = holdings.num_growing_from(state, row, rows.published_of[row])
        for group in state.rings:
            own[state.pool_of[group.index]] += max(rows.ends_of[group.index][row] - rows.published_of[row], 0)
        needs = zip(state.needs_between(boundary, boundary + 1), own, strict=True)
        try:
            state.require([max(needed - had, 0) for needed, had in needs])
        except OutOfBlocks:
            rows.computed_of[row] = num_computed
            raise
    sources = rows.block_table[:, row, boundary].copy()
    kept_tokens = rows.packed_tokens(sequence)[(left - inside) * TOKEN_BYTES : left * TOKEN_BYTES]
    old, published = sequence._extent, rows.num_published.item(row)
    extent = extent_ending_at(state, sequence, boundary)
    state.tree.hold(extent)
    state.give_row(row, published)
    if state.linear:
        holdings.release_shared(state, sequence)
    state.tree.release(old)
    sequence._extent = extent
    rows.cut(row, boundary)
    rows.set_earlier(sequence, boundary * state.block_size, kept_tokens)
    rows.set_published(sequence, boundary)
    rows.version[row] += 1
    if state.linear:
        holdings.hold_shared(state, row)
    if inside:
        state.fill(row, boundary, boundary + 1)
        state.order_column_moves(sources, boundary, row, inside)


def extent_ending_at(state: CacheState, sequence: Sequence, num_blocks: int) -> Extent:
    """Return the extent on the sequence's path that ends after `num_blocks` blocks, split off where needed."""
    extent: Extent = sequence._extent
    end = state.rows.num_published.item(sequence.row)
    while extent.parent is not None and end - extent.num_blocks >= num_blocks:
        end -= extent.num_blocks
        extent = extent.parent
    return state.tree.split(extent, num_blocks - end + extent.num_blocks) if end > num_blocks else extent


def refuse_open_media(state: CacheState, sequence: Sequence, left: int) -> None:
    """Raise SequenceError if a sequence would end inside a media span, whose rest it would still be taken to have."""
    if len(state.identities) and (
        missing := state.identities.num_open_tokens(state.rows.packed_tokens(sequence)[: left * TOKEN_BYTES])
    ):
        raise SequenceError(f"rewind: {left} tokens end inside a media span, {missing} tokens before its end")
