"""How running sequences get tokens and blocks, and how it is noted what of them is computed: all rows at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvist.core import branches, holdings, recurrent, rings
from kvist.core.arguments import as_counts
from kvist.core.moves import Move
from kvist.core.rows import Batch
from kvist.core.sequences import Sequence
from kvist.core.state import CacheState
from kvist.core.tokens import TOKEN_BYTES
from kvist.errors import NeverFits, OutOfBlocks, SequenceError

__all__ = [
    "accept",
    "append_arrays",
    "append_one_each",
    "check_chunk",
    "commit_one",
    "commit_rows",
    "grow",
    "reserve",
]


def append_one_each(state: CacheState, batch: Batch, ids: NDArray[np.int32]) -> None:
    """Add one token to each row; only rows that cross a block boundary, or whose tail is full, take more than that."""
    rows, select = state.rows, batch.select
    num_tokens = rows.num_tokens[select]
    at_limit = (num_tokens >= rows.limit[select]).nonzero()[0]
    if at_limit.size:
        _grow_by_one(state, batch.rows[at_limit])
    rows.tail[rows.tail_origin[select] + num_tokens] = ids
    rows.num_tokens[select] = num_tokens + 1


def append_arrays(state: CacheState, batch: Batch, packed: list[bytes]) -> None:
    """Add packed tokens of any number to each row."""
    rows = state.rows
    grow(state, batch, np.fromiter(map(len, packed), np.int64, len(packed)) // TOKEN_BYTES, "append")
    for row, added in zip(batch.rows.tolist(), packed, strict=True):
        rows.extend_earlier(rows.sequence_at(row), added)
    rows.refresh_limits(batch.rows)


def grow(state: CacheState, batch: Batch, num_added: int | NDArray[np.int64], call: str) -> None:
    """Give each row the blocks that `num_added` more tokens need; all rows or none."""
    rows = state.rows
    if not len(batch.rows):
        return
    wanted = rows.num_tokens[batch.select] + num_added
    _check_length(state, batch.rows, wanted, call)
    have = rows.num_blocks[batch.select].copy()
    extra = np.maximum(rows.columns_for_each(wanted) - have, 0)
    total = int(extra.sum())
    if state.rings:
        _grow_with_rings(state, batch, have, extra, wanted)
        return
    if not total:
        return
    needs = state.column_needs(total)
    state.require(needs)
    state.make_room(needs)
    _add_columns(state, batch, have, extra)


def _add_columns(state: CacheState, batch: Batch, have: NDArray[np.int64], extra: NDArray[np.int64]) -> None:
    at_rows = np.repeat(batch.rows, extra)
    firsts = np.cumsum(extra) - extra
    columns = np.repeat(have - firsts, extra) + np.arange(len(at_rows))
    _give_columns(state, at_rows, columns)
    _note_columns(state, batch.rows, have + extra)
    state.rows.refresh_limits(batch.rows)


def _require_together(state: CacheState, needs: list[int], more: list[int]) -> list[int]:
    total = [n + m for n, m in zip(needs, more, strict=True)]
    state.require(total)
    return total


def _publish_wrapping(state: CacheState, batch: Batch, num_tokens: NDArray[np.int64]) -> None:
    """Publish the rows that are to wrap a last time."""
    for row, tokens in zip(batch.rows.tolist(), num_tokens.tolist(), strict=True):
        if rings.wraps(state, tokens) and not state.rows.wrapped[row] and state.rows.sequence_at(row).publishes:
            state.publish(state.rows.sequence_at(row))


def _grow_with_rings(
    state: CacheState,
    batch: Batch,
    have: NDArray[np.int64],
    extra: NDArray[np.int64],
    wanted: NDArray[np.int64],
) -> None:
    """Give rows columns, and their rings what they must have of their own before they overwrite it."""
    rings.refuse_overwriting(state, batch.rows, wanted)
    grown = rings.growth_of(state, batch.rows, have + extra, wanted)
    of_columns = state.column_needs(int(extra.sum()))
    taking_over = False
    try:
        needs = _require_together(state, of_columns, rings.num_needed(state, grown, taking_over=False))
    except OutOfBlocks:
        taking_over = True
        needs = _require_together(state, of_columns, rings.num_needed(state, grown, taking_over=True))
    else:
        _publish_wrapping(state, batch, wanted)
    state.make_room(needs)
    rings.perform(state, grown, batch.rows, wanted, taking_over=taking_over)
    _add_columns(state, batch, have, extra)


def commit_rows(state: CacheState, batch: Batch, num_computed_tokens: ArrayLike | None) -> None:
    """Note how many tokens of each row are computed; None for all."""
    rows, select = state.rows, batch.select
    if num_computed_tokens is None:
        counts = rows.num_tokens[select]
    else:
        counts = as_counts(num_computed_tokens, len(batch.rows), "num_computed_tokens")
        _check_commit(state, batch, counts)
    if rows.num_waiting and state.recurrent is not None:
        for row, count in zip(batch.rows.tolist(), counts.tolist(), strict=True):
            branches.require_exact_prompt(state, rows.sequence_at(row), count)
    if state.max_chunk_tokens:
        check_chunk(state, batch.rows, counts, "commit")
    rows.num_computed[select] = counts
    state.note_rows_committed()
    if state.recurrent is not None:
        recurrent.checkpoint(state, batch.rows)
    if rows.num_waiting:
        for row in batch.rows.tolist():
            branches.start_beams(state, rows.sequence_at(row))
    if state.max_chunk_tokens and state.sliding:
        holdings.prepare_chunks(state, batch.rows)


def accept(state: CacheState, sequence: Sequence, ids: NDArray[np.int32], nodes: NDArray[np.int64]) -> None:
    """Add the tokens of the accepted nodes of a verified tree, and order the moves of their K and V to their places.

    Node i was computed at position `num_computed + i`; `nodes` increase, so no move reads what another one has written.
    """
    rows, row = state.rows, sequence.row
    base, have = rows.computed_of[row], rows.tokens_of[row] - rows.computed_of[row]
    if len(ids) > have:
        rows.extend_earlier(sequence, ids[have:].tobytes())
        rows.refresh_limit(row)
    for group, span in enumerate(state.spans):
        if span.kind in ("state", "cross"):
            continue
        table = rows.block_table[group, row]
        sources, destinations = base + nodes, base + np.arange(len(nodes))
        if span.ring is not None:
            sources, destinations = span.ring.positions(sources), span.ring.positions(destinations)
        for to_block, from_block, to_offset, from_offset, n in _runs(sources, destinations, state.block_size):
            source, destination = table.item(from_block), table.item(to_block)
            state.moves.append(
                Move(source, destination, n, group, source_offset=from_offset, destination_offset=to_offset)
            )
    rows.computed_of[row] = base + len(ids)
    state.note_committed(row, base + len(ids))


def _runs(
    sources: NDArray[np.int64], destinations: NDArray[np.int64], block_size: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the moves of tokens between positions: (to block, from block, to offset, from offset, number of tokens).

    None writes what it reads, so that it can be made again.
    """
    at = 0
    while at < len(sources):
        source, destination = int(sources[at]), int(destinations[at])
        to_block, to_offset = divmod(destination, block_size)
        from_block, from_offset = divmod(source, block_size)
        n = 1
        longest = min(block_size - max(to_offset, from_offset), len(sources) - at)
        if from_block == to_block and source != destination:
            longest = min(longest, abs(from_offset - to_offset))
        while n < longest and sources[at + n] == source + n and destinations[at + n] == destination + n:
            n += 1
        if source != destination:
            yield to_block, from_block, to_offset, from_offset, n
        at += n


def commit_one(state: CacheState, named: Any) -> None:
    """Commit all tokens of one sequence without array operations, which cost more than they save for a single row."""
    rows = state.rows
    if type(named) is not Sequence or named.row < 0 or named._rows is not rows or named.leader is not None:
        rows.check_running(named, "commit")
    sequence: Sequence = named
    row = sequence.row
    num_tokens = rows.tokens_of[row]
    if state.max_chunk_tokens:
        check_chunk(state, np.array([row]), np.array([num_tokens]), "commit")
    if rows.num_waiting:
        branches.require_exact_prompt(state, sequence, num_tokens)
    rows.computed_of[row] = num_tokens
    state.note_committed(row, num_tokens)
    if state.recurrent is not None:
        recurrent.checkpoint(state, np.array([row]))
    if rows.num_waiting:
        branches.start_beams(state, sequence)
    if state.max_chunk_tokens and state.sliding:
        holdings.prepare_chunks(state, np.array([row]))


def _grow_by_one(state: CacheState, at_limit: NDArray[np.int64]) -> None:
    """Make room for one more token in rows that have none: a block, or an empty tail, which takes a call a row."""
    rows = state.rows
    num_tokens, num_blocks = rows.num_tokens[at_limit], rows.num_blocks[at_limit]
    if state.rings:
        grow(state, Batch(at_limit), 1, "append")
        _empty_full_tails(state, at_limit, num_tokens)
        return
    _check_length(state, at_limit, num_tokens + 1, "append")
    in_need = num_tokens >= num_blocks * state.block_size - rows.bubble
    if in_need.all():
        growing, have = at_limit, num_blocks
    else:
        growing, have = at_limit[in_need], num_blocks[in_need]
    needs = state.column_needs(len(growing))
    state.require(needs)
    state.make_room(needs)
    _give_columns(state, growing, have)
    _note_columns(state, growing, have + 1)
    _empty_full_tails(state, at_limit, num_tokens)


def _empty_full_tails(state: CacheState, at_limit: NDArray[np.int64], num_tokens: NDArray[np.int64]) -> None:
    rows = state.rows
    tails_full = rows.tail_origin[at_limit] + num_tokens >= (at_limit + 1) * rows.tail_tokens
    if tails_full.any():
        for row in at_limit[tails_full].tolist():
            rows.empty_tail(rows.sequence_at(row))
    rows.refresh_limits(at_limit)


def _give_columns(state: CacheState, at_rows: NDArray[np.int64], columns: NDArray[np.int64]) -> None:
    """Put new blocks into columns of rows, in all groups whose tables grow; there must be as many.

    A row that lacks earlier columns of a group, being computed in chunks, gets these first, chunk by chunk.
    """
    table, n = state.rows.block_table, len(at_rows)
    if state.has_full:
        table[0, at_rows, columns] = state.take(0, n)
    for group in state.sliding:
        index = group.index
        rows, at = at_rows, columns
        if state.max_chunk_tokens:
            in_turn = state.rows.ends[index, at_rows] >= state.rows.num_blocks[at_rows]
            rows, at = at_rows[in_turn], columns[in_turn]
        table[index, rows, at] = state.take(group.index, len(rows))


def _note_columns(state: CacheState, at_rows: NDArray[np.int64], num_blocks: NDArray[np.int64]) -> None:
    """Note how many columns the rows have now."""
    before = state.rows.num_blocks[at_rows]
    for group in state.sliding:
        ends = state.rows.ends[group.index]
        ends[at_rows] = np.where(ends[at_rows] >= before, num_blocks, ends[at_rows])
    state.rows.num_blocks[at_rows] = num_blocks


def reserve(state: CacheState, batch: Batch, num_added: NDArray[np.int64]) -> None:
    """Give rows capacity for more tokens, and sliding groups what the next chunk of a prompt needs; all or nothing."""
    if not state.max_chunk_tokens or not state.sliding or not len(batch.rows):
        grow(state, batch, num_added, "reserve")
        return
    rows = state.rows
    wanted = rows.num_tokens[batch.rows] + num_added
    _check_length(state, batch.rows, wanted, "reserve")
    if state.rings:
        rings.refuse_overwriting(state, batch.rows, wanted)
    extra = np.maximum(rows.columns_for_each(wanted) - rows.num_blocks[batch.rows], 0)
    needs = state.column_needs(int(extra.sum()))
    for group, missing in zip(state.sliding, holdings.missing_columns(state, batch.rows).sum(axis=1), strict=True):
        needs[state.pool_of[group.index]] += int(missing)
    state.require(needs)
    grow(state, batch, num_added, "reserve")
    holdings.prepare_chunks(state, batch.rows)


def _check_length(state: CacheState, rows: NDArray[np.int64], wanted: NDArray[np.int64], call: str) -> None:
    longest = state.rows.max_tokens
    if (wanted > longest).any():
        at = int(np.flatnonzero(wanted > longest)[0])
        raise NeverFits(f"{call}: row {rows[at]} would have {wanted[at]} tokens, max_sequence_length is {longest}")


def check_chunk(state: CacheState, rows: NDArray[np.int64], counts: NDArray[np.int64], call: str) -> None:
    """Raise SequenceError where tokens are said to be computed for which a sliding group had no blocks."""
    for group in state.sliding:
        ends = state.rows.ends[group.index, rows] * state.block_size
        if (counts > ends).any():
            at = int(np.flatnonzero(counts > ends)[0])
            raise SequenceError(
                f"{call}: row {rows[at]} cannot have {counts[at]} computed tokens: group {group.index} has blocks for "
                f"{ends[at]}; compute at most max_chunk_tokens={state.max_chunk_tokens} at a time, see chunk_limit"
            )


def _check_commit(state: CacheState, batch: Batch, counts: NDArray[np.int64]) -> None:
    rows = state.rows
    wrong = (counts < rows.num_computed[batch.rows]) | (counts > rows.num_tokens[batch.rows])
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        row = batch.rows[at]
        raise SequenceError(
            f"commit: row {row} cannot have {counts[at]} computed tokens: it has {rows.num_tokens[row]} tokens, "
            f"and {rows.num_computed[row]} of them are computed (rewind takes tokens back)"
        )
