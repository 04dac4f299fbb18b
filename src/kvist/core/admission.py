"""How a prompt gets its row: what it may ask, what it reuses, what it must be given."""

from __future__ import annotations

from kvist.core import branches
from kvist.core.extents import Blocks, Extent, Match, Namespace
from kvist.core.retention import Retention
from kvist.core.rewinding import extent_ending_at
from kvist.core.sequences import Sequence
from kvist.core.state import CacheState
from kvist.core.tokens import TOKEN_BYTES
from kvist.errors import ArgumentError, NeverFits

__all__ = ["admit", "check_prompt", "extent_of", "match_prompt"]


def check_prompt(state: CacheState, num_tokens: int, num_beams: int, free_rows: int) -> None:
    """Raise unless an empty cache with so many free rows would admit a prompt of that length."""
    if not num_tokens:
        raise ArgumentError("tokens is empty; a prompt has at least one token")
    if num_tokens > state.rows.max_tokens:
        raise NeverFits(f"the prompt has {num_tokens} tokens, max_sequence_length is {state.rows.max_tokens}")
    num_full, rest = divmod(num_tokens, state.block_size)
    needed, total = num_full + (num_beams if rest else 0), state.pool.num_blocks
    if needed > total:
        raise NeverFits(f"the prompt needs {needed} blocks of {state.block_size} tokens, the whole pool has {total}")
    state.require_rows(num_beams, free_rows)


def match_prompt(state: CacheState, prompt: bytes | memoryview, namespace: Namespace) -> Match | None:
    """Find all of a prompt but its last token, which must be computed for its logits."""
    while (root := state.tree.roots.get(namespace)) is not None:
        match = state.tree.find(root, prompt, len(prompt) - TOKEN_BYTES, partial=state.tree.partial)
        if not state.publish_along(match):
            return match
    return None


def admit(
    state: CacheState,
    prompt: bytes | memoryview,
    namespace: Namespace,
    match: Match | None,
    *,
    publishes: bool,
    retention: Retention | None,
    num_beams: int,
) -> Sequence:
    """Give a checked prompt a row that holds what it matched, and blocks for the rest, or raise OutOfBlocks."""
    rows, tree, block_bytes = state.rows, state.tree, state.tree.block_bytes
    num_blocks, num_reused = -(-len(prompt) // block_bytes), match.position // block_bytes if match else 0
    num_extra = num_beams - 1 if len(prompt) % block_bytes else 0
    num_new = num_blocks - num_reused
    state.require_blocks(num_new + num_extra, match)
    source = int(match.source.blocks[0, match.source_block]) if match and match.source else None

    extent: Extent = extent_of(state, match) if match else tree.root(namespace)
    tree.hold(extent)
    sequence = rows.open(namespace, extent, publishes=publishes)
    sequence.num_prompt_tokens, sequence.retention = len(prompt) // TOKEN_BYTES, retention
    table = rows.block_table[:, sequence.row]
    if num_reused:
        _fill_from_tree(table, extent)
    state.evict_for(num_new)
    table[0, num_reused:num_blocks] = state.pool.take(num_new)
    rows.begin(sequence, num_reused, num_blocks, bytes(prompt[num_reused * block_bytes :]))
    _note_cached(state, sequence, match, source, num_reused)
    if num_beams > 1:
        branches.add_beams(state, sequence, bytes(prompt), num_beams)
    state.counters.admit(sequence.num_prompt_tokens, sequence.num_cached_tokens, num_blocks + num_extra, num_reused)
    return sequence


def extent_of(state: CacheState, match: Match) -> Extent:
    """Return the extent that ends where the whole blocks of a match do, split off where needed."""
    return state.tree.split(match.child, match.child_blocks) if match.child else match.extent


def _fill_from_tree(table: Blocks, extent: Extent) -> None:
    """Write the blocks on the path to an extent into a row's table `[num_groups, columns]`, counting a hit of each."""
    path = []
    while extent.parent is not None:
        extent.hits += 1
        path.append(extent.blocks)
        extent = extent.parent
    end = 0
    for blocks in reversed(path):
        start, end = end, end + blocks.shape[1]
        table[:, start:end] = blocks


def _note_cached(
    state: CacheState, sequence: Sequence, match: Match | None, source: int | None, num_reused: int
) -> None:
    """Count what a new sequence need not compute, and keep that as it asks.

    Where a block agrees in part, its first tokens are to be copied into the sequence's first block of its own. Making
    room may just have evicted the source, and may even have handed out its block: its content is still there when the
    copy is made, since moves come before anything that is written.
    """
    sequence.num_cached_tokens = num_reused * state.block_size
    if match is not None and source is not None:
        state.order_move(source, state.rows.block_table.item(0, sequence.row, num_reused), match.num_partial_tokens)
        sequence.num_cached_tokens += match.num_partial_tokens
        state.rows.computed_of[sequence.row] = sequence.num_cached_tokens
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
        extent.keep = keep
