"""One number for the whole state of a manager, so that two can be compared."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvist.core.extents import Extent
    from kvist.core.manager import CacheCore

__all__ = ["state_digest"]


def state_digest(core: CacheCore) -> str:
    """Hash geometry, cached content with its blocks and use, sequences, pins and free blocks, all in a fixed order."""
    state = hashlib.sha256(
        repr(
            (core.config.block_size, core.config.max_sequences, core.config.max_sequence_length, core.pool.num_blocks)
        ).encode()
    )
    for namespace in sorted(core.tree.roots, key=repr):
        state.update(repr(namespace).encode())
        for extent in core.tree.roots[namespace].subtree_in_order():
            _add_extent(state, extent)
    rows = core.rows
    for sequence in rows.running():
        row, counts = sequence.row, (sequence.num_tokens, sequence.num_computed_tokens, sequence.num_cached_tokens)
        state.update(repr((row, sequence.namespace, counts, sequence.publishes, sequence.leader is None)).encode())
        state.update(sequence.tokens.astype("<i4").tobytes())
        state.update(sequence.block_ids.astype("<i4").tobytes())
    state.update(repr(sorted(((pin.namespace, pin.num_tokens) for pin in core.pins), key=repr)).encode())
    state.update(core.pool.free_blocks().astype("<i4").tobytes())
    return state.hexdigest()


def _add_extent(state: hashlib._Hash, extent: Extent) -> None:
    state.update(
        repr(
            (extent.num_tokens, extent.references, extent.hits, extent.created, extent.last_use, *extent.keep)
        ).encode()
    )
    state.update(extent.tokens)
    state.update(extent.blocks.astype("<i4").tobytes())
