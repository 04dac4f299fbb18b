"""One number for the whole state of a manager, so that two can be compared."""

from __future__ import annotations

import hashlib

from kvist.core.extents import Extent
from kvist.core.rows import SequenceRows
from kvist.core.sequences import Sequence
from kvist.core.state import CacheState

__all__ = ["state_digest"]


def state_digest(state: CacheState) -> str:
    """Hash geometry, cached content with its blocks and use, sequences, pins and free blocks, all in a fixed order."""
    sha = hashlib.sha256(
        repr(
            (
                state.config.block_size,
                state.config.max_sequences,
                state.config.max_sequence_length,
                tuple(pool.num_blocks for pool in state.pools),
            )
        ).encode()
    )
    for namespace in sorted(state.tree.roots, key=repr):
        sha.update(repr(namespace).encode())
        for extent in state.tree.roots[namespace].subtree_in_order():
            _add_extent(sha, state, extent)
            if state.copies is not None and (copies := state.copies.of(extent)).max(initial=-1) >= 0:
                sha.update(b"copies" + copies.astype("<i4").tobytes())
    for extent in state.lower_extents():
        sha.update(b"host")
        _add_extent(sha, state, extent)
    rows = state.rows
    for sequence in rows.running():
        row, counts = sequence.row, (sequence.num_tokens, sequence.num_computed_tokens, sequence.num_cached_tokens)
        sha.update(repr((row, sequence.namespace, counts, sequence.publishes, sequence.leader is None)).encode())
        sha.update(sequence.tokens.astype("<i4").tobytes())
        sha.update(repr(state.identities.identities(_packed(rows, sequence))).encode())
        for group in range(len(state.spans)):
            sha.update(sequence.group_blocks(group).astype("<i4").tobytes())
    for sequence in state.suspended:
        sha.update(repr((sequence.namespace, sequence._suspended)).encode())
    sha.update(repr(sorted(((pin.namespace, pin.num_tokens) for pin in state.pins), key=repr)).encode())
    for pool in [*state.pools, *(state.lower.pools if state.lower else ())]:
        sha.update(repr((pool.num_blocks, pool.num_free)).encode())
        sha.update(pool.free_blocks().astype("<i4").tobytes())
    return sha.hexdigest()


def _packed(rows: SequenceRows, sequence: Sequence) -> bytes:
    return rows.packed_tokens(sequence.leader or sequence)


def _add_extent(sha: hashlib._Hash, state: CacheState, extent: Extent) -> None:
    sha.update(
        repr(
            (extent.num_tokens, extent.references, extent.hits, extent.created, extent.last_use, *extent.keep)
        ).encode()
    )
    sha.update(state.identities.tokens(extent.tokens).astype("<i4").tobytes())
    sha.update(repr(state.identities.identities(extent.tokens)).encode())
    sha.update(extent.blocks.astype("<i4").tobytes())
