"""Why a prompt was not found in the cache, as far as it was not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvist.core.extents import Loss, Match, Namespace
from kvist.core.tokens import TOKEN_BYTES, common_prefix

if TYPE_CHECKING:
    from kvist.core.state import CacheState

__all__ = ["COLD", "EVICTED", "MISSES", "OTHER_NAMESPACE", "loss_after", "miss_of", "shown_miss"]

COLD, EVICTED, OTHER_NAMESPACE = "cold", "evicted", "other namespace"
UNCOMMITTED, UNDER_A_BLOCK, WINDOW = "uncommitted", "under a block", "window"
MISSES = (COLD, EVICTED, OTHER_NAMESPACE, UNCOMMITTED, UNDER_A_BLOCK, WINDOW)
"""The classes of misses.

Never committed here; evicted since; there, but in another namespace; in a running sequence that has not committed it,
or not yet a full block; less than a block; there, but without what windows or states would need to go on.
"""

MAX_COMPARED = 64


def shown_miss(state: CacheState, miss: str) -> str:
    """Return the class that whoever asks for one prompt is told.

    With private namespaces it depends on nothing that others hold: what only another namespace has is cold, and counted
    apart in the statistics of all.
    """
    return COLD if miss == OTHER_NAMESPACE and state.config.private_namespaces else miss


def miss_of(state: CacheState, prompt: bytes | memoryview, namespace: Namespace, match: Match | None) -> str:
    """Class the miss at the end of a match of all of a prompt but its last token; empty if nothing is missing."""
    tree, limit = state.tree, len(prompt) - TOKEN_BYTES
    if match is None:
        position = num_partial = 0
    else:
        position, num_partial = match.position, match.num_partial_tokens
        if match.known > position:
            return WINDOW
    if position + num_partial * TOKEN_BYTES >= limit:
        return ""
    end = position + tree.block_bytes
    if match is None or match.child is None:
        key = bytes(prompt[position:end])
        if tree.losses.after(namespace, None if match is None else match.extent, key) is not None:
            return EVICTED
        if state.rows.num_running and _is_uncommitted(state, namespace, match, key):
            return UNCOMMITTED
        if not position and end <= limit and tree.losses.is_first_elsewhere(key, tree.roots.get(namespace)):
            return OTHER_NAMESPACE
    return UNDER_A_BLOCK if end > limit else COLD


def loss_after(state: CacheState, prompt: bytes | memoryview, namespace: Namespace, match: Match | None) -> Loss | None:
    """Return the eviction of what followed a match that ends with an extent, if it is remembered."""
    position, block_bytes = 0 if match is None else match.position, state.tree.block_bytes
    key = bytes(prompt[position : position + block_bytes])
    return state.tree.losses.after(namespace, None if match is None else match.extent, key)


def _is_uncommitted(state: CacheState, namespace: Namespace, match: Match | None, key: bytes) -> bool:
    """Say whether a running sequence goes on from the match with tokens of `key` that are not committed yet."""
    rows = state.rows
    position, num_partial = (0, 0) if match is None else (match.position, match.num_partial_tokens)
    num_blocks, least = position // state.tree.block_bytes, num_partial * TOKEN_BYTES
    start = num_blocks * state.block_size
    same_place = np.flatnonzero((rows.num_published == num_blocks) & (rows.num_tokens > start + num_partial))
    for row in same_place[:MAX_COMPARED].tolist():
        sequence = rows.sequence_at(row)
        if sequence.namespace != namespace or not sequence.publishes or sequence.leader is not None:
            continue
        if match is not None and sequence._extent is not match.extent:
            continue
        ours = rows.token_bytes(sequence, start, min(start + state.block_size, rows.tokens_of[row]))
        if common_prefix(key, 0, ours, min(len(key), len(ours))) > least:
            return True
    return False
