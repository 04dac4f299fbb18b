"""How a prompt gets its row: what it may ask, what it reuses, what it must be given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvist.core import branches
from kvist.core.arguments import check_namespace
from kvist.core.extents import Extent, Match, Namespace
from kvist.core.retention import Retention
from kvist.core.rewinding import extent_ending_at
from kvist.core.sequences import Sequence
from kvist.core.tokens import TOKEN_BYTES
from kvist.errors import ArgumentError, NeverFits

if TYPE_CHECKING:
    from kvist.core.manager import CacheCore

__all__ = ["admit", "check_prompt", "extent_of", "match_prompt"]


def check_prompt(core: CacheCore, num_tokens: int, namespace: Namespace, num_beams: int, *, free_rows: int) -> None:
    """Raise unless an empty cache with so many free rows would admit a prompt of that length."""
    if not num_tokens:
        raise ArgumentError("tokens is empty; a prompt has at least one token")
    check_namespace(namespace)
    if type(num_beams) is not int or num_beams < 1:
        raise ArgumentError(f"num_beams is {num_beams!r}, must be an int of at least 1")
    if num_tokens > core.rows.max_tokens:
        raise NeverFits(f"the prompt has {num_tokens} tokens, max_sequence_length is {core.rows.max_tokens}")
    num_full, rest = divmod(num_tokens, core.block_size)
    needed, total = num_full + (num_beams if rest else 0), core.pool.num_blocks
    if needed > total:
        raise NeverFits(f"the prompt needs {needed} blocks of {core.block_size} tokens, the whole pool has {total}")
    core.require_rows(num_beams, free_rows)


def match_prompt(core: CacheCore, prompt: bytes | memoryview, namespace: Namespace) -> Match | None:
    """Find all of a prompt but its last token, which must be computed for its logits."""
    core.publish_committed()
    root = core.tree.roots.get(namespace)
    return core.tree.find(root, prompt, len(prompt) - TOKEN_BYTES, partial=core.tree.partial) if root else None


def admit(
    core: CacheCore,
    prompt: bytes | memoryview,
    namespace: Namespace,
    match: Match | None,
    *,
    publishes: bool,
    retention: Retention | None,
    num_beams: int,
) -> Sequence:
    """Give a checked prompt a row that holds what it matched, and blocks for the rest; raises OutOfBlocks before any
    change.
    """
    num_blocks, num_reused = _num_blocks(core, prompt), match.position // core.tree.block_bytes if match else 0
    num_extra = num_beams - 1 if len(prompt) % core.tree.block_bytes else 0
    core.require_blocks(num_blocks - num_reused + num_extra, match)
    source = int(match.source.blocks[0, match.source_block]) if match and match.source else None
    sequence = _open(core, prompt, namespace, match, publishes=publishes)
    sequence.num_prompt_tokens, sequence.retention = len(prompt) // TOKEN_BYTES, retention
    if retention is not None and num_reused:
        _keep_reused(core, sequence, num_reused)
    core.fill(sequence.row, num_reused, num_blocks)
    if match and source is not None:
        _copy_partial(core, sequence, source, num_reused, match.num_partial_tokens)
    core.rows.refresh_limit(sequence.row)
    if num_beams > 1:
        branches.add_beams(core, sequence, bytes(prompt), num_beams)
    core.counters.admit(sequence.num_prompt_tokens, sequence.num_cached_tokens, num_blocks + num_extra, num_reused)
    return sequence


def extent_of(core: CacheCore, match: Match) -> Extent:
    """Return the extent that ends where the whole blocks of a match do, split off where needed."""
    return core.tree.split(match.child, match.child_blocks) if match.child else match.extent


def _num_blocks(core: CacheCore, prompt: bytes | memoryview) -> int:
    return -(-len(prompt) // core.tree.block_bytes)


def _open(
    core: CacheCore, prompt: bytes | memoryview, namespace: Namespace, match: Match | None, *, publishes: bool
) -> Sequence:
    rows, tree = core.rows, core.tree
    extent: Extent = extent_of(core, match) if match else tree.root(namespace)
    tree.hold(extent)
    sequence = rows.open(namespace, extent, publishes=publishes)
    row, num_reused = sequence.row, _fill_from_tree(core, sequence)
    rows.set_earlier(sequence, num_reused * core.block_size, bytes(prompt[num_reused * tree.block_bytes :]))
    rows.num_computed[row] = sequence.num_cached_tokens = num_reused * core.block_size
    rows.num_blocks[row] = num_reused
    rows.set_published(sequence, num_reused)
    return sequence


def _fill_from_tree(core: CacheCore, sequence: Sequence) -> int:
    """Write the blocks of the sequence's extents into its row, counting a hit of each; returns their number."""
    extent: Extent = sequence._extent
    path = []
    while extent.parent is not None:
        extent.hits += 1
        path.append(extent.blocks)
        extent = extent.parent
    end = 0
    table = core.rows.block_table[:, sequence.row]
    for blocks in reversed(path):
        start, end = end, end + blocks.shape[1]
        table[:, start:end] = blocks
    return end


def _keep_reused(core: CacheCore, sequence: Sequence, num_reused: int) -> None:
    """Let what a sequence reuses be kept as it asks, which cuts extents where that changes."""
    for stop, _ in list(sequence.keeps(0, num_reused))[:-1]:
        extent_ending_at(core, sequence, stop)
    runs = iter(sequence.keeps(0, num_reused))
    stop, keep = next(runs)
    end = 0
    for extent in sequence._extent.path():
        if end == stop:
            stop, keep = next(runs)
        end += extent.num_blocks
        extent.keep = keep


def _copy_partial(core: CacheCore, sequence: Sequence, source: int, index: int, num_tokens: int) -> None:
    """Order a copy of the first tokens of a block that agrees in part into the sequence's block at position `index`.

    Making room may just have evicted the source, and may even have handed out its block: its content is still there
    when the copy is made, since moves come before anything that is written.
    """
    core.order_move(source, core.rows.block_table.item(0, sequence.row, index), num_tokens)
    sequence.num_cached_tokens += num_tokens
    core.rows.num_computed[sequence.row] = sequence.num_cached_tokens
