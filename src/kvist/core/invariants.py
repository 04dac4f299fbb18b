"""Proof that the books are right: every block has one owner, every reference a holder, every candidate its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvist.core.extents import Blocks, Extent, Root
from kvist.core.rows import FREE, NEVER, RUNNING, WAITING
from kvist.core.sequences import Encoder, Sequence
from kvist.core.state import CacheState
from kvist.errors import InvariantError

__all__ = ["check"]

MAX_PROBLEMS = 20


def check(state: CacheState) -> None:
    """Raise InvariantError with what is wrong and who holds it; takes time in proportion to the pool."""
    extents = state.all_extents()
    problems = [
        *_block_problems(state, extents),
        *_reference_problems(state, extents),
        *_group_problems(state, extents),
        *(problem for extent in extents for problem in _extent_problems(state, extent)),
        *_queue_problems(state, extents),
        *(problem for sequence in state.rows.running() for problem in _row_problems(state, sequence)),
        *_free_row_problems(state),
        *_lower_problems(state, extents),
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


def _block_problems(state: CacheState, extents: list[Extent]) -> Iterator[str]:
    for index, pool in enumerate(state.pools):
        holdings = [("the free list", pool.free_blocks()), *_holdings(state, index, extents)]
        blocks = np.concatenate([held for _, held in holdings])
        inside = (blocks >= 0) & (blocks < pool.num_blocks)
        counts = np.bincount(blocks[inside], minlength=pool.num_blocks)
        where = f"pool {index}: " if len(state.pools) > 1 else ""
        for block in np.flatnonzero(counts != 1).tolist():
            owners = [_name(owner) for owner, held in holdings for _ in range(int((held == block).sum()))]
            yield f"{where}block {block} has {counts[block]} owners: {', '.join(owners) or 'it is lost'}"
        for owner, held in [] if inside.all() else holdings:
            if missing := [block for block in held.tolist() if not 0 <= block < pool.num_blocks]:
                yield f"{where}blocks {missing} do not exist, held by {_name(owner)}"


def _holdings(state: CacheState, pool: int, extents: list[Extent]) -> Iterator[tuple[object, Blocks]]:
    """Yield who owns which blocks of a pool: extents, rows, encoders."""
    for group, span in enumerate(state.spans):
        if state.pool_of[group] != pool:
            continue
        for extent in extents:
            column = extent.blocks[group]
            yield extent, column if span.kind == "full" else column[column >= 0]
        for sequence in state.rows.running():
            yield sequence, _own_blocks(state, group, sequence)
        if span.kind == "cross":
            encoders = {id(each._encoder): each for each in state.rows.running() if each._encoder is not None}
            yield from ((f"the encoder of {each!r}", _encoder(each).blocks) for each in encoders.values())


def _encoder(sequence: Sequence) -> Encoder:
    assert sequence._encoder is not None
    return sequence._encoder


def _own_blocks(state: CacheState, group: int, sequence: Sequence) -> Blocks:
    rows, row = state.rows, sequence.row
    table: Blocks = rows.block_table[group, row]
    end, published = rows.ends_of[group][row], rows.published_of[row]
    kind = state.spans[group].kind
    if kind == "cross":
        return table[:0]
    if kind == "state":
        checkpoints = np.array([block for _, block in sequence._checkpoints], np.int32)
        return np.concatenate((table[:end], checkpoints))
    if kind == "ring":
        of_ring: Blocks = table[:end][~_is_shared_in_ring(state, group, row)[:end]]
        return of_ring
    own: Blocks = table[published:end][_is_held(state, group, row)[published:end]]
    return own


def _is_shared_in_ring(state: CacheState, group: int, row: int) -> NDArray[np.bool_]:
    """Say of each column of a ring's table whether the row shows a block of the tree there, bool `[columns]`."""
    rows, span = state.rows, state.spans[group]
    columns = np.arange(rows.block_table.shape[2])
    num_shared = rows.frozen[group, row] if rows.wrapped[row] else rows.published_of[row]
    is_shared: NDArray[np.bool_] = (columns < span.num_sink_blocks) | (columns >= rows.firsts_of[group][row])
    is_shared &= (columns < num_shared) & (columns < rows.ends_of[group][row])
    return is_shared


def _is_held(state: CacheState, group: int, row: int) -> NDArray[np.bool_]:
    """Say of each column of a table whether the row has a block there, bool `[columns]`."""
    rows, span = state.rows, state.spans[group]
    columns = np.arange(rows.block_table.shape[2])
    in_span: NDArray[np.bool_] = (columns >= rows.firsts_of[group][row]) | (columns < span.num_sink_blocks)
    if span.ring is not None:
        in_span[:] = True
    in_span &= columns < rows.ends_of[group][row]
    return in_span


def _group_problems(state: CacheState, extents: list[Extent]) -> Iterator[str]:
    """Compare the references and counts of the groups that need a part of the past with who has their blocks."""
    for group in state.spanned:
        in_tree = np.concatenate([np.empty(0, np.int32), *(extent.blocks[group.index] for extent in extents)])
        in_tree = in_tree[in_tree >= 0]
        expected = np.zeros(group.pool.num_blocks, np.int64)
        holders = [_shared_blocks(state, group.index, sequence) for sequence in state.rows.running()]
        holders += [hold.blocks[state.spanned.index(group)] for hold in state.pins.values()]
        for blocks in holders:
            np.add.at(expected, blocks, 1)
        wrong = in_tree[group.references[in_tree] != expected[in_tree]]
        for block in wrong.tolist():
            counts = f"{group.references[block]} references, {expected[block]} holders found"
            yield f"group {group.index}: block {block} has {counts}"
        evictable = int((expected[in_tree] == 0).sum())
        if evictable != group.num_evictable:
            yield f"group {group.index}: {group.num_evictable} blocks are counted as evictable, {evictable} are"


def _shared_blocks(state: CacheState, group: int, sequence: Sequence) -> Blocks:
    rows, row = state.rows, sequence.row
    if sequence.leader is not None or state.spans[group].kind == "state":
        return rows.block_table[group, row, :0]
    if state.spans[group].ring is not None:
        shown: Blocks = rows.block_table[group, row][_is_shared_in_ring(state, group, row)]
        return shown
    published = rows.published_of[row]
    return rows.block_table[group, row, :published][_is_held(state, group, row)[:published]]


def _name(owner: object) -> str:
    if isinstance(owner, Extent):
        return describe(owner)
    return owner if isinstance(owner, str) else repr(owner)


def _reference_problems(state: CacheState, extents: list[Extent]) -> Iterator[str]:
    expected: Counter[int] = Counter(id(sequence._extent) for sequence in state.rows.running())
    expected.update(id(hold.extent) for hold in state.pins.values())
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
    if extent.start != extent.parent.start + extent.parent.num_blocks:
        yield f"{describe(extent)}: begins at block {extent.start}, not where its parent ends"
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


def _lower_problems(state: CacheState, extents: list[Extent]) -> Iterator[str]:
    """Prove the books of the host tier: where its extents hang, who owns its blocks, who may be evicted."""
    lower = state.lower
    hung = [(parent, key, child) for parent in extents for key, child in (parent.lower or {}).items()]
    if lower is None:
        yield from (f"{describe(parent)}: has extents in a host tier, and there is none" for parent, _, _ in hung)
        return
    found = lower.extents()
    for parent, key, child in [*hung, *((each, *item) for each in found for item in (each.children or {}).items())]:
        yield from (
            f"host {describe(child)}: {problem}"
            for problem in _hung_problems(parent, key, child, state.tree.block_bytes)
        )
    if len(found) != lower.num_extents:
        yield f"{lower.num_extents} extents are counted in the host tier, {len(found)} are there"
    for index, pool in enumerate(lower.pools):
        held = [each.blocks for each in found] + [lower.copies.of(each) for each in lower.copies.extents()]
        columns = [blocks[group] for blocks in held for group, own in enumerate(lower.pool_of) if own == index]
        blocks = np.concatenate([pool.free_blocks(), *columns])
        counts = np.bincount(blocks[blocks >= 0], minlength=pool.num_blocks)
        if len(counts) > pool.num_blocks or (counts != 1).any():
            yield f"host pool {index}: blocks {np.flatnonzero(counts != 1).tolist()[:8]} have no owner, or several"
    queued = Counter(map(id, lower.queue.candidates()))
    leaves = Counter(id(each) for each in found if not each.children)
    if queued != leaves or lower.queue.num_candidates != queued.total():
        yield f"{queued.total()} extents of the host tier may be evicted, {leaves.total()} are leaves"
    known = set(map(id, extents))
    for extent in lower.copies.extents():
        if id(extent) not in known or extent.key is None or not lower.writes_through:
            yield f"{describe(extent)}: has copies in the host tier, and cannot be found"
        elif ((copies := lower.copies.of(extent)) >= 0)[extent.blocks < 0].any() or not (copies >= 0).any():
            yield f"{describe(extent)}: has other copies in the host tier than blocks"


def _hung_problems(parent: Extent, key: bytes, child: Extent, block_bytes: int) -> Iterator[str]:
    if child.parent is not parent or child.key != key or key != bytes(child.tokens[:block_bytes]):
        yield "is not what its parent's key says"
    if child.start != parent.start + parent.num_blocks:
        yield "does not begin where its parent ends"
    if not child.num_blocks or len(child.tokens) != child.num_blocks * block_bytes:
        yield f"{child.num_tokens} tokens do not fill its blocks"
    if child.references:
        yield "somebody refers to it"
    if parent.parent is not None and parent.key is None:
        yield "hangs below what nobody can find"
    if parent.lower is not None and key in (parent.children or {}):
        yield "is on the device, too"
    if (child.blocks < 0).any() and not child.has_holes:
        yield "has holes that nobody knows of"


def _row_problems(state: CacheState, sequence: Sequence) -> Iterator[str]:
    rows, row = state.rows, sequence.row
    if rows.sequences[row] is not sequence or rows.state[row] != (RUNNING if sequence.leader is None else WAITING):
        yield f"{sequence!r}: its row has another state"
    num_published = int(rows.num_published[row])
    if not 0 <= rows.num_computed[row] <= rows.num_tokens[row] <= rows.capacity(row):
        yield f"{sequence!r}: computed <= tokens <= capacity ({rows.capacity(row)}) does not hold"
    yield from _table_problems(state, sequence)
    due = (num_published + 1) * state.block_size if sequence.publishes else NEVER
    if rows.publish_due[row] != due:
        yield f"{sequence!r}: is to be published from {rows.publish_due[row]} computed tokens on, not {due}"
    if len(sequence.tokens) != rows.num_tokens[row]:
        yield f"{sequence!r}: {len(sequence.tokens)} token ids are kept"
    tail_end = rows.tail_start(row) + rows.tail_tokens
    limit = min(rows.capacity(row), tail_end)
    if (rows.limit[row] > limit if state.rings else rows.limit[row] != limit) or rows.num_tokens[row] > tail_end:
        ends = f"its blocks reach to {rows.capacity(row)} and its tail to {tail_end}"
        yield f"{sequence!r}: may append up to {rows.limit[row]} tokens, {ends}"


def _table_problems(state: CacheState, sequence: Sequence) -> Iterator[str]:
    rows, row = state.rows, sequence.row
    for group, span in enumerate(state.spans):
        table, held = rows.block_table[group, row], _is_held(state, group, row)
        if table[~held].any():
            yield f"{sequence!r}: its table of group {group} has blocks where it should have none"
        num_columns = rows.num_blocks[row] if span.ring is None else min(rows.num_blocks[row], span.ring.num_blocks)
        is_short = rows.ends_of[group][row] < num_columns
        may_be_short = state.max_chunk_tokens is not None and span.slides
        if span.kind not in ("state", "cross") and is_short and not may_be_short:
            yield f"{sequence!r}: its table of group {group} ends at {rows.ends_of[group][row]}"
        if span.kind in ("state", "cross"):
            continue
        if span.ring is not None:
            continue
        num_published = rows.published_of[row]
        if not np.array_equal(_blocks_to_share(state, group, sequence), table[:num_published][held[:num_published]]):
            yield f"{sequence!r}: its first {num_published} blocks of group {group} are not those that it shares"


def _blocks_to_share(state: CacheState, group: int, sequence: Sequence) -> Blocks:
    """Return the blocks that a row should show where it shows those of the tree, or of its leader."""
    rows, row = state.rows, sequence.row
    num_published = rows.published_of[row]
    if sequence.leader is not None:
        shown = rows.block_table[group, sequence.leader.row, :num_published]
    else:
        path = sequence._extent.path()
        shown = np.concatenate([np.empty(0, np.int32), *(extent.blocks[group] for extent in path)])
    return shown[_is_held(state, group, row)[:num_published]]


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
    if rows.num_running != len(live):
        yield f"{rows.num_running} rows are counted as running, {len(live)} are"
    if rows.num_free + len(live) != len(rows.state):
        yield f"{rows.num_free} rows are free and {len(live)} are live, of {len(rows.state)}"
