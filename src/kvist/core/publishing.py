"""How committed blocks get from the rows into the tree, where equal content is found and shared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvist.core.retention import Keep
from kvist.core.sequences import Sequence

if TYPE_CHECKING:
    from kvist.core.manager import CacheCore

__all__ = ["publish", "publish_last", "publish_rows"]


def publish_rows(core: CacheCore, rows: list[int]) -> None:
    """Publish the sequences of these rows, as far as there is anything to publish."""
    for row in rows:
        sequence = core.rows.sequences[row]
        if sequence is not None:
            publish(core, sequence)


def publish(core: CacheCore, sequence: Sequence) -> None:
    """Put the sequence's full committed blocks into the tree; where the content is there already, share it.

    A sequence that must not publish keeps them unlisted, for itself and its forks.
    """
    rows, row = core.rows, sequence.row
    start, end = rows.num_published.item(row), rows.num_computed.item(row) // core.block_size
    if end <= start:
        return
    if not sequence.publishes:
        tokens = rows.token_bytes(sequence, start * core.block_size, end * core.block_size)
        sequence._extent = core.tree.insert_unlisted(sequence._extent, tokens, rows.block_table[:, row, start:end])
        rows.set_published(sequence, end)
        return
    for stop, keep in list(sequence.keeps(start, end)):
        existing = _insert(core, sequence, start, stop, stop * core.block_size, keep)
        if existing:
            _rebase(core, sequence, start, existing, stop)
        rows.set_published(sequence, stop)
        start = stop


def publish_last(core: CacheCore, sequence: Sequence) -> None:
    """Publish all that is computed, a partly filled last block too; the sequence must end right after."""
    rows, row = core.rows, sequence.row
    start, computed = rows.num_published.item(row), rows.num_computed.item(row)
    if not core.tree.partial:
        computed -= computed % core.block_size
    end = -(-computed // core.block_size)
    if end <= start:
        return
    for stop, keep in list(sequence.keeps(start, end)):
        existing = _insert(core, sequence, start, stop, min(stop * core.block_size, computed), keep)
        if existing:
            core.pool.give(rows.block_table[0, row, start : start + existing])
            core.counters.num_shared_blocks += existing
        rows.num_published[row] = start = stop


def _insert(core: CacheCore, sequence: Sequence, start: int, stop: int, end_token: int, keep: Keep) -> int:
    """Put a row's blocks start .. stop-1 into the tree; returns how many leading ones the tree did not take."""
    tokens = core.rows.token_bytes(sequence, start * core.block_size, end_token)
    blocks = core.rows.block_table[:, sequence.row, start:stop]
    sequence._extent, existing = core.tree.insert(sequence._extent, tokens, blocks, keep)
    return existing


def _rebase(core: CacheCore, sequence: Sequence, start: int, existing: int, end: int) -> None:
    """Replace the row's blocks whose content was in the tree already by the tree's, and give its own back."""
    table = core.rows.block_table[:, sequence.row]
    own: np.ndarray[tuple[int], np.dtype[np.int32]] = table[0, start : start + existing].copy()
    extent = sequence._extent
    while end > start and extent.parent is not None:
        first = end - extent.num_blocks
        table[:, max(first, start) : end] = extent.blocks[:, max(start - first, 0) :]
        extent, end = extent.parent, first
    core.pool.give(own)
    core.rows.version[sequence.row] += 1
    core.counters.num_shared_blocks += existing
    _show_waiting_beams(core, sequence)


def _show_waiting_beams(core: CacheCore, leader: Sequence) -> None:
    """Show a change in a leader's blocks in the rows of the beams that wait for it."""
    rows = core.rows
    for beam in leader.waiting_beams():
        num_full = rows.num_published.item(beam.row)
        rows.block_table[:, beam.row, :num_full] = rows.block_table[:, leader.row, :num_full]
        rows.version[beam.row] += 1
