"""Why a prompt was not found in the cache, as far as it was not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvist.core.extents import Loss, Match, Namespace
from kvist.core.tokens import TOKEN_BYTES, common_prefix

if TYPE_CHECKING:
    from kvist.core.state import CacheState

__all__ = ["COLD", "EVICTED", "MISSES", "counted_miss", "loss_after", "miss_of"]

COLD, EVICTED, OTHER_NAMESPACE = "cold", "evicted", "other namespace"
UNCOMMITTED, UNDER_A_BLOCK, WINDOW = "uncommitted", "under a block", "window"
MISSES = (COLD, EVICTED, OTHER_NAMESPACE, UNCOMMITTED, UNDER_A_BLOCK, WINDOW)
"""The classes of misses.

Never committed here; evicted since; there, but in another namespace; in a running sequence that has not committed it,
or not yet a full block; less than a block; there, but without what windows or states would need to go on.

What another namespace has is only counted, in the statistics of all: whoever asks for one prompt would learn from it
what others have asked.
"""

MAX_COMPARED = 64


def miss_of(state: CacheState, prompt: bytes | memoryview, namespace: Namespace, match: Match | None) -> str:
    """Class the miss at the end of a match of all of a prompt but its last token; empty if nothing is missing.

    It depends on nothing that other namespaces hold: to them, what is there is cold.
    """
    position, limit, block_bytes = 0, len(prompt) - TOKEN_BYTES, state.tree.block_bytes
    if match is not None:
        position = match.position
        if match.known > position:
            return WINDOW
        if position + match.num_partial_tokens * TOKEN_BYTES >= limit:
            return ""
    elif not limit:
        return ""
    if match is None or match.child is None:
        if _is_evicted(state, prompt, namespace, match):
            return EVICTED
        if state.rows.num_running and _is_uncommitted(state, prompt, namespace, match):
            return UNCOMMITTED
    return UNDER_A_BLOCK if position + block_bytes > limit else COLD


def counted_miss(state: CacheState, prompt: bytes | memoryview, namespace: Namespace, miss: str) -> str:
    """Return the class that a miss is counted in: of a cold prompt, whether another namespace has its first block."""
    if miss != COLD:
        return miss
    first, root = bytes(prompt[: state.tree.block_bytes]), state.tree.roots.get(namespace)
    return OTHER_NAMESPACE if state.tree.losses.is_first_elsewhere(first, root) else COLD


def _is_evicted(state: CacheState, prompt: bytes | memoryview, namespace: Namespace, match: Match | None) -> bool:
    """Say whether what followed a match that ends with an extent was evicted, as far as that is remembered."""
    if match is None or not match.position:
        return loss_after(state, prompt, namespace, match) is not None
    position, lost = match.position, match.extent.lost
    return lost is not None and bytes(prompt[position : position + state.tree.block_bytes]) in lost


def loss_after(state: CacheState, prompt: bytes | memoryview, namespace: Namespace, match: Match | None) -> Loss | None:
    """Return the eviction of what followed a match that ends with an extent, if it is remembered."""
    position, block_bytes = 0 if match is None else match.position, state.tree.block_bytes
    key = bytes(prompt[position : position + block_bytes])
    return state.tree.losses.after(namespace, None if match is None else match.extent, key)


def _is_uncommitted(state: CacheState, prompt: bytes | memoryview, namespace: Namespace, match: Match | None) -> bool:
    """Say whether a running sequence goes on from the match with tokens that are not committed yet."""
    rows = state.rows
    position, num_partial = (0, 0) if match is None else (match.position, match.num_partial_tokens)
    num_blocks, least = position // state.tree.block_bytes, num_partial * TOKEN_BYTES
    start = num_blocks * state.block_size
    key = bytes(prompt[position : position + state.tree.block_bytes])
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
