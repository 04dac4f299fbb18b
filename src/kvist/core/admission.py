"""How a prompt gets its row: what it may ask, what it reuses, what it must be given."""

from __future__ import annotations

from kvist.core import branches, holdings, recurrent, rings
from kvist.core.extents import Blocks, Extent, Match, Namespace
from kvist.core.lower import DEVICE
from kvist.core.misses import OTHER_NAMESPACE, miss_of, shown_miss
from kvist.core.promotion import find_lower, promote
from kvist.core.rewinding import extent_ending_at
from kvist.core.sequences import Encoder, Sequence, Wishes
from kvist.core.state import CacheState
from kvist.core.tokens import TOKEN_BYTES
from kvist.errors import ArgumentError, NeverFits

__all__ = [
    "admit",
    "bring_up",
    "check_prompt",
    "count_prompt",
    "extent_of",
    "match_prompt",
    "most_needs",
    "prompt_needs",
]


def check_prompt(state: CacheState, num_tokens: int, num_beams: int, free_rows: int, num_encoder_tokens: int) -> None:
    """Raise unless an empty cache with so many free rows would admit a prompt of that length."""
    if not num_tokens:
        raise ArgumentError("tokens is empty; a prompt has at least one token")
    longest = state.rows.max_tokens
    if num_tokens > longest:
        raise NeverFits(f"the prompt has {num_tokens} tokens, max_sequence_length is {longest}")
    if num_encoder_tokens:
        _check_encoder(state, num_encoder_tokens)
    may_need_rings = num_beams > 1 and state.rings
    if may_need_rings or num_tokens // state.block_size + num_beams + num_encoder_tokens >= state.sure_columns:
        _check_pools(state, num_tokens, num_beams, num_encoder_tokens)
    if num_beams > free_rows:
        state.require_rows(num_beams, free_rows)


def _check_pools(state: CacheState, num_tokens: int, num_beams: int, num_encoder_tokens: int) -> None:
    needs = most_needs(state, num_tokens, num_beams, num_encoder_tokens)
    for index, pool in enumerate(state.pools):
        if needs[index] > pool.num_blocks:
            raise NeverFits(
                f"the prompt needs {needs[index]} blocks of {state.block_size} tokens, "
                f"the whole pool of group {state.pool_of.index(index)} has {pool.num_blocks}"
            )


def _check_encoder(state: CacheState, num_encoder_tokens: int) -> None:
    if state.cross is None:
        raise ArgumentError(f"encoder_tokens is {num_encoder_tokens}, but no layer has cross attention")
    if num_encoder_tokens > state.rows.max_tokens:
        raise NeverFits(f"the encoder has {num_encoder_tokens} tokens, max_sequence_length is {state.rows.max_tokens}")


def prompt_needs(
    state: CacheState, num_tokens: int, num_cached: int, num_beams: int, num_encoder_tokens: int
) -> list[int]:
    """Count the blocks by pool that a prompt must be given, of which `num_cached` tokens are cached."""
    block_size = state.block_size
    num_reused, num_full = num_cached // block_size, num_tokens // block_size
    if state.is_plain:
        return [num_full - num_reused + (num_beams if num_tokens % block_size else 0)]
    num_columns = state.rows.columns_for(num_tokens)
    num_private = num_columns - num_full
    needs = state.column_needs(num_columns - num_reused + (num_beams - 1) * num_private)
    for group in state.rings:
        end = min(num_columns, rings.geometry(group).num_blocks)
        own = end if rings.wraps(state, num_tokens) else end - num_full
        needs[state.pool_of[group.index]] += end - num_reused + (num_beams - 1) * own
    if state.max_chunk_tokens:
        num_later = num_columns - state.chunk_end(num_tokens, num_cached)
        for group in state.sliding:
            needs[state.pool_of[group.index]] -= num_later
    if state.recurrent is not None:
        needs[state.pool_of[state.recurrent.index]] += num_beams
    if state.cross is not None:
        needs[state.pool_of[state.cross]] += -(-num_encoder_tokens // block_size)
    return needs


def most_needs(state: CacheState, num_tokens: int, num_beams: int, num_encoder_tokens: int) -> list[int]:
    """Count the blocks by pool that a prompt holds at most while it is computed, with nothing cached."""
    needs = prompt_needs(state, num_tokens, 0, num_beams, num_encoder_tokens)
    if state.max_chunk_tokens:
        num_columns, at_first = -(-num_tokens // state.block_size), state.chunk_end(num_tokens, 0)
        for group in state.sliding:
            needs[state.pool_of[group.index]] += min(num_columns, state.most_columns(group)) - at_first
    return needs


def match_prompt(
    state: CacheState, prompt: bytes | memoryview, namespace: Namespace, limit: int | None = None
) -> Match | None:
    """Find a prompt up to `limit` bytes: all but its last token, which must be computed for its logits."""
    if limit is None:
        limit = len(prompt) - TOKEN_BYTES
    if state.rings and rings.wraps(state, len(prompt) // TOKEN_BYTES):
        return None
    while (root := state.tree.roots.get(namespace)) is not None:
        match = state.tree.find(root, prompt, limit, partial=state.tree.partial)
        if not state.publish_along(match):
            return state.tree.fit(match) if state.spanned else match
    return None


def bring_up(
    state: CacheState,
    prompt: bytes | memoryview,
    namespace: Namespace,
    match: Match | None,
    num_beams: int = 1,
    limit: int | None = None,
) -> tuple[Match | None, Extent | None]:
    """Bring what the host tier has of a prompt to the device, if there is room for it and for the rest of the prompt.

    Returns the match then, and an extent that the caller releases once somebody else holds what it matched.
    """
    if limit is None:
        limit = len(prompt) - TOKEN_BYTES
    find = find_lower(state, prompt, namespace, limit, match)
    if find is None:
        return match, None
    num_tokens = len(prompt) // TOKEN_BYTES
    held = promote(state, find, prompt_needs(state, num_tokens, find.num_columns * state.block_size, num_beams, 0))
    return (match, None) if held is None else (match_prompt(state, prompt, namespace, limit), held)


def admit(
    state: CacheState,
    prompt: bytes | memoryview,
    namespace: Namespace,
    match: Match | None,
    wishes: Wishes,
    resumed: Sequence | None = None,
) -> Sequence:
    """Give a checked prompt a row that holds what it matched, and blocks for the rest, or raise OutOfBlocks.

    The row is a new sequence's, or that of one to be `resumed`.
    """
    rows, num_tokens = state.rows, len(prompt) // TOKEN_BYTES
    num_blocks, num_reused, num_cached = rows.columns_for(num_tokens), 0, 0
    if match is not None:
        num_reused = match.position // state.tree.block_bytes
        num_cached = match.position // TOKEN_BYTES + match.num_partial_tokens
    if state.is_plain and wishes.num_beams == 1:
        needs = [num_blocks - num_reused]
        if needs[0] > state.pools[0].num_free + state.tree.num_evictable - num_reused:
            state.require(needs, match)
    else:
        needs = prompt_needs(state, num_tokens, num_cached, wishes.num_beams, wishes.num_encoder_tokens)
        state.require(needs, match)
    sources = None if match is None or match.source is None else _sources(match)
    sequence = resumed
    if sequence is None:
        miss = miss_of(state, prompt, namespace, match)
        sequence = Sequence(rows, namespace, wishes, num_tokens, num_cached, miss)
    _open_row(state, sequence, match, num_reused)
    if state.is_plain:  # its blocks come first: its tokens then get the memory of those that had to go for it
        _fill_alone(state, sequence.row, num_reused, num_blocks)
    rows.begin(sequence, num_reused, num_blocks, bytes(prompt[num_reused * state.tree.block_bytes :]))
    if not state.is_plain:
        _fill_groups(state, sequence, match, needs, num_cached, wishes.num_encoder_tokens)
    if sources is not None or sequence.retention is not None:
        _note_cached(state, sequence, match, sources, num_reused)
    if wishes.num_beams > 1:
        branches.add_beams(state, sequence, bytes(prompt), wishes.num_beams)
    return sequence


def _open_row(state: CacheState, sequence: Sequence, match: Match | None, num_reused: int) -> None:
    """Give a sequence a row that holds what was matched and shows its blocks, and count a hit of each extent."""
    tree, rows = state.tree, state.rows
    extent = tree.root(sequence.namespace) if match is None else extent_of(state, match)
    tree.hold(extent)
    row = rows.open(sequence, extent)
    if not num_reused:
        return
    node, end, table = extent, num_reused, rows.table_of[0][row]
    while node.parent is not None:
        node.hits += 1
        start = node.start
        if state.has_full:
            table[start:end] = node.blocks[0]
        node, end = node.parent, start
    if state.copies is not None:
        state.copies.hit(extent)
    if state.linear:
        holdings.share(state, row, extent, num_reused)


def count_prompt(state: CacheState, sequence: Sequence) -> None:
    """Count a prompt that has just been admitted, and the blocks of each group that it reused or was given."""
    num_tokens, num_cached = sequence.num_prompt_tokens, sequence.num_cached_tokens
    counters, miss, num_beams = state.counters, sequence.miss, 1
    counters.num_admitted += 1
    counters.num_query_tokens += num_tokens
    counters.num_hit_tokens += num_cached
    counters.recent.append((num_tokens, num_cached))
    if miss:
        counters.misses[miss] += num_tokens - 1 - num_cached
        if miss is OTHER_NAMESPACE:
            sequence.miss = shown_miss(state, miss)
    num_blocks, num_reused = state.rows.blocks_of[sequence.row], num_cached // state.block_size
    num_new = num_blocks - num_reused
    if sequence._beams is not None:
        num_beams = len(sequence._beams)
        num_new += (num_beams - 1) * (num_blocks - num_tokens // state.block_size)
    if state.has_full:
        full = counters.groups[0]
        full.num_reused += num_reused
        full.num_missed += num_new
    if not state.is_plain:
        _count_in_groups(state, sequence.row, num_reused, num_new - num_blocks, num_beams)


def _count_in_groups(state: CacheState, row: int, num_reused: int, num_more: int, num_beams: int) -> None:
    """Count what a prompt reuses in the other groups, and what it was given: `num_more` than its row has columns."""
    rows, groups = state.rows, state.counters.groups
    for group in state.linear:
        index, counts = group.index, groups[group.index]
        num_holes = rows.firsts_of[index][row] - group.span.num_sink_blocks
        counts.num_reused += num_reused - num_holes if num_holes > 0 else num_reused
        counts.num_missed += rows.ends_of[index][row] + num_more
    if state.recurrent is not None:
        groups[state.recurrent.index].admit(0, num_beams)
    if state.cross is not None:
        groups[state.cross].admit(0, rows.ends_of[state.cross][row])


def _fill_alone(state: CacheState, row: int, start: int, end: int) -> None:
    """Give a row new blocks at columns start .. end-1 of the only table; so many must be free or evictable."""
    pool, counts, n = state.pools[0], state.counters.groups[0], end - start
    missing = n - pool.num_free
    if missing > 0:
        counts.num_reallocated += missing
        state.tree.evict(pool, missing)
    counts.num_allocated += n
    pool.take_into(state.rows.table_of[0][row], start, end)


def _fill_groups(
    state: CacheState,
    sequence: Sequence,
    match: Match | None,
    needs: list[int],
    num_cached: int,
    num_encoder_tokens: int,
) -> None:
    """Give a row what it must have besides what it reuses, in every group."""
    row, rows = sequence.row, state.rows
    start, end = rows.published_of[row], rows.blocks_of[row]
    checkpoint = None if state.recurrent is None else _checkpoint(state, match)
    state.make_room(needs)
    state.fill(row, start, end, num_computed=num_cached)
    if state.recurrent is not None:
        recurrent.give_row_a_state(state, row)
        if checkpoint is not None:
            recurrent.order_state_move(state, checkpoint, row)
    if num_encoder_tokens and state.cross is not None:
        blocks = state.take(state.cross, -(-num_encoder_tokens // state.block_size)).copy()
        state.join_encoder(sequence, Encoder(blocks, num_encoder_tokens))
    if match is not None and match.known > match.position:
        sequence.num_shared_tokens = match.known // TOKEN_BYTES
    if state.rings and rings.wraps(state, sequence.num_tokens):
        rings.wrap(state, row)
        rows.refresh_limit(row)


def _checkpoint(state: CacheState, match: Match | None) -> int | None:
    """Return the block with the state after a match, if states are kept and the match is not empty."""
    if state.recurrent is None or match is None or not match.position:
        return None
    # The match's own extent may have been cut at its end since.
    node, column = match.bottom, match.position // state.tree.block_bytes - 1
    while node.start > column:
        assert node.parent is not None
        node = node.parent
    return node.blocks.item(state.recurrent.index, column - node.start)


def extent_of(state: CacheState, match: Match) -> Extent:
    """Return the extent that ends where the whole blocks of a match do, split off where needed."""
    return match.extent if match.child is None else state.tree.split(match.child, match.child_blocks)


def _sources(match: Match) -> Blocks:
    """Return the blocks of all groups, `[num_groups]`, whose first tokens are to be copied, if a block agrees in part.

    Making room may evict the source, and may even hand out its block: its content is still there when the copy is made,
    since moves come before anything that is written.
    """
    assert match.source is not None
    blocks: Blocks = match.source.blocks[:, match.source_block].copy()
    return blocks


def _note_cached(
    state: CacheState, sequence: Sequence, match: Match | None, sources: Blocks | None, num_reused: int
) -> None:
    """Order the copies of what a new sequence need not compute, and keep that as the sequence asks."""
    if match is not None and sources is not None:
        if state.is_plain:
            destination = state.rows.block_table.item(0, sequence.row, num_reused)
            state.order_move(sources.item(0), destination, match.num_partial_tokens)
        else:
            state.order_column_moves(sources, num_reused, sequence.row, match.num_partial_tokens)
        state.rows.computed_of[sequence.row] += match.num_partial_tokens
        state.note_committed(sequence.row, state.rows.computed_of[sequence.row])
    if sequence.retention is not None and num_reused:
        _keep_reused(state, sequence, num_reused)


def _keep_reused(state: CacheState, sequence: Sequence, num_reused: int) -> None:
    """Let what a sequence reuses be kept as it asks, which cuts extents where that changes."""
    for stop, _ in list(sequence._keeps(0, num_reused))[:-1]:
        extent_ending_at(state, sequence, stop)
    runs = iter(sequence._keeps(0, num_reused))
    stop, keep = next(runs)
    end = 0
    for extent in sequence._extent.path():
        if end == stop:
            stop, keep = next(runs)
        end += extent.num_blocks
        old_priority, extent.keep = extent.priority, keep
        if state.recorder is not None:
            state.recorder.updated(extent, old_priority, DEVICE)
