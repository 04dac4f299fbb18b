"""How a sequence takes tokens back, inside what is its own and inside what it has published."""

from __future__ import annotations

from kvist.core.extents import Extent
from kvist.core.sequences import Sequence
from kvist.core.state import CacheState
from kvist.core.tokens import TOKEN_BYTES

__all__ = ["extent_ending_at", "rewind_own", "rewind_published"]


def rewind_own(state: CacheState, sequence: Sequence, left: int) -> None:
    """Drop the tokens after the first `left`, none of them published, and the blocks past the last token."""
    rows, row = state.rows, sequence.row
    if left < rows.tail_start(row):
        kept = sequence._earlier[: (left - sequence._earlier_start) * TOKEN_BYTES]
        rows.set_earlier(sequence, sequence._earlier_start, kept)
    rows.num_tokens[row] = left
    needed = -(-left // state.block_size)
    rows.version[row] += int(rows.num_blocks[row] > needed)
    state.give_row(row, needed)


def rewind_published(state: CacheState, sequence: Sequence, left: int) -> None:
    """Step back to the extent that ends where the sequence goes on, with a private copy of a block it stops inside."""
    rows, row = state.rows, sequence.row
    boundary, inside = divmod(left, state.block_size)
    old, published = sequence._extent, rows.num_published.item(row)
    if inside and old.references > 1 and rows.num_blocks.item(row) == published:
        state.require_blocks(1)
    source = rows.block_table.item(0, row, boundary)
    kept_tokens = sequence.tokens[left - inside : left].tobytes()
    extent = extent_ending_at(state, sequence, boundary)
    state.tree.hold(extent)
    state.give_row(row, published)
    state.tree.release(old)
    sequence._extent = extent
    rows.block_table[:, row, boundary:published] = 0
    rows.num_blocks[row] = boundary
    rows.set_earlier(sequence, boundary * state.block_size, kept_tokens)
    rows.set_published(sequence, boundary)
    rows.version[row] += 1
    if inside:
        state.fill(row, boundary, boundary + 1)
        state.order_move(source, rows.block_table.item(0, row, boundary), inside)


def extent_ending_at(state: CacheState, sequence: Sequence, num_blocks: int) -> Extent:
    """Return the extent on the sequence's path that ends after `num_blocks` blocks, split off where needed."""
    extent: Extent = sequence._extent
    end = state.rows.num_published.item(sequence.row)
    while extent.parent is not None and end - extent.num_blocks >= num_blocks:
        end -= extent.num_blocks
        extent = extent.parent
    return state.tree.split(extent, num_blocks - end + extent.num_blocks) if end > num_blocks else extent
