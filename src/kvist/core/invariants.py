"""Proof that the books are right: every block has one owner, every reference a holder, every candidate its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvist.core.extents import Extent, Root
from kvist.core.sequences import FREE, NEVER, RUNNING, WAITING, Sequence
from kvist.core.state import CacheState
from kvist.errors import InvariantError

__all__ = ["check"]

MAX_PROBLEMS = 20


def check(state: CacheState) -> None:
    """Raise InvariantError with what is wrong and who holds it; takes time in proportion to the pool."""
    extents = _all_extents(state)
    problems = [
        *_block_problems(state, extents),
        *_reference_problems(state, extents),
        *(problem for extent in extents for problem in _extent_problems(state, extent)),
        *_queue_problems(state, extents),
        *(problem for sequence in state.rows.running() for problem in _row_problems(state, sequence)),
        *_free_row_problems(state),
    ]
    if problems:
        more = [f"... and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
        raise InvariantError(problems[:MAX_PROBLEMS] + more)


def describe(extent: Extent) -> str:
    """Name an extent by its place in the tree."""
    if isinstance(extent, Root):
        return f"root of namespace {extent.namespace!r}, {extent.references} references"
    start = sum(each.num_blocks for each in extent.path()[:-1])
    kind = "extent" if extent.key is not None else "unlisted extent"
    end, ids = start + extent.num_blocks - 1, extent.blocks[0].tolist()[:8]
    return f"{kind} of blocks {start} .. {end} of a prefix, ids {ids}, {extent.references} references"


def _all_extents(state: CacheState) -> list[Extent]:
    """List every extent, roots included: the listed ones, and those that only holders reach."""
    found = {id(extent): extent for root in state.tree.roots.values() for extent in root.subtree()}
    for holder in [*(sequence._extent for sequence in state.rows.running()), *state.pins.values()]:
        extent: Extent | None = holder
        while extent is not None and id(extent) not in found:
            found[id(extent)] = extent
            extent = extent.parent
    return list(found.values())


def _block_problems(state: CacheState, extents: list[Extent]) -> Iterator[str]:
    rows = state.rows
    holdings: list[tuple[object, NDArray[np.int32]]] = [("the free list", state.pool.free_blocks())]
    holdings += [(extent, extent.blocks[0]) for extent in extents]
    for sequence in rows.running():
        row = sequence.row
        holdings.append((sequence, rows.block_table[0, row, rows.num_published[row] : rows.num_blocks[row]]))
    blocks = np.concatenate([held for _, held in holdings])
    inside = (blocks >= 0) & (blocks < state.pool.num_blocks)
    counts = np.bincount(blocks[inside], minlength=state.pool.num_blocks)
    for block in np.flatnonzero(counts != 1).tolist():
        owners = [_name(owner) for owner, held in holdings for _ in range(int((held == block).sum()))]
        yield f"block {block} has {counts[block]} owners: {', '.join(owners) or 'it is lost'}"
    for owner, held in [] if inside.all() else holdings:
        if missing := [block for block in held.tolist() if not 0 <= block < state.pool.num_blocks]:
            yield f"blocks {missing} do not exist, held by {_name(owner)}"


def _name(owner: object) -> str:
    if isinstance(owner, Extent):
        return describe(owner)
    return owner if isinstance(owner, str) else repr(owner)


def _reference_problems(state: CacheState, extents: list[Extent]) -> Iterator[str]:
    expected: Counter[int] = Counter(id(sequence._extent) for sequence in state.rows.running())
    expected.update(id(extent) for extent in state.pins.values())
    expected.update(id(extent.parent) for extent in extents if extent.references and extent.parent is not None)
    for extent in extents:
        if extent.references != expected[id(extent)]:
            holders = [repr(sequence) for sequence in state.rows.running() if sequence._extent is extent]
            yield f"{describe(extent)}: {expected[id(extent)]} holders found: {', '.join(holders) or 'no sequence'}"
    for namespace, root in state.tree.roots.items():
        if root.namespace != namespace:
            yield f"{describe(root)}: is filed under namespace {namespace!r}"
    evictable = sum(extent.num_blocks for extent in extents if not extent.references)
    if evictable != state.tree.num_evictable:
        yield f"{state.tree.num_evictable} blocks are counted as evictable, {evictable} are"


def _extent_problems(state: CacheState, extent: Extent) -> Iterator[str]:
    block_bytes = state.tree.block_bytes
    children = extent.children or {}
    if extent.order is not None and list(extent.order) != sorted(children):
        yield f"{describe(extent)}: its sorted keys are not its children's"
    if extent.num_short_children != sum(len(key) < block_bytes for key in children):
        yield f"{describe(extent)}: {extent.num_short_children} children in partly filled blocks are counted"
    for key, child in children.items():
        if child.parent is not extent or child.key != key or key != bytes(child.tokens[:block_bytes]):
            yield f"{describe(child)}: is not what its parent's key says"
    if extent.parent is None:
        return
    if not extent.num_blocks or -(-len(extent.tokens) // block_bytes) != extent.num_blocks:
        yield f"{describe(extent)}: {extent.num_tokens} tokens do not fill its blocks"
    if len(extent.tokens) % block_bytes and (children or extent.references):
        yield f"{describe(extent)}: is partly filled, and yet referenced or not a leaf"
    if extent.key is None and not extent.references:
        yield f"{describe(extent)}: is unlisted, and nobody holds it"


def _queue_problems(state: CacheState, extents: list[Extent]) -> Iterator[str]:
    queued = Counter(map(id, state.tree.queue.candidates()))
    if state.tree.queue.num_candidates != queued.total():
        yield f"{state.tree.queue.num_candidates} eviction candidates are counted, {queued.total()} are queued"
    known = set(map(id, extents))
    yield from (
        f"{describe(extent)}: waits to be evicted, and is in no tree"
        for extent in state.tree.queue.candidates()
        if id(extent) not in known
    )
    for extent in extents:
        expected = int(extent.parent is not None and not extent.references and not extent.children)
        if queued[id(extent)] != expected:
            yield f"{describe(extent)}: is {queued[id(extent)]} times in the eviction queue, not {expected}"


def _row_problems(state: CacheState, sequence: Sequence) -> Iterator[str]:
    rows, row = state.rows, sequence.row
    if rows.sequences[row] is not sequence or rows.state[row] != (RUNNING if sequence.leader is None else WAITING):
        yield f"{sequence!r}: its row has another state"
    num_published, num_blocks = int(rows.num_published[row]), int(rows.num_blocks[row])
    if not 0 <= rows.num_computed[row] <= rows.num_tokens[row] <= rows.capacity(row):
        yield f"{sequence!r}: computed <= tokens <= capacity ({rows.capacity(row)}) does not hold"
    if rows.block_table[:, row, num_blocks:].any():
        yield f"{sequence!r}: its table goes on after its {num_blocks} blocks"
    due = (num_published + 1) * state.block_size if sequence.publishes else NEVER
    if rows.publish_due[row] != due:
        yield f"{sequence!r}: is to be published from {rows.publish_due[row]} computed tokens on, not {due}"
    if len(sequence.tokens) != rows.num_tokens[row]:
        yield f"{sequence!r}: {len(sequence.tokens)} token ids are kept"
    tail_end = rows.tail_start(row) + rows.tail_tokens
    if rows.limit[row] != min(rows.capacity(row), tail_end) or rows.num_tokens[row] > tail_end:
        ends = f"its blocks reach to {rows.capacity(row)} and its tail to {tail_end}"
        yield f"{sequence!r}: may append up to {rows.limit[row]} tokens, {ends}"
    if sequence.leader is not None:
        shared = rows.block_table[:, sequence.leader.row, :num_published]
    else:
        shared = np.concatenate(
            [np.empty((1, 0), np.int32), *(extent.blocks for extent in sequence._extent.path())], axis=1
        )
    if not np.array_equal(shared, rows.block_table[:, row, :num_published]):
        yield f"{sequence!r}: its first {num_published} blocks are not those that it shares"


def _free_row_problems(state: CacheState) -> Iterator[str]:
    rows = state.rows
    live = {sequence.row for sequence in rows.running()}
    for row in np.flatnonzero((rows.state == FREE) == np.isin(np.arange(len(rows.state)), list(live))).tolist():
        yield f"row {row} is free, and has a sequence"
    free = rows.free_rows()
    if len(set(free)) < len(free) or live.intersection(free):
        yield f"rows {free} are listed as free, and {sorted(live)} are live"
    waiting = sum(sequence.leader is not None for sequence in rows.running())
    if rows.num_waiting != waiting:
        yield f"{rows.num_waiting} beams are counted as waiting, {waiting} are"
    if rows.num_free + len(live) != len(rows.state):
        yield f"{rows.num_free} rows are free and {len(live)} are live, of {len(rows.state)}"
